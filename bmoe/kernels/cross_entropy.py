"""The summed cross entropy of a tiny vocabulary and its gradient, a pass each.

Shapes: M rows, V vocabulary, P programs.

Mathematics, for the rows whose target y is not negative, in fp32:  loss = sum of logsumexp(l) - l_y;  dl = (softmax(l) - onehot(y)) dloss
Rows with a negative target give no loss and no gradient. The programs' partial sums are added in a fixed order.

Bytes (bf16): forward 2 M V in; backward 2 M V in and out. Composed of general operations it takes ten launches and an
fp32 copy of the logits, for a few megabytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.sizes import cdiv, next_power_of_2
from bmoe.kernels.sums import sum_parts

WIDEST = 1024
"""The largest vocabulary: a row is held in registers."""


@triton.jit
def _rows(logits_MV, row, rows, V: tl.constexpr, V_P2: tl.constexpr):
    """(logits less their largest, the logarithm of the sum of their exponentials) of rows, and where they lie."""
    v = tl.arange(0, V_P2)[None, :]
    at = row[:, None].to(tl.int64) * V + v
    inside = (row < rows)[:, None] & (v < V)
    logits = tl.load(logits_MV + at, mask=inside, other=0.0).to(tl.float32)
    logits = tl.where(v < V, logits, float("-inf"))
    logits -= tl.max(logits, axis=1)[:, None]
    return logits, tl.log(tl.sum(tl.exp(logits), axis=1)), v, at, inside


@triton.jit
def _entropy_kernel(logits_MV, targets_M, loss_P, rows, V: tl.constexpr, V_P2: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    logits, total, v, _, _ = _rows(logits_MV, row, rows, V, V_P2)
    target = tl.load(targets_M + row, mask=row < rows, other=-1)
    picked = tl.sum(tl.where(v == target[:, None], logits, 0.0), axis=1)
    tl.store(loss_P + tl.program_id(0), tl.sum(tl.where(target >= 0, total - picked, 0.0), axis=0))


@triton.jit
def _entropy_backward_kernel(logits_MV, targets_M, dloss, dlogits_MV, rows, V: tl.constexpr, V_P2: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    logits, total, v, at, inside = _rows(logits_MV, row, rows, V, V_P2)
    target = tl.load(targets_M + row, mask=row < rows, other=-1)[:, None]
    share = tl.exp(logits - total[:, None]) - tl.where(v == target, 1.0, 0.0)
    gradient = tl.where(target >= 0, share * tl.load(dloss), 0.0)
    tl.store(dlogits_MV + at, gradient.to(dlogits_MV.dtype.element_ty), mask=inside)


def _tile(vocabulary: int) -> tuple[int, int]:
    """(columns, rows) of a tile."""
    columns = next_power_of_2(vocabulary)
    return columns, max(1, 2048 // columns)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_MV, targets_M):
        logits_MV, targets_M = logits_MV.contiguous(), targets_M.contiguous()
        M, V = logits_MV.shape
        columns, rows = _tile(V)
        programs = cdiv(M, rows)
        loss_P = torch.empty(programs, dtype=torch.float32, device=logits_MV.device)
        if M:
            _entropy_kernel[(programs,)](logits_MV, targets_M, loss_P, M, V, columns, rows, num_warps=4)
        ctx.save_for_backward(logits_MV, targets_M)
        return sum_parts(loss_P[:, None], torch.float32).view(())

    @staticmethod
    def backward(ctx, dloss):
        logits_MV, targets_M = ctx.saved_tensors
        M, V = logits_MV.shape
        columns, rows = _tile(V)
        dlogits_MV = torch.empty_like(logits_MV)
        if M:
            _entropy_backward_kernel[(cdiv(M, rows),)](
                logits_MV, targets_M, dloss, dlogits_MV, M, V, columns, rows, num_warps=4
            )  # fmt: skip
        return dlogits_MV, None


def cross_entropy(logits_MV: Tensor, targets_M: Tensor) -> Tensor:
    """The sum over rows, fp32 []; logits bf16 or fp32 with V at most WIDEST, targets int64, negative where there is none."""
    return _CrossEntropy.apply(logits_MV, targets_M)
