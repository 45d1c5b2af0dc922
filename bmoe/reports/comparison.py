"""The numbers by which models are compared: where each stands in the results, and which way is better."""

import math
from typing import NamedTuple


class Metric(NamedTuple):
    """label: for people. path: keys in the results; its interval is at the same path with `_low` and `_high` added. baseline: keys
    of what is reached without learning. inputs: keys of the digest of what was shown and asked for; values compare where it is equal."""

    label: str
    path: tuple[str, ...]
    lower_is_better: bool = False
    low: tuple[str, ...] | None = None
    high: tuple[str, ...] | None = None
    baseline: tuple[str, ...] | None = None
    inputs: tuple[str, ...] | None = None


class Value(NamedTuple):
    """A value and its 95 % interval; None where there is none."""

    value: float | None
    low: float | None
    high: float | None


METRICS = (
    Metric("perplexity, fully masked", ("perplexity_mask",), True, baseline=("baseline_mask",), inputs=("inputs", "mask")),
    Metric("perplexity / baseline, fully masked", ("ratio_mask",), True),
    Metric("perplexity, training scheme", ("perplexity_8010",), True, baseline=("baseline_8010",), inputs=("inputs", "8010")),
    Metric("perplexity, next token", ("perplexity",), True, baseline=("baseline",), inputs=("inputs", "clm")),
    Metric("perplexity / baseline, next token", ("ratio",), True),
    Metric("pseudo-perplexity", ("pseudo", "pseudo_perplexity"), True, ("pseudo", "low"), ("pseudo", "high")),
    Metric("mutations, Spearman", ("mutations", "spearman"), baseline=("mutations", "blosum62", "spearman")),
    Metric("mutations, AUC", ("mutations", "auc"), baseline=("mutations", "blosum62", "auc")),
    Metric("contacts, long range P@L", ("contacts", "long", "p_at_l"), baseline=("contacts", "long", "p_at_l_by_separation")),
    Metric("contacts, long range P@L/5", ("contacts", "long", "p_at_l5"), baseline=("contacts", "long", "p_at_l5_by_separation")),
    Metric("contacts, medium range P@L", ("contacts", "medium", "p_at_l"), baseline=("contacts", "medium", "p_at_l_by_separation")),
    Metric("contacts, short range P@L", ("contacts", "short", "p_at_l"), baseline=("contacts", "short", "p_at_l_by_separation")),
    Metric("secondary structure, accuracy", ("probe", "accuracy"), baseline=("probe", "majority")),
    Metric("secondary structure, 3 states", ("probe", "three_state", "accuracy"), baseline=("probe", "three_state", "majority")),
    Metric("generated, perplexity", ("generation", "perplexity"), True),
)


def value(results: dict, metric: Metric) -> Value:
    """The metric in the results of one model."""

    def end(path: tuple[str, ...] | None, ending: str) -> float | None:
        return _at(results, path or (*metric.path[:-1], metric.path[-1] + ending))

    return Value(_at(results, metric.path), end(metric.low, "_low"), end(metric.high, "_high"))


def without_learning(runs: dict[str, dict], metric: Metric) -> float | None:
    """The baseline that all models share; None if there is none, or if they were judged on other data."""
    found = {_at(results, metric.baseline) for results in runs.values()} if metric.baseline else {None}
    return found.pop() if len(found) == 1 else None


def comparable(runs: dict[str, dict], metric: Metric) -> bool:
    """Whether all models that have this metric were shown and asked for the same."""
    having = [results for results in runs.values() if value(results, metric).value is not None]
    return len({_found(results, metric.inputs) for results in having}) <= 1 if metric.inputs else True


def notes(runs: dict[str, dict]) -> list[str]:
    """Why rows of the comparison have no best."""
    apart = {metric.path[0]: metric.label for metric in METRICS if not comparable(runs, metric)}
    shares = apart.pop("perplexity_8010", None) if "perplexity_mask" not in apart else None
    sentences = [f"{label}: no best is marked, because the models were evaluated on different targets." for label in apart.values()]
    if shares:
        sentences.append(f"{shares}: no best is marked, because the models were shown different shares of <mask> and random residues.")
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]


def _at(results: dict, path: tuple[str, ...]) -> float | None:
    found = _found(results, path)
    return float(found) if isinstance(found, int | float) and math.isfinite(found) else None


def _found(results: dict, path: tuple[str, ...]) -> object:
    found = results
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return found


def rows(runs: dict[str, dict]) -> list[tuple[Metric, list[Value]]]:
    """The metrics that at least one model has, each with a value per model."""
    found = [(metric, [value(results, metric) for results in runs.values()]) for metric in METRICS]
    return [(metric, values) for metric, values in found if any(v.value is not None for v in values)]
