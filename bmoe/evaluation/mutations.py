"""Does the model know which mutations harm? Its scores of variants against measured effects.

Scores (Meier et al. 2021), each a log-likelihood ratio, higher is fitter. For variant m with changed sites M:
- masked_marginal: sum over M of log P(new | wild type with all of M masked) - log P(old | the same).
- wt_marginal: the same with nothing masked; one forward pass for all variants.
- pll: pseudo-log-likelihood of the variant minus that of the wild type, one masked site at a time: a forward pass a residue.
- log_likelihood (decoders): log P(variant) - log P(wild type), `<eos>` included.

A wild type longer than the model was trained for is scored in the window of that length around the sites.

Legend: M mutated sites of all variants.
"""

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from Bio.Align import substitution_matrices
from torch import nn

from bmoe.data.alphabet import Alphabet
from bmoe.errors import RequestError, RunError
from bmoe.evaluation.files import read_fasta
from bmoe.evaluation.forward import Request, log_probabilities, wrap
from bmoe.evaluation.statistics import auc, bootstrap, spearman
from bmoe.evaluation.variants import Sites, Variants, read_variants
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
    """Score the variants of `table` (CSV or TSV) against the first record of the FASTA `wildtype`.

    Returns spearman, spearman_low, spearman_high (95 % bootstrap over variants), n, auc of the first method, and under
    `methods` the same for each, under `blosum62` (proteins) that of BLOSUM62 as trivial baseline, with what was read and dropped, and
    `points` (effect, score) for a plot. `methods`: of an
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
    header, ids = read_fasta(wildtype, letters)[0]
    if recipe.data.alphabet.startswith("dna-bpe"):
        raise RequestError("variants change single letters, and this model reads byte-pair tokens")
    variants = read_variants(table, "".join(letters.symbols[i] for i in ids), column)
    _check_letters(variants, letters, table)
    scores = {method: score(model, recipe, letters, ids, variants.sites, method, device) for method in methods}
    if scores_file is not None:
        _write(scores_file, variants, scores)
    results = {method: _agreement(values, variants) for method, values in scores.items()}
    main = results[methods[0]]
    baseline = {"blosum62": _agreement(blosum(variants.sites), variants)} if letters.name == "protein" else {}
    return {
        "spearman": main["spearman"], "spearman_low": main["spearman_low"], "spearman_high": main["spearman_high"],
        "n": len(variants.names), "auc": main["auc"], "method": methods[0], "methods": results, **baseline,
        "wildtype": header.split(None, 1)[0] if header else "", "wildtype_length": int(ids.size), "column": variants.column,
        "positive": variants.positive_name, "offset": variants.offset, "dropped": variants.dropped,
        "multiple": sum(len(s) > 1 for s in variants.sites),
        "points": [[float(a), float(b)] for a, b in zip(variants.effect, scores[methods[0]], strict=True)],
    }  # fmt: skip


def blosum(variants: list[Sites]) -> np.ndarray:
    """How common the changes are in proteins at large: BLOSUM62 of old and new letters, summed over the sites, [n]. It sees neither
    the protein nor the place."""
    matrix = substitution_matrices.load("BLOSUM62")
    rare = str.maketrans("UOJ", "CKL")
    return np.array([sum(matrix[old.translate(rare)][new.translate(rare)] for _, old, new in sites) for sites in variants], float)


def _check_letters(variants: Variants, letters: Alphabet, table: str | Path) -> None:
    known = set(letters.symbols[4:])
    for name, sites in zip(variants.names, variants.sites, strict=True):
        for _, _, new in sites:
            if new not in known:
                raise RequestError(f"{table}: {name} changes to {new}, which the alphabet {letters.name} does not have")


def _agreement(score_N: np.ndarray, variants: Variants) -> dict:
    effect_N, positive_N = variants.effect, variants.positive

    def resampled(drawn: np.ndarray) -> float:
        rows = np.repeat(np.arange(drawn.size), drawn)
        return spearman(score_N[rows], effect_N[rows])

    low, high = bootstrap(score_N.size, resampled)
    return {"spearman": spearman(score_N, effect_N), "spearman_low": low, "spearman_high": high, "auc": auc(score_N, positive_N)}


def _write(path: str | Path, variants: Variants, scores: dict[str, np.ndarray]) -> None:
    try:
        with Path(path).open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["mutant", variants.column, *scores])
            writer.writerows(zip(variants.names, variants.effect, *scores.values(), strict=True))
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror}") from None


def score(
    model: nn.Module, recipe: Recipe, letters: Alphabet, ids: np.ndarray, variants: list[Sites], method: str, device: torch.device
) -> np.ndarray:
    """The score of each variant, float64 [n]. `ids`: the wild type's tokens without specials."""
    slots = recipe.data.tokens_per_batch
    fits = ids.size <= recipe.data.max_length - 2
    windows = [(0, int(ids.size)) if fits else window(sites, ids.size, recipe.data.max_length) for sites in variants]
    token = {symbol: number for number, symbol in enumerate(letters.symbols)}
    if method in (PLL, LIKELIHOOD):
        return _by_sequence(model, letters, ids, variants, windows, token, slots, device, masked=method == PLL)
    return _by_site(model, letters, ids, variants, windows, token, slots, device, masked=method == "masked_marginal")


