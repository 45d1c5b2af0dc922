"""The report of `bmoe eval`: one page for one model, or for several side by side.

Reads results as `bmoe eval --json` holds them; a part that was not asked for has no section.
"""

from pathlib import Path

from bmoe import __version__
from bmoe.errors import RunError
from bmoe.files import whole
from bmoe.reports import comparison, remarks
from bmoe.reports import perplexity as perplexity_parts
from bmoe.reports.page import details, grid, number, page, section, table, tiles, with_interval
from bmoe.reports.plots import Series, bar_chart, contact_map, interval_chart, line_plot, scatter
from bmoe.reports.routing import routing_section

DIFFERENCES = {"mutations": "mutations, Spearman", "contacts": "contacts, long range P@L", "probe": "secondary structure, accuracy"}
PAIRED = ["model", "beside", "of", "paired (95 % interval)"]
BLOSUM = "BLOSUM62, without a model"
RANGES = {"short": "short, 6–11", "medium": "medium, 12–23", "long": "long, 24 or more"}


def write_evaluation_report(results: dict | list[dict], file: str | Path) -> Path:
    """Write the page of one or several models. Returns its path; RunError if it cannot be written.

    Each of `results` is named by its key `run`, a path.
    """
    file, runs = Path(file), named([results] if isinstance(results, dict) else results)
    names = list(runs)
    if len(names) == 1:
        title = f"Evaluation of {names[0]}"
        parts = [tiles(_key_numbers(runs[names[0]])), *_parts(runs[names[0]], 2)]
    else:
        title = "Comparison of " + ", ".join(names)
        parts = [_comparison(runs)]
        parts += [section(name, tiles(_key_numbers(results)), *_parts(results, 3)) for name, results in runs.items()]
    try:
        with whole(file) as partial:
            partial.write_text(page(title, f"bmoe {__version__}", parts), encoding="utf-8")
    except OSError as error:
        raise RunError(f"{file} cannot be written: {error.strerror}") from None
    return file


def named(results: list[dict]) -> dict[str, dict]:
    """Results by the shortest name that tells them apart: the last part of the path of their run, or all of it."""
    last = [Path(found["run"]).name or found["run"] for found in results]
    return {(name if last.count(name) == 1 else found["run"]): found for name, found in zip(last, results, strict=True)}


def _key_numbers(results: dict) -> list[tuple[str, str]]:
    """The metrics of the comparison that this model has, the first six."""
    found = comparison.rows({"": results})[:6]
    described = []
    for metric, (value,) in found:
        text, trivial = metric.label, comparison.without_learning({"": results}, metric)
        text += "" if value.low is None or value.high is None else f"; 95 % interval {number(value.low)} to {number(value.high)}"
        text += "" if trivial is None else f"; without learning {number(trivial)}"
        described.append((number(value.value), text))
    return described


def _parts(results: dict, level: int) -> list[str]:
    parts = [perplexity_parts.sections(results, level)]
    parts += [make(results[key], level) for key, make in SECTIONS.items() if results.get(key)]
    return parts


def _comparison(runs: dict[str, dict]) -> str:
    """A table of all metrics, best in its row marked, and a chart of each that has an interval."""
    found = comparison.rows(runs)
    body, charts = [], []
    for metric, values in found:
        known = [v.value for v in values if v.value is not None]
        best = min(known) if metric.lower_is_better else max(known)
        ranked = len(known) > 1 and comparison.comparable(runs, metric)
        marked = (with_interval(*v) + (" *" if v.value == best and ranked else "") for v in values)
        body.append([metric.label, *marked, comparison.without_learning(runs, metric)])
        if len(known) > 1 and all(v.low is not None for v in values):
            charts.append(interval_chart(metric.label, list(runs), [v.value for v in values], [(v.low, v.high) for v in values]))
    text = (
        "Values with their 95 % bootstrap interval; * is the best of its row. Each interval is of one model by itself: where two overlap, "
        "look at the paired ratio or difference. Without learning: the composition of the residues, BLOSUM62, the most frequent class, "
        "nearest pairs first. Perplexities compare only models evaluated on the same split and alphabet. "
        f"{' '.join(comparison.notes(runs))}"
    )
    return section("Side by side", table(["metric", *runs, "without learning"], body), _paired(runs), grid(*charts), text=text)


def _paired(runs: dict[str, dict]) -> str:
    """Each model beside the first on the same data: ratios of perplexities, differences of the rest."""
    return table(PAIRED, paired_rows(runs))


def paired_rows(runs: dict[str, dict]) -> list[list[str]]:
    """The cells of PAIRED of `named` runs: which model, beside which, what, and the value with its interval."""
    name_of = {found["run"]: name for name, found in runs.items()}
    rows = []
    for name, found in runs.items():
        compared = found.get("compared", {})
        values = {}
        for scheme, ratio in compared.get("schemes", {}).items():
            what = perplexity_parts.NAMES["" if scheme == "clm" else f"_{scheme}"]
            values[f"perplexity, {what}: ratio"] = with_interval(ratio["ratio"], ratio["low"], ratio["high"])
        for part, gain in compared.get("differences", {}).items():
            values[f"{DIFFERENCES[part]}: difference"] = with_interval(gain["difference"], gain["low"], gain["high"])
        rows += [[name, name_of[compared["to"]], what, value] for what, value in values.items()]
    return rows


