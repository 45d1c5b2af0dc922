"""The page of a profile: whole, self-contained, with the numbers of the results; drawings keep proportions and ceilings."""

import math
import re
from html.parser import HTMLParser

import pytest

from bmoe.errors import RunError
from bmoe.profiling import validation
from bmoe.reports.plots import BOTTOM, HEIGHT, LEFT, TOP
from bmoe.reports.profile import write_profile_report
from bmoe.reports.profile_plots import EDGE, Piece, pieces, roofline, seconds, time_bars


class Checker(HTMLParser):
    """Tags close in order, nothing is loaded or run."""

    def __init__(self):
        super().__init__()
        self.open, self.heads = [], []

    def handle_starttag(self, tag, attributes):
        assert tag not in ("script", "link", "iframe", "object", "img")
        assert all(name not in ("src", "href") and "http" not in (value or "") for name, value in attributes)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("h2", "h3"):
            self.heads.append(data)


def read(path) -> tuple[str, list[str]]:
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    assert not checker.open and "nan" not in text.split("<main>")[1].lower()
    return text, checker.heads


def part(forward, backward, flops=None, moved=1e9, bound="memory"):
    total = forward + backward
    return {
        "forward_s": forward, "backward_s": backward, "seconds": total, "flops": flops, "bytes": moved, "bound": bound,
        "tflops": flops and flops / total / 1e12, "gb_per_s": moved / total / 1e9,
        "intensity": flops and flops / moved, "ceiling_share": 0.4,
    }  # fmt: skip


KNOWN = {"points": 9, "on": "h200", "precision": "bf16", "median": 0.05, "worst": -0.26, "where": "a layer"}


def chip(**more):
    return {
        "chip": "b200", "world": 1, "step_s": 0.05, "tokens_per_s": 3e5, "mfu": 0.3, "memory": {"peak": 20.0}, "fits": True,
        "speedup_over_bf16": 1.1, "bottleneck": {"part": "attention", "share": 0.4},
        "model_error": KNOWN,
        "model_error_label": validation.in_words(KNOWN, "bf16"),
        "label": "predicted by a roofline model, not measured",
        "assumptions": {"gemm": 0.68, "low_gemm": 0.45, "guessed": ["low_gemm"], "peaks": "a data sheet"}, **more,
    }  # fmt: skip


def results(**more) -> dict:
    parts = {
        "attention": part(4e-3, 8e-3, 2e12), "experts gemm 1": part(6e-3, 12e-3, 9e12, 2e9, "arithmetic"), "norms": part(1e-3, 2e-3),
        "optimizer": {"forward_s": 3e-3, "backward_s": 0.0, "seconds": 3e-3, "tflops": None, "gb_per_s": None},
    }  # fmt: skip
    sizes = {"weights": 2.0, "gradients": 2.0, "optimizer": 10.0, "activations": 6.0, "workspace": 1.0, "peak": 19.0}
    return {
        "recipe": "a <b> & c", "device": "NVIDIA H200", "precision": "bf16", "data": "synthetic", "unmet_conditions": [],
        "left_out": [],
        "ceilings": {"matmul_tflops": 780.0, "copy_gb_per_s": 4300.0, "what": "a product; a copy"}, "step_s": 0.07, "step_s_low": 0.069,
        "step_s_high": 0.072, "batches_per_step": 2, "residues_per_s": 4e5, "tokens_per_s": 4.1e5, "mfu": 0.4, "peak_flops": 989e12,
        "mfu_of_measured_ceiling": 0.51, "mfu_formula": "a formula", "parts": parts, "parts_label": "seconds of one batch",
        "compiled": True, "replayed": True,
        "experts": "triton", "attention": "varlen", "memory": {**sizes, "measured": {**sizes, "label": "counted"}, "measured_peak": 18.5},
        "measured": {"layers": 6, "of_layers": 24, "tokens_per_batch": 1024, "of_tokens_per_batch": 1024, "batches": 2, "of_batches": 4,
                     "label": "scaled up"},
        "padding": {"tail": 0.01, "expert_rows": 0.0, "rectangle": 0.6},
        "bottleneck": {"part": "experts gemm 1", "share": 0.5, "key": "precision.kind", "why": "fewer bits compute faster"},
        "kernels_per_step": 964, "syncs_per_step": 1, "gpu_busy_share": 0.84, "idle_s": 0.011, "host_reads_per_step": 1,
        "kernels": {"experts' products": {"seconds": 0.03, "calls": 72}},
        "idle_gaps": {"over_10_us": 3, "longest": [{"seconds": 1e-3, "after": "k1", "before": "k2"}], "label": "traced"},
        "operators": [{"name": "kernel<float>", "calls": 3, "seconds": 1e-3}], "emulated": {},
        "predicted": {"b200": chip(error=0.08)}, "ratios": {},
        **more,
    }  # fmt: skip


def test_a_measured_profile(tmp_path):
    text, heads = read(write_profile_report(results(), tmp_path / "p.html"))
    assert heads == ["First bottleneck", "Where a step goes", "Roofline", "Memory", "On other chips, predicted"]
    for needed in ("Experts gemm 1, 50% of a step", "precision.kind", "a &lt;b&gt; &amp; c", "964", "84%", "idle 11 ms", "+8% here",
                   "by 5% in the median", "-26% at worst (a layer)",
                   "a data sheet", "low_gemm: 0.4500 (a guess)", "9 times measured on one h200 in bf16", "Untested on Blackwell",
                   "kernel&lt;float&gt;", "before k2", "6 of 24 layers", "of the published peak, 989 TFLOP/s"):  # fmt: skip
        assert needed in text, needed


