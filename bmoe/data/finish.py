"""The end of a preparation: names without `.partial`, hashes of all files, the manifest last."""

import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from bmoe.data.alphabet import TOKENIZER_FILE, Alphabet
from bmoe.data.bulk import PARTIAL
from bmoe.data.digests import Digest, digest
from bmoe.data.ledger import LOG, Ledger
from bmoe.data.shards import FORMAT, MANIFEST, SPLITS, manifest_sha256
from bmoe.data.tasks import Plan

KINDS = ("tokens", "offsets", "headers", "headers.offsets", "clusters", "softmask", "softmask.offsets", "hashes", "excluded")


def manifest(
    out: Path,
    ledger: Ledger,
    request: dict,
    letters: Alphabet,
    begun: dict[str, Digest],
    digests: Callable,
    plan: Plan,
    workers: int,
    show: Callable,
) -> dict:
    """Rename the files, hash them, write and return the manifest. May be repeated after a kill at any point.

    request: options, part, inputs (names and sizes), and of a part `lines` (`logs.py`).
    begun: digests of some files, by name, which are finished here. digests: returns those of the inputs.
    """
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
                        found = begun.get(path.name) or Digest(letters.dtype if kind == "tokens" else None)
                        waiting[shard["name"], kind] = pool.submit(found.finish, path)
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
        **({"lines": request["lines"]} if request["part"] else {}),
        "inputs": [{"name": name, "size": size} for name, size in request["inputs"]],
        "sources": sources(plan, digests()),
        "splits": splits,
        "files": {name: future.result() for name, future in files.items()},
        "records_read": totals.records_read,
        "records_kept": totals.records_read - sum(totals.dropped.values()),
        "records_dropped": dict(sorted(totals.dropped.items())),
        "residues": sum(totals.residues),
        "counts": dict(sorted(totals.letters.items())),
        "lengths": ledger.lengths.summary(),
        "composition": composition(counted, letters),
    }
    write(out, written)
    return written


def write(out: Path, manifest: dict) -> None:
    """Write a manifest whole or not at all, and after everything it speaks of."""
    temporary = out / (MANIFEST + PARTIAL)
    with temporary.open("w") as file:
        file.write(json.dumps(manifest | {"sha256": manifest_sha256(manifest)}, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, out / MANIFEST)


def sources(plan: Plan, digests: dict[int, dict]) -> list[dict]:
    """Name, size and SHA-256 of every input that was read."""
    return [{"name": source.name} | digests[k] for k, source in enumerate(plan.sources) if k in digests]


def composition(counted: np.ndarray, letters: Alphabet) -> dict[str, float]:
    """Shares of the letters, largest first; for more than 64 letters the 64 most frequent."""
    total = max(int(counted.sum()), 1)
    order = np.argsort(-counted[: letters.size], kind="stable")[:64]
    return {letters.symbols[i]: round(float(counted[i]) / total, 6) for i in order.tolist() if counted[i]}
