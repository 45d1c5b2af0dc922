"""A block is one graph for torch.compile, and equal blocks share it.

Attention and experts have stand-ins of static shapes here, because their CPU paths read lengths on the host; the real
ones are held to the same in tests/gpu.
"""

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounterWithBackend

SHAPES = {
    "encoder MoE": {},
    "sigmoid, groups, shared, jitter": {
        "norm": "layernorm", "qk_norm": True,
        "moe": {"shared_experts": 1, "score": "sigmoid", "groups": 2, "groups_kept": 1, "jitter": 0.1},
    },
    "dense": {"ffn": "gelu", "norm": "layernorm", "bias": True, "moe": None},
}  # fmt: skip


def masked_attention(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, causal, kind):
    slots = torch.arange(q_THd.shape[0])
    segment = torch.searchsorted(cu_seqlens, slots, right=True)
    same = (segment[:, None] == segment) & (slots < cu_seqlens[-1])
    q, k, v = (x.transpose(0, 1) for x in (q_THd, k_TGd, v_TGd))
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(~same, -1e9)
    return (scores.softmax(-1) @ v).transpose(0, 1) * (slots < cu_seqlens[-1])[:, None, None]


def all_experts(self, x_TD, experts_TK, weights_TK):
    weights_TE = (F.one_hot(experts_TK, self.experts + 1) * weights_TK[:, :, None]).sum(1)[:, : self.experts]
    hidden = torch.einsum("td,ecd->tec", x_TD, self.gate_up)
    gate, up = hidden.chunk(2, dim=-1)
    return torch.einsum("tef,edf->td", F.silu(gate) * up * weights_TE[:, :, None], self.down)


@pytest.mark.no_cover
@pytest.mark.parametrize("recompute", ["none", "experts", "full"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_one_graph_for_all_equal_blocks(shape, recompute, build, pack, proteins, monkeypatch):
    monkeypatch.setattr("bmoe.model.attention.attention", masked_attention)
    monkeypatch.setattr("bmoe.model.experts.loop.LoopExperts.forward", all_experts)
    plain, model = (build(layers=3, backend={"recompute": recompute}, **shape) for _ in range(2))
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    results = []
    for network in (plain, model):
        for lengths, tail in (((9, 5, 14), 4), ((6, 8, 15), 3)):
            batch = pack(proteins(*lengths), tail=tail) | {"real_tokens": torch.tensor(sum(lengths)), "max_seqlen": 64}
            output = network(**batch, jitter_key=3)
            (output.logits.sum() + output.balance_L.sum() + output.z_L.sum()).backward()
        results.append((output, [parameter.grad for parameter in network.parameters()]))
    assert counter.frame_count == 1
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
