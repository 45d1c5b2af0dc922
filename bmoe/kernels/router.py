"""The router in three kernels forward and three backward: logits, scores, top-k, weights, loads and both losses.

Shapes: T tokens, D width, E experts, K top-k, n real tokens (slots at or beyond n are a dummy tail), B token blocks, P parts.

Mathematics (fp32), per real token
    l_e = w_e x                        s = softmax(l) or sigmoid(l)           chosen: K largest of s + bias, lowest
    weight_k = s_k, or s_k / sum of the chosen s                              index first at ties
    balance = E / (n^2 K) sum_e counts_e sum_t p_te    p = s / sum_e s        z = 1/n sum_t logsumexp(l_t)^2
backward, with c_e = E counts_e / (n^2 K) dbalance and S the sum of the chosen s
    softmax   ds_e = c_e + [e chosen] (dweight_e - m) / S        dl = s (ds - sum ds s) + 2 dz logsumexp(l) / n softmax(l)
    sigmoid   ds_e = (c_e - sum c p) / sum s + [e chosen] (..)   dl = s (1 - s) ds + the same z term
    m = sum of dweight_k weight_k with normalised weights; without, S = 1 and m = 0
    dx = dl w,  dw = dl^T x
A slot of the tail gets the expert E ("no expert"), weight 0 and no gradient.

Exactness: a bf16 x times an fp32 weight is exact once the weight is split into three bf16 parts, so tensor cores give
the fp32 logits (the order of the sum aside) at the cost of reading x once. The weight is split in a launch of its own, and the
gradient of the logits where it is made: tiles then go from memory to the tensor cores past the registers. A plain fp32 product
would first write x in fp32 and then run outside the tensor cores. dx, which is rounded to bf16, takes the three largest of the
nine products of parts.

Bytes (bf16 x): forward 2 T D in, 4 T E + 12 T K out; backward 2 T D out for dx, 2 T D in for dw, 4 T E in, 6 T E out and in. The
experts read the same x: adding their gradient of it where dx is made costs 2 T D, and saves a pass over 6 T D.
FLOPs: 6 T D E each for logits, dx and dw; memory limits all of them up to E of about 100.

Measured on an H200 (T = 16,384; docs/kernels.md).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.operators import apply, operator
from bmoe.kernels.sizes import cdiv, next_power_of_2
from bmoe.kernels.sums import sum_parts

TOKENS = 64
"""Rows of the smallest tile of Hopper's matrix instruction."""

PROGRAMS = 128
"""Of the weight gradient: one for each multiprocessor of an H100 or H200 but four."""

SHARED = 216_000
"""Bytes of shared memory that a program's tiles on their way may take, of 227 KiB."""


@triton.jit
def _store_parts(value, parts, at, part_size, mask, PARTS: tl.constexpr):
    """fp32 `value` as a sum of PARTS numbers of the type of `parts`, each `part_size` behind the one before."""
    for _ in tl.static_range(PARTS):
        part = value.to(parts.dtype.element_ty)
        tl.store(parts + at, part, mask=mask)
        value -= part.to(tl.float32)
        parts += part_size


