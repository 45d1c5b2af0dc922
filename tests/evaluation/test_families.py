"""Families: relatives together, chance apart, folds that never cut a family."""

import numpy as np
import pytest
from Bio.Align import PairwiseAligner, substitution_matrices

from bmoe.evaluation.alignment import best_scores
from bmoe.evaluation.families import RULES, families, folds
from bmoe.evaluation.structures import read_chains

PER_MILLE = (78, 51, 45, 54, 19, 43, 63, 74, 22, 51, 91, 57, 22, 39, 52, 71, 58, 13, 32, 64)
COMPOSITION = dict(zip("ARNDCQEGHILKMFPSTWYV", PER_MILLE, strict=True))


def test_mutated_copies_are_relatives_and_random_sequences_are_not():
    """Robinson and Robinson's composition, for which the statistics hold: of 1,740 unrelated pairs 0.002 each may be linked."""
    generator = np.random.default_rng(0)
    letters, chance = np.array(list(COMPOSITION)), np.array(list(COMPOSITION.values())) / sum(COMPOSITION.values())
    sequences = []
    for _ in range(30):
        first, other = generator.choice(letters, (2, 150), p=chance)
        second = np.where(generator.random(150) < 0.5, other, first)  # about half identical
        sequences += ["".join(first), "".join(second)]
    family = families(sequences)
    assert all(family[2 * i] == family[2 * i + 1] for i in range(30))
    assert len(set(family)) >= 30 - 8  # 3.5 false links expected; 9 or more have a chance of 1 %


def random_sequences(generator, letters, longest, number=12):
    """Every third followed by a copy with a piece cut out and another put in, so that the best alignments have gaps."""
    out = ["".join(generator.choice(list(letters), generator.integers(1, longest))) for _ in range(number)]
    for i in range(0, number - 1, 3):
        out[i + 1] = out[i][: longest // 4] + out[i + 1][:9] + out[i][longest // 4 + 5 :]
    return out


@pytest.mark.parametrize(("name", "letters"), [("protein", "ACDEFGHIKLMNPQRSTVWYBZX*"), ("dna", "ACGT")])
def test_scores_are_those_of_biopython(name, letters):
    rule, sequences = RULES[name](), random_sequences(np.random.default_rng(3), letters, 120)
    aligner = PairwiseAligner(mode="local", open_gap_score=-rule.first, extend_gap_score=-rule.further)
    if name == "protein":
        aligner.substitution_matrix = substitution_matrices.load("BLOSUM62")
    else:
        aligner.match_score, aligner.mismatch_score = 2, -3
    codes = [np.array([rule.letters.index(x) for x in sequence], np.uint8) for sequence in sequences]
    ends = np.cumsum([code.size for code in codes])
    for sequence, code in zip(sequences, codes, strict=True):
        found = best_scores(code, np.concatenate(codes), ends, rule.score_LL, rule.first, rule.further)
        assert found.tolist() == [aligner.score(sequence, other) for other in sequences]


def test_related_bases():
    """Of random DNA, copies with a quarter of their bases drawn again; unknown bases relate nothing."""
    generator = np.random.default_rng(1)
    sequences = []
    for _ in range(20):
        first, other = generator.choice(list("ACGT"), (2, 200))
        sequences += ["".join(first), "".join(np.where(generator.random(200) < 0.25, other, first)).replace("T", "U")]
    family = families(sequences, "dna")
    assert all(family[2 * i] == family[2 * i + 1] for i in range(20)) and len(set(family)) >= 17
    assert len(set(families(["N" * 200, "N" * 200, "R" * 200], "dna"))) == 3


def test_letters_that_the_matrix_lacks():
    copies = ["MKVUWW-LLPAGHCDEFKRW" * 3, "MKVCWW.LLPAGHCDEFKRW" * 3, "é?" * 30]
    assert families(copies) == [0, 0, 1]


def test_the_known_families_of_42_chains(real_data):
    chains = read_chains(real_data / "structures")
    family = families([c.sequence for c in chains])
    assert max(np.bincount(family)) == 18  # trypsin-like
    number = {c.name.split(":")[0]: f for c, f in zip(chains, family, strict=True)}
    assert number["struc1_A"] == number["struc2_A"] == number["struc3_A"]
    assert number["2hhb_A"] == number["2hhb_B"] and number["1cs4_A"] == number["1cs4_B"]
    assert len({number["struc1_A"], number["2hhb_A"], number["1cs4_A"], number["1A8O_A"]}) == 4


@pytest.mark.parametrize("count", [2, 5, 50])
def test_folds_keep_families_whole(count):
    family = [0] * 18 + [1, 1, 1, 2, 2, *range(3, 12)]
    parts = folds(family, count)
    assert sorted(i for part in parts for i in part) == list(range(len(family)))
    assert len(parts) == min(count, 12)
    for number in set(family):
        assert sum(any(family[i] == number for i in part) for part in parts) == 1
