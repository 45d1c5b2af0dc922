"""The ledger of a preparation: what has been read, what is kept, and where it stands in the shards.

It sees the summaries of batches in the order of the input, so its decisions (duplicates, places) do not depend on who parsed
what. Bulk data it never sees: workers write tokens and headers themselves at the places it assigns. Its whole state is a few
numbers, saved in a journal, plus files that only grow, so that a killed run continues from the last journal.
"""

import json
import os
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from bmoe.data.bulk import PARTIAL, Decision, Write
from bmoe.data.compiled import compiled
from bmoe.data.hashset import HashSet
from bmoe.data.lengths import Lengths
from bmoe.data.options import PrepareOptions
from bmoe.data.shards import SCRATCH, SPLITS
from bmoe.data.summary import NOTES, Note, Summary
from bmoe.errors import RunError

SHARD_TOKENS = 1 << 30  # a shard takes no further sequence once it has so many tokens
LOG = "prepare.log"
PART_BEGINS = "part_begins"  # reason of the line that says from where a part counts lines
_NONE = np.zeros(0, np.int64)
PLACE = np.dtype([("source", "<u4"), ("line", "<u8")])  # of an identifier


@dataclass
class Totals:
    """Counts of everything read so far; plain numbers, saved in the journal."""

    records_read: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    letters: dict[str, int] = field(default_factory=dict)
    noted: dict[str, int] = field(default_factory=dict)
    duplicates: int = 0  # sequences
    open: dict[str, int] = field(default_factory=dict)  # of the record that a fragment left open: its parts, those kept, dropped
    sequences: list[int] = field(default_factory=lambda: [0] * len(SPLITS))
    residues: list[int] = field(default_factory=lambda: [0] * len(SPLITS))
    shard: list[dict] = field(default_factory=lambda: [{"number": 0, "sequences": 0, "tokens": 0, "headers": 0, "runs": 0} for _ in SPLITS])
    shards: list[list[dict]] = field(default_factory=lambda: [[] for _ in SPLITS])


