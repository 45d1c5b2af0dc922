"""One piece of input turned into sequences: parse, clean, apply the policies on records, cut DNA, hash, assign splits.

A worker builds a `Batch` and keeps it; its `Summary`, a few bytes per sequence, goes to the ledger, which knows what came
before (duplicates, places in the shards) and answers which sequences are stored where.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bmoe.data import fasta, windows
from bmoe.data.alphabet import DNA_LETTERS, Alphabet
from bmoe.data.blocks import Piece
from bmoe.data.clusters import Clusters
from bmoe.data.compiled import compiled
from bmoe.data.fasta import Records, Text, first_word
from bmoe.data.hashing import hashes, split_of
from bmoe.data.options import PrepareOptions
from bmoe.data.slots import Slot
from bmoe.data.summary import EMPTY, INTERNAL_STOP, INVALID, NOTES, REASONS, TOO_LONG, TOO_SHORT, Note, Refused, Summary

COUNTS = {
    "gaps": fasta.GAPS,
    "terminal_stops": fasta.TERMINAL_STOPS,
    "internal_stops": fasta.INTERNAL_STOPS,
    "invalid_letters": fasta.INVALID_LETTERS,
    "lower_case": fasta.LOWER_CASE,
    "glued_headers": fasta.GLUED_HEADER,
}


class Batch(NamedTuple):
    """tokens: ids as stored. start, end: each sequence in tokens. headers: of each sequence. line: of each one's record."""

    summary: Summary
    tokens: np.ndarray
    start: np.ndarray
    end: np.ndarray
    headers: Text
    line: np.ndarray


@dataclass
class Carry:
    """A record that a fragment left open."""

    header: bytes
    line: int
    ids: np.ndarray
    lower: np.ndarray | None
    offset: int = 0
    before: int | None = None


