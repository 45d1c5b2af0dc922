"""What rounding to a low precision does to a recipe, by bit-exact emulation on as many layers and tokens as fit.

The layers run in fp32 on the recipe's own dimensions, initial weights and data. Each GEMM of the experts is repeated on
the same inputs with rounded ones, for its three products; then all layers run once more with every GEMM rounded, and the
gradients of their parameters are compared. Errors are relative in the Frobenius norm against fp32. bf16 inputs are shown
beside, the error that training lives with today.

A machine affords about `SECONDS` and half of its free memory: tokens come first, up to `MOST_TOKENS`, then layers.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from bmoe.data.loader import build_batch, build_sampler
from bmoe.data.packing import Batch
from bmoe.data.sampler import Position
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.precision.emulate import KINDS, EmulatedProduct, emulate
from bmoe.profiling.ceilings import available_gib
from bmoe.profiling.fit import with_values
from bmoe.recipe import HighPrecisionSection, Recipe

MOST_TOKENS = 2048
FEWEST_TOKENS = 256
SECONDS = 15.0
PASSES = 14  # forward products that the comparison costs, all told
COPIES = 4  # of the weights in fp32: they, their gradients, both gradients that are compared


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


def _some_layers(recipe: Recipe, layers: int, vocabulary: Vocabulary, device: torch.device) -> Transformer:
    """The recipe's model, or `layers` layers of it, which then all have experts if it has any."""
    model = recipe.model
    moe = model.moe.model_copy(update={"dense_layers": 0}) if model.moe and layers < model.layers else model.moe
    section = model.model_copy(update={"layers": layers, "moe": moe})
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


def affordable(recipe: Recipe, tflops: float, free_gib: float) -> tuple[int, int]:
    """(token slots, layers) whose comparison takes at most about `SECONDS` at `tflops`, and half of `free_gib`."""
    moe, D = recipe.model.moe, recipe.model.width
    visited, stored = (moe.top_k * moe.expert_width, moe.experts * moe.expert_width) if moe else (4 * D, 4 * D)
    per_token = PASSES * 2 * (3 * D * visited + 4 * D * D) / (tflops * 1e12)
    tokens = FEWEST_TOKENS
    while tokens < MOST_TOKENS and 2 * tokens * per_token < SECONDS:
        tokens *= 2
    tokens = min(tokens, recipe.data.tokens_per_batch)
    layer_gib = COPIES * 4 * (3 * D * stored + 4 * D * D) / 2**30
    layers = int(min(SECONDS / (tokens * per_token), free_gib / 2 / layer_gib))
    return tokens, max(1, min(recipe.model.layers, layers))


def _mean(layers: list[dict]) -> dict:
    """Mean over layers of {GEMM: {product: error}}."""
    return {
        gemm: {product: sum(layer[gemm][product] for layer in layers) / len(layers) for product in layers[0][gemm]} for gemm in layers[0]
    }


def over_layers(gradients: dict[str, float]) -> dict[str, dict]:
    """Name, with * for the layer -> {mean, worst, layer: of the worst, counted from 1, or None outside the layers}."""
    found: dict[str, list[tuple[float, int | None]]] = {}
    for name, value in gradients.items():
        first, _, rest = name.partition(".")
        number, _, rest = rest.partition(".")
        inside = first == "blocks"
        found.setdefault(f"blocks.*.{rest}" if inside else name, []).append((value, int(number) + 1 if inside else None))
    return {
        name: {"mean": sum(value for value, _ in values) / len(values), "worst": max(values)[0], "layer": max(values)[1]}
        for name, values in found.items()
    }


def emulated(recipe: Recipe, shards, device: torch.device, tflops: float) -> dict:
    """Errors of the recipe's precision, by emulation. `tflops`: what this device reaches in fp32 products."""
    kind = recipe.precision.kind
    if kind not in KINDS:
        return {"label": f"{kind} is not emulated: its scales depend on the steps before"} if kind.startswith("fp8") else {}
    tokens, layers = affordable(recipe, tflops, available_gib(device))
    recipe = with_values(recipe, "data", max_length=min(recipe.data.max_length, tokens))
    crops, _ = next(build_sampler(shards, recipe, recipe.seed, "sequence").batches(Position(0, 0), tokens))
    batch = build_batch(shards, crops, recipe, recipe.seed, slots=tokens).to(device)
    letters = shards.alphabet
    model = _some_layers(recipe, layers, Vocabulary(letters.size, letters.pad_id, letters.mask_id), device).train()
    experts = [block.ffn.experts for block in model.blocks if block.is_moe]
    for module in experts:
        module.matmul = _Compare(module.matmul)
    loss, exact = _gradients(model, batch)
    by_layer, today = [], []
    for module in experts:
        compare: _Compare = module.matmul
        names = ("experts gemm 1", "experts gemm 2")
        by_layer.append(dict(zip(names, compare.errors(EmulatedProduct(kind, compare.product)), strict=True)))
        today.append(dict(zip(names, compare.errors(_Bf16Product(compare.product)), strict=True)))
        module.matmul = compare.product
    everything = recipe.precision.emulate_linears or recipe.model.moe is None
    kept = recipe.precision.high_precision_layers if layers == recipe.model.layers else HighPrecisionSection()
    section = recipe.precision.model_copy(update={"high_precision_layers": kept, "emulate_linears": everything})
    changed = emulate(model, section)
    rounded_loss, rounded = _gradients(model, batch)
    gradients = {name: error(rounded[name], g) for name, g in exact.items() if float(g.norm()) > 0}
    return {
        "format": kind,
        "layers": layers,
        "of_layers": recipe.model.layers,
        "tokens": int(batch.real_tokens),
        "modules": changed,
        "gemms": _mean(by_layer) if by_layer else {},
        "gemms_bf16": _mean(today) if today else {},
        "gemms_by_layer": by_layer,
        "gradients": gradients,
        "gradients_over_layers": over_layers(gradients),
        "loss": loss,
        "loss_difference": rounded_loss - loss,
        "label": f"emulated bit for bit on {layers} of {recipe.model.layers} layers, initial weights, {int(batch.real_tokens):,} tokens, "
        f"fp32 elsewhere; not measured in {kind} hardware",
    }
