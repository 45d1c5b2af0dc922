"""The command line: parse, call one job, render. No logic.

Exit codes: 0 done; 1 failed while running; 2 wrong request; 75 checkpointed after SIGTERM or SIGUSR1; 130 the same after
Ctrl-C. Errors are one sentence; `--debug`, before or after the command, shows the traceback.
"""

import errno
import re
import signal
import sys
from functools import partial
from typing import Annotated

import typer

from bmoe import __version__, console
from bmoe.errors import RequestError, RunError
from bmoe.recipe import RecipeError


class Commands(typer.core.TyperGroup):
    """The commands; typer would end silently on Ctrl-C, and `explain` has a sentence for it."""

    def invoke(self, context: typer.Context) -> object:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            raise typer.Abort from None


app = typer.Typer(
    name="bmoe",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Pretrain Mixture-of-Experts models of biological sequences, from FASTA to an evaluated model.",
)

UsageError = typer.BadParameter.__base__  # typer may carry its own copy of click, whose classes only typer names

JSON = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Also write the results as JSON.")]
SET = Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a value of the recipe.")]
PRECISIONS = "fp32, bf16, fp8_row, fp8_current, fp8_block, fp8_delayed, mxfp8 or nvfp4; default: the recipe's."
METHOD = "Score by masked-marginal, wildtype-marginal, pseudo-log-likelihood or (decoders) log-likelihood; repeat for more."
DEVICE = Annotated[str | None, typer.Option("--device", metavar="cpu|cuda", help="Where to run; default: the GPU if there is one.")]


# the options of one panel of a command's help
CLEANING, SPLITS, DNA, LARGE, STOP, DRY, MUTATIONS, STRUCTURE, EMBEDDINGS, GENERATION, BASELINE, RANKS = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in (
        "What is kept", "Splits", "DNA", "Large inputs", "Stopping and going on", "Dry run", "Mutations", "Structure", "Embeddings",
        "Generation", "Beside Hugging Face", "Several ranks",
    )
)  # fmt: skip


def print_version(wanted: bool) -> None:
    if wanted:
        console.show(__version__)
        raise typer.Exit


VERSION = typer.Option("--version", help="Print the version.", is_eager=True, callback=print_version)
DEBUG = typer.Option("--debug", help="Show the traceback of an error; also after the command.")


@app.callback()
def root(version: Annotated[bool, VERSION] = False, debug: Annotated[bool, DEBUG] = False) -> None:
    """The options of bmoe itself; every command has its own."""


