"""One piece of input turned into sequences: parse, clean, apply the policies on records, cut DNA, hash, assign splits.

A worker builds a `Batch` and keeps it; its `Summary`, a few bytes per sequence, goes to the ledger, which knows what came
before (duplicates, places in the shards) and answers which sequences are stored where.
"""

import re
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bmoe.data import fasta, windows
from bmoe.data.alphabet import DNA_LETTERS, Alphabet
from bmoe.data.blocks import Piece
from bmoe.data.clean import Clean, clean
from bmoe.data.clusters import Clusters
from bmoe.data.hashing import hashes, split_of, word_hashes
from bmoe.data.options import PrepareOptions
from bmoe.data.summary import EMPTY, INTERNAL_STOP, INVALID, NOTES, REASONS, TOO_LONG, TOO_SHORT, Note, Refused, Summary


class Batch(NamedTuple):
    """tokens: ids as stored. start, end: each sequence in tokens. headers: of each sequence, or None. identifiers, line: of
    each sequence, for the log."""

    summary: Summary
    tokens: np.ndarray
    start: np.ndarray
    end: np.ndarray
    headers: list[bytes] | None
    line: np.ndarray


@dataclass
class _Carry:
    """A record that a fragment left open."""

    header: bytes
    line: int
    ids: np.ndarray
    lower: np.ndarray | None
    offset: int = 0
    before: int | None = None


