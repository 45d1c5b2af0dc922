"""The summary of a preparation on a terminal: records, splits, lengths, composition, as rich renderables."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bmoe.reports.composition import beside_swissprot
from bmoe.reports.prepare import REASONS, counted, empty_splits, found, unit

WIDTH = 40  # columns of the longest bar
EIGHTHS = " ▏▎▍▌▋▊▉█"


def summary(results: dict) -> RenderableType:
    """The whole summary of the results of `prepare` or `merge`."""
    parts = [_records(results), *(Text(f"note: {note}", style="yellow") for note in empty_splits(results))]
    if results["residues"]:
        parts += [Text(), _lengths(results), Text(), _composition(results)]
    return Group(*parts)


def _records(results: dict) -> Table:
    title = "prepared"
    if results.get("dry_run"):
        share = results["share_read"]
        title = "dry run: " + (f"read {100 * share:.3g} % of the input" if share and share < 1 else "read all of the input")
        title = "dry run: read the beginning of standard input" if share is None else title
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("read", counted(results["records_read"], "record"))
    table.add_row("kept", counted(results["records_kept"], "record"))
    for reason, number in results["records_dropped"].items():
        table.add_row("dropped", f"{number:,}  {REASONS.get(reason, reason)}")
    for what, number in results["counts"].items():
        if number:
            table.add_row("found", f"{number:,}  {found(what, number)}")
    noun = unit(results)
    for name, split in results["splits"].items():
        if split["sequences"] or name == "train":
            table.add_row(name, f"{counted(split['sequences'], 'sequence')}, {counted(split['residues'], noun)}")
    table.add_row("in all", counted(results["residues"], noun))
    if results.get("seconds") is not None:
        table.add_row("speed", f"{duration(results['seconds'])}, {size(results['mb_per_s'] * 1e6)}/s of text")
    if results.get("dry_run"):
        for line in _predicted(results.get("predicted"), noun):
            table.add_row("predicted", line)
    table.add_row("folder", results["directory"] + (" (nothing was written)" if results.get("dry_run") else ""))
    return table


def _predicted(numbers: dict | None, noun: str) -> list[str]:
    """What the whole input would take."""
    if numbers is None:
        return ["nothing: the size of standard input is not known"]
    return [
        f"about {counted(round(numbers['records_kept']), 'record')} kept of {round(numbers['records_read']):,}",
        f"about {counted(round(numbers['residues']), noun)}, {size(numbers['bytes'])} on disk, in {duration(numbers['seconds'])}",
    ]


def size(number: float) -> str:
    """Bytes in the largest unit of which there are some."""
    for name, value in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if number >= value:
            return f"{number / value:.3g} {name}"
    return f"{number:.0f} bytes"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def bar(share: float) -> str:
    """A bar of share x WIDTH columns, in eighths."""
    whole, rest = divmod(round(share * WIDTH * 8), 8)
    return "█" * whole + (EIGHTHS[rest] if rest else "")


def _lengths(results: dict) -> RenderableType:
    found, mean = results["lengths"]["quantiles"], results["lengths"]["mean"]
    words = f"shortest {found['0']:,}, median {found['50']:,}, 95 % up to {found['95']:,}, longest {found['100']:,}, mean {mean:,}"
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(justify="right", style="dim")
    table.add_column()
    bins = results["lengths"]["histogram"]
    most = max(number for _, number in bins)
    for start, number in bins:
        table.add_row(f"from {start:,}", f"{bar(number / most)} {number:,}")
    return Group(Text(f"lengths: {words}", style="italic"), table)


def _composition(results: dict) -> Table:
    protein = results["alphabet"] == "protein"
    table = Table(title="composition, percent", title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("letter", style="dim")
    table.add_column("here", justify="right")
    if protein:
        table.add_column("Swiss-Prot", justify="right")
    table.add_column()
    rows = (
        beside_swissprot(results["composition"]) if protein else [(k, 100 * v, None) for k, v in list(results["composition"].items())[:16]]
    )
    most = max(here for _, here, _ in rows)
    for letter, here, other in rows:
        cells = [letter, f"{here:.2f}"] + ([f"{other:.2f}" if other is not None else ""] if protein else [])
        table.add_row(*cells, bar(here / most / 2))
    return table
