"""Features of residue pairs for contacts: every head's attention, symmetrised, with the average product correction.

As in ESM (Rao et al. 2021), the specials are stripped before. On a GPU kernels compute the features alone, in 16 bits
(kernels/contact_features.py): maps in memory take a small model longer than its forward passes. Elsewhere maps are formed and
gathered, by the definition.

The pairs of a sequence are its residues i < j of known place, at least NEAREST apart, row by row: as in `pairs_of`.

Legend: L layers, H query heads, G key heads, A = L x H maps, layer-major, T tokens, d head dimension, C sequences of n tokens, P pairs.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from bmoe.evaluation.attention_maps import Maps, attention_maps, projections
from bmoe.evaluation.forward import upload

NEAREST = 6
FITTING = 2**34  # bytes of features that stay on the device
WIDEST = 128  # head dimension the kernels take
AT_ONCE = 2**32  # bytes of features computed at a time, of several sequences, or of some layers of one

Pairs = list[tuple[np.ndarray, np.ndarray]]
"""Residues i < j of each sequence, counted from 0 without the specials."""


def pairs_of(known_R: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of a sequence, of which bool `known_R` names the residues of known place."""
    i, j = np.triu_indices(known_R.size, NEAREST)
    keep = known_R[i] & known_R[j]
    return i[keep], j[keep]


def pair_features(model: nn.Module, sequences: list[np.ndarray], known: list[np.ndarray], slots: int, device: torch.device) -> list[Tensor]:
    """Features of the pairs of each sequence, fp32 [P, A], on `device` if all of them fit into FITTING bytes, else in the host's
    memory. Sequences are token ids with their specials; `known`, bool, of their residues."""
    heads = sum(block.attention.heads for block in model.blocks)
    counts = _places(known)[2].tolist()
    home = device if 4 * heads * sum(counts) <= FITTING else torch.device("cpu")
    found: list[list[Tensor]] = [[] for _ in sequences]
    source = from_projections if _kernels_run(model.blocks[0].attention, device) else from_maps
    for numbers, features_AP in source(model, sequences, known, slots, device):
        parts = features_AP.to(home).split([counts[number] for number in numbers], dim=1)
        for number, part_AP in zip(numbers, parts, strict=True):
            found[number].append(part_AP)
    return [torch.cat(parts).T if len(parts) > 1 else parts[0].T for parts in found]


def _kernels_run(layer: nn.Module, device: torch.device) -> bool:
    """On a GPU, with 16 bits and heads whose tiles fit a multiprocessor; with 32 the kernels' registers spill."""
    return device.type == "cuda" and layer.qkv.weight.dtype in (torch.bfloat16, torch.float16) and layer.head_dim <= WIDEST


Source = Iterator[tuple[list[int], Tensor]]
"""(which sequences, features of their pairs one after the other, [A, P]); of a long sequence some layers, then the next ones."""


def from_maps(model: nn.Module, sequences: list[np.ndarray], known: list[np.ndarray], slots: int, device: torch.device) -> Source:
    """Features by way of the maps."""
    for maps in attention_maps(model, sequences, slots, device):
        yield maps.numbers, features_at(maps, [pairs_of(known[number]) for number in maps.numbers])