class Ledger:
    """Decides about batches and keeps the small files: offsets, clusters, hashes, soft masks, the log.

    Args:
        out: folder of the shards. options: of the preparation. clustered: whether sequences have clusters.
        masked: whether they have soft masks. hashes: keep hashes beside the shards (parts of a job array).
    """

    def __init__(self, out: Path, options: PrepareOptions, clustered: bool, masked: bool, hashes: bool):
        self.out, self.options = out, options
        self.clustered, self.masked, self.hashes = clustered, masked, hashes
        self.totals = Totals()
        self.lengths = Lengths()
        self.seen = HashSet() if options.dedup else None
        self._files: dict[str, object] = {}
        self._scratch = out / SCRATCH

    # deciding -----------------------------------------------------------------------------------------------------------

    def decide(self, summary: Summary) -> Decision:
        """Take a batch in: which of its sequences are new, and where they are stored."""
        totals = self.totals
        totals.records_read += summary.records
        for mine, theirs in ((totals.dropped, summary.dropped), (totals.letters, summary.letters)):
            for what, number in theirs.items():
                self._count(mine, what, number)
        size = summary.hash.size
        new = self.seen.add(summary.hash) if self.seen is not None else np.ones(size, bool)
        rows, ends, bounds = np.empty(size, np.int64), np.empty((2, size), np.int64), np.zeros(len(SPLITS) + 2, np.int64)
        before = np.array([[shard["tokens"], shard["headers"]] for shard in totals.shard])
        headers = summary.header_length if summary.header_length is not None else _NONE
        _sort(new, summary.split, summary.length, headers, before, rows, ends, bounds)
        kept, duplicates = rows[: bounds[-2]], rows[bounds[-2] :]
        if self.seen is not None and size:
            self._append(f"{SCRATCH}/kept", summary.hash[new] if duplicates.size else summary.hash)
            self._append(f"{SCRATCH}/duplicates", summary.hash[duplicates])
        to_note = duplicates[: max(NOTES - totals.duplicates, 0)]
        totals.duplicates += duplicates.size
        self._count_duplicates(summary, new, duplicates.size)
        self.lengths.add(summary.length[kept] if duplicates.size else summary.length)
        writes = []
        for split, (begin, end) in enumerate(pairwise(bounds[:-1].tolist())):
            if begin < end:
                writes.extend(self._place(split, kept[begin:end], ends[:, begin:end], summary))
        return Decision(writes, to_note)

    def _count_duplicates(self, summary: Summary, new: np.ndarray, duplicates: int) -> None:
        """A record is a duplicate when all its sequences are; duplicate parts of other records are counted apart."""
        if summary.continued or summary.open:
            return self._count_fragment(summary, new)
        if not duplicates or summary.record is None:
            return self._count(self.totals.dropped, "duplicate", duplicates)
        parts = np.bincount(summary.record)
        fresh = np.bincount(summary.record[new], minlength=parts.size)
        self._count(self.totals.dropped, "duplicate", int(np.count_nonzero((parts > 0) & (fresh == 0))))
        self._count(self.totals.letters, "parts_duplicate", int(np.sum(parts[fresh > 0] - fresh[fresh > 0])))

    def _count_fragment(self, summary: Summary, new: np.ndarray) -> None:
        """The same for a record in fragments: known at its last one."""
        totals = self.totals
        if not summary.continued:
            totals.open = {"parts": 0, "kept": 0, "dropped": sum(summary.dropped.values())}
        totals.open["parts"] += new.size
        totals.open["kept"] += int(np.count_nonzero(new))
        self._count(totals.letters, "parts_duplicate", int(np.count_nonzero(~new)))
        if not summary.open and not totals.open["kept"] and not totals.open["dropped"]:
            self._count(totals.dropped, "duplicate" if totals.open["parts"] else "too_short", 1)

    @staticmethod
    def _count(counts: dict[str, int], what: str, number: int) -> None:
        if number:
            counts[what] = counts.get(what, 0) + number

    def _place(self, split: int, rows: np.ndarray, ends: np.ndarray, summary: Summary) -> list[Write]:
        """Assign places to the sequences `rows` of a split, opening a new shard when one is full. ends: of their tokens and of their
        headers in the shard."""
        writes = []
        while rows.size:
            shard = self.totals.shard[split]
            take = rows.size
            if ends[0, -1] >= SHARD_TOKENS:
                take = int(np.searchsorted(ends[0], SHARD_TOKENS)) + 1  # the sequence that fills the shard is its last
            name = f"{SPLITS[split]}-{shard['number']:05d}"
            tokens, headers = shard["tokens"], shard["headers"]
            self._grow(split, name, rows[:take], summary, ends[:, :take])
            writes.append(Write(name, rows[:take], tokens, shard["tokens"] - tokens, headers, shard["headers"] - headers))
            rows, ends = rows[take:], ends[:, take:] - ends[:, take - 1 : take] if take < rows.size else ends[:, take:]
            if shard["tokens"] >= SHARD_TOKENS:
                self._close(split)
        return writes

    def _grow(self, split: int, name: str, rows: np.ndarray, summary: Summary, ends: np.ndarray) -> None:
        shard, totals = self.totals.shard[split], self.totals
        begin = shard["tokens"]
        self._append_offsets(name, "offsets", shard["sequences"], ends[0])
        shard["tokens"] = int(ends[0, -1])
        if summary.header_length is not None:
            self._append_offsets(name, "headers.offsets", shard["sequences"], ends[1])
            shard["headers"] = int(ends[1, -1])
        if self.clustered:
            self._append(f"{name}.clusters{PARTIAL}", summary.cluster[rows])
        if self.hashes:
            self._append(f"{name}.hashes{PARTIAL}", summary.hash[rows])
        if self.masked:
            counts = summary.mask_count[rows]
            ends = np.cumsum(summary.mask_count)
            runs = np.repeat(ends[rows] - counts, counts) + _within(counts)
            self._append(f"{name}.softmask{PARTIAL}", summary.mask_runs[runs])
            self._append_offsets(name, "softmask.offsets", shard["sequences"], shard["runs"] + np.cumsum(counts))
            shard["runs"] += int(counts.sum())
        shard["sequences"] += rows.size
        totals.sequences[split] += rows.size
        totals.residues[split] += shard["tokens"] - begin

    def _close(self, split: int) -> None:
        shard = self.totals.shard[split]
        name = f"{SPLITS[split]}-{shard['number']:05d}"
        for key in [key for key in self._files if key.startswith(name + ".")]:
            self._files.pop(key).close()
        self.totals.shards[split].append({"name": name, "sequences": shard["sequences"], "residues": shard["tokens"]})
        self.totals.shard[split] = {"number": shard["number"] + 1, "sequences": 0, "tokens": 0, "headers": 0, "runs": 0}

    def close_shards(self) -> None:
        """Close the last shard of every split."""
        for split in range(len(SPLITS)):
            if self.totals.shard[split]["sequences"]:
                self._close(split)

    # small files --------------------------------------------------------------------------------------------------------

    def identifiers(self, summary: Summary, source: int, first_line: int) -> None:
        """Remember the identifiers of a batch, to find those that stand twice."""
        hashes, places = np.empty(summary.identifier_hash.size, np.uint64), np.empty((summary.identifier_hash.size, 3), np.uint32)
        known = _places(summary.identifier_hash, summary.identifier_line, source, first_line, hashes, places)
        self._append(f"{SCRATCH}/identifiers", hashes[:known])
        self._append(f"{SCRATCH}/places", places[:known])

    def log(self, source: str, first_line: int, notes: list[Note]) -> None:
        """Write notes as `file:line:id<TAB>reason<TAB>detail`; of each reason the first NOTES."""
        lines = []
        for note in sorted(notes, key=lambda note: note.line):
            number = self.totals.noted[note.reason] = self.totals.noted.get(note.reason, 0) + 1
            if number <= NOTES:
                lines.append(f"{source}:{first_line + note.line}:{note.identifier}\t{note.reason}\t{note.detail}".rstrip() + "\n")
        if lines:
            self._append(LOG + PARTIAL, "".join(lines).encode())

    def text_before(self, source: str, lines: int) -> None:
        """Note text before the first record of an input."""
        self._count(self.totals.letters, "text_lines_before_first_record", lines)
        self._append(LOG + PARTIAL, f"{source}:1:\ttext_before_first_record\t{lines}\n".encode())

    def part_begins(self, source: str, byte: int) -> None:
        """Note that lines of a file are counted from there."""
        text = f"at byte {byte} of the file, from which its lines are counted here"
        self._append(LOG + PARTIAL, f"{source}:1:\t{PART_BEGINS}\t{text}\n".encode())

    def end_log(self) -> None:
        """Say how much was noted; the log has the first NOTES lines of each reason."""
        noted = self.totals.noted
        if self.totals.duplicates:
            noted["duplicate"] = self.totals.duplicates
        lines = [f"# {reason}: {number}\n" for reason, number in sorted(noted.items())]
        self._append(LOG + PARTIAL, "".join(lines).encode())

    def _append_offsets(self, name: str, kind: str, sequences: int, ends: np.ndarray) -> None:
        path = f"{name}.{kind}{PARTIAL}"
        if sequences == 0:
            self._append(path, np.zeros(1, np.int64))
        self._append(path, ends)

    def _append(self, path: str, data) -> None:
        """Add to a file; paths are relative to `out`."""
        self._open(path).write(data if isinstance(data, bytes) else np.ascontiguousarray(data))

    def _open(self, path: str):
        if path not in self._files:
            self._files[path] = (self.out / path).open("ab", buffering=1 << 18)
        return self._files[path]

    # journal ------------------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Hand everything to the operating system."""
        for file in self._files.values():
            file.flush()

    def bulk_sizes(self, item: int) -> dict[str, int]:
        """Bytes of tokens and headers in the open shards, once all batches so far are written. item: bytes of a token."""
        sizes = {}
        for split, name in enumerate(SPLITS):
            shard = self.totals.shard[split]
            if shard["sequences"]:
                stem = f"{name}-{shard['number']:05d}"
                sizes[f"{stem}.tokens"] = shard["tokens"] * item
                if self.options.keep_headers:
                    sizes[f"{stem}.headers"] = shard["headers"]
        return sizes

    def save(self, journal: dict) -> None:
        """Write the journal: everything up to here is in the files. A kill in between leaves the journal before."""
        self.flush()
        sizes = {path: file.tell() for path, file in self._files.items()}
        sizes |= {name + PARTIAL: size for name, size in self.bulk_sizes(journal["item"]).items()}
        state = journal | {
            "totals": self.totals.__dict__,
            "lengths": self.lengths.counts(),
            "sizes": sizes,
        }
        temporary = self._scratch / "journal.new"
        temporary.write_text(json.dumps(state))
        os.replace(temporary, self._scratch / "journal")

    def restore_totals(self, state: dict) -> None:
        """Take the numbers of a journal."""
        self.totals = Totals(**state["totals"])
        self.lengths.restore(*state["lengths"])

    def restore(self, state: dict) -> None:
        """Go back to a journal: cut files to their size then, drop younger ones, read the hashes kept so far."""
        self.restore_totals(state)
        closed = {shard["name"] for shards in self.totals.shards for shard in shards}
        for path in [*self.out.glob("*" + PARTIAL), *self._scratch.iterdir()]:
            key = os.path.relpath(path, self.out)
            if key in state["sizes"]:
                if path.stat().st_size < state["sizes"][key]:
                    raise RunError(f"{path} is shorter than the journal says: remove {self.out} and start again")
                os.truncate(path, state["sizes"][key])
            elif path.name.partition(".")[0] not in closed and path.name not in ("journal", "lock"):
                path.unlink()
        if self.seen is not None and (self._scratch / "kept").exists():
            with (self._scratch / "kept").open("rb") as file:
                while block := file.read(1 << 22):
                    self.seen.add(np.frombuffer(block, "<u8"))
        for key in state["sizes"]:
            if not key.endswith((f".tokens{PARTIAL}", f".headers{PARTIAL}")):
                self._open(key)

    def close(self) -> None:
        """Close the small files."""
        for file in self._files.values():
            file.close()
        self._files = {}


