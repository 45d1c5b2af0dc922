"""The AdamW step of kernels/adamw.py as one Triton kernel: mathematics, layout and bytes are explained there."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _adamw_kernel(
    weight_p,
    low_p,
    gradient_p,
    m_p,
    v_p,
    scalars_p,
    n,
    b1,
    b2,
    eps,
    weight_decay,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    if tl.load(scalars_p + 4) > 0:
        scale = tl.load(scalars_p)
        lr = tl.load(scalars_p + 1)
        correction1 = tl.load(scalars_p + 2)
        root_correction2 = tl.load(scalars_p + 3)
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        g = tl.load(gradient_p + at, mask=inside, other=0.0).to(tl.float32) * scale
        m = tl.load(m_p + at, mask=inside, other=0.0).to(tl.float32) * b1 + g * (1.0 - b1)
        v = tl.load(v_p + at, mask=inside, other=0.0).to(tl.float32) * b2 + g * g * (1.0 - b2)
        if SPLIT:
            low = tl.load(low_p + at, mask=inside, other=0).to(tl.int32) & 0xFFFF
            high = tl.load(weight_p + at, mask=inside, other=0).to(tl.int32)
            master = (((high - (low >> 15)) << 16) | low).to(tl.float32, bitcast=True)
        else:
            master = tl.load(weight_p + at, mask=inside, other=0.0)
        update = (m / correction1) / (tl.sqrt(v) / root_correction2 + eps)
        master = master * (1.0 - lr * weight_decay) - lr * update
        tl.store(m_p + at, m.to(m_p.dtype.element_ty), mask=inside)
        tl.store(v_p + at, v.to(v_p.dtype.element_ty), mask=inside)
        if SPLIT:
            bits = master.to(tl.int32, bitcast=True)
            tl.store(low_p + at, bits.to(tl.int16), mask=inside)
            tl.store(weight_p + at, ((bits + 0x8000) >> 16).to(tl.int16), mask=inside)
        else:
            tl.store(weight_p + at, master, mask=inside)


def adamw_triton(
    weight: Tensor,
    low: Tensor | None,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    scalars: Tensor,
    b1: float,
    b2: float,
    eps: float,
    weight_decay: float,
) -> None:
    """One AdamW step in place. `weight` is bf16 with `low` int16, or fp32 with low None. All contiguous, any shape."""
    n = weight.numel()
    view = weight if low is None else weight.view(torch.int16)
    _adamw_kernel[(triton.cdiv(n, BLOCK),)](
        view,
        view if low is None else low,
        gradient,
        m,
        v,
        scalars,
        n,
        b1,
        b2,
        eps,
        weight_decay,
        SPLIT=low is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
