"""Which of many 64-bit hashes stand more than once, in little memory.

A file of them is dealt into buckets; of each bucket the few are sorted that share their last bits with others.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bmoe.data.compiled import compiled

ROWS = 1 << 20  # of a bucket
BITS = 25  # last bits of a hash by which those that may stand twice are told
NUMBERED = np.dtype([("hash", "<u8"), ("row", "<u8")])
_U = np.uint64


def buckets(path: Path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(hashes, their rows in the file) of a file of uint64, by ranges of the hash, each range whole, rows ascending."""
    rows = path.stat().st_size // 8 if path.exists() else 0
    if rows <= ROWS:
        if rows:
            yield np.fromfile(path, "<u8"), np.arange(rows)
        return
    count = 1 << int(np.ceil(np.log2(2 * rows / ROWS)))
    names = [path.with_name(f"{path.name}.{k}") for k in range(count)]
    files = [name.open("wb", buffering=1 << 14) for name in names]
    with path.open("rb") as file:
        row = 0
        while block := file.read(ROWS):
            part = np.empty(len(block) // 8, NUMBERED)
            part["hash"] = np.frombuffer(block, "<u8")
            part["row"] = np.arange(row, row + part.size)
            row += part.size
            bucket = (part["hash"] >> _U(64 - int(np.log2(count)))).astype(np.int64)
            order = np.argsort(bucket, kind="stable")
            ends = np.searchsorted(bucket[order], np.arange(count), side="right").tolist()
            for k, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
                if begin < end:
                    files[k].write(part[order[begin:end]].tobytes())
    for file in files:
        file.close()
    for name in names:
        part = np.fromfile(name, NUMBERED)
        yield np.ascontiguousarray(part["hash"]), part["row"].astype(np.int64)
        name.unlink()


def distinct(path: Path) -> int:
    """Number of different hashes in a file of uint64."""
    return sum(int(np.unique(hashes).size) for hashes, _ in buckets(path))


def repeated(path: Path, keep: int) -> tuple[int, np.ndarray]:
    """How many hashes of a file of uint64 an earlier row has as well, and the first `keep` of these rows."""
    count, found = 0, np.zeros(0, np.int64)
    for hashes, rows in buckets(path):
        doubtful = np.empty(hashes.size, bool)
        _mark(hashes, *np.zeros((2, 1 << BITS - 6), np.uint64), doubtful)
        hashes, rows = hashes[doubtful], rows[doubtful]
        order = np.argsort(hashes, kind="stable")
        again = rows[order[1:][hashes[order[1:]] == hashes[order[:-1]]]]
        count += again.size
        found = np.sort(np.append(found, again))[:keep]
    return count, found


@compiled
def _mark(hashes, once, twice, doubtful):
    """Mark all hashes that stand more than once, and few others. once, twice: zeros, a bit for each value of the last bits."""
    last = _U(once.size) * _U(64) - _U(1)
    for key in hashes:
        word, bit = (key & last) >> _U(6), _U(1) << (key & _U(63))
        twice[word] |= once[word] & bit
        once[word] |= bit
    for row in range(hashes.size):
        key = hashes[row]
        doubtful[row] = (twice[(key & last) >> _U(6)] >> (key & _U(63))) & _U(1)
