"""Reading the small files that users bring to an evaluation: tables and FASTA, plain or compressed."""

import bz2
import csv
import gzip
import io
import lzma
import re
import zlib
from pathlib import Path

import numpy as np
from Bio.SeqIO.FastaIO import SimpleFastaParser

from bmoe.data.alphabet import Alphabet
from bmoe.errors import RequestError

OPENERS = {b"\x1f\x8b": gzip.decompress, b"BZh": bz2.decompress, b"\xfd7zXZ": lzma.decompress}
DECIMAL_COMMA = re.compile(r"^(\s*[+-]?\d*),(\d+(?:[eE][+-]?\d+)?\s*)$")
WORKBOOK = b"PK\x03\x04"


def read_text(path: str | Path) -> str:
    """The text of a file, without a BOM; gzip, bzip2 and xz by their first bytes. RequestError if it cannot be read."""
    try:
        data = Path(path).read_bytes()
        for magic, opened in OPENERS.items():
            if data.startswith(magic):
                data = opened(data)
        if data.startswith(WORKBOOK):
            raise RequestError(f"{path} is a workbook or a zip archive; save it as CSV, or unpack it")
        return data.decode("utf-8-sig")
    except OSError as error:
        raise RequestError(f"{path} cannot be read: {error.strerror or error}") from None
    except (EOFError, UnicodeDecodeError, ValueError, lzma.LZMAError, zlib.error):
        raise RequestError(f"{path} is damaged or no text; save it again, a spreadsheet as CSV in UTF-8") from None


def read_table(path: str | Path) -> tuple[list[str], list[list[str]]]:
    """Column names and rows of a table with commas, semicolons or tabs, whichever its first line has most of. Between
    semicolons, 1,5 is 1.5.

    Short rows are filled up, empty lines left out. RequestError for a file without rows.
    """
    text = read_text(path)
    head = text.split("\n", 1)[0]
    delimiter = max("\t;,", key=head.count)
    try:
        rows = [row for row in csv.reader(io.StringIO(text, newline=""), delimiter=delimiter) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise RequestError(f"{path} is no table that can be read ({error})") from None
    if delimiter == ";":
        rows = [[DECIMAL_COMMA.sub(r"\1.\2", cell) for cell in row] for row in rows]
    if len(rows) < 2:
        raise RequestError(f"{path} has no rows below its line of column names")
    names = [name.strip() for name in rows[0]]
    return names, [[cell.strip() for cell in row] + [""] * (len(names) - len(row)) for row in rows[1:]]


def numeric(cells: list[str]) -> np.ndarray:
    """Cells as float64; nan where a cell is empty or no number."""
    out = np.full(len(cells), np.nan)
    for i, cell in enumerate(cells):
        try:
            out[i] = float(cell)
        except ValueError:
            continue
    return out


def read_fasta(path: str | Path, letters: Alphabet) -> list[tuple[str, np.ndarray]]:
    """(header without `>`, token ids without specials) of every record; gaps and stops are removed.

    RequestError for a file without records, or a record without letters.
    """
    records = []
    for header, sequence in SimpleFastaParser(io.StringIO(read_text(path), newline=None)):
        kept = sequence.translate(str.maketrans("", "", " \t-.*"))
        if not kept:
            raise RequestError(f"{path}: the record {header.strip()[:60]!r} has no letters; take it out of the file")
        records.append((header.strip(), letters.encode(kept.encode("ascii", "replace"))))
    if not records:
        raise RequestError(f"{path} has no FASTA record (a line that begins with >); name a FASTA file")
    return records
