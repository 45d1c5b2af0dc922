"""RMSNorm with the residual sum before it, and their gradients, each in one pass.

Shapes: T tokens, D width, P programs.

Mathematics, per token
    s = x + y (in x's dtype),   r = 1 / sqrt(mean(s^2) + eps),   h = s r w
    backward   u = s r,  g = dh w:   dx = dy = ds + r (g - u mean(g u)),   dw = sum over tokens of dh u
Sums in fp32, results rounded once. ds is what the residual stream brings back; adding it here saves a pass of its own.

Bytes (bf16): forward 4 T D in and 4 T D out; backward 6 T D in and 2 T D out, and 8 P D for dw, whose P partial sums are
added in a fixed order: the same bits on every run.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.operators import operator

ELEMENTS = 4096
"""Elements of a tile."""

PROGRAMS = 528
"""Of the backward pass: four for each multiprocessor of an H100 or H200."""


@triton.jit
def _forward_kernel(x_TD, y_TD, w_D, s_TD, h_TD, r_T, tokens, eps, D: tl.constexpr, D_P2: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D_P2)
    at = row[:, None].to(tl.int64) * D + column[None, :]
    inside = (row < tokens)[:, None] & (column < D)[None, :]
    x = tl.load(x_TD + at, mask=inside, other=0.0)
    y = tl.load(y_TD + at, mask=inside, other=0.0)
    s = (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)
    tl.store(s_TD + at, s, mask=inside)
    wide = s.to(tl.float32)
    r = 1.0 / tl.sqrt(tl.sum(wide * wide, axis=1) / D + eps)
    tl.store(r_T + row, r, mask=row < tokens)
    w = tl.load(w_D + column, mask=column < D, other=0.0).to(tl.float32)
    tl.store(h_TD + at, (wide * r[:, None] * w[None, :]).to(x.dtype), mask=inside)


@triton.jit
def _backward_kernel(ds_TD, dh_TD, s_TD, w_D, r_T, dx_TD, dw_PD, tokens, programs, D: tl.constexpr, D_P2: tl.constexpr, ROWS: tl.constexpr):
    program = tl.program_id(0)
    column = tl.arange(0, D_P2)
    w = tl.load(w_D + column, mask=column < D, other=0.0).to(tl.float32)
    dw = tl.zeros([D_P2], tl.float32)
    for block in range(program, tl.cdiv(tokens, ROWS), programs):
        row = block * ROWS + tl.arange(0, ROWS)
        at = row[:, None].to(tl.int64) * D + column[None, :]
        inside = (row < tokens)[:, None] & (column < D)[None, :]
        dh = tl.load(dh_TD + at, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(s_TD + at, mask=inside, other=0.0).to(tl.float32)
        ds = tl.load(ds_TD + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(r_T + row, mask=row < tokens, other=0.0)[:, None]
        unit = s * r
        dw += tl.sum(dh * unit, axis=0)
        g = dh * w[None, :]
        share = tl.sum(g * unit, axis=1)[:, None] / D
        tl.store(dx_TD + at, (ds + r * (g - unit * share)).to(dx_TD.dtype.element_ty), mask=inside)
    tl.store(dw_PD + program * D + column, dw, mask=column < D)


def _tile(width: int) -> tuple[int, int]:
    """(rows, columns) of a tile."""
    columns = triton.next_power_of_2(width)
    return max(1, ELEMENTS // columns), columns


def _forward_fake(x_TD, y_TD, weight_D, eps):
    return torch.empty_like(x_TD), torch.empty_like(x_TD), x_TD.new_empty(x_TD.shape[0], dtype=torch.float32)


@operator("add_norm", _forward_fake)
def add_norm_forward(x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """s_TD, h_TD, r_T (fp32)."""
    x_TD, y_TD = x_TD.contiguous(), y_TD.contiguous()
    T, D = x_TD.shape
    s_TD, h_TD, r_T = torch.empty_like(x_TD), torch.empty_like(x_TD), x_TD.new_empty(T, dtype=torch.float32)
    if T:
        rows, columns = _tile(D)
        _forward_kernel[(triton.cdiv(T, rows),)](x_TD, y_TD, weight_D, s_TD, h_TD, r_T, T, eps, D, columns, rows, num_warps=8)
    return s_TD, h_TD, r_T


def _backward_fake(ds_TD, dh_TD, s_TD, weight_D, r_T):
    return torch.empty_like(s_TD), torch.empty_like(weight_D)


@operator("add_norm_backward", _backward_fake)
def add_norm_backward(ds_TD: Tensor, dh_TD: Tensor, s_TD: Tensor, weight_D: Tensor, r_T: Tensor) -> tuple[Tensor, Tensor]:
    """dx_TD (which is dy_TD), dweight_D."""
    ds_TD, dh_TD = ds_TD.contiguous(), dh_TD.contiguous()
    T, D = s_TD.shape
    rows, columns = _tile(D)
    programs = max(1, min(PROGRAMS, triton.cdiv(T, rows)))
    dx_TD, dw_PD = torch.empty_like(s_TD), s_TD.new_empty(programs, D, dtype=torch.float32)
    grid = (programs,)
    _backward_kernel[grid](ds_TD, dh_TD, s_TD, weight_D, r_T, dx_TD, dw_PD, T, programs, D, columns, rows, num_warps=8)
    return dx_TD, dw_PD.sum(0).to(weight_D.dtype)


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


def add_norm(x_TD: Tensor, y_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(s, h): the sum and its RMSNorm, in x's dtype."""
    return _AddNorm.apply(x_TD, y_TD, weight_D, eps)
