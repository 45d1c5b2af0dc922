"""Which of many 64-bit hashes stand more than once, in little memory: a file of them is dealt into buckets, and of each bucket the few
are sorted that share their last bits with others."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bmoe.data.compiled import compiled

ROWS = 1 << 21  # of a bucket
BITS = 25  # last bits of a hash by which those that may stand twice are told
_U = np.uint64


def buckets(path: Path, dtype: np.dtype) -> Iterator[np.ndarray]:
    """The rows of a file of `dtype` (a hash, or with a field `hash`), by ranges of the hash, each range whole."""
    rows = path.stat().st_size // dtype.itemsize if path.exists() else 0
    if rows <= ROWS:
        if rows:
            yield np.fromfile(path, dtype)
        return
    count = 1 << int(np.ceil(np.log2(2 * rows / ROWS)))
    names = [path.with_name(f"{path.name}.{k}") for k in range(count)]
    files = [name.open("wb", buffering=1 << 14) for name in names]
    with path.open("rb") as file:
        while block := file.read(ROWS // 8 * dtype.itemsize):
            part = np.frombuffer(block, dtype)
            bucket = (_hash(part) >> np.uint64(64 - int(np.log2(count)))).astype(np.int64)
            order = np.argsort(bucket, kind="stable")
            ends = np.searchsorted(bucket[order], np.arange(count), side="right").tolist()
            for k, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                if begin < end:
                    files[k].write(part[order[begin:end]].tobytes())
    for file in files:
        file.close()
    for name in names:
        yield np.fromfile(name, dtype)
        name.unlink()


def distinct(path: Path) -> int:
    """Number of different hashes in a file of uint64."""
    return sum(int(np.unique(rows).size) for rows in buckets(path, np.dtype("<u8")))


def repeated(path: Path, dtype: np.dtype, keep: int) -> tuple[int, np.ndarray]:
    """How many rows have a hash that an earlier row has, and the first `keep` of them, in the file's order by source and line."""
    count, found = 0, []
    for rows in buckets(path, dtype):
        rows = rows[_doubtful(np.ascontiguousarray(rows["hash"]))]
        rows = rows[np.argsort(rows["hash"], kind="stable")]
        again = rows[1:][rows["hash"][1:] == rows["hash"][:-1]]
        count += again.size
        found.append(again)
        if sum(map(len, found)) > 4 * keep:
            found = [_first(found, keep)]
    return count, _first(found, keep) if found else np.zeros(0, dtype)


def _doubtful(hash_n: np.ndarray) -> np.ndarray:
    """Rows whose hash may stand more than once: all that do, and few others."""
    once, twice = np.zeros(1 << BITS - 6, np.uint64), np.zeros(1 << BITS - 6, np.uint64)
    doubtful = np.empty(hash_n.size, bool)
    _mark(hash_n, once, twice, doubtful)
    return np.flatnonzero(doubtful)


@compiled
def _mark(hash_n, once, twice, doubtful):
    last = _U((1 << BITS) - 1)
    for key in hash_n:
        word, bit = (key & last) >> _U(6), _U(1) << (key & _U(63))
        twice[word] |= once[word] & bit
        once[word] |= bit
    for row in range(hash_n.size):
        key = hash_n[row]
        doubtful[row] = (twice[(key & last) >> _U(6)] >> (key & _U(63))) & _U(1)


def _first(found: list[np.ndarray], keep: int) -> np.ndarray:
    rows = np.concatenate(found)
    return rows[np.lexsort((rows["line"], rows["source"]))][:keep]


def _hash(rows: np.ndarray) -> np.ndarray:
    return rows["hash"] if rows.dtype.names else rows
