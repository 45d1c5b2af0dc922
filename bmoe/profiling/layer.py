"""One MoE layer, forward + backward: ours beside Hugging Face's, same shapes, same process, same routing.

A layer is everything between its input and its output: router, dispatch, experts, combine. TFLOP/s count the expert
GEMMs only: 3 passes x 2 x T x K x 3 x D x F. The peak is an 8192^3 bf16 matrix product timed in the same process.

Shapes: T tokens, D width, F expert width, E experts, K top-k.

The contestants
    hf-loop              transformers' MixtralSparseMoeBlock, experts one after the other
    hf-grouped           the same with `grouped_mm`
    hf-grouped-compiled  the same under torch.compile: the strongest thing a user has
    loop, grouped, te, triton   ours under torch.compile where there is a GPU; te and triton with :fp8_row and the like behind
                         the name compute in that precision
All are timed in turns, so that the chip's temperature and clock favour none, and a timing spans several steps in a row
(`STEPS`), so that the host runs ahead of the device as it does in training.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from bmoe.errors import RequestError
from bmoe.model.experts import KINDS, build_experts

STEPS = 4
"""Steps of one timing on a GPU."""

BASELINES = ("hf-loop", "hf-grouped", "hf-grouped-compiled")


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one MoE layer and the tokens of one forward pass."""

    tokens: int
    width: int
    expert_width: int
    experts: int
    top_k: int

    @property
    def name(self) -> str:
        return f"H{self.width} F{self.expert_width} {self.experts}e k{self.top_k} T{self.tokens}"

    @property
    def flops(self) -> int:
        """Of the expert GEMMs of one forward and backward pass."""
        return 3 * 2 * self.tokens * self.top_k * 3 * self.width * self.expert_width


SHAPES = (
    LayerShape(16384, 2048, 5632, 8, 2),
    LayerShape(16384, 1280, 3584, 8, 2),
    LayerShape(16384, 1280, 768, 64, 8),
)
"""Eight wide experts (two widths) and 64 fine ones: the shapes of docs/kernels.md."""


@dataclass(frozen=True)
class LayerTiming:
    """Milliseconds of one forward and backward pass (median, fastest, slowest) and what follows from them."""

    shape: str
    contestant: str
    balanced: bool
    milliseconds: float
    fastest: float
    slowest: float
    tflops: float
    fraction_of_peak: float | None
    peak_memory_gib: float | None

    def as_dict(self) -> dict:
        return asdict(self)


class Layer(nn.Module):
    """Our router and experts as `bmoe train` runs them; `choice_TK` replaces the router's choice where given."""

    def __init__(self, kind: str, shape: LayerShape, choice_TK: Tensor | None = None, precision: str = "bf16"):
        super().__init__()
        self.shape, self.choice_TK = shape, choice_TK
        self.router = nn.Parameter(torch.randn(shape.experts, shape.width) * 0.02)
        self.experts = build_experts(kind, shape.experts, shape.width, shape.expert_width, precision=precision)
        self.register_buffer("bias_E", torch.zeros(shape.experts), persistent=False)
        self.register_buffer("real_tokens", torch.tensor(shape.tokens), persistent=False)

    def cast(self, device: torch.device, dtype: torch.dtype) -> "Layer":
        """Experts to `dtype`; the router stays fp32."""
        self.experts.to(dtype)
        return self.to(device)

    def forward(self, x_TD: Tensor) -> Tensor:
        if x_TD.is_cuda:
            from bmoe.kernels.router import route
        else:
            route = _route_on_cpu
        experts_TK, weights_TK = route(x_TD, self.router, self.bias_E, self.real_tokens, self.shape.top_k)[:2]
        return self.experts(x_TD, experts_TK if self.choice_TK is None else self.choice_TK, weights_TK)


def _route_on_cpu(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, real_tokens: Tensor, k: int) -> tuple[Tensor, Tensor]:
    scores_TE = (x_TD.to(weight_ED.dtype) @ weight_ED.T).softmax(-1)
    weights_TK, experts_TK = (scores_TE + bias_E).topk(k, dim=-1)
    return experts_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


def balanced_choice(shape: LayerShape, device: torch.device | str) -> Tensor:
    """experts_TK that loads every expert equally (up to one row) with K distinct experts per token."""
    slots_TK = torch.arange(shape.tokens * shape.top_k, device=device).view(shape.tokens, shape.top_k)
    return slots_TK % shape.experts


