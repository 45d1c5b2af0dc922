"""Perplexity on a split, under every masking scheme, each beside the trivial baseline of the same targets.

MLM runs twice over identical targets: with the training scheme ("8010": 80 % `<mask>`, 10 % random, 10 % kept in ESM-2)
and with every target shown as `<mask>` ("mask"). The first number is lower, because kept residues are half given away;
compare models by the second, and by its ratio to the baseline. CLM has one scheme ("clm").

Which residues are asked for depends on the split and the budget alone. Sums are kept per sequence, so that length bins,
header fields and bootstrap intervals need no second pass. Several ranks share the batches and add up.

Legend: S sequences, M targets, V vocabulary, E experts.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmoe.data import random
from bmoe.data.loader import validation_batches, validation_crops
from bmoe.data.packing import NO_TARGET, Batch
from bmoe.data.shards import Shards
from bmoe.errors import RequestError
from bmoe.evaluation import baselines
from bmoe.evaluation.statistics import bootstrap
from bmoe.recipe import Recipe

LENGTH_BINS = (128, 256, 512, 1024)  # upper ends, in residues of the whole record


@dataclass(frozen=True)
class Perplexity:
    """Sums of cross entropies, from which every perplexity follows.

    sequence_S: numbers in the shards. lengths_S: residues of the whole records. targets_S: targets in each.
    loss, baseline: scheme -> nats summed over the targets of each sequence, float64 [S].
    composition_V: how often each token was a target. loss_V: scheme -> nats summed over the targets that were this token.
    baseline_V: scheme -> nats of the baseline on one target that is this token.
    inputs: scheme -> a number that tells the tokens shown and asked for in each sequence from others, float64 [S].
    symbols: text of each token. counts_LE: tokens on each expert under the training scheme, or None (dense).
    """

    sequence_S: np.ndarray
    lengths_S: np.ndarray
    targets_S: np.ndarray
    loss: dict[str, np.ndarray]
    baseline: dict[str, np.ndarray]
    composition_V: np.ndarray
    loss_V: dict[str, np.ndarray]
    baseline_V: dict[str, np.ndarray]
    inputs: dict[str, np.ndarray]
    symbols: tuple[str, ...]
    counts_LE: np.ndarray | None

    @property
    def schemes(self) -> list[str]:
        return list(self.loss)

    def perplexity(self, scheme: str, rows: np.ndarray | slice = slice(None)) -> float:
        """exp of the mean cross entropy over the targets of the sequences `rows`; nan without targets."""
        return _perplexity(self.loss[scheme][rows], self.targets_S[rows])

    def baseline_perplexity(self, scheme: str, rows: np.ndarray | slice = slice(None)) -> float:
        """The same of the trivial baseline; its composition is that of all targets."""
        return _perplexity(self.baseline[scheme][rows], self.targets_S[rows])

    def ratio(self, scheme: str) -> dict[str, float]:
        """Perplexity over baseline perplexity, with its 95 % bootstrap interval over sequences."""
        gain_S = self.loss[scheme] - self.baseline[scheme]
        low, high = _interval(gain_S, self.targets_S)
        return {"ratio": _perplexity(gain_S, self.targets_S), "low": low, "high": high}

    def interval(self, scheme: str, rows: np.ndarray | slice = slice(None)) -> tuple[float, float]:
        """95 % bootstrap interval over sequences of the perplexity."""
        return _interval(self.loss[scheme][rows], self.targets_S[rows])

    def digest(self, scheme: str) -> str:
        """What was shown and asked for, as 16 hexadecimal digits: equal ones, the same inputs and targets."""
        parts = (self.sequence_S, self.targets_S, self.inputs[scheme])
        return hashlib.sha256(b"".join(np.asarray(part, np.float64).tobytes() for part in parts)).hexdigest()[:16]

    def metrics(self) -> dict[str, float]:
        """The validation metrics of metrics.jsonl; `valid_loss` is the mean cross entropy of the training scheme."""
        number = max(self.targets_S.sum(), 1)
        out = {"valid_loss": float(self.loss[self.schemes[0]].sum() / number)}
        for scheme in self.schemes:
            ending = "" if scheme == "clm" else f"_{scheme}"
            out[f"valid_perplexity{ending}"] = self.perplexity(scheme)
            out[f"valid_baseline{ending}"] = self.baseline_perplexity(scheme)
        return out

    def results(self) -> dict:
        """The results of `bmoe eval`: perplexities, baselines, their ratios with intervals, length bins, per residue."""
        out: dict = {"sequences": int(self.sequence_S.size), "targets": int(self.targets_S.sum())}
        out["inputs"] = {scheme: self.digest(scheme) for scheme in self.schemes}
        for scheme in self.schemes:
            ending = "" if scheme == "clm" else f"_{scheme}"
            out |= self._named(slice(None), scheme)
            ratio = self.ratio(scheme)
            out[f"ratio{ending}"], out[f"ratio{ending}_low"], out[f"ratio{ending}_high"] = ratio["ratio"], ratio["low"], ratio["high"]
        return out | {"by_length": self.by_length(), "by_residue": self.by_residue()}

    def group(self, rows: np.ndarray) -> dict:
        """Counts, perplexities with their intervals, and baselines of some sequences."""
        out: dict = {"sequences": int(rows.size), "targets": int(self.targets_S[rows].sum())}
        for scheme in self.schemes:
            out |= self._named(rows, scheme)
        return out

    def by_length(self, bins: tuple[int, ...] = LENGTH_BINS) -> list[dict]:
        """One entry per bin of record length that has targets."""
        bin_S = np.searchsorted(bins, self.lengths_S, side="left")
        out = []
        for number in range(len(bins) + 1):
            rows = np.flatnonzero((bin_S == number) & (self.targets_S > 0))
            if rows.size:
                low, high = (1 if number == 0 else bins[number - 1] + 1), (bins[number] if number < len(bins) else None)
                out.append({"min_length": low, "max_length": high, **self.group(rows)})
        return out

    def by_residue(self) -> list[dict]:
        """One entry per token that was a target: the perplexity on it, and what the baseline gives it."""
        out = []
        for token in np.argsort(-self.composition_V, kind="stable"):
            number = self.composition_V[token]
            if number == 0:
                break
            entry: dict = {"residue": self.symbols[token], "targets": int(number)}
            for scheme in self.schemes:
                ending = "" if scheme == "clm" else f"_{scheme}"
                entry[f"perplexity{ending}"] = float(np.exp(self.loss_V[scheme][token] / number))
                entry[f"baseline{ending}"] = float(np.exp(self.baseline_V[scheme][token]))
            out.append(entry)
        return out

    def _named(self, rows: np.ndarray | slice, scheme: str) -> dict[str, float | None]:
        ending = "" if scheme == "clm" else f"_{scheme}"
        low, high = (None if np.isnan(end) else end for end in self.interval(scheme, rows))  # of one sequence there is none
        return {
            f"perplexity{ending}": self.perplexity(scheme, rows), f"perplexity{ending}_low": low, f"perplexity{ending}_high": high,
            f"baseline{ending}": self.baseline_perplexity(scheme, rows),
        }  # fmt: skip


def _perplexity(nats_S: np.ndarray, targets_S: np.ndarray) -> float:
    number = float(targets_S.sum())
    return float(np.exp(nats_S.sum() / number)) if number > 0 else float("nan")


def _interval(nats_S: np.ndarray, targets_S: np.ndarray) -> tuple[float, float]:
    """95 % bootstrap interval over sequences of exp(nats / targets)."""
    return bootstrap(targets_S.size, lambda drawn_RS: np.exp(drawn_RS @ nats_S / (drawn_RS @ targets_S)))


def compare(first: Perplexity, second: Perplexity) -> dict[str, dict[str, float]]:
    """Per scheme, the perplexity of `first` over that of `second` on the same targets, with a paired 95 % bootstrap interval
    over sequences; without the schemes in which the two were shown other tokens, as with other shares of `<mask>`. ValueError
    if their targets differ."""
    same = [scheme for scheme in first.schemes if scheme in second.schemes and first.digest(scheme) == second.digest(scheme)]
    if not same:
        raise ValueError("the two were evaluated on different targets")
    out = {}
    for scheme in same:
        gain_S = first.loss[scheme] - second.loss[scheme]
        low, high = _interval(gain_S, first.targets_S)
        out[scheme] = {"ratio": _perplexity(gain_S, first.targets_S), "low": low, "high": high}
    return out


def evaluate(
    model: nn.Module,
    shards: Shards,
    recipe: Recipe,
    *,
    device: torch.device,
    budget: int | None = None,
    rank: int = 0,
    world: int = 1,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Perplexity:
    """Evaluate `model` on the first `budget` token slots of the split's fixed order (None: `training.validation_tokens`).

    The model is on `device`; its training mode is restored. With several ranks each takes every `world`-th batch, runs
    equally many forward passes as the others, and `reduce` adds a tensor over all ranks. RequestError for an empty split.
    """
    if len(shards) == 0:
        raise RequestError(f"{shards.directory} has no sequence in the split {shards.split!r}: hold some out with --valid-fraction")
    budget = recipe.training.validation_tokens if budget is None else budget
    crops = validation_crops(shards, recipe, budget)
    sequence_S = np.unique(crops.sequence)
    passes = -(-_batch_count(crops.slots, recipe.data.tokens_per_batch) // world)
    reduce = reduce or (lambda tensor: tensor)
    objective = recipe.objective
    schemes = {"clm": 1.0} if objective.kind == "clm" else {"8010": objective.mask_token, "mask": 1.0}

    training = model.training
    model.eval()
    runs = {}
    for scheme in schemes:
        batches = _equally_many(shards, recipe, budget, scheme == "mask", rank, world, passes)
        runs[scheme] = _run(model, batches, sequence_S, device)
    model.train(training)

    S, V = sequence_S.size, shards.alphabet.size
    first = next(iter(runs.values()))
    sums = [np.bincount(first.row_M, minlength=S), np.bincount(first.target_M, minlength=V)]
    for run in runs.values():
        sums += [np.bincount(run.row_M, run.loss_M, S), np.bincount(run.target_M, run.loss_M, V)]
    counts_LE = None if first.counts_LE is None else first.counts_LE.cpu().numpy().astype(np.float64)
    sums += [run.inputs_S for run in runs.values()]
    targets_S, composition_V, *parts, flat = _reduced([*sums, np.empty(0) if counts_LE is None else counts_LE.ravel()], reduce, device)
    losses, inputs = parts[: 2 * len(runs)], parts[2 * len(runs) :]

    baseline_V = {
        scheme: baselines.unigram_nats(composition_V, shards.alphabet, share, 0.0 if share >= 1.0 else objective.random_token)
        for scheme, share in schemes.items()
    }
    sums = [np.bincount(first.row_M, baseline_V[scheme][first.target_M], S) for scheme in schemes]
    return Perplexity(
        sequence_S, shards.lengths[sequence_S], targets_S,
        loss=dict(zip(schemes, losses[0::2], strict=True)),
        baseline=dict(zip(schemes, _reduced(sums, reduce, device), strict=True)),
        composition_V=composition_V, loss_V=dict(zip(schemes, losses[1::2], strict=True)), baseline_V=baseline_V,
        inputs=dict(zip(schemes, inputs, strict=True)), symbols=shards.alphabet.symbols,
        counts_LE=None if counts_LE is None else flat.reshape(counts_LE.shape),
    )  # fmt: skip


@dataclass(frozen=True)
class _Run:
    """All targets of this rank under one scheme: row of the sequence, true token, nats; and of each sequence the sum of `_fingerprint`;
    and the experts' loads."""

    row_M: np.ndarray
    target_M: np.ndarray
    loss_M: np.ndarray
    inputs_S: np.ndarray
    counts_LE: Tensor | None


