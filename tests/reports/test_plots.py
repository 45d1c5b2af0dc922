"""Plots: data land where the axes say, round ticks, gaps and constants, nothing for nothing."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.reports import plots
from bmoe.reports.page import number, table, with_interval

FINITE = st.floats(-1e12, 1e12, allow_nan=False)


@given(FINITE, FINITE, st.integers(2, 9))
def test_ticks_are_round_cover_the_data_and_are_few(a, b, count):
    low, high = sorted((a, b))
    ticks = plots._ticks(low, high, count)
    assert ticks == sorted(ticks) and len(ticks) <= count + 3
    reach = max(abs(low), abs(high), 1e-300) * 1e-9
    assert ticks[0] <= low + reach and ticks[-1] >= high - reach


def test_points_land_where_the_axes_say():
    frame = plots.Frame([0, 10], [0, 5])
    assert frame.x(0) == plots.LEFT and frame.x(10) == plots.WIDTH - plots.RIGHT
    assert frame.y(0) == plots.HEIGHT - plots.BOTTOM and frame.y(5) == plots.TOP
    assert frame.x(5) == pytest.approx((plots.LEFT + plots.WIDTH - plots.RIGHT) / 2)
    text = plots.line_plot("t", [plots.Series("a", [0, 5, 10], [0, 5, 0])], "x", "y")
    assert f"M{plots.LEFT:.1f} {plots.HEIGHT - plots.BOTTOM:.1f} L{frame.x(5):.1f} {plots.TOP:.1f}" in text


@given(st.lists(st.one_of(st.none(), st.floats()), min_size=1, max_size=12))
def test_any_values_give_a_legal_drawing(values):
    x = list(range(len(values)))
    pictures = [
        plots.line_plot("t", [plots.Series("a", x, values)], "x", "y"),
        plots.bar_chart("t", [str(i) for i in x], [("a", values)], "y", reference=("r", 1.0)),
        plots.interval_chart("t", [str(i) for i in x], values, [(v, v) for v in values]),
        plots.heat_map("t", [values], ["r"], [str(i) for i in x], "x", "y"),
        plots.heat_map("t", [values], ["r"], [str(i) for i in x], "x", "y", middle=0.0),
    ]
    for text in pictures:
        assert not re.search(r'="[^"]*(nan|inf)[^"]*"', text)


def test_nothing_to_draw_is_no_figure():
    assert plots.line_plot("t", [plots.Series("a", [], [])], "x", "y") == ""
    assert plots.bar_chart("t", [], [("a", [])], "y") == "" and plots.scatter("t", [], [], "x", "y") == ""
    assert plots.heat_map("t", [[None]], ["r"], ["c"], "x", "y") == ""


def test_long_curves_are_thinned_and_keep_their_end():
    text = plots.line_plot("t", [plots.Series("a", range(100_001), range(100_001))], "x", "y")
    points = re.search(r' d="(M[^"]*)"><title>', text)[1].split(" L")
    assert len(points) <= plots.MAX_POINTS + 1 and points[-1].startswith(f"{plots.WIDTH - plots.RIGHT:.1f} ")


def test_names_are_escaped():
    text = plots.bar_chart("<t>", ["<a>"], [("<b>", [1.0])], "y")
    assert "<t>" not in text and "<a>" not in text and "&lt;a&gt;" in text


def test_contact_map_tells_right_from_wrong():
    text = plots.contact_map("m", 10, [(0, 9), (1, 8)], [(0, 9), (2, 7)])
    squares = {colour: body.count("z") for colour, body in re.findall(r'<path fill="var\(--c(\d)\)" d="([^"]*)"', text)}
    assert squares == {"4": 2, "0": 1, "1": 1}


@pytest.mark.parametrize(("value", "text"), [
    (None, "–"), (float("nan"), "–"), (float("inf"), "∞"), (0, "0"), (0.0, "0"), (3, "3"), (1234567, "1,234,567"), (0.95321, "0.9532"),
    (17.3456, "17.35"), (12345.6, "12,346"), (2e-5, "2.00e-05"), (True, "yes"), ("a", "a"), (-0.5, "-0.5000"),
])  # fmt: skip
def test_numbers_as_people_read_them(value, text):
    assert number(value) == text


def test_intervals_and_tables():
    assert with_interval(0.5, 0.4, 0.6) == "0.5000 (0.4000 to 0.6000)"
    assert with_interval(0.5, None, None) == with_interval(0.5, float("nan"), 1.0) == "0.5000"
    assert table(["a"], []) == "" and "<td>&lt;x&gt;</td>" in table(["a"], [["<x>"]])


@pytest.mark.parametrize(("value", "text"), [(2e6, "2M"), (15000, "15k"), (2500, "2500"), (4e-5, "4e-5"), (0.25, "0.25"), (0, "0")])
def test_tick_labels(value, text):
    assert plots.short(value) == text
