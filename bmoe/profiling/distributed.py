"""What ranks spend on each other in a training step: bytes, seconds, and how much of it hides behind arithmetic.

bytes     every collective of one step, counted where torch dispatches it; what leaves a rank by ring algorithms: n (g - 1) / g
          to gather or scatter n bytes over g ranks, twice that to all-reduce them; of an all-to-all, the rows for others
seconds   of the collectives in one step under torch's profiler (NCCL's kernels, or gloo's calls). A rank that comes early
          waits inside, so the time on the wire is that of the rank that came last: the least over ranks, call by call
hidden    the share of those seconds during which other kernels (on the CPU: operators) run on the same rank
link      an all-to-all of equal parts between the same ranks, measured in the same process: what there is to reach
"""

import os
import re
import time
from collections import defaultdict
from pathlib import Path
from statistics import mean, median, quantiles

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from bmoe.model import counts
from bmoe.parallel.world import World
from bmoe.profiling.estimate import expected_load
from bmoe.profiling.measure import synchronise
from bmoe.profiling.race import Ours
from bmoe.profiling.trace import union
from bmoe.profiling.work import model_flops

GIB = 2**30
LINK_BYTES = {"cuda": 2**28, "cpu": 2**22}  # of one rank's message
KINDS = (  # by the names of NCCL's kernels and gloo's calls; gloo reports a reduce-scatter as an all-reduce
    ("all_to_all", r"sendrecv|all_?to_?all"),
    ("all_gather", r"all_?gather"),
    ("reduce_scatter", r"reduce_?scatter"),
    ("all_reduce", r"all_?reduce"),
)
Span = tuple[float, float]


class Ledger(TorchDispatchMode):
    """While active: `sent`, kind of collective -> bytes that leave this rank."""

    def __init__(self):
        super().__init__()
        self.sent: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        packet = getattr(func, "overloadpacket", None)
        if packet is not None and str(packet).startswith("c10d."):
            self._count(str(packet).removeprefix("c10d."), args)
        return func(*args, **(kwargs or {}))

    def _count(self, name: str, args: tuple) -> None:
        if name == "alltoall_base_":
            _, rows, group, _, going = args[:5]
            ranks, here = _size(group), _rank(group)
            away = sum(going) - going[here] if going else rows.shape[0] * (ranks - 1) / ranks
            self.sent["all_to_all"] += away * _bytes(rows[:1])
        elif name == "_allgather_base_":
            self.sent["all_gather"] += _bytes(args[0]) * _part(args[2])
        elif name == "_reduce_scatter_base_":
            self.sent["reduce_scatter"] += _bytes(args[1]) * _part(args[2])
        elif name == "allreduce_":
            self.sent["all_reduce"] += 2 * sum(map(_bytes, args[0])) * _part(args[1])


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _size(group: torch.ScriptObject) -> int:
    return dist.ProcessGroup.unbox(group).size()


def _rank(group: torch.ScriptObject) -> int:
    return dist.ProcessGroup.unbox(group).rank()


def _part(group: torch.ScriptObject) -> float:
    return (_size(group) - 1) / _size(group)


def kind_of(name: str) -> str | None:
    """The collective that a kernel of NCCL or a call of gloo is; None for anything else."""
    low = name.lower()
    if not low.startswith(("nccldev", "gloo:")):  # `nccl:...` are marks around the kernels
        return None
    return next((kind for kind, pattern in KINDS if re.search(pattern, low)), "other")


def overlap(a: list[Span], b: list[Span]) -> float:
    """Length of the intersection of the unions of two sets of spans."""
    a, b = union(a), union(b)
    length, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        length += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return length


def spans_of(events: list, cuda: bool) -> tuple[dict[str, list[Span]], list[Span]]:
    """(collective -> spans of its calls, spans of arithmetic) of a profiler's events, in us."""
    calls: dict[str, list[Span]] = defaultdict(list)
    work: list[Span] = []
    for event in events:
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        if on_device and event.is_user_annotation:
            continue
        span = (event.time_range.start, event.time_range.end)
        kind = kind_of(event.name)
        if kind and on_device == cuda:
            calls[kind].append(span)
        elif cuda and on_device and not event.name.startswith(("Memcpy", "Memset")):
            work.append(span)
        elif not cuda and event.name.startswith("aten::"):
            work.append(span)
    return calls, work


def wire_seconds(calls_of_ranks: list[list[float]]) -> float:
    """Seconds on the wire from each rank's calls of one collective, in us: the least over ranks, call by call where all ranks
    made as many."""
    if len({len(calls) for calls in calls_of_ranks}) == 1:
        return sum(map(min, zip(*calls_of_ranks, strict=True))) / 1e6
    return min(map(sum, calls_of_ranks)) / 1e6


