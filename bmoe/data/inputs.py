"""Inputs of `prepare`: which files they are, and how their bytes are read.

A plain file and a bgzf file are read at any place (so several workers share one file); every other input is a stream.
"""

import glob
import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
from isal import igzip_lib

from bmoe.data import compression
from bmoe.errors import RequestError

STDIN = "-"
SUFFIXES = {
    "fasta": (".fasta", ".fa", ".faa", ".fna", ".ffn", ".frn", ".fas", ".fsa", ".mpfa"),
    "fastq": (".fastq", ".fq"),
    "genbank": (".gb", ".gbk", ".gbff", ".genbank"),
    "embl": (".embl", ".ebl"),
    "swissprot": (".dat", ".txt", ".sprot", ".swiss"),
}
PACKED = ("", ".gz", ".bgz", ".bgzf", ".bz2", ".xz", ".zst", ".zstd")
BGZF_HEADER = 18  # bytes of a bgzf member before its deflate stream (SAM specification, section 4.1)


@dataclass(frozen=True)
class Source:
    """One input. kind: `plain`, `bgzf`, a compression that is a stream, or `stdin`. size: bytes on disk, 0 for stdin."""

    name: str
    kind: str
    size: int

    @property
    def shown(self) -> str:
        """Its name, for people."""
        return "stdin" if self.name == STDIN else readable(self.name)

    @property
    def random_access(self) -> bool:
        return self.kind in ("plain", "bgzf")


def find(inputs: list[str], format: str) -> list[Source]:
    """The sources behind files, globs, directories and `-`, in the order given; directories and globs sorted by name.

    RequestError for a name that matches nothing, an unreadable file, or the same file twice.
    """
    if not inputs:
        raise RequestError("no input was named: give FASTA files, directories, globs, or - for stdin")
    names: list[str] = []
    for name in inputs:
        if not name.strip():
            raise RequestError("an input has an empty name: name a file (is a variable of the shell not set?)")
        if name == STDIN:
            names.append(name)
        elif os.path.isdir(name):
            inside = _inside(name, format)
            if not inside:
                endings = ", ".join(SUFFIXES[format])
                raise RequestError(f"the directory {name} has no {format} file by its name ({endings}; also compressed): name files")
            names.extend(inside)
        elif os.path.exists(name):
            names.append(name)
        else:
            matched = sorted(n for n in glob.glob(name, recursive=True) if os.path.isfile(n))
            if not matched:
                what = f"no file matches the glob {name}" if glob.has_magic(name) else f"the input {name} does not exist"
                raise RequestError(f"{what}; check the path, which is seen from {os.getcwd()}")
            names.extend(matched)
    seen: dict[str, str] = {}
    for name in names:
        real = name if name == STDIN else os.path.realpath(name)
        if real in seen:
            raise RequestError(f"the input {name} is named twice (also as {seen[real]}): leave one out")
        seen[real] = name
    return [_source(name) for name in names]


def _inside(directory: str, format: str) -> list[str]:
    """Files of a format below a directory, by their names; hidden ones are left out (macOS writes `._name` beside `name`)."""
    endings = tuple(s + p for s in SUFFIXES[format] for p in PACKED)
    found = (p for p in Path(directory).rglob("*") if p.name.lower().endswith(endings) and not p.name.startswith(".") and p.is_file())
    return sorted(map(str, found))


def described(sources: list[Source]) -> list[list]:
    """Names and sizes, for the manifest."""
    return [[source.name, source.size] for source in sources]


def _source(name: str) -> Source:
    if name == STDIN:
        return Source(name, "stdin", 0)
    if os.path.exists(name) and not os.path.isfile(name):
        return Source(name, "stdin", 0)  # a pipe or a device: read once, to its end
    try:
        with open(name, "rb") as file:
            head = file.read(BGZF_HEADER)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise RequestError(f"the input {name} cannot be read: {error.strerror}; change that, or leave it out of the inputs") from None
    kind = compression.kind_of(head)
    if kind == "gzip" and _bgzf_size(head):
        return Source(name, "bgzf" if bgzf_index(name) is not None else "gzip", size)
    return Source(name, kind or "plain", size)


def readable(name: str) -> str:
    """A file's name as text of one line: bytes that are no UTF-8 and control characters become U+FFFD."""
    return "".join(c if c.isprintable() else "\ufffd" for c in os.fsencode(name).decode("utf-8", "replace"))


