"""Contestants that train on the same sequences, timed in turns: ours, and others beside them.

All are in memory at once. A pass is some steps in a row of one contestant with one form of its batches and one routing; passes
go round, ours first and last, so that the chip's clock favours none. Between two steps lies a mark, and the host does not
wait for the device, as in training. Rates count residues: no padding, no <cls>, no <eos>.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import NamedTuple, Protocol

import torch

from bmoe.data.loader import TrainingLoader
from bmoe.data.sampler import Position
from bmoe.parallel.world import World
from bmoe.profiling.measure import Subject, Take, synchronise
from bmoe.profiling.timeline import between, mark

PASSES = 3
"""Of each lane on a GPU: the median of three steps ignores one."""


class Seen(NamedTuple):
    """What was in a step of one rank: real tokens, residues, slots."""

    tokens: float
    residues: float
    slots: float


class Step(NamedTuple):
    """One step of all ranks: seconds of the slowest, and the sum of what they saw."""

    seconds: float
    tokens: float
    residues: float
    slots: float


class Counts(NamedTuple):
    """Untimed steps before the first pass of a form, and steps of a pass."""

    warmup: int
    steps: int


class Contestant(Protocol):
    """Something that trains on the recipe's sequences.

    form_names: the forms of its batches. resident: bytes on the device between steps. `steps` runs a pass; `first` is
    whether it is the first of its form, which compiles.
    """

    name: str
    form_names: tuple[str, ...]
    resident: int

    def steps(self, form: str, first: bool) -> list[Step]: ...


class Ours:
    """One of our implementations of the experts; its batches are packed."""

    form_names = ("packed",)

    def __init__(self, subject: Subject, take: Take, shards, world: World, counts: Counts, resident: int = 0):
        self.subject, self.take, self.shards, self.world, self.counts, self.resident = subject, take, shards, world, counts, resident
        self.name = f"bmoe-{subject.recipe.backend.experts}"
        self.reached = 0  # bytes that its steps have taken before, such as those that a CUDA graph was recorded from

    def steps(self, form: str, first: bool) -> list[Step]:
        self.subject.model.train()
        with self.loader() as stream:
            for _ in range(self.counts.warmup if first else again(self.world.device)):
                self.take(stream.next().batches)
            return timed_steps(lambda _: self._one(stream), self.counts.steps, self.world)

    def loader(self) -> TrainingLoader:
        """This rank's training batches from the start."""
        cuda = self.world.device.type == "cuda"
        return TrainingLoader(self.shards, self.subject.recipe, Position(0, 0), self.world.rank, self.world.size, pin=cuda)

    def _one(self, stream: TrainingLoader) -> Seen:
        batches = stream.next().batches
        self.take(batches)
        real, residues = sum(int(b.real_tokens) for b in batches), sum(b.residues for b in batches)
        return Seen(real, residues, sum(b.tokens_T.numel() for b in batches))


def again(device: torch.device) -> int:
    """Untimed steps before a later pass: other contestants have used the device, and a new loader has no batches ready yet."""
    return 3 if device.type == "cuda" else 0


