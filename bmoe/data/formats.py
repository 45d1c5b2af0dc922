"""Inputs in other formats, read by Biopython and handed on as FASTA, so that everything after the record is the same."""

import io
import itertools
from collections.abc import Iterator

from bmoe.errors import RequestError

BIOPYTHON = {"genbank": "genbank", "embl": "embl", "swissprot": "swiss"}
BLOCK = 1 << 20
BEGINNINGS = {"fasta": (b">",), "fastq": (b"@",), "genbank": (b"LOCUS ",), "embl": (b"ID ",), "swissprot": (b"ID ",)}


FOREIGN = {  # how other files begin, what they are, and what to do
    b"PK\x03\x04": "a zip archive: unpack it and name the files in it",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive: unpack it and name the files in it",
    b"Rar!\x1a\x07": "a RAR archive: unpack it and name the files in it",
    b"\x1f\x9d": "compressed with compress: unpack it",
    b"\x04\x22\x4d\x18": "compressed with lz4: unpack it",
    b"\xff\xfe": "text in UTF-16: save it as UTF-8",
    b"\xfe\xff": "text in UTF-16: save it as UTF-8",
    b"%PDF-": "a PDF: take the sequences from their source",
    b"<!DOCTYPE": "a web page: download the file that it links to",
    b"<html": "a web page: download the file that it links to",
}
USTAR = slice(257, 262)  # where a tar archive says that it is one (POSIX.1-1988)


def foreign(head: bytes) -> str | None:
    """What the file that begins with `head` (unpacked, its first 262 bytes at least) is, and what to do, where it holds no sequences."""
    if head[USTAR] == b"ustar":
        return "a tar archive: unpack it and name the files in it"
    return next((what for beginning, what in FOREIGN.items() if head.startswith(beginning)), None)


def advice(head: bytes, format: str) -> str:
    """What to do about an input that begins with `head` and was no readable `format`."""
    head = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    alike = [name for name, beginnings in BEGINNINGS.items() if head.startswith(beginnings)]
    if alike and format not in alike:
        return f"it begins like {' or '.join(alike)}, so try --format {alike[0]}"
    return "mend it, or leave it out of the inputs"


class _Text(io.RawIOBase):
    """Chunks of bytes as a raw stream."""

    def __init__(self, chunks: Iterator[bytes]):
        self._chunks, self._rest, self.head = chunks, b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = chunk
            self.head = self.head or chunk[:100]
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count


def as_fasta(chunks: Iterator[bytes], format: str, name: str) -> Iterator[bytes]:
    """Records of a GenBank, EMBL, Swiss-Prot or FASTQ stream as FASTA text: two lines a record, `>id description`.

    RequestError, with the number of the record, where Biopython cannot read on.
    """
    first = next(chunks, b"")
    if what := foreign(first):
        raise RequestError(f"{name} is {what}")
    source = _Text(itertools.chain((first,) if first else (), chunks))
    text = io.TextIOWrapper(io.BufferedReader(source, BLOCK), encoding="utf-8", errors="replace")
    parts, size, number = [], 0, 0
    records = _fastq(text) if format == "fastq" else _annotated(text, format)
    while True:
        try:
            header, sequence = next(records)
        except StopIteration:
            break
        except (ValueError, AssertionError, KeyError, IndexError, AttributeError, TypeError) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            problem = f"record {number + 1} fails ({reason}); {advice(source.head, format)}"
            raise RequestError(f"{name} is no readable {format}: {problem}") from None
        number += 1
        parts.append(f">{' '.join(header.split())}\n{sequence}\n".encode())
        size += len(parts[-1])
        if size >= BLOCK:
            yield b"".join(parts)
            parts, size = [], 0
    if not number:
        raise RequestError(f"{name} has no {format} record: {advice(source.head, format)}")
    yield b"".join(parts)


def _fastq(text) -> Iterator[tuple[str, str]]:
    from Bio.SeqIO.QualityIO import FastqGeneralIterator  # imported here: only these formats need Biopython

    return ((title, sequence) for title, sequence, _ in FastqGeneralIterator(text))


def _annotated(text, format: str) -> Iterator[tuple[str, str]]:
    from Bio import SeqIO
    from Bio.Seq import UndefinedSequenceError

    for record in SeqIO.parse(text, BIOPYTHON[format]):
        try:
            yield f"{record.id} {record.description}", str(record.seq)
        except UndefinedSequenceError:
            yield f"{record.id} {record.description}", ""  # an entry without its sequence: counted as empty
