"""Training in a low precision this machine lacks: GEMM inputs are rounded to the format, the GEMM runs in x's dtype.

A linear layer y_NO = x_NI w_OI^T is three GEMMs, and each rounds both of its inputs along its own contraction:

| GEMM  | computes           | contracts over | x           | w           | dy          |
|-------|--------------------|----------------|-------------|-------------|-------------|
| fprop | y = x w^T          | I              | along rows  | along rows  |             |
| dgrad | dx = dy w          | O              |             | down columns| along rows  |
| wgrad | dw = dy^T x        | N (per expert) | down columns|             | down columns|

Both copies come from the high-precision tensor. For experts, blocks down the columns of N start anew at each expert's
first row, as every expert's rows are a tensor of their own on the GPU (there padded with zero rows, which change
nothing here). Products of E4M3 numbers times powers of two are exact in bf16 and fp32, so what differs from a real
FP8 GEMM is only the order of an fp32 accumulation.

- mxfp8: blocks of 32, E4M3 for x, w and dy.
- fp8_block: blocks of 128 for x and dy, squares of 128 x 128 for w (one copy serves both directions), E4M3.
- fp8_current: one scale for x, w and dy of each expert; x and w in E4M3, dy in E5M2. The inverse scales multiply the
  result, in its dtype, where the GPU multiplies its fp32 accumulator.
- fp8_row: one scale for each row of x and dy and one for w of each expert, E4M3; wgrad is not rounded (kernels/fp8.py).
- nvfp4: E2M1 in blocks of 16 for x and dy, squares of 16 x 16 for w, and one scale for x, w and dy of each expert besides; dy is
  rounded stochastically, and the columns of wgrad are rotated before they are rounded (`nvfp4`). The experts' scales multiply the
  result. In plain torch on every device.

Biases, activations, the router, norms, attention, embedding, head and the optimizer stay in high precision.
Shapes: N rows, I inputs, O outputs, E experts.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from bmoe.errors import RequestError
from bmoe.precision import blocks, current, nvfp4
from bmoe.precision.float8 import E4M3, E5M2, RECIPROCAL_448, Float8, round_to, saturate
from bmoe.precision.groups import aligned_rows, amax_of_groups, group_of_rows, rounded_copies, rounded_weight
from bmoe.recipe import PrecisionSection

KINDS = ("mxfp8", "fp8_block", "fp8_current", "fp8_row", "nvfp4")


class Operand(NamedTuple):
    """A rounded GEMM input: `values` in the high-precision dtype; times `inverse`, if that is not None, by group or by row.
    ends: of the experts' rows in `values`, if that is not None; else they are the offsets."""

    values: Tensor
    inverse: Tensor | None = None
    by_row: bool = False
    ends: Tensor | None = None


def _each_row(x_NI: Tensor) -> Operand:
    """One scale per row; as in the kernels an infinity makes its row's products infinite."""
    amax_N1 = blocks.amax(x_NI, -1)
    values = round_to(saturate(x_NI.float() * current.scales(amax_N1, E4M3), E4M3), E4M3).to(x_NI.dtype)
    return Operand(values, (amax_N1 * RECIPROCAL_448)[:, 0], by_row=True)


def _current_rows(x_NI: Tensor, offsets_E: Tensor | None, form: Float8) -> Operand:
    """One scale per group of rows; values stay scaled, as float8 integers of a sort: exact in bf16."""
    scale_G = current.scales(amax_of_groups(x_NI, offsets_E), form)
    scale_N1 = scale_G if offsets_E is None else scale_G[group_of_rows(offsets_E, x_NI.shape[0])][:, None]
    values = round_to(saturate(x_NI.float() * scale_N1, form), form).to(x_NI.dtype)
    return Operand(values, 1.0 / scale_G)


