"""Runs that are killed at random moments, each resumed to its end and compared with an undisturbed run.

    python kills.py NUMBER SEED FOLDER

Processes are forked from one that has imported everything, because an import takes longer than the run. Prints one line a
kill and ends with 0 if all final checkpoints are equal, bit for bit.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import runs
import torch

STEPS = 12


def fork_run(folder: Path) -> int:
    """Start or resume a run in a child; its process id."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            runs.train(folder, runs.make_recipe(STEPS, every=1, keep=2))
            code = 0
        finally:
            os._exit(code)
    return pid


def complete(folder: Path) -> None:
    _, status = os.waitpid(fork_run(folder), 0)
    assert status == 0, f"{folder} ended with {status}"


def kill_once(folder: Path, delay: float) -> str:
    """Kill a run `delay` seconds after it started; where it stood."""
    pid = fork_run(folder)
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    newest = runs.checkpoint.newest_whole(folder / "checkpoints")
    left = [p.name for p in (folder / "checkpoints").glob("*.partial")] if newest else []
    return f"newest {newest.name if newest else None}, left {left}"


def main(number: int, seed: int, root: Path) -> None:
    torch.set_num_threads(1)
    began = time.monotonic()
    complete(root / "undisturbed")
    length, draw = time.monotonic() - began, random.Random(seed)
    want = runs.final_tensors(root / "undisturbed")
    killed_while_saving = 0
    for kill in range(number):
        folder = root / f"killed-{kill}"
        found = kill_once(folder, draw.uniform(0.1, 1.0) * length)
        killed_while_saving += "partial" in found
        complete(folder)
        got = runs.final_tensors(folder)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[name], want[name]) for name in want), f"kill {kill}: {found}"
        assert runs.records(folder) == runs.records(root / "undisturbed")
        sys.stdout.write(f"kill {kill}: {found}: equal\n")
    sys.stdout.write(f"{number} kills, {killed_while_saving} while a checkpoint was being written\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
