"""How evenly the experts of a layer are used: one definition for metrics, evaluation and reports."""

import numpy as np

LOAD_KEYS = ("load_max_over_mean", "load_entropy", "dead_experts")


def load_statistics(counts_E: np.ndarray) -> dict[str, float]:
    """From the routed slots on each expert.

    load_max_over_mean: busiest expert over the mean (1 is even, E is collapse). load_entropy: entropy of the shares over
    log E (1 is even, 0 is collapse). dead_experts: experts without a token. A layer without tokens counts as even.
    """
    counts_E = np.asarray(counts_E, np.float64)
    total = counts_E.sum()
    dead = int((counts_E == 0).sum())
    if total == 0:
        return {"load_max_over_mean": 1.0, "load_entropy": 1.0, "dead_experts": dead}
    live = counts_E[counts_E > 0] / total
    entropy = float(-(live * np.log(live)).sum() / np.log(counts_E.size)) if counts_E.size > 1 else 1.0
    return {"load_max_over_mean": float(counts_E.max() * counts_E.size / total), "load_entropy": entropy, "dead_experts": dead}
