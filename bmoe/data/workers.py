"""Who does the parsing: this process, or worker processes that write their own bulk data.

Both give the summaries in the order of the tasks and take back a plan for each. A worker builds batches ahead of the plans by
at most AHEAD, then writes what the ledger keeps; tokens never pass between processes.
"""

import contextlib
import multiprocessing
import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from bmoe.data import inputs
from bmoe.data.ahead import ahead
from bmoe.data.alphabet import alphabet, dna, is_bpe
from bmoe.data.batch import Batch, Builder, duplicate_notes
from bmoe.data.blocks import Piece
from bmoe.data.bulk import Bulk, Plan
from bmoe.data.clusters import Clusters
from bmoe.data.options import PrepareOptions
from bmoe.data.summary import Note, Refused, Summary
from bmoe.data.tasks import Task, pieces
from bmoe.errors import RequestError, RunError

AHEAD = 8  # batches a worker holds while it waits for plans
QUEUED = 4  # tasks a worker has at hand
Event = tuple[Task, Summary | Refused | None]  # None: the task is done


@dataclass(frozen=True)
class Setting:
    """What a worker needs to know of the preparation. clusters: folder of the cluster table's arrays, or None."""

    out: Path
    options: PrepareOptions
    sources: list[inputs.Source]
    clusters: Path | None

    def builder(self) -> Builder:
        """A builder of batches."""
        letters = alphabet(self.options.alphabet, self.out)
        clusters = Clusters.mapped(self.clusters) if self.options.clusters is not None else None
        return Builder(self.options, letters, dna() if is_bpe(self.options.alphabet) else letters, clusters)


class _Readers:
    """The reader of the source that is being read, opened when its first task comes."""

    def __init__(self, sources: list[inputs.Source]):
        self._sources, self._number, self._reader = sources, -1, None

    def pieces(self, task: Task) -> Iterator:
        if task.piece is None and task.source != self._number:
            self.close()
            self._number, self._reader = task.source, inputs.reader(self._sources[task.source])
        return pieces(task, self._reader)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()


class Serial:
    """Everything in this process; a thread reads ahead and another writes behind, which needs no interpreter."""

    def __init__(self, setting: Setting):
        self._builder, self._bulk, self._readers = setting.builder(), Bulk(setting.out), _Readers(setting.sources)
        self._batch: Batch | None = None
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future | None = None
        self._notes: list[Note] = []  # of the batch that is being written
        self._written: list[list[Note]] = []

    def _pieces(self, tasks: Iterator[Task]) -> Iterator[tuple[Task, Piece | None]]:
        for task in tasks:
            for piece in self._readers.pieces(task):
                yield task, piece
            yield task, None

    def events(self, tasks: Iterator[Task]) -> Iterator[Event]:
        """Summaries in order; call `apply` with the plan of each before the next."""
        with contextlib.closing(ahead(self._pieces(tasks), 4)) as pieces_ahead:
            for task, piece in pieces_ahead:
                if piece is None:
                    yield task, None
                    continue
                try:
                    self._batch = self._builder.build(piece)
                except Refused as refused:
                    yield task, refused
                    return
                yield task, self._batch.summary

    def apply(self, plan: Plan) -> None:
        """Write the batch of the last summary."""
        self._wait()
        self._writing = self._writer.submit(self._bulk.write, self._batch, plan)
        self._notes = duplicate_notes(self._batch, plan.duplicates)

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._written.append(self._notes)
            self._writing = None

    def written(self, wait: bool = False) -> list[list[Note]]:
        """Notes about the duplicates of every batch written since the last call, in order; `wait`: until all are."""
        if wait:
            self._wait()
        written, self._written = self._written, []
        return written

    def close(self) -> None:
        """Release files."""
        self._writer.shutdown()
        self._bulk.close()
        self._readers.close()


