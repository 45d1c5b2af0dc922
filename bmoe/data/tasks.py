"""The work of a preparation in order: ranges of files that can be read at any place, and pieces of streams."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from bmoe.data import inputs
from bmoe.data.blocks import TARGET, Piece, cut, first_record
from bmoe.data.formats import as_fasta
from bmoe.data.inputs import Source
from bmoe.data.options import PrepareOptions
from bmoe.data.slots import Slot, within
from bmoe.errors import RequestError

UNIT = TARGET  # bytes of a range
CHUNK = 1 << 20
RECORD = (b"\n>", b"\r>")  # where a record begins
MARGIN = 16 << 10  # bytes in which the next record is looked for first


@dataclass(frozen=True)
class Task:
    """The records that begin in [begin, end) of a source; or one piece of a stream. last: of its source. disk: bytes of a stream's file
    read so far."""

    source: int
    begin: int
    end: int
    piece: Piece | None = None
    last: bool = False
    disk: int = 0


class Plan:
    """Tasks of some sources, or of part i of n of them (i from 1).

    Attributes:
        sources: all inputs. sizes: their bytes decompressed where they can be read at any place, else on disk. total: bytes on disk.
        digests: bytes and SHA-256 of the streams that were read to their end, by number of the source.

    RequestError where a part of standard input is wanted.
    """

    def __init__(self, sources: list[Source], options: PrepareOptions, part: tuple[int, int] | None):
        self.sources, self.options, self.part = sources, options, part
        plain = options.format == "fasta"
        self._readers = [inputs.reader(s) if plain and s.random_access else None for s in sources]
        self.sizes = [r.size if r else s.size for r, s in zip(self._readers, sources, strict=True)]
        self.total = sum(s.size for s in sources)
        self._before = [0, *itertools.accumulate(s.size for s in sources)]
        self._closed = 0
        self.digests: dict[int, dict] = {}  # of streams that were read to their end
        if part and any(s.kind == "stdin" for s in sources):
            raise RequestError("--part needs files: stdin cannot be divided among the machines of a job array")

    def position(self, source: int, end: int, disk: int = 0) -> float:
        """Bytes on disk, over all inputs, before offset `end` of a source, or of a stream before byte `disk` of its file."""
        share = end / self.sizes[source] if self._readers[source] and self.sizes[source] else 0.0
        return self._before[source] + (share * self.sources[source].size if self._readers[source] else disk)

    def mine(self, source: int, begin: int) -> bool:
        """Whether what begins there belongs to this part."""
        if self.part is None:
            return True
        number, parts = self.part
        return int(self.position(source, begin) * parts // max(self.total, 1)) == number - 1

    def units(self, source: int) -> list[tuple[int, int]]:
        """Ranges of a source that is read at any place, those of this part."""
        size = self.sizes[source]
        return [(b, min(b + UNIT, size)) for b in range(0, size, UNIT) if self.mine(source, b)] if size else []

    def inside(self) -> tuple[int, int] | None:
        """The source within which this part begins, and the byte; None where it begins with a source."""
        for source in range(len(self.sources)):
            units = self.units(source) if self.ranged(source) else [(0, 0)] if self.mine(source, 0) else []
            if units:
                return (source, units[0][0]) if units[0][0] else None
        return None

    def ranged(self, source: int) -> bool:
        """Whether a source is read by ranges."""
        return self._readers[source] is not None

    def tasks(self, first_source: int, offset: int) -> Iterator[Task]:
        """All tasks from `offset` of `first_source` on."""
        for source in range(first_source, len(self.sources)):
            start = offset if source == first_source else 0
            if self.ranged(source):
                units = [unit for unit in self.units(source) if unit[0] >= start]
                for k, (begin, end) in enumerate(units):
                    yield Task(source, begin, end, last=k == len(units) - 1)
            elif self.mine(source, 0):
                yield from self._stream(source, start)

    def _stream(self, source: int, start: int) -> Iterator[Task]:
        raw, chunks = inputs.stream(self.sources[source])
        if self.options.format != "fasta":
            chunks = as_fasta(chunks, self.options.format, self.sources[source].shown)
        piece, disk = None, 0
        for following in cut(_after(chunks, max(start - 1, 0)), start, None, name=self.sources[source].shown):
            if piece is not None:
                yield Task(source, 0, piece.end, piece, disk=disk)
            piece, disk = following, raw.count
        self.digests[source] = {"bytes": raw.count, "sha256": raw.hexdigest()}
        yield Task(source, 0, piece.end if piece else start, piece or Piece(b"", start), last=True, disk=raw.count)

    def pieces(self, task: Task, slot: Slot | None = None) -> Iterator[Piece]:
        """The pieces of a task; the first may stand in the slot."""
        return pieces(task, self._readers[task.source], slot, self.sources[task.source].shown)

    def close(self, before: int) -> None:
        """Close the files of sources before that one: their tasks are done."""
        while self._closed < min(before, len(self._readers)):
            if self._readers[self._closed] is not None:
                self._readers[self._closed].close()
            self._closed += 1

    def extent(self, source: int) -> tuple[int, int] | None:
        """Where the bytes of a ranged source that this part reads begin and end on disk. None: it reads none."""
        units = self.units(source)
        if not units and self.sizes[source]:
            return None
        if self.part is None or (units and units[0][0] == 0 and units[-1][1] == self.sizes[source]):
            return 0, self.sources[source].size
        return self._readers[source].on_disk(units[0][0], units[-1][1])


def pieces(task: Task, reader, slot: Slot | None, name: str) -> Iterator[Piece]:
    """The pieces of a task, read from its source's reader where it is a range."""
    if task.piece is not None:
        return iter((task.piece,))
    if task.begin and slot is not None:
        base, size = task.begin - 1, task.end - task.begin
        data = reader.read_into(memoryview(slot.data)[within(base) :][: size + MARGIN], base)
        near, after = (first_record(bytes(data[at : at + MARGIN]), 0) for at in (0, size))
        if near >= 0 and after >= 0:  # nearly always: then exactly these records are read
            return iter((Piece(data[near : size + after], base + size + after),)) if near < size + after else iter(())
        if near < 0 and not slot.holds(RECORD, within(base), within(base) + min(size + 1, len(data))):
            return iter(())  # within a long record
    return cut(_read(reader, max(task.begin - 1, 0), task.end), task.begin, task.end, target=2 * UNIT, name=name)


def _read(reader, begin: int, end: int) -> Iterator[bytes]:
    """Bytes from `begin` on: the range with a little more at once, then on to the end of the file."""
    count = end - begin + MARGIN
    while data := reader.read(begin, count):
        yield data
        begin += len(data)
        count = CHUNK


def _after(chunks: Iterator[bytes], skip: int) -> Iterator[bytes]:
    """Chunks without their first `skip` bytes."""
    for chunk in chunks:
        if skip < len(chunk):
            yield chunk[skip:]
        skip = max(skip - len(chunk), 0)
