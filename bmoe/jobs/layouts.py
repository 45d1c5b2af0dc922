"""`bmoe profile --layouts`: one checkpoint and the same data in every way that the ranks can share the model.

A run in one layout writes a checkpoint after two steps and goes on; every layout loads the checkpoint and takes the same next
steps. Losses must agree with the undisturbed run's to the rounding of the precision, and the gradient's norm must be the same
number on every rank.
"""

import gc
import shutil
import tempfile
from pathlib import Path

import torch

from bmoe.data.alphabet import alphabet
from bmoe.data.loader import TrainingLoader
from bmoe.errors import RequestError
from bmoe.jobs import train
from bmoe.jobs.common import shard_folder
from bmoe.jobs.stepping import step_of
from bmoe.parallel.launch import on_first
from bmoe.parallel.world import World
from bmoe.profiling import Subject, open_data
from bmoe.recipe import Recipe
from bmoe.training import checkpoint, setup, state
from bmoe.training.guards import check_replicas, data_checksum

BEFORE, AFTER = 2, 3  # steps before the checkpoint and after it
TOLERANCE = {"fp32": 1e-5}  # of a loss, relative
LOW_TOLERANCE = 1e-3


def ways(ranks: int, experts: int) -> list[tuple[int, int]]:
    """(data_shard, expert) of `ranks` ranks, from no expert parallelism to the most that `experts` allow."""
    return [(ranks // expert, expert) for expert in range(1, ranks + 1) if ranks % expert == 0 and experts % expert == 0]


def layouts(recipe: Recipe, world: World) -> dict:
    """The results of `--layouts`. Collective. Raises RequestError for a model without experts, RunError if replicas drift apart."""
    if recipe.model.moe is None:
        raise RequestError("--layouts: this recipe has no experts to share (model.moe is null)")
    tolerance = TOLERANCE.get(recipe.precision.kind, LOW_TOLERANCE)
    shards, source = open_data(recipe)
    every = ways(world.size, recipe.model.moe.experts)
    saving = every[len(every) // 2]
    folder = on_first(world, lambda: Path(tempfile.mkdtemp(prefix="bmoe-layouts-")))
    try:
        undisturbed = run(recipe, saving, world, shards, folder, save=True)
        rows = [run(recipe, way, world, shards, folder, save=False) for way in every]
    finally:
        world.barrier()
        on_first(world, lambda: shutil.rmtree(folder, ignore_errors=True))
    for row in rows:
        row["loss_difference"] = max(abs(a / b - 1) for a, b in zip(row["losses"], undisturbed["losses"], strict=True))
        row["norm_difference"] = max(abs(a / b - 1) for a, b in zip(row["norms"], undisturbed["norms"], strict=True))
    return {
        "recipe": recipe.name, "precision": recipe.precision.kind, "data": source, "ranks": world.size, "tolerance": tolerance,
        "saved_in": {"data_shard": saving[0], "expert": saving[1]}, "steps_before": BEFORE, "undisturbed": undisturbed, "layouts": rows,
        "agree": all(row["loss_difference"] <= tolerance and row["norms_equal"] for row in rows),
    }  # fmt: skip


def run(recipe: Recipe, way: tuple[int, int], world: World, shards, folder: Path, save: bool) -> dict:
    """The losses and norms of `AFTER` steps in one layout: after `BEFORE` others from the seed, and saving a checkpoint; or from
    that checkpoint."""
    parallel = recipe.parallel.model_copy(update={"data_replicate": 1, "data_shard": way[0], "expert": way[1]})
    resolved, _ = setup.resolve(recipe.model_copy(update={"parallel": parallel}), world)
    here = world.arrange(resolved.parallel)
    letters = alphabet(resolved.data.alphabet, shard_folder(resolved))
    model, optimizer = train.build(resolved, letters, here, fresh=save)
    progress = state.Progress() if save else state.load_state(checkpoint.newest_whole(folder / "checkpoints"), model, optimizer)
    take, losses, norms = step_of(Subject(resolved, model, optimizer), here), [], []
    model.train()
    with TrainingLoader(shards, resolved, progress.position, here.rank, here.size, pin=here.device.type == "cuda") as stream:
        for number in range(-BEFORE if save else 0, AFTER):
            if save and number == 0:
                meta = {**progress.as_meta(), **checkpoint.torch_facts(here.device), "world": here.size}
                checkpoint.Checkpoints(folder, 1, False, here.rank).save(progress.step, state.each_tensor(model, optimizer), meta)
            batches, position = stream.next()
            loss, norm = take(batches, resolved.optimizer.lr)
            if number >= 0:
                losses.append(float(here.sum(loss.detach().double().clone())))
                norms.append(float(norm))
            progress = state.Progress(progress.step + 1, position, progress.tokens)
    position = progress.position
    check_replicas(model, optimizer, progress.step, position, data_checksum(shards, position), here)
    mine = torch.tensor(norms, dtype=torch.float64, device=here.device)
    highest, lowest = here.max(mine.clone()), -here.max(-mine)
    del model, optimizer, take
    gc.collect()  # FSDP2's modules refer to each other in circles
    if here.device.type == "cuda":
        torch.cuda.empty_cache()
    return {
        "data_shard": way[0], "expert": way[1], "losses": losses, "norms": norms, "norms_equal": bool(torch.equal(highest, lowest)),
    }  # fmt: skip
