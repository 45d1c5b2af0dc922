"""The numbers by which models are compared: where each stands in the results, and which way is better."""

import math
from typing import NamedTuple


class Metric(NamedTuple):
    """label: for people. path: keys in the results; its interval is at the same path with `_low` and `_high` added."""

    label: str
    path: tuple[str, ...]
    lower_is_better: bool = False
    low: tuple[str, ...] | None = None
    high: tuple[str, ...] | None = None


class Value(NamedTuple):
    """A value and its 95 % interval; None where there is none."""

    value: float | None
    low: float | None
    high: float | None


METRICS = (
    Metric("perplexity, fully masked", ("perplexity_mask",), True),
    Metric("perplexity / baseline, fully masked", ("ratio_mask",), True),
    Metric("perplexity, training scheme", ("perplexity_8010",), True),
    Metric("perplexity, next token", ("perplexity",), True),
    Metric("perplexity / baseline, next token", ("ratio",), True),
    Metric("pseudo-perplexity", ("pseudo", "pseudo_perplexity"), True, ("pseudo", "low"), ("pseudo", "high")),
    Metric("mutations, Spearman", ("mutations", "spearman")),
    Metric("mutations, AUC", ("mutations", "auc")),
    Metric("contacts, long range P@L", ("contacts", "long", "p_at_l")),
    Metric("contacts, long range P@L/5", ("contacts", "long", "p_at_l5")),
    Metric("contacts, medium range P@L", ("contacts", "medium", "p_at_l")),
    Metric("contacts, short range P@L", ("contacts", "short", "p_at_l")),
    Metric("secondary structure, accuracy", ("probe", "accuracy")),
    Metric("secondary structure, 3 states", ("probe", "three_state", "accuracy")),
    Metric("generated, perplexity", ("generation", "perplexity"), True),
)


def value(results: dict, metric: Metric) -> Value:
    """The metric in the results of one model."""

    def at(path: tuple[str, ...] | None, ending: str) -> float | None:
        path = path or (*metric.path[:-1], metric.path[-1] + ending)
        found = results
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return float(found) if isinstance(found, int | float) and math.isfinite(found) else None

    return Value(at(None, ""), at(metric.low, "_low"), at(metric.high, "_high"))


def rows(runs: dict[str, dict]) -> list[tuple[Metric, list[Value]]]:
    """The metrics that at least one model has, each with a value per model."""
    found = [(metric, [value(results, metric) for results in runs.values()]) for metric in METRICS]
    return [(metric, values) for metric, values in found if any(v.value is not None for v in values)]
