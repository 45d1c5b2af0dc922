"""When to stop: limits, and how the ranks agree on them without a host ever waiting for its device.

Each rank's wish travels with the step's totals, in the all-reduce that is made anyway before the step's backward passes, and
is read after the step was launched. So all ranks stop after the same step: at the latest the one after the wish.
"""

import signal
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bmoe.parallel.world import World


@dataclass
class Limits:
    """When to stop before `training.steps`: after a step, after seconds since `began`, or when `signal` is set (by a handler)."""

    stop_at: int | None = None
    max_seconds: float | None = None
    signal: int = 0
    began: float = field(default_factory=time.monotonic)


class Stopping:
    """The wishes of all ranks. Time counts from when the limits were made, at the start of the command."""

    def __init__(self, limits: Limits, world: World):
        self.limits, self.world = limits, world
        self.votes: Tensor | None = None
        self.copied = torch.cuda.Event() if world.device.type == "cuda" else None

    def wishes(self) -> list[int]:
        """This rank's: time is up, Ctrl-C, another signal; each 0 or 1."""
        limits = self.limits
        late = limits.max_seconds is not None and time.monotonic() - limits.began >= limits.max_seconds
        return [int(late), int(limits.signal == signal.SIGINT), int(limits.signal not in (0, signal.SIGINT))]

    def count(self, votes: Tensor) -> None:
        """Take the sum of `wishes` over all ranks, int64 [3] on the device; starts its copy to the host."""
        self.votes = votes.to("cpu", non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def decided(self) -> bool:
        """Whether this step is the last one, the same on every rank; `limits.signal` becomes what any rank was sent."""
        if self.world.size == 1:
            return any(self.wishes())
        if self.copied is not None:
            self.copied.synchronize()
        late, interrupted, terminated = self.votes.tolist()
        if interrupted or terminated:
            self.limits.signal = self.limits.signal or (signal.SIGTERM if terminated else signal.SIGINT)
        return bool(late or interrupted or terminated)
