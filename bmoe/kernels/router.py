"""The router in two kernels forward and four backward: logits, scores, top-k, weights, loads and both losses.

Shapes: T tokens, D width, E experts, K top-k, n real tokens (slots at or beyond n are a dummy tail), B token blocks.

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
the fp32 logits (the order of the sum aside) at the cost of reading x once. A plain fp32 product would first write x in
fp32 and then run outside the tensor cores.

Bytes: forward 2 T D in, 4 T E + 12 T K out; backward 2 T D out for dx, 2 T D in for dw, 4 T E four times. The experts read
the same x: adding their gradient of it where dx is made costs 2 T D, and saves a pass over 6 T D.
FLOPs: 6 T D E each for logits, 2 T D E for dx, 4 T D E for dw; memory limits all of them up to E of about 100.

Measured on an H200 (T = 16,384, D = 1280; GPU time): forward 21 us for 8 experts and 39 us for 64 (floor 11), weight
gradient 19 and 33 us (floor 10). docs/kernels.md has the rest.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.operators import operator
from bmoe.kernels.sizes import cdiv, next_power_of_2
from bmoe.kernels.sums import sum_parts

TOKENS = 64
"""Tokens of one program: the smallest tile of Hopper's matrix instruction."""


@triton.jit
def _dot_exact(x, w, acc):
    """acc + x w for bf16 x and fp32 w, by three bf16 parts of w; plain fp32 for fp32 x."""
    if x.dtype == tl.float32:
        acc = tl.dot(x, w, acc, input_precision="ieee")
    else:
        high = w.to(x.dtype)
        rest = w - high.to(tl.float32)
        middle = rest.to(x.dtype)
        low = (rest - middle.to(tl.float32)).to(x.dtype)
        acc = tl.dot(x, low, acc)
        acc = tl.dot(x, middle, acc)
        acc = tl.dot(x, high, acc)
    return acc


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
    weight_ED,
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
        w = tl.load(weight_ED + expert[None, :] * D + d[:, None], mask=real_expert & (d < D)[:, None], other=0.0)
        logits = _dot_exact(x, w, logits)
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
    dlogits_TE,
    tokens,
    E: tl.constexpr,
    E_P2: tl.constexpr,
    K: tl.constexpr,
    SIGMOID: tl.constexpr,
    NORMALIZE: tl.constexpr,
    BLOCK_T: tl.constexpr,
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
    tl.store(dlogits_TE + token[:, None] * E + expert[None, :], dlogits, mask=inside & real_expert)


