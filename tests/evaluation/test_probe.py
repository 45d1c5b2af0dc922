"""Probe: no leakage, the classifier of scikit-learn, a planted signal at a known layer, and labels in real tables."""

import numpy as np
import pytest
import torch

from bmoe.errors import RequestError
from bmoe.evaluation import labels, probe
from bmoe.evaluation.families import families

CPU = torch.device("cpu")


def test_repeats_duplicates_and_conflicts(tmp_path, make_proteins):
    a, b, c, d = make_proteins(4, 60, seed=5)
    rows = [(a, "H"), (a * 3, "H"), (b, "E"), (b, "H"), (c, "~"), (c + d, "T")]
    path = tmp_path / "x.tsv"
    path.write_text("sequence\tss8\n" + "".join(f"{s}\t{t * len(s)}\n" for s, t in rows))
    found = labels.read_labelled(path)
    assert found.sequences == [a, c, c + d]
    assert found.counts == {"read": 6, "repeats": 1, "conflicting": 1, "sequences": 3}
    assert found.is_secondary_structure


def test_labels_are_the_column_as_long_as_the_sequences(tmp_path):
    (tmp_path / "x.tsv").write_text("name\tsequence\tlen\tss8\np1\tMKVL\t4\tHHEE\n")
    assert labels.read_labelled(tmp_path / "x.tsv").labels == ["HHEE"]


def test_period():
    assert [labels.period(t) for t in ("abcabc", "aaaa", "abcab", "abc")] == [3, 1, 5, 3]


