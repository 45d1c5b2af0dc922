"""The state of a run as named tensors and numbers: what a checkpoint holds, and how it comes back.

A tensor that is sharded over ranks is handed over as a DTensor of the whole, experts as [experts, ...], so that any layout
loads what any other has saved.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from bmoe.data.sampler import Position
from bmoe.parallel.shard import canonical, release
from bmoe.training.checkpoint import load, read_meta
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


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """model.NAME -> parameter or persistent buffer: what is needed to use a model."""
    release(model)
    names = {name for name, _ in model.named_parameters()}
    tensors = {f"model.{name}": canonical(model, name, local(p.data)) for name, p in model.named_parameters()}
    return tensors | {f"model.{name}": value for name, value in model.state_dict().items() if name not in names}


def each_tensor(model: nn.Module, optimizer: AdamW) -> Iterator[tuple[str, Tensor]]:
    """The whole state of training, one tensor at a time, because the fp32 master of a bf16 weight is made when asked for.

    Filling one in place fills the state, but for those masters: see `restore`.
    """
    for name, value in model_tensors(model).items():
        name = name.removeprefix("model.")
        yield f"model.{name}", canonical(model, name, optimizer.master(name)) if name in optimizer.parameters else value
    for kind, moments in (("m", optimizer.m), ("v", optimizer.v)):
        for name, value in moments.items():
            yield f"optimizer.{kind}.{name}", canonical(model, name, value)
    yield "optimizer.skipped", optimizer.skipped
    yield "optimizer.skipped_in_a_row", optimizer.skipped_in_a_row


def all_tensors(model: nn.Module, optimizer: AdamW) -> dict[str, Tensor]:
    """`each_tensor`, together."""
    return dict(each_tensor(model, optimizer))


def load_state(checkpoint: Path, model: nn.Module, optimizer: AdamW, checked: bool = False) -> Progress:
    """Put the state of a checkpoint, written by any layout, into `model` and `optimizer`. Collective. Raises RequestError.

    checked: see `checkpoint.load`.
    """
    tensors = all_tensors(model, optimizer)
    load(checkpoint, tensors, checked)
    meta = read_meta(checkpoint)
    restore(model, optimizer, tensors, meta["step"])
    return Progress.from_meta(meta)


@torch.no_grad()
def restore(model: nn.Module, optimizer: AdamW, tensors: dict[str, Tensor], step: int) -> None:
    """Put loaded tensors (those of `all_tensors`) back where they cannot be loaded in place: the split masters."""
    for name in optimizer.low:
        optimizer.load_master(name, local(tensors[f"model.{name}"]))
    optimizer.attempted.fill_(step)
