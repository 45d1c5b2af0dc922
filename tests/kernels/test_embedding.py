"""The scaled embedding of a tiny vocabulary against its plain twin, values and gradient."""

import pytest
import torch

pytest.importorskip("triton")

from bmoe.kernels.embedding import embed, embed_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("pattern", ["all", "one"])
@pytest.mark.parametrize(("tokens", "vocabulary", "width"), [(1, 3, 8), (70, 33, 64), (300, 33, 100), (2100, 5, 16), (129, 128, 160)])
def test_values_and_gradient(pattern, tokens, vocabulary, width):
    torch.manual_seed(0)
    ids = torch.randint(vocabulary, (tokens,), device=DEVICE) if pattern == "all" else torch.full((tokens,), 2, device=DEVICE)
    scale = torch.rand(tokens, device=DEVICE) * (torch.rand(tokens, device=DEVICE) < 0.8)
    table, dx = torch.randn(vocabulary, width, device=DEVICE), torch.randn(tokens, width, device=DEVICE)
    leaf, exact = table.clone().requires_grad_(), table.double().requires_grad_()
    out, want = embed(ids, leaf, scale), embed_reference(ids, exact, scale.double())
    torch.testing.assert_close(out.double(), want, rtol=1e-6, atol=1e-6)
    grad, wanted = torch.autograd.grad(out, leaf, dx)[0], torch.autograd.grad(want, exact, dx.double())[0]
    torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(DEVICE == "cpu", reason="bf16 products are wrong in Triton's interpreter")
def test_bf16_gradients_are_sums_of_what_bf16_holds():
    torch.manual_seed(0)
    ids, scale = torch.randint(33, (5000,), device=DEVICE), torch.rand(5000, device=DEVICE)
    table = torch.randn(33, 320, device=DEVICE).bfloat16().requires_grad_()
    dx = torch.randn(5000, 320, device=DEVICE).bfloat16()
    out = embed(ids, table, scale)
    assert torch.equal(out, embed_reference(ids, table, scale))
    (grad,) = torch.autograd.grad(out, table, dx)
    rounded = (dx.float() * scale[:, None]).bfloat16().double()
    wanted = torch.zeros(33, 320, dtype=torch.float64, device=DEVICE).index_add_(0, ids, rounded)
    assert ((grad.double() - wanted).abs() <= wanted.abs() * 2.0**-8 + 1e-5).all()


def test_no_tokens_give_no_gradient():
    table = torch.randn(5, 8, device=DEVICE, requires_grad=True)
    out = embed(torch.zeros(0, dtype=torch.int64, device=DEVICE), table, torch.zeros(0, device=DEVICE))
    out.sum().backward()
    assert out.shape == (0, 8) and not table.grad.any()
