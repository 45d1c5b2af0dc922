"""The two 8-bit float formats: rounding a float32 to them, and their byte codes.

A float8 format has a sign, `exponent` and `mantissa` bits. Rounding to the nearest value, ties to even, needs no
table: a float32 `v` in [2^e, 2^(e+1)) has neighbours `2^(e - mantissa)` apart, and adding then subtracting
`c = 1.5 x 2^(e - mantissa + 23)`, a number whose own last bit is that step, makes the float32 adder round `v` to it.
Below the smallest normal value the step stops shrinking (subnormals), hence the lower limit on `e`.

All callers clamp to the largest finite value first (saturation, as `cvt.rn.satfinite` does on the GPU); torch's own
cast saturates only from torch 2.12 on.
Formats: Micikevicius et al. 2022, "FP8 formats for deep learning" (arXiv:2209.05433), table 1.
"""

from typing import NamedTuple

import torch

MANTISSA_BITS_FP32 = 23
EXPONENT_MASK_FP32 = 0x7F800000
BIAS_FP32 = 127
NAN_CODE = 0x7F  # what the GPU's conversion writes for every NaN, whatever its sign; a NaN in both formats


class Float8(NamedTuple):
    """A float8 format: its torch dtype, largest finite value, mantissa bits and the exponent of its smallest normal."""

    dtype: torch.dtype
    maximum: float
    mantissa: int
    min_exponent: int


E4M3 = Float8(torch.float8_e4m3fn, 448.0, 3, -6)
E5M2 = Float8(torch.float8_e5m2, 57344.0, 2, -14)
RECIPROCAL_448 = 1.0 / 448.0  # as float32: 0x3B124925. Kernels multiply by it, which is not dividing by 448


def saturate(values: torch.Tensor, form: Float8) -> torch.Tensor:
    """float32 `values` clamped in place to the format's finite range; +-Inf become +-maximum, NaN stays NaN."""
    return values.clamp_(-form.maximum, form.maximum)


def round_to(values: torch.Tensor, form: Float8) -> torch.Tensor:
    """The float32 values of `form` nearest to saturated float32 `values`, ties to even; NaN stays NaN."""
    exponent = (values.view(torch.int32) & EXPONENT_MASK_FP32).clamp_(min=(form.min_exponent + BIAS_FP32) << 23)
    shift = MANTISSA_BITS_FP32 - form.mantissa
    anchor = exponent.add_(shift << 23).bitwise_or_(0x400000).view(torch.float32)  # 1.5 x 2^(e + shift)
    return (values + anchor).sub_(anchor)


def encode(values: torch.Tensor, form: Float8) -> torch.Tensor:
    """Saturated float32 `values` as float8 (dtype `form.dtype`), nearest, ties to even; every NaN is code 0x7F."""
    codes = values.to(form.dtype).view(torch.uint8)
    return torch.where(values.isnan(), NAN_CODE, codes).view(form.dtype)
