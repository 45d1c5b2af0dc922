"""Profiles of several ranks as people read them on a terminal."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bmoe.profiling.render import baseline_table, notes, number, runs, seconds, titled


def report(results: dict) -> RenderableType:
    """The whole of a `bmoe profile --gpus N`."""
    layout = " x ".join(f"{key} {value}" for key, value in results["layout"].items())
    head = f"{results['recipe']} in {results['precision']} on {results['ranks']} x {results['device']}"
    blocks: list[RenderableType] = [Text(head, style="bold"), notes(f"data: {results['data']}"), Text(), _headline(results, layout)]
    if results["communication"]:
        blocks += [Text(), _communication(results["communication"]), Text(), _rows(results["all_to_all"])]
    if results.get("baseline"):
        blocks += [Text(), baseline_table(results)]
    for name, chip in results["predicted"].items():
        if chip["this_machine"]:
            line = (
                f"Predicted for {chip['world']} x {name}: a step of {seconds(chip['step_s'])}, {chip['error']:+.0%} from the measured one."
            )
            blocks += [Text(), notes(line)]
    return Group(*blocks)


def _headline(results: dict, layout: str) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("layout", layout)
    spread = f"80 % of {results['steps']} steps: {seconds(results['step_s_low'])} to {seconds(results['step_s_high'])}"
    table.add_row("step", f"{seconds(results['step_s'])}  ({spread}, after {results['warmup_steps']}; the slowest rank's)")
    each = f"{number(results['residues_per_s_per_rank'])} a rank"
    table.add_row("throughput", f"{number(results['residues_per_s'])} residues/s, {each}; {number(results['tokens_per_s'])} tokens/s")
    if results["mfu"] is not None:
        table.add_row("MFU", f"{results['mfu']:.1%} of {results['peak_flops'] / 1e12:,.0f} TFLOP/s a rank")
    if results["memory"]:
        memory = results["memory"]
        table.add_row("peak memory", f"{number(memory['measured_peak'])} GiB (least {number(memory['measured_peak_of_least'])})")
    table.add_row("runs", runs(results))
    return table


def _communication(found: dict) -> RenderableType:
    table = titled("What a rank sends in a step", "collective", "MB", "on the wire", "GB/s")
    sent_bytes, wire_s = dict(found["sent_bytes"]), dict(found["wire_s"])
    if sent_bytes.get("reduce_scatter") and not wire_s["reduce_scatter"]:  # gloo reports it as an all-reduce
        both = ("all_reduce", "reduce_scatter")
        sent_bytes["all_reduce, reduce_scatter"], wire_s["all_reduce, reduce_scatter"] = (
            sum(values.pop(kind, 0.0) for kind in both) for values in (sent_bytes, wire_s)
        )
    for kind, sent in sent_bytes.items():
        wire = wire_s[kind]
        table.add_row(kind, number(sent / 1e6), seconds(wire), number(sent / wire / 1e9) if wire and sent else "-")
    hidden = "-" if found["hidden_share"] is None else f"{found['hidden_share']:.0%}"
    line = f"{found['share']:.1%} of the step communicates and nothing else; {hidden} of all communication is hidden."
    return Group(table, notes(line, f"{found['label']}."))


def _rows(found: dict) -> RenderableType:
    if not found["bytes"] or found["gb_per_s"] is None:
        return Text("No token leaves its rank: parallel.expert is 1.", style="dim")
    link = f"{number(found['link_gb_per_s'])} GB/s of an all-to-all of equal parts, measured here"
    text = Text("All-to-all: ", style="bold")
    text.append(f"{number(found['bytes'] / 1e6)} MB a rank and step at {number(found['gb_per_s'])} GB/s, ", style="default")
    text.append(f"{found['of_link']:.0%} of {link}; {found['hidden_share']:.0%} hidden.", style="default")
    return text


def layouts(results: dict) -> RenderableType:
    """What `bmoe profile --layouts` found."""
    saved = results["saved_in"]
    title = f"{results['recipe']} in {results['precision']} on {results['ranks']} ranks"
    table = titled(title, "data_shard x expert", "losses", "difference", "norms", "difference", "norms of ranks")
    for row in ({**results["undisturbed"], "loss_difference": 0.0, "norm_difference": 0.0}, *results["layouts"]):
        table.add_row(
            f"{row['data_shard']} x {row['expert']}",
            " ".join(f"{loss:.5f}" for loss in row["losses"]),
            f"{row['loss_difference']:.1e}",
            " ".join(f"{norm:.4f}" for norm in row["norms"]),
            f"{row['norm_difference']:.1e}",
            "equal" if row["norms_equal"] else "DIFFER",
        )
    verdict = "agree" if results["agree"] else "DO NOT AGREE"
    return Group(
        table,
        notes(
            f"All resume one checkpoint, written at {saved['data_shard']} x {saved['expert']} after {results['steps_before']} steps by a "
            "run that went on: the first row.",
            f"Losses {verdict} with it to {results['tolerance']:g} (relative).",
        ),
    )
