"""How far the roofline model is from what was measured: the points it is held against, and its error at each.

All on one H200 with prediction made for the same load: MoE layers, forward and backward, of sequences of 1,024 tokens, with the
fused kernels (replayed) and with torch's grouped products compiled, in bf16 and in 8 bits; steps, replayed but for Transformer
Engine's, as in training (docs/benchmarks.md; some numbers there are of other runs). The model's efficiencies come from the kernels
of two of these steps, the rate of the experts' products from those of a third too, the rate of fp8_row's from the kernels of its
first layer, and the host's time for Transformer Engine from its three layers; all other points were only predicted.

`python benchmarks/profile_accuracy.py --only steps` prints new `STEPS`, `python benchmarks/fp8_gain.py` times fp8_row beside bf16.
"""

import functools
from statistics import median
from typing import NamedTuple

from bmoe import recipe as recipes
from bmoe.data.alphabet import alphabet
from bmoe.profiling import chips, predict
from bmoe.profiling.fit import with_values
from bmoe.profiling.work import Load
from bmoe.recipe import Recipe

MEASURED_ON = "h200"
EXPERTS = ("router", "dispatch", "experts gemm 1", "experts activation", "experts gemm 2", "combine")
PROTEINS = Load(16384, 16217, 7973417, 2432)  # of UniRef90's lengths


