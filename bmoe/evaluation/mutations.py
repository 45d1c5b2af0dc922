"""Does the model know which mutations harm? Its scores of variants against measured effects.

Scores (Meier et al. 2021), each a log-likelihood ratio, higher is fitter. For variant m with changed sites M:
- masked_marginal: sum over M of log P(new | wild type with all of M masked) - log P(old | the same).
- wt_marginal: the same with nothing masked; one forward pass for all variants.
- pll: pseudo-log-likelihood of the variant minus that of the wild type, one masked site at a time: a forward pass a residue.
- log_likelihood (decoders): log P(variant) - log P(wild type), `<eos>` included.

A wild type longer than the model was trained for is scored in the window of that length around the sites.

Legend: N variants, M mutated sites of all of them, I inputs shown to the model, C of them of n tokens, W windows.
"""

import csv
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from Bio.Align import substitution_matrices
from torch import nn

from bmoe.data.alphabet import Alphabet
from bmoe.errors import RequestError, RunError
from bmoe.evaluation.files import read_fasta
from bmoe.evaluation.forward import Request, batch_slots, check_numbers, log_probabilities, wrap
from bmoe.evaluation.statistics import auc, bootstrap, resampled_spearman, spearman
from bmoe.evaluation.variants import Sites, Variants, read_variants
from bmoe.files import whole
from bmoe.recipe import Recipe

ENCODER_METHODS = ("masked_marginal", "wt_marginal")
PLL = "pll"
LIKELIHOOD = "log_likelihood"
METHODS = {  # as users write them
    "masked-marginal": "masked_marginal", "wildtype-marginal": "wt_marginal", "pseudo-log-likelihood": PLL, "log-likelihood": LIKELIHOOD,
}  # fmt: skip


def evaluate(
    model: nn.Module,
    recipe: Recipe,
    letters: Alphabet,
    table: str | Path,
    wildtype: str | Path,
    column: str | None,
    device: torch.device,
    methods: tuple[str, ...] | None = None,
    scores_file: str | Path | None = None,
) -> dict:
    """Score the variants of `table` (CSV or TSV) against the one record of the FASTA `wildtype`.

    Returns spearman, spearman_low, spearman_high (95 % bootstrap over variants), n, auc of the first method, and under
    `methods` the same for each, under `blosum62` (proteins) that of BLOSUM62 as trivial baseline, with what was read and dropped, and
    `points` (effect, score) for a plot. `longer_than_trained`: whether windows of
    the wild type were shown. `methods`: of an
    encoder masked_marginal, wt_marginal (the default) and pll. `scores_file` gets a CSV of all scores. RequestError for tables
    that do not fit.
    """
    decoder = recipe.objective.kind == "clm"
    methods = methods or ((LIKELIHOOD,) if decoder else ENCODER_METHODS)
    legal = (LIKELIHOOD,) if decoder else (*ENCODER_METHODS, PLL)
    names = {key: name for name, key in METHODS.items()}
    for method in methods:
        if method not in legal:
            known, wanted = ", ".join(names[key] for key in legal), names.get(method, method)
            raise RequestError(f"--method: variants of {'a decoder' if decoder else 'an encoder'} are scored by {known}, not {wanted}")
    records = read_fasta(wildtype, letters)
    if len(records) > 1:
        raise RequestError(f"{wildtype} has {len(records)} records, and the table is of one wild type; leave that one alone in the file")
    header, ids = records[0]
    if recipe.data.alphabet.startswith("dna-bpe"):
        raise RequestError("variants change single letters, and this model reads byte-pair tokens")
    text = "".join(x if len(x) == 1 else "?" for x in map(letters.symbols.__getitem__, ids))
    variants = read_variants(table, text, column, "".join(letters.symbols[i] for i in letters.residues))
    scores = {method: score(model, recipe, letters, ids, variants.sites, method, device) for method in methods}
    for score_N in scores.values():
        check_numbers(score_N, "scores")
    if scores_file is not None:
        _write(scores_file, variants, scores)
    group_N = _groups(variants)
    results = {method: _agreement(values, variants, group_N) for method, values in scores.items()}
    main = results[methods[0]]
    baseline = {"blosum62": _agreement(blosum(variants.sites), variants, group_N)} if letters.name == "protein" else {}
    return {
        "spearman": main["spearman"], "spearman_low": main["spearman_low"], "spearman_high": main["spearman_high"],
        "n": len(variants.names), "auc": main["auc"], "method": methods[0], "methods": results, **baseline,
        "wildtype": header.split(None, 1)[0] if header else "", "wildtype_length": int(ids.size), "column": variants.column,
        "positive": variants.positive_name, "offset": variants.offset, "dropped": variants.dropped,
        "longer_than_trained": bool(ids.size + 2 > recipe.data.max_length),
        "multiple": sum(len(s) > 1 for s in variants.sites), "repeated": group_N.size - len(set(group_N.tolist())),
        "points": [[float(a), float(b)] for a, b in zip(variants.effect, scores[methods[0]], strict=True)],
        "group": group_N.tolist(),
    }  # fmt: skip


