"""A small recipe, and a Subject built as training builds one."""

import pytest
import torch

from bmoe.data.alphabet import alphabet
from bmoe.parallel.world import World
from bmoe.profiling import Subject, profile
from bmoe.recipe import Recipe
from bmoe.training import setup


def small_recipe(**sections) -> Recipe:
    values = {
        "name": "small",
        "data": {"path": "/nonexistent", "max_length": 64, "tokens_per_batch": 256},
        "model": {"layers": 2, "width": 64, "heads": 4, "moe": {"experts": 4, "top_k": 2, "expert_width": 64}},
        "precision": {"kind": "fp32"},
        "training": {"steps": 10, "tokens_per_step": 512},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Recipe.model_validate(values)


def build_subject(recipe: Recipe, device: torch.device) -> Subject:
    world = World(device)
    resolved, _ = setup.resolve(recipe, world)
    model = setup.build_model(resolved, alphabet(resolved.data.alphabet), device)
    return Subject(resolved, model, setup.build_optimizer(model, resolved, world))


@pytest.fixture(scope="session")
def compared() -> dict:
    """The results of the small recipe with every implementation of the experts."""
    return profile(small_recipe(), build_subject, device=torch.device("cpu"), steps=3, experts="all")


@pytest.fixture
def recipe_of():
    return small_recipe


@pytest.fixture
def build():
    return build_subject
