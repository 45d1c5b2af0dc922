"""Profiles as people read them on a terminal. Only rich renderables; the console module prints them."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bmoe.profiling.bottleneck import shares

BOUNDS = {"arithmetic": "flop", "memory": "mem"}


def seconds(value: float | None) -> str:
    """1.234 s, 12.3 ms or 45 us."""
    if value is None:
        return "-"
    if value >= 1:
        return f"{value:,.3g} s" if value < 1000 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def number(value: float | None, digits: int = 3) -> str:
    """With thousands separated, or three digits; - for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.{digits}g}"


def titled(title: str, *columns: str) -> Table:
    """An empty table without frame; all columns but the first are numbers."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index > 0)
    return table


def notes(*lines: str) -> Text:
    """Lines in small print."""
    return Text("\n".join(line for line in lines if line), style="dim")


def report(results: dict) -> RenderableType:
    """The whole of a `bmoe profile`."""
    blocks: list[RenderableType] = [Text(f"{results['recipe']} in {results['precision']} on {results['device']}", style="bold")]
    blocks.append(notes(f"data: {results['data']}"))
    if results["unmet_conditions"]:
        blocks += [Text(), _lacking(results)]
    else:
        blocks += [Text(), _headline(results), Text(), _parts(results), Text(), _memory(results), Text(), _bottleneck(results)]
    if results["emulated"]:
        blocks += [Text(), _emulated(results["emulated"])]
    for key, show in (("experts_compared", _experts), ("baseline", baseline_table)):
        if results.get(key):
            blocks += [Text(), show(results)]
    if results["predicted"]:
        blocks += [Text(), _predicted(results["predicted"])]
    return Group(*blocks)


def _lacking(results: dict) -> RenderableType:
    lines = Text(f"{results['precision']} does not run on this machine:\n", style="bold yellow")
    for sentence in results["unmet_conditions"]:
        lines.append(f"  - {sentence}\n", style="default")
    if results["left_out"]:
        lines.append(f"Left out, as no step of it runs here: {', '.join(results['left_out'])}.\n", style="default")
    numerics = "numerics below are emulated, " if results["emulated"].get("gradients") else ""
    foretold = "speed and memory predicted" if results["predicted"] else "speed and memory not predicted, as this model has it on no chip"
    lines.append(f"So nothing was measured in it: {numerics}{foretold}.", style="dim")
    return lines


def _headline(results: dict) -> RenderableType:
    measured, ceiling = results["measured"], results["ceilings"]
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    whole = f"{seconds(results['step_s'])}  (80 % of steps: {seconds(results['step_s_low'])} to {seconds(results['step_s_high'])})"
    table.add_row("step", whole)
    rate = f"{seconds(results['batch_s'])} a batch x {results['batches_per_step']}, optimizer {seconds(results['optimizer_s'])}"
    table.add_row("", rate)
    table.add_row("throughput", f"{number(results['tokens_per_s'])} tokens/s, {number(results['residues_per_s'])} residues/s")
    of_ceiling = f"{results['mfu_of_measured_ceiling']:.1%} of the product measured here ({number(ceiling['matmul_tflops'])} TFLOP/s)"
    if results["mfu"] is not None:
        of_ceiling = f"{results['mfu']:.1%} of {results['peak_flops'] / 1e12:,.0f} TFLOP/s; {of_ceiling}"
    table.add_row("MFU", of_ceiling)
    table.add_row("", Text(f"= {results['mfu_formula']}", style="dim"))
    table.add_row("ceilings", f"{number(ceiling['matmul_tflops'])} TFLOP/s, {number(ceiling['copy_gb_per_s'])} GB/s ({ceiling['what']})")
    table.add_row("runs", runs(results))
    padding = results["padding"]
    rows = f", {padding['expert_rows']:.1%} of expert rows" if results["experts"] else ""
    table.add_row("padding", f"{padding['tail']:.1%} of slots{rows}; a rectangle would waste {padding['rectangle']:.0%}")
    table.add_row("a measured step", _device_use(results))
    whole_or_not = f"{measured['layers']} of {measured['of_layers']} layers"
    slots = f"{measured['tokens_per_batch']:,} of {measured['of_tokens_per_batch']:,} slots a batch"
    batches = f"{measured['batches']} of {measured['of_batches']} batches a step"
    if measured.get("experts") != measured.get("of_experts"):
        whole_or_not += f", {measured['experts']} of {measured['of_experts']} experts"
    table.add_row("measured", f"{whole_or_not}, {slots}, {batches}: {measured['label']}")
    if "trace_label" in results:
        table.add_row("trace", results["trace_label"])
    return table


def runs(results: dict) -> str:
    """Which implementations ran; a dense model has no experts."""
    experts = f"experts: {results['experts']}, " if results["experts"] else ""
    replayed = ", replayed as CUDA graphs" if results["replayed"] else ""
    return f"{experts}attention: {results['attention']}, {'compiled' if results['compiled'] else 'not compiled'}{replayed}"


def _device_use(results: dict) -> str:
    """Kernels, waits and idle time on a GPU; on a CPU the numbers that the host reads, each of which a GPU would wait for."""
    if "kernels_per_step" not in results:
        return f"{results['host_reads_per_step']} tensor values read by the host (a GPU would be waited for)"
    gaps = results["idle_gaps"]
    counted = f"{results['kernels_per_step']:,} kernels, {results['syncs_per_step']} waits for the device"
    return f"{counted}, busy {results['gpu_busy_share']:.0%}, idle {seconds(results['idle_s'])} ({gaps['over_10_us']} gaps over 10 us)"


def _parts(results: dict) -> RenderableType:
    table = titled("Where a step goes", "part", "share", "time", "forward", "backward", "TFLOP/s", "GB/s", "ceiling")
    for name, share in sorted(shares(results["parts"], results["batches_per_step"]).items(), key=lambda item: -item[1]):
        part = results["parts"][name]
        times = (seconds(part[key]) for key in ("seconds", "forward_s", "backward_s"))
        near = f"{part['ceiling_share']:.0%} {BOUNDS[part['bound']]}" if part.get("ceiling_share") else "-"
        table.add_row(name, f"{share:.1%}", *times, number(part["tflops"]), number(part["gb_per_s"]), near)
    ceiling = "ceiling: what the part reaches of the one that its work meets first, arithmetic (flop) or memory (mem)."
    blocks: list[RenderableType] = [table, notes(f"{results['parts_label']}.", ceiling)]
    if results.get("kernels"):
        kinds = titled("The step as it runs, by kind of kernel", "kind", "time", "kernels")
        for kind, entry in results["kernels"].items():
            kinds.add_row(kind, seconds(entry["seconds"]), f"{entry['calls']:,}")
        blocks += [Text(), kinds]
    return Group(*blocks)


def _memory(results: dict) -> RenderableType:
    memory = results["memory"]
    names = ("weights", "gradients", "optimizer", "activations", "workspace", "peak")
    table = titled("Memory of what was measured, GiB", "", *names)
    table.add_row("closed form", *(number(memory[name]) for name in names))
    table.add_row("measured", *(number(memory["measured"].get(name)) for name in names))
    return Group(table, notes(f"measured: {memory['measured']['label']}."))


def _bottleneck(results: dict) -> Text:
    worst = results["bottleneck"]
    text = Text("First bottleneck: ", style="bold")
    text.append(f"{worst['part']}, {worst['share']:.0%} of a step. ", style="default")
    text.append(worst["key"], style="bold cyan")
    text.append(f" moves it: {worst['why']}.", style="default")
    return text


def _emulated(emulated: dict) -> RenderableType:
    if not emulated.get("gradients"):
        return notes(emulated["label"])
    blocks: list[RenderableType] = []
    if emulated["gemms"]:
        title = f"Relative error of each product in {emulated['format']} (bf16)"
        table = titled(title, "GEMM", "forward", "input gradient", "weight gradient")
        for name, errors in emulated["gemms"].items():
            today = emulated["gemms_bf16"][name]
            table.add_row(name, *(f"{errors[p]:.2%} ({today[p]:.2%})" for p in ("fprop", "dgrad", "wgrad")))
        blocks.append(table)
    table = titled("Relative error of the gradients, over layers", "parameter", "mean", "worst", "in layer")
    for name, found in emulated["gradients_over_layers"].items():
        table.add_row(name, f"{found['mean']:.2%}", f"{found['worst']:.2%}", str(found["layer"] or "-"))
    label = f"loss {emulated['loss']:.4f}, difference {emulated['loss_difference']:+.4f}; {emulated['label']}."
    return Group(*blocks, table, notes(label))


def _experts(results: dict) -> RenderableType:
    table = titled("Implementations of the experts", "implementation", "step", "80 % of steps", "tokens/s", "time / " + results["experts"])
    for name, run in results["experts_compared"].items():
        spread = f"{seconds(run['step_s_low'])} to {seconds(run['step_s_high'])}"
        ratio = f"{results['ratios'][f'experts {name}']:.2f}"
        table.add_row(name, seconds(run["step_s"]), spread, number(run["tokens_per_s"]), ratio)
    return table


def baseline_table(results: dict) -> RenderableType:
    """Ours and the baselines, with ratios."""
    title = "Beside Hugging Face's Mixtral of the same dimensions"
    table = titled(title, "", "step", "between passes", "residues/s", "fill", "peak GiB", "bmoe is faster by")
    for name, run in results["baseline"].items():
        if run["step_s"] is None:
            table.add_row(name, "-", "", "-", "", "", run["label"])
            continue
        ratio, several = results["ratios"].get(name), run["step_s_low"] < run["step_s_high"]
        spread = f"{seconds(run['step_s_low'])} to {seconds(run['step_s_high'])}" if several else "one pass"
        last = (f"{run['fill']:.0%}", number(run["peak_memory_gib"]), f"{ratio:.2f} x" if ratio else "")
        table.add_row(name, seconds(run["step_s"]), spread, number(run["residues_per_s"]), *last)
    absent = not any("compiled" in name for name in results["baseline"])
    return Group(
        table,
        notes(
            "One batch a step; residues, not slots. Theirs is a decoder with bf16 weights and moments on GPUs.",
            "hf-grouped-compiled is the strongest a user has; name the baseline beside a ratio.",
            *["It was not measured here: --baseline hf takes it on a GPU, and it does not run on a CPU."] * absent,
        ),
    )


def _predicted(predicted: dict) -> RenderableType:
    table = titled("Predicted", "chip", "GPUs", "step", "tokens/s", "MFU", "peak GiB", "fits", "over bf16", "error")
    for name, chip in predicted.items():
        known = chip["model_error"]
        error = f"{known['median']:.0%} on one {known['on']}" if known else "not known"
        error = f"{chip['error']:+.0%} here" if "error" in chip else error
        table.add_row(
            name, str(chip["world"]), seconds(chip["step_s"]), number(chip["tokens_per_s"]), f"{chip['mfu']:.1%}",
            number(chip["memory"]["peak"]), "yes" if chip["fits"] else "no", f"{chip['speedup_over_bf16']:.2f} x", error,
        )  # fmt: skip
    first = next(iter(predicted.values()))
    used = first["assumptions"]
    shown = ("gemm", "grouped", "row_gemm", "low_gemm", "attention_flash", "attention_varlen", "memory", "idle")
    fractions = ", ".join(f"{key} {used[key]:g}" for key in shown)
    label = f"{first['label']}: shares of published peaks {fractions}; {used['kernel_s'] * 1e6:g} us a kernel."
    return Group(
        table,
        notes(
            label,
            f"error: {first['model_error_label']}.",
            f"Guessed: {', '.join(used['guessed'])}. Untested on Blackwell: no Blackwell was at hand.",
        ),
    )


def estimate(results: dict) -> RenderableType:
    """Memory and speed for `train --dry-run`."""
    names = ("weights", "gradients", "optimizer", "activations", "workspace", "peak")
    memory = titled(f"Memory of one of {results['world']} GPUs, GiB", "", *names)
    alike: dict[tuple[str, ...], list[str]] = {}
    for name, sizes in {results["memory_on"]: results["memory"], **{n: chip["memory"] for n, chip in results["predicted"].items()}}.items():
        alike.setdefault(tuple(number(sizes[key]) for key in names), []).append(name)
    for row, gpus in alike.items():
        memory.add_row(", ".join(gpus), *row)
    lines = []
    for name, chip in results["predicted"].items():
        lines += _sent(name, chip["communication"])
        first = chip["bottleneck"]
        lines.append(
            f"first bottleneck on {name}: {first['part']}, {first['share']:.0%} of a step. {first['key']} moves it: {first['why']}"
        )
        largest = chip["largest_tokens_per_batch"]
        at_most = f"fits {name}; the largest data.tokens_per_batch that does and divides training.tokens_per_step is {largest:,}"
        if other := chip["with_another_step"]:
            at_most += f"; {other['tokens_per_batch']:,} fits with training.tokens_per_step {other['tokens_per_step']:,}"
        fits = at_most if chip["fits"] else f"does not fit {name}: "
        lines.append(fits + "; or ".join(chip["advice"]))
        if chip["copy_peak_gib"]:
            lines.append(copies_fit(name, chip["copy_peak_gib"], results["world"]))
    speed = [_predicted(results["predicted"]), Text()] if results["predicted"] else []
    return Group(memory, Text(), *speed, Text("\n".join([*lines, *results["lacking"]])), notes(f"{results['label']}."))


def _sent(gpu: str, sent: dict | None) -> list[str]:
    """What a rank sends in a step, where there are several."""
    if not sent:
        return []
    rows = f" and {sent['all_to_all_bytes'] / 1e9:,.3g} GB of experts' rows (all-to-all)" if sent["all_to_all_bytes"] else ""
    return [f"each {gpu} sends {sent['parameter_bytes'] / 1e9:,.3g} GB of weights and gradients{rows} in a step"]


def copies_fit(gpu: str, peak_gib: float, world: int) -> str:
    """That every rank may hold the whole model, and what for."""
    takes = f"a copy of the model on each {gpu} takes {peak_gib:.0f} GiB"
    return f"{takes}: parallel.data_replicate: {world} spares FSDP2 and lets steps be replayed"


def comparison(results: dict) -> RenderableType:
    """What `bmoe profile --compare A B` found."""
    step = results["step"]
    head = Text(f"step {seconds(step['a'])} -> {seconds(step['b'])}: {step['ratio'] - 1:+.1%} ", style="bold")
    if step["changed"] is None:
        head.append("(noise not known: a file has fewer than 3 measured steps; profile with --steps 10)", style="default")
    else:
        verdict = "changed" if step["changed"] else "no change beyond noise"
        head.append(f"({step['low'] - 1:+.1%} to {step['high'] - 1:+.1%} within noise): {verdict}", style="default")
    table = titled("Parts", "part", "A", "B", "change")
    for name, part in sorted(results["parts"].items(), key=lambda item: -item[1]["a"]):
        table.add_row(name, seconds(part["a"]), seconds(part["b"]), f"{part['ratio'] - 1:+.1%}" if part["ratio"] else "-")
    differing = [f"{key}: {both['a']} -> {both['b']}" for key, both in results["differing"].items()]
    ranks = results["scaling"]
    if ranks["a"] != ranks["b"]:
        head.append(f"\n{ranks['a']} -> {ranks['b']} ranks: {ranks['efficiency']:.1%} of the tokens/s a rank")
    bounds = "Parts are of other steps and have no noise bounds: they show where a change lies, not whether there is one."
    parts: list[RenderableType] = [Text(), table, notes(bounds)] if results["parts"] else []
    return Group(head, *([notes(*differing)] if differing else []), *parts)