def test_relatives_stay_on_one_side(make_proteins):
    """Threes of which two are half identical to the first: no two share a fifth of their 8-mers."""
    generator = np.random.default_rng(6)
    sequences = []
    for first, *others in zip(*(iter(make_proteins(300, 80, seed=6)),) * 3, strict=True):
        first, others = (first * 40)[:80], ["".join(generator.choice(list("ACDEFGHIKLMNPQRSTVWY"), 80)) for _ in others]
        mutated = ["".join(a if k % 2 else b for k, (a, b) in enumerate(zip(first, other, strict=True))) for other in others]
        sequences += [first, *mutated]
    found = labels.Labelled(sequences, ["H" * 80] * 300, {})
    parts = labels.split(found, 9000, 60, "protein")
    used = {name: {i // 3 for i in members} for name, members in parts.items()}
    assert not (used["train"] & used["test"] or used["train"] & used["valid"] or used["valid"] & used["test"])
    sizes = {name: 60 * len(members) for name, members in parts.items()}
    for name, share in labels.SPLITS.items():
        assert sizes[name] == pytest.approx(share * 9000, abs=600)


def test_what_is_aligned_does_not_grow_with_the_table(make_proteins):
    """Ten thousand sequences with one tag: as many are drawn as hold the residues wanted, whatever their order in the table."""
    sequences = ["MHHHHHHHHHH" + s for s in make_proteins(10_000, 100, seed=8)]
    found = labels.Labelled(sequences, ["H" * len(s) for s in sequences], {})
    chosen = labels.drawn(found, 2000, 50)
    sizes = [min(len(sequences[i]), 50) for i in chosen]
    assert sum(sizes[:-1]) < 2000 <= sum(sizes) and len(set(chosen)) == len(chosen)
    parts = labels.split(found, 2000, 50, "protein")
    assert sorted(i for members in parts.values() for i in members) == sorted(chosen)


@pytest.mark.parametrize("decay", [probe.DECAY, 1.0])
def test_classifier_equals_scikit_learn(decay):
    linear = pytest.importorskip("sklearn.linear_model")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(600, 8)).astype(np.float32) * [1, 5, 0.1, 1, 1, 1, 1, 1]
    y = (x[:, 0] + x[:, 1] / 5 + generator.normal(size=600) > 0).astype(int) + (x[:, 2] > 0.1)
    z = (x - x.mean(0)) / x.std(0, ddof=1)
    theirs = linear.LogisticRegression(C=1 / (600 * decay), tol=1e-8, max_iter=2000).fit(z, y)
    features = torch.tensor(x, dtype=torch.float32)
    ours = probe.fit(features, torch.tensor(y), 3, decay)(features).numpy()
    assert (ours == theirs.predict(z)).mean() > 0.995


def test_the_layer_is_chosen_on_validation_sequences_and_judged_on_others():
    """One layer tells the labels of validation, and the other way round those of the test; the other layer the opposite."""
    letter, owner = np.array(list("AB" * 30)), np.repeat(np.arange(6), 10)
    rows = {name: np.isin(owner, parts) for name, parts in (("train", (0, 1)), ("valid", (2, 3)), ("test", (4, 5)))}
    sign = torch.from_numpy(np.where(letter == "A", 1.0, -1.0)).float()
    layers = [torch.where(torch.from_numpy(rows[wrong]), -sign, sign)[:, None] for wrong in ("valid", "test")]
    found = probe._probe(layers, letter, owner, rows, CPU)
    assert found["best_layer"] == 1 and found["accuracy"] == 0.0
    assert [entry["test_accuracy"] for entry in found["layers"]] == [1.0, 0.0]


def test_states_that_are_no_numbers_are_refused():
    with pytest.raises(RequestError, match="states that are no numbers"):
        probe.fit(torch.full((20, 3), torch.nan), torch.arange(20) % 2, 2)


@pytest.fixture
def table(tmp_path, make_proteins):
    """Labels that follow from the residue: H for the first half of the alphabet, E for some, coil for the rest."""
    sequences = make_proteins(60, 90, seed=7)
    label = ["".join("H" if x < "L" else "E" if x < "S" else "~" for x in s) for s in sequences]
    path = tmp_path / "ss.tsv"
    path.write_text("sequence\tss8\n" + "".join(f"{s}\t{t}\n" for s, t in zip(sequences, label, strict=True)))
    return path


def test_labels_of_the_residue_are_read_off_the_embedding(table, make_recipe, make_model, proteins):
    recipe = make_recipe()
    found = probe.evaluate(make_model(recipe), recipe, proteins.alphabet, table, CPU)
    assert [entry["layer"] for entry in found["layers"]] == [0, 1, 2, 3]
    assert found["layers"][0]["test_accuracy"] > 0.99 and found["classes"] == 3
    assert found["accuracy_low"] <= found["accuracy"] <= found["accuracy_high"]
    assert found["majority"] == pytest.approx(0.45, abs=0.05) and found["majority_class"] == "H"
    short = probe.evaluate(
        make_model(recipe),
        recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": 20})}),
        proteins.alphabet,
        table,
        CPU,
    )
    assert found["longer_than_trained"] == 0 and short["longer_than_trained"] > 0
    assert found["three_state"]["layers"][0]["test_accuracy"] > 0.99
    best = max(found["layers"], key=lambda e: e["valid_accuracy"])
    assert best["layer"] == found["best_layer"] and best["test_accuracy"] == found["accuracy"]


def test_labels_of_the_neighbour_need_context(table, make_recipe, make_model, proteins, tmp_path):
    """Labels shifted by one residue cannot be read off layer 0, whatever the model."""
    lines = table.read_text().splitlines()[1:]
    moved = tmp_path / "moved.tsv"
    moved.write_text("sequence\tss8\n" + "".join(f"{s}\t{t[1:]}{t[0]}\n" for s, t in (line.split("\t") for line in lines)))
    recipe = make_recipe()
    found = probe.evaluate(make_model(recipe), recipe, proteins.alphabet, moved, CPU)
    assert found["layers"][0]["test_accuracy"] < found["majority"] + 0.06


def test_tables_that_do_not_fit(tmp_path, make_recipe, make_model, proteins):
    recipe = make_recipe()

    def run(text):
        (tmp_path / "x.tsv").write_text(text)
        return probe.evaluate(make_model(recipe), recipe, proteins.alphabet, tmp_path / "x.tsv", CPU)

    with pytest.raises(RequestError, match="row 3: 3 residues and 2 labels"):
        run("sequence\tss8\nMKV\tHHH\nMKV\tHH\n")
    with pytest.raises(RequestError, match="too few unrelated"):
        run("sequence\tss8\nMKV\tHHH\n")
    with pytest.raises(RequestError, match="row 2: 3 residues and 2 labels in 'name'"):
        run("name\tsequence\tss8\np1\tMKV\tHHHH\n")
    with pytest.raises(RequestError, match="one column"):
        run("sequence\nMKV\n")


def test_a_real_table_of_secondary_structures(real_data):
    found = labels.read_labelled(real_data / "ss8_2000.tsv.gz")
    assert found.counts["read"] == 2000 and found.counts["conflicting"] >= 35
    assert found.is_secondary_structure
    parts = labels.split(found, 32_000, 1022, "protein")
    chosen = [i for members in parts.values() for i in members]
    family = dict(zip(chosen, families([found.sequences[i][:1022] for i in chosen]), strict=True))
    assert len(set(family.values())) < len(chosen) - 3
    assert not {family[i] for i in parts["test"]} & {family[i] for i in parts["train"] + parts["valid"]}
    letter = np.array(list("".join(found.labels[i][:1022] for i in parts["test"])))
    assert (letter == "H").mean() == pytest.approx(0.327, abs=0.06)  # the majority class
