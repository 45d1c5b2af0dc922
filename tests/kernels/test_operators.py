"""Operators outside and inside torch.compile, and Functions without gradients."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from bmoe.kernels.operators import apply, operator  # noqa: E402

calls = []


@operator("test_double", lambda x: torch.empty_like(x))
def double(x: Tensor) -> Tensor:
    calls.append(type(x))
    return x * 2


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.times = 2
        return double(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.times * grad


def test_the_compiler_sees_one_node():
    graphs = []

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    assert torch.equal(torch.compile(double, backend=backend, fullgraph=True)(torch.ones(3)), torch.full((3,), 2.0))
    assert graphs == [[double.operator]]


@pytest.mark.parametrize("compiled", [False, True])
def test_forward_and_gradient_with_and_without_gradients_wanted(compiled):
    def function(x):
        return apply(Double, x)

    call = torch.compile(function, backend="aot_eager", fullgraph=True) if compiled else function
    x = torch.ones(3, requires_grad=True)
    call(x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    with torch.no_grad():
        y = call(x)
    assert torch.equal(y, torch.full((3,), 2.0)) and not y.requires_grad
