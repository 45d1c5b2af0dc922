"""SHA-256 of inputs and outputs, beside the work: hashing needs no interpreter, so threads do it on other cores."""

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bmoe.data.compiled import compiled
from bmoe.data.tasks import Plan

CHUNK = 1 << 20  # bytes hashed at a time: they stay in the cache, and a hashing thread seldom needs the interpreter
COUNTED = 8 << 20  # of a file of tokens the first two stretches of this size and every 16th are counted for the composition
EVERY = 16


class Inputs:
    """Hashes the inputs that are read by ranges, in a thread beside the reading."""

    def __init__(self, plan: Plan):
        self._plan, self._stopped, self._error = plan, False, None
        self._found: dict[int, dict] = {}
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for source in range(len(self._plan.sources)):
                if self._plan.ranged(source) and not self._stopped:
                    found = self._plan.digest(source, lambda: self._stopped)
                    if found is not None:
                        self._found[source] = found
        except OSError as error:
            self._error = error

    def result(self) -> Callable[[], dict[int, dict]]:
        """A call that waits for the hashes."""

        def wait() -> dict[int, dict]:
            self._thread.join()
            if self._error is not None:
                raise self._error
            return self._found | self._plan.digests

        return wait

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._thread.join()


class Growing:
    """Hashes files of tokens and headers in a thread while they grow, so that little is left to hash at the end.

    It keeps nothing that a resumed preparation would need: that one hashes from the start again.
    """

    def __init__(self, out: Path, dtype: type):
        """dtype: of tokens."""
        self._out, self._dtype = out, dtype
        self._digests: dict[str, Digest] = {}
        self._sizes: dict[str, int] = {}
        self._ending = ""
        self._changed, self._stopped, self._error = threading.Condition(), False, None
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def upto(self, sizes: dict[str, int], ending: str) -> None:
        """The first bytes of these files will not change any more. ending: of their names for now."""
        with self._changed:
            self._sizes.update(sizes)
            self._ending = ending
            self._changed.notify()

    def _next(self) -> tuple[str, int] | None:
        """A file of which at least a whole chunk can be hashed, and its size."""
        for name, size in self._sizes.items():
            if name not in self._digests:
                self._digests[name] = Digest(self._dtype if name.endswith(".tokens") else None)
            if size - self._digests[name].done >= CHUNK:
                return name, size
        return None

    def _work(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopped or self._next())
                    if self._stopped:
                        return
                    name, size = self._next()
                self._digests[name].advance(self._out / (name + self._ending), min(size, self._digests[name].done + COUNTED))
        except OSError as error:
            self._error = error

    def stop(self) -> dict[str, "Digest"]:
        """End the thread. Returns how far it came with every file."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._digests


class Digest:
    """SHA-256 of a file up to byte `done`, and for tokens how often each id stands in a sample of it, int64 [65536]."""

    def __init__(self, dtype: type | None):
        self.done, self._hash, self._dtype = 0, hashlib.sha256(), dtype
        self._counted = np.zeros(1 << 16, np.int64)

    def advance(self, path: Path, size: int, last: bool = False) -> None:
        """Go on as far as whole chunks lie before `size`; `last`: to `size` itself."""
        buffer = memoryview(bytearray(CHUNK))
        with path.open("rb", buffering=0) as file:
            file.seek(self.done)
            while size - self.done >= CHUNK or (last and self.done < size):
                count = file.readinto(buffer[: size - self.done])
                if not count:
                    return
                self._hash.update(buffer[:count])
                number = self.done // COUNTED
                if self._dtype is not None and (number < 2 or number % EVERY == 0):
                    _count(np.frombuffer(buffer[:count], self._dtype), self._counted)
                self.done += count

    def finish(self, path: Path) -> dict:
        """The rest, then bytes and SHA-256, and with a dtype the counts."""
        self.advance(path, os.path.getsize(path), last=True)
        found = {"bytes": self.done, "sha256": self._hash.hexdigest()}
        return found | ({"counted": self._counted} if self._dtype is not None else {})


def digest(path: Path, dtype: type | None) -> dict:
    """Bytes and SHA-256 of a file; with a dtype also how often each id stands in a sample of it."""
    return Digest(dtype).finish(path)


@compiled
def _count(ids, counted):
    for k in range(ids.size):
        counted[ids[k]] += 1
