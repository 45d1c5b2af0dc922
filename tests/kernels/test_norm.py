"""The fused residual sum and RMSNorm against float64, values and every gradient, through Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from bmoe.kernels import norm
from bmoe.kernels.sums import sum_parts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def reference(x, y, w, eps):
    s = x + y
    return s, s / (s.square().mean(-1, keepdim=True) + eps).sqrt() * w


@pytest.mark.parametrize("programs", [528, 3])
@pytest.mark.parametrize("shape", [(37, 64), (5, 1280), (9, 100), (1, 1), (16, 320)])
def test_values_and_gradients(shape, programs, monkeypatch):
    monkeypatch.setattr(norm, "PROGRAMS", programs)
    monkeypatch.setattr(norm, "ELEMENTS", 512)
    monkeypatch.setattr(norm, "BACKWARD_ELEMENTS", 256)
    torch.manual_seed(0)
    x, y, ds, dh = (torch.randn(shape, device=DEVICE) for _ in range(4))
    w = torch.randn(shape[1], device=DEVICE)
    leaves = [t.clone().requires_grad_() for t in (x, y, w)]
    exact = [t.double().requires_grad_() for t in (x, y, w)]
    out, want = norm.add_norm(*leaves, 1e-5), reference(*exact, 1e-5)
    grads = torch.autograd.grad(out, leaves, (ds, dh))
    wanted = torch.autograd.grad(want, exact, (ds.double(), dh.double()))
    for got, expected in zip((*out, *grads), (*want, *wanted), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(37, 64), (5, 1280), (9, 100), (1, 1)])
def test_alone(shape, monkeypatch):
    monkeypatch.setattr(norm, "PROGRAMS", 3)
    monkeypatch.setattr(norm, "ELEMENTS", 512)
    monkeypatch.setattr(norm, "BACKWARD_ELEMENTS", 256)
    torch.manual_seed(0)
    x, dh = (torch.randn(shape, device=DEVICE) for _ in range(2))
    w = torch.randn(shape[1], device=DEVICE)
    leaves, exact = [x.requires_grad_(), w.requires_grad_()], [t.detach().double().requires_grad_() for t in (x, w)]
    out, want = norm.norm(*leaves, 1e-5), reference(exact[0], 0.0, exact[1], 1e-5)[1]
    grads, wanted = torch.autograd.grad(out, leaves, dh), torch.autograd.grad(want, exact, dh.double())
    for got, expected in zip((out, *grads), (want, *wanted), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("strided", [False, True])
def test_what_passes_through_has_its_gradient_added(strided):
    torch.manual_seed(0)
    x, ds, dh = (torch.randn(40, 21, device=DEVICE).T if strided else torch.randn(21, 40, device=DEVICE) for _ in range(3))
    w = torch.randn(40, device=DEVICE)
    leaves, exact = [x.requires_grad_(), w.requires_grad_()], [t.detach().double().requires_grad_() for t in (x, w)]
    out, want = norm.norm_through(*leaves, 1e-5), reference(exact[0], 0.0, exact[1], 1e-5)
    grads, wanted = torch.autograd.grad(out, leaves, (ds, dh)), torch.autograd.grad(want, exact, (ds.double(), dh.double()))
    for got, expected in zip((*out, *grads), (*want, *wanted), strict=True):
        torch.testing.assert_close(got.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("shape", [(1, 1), (528, 70), (3, 33), (129, 8, 5), (0, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_partial_sums_add_up(shape, dtype):
    parts = torch.randint(-8, 9, shape, device=DEVICE).float()  # whole numbers: any order gives the same sum
    total = sum_parts(parts, dtype)
    assert total.dtype == dtype and total.shape == parts.shape[1:]
    if dtype == torch.float32:
        assert torch.equal(total, parts.sum(0))
    else:  # the interpreter cuts bf16 off
        torch.testing.assert_close(total, parts.sum(0).to(dtype), rtol=2.0**-7, atol=0.0)


def test_no_tokens_give_no_gradient():
    leaves = [torch.zeros(0, 8, device=DEVICE, requires_grad=True) for _ in range(2)] + [torch.ones(8, device=DEVICE, requires_grad=True)]
    s, h = norm.add_norm(*leaves, 1e-5)
    (s.sum() + h.sum()).backward()
    assert s.shape == h.shape == (0, 8) and not leaves[2].grad.any()
