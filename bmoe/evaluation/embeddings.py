"""Embeddings of sequences, for use outside: one vector a residue, or their mean.

Layer 0 is the embedding table, layer i the residual stream after layer i, the last layer is taken after the final norm.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from bmoe.data.alphabet import Alphabet
from bmoe.errors import RequestError, RunError
from bmoe.evaluation.files import read_fasta
from bmoe.evaluation.forward import batch_slots, check_numbers, hidden_states, packed, wrap
from bmoe.files import whole
from bmoe.recipe import Recipe

MODES = ("residue", "mean")


@torch.no_grad()
def states(
    model: nn.Module, sequences: Iterable[np.ndarray], slots: int, device: torch.device, layers: list[int] | None = None
) -> Iterator[list[Tensor]]:
    """The states of `layers` (None: all) of each sequence of tokens with specials: fp32 [tokens - 2, D] each, on `device`,
    without the specials' rows."""
    with hidden_states(model) as collected:
        for batch in packed(sequences, slots, device):
            model(**batch.inputs, select_M=None)
            wanted = [collected[layer].float() for layer in (layers if layers is not None else range(len(collected)))]
            for begin, end in zip(batch.bounds[:-1], batch.bounds[1:], strict=True):
                yield [state_TD[begin + 1 : end - 1] for state_TD in wanted]


def embed(
    model: nn.Module,
    recipe: Recipe,
    letters: Alphabet,
    fasta: str | Path,
    out: str | Path,
    device: torch.device,
    mode: str = "residue",
    layer: int | None = None,
) -> dict:
    """Write embeddings of a FASTA's sequences to a safetensors file, one fp32 tensor per identifier: [residues, D], or [D] for
    the mean.

    `layer` None is the last. Returns what was written. RequestError for identifiers that occur twice or a layer that is not there.
    """
    depth = len(model.blocks)
    layer = depth if layer is None else layer
    if mode not in MODES:
        raise RequestError(f"--mode {mode}: embeddings are by {' or '.join(MODES)}")
    if not 0 <= layer <= depth:
        raise RequestError(f"--layer {layer}: the model has layers 0 (the embedding table) to {depth}")
    records = read_fasta(fasta, letters)
    names = [header.split(None, 1)[0] if header else f"record_{i + 1}" for i, (header, _) in enumerate(records)]
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise RequestError(f"{fasta}: the identifier {name} occurs twice, and embeddings are named by it; make it unique")
        seen.add(name)
    sequences = (wrap(letters, ids) for _, ids in records)
    tensors = {}
    for name, (state_nD,) in zip(names, states(model, sequences, batch_slots(recipe, device), device, [layer]), strict=True):
        tensors[name] = (state_nD.mean(dim=0) if mode == "mean" else state_nD).cpu().contiguous().clone()
        check_numbers(tensors[name], "embeddings")
    try:
        with whole(out) as partial:
            save_file(tensors, partial, {"model": recipe.name, "alphabet": letters.name, "mode": mode, "layer": str(layer)})
    except (OSError, SafetensorError) as error:
        raise RunError(f"{out} cannot be written: {error}") from None
    longest = max(ids.size for _, ids in records)
    return {
        "file": str(out), "mode": mode, "layer": layer, "sequences": len(records), "width": recipe.model.width,
        "residues": int(sum(ids.size for _, ids in records)), "longest": int(longest),
        "longer_than_trained": sum(ids.size + 2 > recipe.data.max_length for _, ids in records),
    }  # fmt: skip
