"""Plots as inline SVG in the page's colours: lines, bars, heat maps, points. No script; hover texts are SVG titles.

Coordinates are pixels of a 520-wide drawing that the page scales; colours are the numbers of the page's palette.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from bmoe.reports.page import figure, number

WIDTH, HEIGHT = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 78, 14, 12, 46
MAX_POINTS = 400
LABEL = 7.2  # mean width of a 13-px character


class Series(NamedTuple):
    """A named curve; missing values (None or not finite) break it."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    dashed: bool = False
    colour: int | None = None


def line_plot(
    title: str, series: Sequence[Series], x_label: str, y_label: str, text: str = "", zero: bool = False, whole_x: bool = False
) -> str:
    """A figure of curves. `zero` starts the y axis at 0; `whole_x` labels whole numbers only. Empty if there is nothing to draw."""
    curves = [(s.colour if s.colour is not None else i % 6, s, _clean(s)) for i, s in enumerate(series)]
    curves = [(c, s, points) for c, s, points in curves if points]
    if not curves:
        return ""
    xs = [x for _, _, points in curves for x, _ in points]
    ys = [y for _, _, points in curves for _, y in points] + ([0.0] if zero else [])
    frame = Frame(xs, ys, whole_x=whole_x)
    body = frame.axes(x_label, y_label)
    for colour, s, points in curves:
        path = " ".join(f"{'M' if i == 0 else 'L'}{frame.x(x):.1f} {frame.y(y):.1f}" for i, (x, y) in enumerate(points))
        style = f'class="line{" dashed" if s.dashed else ""}" stroke="var(--c{colour})"'
        body += f'<path {style} d="{path}"><title>{escape(s.name)}</title></path>'
        if len(points) <= 40 and not s.dashed:
            body += "".join(
                f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" fill="var(--c{colour})">'
                f"<title>{escape(s.name)}: {number(y)} at {number(x)}</title></circle>"
                for x, y in points
            )
    legend = [(s.name, colour, s.dashed) for colour, s, _ in curves] if len(curves) > 1 else []
    return figure(title, _svg(body, title), text, legend)


