"""What rounding to a low precision does to a recipe, by bit-exact emulation on one layer and few tokens.

The layer runs in fp32 on the recipe's own dimensions, initial weights and data. Each GEMM of the experts is repeated on
the same inputs with rounded ones, for its three products; then the whole layer runs once more with every GEMM rounded, and
the gradients of its parameters are compared. Errors are relative in the Frobenius norm against fp32. bf16 inputs are
shown beside, the error that training lives with today.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from bmoe.data.loader import build_batch, build_sampler
from bmoe.data.packing import Batch
from bmoe.data.sampler import Position
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.precision.emulate import KINDS, EmulatedProduct, emulate
from bmoe.recipe import HighPrecisionSection, Recipe

MOST_TOKENS = 2048
FEWEST_TOKENS = 256
SECONDS = 15.0
PASSES = 14  # forward products that the comparison costs, all told


def error(got: Tensor, exact: Tensor) -> float:
    """|got - exact| / |exact| in the Frobenius norm."""
    return float((got - exact).norm() / exact.norm().clamp(min=1e-30))


class _Bf16Product:
    """The product with inputs rounded to bf16, forward and backward."""

    def __init__(self, product):
        self.product = product

    def __call__(self, x: Tensor, w: Tensor, *offsets: Tensor) -> Tensor:
        y = self.product(_straight(x), _straight(w), *offsets)
        return _RoundGradient.apply(y)


def _straight(x: Tensor) -> Tensor:
    """x rounded to bf16, with the gradient of the identity."""
    return x + (x.bfloat16().to(x.dtype) - x).detach()


class _RoundGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx, dy: Tensor) -> Tensor:
        return dy.bfloat16().to(dy.dtype)


class _Compare:
    """Stands in for a product in the exact run: notes its inputs and its output's gradient, then compares."""

    def __init__(self, product):
        self.product, self.seen = product, []

    def __call__(self, x: Tensor, w: Tensor, *offsets: Tensor) -> Tensor:
        y = self.product(x, w, *offsets)
        call = [x.detach(), w.detach(), offsets, None]
        self.seen.append(call)
        y.register_hook(lambda dy: call.__setitem__(3, dy.detach()))
        return y

    def errors(self, other) -> list[dict[str, float]]:
        """fprop, dgrad and wgrad errors of each call against the exact product."""
        found = []
        for x, w, offsets, dy in self.seen:
            results = []
            for product in (self.product, other):
                inputs = x.clone().requires_grad_(), w.clone().requires_grad_()
                y = product(*inputs, *offsets)
                if offsets:  # rows beyond the last offset are undefined
                    y = torch.where(torch.arange(y.shape[0], device=y.device)[:, None] < offsets[0][-1], y, 0)
                results.append((y.detach(), *torch.autograd.grad(y, inputs, dy)))
            found.append({name: error(b, a) for name, a, b in zip(("fprop", "dgrad", "wgrad"), *results, strict=True)})
        return found


def _one_layer(recipe: Recipe, vocabulary: Vocabulary, device: torch.device) -> Transformer:
    model = recipe.model
    moe = model.moe.model_copy(update={"dense_layers": 0}) if model.moe else None
    section = model.model_copy(update={"layers": 1, "moe": moe})
    backend = recipe.backend.model_copy(update={"experts": "grouped", "attention": "sdpa", "compile": False, "recompute": "none"})
    with device:
        built = Transformer(section, vocabulary, backend)
    built.initialize(recipe.seed)
    return built


def _gradients(model: nn.Module, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    out = model(**batch.model_inputs(), jitter_key=0)
    loss = functional.cross_entropy(out.logits, batch.picked_M, ignore_index=-100, reduction="sum") / max(batch.targets, 1)
    model.zero_grad(set_to_none=True)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def affordable_tokens(recipe: Recipe, tflops: float) -> int:
    """Token slots whose comparison takes at most about `SECONDS` at `tflops`, between 256 and 2,048."""
    moe, D = recipe.model.moe, recipe.model.width
    hidden = moe.top_k * moe.expert_width if moe else 4 * D
    per_token = PASSES * 2 * (3 * D * hidden + 4 * D * D)
    tokens = FEWEST_TOKENS
    while tokens < MOST_TOKENS and 2 * tokens * per_token / (tflops * 1e12) < SECONDS:
        tokens *= 2
    return min(tokens, recipe.data.tokens_per_batch)


def emulated(recipe: Recipe, shards, device: torch.device, tflops: float) -> dict:
    """Errors of the recipe's precision, by emulation. `tflops`: what this device reaches in fp32 products."""
    kind, label = recipe.precision.kind, f"one of {recipe.model.layers} layers, initial weights"
    if kind not in KINDS:
        return {"label": f"{kind} is not emulated: its scales depend on the steps before"} if kind.startswith("fp8") else {}
    tokens = affordable_tokens(recipe, tflops)
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": min(recipe.data.max_length, tokens)})})
    crops, _ = next(build_sampler(shards, recipe, recipe.seed, "sequence").batches(Position(0, 0), tokens))
    batch = build_batch(shards, crops, recipe, recipe.seed, slots=tokens).to(device)
    letters = shards.alphabet
    model = _one_layer(recipe, Vocabulary(letters.size, letters.pad_id, letters.mask_id), device).train()
    gemms, bf16 = {}, {}
    compare = None
    if recipe.model.moe:
        experts = model.blocks[0].ffn.experts
        exact_product = experts.matmul
        experts.matmul = compare = _Compare(exact_product)
    loss, exact = _gradients(model, batch)
    if compare is not None:
        names = ("experts gemm 1", "experts gemm 2")
        gemms = dict(zip(names, compare.errors(EmulatedProduct(kind, exact_product)), strict=True))
        bf16 = dict(zip(names, compare.errors(_Bf16Product(exact_product)), strict=True))
        experts.matmul = exact_product
    everything = recipe.precision.emulate_linears or recipe.model.moe is None
    section = recipe.precision.model_copy(update={"high_precision_layers": HighPrecisionSection(), "emulate_linears": everything})
    changed = emulate(model, section)
    rounded_loss, rounded = _gradients(model, batch)
    return {
        "format": kind,
        "layers": 1,
        "of_layers": recipe.model.layers,
        "tokens": int(batch.real_tokens),
        "modules": changed,
        "gemms": gemms,
        "gemms_bf16": bf16,
        "gradients": {name: error(rounded[name], g) for name, g in exact.items() if float(g.norm()) > 0},
        "loss": loss,
        "loss_difference": rounded_loss - loss,
        "label": f"emulated bit for bit on {label}, {int(batch.real_tokens):,} tokens, fp32 elsewhere; not measured in {kind} hardware",
    }
