"""The report of `bmoe profile`: one page from the results that `--json` holds; what was not measured has no section."""

from pathlib import Path

from bmoe import __version__
from bmoe.errors import RunError
from bmoe.reports.page import details, grid, items, number, page, section, table, tiles
from bmoe.reports.plots import bar_chart
from bmoe.reports.profile_plots import Piece, pieces, roofline, seconds, time_bars

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "workspace", "peak")
ONCE = ("optimizer", "data wait", "communication")
KINDS = {  # kind of kernel -> colour and opacity, as the parts'
    "attention": (0, 1.0), "experts' products": (1, 1.0), "other products": (0, 0.55), "optimizer": (5, 1.0),
    "routing, rows of experts": (2, 1.0), "rounding": (1, 0.55), "fused passes": (4, 1.0), "other passes": (4, 0.6),
    "copies, fills": (3, 0.6),
}  # fmt: skip


def write_profile_report(results: dict, file: str | Path) -> Path:
    """Write the page. Returns its path; RunError if it cannot be written."""
    file = Path(file)
    title = f"Profile of {results['recipe']} in {results['precision']}"
    subtitle = f"bmoe {__version__}, on {results['device']}; data: {results['data']}"
    try:
        file.write_text(page(title, subtitle, parts(results)), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from None
    return file


def parts(results: dict) -> list[str]:
    """The sections."""
    found = []
    if results["unmet_conditions"]:
        found.append(_lacking(results))
    if results["step_s"]:
        found += [tiles(_key_numbers(results)), _bottleneck(results), _time(results), _roofline(results), _memory(results)]
    for key, make in (("emulated", _emulated), ("experts_compared", _experts), ("baseline", _baseline), ("predicted", _predicted)):
        if results.get(key):
            found.append(make(results))
    return found


def _percent(value: float | None, digits: int = 0) -> str:
    return "–" if value is None else f"{value:.{digits}%}"


def _lacking(results: dict) -> str:
    rounding = "its rounding is emulated, " if results["emulated"].get("gradients") else ""
    foretold = "predicted" if results["predicted"] else "not predicted, as this model has it on no chip"
    kind, rest = results["precision"], f"{rounding}speed and memory are {foretold}."
    text = f"{kind} does not run on this machine, so nothing below was measured in it: {rest}"
    if results["left_out"]:
        text += f" Left out, as no step of it runs here: {', '.join(results['left_out'])}."
    return section(f"Why {results['precision']} does not run here", items(results["unmet_conditions"]), text=text)


def _key_numbers(results: dict) -> list[tuple[str, str]]:
    spread = f"{seconds(results['step_s_low'])} to {seconds(results['step_s_high'])}"
    ceiling = f"of the {number(results['ceilings']['matmul_tflops'])} TFLOP/s measured here"
    found = [
        (seconds(results["step_s"]), f"a step; 80 % of steps {spread}"),
        (number(results["residues_per_s"]), "residues per second"),
        (number(results["tokens_per_s"]), "tokens per second"),
        (_percent(results["mfu_of_measured_ceiling"], 1), f"model FLOPs utilisation {ceiling}"),
    ]
    if results["mfu"] is not None:
        found.append((_percent(results["mfu"], 1), f"of the published peak, {results['peak_flops'] / 1e12:,.0f} TFLOP/s"))
    peak = results["memory"]["measured_peak"]
    found.append((f"{number(peak or results['memory']['peak'])} GiB", "peak memory, " + ("measured" if peak else "in closed form")))
    if "kernels_per_step" in results:
        found.append((number(results["kernels_per_step"]), f"kernels a step, {results['syncs_per_step']} waits of the host"))
        found.append((_percent(results["gpu_busy_share"]), f"of a step the GPU computes; idle {seconds(results['idle_s'])}"))
    padding = results["padding"]
    rows = f", {_percent(padding['expert_rows'], 1)} of expert rows" if results["experts"] else ""
    rest = f"of slots are padding{rows}; a rectangle: {_percent(padding['rectangle'])}"
    return [*found, (_percent(padding["tail"], 1), rest)]


def _bottleneck(results: dict) -> str:
    worst, measured = results["bottleneck"], results["measured"]
    text = f"{worst['part'].capitalize()}, {_percent(worst['share'])} of a step. The recipe key {worst['key']} moves it: {worst['why']}."
    compiled = ("compiled" if results["compiled"] else "not compiled") + (", replayed as CUDA graphs" if results["replayed"] else "")
    experts = f"experts {results['experts']}, " if results["experts"] else ""
    fewer = measured.get("experts") != measured.get("of_experts")
    some = f"{measured['experts']} of {measured['of_experts']} experts, " if fewer else ""
    slots = f"{measured['tokens_per_batch']:,} of {measured['of_tokens_per_batch']:,}"
    where = f"{measured['layers']} of {measured['of_layers']} layers, {some}{slots}"
    batches = f"{measured['batches']} of {measured['of_batches']} batches a step"
    facts = [
        f"Measured: {where} slots a batch, {batches}; {measured['label']}.",
        f"It ran with {experts}attention {results['attention']}, {compiled}.",
        f"Model FLOPs utilisation is {results['mfu_formula']}.",
        *([f"Trace: {results['trace_label']}."] if "trace_label" in results else []),
    ]
    return section("First bottleneck", items(facts), text=text)


def _time(results: dict) -> str:
    measured, batches = results["parts"], results["batches_per_step"]
    inside = {name: part for name, part in measured.items() if name not in ONCE}
    once = {name: part for name, part in measured.items() if name in ONCE}
    rows = [("forward", pieces(inside, "forward_s", batches)), ("backward", pieces(inside, "backward_s", batches))]
    rows.append(("once a step", pieces(once, "seconds", 1)))
    figures = [time_bars("Parts of a step", rows, f"All {batches} batches of a step. " + results["parts_label"].capitalize() + ".")]
    if results.get("kernels"):
        kinds = [Piece(kind, entry["seconds"], *KINDS.get(kind, (4, 1.0))) for kind, entry in results["kernels"].items()]
        kinds.append(Piece("idle", results["idle_s"], 4, 0.25))
        text = "One measured step as it runs, compiled, by the names of its kernels; idle is what they leave of an undisturbed step."
        figures.append(time_bars("Kinds of kernels", [("step", kinds)], text))
    whole = sum(part["seconds"] * (1 if name in ONCE else batches) for name, part in measured.items())
    body = []
    for name, part in sorted(measured.items(), key=lambda item: -item[1]["seconds"] * (1 if item[0] in ONCE else batches)):
        share = part["seconds"] * (1 if name in ONCE else batches) / whole
        times = [seconds(part[key]) for key in ("seconds", "forward_s", "backward_s")]
        near = f"{_percent(part['ceiling_share'])} of {part['bound']}" if part.get("ceiling_share") else None
        body.append([name, _percent(share, 1), *times, part["tflops"], part["gb_per_s"], near])
    head = ["part", "share", "time", "forward", "backward", "TFLOP/s", "GB/s", "of the ceiling it meets first"]
    text = (
        "Marks at the borders of the model's parts, in the forward and the backward pass, on steps of their own: between two marks all "
        "time belongs to one part. TFLOP/s and GB/s are the closed-form work of a part over its time."
    )
    return section("Where a step goes", grid(*figures), table(head, body), _operators(results), text=text)


def _operators(results: dict) -> str:
    lines = [f"{seconds(row['seconds']):>10}  {row['calls']:>6}  {row['name'][:150]}" for row in results["operators"]]
    what = "kernels" if "kernels_per_step" in results else "operators"
    found = details(f"The longest {what} of one step", "\n".join(lines))
    if results.get("idle_gaps", {}).get("longest"):
        gaps = [
            f"{seconds(gap['seconds'])}  after {gap['after'][:90]}\n{'':10}before {gap['before'][:90]}"
            for gap in results["idle_gaps"]["longest"]
        ]
        label = f"The longest of {results['idle_gaps']['over_10_us']} idle gaps, {results['idle_gaps']['label']}"
        found += details(label, "\n".join(gaps))
    return found


def _roofline(results: dict) -> str:
    ceiling = results["ceilings"]
    plot = roofline("Parts under the roofline", results["parts"], ceiling["matmul_tflops"], ceiling["copy_gb_per_s"])
    text = (
        "Each part's achieved arithmetic against how much of it a byte of memory traffic pays for. Parts left of the ridge are limited "
        "by memory, parts right of it by arithmetic; the distance to the line is what better code could gain. The ceilings were measured "
        f"in this run: {ceiling['what']}. Parts without matrix products have no arithmetic to show; the table has their GB/s."
    )
    return section("Roofline", grid(plot), text=text)


def _memory(results: dict) -> str:
    memory = results["memory"]
    measured = [memory["measured"].get(name) for name in CATEGORIES]
    groups = [("closed form", [memory[name] for name in CATEGORIES]), ("measured", measured)]
    rows = [[name, *values] for name, *values in zip(CATEGORIES, *(values for _, values in groups), strict=True)]
    text = (
        f"GiB of what was measured. Closed form: from the recipe's shapes alone, as `bmoe train --dry-run` predicts it; the peak is the "
        f"larger end of forward or backward, not the sum. Measured: {memory['measured']['label']}."
    )
    chart = bar_chart("Memory by category", ["weights", "grads", "optim.", "activ.", "work", "peak"], groups, "GiB")
    return section("Memory", grid(chart), table(["category", "closed form", "measured"], rows), text=text)


def _emulated(results: dict) -> str:
    found = results["emulated"]
    if not found.get("gradients"):
        return section("Rounding, emulated", items([found["label"]]))
    keys = ("fprop", "dgrad", "wgrad")
    gemms = [
        [name, *(f"{_percent(errors[k], 2)} ({_percent(found['gemms_bf16'][name][k], 2)})" for k in keys)]
        for name, errors in found["gemms"].items()
    ]
    gradients = [[name, _percent(e["mean"], 2), _percent(e["worst"], 2), e["layer"]] for name, e in found["gradients_over_layers"].items()]
    text = (
        f"Relative error in the Frobenius norm against fp32; with bf16 inputs in brackets, the error that training lives with today. "
        f"Loss {found['loss']:.4f}, difference {found['loss_difference']:+.4f}; {found['label']}."
    )
    products = table(["product", "forward", "input gradient", "weight gradient"], gemms)
    return section("Rounding, emulated", products, table(["gradient of", "mean over layers", "worst", "in layer"], gradients), text=text)


def _experts(results: dict) -> str:
    rows = []
    for name, run in results["experts_compared"].items():
        spread = f"{seconds(run['step_s_low'])} to {seconds(run['step_s_high'])}"
        ratio = results["ratios"].get(f"experts {name}")
        rows.append([name, seconds(run["step_s"]), spread, run["tokens_per_s"], ratio])
    head = ["implementation", "step", "80 % of steps", "tokens/s", f"time / {results['experts']}"]
    return section("Implementations of the experts", table(head, rows), text="The same weights and batches, one after the other.")


def _baseline(results: dict) -> str:
    rows = []
    for name, run in results["baseline"].items():
        ratio = results["ratios"].get(name)
        rows.append([name, seconds(run.get("step_s")), run.get("residues_per_s"), run.get("fill"), run.get("peak_memory_gib"), ratio])
    head = ["", "step", "residues/s", "fill", "peak GiB", "bmoe is faster by"]
    return section("Beside Hugging Face", table(head, rows), text="One batch a step, the same batches; name the baseline beside a ratio.")


def _predicted(results: dict) -> str:
    rows = []
    for name, chip in results["predicted"].items():
        known = chip["model_error"]
        error = f"{_percent(known['median'])} on one {known['on']}" if known else "not known"
        error = f"{chip['error']:+.0%} here" if "error" in chip else error
        worst = f"{chip['bottleneck']['part']}, {_percent(chip['bottleneck']['share'])}"
        rows.append([
            name, chip["world"], seconds(chip["step_s"]), chip["tokens_per_s"], _percent(chip["mfu"], 1), chip["memory"]["peak"],
            chip["fits"], chip["speedup_over_bf16"], worst, error,
        ])  # fmt: skip
    first = next(iter(results["predicted"].values()))
    used = first["assumptions"]
    assumed = "\n".join(
        f"{key}: {number(value)}{' (a guess)' if key in used['guessed'] else ''}" for key, value in used.items() if key != "guessed"
    )
    head = ["chip", "GPUs", "step", "tokens/s", "MFU", "peak GiB", "fits", "over bf16", "first bottleneck", "error"]
    text = (
        f"{first['label'].capitalize()}. Each part takes the longer of its arithmetic and its memory traffic at a share of the chip's "
        f"published peaks, plus its launches. Error: here, against the step measured above; elsewhere "
        f"{first['model_error_label']}. Guessed: {', '.join(used['guessed'])}. Untested on Blackwell: none was at hand."
    )
    return section("On other chips, predicted", table(head, rows), details(f"Assumptions, for {first['chip']}", assumed), text=text)
