"""Moving rows between token order and expert order: stable counting sort, spread (gather) and combine (gather-sum).

Shapes: T tokens, D width, E experts, K top-k, N = T x K slots (slot n = t K + k); B blocks of the counting sort.

Mathematics
    row_of_slot[n]    = #{m : id[m] < id[n]} + #{m < n : id[m] = id[n]}        (-1 where id[n] = E, "no expert")
    token_of_row[r]   = n // K and weight_of_row[r] = weights[n] for the slot n with row_of_slot[n] = r
    bounds[e]         = #{m : id[m] < e},  0 <= e <= E: rows bounds[e] to bounds[e + 1] belong to expert e
    spread(x)[r]      = x[token_of_row[r]]                                     [T, D] -> [N, D]
    combine(r, w)[t]  = sum over k of w[t, k] r[row_of_slot[t K + k]], fp32    [N, D] -> [T, D]
    combine(r)        = the same with w = 1: the transpose of spread
    A residual x[t] may be added to the sum: 2 T D bytes more in, where an addition of its own would move 6 T D.

Bytes (bf16, floor; no FLOPs to speak of)
    sort     8 N + 4 N in, 12 N out, and B E int32 counters that stay in L2
    spread   2 T D in, 2 N D out: each token is read once and written K times
    combine  2 N D in, 2 T D out: no atomics, one writer per row, the same bits on every run

Nothing here depends on how many rows an expert got: no value is read on the host. Rows at or beyond bounds[E] are
neither read nor written.

Measured on an H200 that copies 4.27 TB/s: spread 3.3-3.6 TB/s, combine 3.3-3.8 TB/s (T = 16,384; D 1280, 2048; K 2, 8).
The sort took 8 us for 8 experts in an older form, and 52 us for 64 (docs/kernels.md).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.sizes import cdiv, next_power_of_2

FEW_COUNTS = 2048
"""Counters that every program of the sort adds up by itself, rather than in a launch of their own."""


class Order(NamedTuple):
    """The sort in both directions; rows beyond bounds_E1[-1] have token 0 and weight 0."""

    row_of_slot_N: Tensor  # int32
    token_of_row_N: Tensor  # int32
    weight_of_row_N: Tensor  # fp32
    bounds_E1: Tensor  # int32 [E + 1]


def row_tile(width: int, elements: int = 2048, widest: int = 1024) -> tuple[int, int]:
    """(rows, columns) of a tile of about `elements`, for rows of `width`.

    Columns: the largest power of two that divides `width`, so that no lane is masked off (1280 = 5 x 256); where that
    is below 64 (odd widths) the next power of two above `width`, with a mask.
    """
    columns = min(width & -width, widest)
    if columns < 64:
        columns = min(next_power_of_2(width), widest)
    return max(elements // columns, 1), columns


@triton.jit
def _count_kernel(ids_N, counts_BE, n_slots, EXPERTS_P2: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.arange(0, EXPERTS_P2)
    ids = tl.load(ids_N + slot, mask=slot < n_slots, other=EXPERTS_P2).to(tl.int32)
    hit = (ids[:, None] == expert[None, :]).to(tl.int32)
    tl.store(counts_BE + block * EXPERTS_P2 + expert, tl.sum(hit, axis=0))


@triton.jit
def _scan_kernel(counts_BE, totals_E, n_blocks, EXPERTS_P2: tl.constexpr, CHUNK: tl.constexpr):
    """One expert per program: counts of its blocks become the sum of the blocks before."""
    expert = tl.program_id(0)
    running = tl.zeros([], tl.int32)
    for first in range(0, n_blocks, CHUNK):
        block = first + tl.arange(0, CHUNK)
        at = counts_BE + block * EXPERTS_P2 + expert
        counts = tl.load(at, mask=block < n_blocks, other=0)
        tl.store(at, running + tl.cumsum(counts, axis=0) - counts, mask=block < n_blocks)
        running += tl.sum(counts, axis=0)
    tl.store(totals_E + expert, running)


@triton.jit
def _place_kernel(
    ids_N,
    counts_BE,
    totals_E,
    weights_N,
    row_of_slot_N,
    token_of_row_N,
    weight_of_row_N,
    bounds_E1,
    n_slots,
    n_blocks,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    EXPERTS_P2: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """CHUNK: 0 after a scan, whose sums it reads; else at least the number of blocks, whose counts every program adds up."""
    block = tl.program_id(0)
    expert = tl.arange(0, EXPERTS_P2)
    if CHUNK == 0:
        totals = tl.load(totals_E + expert, mask=expert < EXPERTS, other=0)
        before = tl.load(counts_BE + block * EXPERTS_P2 + expert)
    else:
        b = tl.arange(0, CHUNK)[:, None]
        counts = tl.load(counts_BE + b * EXPERTS_P2 + expert[None, :], mask=(b < n_blocks) & (expert < EXPERTS)[None, :], other=0)
        totals = tl.sum(counts, axis=0)
        before = tl.sum(tl.where(b < block, counts, 0), axis=0)
    ends = tl.cumsum(totals, axis=0)
    if block == 0:
        tl.store(bounds_E1 + 1 + expert, ends, mask=expert < EXPERTS)
        tl.store(bounds_E1 + expert, 0, mask=expert == 0)
    start = ends - totals + before
    slot = block * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_N + slot, mask=slot < n_slots, other=EXPERTS_P2).to(tl.int32)
    hit = (ids[:, None] == expert[None, :]).to(tl.int32)
    row = tl.sum(hit * (tl.cumsum(hit, axis=0) - 1 + start[None, :]), axis=1)
    # An id at or above EXPERTS ("no expert") owns no row, also where it falls into a padding column.
    real = (ids < EXPERTS) & (slot < n_slots)
    tl.store(row_of_slot_N + slot, tl.where(real, row, -1), mask=slot < n_slots)
    tl.store(token_of_row_N + row, slot // K, mask=real)
    tl.store(weight_of_row_N + row, tl.load(weights_N + slot, mask=real, other=0.0), mask=real)
    free = (slot >= tl.sum(totals, axis=0)) & (slot < n_slots)  # as the number of a row
    tl.store(token_of_row_N + slot, 0, mask=free)
    tl.store(weight_of_row_N + slot, 0.0, mask=free)


def sort_slots(experts_TK: Tensor, weights_TK: Tensor, experts: int) -> Order:
    """Stable counting sort of the N expert ids (int64, each in [0, experts]) in two launches, or three for many; weights fp32."""
    ids_N = experts_TK.reshape(-1)
    n = ids_N.numel()
    if n == 0:
        none = ids_N.new_zeros(0, dtype=torch.int32)
        return Order(none, none.clone(), none.float(), ids_N.new_zeros(experts + 1, dtype=torch.int32))
    order = Order(
        ids_N.new_empty(n, dtype=torch.int32),
        ids_N.new_empty(n, dtype=torch.int32),
        ids_N.new_empty(n, dtype=torch.float32),
        ids_N.new_empty(experts + 1, dtype=torch.int32),
    )
    experts_p2 = next_power_of_2(experts)
    block = min(max(8192 // experts_p2, 16), 1024, max(next_power_of_2(n), 16))
    blocks = cdiv(n, block)
    counts_BE = torch.empty(blocks, experts_p2, dtype=torch.int32, device=ids_N.device)
    totals_E = torch.empty(experts_p2, dtype=torch.int32, device=ids_N.device)
    _count_kernel[(blocks,)](ids_N, counts_BE, n, experts_p2, block, num_warps=4)
    chunk = next_power_of_2(blocks)
    few = chunk * experts_p2 <= FEW_COUNTS
    if not few:
        _scan_kernel[(experts_p2,)](counts_BE, totals_E, blocks, experts_p2, min(chunk, 1024), num_warps=4)
    _place_kernel[(blocks,)](
        ids_N, counts_BE, totals_E, weights_TK.reshape(-1), *order, n, blocks, experts_TK.shape[1], experts, experts_p2, block,
        chunk if few else 0, num_warps=4,
    )  # fmt: skip
    return order


def sort_slots_reference(experts_TK: Tensor, weights_TK: Tensor, experts: int) -> Order:
    """Plain-torch twin of `sort_slots`."""
    ids_N, weights_N = experts_TK.reshape(-1), weights_TK.reshape(-1)
    slot_of_row_N = torch.argsort(ids_N, stable=True)
    row_of_slot_N = torch.empty_like(slot_of_row_N)
    row_of_slot_N[slot_of_row_N] = torch.arange(slot_of_row_N.numel(), device=ids_N.device)
    real_N = ids_N < experts
    bounds_E1 = torch.bincount(ids_N + 1, minlength=experts + 2)[: experts + 1].cumsum(0)
    return Order(
        torch.where(real_N, row_of_slot_N, -1).int(),
        torch.where(real_N[slot_of_row_N], slot_of_row_N // experts_TK.shape[1], 0).int(),
        torch.where(real_N[slot_of_row_N], weights_N[slot_of_row_N], 0),
        bounds_E1.int(),
    )


@triton.jit
def _spread_kernel(x_TD, rows_ND, row_of_slot_N, tokens, D: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < D)[None, :]
    x = tl.load(x_TD + token[:, None].to(tl.int64) * D + column[None, :], mask=inside)
    for k in tl.static_range(K):
        row = tl.load(row_of_slot_N + token * K + k, mask=token < tokens, other=-1)
        tl.store(rows_ND + row[:, None].to(tl.int64) * D + column[None, :], x, mask=inside & (row >= 0)[:, None])


@triton.jit
def _combine_kernel(
    rows_ND,
    y_TD,
    row_of_slot_N,
    weights_N,
    residual_TD,
    tokens,
    D: tl.constexpr,
    K: tl.constexpr,
    WEIGHTED: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < D)[None, :]
    at = token[:, None].to(tl.int64) * D + column[None, :]
    y = tl.zeros([ROWS, COLUMNS], tl.float32)
    if RESIDUAL:
        y += tl.load(residual_TD + at, mask=inside, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_of_slot_N + token * K + k, mask=token < tokens, other=-1)
        part = tl.load(rows_ND + row[:, None].to(tl.int64) * D + column[None, :], mask=inside & (row >= 0)[:, None], other=0.0).to(
            tl.float32
        )
        if WEIGHTED:
            part *= tl.load(weights_N + token * K + k, mask=(token < tokens) & (row >= 0), other=0.0)[:, None]
        y += part
    tl.store(y_TD + at, y.to(y_TD.dtype.element_ty), mask=inside)


@triton.jit
def _to_slots_kernel(values_N, slots_N, row_of_slot_N, n_slots, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(row_of_slot_N + slot, mask=slot < n_slots, other=-1)
    tl.store(slots_N + slot, tl.load(values_N + row, mask=row >= 0, other=0.0), mask=slot < n_slots)


def spread(x_TD: Tensor, row_of_slot_N: Tensor, k: int, rows: int | None = None) -> Tensor:
    """Each token's row copied to the rows of its slots: [N, D], or zero-filled [rows, D] where a layout has gaps.

    Without `rows`, rows that no slot owns stay uninitialised.
    """
    tokens, width = x_TD.shape
    rows_ND = x_TD.new_empty(tokens * k, width) if rows is None else x_TD.new_zeros(rows, width)
    if tokens and width:
        tile_rows, columns = row_tile(width)
        grid = (cdiv(tokens, tile_rows), cdiv(width, columns))
        _spread_kernel[grid](x_TD.contiguous(), rows_ND, row_of_slot_N, tokens, width, k, tile_rows, columns, num_warps=4)
    return rows_ND


def combine(rows_ND: Tensor, row_of_slot_N: Tensor, k: int, weights_TK: Tensor | None = None, residual_TD: Tensor | None = None) -> Tensor:
    """Sum of each token's K rows, times their fp32 weights if given, and of its residual if given, in fp32, rounded once to the
    rows' dtype: [T, D]."""
    width = rows_ND.shape[1]
    tokens = row_of_slot_N.numel() // k
    y_TD = rows_ND.new_empty(tokens, width)
    if y_TD.numel():
        rows, columns = row_tile(width, elements=1024)
        grid = (cdiv(tokens, rows), cdiv(width, columns))
        weights_N = rows_ND if weights_TK is None else weights_TK.reshape(-1)
        residual = rows_ND if residual_TD is None else residual_TD.contiguous()
        _combine_kernel[grid](
            rows_ND, y_TD, row_of_slot_N, weights_N, residual, tokens, width, k, weights_TK is not None, residual_TD is not None,
            rows, columns, num_warps=4,
        )  # fmt: skip
    return y_TD