def test_a_cpu_has_no_kernels_and_no_published_peak(tmp_path):
    cpu = {
        key: value for key, value in results(mfu=None, peak_flops=None).items() if key not in ("kernels", "kernels_per_step", "idle_gaps")
    }
    cpu["memory"]["measured_peak"] = None
    text, _ = read(write_profile_report(cpu, tmp_path / "p.html"))
    assert "Kinds of kernels" not in text and "published peak," not in text and "in closed form" in text


def test_a_precision_that_does_not_run(tmp_path):
    emulated = {
        "gemms": {"experts gemm 1": {"fprop": 0.037, "dgrad": 0.038, "wgrad": 0.039}}, "loss": 3.4,
        "gradients": {"embedding": 0.06},
        "gradients_over_layers": {"embedding": {"mean": 0.06, "worst": 0.06, "layer": None}},
        "gemms_bf16": {"experts gemm 1": {"fprop": 0.002, "dgrad": 0.002, "wgrad": 0.002}}, "loss_difference": -0.004,
        "label": "emulated bit for bit",
    }  # fmt: skip
    lacking = results(
        step_s=None,
        unmet_conditions=["Chip: this is no Blackwell."],
        emulated=emulated,
        left_out=["--trace"],
    )
    text, heads = read(write_profile_report(lacking, tmp_path / "p.html"))
    assert heads == ["Why bf16 does not run here", "Rounding, emulated", "On other chips, predicted"]
    for needed in (
        "Chip: this is no Blackwell.",
        "3.70% (0.20%)",
        "6.00%",
        "-0.0040",
        "not measured",
        "runs here: --trace.",
    ):
        assert needed in text


def test_what_was_never_measured_has_no_error(tmp_path):
    found = results()
    for chip in found["predicted"].values():
        chip |= {"model_error": None, "model_error_label": "not known; no time in bf16 was held against this model"}
        chip.pop("error", None)
    text = write_profile_report(found, tmp_path / "p.html").read_text()
    assert ">not known<" in text and "elsewhere not known; no time in bf16 was held against this model." in text


def test_a_dense_model_names_no_experts(tmp_path):
    shown = [write_profile_report(results(experts=experts), tmp_path / "p.html").read_text() for experts in ("grouped", None)]
    assert [("It ran with experts" in text, "of expert rows" in text) for text in shown] == [(True, True), (False, False)]


def test_bars_are_as_long_as_their_seconds():
    rows = [("forward", [Piece("a", 1.0, 0, 1.0), Piece("b", 3.0, 1, 1.0)]), ("backward", [Piece("c", 8.0, 2, 1.0)])]
    widths = [float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', time_bars("Bars", rows))]
    a, b, c = (width + 0.8 for width in widths)  # 0.8 pixels stay free between two
    assert b / a == pytest.approx(3, rel=0.01) and c / b == pytest.approx(8 / 3, rel=0.01)


def test_parts_of_a_batch_are_drawn_for_all_batches_in_their_order():
    drawn = pieces(results()["parts"], "forward_s", 2)
    assert [piece.name for piece in drawn] == ["norms", "attention", "experts gemm 1", "optimizer"]
    assert drawn[1].seconds == pytest.approx(8e-3)


def test_points_lie_at_their_work_below_the_roof():
    drawing = roofline("Roofline", results()["parts"], 780.0, 4300.0)
    points = {name: (float(x), float(y)) for x, y, name in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)".*?<title>([^:]+):', drawing)}
    assert set(points) == {"attention", "experts gemm 1"}
    path = re.search(r'class="line" stroke="var\(--ink\)" d="M([^"]+)"', drawing).group(1)
    (_, _), (ridge_x, roof_y), (_, flat_y) = [tuple(map(float, corner.split())) for corner in path.split("L")]
    assert roof_y == flat_y and all(y > roof_y for _, y in points.values())  # y grows downwards
    per_decade_x = (points["experts gemm 1"][0] - points["attention"][0]) / math.log10(4500 / 2000)
    per_decade_y = (points["attention"][1] - points["experts gemm 1"][1]) / math.log10(500 / (2e12 / 12e-3 / 1e12))
    assert points["attention"][0] - ridge_x == pytest.approx(per_decade_x * math.log10(2000 / (780e3 / 4300)), abs=0.5)
    assert points["experts gemm 1"][1] - roof_y == pytest.approx(per_decade_y * math.log10(780 / 500), abs=0.5)
    assert all(LEFT <= x <= EDGE and TOP <= y <= HEIGHT - BOTTOM for x, y in points.values())


def test_nothing_to_draw_is_no_figure():
    assert time_bars("Bars", [("forward", [])]) == "" and roofline("Roofline", {"norms": part(1.0, 1.0)}, 1.0, 1.0) == ""


@pytest.mark.parametrize(
    "value, shown", [(2.5, "2.5 s"), (0.0123, "12.3 ms"), (4e-5, "40 µs"), (None, "–"), (5000.0, "5,000 s"), (0.0, "0 µs")]
)
def test_times_are_read_in_their_unit(value, shown):
    assert seconds(value) == shown


def test_unwritable_output(tmp_path):
    with pytest.raises(RunError, match="cannot be written"):
        write_profile_report(results(), tmp_path / "no" / "p.html")
