"""Counter-based draws: uniform, independent of history, and a permutation that needs no memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bmoe.data import random


def test_mix_is_the_published_splitmix64():
    # SplitMix64 seeded with 1234567 (reference outputs of Vigna's splitmix64.c): state advances by the golden increment.
    state = np.array([1234567], np.uint64) + random.GOLDEN * np.arange(1, 6).astype(np.uint64)
    assert random.mix(state).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.integers(1, 5000), st.integers(0, 2**63))
def test_permute_is_a_bijection(n, seed):
    image = random.permute(np.arange(n), n, random.key(seed, random.ORDER, 0, 0))
    assert sorted(image) == list(range(n))


def test_permute_is_random_access():
    key = random.key(5, random.ORDER, 2, 0)
    whole = random.permute(np.arange(1000), 1000, key)
    assert (random.permute(np.array([7, 999, 3]), 1000, key) == whole[[7, 999, 3]]).all()


@pytest.mark.parametrize("n", [2, 3, 10, 97])
def test_permute_puts_every_item_everywhere_alike(n):
    rounds = 4000
    first = np.array([random.permute(np.array([0]), n, random.key(0, random.ORDER, e, 0))[0] for e in range(rounds)])
    counts = np.bincount(first, minlength=n)
    chi2 = ((counts - rounds / n) ** 2 / (rounds / n)).sum()
    assert chi2 < (n - 1) + 5 * np.sqrt(2 * (n - 1)) + 5


def test_uniform_is_uniform_and_uncorrelated():
    keys = random.key(0, random.MASK, 0, np.arange(200_000))
    u, v = random.uniform(keys, 0), random.uniform(keys, 1)
    assert abs(u.mean() - 0.5) < 0.003 and abs(u.var() - 1 / 12) < 0.001
    assert abs(np.corrcoef(u, v)[0, 1]) < 0.01 and abs(np.corrcoef(u[1:], u[:-1])[0, 1]) < 0.01
    assert u.min() >= 0 and u.max() < 1


def test_streams_of_purpose_epoch_and_seed_differ():
    draws = {random.bits(random.key(s, p, e, i), 0).item() for s in (0, 1) for p in (1, 2) for e in (0, 1) for i in (0, 1)}
    assert len(draws) == 16


def test_below_reaches_both_ends():
    draws = random.below(random.key(0, random.CROP, 0, np.arange(2000)), 0, 3)
    assert set(draws.tolist()) == {0, 1, 2}
