"""FASTA, a whole block of records at a time: one compiled pass from bytes to headers and clean token ids.

A block begins with a header line and ends with a record's end. Every byte goes through a table to its code: an id, or what else it
is. Eight bytes whose codes are all ids are stored at once; all others, line ends among them, are looked at one by one.

What is read, and how it differs from a parser of clean files:
- line ends LF, CR LF or CR; blank lines; a missing last line end; a BOM; blanks inside sequences (removed);
- lines that begin with `;` or `#` are comments wherever they stand; text before the first `>` is skipped and counted;
- a header is the line after `>` without blanks at either end, so `> id` has the identifier `id`; it may be empty.
"""

from typing import NamedTuple

import numpy as np

from bmoe.data.alphabet import Alphabet
from bmoe.data.compiled import compiled, first_byte, inlined, load64, store64
from bmoe.data.hashing import word_hash
from bmoe.data.letters import AVX2, WIDE, letters
from bmoe.data.slots import Slot, rows

# Codes of bytes that are no residue; ids of residues are below LOWER, the same ids in lower case have the bit LOWER.
LOWER = 0x40
BLANK, GAP, STOP, INVALID, LINE_END = 0x80, 0x81, 0x82, 0x83, 0x84
BLANKS = b" \t\v\f"
AMINO = np.isin(np.arange(256), list(b"ACDEFGHIKLMNPQRSTVWYX"))
GLUED = 20  # so many amino-acid letters at the end of a header look like a sequence pasted there

# What is counted of each record: columns of `Records.odd`.
GAPS, TERMINAL_STOPS, LOWER_CASE, INTERNAL_STOPS, INVALID_LETTERS, WRONG, GLUED_HEADER = range(7)
ODD = 7
TYPICAL = 128  # bytes of a record
LF, CR = 10, 13
_U = np.uint64
_ONES, _HIGH = _U(0x0101010101010101), _U(0x8080808080808080)


class Codes(NamedTuple):
    """What each byte is. table: uint8 [256], byte -> id, id | LOWER, or one of BLANK, GAP, STOP, INVALID, LINE_END. pairs: uint16
    [65536], the same for two bytes at once. folded: uint8 [32], ids of letters by their last five bits, INVALID for none."""

    table: np.ndarray
    pairs: np.ndarray
    folded: np.ndarray


class Records(NamedTuple):
    """R records of a block.

    ids: token ids (or base ids), uint8, record after record. bounds: where each begins in ids, and the end, int64 [R+1].
    lower: which ids were lower case, bool, or None if none was.
    headers: texts of the headers, in the block. identifier: hash of the first word of each, uint64 [R] (0: none).
    line: line of the header within the block, from 0, int64 [R]. lines: number of line ends.
    odd: int32 [R, 7], what was found in each record, or None if nothing was: gaps; `*` at the end (removed); letters in lower
    case; other `*`; letters outside the alphabet; the same with gaps that count as such; 1 for a header that looks glued.
    """

    ids: np.ndarray
    bounds: np.ndarray
    lower: np.ndarray | None
    headers: "Text"
    identifier: np.ndarray
    line: np.ndarray
    lines: int
    odd: np.ndarray | None

    def name(self, record: int) -> bytes:
        """Its identifier."""
        return first_word(self.headers[record])


class Text(NamedTuple):
    """Texts in a buffer (uint8): bytes[start:end] for each."""

    bytes: np.ndarray
    start: np.ndarray
    end: np.ndarray

    def of(self, rows: np.ndarray) -> "Text":
        """Some of them."""
        return Text(self.bytes, self.start[rows], self.end[rows])

    def __getitem__(self, row: int) -> bytes:
        return self.bytes[self.start[row] : self.end[row]].tobytes()


def first_word(text: bytes) -> bytes:
    """Up to the first blank; empty where there is none."""
    return (text.split(None, 1) or [b""])[0]


def codes_of(alphabet: Alphabet) -> Codes:
    """The codes of an alphabet's letters."""
    table = np.full(256, INVALID, np.uint8)
    for letter in range(ord("A"), ord("Z") + 1):
        if alphabet.table[letter] != alphabet.unk_id:
            table[letter] = alphabet.table[letter]
            table[letter + 32] = alphabet.table[letter] | LOWER
    table[list(BLANKS)] = BLANK
    table[list(b"-.")] = GAP
    table[ord("*")] = STOP
    table[list(b"\r\n")] = LINE_END
    folded = np.full(32, INVALID, np.uint8)
    folded[1:27] = table[ord("A") : ord("Z") + 1]
    return Codes(table, (table.astype(np.uint16)[:, None] << 8 | table).ravel(), folded)


def parse(data: bytes | memoryview, codes: Codes, unknown: int, remove_gaps: bool, slot: Slot | None = None) -> Records:
    """The records of a block that begins with `>`, with the policies on single letters applied. They stand in `slot` if there is one.

    A trailing `*` is removed; every other `*` and every invalid letter become `unknown`, counted per record, so that the caller can
    drop or refuse the record. Gaps (`-`, `.`) are removed, or count as invalid letters.
    """
    view, fits = np.frombuffer(data, np.uint8), slot is not None and len(data) <= slot.ids.size
    ids = slot.ids if fits else np.empty(len(data), np.uint8)
    records, room = -1, len(data) // TYPICAL + 64
    while records < 0:  # once, unless records are short
        (bounds, start, end, line), identifier, odd = slot.rows(room, ODD) if fits else rows(room, ODD)
        records, lines, found = _parse(
            view, *codes, AMINO, unknown, remove_gaps, ids, bounds, start, end, identifier, line, odd
        )
        room = lines
    odd = odd[:records] if found else None
    ids, lower = ids[: bounds[records]], None
    if found and odd[:, LOWER_CASE].any():
        lower = ids >= LOWER
        ids &= LOWER - 1
    headers = Text(view, start[:records], end[:records])
    return Records(ids, bounds[: records + 1], lower, headers, identifier[:records], line[:records], lines, odd)


