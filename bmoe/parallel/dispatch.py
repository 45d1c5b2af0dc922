"""Expert parallelism: token rows travel to the ranks of their experts and back.

Legend: T tokens, D width, E experts, W ranks that share them, e = E / W experts a rank, K top-k, N = T x K slots, S slots
sent (those with an expert), M rows received.

    slots sorted by expert | counts exchanged, one host sync | rows and weights to their ranks (uneven all-to-all) |
    the rank's experts on M rows with K = 1 | rows back | each token sums its K rows in fp32

Rank w holds experts w e .. (w + 1) e. Rows arrive by sender and, within it, by expert, so that the counts alone say which
expert a row is for. Slots of the dummy tail (expert E) are not sent and add nothing. Whatever alignment a kernel wants is
the business of the experts' implementation, after the wire. The shared expert runs while the counts are on their way.
"""

import importlib.metadata
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

TE_NEEDS_NCCL = (2, 30, 4)
"""NCCL of Transformer Engine's expert parallelism (its documentation, 2.17 and later)."""


def why_torch_exchanges(device: torch.device) -> str:
    """Why rows travel by torch's all-to-all and not by Transformer Engine's NCCL expert parallelism, in words."""
    if device.type != "cuda":
        return "torch's all-to-all over gloo: Transformer Engine's exchange needs GPUs"
    nccl = torch.cuda.nccl.version()
    if nccl < TE_NEEDS_NCCL:
        have, need = (".".join(map(str, version)) for version in (nccl, TE_NEEDS_NCCL))
        return f"torch's all-to-all: Transformer Engine's exchange needs NCCL {need}, and this is {have}"
    try:
        importlib.metadata.version("transformer-engine-torch")
    except importlib.metadata.PackageNotFoundError:
        return "torch's all-to-all: Transformer Engine is not installed"
    return "torch's all-to-all: Transformer Engine's exchange could be had, but has never been run with bmoe"


class Plan(NamedTuple):
    """How the slots of one batch travel. `order_S`: slot of each sent row, by expert; `row_N` (int32): row of each slot, -1 for
    one that is not sent; `sent`, `received`: rows to and from each rank; `expert_M`: this rank's expert (from 0) of each
    received row."""

    order_S: Tensor
    row_N: Tensor
    sent: list[int]
    received: list[int]
    expert_M: Tensor


class _Counts:
    """The exchange of counts on its way: launched by the constructor, finished by `plan`."""

    def __init__(self, experts_TK: Tensor, experts: int, group: dist.ProcessGroup):
        ranks = group.size()
        ids_N = experts_TK.reshape(-1)
        self.ids_N, self.order_N = torch.sort(ids_N, stable=True)
        bounds = torch.searchsorted(self.ids_N, torch.arange(experts + 1, device=ids_N.device))
        self.sent_We = bounds.diff().view(ranks, -1)
        self.received_We = torch.empty_like(self.sent_We)
        self.work = dist.all_to_all_single(self.received_We, self.sent_We, group=group, async_op=True)

    def plan(self) -> Plan:
        """The one host sync of a layer."""
        self.work.wait()
        sent, received = torch.stack([self.sent_We.sum(1), self.received_We.sum(1)]).tolist()
        order_S = self.order_N[: sum(sent)]
        row_N = torch.full_like(self.order_N, -1, dtype=torch.int32)
        row_N[order_S] = torch.arange(order_S.numel(), device=row_N.device, dtype=torch.int32)
        here_e = torch.arange(self.sent_We.shape[1], device=row_N.device)
        expert_M = here_e.repeat(len(received)).repeat_interleave(self.received_We.flatten(), output_size=sum(received))
        return Plan(order_S, row_N, sent, received, expert_M)


class _Exchange(torch.autograd.Function):
    """Rows [S, D] and their weights [S] to other ranks; gradients travel back. One function, so that every rank runs the two
    collectives of the backward pass in the same order."""

    @staticmethod
    def forward(ctx, rows_SD: Tensor, weights_S: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows_SD, sent, received, group), _all_to_all(weights_S, sent, received, group)

    @staticmethod
    def backward(ctx, grad_MD: Tensor, grad_M: Tensor):
        rows_SD = _all_to_all(grad_MD, ctx.received, ctx.sent, ctx.group)
        return rows_SD, _all_to_all(grad_M, ctx.received, ctx.sent, ctx.group), None, None, None