def _nvfp4_rows(x_NI: Tensor, offsets_E: Tensor | None, stochastic: bool) -> tuple[Operand, Operand]:
    """Blocks along the rows; and down the columns, rotated, where every group starts at a multiple of 16 rows.

    Rotation mixes the rows of a block, so the second copy keeps the zero rows that complete a group's last block.
    """
    size, rows = nvfp4.BLOCK, x_NI.shape[0]
    if offsets_E is None:
        place_N, ends_E, length = torch.arange(rows, device=x_NI.device), None, -(-rows // size) * size
    else:
        place_N, ends_E, length = aligned_rows(offsets_E, rows, size)
    x_RI = x_NI.new_zeros(length, x_NI.shape[1]).index_copy(0, place_N, x_NI)
    row_R = torch.arange(length, device=x_NI.device)
    group_B = torch.zeros_like(row_R[::size])  # of each block of rows
    if ends_E is not None:
        group_B = group_of_rows(ends_E, length)[::size]
        row_R = row_R - functional.pad(ends_E, (1, 0))[group_B].repeat_interleave(size)
    found = []
    for t_RI, axis in ((x_RI, -1), (nvfp4.rotate(x_RI), -2)):
        amax_G = amax_of_groups(t_RI, ends_E)
        noise = nvfp4.noise_of(t_RI, row_R).unflatten(0, (-1, size)) if stochastic else None
        values = nvfp4.scaled(t_RI.unflatten(0, (-1, size)), nvfp4.factors(amax_G)[group_B].view(-1, 1, 1, 1), axis, noise).flatten(0, 1)
        found.append(Operand(values, amax_G * (1.0 / nvfp4.RANGE), ends=ends_E))
    along, down = found
    return along._replace(values=along.values[place_N], ends=None), down


def _expert_weight(w: Tensor, kind: str) -> Operand:
    """One scale per expert of w_EOI, or for the whole w_OI; under nvfp4 squares inside it."""
    w_EOI = w if w.ndim == 3 else w[None]
    amax_E = blocks.amax(w_EOI.flatten(1), -1).squeeze(-1)
    if kind == "nvfp4":
        values = nvfp4.scaled(w_EOI, nvfp4.factors(amax_E).view(-1, 1, 1, 1, 1), None)
        return Operand(values.view(w.shape), amax_E * (1.0 / nvfp4.RANGE))
    scale_E = current.scales(amax_E, E4M3)
    values = round_to(saturate(w_EOI.float() * scale_E[:, None, None], E4M3), E4M3).to(w.dtype)
    return Operand(values.view(w.shape), amax_E * RECIPROCAL_448 if kind == "fp8_row" else 1.0 / scale_E)


def _inputs(x_NI: Tensor, offsets_E: Tensor | None, kind: str, gradient: bool) -> tuple[Operand, Operand]:
    """x, or dy if `gradient`, with blocks along its rows, and with blocks down its columns."""
    if kind == "fp8_row":
        return _each_row(x_NI), Operand(x_NI)
    if kind == "fp8_current":
        both = _current_rows(x_NI, offsets_E, E5M2 if gradient else E4M3)
        return both, both
    if kind == "nvfp4":
        return _nvfp4_rows(x_NI, offsets_E, stochastic=gradient)
    along, down = rounded_copies(x_NI, kind, offsets_E)
    return Operand(along), Operand(down)


def _weight(w: Tensor, kind: str, axis: int) -> Operand:
    """w_OI or w_EOI with blocks along `axis`: -1 for fprop, -2 for dgrad."""
    return _expert_weight(w, kind) if kind in ("fp8_current", "fp8_row", "nvfp4") else Operand(rounded_weight(w, kind, axis))


def _rescale_rows(y_NO: Tensor, a: Operand, b: Operand, offsets_E: Tensor | None) -> Tensor:
    """y times the inverse scales of its row's group; rows beyond the last group keep 1 as the weight's factor."""
    if a.inverse is None or b.inverse is None:
        return y_NO
    if offsets_E is None:
        factor = a.inverse * b.inverse
        return (y_NO * (factor[:, None] if a.by_row else factor)).to(y_NO.dtype)
    group_N, weight_G = group_of_rows(offsets_E, y_NO.shape[0]), functional.pad(b.inverse, (0, 1), value=1.0)
    factor_N = a.inverse * weight_G[group_N] if a.by_row else (a.inverse * weight_G)[group_N]
    return (y_NO * factor_N[:, None]).to(y_NO.dtype)


def _weight_gradient(dy_NO: Tensor, x_NI: Tensor, offsets_E: Tensor | None) -> Tensor:
    """dy^T x: [O, I], or one per expert [E, O, I]."""
    if offsets_E is None:
        return dy_NO.T @ x_NI
    aligned = all(t.shape[1] * t.element_size() % 16 == 0 for t in (dy_NO, x_NI))
    if aligned and x_NI.dtype == torch.bfloat16 and x_NI.shape[0] > 0:
        return torch._grouped_mm(dy_NO.t(), x_NI, offs=offsets_E)
    ends = offsets_E.tolist()
    spans = [slice(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return torch.stack([dy_NO[span].T @ x_NI[span] for span in spans])


class _Product(torch.autograd.Function):
    """product(x, w[, offsets]) with rounded inputs, and both of its gradients with rounded inputs."""

    @staticmethod
    def forward(ctx, x_NI: Tensor, w: Tensor, offsets_E: Tensor | None, kind: str, product: Callable) -> Tensor:
        ctx.kind, ctx.product, ctx.dtype = kind, product, x_NI.dtype
        along, down = _inputs(x_NI, offsets_E, kind, gradient=False)
        weight = _weight(w, kind, -1)
        ctx.save_for_backward(down.values, down.inverse, w, offsets_E)
        groups = () if offsets_E is None else (offsets_E,)
        return _rescale_rows(product(along.values, weight.values, *groups), along, weight, offsets_E)

    @staticmethod
    def backward(ctx, dy_NO: Tensor):
        x_values, x_inverse, w, offsets_E = ctx.saved_tensors
        along, down = _inputs(dy_NO.contiguous(), offsets_E, ctx.kind, gradient=True)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            weight = _weight(w, ctx.kind, -2)
            groups = () if offsets_E is None else (offsets_E,)
            dx = _rescale_rows(ctx.product(along.values, weight.values.transpose(-1, -2), *groups), along, weight, offsets_E)
        if ctx.needs_input_grad[1]:
            dw = _weight_gradient(down.values, x_values, offsets_E if down.ends is None else down.ends)
            if down.inverse is not None:
                factor = down.inverse * x_inverse
                dw = dw * (factor if offsets_E is None else factor[:-1, None, None]).to(dw.dtype)
        return dx, dw, None, None, None


class EmulatedProduct:
    """Stands in for an experts module's `matmul`: `product(x_nI, w_OI)` or `product(x_NI, w_EOI, offsets_E)`."""

    def __init__(self, kind: str, product: Callable[..., Tensor]):
        self.kind, self.product = kind, product

    def __call__(self, x: Tensor, w: Tensor, offsets_E: Tensor | None = None) -> Tensor:
        return _Product.apply(x, w, offsets_E, self.kind, self.product)


class EmulatedLinear(nn.Linear):
    """A linear layer that shares the parameters of `linear` and rounds its GEMM inputs."""

    def __init__(self, linear: nn.Linear, kind: str):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.kind = linear.in_features, linear.out_features, kind
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """x [..., I] -> [..., O] in x's dtype."""
        y = _Product.apply(x.reshape(-1, x.shape[-1]), self.weight, None, self.kind, functional.linear)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(y.dtype)


def low_precision_layers(layers: int, precision: PrecisionSection) -> range:
    """Indices of the layers that are not kept in high precision."""
    return range(precision.high_precision_layers.first, layers - precision.high_precision_layers.last)


def emulate(model: nn.Module, precision: PrecisionSection) -> list[str]:
    """Round the GEMM inputs of `model.blocks` to `precision.kind`, in place; returns the names of what was changed.

    Experts always; with `emulate_linears` every linear layer of the blocks too (attention's, dense and shared
    feed-forwards). Blocks named by `high_precision_layers` keep their precision. Call it before compiling or sharding the
    model. Raises RequestError for a kind that cannot be emulated, and for experts whose products cannot be replaced.
    """
    kind = precision.kind
    if kind not in KINDS:
        raise RequestError(f"precision.emulate: {kind} cannot be emulated; precision.kind must be one of {', '.join(KINDS)}")
    changed = []
    for index in low_precision_layers(len(model.blocks), precision):
        layer = model.blocks[index]
        for name, module in list(layer.named_modules()):
            place = f"blocks.{index}.{name}"
            if hasattr(module, "matmul"):
                module.matmul = EmulatedProduct(kind, module.matmul)
                changed.append(place)
            elif hasattr(module, "gate_up") and isinstance(module.gate_up, nn.Parameter):
                raise RequestError(
                    f"precision.emulate: {type(module).__name__} in {place} has fused products; set backend.experts to grouped or loop"
                )
            elif precision.emulate_linears and isinstance(module, nn.Linear):
                parent, _, leaf = name.rpartition(".")
                setattr(layer.get_submodule(parent), leaf, EmulatedLinear(module, kind))
                changed.append(place)
    if not changed:
        raise RequestError("precision.emulate: no layer has experts in low precision; check model.moe and precision.high_precision_layers")
    return changed