@app.command()
def prepare(
    context: typer.Context,
    inputs: Annotated[list[str] | None, typer.Argument(metavar="INPUT", help="Files, globs, directories, or - for stdin.")] = None,
    out: Annotated[str | None, typer.Option("--out", metavar="DIR", help="Where the shards go; default data/<stem> of one input.")] = None,
    alphabet: Annotated[str, typer.Option(metavar="protein|dna|dna-bpe:N", help="Letters, or N byte pairs.")] = "protein",
    format_: Annotated[str, typer.Option("--format", metavar="fasta|fastq|genbank|embl|swissprot")] = "fasta",
    valid_fraction: Annotated[float, SPLITS(help="Share of sequences or clusters held out for validation.")] = 0.005,
    test_fraction: Annotated[float, SPLITS(help="Share held out for a final test.")] = 0.0,
    clusters: Annotated[str | None, SPLITS(metavar="TSV", help="Member and representative; or uniref: from the headers.")] = None,
    dedup: Annotated[bool, CLEANING(help="Keep the first of equal sequences.")] = True,
    min_length: Annotated[int, CLEANING(help="Shortest sequence kept, in residues.")] = 2,
    max_length: Annotated[int | None, CLEANING(help="Longest sequence kept, in residues.")] = None,
    on_invalid: Annotated[str, CLEANING(metavar="unknown|drop|error", help="What a letter outside the alphabet does.")] = "unknown",
    internal_stop: Annotated[str, CLEANING(metavar="unknown|drop|error", help="The same for a * inside a sequence.")] = "unknown",
    gaps: Annotated[str, CLEANING(metavar="remove|invalid", help="What - and . mean.")] = "remove",
    n_runs: Annotated[str, DNA(metavar="split|keep", help="Cut records at long runs of N.")] = "split",
    soft_mask: Annotated[bool, DNA(help="Remember which bases were lower case.")] = True,
    keep_headers: Annotated[bool, CLEANING(help="Store the header lines.")] = True,
    workers: Annotated[int, LARGE(min=1, help="Threads that parse; the output is the same for any number.")] = 1,
    seed: Annotated[int, SPLITS(help="Another seed is another split.")] = 0,
    resume: Annotated[bool, LARGE("--resume", help="Go on where a killed preparation stopped, or start.")] = False,
    part: Annotated[str | None, LARGE(metavar="i/n", help="Only part i of n, for a job array; join with --merge.")] = None,
    dry_run: Annotated[bool, LARGE("--dry-run", help="Read the first 100 MB and predict size and time.")] = False,
    merge: Annotated[bool, LARGE("--merge", help="INPUT are folders of parts: join them in --out.")] = False,
    verify: Annotated[str | None, typer.Option("--verify", metavar="DIR", help="Check every hash and offset of a folder.")] = None,
    json: JSON = None,
) -> None:
    """Turn FASTA (and other formats) into token shards."""
    from bmoe.jobs import common
    from bmoe.jobs import prepare as job

    names = inputs or []
    common.check_targets({"--json": json}, names)
    if verify is not None:
        refuse_others(context, "--verify", {"json", "verify"})
        results = job.verify(verify)
    elif merge:
        refuse_others(context, "--merge", {"json", "merge", "out", "inputs"})
        results = job.merge(names, out)
    else:
        options = job.PrepareOptions(
            alphabet=alphabet,
            format=format_,
            valid_fraction=valid_fraction,
            test_fraction=test_fraction,
            clusters=clusters,
            dedup=dedup,
            min_length=min_length,
            max_length=max_length,
            on_invalid=on_invalid,
            internal_stop=internal_stop,
            gaps=gaps,
            n_runs=n_runs,
            soft_mask=soft_mask,
            keep_headers=keep_headers,
            seed=seed,
        )
        results = job.prepare(names, out, options, workers=workers, resume=resume, part=part, dry_run=dry_run)
    job.show(results)
    job.write_json(json, "prepare", None, results)


@app.command()
def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a shipped one.")],
    set_: SET = None,
    gpus: Annotated[int | None, typer.Option("--gpus", min=1, help="GPUs of this machine to use.")] = None,
    device: DEVICE = None,
    out: Annotated[str | None, typer.Option("--out", metavar="RUN", help="The run's folder; default runs/NAME.")] = None,
    resume: Annotated[bool, STOP("--resume", help="Go on from the newest checkpoint, or start.")] = False,
    stop_at: Annotated[int | None, STOP("--stop-at", min=1, metavar="STEP", help="Save and exit after this step.")] = None,
    max_time: Annotated[str | None, STOP("--max-time", metavar="3h50m", help="Save and exit after this time.")] = None,
    procs: Annotated[int | None, typer.Option("--procs", min=1, help="With --device cpu: processes.")] = None,
    restarts: Annotated[int, STOP("--restarts", min=0, metavar="N", help="Start anew if a process dies.")] = 0,
    dry_run: Annotated[bool, DRY("--dry-run", help="Show what would run, and its size, without running it.")] = False,
    world: Annotated[int | None, DRY("--world", min=1, help="With --dry-run: ranks.")] = None,
    chip: Annotated[str | None, DRY("--chip", metavar="h100|h200|b200|gb200", help="With --dry-run: this chip only.")] = None,
    json: JSON = None,
) -> None:
    """Train a recipe: data if needed, training, report."""
    from bmoe.jobs import common, start
    from bmoe.jobs import dry_run as dry

    limits = start.Limits(stop_at=stop_at, max_seconds=seconds(max_time) if max_time else None)
    loaded, file = common.load_recipe(recipe, set_ or [])
    common.check_targets({"--json": json}, [str(file), loaded.data.fasta])
    if not dry_run and (world is not None or chip):
        raise RequestError("--world and --chip are for --dry-run; a run takes its ranks from --gpus, --procs or the launcher")
    if dry_run:
        refuse_others(context, "--dry-run", {"recipe", "set_", "gpus", "device", "procs", "dry_run", "world", "chip", "json"})
        if sum(n is not None for n in (world, gpus, procs)) > 1:
            raise RequestError("--world, --gpus and --procs each say how many ranks a dry run is of; give one of them")
        results, view = dry.dry_run(loaded, world or gpus or procs or 1, chip, common.choose_device(device, None)[0])
        console.show(view)
        common.write_json(json, "train", loaded, results)
        return
    code = start.start(loaded, start.Request(context.obj, gpus, device, procs, out, resume, json, restarts), limits)
    if code:
        raise typer.Exit(code)


