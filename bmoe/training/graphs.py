"""A training step as two CUDA graphs: forward and backward of one batch, and the optimizer's update.

A step of a model of moderate size launches a thousand kernels of some ten microseconds each, which the host cannot issue
fast enough. A graph is recorded once and replayed with one call. It needs fixed addresses and shapes: a batch has a
fixed number of slots already, its inputs are copied into memory of their own, and the two lengths that vary from batch to
batch (segments and targets) get some room, filled up with empty segments and rows without a target. A batch that does
not fit makes the graphs be recorded anew, with more room.

The first batches before each recording, and the first update, run eagerly: that compiles, tunes and loads what is compiled,
tuned and loaded at first use, which a recording would not survive. They are ordinary parts of training, and nothing is
computed twice. torch waits for the device nowhere here but in a recording. Ranks that each have a copy of the whole model sum
their gradients between the two graphs.

The memory of a recording stays reserved: validation and whatever runs eagerly needs its own beside it.
"""

import gc
from collections.abc import Callable

import torch
from torch import Tensor

from bmoe.data.packing import NO_TARGET, SEGMENT_MULTIPLE, Batch
from bmoe.training.optimizer import AdamW

WARM_UP = 2
"""Eager batches before a recording."""

ROOM = 1.1
"""Room for segments and targets, relative to the batch that a recording starts with."""

Losses = Callable[[dict, Tensor, Tensor, Tensor | None], Tensor]


class Graphs:
    """Records and replays.

    Args:
        losses: (model inputs, picked_M, totals, jitter key) -> flat sums; runs forward and backward, with all its tensor
        arguments on the device. optimizer: whose parameters get the gradients.
    """

    def __init__(self, losses: Losses, optimizer: AdamW, device: torch.device):
        self.losses, self.optimizer, self.device = losses, optimizer, device
        self.stream = torch.cuda.Stream(device)
        self.inputs: Inputs | None = None
        self.updated = False
        self._forget()

    def _forget(self) -> None:
        """Drop the recordings; the next batches run eagerly. Sums that are under way stay."""
        self.batches_run = 0
        self.pool = torch.cuda.graph_pool_handle()
        self.batch_graph: torch.cuda.CUDAGraph | None = None
        self.update_graph: torch.cuda.CUDAGraph | None = None
        self.flat = self.norm = None
        self.gradients: list[Tensor | None] = []
        self.located: list[list[int]] | None = None

    def backward(self, batch: Batch, totals: Tensor, jitter_key: int | None) -> Tensor:
        """Forward and backward of a batch on the CPU; returns what `losses` does."""
        with self._on_stream():
            if self.inputs is None or not self.inputs.fit(batch):
                self._forget()
                self.inputs = Inputs(batch, totals, jitter_key, self.device, grown_from=self.inputs)
            self.inputs.fill(batch, totals, jitter_key)
            if self.batches_run < WARM_UP:
                self.batches_run += 1
                return self.losses(*self.inputs.arguments())
            if self.batch_graph is None:
                self.optimizer.hold_gradients()
                self.batch_graph, self.flat = self._record(lambda: self.losses(*self.inputs.arguments()))
                self.gradients = [p.grad for p in self.optimizer.parameters.values()]  # the graph writes into this memory
            self.batch_graph.replay()
            return self.flat.clone()

    def update(self, lr: float) -> Tensor:
        """One update; returns the norm of the gradient."""
        with self._on_stream():
            self.optimizer.set_rate(lr)
            if self.batch_graph is None or not self.updated:
                self.updated = True
                return self.optimizer.update()
            self.optimizer.sum_over_ranks()
            if self.update_graph is None:
                self.optimizer.locate()
                self.update_graph, self.norm = self._record(self.optimizer.apply)
                self.located = self.optimizer.located
            self.optimizer.located = self.located  # a step outside of the recording may have been elsewhere
            self.update_graph.replay()
            return self.norm.clone()

    def _record(self, function: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        graph = torch.cuda.CUDAGraph()
        gc.collect()
        collecting = gc.isenabled()
        gc.disable()  # an object that unloads a kernel when it dies would end the recording
        try:
            # Other threads pin memory for the next batches meanwhile, which a recording that watched them would refuse.
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
                result = function()
        finally:
            if collecting:
                gc.enable()
        return graph, result

    def _on_stream(self) -> "_OnStream":
        return _OnStream(self.stream)


class _OnStream:
    """Work on a stream, ordered with the caller's stream before and after it."""

    def __init__(self, stream: torch.cuda.Stream):
        self.stream, self.inside = stream, torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        self.inside.__enter__()

    def __exit__(self, *error: object) -> None:
        self.inside.__exit__(*error)
        torch.cuda.current_stream(self.stream.device).wait_stream(self.stream)


class Inputs:
    """Device memory for the inputs of a batch, with room."""

    def __init__(self, batch: Batch, totals: Tensor, jitter_key: int | None, device: torch.device, grown_from: "Inputs | None" = None):
        slots = batch.tokens_T.numel()
        self.max_seqlen = batch.max_seqlen
        self.fillers = {"cu_seqlens": slots}
        if batch.select_M is not None:
            self.fillers |= {"select_M": 0, "picked_M": NO_TARGET}
        self.tensors: dict[str, Tensor] = {}
        for name, value in _tensors(batch, totals, jitter_key).items():
            shape = list(value.shape)
            if name in self.fillers:
                before = grown_from.tensors[name].numel() if grown_from and name in grown_from.tensors else 0
                shape = [max(room(value.numel()), before)]
            self.tensors[name] = torch.empty(shape, dtype=value.dtype, device=device)

    def fit(self, batch: Batch) -> bool:
        """Whether a batch's inputs go in here."""
        small = batch.cu_seqlens.numel() <= self.tensors["cu_seqlens"].numel() and batch.max_seqlen == self.max_seqlen
        if batch.select_M is None:
            return small and "select_M" not in self.tensors
        return small and "select_M" in self.tensors and batch.select_M.numel() <= self.tensors["select_M"].numel()

    def fill(self, batch: Batch, totals: Tensor, jitter_key: int | None) -> None:
        """Copy a batch in; from pinned memory in the background."""
        for name, value in _tensors(batch, totals, jitter_key).items():
            place = self.tensors[name]
            if name not in self.fillers:
                place.copy_(value, non_blocking=True)
                continue
            place[: value.numel()].copy_(value, non_blocking=True)
            place[value.numel() :].fill_(self.fillers[name])

    def arguments(self) -> tuple[dict, Tensor, Tensor, Tensor | None]:
        """(model inputs, picked_M, totals, jitter key) as `losses` takes them."""
        held = dict(self.tensors)
        picked_M, totals, key = held.pop("picked_M"), held.pop("totals"), held.pop("jitter_key", None)
        return {"select_M": None, **held, "max_seqlen": self.max_seqlen}, picked_M, totals, key


def _tensors(batch: Batch, totals: Tensor, jitter_key: int | None) -> dict[str, Tensor]:
    named = {name: value for name, value in batch.model_inputs().items() if isinstance(value, Tensor)}
    named |= {"picked_M": batch.picked_M, "totals": totals}
    return named if jitter_key is None else named | {"jitter_key": torch.tensor(jitter_key)}


def room(length: int) -> int:
    """Entries for a tensor whose length is `length` in one batch and a little different in the next."""
    return -(-int(length * ROOM + 1) // SEGMENT_MULTIPLE) * SEGMENT_MULTIPLE
