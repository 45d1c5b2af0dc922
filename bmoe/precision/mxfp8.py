"""MXFP8 as Transformer Engine 2.20 quantises it: blocks of 32, E4M3 values, one E8M0 (power of two) scale a block.

The scale of a block is the smallest power of two that brings its largest magnitude to at most 448, so a finite value
never saturates: `2^(e - 127) = ceil_pow2(amax / 448)`. (The OCP specification's example rounds down instead, and
saturates up to 1/8 of the blocks' maxima.) A block lies along the contraction of the GEMM that reads it; the copies
for the two directions are both made from the high-precision tensor, never one from the other.

`quantize` gives the bytes a GPU would hold, `quantize_dequantize` the values the GEMM would see; both are exact.
Values come back exactly in bfloat16 too, as E4M3 needs 4 significant bits, unless below bfloat16's range (2^-133).
"""

import torch

from bmoe.precision import blocks
from bmoe.precision.float8 import E4M3, RECIPROCAL_448, encode, round_to, saturate

BLOCK = 32


def scale_exponents(amax: torch.Tensor) -> torch.Tensor:
    """E8M0 codes (int32, 0..255) for float32 block maxima: amax / 448 rounded up to a power of two; 255 is NaN."""
    bits = (amax * RECIPROCAL_448).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # A subnormal (exponent 0) up to 2^-127 is covered by code 0 itself, whose scale is 2^-127.
    up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    code = torch.where(bits == 0x7F800000, 0xFE, exponent + up.int())
    return torch.where(bits > 0x7F800000, 0xFF, code)


def scales(exponents: torch.Tensor) -> torch.Tensor:
    """float32 scale 2^(e - 127) of int32 E8M0 codes e; code 255 is NaN."""
    bits = torch.where(exponents == 0, 0x00400000, exponents << 23)  # 2^-127 is a subnormal float32
    return torch.where(exponents == 0xFF, torch.nan, bits.view(torch.float32))


def inverse_scales(exponents: torch.Tensor) -> torch.Tensor:
    """float32 2^(127 - e), by which values are multiplied before rounding; code 255 is NaN."""
    return scales(254 - exponents).where(exponents != 0xFF, torch.nan)


def _scaled(x: torch.Tensor, axis: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of `x` along `axis` times their inverse scale, saturated (float32), and the int32 E8M0 codes."""
    cut = blocks.split(x, axis, BLOCK)
    exponents = scale_exponents(blocks.amax(cut, axis))
    return saturate(cut.float() * inverse_scales(exponents), E4M3), exponents


def quantize(x: torch.Tensor, axis: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes float8_e4m3fn of x's shape, scales uint8 E8M0 with ceil(n / 32) entries along `axis`)."""
    scaled, exponents = _scaled(x, axis)
    codes = blocks.join(encode(scaled, E4M3).view(torch.uint8), axis, x.shape[axis])
    return codes.view(E4M3.dtype), exponents.squeeze(axis).to(torch.uint8)


def dequantize(codes: torch.Tensor, exponents: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """float32 values of what `quantize` returned."""
    scale = scales(exponents.int()).unsqueeze(axis)
    return blocks.join(blocks.split(codes.float(), axis, BLOCK) * scale, axis, codes.shape[axis])


def quantize_dequantize(x: torch.Tensor, axis: int = -1) -> torch.Tensor:
    """`dequantize(*quantize(x, axis), axis)` in x's dtype, without the detour over bytes."""
    scaled, exponents = _scaled(x, axis)
    return blocks.join(round_to(scaled, E4M3).mul_(scales(exponents)), axis, x.shape[axis]).to(x.dtype)
