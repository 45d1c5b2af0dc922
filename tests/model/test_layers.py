"""Norms and the dense feed-forward against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from bmoe.model.layers import FeedForward, Norm, default_ffn_width


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_equal_torch(kind):
    norm = Norm(kind, 12, bias=True).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.normal_()
    x = torch.randn(3, 5, 12, dtype=torch.float64, requires_grad=True)
    expected = F.rms_norm(x, (12,), norm.weight, 1e-5) if kind == "rmsnorm" else F.layer_norm(x, (12,), norm.weight, norm.bias, 1e-5)
    torch.testing.assert_close(norm(x), expected)
    upstream, leaves = torch.randn_like(x), (x, *norm.parameters())
    for got, want in zip(torch.autograd.grad(norm(x), leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["rmsnorm", "layernorm"])
def test_norms_of_bf16_are_computed_in_fp32_and_rounded_once(kind):
    norm = Norm(kind, 64, bias=True)
    torch.nn.init.uniform_(norm.weight)
    if norm.bias is not None:
        torch.nn.init.normal_(norm.bias)
    x = (100 + torch.randn(8, 64)).bfloat16()
    assert norm(x).dtype == torch.bfloat16
    torch.testing.assert_close(norm(x), norm(x.float()).bfloat16(), rtol=0, atol=0)


def test_a_norm_returns_the_sum_or_what_passes_through_first():
    norm = Norm("rmsnorm", 8, bias=False, fused=True).double()
    torch.nn.init.normal_(norm.weight)
    x, y = torch.randn(3, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    for got, want in zip((*norm(x, y), *norm(x, through=True)), (x + y, norm(x + y), x, norm(x)), strict=True):
        assert torch.equal(got, want)


def test_zero_rows_have_finite_gradients():
    """A fully masked residue starts with an embedding of zeros."""
    norm = Norm("rmsnorm", 8, bias=False)
    torch.nn.init.ones_(norm.weight)
    x = torch.zeros(2, 8, requires_grad=True)
    norm(x).sum().backward()
    assert norm(x).eq(0).all() and x.grad.isfinite().all()


@pytest.mark.parametrize("kind", ["swiglu", "gelu"])
def test_feed_forward_formula(kind):
    layer = FeedForward(kind, 4, 6, bias=True)
    torch.manual_seed(0)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(3, 4)
    hidden = x @ layer.gate_up.weight.T + layer.gate_up.bias
    if kind == "swiglu":
        hidden = hidden[:, :6] * torch.sigmoid(hidden[:, :6]) * hidden[:, 6:]
    else:
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    torch.testing.assert_close(layer(x), hidden @ layer.down.weight.T + layer.down.bias)


def test_default_widths():
    assert default_ffn_width("gelu", 320) == 1280
    assert default_ffn_width("swiglu", 1280) == 3456  # 3413.3 rounded up to a multiple of 64
    assert default_ffn_width("swiglu", 384) == 1024
