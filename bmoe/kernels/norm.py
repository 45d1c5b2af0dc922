"""RMSNorm, alone or with the residual sum before it, and their gradients, each in one pass.

Shapes: T tokens, D width, P programs.

Mathematics, per token
    s = x + y (in x's dtype),   r = 1 / sqrt(mean(s^2) + eps),   h = s r w
    backward   u = s r,  g = dh w:   dx = dy = ds + r (g - u mean(g u)),   dw = sum over tokens of dh u
Sums in fp32, results rounded once. ds is what the residual stream brings back; adding it here saves a pass of its own. Alone,
s is x and there is no ds.

Bytes (bf16): forward 4 T D in and 4 T D out; backward 6 T D in and 2 T D out, and 8 P D for dw, whose P partial sums are
added in a fixed order: the same bits on every run. Alone: 2 in, 2 out; backward 4 in, 2 out.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.operators import apply, operator
from bmoe.kernels.sizes import cdiv, next_power_of_2
from bmoe.kernels.sums import sum_parts

ELEMENTS = 4096
"""Elements of a tile of the forward pass."""

BACKWARD_ELEMENTS = 2048
"""Of the backward pass, which holds five of them a thread in registers."""

STAGES = 3
"""Of the backward pass: tiles on their way at a time, so that memory is busy while rows are summed."""

PROGRAMS = 528
"""Of the backward pass: four for each multiprocessor of an H100 or H200."""


@triton.jit
def _norm_kernel(x_TD, y_TD, w_D, s_TD, h_TD, r_T, tokens, eps, ADD: tl.constexpr, D: tl.constexpr, D_P2: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D_P2)
    at = row[:, None].to(tl.int64) * D + column[None, :]
    inside = (row < tokens)[:, None] & (column < D)[None, :]
    s = tl.load(x_TD + at, mask=inside, other=0.0)
    if ADD:
        y = tl.load(y_TD + at, mask=inside, other=0.0)
        s = (s.to(tl.float32) + y.to(tl.float32)).to(s.dtype)
        tl.store(s_TD + at, s, mask=inside)
    wide = s.to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / D + eps)
    tl.store(r_T + row, r, mask=row < tokens)
    w = tl.load(w_D + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(h_TD + at, (wide * r[:, None] * w[None, :]).to(s.dtype), mask=inside)


@triton.jit
def _norm_backward_kernel(
    ds_TD,
    dh_TD,
    s_TD,
    w_D,
    r_T,
    dx_TD,
    dw_PD,
    tokens,
    programs,
    ADD: tl.constexpr,
    D: tl.constexpr,
    D_P2: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, D_P2)
    w = tl.load(w_D + column, mask=column < D, other=0.0).to(tl.float32)
    dw = tl.zeros([ROWS, D_P2], tl.float32)  # a sum over rows in every step would make all warps wait for each other
    for block in tl.range(program, tl.cdiv(tokens, ROWS), programs, num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * D + column[None, :]
        inside = (row < tokens)[:, None] & (column < D)[None, :]
        dh = tl.load(dh_TD + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(s_TD + at, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            ds = tl.load(ds_TD + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(r_T + row, mask=row < tokens, other=0.0)[:, None]
        unit = s * r
        dw += dh * unit
        g = dh * w[None, :]
        dx = r * (g - unit * (tl.sum(g * unit, axis=1)[:, None] / D))
        if ADD:
            dx += ds
        tl.store(dx_TD + at, dx.to(dx_TD.dtype.element_ty), mask=inside)
    tl.store(dw_PD + program * D + column, tl.sum(dw, axis=0), mask=column < D)


def _tile(width: int, elements: int) -> tuple[int, int]:
    """(rows, columns) of a tile."""
    columns = next_power_of_2(width)
    return max(1, elements // columns), columns


def _forward(x_TD: Tensor, y_TD: Tensor | None, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """s_TD (x itself without y), h_TD, r_T."""
    T, D = x_TD.shape
    s_TD = x_TD if y_TD is None else torch.empty_like(x_TD)
    h_TD, r_T = torch.empty_like(x_TD), x_TD.new_empty(T, dtype=torch.float32)
    if T:
        rows, columns = _tile(D, ELEMENTS)
        _norm_kernel[(cdiv(T, rows),)](
            x_TD, x_TD if y_TD is None else y_TD, weight_D, s_TD, h_TD, r_T, T, eps, y_TD is not None, D, columns, rows, num_warps=8
        )
    return s_TD, h_TD, r_T


def _backward(ds_TD: Tensor | None, dh_TD: Tensor, s_TD: Tensor, weight_D: Tensor, r_T: Tensor) -> tuple[Tensor, Tensor]:
    """dx_TD, dweight_D."""
    dh_TD, s_TD = dh_TD.contiguous(), s_TD.contiguous()
    T, D = s_TD.shape
    rows, columns = _tile(D, BACKWARD_ELEMENTS)
    programs = max(1, min(PROGRAMS, cdiv(T, rows)))
    dx_TD, dw_PD = torch.empty_like(s_TD), s_TD.new_empty(programs, D, dtype=torch.float32)
    _norm_backward_kernel[(programs,)](
        dh_TD if ds_TD is None else ds_TD.contiguous(), dh_TD, s_TD, weight_D, r_T, dx_TD, dw_PD, T, programs,
        ds_TD is not None, D, columns, rows, STAGES, num_warps=4 if columns <= 2048 else 8,
    )  # fmt: skip
    return dx_TD, sum_parts(dw_PD, weight_D.dtype)


@operator("norm", lambda x_TD, weight_D, eps: (torch.empty_like(x_TD), x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)))
def norm_forward(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h_TD, r_T (fp32)."""
    return _forward(x_TD.contiguous(), None, weight_D, eps)[1:]