def _mutations(found: dict, level: int) -> str:
    points = found.get("points", [])
    x, y = [p[0] for p in points], [p[1] for p in points]
    shown = f"{number(found['n'])} variants of {found['wildtype']}."
    plot = scatter("Measured effect and score", x, y, found["column"], found["method"].replace("_", " "), shown)
    rows = [
        [name.replace("_", " "), with_interval(m["spearman"], m["spearman_low"], m["spearman_high"]), m["auc"]]
        for name, m in {**found["methods"], **({BLOSUM: found["blosum62"]} if "blosum62" in found else {})}.items()
    ]  # fmt: skip
    text = (
        f"The model scores each variant by how much less likely it finds it than the wild type, without having seen a measurement. "
        f"Spearman's correlation with the measured effect is 1 for a perfect ranking, 0 for none; the AUC tells {found['positive']} "
        "from the rest, 0.5 is chance. BLOSUM62 knows how common a change of letters is in proteins at large, and nothing of this "
        f"protein. {' '.join(remarks.mutations(found))}"
    )
    return section("Mutations", table(["score", "Spearman (95 % interval)", "AUC"], rows), grid(plot), text=text, level=level)


def _contacts(found: dict, level: int) -> str:
    keys = {"p_at_l": "P@L", "p_at_l2": "P@L/2", "p_at_l5": "P@L/5"}
    rows = []
    for name, label in RANGES.items():
        for key, title in keys.items():
            entry = found[name]
            interval = with_interval(entry[key], entry[f"{key}_low"], entry[f"{key}_high"])
            rows.append([label, title, interval, entry[f"{key}_by_separation"]])
    columns = {"model": "p_at_l", "nearest pairs first": "p_at_l_by_separation"}
    groups = [(what, [found[name][key] for name in RANGES]) for what, key in columns.items()]
    intervals = [(found[name]["p_at_l_low"], found[name]["p_at_l_high"]) for name in RANGES]
    figures = [bar_chart("Precision of the first L pairs", [r.split(",")[0] for r in RANGES.values()], groups, "P@L", intervals=intervals)]
    figures += [
        contact_map(f"{m['chain']}, {m['length']} residues", m["length"], [tuple(p) for p in m["true"]], [tuple(p) for p in m["predicted"]],
                    f"Long-range P@L {number(m['long_p_at_l'])}; the first L predictions below the diagonal.")
        for m in found["maps"]
    ]  # fmt: skip
    text = (
        "Residues that touch in the fold, read off the attention maps by a regression trained on other families: "
        f"{found['chains']} chains of {found['families']} families. P@L is the share of true contacts among the L most probable pairs, "
        f"L the chain's length. {' '.join(remarks.contacts(found))}"
    )
    head = ["separation in residues", "", "precision (95 % interval)", "nearest pairs first"]
    per_chain = "\n".join(f"{c['chain']}\t{c['length']}\tfamily {c['family']}\t{number(c['long_p_at_l'])}" for c in found["per_chain"])
    listed = details("Long-range P@L of every chain", per_chain)
    return section("Contacts", table(head, rows), grid(*figures), listed, text=text, level=level)


def _probe(found: dict, level: int) -> str:
    kinds = {"all states": found} | ({"3 states": found["three_state"]} if "three_state" in found else {})
    rows, figures = [], []
    for name, entry in kinds.items():
        interval = with_interval(entry["accuracy"], entry["accuracy_low"], entry["accuracy_high"])
        rows.append([name, entry["classes"], interval, entry["majority"], entry["layers"][0]["test_accuracy"], entry["best_layer"]])
        at = [x["layer"] for x in entry["layers"]]
        curves = [
            Series("test", at, [x["test_accuracy"] for x in entry["layers"]], colour=0),
            Series("most frequent class", [at[0], at[-1]], [entry["majority"]] * 2, dashed=True, colour=1),
        ]
        figures.append(line_plot(f"Accuracy by layer, {name}", curves, "layer", "accuracy", whole_x=True))
    text = (
        f"A linear classifier on the frozen embeddings of each layer, on {number(found['residues']['test'])} residues of test sequences. "
        "None of them has a relative (a local alignment of E ≤ 0.002) among the sequences it was trained on, or those on which the layer "
        f"was chosen. Layer 0 knows the residue itself and nothing around it. {' '.join(remarks.probe(found))}"
    )
    head = ["labels", "classes", "accuracy (95 % interval)", "most frequent class", "layer 0", "best layer"]
    return section("Secondary structure", table(head, rows), grid(*figures), text=text, level=level)


def _generation(found: dict, level: int) -> str:
    rows = []
    for sample in found["samples"][:20]:
        start = sample["sequence"][:60] + ("…" if len(sample["sequence"]) > 60 else "")
        rows.append([start, sample["length"], sample["ended"], sample["perplexity"]])
    drawn = "" if found.get("temperature", 1.0) == 1.0 else f" at temperature {number(found['temperature'])}"
    drawn += f" from the {found['top_k']} likeliest letters" if found.get("top_k") else ""
    text = (
        f"{number(found['n'])} sequences drawn from the model{drawn}, {found['ended']} of them ended by themselves; mean length "
        f"{number(found['mean_length'])}, perplexity under the model {number(found['perplexity'])}."
    )
    return section("Generated sequences", table(["sequence", "length", "ended", "perplexity"], rows), text=text, level=level)


def _embeddings(found: dict, level: int) -> str:
    vectors = "every residue" if found["mode"] == "residue" else "every sequence, the mean over its residues"
    row = [found["file"], found["sequences"], found["residues"], found["layer"], found["width"], vectors, found["longer_than_trained"]]
    head = ["file", "sequences", "residues", "layer", "numbers in a vector", "a vector for", "longer than the model was trained for"]
    return section("Embeddings", table(head, [row]), text="States inside the model, for use as features elsewhere.", level=level)


SECTIONS = {
    "mutations": _mutations,
    "contacts": _contacts,
    "probe": _probe,
    "routing": routing_section,
    "embeddings": _embeddings,
    "generation": _generation,
}