def scatter(title: str, x: Sequence[float], y: Sequence[float], x_label: str, y_label: str, text: str = "") -> str:
    """A figure of points, thinned to at most 3,000."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if _finite(a) and _finite(b)]
    if not points:
        return ""
    points = points[:: -(-len(points) // 3000)]
    frame = Frame([a for a, _ in points], [b for _, b in points])
    dots = "".join(f"M{frame.x(a):.1f} {frame.y(b):.1f}h0" for a, b in points)
    body = frame.axes(x_label, y_label)
    body += f'<path d="{dots}" stroke="var(--c0)" stroke-width="4" stroke-linecap="round" stroke-opacity=".35"/>'
    return figure(title, _svg(body, title), text)


def bar_chart(
    title: str,
    labels: Sequence[str],
    groups: Sequence[tuple[str, Sequence[float | None]]],
    y_label: str,
    text: str = "",
    intervals: Sequence[tuple[float, float]] | None = None,
    reference: tuple[str, float] | None = None,
) -> str:
    """A figure of vertical bars, one group of bars a label. `intervals` draws whiskers on the first group; `reference` is a
    dashed line with its name."""
    values = [v for _, column in groups for v in column if _finite(v)]
    if not values:
        return ""
    tops = values + [high for _, high in intervals or [] if _finite(high)] + ([reference[1]] if reference else [])
    frame = Frame([0, len(labels)], [0.0, *tops], ticks_x=False)
    slot = (WIDTH - LEFT - RIGHT) / len(labels)
    width = min(slot * 0.8 / len(groups), 46)
    body = frame.axes("", y_label)
    for g, (name, column) in enumerate(groups):
        for i, value in enumerate(column):
            if not _finite(value):
                continue
            x = LEFT + slot * (i + 0.5) + (g - len(groups) / 2) * width
            top, base = sorted((frame.y(value), frame.y(0.0)))
            body += (
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width - 1:.1f}" height="{max(base - top, 0.5):.1f}" fill="var(--c{g % 6})">'
                f"<title>{escape(labels[i])}, {escape(name)}: {number(value)}</title></rect>"
            )
            if intervals and g == 0 and _finite(intervals[i][0]):
                middle = x + width / 2
                body += f'<path stroke="var(--ink)" d="M{middle:.1f} {frame.y(intervals[i][0]):.1f}V{frame.y(intervals[i][1]):.1f}"/>'
    body += _labels_below(labels, slot)
    legend = [(name, g % 6, False) for g, (name, _) in enumerate(groups)] if len(groups) > 1 else []
    if reference:
        y = frame.y(reference[1])
        body += f'<path class="line dashed" stroke="var(--c4)" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
        legend = [*(legend or [(groups[0][0], 0, False)]), (reference[0], 4, True)]
    return figure(title, _svg(body, title), text, legend)


def interval_chart(title: str, labels: Sequence[str], values: Sequence[float | None], intervals: Sequence[tuple[float, float]]) -> str:
    """A figure of points with their intervals, one a label, on an axis that need not begin at 0."""
    rows = [(i, v, *span) for i, (v, span) in enumerate(zip(values, intervals, strict=True)) if _finite(v)]
    if not rows:
        return ""
    ends = [x for _, v, low, high in rows for x in (v, low, high) if _finite(x)]
    frame, slot = Frame([0, len(labels)], ends, ticks_x=False), (WIDTH - LEFT - RIGHT) / len(labels)
    body = frame.axes("", "") + _labels_below(labels, slot)
    for i, v, low, high in rows:
        x = LEFT + slot * (i + 0.5)
        if _finite(low) and _finite(high):
            a, b = frame.y(low), frame.y(high)
            body += f'<path class="line" stroke="var(--c0)" d="M{x:.1f} {a:.1f}V{b:.1f}M{x - 7:.1f} {a:.1f}h14M{x - 7:.1f} {b:.1f}h14"/>'
        hover = f"<title>{escape(labels[i])}: {number(v)}</title>"
        body += f'<circle cx="{x:.1f}" cy="{frame.y(v):.1f}" r="5" fill="var(--c0)">{hover}</circle>'
    return figure(title, _svg(body, title))


def heat_map(
    title: str,
    matrix: Sequence[Sequence[float | None]],
    rows: Sequence[str],
    columns: Sequence[str],
    x_label: str,
    y_label: str,
    text: str = "",
    low: float | None = None,
    high: float | None = None,
    middle: float | None = None,
) -> str:
    """A figure of cells. Stronger colour is more; with `middle`, values below it take the second hue. Nothing where None."""
    values = [v for row in matrix for v in row if _finite(v)]
    if not values:
        return ""
    low, high = min(values) if low is None else low, max(values) if high is None else high
    reach = max(high - middle, middle - low) if middle is not None else high - low
    label_width = max(len(r) for r in rows) * LABEL + 38
    across, cell_height = WIDTH - RIGHT - label_width, max(9, min(24, 330 / len(rows)))
    cell_width = across / len(columns)
    height = TOP + cell_height * len(rows)

    def cell(i: int, j: int, value: float | None) -> str:
        if not _finite(value):
            return ""
        share = (value - (middle if middle is not None else low)) / reach if reach > 0 else 0.0
        colour, strength = (1, -share) if share < 0 else (0, share)
        return (
            f'<rect x="{label_width + j * cell_width:.1f}" y="{TOP + i * cell_height:.1f}" width="{cell_width + 0.2:.1f}" '
            f'height="{cell_height + 0.2:.1f}" fill="var(--c{colour})" fill-opacity="{min(max(strength, 0.02), 1.0):.2f}">'
            f"<title>{escape(rows[i])}, {escape(columns[j])}: {number(value)}</title></rect>"
        )

    body = "".join(cell(i, j, value) for i, row in enumerate(matrix) for j, value in enumerate(row))
    step = -(-14 // int(cell_height)) if cell_height < 14 else 1
    body += "".join(
        f'<text x="{label_width - 6:.1f}" y="{TOP + (i + 0.5) * cell_height + 4:.1f}" text-anchor="end">{escape(r)}</text>'
        for i, r in enumerate(rows) if i % step == 0
    )  # fmt: skip
    widest = max(len(c) for c in columns) * LABEL + 6
    step = max(1, math.ceil(widest / cell_width))
    body += "".join(
        f'<text x="{label_width + (j + 0.5) * cell_width:.1f}" y="{height + 17:.1f}" text-anchor="middle">{escape(c)}</text>'
        for j, c in enumerate(columns) if j % step == 0
    )  # fmt: skip
    body += f'<rect class="axis" x="{label_width:.1f}" y="{TOP}" width="{across:.1f}" height="{cell_height * len(rows):.1f}"/>'
    body += f'<text x="{label_width + across / 2:.1f}" y="{height + 36:.1f}" text-anchor="middle">{escape(x_label)}</text>'
    body += _rotated(y_label, 13, TOP + cell_height * len(rows) / 2)
    body += _scale(label_width, height + 48, across, low, high, middle, reach)
    return figure(title, _svg(body, title, height + 86), text)


def contact_map(title: str, length: int, true: Sequence[tuple[int, int]], predicted: Sequence[tuple[int, int]], text: str = "") -> str:
    """A figure of pairs of residues (i < j, from 0): true contacts above the diagonal, predicted ones below it."""
    side = WIDTH - LEFT - RIGHT
    scale = side / max(length, 1)
    known = set(true)

    def squares(pairs: Sequence[tuple[int, int]], below: bool) -> str:
        places = ((i, j) if below else (j, i) for i, j in pairs)
        size = max(scale, 1.5)
        return "".join(f"M{LEFT + x * scale:.1f} {TOP + y * scale:.1f}h{size:.1f}v{size:.1f}h-{size:.1f}z" for x, y in places)

    right = [p for p in predicted if p in known]
    wrong = [p for p in predicted if p not in known]
    body = f'<path fill="var(--c4)" d="{squares(true, False)}"/><path fill="var(--c0)" d="{squares(right, True)}"/>'
    body += f'<path fill="var(--c1)" d="{squares(wrong, True)}"/>'
    body += f'<rect class="axis" x="{LEFT}" y="{TOP}" width="{side}" height="{side}"/><path class="axis" d="M{LEFT} {TOP}l{side} {side}"/>'
    for tick in _ticks(0, length, 5):
        if tick <= length:
            at = tick * scale
            body += f'<text x="{LEFT + at:.1f}" y="{TOP + side + 17}" text-anchor="middle">{number(int(tick))}</text>'
            body += f'<text x="{LEFT - 6}" y="{TOP + at + 4:.1f}" text-anchor="end">{number(int(tick))}</text>'
    body += f'<text x="{LEFT + side / 2}" y="{TOP + side + 36}" text-anchor="middle">residue</text>'
    legend = [("true", 4, False), ("predicted, right", 0, False), ("predicted, wrong", 1, False)]
    return figure(title, _svg(body, title, TOP + side + 44), text, legend)


class Frame:
    """The axes of a plot: data to pixels, ticks, labels."""

    def __init__(self, xs: Sequence[float], ys: Sequence[float], ticks_x: bool = True, whole_x: bool = False):
        self.ticks_x = ticks_x
        self.x_ticks = _ticks(min(xs), max(xs), 6)
        if whole_x:
            self.x_ticks = [tick for tick in self.x_ticks if tick == round(tick)]
        self.y_ticks = _ticks(min(ys), max(ys), 5)
        self._x = self._scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
        low, high = min(*ys, self.y_ticks[0]), max(*ys, self.y_ticks[-1])
        self._y = self._scale(low, high, HEIGHT - BOTTOM, TOP)

    @staticmethod
    def _scale(low: float, high: float, begin: float, end: float) -> Callable[[float], float]:
        span = (high - low) or 1.0
        return lambda value: begin + (end - begin) * (value - low) / span

    def x(self, value: float) -> float:
        return self._x(value)

    def y(self, value: float) -> float:
        return self._y(value)

    def axes(self, x_label: str, y_label: str) -> str:
        body = ""
        for tick in self.y_ticks:
            y = self._y(tick)
            body += f'<path class="axis" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>'
            body += f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        if self.ticks_x:
            for tick in self.x_ticks:
                x = self._x(tick)
                if LEFT - 1 <= x <= WIDTH - RIGHT + 1:
                    body += f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{short(tick)}</text>'
        body += f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>'
        return body + _rotated(y_label, 13, (TOP + HEIGHT - BOTTOM) / 2)


def short(value: float) -> str:
    """A tick label: 2k, 1.5M, 0.25, 4e-4."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):g}{unit}"
    if 0 < size < 1e-3:
        return f"{value:.3g}".replace("e-0", "e-")
    return f"{value:.4g}"