@triton.jit
def _route_input_kernel(
    dlogits_TE,
    weight_ED,
    dthrough_TD,
    dx_TD,
    tokens,
    THROUGH: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    E_P2: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    expert = tl.arange(0, E_P2)
    inside = (token < tokens)[:, None]
    dlogits = tl.load(dlogits_TE + token[:, None] * E + expert[None, :], mask=inside & (expert < E)[None, :], other=0.0)
    w = tl.load(weight_ED + expert[:, None] * D + d[None, :], mask=(expert < E)[:, None] & (d < D)[None, :], other=0.0)
    # dx is rounded to x's dtype: for bf16, tf32 products are four times finer than that rounding.
    if dx_TD.dtype.element_ty == tl.float32:
        dx = tl.dot(dlogits, w, input_precision="ieee")
    else:
        dx = tl.dot(dlogits, w, input_precision="tf32")
    at = token[:, None].to(tl.int64) * D + d[None, :]
    if THROUGH:
        dx += tl.load(dthrough_TD + at, mask=inside & (d < D)[None, :], other=0.0).to(tl.float32)
    tl.store(dx_TD + at, dx.to(dx_TD.dtype.element_ty), mask=inside & (d < D)[None, :])


@triton.jit
def _route_weight_kernel(
    dlogits_TE,
    x_TD,
    partial_SED,
    tokens,
    tokens_of_split,
    D: tl.constexpr,
    E: tl.constexpr,
    E_P2: tl.constexpr,
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
        dlogits = tl.load(
            dlogits_TE + t[:, None] * E + expert[None, :],
            mask=(t < tokens)[:, None] & (expert < E)[None, :],
            other=0.0,
        )
        acc = _dot_exact(x, dlogits, acc)
    at = (split * E + expert[None, :]) * D + d[:, None]
    tl.store(partial_SED + at, acc, mask=(expert < E)[None, :] & (d < D)[:, None])


def _sizes(experts: int) -> int:
    return max(next_power_of_2(experts), 16)


def _warps(experts_p2: int) -> int:
    """Eight where four would spill: a [64, 64] tile of several fp32 arrays."""
    return 8 if experts_p2 >= 64 else 4


def _forward_fake(x_TD, weight_ED, bias_E, real_tokens, top_k, sigmoid, normalize):
    tokens, experts = x_TD.shape[0], weight_ED.shape[0]
    new = weight_ED.new_empty
    experts_TK = x_TD.new_empty(tokens, top_k, dtype=torch.int64)
    return experts_TK, new(tokens, top_k), new(()), new(()), new(experts), new(tokens, experts)


@operator("router", _forward_fake)
def router_forward(
    x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor, real_tokens: Tensor, top_k: int, sigmoid: bool, normalize: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """experts_TK int64, weights_TK fp32, balance, z, counts_E fp32, and logits_TE for the backward."""
    tokens, width = x_TD.shape
    experts = weight_ED.shape[0]
    new = weight_ED.new_empty
    experts_TK = torch.empty(tokens, top_k, dtype=torch.int64, device=x_TD.device)
    weights_TK, logits_TE, counts_E = new(tokens, top_k), new(tokens, experts), new(experts)
    balance, z = new(()), new(())
    blocks = cdiv(tokens, TOKENS)
    experts_p2 = _sizes(experts)
    counts_BE = torch.empty(blocks, experts_p2, dtype=torch.int32, device=x_TD.device)
    shares_BE, z_B = new(blocks, experts_p2), new(blocks)
    if blocks:
        _route_kernel[(blocks,)](
            x_TD.contiguous(), weight_ED, bias_E, real_tokens, logits_TE, experts_TK, weights_TK, counts_BE, shares_BE,
            z_B, tokens, width, experts, experts_p2, top_k, next_power_of_2(top_k), sigmoid, normalize, TOKENS,
            64, num_warps=_warps(experts_p2), num_stages=4,
        )  # fmt: skip
    chunk = max(4096 // experts_p2, 1)
    _route_finish_kernel[(1,)](counts_BE, shares_BE, z_B, real_tokens, counts_E, balance, z, blocks, experts, experts_p2, top_k, chunk)
    return experts_TK, weights_TK, balance, z, counts_E, logits_TE


def _backward_fake(dthrough_TD, dweights_TK, dbalance, dz, x_TD, weight_ED, *_):
    return x_TD.new_empty(x_TD.shape), torch.empty_like(weight_ED)


@operator("router_backward", _backward_fake)
def router_backward(
    dthrough_TD: Tensor | None,
    dweights_TK: Tensor,
    dbalance: Tensor,
    dz: Tensor,
    x_TD: Tensor,
    weight_ED: Tensor,
    real_tokens: Tensor,
    experts_TK: Tensor,
    counts_E: Tensor,
    logits_TE: Tensor,
    sigmoid: bool,
    normalize: bool,
) -> tuple[Tensor, Tensor]:
    """dx_TD in x's dtype, `dthrough_TD` included; dweight_ED fp32."""
    tokens, width = x_TD.shape
    experts, experts_p2 = weight_ED.shape[0], _sizes(weight_ED.shape[0])
    x_TD = x_TD.contiguous()
    dx_TD = torch.empty_like(x_TD)
    through = dthrough_TD is not None
    dthrough_TD = dthrough_TD.contiguous() if through else x_TD
    if tokens == 0:
        return dx_TD, torch.zeros_like(weight_ED)
    dlogits_TE = torch.empty_like(logits_TE)
    blocks = cdiv(tokens, TOKENS)
    block_t = max(min(2048 // experts_p2, TOKENS), 8)  # more would not fit into registers
    _route_backward_kernel[(cdiv(tokens, block_t),)](
        logits_TE, experts_TK, dweights_TK.contiguous(), counts_E, dbalance, dz, real_tokens, dlogits_TE, tokens,
        experts, experts_p2, experts_TK.shape[1], sigmoid, normalize, block_t,
        num_warps=_warps(experts_p2),
    )  # fmt: skip
    block_d = 128 if width >= 128 else 64
    _route_input_kernel[(blocks, cdiv(width, block_d))](
        dlogits_TE, weight_ED, dthrough_TD, dx_TD, tokens, through, width, experts, experts_p2, TOKENS, block_d, num_warps=4
    )
    splits = min(blocks, 32)
    tokens_of_split = cdiv(cdiv(tokens, splits), TOKENS) * TOKENS
    partial_SED = weight_ED.new_empty(splits, experts, width)
    _route_weight_kernel[(splits, cdiv(width, block_d))](
        dlogits_TE, x_TD, partial_SED, tokens, tokens_of_split, width, experts, experts_p2, TOKENS, block_d,
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return dx_TD, sum_parts(partial_SED, weight_ED.dtype)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_ED, bias_E, real_tokens, top_k, sigmoid, normalize):
        experts_TK, weights_TK, balance, z, counts_E, logits_TE = router_forward(
            x_TD, weight_ED, bias_E, real_tokens, top_k, sigmoid, normalize
        )
        ctx.sigmoid, ctx.normalize = sigmoid, normalize
        ctx.save_for_backward(x_TD, weight_ED, real_tokens, experts_TK, counts_E, logits_TE)
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
    return (_RouteThrough if through else _Route).apply(x_TD, weight_ED, bias_E, real_tokens, top_k, score == "sigmoid", normalize)


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
