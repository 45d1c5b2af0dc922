"""Spread a model over the ranks of a world, from outside: experts by expert parallelism, then everything by FSDP2.

1. Each rank keeps E / expert of every MoE layer's experts, and `dispatch` brings it their tokens.
2. FSDP2 shards each block's matrices over data_shard x expert, and each rank's experts over data_shard; with replicas, both
   as HSDP. A unit is a block, its experts where they have a mesh of their own (expert parallelism), or the root (embedding
   and head): few, because each takes time of the host, and one inside a block cuts its compiled graph.
   A mesh of one rank gets no units: nothing there is to be gathered or summed, and FSDP2 would copy every weight and gradient
   once a step for it. So the experts of a rank that shares them with no other (data_replicate = data_shard = 1) live as on
   one GPU: rounded to bf16 with split masters, their gradients summed in fp32 by the optimizer. Where every rank has a copy of
   everything (data_shard = expert = 1) there is no unit at all: each batch is that of one GPU, and the optimizer sums all
   gradients over the ranks once a step.
3. Vectors and the router stay whole and fp32 on every rank: they are below 0.1 % of the parameters, and FSDP2 gathers one
   unit in one dtype. The optimizer sums their gradients once a step.

Where memory allows (`fits_gathered`), units stay gathered for all batches of a step, and gradients are reduced once a step:
with b batches a rank, a b-th of the traffic. Else weights are gathered for each pass and freed after it.

Nothing divides a gradient: losses are sums, divided once by the global number of targets, so gradients are summed.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from bmoe.parallel.dispatch import ExpertParallel
from bmoe.parallel.mesh import Mesh
from bmoe.parallel.world import World
from bmoe.recipe import Recipe


def apply(
    model: nn.Module,
    world: World,
    recipe: Recipe,
    whole: Callable[[str, Tensor], bool],
    initial: Callable[[str, torch.Size], Tensor],
    lone: bool = False,
) -> None:
    """Spread `model` (fp32 or fp64, the same on every rank) over `world.mesh`, in place. Collective.

    whole: (name, parameter) -> whether it stays whole on every rank. initial: (name, shape) -> value of a parameter that is
    on the meta device: a model built there never exists as a whole, but a block at a time. The forward pass computes in bf16
    unless the recipe's precision is fp32; gradients are reduced in fp32 and kept in the dtype of the parameters given. The
    optimizer rounds what is in no unit. lone: units on meshes of one rank too, to measure FSDP2 where there is one GPU.
    """
    mesh, low = world.mesh, recipe.precision.kind != "fp32"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
    )

    def unit(module: nn.Module, ranks: DeviceMesh, placement: Callable[[nn.Parameter], Shard] | None = None) -> None:
        if not lone and (ranks.size() == 1 or mesh.copy_group.size() == 1):
            alone.update(module.parameters())
            return
        kept = alone | {p for name, p in model.named_parameters() if whole(name, p)}
        fully_shard(module, mesh=ranks, mp_policy=policy, shard_placement_fn=placement, ignored_params=kept)
        if ranks.size() > 1:  # FSDP2 takes the mean otherwise; alone a factor of 1 would only cost a pass over the gradients
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)

    even, alone = _evenly(mesh), set[nn.Parameter]()
    for number, block in enumerate(model.blocks):
        _materialise(block, f"blocks.{number}.", world.device, initial)
        if block.is_moe and recipe.parallel.expert > 1:
            block.ffn = expert_parallel(block.ffn, mesh)
        if block.is_moe and isinstance(block.ffn, ExpertParallel):
            unit(block.ffn.experts, mesh.experts, even)
        unit(block, mesh.dense, lambda parameter: even(parameter) if parameter.ndim == 3 else Shard(0))
    _materialise(model, "", world.device, initial)
    unit(model, mesh.dense)


def _materialise(module: nn.Module, prefix: str, device: torch.device, initial: Callable[[str, torch.Size], Tensor]) -> None:
    """Give the parameters of `module` that are on the meta device their values, and its buffers (undefined) memory."""
    for name, parameter in list(module.named_parameters()):
        if parameter.is_meta:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(initial(prefix + name, parameter.shape).to(device)))
    for name, buffer in list(module.named_buffers()):
        if buffer.is_meta:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, torch.empty_like(buffer, device=device))


def fits_gathered(model: nn.Module, recipe: Recipe, world: World) -> bool:
    """Whether ranks may keep their units' gathered weights and unreduced gradients (fp32) for a whole optimizer step: they
    take at most a quarter of the smallest GPU, or 2 GiB of host memory. Collective: ranks that differed would wait for ever."""
    weight = 4 if recipe.precision.kind == "fp32" else 2
    gathered = sum(p.numel() for p in model.parameters() if isinstance(p, DTensor))  # numel of a DTensor is that of the whole
    needed = gathered * (weight + 4)
    device = world.device
    memory = torch.cuda.get_device_properties(device).total_memory / 4 if device.type == "cuda" else 2**31
    return not world.max(torch.tensor(float(needed > memory), device=device))


def begin_batch(model: nn.Module, number: int, batches: int) -> None:
    """Before each of the batches of a step whose units stay gathered, counted from 0: weights travel once a step, and
    gradients with its last batch."""
    last = number == batches - 1
    if isinstance(model, FSDPModule) and (number == 0 or last):  # each call walks through all modules
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(last)
        model.set_requires_gradient_sync(last)


def release(model: nn.Module) -> None:
    """Free gathered weights: afterwards `named_parameters` are this rank's parts. A forward pass alone (a validation) leaves
    some of them gathered."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def expert_parallel(layer: nn.Module, mesh: Mesh) -> ExpertParallel:
    """Cut the experts of an MoE layer down to this rank's, and put the dispatch around them."""
    experts, group = layer.experts, mesh.expert_group
    total = experts.experts
    here = total // group.size()
    for name, parameter in list(experts.named_parameters(recurse=False)):
        part = parameter.data[group.rank() * here : (group.rank() + 1) * here].clone()
        setattr(experts, name, nn.Parameter(part))
    experts.experts = here
    return ExpertParallel(layer, total, mesh.canonical)


