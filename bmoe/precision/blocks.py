"""Cutting a tensor into blocks along one axis, and the largest magnitude of each block.

`axis` counts from the end (-1 rows of a matrix: along the last axis; -2: along columns). A last block that the axis
does not fill is completed with zeros, which change neither its maximum nor any value.
"""

import torch
import torch.nn.functional as F


def split(x: torch.Tensor, axis: int, size: int) -> torch.Tensor:
    """`x` with `axis` (negative) of length n as two axes (ceil(n / size), size); zero-filled at the end."""
    missing = -x.shape[axis] % size
    if missing:
        x = F.pad(x, [0, 0] * (-axis - 1) + [0, missing])
    return x.unflatten(axis, (x.shape[axis] // size, size))


def join(blocks: torch.Tensor, axis: int, length: int) -> torch.Tensor:
    """Inverse of `split`: the two axes ending at `axis` become one again, cut to `length`."""
    return blocks.flatten(axis - 1, axis).narrow(axis, 0, length)


def amax(blocks: torch.Tensor, axes: int | tuple[int, ...]) -> torch.Tensor:
    """max|x| over `axes` in float32, kept as axes of length 1; NaN is ignored, Inf is not (`fmaxf` on the GPU)."""
    magnitude = blocks.abs().nan_to_num_(nan=0.0, posinf=torch.inf)
    return magnitude.amax(axes, keepdim=True).float()
