"""`bmoe train --dry-run`: what would run, how large it is and where it fits, from the recipe alone; needs no hardware."""

from pathlib import Path

import torch
from rich.console import Group
from rich.text import Text

from bmoe import console, profiling
from bmoe.data.alphabet import alphabet
from bmoe.data.shards import MANIFEST
from bmoe.errors import RequestError
from bmoe.jobs.common import shard_folder
from bmoe.model import counts
from bmoe.parallel.world import World
from bmoe.profiling import render
from bmoe.recipe import BackendSection, PrecisionSection, Recipe, dump, to_dict
from bmoe.training import setup


def dry_run(recipe: Recipe, world: int, chip: str | None, device: torch.device) -> tuple[dict, Group]:
    """Results for --json and what to show; `auto` is resolved as for `world` ranks of `device`.

    Raises RequestError if the recipe does not divide over the ranks.
    """
    if recipe.model.init_from and not Path(recipe.model.init_from).exists():
        raise RequestError(f"model.init_from: {recipe.model.init_from} does not exist")
    check_layout(recipe, world)
    asked = recipe
    try:
        recipe, reasons = setup.resolve(recipe, World(device, size=world))
        resolved_for = f"resolved for {world} x {device.type}; predictions take what auto becomes on their own chips"
    except RequestError as error:  # a precision or a backend that this machine lacks is no obstacle to a dry run
        reasons, resolved_for = {}, f"not resolved on this machine: {error}"
    folder = shard_folder(recipe)
    letters = alphabet(recipe.data.alphabet, folder)
    parameters = counts.parameters(recipe.model, letters.size)
    estimate = profiling.estimate(asked, world, chip)
    mean = recipe.data.max_length  # tokens of a full-length sequence, the dearest case for attention
    flops = counts.training_flops(recipe.model, letters.size, 1.0, float(mean))
    prepared = (folder / MANIFEST).is_file()
    results = {
        "parameters": parameters.total,
        "active_parameters": parameters.active,
        "tokens_per_step": recipe.training.tokens_per_step,
        "batches_per_rank": recipe.training.tokens_per_step // (recipe.data.tokens_per_batch * world),
        "resolved": to_dict(recipe),
        "reasons": reasons,
        "flops_per_token": flops,
        "data_prepared": prepared,
        **estimate,
    }
    rows = [
        ("recipe", f"{recipe.name}: {recipe.model.kind} of {recipe.model.layers} layers x {recipe.model.width}"),
        ("parameters", f"{parameters.total:,} ({parameters.active:,} active per token)"),
        (
            "tokens per step",
            f"{recipe.training.tokens_per_step:,} = {recipe.data.tokens_per_batch:,} x {world} ranks x "
            f"{results['batches_per_rank']} batches",
        ),
        ("steps", f"{recipe.training.steps:,}: {recipe.training.steps * recipe.training.tokens_per_step:.3g} tokens"),
        ("FLOPs per token", f"{flops:.3g} forward and backward, at sequences of {mean:,} tokens"),
        ("data", f"{folder} is prepared" if prepared else _not_prepared(recipe)),
        ("precision", f"{recipe.precision.kind}{' (emulated)' if recipe.precision.emulate else ''}"),
        (
            f"backend on {device.type}",
            f"experts {recipe.backend.experts}, attention {recipe.backend.attention}, compile {recipe.backend.compile}",
        ),
    ]
    whole = (Text(f"recipe, {resolved_for}", style="bold"), Text(dump(recipe, reasons)))  # first: what follows stays on the screen
    return results, Group(*whole, console.settings_table("dry run", rows), render.estimate(estimate))


def check_layout(recipe: Recipe, world: int) -> None:
    """Raise RequestError if the recipe's layout and step do not divide over `world` ranks, whatever the machine has."""
    anywhere = {"precision": PrecisionSection(kind="fp32"), "backend": BackendSection()}
    setup.resolve(recipe.model_copy(update=anywhere), World(torch.device("cpu"), size=world))


def _not_prepared(recipe: Recipe) -> str:
    if recipe.data.fasta:
        return f"{recipe.data.fasta} would be prepared into {recipe.data.path}"
    return f"{recipe.data.path} is not prepared yet: run bmoe prepare first"