class Builder:
    """Makes batches of consecutive pieces of one input. Keeps only what an unfinished record needs."""

    def __init__(self, options: PrepareOptions, letters: Alphabet, base: Alphabet, clusters: Clusters | None):
        """letters: of the tokens stored. base: single letters that are cleaned (the same but for byte-pair encodings)."""
        self.options, self.letters, self.base, self.clusters = options, letters, base, clusters
        self._table = fasta.code_table(base)
        self._n_id = base.symbols.index("N") if options.dna else None
        self._carry: _Carry | None = None

    def build(self, piece: Piece) -> Batch:
        """The batch of a piece. Refused under a policy `error`."""
        data, lines_less = piece.data, 0
        if piece.continued:
            data, lines_less = self._continued(piece), 1
        if not data:
            return _empty(piece)
        block = fasta.parse(data, self._table)
        summary = Summary(lines=block.lines - lines_less - (piece.open and data[-1:] not in (b"\n", b"\r")), end=piece.end)
        summary.continued, summary.open = piece.continued, piece.open
        block = block._replace(line=block.line - lines_less)
        cleaned = clean(block, self.base.unk_id, self.options.gaps == "remove")
        summary.letters = dict(cleaned.counts)
        reasons = self._judge(block, cleaned, piece, summary)
        summary.records = block.start.size - piece.continued
        if self.options.dna:
            sequences = self._dna(block, cleaned, reasons, piece, summary)
        else:
            sequences = self._whole(block, cleaned, reasons, summary)
        return sequences

    def _continued(self, piece: Piece) -> bytes:
        data = piece.data
        if piece.middle and data[:1] in (b">", b";", b"#"):
            data = b"?" + data[1:]  # within a line these are letters, and no valid ones
        return b">" + (self._carry.header if self._carry else b"") + b"\n" + data

    def _judge(self, block, cleaned: Clean, piece: Piece, summary: Summary) -> np.ndarray:
        """Reason to drop each record, as its number in REASONS; 0 keeps it. Writes counts and notes."""
        options, lengths = self.options, np.diff(cleaned.bounds)
        reasons = np.zeros(lengths.size, np.int8)
        fragment = piece.continued or piece.open
        if fragment and not options.dna or (fragment and options.max_length is not None):
            reasons[:] = TOO_LONG
        else:
            if options.max_length is not None:
                reasons[lengths > options.max_length] = TOO_LONG
            if not fragment:
                reasons[lengths < options.min_length] = TOO_SHORT
                reasons[lengths == 0] = EMPTY
        for found, policy, reason in (
            (cleaned.stops, options.internal_stop, INTERNAL_STOP),
            (cleaned.invalid, options.on_invalid, INVALID),
        ):
            if found is None:
                continue
            rows = np.flatnonzero(found)
            if policy == "error":
                self._refuse(block, int(rows[0]), reason)
            if policy == "drop":
                reasons[rows] = reason
            else:
                self._note(summary, block, rows, REASONS[reason] + "_unknown", found)
        suspects = fasta.glued(block) if not piece.continued else ()
        if len(suspects):
            summary.letters["glued_headers"] = len(suspects)
            self._note(summary, block, suspects, "glued_header")
        for what, rows in cleaned.records.items():
            if not options.dna:
                self._note(summary, block, rows, what)
        for code in np.unique(reasons[reasons > 0]).tolist() if reasons.any() else ():
            rows = np.flatnonzero(reasons == code)
            if not piece.continued:
                summary.dropped[REASONS[code]] = rows.size
                self._note(summary, block, rows, REASONS[code])
        return reasons

    def _refuse(self, block, record: int, reason: int) -> None:
        problem = "a * inside its sequence: mend it, or choose --internal-stop unknown or drop"
        if reason == INVALID:
            shown = self._first_invalid(block, record)
            problem = f"the invalid letter {shown}: mend it, or choose --on-invalid unknown or drop"
        raise Refused(int(block.line[record]), _text(block.identifier(record)), problem)

    def _first_invalid(self, block, record: int) -> str:
        begin = int(block.header_end[record])
        after = block.header_start[record + 1] - 1 if record + 1 < block.header_start.size else len(block.data)
        bad = (fasta.INVALID, fasta.GAP) if self.options.gaps == "invalid" else (fasta.INVALID,)
        letters = (bytes([b]) for b in block.data[begin:after] if self._table[b] in bad and b != 10)
        return repr(next(letters, b"?"))[1:]

    @staticmethod
    def _note(summary: Summary, block, rows, reason: str, numbers: np.ndarray | None = None) -> None:
        for row in np.asarray(rows)[:NOTES].tolist():
            detail = "" if numbers is None else str(int(numbers[row]))
            summary.notes.append(Note(int(block.line[row]), _text(block.identifier(row)), reason, detail))

    # protein ------------------------------------------------------------------------------------------------------------

    def _whole(self, block, cleaned: Clean, reasons: np.ndarray, summary: Summary) -> Batch:
        rows = None if not reasons.any() else np.flatnonzero(reasons == 0)
        headers = _headers(block)
        self._identifiers(block, summary)
        start, end, line, summary.hash = cleaned.bounds[:-1], cleaned.bounds[1:], block.line, cleaned.hash
        cluster_of = None
        if self.clusters is not None:
            cluster_of = self.clusters.of(headers, summary.identifier_hash, summary.letters)
        summary.record = np.arange(line.size)
        if rows is not None:
            start, end, line, summary.record = start[rows], end[rows], line[rows], rows
            headers, summary.hash = [headers[r] for r in rows.tolist()], summary.hash[rows]
            cluster_of = None if cluster_of is None else cluster_of[rows]
        summary.cluster = cluster_of
        keys = summary.hash if cluster_of is None else cluster_of.view(np.uint64)
        summary.split = self._split(keys)
        return self._finish(summary, cleaned.ids, start, end, headers, line)

    def _split(self, keys: np.ndarray) -> np.ndarray:
        return split_of(keys, self.options.valid_fraction, self.options.test_fraction, self.options.seed)

    @staticmethod
    def _identifiers(block: fasta.Block, summary: Summary) -> None:
        summary.identifier_hash = word_hashes(np.frombuffer(block.data, np.uint8), block.header_start)
        summary.identifier_line = block.line

    def _finish(self, summary: Summary, ids, start, end, headers: list[bytes], line) -> Batch:
        if self.letters.tokenizer is not None:
            ids, start, end = self._encode(ids, start, end)
        summary.length = end - start
        if self.options.keep_headers:
            summary.header_length = np.fromiter(map(len, headers), np.int64, len(headers))
        return Batch(summary, ids, start, end, headers, line)

    # DNA ----------------------------------------------------------------------------------------------------------------

    def _dna(self, block, cleaned: Clean, reasons: np.ndarray, piece: Piece, summary: Summary) -> Batch:
        headers = _headers(block)
        if not piece.continued:
            self._identifiers(block, summary)
        n_id = self._n_id if self.options.n_runs == "split" else None
        ids, lower, bounds = cleaned.ids, cleaned.lower, cleaned.bounds
        cluster_of = None
        if self.clusters is not None:
            known = word_hashes(np.frombuffer(block.data, np.uint8), block.header_start)
            cluster_of = self.clusters.of(headers, known, {} if piece.continued else summary.letters)
        fragment = piece.continued or piece.open
        if fragment:
            return self._fragment(block, cleaned, reasons, piece, summary, headers, n_id, cluster_of)
        data = ids.tobytes()
        long = np.diff(bounds) > windows.REGION
        if n_id is not None and windows.has_n_run(data, n_id):
            spans = zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
            long |= np.fromiter((windows.has_n_run(data[a:b], n_id) for a, b in spans), bool, long.size)
        start, end, split, record, names = [], [], [], [], []
        whole = np.flatnonzero((reasons == 0) & ~long)
        keys = self._strand_hashes([data[a:b] for a, b in zip(bounds[whole].tolist(), bounds[whole + 1].tolist(), strict=True)])
        whole_split = dict(
            zip(whole.tolist(), self._split(keys if cluster_of is None else cluster_of[whole].view(np.uint64)).tolist(), strict=True)
        )
        for r in np.flatnonzero(reasons == 0).tolist():
            begin, stop = int(bounds[r]), int(bounds[r + 1])
            if r in whole_split:
                start.append(begin), end.append(stop), split.append(whole_split[r]), record.append(r), names.append(headers[r])
                continue
            found = windows.cut(ids[begin:stop], None, True, n_id, self._region_splits(cluster_of, r))
            parts = self._long_enough(found, summary)
            if not parts:
                summary.dropped["too_short"] = summary.dropped.get("too_short", 0) + 1
                self._note(summary, block, [r], "too_short")
            for part in parts:
                start.append(begin + part.start), end.append(begin + part.end), split.append(part.split), record.append(r)
                names.append(_named(headers[r], part.start, part.end))
        return self._dna_finish(summary, block, ids, lower, start, end, split, record, names, cluster_of)

    def _fragment(self, block, cleaned, reasons, piece: Piece, summary: Summary, headers, n_id, cluster_of) -> Batch:
        """A piece of one long record: emit the regions whose neighbours are known, carry the rest."""
        carry = self._carry
        if carry is None or not piece.continued:
            carry = _Carry(headers[0], int(block.line[0]), cleaned.ids[:0], None)
        ids = np.concatenate([carry.ids, cleaned.ids])
        lower = None
        if carry.lower is not None or cleaned.lower is not None:
            halves = [(carry.lower, carry.ids.size), (cleaned.lower, cleaned.ids.size)]
            lower = np.concatenate([np.zeros(size, bool) if half is None else half for half, size in halves])
        start, end, split, names = [], [], [], []
        rest = ids.size
        if not reasons.any():
            found = windows.cut(ids, carry.before, not piece.open, n_id, self._region_splits(cluster_of, 0))
            rest, carry.before = found.rest, found.before
            for part in self._long_enough(found, summary):
                start.append(part.start), end.append(part.end), split.append(part.split)
                names.append(_named(carry.header, carry.offset + part.start, carry.offset + part.end))
        carry.offset += rest
        carry.ids, carry.lower = ids[rest:].copy(), None if lower is None else lower[rest:].copy()
        self._carry = carry if piece.open else None
        return self._dna_finish(summary, block, ids, lower, start, end, split, [0] * len(start), names, cluster_of)

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
            return self._split(self._strand_hashes(regions))

        return splits

    def _strand_hashes(self, items: list[bytes]) -> np.ndarray:
        """A hash that both strands share, so that they are in the same split."""
        table = bytes([*self.base.complement.tolist(), *range(self.base.size, 256)])
        return np.minimum(hashes(items), hashes([item.translate(table)[::-1] for item in items]))

    def _dna_finish(self, summary, block, ids, lower, start, end, split, record, names, cluster_of) -> Batch:
        start, end, record = np.array(start, np.int64), np.array(end, np.int64), np.array(record, np.int64)
        summary.split, summary.record = np.array(split, np.uint8), record
        summary.cluster = None if cluster_of is None else cluster_of[record]
        data = ids.tobytes()
        summary.hash = hashes([data[a:b] for a, b in zip(start.tolist(), end.tolist(), strict=True)])
        if self.options.soft_mask and self.letters.tokenizer is None:
            summary.mask_runs, summary.mask_count = _runs(lower, start, end)
        return self._finish(summary, ids, start, end, names, block.line[record])

    def _encode(self, ids, start, end):
        """Byte-pair tokens of every sequence. Returns (tokens, start, end)."""
        text = np.frombuffer(("?" * 5 + DNA_LETTERS).encode(), np.uint8)[ids].tobytes().decode()
        pieces = [text[a:b] for a, b in zip(start.tolist(), end.tolist(), strict=True)]
        encoded = [e.ids for e in self.letters.tokenizer.encode_batch_fast(pieces, add_special_tokens=False)]
        bounds = np.cumsum([0, *map(len, encoded)])
        return np.array([i for e in encoded for i in e], self.letters.dtype), bounds[:-1], bounds[1:]


