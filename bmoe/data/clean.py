"""From raw records to clean sequences: blanks, gaps, stops, letters outside the alphabet, case.

Almost every block is clean already, which one look at its largest code tells; the work below is for the others, and is
array arithmetic as well.
"""

import io
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_digest

from bmoe.data.fasta import BLANK, GAP, INVALID, LOWER, STOP, Block
from bmoe.data.hashing import as_hashes

TRAILING = bytes([BLANK, GAP, STOP])


class Clean(NamedTuple):
    """R sequences, one after the other.

    ids: token ids (or base ids), uint8. hash: `hashes` of each sequence, uint64 [R]. bounds: int64 [R+1].
    lower: bool like ids, or None if nothing is lower case.
    invalid, stops: letters outside the alphabet and internal `*` per record, int64 [R], or None if there are none.
    counts: {what: number of letters}. records: {what: numbers of the records that have any}, for the log.
    """

    ids: np.ndarray
    hash: np.ndarray
    bounds: np.ndarray
    lower: np.ndarray | None
    invalid: np.ndarray | None
    stops: np.ndarray | None
    counts: dict[str, int]
    records: dict[str, np.ndarray]


def clean(block: Block, unknown: int, remove_gaps: bool) -> Clean:
    """Join the sequences of a block and apply the policies on single letters.

    A trailing `*` is removed; every other `*` and every invalid letter become `unknown` and are counted per record, so that
    the caller can drop or refuse the record. Gaps (`-`, `.`) are removed, or count as invalid letters.
    """
    joined, hash_n = join(block.codes, block.start, block.end)
    bounds = np.zeros(block.start.size + 1, np.int64)
    np.cumsum(block.end - block.start, out=bounds[1:])
    ids = np.frombuffer(joined, np.uint8)
    if ids.size == 0 or ids.max() < LOWER:
        return Clean(ids, hash_n, bounds, None, None, None, {}, {})
    ids = ids.copy()
    lower = invalid = stops = None
    counts: dict[str, int] = {}
    records: dict[str, np.ndarray] = {}
    odd = np.flatnonzero(ids >= BLANK)
    if odd.size:
        keep, ids, stops, invalid = _odd(joined, ids, odd, bounds, unknown, remove_gaps, counts, records)
        bounds = bounds - np.searchsorted(np.flatnonzero(~keep), bounds)
        ids = ids[keep]
    lower = ids >= LOWER
    number = int(np.count_nonzero(lower))
    if number:
        counts["lower_case"] = number
        records["lower_case"] = np.unique(np.searchsorted(bounds, np.flatnonzero(lower), side="right") - 1)
        ids &= LOWER - 1
    _, hash_n = join(ids.tobytes(), bounds[:-1], bounds[1:])
    return Clean(ids, hash_n, bounds, lower if number else None, invalid, stops, counts, records)


def join(codes: bytes, start: np.ndarray, end: np.ndarray) -> tuple[bytes, np.ndarray]:
    """All codes[start:end] one after the other, and the hash of each, uint64.

    The only loop over records of a clean block. It keeps no list of them: memory just given back is still in the cache.
    """
    joined, found = io.BytesIO(), []
    write, add = joined.write, found.append
    for a, b in zip(start.tolist(), end.tolist(), strict=True):
        sequence = codes[a:b]
        write(sequence)
        add(xxh3_64_digest(sequence))
    return joined.getvalue(), as_hashes(found)


def _odd(joined, ids, odd, bounds, unknown, remove_gaps, counts, affected):
    """Decide about every code that is no residue. Returns (keep mask, ids, internal stops [R], invalid letters [R])."""
    code = ids[odd]
    record = np.searchsorted(bounds, odd, side="right") - 1
    keep = np.ones(ids.size, bool)
    keep[odd[code == BLANK]] = False
    gaps = odd[code == GAP]
    records = bounds.size - 1
    wrong = code == INVALID
    if gaps.size:
        counts["gaps"] = int(gaps.size)
        affected["gaps"] = np.unique(record[code == GAP])
        if remove_gaps:
            keep[gaps] = False
        else:
            wrong |= code == GAP
            ids[gaps] = unknown
    stops = None
    if (code == STOP).any():
        terminal, ended = 0, []
        for r in np.unique(record[code == STOP]).tolist():
            begin, end = int(bounds[r]), int(bounds[r + 1])
            body = len(joined[begin:end].rstrip(TRAILING))
            found = joined.count(STOP, begin + body, end)
            terminal += found
            if found:
                ended.append(r)
            tail = ids[begin + body : end]
            keep[begin + body : end][tail == STOP] = False
        internal = (code == STOP) & keep[odd]
        if terminal:
            counts["terminal_stops"] = terminal
            affected["terminal_stops"] = np.array(ended)
        if internal.any():
            counts["internal_stops"] = int(np.count_nonzero(internal))
            stops = np.bincount(record[internal], minlength=records)
            ids[odd[internal]] = unknown
    invalid = None
    if wrong.any():
        if letters := int(np.count_nonzero(code == INVALID)):
            counts["invalid_letters"] = letters
        invalid = np.bincount(record[wrong], minlength=records)
        ids[odd[wrong]] = unknown
    return keep, ids, stops, invalid
