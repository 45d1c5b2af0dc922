"""The command line: parse, call one job, render. No logic.

Exit codes: 0 done; 1 failed while running; 2 wrong request; 75 checkpointed after SIGTERM or SIGUSR1; 130 the same after
Ctrl-C. Errors are one sentence; `--debug`, before or after the command, shows the traceback.
"""

import errno
import re
import signal
import sys
from typing import Annotated

import typer

from bmoe import __version__, console
from bmoe.errors import RequestError, RunError
from bmoe.recipe import RecipeError

app = typer.Typer(name="bmoe", no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False,
                  help="Pretrain Mixture-of-Experts models of biological sequences, from FASTA to an evaluated model.")

UsageError = typer.BadParameter.__base__  # typer may carry its own copy of click, whose classes only typer names

JSON = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Also write the results as JSON.")]
SET = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the recipe.")]
DEVICE = Annotated[str | None, typer.Option("--device", metavar="cpu|cuda", help="Where to run; default: the GPU if there is one.")]


@app.callback()
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.", is_eager=True)] = False) -> None:
    if version:
        console.show(__version__)
        raise typer.Exit


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")],
    set_: SET = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs of this machine to use.")] = None,
    device: DEVICE = None,
    out: Annotated[str | None, typer.Option("--out", metavar="RUN", help="The run's folder; default runs/NAME.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint, or start.")] = False,
    stop_at: Annotated[int | None, typer.Option("--stop-at", min=1, metavar="STEP", help="Save and exit after this step.")] = None,
    max_time: Annotated[str | None, typer.Option("--max-time", metavar="3h50m", help="Save and exit after this time.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would run, and its size, without running it.")] = False,
    json: JSON = None,
) -> None:
    """Train a recipe: data if needed, training, report."""
    from bmoe.jobs import common
    from bmoe.jobs import train as job

    loaded, _ = common.load_recipe(recipe, set_ or [])
    if dry_run:
        results, view = job.dry_run(loaded)
        console.show(view)
        common.write_json(json, "train", loaded, results)
        return
    chosen, line = common.choose_device(device, gpus)
    console.note(line)
    limits = job.Limits(stop_at=stop_at, max_seconds=seconds(max_time) if max_time else None)
    outcome, folder, metrics = job.train(loaded, out=out, resume=resume, device=chosen, limits=limits)
    common.write_json(json, "train", loaded, {"run": str(folder), **metrics})
    console.show(job.training_summary(outcome, folder, metrics))
    if outcome.signal:
        raise typer.Exit(130 if outcome.signal == signal.SIGINT else 75)


def seconds(text: str) -> float:
    """Seconds of `90`, `45s`, `30m`, `3h50m` or `1d12h`. Raises RequestError."""
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not match or not any(match.groups()):
        raise RequestError(f"--max-time {text}: a time is written like 3h50m, 45m or 90s")
    days, hours, minutes, rest = (float(x or 0) for x in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Never returns: exits with the command's code."""
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    try:
        code = app(arguments, prog_name="bmoe", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except typer.Exit as leave:
        return leave.exit_code
    except (Exception, KeyboardInterrupt) as problem:  # the one place that turns anything into a sentence and a code
        if debug:
            raise
        return explain(problem)


def explain(problem: BaseException) -> int:
    """Say a known failure in one sentence and return its exit code."""
    if isinstance(problem, KeyboardInterrupt | typer.Abort):
        console.error("interrupted before the step was whole; --resume goes on from the last checkpoint")
        return 130
    if isinstance(problem, UsageError):
        if not problem.format_message():
            return 2  # no command at all: the help was shown
        command = problem.ctx.command_path if problem.ctx else "bmoe"
        console.error(f"{problem.format_message().rstrip('.')}; see {command} --help")
        return 2
    if isinstance(problem, RecipeError):
        for fault in problem.faults:
            console.error(fault)
        return 2
    if isinstance(problem, OSError):
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        advice = "free some space and use --resume" if full else "check the path and its permissions"
        console.error(f"{problem.filename or 'a file'}: {problem.strerror or problem}; {advice}")
        return 1 if full else 2
    if isinstance(problem, RequestError | RunError):
        console.error(str(problem))
        return 2 if isinstance(problem, RequestError) else 1
    console.error(f"this should not happen: {type(problem).__name__}: {problem}; run it again with --debug and report the traceback")
    return 1
