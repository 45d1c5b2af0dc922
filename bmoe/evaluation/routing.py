"""How evenly the experts of each layer are used.

Legend: L layers with experts, E experts.
"""

import numpy as np


def summary(counts_LE: np.ndarray, moe_layers: list[int]) -> list[dict]:
    """One entry per layer with experts.

    layer: its number, from 1. load: share of the routed slots on each expert. load_max_over_mean: the busiest expert over the mean
    (1 is even, E is collapse). load_entropy: entropy of the shares over log E (1 is even, 0 is collapse). dead_experts:
    experts without a token.
    """
    out = []
    for layer, counts_E in zip(moe_layers, np.asarray(counts_LE, np.float64), strict=True):
        share_E = counts_E / max(counts_E.sum(), 1.0)
        live = share_E[share_E > 0]
        out.append({
            "layer": layer + 1,
            "load": share_E.tolist(),
            "load_max_over_mean": float(share_E.max() * share_E.size),
            "load_entropy": float(-(live * np.log(live)).sum() / np.log(share_E.size)) if share_E.size > 1 else 1.0,
            "dead_experts": int((counts_E == 0).sum()),
        })  # fmt: skip
    return out
