"""SwiGLU times the routing weight, forward and backward, each in one pass over rows sorted by expert.

Shapes: F expert width, K top-k, N = T x K rows; w = weight_of_row[r].

Mathematics, with g = h[r, :F], u = h[r, F:], s(g) = 1 / (1 + exp(-g))
    forward    a    = w g s(g) u
    backward   dg   = w da u s(g) (1 + g (1 - s(g)))
               du   = w da g s(g)
               dw   = sum over f of da g s(g) u            (the gradient of the routing weight)
               a    is computed again for the second weight gradient, in place of da: it is never saved

Bytes (bf16, floor), per row
    forward    4 F in (h), 2 F out (a)                          6 F
    backward   4 F + 2 F in (h, da), 4 F + 2 F out (dh, a)     12 F
About 10 and 25 operations per element: both are limited by memory on any GPU.

Arithmetic is fp32, each result rounded once. Rows at or beyond bounds[E] are neither read nor written.

Measured on an H200 that copies 4.27 TB/s: forward 4.0 TB/s, backward 3.8-3.9 TB/s (docs/kernels.md).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from bmoe.kernels.rows import row_tile
from bmoe.kernels.sizes import cdiv


@triton.jit
def _forward_kernel(h_NC, a_NF, weight_of_row_N, total, F: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    real = row < tl.load(total)
    inside = real[:, None] & (column < F)[None, :]
    w = tl.load(weight_of_row_N + row, mask=real, other=0.0)
    at = h_NC + row[:, None].to(tl.int64) * (2 * F) + column[None, :]
    g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(at + F, mask=inside, other=0.0).to(tl.float32)
    a = g * tl.sigmoid(g) * u * w[:, None]
    tl.store(a_NF + row[:, None].to(tl.int64) * F + column[None, :], a.to(a_NF.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    h_NC,
    da_NF,
    dh_NC,
    weight_of_row_N,
    dweight_of_row_N,
    total,
    F: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < tl.load(total)
    w = tl.load(weight_of_row_N + row, mask=real, other=0.0)[:, None]
    dw = tl.zeros([ROWS, COLUMNS], tl.float32)
    row_h = row[:, None].to(tl.int64) * (2 * F)
    row_a = row[:, None].to(tl.int64) * F
    for first in range(0, F, COLUMNS):
        column = (first + tl.arange(0, COLUMNS))[None, :]
        inside = real[:, None] & (column < F)
        g = tl.load(h_NC + row_h + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(h_NC + row_h + F + column, mask=inside, other=0.0).to(tl.float32)
        da = tl.load(da_NF + row_a + column, mask=inside, other=0.0).to(tl.float32)
        s = tl.sigmoid(g)
        silu = g * s
        dw += da * silu * u
        dg = w * da * u * (s + silu * (1.0 - s))
        du = w * da * silu
        tl.store(dh_NC + row_h + column, dg.to(dh_NC.dtype.element_ty), mask=inside)
        tl.store(dh_NC + row_h + F + column, du.to(dh_NC.dtype.element_ty), mask=inside)
        tl.store(da_NF + row_a + column, (w * silu * u).to(da_NF.dtype.element_ty), mask=inside)
    tl.store(dweight_of_row_N + row, tl.sum(dw, axis=1), mask=real)


def swiglu(h_NC: Tensor, weight_of_row_N: Tensor, bounds_E1: Tensor) -> Tensor:
    """Weighted activation a_NF in h's dtype."""
    rows_n, width = h_NC.shape[0], h_NC.shape[1] // 2
    a_NF = h_NC.new_empty(rows_n, width)
    if a_NF.numel():
        rows, columns = row_tile(width, widest=512)
        grid = (cdiv(rows_n, rows), cdiv(width, columns))
        _forward_kernel[grid](h_NC, a_NF, weight_of_row_N, bounds_E1[-1:], width, rows, columns, num_warps=4)
    return a_NF


def swiglu_backward(h_NC: Tensor, da_NF: Tensor, weight_of_row_N: Tensor, bounds_E1: Tensor) -> tuple[Tensor, Tensor]:
    """(dh_NC, dweight_of_row_N fp32); `da_NF` is overwritten by a_NF."""
    rows_n, width = da_NF.shape
    dh_NC = torch.empty_like(h_NC)
    dweight_of_row_N = torch.empty_like(weight_of_row_N)
    if da_NF.numel():
        rows, columns = row_tile(width, elements=1024, widest=512)
        _backward_kernel[(cdiv(rows_n, rows),)](
            h_NC, da_NF, dh_NC, weight_of_row_N, dweight_of_row_N, bounds_E1[-1:], width, rows, columns, num_warps=4
        )
    return dh_NC, dweight_of_row_N


def swiglu_reference(h_NC: Tensor, weight_of_row_N: Tensor, bounds_E1: Tensor) -> Tensor:
    """Plain-torch twin of `swiglu`, differentiable; rows without a slot hold 0."""
    rows_N = torch.arange(h_NC.shape[0], device=h_NC.device)
    real_N1 = (rows_N < bounds_E1[-1])[:, None]
    gate_NF, up_NF = torch.where(real_N1, h_NC, 0).float().chunk(2, dim=-1)
    return torch.where(real_N1, functional.silu(gate_NF) * up_NF * weight_of_row_N[:, None], 0).to(h_NC.dtype)
