"""Rank statistics against scipy and scikit-learn, and the coverage of the bootstrap."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bmoe.evaluation import statistics
from bmoe.evaluation.statistics import auc, bootstrap, ranks, resampled_spearman, resamples, spearman

VALUES = st.lists(st.integers(-5, 5), min_size=3, max_size=40)


@settings(max_examples=50, deadline=None)
@given(VALUES, st.randoms(use_true_random=False))
def test_ranks_and_spearman_equal_scipy(values, random):
    stats = pytest.importorskip("scipy.stats")
    a = np.array(values, float)
    b = np.array([random.randint(-5, 5) for _ in values], float)
    assert np.array_equal(ranks(a), stats.rankdata(a))
    if np.ptp(a) and np.ptp(b):
        assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)
    else:
        assert np.isnan(spearman(a, b))


@settings(max_examples=50, deadline=None)
@given(VALUES, st.randoms(use_true_random=False))
def test_auc_equals_scikit_learn(values, random):
    metrics = pytest.importorskip("sklearn.metrics")
    positive = np.array([random.random() < 0.5 for _ in values])
    scores = np.array(values, float)
    if 0 < positive.sum() < positive.size:
        assert auc(scores, positive) == pytest.approx(metrics.roc_auc_score(positive, scores), abs=1e-12)
    else:
        assert np.isnan(auc(scores, positive))


def test_bootstrap_interval_of_a_mean_covers_it():
    """About 95 of 100 intervals hold the true mean (binomial, so 86 at least)."""
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(100):
        x = generator.normal(3.0, 1.0, 60)
        low, high = bootstrap(60, lambda drawn, x=x: drawn @ x / drawn.sum(axis=1), 200)
        hits += low < 3.0 < high
    assert hits >= 86


def test_bootstrap_of_one_unit_has_no_interval():
    assert np.isnan(bootstrap(1, lambda drawn: 1.0)).all()


def test_correlation_of_resamples_is_that_of_the_drawn_rows():
    """By the definition: each pair written out as often as it was drawn, ties included."""
    generator = np.random.default_rng(1)
    a, b = generator.integers(0, 6, 50).astype(float), generator.normal(size=50)
    (drawn_RN,) = resamples(50, 20)
    assert (drawn_RN.sum(axis=1) == 50).all()
    rows = [np.repeat(np.arange(50), drawn_N) for drawn_N in drawn_RN]
    expected = [pytest.importorskip("scipy.stats").spearmanr(a[r], b[r]).statistic for r in rows]
    assert resampled_spearman(a, b)(drawn_RN) == pytest.approx(expected, abs=1e-12)


def test_resamples_do_not_depend_on_how_many_are_held(monkeypatch):
    """They are what one generator draws, one replicate after the other."""
    together = np.concatenate(list(resamples(7, 30)))
    monkeypatch.setattr(statistics, "BLOCK", 14)
    assert np.array_equal(np.concatenate(list(resamples(7, 30))), together)
    generator = np.random.default_rng(statistics.SEED)
    assert np.array_equal(together, [np.bincount(generator.integers(0, 7, 7), minlength=7) for _ in range(30)])