class _Return(torch.autograd.Function):
    """Rows [M, D] back to where they came from: [S, D]."""

    @staticmethod
    def forward(ctx, rows_MD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup):
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(rows_MD, received, sent, group)

    @staticmethod
    def backward(ctx, grad_SD: Tensor):
        return _all_to_all(grad_SD, ctx.sent, ctx.received, ctx.group), None, None, None


def _all_to_all(rows: Tensor, going: list[int], coming: list[int], group: dist.ProcessGroup) -> Tensor:
    out = rows.new_empty(sum(coming), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), coming, going, group=group)
    return out


class _Gather(torch.autograd.Function):
    """x_TD -> rows [S, D]; the gradient sums each token's rows by a gather: no atomics, the same bits every time."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, order_S: Tensor, row_N: Tensor, k: int):
        ctx.save_for_backward(row_N)
        ctx.k = k
        return _spread(x_TD, order_S, row_N, k)

    @staticmethod
    def backward(ctx, grad_SD: Tensor):
        return _sum_rows(grad_SD.contiguous(), *ctx.saved_tensors, ctx.k), None, None, None


class _Combine(torch.autograd.Function):
    """rows [S, D] -> y_TD, the transpose of `_Gather`."""

    @staticmethod
    def forward(ctx, rows_SD: Tensor, order_S: Tensor, row_N: Tensor, k: int):
        ctx.save_for_backward(order_S, row_N)
        ctx.k = k
        return _sum_rows(rows_SD, row_N, k)

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        return _spread(grad_TD, *ctx.saved_tensors, ctx.k), None, None, None


def _spread(x_TD: Tensor, order_S: Tensor, row_N: Tensor, k: int) -> Tensor:
    """Each sent slot's copy of its token: [S, D]. On a GPU one pass that reads each token once."""
    if not _has_kernel(x_TD):
        return x_TD[order_S // k]
    from bmoe.kernels.rows import spread  # Triton comes with CUDA builds of torch only

    return spread(x_TD, row_N, k)[: order_S.numel()]


def _sum_rows(rows_SD: Tensor, row_N: Tensor, k: int) -> Tensor:
    """The sum of each token's rows in at least fp32, rounded once: [T, D]. On a GPU one pass."""
    if _has_kernel(rows_SD):
        from bmoe.kernels.rows import combine

        return combine(rows_SD, row_N, k)
    wide = torch.promote_types(rows_SD.dtype, torch.float32)
    padded_SD = torch.cat([rows_SD, rows_SD.new_zeros(1, rows_SD.shape[1])])  # row -1 is zero
    return padded_SD[row_N.long()].unflatten(0, (-1, k)).sum(1, dtype=wide).to(rows_SD.dtype)


def _has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


class ExpertParallel(nn.Module):
    """Stands in for an MoE layer whose experts are shared by the ranks of a group.

    Takes over the layer's `router`, `experts` and `shared` under the same names, so that the names of parameters stay what
    they are. `experts` already holds this rank's part, counts it in its attribute `experts`, and keeps its contract.
    """

    def __init__(self, layer: nn.Module, experts: int, mesh: DeviceMesh):
        """layer: the MoE layer. experts: how many all ranks hold. mesh: (expert, data_shard)."""
        super().__init__()
        self.router, self.experts, self.shared = layer.router, layer.experts, layer.shared
        self.total, self.mesh, self.group = experts, mesh, mesh.get_group("expert")

    def route(self, x_TD: Tensor, layout):
        return self.router(x_TD, layout)

    @torch.compiler.disable
    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """As the layer's: y_TD in x's dtype. Collective over the group, in the forward and in the backward pass."""
        counts = _Counts(experts_TK, self.total, self.group)
        shared_TD = None if self.shared is None else self.shared(x_TD)
        plan = counts.plan()
        k = experts_TK.shape[1]
        rows_SD = _Gather.apply(x_TD, plan.order_S, plan.row_N, k)
        weights_S = weights_TK.reshape(-1)[plan.order_S]
        rows_MD, weights_M = _Exchange.apply(rows_SD, weights_S, plan.sent, plan.received, self.group)
        out_MD = self.experts(rows_MD, plan.expert_M[:, None], weights_M[:, None])
        out_SD = _Return.apply(out_MD, plan.sent, plan.received, self.group)
        y_TD = _Combine.apply(out_SD, plan.order_S, plan.row_N, k)
        return y_TD if shared_TD is None else y_TD + shared_TD
