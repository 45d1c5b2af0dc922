"""`bmoe prepare`: inputs to shards, parts to a whole, and the check of what is there."""

import glob
import re
from pathlib import Path

from bmoe import console
from bmoe.data import inputs
from bmoe.data import prepare as rooms
from bmoe.data.options import PrepareOptions
from bmoe.errors import RequestError
from bmoe.jobs.common import write_json
from bmoe.reports import prepare as page
from bmoe.reports.prepare_terminal import summary

__all__ = ["PrepareOptions", "default_out", "merge", "prepare", "show", "verify", "write_json"]

ENDINGS = {ending for endings in inputs.SUFFIXES.values() for ending in endings} | set(inputs.PACKED[1:])


def default_out(names: list[str], out: str | None) -> Path:
    """--out, or data/<stem> of a single file or folder. Raises RequestError where none can be made up."""
    if out is not None:
        return Path(out)
    path = Path(names[0])
    if len(names) != 1 or not (path.is_file() or path.is_dir() or not path.exists()) or names[0] == "-" or glob.has_magic(names[0]):
        raise RequestError("--out DIR is needed for several inputs, globs, pipes and standard input")
    name = path.name if path.name not in ("", "..") else path.resolve().name
    while (stem := Path(name)).suffix.lower() in ENDINGS:
        name = stem.stem
    return Path("data") / name


def prepare(
    names: list[str], out: str | None, options: PrepareOptions, *, workers: int, resume: bool, part: str | None, dry_run: bool
) -> dict:
    """Prepare inputs with a progress bar. Raises RequestError, RunError."""
    if not names:
        raise RequestError("bmoe prepare needs an input: a FASTA file, a folder, or - for standard input")
    _given("--out", out)
    if part is not None and not out:
        raise RequestError("--part i/n needs --out DIR: each part is prepared into a folder of its own")
    with console.PreparationView() as view:
        results = rooms.prepare(
            names, default_out(names, out), options, workers=workers, resume=resume, part=_part(part), dry_run=dry_run, progress=view.update
        )
    whole = results.get("already_prepared") and page.path(results["directory"]).exists()
    if not results.get("dry_run") and not whole:  # a kill right after the manifest leaves no page
        page.write(results["directory"], results)
    return results


def _part(text: str | None) -> tuple[int, int] | None:
    """(i, n) of `i/n`. Raises RequestError."""
    if text is None:
        return None
    number, _, total = text.partition("/")
    if not re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
        raise RequestError(f"--part {text} should be i/n, for example 3/16")
    return int(number), int(total)


def _given(flag: str, value: str | None) -> None:
    """RequestError for a flag whose value is empty."""
    if value is not None and not value.strip():
        raise RequestError(f"{flag} is empty: name a folder (is a variable of the shell not set?)")


def merge(names: list[str], out: str | None) -> dict:
    """Join parts of a job array (folders, globs) into `out`. Raises RequestError, RunError."""
    _given("--out", out)
    if not names or out is None:
        raise RequestError("--merge needs the folders of the parts and --out DIR")
    names = [found for name in names for found in (sorted(glob.glob(name)) or [name])]
    from bmoe.data.merge import merge as join  # imported here, as is what `prepare` needs: it takes a moment

    results = join(names, out)
    page.write(results["directory"], results)
    return results


def verify(directory: str) -> dict:
    """Check every hash and offset of a prepared folder. Raises RequestError naming the first file that is wrong."""
    _given("--verify", directory)
    from bmoe.data.verify import verify as check  # imported here: it takes a moment

    return check(directory)


def show(results: dict) -> None:
    """The results of any of the three, for people."""
    if results.get("already_prepared"):
        console.note(f"{results['directory']} is already prepared from these inputs with these options")
    if "records_read" not in results:
        plain = {key: value for key, value in results.items() if not isinstance(value, dict)}
        rows = [(key, f"{value:,}" if isinstance(value, int) else str(value)) for key, value in plain.items()]
        console.show(console.settings_table("checked" if "files" in results else "merged", rows))
        return
    console.show(summary(results))
    for doubt in (wrong_alphabet(results), wrong_clusters(results)):
        if doubt:
            console.note(doubt)


def wrong_alphabet(results: dict) -> str | None:
    """A sentence if the letters look as if --alphabet were the wrong one."""
    shares = results.get("composition", {})
    if results.get("alphabet") == "protein" and shares.get("<unk>", 0.0) > 0.1:
        return f"{shares['<unk>']:.0%} of the letters are no amino acids: are all inputs protein sequences?"
    bases = sum(shares.get(letter, 0.0) for letter in "ACGTUN")
    if results.get("alphabet") == "protein" and bases > 0.95:
        return f"these sequences look like DNA or RNA: {bases:.0%} of their letters are A, C, G, T, U or N; if so, use --alphabet dna"
    if str(results.get("alphabet")).startswith("dna") and sum(shares.get(letter, 0.0) for letter in ("<unk>", "?")) > 0.1:
        return "these sequences do not look like DNA: more than a tenth of their letters are no bases; is --alphabet right?"
    return None


def wrong_clusters(results: dict) -> str | None:
    """A sentence if the cluster table seems to be of other sequences."""
    alone = results["counts"].get("unclustered_records", 0)
    if 2 * alone <= results["records_read"]:
        return None
    listed = f"{results['records_read'] - alone:,} of {results['records_read']:,} records"
    return f"the cluster table lists {listed}: are its names their identifiers?"
