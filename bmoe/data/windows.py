"""How long DNA records are cut, so that one chromosome gives every split.

A record is divided into regions of REGION bases, counted from its first base. Each region belongs to one split; where two
neighbours differ, GAP bases between them are left out, taken from the less strictly held out side (train before valid before
test). Long runs of N are cut out as well. What remains is stored as sequences of their own, named `id:first-last` in bases
counted from 1, both ends included (as samtools does). The windows of a training recipe are cut from these later.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

REGION = 1 << 16
GAP = 1024
N_RUN = 20  # so many N in a row are cut out; fewer are unknown bases


class Part(NamedTuple):
    """A sequence cut from a record: ids[start:end], in a split."""

    start: int
    end: int
    split: int


class Cut(NamedTuple):
    """parts: sequences in order. rest: where the undecided ids begin. before: split of the last region that was cut.
    n_bases, gap_bases: bases left out."""

    parts: list[Part]
    rest: int
    before: int | None
    n_bases: int
    gap_bases: int


def has_n_run(ids: bytes, n_id: int) -> bool:
    """Whether there is a run of N to cut out."""
    return bytes([n_id]) * N_RUN in ids


def cut(ids: np.ndarray, before: int | None, final: bool, n_id: int | None, splits: Callable[[list[bytes]], np.ndarray]) -> Cut:
    """Cut a record, or a fragment of it that begins with a region.

    Args:
        ids: uint8; all of the record, or what is known of it so far.
        before: split of the region before, None at the record's start.
        final: the record ends here. Otherwise the last whole region waits for its neighbour.
        n_id: id of N, or None to keep runs of N.
        splits: from the regions' bases without runs of N to their splits.
    """
    starts = list(range(0, ids.size, REGION))
    inside = [_without_n(ids[s : s + REGION], n_id) for s in starts]
    split = splits([b"".join([ids[s + a : s + b].tobytes() for a, b in spans]) for s, spans in zip(starts, inside, strict=True)]).tolist()
    if not final:
        starts = starts[: max(ids.size // REGION - 1, 0)]  # the last whole region waits: its neighbour is not whole
    parts, n_bases, gap_bases = [], 0, 0
    for k, start in enumerate(starts):
        size = min(REGION, ids.size - start)
        after = split[k + 1] if k + 1 < len(split) else None
        low = GAP if before is not None and before > split[k] else 0
        high = size - GAP if after is not None and after > split[k] else size
        n_bases += size - sum(b - a for a, b in inside[k])
        for a, b in inside[k]:
            kept = max(a, low), max(min(b, high), max(a, low))
            gap_bases += (b - a) - (kept[1] - kept[0])
            if kept[0] < kept[1]:
                parts.append(Part(start + kept[0], start + kept[1], split[k]))
        before = split[k]
    rest = ids.size if final else (starts[-1] + REGION if starts else 0)
    return Cut(parts, rest, before, n_bases, gap_bases)


def _without_n(region: np.ndarray, n_id: int | None) -> list[tuple[int, int]]:
    """The spans of a region between its long runs of N."""
    if n_id is None or not has_n_run(region.tobytes(), n_id):
        return [(0, region.size)]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], (region == n_id).view(np.int8), [0]])))
    spans, begin = [], 0
    for a, b in edges.reshape(-1, 2).tolist():
        if b - a >= N_RUN:
            if a > begin:
                spans.append((begin, a))
            begin = b
    if begin < region.size:
        spans.append((begin, region.size))
    return spans
