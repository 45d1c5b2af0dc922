"""Digests of a checkpoint's files: taken after they were written, compared before they are read.

    digests.json    {"part_bytes": .., "files": {NAME: {"bytes": n, "sha256": [of each part]}}}

A bit that flips on a disk or on the way from it changes a weight without a word otherwise. Files are cut into parts that
several threads hash at once, because one SHA-256 runs at 1 to 2 GB/s, and a name and a place can be given for the damage.
"""

import hashlib
import json
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch.distributed as dist

DIGESTS = "digests.json"
PART = 2**26  # bytes
PIECE = 2**20  # bytes read at once


def digest(path: Path) -> dict:
    """{"bytes", "sha256": of each part} of a file."""
    size = path.stat().st_size
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        return {"bytes": size, "sha256": list(pool.map(lambda begin: _hash(path, begin, PART), range(0, size, PART)))}


def digest_text(text: str) -> dict:
    """The same of a short text that is not on disk yet."""
    data = text.encode()
    return {"bytes": len(data), "sha256": [hashlib.sha256(data).hexdigest()]}


def _hash(path: Path, begin: int, length: int) -> str:
    found, piece = hashlib.sha256(), memoryview(bytearray(PIECE))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        while length and (count := file.readinto(piece[:length])):
            found.update(piece[:count])
            length -= count
    return found.hexdigest()


def dump(files: dict[str, dict]) -> str:
    """The text of digests.json."""
    return json.dumps({"part_bytes": PART, "files": dict(sorted(files.items()))}, indent=1)


def damage(folder: Path) -> str | None:
    """What is wrong with the files of a checkpoint, naming one, or None.

    Every rank looks at its share of the files, and all return the same. Collective.
    """
    if not dist.is_initialized():
        return _damage_of_share(folder, 0, 1)
    found: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, _damage_of_share(folder, dist.get_rank(), len(found)))
    return next((fault for fault in found if fault is not None), None)


def _damage_of_share(folder: Path, share: int, shares: int) -> str | None:
    if not (folder / DIGESTS).is_file():
        return f"{DIGESTS} is missing"
    try:
        known = json.loads((folder / DIGESTS).read_text())
        part, files = known["part_bytes"], sorted(known["files"].items())
        faults: Iterable[str | None] = (_difference(folder / name, facts, part) for name, facts in files[share::shares])
        return next((fault for fault in faults if fault is not None), None)
    except (ValueError, LookupError, TypeError, AttributeError):
        return f"{DIGESTS} is broken"


def _difference(path: Path, facts: dict, part: int) -> str | None:
    """How a file differs from its digest, or None."""
    try:
        size = path.stat().st_size
        if size != facts["bytes"]:
            return f"{path.name} has {size} bytes of {facts['bytes']}"
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            begins = range(0, size, part)
            for begin, found, wanted in zip(begins, pool.map(lambda b: _hash(path, b, part), begins), facts["sha256"], strict=True):
                if found != wanted:
                    end = min(begin + part, size)
                    return f"{path.name} has other bytes than were written, between {begin / 1e6:,.0f} and {end / 1e6:,.0f} MB"
    except OSError as error:
        return f"{path.name} cannot be read ({error.strerror})"
    return None