def link_gb_per_s(world: World) -> float | None:
    """GB/s that leave a rank in an all-to-all of equal parts among the ranks that share experts, or among all. Collective."""
    if world.size == 1:
        return None
    group = world.mesh.expert_group if world.mesh.expert_group.size() > 1 else dist.group.WORLD
    ranks, device = group.size(), world.device
    message = torch.zeros(LINK_BYTES[device.type] // ranks * ranks, dtype=torch.uint8, device=device)
    received, seconds = torch.empty_like(message), []
    for _ in range(8):
        synchronise(device)
        dist.barrier(group=group)
        began = time.perf_counter()
        dist.all_to_all_single(received, message, group=group)
        synchronise(device)
        seconds.append(time.perf_counter() - began)
    return float(world.max(torch.tensor(median(seconds[3:]), device=device)) ** -1) * message.numel() * (ranks - 1) / ranks / 1e9


def _gathered(world: World, value: object) -> list:
    """`value` of every rank."""
    if world.size == 1:
        return [value]
    found: list = [None] * world.size
    dist.all_gather_object(found, value)
    return found


def measured(ours: Ours, world: World, trace: str | Path | None) -> dict:
    """Speed, memory and communication of a training step on all ranks; the same on every rank. Writes rank 0's Chrome trace to
    `trace`. Collective."""
    device, recipe, cuda = world.device, ours.subject.recipe, world.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    steps = ours.steps("packed", first=True)
    peaks = _gathered(world, torch.cuda.max_memory_allocated(device) / GIB if cuda else None)
    seconds = [step.seconds for step in steps]
    cuts = quantiles(seconds, n=10, method="inclusive") if len(seconds) > 1 else seconds
    step_s, tokens, residues = median(seconds), mean(s.tokens for s in steps), mean(s.residues for s in steps)
    batches = recipe.training.tokens_per_step // recipe.data.tokens_per_batch
    peak = counts.peak_flops(torch.cuda.get_device_name(device)) if cuda else None
    flops = model_flops(recipe.model, ours.shards.alphabet.size, expected_load(recipe, ours.shards)) * batches
    parallel = recipe.parallel
    return {
        "ranks": world.size,
        "layout": {key: getattr(parallel, key) for key in ("data_replicate", "data_shard", "expert")},
        "step_s": step_s, "step_s_low": cuts[0], "step_s_high": cuts[-1], "steps": len(seconds), "warmup_steps": ours.counts.warmup,
        "tokens_per_step": tokens, "tokens_per_s": tokens / step_s,
        "residues_per_s": residues / step_s, "residues_per_s_per_rank": residues / step_s / world.size,
        "mfu": flops / step_s / (peak * world.size) if peak else None, "peak_flops": peak,
        "memory": {"measured_peak": max(peaks), "measured_peak_of_least": min(peaks)} if cuda else {},
        "experts": recipe.backend.experts if recipe.model.moe else None, "attention": recipe.backend.attention,
        "compiled": bool(recipe.backend.compile), "replayed": recipe.backend.graphs is True,
        **_communication(ours, world, trace),
    }  # fmt: skip


def _communication(ours: Ours, world: World, trace: str | Path | None) -> dict:
    """`communication` and `all_to_all` of the results; see the module. Empty for one rank."""
    device, cuda = world.device, world.device.type == "cuda"
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library writes start and stop to the terminal otherwise
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    with ours.loader() as stream:
        with torch.compiler.set_stance("force_eager"), Ledger() as ledger:  # a mode does not see into compiled blocks
            ours.take(stream.next().batches)
        synchronise(device)
        world.barrier()
        with torch.profiler.profile(activities=activities) as profiler:
            began = time.perf_counter()
            ours.take(stream.next().batches)
            synchronise(device)
            traced_s = time.perf_counter() - began
    if trace is not None and world.rank == 0:
        profiler.export_chrome_trace(str(trace))
    if world.size == 1:
        return {"communication": None, "all_to_all": None}
    calls, work = spans_of(profiler.events(), cuda)
    everything = [span for spans in calls.values() for span in spans]
    total = sum(end - start for start, end in union(everything))
    own = {
        "sent": dict(ledger.sent),
        "calls": {kind: [end - start for start, end in spans] for kind, spans in calls.items()},
        "all": (total, overlap(everything, work)),
        "rows": (sum(end - start for start, end in union(calls["all_to_all"])), overlap(calls["all_to_all"], work)),
        "step": traced_s,
    }
    ranks = _gathered(world, own)
    kinds = sorted({kind for rank in ranks for kind in (*rank["sent"], *rank["calls"])})
    sent = {kind: mean(rank["sent"].get(kind, 0.0) for rank in ranks) for kind in kinds}
    wire = {kind: wire_seconds([rank["calls"].get(kind, []) for rank in ranks]) for kind in kinds}
    seconds, hidden = (sum(rank["all"][i] for rank in ranks) for i in (0, 1))
    rows_s, rows_hidden = (sum(rank["rows"][i] for rank in ranks) for i in (0, 1))
    link = link_gb_per_s(world)
    rows_bytes, rows_wire = sent.get("all_to_all", 0.0), wire.get("all_to_all", 0.0)
    rate = rows_bytes / rows_wire / 1e9 if rows_wire else None
    return {
        "communication": {
            "sent_bytes": sent,
            "wire_s": wire,
            "share": (seconds - hidden) / 1e6 / sum(rank["step"] for rank in ranks),
            "hidden_share": hidden / seconds if seconds else None,
            "label": "bytes and seconds of a rank in a step; share: of the step, while nothing else ran, waits for others included",
        },
        "all_to_all": {
            "bytes": rows_bytes, "wire_s": rows_wire, "gb_per_s": rate, "link_gb_per_s": link,
            "of_link": rate / link if rate and link else None, "hidden_share": rows_hidden / rows_s if rows_s else None,
        },
    }  # fmt: skip
