"""Perplexity: a naive loop over sequences, independence of batches and ranks, and models whose answer is known."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bmoe.data import objectives
from bmoe.data.loader import validation_batches
from bmoe.errors import RequestError
from bmoe.evaluation import perplexity
from bmoe.model.transformer import Output

CPU = torch.device("cpu")


def evaluate(model, shards, recipe, **more):
    return perplexity.evaluate(model, shards, recipe, device=CPU, budget=more.pop("budget", 10_000), **more)


class Composition(nn.Module):
    """Says the same distribution at every slot."""

    def __init__(self, logits_V):
        super().__init__()
        self.logits_V = logits_V

    def forward(self, tokens_T, positions_T, segments_T, cu_seqlens, max_seqlen, real_tokens, select_M=None):
        rows = tokens_T.shape[0] if select_M is None else select_M.shape[0]
        empty = torch.zeros(0)
        return Output(self.logits_V.expand(rows, -1), empty, empty, empty.view(0, 0))


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_equals_a_naive_loop_over_sequences(proteins, make_recipe, make_model, kind):
    recipe = make_recipe(kind)
    model = make_model(recipe)
    ours = evaluate(model, proteins, recipe)
    for scheme in ours.schemes:
        loss, number = {}, {}
        for batch in validation_batches(proteins, recipe, 10_000, all_mask=scheme == "mask"):
            for s, sequence in enumerate(batch.sequence_ids.tolist()):  # each crop alone in a forward pass
                at = (batch.segments_T == s).nonzero().ravel()
                n = len(at)
                out = model(batch.tokens_T[at], torch.arange(n), torch.zeros(n, dtype=torch.long), torch.tensor([0, n]).int(), n, n)
                targets = batch.targets_T[at]
                loss[sequence] = F.cross_entropy(out.logits, targets, ignore_index=-100, reduction="sum").item()
                number[sequence] = (targets >= 0).sum().item()
        total = np.exp(sum(loss.values()) / sum(number.values()))
        assert ours.perplexity(scheme) == pytest.approx(total, rel=1e-5)
        assert ours.loss[scheme] == pytest.approx([loss[i] for i in ours.sequence_S], rel=1e-4, abs=1e-5)
        assert ours.targets_S.tolist() == [number[i] for i in ours.sequence_S]


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_independent_of_batch_size_and_ranks(proteins, make_recipe, make_model, kind):
    model = make_model(make_recipe(kind))
    reference = evaluate(model, proteins, make_recipe(kind, slots=8192))
    for slots in (128, 300, 2048):
        other = evaluate(model, proteins, make_recipe(kind, slots=slots))
        assert np.array_equal(other.sequence_S, reference.sequence_S)
        assert np.array_equal(other.targets_S, reference.targets_S)
        assert np.array_equal(other.composition_V, reference.composition_V)
        assert all(other.digest(scheme) == reference.digest(scheme) for scheme in reference.schemes)
        for name, value in reference.metrics().items():
            assert other.metrics()[name] == pytest.approx(value, rel=1e-6)
        assert other.counts_LE.sum() == reference.counts_LE.sum()


def test_ranks_share_the_batches(proteins, make_recipe, make_model):
    """Three ranks, more than the batches of the last: sums add up, and all run equally many forward passes."""
    recipe = make_recipe(slots=1024)
    model = make_model(recipe)
    alone = evaluate(model, proteins, recipe)
    passes, parts = [], []

    def record(tensor):
        recorded.append(tensor.clone())
        return tensor

    for rank in range(3):
        recorded, calls = [], []
        handle = model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        evaluate(model, proteins, recipe, rank=rank, world=3, reduce=record)
        handle.remove()
        passes.append(len(calls))
        parts.append(recorded[0])
    assert len(set(passes)) == 1
    sums = sum(parts).numpy()
    S, V = alone.targets_S.size, alone.composition_V.size
    assert np.array_equal(sums[:S], alone.targets_S)
    assert sums[S + V : 2 * S + V] == pytest.approx(alone.loss["8010"], rel=1e-5, abs=1e-6)
    inputs = sums[-alone.counts_LE.size - 2 * S : -alone.counts_LE.size].reshape(2, S)
    assert np.array_equal(inputs, list(alone.inputs.values()))
    assert sums[-alone.counts_LE.size :] == pytest.approx(alone.counts_LE.ravel())


def test_a_model_of_the_composition_reaches_the_baseline(proteins, make_recipe, make_model):
    recipe = make_recipe()
    counts_V = evaluate(make_model(recipe), proteins, recipe).composition_V
    logits = torch.from_numpy(np.log(np.maximum(counts_V / counts_V.sum(), 1e-30))).float()
    result = evaluate(Composition(logits), proteins, recipe)
    assert result.perplexity("mask") == pytest.approx(result.baseline_perplexity("mask"), rel=1e-5)
    assert result.ratio("mask") == pytest.approx({"ratio": 1.0, "low": 1.0, "high": 1.0}, rel=1e-4)
    assert result.perplexity("8010") > result.baseline_perplexity("8010")  # it does not copy what it sees
    assert result.counts_LE is None
    for scheme, share, random in [("mask", 1.0, 0.0), ("8010", 0.8, 0.1)]:
        published = objectives.baseline(counts_V, proteins.alphabet, share, random)
        assert result.baseline_perplexity(scheme) == pytest.approx(published, rel=1e-9)


def test_names_are_those_of_the_metrics(proteins, make_recipe, make_model):
    mlm, clm = make_recipe(), make_recipe("decoder")
    assert set(evaluate(make_model(mlm), proteins, mlm).metrics()) == {
        "valid_loss", "valid_perplexity_8010", "valid_perplexity_mask", "valid_baseline_8010", "valid_baseline_mask",
    }  # fmt: skip
    result = evaluate(make_model(clm), proteins, clm)
    assert set(result.metrics()) == {"valid_loss", "valid_perplexity", "valid_baseline"}
    assert {"perplexity", "baseline", "by_length"} <= set(result.results())


def test_length_bins_and_residues_add_up(proteins, make_recipe, make_model):
    recipe = make_recipe()
    result = evaluate(make_model(recipe), proteins, recipe)
    bins = result.by_length((50, 100))
    assert [(b["min_length"], b["max_length"]) for b in bins] == [(1, 50), (51, 100), (101, None)]
    assert sum(b["targets"] for b in bins) == result.targets_S.sum()
    nats = sum(b["targets"] * np.log(b["perplexity_mask"]) for b in bins)
    assert np.exp(nats / result.targets_S.sum()) == pytest.approx(result.perplexity("mask"))
    residues = result.by_residue()
    nats = sum(r["targets"] * np.log(r["perplexity_8010"]) for r in residues)
    assert np.exp(nats / result.targets_S.sum()) == pytest.approx(result.perplexity("8010"))
    nats = sum(r["targets"] * np.log(r["baseline_8010"]) for r in residues)
    assert np.exp(nats / result.targets_S.sum()) == pytest.approx(result.baseline_perplexity("8010"))


def test_groups_have_intervals_of_their_own(proteins, make_recipe, make_model):
    """By the delta method within its width's sixth; of all sequences the same as the whole; of one sequence none."""
    recipe = make_recipe()
    result = evaluate(make_model(recipe), proteins, recipe)
    rows = np.arange(0, result.targets_S.size, 2)
    found, loss, n = result.group(rows), result.loss["mask"][rows], result.targets_S[rows]
    error = np.sqrt(((loss - loss.sum() / n.sum() * n) ** 2).sum()) / n.sum()
    assert np.log(found["perplexity_mask_high"] / found["perplexity_mask_low"]) == pytest.approx(2 * 1.96 * error, rel=0.17)
    everything, whole = result.group(np.arange(result.targets_S.size)), result.results()
    assert all(everything[key] == pytest.approx(whole[key], rel=1e-12) for key in everything)
    assert result.group(rows[:1])["perplexity_mask_low"] is None


