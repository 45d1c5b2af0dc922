"""Quantisation to FP8 (E4M3) for the experts' products: one scale per row of activations, one per expert's weight.

Shapes: R rows, C columns, N routed rows sorted by expert, T tokens, E experts, O outputs, I inputs, P parts of a maximum.

Mathematics
    rows       s[r] = max_c |x[r, c]| / 448,       q[r, c] = E4M3(x[r, c] / s[r]),     x ~ q s
    weights    s[e] = max |w[e]| / 448,            q[e] = E4M3(w[e] / s[e]) and its transpose
    a product contracts over the columns of both, so its scale is constant along the sum: y[r, o] ~ s[r] s[e] sum q q
448 is the largest finite E4M3 number (Micikevicius et al. 2022, "FP8 formats for deep learning"). Rounding is to nearest,
ties to even. A row of zeros has scale 0. A row with an infinity or NaN gets the scale infinity, so that what is computed
from it is not finite either.

FP8 products on Hopper read both operands along the contraction only, so a weight that takes part in two products with
different contractions is written twice, the second time transposed. gate_up is written with gate and up rows
interleaved, as kernels/fused_gemm.py wants them.

The activation's backward ends in a quantisation too, so it is a pass here: a row's scale needs the whole row, which no tile
of a GEMM sees. It replaces the epilogue that the bf16 path has, and a second pass that would read dh again.

Bytes: rows 2 R C in, R C out. dswiglu 6 N F in, 8 N F out. Weights 2 E O I in for the maxima, and again for the copies,
2 E O I out. Measured on an H200 (copying 4.27 TB/s): rows 3.4-4.1 TB/s from 768 to 11,264 columns, weights 3.7, maxima 3.6.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.fused_gemm import dswiglu_reference
from bmoe.kernels.sizes import cdiv, next_power_of_2

LARGEST = 448.0
"""The largest finite E4M3 number."""

E4M3 = torch.float8_e4m3fn

RECIPROCAL = 1.0 / LARGEST
"""What a maximum is multiplied with for its scale, as float32; its plain twins and the emulation (precision/float8.py) do the same."""

_RECIPROCAL = tl.constexpr(RECIPROCAL)

_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Triton's interpreter (3.6) loses a carry into the exponent where it converts to E4M3, so numbers are rounded before it."""


@triton.jit
def _inverse(amax):
    """What to multiply with before rounding; finite, so that 0 stays 0 beside the smallest numbers."""
    return tl.where(amax > 0, tl.minimum(tl.div_rn(448.0, amax), 3.0e38), 0.0)


@triton.jit
def _size(x):
    """|x|, and infinity for NaN, which a maximum would pass over."""
    return tl.where(x == x, tl.abs(x), float("inf"))


