"""Whether a device has room for what a rank holds all the time, before anything is built there."""

import os

import torch

from bmoe.errors import RequestError
from bmoe.parallel.world import World
from bmoe.profiling.memory import GIB, by_category
from bmoe.profiling.work import Load
from bmoe.recipe import Recipe

HELD = ("weights", "gradients", "optimizer")  # categories that no batch size changes
NO_BATCH = Load(0, 0, 0.0, 0)


def check_room(recipe: Recipe, vocabulary: int, world: World) -> None:
    """Refuse a resolved recipe whose weights, gradients and optimizer state cannot fit this rank's share of ALL memory of its device,
    whatever else is there: the closed form of `profiling.memory`, without activations. Raises RequestError."""
    sizes = by_category(recipe, vocabulary, NO_BATCH, world.size)
    needed, there = sum(sizes[name] for name in HELD), device_bytes(world.device) / GIB
    if needed <= there:
        return
    where = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "this machine"
    ranks = f" for each of its ranks ({ranks_here()})" if world.device.type == "cpu" and ranks_here() > 1 else ""
    raise RequestError(
        f"model: its weights, gradients and optimizer state take {needed:,.1f} GiB a rank, and {where} has {there:,.1f} GiB in all{ranks}; "
        "make model.width, model.layers or the experts smaller, or share the model among more GPUs or machines"
    )


def device_bytes(device: torch.device) -> float:
    """Memory of a GPU; on the CPU this machine's, divided among its ranks."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks_here()


def ranks_here() -> int:
    """Ranks on this machine, as torch's launchers say; 1 where nobody does."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1))