@torch.no_grad()
def _run(model: nn.Module, batches: Iterator[tuple[Batch, bool]], sequence_S: np.ndarray, device: torch.device) -> _Run:
    """The device is waited for once, at the end."""
    rows, targets, losses, counts_LE = [], [], [], None
    inputs_S = np.zeros(sequence_S.size)
    for batch, counted in batches:
        inputs_S += _fingerprint(batch, sequence_S) * counted
        slot_M = slice(None) if batch.select_M is None else batch.select_M
        segment_M = batch.segments_T[slot_M].clamp(max=max(len(batch.sequence_ids) - 1, 0))  # the tail has no target
        rows.append(np.searchsorted(sequence_S, batch.sequence_ids[segment_M].numpy()))
        targets.append(batch.picked_M.numpy())
        moved = batch.to(device)
        out = model(**moved.model_inputs())
        losses.append(F.cross_entropy(_at_least_fp32(out.logits), moved.picked_M, ignore_index=NO_TARGET, reduction="none"))
        if out.counts_LE.numel():
            counts_LE = torch.zeros_like(out.counts_LE, dtype=torch.float64) if counts_LE is None else counts_LE
            counts_LE += out.counts_LE * counted
    target_M = np.concatenate(targets)
    asked = target_M != NO_TARGET
    loss_M = torch.cat(losses).double().cpu().numpy()
    return _Run(np.concatenate(rows)[asked], target_M[asked], loss_M[asked], inputs_S, counts_LE)


