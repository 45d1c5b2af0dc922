"""`bmoe prepare`: any FASTA to shards, exact, resumable, the same bytes for any number of workers.

    inputs -> tasks -> workers (parse, clean, cut, hash) -> ledger (duplicates, places) -> workers (write) -> manifest

What works on bytes is compiled (`compiled.py`) and takes half a second to load, so it is imported when it is needed. Memory does not
grow with the input but for the set of hashes that finds duplicates (at most 16 bytes a sequence).
"""

import errno
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bmoe.data import inputs
from bmoe.data.options import PrepareOptions
from bmoe.data.shards import MANIFEST, SCRATCH, Shards, read_manifest
from bmoe.errors import RequestError, RunError

if TYPE_CHECKING:
    from bmoe.data.run import Progress, Run

__all__ = ["PrepareOptions", "prepare"]

DRY_RUN = 100_000_000  # bytes of input read by a dry run


def prepare(
    names: list[str],
    out: str | Path,
    options: PrepareOptions | None = None,
    *,
    workers: int = 1,
    resume: bool = False,
    part: tuple[int, int] | None = None,
    dry_run: bool = False,
    progress: "Callable[[Progress], None] | None" = None,
) -> dict:
    """Prepare inputs into the folder `out`.

    Args:
        names: files, globs, directories, or `-`.
        workers: threads that parse.
        resume: go on where a killed preparation with the same inputs and options stopped (or start).
        part: (i, n): only part i of n, from 1, for the machines of a job array; join with `merge`.
        dry_run: read the first DRY_RUN bytes into a folder that is removed, and predict.
        progress: called about ten times a second.

    Returns the manifest and the results of the run: seconds, mb_per_s (both None if already_prepared), already_prepared, directory;
    for a dry run `predicted`.
    Raises RequestError for a wrong request or input, RunError where the disk does not take the output.
    """
    options = options or PrepareOptions()
    if workers < 1:
        raise RequestError("--workers is the number of threads that parse, 1 or more")
    if part is not None and not 1 <= part[0] <= part[1]:
        raise RequestError(f"--part {part[0]}/{part[1]} should be i/n with i from 1 to n")
    out = Path(out)
    if out.exists() and not out.is_dir():
        raise RequestError(f"--out {out} is a file: name a folder that is empty or not there yet")
    sources = inputs.find([str(name) for name in names], options.format)
    if dry_run:
        return _dry_run(sources, out, options, workers, progress)
    done = _already(sources, out, options, part)
    if done is not None:
        return done
    try:
        return _run(sources, out, options, workers, part, progress).run(resume)
    except OSError as error:
        raise _disk(error, out, sources) from error


def _run(*request) -> "Run":
    from bmoe.data.run import Run  # imported here: it takes a moment, and commands that find their data prepared do without

    return Run(*request)


def _disk(error: OSError, out: Path, sources: list[inputs.Source]) -> Exception:
    if error.filename in {source.name for source in sources}:
        return RequestError(f"the input {error.filename} cannot be read: {error.strerror}; leave it out of the inputs, or start again")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(f"the disk of {out} is full: free some space and go on with --resume")
    place = error.filename or out
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENOENT):
        return RequestError(f"{place} cannot be written: {error.strerror}; name another --out")
    return RunError(f"{place}: {error.strerror or error}")


def _already(sources, out: Path, options: PrepareOptions, part) -> dict | None:
    """The result where the same was prepared before; RequestError where something else was."""
    if not (out / MANIFEST).exists():
        return None
    manifest = read_manifest(out)
    wanted = options.as_dict()
    differing = [name for name, value in wanted.items() if manifest["options"].get(name) != value]
    if manifest.get("part") != (list(part) if part else None):
        differing.append("part")
    if differing:
        raise RequestError(f"{out} was prepared with other options ({', '.join(differing)}): name another --out, or remove it")
    before, now = ([(Path(name).name, size) for name, size in pairs] for pairs in (
        [(s["name"], s["size"]) for s in manifest["inputs"]], inputs.described(sources),
    ))  # a file is the same under another path  # fmt: skip
    if before != now or any(s.kind == "stdin" for s in sources):
        raise RequestError(f"{out} was prepared from other inputs: name another --out, or remove it")
    if changed := _changed(sources, manifest, (out / MANIFEST).stat().st_mtime):
        raise RequestError(f"{changed} is not what {out} was prepared from, though as large: name another --out, or remove it")
    for split in manifest["splits"]:
        Shards(out, split)  # raises where a file is missing or has another size
    shutil.rmtree(out / SCRATCH, ignore_errors=True)  # a kill right after the manifest leaves it
    return manifest | {"directory": str(out), "already_prepared": True, "seconds": None, "mb_per_s": None}


def _changed(sources: list[inputs.Source], manifest: dict, since: float) -> str | None:
    """Name of the first input that was written after `since` (seconds of the epoch) and has another SHA-256 than in the manifest."""
    known = {found["name"]: found["sha256"] for found in manifest["sources"] if "range" not in found}
    for source, before in zip(sources, manifest["inputs"], strict=True):
        if before["name"] in known and os.stat(source.name).st_mtime > since:
            with open(source.name, "rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != known[before["name"]]:
                    return source.shown
    return None


def _dry_run(sources, out: Path, options: PrepareOptions, workers: int, progress) -> dict:
    """Prepare the beginning of the input into a folder beside `out`, and scale up."""
    place = out.absolute()
    while not place.is_dir():
        place = place.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".bmoe-dry-run-", dir=place) as folder:
            run = _run(sources, Path(folder) / "out", options, workers, None, progress, DRY_RUN)
            result = run.run(False)
            size = sum(path.stat().st_size for path in (Path(folder) / "out").iterdir())
            done, total, start = run.done, run.plan.total, run.first - run.begun
    except OSError as error:
        raise _disk(error, place, sources) from error
    known = done > 0 and all(s.kind != "stdin" for s in sources)
    scale = max(total / done, 1.0) if known else None
    predicted = None
    if scale is not None:
        predicted = {name: result[name] * scale for name in ("records_read", "records_kept", "residues")}
        predicted |= {"seconds": start + (result["seconds"] - start) * scale, "bytes": size * scale}
    return result | {"directory": str(out), "dry_run": True, "share_read": 1 / scale if scale else None, "predicted": predicted}
