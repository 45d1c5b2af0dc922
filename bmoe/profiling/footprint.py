"""Memory of a training step as it is, by category, beside the closed form of `memory`.

Weights, gradients and the optimizer's state are tensors that can be counted, on every device. Activations are what the
forward pass leaves allocated for the backward pass: on CUDA by the allocator, on the CPU the tensors that autograd saves.
Workspace is what the peak needs besides. The peak is the allocator's; a CPU has none to ask, so there it is the process's
largest resident size, which includes libraries and data.
"""

import resource
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor

from bmoe.profiling.measure import Subject, loader, loss_of
from bmoe.profiling.memory import GIB


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address -> bytes of each storage once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


class _Saved:
    """Storages that autograd saves, weights left out."""

    def __init__(self, weights: dict[int, int]):
        self.weights, self.kept = weights, []

    def pack(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self.weights:
            self.kept.append(tensor)  # alive, so that no other storage takes its address
        return tensor

    def bytes(self) -> int:
        return sum(_storages(self.kept).values())


def by_category(subject: Subject, shards, device: torch.device) -> tuple[dict[str, float | str], Tensor]:
    """GiB: weights, gradients, optimizer, activations, workspace (CUDA), peak, and a label; and counts_LE of a batch.

    Takes one training step, eagerly (compiled where the model is).
    """
    model, optimizer, cuda = subject.model, subject.optimizer, device.type == "cuda"
    weights = _storages([*model.parameters(), *model.buffers()])
    state = _storages(tensor for named in (optimizer.m, optimizer.v, optimizer.low) for tensor in named.values())
    sums = sum(_storages(optimizer.sums.values()).values())
    saved = _Saved(weights)
    with loader(subject, shards, device) as stream:
        batches = stream.next().batches
    targets, real = sum(b.targets for b in batches), sum(int(b.real_tokens) for b in batches)
    gradients = activations = 0
    for batch in batches:
        share = int(batch.real_tokens) / real
        batch = batch.to(device)
        before = torch.cuda.memory_allocated(device) if cuda else 0
        with nullcontext() if cuda else torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            loss, counts_LE = loss_of(subject, batch, targets, share)
        activations = torch.cuda.memory_allocated(device) - before if cuda else saved.bytes()
        saved.kept.clear()
        loss.backward()
        del loss
        gradients = sum(_storages(p.grad for p in model.parameters() if p.grad is not None).values())
    optimizer.step(1e-9)
    peak = torch.cuda.max_memory_allocated(device) if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    static = sum(weights.values()) + sum(state.values()) + sums
    found = {
        "weights": sum(weights.values()),
        "gradients": gradients + sums,
        "optimizer": sum(state.values()),
        "activations": activations,
        **({"workspace": max(0, peak - static - max(activations, gradients))} if cuda else {}),
        "peak": peak,
    }
    label = "counted tensors; peak of the allocator" if cuda else "counted tensors; peak is the whole process's resident size"
    return {**{name: size / GIB for name, size in found.items()}, "label": label}, counts_LE.cpu()
