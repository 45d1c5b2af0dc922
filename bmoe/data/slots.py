"""Memory for blocks that are at work, used again and again: pages that the system hands out fresh cost as much as filling them.

Bytes on their way from or to a file stand at the file's place within a page (`within`): some processors copy several times more slowly
between places that differ by a few bytes there.
"""

import contextlib
import ctypes
import mmap
import threading
from collections import deque

import numpy as np


def rows(room: int, odd: int) -> tuple[np.ndarray, ...]:
    """Arrays for that many records: int64 [4, room + 1], uint64 [room], int32 [room, odd]."""
    return np.empty((4, room + 1), np.int64), np.empty(room, np.uint64), np.empty((room, odd), np.int32)

MEMORY = 128 << 20  # bytes that blocks at work may take together, as far as the last ones tell
LARGE = 4 << 20  # bytes
FIRST = 4  # blocks at work before one is known


def within(offset: int) -> int:
    """Place of an offset within its page."""
    return offset % mmap.PAGESIZE


class Slot:
    """Memory for one block of up to `room` bytes and what is made of it. What is larger makes its own.

    Attributes, uint8 from the beginning of a page on:
        data: as read. ids: of its sequences. joined: what is written of them.
    """

    def __init__(self, room: int):
        self._pages, ids, joined = (mmap.mmap(-1, room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(3))
        self.data, self.ids, self.joined = (np.frombuffer(pages, np.uint8) for pages in (self._pages, ids, joined))
        self._rows: tuple[np.ndarray, ...] = ()

    def holds(self, texts: tuple[bytes, ...], begin: int, end: int) -> bool:
        """Whether any of some texts stands in data[begin:end]."""
        return any(self._pages.find(text, begin, end) >= 0 for text in texts)

    def rows(self, room: int, odd: int) -> tuple[np.ndarray, ...]:
        """Arrays as of `rows`, or larger ones."""
        if not self._rows or self._rows[1].size < room:
            self._rows = rows(room, odd)
        return self._rows


def return_large_blocks() -> None:
    """Have the C library, where it is glibc, give arrays of LARGE and more back when they are freed: once it has seen one, it
    would keep up to 64 MB for every thread (mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD)."""
    with contextlib.suppress(AttributeError, OSError, TypeError):  # another library, or none that can be asked
        library = ctypes.CDLL(None)
        library.mallopt(-3, LARGE)
        library.mallopt(-1, LARGE)


class Slots:
    """Slots for as many blocks as are at work, the last one used first: its memory is still in the cache.

    How many may be at work follows from what the last ones took, so that memory is bounded whatever the records and the number of workers.
    """

    def __init__(self, room: int):
        self._room, self._free, self._busy = room, [], 0
        self._weights: deque[int] = deque([MEMORY // FIRST], 16)
        self._changed = threading.Condition()

    def room(self, wait: bool) -> bool:
        """Whether another block may begin; `wait`: until one may."""
        with self._changed:
            most = max(1, MEMORY // max(self._weights))
            return self._changed.wait_for(lambda: self._busy < most, None if wait else 0)

    def take(self) -> Slot:
        """One that nobody uses."""
        with self._changed:
            self._busy += 1
            return self._free.pop() if self._free else Slot(self._room)

    def weigh(self, size: int) -> None:
        """A block took so many bytes."""
        self._weights.append(size)

    def give(self, slot: Slot) -> None:
        """Its block is done."""
        with self._changed:
            self._busy -= 1
            self._free.append(slot)
            self._changed.notify()
