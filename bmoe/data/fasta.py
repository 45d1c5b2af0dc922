"""FASTA, a whole block of records at a time.

A block begins with a header line and ends with a record's end. Python sees the block in a handful of calls: one search for
line ends, one translation that also deletes them, and arithmetic on the positions; no loop over lines.

What is read, and how it differs from a parser of clean files:
- line ends LF, CR LF or CR; blank lines; a missing last line end; a BOM; blanks inside sequences (removed);
- lines that begin with `;` or `#` are comments wherever they stand; text before the first `>` is skipped and counted;
- a header is the line after `>` without blanks at either end, so `> id` has the identifier `id`; it may be empty.
"""

from typing import NamedTuple

import numpy as np
import stringzilla

from bmoe.data.alphabet import Alphabet

# Codes of bytes that are no residue; ids of residues are below LOWER, the same ids in lower case have the bit LOWER.
LOWER = 0x40
BLANK, GAP, STOP, INVALID = 0x80, 0x81, 0x82, 0x83
BLANKS = b" \t\v\f"
_BLANK_BYTES = np.zeros(256, bool)
_BLANK_BYTES[list(BLANKS)] = True
_AMINO = np.zeros(256, bool)
_AMINO[list(b"ACDEFGHIKLMNPQRSTVWYX")] = True
GLUED = 20  # so many amino-acid letters at the end of a header look like a sequence pasted there


class Block(NamedTuple):
    """R raw records of one block.

    data: the block with LF line ends. codes: a code per byte of data without line ends.
    header_start, header_end: header text in data, int64 [R]. start, end: sequence in codes, int64 [R].
    line: line of the header within the block, from 0, int64 [R]. lines: number of lines.
    """

    data: bytes
    codes: bytes
    header_start: np.ndarray
    header_end: np.ndarray
    start: np.ndarray
    end: np.ndarray
    line: np.ndarray
    lines: int

    def header(self, record: int) -> bytes:
        return self.data[self.header_start[record] : self.header_end[record]]

    def identifier(self, record: int) -> bytes:
        return (self.header(record).split(None, 1) or [b""])[0]


def code_table(alphabet: Alphabet) -> bytes:
    """256 bytes: byte -> id, id | LOWER, or one of BLANK, GAP, STOP, INVALID."""
    table = bytearray([INVALID]) * 256
    for letter in range(ord("A"), ord("Z") + 1):
        if alphabet.table[letter] != alphabet.unk_id:
            table[letter] = alphabet.table[letter]
            table[letter + 32] = alphabet.table[letter] | LOWER
    for blank in BLANKS:
        table[blank] = BLANK
    table[ord("-")] = table[ord(".")] = GAP
    table[ord("*")] = STOP
    return bytes(table)


def parse(data: bytes, table: bytes) -> Block:
    """The records of a block that begins with `>`."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if data[-1:] != b"\n":
        data += b"\n"
    view = np.frombuffer(data, np.uint8)
    line_ends = np.flatnonzero(view == 10)
    line_starts = np.empty(line_ends.size + 1, np.int64)  # with one past the last
    line_starts[0] = 0
    np.add(line_ends, 1, out=line_starts[1:])
    first = view[line_starts[:-1]]
    line = np.flatnonzero(first == ord(">"))
    codes = stringzilla.translate(data.replace(b"\n", b""), table)
    comments = np.flatnonzero((first == ord(";")) | (first == ord("#")))
    if comments.size:
        changed = bytearray(codes)
        for number in comments.tolist():
            begin, end = int(line_starts[number]) - number, int(line_ends[number]) - number
            changed[begin:end] = bytes([BLANK]) * (end - begin)
        codes = bytes(changed)
    after = np.append(line[1:], line_ends.size)
    start = line_starts[line + 1] - (line + 1)  # as many line ends precede it as lines
    end = line_starts[after] - after
    header_start, header_end = line_starts[line] + 1, line_ends[line]
    _strip(view, header_start, header_end)
    return Block(data, codes, header_start, header_end, start, end, line, line_ends.size)


def _strip(view: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
    """Move header bounds past blanks, in place. Few headers have any."""
    rows = np.flatnonzero((start < end) & _BLANK_BYTES[view[start]])
    while rows.size:
        start[rows] += 1
        rows = rows[(start[rows] < end[rows]) & _BLANK_BYTES[view[start[rows]]]]
    rows = np.flatnonzero((start < end) & _BLANK_BYTES[view[end - 1]])
    while rows.size:
        end[rows] -= 1
        rows = rows[(start[rows] < end[rows]) & _BLANK_BYTES[view[end[rows] - 1]]]


def glued(block: Block) -> np.ndarray:
    """Records whose header ends in a word of at least GLUED amino-acid letters: perhaps a sequence pasted there."""
    view = np.frombuffer(block.data, np.uint8)
    rows = np.flatnonzero(block.header_end - block.header_start > GLUED)
    for back in range(GLUED, 0, -1):  # the far letters first: they tell most headers from a sequence
        rows = rows[_AMINO[view[block.header_end[rows] - back]]]
        if not rows.size:
            break
    return rows
