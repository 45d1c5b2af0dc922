"""The small layers of a block: linear, norm, dense feed-forward, and what a block must know about its packed batch.

Legend: T tokens, D width, F feed-forward width, S sequences.

Matrices may be bf16 while norm weights and biases stay fp32 (the training set-up on GPUs): every layer here computes
norms in at least fp32 and returns its input's dtype.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-5  # ESM-2 and Mixtral


class Layout(NamedTuple):
    """One packed batch as every block sees it; built once per forward pass."""

    cos_Th: Tensor  # of the rotary angles, fp32 [T, head_dim / 2]
    sin_Th: Tensor
    cu_seqlens: Tensor  # int32 [S + 1], cut at the first dummy slot: the tail belongs to no sequence
    max_seqlen: int
    real_T: Tensor  # bool [T]: False marks the dummy tail
    real_tokens: Tensor  # int64 [], the number of True above
    jitter_key: Tensor | None  # int64 [], keys the router noise of this batch and layer; None without


def wide(x: Tensor) -> Tensor:
    """`x` in fp32, or as it is if that is at least as precise."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


class Linear(nn.Linear):
    """A linear layer without an initialisation of its own whose bias may be wider than its weight."""

    def reset_parameters(self) -> None:
        """Leave the memory as it is: `Transformer.initialize` or a checkpoint fills it."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight, bias)


class Norm(nn.Module):
    """RMSNorm or LayerNorm over the last dimension.

    `fused`: RMSNorm of bf16 rows on a GPU by the kernels of kernels/norm.py. Not for what the compiler merges with its neighbours.
    """

    def __init__(self, kind: str, width: int, bias: bool, fused: bool = False):
        super().__init__()
        self.kind, self.fused = kind, fused and kind == "rmsnorm"
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias and kind == "layernorm" else None

    def forward(self, x: Tensor, y: Tensor | None = None, through: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x; with y, (x + y, the norm of x + y).

        `through` gives (x, the norm of x): who reads x there has its gradient added in the norm's backward pass.
        """
        if self._by_kernel(x):
            from bmoe.kernels import norm  # imported here: it needs triton

            if y is not None:
                return norm.add_norm(x, y, self.weight, NORM_EPS)
            return (norm.norm_through if through else norm.norm)(x, self.weight, NORM_EPS)
        if y is not None:
            x = x + y
        h = self._plain(x)
        return (x, h) if y is not None or through else h

    def _by_kernel(self, x: Tensor) -> bool:
        return self.fused and x.is_cuda and x.dtype == torch.bfloat16

    def _plain(self, x: Tensor) -> Tensor:
        if self.kind == "rmsnorm":
            return _RMSNorm.apply(x, self.weight)
        bias = None if self.bias is None else wide(self.bias)
        return F.layer_norm(wide(x), self.weight.shape, wide(self.weight), bias, NORM_EPS).to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    """x / sqrt(mean(x^2) + eps) * weight, in at least fp32 and rounded once to x's dtype.

    The derivative is by hand: it keeps x alone (F.rms_norm of a widened x keeps an fp32 copy), and on CPUs forward and
    backward take 0.6 of the time.
    """

    @staticmethod
    def forward(ctx, x, weight):
        wide_x = wide(x)
        inverse = torch.rsqrt(torch.linalg.vector_norm(wide_x, dim=-1, keepdim=True).square() / x.shape[-1] + NORM_EPS)
        ctx.save_for_backward(x, inverse, weight)
        return (wide_x * inverse * wide(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        x, inverse, weight = ctx.saved_tensors
        unit, wide_grad = wide(x) * inverse, wide(grad)
        projected = wide_grad * unit
        share = (projected @ wide(weight))[..., None] / unit.shape[-1]
        grad_x = torch.addcmul(wide_grad * wide(weight), unit, share, value=-1) * inverse
        return grad_x.to(x.dtype), projected.flatten(0, -2).sum(dim=0).to(weight.dtype)


class FeedForward(nn.Module):
    """The dense feed-forward: down(silu(gate x) * up x), or down(gelu(up x)) with the exact GELU.

    `gate_up` holds the gate's F rows first, then the up projection's (SwiGLU), or the up projection alone (GELU).
    """

    def __init__(self, kind: str, width: int, hidden: int, bias: bool):
        super().__init__()
        self.kind = kind
        self.gate_up = Linear(width, 2 * hidden if kind == "swiglu" else hidden, bias=bias)
        self.down = Linear(hidden, width, bias=bias)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.kind == "gelu":
            return self.down(F.gelu(self.gate_up(x_TD)))
        gate_TF, up_TF = self.gate_up(x_TD).chunk(2, dim=-1)
        return self.down(F.silu(gate_TF) * up_TF)


def default_ffn_width(kind: str, width: int) -> int:
    """Width of a dense feed-forward when the recipe gives none: 4 D (GELU), 8/3 D rounded up to a multiple of 64 (SwiGLU)."""
    return 4 * width if kind == "gelu" else -(-8 * width // (3 * 64)) * 64
