"""The fused cross entropy against torch's own in float64, value and gradient."""

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from bmoe.kernels.cross_entropy import cross_entropy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("targets", ["some", "none", "all"])
@pytest.mark.parametrize(("rows", "vocabulary"), [(1, 1), (70, 33), (300, 5), (17, 1000), (0, 33)])
def test_value_and_gradient(rows, vocabulary, targets):
    torch.manual_seed(rows)
    logits = 20 * torch.randn(rows, vocabulary, device=DEVICE)
    targets_M = torch.randint(vocabulary, (rows,), device=DEVICE)
    if targets != "all":
        targets_M[torch.rand(rows, device=DEVICE) < (0.5 if targets == "some" else 2.0)] = -100
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got, want = cross_entropy(leaf, targets_M), F.cross_entropy(exact, targets_M, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    (0.3 * got).backward()
    (0.3 * want).backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-4, atol=1e-6)


def test_bf16_logits_are_widened_and_gradients_rounded_once():
    torch.manual_seed(0)
    logits = torch.randn(200, 33, device=DEVICE).bfloat16()
    targets_M = torch.randint(33, (200,), device=DEVICE)
    leaf, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got, want = cross_entropy(leaf, targets_M), F.cross_entropy(exact, targets_M, reduction="sum")
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    got.backward()
    want.backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=2.0**-7, atol=1e-6)  # the interpreter cuts bf16 off


def test_huge_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, 1e38], [-1e38, -1e38, -1e38]], device=DEVICE, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([2, 0], device=DEVICE))
    loss.backward()
    assert loss.item() == pytest.approx(1.0986, abs=1e-3) and logits.grad.isfinite().all()


def test_a_nan_is_not_hidden():
    logits = torch.zeros(3, 4, device=DEVICE)
    logits[1, 2] = torch.nan
    assert cross_entropy(logits, torch.tensor([0, 1, 2], device=DEVICE)).isnan()
