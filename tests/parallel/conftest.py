"""Worlds of gloo processes that live for all tests of a file, forked from one that lives for all files. Every group of ranks that a
case makes has threads that wake a thousand times a second for as long as the processes live, so they do not live longer."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection, Listener
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel file is imported
HERE = Path(__file__).parent
PATIENCE = 200.0  # seconds for one case on a busy machine


class Nursery:
    """A process that has imported what ranks need and forks them."""

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="bmoe-ranks-")
        self.worlds = 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent / 'training'}"}
        with Listener(f"{self.folder}/orders", "AF_UNIX") as listener:
            self.process = subprocess.Popen([sys.executable, str(HERE / "rank.py"), f"{self.folder}/orders"], env=environment)
            self.orders = listener.accept()

    def start(self, size: int) -> tuple[list[int], dict[int, Connection]]:
        """Process ids of a new world's ranks, and a line to each."""
        self.worlds += 1
        address = f"{self.folder}/line-{self.worlds}"
        with Listener(address, "AF_UNIX", backlog=size) as listener:
            listener._listener._socket.settimeout(PATIENCE)  # else a rank that dies at its start would never be missed
            self.orders.send((address, f"{self.folder}/store-{self.worlds}", size))
            lines = [listener.accept() for _ in range(size)]
        return self.orders.recv(), {line.recv(): line for line in lines}

    def end(self, pids: list[int]) -> None:
        self.orders.send(pids)
        self.orders.recv()

    def close(self) -> None:
        self.orders.close()
        self.process.wait()


class Ranks:
    """`size` processes that run cases of cases.py together."""

    def __init__(self, nursery: Nursery, size: int):
        self.nursery, self.size, self.pids = nursery, size, []

    def run(self, case: str, **arguments) -> list:
        """What `case` returns on each rank. Raises AssertionError with the ranks' own tracebacks; a stuck world is replaced."""
        if not self.pids:
            self.pids, self.lines = self.nursery.start(self.size)
        for rank in range(self.size):
            self.lines[rank].send((case, arguments))
        replies, told = [], []
        for rank in range(self.size):
            if not self.lines[rank].poll(PATIENCE):
                told.append(f"rank {rank} does not answer")
                continue
            good, reply = self.lines[rank].recv()
            replies.append(reply)
            told += [] if good else [f"rank {rank}: {reply}"]
        if told:
            self.stop()
            raise AssertionError("\n".join(told))
        return replies

    def stop(self) -> None:
        self.nursery.end(self.pids)
        self.pids = []


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    started = Nursery()
    yield started
    started.close()


@pytest.fixture(scope="module")
def ranks(nursery) -> Iterator:
    """ranks(2) or ranks(4): a world of that many processes."""
    worlds: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        return worlds.setdefault(size, Ranks(nursery, size))

    yield of
    for world in worlds.values():
        world.stop()
