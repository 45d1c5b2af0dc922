"""Timing real training steps: the whole step without any instrument, then its parts in a pass of their own.

A step is data, forward, loss, backward, clip and optimizer, as in training. `Subject` is what the caller built for it.
The step time comes from undisturbed steps: one mark between two steps (on CUDA an event) and no wait for the device, as in
training. The parts come from separate steps with many marks (`timeline`), and kernels and synchronisations from one under torch's
profiler (`trace`).
"""

import math
import time
from collections.abc import Callable, Iterable
from functools import partial, reduce
from itertools import pairwise
from statistics import median, quantiles
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmoe.data.loader import TrainingLoader
from bmoe.data.packing import Batch
from bmoe.data.sampler import Position
from bmoe.precision.conditions import ROW_MULTIPLE
from bmoe.profiling.predict import optimizer_work
from bmoe.profiling.timeline import Mark, Timeline, attached, between, mark
from bmoe.profiling.work import Load, Part, Work, batch_parts
from bmoe.recipe import Recipe


class Subject(NamedTuple):
    """A resolved recipe, its model on the device (compiled if the recipe says so) and an optimizer: `step(lr)`, and its
    tensors by name: moments `m` and `v`, `low` halves of the masters, `sums` of gradients."""

    recipe: Recipe
    model: nn.Module
    optimizer: object


Build = Callable[[Recipe, torch.device], Subject]
Take = Callable[[list[Batch]], object]  # one training step on batches that lie on the CPU


def loss_of(subject: Subject, batch: Batch, targets: int, share: float) -> tuple[Tensor, Tensor]:
    """Forward and loss of one batch, which has `share` of the tokens of a step with `targets` targets: (loss, counts_LE)."""
    key = 0 if subject.recipe.model.moe and subject.recipe.model.moe.jitter else None
    out = subject.model(**batch.model_inputs(), jitter_key=key)
    logits = out.logits.float() if out.logits.dtype == torch.bfloat16 else out.logits
    loss = F.cross_entropy(logits, batch.picked_M, ignore_index=-100, reduction="sum") / max(targets, 1)
    moe = subject.recipe.model.moe
    if moe:
        loss = loss + (moe.balance_loss * out.balance_L.sum() + moe.z_loss * out.z_L.sum()) * share
    return loss, out.counts_LE


def backward(subject: Subject, batch: Batch, targets: int, share: float, timeline: Timeline | None = None) -> Tensor:
    """Forward, loss and backward of one batch; see `loss_of`. Returns counts_LE. The host does not wait for the device."""
    loss, counts_LE = loss_of(subject, batch, targets, share)
    if timeline:
        timeline.phase = "backward"
        timeline.enter("head + loss")
    loss.backward()
    if timeline:
        timeline.enter(None)
        timeline.phase = "forward"
    return counts_LE


def training_step(subject: Subject, batches: list[Batch], device: torch.device, timeline: Timeline | None = None) -> Tensor:
    """One optimizer step on `batches`, as training does it. Returns counts_LE of its last batch."""
    targets, real = sum(b.targets for b in batches), [int(b.real_tokens) for b in batches]
    for batch, tokens in zip(batches, real, strict=True):
        counts_LE = backward(subject, batch.to(device), targets, tokens / sum(real), timeline)
    if timeline:
        timeline.enter("optimizer")
    subject.optimizer.step(1e-9)
    if timeline:
        timeline.enter(None)
    return counts_LE


class Steps(NamedTuple):
    """What undisturbed steps took. `seconds` is one entry a step, wait_s the mean wait for data, load the mean batch.

    residue_share: residues among real tokens. rectangle: padding if each batch were a rectangle.
    """

    seconds: list[float]
    wait_s: float
    load: Load
    residue_share: float
    rectangle: float

    @property
    def middle(self) -> float:
        return median(self.seconds)

    @property
    def bounds(self) -> tuple[float, float]:
        """10th and 90th percentile: what one step of the same thing may take."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        cuts = quantiles(self.seconds, n=10, method="inclusive")
        return cuts[0], cuts[-1]

    def and_later(self, later: "Steps") -> "Steps":
        """These and later steps of the same thing: their spread also has what drifted in between. The load is that of these."""
        n, m = len(self.seconds), len(later.seconds)
        wait_s = (self.wait_s * n + later.wait_s * m) / (n + m)
        return self._replace(seconds=self.seconds + later.seconds, wait_s=wait_s)


def loader(subject: Subject, shards, device: torch.device) -> TrainingLoader:
    """The recipe's training batches from the start."""
    return TrainingLoader(shards, subject.recipe, Position(0, 0), pin=device.type == "cuda")


