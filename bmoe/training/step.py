"""One optimizer step of one rank: forward and backward of its batches, then the update; eager, or replayed as CUDA graphs.

The loss of a step is the SUM of cross entropies over the targets of all its batches on all ranks, divided once by their
number. Balance and z-loss are per layer and per batch, averaged over the step's batches weighted by real tokens, summed
over layers, times their coefficients. Nothing else divides anything, so the loss does not depend on the layout.

Legend: L MoE layers, E experts, M rows of the head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmoe.data.packing import NO_TARGET, Batch
from bmoe.precision.conditions import ROW_MULTIPLE
from bmoe.recipe import Recipe
from bmoe.training.graphs import Graphs
from bmoe.training.optimizer import AdamW


@dataclass(frozen=True)
class StepSums:
    """Sums over batches, in one tensor on the device: loss [], then balance_L, z_L, padding_L, counts_LE.

    padding_L: rows that the experts' kernels add so that each expert's rows are a multiple.
    """

    flat: Tensor
    layers: int
    experts: int

    def __add__(self, other: "StepSums") -> "StepSums":
        return StepSums(self.flat + other.flat, self.layers, self.experts)

    @property
    def loss(self) -> Tensor:
        return self.flat[0]

    @property
    def balance_L(self) -> Tensor:
        return self.flat[1 : 1 + self.layers]

    @property
    def z_L(self) -> Tensor:
        return self.flat[1 + self.layers : 1 + 2 * self.layers]

    @property
    def padding_L(self) -> Tensor:
        return self.flat[1 + 2 * self.layers : 1 + 3 * self.layers]

    @property
    def counts_LE(self) -> Tensor:
        return self.flat[1 + 3 * self.layers :].view(self.layers, self.experts)


class Stepper:
    """Forward, backward and update of one rank.

    Args:
        recipe: resolved. model, optimizer: as `setup` built them. device: theirs.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, optimizer: AdamW, device: torch.device):
        self.recipe, self.model, self.optimizer, self.device = recipe, model, optimizer, device
        self.row_multiple = ROW_MULTIPLE.get(recipe.precision.kind, 1) if recipe.backend.experts == "te" else 1
        self.graphs = Graphs(self._losses, optimizer, device) if recipe.backend.graphs is True else None
        # Experts in FP8 of our own: with several batches a rank and step their weights are quantised before the first.
        split = recipe.parallel
        ranks = split.data_replicate * split.data_shard * split.expert
        several = recipe.training.tokens_per_step > ranks * recipe.data.tokens_per_batch
        self.holders = [module for module in model.modules() if several and hasattr(module, "hold") and _whole(module)]
        self.begun = False

    def backward(self, batch: Batch, totals: Tensor, jitter_key: int | None = None) -> StepSums:
        """Add the gradient of one batch, which lies on the CPU. `totals`: the step's (targets, real tokens, ..), int64.

        The host does not wait for the device.
        """
        if not self.begun:
            self.begun = True
            for experts in self.holders:
                experts.hold()
        if self.graphs:
            flat = self.graphs.backward(batch, totals, jitter_key)
        else:
            moved = batch.to(self.device)
            flat = self._losses(moved.model_inputs(), moved.picked_M, totals, jitter_key)
        moe = self.recipe.model.moe
        return StepSums(flat, len(self.model.moe_layers), moe.experts if moe else 0)

    def update(self, lr: float) -> Tensor:
        """Clip, update and clear the gradients; returns their global norm before clipping, on the device."""
        self.begun = False
        for experts in self.holders:
            experts.let_go()
        return self.graphs.update(lr) if self.graphs else self.optimizer.step(lr)

    def _losses(self, inputs: dict, picked_M: Tensor, totals: Tensor, jitter_key: Tensor | int | None) -> Tensor:
        """Forward and backward of one batch; what `StepSums` holds of it."""
        out = self.model(**inputs, jitter_key=jitter_key)
        entropy = summed_entropy(out.logits, picked_M)
        per_target = totals[0].clamp(min=1).to(entropy.dtype).reciprocal()
        share = inputs["real_tokens"].to(out.balance_L.dtype) / totals[1]
        # The gradients of loss = entropy / targets + share (sum of the layers' losses), given as such: a dozen tiny passes less.
        roots = [(entropy, per_target)]
        moe = self.recipe.model.moe
        if moe:
            losses = ((out.balance_L, moe.balance_loss), (out.z_L, moe.z_loss))
            roots += [(loss_L, (share * weight).expand_as(loss_L)) for loss_L, weight in losses if loss_L.requires_grad]
        torch.autograd.backward(*zip(*roots, strict=True))
        none_L = torch.zeros_like(out.balance_L)
        padding_L = none_L if self.row_multiple == 1 else torch.remainder(-out.counts_LE, self.row_multiple).sum(-1)
        parts = ((entropy * per_target).view(1), out.balance_L * share, out.z_L * share, padding_L, out.counts_LE.flatten())
        return torch.cat([x.detach().to(entropy.dtype) for x in parts])


def _whole(module: nn.Module) -> bool:
    """Whether FSDP2 shards nothing of a module; while it is gathered, its parameters do not tell."""
    return not any(isinstance(p, DTensor) for p in module.parameters())


def summed_entropy(logits_MV: Tensor, targets_M: Tensor) -> Tensor:
    """Sum of cross entropies over the rows that have a target, at least fp32."""
    if logits_MV.is_cuda and logits_MV.dtype == torch.bfloat16:
        from bmoe.kernels.cross_entropy import WIDEST, cross_entropy  # imported here: it needs triton

        if logits_MV.shape[1] <= WIDEST:
            return cross_entropy(logits_MV, targets_M)
    wide = logits_MV.float() if logits_MV.dtype == torch.bfloat16 else logits_MV
    return F.cross_entropy(wide, targets_M, ignore_index=NO_TARGET, reduction="sum")
