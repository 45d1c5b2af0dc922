"""Prepared sequences on disk: a folder of memory-mapped shards under one manifest.

    manifest.json              format, alphabet, options, sources, splits -> shards -> files with bytes and SHA-256, counts,
                               and the SHA-256 of all this
    train-00000.tokens         ids without specials, uint8 or little-endian uint16, one sequence after the other
    train-00000.offsets        int64 [n+1], where each sequence begins, in tokens
    train-00000.headers        header lines without `>`, and
    train-00000.headers.offsets   int64 [n+1], in bytes (absent with --no-keep-headers)
    train-00000.clusters       int64 [n], a number per cluster: equal numbers, same cluster (with --clusters)
    train-00000.softmask       uint32 [m, 2], begin and end of lower-case runs within their sequence (DNA), and
    train-00000.softmask.offsets  int64 [n+1], which runs belong to a sequence
    train-00000.hashes         uint64 [n], hash of each sequence (parts of a job array; used by --merge)
    train-00000.excluded       int64, ascending numbers of sequences that an earlier part holds too (after --merge)

A sequence is stored whole; cropping is the sampler's business.
"""

import hashlib
import json
import threading
import time
from functools import cached_property
from pathlib import Path

import numpy as np

from bmoe.data.alphabet import Alphabet, alphabet
from bmoe.errors import RequestError

FORMAT = 1
MANIFEST = "manifest.json"
SCRATCH = ".prepare"  # folder of what only the preparation needs
SPLITS = ("train", "valid", "test")


def read_manifest(directory: str | Path) -> dict:
    """The manifest of a folder of shards; RequestError where there is none, or it is damaged or of another format."""
    path = Path(directory) / MANIFEST
    if Path(directory).exists() and not Path(directory).is_dir():
        raise RequestError(f"{directory} is a file: name a folder that `bmoe prepare` wrote")
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise RequestError(f"{directory} holds no prepared data ({MANIFEST} is missing): run `bmoe prepare` first") from None
    except (OSError, ValueError) as error:
        raise RequestError(f"{path} cannot be read ({error}): remove its folder and prepare again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RequestError(f"{path} has another format than {FORMAT}: remove its folder and prepare again with this version")
    said = manifest.pop("sha256", None)
    if said != manifest_sha256(manifest):
        what = "is not what its own SHA-256 says" if said else "has no SHA-256 of itself"
        raise RequestError(f"{path} is damaged: it {what}; remove its folder and prepare again")
    return manifest


def manifest_sha256(manifest: dict) -> str:
    """SHA-256 of a manifest's text, which stands in the file as `sha256`."""
    return hashlib.sha256(json.dumps(manifest).encode()).hexdigest()


class Shards:
    """One split of a prepared folder, read only.

    Opening checks that every file has the size that the manifest says (RequestError naming the file). Contents are checked
    by `bmoe prepare --verify`, and by `check_in_background`, which training starts.

    Attributes:
        manifest: the manifest.
        alphabet: its alphabet.
        lengths: tokens of each sequence, specials not counted, int64 [n].
        clusters: a number per sequence, equal for members of one cluster, int64 [n]; or None.
        residues: tokens of the split.
    """

    def __init__(self, directory: str | Path, split: str):
        self.directory, self.split = Path(directory), split
        self.manifest = read_manifest(directory)
        if split not in self.manifest["splits"]:
            raise RequestError(f"{directory} has no split {split!r}, only {', '.join(self.manifest['splits'])}")
        self.alphabet: Alphabet = alphabet(self.manifest["alphabet"], directory)
        for name, facts in self.manifest.get("files", {}).items():
            check_size(self.directory / name, facts["bytes"])
        self._shards = [_Shard(self.directory, entry, self.alphabet.dtype) for entry in self.manifest["splits"][split]["shards"]]
        self._first = np.cumsum([0, *(len(shard) for shard in self._shards)])
        self.lengths = _joined([shard.lengths for shard in self._shards], np.int64)
        self.residues = int(self.lengths.sum())
        parts = [shard.clusters for shard in self._shards]
        self.clusters = None if not parts or any(part is None for part in parts) else _joined(parts, np.int64)

        self._fault: RequestError | None = None

    def __len__(self) -> int:
        return int(self._first[-1])

    @cached_property
    def contents(self) -> str:
        """SHA-256 over those of the files that training reads, as the manifest has them: equal for the same shards."""
        return hashlib.sha256("".join(digest for shard in self._shards for _, digest in shard.read_in_training()).encode()).hexdigest()

    def check_in_background(self) -> threading.Thread:
        """Compare the SHA-256 of the files that training reads with the manifest, in a thread that leaves half of its core alone.

        Once a file differs, every later `sequence` raises the RequestError that names it.
        """
        files = [file for shard in self._shards for file in shard.read_in_training()]
        thread = threading.Thread(target=self._check, args=(files,), name="bmoe-check", daemon=True)
        thread.start()
        return thread

    def check(self) -> None:
        """The same at once. Raises RequestError naming the first file that differs."""
        self._check([file for shard in self._shards for file in shard.read_in_training()], rest=False)
        if self._fault is not None:
            raise self._fault

    def _check(self, files: list[tuple[Path, str]], rest: bool = True) -> None:
        for path, expected in files:
            if (found := _sha256(path, rest)) != expected:
                what = "cannot be read any more" if found is None else "is corrupt: its SHA-256 is not that of the manifest"
                self._fault = RequestError(f"{path} {what}; remove its folder and prepare again (`bmoe prepare --verify` checks all of it)")
                return

    def sequence(self, index: int) -> np.ndarray:
        """Ids of sequence `index`, a view of the file. RequestError if a background check has found a damaged file."""
        if self._fault is not None:
            raise self._fault
        shard, place = self._find(index)
        return shard.tokens[shard.offsets[place] : shard.offsets[place + 1]]

    def header(self, index: int) -> str | None:
        """Header line of sequence `index` without `>`, or None where headers were not kept."""
        shard, place = self._find(index)
        if shard.header_offsets is None:
            return None
        begin, end = shard.header_offsets[place : place + 2]
        return bytes(shard.headers[begin:end]).decode("utf-8", "replace")

    def soft_mask(self, index: int) -> np.ndarray | None:
        """Which residues of sequence `index` were lower case, bool; None where the alphabet has no soft mask."""
        shard, place = self._find(index)
        if shard.mask_offsets is None:
            return None
        mask = np.zeros(int(shard.offsets[place + 1] - shard.offsets[place]), bool)
        for begin, end in shard.mask_runs[shard.mask_offsets[place] : shard.mask_offsets[place + 1]]:
            mask[begin:end] = True
        return mask

    def _find(self, index: int) -> tuple["_Shard", int]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self._first, index, side="right")) - 1
        shard = self._shards[number]
        place = int(index - self._first[number])
        return shard, place if shard.kept is None else int(shard.kept[place])


