"""Two models on the same variants, chains and sequences: differences with paired intervals.

Two models find the same proteins hard, so the interval of a difference, in which both are resampled together, is narrower
than those of the models would suggest. Perplexities are compared by `perplexity.compare`.
"""

from collections.abc import Callable

import numpy as np

from bmoe.evaluation.statistics import bootstrap, resampled_spearman


def differences(here: dict, there: dict) -> dict[str, dict[str, float]]:
    """Of results of `bmoe eval`, those of `here` minus those of `there`: mutations (Spearman), contacts (long-range P@L),
    probe (accuracy). Each has difference, low, high (95 % bootstrap over variants, families, sequences); what one of them
    lacks, or has of other data, is left out."""
    found = {}
    for name, compare in {"mutations": _mutations, "contacts": _contacts, "probe": _probe}.items():
        if name in here and name in there and (difference := compare(here[name], there[name])):
            found[name] = difference
    return found


def _mutations(here: dict, there: dict) -> dict[str, float] | None:
    a_N2, b_N2 = np.array(here["points"], float), np.array(there["points"], float)
    if a_N2.shape != b_N2.shape or not np.array_equal(a_N2[:, 0], b_N2[:, 0]):
        return None
    group_N = np.array(here["group"])
    ours, theirs = resampled_spearman(*a_N2.T), resampled_spearman(*b_N2.T)

    def gain(drawn_RG: np.ndarray) -> np.ndarray:
        drawn_RN = drawn_RG[:, group_N]
        return ours(drawn_RN) - theirs(drawn_RN)

    return _with_interval(gain, int(group_N.max()) + 1)


def _contacts(here: dict, there: dict) -> dict[str, float] | None:
    chains, others = here["per_chain"], there["per_chain"]
    if [c["chain"] for c in chains] != [c["chain"] for c in others]:
        return None
    gain_C = np.array([a["long_p_at_l"] - b["long_p_at_l"] for a, b in zip(chains, others, strict=True)])
    family_C, known = np.array([c["family"] for c in chains]), np.isfinite(gain_C)
    if not known.any():  # no chain has pairs that far apart
        return None
    sums = np.bincount(family_C[known], gain_C[known])
    return _ratio_of_sums(sums, np.bincount(family_C[known], minlength=sums.size))


def _probe(here: dict, there: dict) -> dict[str, float] | None:
    a_S2, b_S2 = np.array(here["per_sequence"]), np.array(there["per_sequence"])
    if a_S2.shape != b_S2.shape or not np.array_equal(a_S2[:, 1], b_S2[:, 1]):
        return None
    return _ratio_of_sums(a_S2[:, 0] - b_S2[:, 0], a_S2[:, 1])


def _ratio_of_sums(sums_U: np.ndarray, sizes_U: np.ndarray) -> dict[str, float]:
    """Sum over units by their sizes, units without size left out."""
    sums_U, sizes_U = sums_U[sizes_U > 0], sizes_U[sizes_U > 0]
    return _with_interval(lambda drawn_RU: drawn_RU @ sums_U / (drawn_RU @ sizes_U), sums_U.size)


def _with_interval(value: Callable[[np.ndarray], np.ndarray], units: int) -> dict[str, float]:
    low, high = bootstrap(units, value)
    return {"difference": float(value(np.ones((1, units), int))[0]), "low": low, "high": high}
