"""Paired differences: by hand, by scipy, and intervals narrower than those of the models."""

import numpy as np
import pytest

from bmoe.evaluation.pairs import differences
from bmoe.evaluation.statistics import bootstrap, resampled_spearman


def scan(noise: float, seed: int, effects: np.ndarray) -> dict:
    scores = effects + noise * np.random.default_rng(seed).normal(size=effects.size)
    return {"points": np.stack([effects, scores], axis=1).tolist(), "group": list(range(effects.size))}


def test_spearman_of_the_same_variants():
    stats = pytest.importorskip("scipy.stats")
    effects = np.random.default_rng(0).normal(size=200)
    good, bad = scan(0.5, 1, effects), scan(3.0, 2, effects)
    found = differences({"mutations": good}, {"mutations": bad})["mutations"]
    expected = [stats.spearmanr(*np.array(x["points"]).T).statistic for x in (good, bad)]
    assert found["difference"] == pytest.approx(expected[0] - expected[1]) and 0 < found["low"] < found["difference"] < found["high"]
    assert differences({"mutations": good}, {"mutations": good})["mutations"] == {"difference": 0.0, "low": 0.0, "high": 0.0}


def test_a_common_error_cancels():
    """Two models that err alike: the paired interval is far narrower than that of one of them."""
    effects = np.random.default_rng(0).normal(size=300)
    first = scan(1.0, 1, effects)
    points = np.array(first["points"])
    second = first | {"points": np.stack([effects, points[:, 1] + 0.05 * np.random.default_rng(2).normal(size=300)], axis=1).tolist()}
    found = differences({"mutations": second}, {"mutations": first})["mutations"]

    low, high = bootstrap(300, resampled_spearman(*points.T))
    assert found["high"] - found["low"] < 0.2 * (high - low)


def test_a_table_given_twice_says_no_more():
    effects = np.random.default_rng(0).normal(size=60)
    good, bad = scan(0.5, 1, effects), scan(3.0, 2, effects)
    twice = [{key: values * 2 for key, values in found.items()} for found in (good, bad)]
    once, again = [differences({"mutations": a}, {"mutations": b})["mutations"] for a, b in ((good, bad), twice)]
    assert again == pytest.approx(once, abs=1e-9)


def chains(*values: float) -> dict:
    family = [1, 1, 2, 3]
    return {"per_chain": [{"chain": str(i), "family": f, "long_p_at_l": v} for i, (f, v) in enumerate(zip(family, values, strict=True))]}


def test_contacts_by_hand():
    found = differences({"contacts": chains(0.3, 0.5, 0.2, 0.1)}, {"contacts": chains(0.1, 0.1, 0.2, float("nan"))})["contacts"]
    assert found["difference"] == pytest.approx((0.2 + 0.4 + 0.0) / 3)  # a chain without long pairs does not count
    assert found["low"] == pytest.approx(0.0) and found["high"] == pytest.approx(0.3)  # of two families, one drawn twice


def test_probe_by_hand():
    found = differences({"probe": {"per_sequence": [[5, 10], [9, 30]]}}, {"probe": {"per_sequence": [[4, 10], [3, 30]]}})["probe"]
    assert found["difference"] == pytest.approx(7 / 40) and (found["low"], found["high"]) == pytest.approx((0.1, 0.2))


def test_other_data_is_not_compared():
    effects = np.random.default_rng(0).normal(size=20)
    here = {"mutations": scan(1, 1, effects), "contacts": chains(1, 1, 1, 1), "probe": {"per_sequence": [[1, 2]]}}
    there = {"mutations": scan(1, 1, effects[:10]), "probe": {"per_sequence": [[1, 3]]}}
    assert differences(here, there) == {} and differences({}, here) == {}


def test_chains_without_long_pairs_are_not_compared():
    found = {"contacts": {"per_chain": [{"chain": name, "family": 1, "long_p_at_l": float("nan")} for name in "ab"]}}
    assert differences(found, found) == {}