class _File:
    """A file that is open from the first reading on, for any number of threads: there may be more inputs than a process may open."""

    def __init__(self, name: str):
        self._name, self._lock, self._file = name, threading.Lock(), None

    def read(self, offset: int, count: int) -> bytes:
        """Up to `count` bytes from there on."""
        return os.pread(self._descriptor(), count, offset)

    def read_into(self, buffer: memoryview, offset: int) -> memoryview:
        """Fill a buffer with the bytes from there on. Returns what was filled."""
        return buffer[: os.preadv(self._descriptor(), [buffer], offset)]

    def _descriptor(self) -> int:
        with self._lock:
            if self._file is None:
                self._file = open(self._name, "rb", buffering=0)
            return self._file.fileno()

    def close(self) -> None:
        """Close it; no thread may be reading."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Plain(_File):
    """A plain file, read at any place."""

    def __init__(self, name: str):
        super().__init__(name)
        self.size = os.stat(name).st_size

    def on_disk(self, begin: int, end: int) -> tuple[int, int]:
        """Where these bytes stand in the file."""
        return begin, end


class Bgzf:
    """A bgzf file, read at any place of its decompressed bytes. RequestError for a corrupt block."""

    def __init__(self, name: str, index: np.ndarray | None = None):
        self._name, self._file = name, _File(name)
        self._begin, self._bytes, sizes = bgzf_index(name) if index is None else index
        self._first = np.cumsum(np.append(0, sizes))
        self.size = int(self._first[-1])

    def read(self, offset: int, count: int) -> bytes:
        end = min(offset + count, self.size)
        if offset >= end:
            return b""
        a = int(np.searchsorted(self._first, offset, side="right")) - 1
        b = int(np.searchsorted(self._first, end, side="left"))
        start = int(self._begin[a])
        raw = self._file.read(start, int(self._begin[b - 1] + self._bytes[b - 1]) - start)
        data = b"".join([self._block(raw, start, k) for k in range(a, b)])
        skip = offset - int(self._first[a])
        return data[skip : skip + end - offset]

    def read_into(self, buffer: memoryview, offset: int) -> memoryview:
        """Fill a buffer with the bytes from there on. Returns what was filled."""
        data = self.read(offset, len(buffer))
        buffer[: len(data)] = data
        return buffer[: len(data)]

    def on_disk(self, begin: int, end: int) -> tuple[int, int]:
        """Where the blocks of these decompressed bytes stand in the file."""
        a = int(np.searchsorted(self._first, begin, side="right")) - 1
        b = int(np.searchsorted(self._first, end, side="left"))
        return int(self._begin[a]), int(self._begin[b - 1] + self._bytes[b - 1])

    def _block(self, raw: bytes, start: int, k: int) -> bytes:
        begin, wanted = int(self._begin[k]), int(self._first[k + 1] - self._first[k])
        part = raw[begin - start : begin - start + int(self._bytes[k])]
        try:
            data = igzip_lib.decompress(part, igzip_lib.DECOMP_GZIP)
        except igzip_lib.IsalError as error:
            raise RequestError(f"{self._name} is corrupt: its bgzf block at byte {begin} fails ({error}); {compression.AGAIN}") from None
        if len(data) != wanted:
            found = f"its bgzf block at byte {begin} has {len(data)} bytes instead of {wanted}"
            raise RequestError(f"{self._name} is corrupt: {found}; {compression.AGAIN}")
        return data

    def close(self) -> None:
        self._file.close()


def _bgzf_size(head: bytes) -> int:
    """Bytes of the bgzf member that begins with `head`, or 0 where it is none."""
    if len(head) < BGZF_HEADER or head[:4] != b"\x1f\x8b\x08\x04" or head[10:16] != b"\x06\x00BC\x02\x00":
        return 0
    return int.from_bytes(head[16:18], "little") + 1


def bgzf_index(name: str) -> np.ndarray | None:
    """(begin, compressed bytes, decompressed bytes) of every block, int64 [3, blocks]; None if not bgzf to its end."""
    rows = []
    with open(name, "rb", buffering=0) as file:
        size, at = os.fstat(file.fileno()).st_size, 0
        while at < size:
            count = _bgzf_size(os.pread(file.fileno(), BGZF_HEADER, at))
            if not count or at + count > size:
                return None
            rows.append((at, count, int.from_bytes(os.pread(file.fileno(), 4, at + count - 4), "little")))
            at += count
    return np.array(rows, np.int64).reshape(-1, 3).T


def reader(source: Source) -> Plain | Bgzf:
    """The random-access reader of a source."""
    return Plain(source.name) if source.kind == "plain" else Bgzf(source.name)


class Hashing:
    """A stream that hashes and counts what is read from it."""

    def __init__(self, stream: BinaryIO):
        self._stream, self._hash, self.count = stream, hashlib.sha256(), 0

    def read(self, count: int) -> bytes:
        data = self._stream.read(count)
        self._hash.update(data)
        self.count += len(data)
        return data

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def stream(source: Source) -> tuple[Hashing, Iterator[bytes]]:
    """The raw stream of a source, and its decompressed chunks."""
    file = sys.stdin.buffer if source.name == STDIN else open(source.name, "rb")
    raw = Hashing(file)
    return raw, _chunks(raw, source, file)


def _chunks(raw: Hashing, source: Source, file: BinaryIO) -> Iterator[bytes]:
    name = source.shown
    try:
        if source.kind not in ("stdin", "plain"):
            yield from compression.decompressed(raw, "gzip" if source.kind == "bgzf" else source.kind, name)
            return
        head = raw.read(compression.CHUNK)
        kind = compression.kind_of(head)
        if kind:
            yield from compression.decompressed(_Rewound(head, raw), kind, name)
            return
        while head:
            yield head
            head = raw.read(1 << 20)
    finally:
        if file is not sys.stdin.buffer:
            file.close()


class _Rewound:
    """A stream with the bytes read to guess its kind put back."""

    def __init__(self, head: bytes, rest: Hashing):
        self._head, self._rest = head, rest

    def read(self, count: int) -> bytes:
        head, self._head = self._head, b""
        return head or self._rest.read(count)