class Pool:
    """Worker processes. They read ranges of files themselves and get pieces of streams."""

    def __init__(self, setting: Setting, workers: int):
        context = multiprocessing.get_context("spawn")
        self._inbox: queue.Queue = queue.Queue()
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(setting, theirs), daemon=True)
            process.start()
            theirs.close()
            threading.Thread(target=self._listen, args=(number, ours), daemon=True).start()
            self._pipes.append(ours)
            self._processes.append(process)
        self._owner = 0  # worker of the summary given last
        self._notes: dict[int, list[Note]] = {}  # by number of the batch, until all before it are written
        self._decided = self._logged = 0
        self._said: dict[int, deque] = {}  # by number of the task

    def _listen(self, worker: int, pipe: Connection) -> None:
        """Take in everything a worker says at once, so that it never waits for us to listen."""
        try:
            while True:
                self._inbox.put((worker, pipe.recv()))
        except (EOFError, OSError):
            self._inbox.put((worker, None))

    def events(self, tasks: Iterator[Task]) -> Iterator[Event]:
        """Summaries in order; call `apply` with the plan of each before the next."""
        with contextlib.closing(ahead(tasks, 4)) as tasks_ahead:
            yield from self._events_of(tasks_ahead)

    def _events_of(self, tasks: Iterator[Task]) -> Iterator[Event]:
        waiting: deque[tuple[int, Task, int]] = deque()  # handed out, not done: (number, task, worker)
        load = [0] * len(self._pipes)
        number = 0
        more = True
        while more or waiting:
            while more and min(load) < QUEUED:
                task = next(tasks, None)
                if task is None:
                    more = False
                    break
                worker = load.index(min(load))
                self._said[number] = deque()
                self._pipes[worker].send((number, task))
                waiting.append((number, task, worker))
                load[worker] += 1
                number += 1
            if not waiting:
                break
            current, task, self._owner = waiting[0]
            events = self._said[current]
            while not events:
                self._take(self._inbox.get())
            event = events.popleft()
            if isinstance(event, RequestError):
                raise event
            yield task, event
            if isinstance(event, Refused):
                return
            if event is None:
                waiting.popleft()
                del self._said[current]
                load[self._owner] -= 1

    def _take(self, message) -> None:
        worker, said = message
        if said is None:
            code = self._processes[worker].exitcode
            raise RunError(f"a worker process ended unexpectedly (exit code {code}): go on with --resume, perhaps with fewer --workers")
        kind, number, content = said
        if kind == "event":
            self._said[number].append(content)
        elif kind == "written":
            self._notes[number] = content
        else:
            raise content

    def apply(self, plan: Plan) -> None:
        """Let the worker write the batch of the last summary."""
        self._pipes[self._owner].send((self._decided, plan))
        self._decided += 1

    def written(self, wait: bool = False) -> list[list[Note]]:
        """Notes about the duplicates of every batch written since the last call, in order; `wait`: until all are."""
        while wait and self._logged + len(self._notes) < self._decided:
            self._take(self._inbox.get())
        ready = []
        while self._logged in self._notes:
            ready.append(self._notes.pop(self._logged))
            self._logged += 1
        return ready

    def close(self) -> None:
        """End the workers."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                with contextlib.suppress(BrokenPipeError):
                    pipe.send((0, None))
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.terminate()
                process.join()


def _work(setting: Setting, pipe: Connection) -> None:
    """A worker's life: build batches of tasks, write them as plans come, until there is no more."""
    bulk = Bulk(setting.out)
    held: deque[Batch] = deque()
    todo: deque[tuple[int, Task]] = deque()

    def listen() -> None:
        number, said = pipe.recv()
        if said is None:
            raise EOFError
        if isinstance(said, Task):
            todo.append((number, said))
            return
        batch = held.popleft()
        bulk.write(batch, said)
        pipe.send(("written", number, duplicate_notes(batch, said.duplicates)))

    try:
        builder, readers = setting.builder(), _Readers(setting.sources)
        while True:
            while not todo or len(held) >= AHEAD or pipe.poll():
                listen()
            number, task = todo.popleft()
            try:
                for piece in readers.pieces(task):
                    held.append(builder.build(piece))
                    pipe.send(("event", number, held[-1].summary))
                    while len(held) >= AHEAD or pipe.poll():
                        listen()
                pipe.send(("event", number, None))
            except (RequestError, Refused) as problem:
                pipe.send(("event", number, problem))
    except OSError as error:
        if not isinstance(error, (BrokenPipeError, ConnectionError)):
            pipe.send(("error", 0, error))
    except (EOFError, KeyboardInterrupt):
        pass  # the end, or the main process is gone, or reports the interruption itself
