"""The layer as a sum over tokens, written out."""

import pytest
import torch
import torch.nn.functional as F

from bmoe.model.layers import Layout
from bmoe.model.moe import MoE
from bmoe.recipe import BackendSection, ModelSection, MoESection


@pytest.mark.parametrize("kind", ["loop", "grouped"])
@pytest.mark.parametrize("shared", [0, 2])
def test_layer_is_the_weighted_sum_of_its_experts(kind, shared):
    section = ModelSection(width=8, heads=2, moe=MoESection(experts=5, top_k=2, expert_width=6, shared_experts=shared))
    layer = MoE(section, BackendSection(experts=kind))
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x, empty = torch.randn(7, 8), torch.zeros(0)
    layout = Layout(empty, empty, torch.tensor([0, 6]), 6, torch.arange(7) < 6, torch.tensor(6), None)
    routing = layer.route(x, layout)
    y = layer(x, routing.experts_TK, routing.weights_TK)
    residual = torch.randn(7, 8)
    torch.testing.assert_close(layer(x, routing.experts_TK, routing.weights_TK, residual), residual + y)

    def swiglu(x, gate_up, down):
        gate, up = (gate_up @ x).chunk(2)
        return down @ (F.silu(gate) * up)

    for t in range(7):
        probabilities = (layer.router.weight @ x[t]).softmax(0)
        top = probabilities.topk(2)
        expected = torch.zeros(8)
        if t < 6:
            for expert, weight in zip(top.indices, top.values / top.values.sum(), strict=True):
                expected += weight * swiglu(x[t], layer.experts.gate_up[expert], layer.experts.down[expert])
        if shared:
            expected += swiglu(x[t], layer.shared.gate_up.weight, layer.shared.down.weight)
        torch.testing.assert_close(y[t], expected, rtol=1e-4, atol=1e-4)
    assert layer.shared is None or layer.shared.down.weight.shape == (8, 12)
