"""What rounding did to the tensors of training, from the `quantisation` entries of metrics.jsonl; `precision.statistics` fills them."""

from collections.abc import Sequence

from bmoe.reports.page import grid, section, table
from bmoe.reports.plots import Series, bar_chart, heat_map, line_plot

NAMES = {
    "input_1": "input, product 1", "weight_1": "weight, product 1", "gradient_1": "gradient, product 1",
    "input_2": "input, product 2", "weight_2": "weight, product 2", "gradient_2": "gradient, product 2",
}  # fmt: skip
LOWEST, SPAN = -128, 256  # of the histogram of scales, in powers of two
TEXT = (
    "Inputs of the experts' two products were rounded to the recipe's precision; gradients are those of the products' outputs. Error is "
    "|rounded - exact| / |exact|, underflow the share of values that became 0, saturation the share cut to the largest code. Error near "
    "3 % (4 significant bits), 5 % (3 bits) or 10 % (2 bits; 13 % where gradients are rounded stochastically) is that of the mantissa "
    "alone; what lies above comes from underflow and saturation."
)


def quantisation_section(records: Sequence[dict]) -> str:
    """The section of the training report; empty if no step recorded statistics."""
    seen = [record for record in records if record.get("quantisation")]
    if not seen:
        return ""
    last = seen[-1]["quantisation"]
    steps = [record["step"] for record in seen]
    figures = [
        line_plot(f"{key.capitalize()} over training", _over_steps(seen, steps, key), "step", "percent", whole_x=True, zero=True)
        for key in ("error", "underflow")
    ]
    layers = len(next(iter(last.values()))["error"])
    matrix = [[_percent(value) for value in last[name]["error"]] for name in last]
    columns = [str(layer + 1) for layer in range(layers)]
    title = f"Error by layer after step {seen[-1]['step']:,}, percent"
    figures.append(heat_map(title, matrix, [NAMES[name] for name in last], columns, "layer", ""))
    figures.append(_scales(last))
    rows = []
    for name, entry in last.items():
        worst = max((value, layer + 1) for layer, value in enumerate(entry["error"]) if value is not None)
        rows.append(
            [NAMES[name], *(_percent(_mean(entry[key])) for key in ("error", "underflow", "saturation")), _percent(worst[0]), worst[1]]
        )
    head = ["tensor", "error %", "underflow %", "saturation %", "worst layer's error %", "layer"]
    return section("Rounding", grid(*figures), table(head, rows), text=TEXT)


def _over_steps(seen: Sequence[dict], steps: list[int], key: str) -> list[Series]:
    names = seen[-1]["quantisation"]
    return [Series(NAMES[name], steps, [_percent(_mean(r["quantisation"].get(name, {}).get(key, []))) for r in seen]) for name in names]


def _scales(last: dict) -> str:
    """Shares of the blocks' scales by power of two, where there are any; blocks of zeros are counted in words."""
    kinds = {
        kind: [sum(bins) for bins in zip(*(entry["scales"] for name, entry in last.items() if name.startswith(kind)), strict=True)]
        for kind in ("input", "weight", "gradient")
    }
    kinds = {kind: bins for kind, bins in kinds.items() if sum(bins)}
    width = SPAN // len(next(iter(kinds.values())))
    used = [index for bins in kinds.values() for index, count in enumerate(bins) if count and index]
    if not used:
        return ""
    span = range(min(used), max(used) + 1)
    labels = [f"2^{LOWEST + index * width}" for index in span]
    groups = [(kind, [100 * bins[index] / sum(bins) for index in span]) for kind, bins in kinds.items()]
    zeros = ", ".join(f"{bins[0] / sum(bins):.1%} of {kind}" for kind, bins in kinds.items() if bins[0])
    text = f"Each group reaches from its power of two to {width} above it." + (f" Blocks of zeros: {zeros}." if zeros else "")
    return bar_chart("Scales of the blocks", labels, groups, "percent of blocks", text)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _percent(value: float | None) -> float | None:
    return None if value is None else 100 * value
