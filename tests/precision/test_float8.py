"""Rounding and codes of the two float8 formats against an independent enumeration of all 256 codes."""

import functools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bmoe.precision.float8 import E4M3, E5M2, encode, round_to, saturate

BITS = {E4M3: (4, 3, 7), E5M2: (5, 2, 15)}  # exponent bits, mantissa bits, bias
UNIT = 2**149  # every float32, and so every code, is a multiple of 1 / UNIT


def value_of(code: int, form) -> Fraction | None:
    """The number a non-negative code stands for, from the definition of the format; None for Inf and NaN."""
    exponent_bits, mantissa_bits, bias = BITS[form]
    exponent, mantissa = code >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
    special = exponent == (1 << exponent_bits) - 1
    if special and (form is E5M2 or mantissa == (1 << mantissa_bits) - 1):
        return None
    if exponent == 0:
        return Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)


@functools.cache
def finite_codes(form) -> list[tuple[int, int]]:
    """The non-negative finite codes with their values in units of 1 / UNIT."""
    return [(code, int(v * UNIT)) for code in range(128) if (v := value_of(code, form)) is not None]


def nearest_code(value: float, form) -> int:
    """The code nearest to a finite saturated float32, a tie going to the even code, by comparing with all codes."""
    magnitude = int(Fraction(abs(value)) * UNIT)
    best = min(finite_codes(form), key=lambda pair: (abs(pair[1] - magnitude), pair[0] % 2))[0]
    return best | (0x80 if math.copysign(1, value) < 0 else 0)


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_every_code_is_what_the_format_defines(form):
    codes = torch.arange(256, dtype=torch.uint8)
    for code, value in zip(codes.tolist(), codes.view(form.dtype).double().tolist(), strict=True):
        expected = value_of(code & 0x7F, form)
        if expected is None:
            assert not math.isfinite(value)
        else:
            assert abs(Fraction(value)) == expected
    assert max(v for c in range(128) if (v := value_of(c, form)) is not None) == form.maximum


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_every_value_and_every_tie_rounds_to_the_nearest_even_code(form):
    finite = sorted(float(v) for c in range(128) if (v := value_of(c, form)) is not None)
    middles = [(a + b) / 2 for a, b in zip(finite, finite[1:], strict=False)]
    around = [math.nextafter(m, s) for m in map(float, torch.tensor(middles)) for s in (0.0, math.inf)]
    probes = torch.tensor(finite + middles + around, dtype=torch.float32)
    probes = torch.cat([probes, torch.nextafter(probes, torch.tensor(torch.inf)), torch.nextafter(probes, -probes)])
    probes = saturate(torch.cat([probes, -probes]), form)
    expected = torch.tensor([nearest_code(v, form) for v in probes.tolist()], dtype=torch.uint8)
    assert torch.equal(encode(probes, form).view(torch.uint8), expected)
    assert torch.equal(round_to(probes, form), expected.view(form.dtype).float())


@given(st.floats(width=32, allow_nan=False), st.sampled_from([E4M3, E5M2]))
def test_any_float_rounds_to_the_nearest_even_code(value, form):
    v = saturate(torch.tensor([value], dtype=torch.float32), form)
    expected = nearest_code(v.item(), form)
    assert encode(v, form).view(torch.uint8).item() == expected
    assert round_to(v, form).item() == torch.tensor([expected], dtype=torch.uint8).view(form.dtype).float().item()


@pytest.mark.parametrize("form", [E4M3, E5M2])
def test_infinities_saturate_and_every_nan_is_one_code(form):
    nan = torch.tensor([0x7FC00000, -0x400000, 0x7F800001], dtype=torch.int32).view(torch.float32)
    x = saturate(torch.cat([torch.tensor([torch.inf, -torch.inf]), nan]), form)
    assert x[:2].tolist() == [form.maximum, -form.maximum]
    assert encode(x, form).view(torch.uint8)[2:].tolist() == [0x7F] * 3
    assert round_to(x, form)[2:].isnan().all()
