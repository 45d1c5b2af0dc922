"""The parts of a report about perplexity and expert load, from the results of `bmoe eval`."""

from bmoe.reports.page import grid, section, table, with_interval
from bmoe.reports.plots import bar_chart, heat_map

TEXT = (
    "Perplexity is the number of equally likely residues the model is left with; lower is better. The baseline knows only how "
    "frequent each residue is, the bigram baseline also the nearest visible neighbours; both are flattered, since they count the "
    "very sequences that they are judged on. A ratio to the baseline of 1 or more says that the model has learnt no more than how "
    "frequent residues are."
)
MOST_RESIDUES = 30  # bars; a byte-pair alphabet has thousands
NAMES = {"_mask": "fully masked", "_8010": "training scheme", "": "next token"}


def sections(results: dict, level: int = 2) -> str:
    """Perplexity with intervals, by length, by residue, by header field; empty without perplexities."""
    endings = [e for e in NAMES if f"perplexity{e}" in results]
    if not endings:
        return ""
    ending = endings[0]
    figures = [
        _by_length(results.get("by_length", []), ending),
        _by_residue(results.get("by_residue", []), ending),
    ]
    parts = [_overview(results, endings), grid(*figures), _group_table("residues", results.get("by_length", []), endings)]
    parts.append(_group_table(results.get("by_field", ""), results.get("by_group", []), endings))
    text = f"{results['sequences']:,} sequences, {results['targets']:,} targets. {TEXT}"
    return section("Held-out sequences", *parts, text=text, level=level)


def _overview(results: dict, endings: list[str]) -> str:
    def interval(key: str, ending: str) -> str:
        return with_interval(*(results.get(f"{key}{ending}{end}") for end in ("", "_low", "_high")))

    rows = [
        [NAMES[e], interval("perplexity", e), results[f"baseline{e}"], interval("ratio", e), results.get(f"bigram{e}")] for e in endings
    ]  # fmt: skip
    pseudo = results.get("pseudo")
    if pseudo:
        rows.append(["one residue at a time", with_interval(pseudo["pseudo_perplexity"], pseudo["low"], pseudo["high"]), None, None, None])
    head = ["scheme", "perplexity (95 % interval)", "baseline", "perplexity / baseline", "bigram baseline"]
    columns = 5 if any(f"bigram{e}" in results for e in endings) else 4
    return table(head[:columns], [row[:columns] for row in rows])


def bin_name(entry: dict) -> str:
    """`129–256`, or `> 1,024` for the last."""
    low, high = entry["min_length"], entry["max_length"]
    return f"> {low - 1:,}" if high is None else f"{low}–{high}"


def _by_length(bins: list[dict], ending: str) -> str:
    groups = [("model", [b[f"perplexity{ending}"] for b in bins]), ("baseline", [b[f"baseline{ending}"] for b in bins])]
    text = f"{NAMES[ending].capitalize()}; length of the whole sequence in residues."
    return bar_chart("Perplexity by sequence length", [bin_name(b) for b in bins], groups, "perplexity", text)


def _by_residue(entries: list[dict], ending: str) -> str:
    common = [e for e in entries if e["targets"] >= 20][:MOST_RESIDUES]
    groups = [("model", [e[f"perplexity{ending}"] for e in common]), ("baseline", [e[f"baseline{ending}"] for e in common])]
    text = "How surprised the model is by each true residue, the most frequent first; rare ones are harder for any model."
    return bar_chart("Perplexity by residue", [e["residue"] for e in common], groups, "perplexity", text) if common else ""


def _group_table(name: str, bins: list[dict], endings: list[str]) -> str:
    """A row per group of sequences: bins of length, or values of a header field."""
    head = [name, "sequences", "targets"]
    for e in endings:
        head += [f"perplexity, {NAMES[e]} (95 % interval)", "baseline"]
    rows = []
    for b in bins:
        row: list[object] = [b["group"] if "group" in b else bin_name(b), b["sequences"], b["targets"]]
        for e in endings:
            row += [with_interval(*(b.get(f"perplexity{e}{end}") for end in ("", "_low", "_high"))), b[f"baseline{e}"]]
        rows.append(row)
    return table(head, rows)


def load_figure(layers: list[dict]) -> str:
    """Load of every expert on held-out sequences over layers and experts; empty for a dense model."""
    if not layers:
        return ""
    experts = len(layers[0]["load"])
    matrix = [[share * experts for share in layer["load"]] for layer in layers]
    names = [str(layer["layer"]) for layer in layers]
    return heat_map(
        "Load of each expert", matrix, names, [str(e + 1) for e in range(experts)], "expert", "layer",
        "On held-out sequences, relative to an even load: 1 is even.", middle=1.0,
    )  # fmt: skip


def load_table(layers: list[dict]) -> str:
    """How even the load of each layer is."""
    head = ["layer", "busiest / mean", "evenness", "dead experts"]
    return table(head, [[x["layer"], x["load_max_over_mean"], x["load_entropy"], x["dead_experts"]] for x in layers])