def to_slots(values_N: Tensor, row_of_slot_N: Tensor) -> Tensor:
    """One fp32 number per row brought to slot order; 0 for slots without an expert."""
    slots_N = torch.empty_like(values_N)
    if slots_N.numel():
        _to_slots_kernel[(cdiv(slots_N.numel(), 1024),)](values_N, slots_N, row_of_slot_N, slots_N.numel(), 1024)
    return slots_N


def spread_reference(x_TD: Tensor, row_of_slot_N: Tensor, k: int) -> Tensor:
    """Plain-torch twin of `spread`; rows without a slot hold 0."""
    rows_ND = x_TD.new_zeros(x_TD.shape[0] * k, x_TD.shape[1])
    real_N = row_of_slot_N >= 0
    rows_ND[row_of_slot_N[real_N].long()] = x_TD.repeat_interleave(k, dim=0)[real_N]
    return rows_ND


def combine_reference(
    rows_ND: Tensor, row_of_slot_N: Tensor, k: int, weights_TK: Tensor | None = None, residual_TD: Tensor | None = None
) -> Tensor:
    """Plain-torch twin of `combine`."""
    picked_ND = torch.where((row_of_slot_N >= 0)[:, None], rows_ND[row_of_slot_N.clamp(min=0).long()], 0)
    picked_TKD = picked_ND.unflatten(0, (-1, k)).float()
    if weights_TK is not None:
        picked_TKD = torch.where((row_of_slot_N >= 0).view(-1, k, 1), picked_TKD * weights_TK[:, :, None], 0)
    y_TD = picked_TKD.sum(1) if residual_TD is None else residual_TD.float() + picked_TKD.sum(1)
    return y_TD.to(rows_ND.dtype)


def to_slots_reference(values_N: Tensor, row_of_slot_N: Tensor) -> Tensor:
    """Plain-torch twin of `to_slots`."""
    return torch.where(row_of_slot_N >= 0, values_N[row_of_slot_N.clamp(min=0).long()], 0)