@compiled
def _sort(new, split, length, header_length, before, rows, ends, bounds):
    """Rows that are new, split by split, then the others. ends: of each one's tokens and header behind those before, int64 [2, n].
    bounds: where each split begins in rows, where the others do, and the end."""
    splits = bounds.size - 2
    for k in range(new.size):
        bounds[(split[k] if new[k] else splits) + 1] += 1
    for k in range(splits + 1):
        bounds[k + 1] += bounds[k]
    for group in range(splits + 1):
        at = bounds[group]
        if at == bounds[group + 1]:
            continue
        tokens, headers = (before[group, 0], before[group, 1]) if group < splits else (0, 0)
        for k in range(new.size):
            if (split[k] if new[k] else splits) == group:
                tokens += length[k]
                headers += header_length[k] if header_length.size else 0
                rows[at], ends[0, at], ends[1, at] = k, tokens, headers
                at += 1


@compiled
def _places(hashes, line, source, first_line, known, places):
    """The hashes that are not 0, and their places, as PLACE lays them out. Returns their number."""
    found = 0
    for k in range(hashes.size):
        if hashes[k]:
            known[found] = hashes[k]
            at = np.uint64(line[k] + first_line)
            places[found, 0], places[found, 1], places[found, 2] = source, at & np.uint64(0xFFFFFFFF), at >> np.uint64(32)
            found += 1
    return found


def _within(counts: np.ndarray) -> np.ndarray:
    """0 .. c-1 for every count c, joined."""
    return np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
