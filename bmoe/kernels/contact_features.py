"""Contact features of residue pairs from queries and keys, without ever forming an attention map.

Legend: L layers, H query heads, G key heads, A = L x H maps (layer-major), T tokens, d head dimension, C sequences of n tokens,
P pairs, N tiles.

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

from bmoe.kernels.sizes import cdiv, next_power_of_2

BLOCK = 64
"""Tokens of a tile's rows and of its columns."""

ROWS = {"num_warps": 4, "num_stages": 2}
"""Of the kernels that go along rows: the fastest of ten on an H200 (d 64 and 16)."""

TILE = {"num_warps": 8, "num_stages": 2, "maxnreg": 128}
"""Of the features' kernel, the fastest of ten on an H200: by itself it takes 178 registers of a thread (bf16, d 64, sm_90), and then one
program at a time fits a multiprocessor. At d 256 two stages take more memory than it shares."""

MAPS = 10
"""Maps whose tile of features one program computes, one after the other: the loads of the next one are under way meanwhile."""


@triton.jit
def _tokens(head_Td, begin, token, inside, token_stride, d, D: tl.constexpr):
    """[BLOCK, D] of one head, as it is, 0 outside."""
    column = tl.arange(0, D)
    place = token[:, None] * token_stride + column[None, :]
    return tl.load(head_Td + begin * token_stride + place, mask=inside[:, None] & (column < d)[None, :], other=0.0)


@triton.jit
def _products(left, right, scale):
    return tl.dot(left, tl.trans(right), input_precision="ieee") * scale


