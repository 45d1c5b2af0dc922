"""Residue contacts from attention maps: does the model know the fold?

As in ESM (Rao et al. 2021): the attention of every head, `<eos>` zeroed, specials stripped, symmetrised, with the average
product correction; one L1 logistic regression on at most 20 chains; contact = C-beta nearer than 8 A, at least 6 apart in
sequence. The chains of a family are all trained on or all tested: relatives would give the answer away.

P@L: share of true contacts among the L most probable pairs of a range, L the chain's length; short range is a separation of
6 to 11, medium 12 to 23, long 24 or more. The baseline ranks pairs by separation alone, nearest first.

Legend: A attention maps (layers x heads), n residues, P pairs.
"""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from bmoe.data.alphabet import Alphabet
from bmoe.errors import RequestError
from bmoe.evaluation import l1
from bmoe.evaluation.contact_features import NEAREST, pair_features, pairs_of
from bmoe.evaluation.families import families, folds
from bmoe.evaluation.forward import batch_slots, wrap
from bmoe.evaluation.statistics import bootstrap
from bmoe.evaluation.structures import Chain, read_chains
from bmoe.recipe import Recipe

RANGES = {"short": (6, 12), "medium": (12, 24), "long": (24, None)}  # separations [from, to)
SHARES = {"p_at_l": 1, "p_at_l2": 2, "p_at_l5": 5}
TRAINING_CHAINS, FOLDS, PENALTY = 20, 5, 0.15
SHOWN = 3  # chains whose maps are handed out for the report


def evaluate(model: nn.Module, recipe: Recipe, letters: Alphabet, directory: str | Path, device: torch.device) -> dict:
    """Cross-validated contact precision on the chains of a folder.

    Returns chains, families, with_breaks (chains in which residues are missing: pairs across a break are nearer in the sequence given
    than in the protein), longer_than_trained (chains beyond `data.max_length`), per range p_at_l, p_at_l2, p_at_l5 with 95 %
    bootstrap intervals over families and the baseline of each, per_chain, and `maps` of some chains for a picture.
    RequestError for a model that reads no proteins, or fewer than two families.
    """
    if letters.name != "protein":
        raise RequestError(f"contacts are of proteins, and this model reads {letters.name}")
    chains = read_chains(directory)
    family = families([chain.sequence for chain in chains])
    if len(set(family)) < 2:
        raise RequestError(f"{directory}: cross-validation over families needs chains of two families, and there are {len(set(family))}")
    pairs = [known_pairs(chain) for chain in chains]
    for chain, (i, _, _) in zip(chains, pairs, strict=True):
        if i.size == 0:
            raise RequestError(f"{directory}: {chain.name} has no two residues {NEAREST} apart with N, CA and C; take it out")
    tokens = [wrap(letters, letters.encode(chain.sequence.encode())) for chain in chains]
    features = pair_features(model, tokens, [chain.known() for chain in chains], batch_slots(recipe, device), device)
    contact = [torch.from_numpy(chosen[2]) for chosen in pairs]

    probability: list[np.ndarray] = [np.empty(0)] * len(chains)
    for test in folds(family, FOLDS):
        train = _spread([i for i in range(len(chains)) if i not in test], family)[:TRAINING_CHAINS]
        weights = l1.fit([features[i] for i in train], torch.cat([contact[i] for i in train]), PENALTY, device)
        for i in test:
            probability[i] = l1.probability(features[i], weights).cpu().numpy()
    longer = sum(len(chain.sequence) + 2 > recipe.data.max_length for chain in chains)
    return _summary(chains, family, pairs, probability) | {"longer_than_trained": longer}


def known_pairs(chain: Chain) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs i < j at least NEAREST apart whose contact is known, and whether they touch."""
    i, j = pairs_of(chain.known())
    return i, j, chain.contacts()[i, j]


def _spread(chains: list[int], family: list[int]) -> list[int]:
    """Chains ordered so that a prefix holds as many families as it can: the first of each, the second of each, ..."""
    seen: dict[int, int] = {}
    order = []
    for i in chains:
        seen[family[i]] = seen.get(family[i], 0) + 1
        order.append((seen[family[i]], i))
    return [i for _, i in sorted(order)]


def precision(i: np.ndarray, j: np.ndarray, score: np.ndarray, contact: np.ndarray, span: tuple[int, int | None], top: int) -> float:
    """Share of contacts among the `top` best-scored pairs of a range of separations; nan for a range without pairs."""
    inside = np.flatnonzero((j - i >= span[0]) & (j - i < (span[1] or np.inf)))
    if inside.size == 0:
        return float("nan")
    best = inside[np.argsort(-score[inside], kind="stable")[: max(top, 1)]]
    return float(contact[best].mean())


def _summary(chains: list[Chain], family: list[int], pairs: list, probability: list[np.ndarray]) -> dict:
    out: dict = {"chains": len(chains), "families": len(set(family)), "residues": sum(len(c.sequence) for c in chains)}
    out["with_breaks"] = sum(chain.breaks() > 0 for chain in chains)
    for name, span in RANGES.items():
        out[name] = {}
        for key, share in SHARES.items():
            model, baseline = (
                np.array([
                    precision(i, j, p if ours else (i - j).astype(float), contact, span, len(chain.sequence) // share)
                    for chain, (i, j, contact), p in zip(chains, pairs, probability, strict=True)
                ])
                for ours in (True, False)
            )  # fmt: skip
            low, high = _interval(model, family)
            out[name] |= {
                key: _mean(model), f"{key}_low": low, f"{key}_high": high, f"{key}_by_separation": _mean(baseline),
            }  # fmt: skip
            if (name, key) == ("long", "p_at_l"):
                longest = model
    out["per_chain"] = [
        {"chain": c.name, "length": len(c.sequence), "family": f + 1, "long_p_at_l": float(p)}
        for c, f, p in zip(chains, family, longest, strict=True)
    ]
    order = [i for i in np.argsort(-longest, kind="stable") if np.isfinite(longest[i])]
    shown = sorted({order[round(k * (len(order) - 1) / (SHOWN - 1))] for k in range(SHOWN)}, key=order.index) if order else []
    out["maps"] = [_map(chains[i], pairs[i], probability[i], float(longest[i])) for i in shown]
    return out


def _mean(value_C: np.ndarray) -> float:
    """Mean over the chains that have pairs in the range; nan if none has."""
    finite = value_C[np.isfinite(value_C)]
    return float(finite.mean()) if finite.size else float("nan")


def _interval(value_C: np.ndarray, family: list[int]) -> tuple[float, float]:
    """95 % bootstrap interval of the mean over chains, whole families drawn together."""
    member, finite = np.array(family), np.isfinite(value_C)
    sums = np.bincount(member[finite], value_C[finite], max(family) + 1)
    sizes = np.bincount(member[finite], minlength=max(family) + 1)
    return bootstrap(sizes.size, lambda drawn: drawn @ sums / (drawn @ sizes))


def _map(chain: Chain, pairs: tuple, probability: np.ndarray, long: float) -> dict:
    i, j, contact = pairs
    best = np.argsort(-probability, kind="stable")[: len(chain.sequence)]
    as_pairs = [np.stack([i[rows], j[rows]], axis=1).tolist() for rows in (np.flatnonzero(contact), best)]
    return {"chain": chain.name, "length": len(chain.sequence), "long_p_at_l": long, "true": as_pairs[0], "predicted": as_pairs[1]}
