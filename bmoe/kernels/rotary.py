"""Rotary positions in one pass: from the projection's rows to queries and keys, and back in the projection's gradient.

Shapes: T tokens, H query heads, G key and value heads, d head dimension, A = H + 2G heads of the projection.

Mathematics, for the pair (i, i + d/2) of every head of token t with angle a_ti: (x, y) -> (x cos a - y sin a, y cos a + x sin a).
The derivative of a rotation is the rotation back. Attention writes the gradients of queries, keys and values into their places in
the projection's gradient, where those of queries and keys are turned in place: no concatenation, and values are not touched.

Rows at or beyond cu_seqlens[-1] belong to no sequence and are not written by attention: both passes also clear them where
attention leaves them open, in its output before it and in the gradient behind it.

Bytes (bf16): forward 2 (H + G) d T in and out; backward the same. 6 operations per pair: memory limits both.
"""

import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.sizes import cdiv, next_power_of_2


@triton.jit
def _turn_kernel(
    source,
    target,
    cleared_THd,
    end_p,
    cos_Th,
    sin_Th,
    tokens,
    heads,
    turned,
    queries,
    source_token,
    target_token,
    HALF: tl.constexpr,
    HALF_P2: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    BACK: tl.constexpr,
):
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS))[:, None, None]
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[None, :, None]
    i = tl.arange(0, HALF_P2)[None, None, :]
    real = token < tl.load(end_p)
    known = (token < tokens) & (i < HALF)
    inside = known & (head < turned)
    at = token.to(tl.int64) * source_token + head * (2 * HALF) + i
    low = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + at + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_Th + token * HALF + i, mask=known, other=0.0)
    sin = tl.load(sin_Th + token * HALF + i, mask=known, other=0.0)
    if BACK:
        sin = -sin
    low, high = low * cos - high * sin, high * cos + low * sin
    stored = inside
    if BACK:
        low, high = tl.where(real, low, 0.0), tl.where(real, high, 0.0)
        stored = known & (head < heads) & ((head < turned) | (token >= tl.load(end_p)))
    else:
        open_p = cleared_THd + (token.to(tl.int64) * queries + head) * (2 * HALF) + i
        open_rows = known & (head < queries) & (token >= tl.load(end_p))
        nothing = tl.zeros([TOKENS, HEADS, HALF_P2], cleared_THd.dtype.element_ty)
        tl.store(open_p, nothing, mask=open_rows)
        tl.store(open_p + HALF, nothing, mask=open_rows)
    to = token.to(tl.int64) * target_token + head * (2 * HALF) + i
    tl.store(target + to, low.to(target.dtype.element_ty), mask=stored)
    tl.store(target + to + HALF, high.to(target.dtype.element_ty), mask=stored)


def _turn(source, target, cleared_THd, cu_seqlens, cos_Th, sin_Th, heads: int, turned: int, queries: int, back: bool) -> None:
    """The first `turned` heads of `source` into `target`, both [T, heads or more, d] with contiguous rows."""
    tokens, _, d = source.shape
    if tokens == 0:
        return
    half = d // 2
    half_p2 = next_power_of_2(half)
    head_block = min(next_power_of_2(heads), max(1, 512 // half_p2))
    token_block = max(1, 2048 // (half_p2 * head_block))
    _turn_kernel[(cdiv(tokens, token_block), cdiv(heads, head_block))](
        source, target, cleared_THd, cu_seqlens[-1:], cos_Th, sin_Th, tokens, heads, turned, queries, source.stride(0), target.stride(0),
        HALF=half, HALF_P2=half_p2, TOKENS=token_block, HEADS=head_block, BACK=back, num_warps=4,
    )  # fmt: skip


def queries_and_keys(
    qkv_TAd: Tensor, groups: int, cos_Th: Tensor, sin_Th: Tensor, cu_seqlens: Tensor, qk_Tad: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Turned queries and keys [T, H + G, d] of a contiguous projection [T, H + 2G, d], and memory [T, H, d] for attention's
    output, where only the rows of no sequence are filled, with zeros. Angles contiguous fp32 [T, d/2]. They are written into
    contiguous `qk_Tad` where it is given."""
    T, A, d = qkv_TAd.shape
    queries, turned = A - 2 * groups, A - groups
    qk_Tad = qkv_TAd.new_empty(T, turned, d) if qk_Tad is None else qk_Tad
    out_THd = qkv_TAd.new_empty(T, queries, d)
    _turn(qkv_TAd, qk_Tad, out_THd, cu_seqlens, cos_Th, sin_Th, turned, turned, queries, back=False)
    return qk_Tad, out_THd


def turn_back(dqkv_TAd: Tensor, groups: int, cos_Th: Tensor, sin_Th: Tensor, cu_seqlens: Tensor) -> None:
    """From the gradients of turned queries, turned keys and values, in place, to that of the projection: contiguous
    [T, H + 2G, d]. Rows of no sequence may hold anything and become zero."""
    heads = dqkv_TAd.shape[1]
    _turn(dqkv_TAd, dqkv_TAd, dqkv_TAd, cu_seqlens, cos_Th, sin_Th, heads, heads - groups, 0, back=True)
