"""The global order of crops: which sequence comes when, and which part of it, free of world size and workers.

An epoch visits every UNIT once in a keyed random order. A unit is a sequence; with cluster sampling it is a cluster, of
which a random member is shown; a DNA record longer than a window counts as its consecutive windows. The sampler's whole
state is two integers, (epoch, index of the next unit in that epoch's order).

A sequence of n tokens stands as `<cls>` + n tokens + `<eos>`; a crop of more than `max_length` slots is cut uniformly over
ALL windows of that string, the first and the last included. A DNA window carries `<cls>`, and `<eos>` only where its
record ends.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from bmoe.data import random

CHUNK = 16_384  # units planned at once; small next to an epoch, large next to a numpy call


class Sequences(Protocol):
    """What the sampler needs of `Shards`."""

    lengths: np.ndarray
    clusters: np.ndarray | None


class Position(NamedTuple):
    """State of the sampler: the next unit is number `index` of epoch `epoch`'s order."""

    epoch: int
    index: int


class Crops(NamedTuple):
    """Consecutive crops of the global order, as parallel int64 arrays.

    `sequence` is the index in the shards, `unit` the unit's number, `start` and `slots` the cut out of the string
    `<cls>` + tokens + `<eos>` of the window that begins at token `offset` and has `tokens` tokens, `last` whether that
    window ends its record (so that it carries `<eos>`).
    """

    epoch: np.ndarray
    index: np.ndarray
    unit: np.ndarray
    sequence: np.ndarray
    offset: np.ndarray
    tokens: np.ndarray
    last: np.ndarray
    start: np.ndarray
    slots: np.ndarray

    def cut(self, begin: int, end: int) -> "Crops":
        return Crops(*(column[begin:end] for column in self))


class Sampler:
    """Deterministic order over the units of one split.

    Args:
        sequences: lengths int64 [n] and optional cluster numbers int64 [n].
        max_length: longest crop in slots, specials included.
        seed: of order, members and crops.
        sampling: "sequence" or "cluster".
        window, overlap: cut sequences longer than `window` tokens into windows (DNA), or None.
    """

    def __init__(
        self, sequences: Sequences, max_length: int, seed: int, sampling: str = "sequence", window: int | None = None, overlap: int = 0
    ):
        self.lengths, self.max_length, self.seed = sequences.lengths, max_length, seed
        self.window, self.stride = window, (window - overlap) if window else 0
        self.windows_end = self.members = self.cluster_start = None
        if sampling == "cluster":
            if sequences.clusters is None:
                raise ValueError("cluster sampling needs shards with clusters")
            self.members = np.argsort(sequences.clusters, kind="stable")
            _, self.cluster_start = np.unique(sequences.clusters[self.members], return_index=True)
            self.units = self.cluster_start.size
        elif window and self.lengths.size and int(self.lengths.max()) > window:
            extra = np.maximum(self.lengths - window, 0)
            self.windows_end = np.cumsum(1 + -(-extra // self.stride))
            self.units = int(self.windows_end[-1])
        else:
            self.units = int(self.lengths.size)

    def crops(self, epoch: int, index: int, count: int) -> Crops:
        """Crops `index` .. `index + count` of an epoch's order (fewer at its end)."""
        order = np.arange(index, min(index + count, self.units))
        unit = random.permute(order, self.units, random.key(self.seed, random.ORDER, epoch, 0))
        offset = np.zeros(unit.size, np.int64)
        if self.members is not None:
            bounds = np.append(self.cluster_start, self.members.size)
            draw = random.below(random.key(self.seed, random.MEMBER, epoch, unit), 0, np.diff(bounds)[unit])
            sequence = self.members[bounds[unit] + draw]
        elif self.windows_end is not None:
            sequence = np.searchsorted(self.windows_end, unit, side="right")
            first = np.where(sequence > 0, self.windows_end[np.maximum(sequence, 1) - 1], 0)
            offset = (unit - first) * self.stride
        else:
            sequence = unit
        rest = self.lengths[sequence] - offset
        tokens = np.minimum(rest, self.window) if self.window else rest
        last = tokens == rest
        whole = tokens + 1 + last
        slots = np.minimum(whole, self.max_length)
        start = random.below(random.key(self.seed, random.CROP, epoch, unit), 0, whole - slots + 1)
        return Crops(np.full(unit.size, epoch), order, unit, sequence, offset, tokens, last, start, slots)

    def batches(self, position: Position, slots_per_batch: int) -> Iterator[tuple[Crops, Position]]:
        """Endless batches from `position` on: greedy cuts of at most `slots_per_batch` slots, across epochs.

        Yields (crops, position after them). Every rank computes the same cuts, since only lengths are needed.
        """
        if self.units == 0:
            raise ValueError("there is nothing to sample")
        epoch, index = position
        plan: Crops | None = None
        while True:
            while plan is None or plan.slots.sum() <= slots_per_batch:
                if index >= self.units:
                    epoch, index = epoch + 1, 0
                more = self.crops(epoch, index, CHUNK)
                index += more.slots.size
                plan = more if plan is None else Crops(*map(np.concatenate, zip(plan, more, strict=True)))
            ends = np.cumsum(plan.slots)
            begin = 0
            while True:
                filled = int(ends[begin - 1]) if begin else 0
                end = int(np.searchsorted(ends, filled + slots_per_batch, side="right"))
                if end == ends.size:
                    break
                yield plan.cut(begin, end), self._after(plan, end)
                begin = end
            plan = plan.cut(begin, plan.slots.size)

    @staticmethod
    def _after(plan: Crops, end: int) -> Position:
        return Position(int(plan.epoch[end]), int(plan.index[end]))
