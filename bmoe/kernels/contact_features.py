"""Contact features of residue pairs from queries and keys, without ever forming an attention map.

Legend: L layers, H heads, A = L x H maps (layer-major), T tokens, d head dimension, C sequences of n tokens, P pairs, N tiles.

Mathematics, per map of a sequence, with R its residues (its tokens but the first and the last)
    p_ij = exp(q_i . k_j / sqrt(d) - z_i),   z_i = log sum over j of exp(q_i . k_j / sqrt(d))
    r_i = sum over j in R of (p_ij + p_ji),   t = sum over i in R of r_i
    feature of the pair i < j:   p_ij + p_ji - r_i r_j / t
the symmetrised map with the average product correction (Rao et al. 2021). Products of bf16 are exact in fp32, and all sums are fp32.

FLOPs: 2 d n^2 a product of a map's tiles: one for z, two for r, two for the upper half of the features; 8 d n^2 in all.
Bytes: 4 P A out. Queries and keys (4 T d H L in bf16) are read once a block of 64 tokens, from the cache. The maps, 4 n^2 A, would be
written once and read about six times: with 480 maps and 42 small chains (2.2 M squares of tokens, 1.0 M pairs) 4.3 GB, the features 2.0.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.sizes import next_power_of_2

BLOCK = 64
"""Tokens of a tile's rows and of its columns."""

WARPS = 8
"""With four, a tile of the features takes all 255 registers of a thread (bf16, d 64, sm_90); with eight no kernel spills."""

SUMMED = 1024
"""Sums over a row that are added at a time: one wait for memory where most chains have no more tokens."""


@triton.jit
def _tokens(x_LTHd, begin, token, inside, layer_stride, heads, d, D: tl.constexpr):
    """[BLOCK, D] of one head, fp32 or less, 0 outside."""
    a = tl.program_id(1)
    at = (a // heads).to(tl.int64) * layer_stride + (a % heads) * d
    column = tl.arange(0, D)
    place = token[:, None] * (heads * d) + column[None, :]
    return tl.load(x_LTHd + at + begin * heads * d + place, mask=inside[:, None] & (column < d)[None, :], other=0.0)


@triton.jit
def _products(left, right, scale):
    return tl.dot(left, tl.trans(right), input_precision="ieee") * scale


@triton.jit
def _normaliser_kernel(
    q_LTHd, k_LTHd, begins_C, sizes_C, blocks_2N, z_AT, blocks, T, scale, layer_stride, heads, d,
    CAUSAL: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    sequence, block = tl.load(blocks_2N + tl.program_id(0)), tl.load(blocks_2N + blocks + tl.program_id(0))
    begin, n = tl.load(begins_C + sequence), tl.load(sizes_C + sequence).to(tl.int32)
    i = block.to(tl.int32) * B + tl.arange(0, B)
    q = _tokens(q_LTHd, begin, i, i < n, layer_stride, heads, d, D)
    top = tl.full([B], float("-inf"), tl.float32)
    total = tl.zeros([B], tl.float32)
    for first in range(0, n, B):
        j = first + tl.arange(0, B)
        s = _products(q, _tokens(k_LTHd, begin, j, j < n, layer_stride, heads, d, D), scale)
        seen = (j < n)[None, :]
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None])
        s = tl.where(seen, s, float("-inf"))
        above = tl.maximum(top, tl.max(s, axis=1))  # finite from the first block on: its first token is seen by all
        total = total * tl.exp(top - above) + tl.sum(tl.exp(s - above[:, None]), axis=1)
        top = above
    tl.store(z_AT + tl.program_id(1).to(tl.int64) * T + begin + i, top + tl.log(total), mask=i < n)


