"""Who does the work: threads that parse, and one that writes behind them.

The loops over bytes run compiled, without the interpreter's lock (`compiled.py`), as do reading, writing and hashing, so threads
use the cores as processes would and nothing is copied between them.
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from bmoe.data.ahead import ahead
from bmoe.data.batch import Batch, Builder, Carry, duplicate_notes
from bmoe.data.blocks import Piece
from bmoe.data.bulk import Bulk, Decision, Read
from bmoe.data.digests import Digest, Inputs
from bmoe.data.slots import Slot, Slots, return_large_blocks
from bmoe.data.summary import Note, Refused, Summary
from bmoe.data.tasks import CHUNK, MARGIN, UNIT, Plan, Task

MOST = 12  # threads that parse: so many are faster than the hashes, which take a file from its beginning to its end
AHEAD = 1  # tasks parsed or being parsed, beyond one for each thread: what waits here is not in the cache any more
WEIGHT, WEIGHT_DNA, RECORD = 3, 8, 110  # memory for a byte of input, of DNA, and for a record: measured
WRITING = 1  # batches that wait to be written
Event = tuple[Task, Summary | Refused | None]  # None: the task is done


class Workers:
    """Parses tasks on some threads. Summaries come in the order of the tasks, and a decision about each is taken back."""

    def __init__(self, out: Path, plan: Plan, builder: Builder, workers: int, inputs: Inputs | None):
        """out: folder of the shards. plan: reads the tasks. workers: threads that parse, at most MOST. inputs: hashes what is read."""
        self._plan, self._builder = plan, builder
        return_large_blocks()
        self._slots = Slots(UNIT + CHUNK + MARGIN)
        self._bulk = Bulk(out, inputs, self._slots)
        workers = min(workers, MOST)
        self._ahead = workers + AHEAD
        self._weight = WEIGHT_DNA if builder.options.dna else WEIGHT
        self._parsers, self._writer = ThreadPoolExecutor(workers), ThreadPoolExecutor(1)
        self._batch: tuple[Batch, Read] | None = None
        self._writing: deque[tuple[Future, list[Note]]] = deque()

    def events(self, tasks: Iterator[Task]) -> Iterator[Event]:
        """Summaries in order; call `apply` with the decision about each before the next. Refused ends them."""
        waiting: deque[tuple[Task, Future]] = deque()
        streams = not all(self._plan.ranged(source) for source in range(len(self._plan.sources)))
        with contextlib.closing(ahead(tasks, 4) if streams else tasks) as tasks_ahead:
            while True:
                while len(waiting) < self._ahead and self._slots.room(wait=not waiting) and (task := next(tasks_ahead, None)) is not None:
                    before = waiting[-1][1] if task.piece is not None and task.piece.continued and waiting else None
                    if task.piece is not None:
                        self._slots.weigh(self._weight * len(task.piece.data))
                    waiting.append((task, self._parsers.submit(self._begin, task, before, self._slots.take())))
                if not waiting:
                    return
                task, future = waiting.popleft()
                try:
                    self._batch, carry, pieces, following = future.result()
                except Refused as refused:
                    yield task, refused
                    return
                if following is not None:  # a record that comes in fragments
                    slot = self._slots.take()
                    waiting.appendleft((task, self._parsers.submit(self._build, task, pieces, following, carry, slot)))
                if self._batch is not None:
                    yield task, self._batch[0].summary
                if following is None:
                    yield task, None

    def _begin(
        self, task: Task, before: Future | None, slot: Slot
    ) -> tuple[tuple[Batch, Read] | None, Carry | None, Iterator[Piece], Piece | None]:
        """The first batch of a task; `before`: the work on the task whose record goes on in this one."""
        pieces = self._plan.pieces(task, slot)
        piece = next(pieces, None)
        if piece is None:
            self._slots.give(slot)
            return None, None, pieces, None
        return self._build(task, pieces, piece, before.result()[1] if before is not None else None, slot)

    def _build(self, task: Task, pieces: Iterator[Piece], piece: Piece, carry: Carry | None, slot: Slot):
        """The batch of a piece; as `_begin`."""
        batch, carry = self._builder.build(piece, carry, slot)
        self._slots.weigh(self._weight * len(piece.data) + RECORD * batch.summary.records)
        return (batch, Read(task.source, piece, slot)), carry, pieces, next(pieces, None)

    def apply(self, decision: Decision) -> None:
        """Write the batch of the last summary, whose arrays are not to be read any more. OSError where the disk does not take it."""
        batch, read = self._batch
        if len(self._writing) >= WRITING:
            self._writing[0][0].result()
        notes = duplicate_notes(batch, decision.duplicates)
        self._writing.append((self._writer.submit(self._bulk.write, batch, decision, read), notes))

    def written(self, wait: bool = False) -> list[list[Note]]:
        """Notes about the duplicates of every batch written since the last call, in order; `wait`: until all are."""
        notes = []
        while self._writing and (wait or self._writing[0][0].done()):
            self._writing[0][0].result()
            notes.append(self._writing.popleft()[1])
        return notes

    def close(self) -> dict[str, Digest]:
        """End the threads, close the files. Returns the digests of files that were written from their beginning, by name."""
        for threads in (self._parsers, self._writer):
            threads.shutdown(cancel_futures=True)
        self._bulk.close()
        return self._bulk.digests
