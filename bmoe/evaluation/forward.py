"""Running a model over sequences that are not in shards: packing, probabilities at chosen slots, and looking inside.

Sequences are token ids with their specials in place. Batches are packed without padding, as in training, so that results do
not depend on what shares a batch.

Legend: T tokens, D width, S sequences, C versions of a sequence of n tokens, M values asked for, V vocabulary, K top-k, L layers.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bmoe.data.alphabet import Alphabet
from bmoe.errors import RequestError
from bmoe.model.counts import forward_flops
from bmoe.model.layers import wide
from bmoe.recipe import Recipe

GPU_FLOPS = 2.0**41  # 20 ms of an H200 with a small model, where launching a pass takes about 10
MOST_SLOTS = 2**18


class Packed(NamedTuple):
    """Some sequences in one row of tokens: arguments of the model, and where each sequence lies."""

    inputs: dict
    bounds: np.ndarray  # int64 [S + 1]


class Request(NamedTuple):
    """Ask for log P(target) at slots of C versions of a sequence (what is hidden or changed differs), in the order of the versions.

    A slot may be asked for several targets.
    """

    tokens_Cn: np.ndarray
    version_M: np.ndarray  # ascending
    slot_M: np.ndarray
    target_M: np.ndarray

    def part(self, begin: int, end: int) -> "Request":
        """The request for the versions `begin` .. `end` alone."""
        first, last = np.searchsorted(self.version_M, [begin, end])
        return Request(self.tokens_Cn[begin:end], self.version_M[first:last] - begin, self.slot_M[first:last], self.target_M[first:last])


def wrap(letters: Alphabet, ids: np.ndarray) -> np.ndarray:
    """`<cls>` + ids + `<eos>`, int64."""
    return np.concatenate([[letters.cls_id], ids.astype(np.int64), [letters.eos_id]])


def batch_slots(recipe: Recipe, device: torch.device) -> int:
    """Token slots of a batch: those of training on a CPU; on a GPU, where launching a pass of few tokens takes longer than running it,
    at least as many as make GPU_FLOPS. Nothing is kept for a backward pass, so that they fit."""
    if device.type != "cuda":
        return recipe.data.tokens_per_batch
    each = forward_flops(recipe.model, 0, 1, 0)
    return max(recipe.data.tokens_per_batch, min(int(GPU_FLOPS / each), MOST_SLOTS))


def packed(sequences: Iterable[np.ndarray], slots: int, device: torch.device) -> Iterator[Packed]:
    """Pack sequences in their order into rows of at most `slots` tokens; a longer sequence gets a row of its own."""
    row: list[np.ndarray] = []
    filled = 0
    for sequence in sequences:
        if row and filled + sequence.size > slots:
            yield _pack(row, device)
            filled, row = 0, []
        row.append(sequence)
        filled += sequence.size
    if row:
        yield _pack(row, device)


def _pack(row: list[np.ndarray], device: torch.device) -> Packed:
    sizes_S = np.array([sequence.size for sequence in row])
    inputs, bounds, _ = _inputs(row, sizes_S, [], device)
    return Packed(inputs, bounds)


def _inputs(
    tokens: list[np.ndarray], sizes_S: np.ndarray, more: list[np.ndarray], device: torch.device
) -> tuple[dict, np.ndarray, list[Tensor]]:
    """The model's arguments for sequences of these sizes, where they lie, and more int64 arrays on the device. All goes over in one
    copy; positions and segments are made there."""
    bounds = np.concatenate([[0], np.cumsum(sizes_S)])
    total = int(bounds[-1])
    flat_T, bounds_S1, *rest = upload([np.concatenate([part.reshape(-1) for part in tokens]), bounds, *more], device)
    segments_T = torch.repeat_interleave(bounds_S1.diff(), output_size=total)
    inputs = {
        "tokens_T": flat_T, "positions_T": torch.arange(total, device=device) - bounds_S1[segments_T], "segments_T": segments_T,
        "cu_seqlens": bounds_S1.int(), "max_seqlen": int(sizes_S.max()), "real_tokens": total,
    }  # fmt: skip
    return inputs, bounds, rest


def check_numbers(values: Tensor | np.ndarray, what: str) -> None:
    """RequestError if a value, of what a model gave, is no finite number; `what` is it called."""
    if not bool(torch.isfinite(torch.as_tensor(values)).all()):
        raise RequestError(f"the model gives {what} that are no numbers; name an earlier checkpoint of the run")


def upload(arrays: list[np.ndarray], device: torch.device) -> list[Tensor]:
    """The arrays as int64 on `device`, in one copy that does not wait for what the device still does: the host prepares the next batch
    meanwhile."""
    sizes = [array.size for array in arrays]
    host = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=host.numpy())
    return list(host.to(device, non_blocking=True).split(sizes))


@torch.no_grad()
def log_probabilities(model: nn.Module, requests: Iterable[Request], slots: int, device: torch.device) -> np.ndarray:
    """log P(target | tokens) of all requests one after the other, float64; the softmax is over the whole vocabulary.

    The requests are consumed as the batches are built, and the device is waited for once, at the end.
    """
    pieces = []
    for batch in _batches(requests, slots):
        counts = np.array([request.tokens_Cn.shape for request in batch])
        begins = np.cumsum(counts.prod(axis=1)) - counts.prod(axis=1)
        asked_M = np.concatenate([
            begin + request.version_M * size + request.slot_M for request, begin, size in zip(batch, begins, counts[:, 1], strict=True)
        ])  # fmt: skip
        rows, place_M = _distinct(asked_M, int(counts.prod(axis=1).sum()))
        more = [rows, place_M, np.concatenate([request.target_M for request in batch])]
        tokens = [request.tokens_Cn for request in batch]
        inputs, _, (select, place, target) = _inputs(tokens, np.repeat(counts[:, 1], counts[:, 0]), more, device)
        logits_MV = wide(model(**inputs, select_M=select).logits)
        pieces.append(logits_MV.log_softmax(dim=-1)[place, target])
    return torch.cat(pieces).double().cpu().numpy() if pieces else np.empty(0)


def _batches(requests: Iterable[Request], slots: int) -> Iterator[list[Request]]:
    """Requests for at most `slots` tokens together, cut between versions; a longer version stands alone."""
    batch: list[Request] = []
    filled = 0
    for request in requests:
        (count, size), begin = request.tokens_Cn.shape, 0
        while begin < count:
            room = (slots - filled) // size
            if room <= 0 and batch:
                yield batch
                batch, filled = [], 0
                continue
            end = min(begin + max(room, 1), count)
            batch.append(request if end - begin == count else request.part(begin, end))
            filled += (end - begin) * size
            begin = end
    if batch:
        yield batch


def _distinct(slot_M: np.ndarray, total: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct of some slots below `total`, ascending, and the place of each among them."""
    asked_T = np.zeros(total, bool)
    asked_T[slot_M] = True
    return np.flatnonzero(asked_T), np.cumsum(asked_T)[slot_M] - 1


