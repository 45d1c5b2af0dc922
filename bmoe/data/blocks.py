"""Cut a stream of bytes into blocks of whole records.

A record begins at a `>` that begins a line. A block is about TARGET bytes and ends where a record ends, so that blocks are
parsed alone, by any worker. A record of more than LIMIT bytes (a chromosome of a large genome) comes in fragments of about FRAGMENT.
Whether a record is cut into fragments depends on the record alone, never on where blocks happen to end.
"""

from collections.abc import Iterator
from typing import NamedTuple

from bmoe.data.formats import foreign
from bmoe.errors import RequestError

TARGET = 2 << 20  # enough that what Python does for each block hardly counts
FRAGMENT = 1 << 20
LIMIT = 16 << 20  # more than TARGET plus the largest chunk of a stream
BOM = b"\xef\xbb\xbf"


class Piece(NamedTuple):
    """Bytes to parse: whole records, or a fragment of one long record.

    end: offset in the decompressed input after this piece. continued: it goes on with the record of the piece before.
    open: its record goes on in the next piece. middle: a continued piece that begins within a line.
    skipped: lines before the first header, of which `text` are not blank (only in an input's first piece, which is empty
    where the input has no record).
    """

    data: bytes
    end: int
    continued: bool = False
    open: bool = False
    middle: bool = False
    skipped: int = 0
    text: int = 0


class _Buffer:
    """Bytes of the input from offset `base` on."""

    def __init__(self, chunks: Iterator[bytes], base: int):
        self._chunks, self.base, self.data, self.ended = chunks, base, b"", False

    def fill(self, size: int) -> None:
        """Read until the buffer has `size` bytes or the input ended."""
        parts, have = [self.data], len(self.data)
        while have < size and not self.ended:
            chunk = next(self._chunks, b"")
            self.ended = not chunk
            parts.append(chunk)
            have += len(chunk)
        if len(parts) > 1:
            self.data = b"".join(parts)

    def take(self, size: int) -> bytes:
        taken, self.data = self.data[:size], self.data[size:]
        self.base += size
        return taken


def cut(
    chunks: Iterator[bytes],
    begin: int,
    stop: int | None,
    target: int = TARGET,
    limit: int = LIMIT,
    fragment: int = FRAGMENT,
    *,
    name: str = "the input",
) -> Iterator[Piece]:
    """Pieces of the records that begin at offset `begin` or later and before `stop` (None: all).

    Args:
        chunks: bytes from offset `max(begin - 1, 0)` of the input on; read only as far as needed.
        target, limit, fragment: bytes of a block, of the longest record in one piece, of a fragment.
        name: of the input, for the RequestError where it is an archive or has a header beyond `limit`.
    """
    buffer = _Buffer(chunks, max(begin - 1, 0))
    if begin == 0:
        buffer.fill(FRAGMENT)
        if what := foreign(buffer.data):
            raise RequestError(f"{name} is {what}")
        skipped, text = _skip_preamble(buffer)
        if skipped or not buffer.data:
            yield Piece(b"", buffer.base, skipped=skipped, text=text)
    elif not _skip_to_record(buffer, stop):
        return
    wanted = target
    while True:
        buffer.fill(wanted)
        data = buffer.data
        if not data or (stop is not None and buffer.base >= stop):
            return
        at = -1
        if stop is not None and buffer.base + len(data) > stop:
            at = first_record(data, stop - buffer.base - 1)
        if at < 0:
            at = len(data) if buffer.ended else last_record(data)
        if at < 0 and len(data) <= limit:
            wanted = min(2 * len(data), limit + 1)
            continue
        if (at < 0 or at > limit) and not 0 <= first_record(data, 0) <= limit:
            yield from _fragments(buffer, fragment, limit, name)
        else:
            data = buffer.take(at)
            yield Piece(data, buffer.base)
        wanted = target


def _fragments(buffer: _Buffer, target: int, limit: int, name: str) -> Iterator[Piece]:
    """The record at the buffer's start, in fragments that end with lines where lines are short enough."""
    if min((n for n in (buffer.data.find(b"\n", 0, limit), buffer.data.find(b"\r", 0, limit)) if n >= 0), default=-1) < 0:
        place = f"{name} is no FASTA: its line at byte {buffer.base} begins like a header and has more than {limit:,} bytes"
        raise RequestError(f"{place}; mend it, or leave it out of the inputs")
    continued = middle = False
    while True:
        buffer.fill(2 * target)
        data = buffer.data
        end = first_record(data, 0)
        if continued and not middle and data[:1] == b">":
            end = 0
        if end < 0 and buffer.ended:
            end = len(data)
        if 0 <= end <= target:
            data = buffer.take(end)
            yield Piece(data, buffer.base, continued, False, middle)
            return
        at = max(data.rfind(b"\n", 0, target), data.rfind(b"\r", 0, target)) + 1
        if not at and not continued:
            at = min(n for n in (data.find(b"\n"), data.find(b"\r")) if n >= 0) + 1
        whole_lines = at > 0
        data = buffer.take(at or target)
        yield Piece(data, buffer.base, continued, True, middle)
        continued, middle = True, not whole_lines


def first_record(data: bytes, start: int) -> int:
    """Place of the first `>` after a line end that is at `start` or later; -1 if there is none."""
    line_feed = data.find(b"\n>", max(start, 0))
    carriage = data.find(b"\r>", max(start, 0)) if data.find(b"\r", max(start, 0)) >= 0 else -1
    found = [n for n in (line_feed, carriage) if n >= 0]
    return min(found) + 1 if found else -1


def last_record(data: bytes) -> int:
    """Place of the last `>` after a line end; -1 if there is none."""
    carriage = data.rfind(b"\r>") if b"\r" in data else -1
    found = max(data.rfind(b"\n>"), carriage)
    return found + 1 if found >= 0 else -1


def count_lines(data: bytes) -> int:
    """Line ends: LF, CR LF or CR."""
    return data.count(b"\n") + (data.count(b"\r") - data.count(b"\r\n") if b"\r" in data else 0)


def _skip_to_record(buffer: _Buffer, stop: int | None) -> bool:
    """Drop the end of a record that another unit reads. False if no record begins before `stop`."""
    while True:
        buffer.fill(2)
        at = first_record(buffer.data, 0)
        if at >= 0:
            buffer.take(at)
            return stop is None or buffer.base < stop
        if buffer.ended or (stop is not None and buffer.base + len(buffer.data) > stop):
            return False
        buffer.take(len(buffer.data) - 1)


def _skip_preamble(buffer: _Buffer) -> tuple[int, int]:
    """Drop everything before the first header. Returns (lines dropped, those that are neither blank nor comments)."""
    buffer.fill(3)
    if buffer.data.startswith(BOM):
        buffer.take(len(BOM))
    skipped, text = 0, 0
    while True:
        buffer.fill(FRAGMENT)
        if buffer.data.startswith(b">"):
            return skipped, text
        at = first_record(buffer.data, 0)
        whole = at if at >= 0 else len(buffer.data) if buffer.ended else max(buffer.data.rfind(b"\n"), 0) + 1
        dropped = buffer.take(whole)
        skipped += count_lines(dropped) + (at < 0 and buffer.ended and dropped[-1:] not in (b"", b"\n", b"\r"))
        text += sum(1 for line in dropped.splitlines() if line.strip() and line[:1] not in (b";", b"#"))
        if buffer.ended and not buffer.data:
            return skipped, text
