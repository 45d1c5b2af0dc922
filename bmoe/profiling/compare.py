"""Two profiles beside each other: what changed, and whether it is more than their own noise."""

import json
from pathlib import Path

from bmoe.errors import RequestError

PASS = "pass two files that `bmoe profile RECIPE --json FILE` wrote"
FEWEST = 3  # steps without which a run's 10-90 % range says nothing of its noise
FLOOR = 0.02  # two runs of the same thing differ by this much on a quiet machine


def load(path: str | Path) -> dict:
    """The results of a `bmoe profile --json` file, with its recipe's values by key as `settings`. Raises RequestError."""
    try:
        body = json.loads(Path(path).read_text())
    except OSError as problem:
        raise RequestError(f"{path}: cannot read it ({problem.strerror}); {PASS}") from None
    except ValueError:
        raise RequestError(f"{path}: this is no JSON; {PASS}") from None
    results, command = (body.get("results"), body.get("command")) if isinstance(body, dict) else (None, None)
    if not isinstance(results, dict) or "step_s" not in results or command != "profile":
        raise RequestError(f"{path}: {_instead(command, results or {})}; {PASS}")
    return results | {"settings": _flat(body.get("recipe") or {})}


def _instead(command: str | None, results: dict) -> str:
    """What a JSON file is that is no profile."""
    if command == "profile":
        for key, what in (("differing", "the comparison of two profiles"), ("agree", "the check of --layouts")):
            if key in results:
                return f"this is {what}, no profile"
        return "this profile has no step_s"
    return f"this was written by `bmoe {command}`, and is no profile" if command else "this was not written by bmoe"


def _flat(values: dict, prefix: str = "") -> dict[str, object]:
    """section.key -> value of nested sections."""
    found: dict[str, object] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def _steps(results: dict) -> int | None:
    """Measured steps of a profile, of one device or of ranks; None if the file does not say."""
    measured = results.get("measured", {}).get("steps")
    return results.get("steps") if measured is None else len(measured)


def compare(a: dict, b: dict) -> dict:
    """Changes from results `a` to results `b`.

    step: seconds of both, ratio b / a with its bounds (the ratio of opposite ends of the runs' 10-90 % ranges, at least
    2 % either way), and `changed`, whether 1 lies outside them; None where a run has too few steps to tell.
    parts: seconds and ratio of each part that both have. scaling: ranks of both, and tokens/s a rank of `b` over those of `a`.
    differing: what was not the same, the recipe's values among it.
    Raises RequestError if one of them measured nothing.
    """
    for name, results in (("first", a), ("second", b)):
        if not results.get("step_s"):
            raise RequestError(
                f"--compare: the {name} file has no measured step, as its precision did not run there; pass profiles of one that did"
            )
        if missing := {"step_s_low", "step_s_high", "tokens_per_s", "parts"} - results.keys():
            raise RequestError(f"--compare: the {name} file lacks {', '.join(sorted(missing))}; profile again and compare the new file")
    ratio = b["step_s"] / a["step_s"]
    low = min(b["step_s_low"] / a["step_s_high"], ratio * (1 - FLOOR))
    high = max(b["step_s_high"] / a["step_s_low"], ratio * (1 + FLOOR))
    shared = [name for name in a["parts"] if name in b["parts"]]
    keys = ("recipe", "device", "precision", "experts", "attention", "compiled", "replayed", "data")
    differing = {key: {"a": a.get(key), "b": b.get(key)} for key in keys if a.get(key) != b.get(key)}
    one, other = a.get("settings", {}), b.get("settings", {})
    for key in sorted(one.keys() & other.keys() - {"name"}):
        if one[key] != other[key]:
            differing[key] = {"a": one[key], "b": other[key]}
    known = all(count is None or count >= FEWEST for count in map(_steps, (a, b)))
    ranks = {"a": a.get("ranks", 1), "b": b.get("ranks", 1)}
    per_rank = b["tokens_per_s"] / ranks["b"] / (a["tokens_per_s"] / ranks["a"])
    return {
        "scaling": ranks | {"efficiency": per_rank if ranks["a"] != ranks["b"] else None},
        "step": {
            "a": a["step_s"],
            "b": b["step_s"],
            "ratio": ratio,
            "low": low,
            "high": high,
            "changed": not low <= 1 <= high if known else None,
        },
        "tokens_per_s": {"a": a["tokens_per_s"], "b": b["tokens_per_s"], "ratio": b["tokens_per_s"] / a["tokens_per_s"]},
        "parts": {
            name: {"a": x, "b": y, "ratio": y / x if x else None}
            for name in shared
            for x, y in [(a["parts"][name]["seconds"], b["parts"][name]["seconds"])]
        },
        "differing": differing,
    }
