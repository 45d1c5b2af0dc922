"""The training step of one rank, for those who measure or compare steps."""

import torch
from torch import Tensor

from bmoe.data.packing import Batch
from bmoe.parallel import shard
from bmoe.parallel.world import World
from bmoe.profiling import Subject, Take
from bmoe.training.step import Stepper


def step_of(subject: Subject, world: World) -> Take:
    """take(batches of this rank, lr) -> (loss, this rank's part; global norm): the step that training takes. Collective."""
    stepper = Stepper(subject.recipe, subject.model, subject.optimizer, world.device)
    stay_gathered = shard.fits_gathered(subject.model, subject.recipe, world)
    moe = subject.recipe.model.moe
    jitter_key = 0 if moe and moe.jitter else None

    def take(batches: list[Batch], lr: float = 1e-9) -> tuple[Tensor, Tensor]:
        totals = torch.tensor([sum(b.targets for b in batches), sum(int(b.real_tokens) for b in batches)])
        if world.size > 1:
            totals = world.sum(totals.to(world.device))
        losses = []
        for number, batch in enumerate(batches):
            if stay_gathered:
                shard.begin_batch(subject.model, number, len(batches))
            losses.append(stepper.backward(batch, totals, jitter_key).loss)
        return torch.stack(losses).sum(), stepper.update(lr)

    return take
