"""The statistics of the evaluation, in numpy: bootstrap intervals, rank correlation, area under the ROC curve."""

from collections.abc import Callable, Iterator

import numpy as np

REPLICATES = 1000
SEED = 20  # of all resampling: the same numbers give the same interval
BLOCK = 2**20  # draws held at a time


def resamples(units: int, replicates: int = REPLICATES) -> Iterator[np.ndarray]:
    """How often each of `units` units is drawn in each bootstrap replicate, int64 [R, units] with sums `units`, some replicates at a
    time."""
    generator = np.random.default_rng(SEED)
    step = max(BLOCK // units, 1)
    for first in range(0, replicates, step):
        rows = min(step, replicates - first)
        drawn = generator.integers(0, units, (rows, units)) + np.arange(rows)[:, None] * units
        yield np.bincount(drawn.ravel(), minlength=rows * units).reshape(rows, units)


def bootstrap(units: int, statistic: Callable[[np.ndarray], np.ndarray], replicates: int = REPLICATES) -> tuple[float, float]:
    """95 % percentile interval of a statistic of the resampled units (Efron and Tibshirani 1993).

    `statistic` gets the number of times each unit was drawn, [R, units], and gives [R] values; those that are not a number are left
    out. (nan, nan) for fewer than two units or replicates.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        values = np.concatenate([statistic(drawn) for drawn in resamples(units, replicates)]) if units > 1 else np.empty(0)
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
    return float(resampled_spearman(a, b)(np.ones((1, a.size), np.int64))[0])


def resampled_spearman(a: np.ndarray, b: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A statistic for `bootstrap`: Spearman's correlation of the pairs, each taken as often as it was drawn.

    The values are sorted once; a resample's ranks follow from how often each value was drawn.
    """
    groups = [np.unique(values, return_inverse=True)[1] for values in (a, b)]

    def ranked(group_N: np.ndarray, drawn_N: np.ndarray) -> np.ndarray:
        """Ranks less their mean (n + 1) / 2."""
        counts = np.bincount(group_N, drawn_N)
        return (np.cumsum(counts) - (counts - 1) / 2.0)[group_N] - (drawn_N.sum() + 1) / 2.0

    def one(drawn_N: np.ndarray) -> float:
        a_N, b_N = (ranked(group_N, drawn_N) for group_N in groups)
        scale = np.sqrt((drawn_N @ (a_N * a_N)) * (drawn_N @ (b_N * b_N)))
        return float(drawn_N @ (a_N * b_N) / scale) if scale > 0 else float("nan")

    return lambda drawn_RN: np.array([one(drawn_N) for drawn_N in drawn_RN.astype(np.float64)])


def auc(scores: np.ndarray, positive: np.ndarray) -> float:
    """Area under the ROC curve: the chance that a positive scores above a negative, ties count half (Mann-Whitney U);
    nan if a class is empty."""
    n_positive = int(positive.sum())
    n_negative = positive.size - n_positive
    if n_positive == 0 or n_negative == 0:
        return float("nan")
    above = ranks(scores)[positive].sum() - n_positive * (n_positive + 1) / 2.0
    return float(above / (n_positive * n_negative))
