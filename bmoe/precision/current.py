"""Per-tensor current scaling (Transformer Engine's `Float8CurrentScaling`): one float32 scale for a whole tensor.

scale = maximum / amax, maximum 448 for E4M3 (activations, weights) and 57344 for E5M2 (gradients, "hybrid"). The scale
is no power of two, so dequantised values do not fit bfloat16 exactly: a GEMM multiplies the rounded values, which do,
and its result takes the inverse scales. Rules (TE 2.20, `compute_scale_from_amax`, epsilon 0): amax of 0 or Inf gives
scale 1; an overflow of maximum / amax gives the largest float32.
"""

import torch

from bmoe.precision import blocks
from bmoe.precision.float8 import E4M3, Float8, encode, round_to, saturate


def scales(amax: torch.Tensor, form: Float8 = E4M3) -> torch.Tensor:
    """float32 factor maximum / amax for float32 maxima (any shape: one a tensor, or one a group of rows)."""
    # A true division: `number / tensor` would be number x (1 / tensor), which rounds twice.
    ratio = torch.full_like(amax, form.maximum).div(amax).clamp(max=torch.finfo(torch.float32).max)
    return torch.where((amax == 0) | ~amax.isfinite(), 1.0, ratio)


def _scale(x: torch.Tensor, form: Float8) -> torch.Tensor:
    return scales(blocks.amax(x.flatten(), -1).squeeze(-1), form) if x.numel() else x.new_ones((), dtype=torch.float32)


def quantize(x: torch.Tensor, form: Float8 = E4M3) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes of x's shape in `form.dtype`, inverse scale float32 0-dim)."""
    scale = _scale(x, form)
    return encode(saturate(x.float() * scale, form), form), 1.0 / scale


def dequantize(codes: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """float32 values of what `quantize` returned."""
    return codes.float() * inverse


def quantize_dequantize(x: torch.Tensor, form: Float8 = E4M3) -> torch.Tensor:
    """`dequantize(*quantize(x, form))` in x's dtype."""
    scale = _scale(x, form)
    return round_to(saturate(x.float() * scale, form), form).mul_(1.0 / scale).to(x.dtype)
