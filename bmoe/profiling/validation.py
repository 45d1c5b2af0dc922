"""How far the roofline model is from what was measured: the points it is held against, and its error at each.

All on one H200 with prediction made for the same load: MoE layers, forward and backward, with the fused kernels and with
torch's grouped products compiled, in bf16 and in 8 bits (as in docs/kernels.md; T = 16,384 tokens in sequences of 1,024); steps,
replayed where training replays them (docs/benchmarks.md; some numbers there are of other runs). The model's efficiencies
come from the kernels of two of these steps, so the steps say less about it than the layers.

`python benchmarks/profile_accuracy.py --only steps` prints new `STEPS`.
"""

import functools
from statistics import median
from typing import NamedTuple

from bmoe import recipe as recipes
from bmoe.data.alphabet import alphabet
from bmoe.profiling import chips, predict
from bmoe.profiling.work import Load
from bmoe.recipe import Recipe

MEASURED_ON = "h200"
EXPERTS = ("router", "dispatch", "experts gemm 1", "experts activation", "experts gemm 2", "combine")
PROTEINS = Load(16384, 16217, 7973417, 2432)  # of UniRef90's lengths
FULL, TARGETS = Load(16384, 16384, 16384 * 1024.0, 2458), Load(16384, 16384, 16384 * 1024.0, 16368)


class Layer(NamedTuple):
    """A measured MoE layer without attention. moe: experts, top-k, expert width."""

    width: int
    heads: int
    moe: tuple[int, int, int]
    experts: str
    seconds: float
    precision: str = "bf16"

    def __str__(self) -> str:
        count, top_k, expert_width = self.moe
        return f"a layer of D {self.width}, {count} experts k{top_k} of F {expert_width} ({self.experts}, {self.precision})"

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
        parts = predict.part_seconds(recipe, 33, FULL, chips.find(MEASURED_ON))
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
        training = recipe.training.model_copy(update={"tokens_per_step": recipe.data.tokens_per_batch})
        return recipe.model_copy(update={"training": training})

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
    Layer(2048, 32, (8, 2, 5632), "triton", 11.26e-3),
    Layer(1280, 20, (8, 2, 3584), "triton", 4.78e-3),
    Layer(1280, 20, (64, 8, 768), "triton", 4.94e-3),
    Layer(2048, 32, (8, 2, 5632), "grouped", 13.4e-3),
    Layer(1280, 20, (8, 2, 3584), "grouped", 6.17e-3),
    Layer(1280, 20, (64, 8, 768), "grouped", 7.37e-3),
    Layer(2048, 32, (8, 2, 5632), "triton", 10.63e-3, "fp8_row"),
    Layer(1280, 20, (8, 2, 3584), "triton", 4.73e-3, "fp8_row"),
    Layer(1280, 20, (64, 8, 768), "triton", 4.80e-3, "fp8_row"),
    Layer(2048, 32, (8, 2, 5632), "te", 15.05e-3, "fp8_current"),
    Layer(1280, 20, (8, 2, 3584), "te", 11.67e-3, "fp8_current"),
    Layer(1280, 20, (64, 8, 768), "te", 45.4e-3, "fp8_current"),
)

_FLASH = "backend.experts=triton backend.attention=flash"
_DECODER = "esm2_moe model.kind=decoder objective.kind=clm model.tie_head=false backend.experts=triton"
_SMALL = f"{_DECODER} model.layers=12 model.width=1024 model.heads=16 model.moe.expert_width=2816"
STEPS = (
    Step(f"{_SMALL} backend.attention=flash", TARGETS, 62.9e-3),
    Step(f"{_SMALL} backend.attention=varlen", TARGETS, 67.7e-3),
    Step(
        f"{_DECODER} model.layers=8 model.moe.experts=64 model.moe.top_k=8 model.moe.expert_width=768 backend.attention=flash",
        TARGETS,
        66.4e-3,
    ),
    Step(
        "esm2_moe_8m data.tokens_per_batch=65536 backend.experts=triton backend.attention=varlen",
        Load(65536, 65257, 31295848, 9788),
        33.8e-3,
    ),
    Step("esm2_moe model.layers=6 backend.experts=triton backend.attention=flash", PROTEINS, 43.3e-3),
    Step("protein_moe_fine model.layers=6 backend.experts=triton backend.attention=varlen", PROTEINS, 50.5e-3),
    Step("genome_mixtral model.layers=8 backend.experts=triton backend.attention=flash", Load(16384, 16381, 67084291, 16381), 50.6e-3),
    Step(
        f"esm2_moe model.layers=12 model.width=1024 model.heads=16 model.moe.expert_width=2816 {_FLASH}",
        PROTEINS,
        60.0e-3,
    ),
    Step(
        f"esm2_moe model.layers=4 model.width=2048 model.heads=32 model.moe.expert_width=5632 {_FLASH}",
        PROTEINS,
        68.3e-3,
    ),
)

Point = Layer | Step


def errors() -> dict[Point, float]:
    """Predicted over measured, less 1, of every point."""
    return {point: point.predicted() / point.seconds - 1 for point in (*LAYERS, *STEPS)}


@functools.cache
def known_error(eight_bits: bool = False) -> dict:
    """{points, on, precision, median, worst, where}: absolute relative errors of the model on the chip where it was held against
    times, in bf16 or in 8 bits; those of bf16 where nothing was measured in 8 bits."""
    found = errors()
    low = {point: error for point, error in found.items() if point.precision in predict.LOW}
    chosen = low if eight_bits and low else {point: error for point, error in found.items() if point not in low}
    worst = max(chosen, key=lambda point: abs(chosen[point]))
    middle = median(abs(error) for error in chosen.values())
    precision = "8 bits" if chosen is low else "bf16"
    facts = {"points": len(chosen), "on": MEASURED_ON, "precision": precision}
    return facts | {"median": middle, "worst": chosen[worst], "where": str(worst)}
