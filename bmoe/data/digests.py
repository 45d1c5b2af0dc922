"""SHA-256 of inputs, in a thread beside the work, and of outputs, as they are written."""

import hashlib
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


class Digest:
    """SHA-256 of the first `done` bytes of a file, and for tokens how often each id stands in a sample of it, int64 [65536]."""

    def __init__(self, dtype: type | None):
        """dtype: of tokens; None for other files."""
        self.done, self._hash, self._dtype = 0, hashlib.sha256(), dtype
        self._counted = np.zeros(1 << 16, np.int64)

    def update(self, data: memoryview) -> None:
        """Take in the bytes that come next."""
        while data:
            part = data[: COUNTED - self.done % COUNTED]
            self._hash.update(part)
            number = self.done // COUNTED
            if self._dtype is not None and (number < 2 or number % EVERY == 0):
                _count(np.frombuffer(part, self._dtype), self._counted)
            self.done += len(part)
            data = data[len(part) :]

    def finish(self, path: Path) -> dict:
        """Take in the rest of a file. Returns bytes and SHA-256, and with a dtype the counts."""
        buffer = memoryview(bytearray(CHUNK))
        with path.open("rb", buffering=0) as file:
            file.seek(self.done)
            while count := file.readinto(buffer):
                self.update(buffer[:count])
        found = {"bytes": self.done, "sha256": self._hash.hexdigest()}
        return found | ({"counted": self._counted} if self._dtype is not None else {})


def digest(path: Path, dtype: type | None) -> dict:
    """Bytes and SHA-256 of a file; with a dtype also how often each id stands in a sample of it."""
    return Digest(dtype).finish(path)


@compiled
def _count(ids, counted):
    for k in range(ids.size):
        counted[ids[k]] += 1
