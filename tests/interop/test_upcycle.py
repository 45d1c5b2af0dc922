"""A dense model upcycled to experts computes the same, whatever the router chooses."""

import json

import pytest
import torch

from bmoe.errors import RequestError
from bmoe.interop.huggingface import export, pack
from bmoe.interop.upcycle import initial_weights, upcycle
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, ModelSection, MoESection

DENSE = {
    "ESM-2": {"norm": "layernorm", "ffn": "gelu", "bias": True, "ffn_width": 96},
    "SwiGLU": {"ffn_width": 96},
    "decoder": {"kind": "decoder", "ffn_width": 96, "tie_head": False},
}
MOE = {
    "copies": {"experts": 4, "top_k": 2, "expert_width": 96},
    "one expert a token": {"experts": 4, "top_k": 1, "expert_width": 96},
    "all experts, softmax": {"experts": 4, "top_k": 4, "expert_width": 96, "normalize_weights": False},
    "split in three": {"experts": 12, "top_k": 6, "expert_width": 32},
    "split in three, one group": {"experts": 9, "top_k": 3, "expert_width": 32},
    "sigmoid": {"experts": 6, "top_k": 3, "expert_width": 48 * 2 // 3, "score": "sigmoid"},
    "shared, first layer dense": {"experts": 4, "top_k": 2, "expert_width": 96, "shared_experts": 2, "dense_layers": 1},
    "limited to groups": {"experts": 8, "top_k": 2, "expert_width": 96, "groups": 4, "groups_kept": 2},
}


def upcycled(weights, section):
    model = Transformer(section, Vocabulary(33, 1, 32), BackendSection(experts="loop"))
    model.load_state_dict(weights)
    return model


def rows(names, sequences):
    return [torch.tensor([0, *names.encode(text.encode()).tolist(), 2]) for text in sequences]


@pytest.mark.parametrize("moe", MOE.values(), ids=MOE)
@pytest.mark.parametrize("dense", DENSE.values(), ids=DENSE)
def test_function_is_preserved(dense, moe, make, sequences, tmp_path):
    model, recipe, names = make(**dense)
    section = recipe.model.model_copy(update={"moe": MoESection(**moe)})
    weights = upcycle(model.state_dict(), section, seed=3)
    for name in weights:
        if name.endswith("router.weight"):
            weights[name] = 30.0 * weights[name]  # far from the nearly even scores of the start: the claim holds for any
    batch = rows(names, sequences)
    expected, output = model(**pack(batch)).logits, upcycled(weights, section)(**pack(batch))
    assert expected.std() > 0.3 and (output.counts_LE > 0).sum() > output.counts_LE.shape[0] * moe["top_k"] - 1
    torch.testing.assert_close(output.logits, expected, rtol=0, atol=1e-4)


def test_noise_makes_experts_differ_and_stays_near(make):
    model, recipe, _ = make(ffn_width=96)
    section = recipe.model.model_copy(update={"moe": MoESection(experts=4, top_k=2, expert_width=96)})
    exact, noisy = (upcycle(model.state_dict(), section, 0, noise) for noise in (0.0, 0.1))
    name = "blocks.0.ffn.experts.down"
    assert torch.equal(exact[name][0], exact[name][1]) and not torch.equal(noisy[name][0], noisy[name][1])
    assert 0.09 < float((noisy[name] - exact[name]).std() / exact[name].std()) < 0.11


def test_noise_of_the_recipe_is_for_upcycling(make, tmp_path):
    model, recipe, names = make(ffn_width=96)
    export(model, recipe, tmp_path / "dense", names)
    moe = {"moe": MoESection(experts=4, top_k=2, expert_width=96), "ffn_width": None, "init_from": "dense", "init_noise": 0.1}
    section = recipe.model.model_copy(update=moe)
    weights = initial_weights(tmp_path / "dense", section, 33, 0)
    assert not torch.equal(weights["blocks.1.ffn.experts.gate_up"][0], weights["blocks.1.ffn.experts.gate_up"][1])
    export(upcycled(weights, section), recipe.model_copy(update={"model": section}), tmp_path / "moe", names)
    assert "init_noise" not in json.loads((tmp_path / "moe" / "config.json").read_text())["model"]
    with pytest.raises(RequestError, match="init_noise.*has experts already"):
        initial_weights(tmp_path / "moe", section, 33, 0)


def test_gradients_separate_the_copies(make, sequences):
    """Copies see different tokens, so that one step makes them differ."""
    model, recipe, names = make(ffn_width=96)
    section = recipe.model.model_copy(update={"moe": MoESection(experts=4, top_k=1, expert_width=96, balance_loss=1.0)})
    moe = upcycled(upcycle(model.state_dict(), section, 0), section)
    moe(**pack(rows(names, sequences))).logits.square().sum().backward()
    gradient = moe.blocks[0].ffn.experts.down.grad
    assert not torch.equal(gradient[0], gradient[1])


def test_initial_weights_from_a_folder(make, tmp_path, sequences):
    model, recipe, names = make(**DENSE["ESM-2"])
    export(model, recipe, tmp_path / "dense", names)
    section = recipe.model.model_copy(update={"moe": MoESection(experts=4, top_k=2, expert_width=96), "ffn_width": None})
    weights = initial_weights(tmp_path / "dense", section, 33, 0)
    batch = rows(names, sequences)
    torch.testing.assert_close(upcycled(weights, section)(**pack(batch)).logits, model(**pack(batch)).logits, rtol=0, atol=1e-4)
    again = initial_weights(tmp_path / "dense", recipe.model, 33, 0)
    assert all(torch.equal(again[name], value) for name, value in model.state_dict().items())
    export(upcycled(weights, section), recipe.model_copy(update={"model": section}), tmp_path / "moe", names)
    relaxed = section.model_copy(update={"moe": section.moe.model_copy(update={"balance_loss": 0.5, "bias_update": 0.1})})
    assert all(torch.equal(weights[n], v) for n, v in initial_weights(tmp_path / "moe", relaxed, 33, 0).items())
    with pytest.raises(RequestError, match="differs from the recipe in model.moe.top_k"):
        initial_weights(tmp_path / "moe", section.model_copy(update={"moe": MoESection(experts=4, top_k=1, expert_width=96)}), 33, 0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layers": 3}, "model.layers"),
        ({"norm": "rmsnorm", "bias": False}, "model.bias.*model.norm"),
        ({"moe": MoESection(experts=4, top_k=2, expert_width=80)}, "does not divide"),
        ({"moe": MoESection(experts=4, top_k=2, expert_width=32)}, "multiples of 3"),
        ({"moe": MoESection(experts=4, top_k=2, expert_width=96, normalize_weights=False)}, "normalised weights"),
        ({"moe": MoESection(experts=12, top_k=3, expert_width=32, groups=4, groups_kept=2)}, "groups"),
    ],
)
def test_refusals_name_the_key(change, message, make, tmp_path):
    model, recipe, names = make(**DENSE["ESM-2"])
    export(model, recipe, tmp_path / "dense", names)
    with pytest.raises(RequestError, match=message):
        initial_weights(tmp_path / "dense", ModelSection(**recipe.model.model_dump() | change), 33, 0)
    with pytest.raises(RequestError, match="alphabets differ"):
        initial_weights(tmp_path / "dense", recipe.model, 20, 0)
    assert json.loads((tmp_path / "dense" / "config.json").read_text())["vocab_size"] == 33
