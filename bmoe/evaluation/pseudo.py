"""Pseudo-perplexity of an encoder: every residue is asked for with nothing but itself hidden (Salazar et al. 2020).

One forward pass a residue, so it is budgeted: of each sequence at most `positions` residues are asked for, drawn at random,
and stand for all of it; sequences are taken in the split's fixed order until the budget of token slots is spent. More
sequences with fewer residues each give a narrower interval than few whole sequences.

pseudo-perplexity = exp(- sum_s n_s mean_i log P(x_i | x without i) / sum_s n_s), n_s residues of sequence s.
"""

import numpy as np
import torch
from torch import nn

from bmoe.data import random
from bmoe.data.loader import VALIDATION_SEED, validation_crops
from bmoe.data.packing import pack
from bmoe.data.shards import Shards
from bmoe.errors import RequestError
from bmoe.evaluation.forward import Request, log_probabilities
from bmoe.evaluation.statistics import bootstrap
from bmoe.recipe import Recipe

POSITIONS = 8
PSEUDO = 101  # purpose of the draws, apart from those of training


def evaluate(
    model: nn.Module, shards: Shards, recipe: Recipe, *, device: torch.device, budget: int, positions: int | None = POSITIONS
) -> dict:
    """Pseudo-perplexity with its 95 % bootstrap interval over sequences. `positions` None asks for every residue.

    `budget`: token slots of all forward passes; at least one sequence is done. RequestError for a decoder.
    """
    if recipe.objective.kind != "mlm":
        raise RequestError("pseudo-perplexity is of encoders; a decoder has its perplexity")
    plan = _plan(shards, recipe, budget, positions)
    requests = (
        Request(np.where(np.arange(tokens.size) == slot, shards.alphabet.mask_id, tokens), np.array([slot]), tokens[[slot]])
        for tokens, slots, _ in plan
        for slot in slots
    )
    nats_M = -np.concatenate(log_probabilities(model, requests, recipe.data.tokens_per_batch, device))
    owner_M = np.repeat(np.arange(len(plan)), [slots.size for _, slots, _ in plan])
    mean_S = np.bincount(owner_M, nats_M) / np.bincount(owner_M)
    residues_S = np.array([residues for _, _, residues in plan], float)

    def value(weight_S: np.ndarray) -> float:
        return float(np.exp(weight_S * residues_S @ mean_S / (weight_S @ residues_S)))

    low, high = bootstrap(len(plan), value)
    return {
        "pseudo_perplexity": value(np.ones(len(plan))), "low": low, "high": high, "sequences": len(plan),
        "residues_asked": int(nats_M.size), "residues": int(residues_S.sum()),
    }  # fmt: skip


def _plan(shards: Shards, recipe: Recipe, budget: int, positions: int | None) -> list[tuple[np.ndarray, np.ndarray, int]]:
    """(tokens, slots to ask for, residues that they stand for) of each crop within the budget."""
    crops, letters, plan, spent = validation_crops(shards, recipe, None), shards.alphabet, [], 0
    keys = random.key(VALIDATION_SEED, PSEUDO, 0, crops.unit)
    for i, size in enumerate(crops.slots.tolist()):
        cut = pack(shards, crops.cut(i, i + 1), size, VALIDATION_SEED)
        legal = np.flatnonzero((cut.origin_T >= 0) & (cut.tokens_T != letters.unk_id))
        order = np.argsort(random.uniform(keys[i], cut.origin_T[legal]), kind="stable")
        slots = np.sort(legal[order[:positions]])
        if plan and spent + slots.size * size > budget:
            break
        if slots.size:
            plan.append((cut.tokens_T, slots, legal.size))
            spent += slots.size * size
    if not plan:
        raise RequestError(f"{shards.directory} has no sequence with a known residue in the split {shards.split!r}")
    return plan
