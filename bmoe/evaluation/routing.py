"""How evenly the experts of each layer are used.

Legend: L layers with experts, E experts.
"""

import numpy as np

from bmoe.model.load import load_statistics


def summary(counts_LE: np.ndarray, moe_layers: list[int]) -> list[dict]:
    """One entry per layer with experts: its number from 1, `load` (share of the routed slots on each expert), and
    `load_statistics`."""
    counts_LE = np.asarray(counts_LE, np.float64)
    return [
        {"layer": layer + 1, "load": (counts_E / max(counts_E.sum(), 1.0)).tolist(), **load_statistics(counts_E)}
        for layer, counts_E in zip(moe_layers, counts_LE, strict=True)
    ]