def window(sites: Sites, length: int, max_length: int) -> tuple[int, int]:
    """Residues [begin, end) that are shown: all of them, or, of a longer wild type, as many as fit around the sites' middle
    (at least all the sites)."""
    first, last = min(s[0] for s in sites), max(s[0] for s in sites)
    size = max(max_length - 2, last - first + 1)
    if length <= size:
        return 0, length
    begin = min(max((first + last + 1) // 2 - size // 2, 0), length - size)
    return begin, begin + size


def _tokens(letters: Alphabet, ids: np.ndarray, span: tuple[int, int]) -> np.ndarray:
    """The window with the specials that belong to its ends."""
    tokens = wrap(letters, ids[slice(*span)])
    return tokens[(1 if span[0] > 0 else 0) : (-1 if span[1] < ids.size else None)]


def _first_slot(span: tuple[int, int]) -> int:
    """What added to a residue's number gives its slot in the window."""
    return (1 if span[0] == 0 else 0) - span[0]


def _by_site(model, letters, ids, variants, windows, token, slots, device, masked: bool) -> np.ndarray:
    """Marginals: variants that show the model the same input share one forward pass.

    All mutated sites lie in one table, ordered by the input that answers them: whole scans are scored in a moment.
    """
    inputs: dict[tuple, int] = {}
    number = np.empty(len(variants), np.int64)
    for v, (sites, span) in enumerate(zip(variants, windows, strict=True)):
        hidden = tuple(sorted({place for place, _, _ in sites})) if masked else ()
        number[v] = inputs.setdefault((span, hidden), len(inputs))
    owner_M = np.repeat(np.arange(len(variants)), [len(sites) for sites in variants])
    table_M3 = np.array([(place, token[new], token[old]) for sites in variants for place, old, new in sites])
    order_M = np.argsort(number[owner_M], kind="stable")
    owner_M, table_M3 = owner_M[order_M], table_M3[order_M]
    bounds = np.searchsorted(number[owner_M], np.arange(len(inputs) + 1))

    def requests() -> Iterator[Request]:
        for i, (span, hidden) in enumerate(inputs):
            tokens, first = _tokens(letters, ids, span), _first_slot(span)
            if hidden:
                tokens[np.array(hidden) + first] = letters.mask_id
            place, new, old = table_M3[bounds[i] : bounds[i + 1]].T
            yield Request(tokens, np.concatenate([place, place]) + first, np.concatenate([new, old]))

    gained = [values[: values.size // 2] - values[values.size // 2 :] for values in log_probabilities(model, requests(), slots, device)]
    return np.bincount(owner_M, np.concatenate(gained), minlength=len(variants))


def _by_sequence(model, letters, ids, variants, windows, token, slots, device, masked: bool) -> np.ndarray:
    """Whole sequences: pseudo-log-likelihood (masked) or log-likelihood, of each variant minus that of its wild type."""
    shown = [("", span, ()) for span in sorted(set(windows))] + [(str(v), windows[v], sites) for v, sites in enumerate(variants)]

    def requests() -> Iterator[Request]:
        for _, span, sites in shown:
            tokens = _tokens(letters, ids, span)
            if sites:
                tokens[np.array([place for place, _, _ in sites]) + _first_slot(span)] = [token[new] for _, _, new in sites]
            if not masked:
                yield Request(tokens, np.arange(tokens.size - 1), tokens[1:])
                continue
            for slot in np.flatnonzero((tokens != letters.cls_id) & (tokens != letters.eos_id)):
                hidden = np.where(np.arange(tokens.size) == slot, letters.mask_id, tokens)
                yield Request(hidden, np.array([slot]), tokens[[slot]])

    values = [v.sum() for v in log_probabilities(model, requests(), slots, device)]
    sizes = [span[1] - span[0] if masked else 1 for _, span, _ in shown]
    totals = np.bincount(np.repeat(np.arange(len(shown)), sizes), values)
    wild = {span: totals[i] for i, span in enumerate(sorted(set(windows)))}
    return np.array([totals[len(wild) + v] - wild[span] for v, span in enumerate(windows)])