@triton.jit
def _e4m3(v):
    """To E4M3, nearest even, saturating."""
    if _INTERPRETED:
        v = tl.where(v > 448.0, 448.0, v)
        v = tl.where(v < -448.0, -448.0, v)
        exponent = tl.maximum(v.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
        anchor = ((exponent + (20 << 23)) | 0x400000).to(tl.float32, bitcast=True)
        v = (v + anchor) - anchor
    return v.to(tl.float8e4nv)


@triton.jit
def _expert_of(row, bounds_E1, EXPERTS: tl.constexpr, EXPERTS_P2: tl.constexpr):
    expert = tl.arange(0, EXPERTS_P2)
    ends = tl.load(bounds_E1 + 1 + expert, mask=expert < EXPERTS, other=2147483647)
    return tl.minimum(tl.sum((row[:, None] >= ends[None, :]).to(tl.int32), axis=1), EXPERTS - 1)


@triton.jit
def _rows_kernel(
    x_RC,
    q_RC,
    scale_R,
    factor_E,
    weight_R,
    bounds_E1,
    rows,
    C: tl.constexpr,
    C_P2: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    WEIGHTED: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, C_P2)
    if EXPERTS > 0:
        rows = tl.load(bounds_E1 + EXPERTS)
    inside = (row < rows)[:, None] & (column < C)[None, :]
    at = row[:, None].to(tl.int64) * C + column[None, :]
    x = tl.load(x_RC + at, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(_size(x), axis=1)
    tl.store(q_RC + at, _e4m3(x * _inverse(amax)[:, None]), mask=inside)
    scale = amax * _RECIPROCAL
    if EXPERTS > 0:
        scale *= tl.load(factor_E + _expert_of(row, bounds_E1, EXPERTS, EXPERTS_P2))
    if WEIGHTED:
        scale *= tl.load(weight_R + row, mask=row < rows, other=0.0)
    tl.store(scale_R + row, scale, mask=row < rows)


def quantize_rows(
    x_RC: Tensor, bounds_E1: Tensor | None = None, factor_E: Tensor | None = None, weight_R: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(q_RC E4M3, scale_R fp32) of contiguous rows.

    With `bounds_E1` (int32 [E + 1]) rows belong to experts, rows from bounds_E1[-1] on stay unread and unwritten, and the
    scales come multiplied by `factor_E` (fp32) of the row's expert and by `weight_R` (fp32), if given.
    """
    rows, C = x_RC.shape
    q_RC, scale_R = torch.empty_like(x_RC, dtype=E4M3), torch.empty(rows, dtype=torch.float32, device=x_RC.device)
    if x_RC.numel() == 0:
        return q_RC, scale_R
    columns = next_power_of_2(C)
    block = max(1, 4096 // columns)
    experts = 0 if bounds_E1 is None else bounds_E1.numel() - 1
    none = scale_R
    _rows_kernel[(cdiv(rows, block),)](
        x_RC, q_RC, scale_R, none if factor_E is None else factor_E, none if weight_R is None else weight_R,
        none if bounds_E1 is None else bounds_E1, rows, C, columns, block, experts,
        next_power_of_2(max(experts, 1)), weight_R is not None, num_warps=4 if columns <= 8192 else 8,
    )  # fmt: skip
    return q_RC, scale_R


@triton.jit
def _dswiglu_kernel(
    da_NF,
    h_NI,
    scale_N,
    weight_N,
    bounds_E1,
    factor_E,
    dh_NI,
    dh8_NI,
    dh_scale_N,
    aw_NF,
    dweight_N,
    F: tl.constexpr,
    F_P2: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < tl.load(bounds_E1 + EXPERTS)
    f = tl.arange(0, F_P2)
    i = tl.arange(0, 2 * F_P2)
    at_f = row[:, None].to(tl.int64) * F + f[None, :]
    at_i = row[:, None].to(tl.int64) * (2 * F) + i[None, :]
    inside_f = real[:, None] & (f < F)[None, :]
    inside_i = real[:, None] & (i < 2 * F)[None, :]
    w = tl.load(weight_N + row, mask=real, other=0.0)
    h = tl.load(h_NI + at_i, mask=inside_i, other=0.0)
    g, u = tl.split(tl.reshape(h, (ROWS, F_P2, 2)))
    g, u = g.to(tl.float32), u.to(tl.float32)
    s = tl.sigmoid(g)
    silu = g * s
    da = tl.load(da_NF + at_f, mask=inside_f, other=0.0).to(tl.float32) * tl.load(scale_N + row, mask=real, other=0.0)[:, None]
    tl.store(dweight_N + row, tl.sum(da * silu * u, axis=1), mask=real)
    tl.store(aw_NF + at_f, (w[:, None] * silu * u).to(aw_NF.dtype.element_ty), mask=inside_f)
    da *= w[:, None]
    dg = da * u * (s + silu * (1.0 - s))
    du = da * silu
    amax = tl.max(tl.maximum(_size(dg), _size(du)), axis=1)
    dh = tl.reshape(tl.join(dg, du), (ROWS, 2 * F_P2))
    tl.store(dh_NI + at_i, dh.to(dh_NI.dtype.element_ty), mask=inside_i)
    tl.store(dh8_NI + at_i, _e4m3(dh * _inverse(amax)[:, None]), mask=inside_i)
    factor = tl.load(factor_E + _expert_of(row, bounds_E1, EXPERTS, EXPERTS_P2))
    tl.store(dh_scale_N + row, amax * _RECIPROCAL * factor, mask=real)


def dswiglu_quantize(
    da_NF: Tensor, h_NI: Tensor, scale_N: Tensor, weight_of_row_N: Tensor, bounds_E1: Tensor, factor_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The activation's backward in one pass: (dh_NI, dh8_NI E4M3, its scale_N fp32, aw_NF, dweight_of_row_N fp32).

    da_NF times scale_N is the gradient of the unweighted activation of the interleaved h_NI; dh and aw come in their dtypes,
    dh8 is quantised by row from the fp32 values, its scale times `factor_E` of the row's expert.
    """
    rows, width = da_NF.shape
    dh_NI, dh8_NI, aw_NF = torch.empty_like(h_NI), torch.empty_like(h_NI, dtype=E4M3), torch.empty_like(da_NF)
    dh_scale_N, dweight_N = torch.empty_like(weight_of_row_N), torch.empty_like(weight_of_row_N)
    columns, experts = next_power_of_2(width), factor_E.numel()
    block = max(1, 2048 // columns)
    if rows:
        _dswiglu_kernel[(cdiv(rows, block),)](
            da_NF, h_NI, scale_N, weight_of_row_N, bounds_E1, factor_E, dh_NI, dh8_NI, dh_scale_N, aw_NF, dweight_N,
            width, columns, block, experts, next_power_of_2(experts), num_warps=8,
            **({"maxnreg": 128} if columns > 4096 else {}),  # two programs a multiprocessor, not one
        )  # fmt: skip
    return dh_NI, dh8_NI, dh_scale_N, aw_NF, dweight_N


@triton.jit
def _row_scales_kernel(
    scale_T, token_of_row_N, factor_E, bounds_E1, scale_N, EXPERTS: tl.constexpr, EXPERTS_P2: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = row < tl.load(bounds_E1 + EXPERTS)
    token = tl.load(token_of_row_N + row, mask=real, other=0)
    factor = tl.load(factor_E + _expert_of(row, bounds_E1, EXPERTS, EXPERTS_P2))
    tl.store(scale_N + row, tl.load(scale_T + token, mask=real, other=0.0) * factor, mask=real)


def row_scales(scale_T: Tensor, token_of_row_N: Tensor, factor_E: Tensor, bounds_E1: Tensor) -> Tensor:
    """scale_T[token] factor_E[expert] of every routed row, fp32 [N]; rows without an expert stay unwritten."""
    scale_N = torch.empty(token_of_row_N.numel(), dtype=torch.float32, device=scale_T.device)
    experts, block = factor_E.numel(), 256
    if scale_N.numel():
        _row_scales_kernel[(cdiv(scale_N.numel(), block),)](
            scale_T, token_of_row_N, factor_E, bounds_E1, scale_N, experts, next_power_of_2(experts), block, num_warps=4
        )
    return scale_N


@triton.jit
def _amax_kernel(w_EX, amax_EP, size, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    expert = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    top = tl.zeros([BLOCK], tl.float32)
    for first in range(part * BLOCK, size, PARTS * BLOCK):
        at = first + tl.arange(0, BLOCK)
        w = tl.load(w_EX + expert * size + at, mask=at < size, other=0.0).to(tl.float32)
        top = tl.maximum(top, _size(w))
    tl.store(amax_EP + expert * PARTS + part, tl.max(top, axis=0))


@triton.jit
def _weight_kernel(
    w_EOI,
    amax_EP,
    q_EOI,
    q_EIO,
    scale_E,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    TILE: tl.constexpr,
):
    expert = tl.program_id(2).to(tl.int64)
    o = tl.program_id(1) * TILE + tl.arange(0, TILE)
    i = tl.program_id(0) * TILE + tl.arange(0, TILE)
    amax = tl.max(tl.load(amax_EP + expert * PARTS + tl.arange(0, PARTS)), axis=0)
    inside = (o < OUTPUTS)[:, None] & (i < INPUTS)[None, :]
    source = (o % 2) * (OUTPUTS // 2) + o // 2 if INTERLEAVE else o
    w = tl.load(w_EOI + expert * OUTPUTS * INPUTS + source[:, None].to(tl.int64) * INPUTS + i[None, :], mask=inside, other=0.0)
    q = _e4m3(w.to(tl.float32) * _inverse(amax))
    tl.store(q_EOI + expert * OUTPUTS * INPUTS + o[:, None].to(tl.int64) * INPUTS + i[None, :], q, mask=inside)
    q = _e4m3(tl.trans(w).to(tl.float32) * _inverse(amax))
    there = (i < INPUTS)[:, None] & (o < OUTPUTS)[None, :]
    tl.store(q_EIO + expert * OUTPUTS * INPUTS + i[:, None].to(tl.int64) * OUTPUTS + o[None, :], q, mask=there)
    if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
        tl.store(scale_E + expert, amax * _RECIPROCAL)


def quantize_weight(w_EOI: Tensor, interleave: bool = False, out: tuple[Tensor, ...] | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(q_EOI, its transpose q_EIO, scale_E fp32) of bf16 weights; with `interleave`, output 2f is the gate f and 2f + 1 the up f
    of [gate; up]. `out`: an earlier result, to be overwritten. Raises TypeError for another dtype: Triton 3.6 misplaces E4M3
    numbers that it rounds from fp32 and transposes."""
    if w_EOI.dtype != torch.bfloat16:
        raise TypeError(f"weights are quantised from bf16, and these are {w_EOI.dtype}")
    E, outputs, inputs = w_EOI.shape
    w_EOI = w_EOI.contiguous()
    parts = max(1, min(128, next_power_of_2(1024 // E)))
    amax_EP = torch.empty(E, parts, dtype=torch.float32, device=w_EOI.device)
    if out is None:
        scale_E = torch.empty(E, dtype=torch.float32, device=w_EOI.device)
        out = (torch.empty_like(w_EOI, dtype=E4M3), w_EOI.new_empty(E, inputs, outputs, dtype=E4M3), scale_E)
    _amax_kernel[(E, parts)](w_EOI, amax_EP, outputs * inputs, parts, 8192, num_warps=8)
    grid = (cdiv(inputs, 128), cdiv(outputs, 128), E)
    _weight_kernel[grid](w_EOI, amax_EP, *out, outputs, inputs, parts, interleave, 128, num_warps=8)
    return out


def _round(x: Tensor, amax: Tensor) -> Tensor:
    inverse = torch.where(amax > 0, torch.full_like(amax, LARGEST).div(amax).clamp(max=3.0e38), 0.0)
    return (x.float() * inverse).clamp(-LARGEST, LARGEST).to(E4M3)


def quantize_rows_reference(
    x_RC: Tensor, bounds_E1: Tensor | None = None, factor_E: Tensor | None = None, weight_R: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Plain-torch twin of `quantize_rows`; rows without an expert hold 0."""
    amax_R1 = x_RC.float().abs().amax(1, keepdim=True)
    q_RC, scale_R = _round(x_RC, amax_R1), amax_R1[:, 0] * RECIPROCAL
    if bounds_E1 is not None:
        row_R = torch.arange(x_RC.shape[0], device=x_RC.device)
        real_R = row_R < bounds_E1[-1]
        scale_R = torch.where(real_R, scale_R * factor_E[_expert_of_reference(row_R, bounds_E1)], 0)
        q_RC = torch.where(real_R[:, None], q_RC.float(), 0).to(E4M3)
    return q_RC, scale_R if weight_R is None else scale_R * weight_R


def _expert_of_reference(row_N: Tensor, bounds_E1: Tensor) -> Tensor:
    return torch.searchsorted(bounds_E1[1:], row_N.int(), right=True).clamp(max=bounds_E1.numel() - 2)


def dswiglu_quantize_reference(
    da_NF: Tensor, h_NI: Tensor, scale_N: Tensor, weight_of_row_N: Tensor, bounds_E1: Tensor, factor_E: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Plain-torch twin of `dswiglu_quantize`; rows without an expert hold 0."""
    real_N1 = (torch.arange(da_NF.shape[0], device=da_NF.device) < bounds_E1[-1])[:, None]
    scaled_NF, wide_NI = torch.where(real_N1, da_NF.float() * scale_N[:, None], 0), torch.where(real_N1, h_NI.float(), 0)
    dh_NI, aw_NF, dweight_N = dswiglu_reference(wide_NI, scaled_NF, torch.where(real_N1[:, 0], weight_of_row_N, 0))
    dh8_NI, dh_scale_N = quantize_rows_reference(dh_NI, bounds_E1, factor_E)
    return dh_NI.to(h_NI.dtype), dh8_NI, dh_scale_N, aw_NF.to(h_NI.dtype), dweight_N


def row_scales_reference(scale_T: Tensor, token_of_row_N: Tensor, factor_E: Tensor, bounds_E1: Tensor) -> Tensor:
    """Plain-torch twin of `row_scales`; rows without an expert hold 0."""
    row_N = torch.arange(token_of_row_N.numel(), device=scale_T.device)
    scale_N = scale_T[token_of_row_N.long()] * factor_E[_expert_of_reference(row_N, bounds_E1)]
    return torch.where(row_N < bounds_E1[-1], scale_N, 0)


def quantize_weight_reference(w_EOI: Tensor, interleave: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Plain-torch twin of `quantize_weight`."""
    if interleave:
        w_EOI = torch.stack(w_EOI.chunk(2, dim=1), dim=2).flatten(1, 2)
    amax_E = w_EOI.float().abs().flatten(1).amax(1)
    q_EOI = _round(w_EOI, amax_E[:, None, None])
    # As bytes: torch 2.11 loses some where it transposes E4M3 on a GPU.
    q_EIO = q_EOI.view(torch.uint8).transpose(1, 2).contiguous().view(E4M3)
    return q_EOI, q_EIO, amax_E * RECIPROCAL