def whole_steps(
    subject: Subject, shards, device: torch.device, warmup: int, steps: int, limit_s: float = math.inf, take: Take | None = None
) -> Steps:
    """Time `steps` steps after `warmup`, without instruments: one mark between two steps, and the clock around the loader.

    `take` is the step, as training takes it (replayed, where it is replayed); None: `training_step`.
    As in training the host does not wait for a GPU, but it runs at most one step ahead of the one that is timed. After
    `limit_s` seconds no further step begins, but two are always taken (one if `steps` is 1).
    """
    subject.model.train()
    take = take or partial(training_step, subject, device=device)
    latest = -2 if device.type == "cuda" else -1  # mark that has passed, or soon will
    ends, wait, seen = [], 0.0, []
    with loader(subject, shards, device) as stream:
        for number in range(warmup + steps):
            if number == warmup:
                ends.append(mark(device))
            if len(ends) > 2 and _passed(ends[0], ends[latest]) > limit_s:
                break
            began = time.perf_counter()
            batches = stream.next().batches
            waited = time.perf_counter() - began
            take(batches)
            if number >= warmup:
                ends.append(mark(device))
                wait += waited
                seen.extend(batches)
        synchronise(device)
    seconds = [between(start, end) for start, end in pairwise(ends)]
    n = len(seen)
    load = Load(
        tokens=seen[0].tokens_T.numel(), real=sum(int(b.real_tokens) for b in seen) // n,
        pairs=sum(b.pairs for b in seen) / n, targets=sum(b.picked_M.numel() for b in seen) // n,
    )  # fmt: skip
    return Steps(seconds, wait / len(seconds), load, sum(b.residues for b in seen) / (load.real * n), _rectangle(seen))


def _passed(start: Mark, end: Mark) -> float:
    """Seconds between two marks; waits until the second has passed."""
    if not isinstance(end, float):
        end.synchronize()
    return between(start, end)


def _rectangle(batches: list[Batch]) -> float:
    """Share of slots that would be padding if each batch were a rectangle as wide as its longest sequence."""
    real = slots = 0
    for batch in batches:
        ends = batch.cu_seqlens[batch.cu_seqlens <= batch.real_tokens]
        lengths = ends.diff()
        lengths = lengths[lengths > 0]
        real += int(lengths.sum())
        slots += int(lengths.max()) * lengths.numel()
    return 1.0 - real / slots


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def parts(subject: Subject, shards, device: torch.device, passes: int) -> dict[str, dict[str, float]]:
    """Part -> {forward_s, backward_s, seconds} of ONE batch (optimizer: of one step), mean over `passes` marked steps."""
    timeline, batches_seen = Timeline(device), 0
    with loader(subject, shards, device) as stream:
        for number in range(passes + 1):
            batches = stream.next().batches
            with attached(subject.model, timeline):
                training_step(subject, batches, device, timeline)
            if number == 0:  # the first one warms up what runs uncompiled here
                timeline.marks.clear()
            else:
                batches_seen += len(batches)
    found: dict[str, dict[str, float]] = {}
    for (part, phase), seconds in timeline.seconds().items():
        entry = found.setdefault(part, {"forward_s": 0.0, "backward_s": 0.0, "seconds": 0.0})
        seconds /= passes if part == "optimizer" else batches_seen
        entry[f"{phase}_s"] += seconds
        entry["seconds"] += seconds
    return found


def works(names: Iterable[str], recipe: Recipe, vocabulary: int, load: Load) -> dict[str, Work]:
    """Part -> closed-form work of one batch, forward and backward (optimizer: of one step). `experts` has that of all their
    parts, which have none besides it."""
    names, known = list(names), batch_parts(recipe.model, vocabulary, load, 4 if recipe.precision.kind == "fp32" else 2)
    known["optimizer"] = Part(optimizer_work(recipe, vocabulary), Work())
    inside = ("dispatch", "experts gemm 1", "experts activation", "experts gemm 2", "combine")
    found = {}
    for name in names:
        members = inside if name == "experts" else () if name in inside and "experts" in names else (name,)
        found[name] = reduce(Work.plus, (work for n in members if n in known for work in known[n][:2]), Work())
    return found


def achieved(found: dict[str, dict], recipe: Recipe, vocabulary: int, load: Load, ceiling: dict) -> None:
    """Add what each part of one batch achieves, from its closed-form work; null where none is defined.

    flops, bytes, `tflops`, `gb_per_s`; `intensity`, FLOP per byte; `bound`, the ceiling that its work meets first
    (arithmetic or memory); `ceiling_share`, the time the part would take at that ceiling over the time it takes.
    """
    done = works(found, recipe, vocabulary, load)
    for name, entry in found.items():
        flops, moved = done[name].flops, done[name].bytes
        seconds = entry["seconds"]
        entry |= {"flops": flops or None, "bytes": moved or None}
        entry["tflops"] = flops / seconds / 1e12 if flops and seconds else None
        entry["gb_per_s"] = moved / seconds / 1e9 if moved and seconds else None
        entry["intensity"] = flops / moved if flops and moved else None
        low = name.startswith("experts") and "low_matmul_tflops" in ceiling
        eight = (2 / 3 if recipe.precision.kind == "fp8_row" else 1.0) if low else 0.0  # share of the products in 8 bits
        arithmetic = flops / 1e12 * ((1 - eight) / ceiling["matmul_tflops"] + (eight / ceiling["low_matmul_tflops"] if eight else 0.0))
        memory = moved / (ceiling["copy_gb_per_s"] * 1e9)
        entry["bound"] = ("arithmetic" if arithmetic > memory else "memory") if moved else None
        entry["ceiling_share"] = max(arithmetic, memory) / seconds if moved and seconds else None


def padding_rows(counts_LE: Tensor, kind: str) -> float:
    """Rows that alignment adds to each expert's rows, as a share of the real ones."""
    multiple, rows = ROW_MULTIPLE[kind], counts_LE.long()
    return float((-rows % multiple).sum() / rows.sum().clamp(min=1))
