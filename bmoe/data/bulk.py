"""Bulk data of a batch, tokens and headers, written at the places that the ledger assigned."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bmoe.data.batch import Batch
from bmoe.data.compiled import compiled, load64, store64

PARTIAL = ".partial"  # ending of a file that is not whole yet
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
    """Writes tokens and headers of batches at their places."""

    def __init__(self, out: Path):
        self._out, self._open, self._buffer = out, {}, np.empty(0, np.uint8)

    def write(self, batch: Batch, plan: Plan) -> None:
        """Store what the plan keeps. OSError where the disk does not take it."""
        item = batch.tokens.itemsize
        for write in plan.writes:
            start, end = batch.start[write.rows] * item, batch.end[write.rows] * item
            self._put(f"{write.shard}.tokens{PARTIAL}", batch.tokens.view(np.uint8), start, end, write.tokens_at * item)
            if batch.summary.header_length is not None:
                self._put(f"{write.shard}.headers{PARTIAL}", *batch.headers.of(write.rows), write.headers_at)

    def _put(self, name: str, data: np.ndarray, start: np.ndarray, end: np.ndarray, offset: int) -> None:
        """Write every data[start:end], one after the other."""
        if name not in self._open:
            if len(self._open) > 32:
                self.close()
            self._open[name] = os.open(self._out / name, os.O_CREAT | os.O_WRONLY, 0o666)
        size = int((end - start).sum())
        if self._buffer.size < size:
            self._buffer = np.empty(size + size // 4, np.uint8)
        _gather(data, start, end, self._buffer)
        rest = memoryview(self._buffer)[:size]
        while rest:  # a full disk takes a part, and says so the next time
            written = os.pwrite(self._open[name], rest, offset)
            rest, offset = rest[written:], offset + written

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}


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
