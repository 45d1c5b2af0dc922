"""Probabilities at chosen slots: the same whatever the cut into batches, and against one pass a sequence."""

import numpy as np
import pytest
import torch

from bmoe.evaluation.forward import Request, batch_slots, log_probabilities, packed, wrap

CPU = torch.device("cpu")


def one_pass(model, tokens: np.ndarray) -> np.ndarray:
    n, tokens_T = len(tokens), torch.from_numpy(tokens)
    with torch.no_grad():
        out = model(tokens_T, torch.arange(n), torch.zeros(n, dtype=torch.long), torch.tensor([0, n]).int(), n, n)
    return out.logits.log_softmax(-1).double().numpy()


@pytest.fixture(scope="module")
def setting(make_recipe, make_model, proteins):
    recipe = make_recipe()
    return make_model(recipe), recipe, proteins


def test_versions_are_cut_between_batches(setting):
    """Versions of three sequences, several targets a slot, slots asked for twice, versions asked for nothing; batches that hold less
    than a sequence, a part of a request, all of them."""
    model, _, proteins = setting
    generator = np.random.default_rng(0)
    requests, expected = [], []
    for number, count in ((0, 5), (1, 1), (2, 4)):
        tokens_Cn = np.tile(wrap(proteins.alphabet, proteins.sequence(number)[:30]), (count, 1))
        n = tokens_Cn.shape[1]
        tokens_Cn[np.arange(count), generator.integers(1, n - 1, count)] = proteins.alphabet.mask_id
        version = np.sort(generator.integers(0, count, 9))
        slot, target = generator.integers(0, n, 9), generator.integers(4, 24, 9)
        requests.append(Request(tokens_Cn, version, slot, target))
        logp = [one_pass(model, tokens) for tokens in tokens_Cn]
        expected += [logp[v][s, t] for v, s, t in zip(version, slot, target, strict=True)]
    for slots in (10, 70, 10_000):
        assert log_probabilities(model, requests, slots, CPU) == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert log_probabilities(model, [], 10, CPU).size == 0


def test_rows_hold_whole_sequences_at_their_places(setting):
    _, _, proteins = setting
    sequences = [wrap(proteins.alphabet, np.arange(length) % 20 + 4) for length in (20, 3, 30, 8)]
    rows = list(packed(sequences, 30, CPU))
    assert [np.diff(row.bounds).tolist() for row in rows] == [[22, 5], [32], [10]]
    inputs = rows[0].inputs
    assert inputs["tokens_T"].tolist() == [*sequences[0], *sequences[1]] and inputs["max_seqlen"] == 22 and inputs["real_tokens"] == 27
    assert inputs["positions_T"].tolist() == [*range(22), *range(5)] and inputs["segments_T"].tolist() == [0] * 22 + [1] * 5
    assert inputs["cu_seqlens"].tolist() == [0, 22, 27] and inputs["cu_seqlens"].dtype == torch.int32


def test_small_models_get_larger_batches_on_a_gpu(setting):
    _, recipe, _ = setting
    assert batch_slots(recipe, CPU) == recipe.data.tokens_per_batch
    cuda = torch.device("cuda")
    large = recipe.model.model_copy(update={"width": 512, "layers": 24})
    assert batch_slots(recipe, cuda) == 2**18
    assert recipe.data.tokens_per_batch < batch_slots(recipe.model_copy(update={"model": large}), cuda) < 2**17
