"""The two drawings of a profile: where a step's time goes, and its parts under the roofline."""

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from bmoe.reports.page import figure, number
from bmoe.reports.plots import BOTTOM, HEIGHT, LEFT, TOP, WIDTH

COLOURS = {  # part -> (colour of the page's palette, opacity): one hue a group
    "attention": (0, 1.0),
    "experts": (1, 1.0), "experts gemm 1": (1, 1.0), "experts activation": (1, 0.55), "experts gemm 2": (1, 0.8), "ffn": (1, 1.0),
    "shared expert": (1, 0.35),
    "router": (2, 1.0), "dispatch": (2, 0.7), "combine": (2, 0.45),
    "embedding": (4, 0.6), "norms": (4, 1.0),
    "head + loss": (3, 1.0),
    "optimizer": (5, 1.0), "communication": (5, 0.7), "data wait": (5, 0.4), "idle": (4, 0.25),
}  # fmt: skip
ORDER = (
    "data wait", "embedding", "norms", "attention", "router", "dispatch", "experts", "experts gemm 1", "experts activation",
    "experts gemm 2", "combine", "shared expert", "ffn", "head + loss", "optimizer", "communication",
)  # fmt: skip
BAR, GAP, LABEL = 34, 26, 7.4
EDGE = WIDTH - 132  # right end of the roofline's axes; names stand beyond


class Piece(NamedTuple):
    """One piece of a bar: what, its seconds, its colour and opacity."""

    name: str
    seconds: float
    colour: int
    opacity: float


def seconds(value: float | None) -> str:
    """A time in its unit: 1.234 s, 12.3 ms, 45 µs."""
    if value is None:
        return "–"
    for limit, factor, unit in ((1.0, 1.0, "s"), (1e-3, 1e3, "ms"), (0.0, 1e6, "µs")):
        if value >= limit:
            return f"{value * factor:.3g} {unit}" if value * factor < 1000 else f"{value * factor:,.0f} {unit}"
    return number(value)


def pieces(parts: Mapping[str, dict], phase: str, batches: int) -> list[Piece]:
    """The parts of a phase ("forward_s", "backward_s", or "seconds") over a step, in the order they run."""
    return [
        Piece(name, parts[name][phase] * batches, *COLOURS.get(name, (4, 1.0)))
        for name in (*ORDER, *(n for n in parts if n not in ORDER)) if name in parts and parts[name][phase] > 0
    ]  # fmt: skip


def time_bars(title: str, rows: Sequence[tuple[str, Sequence[Piece]]], text: str = "") -> str:
    """A figure of bars on one time axis, one a row, with pieces that name themselves where there is room."""
    rows = [(name, row) for name, row in rows if row]
    longest = max((sum(piece.seconds for piece in row) for _, row in rows), default=0.0)
    if longest <= 0:
        return ""
    body = ""
    for i, (name, row) in enumerate(rows):
        y, x = TOP + 14 + i * (BAR + GAP), 4.0
        total = sum(piece.seconds for piece in row)
        body += f'<text x="4" y="{y - 5}">{escape(name)}: {escape(seconds(total))}</text>'
        for piece in row:
            width = (WIDTH - 8) * piece.seconds / longest
            hover = f"{piece.name}: {seconds(piece.seconds)}, {piece.seconds / total:.0%} of {name}"
            body += (
                f'<rect x="{x:.1f}" y="{y}" width="{max(width - 0.8, 0.3):.1f}" height="{BAR}" fill="var(--c{piece.colour})" '
                f'fill-opacity="{piece.opacity}"><title>{escape(hover)}</title></rect>'
            )
            if width > len(piece.name) * LABEL + 6:
                body += (
                    f'<text x="{x + width / 2:.1f}" y="{y + BAR / 2 + 4.5}" text-anchor="middle" '
                    f'style="fill:var({"--paper" if piece.opacity > 0.6 else "--ink"})">{escape(piece.name)}</text>'
                )
            x += width
    names = {piece.name: piece for _, row in rows for piece in row}
    return figure(title, _svg(body, title, TOP + 14 + len(rows) * (BAR + GAP) - GAP + 6) + _key(names), text)


