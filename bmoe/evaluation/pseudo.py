"""Pseudo-perplexity of an encoder: every residue is asked for with nothing but itself hidden (Salazar et al. 2020).

One forward pass a residue, so it is budgeted: of each sequence at most `positions` residues are asked for, drawn at random,
and stand for all of it; sequences are taken in the split's fixed order until the budget of token slots is spent. More
sequences with fewer residues each give a narrower interval than few whole sequences.

pseudo-perplexity = exp(- sum_s n_s mean_i log P(x_i | x without i) / sum_s n_s), n_s residues of sequence s.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from bmoe.data import random
from bmoe.data.loader import VALIDATION_SEED, build_sampler
from bmoe.data.packing import pack
from bmoe.data.shards import Shards
from bmoe.errors import RequestError
from bmoe.evaluation.forward import Request, batch_slots, log_probabilities
from bmoe.evaluation.statistics import bootstrap
from bmoe.recipe import Recipe

POSITIONS = 8
PSEUDO = 101  # purpose of the draws, apart from those of training
AHEAD = 32  # sequences prepared at a time


def evaluate(
    model: nn.Module, shards: Shards, recipe: Recipe, *, device: torch.device, budget: int, positions: int | None = POSITIONS
) -> dict:
    """Pseudo-perplexity with its 95 % bootstrap interval over sequences. `positions` None asks for every residue.

    `budget`: token slots of all forward passes; at least one sequence is done. RequestError for a decoder.
    """
    if recipe.objective.kind != "mlm":
        raise RequestError("pseudo-perplexity is of encoders, and a decoder has its perplexity: leave --pseudo out")
    asked, residues = [], []

    def requests() -> Iterator[Request]:
        for cut in _within(_cuts(shards, recipe, positions), budget):
            asked.append(cut.slots.size)
            residues.append(cut.residues)
            yield _one_hidden_each(cut, shards.alphabet.mask_id)

    nats_M = -log_probabilities(model, requests(), batch_slots(recipe, device), device)
    if not asked:
        raise RequestError(f"{shards.directory} has no sequence with a known residue in the split {shards.split!r}")
    mean_S = np.bincount(np.repeat(np.arange(len(asked)), asked), nats_M) / asked
    residues_S = np.array(residues, float)

    def value(weight_S: np.ndarray) -> np.ndarray:
        return np.exp(weight_S @ (residues_S * mean_S) / (weight_S @ residues_S))

    low, high = bootstrap(residues_S.size, value)
    return {
        "pseudo_perplexity": float(value(np.ones(residues_S.size))), "low": low, "high": high, "sequences": residues_S.size,
        "residues_asked": nats_M.size, "residues": int(residues_S.sum()),
    }  # fmt: skip


class _Cut(NamedTuple):
    tokens: np.ndarray  # of the crop
    slots: np.ndarray  # to ask for, ascending
    residues: int  # that they stand for


def _cuts(shards: Shards, recipe: Recipe, positions: int | None) -> Iterator[_Cut]:
    """The split's crops in its fixed order, those without a known residue left out."""
    sampler = build_sampler(shards, recipe, VALIDATION_SEED, "sequence")
    for first in range(0, sampler.units, AHEAD):
        crops = sampler.crops(0, first, AHEAD)
        ends = np.cumsum(crops.slots)
        begins = ends - crops.slots
        packed = pack(shards, crops, int(ends[-1]), VALIDATION_SEED)
        legal = np.flatnonzero((packed.origin_T >= 0) & (packed.tokens_T != shards.alphabet.unk_id))
        owner = packed.segments_T[legal]
        draw = random.uniform(random.key(VALIDATION_SEED, PSEUDO, 0, crops.unit)[owner], packed.origin_T[legal])
        order = np.lexsort((draw, owner))
        bounds = np.searchsorted(owner, np.arange(crops.slots.size + 1))
        for begin, end, low, high in zip(begins, ends, bounds[:-1], bounds[1:], strict=True):
            slots = np.sort(legal[order[low:high][:positions]]) - begin
            if slots.size:
                yield _Cut(packed.tokens_T[begin:end], slots, int(high - low))


def _within(cuts: Iterator[_Cut], budget: int) -> Iterator[_Cut]:
    """The first, and those that follow until their forward passes exceed `budget` token slots."""
    spent = 0
    for cut in cuts:
        cost = cut.slots.size * cut.tokens.size
        if spent and spent + cost > budget:
            return
        spent += cost
        yield cut


def _one_hidden_each(cut: _Cut, mask: int) -> Request:
    versions = np.arange(cut.slots.size)
    tokens_Cn = np.tile(cut.tokens, (cut.slots.size, 1))
    tokens_Cn[versions, cut.slots] = mask
    return Request(tokens_Cn, versions, cut.slots, cut.tokens[cut.slots])
