"""Scores of variants against their definitions, written out one forward pass at a time."""

import copy
import csv
import itertools

import numpy as np
import pytest
import torch

from bmoe.errors import RequestError
from bmoe.evaluation import mutations

CPU = torch.device("cpu")
WILD = "MKTAYIAKQRQISFVK"
VARIANTS = [  # variants of the same sites are not neighbours
    ((0, "M", "A"),), ((15, "K", "W"),), ((2, "T", "S"), (9, "R", "E")), ((0, "M", "C"),), ((9, "R", "E"), (2, "T", "P")),
]  # fmt: skip


def logits(model, tokens) -> torch.Tensor:
    tokens = torch.as_tensor(tokens)
    n = len(tokens)
    with torch.no_grad():
        out = model(tokens, torch.arange(n), torch.zeros(n, dtype=torch.long), torch.tensor([0, n]).int(), n, n)
    return out.logits.log_softmax(-1).double()


def ids(letters, text: str) -> list[int]:
    return [letters.cls_id, *letters.encode(text.encode()).tolist(), letters.eos_id]


def changed(sites) -> str:
    text = list(WILD)
    for place, old, new in sites:
        assert text[place] == old
        text[place] = new
    return "".join(text)


@pytest.fixture(scope="module", params=["encoder", "decoder"])
def setting(request, make_recipe, make_model, proteins):
    recipe = make_recipe(request.param, slots=150)
    return make_model(recipe), recipe, proteins.alphabet


def ours(setting, method, variants=VARIANTS, text=WILD):
    model, recipe, letters = setting
    return mutations.score(model, recipe, letters, letters.encode(text.encode()), variants, method, CPU)