def _key(names: Mapping[str, Piece]) -> str:
    """What each colour is."""
    marks = "".join(
        f'<span><i style="border-top-width:10px;border-color:var(--c{p.colour});opacity:{p.opacity}"></i>{escape(name)}</span>'
        for name, p in names.items()
    )
    return f'<div class="legend">{marks}</div>'


def roofline(title: str, parts: Mapping[str, dict], tflops: float, gb_per_s: float, text: str = "") -> str:
    """A figure of achieved TFLOP/s against FLOP per byte, both logarithmic, under the two measured ceilings."""
    points = [(p["intensity"], p["tflops"], name) for name, p in parts.items() if p.get("intensity") and p.get("tflops")]
    if not points:
        return ""
    ridge = tflops * 1e3 / gb_per_s
    low_x, high_x = _decades([ridge / 3, ridge * 3, *(x for x, _, _ in points)])
    low_y, high_y = _decades([tflops * 1.3, *(y for _, y, _ in points)])

    def at(x: float, y: float) -> tuple[float, float]:
        across = (math.log10(x) - low_x) / (high_x - low_x)
        up = (math.log10(y) - low_y) / (high_y - low_y)
        return LEFT + across * (EDGE - LEFT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    body = _log_axes(low_x, high_x, low_y, high_y, at)
    start = max(10**low_x, 10**low_y * 1e3 / gb_per_s)
    roof = [at(start, start * gb_per_s / 1e3), at(ridge, tflops), at(10**high_x, tflops)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in roof)
    body += f'<path class="line" stroke="var(--ink)" d="{path}"><title>measured ceilings</title></path>'
    x, y = roof[2]
    body += f'<text x="{x - 4:.1f}" y="{y - 6:.1f}" text-anchor="end">{escape(number(tflops))} TFLOP/s</text>'
    (x, y), (to_x, to_y) = roof[0], roof[1]
    angle = math.degrees(math.atan2(to_y - y, to_x - x))
    middle = x + (to_x - x) * 0.4, y + (to_y - y) * 0.4 - 7
    turn = f'transform="rotate({angle:.1f} {middle[0]:.1f} {middle[1]:.1f})"'
    body += f'<text x="{middle[0]:.1f}" y="{middle[1]:.1f}" text-anchor="middle" {turn}>{escape(number(gb_per_s))} GB/s</text>'
    label = float(TOP)
    for intensity, achieved, name in sorted(points, key=lambda point: -point[1]):
        (x, y), (colour, opacity) = at(intensity, achieved), COLOURS.get(name, (4, 1.0))
        label = max(label + 15, y)  # names stand in a column, each joined to its point
        hover = f"{name}: {number(achieved)} TFLOP/s at {number(intensity)} FLOP/byte"
        body += f'<path class="axis" d="M{x:.1f} {y:.1f}L{EDGE + 6} {label:.1f}"/>'
        fill = f'fill="var(--c{colour})" fill-opacity="{opacity}"'
        body += f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {fill}><title>{escape(hover)}</title></circle>'
        body += f'<text x="{EDGE + 9}" y="{label + 4:.1f}">{escape(name)}</text>'
    return figure(title, _svg(body, title, HEIGHT), text)


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten around all values."""
    return math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))


def _log_axes(low_x: int, high_x: int, low_y: int, high_y: int, at) -> str:
    body = ""
    for power in range(low_y, high_y + 1):
        _, y = at(10.0**low_x, 10.0**power)
        body += f'<path class="axis" d="M{LEFT} {y:.1f}H{EDGE}"/>'
        body += f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>'
    for power in range(low_x, high_x + 1):
        x, _ = at(10.0**power, 10.0**low_y)
        body += f'<path class="axis" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>'
        body += f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{10.0**power:g}</text>'
    middle = (TOP + HEIGHT - BOTTOM) / 2
    body += f'<text x="{(LEFT + EDGE) / 2}" y="{HEIGHT - 8}" text-anchor="middle">FLOP per byte</text>'
    return body + f'<text x="13" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 13 {middle:.1f})">TFLOP/s</text>'


def _svg(body: str, title: str, height: float) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">{body}</svg>'
