"""Packing: several whole crops in one row of token slots, with no padding between them.

A batch has exactly `slots` slots, so that shapes are static. What the crops leave is ONE tail of pad tokens in a segment of
its own, which is outside every loss, statistic and expert. `cu_seqlens` covers all slots, the tail included, and is filled
up with empty segments to a multiple of `SEGMENT_MULTIPLE`, so that its length rarely changes either.
"""

from dataclasses import dataclass, fields

import numpy as np
import torch

from bmoe.data import random
from bmoe.data.sampler import Crops

SEGMENT_MULTIPLE = 64
NO_TARGET = -100  # no loss at this slot, as in torch.nn.functional.cross_entropy


@dataclass(frozen=True)
class Batch:
    """One packed batch. T slots, S crops (the tail is segment S).

    tokens_T, targets_T (-100: no loss), positions_T (restart per crop), segments_T: int64 [T].
    cu_seqlens: int32 [>= S + 2]. sequence_ids, epochs: int64 [S], which sequence and epoch each crop is of.
    select_M, picked_M: the slots with a target, filled up with slot 0 to a multiple of `SEGMENT_MULTIPLE`, and their targets,
    so that the head runs on them alone; None and targets_T where nearly every slot has one (CLM).
    real_tokens: slots before the tail, int64 [] tensor. max_seqlen: an upper bound of every segment's length.
    targets, residues: number of slots with a target, and of slots that are no special and no tail.
    pairs: sum of squared crop lengths, which attention's FLOPs are proportional to.
    """

    tokens_T: torch.Tensor
    targets_T: torch.Tensor
    positions_T: torch.Tensor
    segments_T: torch.Tensor
    cu_seqlens: torch.Tensor
    real_tokens: torch.Tensor
    sequence_ids: torch.Tensor
    epochs: torch.Tensor
    select_M: torch.Tensor | None
    picked_M: torch.Tensor
    max_seqlen: int
    targets: int
    residues: int
    pairs: int

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; from pinned memory the copies run in the background."""
        moved = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{k: v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for k, v in moved.items()})

    def pin(self) -> "Batch":
        """The batch in page-locked memory."""
        pinned = {f.name: getattr(self, f.name) for f in fields(self)}
        return Batch(**{k: v.pin_memory() if isinstance(v, torch.Tensor) else v for k, v in pinned.items()})

    def model_inputs(self) -> dict:
        """The keyword arguments of `Transformer.forward`."""
        names = ("tokens_T", "positions_T", "segments_T", "cu_seqlens", "max_seqlen", "real_tokens", "select_M")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Packed:
    """Crops laid out in slots, before an objective: arrays of T slots; S crops, then the tail.

    positions_T, segments_T: int64 [T], as in `Batch`. cu_seqlens: int32 [>= S + 2]. real: slots before the tail.
    """

    crops: Crops
    tokens_T: np.ndarray  # int64, <cls> and <eos> in place, pad in the tail
    origin_T: np.ndarray  # int64, place of the slot in its record: counts residues from 0; -1 for specials and the tail
    soft_T: np.ndarray | None  # bool, soft-masked (lower-case DNA), or None
    positions_T: np.ndarray
    segments_T: np.ndarray
    cu_seqlens: np.ndarray
    real: int


def pack(shards, crops: Crops, slots: int, seed: int, reverse_complement: bool = False, soft_masked: bool = False) -> Packed:
    """Lay `crops` of `shards`, which fit, out in `slots` slots.

    `reverse_complement` reads every other crop, by chance, from the other strand (DNA). `soft_masked` also lays out which residues were
    lower case.
    """
    letters = shards.alphabet
    count = crops.slots.size
    ends = np.cumsum(crops.slots)
    begins, real = ends - crops.slots, int(ends[-1]) if count else 0
    tokens_T = np.full(slots, letters.pad_id, np.int64)
    origin_T = np.full(slots, -1, np.int64)
    soft_T: np.ndarray | None = None
    flip = np.zeros(count, bool)
    if reverse_complement:
        flip = random.uniform(random.key(seed, random.STRAND, crops.epoch, crops.unit), 0) < 0.5
    for s in range(count):
        begin, start, size = int(begins[s]), int(crops.start[s]), int(crops.slots[s])
        offset, length = int(crops.offset[s]), int(crops.tokens[s])
        low, high = max(start - 1, 0), min(start - 1 + size, length)  # residues of the window inside the crop
        if flip[s]:
            low, high = length - high, length - low
        place = begin + (1 if start == 0 else 0)
        span = slice(place, place + high - low)
        ids = shards.sequence(int(crops.sequence[s]))[offset + low : offset + high]
        tokens_T[span] = letters.complement[ids[::-1]] if flip[s] else ids
        where = np.arange(offset + low, offset + high)
        origin_T[span] = where[::-1] if flip[s] else where
        soft = shards.soft_mask(int(crops.sequence[s])) if soft_masked else None
        if soft is not None:
            soft_T = np.zeros(slots, bool) if soft_T is None else soft_T
            part = soft[offset + low : offset + high]
            soft_T[span] = part[::-1] if flip[s] else part
        if start == 0:
            tokens_T[begin] = letters.cls_id
        if crops.last[s] and start + size == length + 2:
            tokens_T[begin + size - 1] = letters.eos_id
    sizes = crops.slots if real == slots else np.append(crops.slots, slots - real)
    segments_T = np.repeat(np.arange(sizes.size), sizes)
    starts = np.cumsum(sizes) - sizes
    positions_T = np.arange(slots) - np.repeat(starts, sizes)
    bounds = np.full(-(-(sizes.size + 1) // SEGMENT_MULTIPLE) * SEGMENT_MULTIPLE, slots, np.int32)
    bounds[0], bounds[1 : sizes.size + 1] = 0, np.cumsum(sizes)
    return Packed(crops, tokens_T, origin_T, soft_T, positions_T, segments_T, bounds, real)


def to_batch(packed: Packed, tokens_T: np.ndarray, targets_T: np.ndarray, max_length: int) -> Batch:
    """The batch of a packed row with an objective's inputs and targets."""
    tail = packed.tokens_T.size - packed.real
    slots = np.flatnonzero(targets_T >= 0)
    select_M, picked_M = None, targets_T
    if slots.size <= targets_T.size // 2:
        size = max(1, -(-slots.size // SEGMENT_MULTIPLE)) * SEGMENT_MULTIPLE
        select_M, picked_M = np.zeros(size, np.int64), np.full(size, NO_TARGET, np.int64)
        select_M[: slots.size], picked_M[: slots.size] = slots, targets_T[slots]
    as_tensor = torch.from_numpy
    return Batch(
        tokens_T=as_tensor(tokens_T),
        targets_T=as_tensor(targets_T),
        positions_T=as_tensor(packed.positions_T),
        segments_T=as_tensor(packed.segments_T),
        cu_seqlens=as_tensor(packed.cu_seqlens),
        real_tokens=torch.tensor(packed.real),
        sequence_ids=as_tensor(np.ascontiguousarray(packed.crops.sequence)),
        epochs=as_tensor(np.ascontiguousarray(packed.crops.epoch)),
        select_M=None if select_M is None else as_tensor(select_M),
        picked_M=as_tensor(picked_M),
        max_seqlen=max(max_length, tail),
        targets=int(slots.size),
        residues=int((packed.origin_T >= 0).sum()),
        pairs=int((packed.crops.slots**2).sum()),
    )