def features_at(maps: Maps, pairs: Pairs) -> Tensor:
    """Features of the pairs of each sequence of `maps`, one after the other, fp32 [A, P].

    With S = M + M^T of the map M without the specials, and sums r over a row of S, t over all of it: S_ij - r_i r_j / t, the average
    product correction. S itself is never formed: only the pairs asked for are gathered, and r is the sum of M's rows and columns.
    The pairs go to the device as they are, and their places in the maps are computed there.
    """
    values_ACnn, n, device = maps.values_ACnn, maps.values_ACnn.shape[-1], maps.values_ACnn.device
    counts = np.array([i.size for i, _ in pairs])
    arrays = [np.array(maps.sizes), counts, *(i for i, _ in pairs), *(j for _, j in pairs)]
    sizes_C, counts_C, *parts = upload(arrays, device)
    i_P, j_P = torch.cat(parts[: len(pairs)]), torch.cat(parts[len(pairs) :])

    place_n = torch.arange(n, device=device)
    residue_Cn = ((place_n > 0) & (place_n < sizes_C[:, None] - 1)).to(values_ACnn.dtype)
    sums_ACn = (values_ACnn @ residue_Cn[:, :, None]).squeeze(3) + (residue_Cn[:, None] @ values_ACnn).squeeze(2)
    sums_ACn *= residue_Cn  # products with ones and zeros: no copy of the maps without the specials
    root_ACn = sums_ACn / sums_ACn.sum(2, keepdim=True).clamp(min=1e-30).sqrt()  # a head may look at specials alone

    row_P = torch.repeat_interleave(counts_C, output_size=int(counts.sum())) * n + 1  # of the first residue, among those of all
    from_P, to_P = row_P + i_P, row_P + j_P
    flat_AQ, root_AR = values_ACnn.flatten(1), root_ACn.flatten(1)
    both_AP = flat_AQ.index_select(1, from_P * n + j_P + 1).add_(flat_AQ.index_select(1, to_P * n + i_P + 1))
    return both_AP.addcmul_(root_AR.index_select(1, from_P), root_AR.index_select(1, to_P), value=-1).float()


def from_projections(model: nn.Module, sequences: list[np.ndarray], known: list[np.ndarray], slots: int, device: torch.device) -> Source:
    """Features by kernels, from queries and keys."""
    from bmoe.kernels.contact_features import contact_features, tables

    causal = model.blocks[0].attention.causal
    for numbers, bounds, q_LTHd, k_LTGd in projections(model, sequences, slots, device):
        sizes_S, layers, heads = np.diff(bounds), q_LTHd.shape[0], q_LTHd.shape[2]
        before_T, rank_T, pairs_S = _places([known[number] for number in numbers])
        for first, last in _together(4 * layers * heads * pairs_S):
            chosen, begin, end = numbers[first:last], bounds[first], bounds[last]
            P, (blocks_2N, tiles_3N) = int(pairs_S[first:last].sum()), tables(sizes_S[first:last])
            places = [before_T[begin:end] - pairs_S[:first].sum(), rank_T[begin:end], bounds[first:last] - begin, sizes_S[first:last]]
            *where, blocks, tiles = upload([*places, blocks_2N.ravel(), tiles_3N.ravel()], device)
            some = max(AT_ONCE // max(4 * heads * P, 1), 1)
            for q_lTHd, k_lTGd in zip(q_LTHd[:, begin:end].split(some), k_LTGd[:, begin:end].split(some), strict=True):
                yield chosen, contact_features(q_lTHd, k_lTGd, *where, blocks.view(2, -1), tiles.view(3, -1), P, NEAREST, causal)


def _together(bytes_S: np.ndarray) -> Iterator[tuple[int, int]]:
    """Runs [first, last) of at most AT_ONCE bytes; what is larger stands alone."""
    first, held = 0, 0
    for number, size in enumerate(bytes_S.tolist()):
        if number > first and held + size > AT_ONCE:
            yield first, number
            first, held = number, 0
        held += size
    yield first, bytes_S.size


def _places(known: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where the pairs of sequences stand among those of all: (i, j) at before_T[i] + rank_T[j], tokens with the specials. rank_T is
    -1 where the place is not known; also the number of pairs of each sequence, [C]."""
    sizes_C = np.array([part.size + 2 for part in known])
    ends_C = np.cumsum(sizes_C)
    inner_T = np.ones(ends_C[-1], bool)
    inner_T[ends_C - 1] = inner_T[ends_C - sizes_C] = False
    known_T = np.zeros(ends_C[-1], bool)
    known_T[inner_T] = np.concatenate(known)
    rank_T = np.cumsum(known_T) - 1  # of a known residue, among those of all sequences
    last_T = np.repeat(ends_C - 1, sizes_C)
    nearer_T = rank_T[np.minimum(np.arange(known_T.size) + NEAREST - 1, last_T)]  # of the last known one that is too near
    pairs_T = np.where(known_T, rank_T[last_T] - nearer_T, 0)
    until_T = np.cumsum(pairs_T)
    return until_T - pairs_T - nearer_T - 1, np.where(known_T, rank_T, -1), np.diff(until_T[ends_C - 1], prepend=0)
