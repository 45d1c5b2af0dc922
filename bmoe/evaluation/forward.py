"""Running a model over sequences that are not in shards: packing, probabilities at chosen slots, and looking inside.

Sequences are token ids with their specials in place. Batches are packed without padding, as in training, so that results do
not depend on what shares a batch.

Legend: T tokens, D width, S sequences, M rows read, V vocabulary, K top-k, L layers.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bmoe.data.alphabet import Alphabet


class Packed(NamedTuple):
    """Some sequences in one row of tokens: arguments of the model, and where each sequence lies."""

    inputs: dict
    bounds: np.ndarray  # int64 [S + 1]
    first: int  # number of the first of these sequences among all


class Request(NamedTuple):
    """Ask for log P(target) at slots of a sequence; a slot may be asked for several targets."""

    tokens: np.ndarray
    slots: np.ndarray
    targets: np.ndarray


def wrap(letters: Alphabet, ids: np.ndarray) -> np.ndarray:
    """`<cls>` + ids + `<eos>`, int64."""
    return np.concatenate([[letters.cls_id], ids.astype(np.int64), [letters.eos_id]])


def packed(sequences: Iterable[np.ndarray], slots: int, device: torch.device) -> Iterator[Packed]:
    """Pack sequences in their order into rows of at most `slots` tokens; a longer sequence gets a row of its own."""
    row: list[np.ndarray] = []
    filled = first = 0
    for sequence in sequences:
        if row and filled + sequence.size > slots:
            yield _pack(row, first, device)
            first, filled, row = first + len(row), 0, []
        row.append(sequence)
        filled += sequence.size
    if row:
        yield _pack(row, first, device)


def _pack(row: list[np.ndarray], first: int, device: torch.device) -> Packed:
    sizes = np.array([s.size for s in row])
    bounds = np.concatenate([[0], np.cumsum(sizes)])
    positions_T = np.arange(bounds[-1]) - np.repeat(bounds[:-1], sizes)
    columns = np.stack([np.concatenate(row), positions_T, np.repeat(np.arange(sizes.size), sizes)]).astype(np.int64)
    tokens_T, positions, segments_T = upload(columns, device)
    inputs = {
        "tokens_T": tokens_T, "positions_T": positions, "segments_T": segments_T,
        "cu_seqlens": upload(bounds.astype(np.int32), device), "max_seqlen": int(sizes.max()), "real_tokens": int(bounds[-1]),
    }  # fmt: skip
    return Packed(inputs, bounds, first)


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """The array on `device`, without waiting for what the device still does: the host prepares the next batch meanwhile."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


@torch.no_grad()
def log_probabilities(model: nn.Module, requests: Iterable[Request], slots: int, device: torch.device) -> list[np.ndarray]:
    """log P(target | tokens) of every request, float64, one array a request; the softmax is over the whole vocabulary.

    The requests are consumed as the batches are built, and the device is waited for once, at the end.
    """
    asked: list[Request] = []

    def remembered() -> Iterator[np.ndarray]:
        for request in requests:
            asked.append(request._replace(tokens=np.empty(0, np.int64)))
            yield request.tokens

    pieces = []
    for batch in packed(remembered(), slots, device):
        here = asked[batch.first : batch.first + batch.bounds.size - 1]
        select = np.concatenate([r.slots + begin for r, begin in zip(here, batch.bounds, strict=False)])
        rows, inverse = np.unique(select, return_inverse=True)
        targets = np.concatenate([r.targets for r in here])
        logits_MV = model(**batch.inputs, select_M=upload(rows, device)).logits
        logits_MV = logits_MV.float() if logits_MV.dtype in (torch.bfloat16, torch.float16) else logits_MV
        pick = upload(np.stack([inverse, targets]).astype(np.int64), device)
        pieces.append(logits_MV.log_softmax(dim=-1)[pick[0], pick[1]])
    if not pieces:
        return []
    flat = torch.cat(pieces).double().cpu().numpy()
    return np.split(flat, np.cumsum([r.slots.size for r in asked])[:-1])


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