@contextmanager
def hidden_states(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect [T, D] states of the forward passes inside: `states[0]` the embeddings, `states[i]` after layer i, the last one
    after the final norm. Each pass starts the list anew."""
    states: list[Tensor] = []
    last = len(model.blocks)

    def enter(_, args) -> None:
        states[:] = [args[0]]

    def leave(_, __, output) -> None:
        states.append(output[0])

    def normed(_, __, output) -> None:
        states[last] = output

    handles = [model.blocks[0].register_forward_pre_hook(enter), model.final_norm.register_forward_hook(normed)]
    handles += [block.register_forward_hook(leave) for block in model.blocks]
    with _removed(handles):
        yield states


@contextmanager
def routes(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect the chosen experts, int64 [T, K] in [0, E], of every layer with experts; each pass starts the list anew."""
    chosen: list[Tensor] = []
    layers = model.moe_layers

    def note(number: int):
        def hook(_, __, routing) -> None:
            if number == 0:
                chosen.clear()
            chosen.append(routing.experts_TK)

        return hook

    handles = [model.blocks[layer].ffn.router.register_forward_hook(note(number)) for number, layer in enumerate(layers)]
    with _removed(handles):
        yield chosen


@contextmanager
def _removed(handles: list) -> Iterator[None]:
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
