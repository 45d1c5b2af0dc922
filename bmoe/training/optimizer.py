"""AdamW with fp32 masters, decoupled weight decay on matrices only, one global clip, and no host sync.

Weights in bf16 keep their masters (see kernels/adamw.py); weights in fp32 or fp64 are their own masters. A gradient that is
accumulated over several batches is summed in fp32, never in bf16. A step whose gradient norm is not finite changes nothing
and is counted, on the device.
"""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from bmoe.kernels.adamw import Tensors, adamw_split, join_master, split_master, step_scalars
from bmoe.recipe import OptimizerSection, ScheduleSection


def learning_rate(step: int, peak: float, schedule: ScheduleSection, steps: int) -> float:
    """Rate of step `step` (1-based): linear warm-up over `warmup_steps`, then decay to final_fraction x peak at `steps`."""
    if step <= schedule.warmup_steps:
        return peak * step / schedule.warmup_steps
    if schedule.decay == "constant" or steps <= schedule.warmup_steps:
        return peak
    progress = min(1.0, (step - schedule.warmup_steps) / (steps - schedule.warmup_steps))
    shape = 1.0 - progress if schedule.decay == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * shape)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Whether a parameter is a matrix (or a stack of one per expert), and not a norm weight or a bias (or a stack of those)."""
    return parameter.ndim >= 2 and not name.endswith("bias")


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that lives on this rank (DTensor), or the tensor."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _sum_of_squares(gradients: list[Tensor]) -> Tensor:
    """fp32 (fp64 for fp64) []."""
    wide = torch.float64 if gradients[0].dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=wide)).square().sum()


class AdamW:
    """AdamW over named parameters.

    Args:
        parameters: (name, parameter) pairs. bf16 parameters keep fp32 masters, taken from `masters` if given.
        section: the recipe's optimizer section.
        accumulate: whether several backward passes make one step, or ranks sum their gradients: in fp32 either way.
        masters: fp32 values of the bf16 parameters before they were rounded.
        parts: names of the parameters of which this rank holds a part only.
        reduce: sums a 0-dim tensor over the ranks that together hold those (identity for one process).
        sum_whole: sums gradients over all ranks in place, for the parameters that are whole on every rank; None for one process.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        section: OptimizerSection,
        accumulate: bool = False,
        masters: dict[str, Tensor] | None = None,
        parts: frozenset[str] = frozenset(),
        reduce: Callable[[Tensor], Tensor] = lambda x: x,
        sum_whole: Callable[[list[Tensor]], None] | None = None,
    ):
        self.section, self.accumulate, self.parts, self.reduce, self.sum_whole = section, accumulate, parts, reduce, sum_whole
        self.parameters = {name: p for name, p in parameters if p.requires_grad}
        self.low: dict[str, Tensor] = {}
        self.m: dict[str, Tensor] = {}
        self.v: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}
        self.packed: dict[str, Tensor] = {}
        self.held = False
        for name, p in self.parameters.items():
            here = local(p.data)
            if p.dtype == torch.bfloat16:
                source = here.float() if masters is None else local(masters.pop(name))  # freed as it is split
                high, self.low[name] = split_master(source.to(here.device))
                here.copy_(high)
                if accumulate:
                    self.sums[name] = torch.zeros_like(here, dtype=torch.float32)
                    p.register_post_accumulate_grad_hook(self._accumulate(name))
            dtype = torch.bfloat16 if section.state_dtype == "bf16" else (here.dtype if p.dtype == torch.float64 else torch.float32)
            self.m[name] = torch.zeros_like(here, dtype=dtype)
            self.v[name] = torch.zeros_like(here, dtype=dtype)
        device = next(iter(self.m.values())).device
        self.fused = self._fuse() if device.type == "cuda" else None
        self.rate = torch.zeros((), dtype=torch.float64, device=device)
        self.attempted = torch.zeros((), dtype=torch.int64, device=device)  # steps, the skipped ones included
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_a_row = torch.zeros((), dtype=torch.int64, device=device)
        self.longest_row = torch.zeros((), dtype=torch.int64, device=device)  # of skipped steps, since `longest_skipped`

    def _fuse(self):
        """The kernels that step all parameters at once (kernels/adamw_triton.py); None if one is float64."""
        if any(p.dtype == torch.float64 for p in self.parameters.values()):
            return None
        from bmoe.kernels.adamw_triton import Fused  # imported here: it needs triton

        tensors = [self._tensors(name, self.sums.get(name, local(p.data))) for name, p in self.parameters.items()]
        sharded = [name in self.parts for name in self.parameters]
        return Fused(tensors, [self._decay(name) for name in self.parameters], sharded, clear=self.accumulate)

    def _tensors(self, name: str, gradient: Tensor) -> Tensors:
        """What the step of a parameter touches on this rank."""
        return Tensors(local(self.parameters[name].data), self.low.get(name), gradient, self.m[name], self.v[name])

    def _decay(self, name: str) -> float:
        return self.section.weight_decay if is_matrix(name, self.parameters[name]) else 0.0

    def _accumulate(self, name: str) -> Callable[[nn.Parameter], None]:
        sums = self.sums  # and not self: a parameter, its hook and the optimizer would keep each other alive for ever

        def hook(p: nn.Parameter) -> None:
            sums[name] += local(p.grad)
            p.grad = None

        return hook

    def gradient(self, name: str) -> Tensor:
        """This rank's part of a gradient. Raises if a parameter has none: every weight must train."""
        if name in self.sums:
            return self.sums[name]
        p = self.parameters[name]
        if p.grad is None:
            raise RuntimeError(f"{name} has no gradient")
        return local(p.grad)

    def global_norm(self) -> Tensor:
        """L2 norm of the whole gradient, fp32 or fp64 [] on the device, equal on every rank."""
        if self.fused:
            self.locate()
            of_parts, of_whole = self.fused.squares()
            return (self.reduce(of_parts) + of_whole if self.parts else of_whole).sqrt()
        parts = [name for name in self.parameters if name in self.parts]
        whole = [name for name in self.parameters if name not in self.parts]
        squares = [self.reduce(_sum_of_squares([self.gradient(name) for name in parts]))] if parts else []
        squares += [_sum_of_squares([self.gradient(name) for name in whole])] if whole else []
        return sum(squares).sqrt()

    def locate(self) -> None:
        """Tell the kernels where the gradients are. Before a CUDA graph is recorded this sends the addresses that it will use."""
        if self.fused:
            self.fused.locate([self._tensors(name, self._packed(name)) for name in self.parameters])

    @property
    def located(self) -> list[list[int]] | None:
        """Where the kernels look for the tensors of a step; a value of before can be set again."""
        return self.fused.addresses if self.fused else None

    @located.setter
    def located(self, addresses: list[list[int]] | None) -> None:
        if self.fused and addresses is not self.fused.addresses:
            self.fused.send(addresses)

    def _packed(self, name: str) -> Tensor:
        """A gradient as the kernels take it: itself, or a contiguous copy in a place of its own."""
        gradient = self.gradient(name)
        if gradient.is_contiguous():
            return gradient
        if name not in self.packed:
            self.packed[name] = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        return self.packed[name].copy_(gradient)

    def step(self, lr: float) -> Tensor:
        """`set_rate`, then `update`."""
        self.set_rate(lr)
        return self.update()

    def set_rate(self, lr: float) -> None:
        """The learning rate of the updates from here on."""
        self.rate.fill_(lr)

    def update(self) -> Tensor:
        """`sum_over_ranks`, then `apply`."""
        self.sum_over_ranks()
        return self.apply()

    @torch.no_grad()
    def sum_over_ranks(self) -> None:
        """Sum the gradients of what is whole on every rank. Collective."""
        if self.sum_whole is not None:
            self.sum_whole([self.gradient(name) for name in self.parameters if name not in self.parts])

    @torch.no_grad()
    def apply(self) -> Tensor:
        """Clip, update, clear the gradients. Returns the norm before clipping; a non-finite one skips the step.

        All that changes from step to step is read on the device, so that a CUDA graph of this can be replayed.
        """
        s = self.section
        norm = self.global_norm()
        counters = (self.attempted, self.skipped, self.skipped_in_a_row)
        if self.fused:
            scalars = self.fused.scalars(norm, self.rate, *counters, s.clip_norm, *s.betas)
            self.fused.step(scalars, *s.betas, s.eps)
        else:
            scalars = step_scalars(norm, self.rate, *counters, s.clip_norm, *s.betas)
            narrow = scalars.float()
            for name, p in self.parameters.items():
                weight, low, gradient, m, v = self._tensors(name, self.gradient(name))
                own = scalars if p.dtype == torch.float64 else narrow
                adamw_split(weight, low, gradient, m, v, own, *s.betas, s.eps, self._decay(name))
        torch.maximum(self.longest_row, self.skipped_in_a_row, out=self.longest_row)
        self.clear()
        return norm

    def longest_skipped(self) -> int:
        """The longest row of skipped steps that there was since the last call; waits for the device."""
        longest = int(self.longest_row)
        self.longest_row.zero_()
        return longest

    def hold_gradients(self) -> None:
        """Keep what accumulates in `grad` over several batches in its place from here on: it is cleared by zeroing.

        A CUDA graph adds to the memory that it was recorded with. Without accumulation it overwrites that memory instead.
        """
        if not self.accumulate or self.held:
            return
        self.held = True
        kept = {name: p for name, p in self.parameters.items() if name not in self.sums}
        missing = [name for name, p in kept.items() if p.grad is None]
        if 0 < len(missing) < len(kept):  # in the middle of a step
            raise RuntimeError(f"{missing[0]} has no gradient")
        for name in missing:
            kept[name].grad = torch.zeros_like(kept[name])

    def clear(self) -> None:
        """Forget the gradients. The kernels leave zeros in those that accumulate."""
        for name, p in self.parameters.items():
            kept = self.sums[name] if name in self.sums else p.grad if self.held else None
            if kept is not None and (not self.fused or name in self.packed):
                kept.zero_()
            if name in self.sums or not self.held:
                p.grad = None

    def master(self, name: str) -> Tensor:
        """The fp32 (or fp64) master of a parameter, this rank's part."""
        here = local(self.parameters[name].data)
        return join_master(here, self.low[name]) if name in self.low else here

    @torch.no_grad()
    def load_master(self, name: str, value: Tensor) -> None:
        """Set a master from a checkpoint."""
        here = local(self.parameters[name].data)
        if name in self.low:
            high, low = split_master(value.float())
            here.copy_(high)
            self.low[name].copy_(low)
        else:
            here.copy_(value)
