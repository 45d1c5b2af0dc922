"""metrics.jsonl: one JSON object a logged step, whole lines only, cut back on resume.

Names are the contract of docs/architecture.md. Arrays have one entry a layer, null for dense layers.
"""

import itertools
import json
import math
import os
from pathlib import Path
from typing import Any


class MetricsLog:
    """Appends records to a JSON-lines file; every line is whole on disk before the next."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, record: dict) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(finite(record), allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def cut_back(self, step: int) -> None:
        """Drop records after `step`, and a last line that a kill left unfinished. They will be written again."""
        if not self.path.exists():
            return
        kept = [line for line in self.path.read_text().splitlines() if _whole(line) and json.loads(line)["step"] <= step]
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept))
        partial.replace(self.path)

    def set_aside(self) -> tuple[Path, int] | None:
        """Rename a log that has records, for a run that starts again: its new name and its last step; None if there is none."""
        records = self.read()
        if not records:
            return None
        names = (self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}") for number in itertools.count(1))
        aside = next(name for name in names if not name.exists())
        return self.path.rename(aside), records[-1]["step"]

    def read(self) -> list[dict]:
        """All whole records."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines() if _whole(line)]


def finite(value: Any) -> Any:
    """The same with null for every number that JSON does not have (NaN, infinities)."""
    if isinstance(value, dict):
        return {key: finite(x) for key, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole(line: str) -> bool:
    try:
        return "step" in json.loads(line)
    except ValueError:
        return False


def per_layer(values: list, moe_layers: list[int], layers: int) -> list:
    """Spread values of the MoE layers over all layers, null for dense ones."""
    out: list = [None] * layers
    for layer, value in zip(moe_layers, values, strict=True):
        out[layer] = value
    return out