def hugging_face_block(implementation: str, shape: LayerShape, choice_TK: Tensor | None) -> nn.Module:
    """transformers' Mixtral block with `_experts_implementation` = eager | grouped_mm, weights from N(0, 0.02^2)."""
    try:
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    except ImportError as error:
        raise RequestError("the Hugging Face baseline needs transformers; install bmoe[hf].") from error
    config = MixtralConfig(
        hidden_size=shape.width,
        intermediate_size=shape.expert_width,
        num_local_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    config._experts_implementation = implementation
    block = MixtralSparseMoeBlock(config)
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.02)
    if choice_TK is not None:
        block.gate.register_forward_hook(lambda _module, _inputs, output: (*output[:2], choice_TK))
    return block


def contestant(name: str, shape: LayerShape, device: torch.device, dtype: torch.dtype, balanced: bool) -> tuple[nn.Module, Callable]:
    """(module that owns the parameters, function of x_TD) for one of BASELINES or our KINDS, with `:precision` behind it."""
    choice_TK = balanced_choice(shape, device) if balanced else None
    if name in BASELINES:
        block = hugging_face_block("eager" if name == "hf-loop" else "grouped_mm", shape, choice_TK).to(device, dtype)
        run = torch.compile(block) if name == "hf-grouped-compiled" else block
        return block, lambda x_TD: _first(run(x_TD[None])).reshape_as(x_TD)
    kind, _, precision = name.partition(":")
    if kind not in KINDS:
        raise RequestError(f"unknown expert implementation {name!r}; choose from {', '.join((*KINDS, *BASELINES))}.")
    layer = Layer(kind, shape, choice_TK, precision or "bf16").cast(device, dtype)
    compiled = device.type == "cuda" and name != "loop"
    return layer, torch.compile(layer) if compiled else layer


def _first(output: Tensor | tuple) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def time_ms(step: Callable[[], object], device: torch.device, steps: int = 1) -> float:
    """Milliseconds per call over `steps` calls: device events on a GPU, the clock elsewhere."""
    if device.type != "cuda":
        start = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - start) * 1e3 / steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / steps


def matmul_peak(device: torch.device, size: int = 8192, repeats: int = 20) -> float:
    """TFLOP/s of a size^3 bf16 matrix product on random data: the ceiling that fractions refer to."""
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = [time_ms(lambda: left @ right, device, STEPS) for _ in range(repeats + 3)][3:]
    return 2 * size**3 / statistics.median(times) / 1e9


def measure(
    shape: LayerShape,
    names: Iterable[str],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    balanced: bool = False,
    repeats: int = 20,
    warmup: int = 4,
    peak_tflops: float | None = None,
) -> list[LayerTiming]:
    """Forward + backward of every contestant in turns; gradients are dropped before each step, as a fresh step does."""
    torch.manual_seed(0)
    x_TD = torch.randn(shape.tokens, shape.width, device=device, dtype=dtype, requires_grad=True)
    dy_TD = torch.randn_like(x_TD)
    steps, memory = {}, {}
    for name in names:
        torch.manual_seed(1)
        module, run = contestant(name, shape, device, dtype, balanced)
        steps[name] = _step_of(module, run, x_TD, dy_TD)
        memory[name] = _warm_up(steps[name], warmup, device)
    times = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            times[name].append(time_ms(step, device, STEPS if device.type == "cuda" else 1))
    return [_timing(shape, name, balanced, times[name], memory[name], peak_tflops) for name in steps]


def _step_of(module: nn.Module, run: Callable, x_TD: Tensor, dy_TD: Tensor) -> Callable[[], None]:
    def step() -> None:
        module.zero_grad(set_to_none=True)
        x_TD.grad = None
        run(x_TD).backward(dy_TD)

    return step


def _warm_up(step: Callable[[], None], warmup: int, device: torch.device) -> float | None:
    """Run the step until everything is compiled; returns its own peak memory in GiB (weights and gradients included)."""
    for _ in range(warmup):
        step()
    if device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _timing(shape: LayerShape, name: str, balanced: bool, times: list[float], memory: float | None, peak: float | None) -> LayerTiming:
    median = statistics.median(times)
    tflops = shape.flops / median / 1e9
    fraction = None if peak is None else tflops / peak
    return LayerTiming(shape.name, name, balanced, median, min(times), max(times), tflops, fraction, memory)
