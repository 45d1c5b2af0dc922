"""One optimizer step of one rank: when the experts' weights are quantised."""

import pytest
import torch

from bmoe import recipe as recipes
from bmoe.data.alphabet import alphabet
from bmoe.data.loader import TrainingLoader
from bmoe.data.sampler import Position
from bmoe.jobs.train import build
from bmoe.parallel.world import World
from bmoe.training import setup
from bmoe.training.step import Stepper
from tests_fakes import RealLengths


@pytest.mark.parametrize("batches", [1, 3])
def test_experts_that_hold_their_weights_do_so_once_a_step(batches, monkeypatch):
    """Before the first of several batches, and not while anybody else computes; a step of one batch would gain nothing."""
    recipe = recipes.validate(
        {
            "data": {"max_length": 64, "tokens_per_batch": 256},
            "model": {"layers": 2, "width": 32, "heads": 2, "moe": {"experts": 4, "top_k": 2, "expert_width": 16}},
            "precision": {"kind": "fp32"},
            "training": {"steps": 100, "tokens_per_step": 256 * batches},
        }
    )
    world = World(torch.device("cpu"))
    resolved, _ = setup.resolve(recipe, world)
    model, optimizer = build(resolved, alphabet("protein"), world)
    log: list[str] = []
    experts = type(model.blocks[0].ffn.experts)
    passed = experts.forward
    monkeypatch.setattr(experts, "hold", lambda self: log.append("hold"), raising=False)
    monkeypatch.setattr(experts, "let_go", lambda self: log.append("let go"), raising=False)
    monkeypatch.setattr(experts, "forward", lambda *arguments: log.append("pass") or passed(*arguments))
    stepper = Stepper(resolved, model, optimizer, world.device)
    with TrainingLoader(RealLengths(50), resolved, Position(0, 0)) as loader:
        for _ in range(2):
            for batch in loader.next().batches:
                stepper.backward(batch, torch.tensor([batch.targets, int(batch.real_tokens), 0, 0]))
            stepper.update(1e-3)
    step = ["hold"] * 2 + ["pass"] * 6 + ["let go"] * 2 if batches > 1 else ["pass"] * 2
    assert log == step * 2
