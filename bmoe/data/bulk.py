"""Bulk data of a batch, tokens and headers, written at the places that the ledger assigned."""

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bmoe.data.batch import Batch
from bmoe.data.blocks import Piece
from bmoe.data.compiled import compiled, copy
from bmoe.data.digests import Bytes, Digest, Inputs, take_in
from bmoe.data.fasta import Text
from bmoe.data.slots import Slot, Slots, within

PARTIAL = ".partial"  # ending of a file that is not whole yet
HASHING = 1  # batches written, not hashed
_U = np.uint64


class Write(NamedTuple):
    """Sequences of a batch (their numbers) for one shard, and where their tokens and headers go, and how many these are, in items."""

    shard: str
    rows: np.ndarray
    tokens_at: int
    tokens: int
    headers_at: int
    headers: int


class Decision(NamedTuple):
    """What happens with a batch: where sequences go, and which duplicates the log names (their numbers)."""

    writes: list[Write]
    duplicates: np.ndarray


class Read(NamedTuple):
    """What a batch was made of: a piece of a source, and the memory that it and what is made of it may stand in."""

    source: int
    piece: Piece
    slot: Slot


class Bulk:
    """Writes tokens and headers of batches at their places, and hashes them in a thread behind, with the input that they came from.

    Attributes:
        digests: by name of the file (as it will be called), of every file written from its beginning; after `close` they are complete.
    """

    def __init__(self, out: Path, inputs: Inputs | None, slots: Slots):
        """inputs: hashes the inputs, if they are hashed. slots: those of the batches."""
        self._out, self._inputs, self._slots, self._open = out, inputs, slots, {}
        self._hasher = ThreadPoolExecutor(1)
        self._hashing: deque[Future] = deque()
        self.digests: dict[str, Digest] = {}

    def write(self, batch: Batch, decision: Decision, read: Read) -> None:
        """Store what the decision keeps. OSError where the disk does not take it."""
        item = batch.tokens.itemsize
        tokens = Text(batch.tokens.view(np.uint8), batch.start, batch.end)
        parts = []  # (name, texts, those to write, bytes of one of their letters, offset in the file and size, type of tokens)
        for write in decision.writes:
            place = write.tokens_at * item, write.tokens * item
            parts.append((f"{write.shard}.tokens", tokens, write.rows, item, *place, batch.tokens.dtype.type))
            if batch.summary.header_length is not None:
                parts.append((f"{write.shard}.headers", batch.headers, write.rows, 1, write.headers_at, write.headers, None))
        hashed, free = [], read.slot.joined
        for name, texts, rows, wide, offset, size, dtype in parts:
            skip = within(offset + free.size - read.slot.joined.size)
            part = free[skip:][:size] if size + skip <= free.size else np.empty(size, np.uint8)
            _gather(texts.bytes, texts.start, texts.end, rows, wide, part)
            self._put(name, memoryview(part), offset)
            if offset == 0:
                self.digests[name] = Digest(dtype)
            if name in self.digests:  # else a resumed preparation goes on with a file, which is hashed at the end
                hashed.append(Bytes(self.digests[name], memoryview(part)))
            free = free[skip + size :]
        while self._hashing and (len(self._hashing) >= HASHING or self._hashing[0].done()):
            self._hashing.popleft().result()
        self._hashing.append(self._hasher.submit(self._hash, hashed, read))

    def _put(self, name: str, data: memoryview, offset: int) -> None:
        """Write bytes to a file."""
        if name not in self._open:
            if len(self._open) > 32:
                self._close_files()
            self._open[name] = os.open(self._out / (name + PARTIAL), os.O_CREAT | os.O_WRONLY, 0o666)
        while data:  # a full disk takes a part, and says so the next time
            written = os.pwrite(self._open[name], data, offset)
            data, offset = data[written:], offset + written

    def _hash(self, written: list[Bytes], read: Read) -> None:
        """Hash what was written and what was read for it."""
        if self._inputs is not None:
            written += self._inputs.read(read.source, read.piece.end - len(read.piece.data), memoryview(read.piece.data))
        take_in(written)
        self._slots.give(read.slot)

    def _close_files(self) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
        self._open = {}

    def close(self) -> None:
        """Hash the rest and close the files. OSError where an input cannot be read."""
        self._hasher.shutdown()
        self._close_files()
        while self._hashing:
            self._hashing.popleft().result()


@compiled
def _gather(data, start, end, rows, wide, joined):
    """Copy data[start:end] of some rows to one place; those that follow each other, at once. start, end: in items of `wide` bytes."""
    o, k, count, wide = _U(0), _U(0), _U(rows.size), _U(wide)
    while k < count:
        at, stop = _U(start[rows[k]]), _U(end[rows[k]])
        k += _U(1)
        while k < count and _U(start[rows[k]]) == stop:
            stop = _U(end[rows[k]])
            k += _U(1)
        copy(joined, o, data, at * wide, (stop - at) * wide)
        o += (stop - at) * wide
