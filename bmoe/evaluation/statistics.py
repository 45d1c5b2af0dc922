"""The statistics of the evaluation, in numpy: bootstrap intervals, rank correlation, area under the ROC curve."""

from collections.abc import Callable, Iterator

import numpy as np

REPLICATES = 1000
SEED = 20  # of all resampling: the same numbers give the same interval


def resamples(units: int, replicates: int = REPLICATES) -> Iterator[np.ndarray]:
    """How often each of `units` units is drawn in each bootstrap replicate, int64 [units] with sum `units`."""
    generator = np.random.default_rng(SEED)
    for _ in range(replicates):
        yield np.bincount(generator.integers(0, units, units), minlength=units)


def bootstrap(units: int, statistic: Callable[[np.ndarray], float], replicates: int = REPLICATES) -> tuple[float, float]:
    """95 % percentile interval of a statistic of the resampled units (Efron and Tibshirani 1993).

    `statistic` gets the number of times each unit was drawn; replicates where it is not a number are left out. (nan, nan)
    for fewer than two units or replicates.
    """
    values = np.array([statistic(drawn) for drawn in resamples(units, replicates)]) if units > 1 else np.empty(0)
    values = values[np.isfinite(values)]
    if values.size < 2:
        return float("nan"), float("nan")
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, ties share their mean rank, float64."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[inverse]


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's rank correlation; nan if a side is constant or has fewer than two values."""
    if a.size < 2:
        return float("nan")
    a, b = ranks(a), ranks(b)
    a, b = a - a.mean(), b - b.mean()
    scale = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / scale) if scale > 0 else float("nan")


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties count half (Mann-Whitney U);
    nan if a class is empty."""
    n_positive = int(positive.sum())
    n_negative = positive.size - n_positive
    if n_positive == 0 or n_negative == 0:
        return float("nan")
    above = ranks(scores)[positive].sum() - n_positive * (n_positive + 1) / 2.0
    return float(above / (n_positive * n_negative))