def _svg(body: str, title: str, height: float = HEIGHT) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{body}</svg>'


def _rotated(text: str, x: float, y: float) -> str:
    return f'<text x="{x}" y="{y:.1f}" text-anchor="middle" transform="rotate(-90 {x} {y:.1f})">{escape(text)}</text>' if text else ""


def _labels_below(labels: Sequence[str], slot: float) -> str:
    step = max(1, math.ceil((max(len(label) for label in labels) * LABEL + 6) / slot))
    return "".join(
        f'<text x="{LEFT + slot * (i + 0.5):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{escape(label)}</text>'
        for i, label in enumerate(labels) if i % step == 0
    )  # fmt: skip


def _scale(x: float, y: float, across: float, low: float, high: float, middle: float | None, reach: float) -> str:
    """The key of a heat map: a bar of its colours with the values at its ends."""
    width, pieces = min(across, 200), 20
    body = ""
    for i in range(pieces):
        value = low + (high - low) * (i + 0.5) / pieces
        share = (value - (middle if middle is not None else low)) / reach if reach > 0 else 0.0
        colour, strength = (1, -share) if share < 0 else (0, share)
        body += (
            f'<rect x="{x + i * width / pieces:.1f}" y="{y:.1f}" width="{width / pieces + 0.2:.1f}" height="10" '
            f'fill="var(--c{colour})" fill-opacity="{max(strength, 0.02):.2f}"/>'
        )
    body += f'<rect class="axis" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="10"/>'
    body += f'<text x="{x:.1f}" y="{y + 25:.1f}">{short(low)}</text>'
    return body + f'<text x="{x + width:.1f}" y="{y + 25:.1f}" text-anchor="end">{short(high)}</text>'


def _clean(series: Series) -> list[tuple[float, float]]:
    points = [(x, float(y)) for x, y in zip(series.x, series.y, strict=True) if _finite(y)]
    stride = -(-len(points) // MAX_POINTS) if points else 1
    return points[::stride] + ([points[-1]] if points and (len(points) - 1) % stride else [])


def _finite(value: float | None) -> bool:
    """Whether a value can be drawn; what diverged beyond 1e100 cannot."""
    return value is not None and abs(value) < 1e100


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round values (1, 2, 5 times a power of ten) that cover low to high."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-100):  # as good as constant
        margin = 0.05 * (size if size > 1e-90 else 1.0)
        low, high = low - margin, high + margin
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]