@app.command("eval")
def evaluate(
    runs: Annotated[list[str], typer.Argument(metavar="RUN_OR_CHECKPOINT", help="Run folders or checkpoints.")],
    data: Annotated[str | None, typer.Option("--data", metavar="DIR", help="Other prepared data than the run's.")] = None,
    split: Annotated[str, typer.Option("--split", metavar="valid|test|train")] = "valid",
    by: Annotated[str | None, typer.Option("--by", metavar="FIELD", help="Perplexity by a header field, for example OS.")] = None,
    pseudo: Annotated[bool, typer.Option("--pseudo", help="Pseudo-perplexity: one mask at a time.")] = False,
    mutations: Annotated[str | None, MUTATIONS("--mutations", metavar="CSV", help="A deep mutational scan.")] = None,
    wildtype: Annotated[str | None, MUTATIONS("--wildtype", metavar="FASTA", help="The wild type of --mutations.")] = None,
    column: Annotated[str | None, MUTATIONS("--column", metavar="NAME", help="The column of --mutations that has the effects.")] = None,
    method: Annotated[list[str] | None, MUTATIONS("--method", metavar="NAME", help=METHOD)] = None,
    scores: Annotated[str | None, MUTATIONS("--scores", metavar="FILE.csv", help="Write every variant's scores.")] = None,
    structures: Annotated[str | None, STRUCTURE("--structures", metavar="DIR", help="PDB or mmCIF chains: contacts.")] = None,
    probe: Annotated[str | None, STRUCTURE("--probe", metavar="TSV", help="Secondary structure labels: linear probe.")] = None,
    routing: Annotated[bool, typer.Option("--routing", help="What the experts specialise in.")] = False,
    embed: Annotated[str | None, EMBEDDINGS("--embed", metavar="FASTA", help="Write embeddings of these sequences.")] = None,
    out: Annotated[str | None, EMBEDDINGS("--out", metavar="FILE.safetensors", help="Where the embeddings go.")] = None,
    mode: Annotated[str | None, EMBEDDINGS("--mode", metavar="residue|mean", help="A vector a residue (default), or their mean.")] = None,
    layer: Annotated[
        int | None, EMBEDDINGS("--layer", metavar="N", help="Of which layer: 0 the embedding table; default the last.")
    ] = None,
    generate: Annotated[int | None, GENERATION("--generate", min=1, metavar="N", help="Decoders: sample sequences.")] = None,
    prompt: Annotated[str, GENERATION("--prompt", metavar="SEQ", help="How the samples begin.")] = "",
    temperature: Annotated[float | None, GENERATION("--temperature", metavar="T", help="Below 1: likelier letters.")] = None,
    top_k: Annotated[int | None, GENERATION("--top-k", min=1, metavar="K", help="Draw from the K likeliest letters.")] = None,
    device: DEVICE = None,
    report: Annotated[str | None, typer.Option("--report", metavar="FILE.html", help="Write a report page.")] = None,
    json: JSON = None,
) -> None:
    """Evaluate trained models; several are compared."""
    from bmoe.jobs import common
    from bmoe.jobs import evaluate as job
    from bmoe.reports.evaluation import write_evaluation_report
    from bmoe.reports.terminal_evaluation import evaluation_tables

    targets = {"--json": json, "--report": report, "--scores": scores, "--out": out}
    common.check_targets(targets, [mutations, wildtype, probe, embed])
    chosen, line = common.choose_device(device, None)
    console.note(line)
    wanted = job.Wanted(
        by=by,
        pseudo=pseudo,
        mutations=mutations,
        wildtype=wildtype,
        column=column,
        methods=tuple(method or ()),
        scores=scores,
        structures=structures,
        probe=probe,
        routing=routing,
        embed=embed,
        out=out,
        mode=mode,
        layer=layer,
        generate=generate,
        prompt=prompt,
        temperature=temperature,
        top_k=top_k,
    )
    results, recipe = job.evaluate(runs, wanted, data=data, split=split, device=chosen)
    console.show(evaluation_tables(results))
    common.write_json(json, "eval", recipe, results[0] if len(results) == 1 else {"runs": results})
    if report:
        console.note(f"report written to {write_evaluation_report(results, report)}")


