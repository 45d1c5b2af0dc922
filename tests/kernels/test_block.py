"""Blocks whose norms, router and experts run on kernels, interpreted in fp32, against the plain model: eager and compiled, with every
recomputation. What passes through norm and router must reach the gradient exactly once."""

import pytest
import torch

pytest.importorskip("triton")

from bmoe.model.layers import Norm
from bmoe.model.router import Router
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, ModelSection, MoESection

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu runs the kernels as they are")

T, REAL = 21, 17


def masked_attention(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, causal, kind):
    """Causal attention of one sequence in static shapes."""
    slots = torch.arange(T)
    allowed = (slots[:, None] >= slots) & (slots < cu_seqlens[1])
    q, k, v = (x.transpose(0, 1) for x in (q_THd, k_TGd, v_TGd))
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~allowed, -1e9)
    return (scores.softmax(-1) @ v).transpose(0, 1) * (slots < cu_seqlens[1])[:, None, None]


def model(experts: str, recompute: str, jitter: float) -> Transformer:
    moe = MoESection(experts=4, top_k=2, expert_width=16, shared_experts=1, jitter=jitter)
    section = ModelSection(kind="decoder", layers=2, width=32, heads=4, moe=moe)
    network = Transformer(section, Vocabulary(33, 1, 32), BackendSection(experts=experts, recompute=recompute))
    network.initialize(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter *= 1.0 if "norm" in name else 3.0
    return network


def run(network: Transformer) -> tuple:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(4, 24, (T,), generator=generator)
    output = network(
        tokens_T=tokens, positions_T=torch.arange(T), segments_T=torch.zeros(T, dtype=torch.int64),
        cu_seqlens=torch.tensor([0, REAL, T], dtype=torch.int32), max_seqlen=REAL, real_tokens=torch.tensor(REAL),
        jitter_key=torch.tensor(3),
    )  # fmt: skip
    (output.logits[:REAL].square().sum() + output.balance_L.sum() + output.z_L.sum()).backward()
    return output.logits[:REAL].detach(), output.balance_L.detach(), {name: p.grad for name, p in network.named_parameters()}


@pytest.mark.no_cover
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("recompute", "jitter"), [("none", 0.0), ("experts", 0.0), ("full", 0.0), ("none", 0.1)])
def test_a_model_of_kernels_equals_the_plain_one(recompute, jitter, compiled, monkeypatch):
    monkeypatch.setattr("bmoe.model.attention.attention", masked_attention)
    expected = run(model("loop", "none", jitter))
    monkeypatch.setattr(Norm, "_by_kernel", lambda self, x: self.fused)
    monkeypatch.setattr(Router, "_by_kernel", lambda self, x: self.kernels is not None)
    network = model("triton", recompute, jitter)
    assert network.final_norm.fused and all(block.ffn_norm.fused and block.ffn.router.kernels for block in network.blocks)
    if compiled:
        torch._dynamo.reset()
        for block in network.blocks:
            block.compile(fullgraph=True, backend="aot_eager")
    (logits, balance, gradients), (logits_, balance_, wanted) = run(network), expected
    for name, got, want in [("logits", logits, logits_), ("balance", balance, balance_), *((n, gradients[n], wanted[n]) for n in wanted)]:
        assert (got - want).norm() <= 1e-4 * want.norm(), name
