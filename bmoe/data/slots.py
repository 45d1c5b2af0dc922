"""Memory for blocks that are at work, used again and again: pages that the system hands out fresh cost as much as filling them.

Bytes on their way from or to a file stand at the file's place within a page (`within`): some processors copy several times more slowly
between places that differ by a few bytes there.
"""

import mmap

import numpy as np


def rows(room: int, odd: int) -> tuple[np.ndarray, ...]:
    """Arrays for that many records: int64 [4, room + 1], uint64 [room], int32 [room, odd]."""
    return np.empty((4, room + 1), np.int64), np.empty(room, np.uint64), np.empty((room, odd), np.int32)


def within(offset: int) -> int:
    """Place of an offset within its page."""
    return offset % mmap.PAGESIZE


class Slot:
    """Memory for one block of up to `room` bytes and what is made of it. What is larger makes its own.

    Attributes, uint8 from the beginning of a page on:
        data: as read. ids: of its sequences. joined: what is written of them.
    """

    def __init__(self, room: int):
        self.data, self.ids, self.joined = (_pages(room) for _ in range(3))
        self._rows: tuple[np.ndarray, ...] = ()

    def rows(self, room: int, odd: int) -> tuple[np.ndarray, ...]:
        """Arrays as of `rows`, or larger ones."""
        if not self._rows or self._rows[1].size < room:
            self._rows = rows(room, odd)
        return self._rows


def _pages(room: int) -> np.ndarray:
    return np.frombuffer(mmap.mmap(-1, room, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


class Slots:
    """Slots for as many blocks as are at work, the last one used first: its memory is still in the cache."""

    def __init__(self, room: int):
        self._room, self._free = room, []

    def take(self) -> Slot:
        """One that nobody uses."""
        try:
            return self._free.pop()
        except IndexError:
            return Slot(self._room)

    def give(self, slot: Slot) -> None:
        """Its block is done."""
        self._free.append(slot)
