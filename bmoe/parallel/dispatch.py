"""Expert parallelism: token rows travel to the ranks of their experts and back.

Legend: T tokens, D width, E experts, W ranks that share them, e = E / W experts a rank, K top-k, N = T x K slots, S slots
sent (those with an expert), M rows received.

    slots sorted by expert | counts exchanged | rows gathered, while the host waits for the counts: one sync a layer |
    rows and weights set off to their ranks (uneven all-to-all) | the shared expert, while they travel |
    the rank's experts on M rows with K = 1 | rows back | each token sums its K rows in fp32

Rank w holds experts w e .. (w + 1) e. Rows arrive by sender and, within it, by expert, so that the counts alone say which
expert a row is for. Slots of the dummy tail (expert E) are not sent and add nothing. Whatever alignment a kernel wants is
the business of the experts' implementation, after the wire. In the backward pass autograd runs the shared expert while the
gradients of the rows travel: they set off in the last node before it and are awaited in the first one behind it.

`Transport` is what moves rows. `AllToAll` is torch's; another one (Transformer Engine's NCCL expert parallelism, DeepEP) takes
its place in `ExpertParallel` without a change elsewhere: rows may arrive with any K, in any order, and with rows for no expert
among them (number e), so a transport may send a token once to a rank that holds several of its experts, or pad to a capacity.
No padded exchange is here: dropping nothing, its buffers would be W times as large as the rows.
"""

import importlib.metadata
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bmoe.parallel.world import wait

TE_NEEDS_NCCL, TE_NEEDS_CAPABILITY, TE_NEEDS_VERSION = (2, 30, 4), (9, 0), (2, 17)
"""Of Transformer Engine's expert parallelism: NCCL and compute capability as `ep_bootstrap` and its backend check them in 2.20, and
the first version that has it."""


def why_torch_exchanges(device: torch.device, low: bool) -> str:
    """Why rows travel by torch's all-to-all and not by Transformer Engine's NCCL expert parallelism, in words: all that it lacks.

    low: rows are bf16. What else it needs, a group of two ranks that divides the experts, holds wherever rows travel.
    """
    if device.type != "cuda":
        return "torch's all-to-all over gloo: Transformer Engine's exchange needs GPUs"
    lacking = []
    if not low:
        lacking.append("rows in bf16, and precision.kind is fp32")
    if (capability := torch.cuda.get_device_capability(device)) < TE_NEEDS_CAPABILITY:
        lacking.append(f"compute capability {_dotted(TE_NEEDS_CAPABILITY)}, and this GPU has {_dotted(capability)}")
    if (nccl := torch.cuda.nccl.version()[:3]) < TE_NEEDS_NCCL:
        lacking.append(f"NCCL {_dotted(TE_NEEDS_NCCL)}, and this is {_dotted(nccl)}")
    try:
        version = importlib.metadata.version("transformer-engine-torch")
        if tuple(int(number) for number in version.split(".")[:2]) < TE_NEEDS_VERSION:
            lacking.append(f"Transformer Engine {_dotted(TE_NEEDS_VERSION)}, and this is {version}")
    except importlib.metadata.PackageNotFoundError:
        lacking.append("Transformer Engine, which is not installed")
    if lacking:
        return f"torch's all-to-all: Transformer Engine's exchange needs {'; '.join(lacking)}"
    return "torch's all-to-all: what Transformer Engine's exchange needs is here, but bmoe has never been run with it"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


