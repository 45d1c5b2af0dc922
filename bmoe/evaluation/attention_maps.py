"""Attention probabilities of every head, by the definition: fused kernels never form them.

Legend: H query heads, G key heads, L layers, A = L x H maps, layer-major, T tokens, d head dimension, C sequences padded to n tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bmoe.evaluation.forward import packed, upload
from bmoe.model.attention import attention
from bmoe.model.layers import Layout, wide

HELD = 2**24  # bytes of maps formed at a time, of several sequences: what a cache holds
FORMED = 2**30  # bytes of one sequence's maps above which they are formed some layers at a time
PADDED = 1.25  # of the shortest sequence's length is the longest that it is put together with


class Maps(NamedTuple):
    """Maps of some sequences: softmax(q k^T / sqrt(d)), at least fp32 [A, C, n, n], rows are queries. Beyond a sequence's tokens, keys
    have 0, and queries have no meaning. Of a long sequence some layers' only, and the next layers' in the next."""

    numbers: list[int]  # which sequences
    sizes: list[int]  # their tokens
    values_ACnn: Tensor


class Projections(NamedTuple):
    """Queries and keys of all layers, as the layer itself projects, normalises and rotates them, of sequences in one row of tokens."""

    numbers: list[int]  # which sequences
    bounds: np.ndarray  # where each begins, and the last one ends
    q_LTHd: Tensor
    k_LTGd: Tensor


@torch.no_grad()
def projections(model: nn.Module, sequences: list[np.ndarray], slots: int, device: torch.device) -> Iterator[Projections]:
    """Queries and keys of all sequences on `device`, by ascending length. Sequences carry their specials."""
    order = sorted(range(len(sequences)), key=lambda number: sequences[number].size)
    done = 0
    for batch in packed((sequences[number] for number in order), slots, device):
        with _projected(model, int(batch.bounds[-1])) as qk_LTad:
            model(**batch.inputs, select_M=torch.zeros(1, dtype=torch.int64, device=device))
        count = batch.bounds.size - 1
        H = model.blocks[0].attention.heads
        yield Projections(order[done : done + count], batch.bounds, qk_LTad[:, :, :H], qk_LTad[:, :, H:])
        done += count


@torch.no_grad()
def attention_maps(model: nn.Module, sequences: list[np.ndarray], slots: int, device: torch.device) -> Iterator[Maps]:
    """The maps of all sequences, those of similar length together, on `device`. Decoders attend to earlier tokens only."""
    for numbers, bounds, q_LTHd, k_LTGd in projections(model, sequences, slots, device):
        k_LTHd = k_LTGd.repeat_interleave(q_LTHd.shape[2] // k_LTGd.shape[2], dim=2)
        sizes_S, A = np.diff(bounds), q_LTHd.shape[0] * q_LTHd.shape[2]
        for first, last in _alike(sizes_S, HELD // (4 * A)):
            begins_C, sizes_C = bounds[first:last], sizes_S[first:last]
            of_a_layer = 4 * q_LTHd.shape[2] * sizes_C.size * int(sizes_C.max()) ** 2
            some = max(FORMED // of_a_layer, 1)
            for q_lTHd, k_lTHd in zip(q_LTHd.split(some), k_LTHd.split(some), strict=True):
                values_ACnn = _probabilities(q_lTHd, k_lTHd, begins_C, sizes_C, model.blocks[0].attention.causal)
                yield Maps(numbers[first:last], sizes_C.tolist(), values_ACnn)


def _alike(sizes_S: np.ndarray, entries: int) -> Iterator[tuple[int, int]]:
    """Runs [first, last) of ascending sizes, no longest above PADDED times the shortest, of at most `entries` squares of the longest."""
    first = 0
    for last in range(1, sizes_S.size + 1):
        following = sizes_S[last] if last < sizes_S.size else np.inf
        if following > PADDED * sizes_S[first] or (last + 1 - first) * following**2 > entries:
            yield first, last
            first = last


@contextmanager
def _projected(model: nn.Module, tokens: int) -> Iterator[Tensor]:
    """Queries and keys, [L, T, H + G, d], of the forward pass of as many tokens inside; all of them belong to sequences."""
    layers = [block.attention for block in model.blocks]
    first = layers[0]
    qk_LTad = first.qkv.weight.new_empty(len(layers), tokens, first.heads + first.kv_heads, first.head_dim)
    for layer, qk_Tad in zip(layers, qk_LTad, strict=True):
        layer.forward = partial(_attend, layer, qk_Tad)
    try:
        yield qk_LTad
    finally:
        for layer in layers:
            del layer.forward  # the class's own is back


def _attend(layer: nn.Module, qk_Tad: Tensor, x_TD: Tensor, layout: Layout) -> Tensor:
    q_THd, k_TGd = qk_Tad.split((layer.heads, layer.kv_heads), dim=1)
    if x_TD.is_cuda and layer.query_norm is None:
        v_TGd = turned(layer, x_TD, layout, qk_Tad)
    else:
        *projected, v_TGd = layer.project(x_TD, layout)
        qk_Tad.copy_(torch.cat(projected, dim=1))
    out_THd = attention(q_THd, k_TGd, v_TGd, layout.cu_seqlens, layout.max_seqlen, layer.causal, tail=False)
    return layer.output(out_THd.flatten(1))


def turned(layer: nn.Module, x_TD: Tensor, layout: Layout, qk_Tad: Tensor) -> Tensor:
    """`layer.project` of a layer that does not normalise queries and keys, by one kernel where operations of torch take eight: they
    are written into contiguous [T, H + G, d]. Returns values [T, G, d]."""
    from bmoe.kernels.rotary import queries_and_keys

    H, G = layer.heads, layer.kv_heads
    qkv_TAd = layer.qkv(x_TD).view(-1, H + 2 * G, layer.head_dim)
    queries_and_keys(qkv_TAd, G, layout.cos_Th, layout.sin_Th, layout.cu_seqlens, qk_Tad)
    return qkv_TAd[:, H + G :]


def _probabilities(q_LTHd: Tensor, k_LTHd: Tensor, begins_C: np.ndarray, sizes_C: np.ndarray, causal: bool) -> Tensor:
    L, _, H, d = q_LTHd.shape
    C, n = sizes_C.size, int(sizes_C.max())
    inside_Cn = np.arange(n) < sizes_C[:, None]
    rows_Cn = np.where(inside_Cn, begins_C[:, None] + np.arange(n), begins_C[:, None])
    rows, inside = upload([rows_Cn.ravel(), inside_Cn.ravel()], q_LTHd.device)

    def padded(x_LTHd: Tensor) -> Tensor:
        """[A C, n, d]"""
        return wide(x_LTHd.index_select(1, rows)).view(L, C, n, H, d).permute(0, 3, 1, 2, 4).reshape(L * H * C, n, d)

    scores = torch.bmm(padded(q_LTHd) / d**0.5, padded(k_LTHd).transpose(1, 2)).view(L * H, C, n, n)
    if sizes_C.min() < n:
        scores.masked_fill_(inside.view(C, 1, n) == 0, float("-inf"))
    if causal:
        scores.masked_fill_(torch.ones(n, n, dtype=torch.bool, device=scores.device).triu(1), float("-inf"))
    return scores.softmax(dim=-1)
