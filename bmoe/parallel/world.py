"""The ranks of a run, and the few collectives that training needs; one process is a world of one without any."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class World:
    """This process among its peers.

    device: where the model lives. mesh: (data_replicate, data_shard, expert), or None for one process.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

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
        """Sum over the ranks that hold different parts of one copy of the parameters, in place."""
        if self.size > 1:
            for name in ("data_shard", "expert"):
                dist.all_reduce(tensor, group=self.mesh.get_group(name))
        return tensor

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.size > 1:
            dist.barrier()
