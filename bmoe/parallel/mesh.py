"""Who shares what: the ranks of a run as a grid of data_replicate x data_shard x expert.

    rank = (replica x data_shard + shard) x expert + expert_rank

so the ranks of one expert-parallel group are neighbours (on one node, as long as `expert` fits there). Every rank is a data
rank with batches of its own. Dense parameters are sharded over the data_shard x expert ranks of a replica; experts are split
over `expert`, and each part is sharded over `data_shard`; replicas repeat all of it.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Mesh(NamedTuple):
    """Views of the one grid.

    dense: ([data_replicate,] dense_shard), over which dense parameters are sharded; replicas only if there are several.
    experts: ([data_replicate,] data_shard), over which one rank's experts are sharded.
    canonical: (expert, data_shard), where the parts of a whole [experts, ...] tensor lie: first cut by expert, then by shard.
    """

    dense: DeviceMesh
    experts: DeviceMesh
    canonical: DeviceMesh

    @property
    def copy_group(self) -> dist.ProcessGroup:
        """The ranks that together hold one copy of the parameters."""
        return self.dense.get_group("dense_shard")

    @property
    def expert_group(self) -> dist.ProcessGroup:
        """The ranks that together hold all experts, in the order of the experts."""
        return self.canonical.get_group("expert")


def build_mesh(device_type: str, replicas: int, shards: int, experts: int) -> Mesh:
    """The mesh of a world of replicas x shards x experts ranks. Collective."""
    dense = init_device_mesh(device_type, (replicas, shards * experts), mesh_dim_names=("data_replicate", "dense_shard"))
    ranks = torch.arange(replicas * shards * experts).view(replicas, shards, experts)
    grid = DeviceMesh(device_type, ranks.transpose(1, 2).contiguous(), mesh_dim_names=("data_replicate", "expert", "data_shard"))
    several = ("data_replicate",) if replicas > 1 else ()
    return Mesh(dense[(*several, "dense_shard")], grid[(*several, "data_shard")], grid["expert", "data_shard"])
