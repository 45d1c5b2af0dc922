"""The longest part of a step is named, with a key that the recipe has."""

import pytest

from bmoe.profiling.bottleneck import ADVICE, FASTER, FEWER, bottleneck, shares
from bmoe.recipe import known_keys


def parts(**seconds):
    return {name.replace("_", " "): {"seconds": value} for name, value in seconds.items()}


def test_parts_of_a_batch_count_once_a_batch_and_the_optimizer_once_a_step():
    found = shares(parts(attention=1.0, optimizer=3.0), batches=4)
    assert found == {"attention": pytest.approx(4 / 7), "optimizer": pytest.approx(3 / 7)}
    assert bottleneck(parts(attention=1.0, optimizer=3.0), 4)["part"] == "attention"
    assert bottleneck(parts(attention=1.0, optimizer=3.0), 2)["part"] == "optimizer"


def test_every_advice_names_a_key_of_the_recipe():
    keys = known_keys()
    for key, why in [*ADVICE.values(), FASTER, FEWER]:
        assert key in keys and why


def test_experts_near_their_ceiling_ask_for_other_arithmetic():
    experts = {"experts": {"seconds": 1.0, "bound": "arithmetic", "ceiling_share": 0.8}}
    assert bottleneck(experts, 1)["key"] == "precision.kind"
    assert bottleneck(experts, 1, cpu=True)["key"] == "model.moe.top_k"
    experts["experts"]["ceiling_share"] = 0.3
    assert bottleneck(experts, 1)["key"] == "backend.experts"
    experts["experts"] |= {"ceiling_share": 0.8, "bound": "memory"}
    assert bottleneck(experts, 1)["key"] == "backend.experts"


def test_a_gpu_that_waits_for_launches_comes_first():
    found = bottleneck(parts(attention=1.0), 1, busy=0.4)
    assert found["part"] == "idle" and found["share"] == pytest.approx(0.6) and found["key"] == "data.tokens_per_batch"
    assert bottleneck(parts(attention=1.0), 1, busy=0.9)["part"] == "attention"