class Builder:
    """Makes batches of pieces of one input, each on its own but for fragments of one record, which hand on a `Carry`."""

    def __init__(self, options: PrepareOptions, letters: Alphabet, base: Alphabet, clusters: Clusters | None):
        """letters: of the tokens stored. base: single letters that are cleaned (the same but for byte-pair encodings)."""
        self.options, self.letters, self.base, self.clusters = options, letters, base, clusters
        self._codes = fasta.codes_of(base)
        self._n_id = base.symbols.index("N") if options.dna and options.n_runs == "split" else None

    def build(self, piece: Piece, carry: Carry | None = None, slot: Slot | None = None) -> tuple[Batch, Carry | None]:
        """The batch of a piece, and what its open record hands on. Refused under a policy `error`. slot: memory to use."""
        data, lines_less = piece.data, 0
        if piece.continued:
            data, lines_less = _continued(piece, carry), 1
        if not data:
            return _empty(piece), None
        records = fasta.parse(data, self._codes, self.base.unk_id, self.options.gaps == "remove", slot)
        summary = Summary(lines=records.lines - lines_less - (piece.open and data[-1:] not in (b"\n", b"\r")), end=piece.end)
        summary.continued, summary.open = piece.continued, piece.open
        records = records._replace(line=records.line - lines_less)
        try:
            reasons = self._judge(records, piece, summary)
        except _Policy as found:
            raise self._refused(records, data, lines_less, *found.args) from None
        summary.records = records.line.size - piece.continued
        if not (self.options.dna and piece.continued):
            summary.identifier_hash, summary.identifier_line = records.identifier, records.line
        if piece.continued or piece.open:
            if self.options.dna:
                return self._fragment(records, reasons, piece, summary, carry)
            carry = Carry(records.headers[0], 0, records.ids[:0], None)
        return (self._dna if self.options.dna else self._whole)(records, reasons, summary), carry

    def _judge(self, records: Records, piece: Piece, summary: Summary) -> np.ndarray:
        """Reason to drop each record, as its number in REASONS; 0 keeps it. Writes counts and notes."""
        options, lengths, odd = self.options, np.diff(records.bounds), records.odd
        reasons = np.zeros(lengths.size, np.int8)
        fragment = piece.continued or piece.open
        if fragment and (not options.dna or options.max_length is not None):
            reasons[:] = TOO_LONG
        else:
            if options.max_length is not None:
                reasons[lengths > options.max_length] = TOO_LONG
            if not fragment:
                reasons[lengths < options.min_length] = TOO_SHORT
                reasons[lengths == 0] = EMPTY
        if odd is not None:
            if piece.continued:
                odd[:, fasta.GLUED_HEADER] = 0  # its header was judged before
            totals = odd.sum(0, dtype=np.int64).tolist()
            summary.letters = {what: totals[column] for what, column in COUNTS.items() if totals[column]}
            for column, policy, reason in (
                (fasta.INTERNAL_STOPS, options.internal_stop, INTERNAL_STOP),
                (fasta.WRONG, options.on_invalid, INVALID),
            ):
                rows = np.flatnonzero(odd[:, column])
                if rows.size and policy == "error":
                    raise _Policy(int(rows[0]), reason)
                if policy == "drop":
                    reasons[rows] = reason
                else:
                    _note(summary, records, rows, REASONS[reason] + "_unknown", odd[:, column])
            _note(summary, records, np.flatnonzero(odd[:, fasta.GLUED_HEADER]), "glued_header")
            for what in ("gaps", "terminal_stops", "lower_case") if not options.dna else ():
                _note(summary, records, np.flatnonzero(odd[:, COUNTS[what]]), what)
        for code in np.unique(reasons[reasons > 0]).tolist() if reasons.any() and not piece.continued else ():
            rows = np.flatnonzero(reasons == code)
            summary.dropped[REASONS[code]] = rows.size
            _note(summary, records, rows, REASONS[code])
        return reasons

    def _refused(self, records: Records, data: bytes, lines_less: int, record: int, reason: int) -> Refused:
        problem = "a * inside its sequence: mend it, or choose --internal-stop unknown or drop"
        line = int(records.line[record])
        if reason == INVALID:
            bad = (fasta.INVALID, fasta.GAP) if self.options.gaps == "invalid" else (fasta.INVALID,)
            text = bytes(data).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")[line + lines_less + 1 :]
            letters = (bytes([b]) for row in text if row[:1] not in (b";", b"#") for b in row if self._codes.table[b] in bad)
            problem = f"the invalid letter {repr(next(letters))[1:]}: mend it, or choose --on-invalid unknown or drop"
        return Refused(line, _text(records.name(record)), problem)

    # protein ------------------------------------------------------------------------------------------------------------

    def _whole(self, records: Records, reasons: np.ndarray, summary: Summary) -> Batch:
        start, end, line = records.bounds[:-1], records.bounds[1:], records.line
        headers = records.headers
        cluster_of = self._clusters_of(records, summary.letters)
        if reasons.any():
            rows = np.flatnonzero(reasons == 0)
            start, end, line, headers = start[rows], end[rows], line[rows], headers.of(rows)
            cluster_of = None if cluster_of is None else cluster_of[rows]
        summary.hash, summary.cluster = hashes(records.ids, start, end), cluster_of
        summary.split = self._split(summary.hash if cluster_of is None else cluster_of.view(np.uint64))
        return self._finish(summary, records.ids, start, end, headers, line)

    def _clusters_of(self, records: Records, counts: dict[str, int]) -> np.ndarray | None:
        return None if self.clusters is None else self.clusters.of(records, counts)

    def _split(self, keys: np.ndarray) -> np.ndarray:
        return split_of(keys, self.options.valid_fraction, self.options.test_fraction, self.options.seed)

    def _finish(self, summary: Summary, ids, start, end, headers: Text, line) -> Batch:
        if self.letters.tokenizer is not None:
            ids, start, end = self._encode(ids, start, end)
        summary.length = end - start
        if self.options.keep_headers:
            summary.header_length = headers.end - headers.start
        return Batch(summary, ids, start, end, headers, line)

    # DNA ----------------------------------------------------------------------------------------------------------------

    def _dna(self, records: Records, reasons: np.ndarray, summary: Summary) -> Batch:
        ids, bounds, kept = records.ids, records.bounds, reasons == 0
        cluster_of = self._clusters_of(records, summary.letters)
        divided = np.diff(bounds) > windows.REGION
        if self._n_id is not None and windows.has_n_run(ids.tobytes(), self._n_id):
            spans = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            divided |= np.fromiter((windows.has_n_run(ids[a:b].tobytes(), self._n_id) for a, b in spans), bool, divided.size)
        record = np.flatnonzero(kept & ~divided)
        start, end = bounds[record], bounds[record + 1]
        split = self._split(self._strand_hashes(ids, start, end) if cluster_of is None else cluster_of[record].view(np.uint64))
        headers = records.headers.of(record)
        cut = [(r, part) for r in np.flatnonzero(kept & divided).tolist() for part in self._parts(records, r, cluster_of, summary)]
        if cut:
            record = np.append(record, [r for r, _ in cut])
            order = np.argsort(record, kind="stable")
            begins = [bounds[r] for r, _ in cut]
            start = np.append(start, np.add(begins, [part.start for _, part in cut]))[order]
            end = np.append(end, np.add(begins, [part.end for _, part in cut]))[order]
            split = np.append(split, np.array([part.split for _, part in cut], np.uint8))[order]
            headers = _more(headers, [_named(records.headers[r], part.start, part.end) for r, part in cut]).of(order)
            record = record[order]
        return self._dna_finish(summary, records, ids, records.lower, start, end, split, record, headers, cluster_of)

    def _parts(self, records: Records, r: int, cluster_of, summary: Summary) -> list[windows.Part]:
        """The parts of a record that is divided."""
        ids = records.ids[records.bounds[r] : records.bounds[r + 1]]
        parts = self._long_enough(windows.cut(ids, None, True, self._n_id, self._region_splits(cluster_of, r)), summary)
        if not parts:
            summary.dropped["too_short"] = summary.dropped.get("too_short", 0) + 1
            _note(summary, records, np.array([r]), "too_short")
        return parts

    def _fragment(self, records: Records, reasons, piece: Piece, summary: Summary, carry: Carry | None) -> tuple[Batch, Carry | None]:
        """A piece of one long record: emit the regions whose neighbours are known, carry the rest."""
        cluster_of = self._clusters_of(records, {} if piece.continued else summary.letters)
        if carry is None or not piece.continued:
            carry = Carry(records.headers[0], int(records.line[0]), records.ids[:0], None)
        ids = np.concatenate([carry.ids, records.ids])
        lower = None
        if carry.lower is not None or records.lower is not None:
            halves = [(carry.lower, carry.ids.size), (records.lower, records.ids.size)]
            lower = np.concatenate([np.zeros(size, bool) if half is None else half for half, size in halves])
        parts, rest, before = [], ids.size, carry.before
        if not reasons.any():
            found = windows.cut(ids, carry.before, not piece.open, self._n_id, self._region_splits(cluster_of, 0))
            parts, rest, before = self._long_enough(found, summary), found.rest, found.before
        start, end = (np.array(places, np.int64) for places in ([part.start for part in parts], [part.end for part in parts]))
        split, record = np.array([part.split for part in parts], np.uint8), np.zeros(start.size, np.int64)
        none = Text(np.zeros(0, np.uint8), *np.zeros((2, 0), np.int64))
        headers = _more(none, [_named(carry.header, carry.offset + part.start, carry.offset + part.end) for part in parts])
        batch = self._dna_finish(summary, records, ids, lower, start, end, split, record, headers, cluster_of)
        if not piece.open:
            return batch, None
        lower = None if lower is None else lower[rest:].copy()
        return batch, Carry(carry.header, carry.line, ids[rest:].copy(), lower, carry.offset + rest, before)

    def _long_enough(self, found: windows.Cut, summary: Summary) -> list[windows.Part]:
        for what, number in (("n_run_bases", found.n_bases), ("split_gap_bases", found.gap_bases)):
            if number:
                summary.letters[what] = summary.letters.get(what, 0) + number
        parts = [part for part in found.parts if part.end - part.start >= self.options.min_length]
        if len(parts) < len(found.parts):
            summary.letters["parts_too_short"] = summary.letters.get("parts_too_short", 0) + len(found.parts) - len(parts)
        return parts

    def _region_splits(self, cluster_of, record: int):
        def splits(regions: list[bytes]) -> np.ndarray:
            if cluster_of is not None:
                return self._split(np.repeat(cluster_of[record : record + 1].view(np.uint64), len(regions)))
            bounds = np.cumsum([0, *map(len, regions)])
            return self._split(self._strand_hashes(np.frombuffer(b"".join(regions), np.uint8), bounds[:-1], bounds[1:]))

        return splits

    def _strand_hashes(self, ids: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """A hash that both strands share, so that they are in the same split."""
        other = self.base.complement[ids[::-1]]
        return np.minimum(hashes(ids, start, end), hashes(other, ids.size - end, ids.size - start))

    def _dna_finish(self, summary, records: Records, ids, lower, start, end, split, record, headers: Text, cluster_of) -> Batch:
        summary.split, summary.record, summary.hash = split, record, hashes(ids, start, end)
        summary.cluster = None if cluster_of is None else cluster_of[record]
        if self.options.soft_mask and self.letters.tokenizer is None:
            summary.mask_runs, summary.mask_count = _runs(lower, start, end)
        return self._finish(summary, ids, start, end, headers, records.line[record])

    def _encode(self, ids, start, end):
        """Byte-pair tokens of every sequence. Returns (tokens, start, end)."""
        text = np.frombuffer(("?" * 5 + DNA_LETTERS).encode(), np.uint8)[ids].tobytes().decode()
        pieces = [text[a:b] for a, b in zip(start.tolist(), end.tolist(), strict=True)]
        encoded = [e.ids for e in self.letters.tokenizer.encode_batch_fast(pieces, add_special_tokens=False)]
        bounds = np.cumsum([0, *map(len, encoded)])
        return np.array([i for e in encoded for i in e], self.letters.dtype), bounds[:-1], bounds[1:]


class _Policy(Exception):
    """A record (its number) that a policy `error` refuses, and why (a number in REASONS)."""


def _empty(piece: Piece) -> Batch:
    none, letters = np.zeros(0, np.int64), np.zeros(0, np.uint8)
    return Batch(Summary(lines=piece.skipped, end=piece.end, skipped_text=piece.text), letters, none, none, Text(letters, none, none), none)


def _continued(piece: Piece, carry: Carry | None) -> bytes:
    """A piece that goes on with a record, under the record's header."""
    data = piece.data
    if piece.middle and data[:1] in (b">", b";", b"#"):
        data = b"?" + data[1:]  # within a line these are letters, and no valid ones
    return b">" + (carry.header if carry else b"") + b"\n" + data


def _note(summary: Summary, records: Records, rows: np.ndarray, reason: str, numbers: np.ndarray | None = None) -> None:
    for row in rows[:NOTES].tolist():
        detail = "" if numbers is None else str(int(numbers[row]))
        summary.notes.append(Note(int(records.line[row]), _text(records.name(row)), reason, detail))


def _more(texts: Text, others: list[bytes]) -> Text:
    """Texts and more of them."""
    if not texts.start.size:
        texts = Text(texts.bytes[:0], texts.start, texts.end)
    bounds = texts.bytes.size + np.cumsum([0, *map(len, others)])
    joined = np.append(texts.bytes, np.frombuffer(b"".join(others), np.uint8))
    return Text(joined, np.append(texts.start, bounds[:-1]), np.append(texts.end, bounds[1:]))


def _named(header: bytes, start: int, end: int) -> bytes:
    """The header of bases start..end (from 0, end excluded) of a record."""
    name = b"%s:%d-%d" % (first_word(header), start + 1, end)
    return b" ".join([name, *header.split(None, 1)[1:]])


def _runs(lower, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower-case runs relative to each sequence: uint32 [m, 2], and their number per sequence."""
    counts = np.zeros(start.size, np.int64)
    if lower is None:
        return np.zeros((0, 2), np.uint32), counts
    runs = np.empty((np.count_nonzero(lower[1:] > lower[:-1]) + start.size, 2), np.uint32)
    return runs[: _find_runs(lower, start, end, runs, counts)], counts


@compiled
def _find_runs(lower, start, end, runs, counts):
    found = 0
    for k in range(start.size):
        first, inside = found, False
        for at in range(start[k], end[k]):
            if lower[at] and not inside:
                runs[found, 0] = at - start[k]
            if inside and not lower[at]:
                runs[found, 1] = at - start[k]
                found += 1
            inside = lower[at]
        if inside:
            runs[found, 1] = end[k] - start[k]
            found += 1
        counts[k] = found - first
    return found


def _text(name: bytes) -> str:
    return name[:200].translate(_SHOWN).decode("utf-8", "replace")


_SHOWN = bytes(ord("?") if byte < 32 or byte == 127 else byte for byte in range(256))


def duplicate_notes(batch: Batch, rows: np.ndarray) -> list[Note]:
    """Notes for the log about sequences that are duplicates."""
    return [Note(int(batch.line[r]), _text(first_word(batch.headers[r])), "duplicate") for r in rows[:NOTES].tolist()]
