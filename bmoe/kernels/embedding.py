"""The embedding of a tiny vocabulary, scaled per token, and its gradient without sorting tokens.

Shapes: T tokens, V vocabulary, D width, S splits of the tokens.

Mathematics:  x_t = scale_t table[token_t];   dtable_v = sum over t with token_t = v of round(scale_t dx_t)
The sum is the product of a one-hot [V, T] matrix with dx: exact in tensor cores, accumulated in fp32. Each split's programs
write partial sums, which are added in a fixed order: no atomics, the same bits on every run.

Bytes (bf16): forward 2 T D out (the table stays in L2); backward 2 T D in, 8 S V D for the partial sums. A gradient by sorted
tokens, as for large vocabularies, takes twenty launches and adds up thousands of rows of one residue one after the other.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bmoe.kernels.rows import row_tile
from bmoe.kernels.sizes import cdiv, next_power_of_2
from bmoe.kernels.sums import sum_parts

LARGEST = 128
"""Of a vocabulary: above, the one-hot product is more work than sorting."""

TOKENS, SPLITS = 64, 32


@triton.jit
def _embed_kernel(tokens_T, table_VD, scale_T, x_TD, tokens, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    inside = (t < tokens)[:, None] & (column < D)
    token = tl.load(tokens_T + t, mask=t < tokens, other=0)[:, None]
    scale = tl.load(scale_T + t, mask=t < tokens, other=0.0)[:, None]
    e = tl.load(table_VD + token * D + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_TD + t[:, None].to(tl.int64) * D + column, (e * scale).to(x_TD.dtype.element_ty), mask=inside)


@triton.jit
def _embed_backward_kernel(
    tokens_T,
    scale_T,
    dx_TD,
    parts_SVD,
    tokens,
    tokens_of_split,
    V: tl.constexpr,
    V_P2: tl.constexpr,
    D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    split = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    v = tl.arange(0, V_P2)
    total = tl.zeros([V_P2, BLOCK_D], tl.float32)
    start = split * tokens_of_split
    for first in range(start, start + tokens_of_split, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        token = tl.load(tokens_T + t, mask=t < tokens, other=-1)
        scale = tl.load(scale_T + t, mask=t < tokens, other=0.0)[:, None]
        at = t[:, None].to(tl.int64) * D + d[None, :]
        dx = tl.load(dx_TD + at, mask=(t < tokens)[:, None] & (d < D)[None, :], other=0.0)
        dx = (dx.to(tl.float32) * scale).to(dx.dtype)
        hit = (v[:, None] == token[None, :]).to(dx.dtype)
        total = tl.dot(hit, dx, total, input_precision="ieee")
    tl.store(parts_SVD + (split * V + v[:, None]) * D + d[None, :], total, mask=(v < V)[:, None] & (d < D)[None, :])


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens_T, table_VD, scale_T):
        tokens_T, table_VD, scale_T = tokens_T.contiguous(), table_VD.contiguous(), scale_T.contiguous()
        T, D = tokens_T.numel(), table_VD.shape[1]
        x_TD = table_VD.new_empty(T, D)
        if T:
            rows, columns = row_tile(D)
            _embed_kernel[(cdiv(T, rows), cdiv(D, columns))](tokens_T, table_VD, scale_T, x_TD, T, D, rows, columns)
        ctx.save_for_backward(tokens_T, scale_T)
        ctx.table = table_VD.shape, table_VD.dtype
        return x_TD

    @staticmethod
    def backward(ctx, dx_TD):
        tokens_T, scale_T = ctx.saved_tensors
        (V, D), dtype = ctx.table
        T = tokens_T.numel()
        splits = max(1, min(SPLITS, cdiv(T, TOKENS)))
        tokens_of_split = cdiv(cdiv(T, splits), TOKENS) * TOKENS
        parts_SVD = dx_TD.new_empty(splits, V, D, dtype=torch.float32)
        block_d = 128 if D >= 128 else 64
        _embed_backward_kernel[(splits, cdiv(D, block_d))](
            tokens_T, scale_T, dx_TD.contiguous(), parts_SVD, T, tokens_of_split, V, max(next_power_of_2(V), 16), D,
            TOKENS, block_d, num_warps=4, num_stages=3,
        )  # fmt: skip
        return None, sum_parts(parts_SVD, dtype), None


def embed(tokens_T: Tensor, table_VD: Tensor, scale_T: Tensor) -> Tensor:
    """Rows of the table times fp32 scales, rounded once to its dtype: [T, D]. tokens int64 in [0, V), V at most LARGEST."""
    return _Embed.apply(tokens_T, table_VD, scale_T)


def embed_reference(tokens_T: Tensor, table_VD: Tensor, scale_T: Tensor) -> Tensor:
    """Plain-torch twin of `embed`, in the scales' dtype."""
    return (torch.nn.functional.embedding(tokens_T, table_VD).to(scale_T.dtype) * scale_T[:, None]).to(table_VD.dtype)
