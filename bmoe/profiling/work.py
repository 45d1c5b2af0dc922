"""How much arithmetic and memory traffic each part of a training step is, in closed form.

The one source for achieved TFLOP/s and GB/s (`measure`) and for predictions (`predict`). Arithmetic counts
multiply-adds of matrix products as 2. Traffic counts every tensor that a part must read or write once, with elementwise
operations fused into passes, as compiled code does them; caches that keep a tensor between two parts are not counted.

Legend: T token slots, R real tokens, D width, H heads, G key and value heads, d head dimension, L layers, V vocabulary,
F expert width, C = 2F (swiglu) or F (gelu), E experts, K top-k, N = R x K routed rows, M rows the head runs on.
"""

from dataclasses import dataclass
from typing import NamedTuple

from bmoe.model import counts
from bmoe.model.layers import default_ffn_width
from bmoe.recipe import ModelSection, ParallelSection

FLASH_BACKWARD = 2.5  # backward of flash attention over its forward: five products instead of two (Dao 2023)


class Work(NamedTuple):
    """Arithmetic in FLOP, memory traffic in bytes, and kernels launched."""

    flops: float = 0.0
    bytes: float = 0.0
    kernels: float = 0.0

    def times(self, n: float) -> "Work":
        """n such works."""
        return Work(self.flops * n, self.bytes * n, self.kernels * n)

    def plus(self, other: "Work") -> "Work":
        """Both works."""
        return Work(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Load:
    """One packed batch: slots T, real tokens R, pairs = sum of squared sequence lengths, targets M of the head."""

    tokens: int
    real: int
    pairs: float
    targets: int


class Part(NamedTuple):
    """Forward and backward work of a part, over all layers of one batch; `matrix` parts run on tensor cores."""

    forward: Work
    backward: Work
    matrix: str | None = None  # "gemm", "grouped" or "attention": which efficiency applies


def _gemm(rows: float, inputs: int, outputs: int, b: int, matrices: int = 1) -> tuple[Work, Work]:
    """Forward and backward of [rows, inputs] x [inputs, outputs] (`matrices` weights in all)."""
    flops = 2.0 * rows * inputs * outputs
    weights, x, y = matrices * inputs * outputs * b, rows * inputs * b, rows * outputs * b
    return Work(flops, weights + x + y, 1), Work(2 * flops, 2 * (weights + x + y), 2)


def _sum(*works: Work) -> Work:
    total = Work()
    for work in works:
        total = total.plus(work)
    return total


def scores(model: ModelSection, load: Load) -> float:
    """FLOP of softmax(q k) v in one layer, forward, as masked."""
    return 4.0 * load.pairs * model.width * (0.5 if model.kind == "decoder" else 1.0)


def scores_share(model: ModelSection, load: Load) -> float:
    """Share of attention's arithmetic, forward and backward, that grows with the sequences' length; the rest is its projections."""
    part = layer_parts(model, load, 2)[0]["attention"]
    return (1 + FLASH_BACKWARD) * scores(model, load) / (part.forward.flops + part.backward.flops)


def layer_parts(model: ModelSection, load: Load, b: int) -> tuple[dict[str, Part], dict[str, Part]]:
    """Parts of one block: those every block has, and those of its feed-forward as (common, moe or dense)."""
    T, D = load.tokens, model.width
    qkv = D + 2 * (model.kv_heads or model.heads) * (D // model.heads)
    stream = T * D * b
    into, out = _gemm(T, D, qkv, b), _gemm(T, D, D, b)
    core = scores(model, load)
    around = Work(0, T * qkv * b * 3 + stream * 2, 4)
    common = {
        "norms": Part(Work(0, 8 * stream, 4), Work(0, 10 * stream, 4)),
        "attention": Part(
            _sum(into[0], out[0], Work(core), around), _sum(into[1], out[1], Work(FLASH_BACKWARD * core), around.times(2)), "attention"
        ),
    }
    if model.moe is None:
        return common, {}
    moe = model.moe
    N, F, E = load.real * moe.top_k, moe.expert_width, moe.experts
    C = 2 * F if model.ffn == "swiglu" else F
    router = 2.0 * T * D * E
    first, second = _gemm(N, D, C, b, E), _gemm(N, F, D, b, E)
    parts = {
        "router": Part(Work(router, T * D * (b + 8) + 6 * T * E * 4, 12), Work(2 * router, 2 * T * D * (b + 8) + 8 * T * E * 4, 16)),
        "dispatch": Part(Work(0, stream + N * D * b, 6), Work(0, stream + N * D * b, 1)),
        "experts gemm 1": Part(*first, "grouped"),
        "experts activation": Part(Work(0, N * (C + F) * b, 1), Work(0, N * (2 * C + 2 * F) * b, 2)),
        "experts gemm 2": Part(*second, "grouped"),
        "combine": Part(Work(0, stream + N * D * b, 1), Work(0, stream + N * D * b, 1)),
    }
    if moe.shared_experts:
        parts["shared expert"] = _dense(model, T, moe.shared_experts * F, b)
    return common, parts


def _dense(model: ModelSection, rows: int, hidden: int, b: int) -> Part:
    """A dense feed-forward of width `hidden`."""
    C = 2 * hidden if model.ffn == "swiglu" else hidden
    first, second = _gemm(rows, model.width, C, b), _gemm(rows, hidden, model.width, b)
    forward = _sum(first[0], second[0], Work(0, rows * (C + hidden) * b, 1))
    backward = _sum(first[1], second[1], Work(0, rows * (2 * C + 2 * hidden) * b, 2))
    return Part(forward, backward, "gemm")


def batch_parts(model: ModelSection, vocabulary: int, load: Load, b: int) -> dict[str, Part]:
    """Part name -> work of the forward and backward pass of one batch; b bytes per element of activations and weights."""
    T, D, M = load.tokens, model.width, load.targets
    common, moe = layer_parts(model, load, b)
    dense_layers = model.layers if model.moe is None else model.moe.dense_layers
    parts = {"embedding": Part(Work(0, 3 * T * D * b, 8), Work(0, T * D * b + vocabulary * D * b, 6))}
    for name, part in common.items():
        parts[name] = Part(part.forward.times(model.layers), part.backward.times(model.layers), part.matrix)
    if dense_layers:
        hidden = model.ffn_width or default_ffn_width(model.ffn, D)
        part = _dense(model, T, hidden, b)
        parts["ffn"] = Part(part.forward.times(dense_layers), part.backward.times(dense_layers), "gemm")
    for name, part in moe.items():
        count = model.layers - dense_layers
        parts[name] = Part(part.forward.times(count), part.backward.times(count), part.matrix)
    decoder = _gemm(M, D, vocabulary, b)
    head = [decoder]
    if model.kind == "encoder":
        head.append(_gemm(M, D, D, b))
    small = Work(0, M * vocabulary * (b + 8) + 4 * M * D * b, 8)
    parts["head + loss"] = Part(_sum(small, *(h[0] for h in head)), _sum(small, *(h[1] for h in head)), "gemm")
    return parts


class Parameters(NamedTuple):
    """Numbers of parameters as memory and optimizer see them: matrices outside the experts, matrices of the experts, and
    what is always fp32 (vectors and routers)."""

    dense: int
    experts: int
    wide: int


def parameters(model: ModelSection, vocabulary: int) -> Parameters:
    """`counts.parameters` in three shares."""
    count, moe = counts.parameters(model, vocabulary), model.moe
    gates = 2 if model.ffn == "swiglu" else 1
    experts = (model.layers - moe.dense_layers) * moe.experts * (gates + 1) * model.width * moe.expert_width if moe else 0
    return Parameters(count.total - count.wide - experts, experts, count.wide)


class Layout(NamedTuple):
    """How `world` GPUs share a model: whole copies, ranks that share parameters, ranks that share experts."""

    replicate: int
    shard: int
    expert: int


def layout(parallel: ParallelSection, world: int) -> Layout:
    """The recipe's layout on `world` GPUs; where it does not divide them (a smaller `world`), all share everything."""
    fixed = parallel.data_replicate * parallel.expert
    if world % fixed or (parallel.data_shard != "auto" and fixed * parallel.data_shard != world):
        return Layout(1, world, 1)
    return Layout(parallel.data_replicate, world // fixed, parallel.expert)


def model_flops(model: ModelSection, vocabulary: int, load: Load) -> float:
    """FLOP of forward and backward that the model asks for: what MFU counts (real tokens, no recomputation)."""
    return counts.training_flops(model, vocabulary, load.real, load.pairs, load.targets)
