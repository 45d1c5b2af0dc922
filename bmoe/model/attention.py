"""Self-attention over packed sequences: rotary positions, grouped-query attention, and one packed kernel interface.

Legend: T tokens, D width, H query heads, G key and value heads, d head dimension, S sequences.

Several sequences lie one after the other in T, and `cu_seqlens` [S + 1] says where each starts; a token attends to
its own sequence only. Rows at or beyond `cu_seqlens[-1]` (the dummy tail) belong to no sequence: their output and
their gradients are zero.
"""

import inspect

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from bmoe.errors import RequestError
from bmoe.model.layers import Layout, Linear, Norm, wide

# ---------------------------------------------------------------------------------------------------------------------
# Rotary positions


class Rotary(nn.Module):
    """Rotary position embedding (Su et al. 2021) in the rotate-halves form of ESM-2 and Llama.

    The inverse frequencies are a saved buffer, not a constant: published ESM-2 checkpoints hold their own.
    """

    def __init__(self, head_dim: int, base: float):
        super().__init__()
        self.head_dim, self.base = head_dim, base
        self.register_buffer("inverse_frequency", torch.empty(head_dim // 2))

    def initialize(self) -> None:
        """Fill the buffer with base^(-2 i / d)."""
        even = torch.arange(0, self.head_dim, 2, device=self.inverse_frequency.device).float()
        self.inverse_frequency.copy_(1.0 / self.base ** (even / self.head_dim))

    def _apply(self, fn, recurse: bool = True):
        """Follow a move to another device, and a cast only if it does not narrow: bf16 angles would be garbage."""
        return super()._apply(lambda t: _never_narrow(fn, t), recurse)

    def forward(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, d/2] of the angles, at least fp32."""
        angles = positions_T[:, None].to(self.inverse_frequency.dtype) * self.inverse_frequency
        return angles.cos(), angles.sin()


def _never_narrow(fn, tensor: Tensor) -> Tensor:
    out = fn(tensor)
    return tensor.to(out.device) if out.dtype in (torch.bfloat16, torch.float16) else out


class _Rotate(torch.autograd.Function):
    """By hand because the derivative of a rotation is the rotation back: half the passes of the derived one."""

    @staticmethod
    def forward(ctx, x_THd, cos_Th, sin_Th):
        ctx.save_for_backward(cos_Th, sin_Th)
        return _turn(x_THd, cos_Th, sin_Th)

    @staticmethod
    def backward(ctx, grad_THd):
        cos_Th, sin_Th = ctx.saved_tensors
        return _turn(grad_THd, cos_Th, -sin_Th), None, None


def _turn(x_THd: Tensor, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    cos, sin = cos_Th[:, None], sin_Th[:, None]
    low, high = wide(x_THd).chunk(2, dim=-1)
    turned = torch.cat((torch.addcmul(low * cos, high, sin, value=-1), torch.addcmul(high * cos, low, sin)), dim=-1)
    return turned.to(x_THd.dtype)


def rotate(x_THd: Tensor, cos_Th: Tensor, sin_Th: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of every head by their angles [T, d/2]; computed in the angles' precision."""
    return _Rotate.apply(x_THd, cos_Th, sin_Th)


# ---------------------------------------------------------------------------------------------------------------------
# The packed interface


def attention(
    q_THd: Tensor,
    k_TGd: Tensor,
    v_TGd: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    causal: bool,
    kind: str = "auto",
    tail: bool = True,
) -> Tensor:
    """softmax(q k^T / sqrt(d)) v within each sequence; returns [T, H, d] in q's dtype.

    `max_seqlen` bounds the sequences' lengths and may exceed all of them. `tail`: rows of no sequence are possible.
    `kind`: `varlen` is torch's variable-length flash attention (CUDA, bf16 or fp16), `sdpa` one exact call a
    sequence (any device and dtype; waits for the device on CUDA), `auto` the first where it runs. Raises
    RequestError for `varlen` where it cannot run.
    """
    fits = q_THd.is_cuda and q_THd.dtype in (torch.bfloat16, torch.float16)
    if kind == "varlen" and not fits:
        raise RequestError(
            f"backend.attention: varlen needs a GPU and bf16, and this is {q_THd.dtype} on {q_THd.device.type}; use auto or sdpa"
        )
    if fits and kind != "sdpa":
        return _varlen(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, causal, tail)
    repeats = q_THd.shape[1] // k_TGd.shape[1]
    if repeats > 1:
        k_TGd, v_TGd = k_TGd.repeat_interleave(repeats, dim=1), v_TGd.repeat_interleave(repeats, dim=1)
    if q_THd.is_cuda:
        return _sdpa_per_sequence(q_THd, k_TGd, v_TGd, cu_seqlens, causal)
    return _FlashPerSequence.apply(q_THd, k_TGd, v_TGd, cu_seqlens, causal)


# torch 2.10 takes `is_causal`, later releases a window; `enable_gqa` came in between. Read once: torch.compile traces the use.
_VARLEN_OPTIONS = inspect.signature(varlen_attn).parameters
_VARLEN_CAUSAL = {"is_causal": True} if "is_causal" in _VARLEN_OPTIONS else {"window_size": (-1, 0)}
_VARLEN_GROUPS = "enable_gqa" in _VARLEN_OPTIONS


def _varlen(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, causal, tail) -> Tensor:
    """The kernel leaves tail rows of its outputs unwritten, so both sides of it are cleaned by selection, not by a product."""
    repeats = q_THd.shape[1] // k_TGd.shape[1]
    options = dict(_VARLEN_CAUSAL) if causal else {}
    if repeats > 1 and _VARLEN_GROUPS:
        options["enable_gqa"] = True
    elif repeats > 1:
        k_TGd, v_TGd = k_TGd.repeat_interleave(repeats, dim=1), v_TGd.repeat_interleave(repeats, dim=1)
    if not tail:
        return varlen_attn(q_THd, k_TGd, v_TGd, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
    inside_T11 = (torch.arange(q_THd.shape[0], device=q_THd.device) < cu_seqlens[-1])[:, None, None]
    q, k, v = (torch.where(inside_T11, x, 0) for x in (q_THd, k_TGd, v_TGd))
    out_THd = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
    return torch.where(inside_T11, out_THd, 0)


def _sdpa_per_sequence(q_THd, k_THd, v_THd, cu_seqlens, causal) -> Tensor:
    bounds = cu_seqlens.tolist()
    out = [
        F.scaled_dot_product_attention(*(_heads_first(x, start, end) for x in (q_THd, k_THd, v_THd)), is_causal=causal)
        for start, end in zip(bounds, bounds[1:], strict=False)
        if end > start
    ]
    out = [x[0].transpose(0, 1) for x in out]
    return torch.cat([*out, torch.zeros_like(q_THd[bounds[-1] :])])


def _heads_first(x_THd: Tensor, start: int, end: int) -> Tensor:
    return x_THd[start:end].transpose(0, 1)[None]


def _runs(bounds: list[int]) -> list[tuple[int, int, int]]:
    """(start, sequences, length) of each run of neighbours of equal length; many crops are as long as the limit."""
    runs: list[tuple[int, int, int]] = []
    for start, end in zip(bounds, bounds[1:], strict=False):
        if runs and runs[-1][2] == end - start:
            first, count, length = runs.pop()
            runs.append((first, count + 1, length))
        elif end > start:
            runs.append((start, 1, end - start))
    return runs


def _batched(x_THd: Tensor, run: tuple[int, int, int]) -> Tensor:
    """A run's rows as [sequences, H, length, d], without a copy."""
    start, count, length = run
    return x_THd[start : start + count * length].unflatten(0, (count, length)).transpose(1, 2)


class _FlashPerSequence(torch.autograd.Function):
    """torch's CPU flash kernels, one call a run of sequences of equal length, writing into the packed tensors.

    The same kernels as F.scaled_dot_product_attention. Done by hand because the derivative of S slices is otherwise S
    tensors of the whole batch's size, or copies: on 2,048 tokens of real proteins this takes 0.75-0.95 of the time of
    split + SDPA + cat, and padding to a rectangle 1-3 times as long.
    """

    @staticmethod
    def forward(ctx, q_THd, k_THd, v_THd, cu_seqlens, causal):
        ctx.causal, ctx.runs = causal, _runs(cu_seqlens.tolist())
        out_THd, sums = q_THd.new_zeros(q_THd.shape), []
        for run in ctx.runs:
            q, k, v = (_batched(x, run) for x in (q_THd, k_THd, v_THd))
            out, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
            _batched(out_THd, run).copy_(out)
            sums.append(logsumexp)
        ctx.save_for_backward(q_THd, k_THd, v_THd, out_THd, *sums)
        return out_THd

    @staticmethod
    def backward(ctx, grad_THd):
        q_THd, k_THd, v_THd, out_THd, *sums = ctx.saved_tensors
        grads = [x.new_zeros(x.shape) for x in (q_THd, k_THd, v_THd)]
        for run, logsumexp in zip(ctx.runs, sums, strict=True):
            views = (_batched(x, run) for x in (grad_THd, q_THd, k_THd, v_THd, out_THd))
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*views, logsumexp, 0.0, ctx.causal)
            for whole, part in zip(grads, parts, strict=True):
                _batched(whole, run).copy_(part)
        return *grads, None, None


# ---------------------------------------------------------------------------------------------------------------------
# The layer


class Attention(nn.Module):
    """Rotary self-attention. `qkv` holds the rows of all query heads, then key heads, then value heads.

    `kind`: as in `attention`, or `flash`: flash-attn-4 with the rotation in one pass before it and one behind its backward
    (Hopper and later, bf16, no qk_norm).
    """

    def __init__(self, width: int, heads: int, kv_heads: int, causal: bool, bias: bool, qk_norm: str | None, kind: str):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.causal, self.kind = causal, kind
        self.qkv = Linear(width, (heads + 2 * kv_heads) * self.head_dim, bias=bias)
        self.query_norm = Norm(qk_norm, self.head_dim, bias) if qk_norm else None
        self.key_norm = Norm(qk_norm, self.head_dim, bias) if qk_norm else None
        self.output = Linear(width, width, bias=bias)

    def project(self, x_TD: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, d], keys and values [T, G, d] as they enter the softmax: normalised and rotated."""
        H, G = self.heads, self.kv_heads
        heads_Tad = self.qkv(x_TD).view(-1, H + 2 * G, self.head_dim)
        if self.query_norm is None:
            turned, v_TGd = heads_Tad.split((H + G, G), dim=1)
            q_THd, k_TGd = rotate(turned, layout.cos_Th, layout.sin_Th).split((H, G), dim=1)
            return q_THd, k_TGd, v_TGd
        q_THd, k_TGd, v_TGd = heads_Tad.split((H, G, G), dim=1)
        q_THd, k_TGd = self.query_norm(q_THd), self.key_norm(k_TGd)
        return rotate(q_THd, layout.cos_Th, layout.sin_Th), rotate(k_TGd, layout.cos_Th, layout.sin_Th), v_TGd

    def forward(self, x_TD: Tensor, layout: Layout) -> Tensor:
        if self.kind == "flash":
            return self.output(self._flash(x_TD, layout).flatten(1))
        q_THd, k_TGd, v_TGd = self.project(x_TD, layout)
        out_THd = attention(q_THd, k_TGd, v_TGd, layout.cu_seqlens, layout.max_seqlen, self.causal, self.kind)
        return self.output(out_THd.flatten(1))

    def _flash(self, x_TD: Tensor, layout: Layout) -> Tensor:
        if not x_TD.is_cuda:
            raise RequestError("backend.attention: flash needs a GPU; use sdpa or auto on this device")
        from bmoe.kernels.flash import flash  # imported here: it needs triton

        qkv_TAd = self.qkv(x_TD).view(-1, self.heads + 2 * self.kv_heads, self.head_dim)
        angles = (layout.cos_Th, layout.sin_Th)
        return flash(qkv_TAd, *angles, layout.cu_seqlens, layout.max_seqlen, self.kv_heads, self.causal)