def blosum(variants: list[Sites]) -> np.ndarray:
    """How common the changes are in proteins at large: BLOSUM62 of old and new letters, summed over the sites, [n]. It sees neither
    the protein nor the place."""
    matrix = substitution_matrices.load("BLOSUM62")
    rare = str.maketrans("UOJ", "CKL")
    return np.array([sum(matrix[old.translate(rare)][new.translate(rare)] for _, old, new in sites) for sites in variants], float)


def _groups(variants: Variants) -> np.ndarray:
    """Which rows measure one variant, int64 [n] from 0: the unit that intervals resample."""
    return np.unique([str(sorted(sites)) for sites in variants.sites], return_inverse=True)[1]


def _agreement(score_N: np.ndarray, variants: Variants, group_N: np.ndarray) -> dict:
    ours = resampled_spearman(score_N, variants.effect)
    low, high = bootstrap(int(group_N.max()) + 1, lambda drawn_RG: ours(drawn_RG[:, group_N]))
    rho, area = spearman(score_N, variants.effect), auc(score_N, variants.positive)
    return {"spearman": rho, "spearman_low": low, "spearman_high": high, "auc": area}


def _write(path: str | Path, variants: Variants, scores: dict[str, np.ndarray]) -> None:
    try:
        with whole(path) as partial, partial.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["mutant", variants.column, *scores])
            writer.writerows(zip(variants.names, variants.effect, *scores.values(), strict=True))
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def score(
    model: nn.Module, recipe: Recipe, letters: Alphabet, ids: np.ndarray, variants: list[Sites], method: str, device: torch.device
) -> np.ndarray:
    """The score of each variant, float64 [n]. `ids`: the wild type's tokens without specials."""
    table = _Table.of(letters, ids, variants, recipe.data.max_length)
    slots = batch_slots(recipe, device)
    if method in (PLL, LIKELIHOOD):
        return _by_sequence(model, letters, ids, table, slots, device, masked=method == PLL)
    return _by_site(model, letters, ids, table, slots, device, masked=method == "masked_marginal")


class _Table(NamedTuple):
    """The sites of all variants, one after the other, and the window in which each variant is shown."""

    variant_M: np.ndarray
    place_M: np.ndarray
    old_M: np.ndarray  # tokens
    new_M: np.ndarray
    span_N2: np.ndarray

    @staticmethod
    def of(letters: Alphabet, ids: np.ndarray, variants: list[Sites], max_length: int) -> "_Table":
        place, old, new = zip(*chain.from_iterable(variants), strict=True)
        variant_M = np.repeat(np.arange(len(variants)), [len(sites) for sites in variants])
        old_M, new_M = (letters.encode("".join(x).encode()).astype(np.int64) for x in (old, new))
        if ids.size <= max_length - 2:
            span_N2 = np.tile([0, ids.size], (len(variants), 1))
        else:
            span_N2 = np.array([window(sites, ids.size, max_length) for sites in variants])
        return _Table(variant_M, np.array(place), old_M, new_M, span_N2)


