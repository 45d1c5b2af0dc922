"""What a model without learning would reach: the trivial baselines beside every perplexity.

Unigram: knows the composition of the targets and the masking scheme, nothing of the context. Bigram: knows how often each
residue follows each other one, and sees the neighbours (all-`<mask>` MLM, CLM). Both take their frequencies from the very
targets or crops they are judged on, so they are flattered: a model that beats them has learnt something.

Legend: V vocabulary, M targets, T token slots.
"""

import numpy as np
import torch

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

    A masked residue y at distance i from the nearest visible token a on its left and j from b on its right has the probability
    (P^i)[a, y] (P^j)[y, b] / (P^(i + j))[a, b]: exact for any run of masks. Causal: P[a, y] of the token before. Crops that
    begin or end without a visible token have the chain's stationary frequencies there.
    """
    counts_VV = transitions(batches, letters.size, causal)
    rows_V = counts_VV.sum(axis=1)
    chain_VV = counts_VV / np.where(rows_V > 0, rows_V, 1.0)[:, None]
    if causal:
        tokens_T, targets_T = (np.concatenate(parts) for parts in zip(*((b.tokens_T, b.targets_T) for b in batches), strict=True))
        asked = targets_T != NO_TARGET
        chance_M = chain_VV[tokens_T[asked], targets_T[asked]]
    else:
        between = np.concatenate([_between(b.tokens_T.numpy(), b.targets_T.numpy(), b.segments_T.numpy()) for b in batches], axis=1)
        chance_M = chances(chain_VV, counts_VV.sum(axis=0) / max(counts_VV.sum(), 1), *between)
    return float(np.exp(-np.log(np.maximum(chance_M, 1e-12)).sum() / max(chance_M.size, 1)))


def chances(chain_VV: np.ndarray, prior_V: np.ndarray, true_M, left_M, right_M, to_left_M, to_right_M) -> np.ndarray:
    """P(true token | tokens `left` and `right` at these distances), [M]; a distance of 0 says that there is no such token.

    The powers of the chain are formed one after the other, as far as distances go, and of each those numbers are taken that are asked
    for: of 4,096 tokens all 64 would fill 8 GiB.
    """
    has_left, has_right, apart_M = to_left_M > 0, to_right_M > 0, to_left_M + to_right_M
    before_M, after_M = prior_V[true_M], np.ones(true_M.size)
    total_M = np.full(true_M.size, prior_V.sum())
    chain, power_VV = torch.from_numpy(chain_VV).to_sparse(), torch.eye(chain_VV.shape[0], dtype=torch.float64)
    for distance in range(1, int(apart_M.max(initial=0)) + 1):
        power_VV = chain @ power_VV
        power = power_VV.numpy()
        here = to_left_M == distance
        before_M[here] = power[left_M[here], true_M[here]]
        here = to_right_M == distance
        after_M[here] = power[true_M[here], right_M[here]]
        here = apart_M == distance
        between, begins, ends = here & has_left & has_right, here & ~has_left, here & ~has_right
        total_M[between] = power[left_M[between], right_M[between]]
        total_M[begins] = (prior_V @ power)[right_M[begins]]
        total_M[ends] = power.sum(axis=1)[left_M[ends]]
    return before_M * after_M / np.where(total_M > 0, total_M, 1.0)


def _between(tokens_T: np.ndarray, targets_T: np.ndarray, segments_T: np.ndarray) -> np.ndarray:
    """Of each target: its token, the nearest visible ones on its left and right in the crop, and how far they are (0: there is none),
    int64 [5, M]."""
    T, visible_T = tokens_T.size, targets_T == NO_TARGET
    slots = np.flatnonzero(~visible_T)
    left_T = np.maximum.accumulate(np.where(visible_T, np.arange(T), -1))
    right_T = np.minimum.accumulate(np.where(visible_T, np.arange(T), T)[::-1])[::-1]
    left, right = left_T[slots].clip(min=0), right_T[slots].clip(max=T - 1)
    has_left = visible_T[left] & (segments_T[left] == segments_T[slots])
    has_right = visible_T[right] & (segments_T[right] == segments_T[slots])
    to_left, to_right = np.minimum(slots - left, FARTHEST) * has_left, np.minimum(right - slots, FARTHEST) * has_right
    return np.stack([targets_T[slots], tokens_T[left], tokens_T[right], to_left, to_right])
