"""The ranks of a run, and the few collectives that training needs; one process is a world of one without any."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from bmoe.parallel.mesh import Mesh, build_mesh
from bmoe.recipe import ParallelSection

LARGE = 2**20
"""Elements of a tensor that a collective of its own sums at the full rate; a copy of it would only cost memory."""


def wait(work: dist.Work, collective: str) -> None:
    """Wait for a collective that was started before; the watchdog reads its name here (`watchdog.where`)."""
    work.wait()


@dataclass(frozen=True)
class World:
    """This process among its peers.

    device: where the model lives. mesh: how the ranks share the model; None before the recipe is resolved, and for one
    process.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: Mesh | None = None

    def arrange(self, parallel: ParallelSection) -> "World":
        """This world with the mesh of a resolved recipe. Collective."""
        if self.size == 1:
            return self
        return replace(self, mesh=build_mesh(self.device.type, parallel.data_replicate, parallel.data_shard, parallel.expert))

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """Maximum over all ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    def sum_shards(self, tensor: Tensor) -> Tensor:
        """Sum over the ranks that hold different parts of one copy of the sharded parameters, in place."""
        if self.mesh is not None:
            dist.all_reduce(tensor, group=self.mesh.copy_group)
        return tensor

    def sum_all(self, tensors: list[Tensor]) -> None:
        """Sum each tensor over all ranks, in place: large ones each by itself, the small ones in one collective a dtype."""
        if self.size == 1:
            return
        large = [t for t in tensors if t.numel() >= LARGE and t.is_contiguous()]
        works = [dist.all_reduce(t, async_op=True) for t in large]
        alone = {id(t) for t in large}
        small = [t for t in tensors if id(t) not in alone]
        for dtype in sorted({t.dtype for t in small}, key=str):
            same = [t for t in small if t.dtype == dtype]
            flat = torch.cat([t.reshape(-1) for t in same])
            dist.all_reduce(flat)
            torch._foreach_copy_(same, [part.view_as(t) for part, t in zip(flat.split([t.numel() for t in same]), same, strict=True)])
        for work in works:
            wait(work, "all_reduce")

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()