@pytest.mark.parametrize("setting", ["encoder"], indirect=True)
def test_marginals(setting):
    model, recipe, letters = setting
    for method in ("masked_marginal", "wt_marginal"):
        expected = []
        for sites in VARIANTS:
            tokens = ids(letters, WILD)
            if method == "masked_marginal":
                for place, _, _ in sites:
                    tokens[place + 1] = letters.mask_id
            p = logits(model, tokens)
            token = letters.symbols.index
            expected.append(sum(p[i + 1, token(new)] - p[i + 1, token(old)] for i, old, new in sites).item())
        assert ours(setting, method) == pytest.approx(expected, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("setting", ["encoder"], indirect=True)
def test_pseudo_log_likelihood(setting):
    model, recipe, letters = setting

    def pll(text):
        total, tokens = 0.0, ids(letters, text)
        for slot in range(1, len(tokens) - 1):
            hidden = [letters.mask_id if i == slot else t for i, t in enumerate(tokens)]
            total += logits(model, hidden)[slot, tokens[slot]].item()
        return total

    assert ours(setting, "pll") == pytest.approx([pll(changed(s)) - pll(WILD) for s in VARIANTS], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("setting", ["decoder"], indirect=True)
def test_log_likelihood(setting):
    model, recipe, letters = setting

    def likelihood(text):
        tokens = ids(letters, text)
        p = logits(model, tokens)
        return sum(p[i, tokens[i + 1]].item() for i in range(len(tokens) - 1))

    expected = [likelihood(changed(s)) - likelihood(WILD) for s in VARIANTS]
    assert ours(setting, "log_likelihood") == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_long_wild_types_are_scored_in_a_window_around_the_sites(setting):
    """A window never shows residues beyond it, and carries the specials of the ends it touches."""
    model, recipe, letters = setting
    longer = WILD * 20  # 320 residues for a model of 126
    middle = ((160, "M", "A"),)
    assert mutations.window(middle, 320, 128) == (97, 223)
    assert mutations.window(((3, "A", "C"),), 320, 128) == (0, 126)
    assert mutations.window(((319, "K", "C"),), 320, 128) == (194, 320)
    assert mutations.window(((0, "M", "C"), (319, "K", "C")), 320, 128) == (0, 320)
    method = "wt_marginal" if recipe.model.kind == "encoder" else "log_likelihood"
    score = ours(setting, method, [middle], longer)[0]
    other = "C" * 97 + longer[97:223] + "C" * 97
    assert ours(setting, method, [middle], other)[0] == score
    if method == "wt_marginal":
        p = logits(model, letters.encode(longer[97:223].encode()).astype(np.int64))
        assert score == pytest.approx((p[63, letters.symbols.index("A")] - p[63, letters.symbols.index("M")]).item(), rel=1e-4)


def test_blosum_by_hand():
    """Henikoff and Henikoff 1992: M to A -1, K to W -3, T to S 1, R to E 0, U as C to S -1."""
    sites = [((0, "M", "A"),), ((15, "K", "W"),), ((2, "T", "S"), (9, "R", "E")), ((3, "U", "S"),)]
    assert mutations.blosum(sites).tolist() == [-1, -3, 1, -1]


def test_evaluate_reads_a_table_and_writes_scores(setting, tmp_path):
    model, recipe, letters = setting
    (tmp_path / "wt.fasta").write_text(f">wt beta\n{WILD[:8]}\n{WILD[8:]}\n")
    singles = [f"{old}{i + 1}{new}" for (i, old), new in itertools.product(enumerate(WILD), "AC") if old != new]
    generator = np.random.default_rng(0)
    (tmp_path / "scan.csv").write_text("mutant,DMS_score\n" + "".join(f"{m},{generator.normal()}\n" for m in singles))

    def evaluate(**more):
        return mutations.evaluate(model, recipe, letters, tmp_path / "scan.csv", tmp_path / "wt.fasta", None, CPU, **more)

    got = evaluate(scores_file=tmp_path / "out.csv")
    assert {"spearman", "spearman_low", "spearman_high", "n", "auc"} <= got.keys()
    assert got["n"] == len(singles) and got["spearman_low"] < got["spearman"] < got["spearman_high"]
    assert got["longer_than_trained"] is (len(WILD) + 2 > recipe.data.max_length)
    rows = list(csv.reader((tmp_path / "out.csv").open()))
    stats = pytest.importorskip("scipy.stats")
    table = np.array([row[1:] for row in rows[1:]], float)
    assert rows[0][:2] == ["mutant", "DMS_score"] and rows[0][2] == got["method"]
    assert got["spearman"] == pytest.approx(stats.spearmanr(table[:, 0], table[:, 1]).statistic, abs=1e-12)
    changes = mutations.blosum([((int(m[1:-1]) - 1, m[0], m[-1]),) for m in singles])
    assert got["blosum62"]["spearman"] == pytest.approx(stats.spearmanr(changes, table[:, 0]).statistic, abs=1e-12)
    with pytest.raises(RequestError, match="are scored by"):
        evaluate(methods=("guess",))
    (tmp_path / "scan.csv").write_text("mutant,y\nM1J,1\nK2A,2\nK2X,2\nT3A,1\n")
    got = evaluate()
    assert got["n"] == 2 and got["dropped"] == {"change to no standard residue": 2}
    (tmp_path / "wt.fasta").write_text(f">wt\n{WILD}\n>other\nMKV\n")
    with pytest.raises(RequestError, match="wt.fasta has 2 records.*leave that one alone"):
        evaluate()


def test_a_model_of_no_numbers_ranks_nothing(setting, tmp_path):
    """Equal ranks would make an AUC of 0.5."""
    model, recipe, letters = setting
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.embedding.fill_(torch.nan)
    (tmp_path / "wt.fasta").write_text(f">wt\n{WILD}\n")
    (tmp_path / "scan.csv").write_text("mutant,y\nM1A,1\nK2A,2\nT3A,0\n")
    with pytest.raises(RequestError, match="scores that are no numbers"):
        mutations.evaluate(model, recipe, letters, tmp_path / "scan.csv", tmp_path / "wt.fasta", None, CPU, scores_file=tmp_path / "s.csv")
    assert not (tmp_path / "s.csv").exists()


def test_variants_measured_again_do_not_narrow_the_interval(setting, tmp_path):
    """Sites in another order are the same variant."""
    model, recipe, letters = setting
    (tmp_path / "wt.fasta").write_text(f">wt\n{WILD}\n")
    rows = [f"{WILD[0]}1C:{WILD[1]}2C,0.3", *(f"{WILD[i]}{i + 1}C,{i % 3}.{i}" for i in range(2, 8))]
    other = f"{WILD[1]}2C:{WILD[0]}1C,0.3"

    def found(table):
        (tmp_path / "scan.csv").write_text("\n".join(["mutant,y", *table, ""]))
        return mutations.evaluate(model, recipe, letters, tmp_path / "scan.csv", tmp_path / "wt.fasta", None, CPU)

    once, twice = found(rows), found(rows + [other] + rows[1:])
    assert (once["repeated"], twice["repeated"]) == (0, 7)
    for key in ("spearman", "spearman_low", "spearman_high"):
        assert twice[key] == pytest.approx(once[key], abs=1e-9)


@pytest.mark.parametrize("setting", ["encoder"], indirect=True)
def test_an_unknown_letter_of_the_wild_type_is_one_residue(setting, tmp_path):
    """J is no letter of the alphabet: the numbers behind it stay those of the sequence."""
    model, recipe, letters = setting
    (tmp_path / "wt.fasta").write_text(">x\nMKJAYIAK\n")
    (tmp_path / "scan.csv").write_text("mutant,y\nY5C,1\nK8A,2\nM1A,3\n")
    found = mutations.evaluate(model, recipe, letters, tmp_path / "scan.csv", tmp_path / "wt.fasta", None, CPU)
    assert found["n"] == 3 and found["offset"] == 0


@pytest.mark.parametrize("setting", ["encoder"], indirect=True)
def test_scores_do_not_depend_on_the_order_of_the_table_or_the_batches(setting):
    model, recipe, letters = setting
    ids, longer = letters.encode(WILD.encode()), letters.encode((WILD * 20).encode())
    far = [tuple((place + 16 * k, old, new) for place, old, new in sites) for k in (0, 9, 19) for sites in VARIANTS]
    for wild, variants in ((ids, VARIANTS), (longer, far)):  # the second in windows
        for method in ("masked_marginal", "wt_marginal", "pll")[: 3 if wild is ids else 2]:
            scores = mutations.score(model, recipe, letters, wild, variants, method, CPU)
            small = recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokens_per_batch": 40})})
            turned = mutations.score(model, small, letters, wild, variants[::-1], method, CPU)[::-1]
            assert scores == pytest.approx(turned, rel=1e-4, abs=1e-4)