@operator("norm_backward", lambda dh_TD, x_TD, weight_D, r_T: (torch.empty_like(x_TD), torch.empty_like(weight_D)))
def norm_backward(dh_TD: Tensor, x_TD: Tensor, weight_D: Tensor, r_T: Tensor) -> tuple[Tensor, Tensor]:
    """dx_TD, dweight_D."""
    return _backward(None, dh_TD, x_TD, weight_D, r_T)


def _add_fake(x_TD, y_TD, weight_D, eps):
    return torch.empty_like(x_TD), torch.empty_like(x_TD), x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)


@operator("add_norm", _add_fake)
def add_norm_forward(x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """s_TD, h_TD, r_T (fp32)."""
    return _forward(x_TD.contiguous(), y_TD.contiguous(), weight_D, eps)


@operator("add_norm_backward", lambda ds_TD, dh_TD, s_TD, weight_D, r_T: (torch.empty_like(s_TD), torch.empty_like(weight_D)))
def add_norm_backward(ds_TD: Tensor, dh_TD: Tensor, s_TD: Tensor, weight_D: Tensor, r_T: Tensor) -> tuple[Tensor, Tensor]:
    """dx_TD (which is dy_TD), dweight_D."""
    return _backward(ds_TD, dh_TD, s_TD, weight_D, r_T)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_D, eps):
        h_TD, r_T = norm_forward(x_TD, weight_D, eps)
        ctx.save_for_backward(x_TD, weight_D, r_T)
        return h_TD

    @staticmethod
    def backward(ctx, dh_TD):
        return *norm_backward(dh_TD, *ctx.saved_tensors), None


class _NormThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_D, eps):
        return x_TD.view_as(x_TD), _Norm.forward(ctx, x_TD, weight_D, eps)

    @staticmethod
    def backward(ctx, ds_TD, dh_TD):
        return *add_norm_backward(ds_TD, dh_TD, *ctx.saved_tensors), None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, y_TD, weight_D, eps):
        s_TD, h_TD, r_T = add_norm_forward(x_TD, y_TD, weight_D, eps)
        ctx.save_for_backward(s_TD, weight_D, r_T)
        return s_TD, h_TD

    @staticmethod
    def backward(ctx, ds_TD, dh_TD):
        s_TD, weight_D, r_T = ctx.saved_tensors
        dx_TD, dweight_D = add_norm_backward(ds_TD, dh_TD, s_TD, weight_D, r_T)
        return dx_TD, dx_TD, dweight_D, None


def norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """The RMSNorm of rows, in x's dtype."""
    return apply(_Norm, x_TD, weight_D, eps)


def norm_through(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x, its RMSNorm): the gradient of this x is added in the norm's backward pass."""
    return apply(_NormThrough, x_TD, weight_D, eps)


def add_norm(x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(s, h): the sum and its RMSNorm, in x's dtype."""
    return apply(_AddNorm, x_TD, y_TD, weight_D, eps)