class Transport(Protocol):
    """Moves rows between the ranks of a group. All three calls are collective and differentiable, and come in this order.

    `depart` starts: rows of x_TD go to the ranks of their experts experts_TK (int64, E for none) with their weights_TK (fp32).
    It returns what the other two need, and may return before anything arrived: the shared expert runs next.
    `arrive` gives this rank's experts their input, (x_MD, experts_MK, weights_MK) with experts counted from 0, e for none.
    `bring_back` takes what they made of it, [M, D], and gives y_TD: the sum over the experts of each token, wherever they are.
    """

    def depart(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Any: ...
    def arrive(self, journey: Any) -> tuple[Tensor, Tensor, Tensor]: ...
    def bring_back(self, out_MD: Tensor, journey: Any) -> Tensor: ...


class Order(NamedTuple):
    """N slots sorted by expert. Rows behind bounds_E1[E], those of the dummy tail, mean nothing."""

    row_N: Tensor  # int32, row of each slot, -1 for one without an expert
    token_N: Tensor  # token of each row
    weight_N: Tensor  # of each row
    bounds_E1: Tensor  # rows bounds[e] to bounds[e + 1] are for expert e


def sort_slots(experts_TK: Tensor, weights_TK: Tensor, experts: int, kernel: bool) -> Order:
    """A stable sort; with `kernel` in three launches of Triton."""
    if kernel:
        from bmoe.kernels import rows  # Triton comes with CUDA builds of torch only

        return Order(*rows.sort_slots(experts_TK, weights_TK, experts))
    ids_N, order_N = torch.sort(experts_TK.reshape(-1), stable=True)
    bounds_E1 = torch.searchsorted(ids_N, torch.arange(experts + 1, device=ids_N.device))
    place_N = torch.where(ids_N < experts, torch.arange(ids_N.numel(), device=ids_N.device), -1)
    row_N = torch.empty_like(place_N).scatter_(0, order_N, place_N).int()
    return Order(row_N, order_N // experts_TK.shape[1], weights_TK.reshape(-1)[order_N], bounds_E1)


class Journey:
    """The rows of one batch on their way through a layer: made by the forward pass, and read by the backward pass.

    sent, received: rows to and from each rank. rows: what is under way, or was gathered for it; works: its collectives.
    """

    def __init__(self, order: Order, k: int, kernel: bool):
        self.order, self.k, self.kernel = order, k, kernel
        self.sent: list[int] = []
        self.received: list[int] = []
        self.expert_M: Tensor | None = None
        self.rows: tuple[Tensor, ...] = ()
        self.works: list[dist.Work] = []

    def spread(self, x_TD: Tensor) -> Tensor:
        """Each slot's copy of its token, sorted by expert: [N, D]. On a GPU one pass that reads each token once."""
        if not self.kernel:
            return x_TD[self.order.token_N]
        from bmoe.kernels.rows import spread

        return spread(x_TD, self.order.row_N, self.k)

    def sum_rows(self, rows_SD: Tensor) -> Tensor:
        """The sum of each token's rows in at least fp32, rounded once: [T, D]; no atomics, the same bits every time."""
        if self.kernel:
            from bmoe.kernels.rows import combine

            return combine(rows_SD, self.order.row_N, self.k)
        wide = torch.promote_types(rows_SD.dtype, torch.float32)
        padded_SD = torch.cat([rows_SD, rows_SD.new_zeros(1, rows_SD.shape[1])])  # row -1 is zero
        return padded_SD[self.order.row_N.long()].unflatten(0, (-1, self.k)).sum(1, dtype=wide).to(rows_SD.dtype)

    def to_slots(self, values_S: Tensor) -> Tensor:
        """One number a row brought to its slot, 0 where there is no row: [T, K]."""
        padded_S = torch.cat([values_S, values_S.new_zeros(1)])
        return padded_S[self.order.row_N.long()].view(-1, self.k)

    def land(self) -> tuple[Tensor, ...]:
        """Wait for what is under way, and hand it over."""
        for work in self.works:
            wait(work, "all_to_all_single")
        rows, self.rows, self.works = self.rows, (), []
        return rows


def has_kernel(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


class AllToAll:
    """Rows by torch's uneven all-to-all: NCCL, or gloo on CPUs."""

    def __init__(self, experts: int, group: dist.ProcessGroup):
        """experts: those of all ranks together."""
        self.experts, self.group, self.ranks = experts, group, group.size()

    @torch.no_grad()
    def _plan(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Journey:
        """Rows sorted and gathered, and where they go."""
        kernel = has_kernel(x_TD)
        order = sort_slots(experts_TK, weights_TK, self.experts, kernel)
        journey = Journey(order, experts_TK.shape[1], kernel)
        sent_We = order.bounds_E1.diff().view(self.ranks, -1)
        received_We = torch.empty_like(sent_We)
        wait(dist.all_to_all_single(received_We, sent_We, group=self.group, async_op=True), "all_to_all_single")
        numbers = torch.stack([sent_We.sum(1), received_We.sum(1)]).to("cpu", non_blocking=True)
        copied = torch.cuda.current_stream().record_event() if x_TD.is_cuda else None
        rows_ND = journey.spread(x_TD)
        if copied is not None:
            copied.synchronize()  # the one host sync of a layer, while the device gathers rows
        journey.sent, journey.received = numbers.tolist()
        here = sum(journey.sent)
        journey.rows = rows_ND[:here], order.weight_N[:here]
        journey.expert_M = _experts_of_rows(received_We, sum(journey.received))
        return journey

    def start(self, rows: tuple[Tensor, ...], going: list[int], coming: list[int]) -> tuple[tuple[Tensor, ...], list[dist.Work]]:
        """(where rows will be, the collectives to wait for)."""
        out = tuple(part.new_empty(sum(coming), *part.shape[1:]) for part in rows)
        pairs = zip(out, rows, strict=True)
        return out, [dist.all_to_all_single(a, b.contiguous(), coming, going, group=self.group, async_op=True) for a, b in pairs]

    def depart(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Journey:
        journey = self._plan(x_TD, experts_TK, weights_TK)
        journey.rows = _Depart.apply(x_TD, weights_TK, journey, self)
        return journey

    def arrive(self, journey: Journey) -> tuple[Tensor, Tensor, Tensor]:
        rows_MD, weights_M = _Arrive.apply(*journey.land(), journey, self)
        return rows_MD, journey.expert_M[:, None], weights_M[:, None]

    def bring_back(self, out_MD: Tensor, journey: Journey) -> Tensor:
        return _Return.apply(out_MD, journey, self)


def _experts_of_rows(counts_We: Tensor, rows: int) -> Tensor:
    """This rank's expert of each received row, int64 [rows]; counts_We: rows from each rank for each expert."""
    ends = counts_We.flatten().cumsum(0)
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True) % counts_We.shape[1]


class _Depart(torch.autograd.Function):
    """Sends the rows of a journey. Its gradients have set off before it (`_Arrive`) and land here."""

    @staticmethod
    def forward(ctx, x_TD: Tensor, weights_TK: Tensor, journey: Journey, transport: AllToAll):
        ctx.journey = journey
        out, journey.works = transport.start(journey.rows, journey.sent, journey.received)
        return out

    @staticmethod
    def backward(ctx, grad_MD: Tensor, grad_M: Tensor):
        rows_SD, weights_S = ctx.journey.land()
        return ctx.journey.sum_rows(rows_SD), ctx.journey.to_slots(weights_S), None, None


class _Arrive(torch.autograd.Function):
    """Nothing to rows that have landed; it sends their gradients back."""

    @staticmethod
    def forward(ctx, rows_MD: Tensor, weights_M: Tensor, journey: Journey, transport: AllToAll):
        ctx.journey, ctx.transport = journey, transport
        return rows_MD.view_as(rows_MD), weights_M.view_as(weights_M)

    @staticmethod
    def backward(ctx, grad_MD: Tensor, grad_M: Tensor):
        journey, grads = ctx.journey, (grad_MD.contiguous(), grad_M.contiguous())
        journey.rows, journey.works = ctx.transport.start(grads, journey.received, journey.sent)
        return *grads, None, None  # alive until they have left


class _Return(torch.autograd.Function):
    """What experts made of rows goes back to where the rows came from, and each token sums its own: [M, D] -> y_TD."""

    @staticmethod
    def forward(ctx, out_MD: Tensor, journey: Journey, transport: AllToAll):
        ctx.journey, ctx.transport = journey, transport
        journey.rows, journey.works = transport.start((out_MD,), journey.received, journey.sent)
        return journey.sum_rows(*journey.land())

    @staticmethod
    def backward(ctx, grad_TD: Tensor):
        journey = ctx.journey
        rows_SD = journey.spread(grad_TD.contiguous())[: sum(journey.sent)]
        journey.rows, journey.works = ctx.transport.start((rows_SD,), journey.sent, journey.received)
        return *journey.land(), None, None


class ExpertParallel(nn.Module):
    """Stands in for an MoE layer whose experts are shared by the ranks of a group.

    Takes over the layer's `router`, `experts` and `shared` under the same names, so that the names of parameters stay what
    they are. `experts` already holds this rank's part, counts it in its attribute `experts`, and keeps its contract.
    """

    def __init__(self, layer: nn.Module, experts: int, mesh: DeviceMesh):
        """layer: the MoE layer. experts: how many all ranks hold. mesh: (expert, data_shard)."""
        super().__init__()
        self.router, self.experts, self.shared = layer.router, layer.experts, layer.shared
        self.total, self.mesh = experts, mesh
        self.transport: Transport = AllToAll(experts, mesh.get_group("expert"))

    def route(self, x_TD: Tensor, layout):
        return self.router(x_TD, layout)

    @torch.compiler.disable
    def forward(self, x_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor, residual_TD: Tensor | None = None) -> Tensor:
        """As the layer's: y_TD, or residual_TD + y_TD, in x's dtype. Collective over the group, in the forward and in the backward pass."""
        journey = self.transport.depart(x_TD, experts_TK, weights_TK)
        shared_TD = None if self.shared is None else self.shared(x_TD)
        arrived = self.transport.arrive(journey)
        for part in arrived:  # compiled experts have one program for any number of rows, and no other size is a variable in it
            torch._dynamo.maybe_mark_dynamic(part, 0)
        out_MD = self.experts(*arrived)
        y_TD = self.transport.bring_back(out_MD, journey)
        y_TD = y_TD if shared_TD is None else y_TD + shared_TD
        return y_TD if residual_TD is None else residual_TD + y_TD
