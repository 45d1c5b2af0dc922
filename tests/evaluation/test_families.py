"""Families: relatives together, chance apart, folds that never cut a family."""

import numpy as np
import pytest

from bmoe.evaluation.families import families, folds
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
