"""Bulk data of a batch, tokens and headers, written by whoever parsed it at the places that the ledger assigned."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bmoe.data.batch import Batch

PARTIAL = ".partial"  # ending of a file that is not whole yet
IOV = 1000  # buffers of one call; systems allow 1024


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
    """Writes tokens and headers of a worker's batches at their places."""

    def __init__(self, out: Path):
        self._out, self._open = out, {}

    def write(self, batch: Batch, plan: Plan) -> None:
        """Store what the plan keeps. OSError where the disk does not take it."""
        for write in plan.writes:
            tokens = runs(batch.tokens, batch.start[write.rows], batch.end[write.rows])
            self._put(f"{write.shard}.tokens{PARTIAL}", tokens, write.tokens_at * batch.tokens.itemsize)
            if batch.summary.header_length is not None:
                headers = batch.headers
                if write.rows.size < len(headers):
                    headers = [headers[r] for r in write.rows.tolist()]
                self._put(f"{write.shard}.headers{PARTIAL}", [b"".join(headers)], write.headers_at)

    def _put(self, name: str, parts: list, offset: int) -> None:
        """Write parts one after the other, without joining them first."""
        if name not in self._open:
            if len(self._open) > 32:
                self.close()
            self._open[name] = os.open(self._out / name, os.O_CREAT | os.O_WRONLY, 0o666)
        file = self._open[name]
        for first in range(0, len(parts), IOV):
            some = parts[first : first + IOV]
            wanted = sum(map(len, some))
            written = os.pwritev(file, some, offset)
            if written < wanted:  # a full disk takes a part, and says so the next time
                rest = memoryview(b"".join(some))[written:]
                while rest:
                    written = os.pwrite(file, rest, offset + wanted - len(rest))
                    rest = rest[written:]
            offset += wanted

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}


def runs(tokens: np.ndarray, begin: np.ndarray, end: np.ndarray) -> list[memoryview]:
    """Bytes of tokens[begin:end] of every sequence, neighbours taken together."""
    if not begin.size:
        return []
    breaks = np.flatnonzero(begin[1:] != end[:-1]) + 1
    first, last = np.append(0, breaks), np.append(breaks, begin.size) - 1
    data, size = memoryview(tokens).cast("B"), tokens.itemsize
    return [data[a * size : b * size] for a, b in zip(begin[first].tolist(), end[last].tolist(), strict=True)]
