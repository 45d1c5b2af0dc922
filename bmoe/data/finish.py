"""The end of a preparation: names without `.partial`, hashes of all files, the manifest last."""

import hashlib
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bmoe.data.alphabet import TOKENIZER_FILE, Alphabet
from bmoe.data.bulk import PARTIAL
from bmoe.data.ledger import LENGTHS, LOG, Ledger
from bmoe.data.shards import FORMAT, MANIFEST, SPLITS
from bmoe.data.tasks import Plan

KINDS = ("tokens", "offsets", "headers", "headers.offsets", "clusters", "softmask", "softmask.offsets", "hashes", "excluded")
CHUNK = 8 << 20  # large, so that a hashing thread seldom needs the interpreter
EVERY = 16  # of a large shard every 16th chunk is counted for the composition
COUNTED_WHOLE = 16 << 20  # bytes of a shard that are counted whole
QUANTILES = (0, 5, 25, 50, 75, 95, 100)


class Digests:
    """Hashes the inputs that are read by ranges, in a thread beside the reading."""

    def __init__(self, plan: Plan):
        self._plan, self._stopped, self._error = plan, False, None
        self._found: dict[int, dict] = {}
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            for source in range(len(self._plan.sources)):
                if self._plan.ranged(source) and not self._stopped:
                    found = self._plan.digest(source, lambda: self._stopped)
                    if found is not None:
                        self._found[source] = found
        except OSError as error:
            self._error = error

    def result(self) -> Callable[[], dict[int, dict]]:
        """A call that waits for the hashes."""

        def wait() -> dict[int, dict]:
            self._thread.join()
            if self._error is not None:
                raise self._error
            return self._found | self._plan.digests

        return wait

    def stop(self) -> None:
        """End the thread."""
        self._stopped = True
        self._thread.join()


def manifest(
    out: Path, ledger: Ledger, request: dict, letters: Alphabet, digests: Callable, plan: Plan, workers: int, show: Callable
) -> dict:
    """Rename the files, hash them, write and return the manifest. May be repeated after a kill at any point."""
    show("hash")
    for partial in sorted(out.glob("*" + PARTIAL)):
        if partial.name != MANIFEST + PARTIAL:
            os.replace(partial, partial.with_name(partial.name.removesuffix(PARTIAL)))
    totals = ledger.totals
    counted = np.zeros(1 << 16, np.int64)
    with ThreadPoolExecutor(max(workers, 2)) as pool:
        waiting = {}
        for split in range(len(SPLITS)):
            for shard in totals.shards[split]:
                for kind in KINDS:
                    path = out / f"{shard['name']}.{kind}"
                    if path.exists():
                        waiting[shard["name"], kind] = pool.submit(digest, path, letters.dtype if kind == "tokens" else None)
        files = {LOG: pool.submit(digest, out / LOG, None)} if (out / LOG).exists() else {}
        if (out / TOKENIZER_FILE).exists():
            files[TOKENIZER_FILE] = pool.submit(digest, out / TOKENIZER_FILE, None)
    splits = {}
    for split, name in enumerate(SPLITS):
        shards = []
        for shard in totals.shards[split]:
            found = {kind: waiting[shard["name"], kind].result() for kind in KINDS if (shard["name"], kind) in waiting}
            counted += found["tokens"].pop("counted")
            shards.append(shard | {"files": found})
        splits[name] = {"sequences": totals.sequences[split], "residues": totals.residues[split], "shards": shards}
    written = {
        "format": FORMAT,
        "alphabet": letters.name,
        "vocabulary": letters.size,
        "options": request["options"],
        "part": request["part"],
        "inputs": [{"name": name, "size": size} for name, size in request["inputs"]],
        "sources": sources(plan, digests()),
        "splits": splits,
        "files": {name: future.result() for name, future in files.items()},
        "records_read": totals.records_read,
        "records_kept": totals.records_read - sum(totals.dropped.values()),
        "records_dropped": dict(sorted(totals.dropped.items())),
        "residues": sum(totals.residues),
        "counts": dict(sorted(totals.letters.items())),
        "lengths": length_summary(ledger.length_counts, sum(totals.residues)),
        "composition": composition(counted, letters),
    }
    write(out, written)
    return written


def write(out: Path, manifest: dict) -> None:
    """Write a manifest whole or not at all, and after everything it speaks of."""
    temporary = out / (MANIFEST + PARTIAL)
    with temporary.open("w") as file:
        file.write(json.dumps(manifest, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, out / MANIFEST)


def sources(plan: Plan, digests: dict[int, dict]) -> list[dict]:
    """Name, size and SHA-256 of every input that was read."""
    return [{"name": source.name} | digests[k] for k, source in enumerate(plan.sources) if k in digests]


def digest(path: Path, dtype: type | None) -> dict:
    """Bytes and SHA-256 of a file; with a dtype also how often each id stands in it (large files: in a sample)."""
    found, counted = hashlib.sha256(), np.zeros(1 << 16, np.int64)
    size = path.stat().st_size
    with path.open("rb", buffering=0) as file:
        number = 0
        while chunk := file.read(CHUNK):
            found.update(chunk)
            if dtype is not None and (size <= COUNTED_WHOLE or number % EVERY == 0):
                counted += _counts(chunk, dtype)
            number += 1
    return {"bytes": size, "sha256": found.hexdigest()} | ({"counted": counted} if dtype is not None else {})


def _counts(chunk: bytes, dtype: type) -> np.ndarray:
    """How often each id stands in a chunk, int64 [65536]."""
    if dtype is np.uint16:
        return np.bincount(np.frombuffer(chunk, "<u2"), minlength=1 << 16)
    pairs = np.bincount(np.frombuffer(chunk, "<u2", len(chunk) // 2), minlength=1 << 16).reshape(256, 256)
    counts = np.zeros(1 << 16, np.int64)
    counts[:256] = pairs.sum(0) + pairs.sum(1)
    if len(chunk) % 2:
        counts[chunk[-1]] += 1
    return counts


def composition(counted: np.ndarray, letters: Alphabet) -> dict[str, float]:
    """Shares of the letters, largest first; for more than 64 letters the 64 most frequent."""
    total = max(int(counted.sum()), 1)
    order = np.argsort(-counted[: letters.size], kind="stable")[:64]
    return {letters.symbols[i]: round(float(counted[i]) / total, 6) for i in order.tolist() if counted[i]}


def length_summary(counts: np.ndarray, residues: int) -> dict:
    """Quantiles of the lengths of stored sequences, and a histogram over powers of two.

    Lengths from LENGTHS on share a bin, so a quantile there reads LENGTHS.
    """
    total = int(counts.sum())
    if not total:
        return {"mean": 0.0, "quantiles": {}, "histogram": []}
    ends = np.cumsum(counts)
    places = {q: int(np.searchsorted(ends, max(int(np.ceil(q / 100 * total)), 1))) for q in QUANTILES}
    edges = [0, *(1 << k for k in range(1, LENGTHS.bit_length()))]
    bins = [int(counts[a:b].sum()) for a, b in zip(edges, [*edges[1:], counts.size], strict=True)]
    histogram = [[a, number] for a, number in zip(edges, bins, strict=True)]
    filled = [k for k, (_, number) in enumerate(histogram) if number]
    return {
        "mean": round(residues / total, 2),
        "quantiles": {str(q): place for q, place in places.items()},
        "histogram": histogram[filled[0] : filled[-1] + 1],
    }
