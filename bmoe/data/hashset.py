"""A set of 64-bit hashes in little memory, for finding duplicates."""

import mmap
from itertools import pairwise

import numpy as np

from bmoe.data.compiled import compiled, inlined

PART_BITS = 3
PARTS = 1 << PART_BITS
WIDE = 8  # hashes of a bucket, which is a line of the cache
FIRST = 1 << 14  # buckets of each part's first table
MAX_LOAD, GROWTH = 0.75, 1.35
_U = np.uint64


class HashSet:
    """A set of 64-bit hashes in at most 16 bytes each, and 8 MiB to start with.

    Buckets of WIDE hashes in PARTS tables, by the top bits of the hash; a table grows by GROWTH: so the load
    stays between 0.55 and 0.75 (11 to 14.4 bytes a hash) and growing needs room for one table only. Among n different sequences
    the chance of one false duplicate is n^2 / 2^65: 1e-4 for 60 million.
    """

    def __init__(self):
        self._tables = [_table(FIRST) for _ in range(PARTS)]
        self._used = [0] * PARTS

    def __len__(self) -> int:
        return sum(self._used)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables)

    def add(self, hash_n: np.ndarray) -> np.ndarray:
        """Put hashes (uint64, none 0) in; True where a hash was new, once for each (its first place). bool [n]."""
        new, rows, bounds = np.empty(hash_n.size, bool), np.empty(hash_n.size, np.int64), np.zeros(PARTS + 1, np.int64)
        _deal(hash_n, rows, bounds)
        for part, (begin, end) in enumerate(pairwise(bounds.tolist())):
            buckets = self._tables[part].shape[0]
            if self._used[part] + end - begin > MAX_LOAD * buckets * WIDE:
                while self._used[part] + end - begin > MAX_LOAD * buckets * WIDE:
                    buckets = int(buckets * GROWTH)
                larger = _table(buckets)
                _move(self._tables[part], larger)
                self._tables[part] = larger
            if begin < end:
                self._used[part] += _insert(self._tables[part], hash_n, rows[begin:end], new)[0]
        return new


def _table(buckets: int) -> np.ndarray:
    """An empty table on pages of its own, which go back to the system with it."""
    pages = mmap.mmap(-1, buckets * WIDE * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # the way to a bucket is random: with small pages each look-up misses the TLB too
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint64).reshape(buckets, WIDE)


@inlined
def _bucket(table, key):
    """The bucket where a key's way through a table begins, from bits that the part does not use."""
    return ((key >> _U(16)) & _U(0xFFFFFFFF)) * _U(table.shape[0]) >> _U(32)


@inlined
def _put(table, key):
    """Put a key into the first bucket with room on its way. Returns whether it was new."""
    at = _bucket(table, key)
    while True:
        same, free = _U(0), _U(0)
        for k in range(WIDE):  # all at once, without a branch for each
            same += _U(table[at, k] == key)
            free += _U(table[at, k] == _U(0))
        if same:
            return False
        if free:
            table[at, _U(WIDE) - free] = key  # a bucket fills from its left
            return True
        at = at + _U(1) if at + _U(1) < _U(table.shape[0]) else _U(0)


@compiled
def _deal(keys, rows, bounds):
    """Rows of the keys part by part, in order, and where each part begins and ends."""
    for key in keys:
        part = key >> _U(64 - PART_BITS)
        if part + _U(1) < _U(PARTS):
            bounds[part + _U(2)] += 1
    for part in range(2, PARTS + 1):
        bounds[part] += bounds[part - 1]
    for row in range(keys.size):
        part = keys[row] >> _U(64 - PART_BITS)
        rows[bounds[part + _U(1)]] = row
        bounds[part + _U(1)] += 1


@compiled
def _insert(table, keys, rows, new):
    """Put in some of the keys, marking those that are new. Returns (their number, a number without meaning)."""
    added, touched = 0, _U(0)
    for row in rows:
        touched ^= table[_bucket(table, keys[row]), 0]  # these reads wait for the memory together, those below would one by one
    for row in rows:
        new[row] = _put(table, keys[row])
        added += new[row]
    return added, touched


@compiled
def _move(table, larger):
    """Put all keys of a table into an empty one."""
    for bucket in range(table.shape[0]):
        for k in range(WIDE):
            if table[bucket, k] != _U(0):
                _put(larger, table[bucket, k])
