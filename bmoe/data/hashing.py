"""Hashes of sequences and what follows from them: the split, and the test for duplicates.

Sequences are hashed with XXH3 (64 bits, seed 0; its output is fixed by its specification since version 0.8.0), over their
ids before any byte-pair encoding, so that a split is the same on every machine, in every order and for every version.
"""

import mmap
from itertools import pairwise

import numpy as np
from xxhash import xxh3_64_digest

PARTITIONS, WIDE = 8, 8  # a bucket of 8 hashes is a cache line
FIRST = 1 << 17  # buckets of the first table
MAX_LOAD, GROWTH = 0.75, 1.35
STEP = np.uint64(0xD1342543DE82EF95)  # odd, so that a key's way through the buckets is another for each key
REBUILD = 4096  # buckets moved at a time when a table grows


def hashes(items: list[bytes]) -> np.ndarray:
    """XXH3 of every item, uint64, never 0."""
    return as_hashes([xxh3_64_digest(item) for item in items])


def as_hashes(digests: list[bytes]) -> np.ndarray:
    """Digests of eight bytes as numbers, uint64, with 1 for 0, which marks an empty slot in HashSet."""
    return np.maximum(np.frombuffer(b"".join(digests), ">u8").astype(np.uint64), np.uint64(1))


def name_hashes(names: list[bytes]) -> np.ndarray:
    """The hash of `word_hashes` for each of some names."""
    text = np.frombuffer(b"\n".join([*names, b""]) or b"\n", np.uint8)
    length = np.fromiter(map(len, names), np.int64, len(names))
    return word_hashes(text, np.cumsum(length + 1) - length - 1)


