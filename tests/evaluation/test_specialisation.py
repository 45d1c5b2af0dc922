"""Mutual information against scikit-learn and by hand, a null that covers chance, and routers with known habits."""

import numpy as np
import pytest
import torch

from bmoe.errors import RequestError
from bmoe.evaluation import specialisation
from bmoe.evaluation.routing import summary

CPU = torch.device("cpu")


def test_mutual_information_by_hand_and_by_scikit_learn():
    assert specialisation.mutual_information(np.array([[5, 0], [0, 5.0]])) == pytest.approx(1.0)  # one bit
    assert specialisation.mutual_information(np.array([[2, 4], [3, 6.0]])) == pytest.approx(0.0, abs=1e-12)
    metrics = pytest.importorskip("sklearn.metrics")
    generator = np.random.default_rng(0)
    a, b = generator.integers(0, 6, 500), generator.integers(0, 9, 500)
    b[:200] = a[:200]
    table = specialisation.counts(a[:, None], b, 6, 9)
    assert table.sum() == 500
    assert specialisation.mutual_information(table) == pytest.approx(metrics.mutual_info_score(a, b) / np.log(2))


def test_null_covers_chance_also_between_runs_of_equal_labels():
    """Independent but slowly changing experts and labels have a high mutual information by chance; the null knows."""
    generator = np.random.default_rng(1)
    rank = []

    def runs(kinds):
        return np.repeat(generator.integers(0, kinds, 100), generator.geometric(0.05, 100))[:1200]

    for _ in range(60):
        expert, label = runs(4)[:, None], runs(3)
        size = min(expert.size, label.size)
        expert, label = expert[:size], label[:size]
        bits = specialisation.mutual_information(specialisation.counts(expert, label, 4, 3))
        rank.append((specialisation.null(expert, label, 4, 3) >= bits).mean())
    assert np.mean(np.array(rank) < 0.05) <= 0.15  # 0.05 expected; a shuffle of single labels calls nearly all of them significant


@pytest.fixture
def routed(make_recipe, make_model, proteins):
    recipe = make_recipe()
    return make_model(recipe), recipe, proteins


def test_p_is_the_share_of_moves_that_reach_the_value_itself_counted():
    counts = np.array([[30.0, 10.0], [10.0, 30.0]])
    bits = specialisation.mutual_information(counts)
    chance = np.array([0.0, bits / 2, bits, 2 * bits])
    found = specialisation._information(counts, chance)
    assert found["bits"] == bits and found["p"] == 3 / 5 and found["null_mean"] == pytest.approx(0.875 * bits)


def test_counts_equal_the_model_s_own(routed):
    model, recipe, shards = routed
    found = specialisation.evaluate(model, shards, recipe, device=CPU, budget=1000)
    tokens = found["tokens"]
    assert [layer["layer"] for layer in found["layers"]] == [2, 3]
    kept = []
    handle = model.register_forward_hook(lambda _, __, out: kept.append(out.counts_LE))
    specialisation.evaluate(model, shards, recipe, device=CPU, budget=1000)
    handle.remove()
    theirs = sum(kept).numpy()
    assert theirs.sum(axis=1).tolist() == [2 * tokens] * 2
    assert np.allclose([layer["load"] for layer in found["layers"]], theirs / theirs.sum(axis=1, keepdims=True))


def test_every_question_is_answered(routed, tmp_path):
    model, recipe, shards = routed
    rows = ["".join("H" if x < "L" else "~" for x in s) for s in ("MKTAYIAKQRQISFVKSHF" * 2 + "W", "ACDEFGHIKLMNPQRSTVWY")]
    (tmp_path / "ss.tsv").write_text(f"sequence\tss8\n{'MKTAYIAKQRQISFVKSHF' * 2 + 'W'}\t{rows[0]}\nACDEFGHIKLMNPQRSTVWY\t{rows[1]}\n")
    found = specialisation.evaluate(model, shards, recipe, device=CPU, budget=2000, structures=tmp_path / "ss.tsv")
    assert found["residue"]["labels"] == [s for s in shards.alphabet.symbols if s in "ACDEFGHIKLMNPQRSTVWY"]
    assert found["structure"]["labels"] == ["H", "coil"] and len(found["position"]["labels"]) == 6
    assert len(found["next_layer"]["layers"]) == 1
    for question in ("residue", "position", "structure", "next_layer"):
        for layer in found[question]["layers"]:
            shares = np.array(layer["shares"])
            assert np.allclose(shares.sum(axis=1)[shares.any(axis=1)], 1.0)
            assert 0 < layer["p"] <= 1 and layer["null_mean"] <= layer["null_95"] + 1e-12
    residue = found["residue"]["layers"][0]
    assert residue["bits"] > residue["null_95"] and residue["p"] < 0.02  # a router sees the residue


def test_routing_by_residue_alone_has_the_entropy_of_the_choice(routed):
    """A first layer whose attention adds nothing: the chosen experts are a function of the residue, nearly."""
    model, recipe, shards = routed
    with torch.no_grad():
        for block in model.blocks[:2]:
            block.attention.output.weight.zero_()
        model.blocks[0].ffn.down.weight.zero_()
    found = specialisation.evaluate(model, shards, recipe, device=CPU, budget=2000)
    shares = np.array(found["residue"]["layers"][0]["shares"])
    load = np.array(found["layers"][0]["load"])
    by_residue = shares * load[:, None] / (shares * load[:, None]).sum(axis=0)  # P(expert | residue)
    assert ((by_residue > 0.45) & (by_residue < 0.55)).sum(axis=0).min() >= 2 - 1e-9  # two experts each, always the same


def test_dense_models_have_nothing_to_show(make_recipe, make_model, proteins):
    recipe = make_recipe(moe=None)
    with pytest.raises(RequestError, match="dense.*leave --routing out"):
        specialisation.evaluate(make_model(recipe), proteins, recipe, device=CPU)


def test_summary_by_hand():
    even, collapsed = summary(np.array([[10, 10, 10, 10], [40, 0, 0, 0]]), [1, 2])
    assert even == {"layer": 2, "load": [0.25] * 4, "load_max_over_mean": 1.0, "load_entropy": pytest.approx(1.0), "dead_experts": 0}
    assert collapsed["load_max_over_mean"] == 4.0 and collapsed["load_entropy"] == 0.0 and collapsed["dead_experts"] == 3
