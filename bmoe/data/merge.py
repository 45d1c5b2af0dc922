"""`bmoe prepare --merge`: the parts of a job array become one folder, without rewriting a token.

Files are linked (or copied, where the parts lie on another disk) under new numbers. A sequence that an earlier part holds as
well is not taken out of its shard but listed beside it, in `.excluded`.
"""

import errno
import os
import shutil
from pathlib import Path

import numpy as np

from bmoe.data import logs
from bmoe.data.alphabet import TOKENIZER_FILE, alphabet
from bmoe.data.digests import digest
from bmoe.data.finish import composition, write
from bmoe.data.hashset import HashSet
from bmoe.data.ledger import LOG
from bmoe.data.lengths import Lengths
from bmoe.data.shards import FORMAT, SPLITS, check_size, read_manifest
from bmoe.errors import RequestError, RunError


def merge(directories: list[str | Path], out: str | Path) -> dict:
    """Join all parts of one preparation into `out`. Returns the manifest with directory, parts, linked, copied.

    RequestError for parts that are missing, double, not whole, of other inputs or options, or for an `out` that is not empty.
    """
    out = Path(out)
    parts = _ordered([Path(directory) for directory in directories])
    for directory, manifest in parts:
        _check(directory, manifest)
    if out.exists() and not out.is_dir():
        raise RequestError(f"--out {out} is a file: name a folder that is empty or not there yet")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"{error.filename} cannot be written: {error.strerror}; name another --out") from None
    if any(out.iterdir()):
        raise RequestError(f"{out} is not empty: name another --out for the merged data, or empty it")
    try:
        return _merge(parts, out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RunError(f"the disk of {out} is full: free some space, empty {out} and merge again") from error
        raise RunError(f"{error.filename or out}: {error.strerror}; empty {out} and merge again") from error


def _check(directory: Path, manifest: dict) -> None:
    """RequestError unless all files of a part are there and as large as its manifest says."""
    for shards in (split["shards"] for split in manifest["splits"].values()):
        for shard in shards:
            for kind, facts in shard["files"].items():
                check_size(directory / f"{shard['name']}.{kind}", facts["bytes"])
    for name, facts in manifest["files"].items():
        check_size(directory / name, facts["bytes"])


def _ordered(directories: list[Path]) -> list[tuple[Path, dict]]:
    """Parts 1 .. n with their manifests."""
    found: dict[int, tuple[Path, dict]] = {}
    first = None
    for directory in directories:
        manifest = read_manifest(directory)
        if not manifest.get("part"):
            raise RequestError(f"{directory} is no part of a job array: only folders prepared with --part i/n are merged")
        number, count = manifest["part"]
        request = (manifest["options"], manifest["inputs"], count)
        if first is None:
            first = (directory, request)
        if request != first[1]:
            raise RequestError(f"{directory} and {first[0]} are parts of different inputs, options or numbers of parts: prepare them alike")
        if number in found:
            raise RequestError(f"{directory} and {found[number][0]} are both part {number}: name each part once")
        found[number] = directory, manifest
    if first is None:
        raise RequestError("no part was named: give the folders that `bmoe prepare --part` wrote")
    missing = [k for k in range(1, first[1][2] + 1) if k not in found]
    if missing:
        raise RequestError(f"part {missing[0]} of {first[1][2]} is missing: name all folders that `bmoe prepare --part` wrote")
    return [found[k] for k in sorted(found)]


def _merge(parts: list[tuple[Path, dict]], out: Path) -> dict:
    options = parts[0][1]["options"]
    letters = alphabet(parts[0][1]["alphabet"], parts[0][0])
    seen = HashSet() if options["dedup"] else None
    how = {"linked": 0, "copied": 0}
    splits = {name: {"sequences": 0, "residues": 0, "shards": []} for name in SPLITS}
    lengths = Lengths()
    again = 0
    for directory, manifest in parts:
        for name in SPLITS:
            split = splits[name]
            for shard in manifest["splits"][name]["shards"]:
                fresh = f"{name}-{len(split['shards']):05d}"
                files = {kind: facts for kind, facts in shard["files"].items() if kind != "hashes"}
                for kind in files:
                    _link(directory / f"{shard['name']}.{kind}", out / f"{fresh}.{kind}", how)
                size = np.diff(np.fromfile(directory / f"{shard['name']}.offsets", "<i8"))
                new = np.ones(size.size, bool)
                if seen is not None:
                    new = _new(seen, np.fromfile(directory / f"{shard['name']}.hashes", "<u8"))
                excluded = np.flatnonzero(~new)
                if excluded.size:
                    again += excluded.size
                    excluded.astype("<i8").tofile(out / f"{fresh}.excluded")
                    files["excluded"] = digest(out / f"{fresh}.excluded", None)
                lengths.add(size[new])
                split["shards"].append({"name": fresh, "sequences": int(new.sum()), "residues": int(size[new].sum()), "files": files})
        # order of parts is the order of the input, so the sequence that stays is the one an undivided run keeps
    for split in splits.values():
        split["sequences"] = sum(shard["sequences"] for shard in split["shards"])
        split["residues"] = sum(shard["residues"] for shard in split["shards"])
    residues = sum(split["residues"] for split in splits.values())
    dropped, counts = _added(parts, "records_dropped"), _added(parts, "counts")
    if again:
        dropped["duplicate"] = dropped.get("duplicate", 0) + again
    read = sum(manifest["records_read"] for _, manifest in parts)
    files_of_all = {}
    if letters.tokenizer is not None:
        files_of_all[TOKENIZER_FILE] = _same_tokenizer(parts)
        _link(parts[0][0] / TOKENIZER_FILE, out / TOKENIZER_FILE, how)
    logs.join(parts, again, out / LOG)
    files_of_all[LOG] = digest(out / LOG, None)
    merged = {
        "format": FORMAT,
        "alphabet": letters.name,
        "vocabulary": letters.size,
        "options": options,
        "part": None,
        "inputs": parts[0][1]["inputs"],
        "sources": [source for _, manifest in parts for source in manifest["sources"]],
        "splits": splits,
        "files": files_of_all,
        "records_read": read,
        "records_kept": read - sum(dropped.values()),
        "records_dropped": dict(sorted(dropped.items())),
        "residues": residues,
        "counts": dict(sorted(counts.items())),
        "lengths": lengths.summary(),
        "composition": _composition(parts, letters),
    }
    write(out, merged)
    return merged | {"directory": str(out), "parts": len(parts), "duplicates_between_parts": again} | how


def _same_tokenizer(parts: list[tuple[Path, dict]]) -> dict:
    """Bytes and SHA-256 of the parts' tokenizer, which all have learnt from the same beginning of the input."""
    (directory, first), *others = ((directory, manifest["files"][TOKENIZER_FILE]) for directory, manifest in parts)
    for other, facts in others:
        if facts != first:
            raise RequestError(f"{other} and {directory} learnt different byte-pair encodings: prepare them with the same version")
    return first


def _new(seen: HashSet, hashes: np.ndarray) -> np.ndarray:
    """Which hashes no earlier shard has."""
    return np.concatenate([seen.add(hashes[k : k + (1 << 16)]) for k in range(0, hashes.size, 1 << 16)] or [np.ones(0, bool)])


def _link(source: Path, target: Path, how: dict[str, int]) -> None:
    try:
        os.link(source, target)
        how["linked"] += 1
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, target)
        how["copied"] += 1


def _added(parts: list[tuple[Path, dict]], what: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for _, manifest in parts:
        for name, number in manifest[what].items():
            total[name] = total.get(name, 0) + number
    return total


def _composition(parts: list[tuple[Path, dict]], letters) -> dict[str, float]:
    """Mean of the parts' compositions, weighted by their residues."""
    counted = np.zeros(1 << 16)
    place = {symbol: number for number, symbol in enumerate(letters.symbols)}
    for _, manifest in parts:
        for symbol, share in manifest["composition"].items():
            counted[place[symbol]] += share * manifest["residues"]
    return composition(counted, letters)