def allocated(device: torch.device) -> int:
    """Bytes of tensors on a GPU; 0 elsewhere, where they are not counted."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def timed_steps(take: Callable[[int], Seen], count: int, world: World) -> list[Step]:
    """Take steps 0 .. count - 1. Collective."""
    synchronise(world.device)
    world.barrier()
    marks, seen = [mark(world.device)], []
    for number in range(count):
        seen.append(take(number))
        marks.append(mark(world.device))
    synchronise(world.device)
    here = {"dtype": torch.float64, "device": world.device}
    seconds = world.max(torch.tensor([between(*both) for both in pairwise(marks)], **here)).tolist()
    return [Step(*both) for both in zip(seconds, *zip(*world.sum(torch.tensor(seen, **here)).tolist(), strict=True), strict=True)]


class Lane:
    """What one contestant did with one form and routing: `passes`, each a list of steps, and the peak in bytes."""

    def __init__(self, contestant: Contestant, form: str, routing: str):
        self.contestant, self.form, self.routing = contestant, form, routing
        self.passes: list[list[Step]] = []
        self.peak = contestant.reached if isinstance(contestant, Ours) else 0
        self.out_of_memory = False

    @property
    def key(self) -> str:
        return f"{self.contestant.name} {self.form} {self.routing}"

    def run(self, first: bool, world: World) -> None:
        """A pass. One process goes on without a contestant that does not fit; several ranks could not agree on it."""
        if self.out_of_memory:
            return
        device, before = world.device, allocated(world.device)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        try:
            steps = self.contestant.steps(self.form, first)
        except torch.cuda.OutOfMemoryError:
            if world.size > 1:
                raise
            self.out_of_memory = True
            torch.cuda.empty_cache()
            return
        if not first:
            self.passes.append(steps)
        if device.type == "cuda":  # the first pass too: what a CUDA graph needs is allocated when it is recorded
            self.peak = max(self.peak, torch.cuda.max_memory_allocated(device) - before + self.contestant.resident)

    def row(self) -> dict:
        """The numbers of --json: means over the steps of a pass of their medians over passes."""
        if not self.passes:
            return {"step_s": None, "tokens_per_s": None, "residues_per_s": None, "label": "out of memory"}
        each = list(zip(*self.passes, strict=False))
        step_s = mean(median(step.seconds for step in same) for same in each)
        tokens, residues, slots = (mean(getattr(same[0], name) for same in each) for name in ("tokens", "residues", "slots"))
        means = [mean(step.seconds for step in one) for one in self.passes]
        return {
            "step_s": step_s, "step_s_low": min(means), "step_s_high": max(means), "passes_s": means,
            "steps": sum(map(len, self.passes)), "tokens_per_s": tokens / step_s, "residues_per_s": residues / step_s,
            "tokens_per_step": tokens, "fill": tokens / slots, "peak_memory_gib": self.peak / 2**30 if self.peak else None,
        }  # fmt: skip


def race(
    ours: Sequence[Contestant], theirs: Sequence[Contestant], routings: Sequence[str], switch: Callable[[str], None], world: World
) -> list[Lane]:
    """Every contestant in every form and routing, in turns, ours first and last. `switch` sets the routing.

    On a GPU three passes of each, so that one that was disturbed does not count (a baseline's took 125 ms a step beside 77 once),
    and a fourth of ours; one of each on the CPU, where that would take minutes. Collective.
    """
    lanes = [Lane(c, form, routing) for routing in routings for c in (*ours, *theirs) for form in c.form_names]

    def run(lane: Lane, first: bool) -> None:
        switch(lane.routing)
        lane.run(first, world)

    met = {}
    for lane in lanes:  # one program serves both routings
        other = met.setdefault((lane.contestant.name, lane.form), lane)
        if other is lane:
            run(lane, first=True)
        lane.peak, lane.out_of_memory = other.peak, other.out_of_memory
    for _ in range(PASSES if world.device.type == "cuda" else 1):
        for lane in lanes:
            run(lane, first=False)
    for lane in lanes:
        if lane.contestant in ours and world.device.type == "cuda":
            run(lane, first=False)
    return lanes


def results_of(lanes: list[Lane], reference: str) -> dict:
    """{baseline: {"NAME FORM ROUTING": row}, ratios: the same keys -> residues/s of `reference` over that baseline's}."""
    rows = {lane.key: lane.row() for lane in lanes}
    ratios = {}
    for lane in lanes:
        rate, mine = rows[lane.key]["residues_per_s"], rows[f"{reference} packed {lane.routing}"]["residues_per_s"]
        if rate and mine and not isinstance(lane.contestant, Ours) and lane.contestant.name != reference:
            ratios[lane.key] = mine / rate
    return {"baseline": rows, "ratios": ratios}