@triton.jit
def _split_kernel(weight_N, parts_PN, n, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _store_parts(tl.load(weight_N + at, mask=at < n, other=0.0), parts_PN, at, n, at < n, PARTS)


@triton.jit
def _scores(logits, real_expert, SIGMOID: tl.constexpr):
    """(scores, logsumexp): padding columns get score 0."""
    top = tl.max(tl.where(real_expert, logits, float("-inf")), axis=1)
    power = tl.where(real_expert, tl.exp(logits - top[:, None]), 0.0)
    total = tl.sum(power, axis=1)
    soft = power / total[:, None]
    if SIGMOID:
        scores = tl.where(real_expert, tl.sigmoid(logits), 0.0)
    else:
        scores = soft
    return scores, soft, top + tl.log(total)


@triton.jit
def _route_kernel(
    x_TD,
    weight_PED,
    bias_E,
    real_tokens,
    logits_TE,
    experts_TK,
    weights_TK,
    counts_BE,
    shares_BE,
    z_B,
    tokens,
    D: tl.constexpr,
    E: tl.constexpr,
    E_P2: tl.constexpr,
    K: tl.constexpr,
    K_P2: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    block = tl.program_id(0)
    token = block * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, E_P2)
    inside = (token < tokens)[:, None]
    real_expert = (expert < E)[None, :]
    logits = tl.zeros([BLOCK_T, E_P2], tl.float32)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        x = tl.load(x_TD + token[:, None].to(tl.int64) * D + d[None, :], mask=inside & (d < D)[None, :], other=0.0)
        for part in tl.static_range(PARTS):
            at = part * E * D + expert[None, :] * D + d[:, None]
            w = tl.load(weight_PED + at, mask=real_expert & (d < D)[:, None], other=0.0)
            logits = tl.dot(x, w, logits, input_precision="ieee")
    tl.store(logits_TE + token[:, None] * E + expert[None, :], logits, mask=inside & real_expert)

    scores, soft, log_total = _scores(logits, real_expert, SIGMOID)
    bias = tl.load(bias_E + expert, mask=expert < E, other=0.0)
    left = tl.where(real_expert, scores + bias[None, :], float("-inf"))
    chosen = tl.zeros([BLOCK_T, E_P2], tl.int32)
    column = tl.arange(0, K_P2)
    ids = tl.zeros([BLOCK_T, K_P2], tl.int64)
    weights = tl.zeros([BLOCK_T, K_P2], tl.float32)
    for k in tl.static_range(K):
        best = tl.argmax(left, axis=1, tie_break_left=True)
        hit = expert[None, :] == best[:, None]
        ids = tl.where(column[None, :] == k, best[:, None].to(tl.int64), ids)
        weights = tl.where(column[None, :] == k, tl.sum(tl.where(hit, scores, 0.0), axis=1)[:, None], weights)
        left = tl.where(hit, float("-inf"), left)
        chosen = tl.where(hit, 1, chosen)
    if NORMALIZE:
        weights = weights / tl.maximum(tl.sum(weights, axis=1), 1e-20)[:, None]
    real = (token < tl.load(real_tokens))[:, None] & inside
    at = token[:, None] * K + column[None, :]
    stored = inside & (column < K)[None, :]
    tl.store(experts_TK + at, tl.where(real, ids, E), mask=stored)
    tl.store(weights_TK + at, tl.where(real, weights, 0.0), mask=stored)

    shares = scores / tl.maximum(tl.sum(scores, axis=1), 1e-20)[:, None]
    row = block * E_P2 + expert
    tl.store(counts_BE + row, tl.sum(tl.where(real, chosen, 0), axis=0))
    tl.store(shares_BE + row, tl.sum(tl.where(real, shares, 0.0), axis=0))
    real_T = tl.sum(tl.where(real, 1, 0), axis=1) > 0
    tl.store(z_B + block, tl.sum(tl.where(real_T, log_total * log_total, 0.0), axis=0))


@triton.jit
def _route_finish_kernel(
    counts_BE,
    shares_BE,
    z_B,
    real_tokens,
    counts_E,
    balance,
    z,
    blocks,
    E: tl.constexpr,
    E_P2: tl.constexpr,
    K: tl.constexpr,
    CHUNK: tl.constexpr,
):
    expert = tl.arange(0, E_P2)
    counts = tl.zeros([E_P2], tl.int32)
    shares = tl.zeros([E_P2], tl.float32)
    square = tl.zeros([CHUNK], tl.float32)
    for first in range(0, blocks, CHUNK):
        b = first + tl.arange(0, CHUNK)
        at = b[:, None] * E_P2 + expert[None, :]
        counts += tl.sum(tl.load(counts_BE + at, mask=(b < blocks)[:, None], other=0), axis=0)
        shares += tl.sum(tl.load(shares_BE + at, mask=(b < blocks)[:, None], other=0.0), axis=0)
        square += tl.load(z_B + b, mask=b < blocks, other=0.0)
    n = tl.maximum(tl.load(real_tokens), 1).to(tl.float32)
    counts_f = counts.to(tl.float32)
    tl.store(counts_E + expert, counts_f, mask=expert < E)
    tl.store(balance, E * tl.sum(counts_f / (n * K) * (shares / n), axis=0))
    tl.store(z, tl.sum(square, axis=0) / n)


@triton.jit
def _route_backward_kernel(
    logits_TE,
    experts_TK,
    dweights_TK,
    counts_E,
    dbalance,
    dz,
    real_tokens,
    weight_PED,
    dthrough_TD,
    dlogits_PTE,
    dx_TD,
    tokens,
    THROUGH: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    E_P2: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert = tl.arange(0, E_P2)
    inside = (token < tokens)[:, None]
    real_expert = (expert < E)[None, :]
    real = (token < tl.load(real_tokens))[:, None] & inside
    n = tl.maximum(tl.load(real_tokens), 1).to(tl.float32)
    logits = tl.load(logits_TE + token[:, None] * E + expert[None, :], mask=inside & real_expert, other=0.0)
    scores, soft, log_total = _scores(logits, real_expert, SIGMOID)

    chosen = tl.zeros([BLOCK_T, E_P2], tl.float32)
    dchosen = tl.zeros([BLOCK_T, E_P2], tl.float32)
    for k in tl.static_range(K):
        e = tl.load(experts_TK + token * K + k, mask=token < tokens, other=E).to(tl.int32)
        dw = tl.load(dweights_TK + token * K + k, mask=token < tokens, other=0.0)
        hit = (expert[None, :] == e[:, None]) & real_expert
        chosen = tl.where(hit, 1.0, chosen)
        dchosen = tl.where(hit, dw[:, None], dchosen)
    if NORMALIZE:
        total = tl.maximum(tl.sum(chosen * scores, axis=1), 1e-20)[:, None]
        mean = tl.sum(dchosen * scores, axis=1)[:, None] / total
        dscores = chosen * (dchosen - mean) / total
    else:
        dscores = dchosen

    counts = tl.load(counts_E + expert, mask=expert < E, other=0.0)
    dshares = (E * tl.load(dbalance) * counts / (n * n * K))[None, :]
    if SIGMOID:
        total = tl.maximum(tl.sum(scores, axis=1), 1e-20)[:, None]
        dscores += (dshares - tl.sum(dshares * scores, axis=1)[:, None] / total) / total
        dlogits = dscores * scores * (1.0 - scores)
    else:
        dscores += dshares
        dlogits = scores * (dscores - tl.sum(dscores * scores, axis=1)[:, None])
    dlogits += soft * (2.0 * tl.load(dz) * log_total / n)[:, None]
    dlogits = tl.where(real & real_expert, dlogits, 0.0)
    _store_parts(dlogits, dlogits_PTE, token[:, None] * E + expert[None, :], tokens * E, inside & real_expert, PARTS)

    # dx is rounded to x's dtype. Of a bf16 pair of parts the products that are left out are 2^-16 of the whole.
    high = dlogits.to(dx_TD.dtype.element_ty)
    low = (dlogits - high.to(tl.float32)).to(dx_TD.dtype.element_ty)
    for first in range(0, D, BLOCK_D):
        d = first + tl.arange(0, BLOCK_D)
        at = token[:, None].to(tl.int64) * D + d[None, :]
        inside_D = inside & (d < D)[None, :]
        dx = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
        if THROUGH:
            dx += tl.load(dthrough_TD + at, mask=inside_D, other=0.0).to(tl.float32)
        w_p = weight_PED + expert[:, None] * D + d[None, :]
        real_w = (expert < E)[:, None] & (d < D)[None, :]
        w = tl.load(w_p, mask=real_w, other=0.0)
        dx = tl.dot(high, w, dx, input_precision="ieee")
        if PARTS > 1:
            dx = tl.dot(low, w, dx)
            dx = tl.dot(high, tl.load(w_p + E * D, mask=real_w, other=0.0), dx)
        tl.store(dx_TD + at, dx.to(dx_TD.dtype.element_ty), mask=inside_D)


@triton.jit
def _route_weight_kernel(
    dlogits_PTE,
    x_TD,
    partial_SED,
    tokens,
    tokens_of_split,
    D: tl.constexpr,
    E: tl.constexpr,
    E_P2: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    split = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    expert = tl.arange(0, E_P2)
    acc = tl.zeros([BLOCK_D, E_P2], tl.float32)
    start = split * tokens_of_split
    for first in range(start, start + tokens_of_split, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        x = tl.load(x_TD + t[None, :].to(tl.int64) * D + d[:, None], mask=(t < tokens)[None, :] & (d < D)[:, None], other=0.0)
        of_part = dlogits_PTE
        for _ in tl.static_range(PARTS):
            part = tl.load(of_part + t[:, None] * E + expert[None, :], mask=(t < tokens)[:, None] & (expert < E)[None, :], other=0.0)
            acc = tl.dot(x, part, acc, input_precision="ieee")
            of_part += tokens * E
    at = (split * E + expert[None, :]) * D + d[:, None]
    tl.store(partial_SED + at, acc, mask=(expert < E)[None, :] & (d < D)[:, None])


def _sizes(experts: int) -> int:
    return max(next_power_of_2(experts), 16)


class Tile(NamedTuple):
    """Sizes of a program's tile: for bf16 and 16 or 64 (padded) experts the fastest of a sweep on an H200, else what fits registers."""

    tokens: int
    columns: int
    warps: int
    stages: int


PLAIN = Tile(32, 32, 8, 2)
"""For fp32 x, whose products run outside the tensor cores."""


def _forward_tile(experts_p2: int, parts: int) -> Tile:
    if parts == 1:
        return PLAIN
    if experts_p2 < 64:
        return Tile(TOKENS, 128, 4, 3)
    tokens, columns = (2 * TOKENS, 64) if experts_p2 == 64 else (TOKENS, 32)
    return Tile(tokens, columns, 8, _stages(2 * columns * (tokens + 3 * experts_p2)))


def _backward_tile(experts_p2: int, parts: int) -> Tile:
    if parts == 1:
        return PLAIN
    if experts_p2 < 64:
        return Tile(TOKENS // 2, 128, 8, 2)
    return Tile(TOKENS, 128, 4, 2) if experts_p2 == 64 else Tile(TOKENS // 2, 64, 8, 2)


def _weight_tile(experts_p2: int, parts: int, width: int) -> Tile:
    if parts == 1:
        return PLAIN
    columns = 256 if width >= 1024 and experts_p2 <= 64 else 64
    return Tile(TOKENS, columns, 8 if columns == 256 else 4, _stages(2 * TOKENS * (columns + 3 * experts_p2)))


def _stages(bytes_each: int) -> int:
    return max(min(SHARED // bytes_each, 4), 1)


def _parts(dtype: torch.dtype) -> int:
    """How many numbers of `dtype` hold an fp32: bf16 has 8 of its 24 bits."""
    return 1 if dtype == torch.float32 else 3


def _forward_fake(x_TD, weight_ED, bias_E, real_tokens, top_k, sigmoid, normalize):
    tokens, experts = x_TD.shape[0], weight_ED.shape[0]
    new = weight_ED.new_empty
    experts_TK = x_TD.new_empty(tokens, top_k, dtype=torch.int64)
    weight_PED = x_TD.new_empty(_parts(x_TD.dtype), *weight_ED.shape)
    return experts_TK, new(tokens, top_k), new(()), new(()), new(experts), new(tokens, experts), weight_PED


@operator("router", _forward_fake)
def router_forward(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, real_tokens: Tensor, top_k: int, sigmoid: bool, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """experts_TK int64, weights_TK fp32, balance, z, counts_E fp32; for the backward logits_TE and the parts of the weight."""
    tokens, width = x_TD.shape
    experts = weight_ED.shape[0]
    new = weight_ED.new_empty
    experts_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=x_TD.device)
    weights_TK, logits_TE, counts_E = new(tokens, top_k), new(tokens, experts), new(experts)
    balance, z = new(()), new(())
    experts_p2 = _sizes(experts)
    parts = _parts(x_TD.dtype)
    tile = _forward_tile(experts_p2, parts)
    blocks = cdiv(tokens, tile.tokens)
    counts_BE = torch.empty(blocks, experts_p2, dtype=torch.int32, device=x_TD.device)
    shares_BE, z_B = new(blocks, experts_p2), new(blocks)
    weight_PED = x_TD.new_empty(parts, experts, width)
    if blocks:
        _split_kernel[(cdiv(weight_ED.numel(), 512),)](weight_ED.contiguous(), weight_PED, weight_ED.numel(), parts, 512, num_warps=4)
        _route_kernel[(blocks,)](
            x_TD.contiguous(), weight_PED, bias_E, real_tokens, logits_TE, experts_TK, weights_TK, counts_BE, shares_BE,
            z_B, tokens, width, experts, experts_p2, top_k, next_power_of_2(top_k), sigmoid, normalize, parts,
            tile.tokens, tile.columns, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    chunk = max(4096 // experts_p2, 1)
    _route_finish_kernel[(1,)](counts_BE, shares_BE, z_B, real_tokens, counts_E, balance, z, blocks, experts, experts_p2, top_k, chunk)
    return experts_TK, weights_TK, balance, z, counts_E, logits_TE, weight_PED


def _backward_fake(dthrough_TD, dweights_TK, dbalance, dz, x_TD, real_tokens, experts_TK, counts_E, logits_TE, weight_PED, *_):
    return x_TD.new_empty(x_TD.shape), logits_TE.new_empty(weight_PED.shape[1:])


@operator("router_backward", _backward_fake)
def router_backward(
    dthrough_TD: Tensor | None,
    dweights_TK: Tensor,
    dbalance: Tensor,
    dz: Tensor,
    x_TD: Tensor,
    real_tokens: Tensor,
    experts_TK: Tensor,
    counts_E: Tensor,
    logits_TE: Tensor,
    weight_PED: Tensor,
    sigmoid: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """dx_TD in x's dtype, `dthrough_TD` included; dweight_ED fp32."""
    (tokens, width), (parts, experts, _) = x_TD.shape, weight_PED.shape
    experts_p2 = _sizes(experts)
    x_TD = x_TD.contiguous()
    dx_TD = torch.empty_like(x_TD)
    through = dthrough_TD is not None
    dthrough_TD = dthrough_TD.contiguous() if through else x_TD
    if tokens == 0:
        return dx_TD, logits_TE.new_zeros(experts, width)
    dlogits_PTE = x_TD.new_empty(parts, tokens, experts)
    tile = _backward_tile(experts_p2, parts)
    _route_backward_kernel[(cdiv(tokens, tile.tokens),)](
        logits_TE, experts_TK, dweights_TK.contiguous(), counts_E, dbalance, dz, real_tokens, weight_PED, dthrough_TD, dlogits_PTE,
        dx_TD, tokens, through, width, experts, experts_p2, experts_TK.shape[1], sigmoid, normalize, parts,
        tile.tokens, tile.columns, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    tile = _weight_tile(experts_p2, parts, width)
    columns = cdiv(width, tile.columns)
    splits = min(cdiv(tokens, tile.tokens), max(PROGRAMS // columns, 1))
    tokens_of_split = cdiv(cdiv(tokens, splits), tile.tokens) * tile.tokens
    partial_SED = logits_TE.new_empty(splits, experts, width)
    _route_weight_kernel[(splits, columns)](
        dlogits_PTE, x_TD, partial_SED, tokens, tokens_of_split, width, experts, experts_p2, parts, tile.tokens, tile.columns,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dx_TD, sum_parts(partial_SED, logits_TE.dtype)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_ED, bias_E, real_tokens, top_k, sigmoid, normalize):
        experts_TK, weights_TK, balance, z, counts_E, logits_TE, weight_PED = router_forward(
            x_TD, weight_ED, bias_E, real_tokens, top_k, sigmoid, normalize
        )
        ctx.sigmoid, ctx.normalize = sigmoid, normalize
        ctx.save_for_backward(x_TD, real_tokens, experts_TK, counts_E, logits_TE, weight_PED)
        ctx.mark_non_differentiable(experts_TK, counts_E)
        return experts_TK, weights_TK, balance, z, counts_E

    @staticmethod
    def backward(ctx, _, dweights_TK, dbalance, dz, __):
        dx_TD, dweight_ED = router_backward(None, dweights_TK, dbalance, dz, *ctx.saved_tensors, ctx.sigmoid, ctx.normalize)
        return dx_TD, dweight_ED, None, None, None, None, None


class _RouteThrough(torch.autograd.Function):
    """`_Route`, and x as an output whose gradient the backward pass adds to its own."""

    @staticmethod
    def forward(ctx, x_TD, *rest):
        return *_Route.forward(ctx, x_TD, *rest), x_TD.view_as(x_TD)

    @staticmethod
    def backward(ctx, _, dweights_TK, dbalance, dz, __, dthrough_TD):
        dx_TD, dweight_ED = router_backward(dthrough_TD, dweights_TK, dbalance, dz, *ctx.saved_tensors, ctx.sigmoid, ctx.normalize)
        return dx_TD, dweight_ED, None, None, None, None, None


def route(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor,
    real_tokens: Tensor,
    top_k: int,
    score: str = "softmax",
    normalize: bool = True,
    through: bool = False,
) -> tuple[Tensor, ...]:
    """Route T tokens: experts_TK int64, weights_TK, balance [], z [], counts_E (fp32), see the top of the file.

    x_TD bf16 or fp32; weight_ED, bias_E (moves the choice only) fp32; real_tokens int64 [] on the device. Differentiable
    in x_TD and weight_ED through weights, balance and z. One graph under torch.compile, nothing read on the host.
    `through` returns x_TD as a sixth: who reads x there has its gradient added in the router's backward pass.
    """
    function = _RouteThrough if through else _Route
    return apply(function, x_TD, weight_ED, bias_E, real_tokens, top_k, score == "sigmoid", normalize)


def route_reference(
    x_TD: Tensor,
    weight_ED: Tensor,
    bias_E: Tensor,
    real_tokens: Tensor,
    top_k: int,
    score: str = "softmax",
    normalize: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Plain-torch twin of `route`, in the dtype of weight_ED."""
    experts = weight_ED.shape[0]
    n = real_tokens.clamp(min=1)
    real_T1 = (torch.arange(x_TD.shape[0], device=x_TD.device) < real_tokens)[:, None]
    logits_TE = x_TD.to(weight_ED.dtype) @ weight_ED.T
    scores_TE = logits_TE.sigmoid() if score == "sigmoid" else logits_TE.softmax(-1)
    experts_TK = (scores_TE.detach() + bias_E).topk(top_k, dim=-1).indices
    weights_TK = scores_TE.gather(1, experts_TK)
    if normalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True).clamp(min=1e-20)
    experts_TK = experts_TK.masked_fill(~real_T1, experts)
    ids_E = torch.arange(experts, device=x_TD.device)
    counts_E = (experts_TK[:, :, None] == ids_E).sum((0, 1)).to(weight_ED.dtype)
    shares_TE = (scores_TE / scores_TE.sum(-1, keepdim=True).clamp(min=1e-20)).masked_fill(~real_T1, 0.0)
    balance = experts * (counts_E / (n * top_k) * shares_TE.sum(0) / n).sum()
    z = logits_TE.logsumexp(-1).square().masked_fill(~real_T1[:, 0], 0.0).sum() / n
    return experts_TK, weights_TK.masked_fill(~real_T1, 0.0), balance, z, counts_E
