"""Pseudo-perplexity against a loop that hides one residue at a time."""

import numpy as np
import pytest
import torch

from bmoe.errors import RequestError
from bmoe.evaluation import pseudo

CPU = torch.device("cpu")


def naive(model, shards, index) -> np.ndarray:
    """- log P of each residue with itself hidden, one forward pass each."""
    letters = shards.alphabet
    tokens = torch.tensor([letters.cls_id, *shards.sequence(index).tolist(), letters.eos_id])
    n, nats = len(tokens), []
    for slot in range(1, n - 1):
        shown = tokens.clone()
        shown[slot] = letters.mask_id
        out = model(shown, torch.arange(n), torch.zeros(n, dtype=torch.long), torch.tensor([0, n]).int(), n, n)
        nats.append(-out.logits[slot].log_softmax(-1)[tokens[slot]].item())
    return np.array(nats)


@pytest.fixture(scope="module")
def setting(memory_shards, make_proteins, make_recipe, make_model):
    recipe = make_recipe(slots=256)
    return make_model(recipe), memory_shards(make_proteins(6, 25, seed=3)), recipe


def test_equals_one_mask_at_a_time(setting):
    model, shards, recipe = setting
    with torch.no_grad():
        nats = np.concatenate([naive(model, shards, i) for i in range(len(shards))])
    ours = pseudo.evaluate(model, shards, recipe, device=CPU, budget=10**6, positions=None)
    assert ours["pseudo_perplexity"] == pytest.approx(np.exp(nats.mean()), rel=1e-5)
    assert ours["residues_asked"] == ours["residues"] == nats.size == shards.lengths.sum()
    assert ours["low"] < ours["pseudo_perplexity"] < ours["high"]


def test_a_sample_of_residues_stands_for_the_sequence(setting):
    """One residue of each sequence: weighted by length, and always one of the naive values."""
    model, shards, recipe = setting
    ours = pseudo.evaluate(model, shards, recipe, device=CPU, budget=10**6, positions=1)
    assert ours["residues_asked"] == len(shards) and ours["residues"] == shards.lengths.sum()
    half = pseudo.evaluate(model, shards, recipe, device=CPU, budget=10**6, positions=12)
    whole = pseudo.evaluate(model, shards, recipe, device=CPU, budget=10**6, positions=None)
    assert abs(np.log(half["pseudo_perplexity"] / whole["pseudo_perplexity"])) < 0.3


def test_budget_bounds_the_slots_but_does_one_sequence(setting):
    model, shards, recipe = setting
    assert pseudo.evaluate(model, shards, recipe, device=CPU, budget=1, positions=None)["sequences"] == 1
    some = pseudo.evaluate(model, shards, recipe, device=CPU, budget=600, positions=None)
    assert 1 < some["sequences"] < len(shards)


def test_decoders_are_refused(setting, make_recipe):
    model, shards, _ = setting
    with pytest.raises(RequestError, match="encoders.*leave --pseudo out"):
        pseudo.evaluate(model, shards, make_recipe("decoder"), device=CPU, budget=100)
