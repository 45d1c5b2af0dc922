"""When to stop: limits, and how the ranks agree on them without a host ever waiting for its device.

Each rank's wish travels with the step's totals, in the all-reduce that is made anyway before the step's backward passes, and
is read after the step was launched. So all ranks stop after the same step: at the latest the one after the wish. Before the
first step they ask each other (`Stopping.asked`): data and weights may have taken longer than a scheduler waits.
"""

import signal
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bmoe.parallel.world import World


@dataclass
class Limits:
    """When to stop before `training.steps`: after a step, after seconds since `began`, or when one of `signals` has come."""

    stop_at: int | None = None
    max_seconds: float | None = None
    signals: list[int] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    agreed: int = 0  # what another rank was sent: this one's own may yet come, and is no second one

    @property
    def signal(self) -> int:
        """The last one that came, here or else to another rank; 0 if none did."""
        return self.signals[-1] if self.signals else self.agreed

    def take(self, number: int) -> None:
        """What a handler does: a signal asks for a stop at the end of the step; a second Ctrl-C interrupts at once."""
        if self.signals and number == self.signals[-1] == signal.SIGINT:
            raise KeyboardInterrupt
        self.signals.append(number)


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
        return self._sent(interrupted, terminated) or bool(late)

    def asked(self) -> bool:
        """Whether a signal has come to any rank, outside a step; one that comes to this rank after its vote is not asked yet.
        Collective."""
        _, interrupted, terminated = self.world.sum(torch.tensor(self.wishes()).to(self.world.device)).tolist()
        return self._sent(interrupted, terminated)

    def _sent(self, interrupted: int, terminated: int) -> bool:
        """Whether a rank has voted for a signal, which this one then knows of."""
        if interrupted or terminated:
            self.limits.agreed = signal.SIGTERM if terminated else signal.SIGINT
        return bool(interrupted or terminated)