def window(sites: Sites, length: int, max_length: int) -> tuple[int, int]:
    """Residues [begin, end) that are shown: all of them, or, of a longer wild type, as many as fit around the sites' middle
    (at least all the sites)."""
    first, last = min(s[0] for s in sites), max(s[0] for s in sites)
    size = max(max_length - 2, last - first + 1)
    if length <= size:
        return 0, length
    begin = min(max((first + last + 1) // 2 - size // 2, 0), length - size)
    return begin, begin + size


def _tokens(letters: Alphabet, ids: np.ndarray, span: np.ndarray) -> tuple[np.ndarray, int]:
    """The window with the specials that belong to its ends, and what added to a residue's number gives its slot in it."""
    begin, end = span
    tokens = wrap(letters, ids[begin:end])
    return tokens[(1 if begin > 0 else 0) : (-1 if end < ids.size else None)], int(begin == 0) - begin


def _by_site(
    model: nn.Module, letters: Alphabet, ids: np.ndarray, table: _Table, slots: int, device: torch.device, masked: bool
) -> np.ndarray:
    """Marginals: variants that show the model the same input share one forward pass. The sites are ordered by the input that answers
    them, so that whole scans are scored in a moment."""
    if masked:
        input_N = _site_sets(table)
        span_I2 = table.span_N2[np.unique(input_N, return_index=True)[1]]
    else:
        span_I2, input_N = _windows(table.span_N2)
    order_M = np.argsort(input_N[table.variant_M], kind="stable")
    variant_M, place_M = table.variant_M[order_M], table.place_M[order_M]
    target_M2 = np.column_stack([table.new_M, table.old_M])[order_M]
    bounds = np.searchsorted(input_N[variant_M], np.arange(len(span_I2) + 1))

    def requests() -> Iterator[Request]:
        for first, last in _alike(span_I2, max(slots // ids.size, 1)):
            tokens, offset = _tokens(letters, ids, span_I2[first])
            tokens_Cn = np.tile(tokens, (last - first, 1))
            here = slice(bounds[first], bounds[last])
            version, slot = input_N[variant_M[here]] - first, place_M[here] + offset
            if masked:
                tokens_Cn[version, slot] = letters.mask_id
            yield Request(tokens_Cn, np.repeat(version, 2), np.repeat(slot, 2), target_M2[here].ravel())

    logp_M2 = log_probabilities(model, requests(), slots, device).reshape(-1, 2)
    return np.bincount(variant_M, logp_M2[:, 0] - logp_M2[:, 1], minlength=len(input_N))


def _site_sets(table: _Table) -> np.ndarray:
    """A number from 0 of each variant, equal for those of the same sites."""
    places = table.place_M[np.lexsort((table.place_M, table.variant_M))].astype(np.int64)
    raw, ends = places.tobytes(), (np.cumsum(np.bincount(table.variant_M)) * places.itemsize).tolist()
    numbers: dict[bytes, int] = {}
    return np.array([numbers.setdefault(raw[begin:end], len(numbers)) for begin, end in zip([0, *ends], ends, strict=False)])


def _windows(span_N2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct windows [W, 2], and the number of each variant's among them."""
    if (span_N2 == span_N2[0]).all():
        return span_N2[:1], np.zeros(len(span_N2), np.int64)
    span_W2, window_N = np.unique(span_N2, axis=0, return_inverse=True)
    return span_W2, window_N.reshape(-1)


def _alike(span_I2: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Runs [first, last) of at most `most` inputs that are shown in the same window."""
    changes = np.flatnonzero(np.diff(span_I2, axis=0).any(axis=1)) + 1
    for begin, end in zip([0, *changes.tolist()], [*changes.tolist(), len(span_I2)], strict=True):
        for first in range(begin, end, most):
            yield first, min(first + most, end)


def _by_sequence(
    model: nn.Module, letters: Alphabet, ids: np.ndarray, table: _Table, slots: int, device: torch.device, masked: bool
) -> np.ndarray:
    """Whole sequences: pseudo-log-likelihood (masked) or log-likelihood, of each variant minus that of its wild type."""
    wild_W2, wild_N = _windows(table.span_N2)
    bounds = np.searchsorted(table.variant_M, np.arange(len(table.span_N2) + 1))
    sizes: list[int] = []

    def requests() -> Iterator[Request]:
        for number in range(-len(wild_W2), len(wild_N)):
            wild = number < 0
            tokens, offset = _tokens(letters, ids, wild_W2[number] if wild else table.span_N2[number])
            if not wild:
                here = slice(bounds[number], bounds[number + 1])
                tokens[table.place_M[here] + offset] = table.new_M[here]
            request = _each_hidden(letters, tokens) if masked else _each_next(tokens)
            sizes.append(request.target_M.size)
            yield request

    logp_M = log_probabilities(model, requests(), slots, device)
    totals = np.add.reduceat(logp_M, np.cumsum(sizes) - sizes)
    return totals[len(wild_W2) :] - totals[wild_N]


def _each_hidden(letters: Alphabet, tokens: np.ndarray) -> Request:
    """Every residue of a sequence, hidden alone."""
    slots = np.flatnonzero((tokens != letters.cls_id) & (tokens != letters.eos_id))
    versions = np.arange(slots.size)
    tokens_Cn = np.tile(tokens, (slots.size, 1))
    tokens_Cn[versions, slots] = letters.mask_id
    return Request(tokens_Cn, versions, slots, tokens[slots])


def _each_next(tokens: np.ndarray) -> Request:
    """Every token of a sequence after the first."""
    slots = np.arange(tokens.size - 1)
    return Request(tokens[None], np.zeros_like(slots), slots, tokens[1:])
