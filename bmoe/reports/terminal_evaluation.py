"""The results of `bmoe eval` on a terminal, as rich tables."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from bmoe.reports import comparison, remarks
from bmoe.reports.evaluation import BLOSUM, PAIRED, RANGES, named, paired_rows
from bmoe.reports.page import number, with_interval
from bmoe.reports.perplexity import NAMES, bin_name
from bmoe.reports.prepare import counted


def evaluation_tables(results: dict | list[dict]) -> Group:
    """Everything that was measured, a table a part; several models side by side first."""
    runs = named([results] if isinstance(results, dict) else results)
    parts = [_comparison(runs)] if len(runs) > 1 else []
    if pairs := paired_rows(runs):
        parts.append(_table("on the same data", PAIRED, pairs))
    for name, found in runs.items():
        if len(runs) > 1:
            parts.append(Text(name, style="bold"))
        parts += [make(found) for key, make in PARTS.items() if found.get(key)]
    return Group(*parts)


def _table(title: str, head: list[str], rows: list[list[object]]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim")
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*(number(cell) for cell in row))
    return table


def _remarked(table: Table, sentences: list[str]) -> Group:
    return Group(table, *map(Text, sentences))


def _comparison(runs: dict[str, dict]) -> Group:
    rows = [
        [metric.label, *(with_interval(*value) for value in values), comparison.without_learning(runs, metric)]
        for metric, values in comparison.rows(runs)
    ]  # fmt: skip
    table = _table("side by side (95 % interval)", ["metric", *runs, "without learning"], rows)
    return _remarked(table, comparison.notes(runs))


def _perplexity(found: dict) -> Group:
    endings = [e for e in NAMES if f"perplexity{e}" in found]

    def interval(key: str, ending: str) -> str:
        return with_interval(*(found.get(f"{key}{ending}{end}") for end in ("", "_low", "_high")))

    rows = [[NAMES[e], interval("perplexity", e), found[f"baseline{e}"], found.get(f"bigram{e}"), interval("ratio", e)] for e in endings]
    if found.get("pseudo"):
        pseudo = found["pseudo"]
        rows.append(["one residue at a time", with_interval(pseudo["pseudo_perplexity"], pseudo["low"], pseudo["high"]), None, None, None])
    title = f"perplexity, {counted(found['sequences'], 'sequence')}, {counted(found['targets'], 'target')}"
    parts = [_table(title, ["scheme", "perplexity", "baseline", "bigram", "perplexity / baseline"], rows)]
    for name, groups in (("residues", found["by_length"]), (found.get("by_field", ""), found.get("by_group", []))):
        rows = [
            [g["group"] if "group" in g else bin_name(g), g["sequences"], g["targets"], *(_of_group(g, e) for e in endings)]
            for g in groups
        ]  # fmt: skip
        if rows:
            parts.append(_table(f"by {name}", [name, "sequences", "targets", *(NAMES[e] for e in endings)], rows))
    return Group(*parts)


def _of_group(group: dict, ending: str) -> str:
    return with_interval(*(group.get(f"perplexity{ending}{end}") for end in ("", "_low", "_high")))


def _mutations(found: dict) -> Group:
    found = found["mutations"]
    rows = [
        [name.replace("_", " "), with_interval(m["spearman"], m["spearman_low"], m["spearman_high"]), m["auc"]]
        for name, m in {**found["methods"], **({BLOSUM: found["blosum62"]} if "blosum62" in found else {})}.items()
    ]  # fmt: skip
    table = _table(f"mutations, {counted(found['n'], 'variant')} against {found['column']}", ["score", "Spearman", "AUC"], rows)
    return _remarked(table, remarks.mutations(found))


def _contacts(found: dict) -> Group:
    found = found["contacts"]
    rows = []
    for name, label in RANGES.items():
        entry = found[name]
        values = [with_interval(entry[key], entry[f"{key}_low"], entry[f"{key}_high"]) for key in ("p_at_l", "p_at_l2", "p_at_l5")]
        rows.append([label, *values, entry["p_at_l_by_separation"]])
    title = f"contacts, {found['chains']} chains of {found['families']} families"
    table = _table(title, ["separation", "P@L", "P@L/2", "P@L/5", "P@L, nearest pairs"], rows)
    return _remarked(table, remarks.contacts(found))


def _probe(found: dict) -> Group:
    found = found["probe"]
    rows = []
    for name, entry in (("all states", found), ("3 states", found.get("three_state"))):
        if entry:
            interval = with_interval(entry["accuracy"], entry["accuracy_low"], entry["accuracy_high"])
            rows.append([name, interval, entry["majority"], entry["layers"][0]["test_accuracy"], entry["best_layer"]])
    table = _table("secondary structure", ["labels", "accuracy", "most frequent class", "layer 0", "best layer"], rows)
    return _remarked(table, remarks.probe(found))


def _routing(found: dict) -> Group:
    found = found["routing"]
    rows = [[x["layer"], x["load_max_over_mean"], x["load_entropy"], x["dead_experts"]] for x in found["layers"]]
    parts = [_table("expert load", ["layer", "busiest / mean", "evenness", "dead experts"], rows)]
    questions = [name for name in ("residue", "structure", "position", "next_layer") if name in found]
    rows = [
        [name.replace("_", " "), entry["layer"], entry["bits"], entry["null_95"], entry["p"]]
        for name in questions for entry in found[name]["layers"]
    ]  # fmt: skip
    if rows:
        parts.append(_table("what experts tell", ["of the", "layer", "bits", "95 % of chance", "p"], rows))
    return Group(*parts)


def _embedded(found: dict) -> Text:
    found = found["embeddings"]
    long = f"; {found['longer_than_trained']} longer than the model was trained for" if found["longer_than_trained"] else ""
    what = f"{counted(found['sequences'], 'sequence')}, layer {found['layer']}, by {found['mode']}"
    return Text(f"embeddings of {what} written to {found['file']}{long}")


def _generation(found: dict) -> Table:
    found = found["generation"]
    rows = [[s["sequence"], s["length"], s["ended"], s["perplexity"]] for s in found["samples"]]
    return _table(f"generated, perplexity {number(found['perplexity'])}", ["sequence", "length", "ended", "perplexity"], rows)


PARTS = {
    "by_length": _perplexity, "mutations": _mutations, "contacts": _contacts, "probe": _probe, "routing": _routing,
    "embeddings": _embedded, "generation": _generation,
}  # fmt: skip
