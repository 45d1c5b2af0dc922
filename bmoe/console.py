"""What people see: one rich console, a dashboard of a training run on a terminal, plain lines elsewhere.

The only module that prints. NO_COLOR is honoured by rich. Results go to standard output, notes and progress to standard
error, so that a pipe gets results only.
"""

import math
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text


def _console(stderr: bool) -> Console:
    """A console; where there is no terminal whose width counts, lines may be 120 characters long."""
    console = Console(stderr=stderr, highlight=False, soft_wrap=True)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, soft_wrap=True, width=120)


out, err = _console(stderr=False), _console(stderr=True)

BARS = " ▁▂▃▄▅▆▇█"


def show(renderable: RenderableType) -> None:
    """Print a result."""
    out.print(renderable)


def note(text: str) -> None:
    """Tell something on the way."""
    err.print(Text(text, style="dim"))


def error(text: str) -> None:
    """Say what went wrong."""
    err.print(Text(f"error: {text}", style="bold red"))


def duration(seconds: float) -> str:
    """Seconds as people read them."""
    if not math.isfinite(seconds):
        return "?"
    hours, rest = divmod(int(seconds), 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{left:02d}s" if minutes else f"{seconds:.1f}s"


class TrainingView:
    """Observer of a run: a live dashboard on a terminal, one plain line a record elsewhere, nothing where it is not `shown`."""

    def __init__(self, name: str, steps: int, done: int, shown: bool = True):
        self.shown = shown
        self.name, self.steps, self.first, self.began = name, steps, done, time.monotonic()
        self.losses: list[float] = []
        self.validation: dict = {}
        self.notes: list[str] = []
        self.live = Live(console=err, refresh_per_second=4, transient=False) if shown and err.is_terminal else None

    def __enter__(self) -> "TrainingView":
        if self.live:
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def record(self, record: dict) -> None:
        self.losses.append(record["loss"])
        if any(key.startswith("valid_") for key in record):
            self.validation = {k: v for k, v in record.items() if k.startswith("valid_")} | {"step": record["step"]}
        if self.live:
            self.live.update(self._dashboard(record))
        elif self.shown:
            err.print(self._line(record))

    def note(self, text: str) -> None:
        self.notes.append(text)
        if self.shown and not self.live:
            note(text)

    def _eta(self, record: dict) -> str:
        steps = record["step"] - self.first
        return duration((time.monotonic() - self.began) / max(steps, 1) * (self.steps - record["step"]))

    def _line(self, record: dict) -> str:
        parts = [
            f"step {record['step']}/{self.steps}",
            f"loss {record['loss']:.4f}",
            f"lr {record['lr']:.2e}",
            f"norm {record['grad_norm']:.2f}",
            f"{record['residues_per_s']:,.0f} residues/s",
            f"eta {self._eta(record)}",
        ]
        loads = [x for x in record["load_max_over_mean"] if x is not None]
        if loads:
            parts.append(f"load max/mean {max(loads):.2f}")
        parts += [f"{k} {v:.4f}" for k, v in record.items() if k.startswith("valid_") and isinstance(v, float)]
        return "  ".join(parts)

    def _dashboard(self, record: dict) -> Group:
        table = Table.grid(padding=(0, 2))
        rows = [
            ("step", f"{record['step']:,} of {self.steps:,}   eta {self._eta(record)}"),
            ("loss", f"{record['loss']:.4f}   {sparkline(self.losses)}"),
            ("perplexity", f"{math.exp(min(record['loss'], 50)):.3f} on training targets"),
            ("speed", f"{record['residues_per_s']:,.0f} residues/s   {record['step_s'] * 1000:,.0f} ms a step"),
            ("gradient norm", f"{record['grad_norm']:.3f}   lr {record['lr']:.2e}"),
            ("memory", f"{record['peak_memory_gib']:.2f} GiB peak" + (f"   MFU {record['mfu']:.1%}" if record["mfu"] is not None else "")),
        ]
        loads = [x for x in record["load_max_over_mean"] if x is not None]
        if loads:
            rows.append(("expert load", "max/mean by layer " + " ".join(f"{x:.2f}" for x in loads)))
        if record["skipped_steps"]:
            rows.append(("skipped", f"{record['skipped_steps']} non-finite steps"))
        for key, value in self.validation.items():
            if isinstance(value, float):
                rows.append((key, f"{value:.4f}   at step {self.validation['step']:,}"))
        for name, text in rows:
            table.add_row(Text(name, style="dim"), text)
        return Group(Text(self.name, style="bold"), table, *(Text(n, style="dim") for n in self.notes[-3:]))


def sparkline(values: list[float], width: int = 40) -> str:
    """The last `width` values as bars."""
    values = [v for v in values[-width:] if math.isfinite(v)]
    if not values:
        return ""
    low, high = min(values), max(values)
    return "".join(BARS[1 + int((v - low) / (high - low or 1.0) * (len(BARS) - 2))] for v in values)


class PreparationView:
    """A progress bar over the input with MB/s and time left on a terminal; a line every half minute elsewhere."""

    def __init__(self):
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self.task = self.bar.add_task("reading", total=None)
        self.told = time.monotonic()

    def __enter__(self) -> "PreparationView":
        self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.stop()

    def update(self, state) -> None:
        """Take a `bmoe.data.prepare.Progress`."""
        self.bar.update(self.task, description=state.phase, completed=state.done, total=state.total or None)
        if not err.is_terminal and time.monotonic() - self.told > 30:
            self.told = time.monotonic()
            speed = state.text / max(state.seconds, 1e-9) / 1e6
            note(f"{state.phase}: {state.records:,} records, {state.text / 1e6:,.0f} MB read, {speed:,.0f} MB/s")


def settings_table(title: str, rows: list[tuple[str, str]]) -> Table:
    """A two-column table of names and values."""
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(Text(name, style="dim"), value)
    return table