@triton.jit
def _sums_kernel(
    q_LTHd, k_LTHd, begins_C, sizes_C, blocks_2N, z_AT, r_AT, blocks, T, scale, layer_stride, heads, d,
    CAUSAL: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    sequence, block = tl.load(blocks_2N + tl.program_id(0)), tl.load(blocks_2N + blocks + tl.program_id(0))
    begin, n = tl.load(begins_C + sequence), tl.load(sizes_C + sequence).to(tl.int32)
    at = tl.program_id(1).to(tl.int64) * T + begin
    i = block.to(tl.int32) * B + tl.arange(0, B)
    q_i = _tokens(q_LTHd, begin, i, i < n, layer_stride, heads, d, D)
    k_i = _tokens(k_LTHd, begin, i, i < n, layer_stride, heads, d, D)
    z_i = tl.load(z_AT + at + i, mask=i < n, other=0.0)
    r = tl.zeros([B], tl.float32)
    for first in range(0, n, B):
        j = first + tl.arange(0, B)
        z_j = tl.load(z_AT + at + j, mask=j < n, other=0.0)
        row = _products(q_i, _tokens(k_LTHd, begin, j, j < n, layer_stride, heads, d, D), scale) - z_i[:, None]
        column = _products(k_i, _tokens(q_LTHd, begin, j, j < n, layer_stride, heads, d, D), scale) - z_j[None, :]
        residue = ((j > 0) & (j < n - 1))[None, :]
        if CAUSAL:
            row = tl.where(j[None, :] <= i[:, None], row, float("-inf"))
            column = tl.where(i[:, None] <= j[None, :], column, float("-inf"))
        r += tl.sum(tl.where(residue, tl.exp(row) + tl.exp(column), 0.0), axis=1)
    tl.store(r_AT + at + i, tl.where((i > 0) & (i < n - 1), r, 0.0), mask=i < n)


@triton.jit
def _features_kernel(
    q_LTHd, k_LTHd, begins_C, sizes_C, squares_C, tiles_3N, pair_Q, z_AT, r_AT, out_AP, tiles, T, P, scale, layer_stride, heads, d,
    CAUSAL: tl.constexpr, D: tl.constexpr, B: tl.constexpr, SUMMED: tl.constexpr,
):  # fmt: skip
    tile = tiles_3N + tl.program_id(0)
    sequence = tl.load(tile)
    begin, n = tl.load(begins_C + sequence), tl.load(sizes_C + sequence).to(tl.int32)
    at = tl.program_id(1).to(tl.int64) * T + begin
    i = tl.load(tile + tiles).to(tl.int32) * B + tl.arange(0, B)
    j = tl.load(tile + 2 * tiles).to(tl.int32) * B + tl.arange(0, B)
    inside = (i < n)[:, None] & (j < n)[None, :]
    pair = tl.load(pair_Q + tl.load(squares_C + sequence) + i[:, None] * n + j[None, :], mask=inside, other=-1)
    parts = tl.zeros([SUMMED], tl.float32)
    for first in range(0, n, SUMMED):
        token = first + tl.arange(0, SUMMED)
        parts += tl.load(r_AT + at + token, mask=token < n, other=0.0)
    t = tl.maximum(tl.sum(parts, axis=0), 1e-30)  # a head may look at specials alone
    z_i, z_j = tl.load(z_AT + at + i, mask=i < n, other=0.0), tl.load(z_AT + at + j, mask=j < n, other=0.0)
    r_i, r_j = tl.load(r_AT + at + i, mask=i < n, other=0.0), tl.load(r_AT + at + j, mask=j < n, other=0.0)
    k_i = _tokens(k_LTHd, begin, i, i < n, layer_stride, heads, d, D)
    q_j = _tokens(q_LTHd, begin, j, j < n, layer_stride, heads, d, D)
    found = tl.exp(_products(k_i, q_j, scale) - z_j[None, :]) - (r_i / t)[:, None] * r_j[None, :]
    if not CAUSAL:  # then i, the earlier one, does not see j
        q_i = _tokens(q_LTHd, begin, i, i < n, layer_stride, heads, d, D)
        k_j = _tokens(k_LTHd, begin, j, j < n, layer_stride, heads, d, D)
        found += tl.exp(_products(q_i, k_j, scale) - z_i[:, None])
    tl.store(out_AP + tl.program_id(1).to(tl.int64) * P + pair, found, mask=pair >= 0)


def tables(sizes_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of rows, [2, N] (sequence, block), and tiles of the upper halves, [3, N'] (sequence, block of i, block of j)."""
    counts_C = -(-sizes_C // BLOCK)
    upper = [np.triu_indices(count) for count in counts_C]
    sequence = np.arange(sizes_C.size)
    blocks = np.stack([np.repeat(sequence, counts_C), np.concatenate([np.arange(count) for count in counts_C])])
    tiles = np.stack([np.repeat(sequence, [i.size for i, _ in upper]), *(np.concatenate(part) for part in zip(*upper, strict=True))])
    return blocks, tiles


def contact_features(
    q_LTHd: Tensor, k_LTHd: Tensor, begins_C: Tensor, sizes_C: Tensor, blocks_2N: Tensor, tiles_3N: Tensor,
    squares_C: Tensor, pair_Q: Tensor, pairs: int, causal: bool,
) -> Tensor:  # fmt: skip
    """Features fp32 [A, P] of pairs of residues of the sequences at `begins_C`, of `sizes_C` tokens with their specials.

    q_LTHd, k_LTHd: bf16, fp16 or fp32, contiguous, of one shape. Integers are int64, but for pair_Q, int32: the squares [n, n] of the
    sequences one after the other, each from `squares_C` on; at (i, j), tokens of a sequence, i < j, the pair's place among the P
    `pairs`, -1 where nothing is asked for. blocks_2N and tiles_3N are `tables` of the sizes. Sums have a fixed order.
    """
    L, T, H, d = q_LTHd.shape
    A, scale = L * H, d**-0.5
    z_AT, r_AT = (q_LTHd.new_empty(A, T, dtype=torch.float32) for _ in range(2))
    out_AP = q_LTHd.new_empty(A, pairs, dtype=torch.float32)
    common = (scale, T * H * d, H, d, causal, next_power_of_2(max(d, 16)), BLOCK)
    blocks, tiles = blocks_2N.shape[1], tiles_3N.shape[1]
    _normaliser_kernel[(blocks, A)](q_LTHd, k_LTHd, begins_C, sizes_C, blocks_2N, z_AT, blocks, T, *common, num_warps=WARPS)
    _sums_kernel[(blocks, A)](q_LTHd, k_LTHd, begins_C, sizes_C, blocks_2N, z_AT, r_AT, blocks, T, *common, num_warps=WARPS)
    _features_kernel[(tiles, A)](
        q_LTHd,
        k_LTHd,
        begins_C,
        sizes_C,
        squares_C,
        tiles_3N,
        pair_Q,
        z_AT,
        r_AT,
        out_AP,
        tiles,
        T,
        pairs,
        *common,
        SUMMED,
        num_warps=WARPS,
    )
    return out_AP
