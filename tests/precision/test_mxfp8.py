"""MXFP8: the scale rule over every bf16 maximum, hand-worked blocks, edge cases and invariants."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.precision import mxfp8


def bf16(bits: torch.Tensor) -> torch.Tensor:
    return bits.to(torch.int16).view(torch.bfloat16)


ALL_BF16_MAXIMA = bf16(torch.arange(0x7F80))  # every finite non-negative bfloat16


def smallest_exponent(amax: float) -> int:
    """E8M0 code of the smallest power of two s >= 2^-127 with float32(amax / 448) <= s, in exact arithmetic."""
    reciprocal = Fraction(torch.tensor(0x3B124925, dtype=torch.int32).view(torch.float32).item())
    product = torch.tensor(float(Fraction(amax) * reciprocal), dtype=torch.float64).float().item()  # one rounding
    if product <= 2.0**-127:
        return 0
    mantissa, exponent = math.frexp(product)  # product = mantissa * 2^exponent, mantissa in [0.5, 1)
    return 127 + (exponent - 1 if mantissa == 0.5 else exponent)


def test_scale_of_every_bf16_maximum_is_the_smallest_sufficient_power_of_two():
    codes = mxfp8.scale_exponents(ALL_BF16_MAXIMA.float()).tolist()
    assert codes == [smallest_exponent(amax) for amax in ALL_BF16_MAXIMA.double().tolist()]


def test_no_finite_maximum_saturates():
    x = ALL_BF16_MAXIMA[:, None].expand(-1, 32)
    exponents = mxfp8.scale_exponents(ALL_BF16_MAXIMA.float())
    scaled = ALL_BF16_MAXIMA.double() * torch.pow(2.0, 127.0 - exponents.double())
    assert scaled.max() <= 448
    big = exponents > 0
    assert scaled[big].min() > 224  # and none wastes more than the factor of two that a power of two must
    assert torch.equal(mxfp8.quantize(x)[1].squeeze(1).int(), exponents)


def test_scales_are_powers_of_two_and_inverse_to_each_other():
    codes = torch.arange(255, dtype=torch.int32)
    assert torch.equal(mxfp8.scales(codes).double(), torch.pow(2.0, codes.double() - 127))
    assert torch.equal(mxfp8.inverse_scales(codes).double(), torch.pow(2.0, 127 - codes.double()))
    nan = torch.tensor([255], dtype=torch.int32)
    assert mxfp8.scales(nan).isnan() and mxfp8.inverse_scales(nan).isnan()


def test_scale_rule_at_its_edges():
    amax = torch.tensor([0.0, torch.inf, torch.nan, 448.0, 449.0, 2.0**-140])
    assert mxfp8.scale_exponents(amax).tolist() == [0x00, 0xFE, 0xFF, 127, 128, 0]


def test_a_block_worked_by_hand():
    # amax 3 -> 3/448 = 0.0067, next power of two 2^-7 (code 120); 3 x 128 = 384 = 1.5 x 2^8 -> code 0x7C.
    # 1 x 128 = 2^7 -> exponent 14 -> 0x70. 0.1 x 128 = 12.8, step 1 in [8, 16) -> 13 -> 1.625 x 2^3 -> 0x55.
    # 0.0001 x 128 = 0.0128 < 2^-6: subnormal step 2^-9: 6.55 -> 7 -> 0x07. -2 -> -256 -> 0xF8.
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([3.0, 1.0, 0.1, 0.0001, -2.0])
    codes, exponents = mxfp8.quantize(x)
    assert exponents.tolist() == [[120]]
    assert codes.view(torch.uint8)[0, :6].tolist() == [0x7C, 0x70, 0x55, 0x07, 0xF8, 0x00]
    assert mxfp8.dequantize(codes, exponents)[0, :5].tolist() == [3.0, 1.0, 13 / 128, 7 / 512 / 128, -2.0]


def test_infinity_nan_and_zero_blocks():
    x = torch.zeros(3, 32)
    x[0, :3] = torch.tensor([torch.inf, -torch.inf, 1e38])
    x[1, :2] = torch.tensor([torch.nan, 3.0])
    codes, exponents = mxfp8.quantize(x)
    assert exponents.flatten().tolist() == [0xFE, 120, 0]  # NaN is ignored by the maximum
    assert codes.view(torch.uint8)[0, :2].tolist() == [0x7E, 0xFE]
    assert codes.view(torch.uint8)[1, :2].tolist() == [0x7F, 0x7C]
    assert not codes.view(torch.uint8)[2].any()
    assert mxfp8.quantize_dequantize(x)[1, 0].isnan()
    assert not mxfp8.quantize_dequantize(x)[2].any()


def test_subnormal_blocks_keep_their_values():
    x = torch.full((1, 32), 2.0**-130)
    codes, exponents = mxfp8.quantize(x)
    assert exponents.item() == 0
    assert torch.equal(mxfp8.dequantize(codes, exponents), x)


def test_columns_are_rows_of_the_transpose_and_not_of_the_row_copy():
    x = torch.randn(96, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, 64)
    down, along = mxfp8.quantize(x, -2), mxfp8.quantize(x.T.contiguous(), -1)
    assert torch.equal(down[0].view(torch.uint8), along[0].view(torch.uint8).T)
    assert torch.equal(down[1], along[1].T)
    assert down[1].shape == (3, 64)
    twice = mxfp8.quantize_dequantize(mxfp8.quantize_dequantize(x, -1), -2)
    assert not torch.equal(twice, mxfp8.quantize_dequantize(x, -2))


@pytest.mark.parametrize("shape", [(5, 33), (1, 1), (64, 32), (0, 32), (2, 3, 70)])
@pytest.mark.parametrize("axis", [-1, -2])
def test_a_last_block_need_not_be_full(shape, axis):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    missing = -x.shape[axis] % 32
    full = torch.cat([x, x.new_zeros([missing if i == len(shape) + axis else n for i, n in enumerate(shape)])], axis)
    expected = mxfp8.quantize_dequantize(full, axis).narrow(axis, 0, x.shape[axis])
    assert torch.equal(mxfp8.quantize_dequantize(x, axis), expected)
    assert torch.equal(mxfp8.dequantize(*mxfp8.quantize(x, axis), axis), expected)


def test_values_are_exact_in_bfloat16():
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    values = mxfp8.quantize_dequantize(x)
    assert torch.equal(values.bfloat16().float(), values)
    assert mxfp8.quantize_dequantize(x.bfloat16()).dtype == torch.bfloat16


blocks = st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=32, max_size=32)  # beyond, rounding up overflows


@settings(deadline=None)
@given(blocks)
def test_bytes_and_shortcut_agree_and_the_error_is_bounded(values):
    x = torch.tensor([values], dtype=torch.float32)
    codes, exponents = mxfp8.quantize(x)
    y = mxfp8.dequantize(codes, exponents)
    assert torch.equal(mxfp8.quantize_dequantize(x), y)
    scale = 2.0 ** (exponents.item() - 127)
    error = (y.double() - x.double()).abs()
    # Half a step: 2^-4 relative for normal codes, 2^-10 of the scale for subnormal ones.
    assert (error <= torch.maximum(x.double().abs() * 2.0**-4, torch.tensor(scale * 2.0**-10))).all()
    assert torch.equal(mxfp8.quantize_dequantize(-x), -y)


@settings(deadline=None)
@given(blocks, st.integers(-20, 20))
def test_scaling_by_a_power_of_two_scales_the_result(values, power):
    x = (torch.tensor([values]).clamp(-1e20, 1e20)).to(torch.float32)
    x = torch.where(x.abs() < 1e-20, 0.0, x)
    assert torch.equal(mxfp8.quantize_dequantize(x * 2.0**power), mxfp8.quantize_dequantize(x) * 2.0**power)
