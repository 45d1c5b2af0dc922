"""`bmoe prepare --verify`: every file against its size and hash, every offset against what it points into."""

from pathlib import Path

import numpy as np

from bmoe.data.alphabet import alphabet
from bmoe.data.digests import digest
from bmoe.data.shards import check_size, read_manifest
from bmoe.errors import RequestError


def verify(directory: str | Path) -> dict:
    """Check a prepared folder. Returns {files, bytes, sequences, residues}. RequestError naming the first file that is wrong."""
    directory = Path(directory)
    manifest = read_manifest(directory)
    letters = alphabet(manifest["alphabet"], directory)
    result = {"directory": str(directory), "files": 0, "bytes": 0, "sequences": 0, "residues": 0}
    for name, facts in manifest.get("files", {}).items():
        _check(directory / name, facts, None, result)
    for split, entry in manifest["splits"].items():
        sequences = residues = 0
        for shard in entry["shards"]:
            for kind, facts in shard["files"].items():
                counted = _check(directory / f"{shard['name']}.{kind}", facts, letters.dtype if kind == "tokens" else None, result)
                if counted is not None and counted[letters.size :].any():
                    path = directory / f"{shard['name']}.tokens"
                    raise RequestError(f"{path} has an id beyond the {letters.size} of {letters.name}: remove its folder and prepare again")
            found = _offsets(directory, shard, np.dtype(letters.dtype).itemsize)
            sequences, residues = sequences + found[0], residues + found[1]
        for what, number in (("sequences", sequences), ("residues", residues)):
            if entry[what] != number:
                said = f"split {split} has {number} {what} where its manifest says {entry[what]}"
                raise RequestError(f"{directory}: {said}: remove its folder and prepare again")
            result[what] += number
    return result


def _check(path: Path, facts: dict, dtype, result: dict):
    check_size(path, facts["bytes"])
    found = digest(path, dtype)
    if found["sha256"] != facts["sha256"]:
        raise RequestError(f"{path} is corrupt: its SHA-256 is not the one in the manifest; remove its folder and prepare again")
    result["files"] += 1
    result["bytes"] += facts["bytes"]
    return found.get("counted")


def _offsets(directory: Path, shard: dict, item: int) -> tuple[int, int]:
    """Check a shard's offsets. Returns the sequences and residues it counts."""
    name, files = shard["name"], shard["files"]
    units = {"offsets": files["tokens"]["bytes"] // item}
    if "headers" in files:
        units["headers.offsets"] = files["headers"]["bytes"]
    if "softmask" in files:
        units["softmask.offsets"] = files["softmask"]["bytes"] // 8
    for kind, end in units.items():
        path = directory / f"{name}.{kind}"
        offsets = np.memmap(path, "<i8", "r") if files[kind]["bytes"] else np.zeros(0, np.int64)
        if offsets.size < 1 or offsets[0] != 0 or offsets[-1] != end or (np.diff(offsets) < 0).any():
            raise RequestError(f"{path} does not rise from 0 to {end}: remove its folder and prepare again")
        if kind == "offsets":
            count, lengths = offsets.size - 1, np.diff(offsets)
        elif offsets.size - 1 != count:
            raise RequestError(f"{path} is of {offsets.size - 1} sequences, {name}.offsets of {count}: remove its folder and prepare again")
    for kind in ("clusters", "hashes"):
        if kind in files and files[kind]["bytes"] != 8 * count:
            raise RequestError(f"{directory / name}.{kind} is not of {count} sequences: remove its folder and prepare again")
    residues = int(lengths.sum())
    if "excluded" in files and files["excluded"]["bytes"]:
        excluded = np.fromfile(directory / f"{name}.excluded", "<i8")
        if (np.diff(excluded) <= 0).any() or excluded[0] < 0 or excluded[-1] >= count:
            raise RequestError(f"{directory / name}.excluded names sequences that are not there: remove its folder and prepare again")
        count, residues = count - excluded.size, residues - int(lengths[excluded].sum())
    return count, residues
