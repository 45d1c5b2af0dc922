"""What do experts specialise in? Which residues, which secondary structure, which places, and whom they follow.

For every layer, how often each expert serves each label is counted over the routed slots of real, unmasked sequences, and
summed up as mutual information in bits: 0 is no relation, log2 of the number of experts or labels is the most. With finite
counts it is above 0 by chance, and neighbours share both experts and labels; so it stands beside a permutation null, in
which the labels are moved along the sequences by random distances, their own order kept.

Legend: L layers with experts, E experts, T tokens, K top-k, C labels.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bmoe.data.alphabet import Alphabet
from bmoe.data.loader import VALIDATION_SEED, validation_crops
from bmoe.data.packing import pack
from bmoe.data.shards import Shards
from bmoe.errors import RequestError
from bmoe.evaluation import labels as labelling
from bmoe.evaluation.forward import batch_slots, packed, routes, wrap
from bmoe.evaluation.routing import summary
from bmoe.evaluation.statistics import SEED
from bmoe.recipe import Recipe

BUDGET = 65_536  # token slots of each part
PERMUTATIONS = 100
PLACES = (16, 64, 128, 256, 512)  # upper ends of the bins of position in the sequence


def evaluate(
    model: nn.Module, shards: Shards, recipe: Recipe, *, device: torch.device, budget: int = BUDGET, structures: str | Path | None = None
) -> dict:
    """Routing of the split's first `budget` token slots; `structures` is a table for `bmoe eval --probe`.

    Returns layers (load, entropy, dead experts), and per question (residue, position, next_layer, and structure with a
    table) names of the labels and per layer the share of each expert's tokens with each label and that of all experts
    (`overall`), their mutual information, the mean and 95 % point of the null, and the chance p of the null. RequestError for
    a dense model.
    """
    if not model.moe_layers:
        raise RequestError("this model is dense and has no experts to look at: leave --routing out")
    crops, letters = validation_crops(shards, recipe, budget), shards.alphabet
    cuts = [pack(shards, crops.cut(i, i + 1), size, VALIDATION_SEED) for i, size in enumerate(crops.slots.tolist())]
    chosen_LTK = _route(model, (cut.tokens_T for cut in cuts), recipe, device)
    E, kinds = model.experts, letters.size
    is_residue = np.concatenate([cut.origin_T >= 0 for cut in cuts])
    tokens = np.concatenate([cut.tokens_T for cut in cuts])[is_residue]
    place = np.searchsorted(PLACES, np.concatenate([cut.positions_T for cut in cuts])[is_residue], side="left")
    inner = chosen_LTK[:, is_residue]
    counts_LE = np.stack([np.bincount(layer.ravel(), minlength=E) for layer in chosen_LTK])
    frequent = _frequent(tokens, kinds)
    known = np.isin(tokens, frequent)
    names = [letters.symbols[t] for t in frequent]
    layers = [layer + 1 for layer in model.moe_layers]
    out: dict = {
        "layers": summary(counts_LE, model.moe_layers), "tokens": int(chosen_LTK.shape[1]),
        "residue": _question(inner[:, known], np.searchsorted(frequent, tokens[known]), names, E, layers),
        "position": _question(inner, place, _place_names(), E, layers),
        "next_layer": _following(inner, E, layers),
    }  # fmt: skip
    if structures is not None:
        out["structure"] = _structure(model, recipe, letters, structures, device, budget, E, layers)
    return out


def _route(model: nn.Module, sequences: Iterable[np.ndarray], recipe: Recipe, device: torch.device) -> np.ndarray:
    """Chosen experts of every token in order, int64 [L, T, K]."""
    pieces = []
    with torch.no_grad(), routes(model) as chosen:
        for batch in packed(sequences, batch_slots(recipe, device), device):
            model(**batch.inputs, select_M=torch.zeros(1, dtype=torch.int64, device=device))
            pieces.append(torch.stack(chosen).cpu())
    return torch.cat(pieces, dim=1).numpy()


def _frequent(tokens: np.ndarray, kinds: int, most: int = 24) -> np.ndarray:
    """The ids of the most frequent tokens, ascending."""
    number = np.bincount(tokens, minlength=kinds)
    best = np.argsort(-number, kind="stable")[:most]
    return np.sort(best[number[best] > 0])


def _place_names() -> list[str]:
    return [f"{low + 1}–{high}" for low, high in zip((0, *PLACES), PLACES, strict=False)] + [f"> {PLACES[-1]}"]


def counts(expert_TK: np.ndarray, label_T: np.ndarray, experts: int, labels: int) -> np.ndarray:
    """How many routed slots of each expert carry each label, float64 [E, C]."""
    joint = expert_TK * labels + label_T[:, None]
    return np.bincount(joint.ravel(), minlength=experts * labels).reshape(experts, labels).astype(np.float64)


def mutual_information(counts_EC: np.ndarray) -> float:
    """Mutual information of rows and columns of a table of counts, in bits (Cover and Thomas, eq. 2.28)."""
    p_EC = counts_EC / max(counts_EC.sum(), 1.0)
    product = p_EC.sum(axis=1, keepdims=True) * p_EC.sum(axis=0, keepdims=True)
    live = p_EC > 0
    return float((p_EC[live] * np.log2(p_EC[live] / product[live])).sum())


def null(expert_TK: np.ndarray, label_T: np.ndarray, experts: int, labels: int) -> np.ndarray:
    """Mutual information after moving the labels along the tokens by random distances, cyclically, [PERMUTATIONS]."""
    generator, T = np.random.default_rng(SEED), label_T.size
    moves = generator.integers(T // 10, max(T - T // 10, T // 10 + 1), PERMUTATIONS)
    return np.array([mutual_information(counts(expert_TK, np.roll(label_T, move), experts, labels)) for move in moves])


def _question(expert_LTK: np.ndarray, label_T: np.ndarray, names: list[str], experts: int, layers: list[int]) -> dict:
    """Counts, mutual information and null of one kind of label in every layer."""
    entries = []
    for layer, expert_TK in zip(layers, expert_LTK, strict=True):
        counts_EC = counts(expert_TK, label_T, experts, len(names))
        entries.append({"layer": layer, **_information(counts_EC, null(expert_TK, label_T, experts, len(names)))})
    return {"labels": names, "layers": entries}


def _information(counts_EC: np.ndarray, chance: np.ndarray) -> dict:
    bits = mutual_information(counts_EC)
    shares = counts_EC / np.maximum(counts_EC.sum(axis=1, keepdims=True), 1.0)
    overall_C = counts_EC.sum(axis=0) / max(counts_EC.sum(), 1.0)
    return {
        "shares": shares.tolist(), "overall": overall_C.tolist(), "bits": bits, "null_mean": float(chance.mean()),
        "null_95": float(np.quantile(chance, 0.95)), "p": float((1 + (chance >= bits).sum()) / (1 + chance.size)),
    }  # fmt: skip


def _following(expert_LTK: np.ndarray, experts: int, layers: list[int]) -> dict:
    """Which experts of the next layer with experts serve the tokens of each: all pairs of a token's choices count."""
    K, entries = expert_LTK.shape[2], []
    for layer, here_TK, next_TK in zip(layers, expert_LTK, expert_LTK[1:], strict=False):
        pairs = [(here_TK[:, a], next_TK[:, b]) for a in range(K) for b in range(K)]
        here, following = np.concatenate([p[0] for p in pairs]), np.concatenate([p[1] for p in pairs])
        counts_EE = counts(here[:, None], following, experts, experts)
        generator, T = np.random.default_rng(SEED), here_TK.shape[0]
        chance = []
        for move in generator.integers(T // 10, max(T - T // 10, T // 10 + 1), PERMUTATIONS):
            moved = np.concatenate([np.roll(next_TK[:, b], move) for _ in range(K) for b in range(K)])
            chance.append(mutual_information(counts(here[:, None], moved, experts, experts)))
        entries.append({"layer": layer, **_information(counts_EE, np.array(chance))})
    return {"labels": [str(e + 1) for e in range(experts)], "layers": entries}


def _structure(
    model: nn.Module, recipe: Recipe, letters: Alphabet, table: str | Path, device: torch.device, budget: int, experts: int,
    layers: list[int],
) -> dict:  # fmt: skip
    """The question of secondary structure, on a random part of the labelled sequences within the budget."""
    data, longest = labelling.read_labelled(table), recipe.data.max_length - 2
    members = labelling.drawn(data, budget, longest)
    sequences = [wrap(letters, letters.encode(data.sequences[i][:longest].encode("ascii", "replace"))) for i in members]
    text = "".join(data.labels[i][:longest] for i in members)
    chosen = _route(model, iter(sequences), recipe, device)
    inner = np.concatenate([np.arange(s.size) for s in sequences])
    ends = np.concatenate([np.full(s.size, s.size - 1) for s in sequences])
    chosen = chosen[:, (inner > 0) & (inner < ends)]
    label = np.array(list(text))
    legal = [x for x in (labelling.DSSP if data.is_secondary_structure else sorted(set(text))) if x in text]
    known = np.isin(label, legal)
    number = {x: i for i, x in enumerate(legal)}
    names = ["coil" if x == "~" else x for x in legal]
    return _question(chosen[:, known], np.array([number[x] for x in label[known]]), names, experts, layers)