def full(tokens: int) -> Load:
    """Decoder's batch of sequences of 1,024 tokens, all but the last of which is a target."""
    return Load(tokens, tokens, tokens * 1024.0, tokens - tokens // 1024)


class Layer(NamedTuple):
    """A measured MoE layer without attention. moe: experts, top-k, expert width."""

    width: int
    heads: int
    moe: tuple[int, int, int]
    experts: str
    seconds: float
    precision: str = "bf16"
    tokens: int = 16384

    def __str__(self) -> str:
        count, top_k, expert_width = self.moe
        tokens = "" if self.tokens == 16384 else f", {self.tokens:,} tokens"
        return f"a layer of D {self.width}, {count} experts k{top_k} of F {expert_width} ({self.experts}, {self.precision}{tokens})"

    def predicted(self) -> float:
        """Seconds that the model gives."""
        experts, top_k, expert_width = self.moe
        moe = {"experts": experts, "top_k": top_k, "expert_width": expert_width}
        recipe = Recipe.model_validate(
            {
                "model": {"layers": 1, "width": self.width, "heads": self.heads, "moe": moe},
                "backend": {"experts": self.experts, "attention": "flash"}, "precision": {"kind": self.precision},
            }
        )  # fmt: skip
        parts = predict.part_seconds(recipe, 33, full(self.tokens), chips.find(MEASURED_ON))
        return sum(parts[name]["seconds"] for name in EXPERTS)


class Step(NamedTuple):
    """A measured training step of one batch: a shipped recipe and what was set, its mean batch, seconds."""

    settings: str
    load: Load
    seconds: float

    def recipe(self) -> Recipe:
        """The recipe that ran."""
        name, *settings = self.settings.split()
        recipe = recipes.load(recipes.find(name)[0], [f"training.tokens_per_step={self.load.tokens}", *settings])
        return with_values(recipe, "training", tokens_per_step=recipe.data.tokens_per_batch)

    @property
    def precision(self) -> str:
        return self.recipe().precision.kind

    def __str__(self) -> str:
        return f"a step of {self.settings}"

    def predicted(self) -> float:
        """Seconds that the model gives."""
        recipe = self.recipe()
        return predict.step(recipe, alphabet(recipe.data.alphabet).size, self.load, chips.find(MEASURED_ON))["step_s"]


LAYERS = (
    Layer(2048, 32, (8, 2, 5632), "triton", 10.80e-3),
    Layer(2048, 32, (8, 2, 5632), "triton", 21.61e-3, tokens=32768),
    Layer(1280, 20, (8, 2, 3584), "triton", 4.46e-3),
    Layer(1280, 20, (64, 8, 768), "triton", 4.28e-3),
    Layer(2048, 32, (8, 2, 5632), "grouped", 13.4e-3),
    Layer(1280, 20, (8, 2, 3584), "grouped", 6.17e-3),
    Layer(1280, 20, (64, 8, 768), "grouped", 7.37e-3),
    Layer(2048, 32, (8, 2, 5632), "triton", 9.47e-3, "fp8_row"),
    Layer(2048, 32, (8, 2, 5632), "triton", 18.07e-3, "fp8_row", tokens=32768),
    Layer(1280, 20, (8, 2, 3584), "triton", 4.20e-3, "fp8_row"),
    Layer(1280, 20, (64, 8, 768), "triton", 4.37e-3, "fp8_row"),
    Layer(2048, 32, (8, 2, 5632), "te", 15.05e-3, "fp8_current"),
    Layer(1280, 20, (8, 2, 3584), "te", 11.67e-3, "fp8_current"),
    Layer(1280, 20, (64, 8, 768), "te", 45.4e-3, "fp8_current"),
)

_ROW = " precision.kind=fp8_row"
_FLASH = "backend.experts=triton backend.attention=flash"
_TE = "backend.experts=te precision.kind=fp8_current"
_DECODER = "esm2_moe data.tokens_per_batch=16384 model.kind=decoder objective.kind=clm model.tie_head=false backend.experts=triton"
_SMALL = f"{_DECODER} model.layers=12 model.width=1024 model.heads=16 model.moe.expert_width=2816"
_WIDE = (
    "esm2_moe model.kind=decoder objective.kind=clm model.layers=4 model.width=2048 model.heads=16 model.moe.expert_width=5632 "
    f"data.tokens_per_batch=32768 {_FLASH}"
)
STEPS = (
    Step(f"{_SMALL} backend.attention=flash", full(16384), 62.9e-3),
    Step(f"{_SMALL} backend.attention=varlen", full(16384), 67.7e-3),
    Step(
        f"{_DECODER} model.layers=8 model.moe.experts=64 model.moe.top_k=8 model.moe.expert_width=768 backend.attention=flash",
        full(16384),
        66.4e-3,
    ),
    Step(
        "esm2_moe_8m data.tokens_per_batch=65536 backend.experts=triton backend.attention=varlen",
        Load(65536, 65257, 31295848, 9788),
        33.8e-3,
    ),
    Step("esm2_moe data.tokens_per_batch=16384 model.layers=6 backend.experts=triton backend.attention=flash", PROTEINS, 43.3e-3),
    Step("protein_moe_fine model.layers=6 backend.experts=triton backend.attention=varlen", PROTEINS, 50.5e-3),
    Step("genome_mixtral model.layers=8 backend.experts=triton backend.attention=flash", Load(16384, 16381, 67084291, 16381), 50.6e-3),
    Step(
        f"esm2_moe data.tokens_per_batch=16384 model.layers=12 model.width=1024 model.heads=16 model.moe.expert_width=2816 {_FLASH}",
        PROTEINS,
        60.0e-3,
    ),
    Step(
        f"esm2_moe data.tokens_per_batch=16384 model.layers=4 model.width=2048 model.heads=32 model.moe.expert_width=5632 {_FLASH}",
        PROTEINS,
        68.3e-3,
    ),
    Step(_WIDE, full(32768), 124.2e-3),
    Step(_WIDE + _ROW, full(32768), 107.4e-3),
    Step(f"esm2_moe_8m data.tokens_per_batch=65536 backend.attention=varlen {_TE}", Load(65536, 65257, 31295848, 9788), 124.7e-3),
    Step(f"esm2_moe data.tokens_per_batch=16384 model.layers=6 {_TE}", PROTEINS, 97.8e-3),
    Step(f"protein_moe_fine model.layers=6 backend.attention=varlen {_TE}", PROTEINS, 176.0e-3),
    Step(f"genome_mixtral model.layers=8 {_TE}", Load(16384, 16381, 67084291, 16381), 114.4e-3),
    Step(
        f"esm2_moe data.tokens_per_batch=16384 model.layers=12 model.width=1024 model.heads=16 model.moe.expert_width=2816 {_TE}",
        PROTEINS,
        138.3e-3,
    ),
    Step(
        f"esm2_moe data.tokens_per_batch=16384 model.layers=4 model.width=2048 model.heads=32 model.moe.expert_width=5632 {_TE}",
        PROTEINS,
        77.7e-3,
    ),
)

Point = Layer | Step


def errors() -> dict[Point, float]:
    """Predicted over measured, less 1, of every point."""
    return {point: point.predicted() / point.seconds - 1 for point in (*LAYERS, *STEPS)}


def gains() -> dict[Point, tuple[float, float]]:
    """fp8_row's speed-up over bf16, measured and predicted, of every layer and step that was timed in both, in turns."""

    def in_bf16(point: Point) -> Point:
        if isinstance(point, Layer):
            return point._replace(precision="bf16", seconds=0.0)
        return point._replace(settings=point.settings.removesuffix(_ROW), seconds=0.0)

    points = (*LAYERS, *STEPS)
    bf16 = {in_bf16(point): point for point in points if point.precision == "bf16"}
    pairs = [(bf16[in_bf16(point)], point) for point in points if point.precision == "fp8_row"]
    return {low: (one.seconds / low.seconds, one.predicted() / low.predicted()) for one, low in pairs}


def in_words(known: dict | None, precision: str) -> str:
    """A `known_error` of predictions in `precision` as a sentence without its end."""
    if known is None:
        return f"not known; no time in {precision} as it would run here was held against this model"
    return (
        f"{known['points']} times measured on one {known['on']} in {known['precision']} differ from this model by "
        f"{known['median']:.0%} in the median, by {known['worst']:+.0%} at worst ({known['where']})"
    )


@functools.cache
def known_error(kind: str) -> dict | None:
    """{points, on, precision, median, worst, where}: absolute relative errors of the model on the chip where it was held against
    times, in bf16 or in 8 bits, which stand for 4 bits too; None in fp32, which was not measured."""
    if kind == "fp32":
        return None
    low = kind in predict.LOW
    chosen = {point: error for point, error in errors().items() if (point.precision in predict.LOW) is low}
    worst = max(chosen, key=lambda point: abs(chosen[point]))
    middle = median(abs(error) for error in chosen.values())
    facts = {"points": len(chosen), "on": MEASURED_ON, "precision": "8 bits" if low else "bf16"}
    return facts | {"median": middle, "worst": chosen[worst], "where": str(worst)}
