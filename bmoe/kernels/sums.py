"""Sum of the partial sums that a kernel's programs leave behind, in a fixed order: the same bits on every run.

Bytes: 4 P W in for P programs and W columns. Reductions over rows that are far more than columns are what general kernels are
slow at: [528, 1024] takes torch's 9 us for 2 MB.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.sizes import cdiv, next_power_of_2

COLUMNS = 32
"""Of one program: 128 bytes of a row."""


@triton.jit
def _sum_parts_kernel(parts_PW, sum_W, parts, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, parts, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < parts)[:, None] & (column < width)[None, :]
        total += tl.load(parts_PW + row[:, None].to(tl.int64) * width + column[None, :], mask=inside, other=0.0)
    tl.store(sum_W + column, tl.sum(total, axis=0).to(sum_W.dtype.element_ty), mask=column < width)


def sum_parts(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension of contiguous fp32 `parts`, rounded once to `dtype`."""
    total = torch.empty(parts.shape[1:], dtype=dtype, device=parts.device)
    if total.numel():
        rows = min(next_power_of_2(max(parts.shape[0], 1)), 128)
        _sum_parts_kernel[(cdiv(total.numel(), COLUMNS),)](parts, total, parts.shape[0], total.numel(), rows, COLUMNS, num_warps=4)
    return total
