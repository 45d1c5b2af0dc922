"""From shards to the batches of a training step or of a validation.

Training: the stream of batches is one global sequence; batch b of a step goes to rank b mod world. Each rank plans the
whole stream (lengths only) and builds its own batches, in a background thread, so that the device does not wait.

Validation: a fixed prefix of a fixed order of the split, with a seed of its own. Neither the training seed nor the size or
number of batches changes which residues are asked for.
"""

import queue
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from bmoe.data import objectives
from bmoe.data.packing import Batch, pack, to_batch
from bmoe.data.sampler import Crops, Position, Sampler
from bmoe.data.shards import Shards
from bmoe.errors import RequestError
from bmoe.recipe import Recipe

VALIDATION_SEED = 2**40 + 1
PREFETCH = 2  # steps prepared ahead


class Step(NamedTuple):
    """This rank's batches of one optimizer step, and the sampler's position after the whole step."""

    batches: list[Batch]
    after: Position


def build_sampler(shards: Shards, recipe: Recipe, seed: int, sampling: str | None = None) -> Sampler:
    """The sampler of a split as the recipe's data section says."""
    data = recipe.data
    sampling = sampling or data.sampling
    if sampling == "cluster" and shards.clusters is None:
        raise RequestError(
            f"data.sampling: cluster needs shards with clusters, and {data.path} has none; "
            "prepare it with --clusters, or use sampling: sequence"
        )
    window = None if data.alphabet == "protein" else data.window
    return Sampler(shards, data.max_length, seed, sampling, window, data.window_overlap if window else 0)


def build_batch(shards: Shards, crops: Crops, recipe: Recipe, seed: int, all_mask: bool = False, slots: int | None = None) -> Batch:
    """Pack crops and apply the recipe's objective. `all_mask`: every MLM target shown as `<mask>`."""
    data = recipe.data
    skip_soft = data.soft_mask == "no_loss"
    packed = pack(shards, crops, slots or data.tokens_per_batch, seed, data.reverse_complement, skip_soft)
    if recipe.objective.kind == "clm":
        inputs, targets = objectives.clm(packed, shards.alphabet, skip_soft)
    else:
        inputs, targets = objectives.mlm(packed, shards.alphabet, recipe.objective, seed, all_mask, skip_soft)
    return to_batch(packed, inputs, targets, data.max_length)


class TrainingLoader:
    """Endless steps of one rank from a position of the sampler. Use as a context manager: it owns a thread."""

    def __init__(self, shards: Shards, recipe: Recipe, position: Position, rank: int = 0, world: int = 1, pin: bool = False):
        self.shards, self.recipe, self.rank, self.world, self.pin = shards, recipe, rank, world, pin
        self.per_step = recipe.training.tokens_per_step // recipe.data.tokens_per_batch
        self.stream = build_sampler(shards, recipe, recipe.seed).batches(position, recipe.data.tokens_per_batch)
        self.queue: queue.Queue[Step | BaseException] = queue.Queue(PREFETCH)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._work, name="bmoe-loader", daemon=True)

    def __enter__(self) -> "TrainingLoader":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        while self.thread.is_alive():  # a full queue would keep the thread from seeing the event
            try:
                self.queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def next(self) -> Step:
        """The next step. Re-raises what went wrong in the thread."""
        item = self.queue.get()
        if isinstance(item, BaseException):
            raise item
        return item

    def _work(self) -> None:
        try:
            while not self.stopped.is_set():
                self.queue.put(self._build())
        except BaseException as error:  # noqa: B036 - handed to the training thread, which raises it
            self.queue.put(error)

    def _build(self) -> Step:
        batches = []
        for b in range(self.per_step):
            crops, after = next(self.stream)
            if b % self.world == self.rank:
                batch = build_batch(self.shards, crops, self.recipe, self.recipe.seed)
                batches.append(batch.pin() if self.pin else batch)
        return Step(batches, after)


def validation_crops(shards: Shards, recipe: Recipe, budget: int | None) -> Crops:
    """The crops a validation looks at: the longest prefix of the fixed order within `budget` slots (at least one crop;
    None: all of them)."""
    sampler = build_sampler(shards, recipe, VALIDATION_SEED, "sequence")
    crops = sampler.crops(0, 0, sampler.units if budget is None else min(sampler.units, budget // 3 + 1))
    if budget is None:
        return crops
    return crops.cut(0, max(1, int(np.searchsorted(np.cumsum(crops.slots), budget, side="right"))))


def validation_batches(
    shards: Shards, recipe: Recipe, budget: int | None, all_mask: bool = False, rank: int = 0, world: int = 1
) -> Iterator[Batch]:
    """This rank's validation batches; batch b goes to rank b mod world."""
    crops, slots = validation_crops(shards, recipe, budget), recipe.data.tokens_per_batch
    ends, begin, number = np.cumsum(crops.slots), 0, 0
    while begin < ends.size:
        filled = int(ends[begin - 1]) if begin else 0
        end = int(np.searchsorted(ends, filled + slots, side="right"))
        if number % world == rank:
            yield build_batch(shards, crops.cut(begin, end), recipe, VALIDATION_SEED, all_mask)
        begin, number = end, number + 1
