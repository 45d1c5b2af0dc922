"""Experts by torch's grouped matrix multiplication: rows sorted by expert, two grouped GEMMs, rows summed back.

Runs on every device, without a host-device synchronisation on CUDA in bf16, and compiles into one graph: shapes depend
on T and K only, never on how many rows an expert got.

Shapes: T tokens, D width, F expert width, E experts, K top-k, N = T x K routed rows sorted by expert, C = 2F or F.
Rows of "no expert" (value E) sort behind the last offset. grouped_mm leaves such rows of its result uninitialised, in
values and in gradients, so each result is masked before anything reads it.
"""

import torch
from torch import Tensor

from bmoe.kernels.grouped_gemm import grouped_linear
from bmoe.model.experts.weights import Experts


def sort_by_expert(experts_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stable order of the N flat slots by expert.

    Returns ids_N (sorted), order_N (row -> flat slot), inverse_N (flat slot -> row), all int64, and offsets_E int32:
    the end of each expert's rows.
    """
    ids_N, order_N = torch.sort(experts_TK.reshape(-1), stable=True)
    rows_N = torch.arange(order_N.numel(), device=order_N.device)
    inverse_N = torch.empty_like(order_N).scatter_(0, order_N, rows_N)
    bounds_E = torch.arange(experts, device=ids_N.device)
    offsets_E = torch.searchsorted(ids_N, bounds_E, right=True, out_int32=True)
    return ids_N, order_N, inverse_N, offsets_E


class _Gather(torch.autograd.Function):
    """x_TD -> rows [N, D]; the gradient sums each token's K rows by a gather: no atomics, the same bits every time."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, order_N: Tensor, inverse_N: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse_N)
        ctx.k = k
        return x_TD[order_N // k]

    @staticmethod
    def backward(ctx, dx_ND: Tensor):
        (inverse_N,) = ctx.saved_tensors
        return _sum_slots(dx_ND, inverse_N, ctx.k), None, None, None


class _Combine(torch.autograd.Function):
    """rows [N, D] -> y_TD, the transpose of `_Gather`."""

    @staticmethod
    def forward(ctx, y_ND: Tensor, order_N: Tensor, inverse_N: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order_N)
        ctx.k = k
        return _sum_slots(y_ND, inverse_N, k)

    @staticmethod
    def backward(ctx, dy_TD: Tensor):
        (order_N,) = ctx.saved_tensors
        return dy_TD[order_N // ctx.k], None, None, None


def _sum_slots(rows_ND: Tensor, inverse_N: Tensor, k: int) -> Tensor:
    wide = torch.promote_types(rows_ND.dtype, torch.float32)
    rows_TKD = rows_ND[inverse_N].unflatten(0, (-1, k))
    return rows_TKD.sum(1, dtype=wide).to(rows_ND.dtype)


class GroupedExperts(Experts):
    """Sort, gather, grouped GEMM, activation, grouped GEMM, combine."""

    matmul = staticmethod(grouped_linear)  # low-precision emulation puts its own here

    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """y_TD in x's dtype; the sum over K is in fp32 (float64 for float64 input)."""
        k = experts_TK.shape[1]
        ids_N, order_N, inverse_N, offsets_E = sort_by_expert(experts_TK, self.experts)
        real_N1 = (ids_N < self.experts)[:, None]
        expert_N = ids_N.clamp(max=self.experts - 1)

        x_ND = torch.where(real_N1, _Gather.apply(x_TD, order_N, inverse_N, k), 0)
        weights_N = weights_TK.reshape(-1)[order_N]
        h_NC = torch.where(real_N1, self.matmul(x_ND, self.gate_up.to(x_TD.dtype), offsets_E), 0)
        if self.gate_up_bias is not None:
            h_NC = h_NC + self.gate_up_bias.to(x_TD.dtype)[expert_N]
        a_NF = torch.where(real_N1, self.activate(h_NC, weights_N), 0).to(x_TD.dtype)
        y_ND = self.matmul(a_NF, self.down.to(x_TD.dtype), offsets_E)
        if self.down_bias is not None:
            wide = torch.promote_types(x_TD.dtype, torch.float32)
            y_ND = (y_ND.to(wide) + weights_N[:, None].to(wide) * self.down_bias.to(wide)[expert_N]).to(x_TD.dtype)
        return _Combine.apply(torch.where(real_N1, y_ND, 0), order_N, inverse_N, k)
