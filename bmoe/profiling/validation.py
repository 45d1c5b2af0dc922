"""How far the roofline model is from what was measured: the points it is held against, and its error at each.

All on one H200 (bf16, T = 16,384 tokens in sequences of 1,024): MoE layers, forward and backward, with the fused kernels and
with torch's grouped products compiled (as in docs/kernels.md); whole training steps of decoders, replayed (as in
docs/benchmarks.md; some numbers there are of other runs). The model's efficiencies come from the kernels of two of these
steps, so the steps say less about it than the layers.
"""

import functools
from statistics import median
from typing import NamedTuple

from bmoe.profiling import chips, predict
from bmoe.profiling.work import Load
from bmoe.recipe import Recipe

MEASURED_ON = "h200"
EXPERTS = ("router", "dispatch", "experts gemm 1", "experts activation", "experts gemm 2", "combine")
BATCH, STEP = Load(16384, 16384, 16384 * 1024.0, 2458), Load(16384, 16384, 16384 * 1024.0, 16368)


class Point(NamedTuple):
    """A measured time: layers 0 is one MoE layer without attention. moe: experts, top-k, expert width."""

    layers: int
    width: int
    heads: int
    moe: tuple[int, int, int]
    experts: str
    attention: str
    seconds: float

    def __str__(self) -> str:
        count, top_k, expert_width = self.moe
        what = f"a step of {self.layers} layers ({self.attention})" if self.layers else "a layer"
        return f"{what} of D {self.width}, {count} experts k{top_k} of F {expert_width} ({self.experts})"


POINTS = (
    Point(0, 2048, 32, (8, 2, 5632), "triton", "flash", 11.26e-3),
    Point(0, 1280, 20, (8, 2, 3584), "triton", "flash", 4.78e-3),
    Point(0, 1280, 20, (64, 8, 768), "triton", "flash", 4.94e-3),
    Point(0, 2048, 32, (8, 2, 5632), "grouped", "flash", 13.4e-3),
    Point(0, 1280, 20, (8, 2, 3584), "grouped", "flash", 6.17e-3),
    Point(0, 1280, 20, (64, 8, 768), "grouped", "flash", 7.37e-3),
    Point(12, 1024, 16, (8, 2, 2816), "triton", "flash", 62.9e-3),
    Point(12, 1024, 16, (8, 2, 2816), "triton", "varlen", 67.7e-3),
    Point(8, 1280, 20, (64, 8, 768), "triton", "flash", 66.4e-3),
)


def predicted(point: Point) -> float:
    """Seconds that the model gives for a point."""
    experts, top_k, expert_width = point.moe
    moe = {"experts": experts, "top_k": top_k, "expert_width": expert_width}
    model = {"kind": "decoder", "layers": max(1, point.layers), "width": point.width, "heads": point.heads, "tie_head": False, "moe": moe}
    recipe = Recipe.model_validate(
        {
            "model": model, "objective": {"kind": "clm"}, "backend": {"experts": point.experts, "attention": point.attention},
            "data": {"tokens_per_batch": 16384}, "training": {"tokens_per_step": 16384},
        }
    )  # fmt: skip
    chip = chips.find(MEASURED_ON)
    if point.layers:
        return predict.step(recipe, 33, STEP, chip)["step_s"]
    parts = predict.part_seconds(recipe, 33, BATCH, chip)
    return sum(parts[name]["seconds"] for name in EXPERTS)


def errors() -> dict[Point, float]:
    """Predicted over measured, less 1, of every point."""
    return {point: predicted(point) / point.seconds - 1 for point in POINTS}


@functools.cache
def known_error() -> dict:
    """{points, on, median, worst, where}: absolute relative errors of the model on the chip where it was held against times."""
    found = errors()
    worst = max(found, key=lambda point: abs(found[point]))
    middle = median(abs(error) for error in found.values())
    return {"points": len(found), "on": MEASURED_ON, "median": middle, "worst": found[worst], "where": str(worst)}
