"""Hugging Face's side of a ratio: the same tokens in every form, the same number of parameters as a Mixtral of ours."""

import numpy as np
import pytest
import torch

from bmoe.errors import RequestError
from bmoe.profiling import baseline
from bmoe.profiling.synthetic import SyntheticShards

CPU = torch.device("cpu")
transformers = pytest.importorskip("transformers")


def test_every_form_holds_the_same_tokens(recipe_of):
    recipe = recipe_of()
    (rows,) = baseline.sequences(recipe, SyntheticShards(recipe), 1)
    tokens = sorted(np.concatenate(rows).tolist())
    slots = {}
    for form in ("padded", "bucketed", "flattened"):
        parts = baseline.form_batches(rows, form, recipe.data.max_length)
        labels = torch.cat([p["labels"].flatten() for p in parts])
        assert sorted(labels[labels != baseline.NO_TARGET].tolist()) == tokens
        slots[form] = sum(p["input_ids"].numel() for p in parts)
    assert slots["flattened"] == len(tokens) <= slots["bucketed"] <= slots["padded"]


@pytest.mark.parametrize("form", ["padded", "bucketed", "flattened"])
def test_no_form_lets_sequences_see_each_other(recipe_of, form):
    """The logits of a sequence are those it has alone."""
    recipe = recipe_of(model={"kind": "decoder"}, objective={"kind": "clm"})
    model = baseline.mixtral(recipe, 33, "loop", CPU).eval()
    rows = [np.arange(5, 5 + n) % 20 + 4 for n in (9, 17, 30)]
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.from_numpy(row)[None]).logits[0] for row in sorted(rows, key=len)])
        found = []
        for part in baseline.form_batches(rows, form, recipe.data.max_length):
            logits = model(**part).logits
            found.append(logits[part["labels"] != baseline.NO_TARGET])
    assert torch.allclose(torch.cat(found), alone, atol=1e-5)


def test_ratios_are_ours_over_theirs(recipe_of):
    recipe = recipe_of()
    found = baseline.against(recipe, 1000.0, SyntheticShards(recipe), CPU, 2)
    assert set(found["ratios"]) == {f"hf-{i} {f}" for i in ("loop", "grouped") for f in ("padded", "bucketed", "flattened")}
    for name, ratio in found["ratios"].items():
        assert ratio == pytest.approx(1000.0 / found["baseline"][name]["tokens_per_s"])


def test_dense_recipes_have_no_such_baseline(recipe_of):
    with pytest.raises(RequestError, match="Mixture-of-Experts"):
        baseline.mixtral(recipe_of(model={"moe": None}), 33, "loop", CPU)
