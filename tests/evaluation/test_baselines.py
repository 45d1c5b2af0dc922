"""Trivial baselines: the published values on real proteins, brute force, and a chain whose answer is known."""

import gzip
import itertools
import resource
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bmoe.data import objectives
from bmoe.data.alphabet import alphabet
from bmoe.data.loader import validation_batches
from bmoe.data.packing import NO_TARGET
from bmoe.evaluation import baselines


def composition(path: Path) -> np.ndarray:
    letters = alphabet("protein")
    text = b"".join(line.strip() for line in gzip.open(path) if not line.startswith(b">"))
    return np.bincount(letters.encode(text), minlength=letters.size).astype(float)


@pytest.mark.parametrize(("name", "mask", "mixed"), [("uniprot_20k", 18.15, 15.17), ("uniref90_10k", 17.6, 14.80)])
def test_known_baselines_of_real_proteins(real_data, name, mask, mixed):
    """18.15 and 17.6 are of held-out parts of the samples; 15.17 and 14.80 of their 20 standard residues."""
    letters, counts_V = alphabet("protein"), composition(real_data / f"{name}.fasta.gz")
    standard_V = np.where(np.isin(np.arange(letters.size), letters.residues), counts_V, 0)
    for counts, share, random, published, tolerance in [(counts_V, 1.0, 0.0, mask, 0.06), (standard_V, 0.8, 0.1, mixed, 0.005)]:
        ours = np.exp(counts @ baselines.unigram_nats(counts, letters, share, random) / counts.sum())
        assert ours == pytest.approx(published, abs=tolerance)
        assert objectives.baseline(counts, letters, share, random) == pytest.approx(ours, rel=1e-12)


def test_unigram_against_simulation():
    """Draw targets and what is shown for them; score the Bayes posterior estimated from an independent draw."""
    letters = alphabet("dna")
    counts_V = np.zeros(letters.size)
    counts_V[letters.residues] = [5, 3, 1, 1]
    generator, n = np.random.default_rng(0), 400_000
    p = counts_V / counts_V.sum()

    def draw():
        true = generator.choice(letters.size, n, p=p)
        way = generator.random(n)
        return true, np.where(way < 0.8, letters.mask_id, np.where(way < 0.9, generator.choice(letters.residues, n), true))

    true, shown = draw()
    joint = np.zeros((letters.size, letters.size))
    np.add.at(joint, (shown, true), 1)
    posterior = joint / joint.sum(axis=1, keepdims=True).clip(1)
    true, shown = draw()
    simulated = -np.log(posterior[shown, true]).mean()
    exact = p @ baselines.unigram_nats(counts_V, letters, 0.8, 0.1)
    assert exact == pytest.approx(simulated, abs=4e-3)


def test_bigram_is_exact_for_runs_of_masks(memory_shards, make_recipe):
    """Against a sum over all fillings of the masked residues of each crop."""
    recipe = make_recipe(slots=128)
    recipe = recipe.model_copy(update={"objective": recipe.objective.model_copy(update={"mask_fraction": 0.4})})
    letters = alphabet("protein")
    shards = memory_shards(["ACCA", "CAACC", "CCCA", "AACAC", "ACACCA"])
    batches = list(validation_batches(shards, recipe, None, all_mask=True))
    counts = baselines.transitions(batches, letters.size, causal=False)
    chain = counts / counts.sum(axis=1, keepdims=True).clip(1)
    nats, number = 0.0, 0
    for batch in batches:
        true = torch.where(batch.targets_T >= 0, batch.targets_T, batch.tokens_T)
        for segment in range(len(batch.sequence_ids)):
            at = (batch.segments_T == segment).nonzero().ravel()
            crop, hidden = true[at].numpy(), (batch.targets_T[at] >= 0).nonzero().ravel().numpy()
            weight = {}
            for filling in itertools.product(letters.encode(b"AC"), repeat=len(hidden)):
                filled = crop.copy()
                filled[hidden] = filling
                weight[filling] = np.prod(chain[filled[:-1], filled[1:]])
            total = sum(weight.values())
            for k, place in enumerate(hidden):
                nats -= np.log(sum(w for f, w in weight.items() if f[k] == crop[place]) / total)
                number += 1
    assert number > 5
    assert baselines.bigram_perplexity(batches, letters, causal=False) == pytest.approx(np.exp(nats / number), rel=1e-9)


def masked(size: int, fraction: float):
    """A batch of 40 crops of `size` kinds of tokens in all-`<mask>` form, with one run of masks of 150."""
    generator = np.random.default_rng(0)
    true, segments = generator.integers(0, size - 1, 3000), np.sort(generator.integers(0, 40, 3000))
    segments[80:320] = segments[80]
    targets = np.where(generator.random(3000) < fraction, true, NO_TARGET)
    if fraction > 0.5:
        targets[100:250] = true[100:250]
    shown = np.where(targets == NO_TARGET, true, size - 1)
    tensors = {name: torch.from_numpy(x) for name, x in (("tokens_T", shown), ("targets_T", targets), ("segments_T", segments))}
    return SimpleNamespace(**tensors, real_tokens=3000), SimpleNamespace(size=size)


@pytest.mark.parametrize("fraction", [0.15, 0.9])
def test_bigram_equals_products_of_rows_and_columns_of_all_powers(fraction):
    """Which fill 8 GiB for 4,096 tokens; runs longer than the powers go, and crops that are masked at an end or throughout."""
    batch, letters = masked(12, fraction)
    counts = baselines.transitions([batch], 12, causal=False)
    chain, prior = counts / counts.sum(axis=1, keepdims=True).clip(1), counts.sum(axis=0) / counts.sum()
    powers = [np.linalg.matrix_power(chain, k) for k in range(baselines.FARTHEST + 1)]
    tokens, targets, segments = batch.tokens_T.numpy(), batch.targets_T.numpy(), batch.segments_T.numpy()
    nats = []
    for slot in np.flatnonzero(targets >= 0):
        visible = np.flatnonzero((segments == segments[slot]) & (targets < 0))
        before, after = visible[visible < slot], visible[visible > slot]
        score = powers[min(slot - before[-1], 64)][tokens[before[-1]]] if before.size else prior
        score = score * (powers[min(after[0] - slot, 64)][:, tokens[after[0]]] if after.size else 1.0)
        nats.append(-np.log(max(score[targets[slot]] / (score.sum() or 1.0), 1e-12)))
    assert baselines.bigram_perplexity([batch], letters, causal=False) == pytest.approx(np.exp(np.mean(nats)), rel=1e-9)


def test_bigram_of_many_tokens_needs_few_matrices():
    """All powers of 2,000 tokens would be 2.1 GB, rows of them for each target 14 MB more."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert baselines.bigram_perplexity([masked(2000, 0.15)[0]], SimpleNamespace(size=2000), causal=False) > 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 5e5  # KiB


def test_bigram_knows_a_strict_alternation(memory_shards, make_recipe):
    recipe = make_recipe("decoder", slots=128)
    shards = memory_shards(["ACACACAC", "ACACACACACAC"])
    batches = list(validation_batches(shards, recipe, None))
    # A is always followed by C; C by A, or by <eos> in 2 of 10 cases.
    counts = 8 * np.log(0.8) + 2 * np.log(0.2)
    assert baselines.bigram_perplexity(batches, shards.alphabet, causal=True) == pytest.approx(np.exp(-counts / 22), rel=1e-9)
    assert baselines.bigram(shards, recipe, None) == pytest.approx(np.exp(-counts / 22), rel=1e-9)