@app.command()
def profile(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="A recipe file or a shipped one's name; default: esm2_moe.")
    ] = None,
    precision: Annotated[str | None, typer.Option("--precision", metavar="KIND", help=PRECISIONS)] = None,
    experts: Annotated[str | None, typer.Option("--experts", metavar="NAME|all", help="An implementation, or compare all.")] = None,
    baseline: Annotated[str | None, BASELINE("--baseline", metavar="hf|NAME,...", help="Beside Hugging Face (extra hf).")] = None,
    forms: Annotated[str | None, BASELINE(metavar="flattened,padded,bucketed", help="Forms of its batches; default: all.")] = None,
    routing: Annotated[str | None, BASELINE(metavar="natural,balanced", help="Routing of that comparison; default: natural.")] = None,
    set_: SET = None,
    gpus: Annotated[int | None, RANKS("--gpus", min=1, help="Ranks of this machine: speed and communication.")] = None,
    device: DEVICE = None,
    procs: Annotated[int | None, RANKS("--procs", min=1, help="With --device cpu: ranks.")] = None,
    layouts: Annotated[bool, RANKS("--layouts", help="Of ranks: one checkpoint in every layout must give one loss.")] = False,
    warmup: Annotated[int | None, RANKS("--warmup", min=1, help="Of ranks: steps before the measured ones.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", min=1, help="Measured steps; default 10, of hf-loop 3.")] = None,
    trace: Annotated[str | None, typer.Option("--trace", metavar="FILE", help="Write a Chrome trace of one step.")] = None,
    report: Annotated[str | None, typer.Option("--report", metavar="FILE.html", help="Write a report page.")] = None,
    compare: Annotated[
        tuple[str, str] | None, typer.Option("--compare", metavar="A.json B.json", help="Two results of --json side by side.")
    ] = None,
    json: JSON = None,
) -> None:
    """Measure where the time goes; predict what this machine cannot run."""
    from bmoe.jobs import common
    from bmoe.jobs import profile as job
    from bmoe.jobs import profile_ranks as ranks
    from bmoe.reports.profile import write_profile_report

    common.check_targets({"--json": json, "--trace": trace, "--report": report}, [recipe, *(compare or ())])
    if compare:
        refuse_others(context, "--compare", {"compare", "json"})
        results = job.compare(*compare)
        console.show(job.comparison(results))
        common.write_json(json, "profile", None, results)
        return
    loaded, _ = common.load_recipe(recipe or job.FLAGSHIP, set_ or [])
    if ranks.wanted(gpus, procs):
        request = ranks.Request(
            context.obj, gpus, device, procs, layouts, precision, experts, baseline, forms, routing, steps, warmup, trace, json, report
        )
        if code := ranks.start(loaded, request):
            raise typer.Exit(code)
        return
    if layouts or warmup:
        raise RequestError(f"--{'layouts' if layouts else 'warmup'} is of several ranks; add --gpus N, or --device cpu --procs N")
    chosen, line = common.choose_device(device, None)
    console.note(line)
    results = job.profile(
        loaded, device=chosen, precision=precision, experts=experts, baseline=baseline, forms=forms, routing=routing,
        steps=steps, trace=trace,
    )  # fmt: skip
    console.show(job.report(results))
    common.write_json(json, "profile", loaded, results)
    if report:
        console.note(f"report written to {write_profile_report(results, report)}")


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A run folder or one of its checkpoints.")],
    to: Annotated[str, typer.Option("--to", metavar="DIR", help="A new folder.")],
    format_: Annotated[str, typer.Option("--format", metavar="hf")] = "hf",
    verify: Annotated[bool, typer.Option("--verify", help="Load the folder again and compare logits (extra hf).")] = False,
    json: JSON = None,
) -> None:
    """Write a model for other tools: Hugging Face folders with safetensors."""
    from bmoe.jobs import common
    from bmoe.jobs import export as job

    if format_ != "hf":
        raise RequestError(f"--format {format_}: the only format is hf")
    common.check_target("--json", json)
    results = job.export(checkpoint, to, verify)
    console.show(console.settings_table("exported", job.rows(results)))
    common.write_json(json, "export", None, results)


