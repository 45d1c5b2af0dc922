"""The state of a run as named tensors and numbers: what a checkpoint holds, and how it comes back.

A tensor that is sharded over ranks is handed over as a DTensor of the whole, experts as [experts, ...], so that any layout
loads what any other has saved.
"""

from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from bmoe.data.sampler import Position
from bmoe.parallel.shard import canonical
from bmoe.training.optimizer import AdamW, local


@dataclass
class Progress:
    """Where a run stands: whole optimizer steps, the sampler's position after them, real tokens seen."""

    step: int = 0
    position: Position = Position(0, 0)
    tokens: int = 0

    def as_meta(self) -> dict:
        return {**asdict(self), "position": list(self.position)}

    @staticmethod
    def from_meta(meta: dict) -> "Progress":
        return Progress(meta["step"], Position(*meta["position"]), meta["tokens"])


def model_tensors(model: nn.Module, optimizer: AdamW | None = None) -> dict[str, Tensor]:
    """model.NAME -> master (or, without an optimizer, the parameter itself) and persistent buffers."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        tensors[f"model.{name}"] = canonical(model, name, optimizer.master(name) if optimizer else local(parameter.data))
    parameters = dict(model.named_parameters())
    for name, value in model.state_dict().items():
        if name not in parameters:
            tensors[f"model.{name}"] = value
    return tensors


def all_tensors(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """The whole state of training."""
    tensors = model_tensors(model, optimizer)
    for kind, moments in (("m", optimizer.m), ("v", optimizer.v)):
        for name, value in moments.items():
            tensors[f"optimizer.{kind}.{name}"] = canonical(model, name, value)
    tensors["optimizer.skipped"] = optimizer.skipped
    return tensors


@torch.no_grad()
def restore(model: nn.Module, optimizer: AdamW, tensors: dict[str, Tensor], step: int) -> None:
    """Put loaded tensors (those of `all_tensors`) back where they cannot be loaded in place: the split masters."""
    for name in optimizer.low:
        optimizer.load_master(name, local(tensors[f"model.{name}"]))
    optimizer.step_count = step
