"""Compressed inputs as streams of bytes: gzip (any number of members, bgzf), bzip2, xz and Zstandard, told by magic bytes.

Whatever is wrong with a stream ends in a RequestError with the file and the byte offset in it; a stream never just ends.
"""

import bz2
import lzma
from collections.abc import Callable, Iterator
from typing import BinaryIO

from isal import igzip_lib

from bmoe.errors import RequestError

CHUNK = 256 << 10  # compressed bytes read at a time
OUTPUT = 1 << 20  # decompressed bytes handed on at a time, at most
AGAIN = "copy it again, or leave it out of the inputs"
MAGIC = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\x00": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
SKIPPABLE = tuple(bytes([0x50 + n]) + b"\x2a\x4d\x18" for n in range(16))  # zstd frames without content (RFC 8878)


def kind_of(head: bytes) -> str | None:
    """Name of the compression that a file beginning with `head` has, or None."""
    if head[:4] in SKIPPABLE:
        return "zstd"
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), None)


def decompressed(stream: BinaryIO, kind: str, name: str) -> Iterator[bytes]:
    """Decompressed bytes of a stream, member after member. RequestError for a corrupt or truncated stream."""
    new, errors = _decoder(kind, name)
    pending = stream.read(CHUNK)
    end = len(pending)  # offset in the stream after `pending`
    while pending:
        decoder, begin = new(), end - len(pending)
        if begin:
            pending, end = _enough(pending, end, stream)
            if kind_of(pending) != kind:
                place = f"after its {kind} stream, from byte {begin} on, stands something else"
                raise RequestError(f"{name} is corrupt: {place}; {AGAIN}")
        while not decoder.eof:
            if not pending and decoder.needs_input:
                pending = stream.read(CHUNK)
                end += len(pending)
                if not pending:
                    raise RequestError(
                        f"{name} is truncated: it ends at byte {end}, inside the {kind} stream that began at byte {begin}; {AGAIN}"
                    )
            try:
                data = decoder.decompress(pending, OUTPUT)
            except errors as error:
                place = f"its {kind} stream fails near byte {end - len(pending)} ({error})"
                raise RequestError(f"{name} is corrupt: {place}; {AGAIN}") from None
            pending = decoder.unused_data if decoder.eof else b""
            if data:
                yield data
        if not pending:
            pending = stream.read(CHUNK)
            end += len(pending)
        while kind in ("gzip", "xz") and pending and not pending.strip(b"\0"):  # padding with zeros, as tapes and block devices leave it
            pending = stream.read(CHUNK)
            end += len(pending)


def _enough(pending: bytes, end: int, stream: BinaryIO) -> tuple[bytes, int]:
    """`pending`, which ends at `end`, and the next bytes of the stream, so that they tell their kind if there are that many."""
    while len(pending) < len(max(MAGIC, key=len)) and (more := stream.read(CHUNK)):
        pending, end = pending + more, end + len(more)
    return pending, end


def _decoder(kind: str, name: str) -> tuple[Callable, tuple[type[Exception], ...]]:
    """A maker of decoders (decompress, eof, needs_input, unused_data) and the errors they raise."""
    if kind == "gzip":
        return lambda: igzip_lib.IgzipDecompressor(igzip_lib.DECOMP_GZIP), (igzip_lib.IsalError, EOFError)
    if kind == "bzip2":
        return bz2.BZ2Decompressor, (OSError, ValueError)
    if kind == "xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), (lzma.LZMAError,)
    assert kind == "zstd", kind
    try:
        import zstandard  # optional: the extra `zstd`
    except ImportError:
        raise RequestError(f"{name} is compressed with zstd: install the extra, `pip install bmoe[zstd]`") from None
    return lambda: _Zstd(zstandard.ZstdDecompressor().decompressobj()), (zstandard.ZstdError,)


class _Zstd:
    """zstandard's decoder with the interface of the others. It takes its input in small pieces, to bound its output."""

    PIECE = 32 << 10

    def __init__(self, decoder):
        self._decoder, self._input = decoder, b""
        self.eof, self.unused_data = False, b""

    @property
    def needs_input(self) -> bool:
        return not self._input

    def decompress(self, data: bytes, limit: int) -> bytes:
        self._input += data
        output, size = [], 0
        while self._input and not self.eof and size < limit:
            piece, self._input = self._input[: self.PIECE], self._input[self.PIECE :]
            output.append(self._decoder.decompress(piece))
            size += len(output[-1])
            self.eof = self._decoder.eof
        if self.eof:
            self.unused_data = self._decoder.unused_data + self._input
        return b"".join(output)
