"""AdamW on bf16 weights that keep their fp32 masters in two more bytes, one pass over memory.

A master weight is split without loss: with b its 32 bits, weight = (b + 0x8000) >> 16 (the bf16 nearest to it, halves away
from zero) and low = b & 0xFFFF. Back: b = (weight - (low >> 15)) << 16 | low. So weight and `low` together ARE the
master: 4 bytes instead of 2 + 4.

Step (Loshchilov and Hutter 2019, eq. as in torch.optim.AdamW), with G = gradient x scale:
    m = b1 m + (1 - b1) G;  v = b2 v + (1 - b2) G^2
    master = master (1 - lr wd) - lr / (1 - b1^t) m / (sqrt(v / (1 - b2^t)) + eps)

`scalars` ([5], on the device: scale, lr, 1 - b1^t, sqrt(1 - b2^t), keep) come from the device, so that clipping and
skipping a non-finite step need no host sync; keep = 0 leaves everything as it is.

Bytes per weight: read 2 (gradient) + 2 + 2 + 2 s (moments of s bytes), write 2 + 2 + 2 s: 26 with fp32 moments, 18 with
bf16 moments; 6 more where the gradient is an fp32 sum, which is read and cleared. The norm reads the gradient once before. About
20 operations: limited by memory. The kernels are in kernels/adamw_triton.py; here are their plain twins, which also define the order
of operations: the kernels give the same bits of the moments, and on a GPU weights that differ in the last bits of the update.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Tensors(NamedTuple):
    """What the step of one parameter touches: contiguous, of one size, on one device."""

    weight: Tensor  # bf16 with `low`, or fp32
    low: Tensor | None  # int16
    gradient: Tensor  # bf16 or fp32
    m: Tensor  # bf16 or fp32
    v: Tensor  # as m


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """(weight bf16, low int16) of an fp32 master, exactly invertible for finite values."""
    bits = master.contiguous().view(torch.int32)
    high = ((bits + 0x8000) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), bits.to(torch.int16)


def join_master(weight: Tensor, low: Tensor) -> Tensor:
    """The fp32 master of (weight bf16, low int16)."""
    low32 = low.to(torch.int32) & 0xFFFF
    high32 = weight.contiguous().view(torch.int16).to(torch.int32) - (low32 >> 15)
    return ((high32 << 16) | low32).view(torch.float32)


def step_scalars(
    norm: Tensor,
    rate: Tensor,
    attempted: Tensor,
    skipped: Tensor,
    skipped_in_a_row: Tensor,
    clip: float | None,
    b1: float,
    b2: float,
) -> Tensor:
    """The fp64 `scalars` of a step whose gradient has this norm; counts it. All arguments lie on the device, [].

    rate: fp64. attempted, skipped, skipped_in_a_row: int64, changed in place; a step counts as skipped if the norm is not finite.
    """
    keep = norm.isfinite()
    skipped += ~keep
    skipped_in_a_row.copy_(torch.where(keep, 0, skipped_in_a_row + 1))
    attempted += 1
    taken = (attempted - skipped).clamp(min=1).to(torch.float64)
    scale = torch.ones_like(norm) if clip is None else (norm.clamp(min=1e-30).reciprocal() * clip).clamp(max=1.0)
    return torch.stack([x.to(torch.float64) for x in (scale, rate, 1.0 - b1**taken, (1.0 - b2**taken).sqrt(), keep)])


def adamw_torch(
    master: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    scalars: Tensor,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """The plain twin: one AdamW step on master, m and v in place. Arithmetic in master's dtype, with one order of operations."""
    scale, lr, correction1, root_correction2, keep = scalars.to(master.dtype).unbind()
    g = gradient.to(master.dtype) * scale
    new_m = m.to(master.dtype) * b1 + g * (1.0 - b1)
    new_v = v.to(master.dtype) * b2 + g * g * (1.0 - b2)
    update = (new_m / correction1) / (new_v.sqrt() / root_correction2 + eps)
    new = master * (1.0 - lr * weight_decay) - lr * update
    kept = keep > 0
    m.copy_(torch.where(kept, new_m, m.to(master.dtype)))
    v.copy_(torch.where(kept, new_v, v.to(master.dtype)))
    master.copy_(torch.where(kept, new, master))


def adamw_split(weight: Tensor, low: Tensor | None, *step: Tensor | float) -> None:
    """`adamw_torch` on a weight that is its own master (low None), or on (bf16 weight, low) in place."""
    if low is None:
        adamw_torch(weight, *step)
        return
    master = join_master(weight, low)
    adamw_torch(master, *step)
    high, new_low = split_master(master)
    weight.copy_(high)
    low.copy_(new_low)
