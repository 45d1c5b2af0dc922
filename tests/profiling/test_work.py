"""Closed-form work: arithmetic equals the model's counts, and an independent count of executed operators."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bmoe.data.loader import build_batch, build_sampler
from bmoe.data.sampler import Position
from bmoe.model import counts
from bmoe.profiling.synthetic import SyntheticShards
from bmoe.profiling.work import Load, batch_parts, model_flops, parameters
from bmoe.recipe import ModelSection

MODELS = [
    ModelSection(),
    ModelSection(kind="decoder", kv_heads=4, tie_head=False),
    ModelSection(ffn="gelu", norm="layernorm", bias=True, moe=None),
    ModelSection(qk_norm=True, moe={"experts": 64, "top_k": 8, "expert_width": 768, "shared_experts": 1, "dense_layers": 2}),
    ModelSection(ffn="gelu", bias=True, moe={"dense_layers": 1}),
]


@pytest.mark.parametrize("model", MODELS)
def test_shares_of_parameters_add_up(model):
    assert sum(parameters(model, 33)) == counts.parameters(model, 33).total


@pytest.mark.parametrize("model", MODELS)
def test_forward_arithmetic_is_the_models(model):
    load = Load(tokens=5000, real=5000, pairs=5000 * 400.0, targets=700)
    ours = sum(part.forward.flops for part in batch_parts(model, 33, load, 2).values())
    exact = counts.forward_flops(model, 33, load.real, load.pairs, load.targets)
    assert ours == pytest.approx(exact, rel=2e-3)  # a decoder's diagonal of scores is what differs


def test_mfu_counts_what_torch_counts(recipe_of, build):
    recipe = recipe_of(backend={"experts": "loop"})
    subject = build(recipe, torch.device("cpu"))
    shards = SyntheticShards(recipe)
    crops, _ = next(build_sampler(shards, recipe, 0).batches(Position(0, 0), 256))
    batch = build_batch(shards, crops, recipe, 0)
    with FlopCounterMode(display=False) as counter:
        out = subject.model(**batch.model_inputs())
        out.logits.sum().backward()
    load = Load(256, int(batch.real_tokens), batch.pairs, batch.picked_M.numel())
    parts = batch_parts(recipe.model, 33, load, 4)
    executed = sum(p.forward.flops + 2 * p.forward.flops for p in parts.values())
    attention = 3 * 4 * batch.pairs * recipe.model.width * recipe.model.layers  # a custom operator, which torch does not see
    assert counter.get_total_flops() == pytest.approx(executed - attention, rel=0.01)
    assert model_flops(recipe.model, 33, load) <= executed


def test_every_part_moves_memory_and_doubling_tokens_doubles_activations():
    one = batch_parts(ModelSection(), 33, Load(8192, 8192, 8192 * 300.0, 1200), 2)
    two = batch_parts(ModelSection(), 33, Load(16384, 16384, 16384 * 300.0, 2400), 2)
    for name, part in one.items():
        assert part.forward.bytes > 0 and part.backward.bytes > 0
        assert part.forward.bytes < two[name].forward.bytes <= 2 * part.forward.bytes
        assert two[name].forward.flops == pytest.approx(2 * part.forward.flops)