def _evenly(mesh: Mesh) -> Callable[[nn.Parameter], Shard]:
    """Cut experts along the first dimension that data_shard divides: FSDP2 pads dimension 0 only."""
    shards = mesh.canonical.size(1)

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(next((dim for dim in range(parameter.ndim) if parameter.shape[dim] % shards == 0), 0))

    return placement


def parts(model: nn.Module) -> frozenset[str]:
    """Names of the parameters of which a rank holds a part only: FSDP2's, and those of experts that ranks share."""
    shared = {id(p) for layer in model.modules() if isinstance(layer, ExpertParallel) for p in layer.experts.parameters()}
    return frozenset(name for name, p in model.named_parameters() if isinstance(p, DTensor) or id(p) in shared)


def canonical(model: nn.Module, name: str, value: Tensor) -> Tensor:
    """`value`, this rank's part of something shaped as the parameter `name`, as a DTensor of the whole: [experts, ...] for
    experts, whatever the layout. A parameter that lives whole on every rank gives `value` itself."""
    parameter = model.get_parameter(name)
    owner = model.get_submodule(name.split(".experts.")[0]) if ".experts." in name else None
    if not isinstance(owner, ExpertParallel):
        if not isinstance(parameter, DTensor):
            return value
        return DTensor.from_local(
            value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride(), run_check=False
        )
    shape = torch.Size([owner.total, *parameter.shape[1:]])
    stride = torch.empty(shape, device="meta").stride()
    within = parameter.placements[-1] if isinstance(parameter, DTensor) else Shard(0)  # over data_shard
    return DTensor.from_local(value, owner.mesh, (Shard(0), within), shape=shape, stride=stride, run_check=False)
