"""Block FP8: the scale rule over every bf16 maximum, its edges, tiles and invariants."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.precision import block

ALL_BF16_MAXIMA = torch.arange(1, 0x7F80).to(torch.int16).view(torch.bfloat16).float()


def expected_scale(amax: float) -> float:
    """The largest power of two not above 448 / amax, at most 2^127, in exact arithmetic."""
    ratio = Fraction(448) / Fraction(amax)
    power = ratio.numerator.bit_length() - ratio.denominator.bit_length()  # 2^power is above half the ratio and below twice
    return 2.0 ** min(power if Fraction(2) ** power <= ratio else power - 1, 127)


def test_scale_of_every_bf16_maximum_is_the_largest_fitting_power_of_two():
    assert block.scales(ALL_BF16_MAXIMA).tolist() == [expected_scale(a) for a in ALL_BF16_MAXIMA.double().tolist()]


def test_scale_rule_at_its_edges():
    amax = torch.tensor([0.0, torch.inf, torch.nan, 448.0, 448.00003, 224.0, 1.3166e-36, 1.4e-45])
    assert block.scales(amax).tolist() == [1.0, 1.0, 1.0, 1.0, 0.5, 2.0, 2.0**127, 2.0**127]


def test_a_block_worked_by_hand():
    # amax 3 -> 448 / 3 = 149.3 -> 128; 3 x 128 = 384 -> 0x7C; 0.1 x 128 = 12.8 -> 13 -> 0x55; inverse 1 / 128.
    x = torch.zeros(1, 128)
    x[0, [0, 127]] = torch.tensor([3.0, 0.1])
    codes, inverse = block.quantize(x)
    assert codes.view(torch.uint8)[0, [0, 127]].tolist() == [0x7C, 0x55]
    assert inverse.tolist() == [[1 / 128]]
    assert block.dequantize(codes, inverse)[0, [0, 127]].tolist() == [3.0, 13 / 128]


def test_values_beside_an_infinity_saturate_at_448():
    x = torch.tensor([[torch.inf, 1000.0, -1000.0, 1.0]])
    codes, inverse = block.quantize(x)
    assert inverse.item() == 1.0
    assert codes.float().tolist() == [[448.0, 448.0, -448.0, 1.0]]


def test_a_square_serves_both_directions():
    x = torch.randn(256, 300, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 300)
    codes, inverse = block.quantize(x, None)
    assert inverse.shape == (2, 3)
    turned, turned_inverse = block.quantize(x.T.contiguous(), None)
    assert torch.equal(turned.view(torch.uint8), codes.view(torch.uint8).T)
    assert torch.equal(turned_inverse, inverse.T)
    one = block.scales(x[:128, 128:256].abs().max())
    assert 1 / inverse[0, 1] == one


@pytest.mark.parametrize("axis", [-1, -2, None])
@pytest.mark.parametrize("shape", [(128, 128), (5, 130), (1, 1), (2, 129, 40), (0, 128)])
def test_bytes_and_shortcut_agree(axis, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 7
    assert torch.equal(block.quantize_dequantize(x, axis), block.dequantize(*block.quantize(x, axis), axis))
    low = block.quantize_dequantize(x.bfloat16(), axis)
    assert torch.equal(low.float(), block.quantize_dequantize(x.bfloat16().float(), axis))  # exact in bfloat16


@settings(deadline=None)
@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=200))
def test_no_finite_value_saturates_and_the_error_is_half_a_step(values):
    x = torch.tensor([values], dtype=torch.float32)
    codes, inverse = block.quantize(x)
    error = (block.dequantize(codes, inverse).double() - x.double()).abs()
    step = inverse.double().repeat_interleave(128, -1)[:, : x.shape[1]] * 2.0**-10
    assert (error <= torch.maximum(x.double().abs() * 2.0**-4, step)).all()
    assert all(math.frexp(v)[0] == 0.5 for v in inverse.flatten().tolist())
