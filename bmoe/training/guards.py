"""What is watched for while a run goes on: replicas that drift apart, steps that are not finite, jumps of the loss."""

import json
import math
import statistics
import zlib
from collections import Counter, deque
from pathlib import Path

import torch
from torch import Tensor, nn

from bmoe.data.packing import Batch
from bmoe.data.shards import Shards
from bmoe.errors import FaultError, RunError
from bmoe.parallel.world import World
from bmoe.training.optimizer import AdamW

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SPIKE_WINDOW = 50  # logged losses that a new one is compared with
SPIKE_LEAST = 10  # of them, before anything is called a jump
SPIKE_DEVIATIONS = 8.0  # robust standard deviations: one false alarm in 10^14 for normal noise
SPIKE_SHARE = 1.05  # and at least this times the median


def checksum(tensors: list[Tensor]) -> Tensor:
    """Sum of all bit patterns as integers, int64 []: any single change of a bit changes it."""
    sums = [t.contiguous().view(BITS[t.element_size()]).sum(dtype=torch.int64) for t in tensors]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


def data_checksum(shards: Shards, position: tuple[int, int]) -> int:
    """Of one sequence as this rank reads it from its own copy of the shards; another one at every position."""
    return zlib.crc32(shards.sequence(position[1] % len(shards)).tobytes())


def check_replicas(model: nn.Module, optimizer: AdamW, step: int, position: tuple[int, int], data: int, world: World) -> None:
    """Compare what must be equal on several ranks, bit for bit: parameters that are whole on each, buffers, the copies of
    sharded parameters, the place in the data, and the data there (`data_checksum`). Called before each checkpoint: one pass
    over the weights is nothing beside writing them, and nothing that has drifted is saved. Collective. Raises RunError naming
    the rank whose weights most others do not have; of two, the second.
    """
    if world.size == 1:
        return
    parameters = optimizer.parameters  # the model's own may be gathered at the moment
    whole = [p.data for name, p in parameters.items() if name not in optimizer.parts] + list(model.buffers())
    parts = [optimizer.master(name) for name in parameters if name in optimizer.parts]
    place = torch.tensor([step, *position, data], device=world.device)
    mine = torch.cat([torch.stack([checksum(whole).to(world.device), checksum(parts).to(world.device)]), place])
    table = mine.new_zeros(world.size, mine.numel())
    table[world.rank] = mine
    ranks, copy = world.sum(table).tolist(), world.mesh.copy_group.size()
    usual = _most([row[0] for row in ranks])
    usual_parts = [_most([row[1] for row in ranks[twin::copy]]) for twin in range(copy)]  # ranks that hold the same parts
    for rank, row in enumerate(ranks):
        twin = rank % copy
        if row[2:-1] != ranks[0][2:-1]:
            raise RunError(f"step {step}: rank {rank} is at another place in the data than rank 0; are all ranks reading the same shards?")
        if row[-1] != ranks[0][-1]:
            raise RunError(f"step {step}: rank {rank} reads another sequence at the same place than rank 0; are all shards copies of one?")
        if row[0] != usual or row[1] != usual_parts[twin]:
            same = [
                seen[0] == usual if row[0] != usual else r % copy == twin and seen[1] == usual_parts[twin] for r, seen in enumerate(ranks)
            ]
            other = same.index(True)
            raise FaultError(
                f"step {step}: the weights of rank {rank} have drifted from rank {other}'s, a fault of hardware or of a "
                "library; this step is not saved, --resume goes on from the last checkpoint"
            )


def _most(values: list[int]) -> int:
    """The value that occurs most often, of equals the first."""
    return Counter(values).most_common(1)[0][0]


def save_batches(run: Path, step: int, batches: list[Batch], rank: int) -> Path:
    """Write which sequences this rank's batches of a step held, for a look at what made it non-finite."""
    file = run / f"nonfinite-step-{step}-rank-{rank}.json"
    rows = [{"sequence_ids": b.sequence_ids.tolist(), "epochs": b.epochs.tolist()} for b in batches]
    file.write_text(json.dumps({"step": step, "rank": rank, "batches": rows}) + "\n")
    return file


class Spikes:
    """Notices a logged loss that jumps above the ones before it."""

    def __init__(self):
        self.losses: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def note(self, step: int, loss: float) -> str | None:
        """A sentence if `loss` jumps, else None."""
        if not math.isfinite(loss):
            return None
        known = list(self.losses)
        self.losses.append(loss)
        if len(known) < SPIKE_LEAST:
            return None
        middle = statistics.median(known)
        deviation = 1.4826 * statistics.median(abs(x - middle) for x in known)  # of a normal distribution (Hampel 1974)
        if loss <= max(middle + SPIKE_DEVIATIONS * deviation, SPIKE_SHARE * middle):
            return None
        return f"step {step:,}: the loss jumped to {loss:.3f}, and the {len(known)} before it were around {middle:.3f}"
