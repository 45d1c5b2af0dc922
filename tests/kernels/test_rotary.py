"""The rotary kernels against the plain rotation of the model, values and gradient, through Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from bmoe.kernels.flash import clear_tail
from bmoe.kernels.rotary import projection_gradient, queries_and_keys
from bmoe.model.attention import Rotary, rotate

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("shape", [(37, 4, 4, 64), (5, 8, 2, 16), (130, 3, 1, 24), (1, 1, 1, 128)])
def test_turning_there_and_back_equals_autograd(shape):
    T, H, G, d = shape
    torch.manual_seed(0)
    rotary = Rotary(d, 10000.0)
    rotary.initialize()
    cos, sin = (x.to(DEVICE) for x in rotary(torch.randint(0, 900, (T,))))
    qkv = torch.randn(T, H + 2 * G, d, device=DEVICE, requires_grad=True)
    turned, v = qkv.split((H + G, G), dim=1)
    expected = rotate(turned, cos, sin)
    torch.testing.assert_close(queries_and_keys(qkv.detach(), G, cos, sin), expected)

    dq, dk, dv = (torch.randn(T, n, d, device=DEVICE) for n in (H, G, G))
    wanted = torch.autograd.grad((expected, v), qkv, (torch.cat((dq, dk), dim=1), dv))[0]
    torch.testing.assert_close(projection_gradient(dq, dk, dv, cos, sin), wanted)


@pytest.mark.parametrize("end", [0, 63, 64, 65, 199, 200])
def test_only_the_tail_is_cleared(end):
    x = torch.ones(200, 3, 5, device=DEVICE)
    clear_tail(x, torch.tensor([0, end // 2, end], dtype=torch.int32, device=DEVICE))
    assert bool((x[:end] == 1).all()) and not x[end:].any()
