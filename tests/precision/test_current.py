"""Per-tensor current scaling: the scale rule, its edges and the error it gives."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.precision import current
from bmoe.precision.float8 import E4M3, E5M2


@pytest.mark.parametrize("form, maximum", [(E4M3, 448.0), (E5M2, 57344.0)])
def test_scale_rule(form, maximum):
    amax = torch.tensor([0.0, torch.inf, torch.nan, maximum, 3.0, 1e-38])
    expected = torch.tensor([1.0, 1.0, 1.0, 1.0, maximum / 3.0, torch.finfo(torch.float32).max])
    assert torch.equal(current.scales(amax, form), expected)


@pytest.mark.parametrize("form, maximum", [(E4M3, 448.0), (E5M2, 57344.0)])
def test_scale_of_every_bf16_maximum_is_the_nearest_float32(form, maximum):
    amax = torch.arange(1, 0x7F80).to(torch.int16).view(torch.bfloat16).float()
    exact = maximum / amax.double()  # 24 bits over at most 8: float64 holds enough of it to round once more without harm
    assert torch.equal(current.scales(amax, form), exact.clamp(max=torch.finfo(torch.float32).max).float())


def test_a_tensor_worked_by_hand():
    # amax 3 -> scale 149.33334; 3 -> 448 (0x7E); 1 -> 149.33 -> 144 (step 16) = 1.125 x 2^7 (0x71).
    codes, inverse = current.quantize(torch.tensor([[3.0, 1.0], [0.0, -3.0]]))
    assert codes.view(torch.uint8).tolist() == [[0x7E, 0x71], [0x00, 0xFE]]
    assert inverse.item() == pytest.approx(3 / 448, rel=1e-7)
    assert inverse.ndim == 0 and inverse.dtype == torch.float32


@pytest.mark.parametrize("form", [E4M3, E5M2])
@pytest.mark.parametrize("shape", [(7, 33), (0, 4), (1,)])
def test_bytes_and_shortcut_agree(form, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(current.quantize_dequantize(x, form), current.dequantize(*current.quantize(x, form)))


@settings(deadline=None)
@given(st.lists(st.floats(-(2.0**99), 2.0**99, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30), min_size=1, max_size=64))
def test_the_maximum_is_kept_and_nothing_saturates(values):
    x = torch.tensor(values, dtype=torch.float32)
    codes, inverse = current.quantize(x)
    assert codes.float().abs().max() == (448.0 if x.any() else 0.0)
    error = (current.dequantize(codes, inverse).double() - x.double()).abs()
    assert (error <= torch.maximum(x.double().abs() * 2.0**-3.99, inverse.double() * 2.0**-9.99)).all()


def test_infinities_nan_and_subnormals():
    codes, inverse = current.quantize(torch.tensor([torch.inf, -torch.inf, 1.0, torch.nan]))
    assert inverse == 1.0 and codes.view(torch.uint8)[3] == 0x7F
    assert codes.float()[:3].tolist() == [448.0, -448.0, 1.0]
    codes, inverse = current.quantize(torch.tensor([torch.nan, 3.0]))  # NaN counts in no maximum
    assert codes.view(torch.uint8).tolist() == [0x7F, 0x7E] and inverse == pytest.approx(3 / 448)
    codes, inverse = current.quantize(torch.tensor([2.0**-135, 0.0]))  # 448 / amax overflows: the largest float32, just below 2^128
    assert codes.float().tolist() == [2.0**-7, 0.0] and inverse == 2.0**-128
