"""Worlds of gloo processes that live for all tests of a file, because starting one takes seconds. Every group of ranks that a
case makes has threads that wake a thousand times a second for as long as the processes live, so they do not live longer."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Listener
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel file is imported
HERE = Path(__file__).parent
PATIENCE = 200.0  # seconds for one case on a busy machine


class Ranks:
    """`size` processes that run cases of cases.py together."""

    def __init__(self, size: int):
        self.size, self.processes = size, []

    def start(self) -> None:
        folder = tempfile.mkdtemp(prefix="bmoe-ranks-")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{HERE.parent.parent}:{HERE.parent / 'training'}"}
        with Listener(f"{folder}/line", "AF_UNIX", backlog=self.size) as listener:
            self.processes = [
                subprocess.Popen(
                    [sys.executable, str(HERE / "rank.py"), f"{folder}/line", f"{folder}/store", str(rank), str(self.size)], env=environment
                )
                for rank in range(self.size)
            ]
            lines = [listener.accept() for _ in range(self.size)]
        self.lines = {line.recv(): line for line in lines}

    def run(self, case: str, **arguments) -> list:
        """What `case` returns on each rank. Raises AssertionError with the ranks' own tracebacks; a stuck world is replaced."""
        if not self.processes:
            self.start()
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
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes = []


@pytest.fixture(scope="module")
def ranks() -> Iterator:
    """ranks(2) or ranks(4): a world of that many processes."""
    worlds: dict[int, Ranks] = {}

    def of(size: int) -> Ranks:
        return worlds.setdefault(size, Ranks(size))

    yield of
    for world in worlds.values():
        world.stop()
