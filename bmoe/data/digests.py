"""SHA-256 of inputs as they are read, and of outputs as they are written."""

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bmoe.data import sha256
from bmoe.data.compiled import compiled
from bmoe.data.tasks import Plan

CHUNK = 1 << 20  # bytes of a file hashed at a time: they stay in the cache, and the thread seldom needs the interpreter
COUNTED = 8 << 20  # of a file of tokens the first two stretches of this size and every 16th are counted for the composition
EVERY = 16


class Digest:
    """SHA-256 of the first `done` bytes of a file, and for tokens how often each id stands in a sample of it, int64 [65536]."""

    def __init__(self, dtype: type | None, begin: int = 0):
        """dtype: of tokens; None for other files. begin: where in the file the hash begins."""
        self.done, self.hash, self._dtype = begin, sha256.sha256(), dtype
        self._counted = np.zeros(1 << 16, np.int64) if dtype is not None else None

    def update(self, data: memoryview) -> None:
        """Take in the bytes that come next."""
        self.count(data)
        self.hash.update(data)

    def count(self, data: memoryview) -> None:
        """What `update` does but for the hash."""
        while data and self._dtype is not None:
            part = data[: COUNTED - self.done % COUNTED]
            number = self.done // COUNTED
            if number < 2 or number % EVERY == 0:
                _count(np.frombuffer(part, self._dtype), self._counted)
            self.done += len(part)
            data = data[len(part) :]
        self.done += len(data)

    def read(self, path: str | Path, end: int | None = None, stopped: Callable[[], bool] = lambda: False) -> None:
        """Take in the file's next bytes, up to `end` or its end."""
        buffer = memoryview(bytearray(CHUNK))
        with open(path, "rb", buffering=0) as file:
            file.seek(self.done)
            while not stopped() and (count := file.readinto(buffer if end is None else buffer[: end - self.done])):
                self.update(buffer[:count])

    def finish(self, path: Path) -> dict:
        """Take in the rest of a file. Returns bytes and SHA-256, and with a dtype the counts."""
        self.read(path)
        found = {"bytes": self.done, "sha256": self.hash.hexdigest()}
        return found | ({"counted": self._counted} if self._dtype is not None else {})


class Bytes(NamedTuple):
    """Bytes that come next in what a digest is of."""

    digest: Digest
    data: memoryview


def take_in(parts: Iterable[Bytes]) -> None:
    """Take in bytes for several digests, of two at a time (`sha256.py`)."""
    ways: tuple[list[Bytes], list[Bytes]] = [], []
    sizes = [0, 0]
    for part in sorted(parts, key=lambda part: -len(part.data)):
        part.digest.count(part.data)
        way = int(sizes[1] < sizes[0])
        ways[way].append(part)
        sizes[way] += len(part.data)
    one, other = ways
    while one and other:
        (a, data_a), (b, data_b) = one.pop(), other.pop()
        size = min(len(data_a), len(data_b))
        sha256.both(a.hash, data_a[:size], b.hash, data_b[:size])
        if len(data_a) > size:
            one.append(Bytes(a, data_a[size:]))
        elif len(data_b) > size:
            other.append(Bytes(b, data_b[size:]))
    for digest, data in one + other:
        digest.hash.update(data)


def digest(path: Path, dtype: type | None) -> dict:
    """Bytes and SHA-256 of a file; with a dtype also how often each id stands in a sample of it."""
    return Digest(dtype).finish(path)


class Inputs:
    """Hashes the inputs that are read by ranges: plain files as they are read, the others in a thread beside the reading."""

    def __init__(self, plan: Plan, first: int):
        """first: the source with which the reading begins."""
        self._plan, self._stopped, self._error = plan, False, None
        self._growing: dict[int, Digest] = {}
        self._found: dict[int, dict] = {}
        self._extents = {s: extent for s in range(len(plan.sources)) if plan.ranged(s) and (extent := plan.extent(s)) is not None}
        self._offered = {s for s in self._extents if s >= first and plan.sources[s].kind == "plain"}
        self._thread = threading.Thread(target=self._work, args=(sorted(set(self._extents) - self._offered),), daemon=True)
        self._thread.start()

    def read(self, source: int, begin: int, data: memoryview) -> list[Bytes]:
        """Bytes of an input as they come from its file, in order, at offset `begin`. Returns those that its hash takes in next."""
        if source not in self._offered:
            return []
        first, end = self._extents[source]
        if source not in self._growing:
            self._finish()
            self._growing[source] = Digest(None, first)
        growing = self._growing[source]
        if growing.done < min(begin, end):  # text before the first record; what was read before a kill
            growing.read(self._plan.sources[source].name, min(begin, end), lambda: self._stopped)
        data = data[max(growing.done - begin, 0) : max(end - begin, 0)]
        return [Bytes(growing, data)] if data else []

    def _finish(self) -> None:
        """Finish the digest that grows."""
        while self._growing:
            self._rest(*self._growing.popitem())

    def _rest(self, source: int, growing: Digest) -> None:
        """Finish a digest with what its input has more."""
        extent, size = self._extents[source], self._plan.sources[source].size
        growing.read(self._plan.sources[source].name, extent[1], lambda: self._stopped)
        found = {"bytes": size, "sha256": growing.hash.hexdigest()}
        self._found[source] = found | ({} if extent == (0, size) else {"range": [*extent]})

    def _work(self, beside: list[int]) -> None:
        try:
            for source in beside:
                self._rest(source, Digest(None, self._extents[source][0]))
        except OSError as error:
            self._error = error

    def result(self) -> dict[int, dict]:
        """Wait for the hashes. Nothing is read any more."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        self._finish()
        for source in self._offered - set(self._found):
            self._rest(source, Digest(None, self._extents[source][0]))
        return self._found | self._plan.digests

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._thread.join()


@compiled
def _count(ids, counted):
    for k in range(ids.size):
        counted[ids[k]] += 1
