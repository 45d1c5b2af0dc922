"""How `bmoe train` starts: in this process, as one rank of a launcher's, or by starting the ranks itself."""

import os
import shutil
import signal
from pathlib import Path
from typing import NamedTuple

import torch

from bmoe import console
from bmoe.errors import RequestError
from bmoe.jobs import train
from bmoe.jobs.common import choose_device, write_json
from bmoe.jobs.dry_run import check_layout
from bmoe.parallel import launch
from bmoe.recipe import Recipe
from bmoe.training import checkpoint
from bmoe.training.run_lock import check_free
from bmoe.training.stopping import Limits

__all__ = ["Limits", "Request", "start"]


class Request(NamedTuple):
    """The command line of `bmoe train`, as far as it decides where and how to run."""

    arguments: list[str]
    gpus: int | None
    device: str | None
    procs: int | None
    out: str | None
    resume: bool
    json: str | None
    restarts: int = 0


def start(recipe: Recipe, request: Request, limits: Limits) -> int:
    """Train, and return the exit code. Raises RequestError, RunError."""
    if request.procs and request.device != "cpu":
        raise RequestError("--procs is the number of processes on the CPU; give --device cpu with it, or --gpus")
    if request.gpus and request.device == "cpu":
        raise RequestError("--gpus and --device cpu exclude each other; leave one out")
    here = launch.place()
    if request.restarts and here is not None and not launch.is_launched():
        raise RequestError(
            f"--restarts {request.restarts}: another launcher started this rank, and restarts are its business (torchrun --max-restarts)"
        )
    with launch.signals_to(limits.take):
        device, line = choose_device(request.device, request.gpus)
        ranks = request.procs or 1
        if device.type == "cuda":
            ranks = request.gpus or torch.cuda.device_count()
        if here is None and not launch.is_launched() and (ranks > 1 or request.restarts):
            return start_ranks(recipe, request, device, ranks, limits)
        if here is None or (here.rank == 0 and not launch.is_launched()):  # `start_ranks` has said it of several
            console.note(line)
        return be_rank(recipe, request, device, limits)


def be_rank(recipe: Recipe, request: Request, device: torch.device, limits: Limits) -> int:
    """Train in this process, the only one or one of several. Returns the exit code."""
    limits.began = launch.began() or limits.began  # a restart takes no more time than was left
    world = launch.world_from_environment(device.type)
    with launch.rank_of(world):
        outcome, folder, metrics = train.train(recipe, world, out=request.out, resume=request.resume, limits=limits)
        if world.rank == 0 and metrics:
            write_json(request.json, "train", recipe, {"run": str(folder), **metrics})
            console.show(train.training_summary(outcome, folder, metrics))
    return exit_code(outcome.signal)


def exit_code(number: int) -> int:
    """Of a run that signal `number` has ended; 0 is none."""
    return (130 if number == signal.SIGINT else 75) if number else 0


def start_ranks(recipe: Recipe, request: Request, device: torch.device, ranks: int, limits: Limits) -> int:
    """Prepare the data if needed, start the ranks on this machine, wait. Returns the exit code. Raises RequestError."""
    check_layout(recipe, ranks)
    folder = train.run_folder(recipe, request.out, request.resume)
    check_free(folder)  # before the logs of a run that goes on are written over
    if train.prepared(recipe, limits) is None:
        return exit_code(train.stopped_early(folder, limits)[0].signal)
    if ranks > 1:  # one process says it itself
        where = f"{ranks} GPUs ({torch.cuda.get_device_name(0)})" if device.type == "cuda" else f"the CPU as {ranks} processes"
        console.note(f"running on {where}")
    go_on = "all ranks go on" if ranks > 1 else "it goes on"

    def again(number: int, reason: str) -> None:
        newest = checkpoint.newest_whole(folder / "checkpoints")
        console.note(f"{reason}; restart {number} of {request.restarts}: {go_on} from {newest or 'the start'}")

    resume = () if request.resume else ("--resume",)
    logs = Path(os.path.abspath(folder) + ".logs")  # `.` and `..` have no name to go beside
    first = not logs.exists()
    end = launch.run(request.arguments, ranks, logs, restarts=request.restarts, resume=resume, note=again, caught=limits.signals)
    if first and end.code == 2:  # a refused request: its sentence is all that the ranks had to say
        shutil.rmtree(logs)
    if end.reason:
        console.error(f"{end.reason}; {train.way_on(folder)}" if end.again else end.reason)
    return end.code
