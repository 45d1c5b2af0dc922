"""The part of a report about what experts do, from the results of `bmoe eval --routing`."""

import math

from bmoe.reports.page import grid, section, table
from bmoe.reports.perplexity import load_figure, load_table
from bmoe.reports.plots import Series, heat_map, line_plot

QUESTIONS = {
    "residue": "residue", "structure": "secondary structure", "position": "place in the sequence", "next_layer": "next layer's expert",
}  # fmt: skip
RARE, REACH = 0.003, 3.0  # labels below this share are too few for a colour; log2 ratios beyond this have the full one
TEXT = (
    "Mutual information says how much knowing the expert tells of the label, in bits; the dashed line is what chance gives 95 % of the "
    "time when the labels are moved along the sequences. Heat maps show, for the layer that tells most, which labels an expert sees more "
    "often (blue) or less often (orange) than average, as log2 of the ratio, up to a factor of 8."
)


def routing_section(routing: dict, level: int = 2) -> str:
    """Load, mutual information by layer, and the strongest layer of every question."""
    layers = routing.get("layers", [])
    asked = [name for name in QUESTIONS if routing.get(name, {}).get("layers")]
    figures = [load_figure(layers), *(_information(routing[name], QUESTIONS[name]) for name in asked)]
    figures += [_strongest(routing[name], QUESTIONS[name]) for name in asked]
    text = TEXT if asked else "An even load uses the whole model: no expert is without tokens."
    return section("Routing", grid(*figures), load_table(layers), _table(routing, asked), text=text, level=level)


def _information(question: dict, name: str) -> str:
    at = [entry["layer"] for entry in question["layers"]]
    found = Series("found", at, [entry["bits"] for entry in question["layers"]], colour=0)
    chance = Series("95 % of chance", at, [entry["null_95"] for entry in question["layers"]], dashed=True, colour=4)
    if len(at) == 1:  # a dashed level needs two ends
        chance = Series("95 % of chance", [at[0] - 0.5, at[0] + 0.5], list(chance.y) * 2, dashed=True, colour=4)
    return line_plot(f"Expert and {name}", [found, chance], "layer", "bits", zero=True, whole_x=True)


def _strongest(question: dict, name: str) -> str:
    best = max(question["layers"], key=lambda entry: entry["bits"] - entry["null_mean"])
    shares, overall = best["shares"], best["overall"]
    common = [c for c, share in enumerate(overall) if share >= RARE]
    matrix = [[_log_ratio(row[c], overall[c]) if any(row) else None for c in common] for row in shares]
    experts = [str(e + 1) for e in range(len(shares))]
    return heat_map(
        f"Experts of layer {best['layer']} by {name}", matrix, experts, [question["labels"][c] for c in common], name, "expert",
        low=-REACH, high=REACH, middle=0.0,
    )  # fmt: skip


def _log_ratio(share: float, overall: float) -> float:
    """log2 of how many times more often than on average, within REACH."""
    return min(max(math.log2(max(share, 1e-12) / overall), -REACH), REACH)


def _table(routing: dict, asked: list[str]) -> str:
    rows = []
    for name in asked:
        for entry in routing[name]["layers"]:
            rows.append([QUESTIONS[name], entry["layer"], entry["bits"], entry["null_mean"], entry["null_95"], entry["p"]])
    return table(["expert and", "layer", "bits", "mean of chance", "95 % of chance", "p"], rows)
