"""Rotary positions in one pass: from the projection's rows to queries and keys, and back from their gradients.

Shapes: T tokens, H query heads, G key and value heads, d head dimension, A = H + 2G heads of the projection.

Mathematics, for the pair (i, i + d/2) of every head of token t with angle a_ti: (x, y) -> (x cos a - y sin a, y cos a + x sin a).
The derivative of a rotation is the rotation back, so the backward pass is the same kernel with -sin; it writes the gradients of
queries, keys and values into their places in the projection's gradient, which needs no concatenation.

Bytes (bf16): forward 2 (H + G) d T in and out; backward 2 A d T in and out. 6 operations per pair: memory limits both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _turn_kernel(
    source,
    target,
    cos_Th,
    sin_Th,
    tokens,
    heads,
    source_token,
    source_head,
    target_token,
    target_head,
    HALF: tl.constexpr,
    HALF_P2: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    SIGN: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[None, :, None]
    i = tl.arange(0, HALF_P2)[None, None, :]
    inside = (token < tokens) & (head < heads) & (i < HALF)
    at = token.to(tl.int64) * source_token + head * source_head + i
    low = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + at + HALF, mask=inside, other=0.0).to(tl.float32)
    if SIGN != 0:
        angle = token * HALF + i
        known = (token < tokens) & (i < HALF)
        cos = tl.load(cos_Th + angle, mask=known, other=0.0)
        sin = tl.load(sin_Th + angle, mask=known, other=0.0) * SIGN
        low, high = low * cos - high * sin, high * cos + low * sin
    to = token.to(tl.int64) * target_token + head * target_head + i
    tl.store(target + to, low.to(target.dtype.element_ty), mask=inside)
    tl.store(target + to + HALF, high.to(target.dtype.element_ty), mask=inside)


def _turn(source_Tad: Tensor, target_Tad: Tensor, cos_Th: Tensor, sin_Th: Tensor, sign: int) -> None:
    """Heads of `source` turned by sign x angle into `target`; 0 copies. Both [T, a, d] with contiguous head vectors."""
    tokens, heads, d = source_Tad.shape
    half = d // 2
    half_p2 = triton.next_power_of_2(half)
    head_block = min(triton.next_power_of_2(heads), max(1, 512 // half_p2))
    token_block = max(1, 2048 // (half_p2 * head_block))
    _turn_kernel[(triton.cdiv(tokens, token_block), triton.cdiv(heads, head_block))](
        source_Tad,
        target_Tad,
        cos_Th,
        sin_Th,
        tokens,
        heads,
        source_Tad.stride(0),
        source_Tad.stride(1),
        target_Tad.stride(0),
        target_Tad.stride(1),
        HALF=half,
        HALF_P2=half_p2,
        TOKENS=token_block,
        HEADS=head_block,
        SIGN=sign,
        num_warps=4,
    )


def queries_and_keys(qkv_TAd: Tensor, groups: int, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    """Turned queries and keys [T, H + G, d] of a projection [T, H + 2G, d]; angles contiguous fp32 [T, d/2]."""
    turned = qkv_TAd[:, : qkv_TAd.shape[1] - groups]
    out = torch.empty(turned.shape, dtype=qkv_TAd.dtype, device=qkv_TAd.device)
    _turn(turned, out, cos_Th, sin_Th, 1)
    return out


def projection_gradient(dq_THd: Tensor, dk_TGd: Tensor, dv_TGd: Tensor, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    """The gradient [T, H + 2G, d] of the projection from those of turned queries, turned keys and values."""
    T, H, d = dq_THd.shape
    G = dk_TGd.shape[1]
    out = dq_THd.new_empty(T, H + 2 * G, d)
    _turn(dq_THd, out[:, :H], cos_Th, sin_Th, -1)
    _turn(dk_TGd, out[:, H : H + G], cos_Th, sin_Th, -1)
    _turn(dv_TGd, out[:, H + G :], cos_Th, sin_Th, 0)
    return out