_NO_NAME = (b"",)


def _empty(piece: Piece) -> Batch:
    none = np.zeros(0, np.int64)
    return Batch(Summary(lines=piece.skipped, end=piece.end, skipped_text=piece.text), np.zeros(0, np.uint8), none, none, [], none)


def _headers(block) -> list[bytes]:
    data = block.data
    return [data[a:b] for a, b in zip(block.header_start.tolist(), block.header_end.tolist(), strict=True)]


def _named(header: bytes, start: int, end: int) -> bytes:
    """The header of bases start..end (from 0, end excluded) of a record."""
    words = header.split(None, 1)
    name = b"%s:%d-%d" % (words[0] if words else b"", start + 1, end)
    return b" ".join([name, *words[1:]])


def _runs(lower, start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Lower-case runs relative to each sequence: uint32 [m, 2], and their number per sequence."""
    if lower is None:
        return np.zeros((0, 2), np.uint32), np.zeros(start.size, np.int64)
    runs, counts = [], []
    for a, b in zip(start.tolist(), end.tolist(), strict=True):
        edges = np.flatnonzero(np.diff(lower[a:b].view(np.int8), prepend=0, append=0))
        runs.append(edges.reshape(-1, 2).astype(np.uint32))
        counts.append(len(runs[-1]))
    return (np.concatenate(runs) if runs else np.zeros((0, 2), np.uint32)), np.array(counts, np.int64)


def _text(name: bytes) -> str:
    return re.sub(r"[\x00-\x1f\x7f]", "?", name[:200].decode("utf-8", "replace"))


def duplicate_notes(batch: Batch, rows: np.ndarray) -> list[Note]:
    """Notes for the log about sequences that are duplicates."""
    if not rows.size or batch.headers is None:
        return []
    return [Note(int(batch.line[r]), _text((batch.headers[r].split(None, 1) or _NO_NAME)[0]), "duplicate") for r in rows[:NOTES].tolist()]
