"""The closed forms against built models, torch's FLOP counter and the sizes the recipes promise."""

import itertools
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bmoe import recipe as recipes
from bmoe.model import counts
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, ModelSection, MoESection

RECIPES = Path(__file__).parents[2] / "recipes"
MOE = {
    "dense": None,
    "moe": MoESection(experts=4, top_k=2, expert_width=12),
    "shared": MoESection(experts=6, top_k=1, expert_width=20, shared_experts=2, dense_layers=1),
}


@pytest.mark.parametrize("moe", MOE.values(), ids=MOE)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_parameters_equal_the_built_model(kind, moe):
    yes_no = (False, True)
    switches = itertools.product(("rmsnorm", "layernorm"), ("swiglu", "gelu"), yes_no, yes_no, yes_no, (None, 2), (None, 40))
    for norm, ffn, bias, qk_norm, tie_head, kv_heads, ffn_width in switches:
        section = ModelSection(
            kind=kind, layers=2, width=16, heads=4, norm=norm, ffn=ffn, bias=bias, qk_norm=qk_norm, tie_head=tie_head,
            kv_heads=kv_heads, ffn_width=ffn_width, moe=moe,
        )  # fmt: skip
        with torch.device("meta"):
            model = Transformer(section, Vocabulary(33, 1, 32), BackendSection(experts="loop"))
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        found = counts.parameters(section, 33)
        assert found.total == sum(sizes.values())
        assert found.experts == sum(n for name, n in sizes.items() if ".experts." in name)
        assert found.shared == sum(n for name, n in sizes.items() if ".shared." in name)
        assert found.router == sum(n for name, n in sizes.items() if ".router." in name)
        wide = [n for name, n in sizes.items() if name.endswith(("bias", "norm.weight", "router.weight"))]
        assert found.wide == sum(wide)
        if moe:
            visited = sum(n * moe.top_k // moe.experts for name, n in sizes.items() if ".experts." in name)
            assert found.active == sum(sizes.values()) - found.experts + visited
        else:
            assert found.active == found.total


@pytest.mark.parametrize("moe", MOE.values(), ids=MOE)
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
@pytest.mark.parametrize("ffn", ["swiglu", "gelu"])
def test_flops_equal_the_flop_counter(kind, moe, ffn, pack, proteins, monkeypatch):
    """With attention written as matrix products, which the counter sees (it does not know the CPU's flash kernel).

    It multiplies masked scores too, so the decoder's n (n + 1) / 2 pairs are computed as n^2.
    """

    def as_products(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, causal, kind):
        k, v = (x.repeat_interleave(q_THd.shape[1] // x.shape[1], dim=1) for x in (k_TGd, v_TGd))
        spans = list(itertools.pairwise(cu_seqlens.tolist()))
        scores = [torch.bmm(q_THd[a:b].transpose(0, 1), k[a:b].permute(1, 2, 0)).softmax(-1) for a, b in spans]
        parts = [torch.bmm(score, v[a:b].transpose(0, 1)) for score, (a, b) in zip(scores, spans, strict=True)]
        return torch.cat(parts, dim=1).transpose(0, 1)

    monkeypatch.setattr("bmoe.model.attention.attention", as_products)
    section = ModelSection(kind=kind, layers=2, width=32, heads=4, kv_heads=2, ffn=ffn, ffn_width=56, moe=moe)
    model = Transformer(section, Vocabulary(33, 1, 32), BackendSection(experts="loop"))
    model.initialize(0)
    lengths = (40, 25, 60)
    tokens, pairs = sum(lengths), sum(n * n for n in lengths)
    counter = FlopCounterMode(display=False)
    with counter:
        output = model(**pack(proteins(*lengths)), select_M=torch.arange(17))
        forward = counter.get_total_flops()
        (output.logits.sum() + output.balance_L.sum() + output.z_L.sum()).backward()
    masked = 4 * 32 * 2 * (pairs - tokens) / 2 if kind == "decoder" else 0
    assert forward == counts.forward_flops(section, 33, tokens, pairs, head_rows=17) + masked
    both = counts.training_flops(section, 33, tokens, pairs, head_rows=17) + 3 * masked
    assert counter.get_total_flops() == pytest.approx(both, rel=0.01)


SIZES = {  # millions, total and active: the table in the recipes' documentation
    "esm2_moe_tiny": (1.7, 0.7),
    "esm2_moe_8m": (23, 7.6),
    "esm2_dense_8m": (7.5, 7.5),
    "esm2_moe": (2800, 800),
}


@pytest.mark.parametrize("name, millions", SIZES.items(), ids=SIZES)
def test_recipes_have_the_promised_sizes(name, millions):
    found = counts.parameters(recipes.load(RECIPES / f"{name}.yaml").model, 33)
    assert found.total / 1e6 == pytest.approx(millions[0], rel=0.1)
    assert found.active / 1e6 == pytest.approx(millions[1], rel=0.1)


def test_bytes_of_bf16_training():
    """The flagship's 2.8 G weights in bf16, with fp32 norms and routers, are 5.6 GB."""
    section = ModelSection()
    found = counts.parameters(section, 33)
    assert found.bytes() == 2 * found.total + 2 * found.wide
    assert found.bytes() / 1e9 == pytest.approx(5.6, rel=0.02)


def test_peaks_by_device_name():
    assert counts.peak_flops("NVIDIA H200") == counts.peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert counts.peak_flops("NVIDIA GB200") == 2.5e15 and counts.peak_flops("NVIDIA B200") == 2.25e15
    assert counts.peak_flops("Some other device") is None
