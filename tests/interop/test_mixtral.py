"""What a Mixtral cannot be, in both directions."""

import pytest
import torch
from transformers import MixtralConfig

from bmoe.errors import RequestError
from bmoe.interop.mixtral import from_mixtral, mixtral_config, to_mixtral, why_not

BASE = {"kind": "decoder", "kv_heads": 2}
MOE = {"experts": 4, "top_k": 2, "expert_width": 16}


@pytest.mark.parametrize(
    "keys, moe, reason",
    [
        ({}, {}, None),
        ({"kind": "encoder"}, {}, "kind"),
        ({"norm": "layernorm"}, {}, "norm"),
        ({"ffn": "gelu"}, {}, "ffn"),
        ({"bias": True}, {}, "biases"),
        ({"qk_norm": True}, {}, "queries"),
        ({}, {"dense_layers": 1}, "dense"),
        ({}, {"shared_experts": 1}, "shared"),
        ({}, {"score": "sigmoid"}, "softmax"),
        ({}, {"normalize_weights": False}, "normalised"),
        ({}, {"groups": 2, "groups_kept": 1}, "group"),
    ],
)
def test_only_a_mixtral_is_written_as_one(keys, moe, reason, make):
    model, _, _ = make(**BASE | keys, moe=MOE | moe)
    found = why_not(model.section, model.state_dict())
    assert found is None if reason is None else reason in found


def test_a_moved_selection_bias_is_no_mixtral(make):
    model, _, _ = make(**BASE, moe=MOE)
    model.blocks[0].ffn.router.selection_bias[1] = 0.1
    assert "selection bias" in why_not(model.section, model.state_dict())
    dense, _, _ = make(kind="decoder")
    assert "no experts" in why_not(dense.section, dense.state_dict())


def test_config_is_what_transformers_understands(make):
    model, _, _ = make(**BASE, moe=MOE, rope_base=12345.0)
    config = MixtralConfig(**mixtral_config(model.section, 33, 128))
    assert config.rope_parameters["rope_theta"] == 12345.0 and config.num_local_experts == 4 and config.intermediate_size == 16


@pytest.mark.parametrize(
    "change, message",
    [
        ({"head_dim": 64}, "head_dim"),
        ({"sliding_window": 4096}, "sliding-window"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_type yarn"),
    ],
)
def test_what_has_no_counterpart_is_refused(change, message, make):
    model, _, _ = make(**BASE, moe=MOE)
    config = mixtral_config(model.section, 33, 128) | change
    with pytest.raises(RequestError, match=message):
        from_mixtral(to_mixtral(model.state_dict(), model.section), config)


def test_configs_of_older_releases(make):
    """rope_theta at the top level, no head_dim."""
    model, _, _ = make(**BASE, moe=MOE, rope_base=5e5)
    config = mixtral_config(model.section, 33, 128)
    del config["rope_parameters"], config["head_dim"]
    weights, section = from_mixtral(to_mixtral(model.state_dict(), model.section), config)
    assert section["rope_base"] == 5e5
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
