"""A set of 64-bit hashes in little memory, for finding duplicates."""

import mmap

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
        self._used = np.zeros(PARTS, np.int64)

    def __len__(self) -> int:
        return int(self._used.sum())

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables)

    def add(self, hash_n: np.ndarray) -> np.ndarray:
        """Put hashes (uint64, none 0) in; True where a hash was new, once for each (its first place). bool [n]."""
        new, wanted = np.empty(hash_n.size, bool), np.zeros(PARTS, np.int64)
        while _insert(tuple(self._tables), hash_n, self._used, wanted, MAX_LOAD, new)[0] < 0:
            for part, used in enumerate((self._used + wanted).tolist()):
                buckets = self._tables[part].shape[0]
                if used > MAX_LOAD * buckets * WIDE:
                    while used > MAX_LOAD * buckets * WIDE:
                        buckets = int(buckets * GROWTH)
                    larger = _table(buckets)
                    _move(self._tables[part], larger)
                    self._tables[part] = larger
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
def _insert(tables, keys, used, wanted, load, new):
    """Put the keys in, marking those that are new. Returns (0, a number without meaning); (-1, ..) and nothing is put in where a table
    may have no room. wanted: how many keys each is to take."""
    wanted[:] = 0
    touched = _U(0)
    for key in keys:
        part = key >> _U(64 - PART_BITS)
        wanted[part] += 1
        touched ^= tables[part][_bucket(tables[part], key), 0]  # these reads wait for the memory together, those below would one by one
    for part in range(PARTS):
        if used[part] + wanted[part] > load * tables[part].shape[0] * WIDE:
            return -1, touched
    for row in range(keys.size):
        part = keys[row] >> _U(64 - PART_BITS)
        new[row] = _put(tables[part], keys[row])
        used[part] += new[row]
    return 0, touched


@compiled
def _move(table, larger):
    """Put all keys of a table into an empty one."""
    for bucket in range(table.shape[0]):
        for k in range(WIDE):
            if table[bucket, k] != _U(0):
                _put(larger, table[bucket, k])