def refuse_others(context: typer.Context, flag: str, allowed: set[str]) -> None:
    """Raise RequestError if options were given that a command does not read together with `flag`."""
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name).name == "COMMANDLINE"
        if given and parameter.name not in allowed:
            raise RequestError(f"{flag} takes no {max(parameter.opts, key=len)}; leave it out")


def seconds(text: str) -> float:
    """Seconds of `90`, `45s`, `30m`, `3h50m` or `1d12h`. Raises RequestError."""
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s?)?", text.strip())
    if not match or not any(match.groups()):
        raise RequestError(f"--max-time {text}: a time is written like 3h50m, 45m or 90s")
    days, hours, minutes, rest = (float(x or 0) for x in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Never returns: exits with the command's code."""
    code = run(sys.argv[1:] if arguments is None else arguments)
    if code in (0, 75):  # all is saved, and a signal while the interpreter winds up must not say otherwise
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    debug = "--debug" in arguments  # listed among the root's options, and taken out here because it may stand anywhere
    arguments = [a for a in arguments if a != "--debug"]
    try:
        code = app(arguments, prog_name="bmoe", standalone_mode=False, obj=[*arguments, *["--debug"] * debug])
        return code if isinstance(code, int) else 0
    except typer.Exit as leave:
        return leave.exit_code
    except (Exception, KeyboardInterrupt) as problem:  # the one place that turns anything into a sentence and a code
        if debug:
            raise
        named = next((a for a in arguments if a in typer.main.get_command(app).commands), None)
        return explain(problem, quiet=started_by_launcher(), command=f"bmoe {named}" if named else "bmoe")


def started_by_launcher() -> bool:
    """Whether this process is a rank of `bmoe train`: then the launcher says what went wrong, once."""
    from bmoe.parallel.launch import is_launched

    return is_launched()


def explain(problem: BaseException, quiet: bool = False, command: str = "bmoe") -> int:
    """Say a known failure of `command` in one sentence (unless `quiet`) and return its exit code."""
    say = (lambda _: None) if quiet else console.error
    if isinstance(problem, KeyboardInterrupt | typer.Abort):
        say("interrupted; train and prepare go on from what they have saved with --resume")
        return 130
    if type(problem).__name__ == "OutOfMemoryError":  # torch's; importing torch to name it would slow every error down
        say("the GPU is out of memory; lower data.tokens_per_batch, or set backend.recompute=experts (see --dry-run)")
        return 1
    # The second is what torch's allocator of the CPU raises, a RuntimeError.
    if isinstance(problem, MemoryError) or "DefaultCPUAllocator" in str(problem) or getattr(problem, "errno", None) == errno.ENOMEM:
        smaller = "give fewer --workers, or divide the input with --part"
        if command != "bmoe prepare":
            smaller = "lower data.tokens_per_batch, or make the model smaller (model.width, model.layers, its experts)"
        say(f"this machine is out of memory; {smaller}")
        return 1
    if isinstance(problem, UsageError):
        if not problem.format_message():
            return 2  # no command at all: the help was shown
        # The parser raises some before it knows the command.
        say(f"{problem.format_message().rstrip('.')}; see {problem.ctx.command_path if problem.ctx else command} --help")
        return 2
    if isinstance(problem, RecipeError):
        for fault in problem.faults:
            say(fault)
        return 2
    if isinstance(problem, OSError):
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        advice = "free some space and use --resume" if full else "check the path and its permissions"
        say(f"{problem.filename or 'a file'}: {problem.strerror or problem}; {advice}")
        return 1 if full else 2
    if isinstance(problem, RequestError | RunError):
        say(str(problem))
        return 2 if isinstance(problem, RequestError) else 1
    say(f"this should not happen: {type(problem).__name__}: {problem}; run it again with --debug and report the traceback")
    return 1
