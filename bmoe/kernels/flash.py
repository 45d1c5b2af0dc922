"""Rotary attention of packed sequences by the warp-specialised flash kernels of flash-attn-4 (CuTe DSL; Hopper and later, bf16).

Shapes: T tokens, H query heads, G key and value heads, d head dimension, S sequences.

Mathematics, with q and k turned by their rotary angles (kernels/rotary.py), within each sequence
    forward    p = softmax(q k^T / sqrt(d)),  o = p v,  L = logsumexp
    backward   dv = p^T do,  dp = do v^T,  ds = p (dp - rowsum(do o)),  dq = ds k / sqrt(d),  dk = ds^T q / sqrt(d)

FLOPs: 4 H d sum of squared lengths forward (half of it when causal) and 2.5 times that backward. Bytes: q, k, v, o once,
and again with their gradients; dq, and with grouped queries dk and dv, are summed in fp32 by atomics, so that their last bits
differ from run to run.

Rows at or beyond cu_seqlens[-1] belong to no sequence; the results are zero there. The last tile of a sequence also reads
rows after it, with weight zero, so those have to be finite. Sequences may be empty.
"""

import functools
import importlib.util
from types import SimpleNamespace

import torch
from torch import Tensor

from bmoe.kernels.operators import apply, operator
from bmoe.kernels.rotary import queries_and_keys, turn_back

HEAD_DIMS = (64, 128)
"""Those whose results were compared with float64, on an H200. With 16 the kernels return wrong numbers on Hopper (4.0.0b36)."""


@functools.cache
def why_not(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """The reason why these kernels cannot run here, or None."""
    if device.type != "cuda":
        return "they need a GPU"
    if torch.cuda.get_device_capability(device)[0] not in (9, 10):
        return "they are for Hopper and Blackwell"
    if dtype != torch.bfloat16:
        return f"they take bf16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"head dimension {head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
    try:
        found = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    except ImportError as error:  # a broken package of the same name
        return str(error).strip().splitlines()[0]
    if found is None:
        return "the package flash-attn-4 is not installed (pip install 'bmoe[fused]')"
    return None


@functools.cache
def _kernels() -> SimpleNamespace:
    """The library's two entry points; imported at first use, because it takes seconds."""
    interface = importlib.import_module("flash_attn.cute.interface")
    return SimpleNamespace(forward=interface._flash_attn_fwd, backward=interface._flash_attn_bwd)


def _forward_fake(qkv_TAd, cos_Th, sin_Th, cu_seqlens, max_seqlen, groups, causal):
    T, A, d = qkv_TAd.shape
    heads = A - 2 * groups
    return (
        qkv_TAd.new_empty(T, heads, d),
        qkv_TAd.new_empty(T, heads + groups, d),
        qkv_TAd.new_empty(heads, T, dtype=torch.float32),
    )


@operator("flash", _forward_fake)
def flash_forward(
    qkv_TAd: Tensor, cos_Th: Tensor, sin_Th: Tensor, cu_seqlens: Tensor, max_seqlen: int, groups: int, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """out_THd, and for the backward the turned queries and keys [T, H + G, d] and logsumexp_HT (fp32)."""
    T, A, d = qkv_TAd.shape
    heads = A - 2 * groups
    qk_Tad, out_THd = queries_and_keys(qkv_TAd, groups, cos_Th, sin_Th, cu_seqlens)
    sums_HT = qkv_TAd.new_empty(heads, T, dtype=torch.float32)
    q_THd, k_TGd, v_TGd = qk_Tad[:, :heads], qk_Tad[:, heads:], qkv_TAd[:, heads + groups :]
    _kernels().forward(
        q_THd, k_TGd, v_TGd, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen,
        causal=causal, return_lse=True, out=out_THd, lse=sums_HT,
    )  # fmt: skip
    return out_THd, qk_Tad, sums_HT


def _backward_fake(do_THd, qkv_TAd, qk_Tad, out_THd, sums_HT, cos_Th, sin_Th, cu_seqlens, max_seqlen, groups, causal):
    return qkv_TAd.new_empty(qkv_TAd.shape)


@operator("flash_backward", _backward_fake)
def flash_backward(
    do_THd: Tensor, qkv_TAd: Tensor, qk_Tad: Tensor, out_THd: Tensor, sums_HT: Tensor, cos_Th: Tensor, sin_Th: Tensor,
    cu_seqlens: Tensor, max_seqlen: int, groups: int, causal: bool,
) -> Tensor:  # fmt: skip
    """dqkv_TAd."""
    heads = out_THd.shape[1]
    q_THd, k_TGd, v_TGd = qk_Tad[:, :heads], qk_Tad[:, heads:], qkv_TAd[:, heads + groups :]
    dqkv_TAd = torch.empty_like(qkv_TAd)
    dq_THd, dk_TGd, dv_TGd = dqkv_TAd.split((heads, groups, groups), dim=1)
    _kernels().backward(
        q_THd, k_TGd, v_TGd, out_THd, do_THd, sums_HT, causal=causal, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen, max_seqlen_k=max_seqlen, dq=dq_THd, dk=dk_TGd, dv=dv_TGd,
    )  # fmt: skip
    turn_back(dqkv_TAd, groups, cos_Th, sin_Th, cu_seqlens)
    return dqkv_TAd


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv_TAd, cos_Th, sin_Th, cu_seqlens, max_seqlen, groups, causal):
        out_THd, qk_Tad, sums_HT = flash_forward(qkv_TAd, cos_Th, sin_Th, cu_seqlens, max_seqlen, groups, causal)
        ctx.options = (max_seqlen, groups, causal)
        ctx.save_for_backward(qkv_TAd, qk_Tad, out_THd, sums_HT, cos_Th, sin_Th, cu_seqlens)
        return out_THd

    @staticmethod
    def backward(ctx, do_THd):
        return flash_backward(do_THd.contiguous(), *ctx.saved_tensors, *ctx.options), None, None, None, None, None, None


def flash(qkv_TAd: Tensor, cos_Th: Tensor, sin_Th: Tensor, cu_seqlens: Tensor, max_seqlen: int, groups: int, causal: bool) -> Tensor:
    """Rotary attention within each sequence, [T, H, d] bf16, of a contiguous projection [T, H + 2G, d].

    cos_Th, sin_Th: fp32 [T, d/2]; cu_seqlens: int32 [S + 1]; no sequence is longer than max_seqlen.
    """
    return apply(_Flash, qkv_TAd, cos_Th, sin_Th, cu_seqlens, max_seqlen, groups, causal)
