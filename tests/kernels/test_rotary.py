"""The rotary kernels against the plain rotation of the model, values and gradient, through Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

from bmoe.kernels.rotary import _turn, queries_and_keys, turn_back
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
    bounds = torch.tensor([0, T], dtype=torch.int32, device=DEVICE)
    torch.testing.assert_close(queries_and_keys(qkv.detach(), G, cos, sin, bounds)[0], expected)

    dqkv = torch.randn(T, H + 2 * G, d, device=DEVICE)
    wanted = torch.autograd.grad((expected, v), qkv, dqkv.split((H + G, G), dim=1))[0]
    turn_back(dqkv, G, cos, sin, bounds)
    torch.testing.assert_close(dqkv, wanted)


@pytest.mark.parametrize("end", [0, 63, 64, 65, 199, 200])
def test_only_rows_of_no_sequence_are_cleared(end):
    T, H, G, d = 200, 3, 1, 10
    cos, sin = torch.ones(T, d // 2, device=DEVICE), torch.zeros(T, d // 2, device=DEVICE)
    bounds = torch.tensor([0, end // 2, end], dtype=torch.int32, device=DEVICE)
    memory = torch.full((T, H, d), 7.0, device=DEVICE)
    _turn(torch.ones(T, H + 2 * G, d, device=DEVICE), torch.empty(T, H + G, d, device=DEVICE), memory, bounds, cos, sin, 4, 4, 3, False)
    assert bool((memory[:end] == 7).all()) and not memory[end:].any()
    assert not queries_and_keys(torch.ones(T, H + 2 * G, d, device=DEVICE), G, cos, sin, bounds)[1][end:].any()

    gradient = torch.ones(T, H + 2 * G, d, device=DEVICE)
    gradient[end:] = torch.nan
    turn_back(gradient, G, cos, sin, bounds)
    assert bool((gradient[:end] == 1).all()) and not gradient[end:].any()
