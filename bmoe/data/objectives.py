"""Objectives: from packed tokens to inputs and targets.

Masked language modelling (MLM) follows ESM-2 (Lin et al., Science 379, 2023): every residue becomes a target with
probability `mask_fraction`; a target is shown as `<mask>` (80 %), as a random residue of the standard letters (10 %) or as
it is (10 %). Specials and letters outside the alphabet are never targets. Causal language modelling (CLM) predicts the next
token of the crop, `<eos>` included.

Draws are keyed by (seed, epoch, unit) and the residue's place in its record: new every epoch, the same in every batch, on
every rank and under any crop.
"""

import numpy as np

from bmoe.data import random
from bmoe.data.alphabet import Alphabet
from bmoe.data.packing import NO_TARGET, Packed
from bmoe.recipe import ObjectiveSection


def mlm(
    packed: Packed, letters: Alphabet, objective: ObjectiveSection, seed: int, all_mask: bool = False, skip_soft: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of masked language modelling, int64 [T] each.

    `all_mask` shows every target as `<mask>`; the targets are the same as without. `skip_soft` takes soft-masked DNA out
    of the loss.
    """
    tokens_T = packed.tokens_T
    candidate_T = (packed.origin_T >= 0) & (tokens_T != letters.unk_id)
    if skip_soft and packed.soft_T is not None:
        candidate_T &= ~packed.soft_T
    keys = random.key(seed, random.MASK, packed.crops.epoch, packed.crops.unit)
    slots = np.flatnonzero(candidate_T)
    key, place = keys[packed.segments_T[slots]], packed.origin_T[slots].astype(np.uint64) * np.uint64(3)
    chosen = random.uniform(key, place) < objective.mask_fraction
    slots, key, place = slots[chosen], key[chosen], place[chosen]
    targets_T = np.full(tokens_T.size, NO_TARGET, np.int64)
    targets_T[slots] = tokens_T[slots]
    shown = np.full(slots.size, letters.mask_id, np.int64)
    if not all_mask:
        way = random.uniform(key, place + np.uint64(1))
        other = letters.residues[random.below(key, place + np.uint64(2), letters.residues.size)]
        kept = way >= objective.mask_token + objective.random_token
        shown = np.where(way < objective.mask_token, letters.mask_id, np.where(kept, tokens_T[slots], other))
    inputs_T = tokens_T.copy()
    inputs_T[slots] = shown
    return inputs_T, targets_T


def clm(packed: Packed, letters: Alphabet, skip_soft: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of causal language modelling, int64 [T] each: the target is the next token of the same crop."""
    tokens_T, targets_T = packed.tokens_T, np.full(packed.tokens_T.size, NO_TARGET, np.int64)
    same = (packed.segments_T[1:] == packed.segments_T[:-1]) & (np.arange(1, tokens_T.size) < packed.real)
    legal = same & (tokens_T[1:] != letters.unk_id)
    if skip_soft and packed.soft_T is not None:
        legal &= ~packed.soft_T[1:]
    targets_T[:-1][legal] = tokens_T[1:][legal]
    return tokens_T, targets_T


def baseline(composition_V: np.ndarray, letters: Alphabet, mask_token: float = 1.0, random_token: float = 0.0) -> float:
    """Perplexity (of targets, >= 1) of the best model that knows the composition and the masking scheme, and nothing of the context.

    Where `<mask>` is shown it predicts the composition p. Where a residue x is shown it predicts the posterior of
    "kept" (prior k, then y = x) and "random" (prior r, x uniform over the R standard residues, y ~ p):
    P(y | x) = (k p(x) [y = x] + r p(y) / R) / (k p(x) + r / R). The cross entropy is taken over the same p.

    Args:
        composition_V: counts of target tokens, [V].
        mask_token, random_token: shares of targets shown as `<mask>` and as a random residue (ESM-2: 0.8, 0.1).
    """
    p_V = composition_V / composition_V.sum()
    seen = p_V > 0
    entropy = -np.sum(p_V[seen] * np.log(p_V[seen]))
    kept = 1.0 - mask_token - random_token
    if mask_token >= 1.0:
        return float(np.exp(entropy))
    random_V = np.zeros_like(p_V)
    random_V[letters.residues] = 1.0 / letters.residues.size
    shown_V = kept * p_V + random_token * random_V  # P(x shown, and not <mask>)
    joint_VV = np.outer(random_token * random_V, p_V) + np.diag(kept * p_V)  # P(x shown, y true)
    live = joint_VV > 0
    visible = -np.sum(joint_VV[live] * np.log((joint_VV / np.where(shown_V > 0, shown_V, 1.0)[:, None])[live]))
    return float(np.exp(mask_token * entropy + visible))
