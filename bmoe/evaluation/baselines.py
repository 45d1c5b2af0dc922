"""What a model without learning would reach: the trivial baselines beside every perplexity.

Unigram: knows the composition of the targets and the masking scheme, nothing of the context. Bigram: knows how often each
residue follows each other one, and sees the neighbours (all-`<mask>` MLM, CLM). Both take their frequencies from the very
targets or crops they are judged on, so they are flattered: a model that beats them has learnt something.

Legend: V vocabulary, M targets, T token slots.
"""

import numpy as np

from bmoe.data.alphabet import Alphabet
from bmoe.data.loader import validation_batches
from bmoe.data.packing import NO_TARGET, Batch
from bmoe.data.shards import Shards
from bmoe.recipe import Recipe

FARTHEST = 64  # beyond so many slots a first-order chain has forgotten its neighbour


def unigram_nats(composition_V: np.ndarray, letters: Alphabet, mask_token: float = 1.0, random_token: float = 0.0) -> np.ndarray:
    """Expected cross entropy (nats) of the unigram baseline on a target that is token y, float64 [V]; 0 for tokens not seen.

    Where `<mask>` is shown it predicts the composition p. Where x is shown it predicts the posterior of "kept" and "random":
    P(y | x) = (k p(x) [y = x] + r p(y) / R) / (k p(x) + r / R), with k, r the shares of kept and random targets and R the
    number of standard residues. The mean over p is the logarithm of `bmoe.data.objectives.baseline`.
    """
    p_V = composition_V / max(composition_V.sum(), 1)
    nats_V = -np.log(np.where(p_V > 0, p_V, 1.0))
    kept = 1.0 - mask_token - random_token
    if mask_token >= 1.0:
        return nats_V
    random_V = np.zeros_like(p_V)
    random_V[letters.residues] = 1.0 / letters.residues.size
    shown_V = kept * p_V + random_token * random_V
    joint_VV = np.outer(random_token * random_V, p_V) + np.diag(kept * p_V)  # rows: x shown, columns: y true
    posterior_VV = joint_VV / np.where(shown_V > 0, shown_V, 1.0)[:, None]
    visible_VV = -np.log(np.where(posterior_VV > 0, posterior_VV, 1.0))
    return mask_token * nats_V + kept * np.diag(visible_VV) + random_token * (random_V @ visible_VV)


def bigram(shards: Shards, recipe: Recipe, budget: int | None) -> float:
    """Bigram perplexity on the very targets of `perplexity.evaluate` with the same budget (MLM: fully masked)."""
    return bigram_perplexity(list(validation_batches(shards, recipe, budget, True)), shards.alphabet, recipe.objective.kind == "clm")


def transitions(batches: list[Batch], size: int, causal: bool) -> np.ndarray:
    """How often token b follows token a inside a crop, float64 [V, V], over the true tokens of all-`<mask>` or CLM batches."""
    counts_VV = np.zeros((size, size))
    for batch in batches:
        tokens_T, targets_T, segments_T = batch.tokens_T.numpy(), batch.targets_T.numpy(), batch.segments_T.numpy()
        if not causal:
            tokens_T = np.where(targets_T == NO_TARGET, tokens_T, targets_T)
        inside = (segments_T[1:] == segments_T[:-1]) & (np.arange(1, tokens_T.size) < int(batch.real_tokens))
        pair = tokens_T[:-1][inside] * size + tokens_T[1:][inside]
        counts_VV += np.bincount(pair, minlength=size * size).reshape(size, size)
    return counts_VV


def bigram_perplexity(batches: list[Batch], letters: Alphabet, causal: bool) -> float:
    """Perplexity of a first-order Markov chain on the targets of all-`<mask>` (or, causal, CLM) batches.

    A masked residue at distance i from the nearest visible token a on its left and j from b on its right has probability
    proportional to (P^i)[a, y] (P^j)[y, b]: exact for any run of masks. Causal: P[a, y] of the token before. Crops that
    begin or end without a visible token have the chain's stationary frequencies there.
    """
    counts_VV = transitions(batches, letters.size, causal)
    rows_V = counts_VV.sum(axis=1)
    chain_VV = counts_VV / np.where(rows_V > 0, rows_V, 1.0)[:, None]
    powers = _powers(chain_VV, 1 if causal else FARTHEST)
    prior_V = counts_VV.sum(axis=0) / max(counts_VV.sum(), 1)
    nats, number = 0.0, 0
    for batch in batches:
        tokens_T, targets_T = batch.tokens_T.numpy(), batch.targets_T.numpy()
        slots = np.flatnonzero(targets_T != NO_TARGET)
        if causal:
            chance_M = chain_VV[tokens_T[slots], targets_T[slots]]
        else:
            chance_M = _chance_between(tokens_T, targets_T, batch.segments_T.numpy(), slots, powers, prior_V)
        nats -= np.log(np.maximum(chance_M, 1e-12)).sum()
        number += slots.size
    return float(np.exp(nats / max(number, 1)))


def _powers(chain_VV: np.ndarray, count: int) -> np.ndarray:
    """P^0 .. P^count, float64 [count + 1, V, V]."""
    powers = [np.eye(chain_VV.shape[0])]
    for _ in range(count):
        powers.append(powers[-1] @ chain_VV)
    return np.stack(powers)


def _chance_between(tokens_T, targets_T, segments_T, slots, powers, prior_V) -> np.ndarray:
    """P(true token | nearest visible tokens on both sides) at each slot, [M]."""
    T = tokens_T.size
    visible_T = targets_T == NO_TARGET
    left_T = np.maximum.accumulate(np.where(visible_T, np.arange(T), -1))
    right_T = np.minimum.accumulate(np.where(visible_T, np.arange(T), T)[::-1])[::-1]
    left, right = left_T[slots], right_T[slots]
    has_left = (left >= 0) & (segments_T[left.clip(0)] == segments_T[slots])
    has_right = (right < T) & (segments_T[right.clip(max=T - 1)] == segments_T[slots])
    far_left, far_right = np.minimum(slots - left, FARTHEST), np.minimum(right - slots, FARTHEST)
    score_MV = np.where(has_left[:, None], powers[far_left, tokens_T[left.clip(0)]], prior_V)
    score_MV = score_MV * np.where(has_right[:, None], powers[far_right, :, tokens_T[right.clip(max=T - 1)]], 1.0)
    total_M = score_MV.sum(axis=1)
    return score_MV[np.arange(slots.size), targets_T[slots]] / np.where(total_M > 0, total_M, 1.0)
