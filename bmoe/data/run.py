"""One preparation from beginning to end: the loop over batches, the journal, the log, the end."""

import fcntl
import json
import shutil
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bmoe.data import bpe, digests, finish, formats, inputs, repeats, tasks
from bmoe.data.alphabet import TOKENIZER_FILE, alphabet, dna, is_bpe
from bmoe.data.batch import Builder
from bmoe.data.blocks import Piece
from bmoe.data.bulk import PARTIAL
from bmoe.data.clusters import Clusters
from bmoe.data.ledger import PLACE, Ledger
from bmoe.data.options import PrepareOptions
from bmoe.data.shards import SCRATCH
from bmoe.data.summary import NOTES, Note, Refused, Summary
from bmoe.data.tasks import Plan, Task
from bmoe.data.workers import Workers
from bmoe.errors import RequestError

JOURNAL_S = 2.0  # seconds between journals
SHOWN_S = 0.1  # seconds between reports of progress


@dataclass(frozen=True)
class Progress:
    """Where a preparation is. total: bytes of input on disk (0: unknown, stdin); done: of these; text: bytes of records read."""

    phase: str
    done: float
    total: int
    text: int
    records: int
    seconds: float


class Run:
    """One preparation.

    Args:
        sources: the inputs. out: folder of the shards. workers: threads that parse. part: (i, n), or None for all.
        progress: called with a `Progress` about ten times a second, or None. limit: bytes of text after which a dry run stops reading.

    Attributes, all about the place where the next batch begins (they are in the journal):
        source, offset, line: number of the input, place in it (decompressed bytes), and its line, from 1.
        next: place in it where the next task begins. disk: bytes read of the file of a stream.
        source_records, source_text: records of this input so far, and lines of text before its first.
        text: bytes of all inputs so far, decompressed.
    """

    def __init__(self, sources, out: Path, options: PrepareOptions, workers: int, part, progress, limit: int | None = None):
        self.sources, self.out, self.options, self.workers, self.part = sources, out, options, workers, part
        self.progress, self.limit = progress or (lambda _: None), limit
        self.scratch = out / SCRATCH
        self.begun = self.shown = self.saved = self.first = time.monotonic()  # first: when the first batch came
        self.source, self.offset, self.line = 0, 0, 1
        self.next = self.disk = 0
        self.source_records = self.source_text = self.text = 0
        self.places: deque[tuple[str, int, list[Note]]] = deque()  # of batches that are not known to be written

    def run(self, resume: bool) -> dict:
        """Prepare, or go on. Returns the manifest with directory, already_prepared, seconds, mb_per_s (10^6 bytes of text a second).

        Raises RequestError, after which nothing is left that could be taken for a result, and OSError, after which `resume` goes on.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        with self._locked():
            state = self._journal(resume)
            try:
                self.plan = Plan(self.sources, self.options, self.part)
                if state is not None:  # streams read before the kill are not read again
                    self.plan.digests = {int(source): found for source, found in state["digests"].items()}
                return self._run(state)
            except RequestError:
                self._remove()
                raise

    def _locked(self):
        """The open lock file of the folder. RequestError if others are at work in it, or if it holds other things."""
        foreign = [p.name for p in self.out.iterdir() if p.name != SCRATCH] if not self.scratch.exists() else []
        if foreign:
            raise RequestError(f"{self.out} is not empty (it has {sorted(foreign)[0]}): name another --out, or empty it")
        self.scratch.mkdir(exist_ok=True)
        lock = (self.scratch / "lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"another process is preparing {self.out}: wait for it, or name another --out") from None
        return lock

    def _request(self) -> dict:
        """What a preparation must have in common with the one that it goes on with."""
        part = list(self.part) if self.part else None
        return {"options": self.options.as_dict(), "inputs": inputs.described(self.sources), "part": part, "unit": tasks.UNIT}

    def _journal(self, resume: bool) -> dict | None:
        """The journal to go on from, or None to start."""
        path = self.scratch / "journal"
        if not path.exists():
            for partial in self.out.glob("*" + PARTIAL):
                partial.unlink()
            return None
        try:
            state = json.loads(path.read_text())
        except ValueError:  # after a power failure
            raise RequestError(f"{path} is damaged: remove {self.out} and start again") from None
        if not resume:
            raise RequestError(f"{self.out} holds an unfinished preparation: go on with --resume, or remove it")
        if state["request"] != self._request():
            raise RequestError(f"{self.out} holds an unfinished preparation of other inputs or options: repeat those, or remove it")
        return state

    def _remove(self) -> None:
        """Leave nothing that could be taken for a result."""
        for partial in self.out.glob("*" + PARTIAL):
            partial.unlink()
        (self.out / TOKENIZER_FILE).unlink(missing_ok=True)
        shutil.rmtree(self.scratch)
        if not any(self.out.iterdir()):
            self.out.rmdir()

    def _run(self, state: dict | None) -> dict:
        """`run` in the locked folder; state: the journal to go on from."""
        options = self.options
        clusters = Clusters.of_table(options.clusters) if options.clusters is not None else None
        if is_bpe(options.alphabet) and not (state and (self.out / TOKENIZER_FILE).exists()):
            whole = Plan(self.sources, self.options, None)  # every part learns the same
            bpe.learn(_all_pieces(whole), int(options.alphabet.partition(":")[2]), self.out)
        self.letters = alphabet(options.alphabet, self.out)
        masked = options.dna and options.soft_mask and self.letters.tokenizer is None
        self.ledger = Ledger(self.out, options, options.clusters is not None, masked, self.part is not None)
        self.item = self.letters.dtype().itemsize
        reads = state is None or state["phase"] == "read"
        first = state["place"][0] if state is not None and reads else 0 if reads else len(self.sources)
        hashed, written = digests.Inputs(self.plan, first) if self.limit is None else None, {}
        try:
            if state is None:
                if inside := self.plan.inside():
                    self.ledger.part_begins(self._name(inside[0]), inside[1])
                self._save("read")
                state = {"phase": "read"}
            elif state["phase"] == "read":
                self.ledger.restore(state)
                self.source, self.next, self.offset, self.line, self.source_records, self.source_text, self.text = state["place"]
            else:
                self.ledger.restore_totals(state)
                self.source, _, _, self.line, _, _, self.text = state["place"]
            if state["phase"] == "read":
                written = self._read(clusters, hashed)
                self._close()
            manifest = finish.manifest(
                self.out,
                self.ledger,
                self._request() | ({"lines": self._lines()} if self.part else {}),
                self.letters,
                written,
                hashed.result if hashed is not None else dict,
                self.plan,
                self.workers,
                self._show,
            )
        finally:
            if hashed is not None:
                hashed.stop()
            self.ledger.close()
        shutil.rmtree(self.scratch)
        seconds = time.monotonic() - self.begun
        return manifest | {"directory": str(self.out), "already_prepared": False, "seconds": seconds, "mb_per_s": self.text / 1e6 / seconds}

    def _read(self, clusters: Clusters | None, hashed: digests.Inputs | None) -> dict[str, digests.Digest]:
        """Read, parse and write everything. Returns digests of files written from their beginning."""
        builder = Builder(self.options, self.letters, dna() if self.letters.tokenizer else self.letters, clusters)
        workers = Workers(self.out, self.plan, builder, self.workers, hashed)
        try:
            for task, event in workers.events(self._limited(self.plan.tasks(self.source, self.next))):
                if isinstance(event, Refused):
                    place = f"{self._name(task.source)}:{self._line_at(task) + event.line}:{event.identifier}"
                    if (inside := self.plan.inside()) and inside[0] == task.source:
                        place += f" (lines are counted from byte {inside[1]}, where this part begins)"
                    raise RequestError(f"{place} has {event.problem}")
                if event is None:
                    self._end_of(task, workers)
                else:
                    self._batch(task, event, workers)
            self._log(workers.written(wait=True))
        finally:
            written = workers.close()
            self.plan.close(before=len(self.sources))
        return written

    def _limited(self, tasks):
        for task in tasks:
            if self.limit is not None and self.text >= self.limit:
                return
            yield task

    def _name(self, source: int) -> str:
        return self.sources[source].shown

    def _line_at(self, task: Task) -> int:
        return self.line if task.source == self.source else 1

    def _batch(self, task: Task, summary: Summary, workers: Workers) -> None:
        """Decide about a batch, have it written, and move on by it."""
        if task.source != self.source:
            self.source, self.line, self.source_records, self.source_text, self.offset = task.source, 1, 0, 0, task.begin
            self.plan.close(before=task.source)
        self.disk = task.disk
        if not self.text:
            self.first = time.monotonic()
        decision = self.ledger.decide(summary)
        self.ledger.identifiers(summary, task.source, self.line)
        self.places.append((self._name(task.source), self.line, summary.notes))
        workers.apply(decision)
        self._log(workers.written())
        self.line += summary.lines
        self.text += max(summary.end - self.offset, 0)
        self.offset = summary.end
        self.source_records += summary.records
        self.source_text += summary.skipped_text
        if summary.skipped_text:
            self.ledger.text_before(self._name(task.source), summary.skipped_text)

    def _log(self, written: list[list[Note]]) -> None:
        """Log the notes of batches that are written, with their duplicates."""
        for duplicates in written:
            name, line, notes = self.places.popleft()
            self.ledger.log(name, line, notes + duplicates)

    def _end_of(self, task: Task, workers: Workers) -> None:
        """A task is done: check its source at its end, show progress, save the journal when it is time."""
        if task.source == self.source:
            self.next = task.end
            if task.last and not self.source_records and self.source_text and (self.part is None or task.begin == 0):
                raise RequestError(self._no_fasta(task.source))
        now = time.monotonic()
        if now - self.shown > SHOWN_S:
            self.shown = now
            self._show("read")
        if now - self.saved > JOURNAL_S and not (task.piece is not None and task.piece.open):
            self._log(workers.written(wait=True))
            self._save("read")
            self.saved = time.monotonic()

    def _no_fasta(self, number: int) -> str:
        head = b"" if self.sources[number].kind == "stdin" else next(inputs.stream(self.sources[number])[1], b"")
        return f"{self._name(number)} has no FASTA record (none of its lines begins with >): {formats.advice(head, 'fasta')}"

    def _lines(self) -> dict:
        """What `logs.py` wants to know."""
        inside, read = self.plan.inside(), self.line - 1
        return {"inside": inside[0] if inside else None, "last": [self.source, read] if read else None}

    def _save(self, phase: str) -> None:
        place = [self.source, self.next, self.offset, self.line, self.source_records, self.source_text, self.text]
        self.ledger.save({"phase": phase, "request": self._request(), "place": place, "item": self.item, "digests": self.plan.digests})

    @property
    def done(self) -> float:
        """Bytes read of the inputs on disk."""
        return self.plan.position(self.source, self.offset, self.disk)

    def _show(self, phase: str) -> None:
        total = 0 if any(s.kind == "stdin" for s in self.sources) else self.plan.total
        self.progress(Progress(phase, self.done, total, self.text, self.ledger.totals.records_read, time.monotonic() - self.begun))

    def _close(self) -> None:
        """Everything was read: count what stands twice, and close the books."""
        ledger = self.ledger
        if not sum(ledger.totals.sequences) and self.part is None:
            raise RequestError(_nothing(ledger, self.sources))
        ledger.seen = None  # the hashes are no longer needed: their memory is
        ledger.close_shards()
        ledger.flush()
        count, rows = repeats.repeated(self.scratch / "identifiers", NOTES)
        if count:
            ledger.totals.letters["duplicate_identifiers"] = count
            for place in np.memmap(self.scratch / "places", PLACE, "r")[rows]:
                ledger.log(self._name(int(place["source"])), int(place["line"]), [Note(0, "", "duplicate_identifier")])
        ledger.totals.letters["sequences_with_duplicates"] = repeats.distinct(self.scratch / "duplicates")
        ledger.end_log()
        self._save("finish")
        ledger.close()


def _all_pieces(plan: Plan) -> Iterator[Piece]:
    """Everything in order, on one thread."""
    for task in plan.tasks(0, 0):
        plan.close(before=task.source)
        yield from plan.pieces(task)
    plan.close(before=len(plan.sources))


def _nothing(ledger: Ledger, sources) -> str:
    """Why there is nothing to prepare."""
    read = ledger.totals.records_read
    place = sources[0].name if len(sources) == 1 else f"the {len(sources)} inputs"
    if not read:
        return f"{place} has no record: nothing was prepared; name an input with sequences"
    reasons = ", ".join(f"{number} {reason}" for reason, number in ledger.totals.dropped.items())
    return f"no record of {place} was kept ({read:,} read; {reasons}): nothing was prepared; choose other limits or another input"
