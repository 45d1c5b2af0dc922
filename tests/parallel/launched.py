"""A program that `launch.run` starts on several ranks; its first argument says what happens."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from bmoe.errors import RequestError, RunError
from bmoe.parallel.launch import rank_of, world_from_environment
from bmoe.parallel.watchdog import Watchdog

caught: list[int] = []


def play(scene: str, folder: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: caught.append(number))
    world = world_from_environment("cpu")
    with rank_of(world):
        total = world.sum(torch.tensor(world.rank + 1))
        (folder / f"sum-{world.rank}").write_text(str(int(total)))
        with (folder / f"starts-{world.rank}").open("a") as file:
            file.write(" ".join(sys.argv[3:]) + "\n")
        if scene == "one fails" and world.rank == 1:
            raise RunError("the disk of rank 1 is full; free some space")
        if scene == "all refuse":
            raise RequestError("model.width: 3 is not a multiple of model.heads = 2")
        if scene == "one is killed" and world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if scene == "one crashes" and world.rank == 1:
            raise ZeroDivisionError("a bug of rank 1")
        if scene == "one hangs":
            with Watchdog(world, folder, limit=2.0) as watchdog:
                watchdog.beat(7)
                if world.rank == 1:
                    time.sleep(120)
                world.sum(torch.zeros(1))
        if scene == "signal":
            (folder / f"ready-{world.rank}").touch()
            while not caught:
                time.sleep(0.05)
            world.barrier()
            (folder / f"left-{world.rank}").touch()
            sys.exit(75)
        if scene != "all is well":
            world.sum(torch.zeros(1))


if __name__ == "__main__":
    try:
        play(sys.argv[1], Path(sys.argv[2]))
    except RequestError:
        sys.exit(2)
    except RunError:
        sys.exit(1)
