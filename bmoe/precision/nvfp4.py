"""NVFP4 as Transformer Engine's `NVFP4BlockScaling` quantises it: E2M1 values, an E4M3 scale a block of 16, a float32 scale a tensor.

Four bits hold 0, 0.5, 1, 1.5, 2, 3, 4 and 6 with a sign, and E4M3 scales alone could not follow a tensor's range, so there are two
levels: x is about q s amax / 2688, amax the tensor's largest magnitude and 2688 = 448 x 6 the largest number of both levels. With
    S = 2688 / amax,    s = e4m3(blockmax x (S / 6)),    q = e2m1(x x 1 / (s x (1 / S)))
in float32 in this order. q s has at most 6 significant bits, so it is exact in bfloat16; amax / 2688 multiplies a product's result.

The recipe that trains with it has three more parts, and all are here:
- Weights have squares of 16 x 16, which serve both directions; activations and gradients 1 x 16 along the contraction.
- Gradients are rounded stochastically: to the neighbour above with the probability of the place between the two. All else is
  rounded to nearest, ties to even.
- Both inputs of the weight gradient are rotated first, 16 rows at a time, by H = S_16 H_16 / 4 (random Hadamard transform; H H^T is
  the identity, so the product is the same), which spreads outliers. The signs S_16 are fixed.

Sources: Transformer Engine's repository in 2026, docs/features/low_precision_training/nvfp4, and the order of operations of its kernels
(common/cast/nvfp4/core_nvfp4.cuh) and of the Python reference that it tests them with (pytorch/custom_recipes/quantization_ref_nvfp4.py;
that of 2025 computed (blockmax / 6) x S, which decides some ties of s otherwise); NVIDIA 2025, "Pretraining large language models with
NVFP4" (arXiv:2509.25149). A tensor without range (amax 0 or Inf) has S = 1; NaN counts in no maximum and becomes +6, as in CUDA's
conversion (cuda_fp4.h). Not compared with hardware.
"""

import torch
from torch import Tensor

from bmoe.precision import blocks
from bmoe.precision.float8 import BIAS_FP32, E4M3, EXPONENT_MASK_FP32, MANTISSA_BITS_FP32, Float8, round_to, saturate

BLOCK = 16
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; 8 to 15 are negative
E2M1 = Float8(torch.uint8, 6.0, 1, 0)  # torch does not compute in its own 4-bit type; a code is a byte here
RANGE = E4M3.maximum * E2M1.maximum
SIGNS = 0xD7E8  # bit i: whether row i of the Hadamard matrix is negated (`get_wgrad_sign_vector` of the reference)
NOISE_BITS = 20  # of a stochastic rounding; what a value adds to the noise stays exact in float32


def factors(amax: Tensor) -> Tensor:
    """float32 S = 2688 / amax of float32 maxima, any shape."""
    # A true division: `number / tensor` would be number x (1 / tensor), which rounds twice.
    ratio = torch.full_like(amax, RANGE).div(amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax == 0) | (ratio == 0), 1.0, ratio)


def _cut(x: Tensor, axis: int | None) -> Tensor:
    """Blocks of 16 along `axis` (-1 or -2), or squares over the last two if None."""
    return blocks.split(blocks.split(x, -2, BLOCK), -1, BLOCK) if axis is None else blocks.split(x, axis, BLOCK)


def _join(cut: Tensor, axis: int | None, x: Tensor) -> Tensor:
    if axis is None:
        return blocks.join(blocks.join(cut, -1, x.shape[-1]), -2, x.shape[-2])
    return blocks.join(cut, axis, x.shape[axis])


def _stochastic(v: Tensor, noise: Tensor) -> Tensor:
    """The neighbour of saturated `v` among E2M1 values above or below; `noise` in [0, 1), multiples of 2^-NOISE_BITS, decides."""
    exponent = (v.view(torch.int32) & EXPONENT_MASK_FP32).clamp_(min=BIAS_FP32 << MANTISSA_BITS_FP32)
    step = (exponent - (1 << MANTISSA_BITS_FP32)).view(torch.float32)  # two values in each power of two, and 0.5 below 1
    return (v.abs() / step + noise).floor_().mul_(step).copysign_(v)


