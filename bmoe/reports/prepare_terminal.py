"""The summary of a preparation on a terminal: records, splits, lengths, composition, as rich renderables."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from bmoe.reports.composition import beside_swissprot
from bmoe.reports.prepare import COUNTS, REASONS, empty_splits

WIDTH = 40  # columns of the longest bar
EIGHTHS = " ▏▎▍▌▋▊▉█"


def summary(results: dict) -> RenderableType:
    """The whole summary of the results of `prepare` or `merge`."""
    parts = [_records(results), *(Text(f"note: {note}", style="yellow") for note in empty_splits(results))]
    if results["residues"]:
        parts += [Text(), _lengths(results), Text(), _composition(results)]
    return Group(*parts)


def _records(results: dict) -> Table:
    title = "read the beginning of the input" if results.get("dry_run") else "prepared"
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    table.add_row("records read", f"{results['records_read']:,}")
    table.add_row("records kept", f"{results['records_kept']:,}")
    for reason, number in results["records_dropped"].items():
        table.add_row("dropped", f"{number:,}  {REASONS.get(reason, reason)}")
    for what, number in results["counts"].items():
        if number:
            table.add_row("found", f"{number:,}  {COUNTS.get(what, what)}")
    table.add_row("residues", f"{results['residues']:,}")
    for name, split in results["splits"].items():
        if split["sequences"] or name == "train":
            table.add_row(name, f"{split['sequences']:,} sequences, {split['residues']:,} residues")
    if "seconds" in results:
        table.add_row("speed", f"{results['seconds']:.1f} s, {results['mb_per_s']:,.0f} MB/s of text")
    for what, number in (results.get("predicted") or {}).items():
        table.add_row("predicted", f"{number:,.0f}  {what.replace('_', ' ')}")
    table.add_row("folder", results["directory"])
    return table


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
    most = max(found for _, found, _ in rows)
    for letter, found, other in rows:
        cells = [letter, f"{found:.2f}"] + ([f"{other:.2f}" if other is not None else ""] if protein else [])
        table.add_row(*cells, bar(found / most / 2))
    return table