class _Shard:
    """The files of one shard, mapped when first used."""

    def __init__(self, directory: Path, entry: dict, dtype: type):
        self._directory, self._files, self._name, self._dtype = directory, entry["files"], entry["name"], dtype
        for kind, facts in self._files.items():
            check_size(self._path(kind), facts["bytes"])
        self.offsets = self._map("offsets", np.int64)
        self.kept: np.ndarray | None = None
        if "excluded" in self._files:
            self.kept = np.delete(np.arange(self.offsets.size - 1), self._map("excluded", np.int64))

    def __len__(self) -> int:
        return int(self.offsets.size - 1 if self.kept is None else self.kept.size)

    @property
    def lengths(self) -> np.ndarray:
        lengths = np.diff(self.offsets)
        return lengths if self.kept is None else lengths[self.kept]

    @property
    def clusters(self) -> np.ndarray | None:
        if "clusters" not in self._files:
            return None
        clusters = self._map("clusters", np.int64)
        return clusters if self.kept is None else clusters[self.kept]

    @cached_property
    def tokens(self) -> np.ndarray:
        return self._map("tokens", self._dtype)

    @cached_property
    def headers(self) -> np.ndarray:
        return self._map("headers", np.uint8)

    @cached_property
    def header_offsets(self) -> np.ndarray | None:
        return self._map("headers.offsets", np.int64) if "headers.offsets" in self._files else None

    @cached_property
    def mask_runs(self) -> np.ndarray:
        return self._map("softmask", np.uint32).reshape(-1, 2)

    @cached_property
    def mask_offsets(self) -> np.ndarray | None:
        return self._map("softmask.offsets", np.int64) if "softmask.offsets" in self._files else None

    def read_in_training(self) -> list[tuple[Path, str]]:
        """Files and SHA-256 of all but headers and the hashes of sequences."""
        unread = ("headers", "headers.offsets", "hashes")
        return [(self._path(kind), facts["sha256"]) for kind, facts in self._files.items() if kind not in unread]

    def _path(self, kind: str) -> Path:
        return self._directory / f"{self._name}.{kind}"

    def _map(self, kind: str, dtype: type) -> np.ndarray:
        little = np.dtype(dtype).newbyteorder("<")
        if self._files[kind]["bytes"] == 0:
            return np.empty(0, little)
        return np.asarray(np.memmap(self._path(kind), little, "r"))


def _sha256(path: Path, rest: bool) -> str | None:
    """Of a file, if `rest` resting as long as it works; None if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            began = time.perf_counter()
            while part := file.read(1 << 22):
                digest.update(part)
                if rest:
                    time.sleep(time.perf_counter() - began)
                began = time.perf_counter()
    except OSError:
        return None
    return digest.hexdigest()


def check_size(path: Path, size: int) -> None:
    """RequestError unless the file has `size` bytes."""
    try:
        found = path.stat().st_size
    except OSError:
        raise RequestError(f"{path} is missing: its manifest lists it; remove its folder and prepare again") from None
    if found != size:
        raise RequestError(f"{path} has {found} bytes where its manifest says {size}: remove its folder and prepare again")


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