def _rounded(x: Tensor, factor: Tensor, axis: int | None, noise: Tensor | None) -> tuple[Tensor, Tensor]:
    """E2M1 values q (float32) of the blocks of `x`, and their E4M3 scales s (float32, axes of length 1)."""
    cut = _cut(x, axis)
    amax = blocks.amax(cut, (-3, -1) if axis is None else axis)
    scale = round_to(saturate(amax * (factor * (1.0 / E2M1.maximum)), E4M3), E4M3)
    inverse = (1.0 / (scale * (1.0 / factor))).clamp(max=torch.finfo(torch.float32).max)
    v = saturate(cut.float() * inverse, E2M1).nan_to_num_(nan=E2M1.maximum)
    return (round_to(v, E2M1).copysign_(v) if noise is None else _stochastic(v, _cut(noise, axis))), scale


def scaled(x: Tensor, factor: Tensor, axis: int | None = -1, noise: Tensor | None = None) -> Tensor:
    """q s of every value in x's dtype, exact: `x` is about this / S.

    factor: S, broadcastable to the blocks' maxima (0-dim for one tensor). `axis` -1 or -2: blocks of 16 along it; None: squares of
    16 x 16 over the last two axes. noise, of x's shape: round stochastically.
    """
    values, scale = _rounded(x, factor, axis, noise)
    return _join(values.mul_(scale), axis, x).to(x.dtype)


def quantize(x: Tensor, axis: int | None = -1, noise: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes uint8 of x's shape, one value a byte; block scales float8_e4m3fn; amax float32 0-dim) of one tensor."""
    amax = blocks.amax(x.flatten(), -1).squeeze(-1) if x.numel() else x.new_zeros((), dtype=torch.float32)
    values, scale = _rounded(x, factors(amax), axis, noise)
    places = torch.searchsorted(torch.tensor(VALUES, device=x.device), values.abs()).to(torch.uint8)
    codes = _join(places | (values.signbit().to(torch.uint8) << 3), axis, x)
    return codes, (scale.squeeze(-1).squeeze(-2) if axis is None else scale.squeeze(axis)).to(E4M3.dtype), amax


def decode(codes: Tensor) -> Tensor:
    """float32 values q of codes."""
    return torch.tensor((*VALUES, *(-v for v in VALUES)), device=codes.device)[codes.long()]


def dequantize(codes: Tensor, scales: Tensor, amax: Tensor, axis: int | None = -1) -> Tensor:
    """float32 values of what `quantize` returned."""
    scale = scales.float() * amax * (1.0 / RANGE)
    wide = scale.unsqueeze(-2).unsqueeze(-1) if axis is None else scale.unsqueeze(axis)
    return _join(_cut(decode(codes), axis) * wide, axis, codes)


def hadamard(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[16, 16] H = S_16 H_16 / 4: Sylvester's matrix, rows negated by SIGNS; orthogonal, and exact in every dtype."""
    i = torch.arange(BLOCK, device=device)
    both = i[:, None] & i
    odd = (both ^ both >> 1 ^ both >> 2 ^ both >> 3 ^ (torch.full_like(i, SIGNS) >> i)[:, None]) & 1
    return (0.25 - 0.5 * odd).to(dtype)


def rotate(x_RI: Tensor) -> Tensor:
    """x_RI with every 16 rows, R a multiple of 16, replaced by H^T times them, in x's dtype (bfloat16 is rounded once)."""
    return (hadamard(x_RI.device, x_RI.dtype).T @ x_RI.unflatten(0, (-1, BLOCK))).flatten(0, 1)


def noise_of(x_RI: Tensor, row_R: Tensor) -> Tensor:
    """Noise for `x` of its shape, uniform in [0, 1): a hash of each value, rounded to bfloat16, and its place (row_R: its row's).

    Hardware draws random bits. Hashing them needs no generator, whose state a resumed run would have to restore, and gives every
    implementation of the experts the same gradients. The hash is lowbias32 (C. Wellons 2018) on wrapping int32.
    """
    place = row_R.int()[:, None] * x_RI.shape[-1] + torch.arange(x_RI.shape[-1], device=x_RI.device, dtype=torch.int32)
    h = _mix(_mix(place) ^ x_RI.bfloat16().contiguous().view(torch.int16).int())
    return (h >> 12 & 0xFFFFF).float() * 2.0**-NOISE_BITS


def _mix(h: Tensor) -> Tensor:
    h = (h ^ (h >> 16 & 0xFFFF)) * 0x7FEB352D
    h = (h ^ (h >> 15 & 0x1FFFF)) * (0x846CA68B - 2**32)
    return h ^ (h >> 16 & 0xFFFF)
