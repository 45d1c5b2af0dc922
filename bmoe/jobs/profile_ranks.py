"""`bmoe profile --gpus N` (or `--device cpu --procs N`, or under a launcher): a training step of several ranks."""

import shutil
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

from bmoe import console
from bmoe.data.alphabet import alphabet
from bmoe.errors import RequestError, RunError
from bmoe.jobs import train
from bmoe.jobs.common import choose_device, shard_folder, write_json
from bmoe.jobs.dry_run import check_layout
from bmoe.jobs.layouts import layouts
from bmoe.jobs.profile import check_experts, check_precision
from bmoe.jobs.stepping import step_of
from bmoe.parallel import launch
from bmoe.parallel.world import World
from bmoe.precision import machine
from bmoe.profiling import Subject, baseline, distributed, open_data, race, render_ranks
from bmoe.profiling.estimate import predictions
from bmoe.profiling.run import unmet
from bmoe.recipe import Recipe
from bmoe.training import setup

WARMUP = {"cuda": 4, "cpu": 1}
STEPS, LOOP_STEPS = 10, 3  # of hf-loop fewer, unless steps are asked for


class Request(NamedTuple):
    """The command line of `bmoe profile`, as far as several ranks read it."""

    arguments: list[str]
    gpus: int | None
    device: str | None
    procs: int | None
    layouts: bool
    precision: str | None
    experts: str | None
    baseline: str | None
    forms: str | None
    routing: str | None
    steps: int | None
    warmup: int | None
    trace: str | None
    json: str | None
    report: str | None = None


def wanted(gpus: int | None, procs: int | None) -> bool:
    """Whether ranks are asked for, or this process is one."""
    return gpus is not None or procs is not None or launch.place() is not None


def start(recipe: Recipe, request: Request) -> int:
    """Profile on all ranks; rank 0 shows it. Returns the exit code. Raises RequestError, RunError."""
    if request.procs and request.device != "cpu":
        raise RequestError("--procs is the number of processes on the CPU; give --device cpu with it, or --gpus")
    if request.gpus and request.device == "cpu":
        raise RequestError("--gpus and --device cpu exclude each other; leave one out")
    device, line = choose_device(request.device, request.gpus)
    if request.report:
        raise RequestError("--report draws the profile of one device; with ranks use --json")
    recipe = overridden(recipe, request)
    baseline.wanted(request.baseline, request.forms, request.routing, device)
    if request.layouts and request.baseline:
        raise RequestError("--layouts compares losses, --baseline times; ask for one at a time")
    here, ranks = launch.place(), request.procs or request.gpus or 1
    if here is None and ranks > 1:
        if not (request.layouts or request.baseline):  # they take other layouts or steps than the recipe's
            check_layout(recipe, ranks)
        return start_ranks(request, device, ranks)
    if here is None or here.rank == 0:
        console.note(line)
    world = launch.world_from_environment(device.type)
    with launch.rank_of(world):
        results = layouts(recipe, world) if request.layouts else profile(recipe, request, world)
        if world.rank == 0:
            console.show(render_ranks.layouts(results) if request.layouts else render_ranks.report(results))
            write_json(request.json, "profile", recipe, results)
        if request.layouts and not results["agree"]:
            raise RunError(f"layouts differ: a loss by more than {results['tolerance']:g}, or norms between ranks; see the table")
    return 0


def overridden(recipe: Recipe, request: Request) -> Recipe:
    """The recipe with the precision and the experts of the command line. Raises RequestError."""
    if request.experts == "all":
        raise RequestError("--experts all compares implementations on one GPU; with ranks name one")
    check_precision(request.precision)
    check_experts(recipe, request.precision, request.experts)
    updates = {}
    if request.precision:
        updates["precision"] = recipe.precision.model_copy(update={"kind": request.precision})
    if request.experts:
        updates["backend"] = recipe.backend.model_copy(update={"experts": request.experts})
    return recipe.model_copy(update=updates)


def start_ranks(request: Request, device: torch.device, ranks: int) -> int:
    """Start the ranks on this machine and wait. Returns the exit code."""
    where = f"{ranks} GPUs ({torch.cuda.get_device_name(0)})" if device.type == "cuda" else f"the CPU as {ranks} processes"
    console.note(f"running on {where}")
    logs = Path(tempfile.mkdtemp(prefix="bmoe-profile-"))
    end = launch.run(request.arguments, ranks, logs)
    if end.reason:
        console.error(end.reason)
    if end.code in (0, 2):  # done, or refused in one sentence
        shutil.rmtree(logs)
    return end.code


def profile(recipe: Recipe, request: Request, world: World) -> dict:
    """The results of `--json`, the same on every rank. Collective. Raises RequestError."""
    device, kind = world.device, recipe.precision.kind
    here = machine.probe(device)
    lacking = unmet(recipe, here)
    if lacking:
        raise RequestError(f"{kind} does not run on this machine: {'; '.join(lacking)}; `bmoe profile` without --gpus predicts it")
    asked = baseline.wanted(request.baseline, request.forms, request.routing, device)
    if asked:  # equal tokens a step on both sides: one batch a rank
        one = recipe.training.model_copy(update={"tokens_per_step": recipe.data.tokens_per_batch * world.size})
        recipe = recipe.model_copy(update={"training": one})
    shards, source = open_data(recipe)
    resolved, _ = setup.resolve(recipe, world)
    world = world.arrange(resolved.parallel)
    warmup = WARMUP[device.type] if request.warmup is None else request.warmup
    counts = race.Counts(warmup, request.steps or STEPS)
    before = race.allocated(device)
    subject = Subject(resolved, *train.build(resolved, alphabet(resolved.data.alphabet, shard_folder(resolved)), world))
    forced = baseline.Forced(device) if asked and "balanced" in asked.routings else None
    if forced:
        forced.install(subject.model)
    ours = race.Ours(subject, step_of(subject, world), shards, world, counts, race.allocated(device) - before)
    results = {
        "recipe": resolved.name, "device": here.device, "precision": kind, "data": source, "parts": {}, "unmet_conditions": [],
        "emulated": {}, "predicted": predictions(resolved, shards, here.device, world.size), "ratios": {},
        **distributed.measured(ours, world, request.trace),
    }  # fmt: skip
    for chip in results["predicted"].values():
        if chip["this_machine"]:
            chip["error"] = chip["step_s"] / results["step_s"] - 1
    if asked:
        loop = race.Counts(warmup, request.steps or LOOP_STEPS)
        ours.counts = race.Counts(1, counts.steps)  # it is warm
        theirs = baseline.others(resolved, shards, asked, counts, loop, world, forced)
        lanes = race.race([ours], theirs, asked.routings, forced.switch if forced else lambda _: None, world)
        results |= race.results_of(lanes, ours.name)
    return results
