"""Bulk data of a batch, tokens and headers, written at the places that the ledger assigned."""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bmoe.data.batch import Batch
from bmoe.data.compiled import compiled, load64, store64
from bmoe.data.digests import Digest

PARTIAL = ".partial"  # ending of a file that is not whole yet
HASHING = 4  # buffers written, not hashed
_U = np.uint64


class Write(NamedTuple):
    """Sequences of a batch (their numbers) for one shard, and where their tokens and headers go, in items."""

    shard: str
    rows: np.ndarray
    tokens_at: int
    headers_at: int


class Plan(NamedTuple):
    """What happens with a batch: where sequences go, and which duplicates the log names (their numbers)."""

    writes: list[Write]
    duplicates: np.ndarray


class Bulk:
    """Writes tokens and headers of batches at their places, and hashes them in a thread behind.

    Attributes:
        digests: by name of the file (as it will be called), of every file written from its beginning; after `close` they are complete.
    """

    def __init__(self, out: Path):
        self._out, self._open = out, {}
        self._hasher = ThreadPoolExecutor(1)
        self._hashing: deque[Future] = deque()
        self.digests: dict[str, Digest] = {}

    def write(self, batch: Batch, plan: Plan) -> None:
        """Store what the plan keeps. OSError where the disk does not take it."""
        item = batch.tokens.itemsize
        for write in plan.writes:
            start, end = batch.start[write.rows] * item, batch.end[write.rows] * item
            self._put(f"{write.shard}.tokens", batch.tokens.view(np.uint8), start, end, write.tokens_at * item, batch.tokens.dtype.type)
            if batch.summary.header_length is not None:
                self._put(f"{write.shard}.headers", *batch.headers.of(write.rows), write.headers_at, None)

    def _put(self, name: str, data: np.ndarray, start: np.ndarray, end: np.ndarray, offset: int, dtype: type | None) -> None:
        """Write every data[start:end], one after the other."""
        if name not in self._open:
            if len(self._open) > 32:
                self._close_files()
            self._open[name] = os.open(self._out / (name + PARTIAL), os.O_CREAT | os.O_WRONLY, 0o666)
        joined = np.empty(int((end - start).sum()), np.uint8)
        _gather(data, start, end, joined)
        if offset == 0:
            self.digests[name] = Digest(dtype)
        if name in self.digests:  # else a resumed preparation goes on with a file, which is hashed at the end
            if len(self._hashing) >= HASHING:
                self._hashing.popleft().result()
            self._hashing.append(self._hasher.submit(self.digests[name].update, memoryview(joined)))
        rest = memoryview(joined)
        while rest:  # a full disk takes a part, and says so the next time
            written = os.pwrite(self._open[name], rest, offset)
            rest, offset = rest[written:], offset + written

    def _close_files(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}

    def close(self) -> None:
        """Hash the rest and close the files."""
        self._hasher.shutdown()
        self._close_files()


@compiled
def _gather(data, start, end, joined):
    """Copy every data[start:end] to one place."""
    o, eight = _U(0), _U(8)
    for k in range(start.size):
        at, stop = _U(start[k]), _U(end[k])
        size = stop - at
        if size >= eight:
            for step in range(_U(0), size - eight, eight):
                store64(joined, o + step, load64(data, at + step))
            store64(joined, o + size - eight, load64(data, stop - eight))
        else:
            for step in range(size):
                joined[o + step] = data[at + step]
        o += size
