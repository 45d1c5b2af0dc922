"""Attention of packed sequences by the warp-specialised flash kernels of flash-attn-4 (CuTe DSL; Hopper and later, bf16).

Shapes: T tokens, H query heads, G key and value heads, d head dimension, S sequences.

Mathematics, within each sequence                       p = softmax(q k^T / sqrt(d)),   o = p v,   L = logsumexp
    backward   dv = p^T do,  dp = do v^T,  ds = p (dp - rowsum(do o)),  dq = ds k / sqrt(d),  dk = ds^T q / sqrt(d)

FLOPs: 4 H d sum of squared lengths forward (half of it when causal) and 2.5 times that backward. Bytes: q, k, v, o once,
and again with their gradients; dq is summed in fp32 by atomics, so its last bits differ from run to run.

Rows at or beyond cu_seqlens[-1] belong to no sequence; the results are zero there. The last tile of a sequence also reads
rows after it, with weight zero, so those have to be finite. Sequences may be empty.
"""

import functools
import importlib.util
from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.operators import operator


@functools.cache
def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why these kernels cannot run here, or None."""
    if device.type != "cuda":
        return "they need a GPU"
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return "they are for Hopper and Blackwell"
    if dtype != torch.bfloat16:
        return f"they take bf16, not {str(dtype).removeprefix('torch.')}"
    if head_dim % 8 or head_dim > 128:
        return f"the head dimension {head_dim} is not a multiple of 8 up to 128"
    if importlib.util.find_spec("flash_attn") is None or importlib.util.find_spec("flash_attn.cute") is None:
        return "the package flash-attn-4 is not installed (pip install 'bmoe[fused]')"
    return None


@functools.cache
def _kernels() -> SimpleNamespace:
    """The library's two entry points; imported at first use, because it takes seconds."""
    interface = importlib.import_module("flash_attn.cute.interface")
    return SimpleNamespace(forward=interface._flash_attn_fwd, backward=interface._flash_attn_bwd)


@triton.jit
def _clear_tail_kernel(x_TW, cu_seqlens_end, rows, WIDTH: tl.constexpr, WIDTH_P2: tl.constexpr, ROWS: tl.constexpr):
    first = tl.program_id(0) * ROWS
    bound = tl.load(cu_seqlens_end)
    column = tl.arange(0, WIDTH_P2)
    for row in range(tl.maximum(first, bound), tl.minimum(first + ROWS, rows)):
        tl.store(x_TW + row.to(tl.int64) * WIDTH + column, tl.zeros([WIDTH_P2], x_TW.dtype.element_ty), mask=column < WIDTH)


def clear_tail(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Zero the rows of a contiguous `x` [T, ...] at or beyond cu_seqlens[-1], in place; touches no other row."""
    rows, width = x.shape[0], x[0].numel()
    block = 64
    _clear_tail_kernel[(triton.cdiv(rows, block),)](x, cu_seqlens[-1:], rows, width, triton.next_power_of_2(width), block)
    return x


def _forward_fake(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, causal):
    return q_THd.new_empty(q_THd.shape), q_THd.new_empty(q_THd.shape[1], q_THd.shape[0], dtype=torch.float32)


@operator("flash", _forward_fake)
def flash_forward(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool) -> tuple[Tensor, Tensor]:
    """(o_THd, logsumexp_HT fp32)."""
    out_THd = clear_tail(q_THd.new_empty(q_THd.shape), cu_seqlens)
    sums_HT = q_THd.new_empty(q_THd.shape[1], q_THd.shape[0], dtype=torch.float32)
    _kernels().forward(
        q_THd, k_TGd, v_TGd, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen,
        causal=causal, return_lse=True, out=out_THd, lse=sums_HT,
    )  # fmt: skip
    return out_THd, sums_HT


def _backward_fake(do_THd, q_THd, k_TGd, v_TGd, out_THd, sums_HT, cu_seqlens, max_seqlen, causal):
    return tuple(x.new_empty(x.shape) for x in (q_THd, k_TGd, v_TGd))


@operator("flash_backward", _backward_fake)
def flash_backward(
    do_THd: Tensor, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, out_THd: Tensor, sums_HT: Tensor, cu_seqlens: Tensor,
    max_seqlen: int, causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq_THd, dk_TGd, dv_TGd."""
    dq, dk, dv = (clear_tail(x.new_empty(x.shape), cu_seqlens) for x in (q_THd, k_TGd, v_TGd))
    _kernels().backward(
        q_THd, k_TGd, v_TGd, out_THd, do_THd, sums_HT, causal=causal, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, dq=dq, dk=dk, dv=dv,
    )  # fmt: skip
    return dq, dk, dv


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, causal):
        out_THd, sums_HT = flash_forward(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, causal)
        ctx.max_seqlen, ctx.causal = max_seqlen, causal
        ctx.save_for_backward(q_THd, k_TGd, v_TGd, out_THd, sums_HT, cu_seqlens)
        return out_THd

    @staticmethod
    def backward(ctx, do_THd):
        *saved, cu_seqlens = ctx.saved_tensors
        return *flash_backward(do_THd, *saved, cu_seqlens, ctx.max_seqlen, ctx.causal), None, None, None


def flash(q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor, cu_seqlens: Tensor, max_seqlen: int, causal: bool) -> Tensor:
    """softmax(q k^T / sqrt(d)) v within each sequence, [T, H, d] bf16; cu_seqlens int32 [S + 1], no length above max_seqlen."""
    return _Flash.apply(q_THd, k_TGd, v_TGd, cu_seqlens, max_seqlen, causal)
