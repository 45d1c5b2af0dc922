"""What `auto` becomes on a GPU, judged on this machine: the choice is a function of the recipe and of what is known of the device."""

import pytest
import torch

from bmoe import recipe as recipes
from bmoe.errors import RequestError
from bmoe.kernels import flash
from bmoe.parallel.world import World
from bmoe.training import setup

CUDA = torch.device("cuda", 0)
MOE = {"experts": 8, "top_k": 2, "expert_width": 256}


def recipe(**sections):
    base = {"model": {"layers": 2, "width": 256, "heads": 4, "moe": MOE}, "precision": {"kind": "bf16"}}
    return recipes.validate(base | sections)


@pytest.mark.parametrize(
    "sections, experts, attention, word",
    [
        ({}, "triton", "flash", None),
        ({}, "grouped", "varlen", None),
        ({"model": {"layers": 2, "width": 256, "heads": 4, "moe": None}}, "loop", "varlen", None),
        ({}, "te", "varlen", "te"),
        ({}, "loop", "varlen", "loop"),
        ({}, "triton", "sdpa", "sdpa"),
        ({"precision": {"kind": "fp32"}}, "grouped", "varlen", "fp32"),
        ({"precision": {"kind": "mxfp8", "emulate": True}}, "grouped", "varlen", None),
        ({"precision": {"kind": "mxfp8", "emulate": True, "statistics_every": 5}}, "grouped", "varlen", "statistics_every"),
        ({"model": {"layers": 2, "width": 256, "heads": 4, "moe": MOE | {"expert_width": 1100}}}, "triton", "varlen", "multiples of 8"),
    ],
)
def test_steps_are_replayed_where_nothing_reads_the_device(sections, experts, attention, word):
    reason = setup.why_no_graphs(recipe(**sections), World(CUDA), experts, attention, 1)
    assert reason is None if word is None else word in reason


def test_graphs_need_a_gpu_and_all_weights_on_it():
    assert "GPU" in setup.why_no_graphs(recipe(), World(torch.device("cpu")), "triton", "flash", 1)
    two = World(CUDA, 0, 2)
    assert "numbers of rows" in setup.why_no_graphs(recipe(parallel={"expert": 2}), two, "triton", "flash", 1)
    assert "data_replicate: 2 keeps a copy on each GPU" in setup.why_no_graphs(recipe(), two, "triton", "flash", 2)
    assert setup.why_no_graphs(recipe(parallel={"data_replicate": 2}), two, "triton", "flash", 1) is None
    with pytest.raises(RequestError, match=r"backend\.graphs.*GPU"):
        setup.resolve(recipe(backend={"graphs": True}), World(torch.device("cpu")))


@pytest.mark.parametrize("capability, expected", [((9, 0), "flash"), ((10, 0), "varlen")])
def test_auto_takes_flash_where_it_was_tested(monkeypatch, capability, expected):
    monkeypatch.setattr(flash, "why_not", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    chosen, reason = setup.choose_attention(recipe(), CUDA)
    assert chosen == expected and reason
    assert setup.choose_attention(recipe(backend={"attention": "flash"}), CUDA)[0] == "flash"
    assert setup.choose_attention(recipe(model={"layers": 2, "width": 256, "heads": 4, "qk_norm": True, "moe": MOE}), CUDA)[0] == "varlen"


def test_flash_is_refused_with_its_reason(monkeypatch):
    monkeypatch.setattr(flash, "why_not", lambda *_: "head dimension 16 is none of 64, 128")
    assert setup.choose_attention(recipe(), CUDA)[0] == "varlen"
    with pytest.raises(RequestError, match=r"backend\.attention: flash cannot run, because head dimension 16"):
        setup.choose_attention(recipe(backend={"attention": "flash"}), CUDA)
    with pytest.raises(RequestError, match="needs a GPU and bf16"):
        setup.choose_attention(recipe(backend={"attention": "flash"}), torch.device("cpu"))


def test_a_step_that_ranks_cannot_share_names_one_that_they_can():
    def over_three(tokens):
        sections = {"data": {"tokens_per_batch": 1024}, "training": {"tokens_per_step": tokens}}
        return setup.resolve(recipe(**sections, precision={"kind": "fp32"}), World(torch.device("cpu"), size=3))

    with pytest.raises(RequestError, match=r"multiple of .* = 1024 x 3; .*tokens_per_step=6144$"):
        over_three(4096)
    assert over_three(6144)[0].parallel.data_shard == 3