def _fingerprint(batch: Batch, sequence_S: np.ndarray) -> np.ndarray:
    """Of each sequence the sum of 32-bit hashes of place, token shown and target, float64 [S]: exact, so that order and ranks do not
    matter."""
    place_T, token_T, target_T, segment_T = (
        part[: int(batch.real_tokens)].numpy() for part in (batch.positions_T, batch.tokens_T, batch.targets_T, batch.segments_T)
    )
    hash_T = random.bits(random.bits(place_T, token_T), target_T) >> np.uint64(32)
    row_T = np.searchsorted(sequence_S, batch.sequence_ids.numpy())[segment_T]
    return np.bincount(row_T, hash_T.astype(np.float64), sequence_S.size)


def _at_least_fp32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits


def _batch_count(slots: np.ndarray, slots_per_batch: int) -> int:
    """How many batches the greedy cut of `validation_batches` makes of crops of these sizes."""
    ends, begin, number = np.cumsum(slots), 0, 0
    while begin < ends.size:
        filled = int(ends[begin - 1]) if begin else 0
        begin = int(np.searchsorted(ends, filled + slots_per_batch, side="right"))
        number += 1
    return number


def _equally_many(
    shards: Shards, recipe: Recipe, budget: int | None, all_mask: bool, rank: int, world: int, passes: int
) -> Iterator[tuple[Batch, bool]]:
    """This rank's batches, and if they are fewer than `passes` a batch without targets, whose load does not count (False):
    forward passes are collective when parameters are sharded, so that every rank must run equally many."""
    done = 0
    for batch in validation_batches(shards, recipe, budget, all_mask, rank, world):
        yield batch, True
        done += 1
    if done < passes:
        first = next(validation_batches(shards, recipe, budget, all_mask))
        empty = torch.full_like(first.picked_M, NO_TARGET)
        yield replace(first, picked_M=empty, targets_T=torch.full_like(first.targets_T, NO_TARGET), targets=0), False


def _reduced(arrays: list[np.ndarray], reduce: Callable[[Tensor], Tensor], device: torch.device) -> list[np.ndarray]:
    """The float64 sums of each array over all ranks, in one reduction."""
    flat = torch.from_numpy(np.concatenate([np.asarray(a, np.float64) for a in arrays])).to(device)
    ends = np.cumsum([a.size for a in arrays])[:-1]
    return np.split(reduce(flat).cpu().numpy(), ends)