@triton.jit
def _normaliser_kernel(
    q_LTHd, k_LTGd, begins_C, sizes_C, blocks_2N, z_AT, blocks, T, scale, heads, group, d, q_layer, q_token, k_layer, k_token,
    CAUSAL: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    sequence, block = tl.load(blocks_2N + tl.program_id(0)), tl.load(blocks_2N + blocks + tl.program_id(0))
    begin, n = tl.load(begins_C + sequence), tl.load(sizes_C + sequence).to(tl.int32)
    a = tl.program_id(1)
    q_Td = q_LTHd + (a // heads).to(tl.int64) * q_layer + a % heads * d
    k_Td = k_LTGd + (a // heads).to(tl.int64) * k_layer + a % heads // group * d
    i = block.to(tl.int32) * B + tl.arange(0, B)
    q = _tokens(q_Td, begin, i, i < n, q_token, d, D)
    top = tl.full([B], float("-inf"), tl.float32)
    total = tl.zeros([B], tl.float32)
    for first in range(0, n, B):
        j = first + tl.arange(0, B)
        s = _products(q, _tokens(k_Td, begin, j, j < n, k_token, d, D), scale)
        seen = (j < n)[None, :]
        if CAUSAL:
            seen = seen & (j[None, :] <= i[:, None])
        s = tl.where(seen, s, float("-inf"))
        above = tl.maximum(top, tl.max(s, axis=1))  # finite from the first block on: its first token is seen by all
        total = total * tl.exp(top - above) + tl.sum(tl.exp(s - above[:, None]), axis=1)
        top = above
    tl.store(z_AT + a.to(tl.int64) * T + begin + i, top + tl.log(total), mask=i < n)


@triton.jit
def _sums_kernel(
    q_LTHd, k_LTGd, begins_C, sizes_C, blocks_2N, z_AT, r_AT, blocks, T, scale, heads, group, d, q_layer, q_token, k_layer, k_token,
    CAUSAL: tl.constexpr, D: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    sequence, block = tl.load(blocks_2N + tl.program_id(0)), tl.load(blocks_2N + blocks + tl.program_id(0))
    begin, n = tl.load(begins_C + sequence), tl.load(sizes_C + sequence).to(tl.int32)
    a = tl.program_id(1)
    q_Td = q_LTHd + (a // heads).to(tl.int64) * q_layer + a % heads * d
    k_Td = k_LTGd + (a // heads).to(tl.int64) * k_layer + a % heads // group * d
    at = a.to(tl.int64) * T + begin
    i = block.to(tl.int32) * B + tl.arange(0, B)
    q_i, k_i = _tokens(q_Td, begin, i, i < n, q_token, d, D), _tokens(k_Td, begin, i, i < n, k_token, d, D)
    z_i = tl.load(z_AT + at + i, mask=i < n, other=0.0)
    r = tl.zeros([B], tl.float32)
    for first in range(0, n, B):
        j = first + tl.arange(0, B)
        z_j = tl.load(z_AT + at + j, mask=j < n, other=0.0)
        row = _products(q_i, _tokens(k_Td, begin, j, j < n, k_token, d, D), scale) - z_i[:, None]
        column = _products(k_i, _tokens(q_Td, begin, j, j < n, q_token, d, D), scale) - z_j[None, :]
        residue = ((j > 0) & (j < n - 1))[None, :]
        if CAUSAL:
            row = tl.where(j[None, :] <= i[:, None], row, float("-inf"))
            column = tl.where(i[:, None] <= j[None, :], column, float("-inf"))
        r += tl.sum(tl.where(residue, tl.exp(row) + tl.exp(column), 0.0), axis=1)
    tl.store(r_AT + at + i, tl.where((i > 0) & (i < n - 1), r, 0.0), mask=i < n)


@triton.jit
def _roots_kernel(begins_C, sizes_C, r_AT, T, MANY: tl.constexpr):
    """r / sqrt(t) in place of r, whose products are the correction."""
    begin, n = tl.load(begins_C + tl.program_id(0)), tl.load(sizes_C + tl.program_id(0)).to(tl.int32)
    r_n = r_AT + tl.program_id(1).to(tl.int64) * T + begin
    parts = tl.zeros([MANY], tl.float32)
    for first in range(0, n, MANY):
        token = first + tl.arange(0, MANY)
        parts += tl.load(r_n + token, mask=token < n, other=0.0)
    root = tl.sqrt(tl.maximum(tl.sum(parts, axis=0), 1e-30))  # a head may look at specials alone
    for first in range(0, n, MANY):
        token = first + tl.arange(0, MANY)
        tl.store(r_n + token, tl.load(r_n + token, mask=token < n, other=0.0) / root, mask=token < n)


@triton.jit
def _features_kernel(
    q_LTHd, k_LTGd, begins_C, sizes_C, tiles_3N, before_T, rank_T, z_AT, r_AT, out_AP, tiles, P, maps, nearest,
    T, scale, heads, group, d, q_layer, q_token, k_layer, k_token,
    CAUSAL: tl.constexpr, D: tl.constexpr, B: tl.constexpr, MAPS: tl.constexpr,
):  # fmt: skip
    tile = tiles_3N + tl.program_id(0)
    sequence = tl.load(tile)
    i = tl.load(tile + tiles).to(tl.int32) * B + tl.arange(0, B)
    j = tl.load(tile + 2 * tiles).to(tl.int32) * B + tl.arange(0, B)
    begin, n = tl.load(begins_C + sequence), tl.load(sizes_C + sequence).to(tl.int32)
    before, rank_i = tl.load(before_T + begin + i, mask=i < n, other=0), tl.load(rank_T + begin + i, mask=i < n, other=-1)
    rank_j = tl.load(rank_T + begin + j, mask=j < n, other=-1)
    # Nearly so: residues of unknown place leave gaps. It makes neighbouring lanes store along a row, one value each, as addresses
    # are multiples of no more; without it they store down a column, 32 sectors of memory at a time.
    rank_j = tl.max_contiguous(rank_j, B)
    asked = (rank_i >= 0)[:, None] & (rank_j >= 0)[None, :] & (j[None, :] - i[:, None] >= nearest)
    for number in range(MAPS):
        a = tl.program_id(1) * MAPS + number
        size = tl.where(a < maps, n, 0)
        q_Td = q_LTHd + (a // heads).to(tl.int64) * q_layer + a % heads * d
        k_Td = k_LTGd + (a // heads).to(tl.int64) * k_layer + a % heads // group * d
        at = a.to(tl.int64) * T + begin
        inside_i, inside_j = i < size, j < size
        z_j = tl.load(z_AT + at + j, mask=inside_j, other=0.0)
        r_i, r_j = tl.load(r_AT + at + i, mask=inside_i, other=0.0), tl.load(r_AT + at + j, mask=inside_j, other=0.0)
        k_i, q_j = _tokens(k_Td, begin, i, inside_i, k_token, d, D), _tokens(q_Td, begin, j, inside_j, q_token, d, D)
        found = tl.exp(_products(k_i, q_j, scale) - z_j[None, :]) - r_i[:, None] * r_j[None, :]
        if not CAUSAL:  # then i, the earlier one, does not see j
            z_i = tl.load(z_AT + at + i, mask=inside_i, other=0.0)
            q_i, k_j = _tokens(q_Td, begin, i, inside_i, q_token, d, D), _tokens(k_Td, begin, j, inside_j, k_token, d, D)
            found += tl.exp(_products(q_i, k_j, scale) - z_i[:, None])
        row = out_AP + (a.to(tl.int64) * P + before)[:, None]
        tl.store(row + rank_j[None, :], found, mask=asked & inside_i[:, None])


def tables(sizes_C: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of rows, [2, N] (sequence, block), and tiles of the upper halves, [3, N'] (sequence, block of i, block of j)."""
    counts_C = -(-sizes_C // BLOCK)
    sequence_N, block_N = _numbered(counts_C)
    of_N, right_N = _numbered(counts_C[sequence_N] - block_N)
    return np.stack([sequence_N, block_N]), np.stack([sequence_N[of_N], block_N[of_N], block_N[of_N] + right_N])


def _numbered(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of so many items of each group, one group after the other: which group, and the place in it."""
    group = np.repeat(np.arange(counts.size), counts)
    return group, np.arange(group.size) - (np.cumsum(counts) - counts)[group]


def contact_features(
    q_LTHd: Tensor, k_LTGd: Tensor, before_T: Tensor, rank_T: Tensor, begins_C: Tensor, sizes_C: Tensor, blocks_2N: Tensor,
    tiles_3N: Tensor, pairs: int, nearest: int, causal: bool,
) -> Tensor:  # fmt: skip
    """Features fp32 [A, P] of pairs of residues of the sequences at `begins_C`, of `sizes_C` tokens with their specials.

    q_LTHd, k_LTGd: bf16, fp16 or fp32, the heads of a token one after the other. Integers are int64. Tokens i and j of a sequence are
    a pair if both rank_T are at least 0 and j - i is at least `nearest`; its place among the P `pairs` is before_T[i] + rank_T[j].
    blocks_2N and tiles_3N are `tables` of the sizes. Sums have a fixed order.
    """
    L, T, H, d = q_LTHd.shape
    A, group = L * H, H // k_LTGd.shape[2]
    z_AT, r_AT = (torch.empty(A, T, dtype=torch.float32, device=q_LTHd.device) for _ in range(2))
    out_AP = torch.empty(A, pairs, dtype=torch.float32, device=q_LTHd.device)
    blocks, tiles = blocks_2N.shape[1], tiles_3N.shape[1]
    strides = (*q_LTHd.stride()[:2], *k_LTGd.stride()[:2])
    common = (T, d**-0.5, H, group, d, *strides, causal, next_power_of_2(max(d, 16)), BLOCK)
    sequences = (q_LTHd, k_LTGd, begins_C, sizes_C)
    _normaliser_kernel[(blocks, A)](*sequences, blocks_2N, z_AT, blocks, *common, **ROWS)
    _sums_kernel[(blocks, A)](*sequences, blocks_2N, z_AT, r_AT, blocks, *common, **ROWS)
    _roots_kernel[(sizes_C.numel(), A)](begins_C, sizes_C, r_AT, T, MANY=512, num_warps=4)
    _features_kernel[(tiles, cdiv(A, MAPS))](
        *sequences, tiles_3N, before_T, rank_T, z_AT, r_AT, out_AP, tiles, pairs, A, nearest, *common, MAPS, **TILE
    )
    return out_AP