def test_interval_of_the_ratio_is_that_of_the_log_normal(proteins, make_recipe, make_model):
    """The bootstrap agrees with the delta method on the ratio of sums within a tenth of its width."""
    recipe = make_recipe()
    result = evaluate(make_model(recipe), proteins, recipe)
    gain, n = result.loss["mask"] - result.baseline["mask"], result.targets_S
    mean = gain.sum() / n.sum()
    error = np.sqrt(((gain - mean * n) ** 2).sum()) / n.sum()
    ratio = result.ratio("mask")
    assert np.log(ratio["high"] / ratio["low"]) == pytest.approx(2 * 1.96 * error, rel=0.15)
    assert ratio["low"] < ratio["ratio"] < ratio["high"]


def test_two_models_are_compared_on_the_same_targets(proteins, make_recipe, make_model):
    recipe = make_recipe()
    first, second = (evaluate(make_model(recipe, seed), proteins, recipe) for seed in (0, 1))
    assert perplexity.compare(first, first)["mask"] == {"ratio": 1.0, "low": 1.0, "high": 1.0}
    there, back = perplexity.compare(first, second)["mask"], perplexity.compare(second, first)["mask"]
    assert there["ratio"] == pytest.approx(1 / back["ratio"])
    with pytest.raises(ValueError, match="different targets"):
        perplexity.compare(first, evaluate(make_model(recipe), proteins, recipe, budget=500))


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_other_residues_of_the_same_lengths_are_other_targets(memory_shards, make_proteins, make_recipe, make_model, kind):
    """Numbers and counts of targets are equal where only letters differ, one of them in 20 sequences, and even where it is no target."""
    sequences, recipe = make_proteins(20, 60, seed=1), make_recipe(kind)
    model = make_model(recipe)
    reference = evaluate(model, memory_shards(sequences), recipe)
    assert perplexity.compare(reference, evaluate(model, memory_shards(list(sequences)), recipe))
    for place in range(0, len(sequences[3]), 3):
        letter = "A" if sequences[3][place] != "A" else "C"
        other = [*sequences[:3], sequences[3][:place] + letter + sequences[3][place + 1 :], *sequences[4:]]
        found = evaluate(model, memory_shards(other), recipe)
        assert np.array_equal(found.sequence_S, reference.sequence_S) and np.array_equal(found.targets_S, reference.targets_S)
        with pytest.raises(ValueError, match="different targets"):
            perplexity.compare(reference, found)


def test_other_shares_of_mask_pair_the_fully_masked_alone(proteins, make_recipe, make_model):
    recipe = make_recipe()
    objective = recipe.objective.model_copy(update={"mask_token": 0.5, "random_token": 0.3})
    model, other = make_model(recipe), recipe.model_copy(update={"objective": objective})
    first, second = evaluate(model, proteins, recipe), evaluate(model, proteins, other)
    assert set(perplexity.compare(first, second)) == {"mask"} and set(perplexity.compare(first, first)) == {"8010", "mask"}
    here, there = first.results()["inputs"], second.results()["inputs"]
    assert here["mask"] == there["mask"] and here["8010"] != there["8010"]


def test_an_empty_split_is_refused(memory_shards, make_recipe, make_model):
    recipe = make_recipe()
    with pytest.raises(RequestError, match="no sequence in the split 'valid'"):
        evaluate(make_model(recipe), memory_shards([]), recipe)


def test_training_mode_is_restored(proteins, make_recipe, make_model):
    recipe = make_recipe()
    model = make_model(recipe).train()
    evaluate(model, proteins, recipe, budget=200)
    assert model.training
