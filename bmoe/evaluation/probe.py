"""What do frozen embeddings know of secondary structure? A linear classifier on every layer.

The layer is chosen on validation sequences and judged on test sequences, none of which has a relative among the others (a local
alignment of E <= 0.002). Beside it: the most frequent class, and layer 0, which knows each residue but not its neighbours.

Legend: n residues, D width, C classes.
"""

from collections import Counter
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmoe.data.alphabet import Alphabet
from bmoe.errors import RequestError
from bmoe.evaluation import labels as labelling
from bmoe.evaluation.embeddings import states
from bmoe.evaluation.forward import batch_slots, check_numbers, wrap
from bmoe.evaluation.statistics import bootstrap
from bmoe.recipe import Recipe

BUDGET = 60_000  # residues of all splits
DECAY = 1e-3  # L2 coefficient on standardised features
ITERATIONS, HISTORY = 200, 20  # of L-BFGS


def evaluate(model: nn.Module, recipe: Recipe, letters: Alphabet, table: str | Path, device: torch.device, budget: int = BUDGET) -> dict:
    """Linear probes of every layer on the labels of a table (`sequence`, labels).

    Returns accuracy with its 95 % bootstrap interval over sequences, majority and best_layer (8 states, or whatever labels
    the table has), the same under `three_state` for secondary structure, `layers`, the curve, longer_than_trained, sequences of
    which only the first `data.max_length` - 2 residues are used, and `per_sequence`, right and all
    residues of each test sequence. RequestError for a table that is too small or a model that reads no single letters.
    """
    if letters.name.startswith("dna-bpe"):
        raise RequestError("a probe needs one token a letter, and this model reads byte-pair tokens")
    data = labelling.read_labelled(table)
    longest = recipe.data.max_length - 2
    parts = labelling.split(data, budget, longest, letters.name)
    if any(not members for members in parts.values()):
        raise RequestError(f"{table} has too few unrelated sequences ({data.counts['sequences']}) for training, validation and test")
    legal = labelling.DSSP if data.is_secondary_structure else "".join(sorted(set("".join(data.labels))))
    members = [i for split in parts.values() for i in split]
    texts = [data.labels[i][:longest] for i in members]
    owner = np.repeat(np.arange(len(members)), [len(t) for t in texts])
    letter = np.array(list("".join(texts)))
    used = np.isin(letter, list(legal))
    bounds = np.cumsum([0, *(len(parts[name]) for name in labelling.SPLITS)])
    rows = {name: used & (owner >= bounds[k]) & (owner < bounds[k + 1]) for k, name in enumerate(labelling.SPLITS)}

    layers = _features(model, recipe, letters, [data.sequences[i][:longest] for i in members], device)
    out = {**data.counts, "residues": {name: int(mask.sum()) for name, mask in rows.items()}}
    out["longer_than_trained"] = sum(len(data.labels[i]) > longest for i in members)
    out |= _probe(layers, letter, owner, rows, device)
    if data.is_secondary_structure:
        three = np.array([labelling.THREE.get(x, "C") for x in letter])
        out["three_state"] = _probe(layers, three, owner, rows, device)
    return out


def _features(model: nn.Module, recipe: Recipe, letters: Alphabet, sequences: list[str], device: torch.device) -> list[Tensor]:
    """States of every layer over all residues in order, fp32 [n, D] on the CPU."""
    tokens = (wrap(letters, letters.encode(s.encode("ascii", "replace"))) for s in sequences)
    collected = [[layer.cpu() for layer in found] for found in states(model, tokens, batch_slots(recipe, device), device)]
    return [torch.cat(column) for column in zip(*collected, strict=True)]


def _probe(layers: list[Tensor], letter: np.ndarray, owner: np.ndarray, rows: dict[str, np.ndarray], device: torch.device) -> dict:
    classes = sorted(set(letter[rows["train"]]))
    number = {name: i for i, name in enumerate(classes)}
    target = torch.tensor([number.get(x, -1) for x in letter])  # a class never trained on is never right
    curve, right = [], []
    for depth, x_nD in enumerate(layers):
        x_nD = x_nD.to(device)
        train = torch.from_numpy(rows["train"])
        predict = fit(x_nD[train.to(device)], target[train].to(device), len(classes))
        hits = (predict(x_nD).cpu() == target).numpy()
        right.append(hits)
        curve.append({"layer": depth, **{f"{name}_accuracy": float(hits[rows[name]].mean()) for name in ("valid", "test")}})
    best = max(curve, key=lambda entry: entry["valid_accuracy"])["layer"]
    test = rows["test"]
    hits, sizes = np.bincount(owner[test], right[best][test]), np.bincount(owner[test])
    sequences = np.flatnonzero(sizes)
    hits, sizes = hits[sequences], sizes[sequences]
    low, high = bootstrap(sequences.size, lambda drawn: drawn @ hits / (drawn @ sizes))
    common = Counter(letter[rows["train"]].tolist()).most_common(1)[0][0]
    return {
        "accuracy": float(right[best][test].mean()), "accuracy_low": low, "accuracy_high": high, "classes": len(classes),
        "majority": float((letter[test] == common).mean()), "majority_class": common, "best_layer": best, "layers": curve,
        "per_sequence": np.stack([hits, sizes], axis=1).astype(int).tolist(),
    }  # fmt: skip


def fit(x_nD: Tensor, target_n: Tensor, classes: int, decay: float = DECAY):
    """Multinomial logistic regression on standardised features: mean cross entropy + decay / 2 |W|^2, by L-BFGS in fp32.

    The weights are the host's, since L-BFGS does many operations on these few numbers for each one on the features. Returns a
    function from features [m, D] to predicted classes, int64 [m]. RequestError for features that are no numbers.
    """
    check_numbers(x_nD, "states")
    mean_D, scale_D = x_nD.mean(dim=0), x_nD.std(dim=0).clamp(min=1e-6)
    z_nD = (x_nD - mean_D) / scale_D
    weight_CD = torch.zeros(classes, x_nD.shape[1], requires_grad=True)
    bias_C = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [weight_CD, bias_C], max_iter=ITERATIONS, tolerance_grad=1e-5, history_size=HISTORY, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits_nC = F.linear(z_nD, weight_CD.to(z_nD.device), bias_C.to(z_nD.device))
        value = F.cross_entropy(logits_nC, target_n).cpu() + 0.5 * decay * weight_CD.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    weight_CD, bias_C = weight_CD.detach().to(x_nD.device), bias_C.detach().to(x_nD.device)
    return lambda other_mD: F.linear((other_mD - mean_D) / scale_D, weight_CD, bias_C).argmax(dim=-1)
