"""`bmoe profile`: what a recipe costs on this machine, in the precision asked for."""

from typing import get_args

import torch

from bmoe import profiling
from bmoe.data.alphabet import alphabet
from bmoe.errors import RequestError
from bmoe.jobs import train
from bmoe.jobs.common import shard_folder
from bmoe.jobs.stepping import step_of
from bmoe.parallel.world import World
from bmoe.profiling.compare import load
from bmoe.profiling.render import comparison, report
from bmoe.recipe import BackendSection, PrecisionSection, Recipe
from bmoe.recipe.rules import broken_rules
from bmoe.training import setup

__all__ = ["FLAGSHIP", "compare", "comparison", "profile", "report"]

FLAGSHIP = "esm2_moe"


def build(recipe: Recipe, device: torch.device) -> profiling.Subject:
    """A resolved recipe's model and optimizer on one device, as training would build them."""
    world = World(device)
    one = recipe.parallel.model_copy(update={"data_replicate": 1, "data_shard": 1, "expert": 1})
    resolved, _ = setup.resolve(recipe.model_copy(update={"parallel": one}), world)
    model, optimizer = train.build(resolved, alphabet(resolved.data.alphabet, shard_folder(resolved)), world)
    return profiling.Subject(resolved, model, optimizer)


def check_precision(precision: str | None) -> None:
    """Raises RequestError for a precision that does not exist."""
    kinds = get_args(PrecisionSection.model_fields["kind"].annotation)
    if precision is not None and precision not in kinds:
        raise RequestError(f"--precision {precision}: use one of {', '.join(kinds)}")


def check_experts(recipe: Recipe, precision: str | None, experts: str | None) -> None:
    """Raises RequestError if the experts, asked for or of the recipe, are unknown or do not compute in the precision."""
    backend, kind = recipe.backend, precision or recipe.precision.kind
    if experts not in (None, "all"):
        known = get_args(BackendSection.model_fields["experts"].annotation)
        if experts not in known:
            raise RequestError(f"--experts {experts}: use all or one of {', '.join(known)}")
        backend = backend.model_copy(update={"experts": experts})
    changed = {"backend": backend, "precision": recipe.precision.model_copy(update={"kind": kind})}
    for key, sentence in broken_rules(recipe.model_copy(update=changed)):
        if key == "backend.experts":
            raise RequestError(f"{f'--experts {experts}' if experts else f'--precision {kind}'}: {key}: {sentence}")


def profile(
    recipe: Recipe, *, device: torch.device, precision: str | None, experts: str | None, baseline: str | None, forms: str | None,
    routing: str | None, steps: int | None, trace: str | None,
) -> dict:  # fmt: skip
    """The results of a profile. Raises RequestError for a precision that does not exist, or that `experts` do not compute in."""
    check_precision(precision)
    check_experts(recipe, precision, experts)
    return profiling.profile(
        recipe, build, device=device, precision=precision, experts=experts, baseline=baseline, forms=forms, routing=routing,
        steps=steps, trace=trace, stepping=lambda subject: step_of(subject, World(device)),
    )  # fmt: skip


def compare(a: str, b: str) -> dict:
    """What changed between two --json files of profiles."""
    return profiling.compare(load(a), load(b))
