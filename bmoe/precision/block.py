"""Block-scaled FP8 (Transformer Engine's `Float8BlockScaling`): E4M3 values, one power-of-two float32 scale a block.

Activations and gradients use blocks of 1 x 128 along the contraction, weights squares of 128 x 128, which serve both
directions with one copy. The scale is 448 / amax rounded DOWN to a power of two, so the largest magnitude lands in
(224, 448]. Rules (TE 2.20, `compute_scale_from_amax` with power-of-two scales and epsilon 0): amax of 0 or Inf gives
scale 1 (finite values above 448 beside an Inf then saturate); an amax so small that 448 / amax overflows gives 2^127.
"""

import torch

from bmoe.precision import blocks
from bmoe.precision.float8 import E4M3, encode, round_to, saturate

BLOCK = 128


def scales(amax: torch.Tensor) -> torch.Tensor:
    """float32 power-of-two factor for float32 block maxima; values are multiplied by it before rounding."""
    # A true division: `number / tensor` would be number x (1 / tensor), which rounds twice.
    ratio = torch.full_like(amax, E4M3.maximum).div(amax).clamp(max=torch.finfo(torch.float32).max)
    power = (ratio.view(torch.int32) & ~0x7FFFFF).view(torch.float32)
    return torch.where((amax == 0) | ~amax.isfinite(), 1.0, power)


def _cut(x: torch.Tensor, axis: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of `x` and their scale, broadcastable: 1 x 128 along `axis`, or squares over the last two if None."""
    if axis is None:
        cut = blocks.split(blocks.split(x, -2, BLOCK), -1, BLOCK)
        return cut, scales(blocks.amax(cut, (-3, -1)))
    cut = blocks.split(x, axis, BLOCK)
    return cut, scales(blocks.amax(cut, axis))


def _join(cut: torch.Tensor, axis: int | None, x: torch.Tensor) -> torch.Tensor:
    if axis is None:
        return blocks.join(blocks.join(cut, -1, x.shape[-1]), -2, x.shape[-2])
    return blocks.join(cut, axis, x.shape[axis])


def quantize(x: torch.Tensor, axis: int | None = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes float8_e4m3fn of x's shape, inverse scales float32, one a block).

    `axis` -1 or -2: blocks of 128 along it. None: squares of 128 x 128 over the last two axes.
    """
    cut, scale = _cut(x, axis)
    codes = encode(saturate(cut.float() * scale, E4M3), E4M3).view(torch.uint8)
    inverse = 1.0 / (scale.squeeze(-1).squeeze(-2) if axis is None else scale.squeeze(axis))
    return _join(codes, axis, x).view(E4M3.dtype), inverse


def dequantize(codes: torch.Tensor, inverse: torch.Tensor, axis: int | None = -1) -> torch.Tensor:
    """float32 values of what `quantize` returned."""
    if axis is None:
        cut = blocks.split(blocks.split(codes.float(), -2, BLOCK), -1, BLOCK)
        return _join(cut * inverse.unsqueeze(-2).unsqueeze(-1), None, codes)
    return _join(blocks.split(codes.float(), axis, BLOCK) * inverse.unsqueeze(axis), axis, codes)


def quantize_dequantize(x: torch.Tensor, axis: int | None = -1) -> torch.Tensor:
    """`dequantize(*quantize(x, axis), axis)` in x's dtype, without the detour over bytes."""
    cut, scale = _cut(x, axis)
    rounded = round_to(saturate(cut.float() * scale, E4M3), E4M3)
    return _join(rounded.mul_(1.0 / scale), axis, x).to(x.dtype)
