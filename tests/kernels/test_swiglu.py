"""Weighted SwiGLU, forward and backward, against its plain-torch twin and autograd."""

import pytest
import torch

pytest.importorskip("triton")

from bmoe.kernels import rows, swiglu  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("width", [1, 24, 64, 160])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 2, 1), (37, 4, 2), (20, 8, 8)])
def test_values_and_gradients_equal_the_twin(width, tokens, experts, k):
    torch.manual_seed(width)
    ids_TK, weights_TK = torch.randint(experts + 1, (tokens, k), device=DEVICE), torch.rand(tokens, k, device=DEVICE)
    order = rows.sort_slots_reference(ids_TK, weights_TK, experts)
    used = int(order.bounds_E1[-1])
    h_NC = torch.randn(tokens * k, 2 * width, device=DEVICE, requires_grad=True)
    weight_N = order.weight_of_row_N.clone().requires_grad_()
    da_NF = torch.randn(tokens * k, width, device=DEVICE)
    expected_NF = swiglu.swiglu_reference(h_NC, weight_N, order.bounds_E1)
    expected_NF.backward(da_NF)

    poisoned_NC = h_NC.detach().clone()
    poisoned_NC[used:] = float("nan")  # rows of no slot must not be read
    arguments = (weight_N.detach(), order.bounds_E1)
    torch.testing.assert_close(swiglu.swiglu(poisoned_NC, *arguments)[:used], expected_NF[:used])
    again_NF = da_NF.clone()
    dh_NC, dweight_N = swiglu.swiglu_backward(poisoned_NC, again_NF, *arguments)
    torch.testing.assert_close(dh_NC[:used], h_NC.grad[:used])
    torch.testing.assert_close(dweight_N[:used], weight_N.grad[:used])
    torch.testing.assert_close(again_NF[:used], expected_NF[:used])
