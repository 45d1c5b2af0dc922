"""Counted memory equals what shapes say."""

import pytest
import torch

from bmoe.model import counts
from bmoe.profiling import footprint, memory
from bmoe.profiling.estimate import expected_load
from bmoe.profiling.synthetic import SyntheticShards

CPU = torch.device("cpu")


@pytest.mark.parametrize("recompute", ["none", "experts", "full"])
def test_counted_categories(recipe_of, build, recompute):
    recipe = recipe_of(backend={"recompute": recompute}, training={"tokens_per_step": 256})
    shards = SyntheticShards(recipe)
    subject = build(recipe, CPU)
    found, counts_LE = footprint.by_category(subject, shards, CPU)
    assert counts_LE.shape == (2, 4) and 0 < counts_LE.sum(-1)[0] == counts_LE.sum(-1)[1] <= 2 * 256  # top-2 of 256 slots
    numbers = counts.parameters(recipe.model, shards.alphabet.size).total
    assert found["weights"] * memory.GIB == pytest.approx(4 * numbers, rel=0.03)  # and a few buffers
    assert found["optimizer"] * memory.GIB == 8 * numbers
    assert found["gradients"] * memory.GIB == 4 * numbers
    expected = memory.by_category(subject.recipe, shards.alphabet.size, expected_load(recipe, shards))
    assert expected["activations"] == pytest.approx(found["activations"], rel=0.2)
    assert found["peak"] > found["weights"] + found["optimizer"]


def test_bf16_keeps_low_halves_and_sums(recipe_of, build):
    recipe = recipe_of(precision={"kind": "bf16"})  # two batches a step: gradients are summed in fp32
    shards = SyntheticShards(recipe)
    found, _ = footprint.by_category(build(recipe, CPU), shards, CPU)
    p = counts.parameters(recipe.model, shards.alphabet.size)
    low = p.total - p.wide
    assert found["optimizer"] * memory.GIB == 8 * p.total + 2 * low
    assert found["weights"] * memory.GIB == pytest.approx(2 * low + 4 * p.wide, rel=0.05)
    assert found["gradients"] * memory.GIB == 4 * low + 4 * p.wide