@compiled
def _parse(data, table, pairs, folded, amino, unknown, remove_gaps, ids, bounds, header_start, header_end, identifier, line, odd):
    """Fill the arrays. Returns (records, line ends, whether anything is in `odd`); -1 records if they have no room for
    all, and how much is needed."""
    at, size, o, record, lines, found, marked = _U(0), _U(data.size), _U(0), -1, 0, False, False
    while at < size:
        first = data[at]
        if first == ord(">"):
            if marked:
                o = _close(ids, _U(bounds[record]), o, unknown, odd, record)
                marked = False
            record += 1
            if record == line.size - 1:
                for k in range(at, size):
                    record += (data[k] == ord(">")) & ((data[k - _U(1)] == LF) | (data[k - _U(1)] == CR))
                return -1, record, False
            bounds[record], line[record], odd[record] = o, lines, 0
            begin, end, at = _header(data, at + _U(1))
            header_start[record], header_end[record] = begin, end
            identifier[record] = word_hash(data, begin, end)
            if _glued(data, begin, end, amino):
                odd[record, GLUED_HEADER], found = 1, True
        elif first == ord(";") or first == ord("#"):
            while at < size and data[at] != LF and data[at] != CR:
                at += _U(1)
        else:
            at, o, counts, marks = _line(data, at, table, pairs, folded, remove_gaps, ids, o, odd, record)
            found, marked = found | counts, marked | marks
        lines += 1  # the line's end, or that of the block
        at += _U(2) if at + _U(1) < size and data[at] == CR and data[at + _U(1)] == LF else _U(1)
    if marked:
        o = _close(ids, _U(bounds[record]), o, unknown, odd, record)
    bounds[record + 1] = o
    return record + 1, lines, found


@inlined
def _header(data, at):
    """The rest of a header line without blanks at its ends. Returns (its begin, its end, the line's end)."""
    size, begin = _U(data.size), at
    while at + _U(8) <= size:
        word = load64(data, at)
        feed, carriage = word ^ _U(0x0A0A0A0A0A0A0A0A), word ^ _U(0x0D0D0D0D0D0D0D0D)
        ends = (((feed - _ONES) & ~feed) | ((carriage - _ONES) & ~carriage)) & _HIGH
        if ends:
            at += first_byte(ends)
            break
        at += _U(8)
    while at < size and data[at] != LF and data[at] != CR:
        at += _U(1)
    end = at
    while begin < end and _blank(data[begin]):
        begin += _U(1)
    while end > begin and _blank(data[end - _U(1)]):
        end -= _U(1)
    return begin, end, at


@inlined
def _blank(byte):
    return byte == 32 or byte == 9 or byte == 11 or byte == 12


@inlined
def _line(data, at, table, pairs, folded, remove_gaps, ids, o, odd, record):
    """Append the codes of a line of sequence. Returns (place of its end, new end of `ids`, whether `odd` counts any, whether `_close`
    has to look at any)."""
    size, counts, marks = _U(data.size), False, False
    while at < size:
        at, o, lower = letters(data, at, ids, o, folded)
        if lower:
            odd[record, LOWER_CASE] += np.int32(lower)
            counts = True
        while at + _U(8) <= size and (not AVX2 or at + _U(WIDE) > size):
            word, codes = load64(data, at), _U(0)
            for k in range(_U(0), _U(64), _U(16)):
                codes |= _U(pairs[(word >> k) & _U(0xFFFF)]) << k
            store64(ids, o, codes)
            special = codes & _HIGH
            lower = codes & (_ONES << _U(6)) & ((special & (~special + _U(1))) - _U(1))  # those before the first special one
            if lower:
                odd[record, LOWER_CASE] += np.int32(((lower >> _U(6)) * _ONES) >> _U(56))
                counts = True
            if special:
                at, o = at + first_byte(special), o + first_byte(special)
                break
            at, o = at + _U(8), o + _U(8)
        if at == size:
            break
        code = table[data[at]]
        if code == LINE_END:
            break
        at += _U(1)
        if code >= LOWER and code != BLANK:
            counts = True
            if code < BLANK:
                odd[record, LOWER_CASE] += 1
            elif code == GAP:
                odd[record, GAPS] += 1
        if code < BLANK or code > GAP or (code == GAP and not remove_gaps):
            marks |= code >= BLANK
            ids[o] = code
            o += _U(1)
    return at, o, counts, marks


@inlined
def _close(ids, begin, end, unknown, odd, record):
    """Decide about the stops, gaps and invalid letters of a record that is whole. Returns its new end."""
    body = end
    while body > begin and (ids[body - _U(1)] == STOP or ids[body - _U(1)] == GAP):
        body -= _U(1)
    last = end
    end = body
    for k in range(body, last):
        if ids[k] == GAP:
            ids[end] = GAP
            end += _U(1)
        else:
            odd[record, TERMINAL_STOPS] += 1
    for k in range(begin, end):
        code = ids[k]
        if code >= BLANK:
            ids[k] = unknown
            if code == STOP:
                odd[record, INTERNAL_STOPS] += 1
            else:
                odd[record, WRONG] += 1
                if code == INVALID:
                    odd[record, INVALID_LETTERS] += 1
    return end


@inlined
def _glued(data, begin, end, amino):
    """Whether a header ends in GLUED amino-acid letters: perhaps a sequence pasted there."""
    if end - begin <= _U(GLUED):
        return False
    for k in range(end - _U(GLUED), end):
        if not amino[data[k]]:
            return False
    return True