def word_hashes(text: np.ndarray, start: np.ndarray) -> np.ndarray:
    """Hash of the word that begins at each `start` in text (uint8) and ends before the next byte below `!`. uint64; 0: no word.

    Eight bytes at a time, all words at once: identifiers are short, and a call for each would cost more. The mixing is that of
    MurmurHash3's finaliser (Appleby, public domain). `start` is within the text, which ends with a blank or a line end.
    """
    hash_n, last = np.zeros(start.size, np.uint64), text.size - 8
    rows, at = np.arange(start.size), start
    if text.size < 8:
        text, last = np.append(text, np.zeros(8 - text.size, np.uint8)), 0
    words = np.ndarray(last + 1, "<u8", text, strides=(1,))  # the eight bytes from every place on
    while rows.size:
        word = words[np.minimum(at, last)]
        if at.size and at.max() > last:
            beyond = np.minimum(at - last, 7).clip(0).astype(np.uint64)
            word >>= beyond * np.uint64(8)  # zeros follow the text, and end a word
        below = (word - _BELOW) & ~word & _HIGH  # the lowest bit set is that of the first byte below `!`
        first = below & (~below + np.uint64(1))
        mixed = hash_n[rows] ^ (word & ((first >> np.uint64(7)) - np.uint64(1)))
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
        mixed = (mixed ^ (mixed >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
        hash_n[rows] = mixed ^ (mixed >> np.uint64(33))
        more = below == 0
        rows, at = rows[more], at[more] + 8
    return hash_n


_BELOW, _HIGH = np.uint64(0x2121212121212121), np.uint64(0x8080808080808080)


def split_of(hash_n: np.ndarray, valid: float, test: float, seed: int) -> np.ndarray:
    """Split of every hash, uint8: 0 train, 1 valid, 2 test, uniformly by share. Another seed is another split."""
    if valid + test == 0:
        return np.zeros(hash_n.size, np.uint8)
    x = hash_n + np.uint64((seed + 1) * 0x9E3779B97F4A7C15 % 2**64)  # splitmix64 (Steele et al., OOPSLA 2014)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    share = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) / 2.0**53
    return (share < valid + test).astype(np.uint8) + ((share >= valid) & (share < valid + test))


class HashSet:
    """A set of 64-bit hashes in at most 16 bytes each, and 8 MiB to start with.

    One table of buckets of WIDE hashes; once it is MAX_LOAD full, PARTITIONS tables, which grow one at a time by GROWTH, so
    that the load stays between 0.55 and 0.75 (11 to 14.4 bytes a hash) and growing needs room for one table only. Among n
    different sequences the chance of one false duplicate is n^2 / 2^65: 1e-4 for 60 million.
    """

    def __init__(self):
        self._tables = [_table(FIRST)]
        self._used = [0]

    def __len__(self) -> int:
        return sum(self._used)

    @property
    def nbytes(self) -> int:
        return sum(table.nbytes for table in self._tables)

    def add(self, hash_n: np.ndarray) -> np.ndarray:
        """Put hashes in; True where a hash was new, once for each (its first place). bool [n]."""
        new = np.zeros(hash_n.size, bool)
        if not hash_n.size:
            return new
        if len(self) + hash_n.size <= MAX_LOAD * FIRST * WIDE and len(self._tables) == 1:
            ordered = np.sort(hash_n)
            if not (ordered[1:] == ordered[:-1]).any():
                return self._add(0, hash_n)  # one table and no repeats: no order is needed
        order = np.argsort(hash_n)
        ordered = hash_n[order]
        first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        ordered, order = ordered[first], np.minimum.reduceat(order, first)
        if len(self) + ordered.size > MAX_LOAD * FIRST * WIDE and len(self._tables) == 1:
            self._divide()
        bounds = _bounds(ordered, len(self._tables))
        for part in range(len(self._tables)):
            begin, end = bounds[part], bounds[part + 1]
            if begin < end:
                new[order[begin:end]] = self._add(part, ordered[begin:end])
        return new

    def _divide(self) -> None:
        """From one table to PARTITIONS."""
        keys = np.sort(self._tables[0][self._tables[0] != 0])
        bounds = _bounds(keys, PARTITIONS)
        self._used = [end - begin for begin, end in pairwise(bounds)]
        self._tables = [_table(int(used * GROWTH / (MAX_LOAD * WIDE)) + 64) for used in self._used]
        for table, (begin, end) in zip(self._tables, pairwise(bounds), strict=True):
            _fill(table, keys[begin:end])

    def _add(self, part: int, keys: np.ndarray) -> np.ndarray:
        table = self._tables[part]
        needed = self._used[part] + keys.size
        if needed > MAX_LOAD * table.size:
            buckets = table.shape[0]
            while needed > MAX_LOAD * buckets * WIDE:
                buckets = int(buckets * GROWTH)
            self._tables[part] = table = _rebuilt(table, buckets)
        added = _insert(table, keys)
        self._used[part] += int(np.count_nonzero(added))
        return added


def _bounds(ordered: np.ndarray, partitions: int) -> list[int]:
    """Where each partition begins in ordered hashes, and the end. A partition has the hashes with equal top bits."""
    tops = np.array([k * 2**64 // partitions for k in range(1, partitions)], np.uint64)
    return [0, *np.searchsorted(ordered, tops).tolist(), ordered.size]


def _bucket(keys: np.ndarray, buckets: int) -> np.ndarray:
    """Bucket of each key, from bits that the partition does not use. int64 like keys."""
    return (((keys >> np.uint64(8)) & np.uint64(0xFFFFFFFF)) * np.uint64(buckets) >> np.uint64(32)).astype(np.int64)


def _table(buckets: int) -> np.ndarray:
    """An empty table on pages of its own, which go back to the system with it."""
    pages = mmap.mmap(-1, buckets * WIDE * 8, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):  # the way to a bucket is random: with small pages each look-up misses the TLB too
        pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint64).reshape(buckets, WIDE)


def _of_eight(bucket: np.ndarray) -> np.ndarray:
    """The eight booleans of each bucket as one number, uint64: reductions over so short an axis are slow."""
    return bucket.view(np.uint64).ravel()


def _rebuilt(table: np.ndarray, buckets: int) -> np.ndarray:
    """A table of that many buckets with the same keys, moved a part at a time."""
    larger = _table(buckets)
    for begin in range(0, table.shape[0], REBUILD):
        keys = table[begin : begin + REBUILD]
        _fill(larger, keys[keys != 0])
    return larger


def _fill(table: np.ndarray, keys: np.ndarray) -> None:
    """Put keys that are not there into a table: many at a time, where `_insert` takes a round for each key of a bucket."""
    bucket = _bucket(keys, table.shape[0])
    order = np.argsort(bucket)
    keys, bucket = keys[order], bucket[order]
    begins = np.diff(bucket, prepend=-1) != 0
    first = np.flatnonzero(begins)
    used = np.bitwise_count(_of_eight(table.take(bucket[first], axis=0) != 0))
    place = np.arange(keys.size) - (first - used)[np.cumsum(begins) - 1]
    fits = place < WIDE
    table.ravel()[(bucket * WIDE + place)[fits]] = keys[fits]
    _insert(table, keys[~fits])


def _insert(table: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Put different keys into the first bucket with room on their way, all at once. Returns which were not there before."""
    added = np.zeros(keys.size, bool)
    rest, probe, flat = np.arange(keys.size), keys, table.ravel()
    while rest.size:
        key, at = keys[rest], _bucket(probe, table.shape[0])
        held = table.take(at, axis=0)  # `take` overlaps the misses of the cache, which indexing does not
        known = _of_eight(held == key[:, None]) != 0
        place = np.bitwise_count(_of_eight(held != 0)).astype(np.int64)  # a bucket fills from its left
        room = (place < WIDE) & ~known
        place[~room] = 0
        slot = at * WIDE + place
        flat[slot[room]] = key[room]  # of several keys for one place the last stays
        mine = room & (flat.take(slot) == key)
        added[rest[mine]] = True
        more = ~(known | mine)
        full = ~room[more]
        rest, probe = rest[more], probe[more]
        probe = np.where(full, probe * STEP, probe)
    return added
