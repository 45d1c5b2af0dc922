"""`bmoe train`: data if needed, training, evaluation on the held-out split, report."""

import json
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from rich.table import Table
from torch import Tensor

from bmoe import console
from bmoe import recipe as recipes
from bmoe.data.alphabet import Alphabet
from bmoe.data.loader import validation_batches
from bmoe.data.shards import Shards
from bmoe.errors import RequestError
from bmoe.evaluation import perplexity, routing
from bmoe.interop.balance import balanced_routers
from bmoe.interop.upcycle import initial_weights
from bmoe.jobs.common import ensure_data, open_split
from bmoe.jobs.room import check_room
from bmoe.model import counts
from bmoe.model.transformer import Transformer
from bmoe.parallel.launch import on_first, signals_to
from bmoe.parallel.world import World
from bmoe.precision.emulate import emulate
from bmoe.profiling import chips, render
from bmoe.profiling.estimate import advised_copy_peak, expected_load
from bmoe.recipe import Recipe
from bmoe.reports.training import write_training_report
from bmoe.training import checkpoint, setup, state
from bmoe.training.loop import Outcome, Trainer
from bmoe.training.metrics import MetricsLog
from bmoe.training.optimizer import AdamW
from bmoe.training.run_lock import locked
from bmoe.training.stopping import Limits, Stopping
from bmoe.training.tracking import Trackers

RECIPE, RECIPE_PARTIAL = "recipe.yaml", "recipe.partial"  # of a run; the second is left by a kill in the first moment
RESUMABLE = ("training.steps", "logging.", "checkpoint.", "parallel.", "backend.", "data.path")  # may differ on --resume
DATA, LAYOUT = "data_sha256", "layout"  # of a checkpoint's meta.json
BALANCE_SLOTS = 8192  # of the batches on which the routers of an upcycled model are balanced


def run_folder(recipe: Recipe, out: str | None, resume: bool) -> Path:
    """The run's folder: one that is missing or empty is a new run's, with --resume or without, so that the first start of a
    job and its requeue are one command line. Raises RequestError for a run without --resume, and for what is no run."""
    folder = Path(out) if out else Path("runs") / recipe.name
    if (folder / RECIPE).is_file():
        if not resume:
            raise RequestError(f"{folder} exists already; add --resume to go on with it, or --out to write elsewhere")
    elif folder.exists():
        strange = [folder] if not folder.is_dir() else [p for p in folder.iterdir() if p.name[0] != "." and p.name != RECIPE_PARTIAL]
        if strange:
            why = "is no folder" if strange == [folder] else f"is no run: it has {min(strange).name} but no {RECIPE}"
            raise RequestError(f"{folder} {why}; name an empty or a new folder with --out")
    return folder


def check_same(folder: Path, recipe: Recipe) -> None:
    """Refuse to resume with a recipe that differs in what may not change."""
    saved = folder / RECIPE
    if not saved.is_file():
        return
    keys = [k for k in recipes.differences(recipes.load(saved), recipe) if not k.startswith(RESUMABLE)]
    if keys:
        raise RequestError(f"--resume: the recipe differs from {saved} in {', '.join(keys)}; use that recipe, or --out for a new run")


def check_same_data(newest: Path, shards: Shards) -> None:
    """Refuse to go on with other sequences: a checkpoint says how far their order has been read. Raises RequestError."""
    if checkpoint.read_meta(newest).get(DATA) != shards.contents:
        raise RequestError(
            f"--resume: {shards.directory} has other sequences in its train split than {newest} was trained on; set data.path to "
            "those, or start a new run with --out"
        )


def train(recipe: Recipe, world: World, *, out: str | None, resume: bool, limits: Limits) -> tuple[Outcome, Path, dict]:
    """Train a recipe: data if needed, training, report. Every rank of `world` calls it.

    Returns how it ended, the folder, the last record of the metrics; none if a signal came before the first step. Raises
    RequestError, RunError.
    """
    resolved, reasons = setup.resolve(recipe, world)
    world = world.arrange(resolved.parallel)
    with ExitStack() as held:  # by rank 0: the lock of the folder
        folder, data, resolved = on_first(world, lambda: begin(resolved, out, resume, limits, world, held))
        return train_in(folder, data, resolved, reasons, world, resume, limits)


def train_in(
    folder: Path, data: Path | None, resolved: Recipe, reasons: dict[str, str], world: World, resume: bool, limits: Limits
) -> tuple[Outcome, Path, dict]:
    """`train`, after `begin`. The recipe is written when nothing can be refused any more: until then the folder is as it was."""
    stopping = Stopping(limits, world)
    if stopping.asked():
        return stopped_early(folder, limits, world.rank)
    shards, valid = open_split(resolved, data, "train"), open_split(resolved, data, "valid")

    if first_of_host():
        for split in (shards, valid):
            split.check_in_background()
    note = console.note if world.rank == 0 else lambda text: None
    if "parallel.expert" in reasons:
        note(f"rows travel to their experts by {reasons['parallel.expert']}")
    if fitting := copies_fit(resolved, shards, world):
        note(fitting)
    newest = checkpoint.resume_point(folder, world, note) if resume else None
    if newest:
        check_same_data(newest, shards)
    model, optimizer = build(resolved, shards.alphabet, world, fresh=newest is None, shards=shards)
    progress = state.load_state(newest, model, optimizer, checked=True) if newest else state.Progress()
    if stopping.asked():
        return stopped_early(folder, limits, world.rank)
    if world.rank == 0:
        write_recipe(folder, resolved, reasons)
        log = MetricsLog(folder / "metrics.jsonl")
        if resume and not newest:
            note(f"{folder} has no checkpoint: starting from step 0" + kept_metrics(log))
        log.cut_back(progress.step)
    latest: list[perplexity.Perplexity] = []

    def validate() -> dict:
        latest[:] = [perplexity.evaluate(model, valid, resolved, device=world.device, rank=world.rank, world=world.size, reduce=world.sum)]
        return latest[0].metrics()

    view = console.TrainingView(resolved.name, resolved.training.steps, progress.step, shown=world.rank == 0)
    with view, Trackers(resolved, folder, view, world.rank == 0, progress.step) as observer:
        if newest:
            observer.note(f"resuming {folder} after step {progress.step:,}" + other_facts(newest, resolved, world))
        mfu = utilisation(resolved, shards.alphabet.size, world.device, world.size)
        facts = {DATA: shards.contents, LAYOUT: layout(resolved)}
        trainer = Trainer(resolved, folder, shards, model, optimizer, world, progress, observer, validate, mfu, facts)
        outcome = trainer.run(limits)
    if world.rank == 0:
        if latest:
            write_evaluation(folder, latest[0], model.moe_layers)
        if trainer.log.read():
            write_training_report(folder)
    records = trainer.log.read()
    return outcome, folder, records[-1] if records else {}


def kept_metrics(log: MetricsLog) -> str:
    """Set the log of a run that starts again aside, and say so as the end of a sentence; empty for a new run."""
    aside = log.set_aside()
    return f"; the metrics of its {aside[1]:,} steps before are kept as {aside[0].name}" if aside else ""


def first_of_host() -> bool:
    """Whether this rank is the first one on its machine, as the launchers number them."""
    return os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"


def way_on(folder: Path) -> str:
    """Where a run goes on, as a part of a sentence."""
    newest = checkpoint.newest_whole(folder / "checkpoints")
    return f"--resume goes on from {newest}" if newest else "there is no checkpoint yet, and --resume starts from step 0"


def stopped_early(folder: Path, limits: Limits, rank: int = 0) -> tuple[Outcome, Path, dict]:
    """The end of a run that was asked to stop before its first step: there is nothing new to save."""
    newest = checkpoint.newest_whole(folder / "checkpoints")
    if rank == 0:
        console.note(f"{signal.Signals(limits.signal).name} came before the first step; {way_on(folder)}")
    return Outcome(checkpoint.read_meta(newest)["step"] if newest else 0, limits.signal, False), folder, {}


def prepared(recipe: Recipe, limits: Limits) -> Path | None:
    """`ensure_data`, which a signal interrupts at once; None if one has come (of Ctrl-C, KeyboardInterrupt)."""

    def interrupt(number: int) -> None:
        first = not limits.signals
        limits.take(number)
        if first:  # the next one must not break off what winds the preparation up
            raise KeyboardInterrupt

    try:
        with signals_to(interrupt):
            return None if limits.signals else ensure_data(recipe)
    except KeyboardInterrupt:
        if limits.signal in (0, signal.SIGINT):
            raise
        return None


def begin(
    resolved: Recipe, out: str | None, resume: bool, limits: Limits, world: World, held: ExitStack
) -> tuple[Path, Path | None, Recipe]:
    """On one rank: the run's folder, locked in `held`, the folder of the data, and the recipe with absolute paths; no data and no lock
    if a signal has come. Raises RequestError."""
    folder = run_folder(resolved, out, resume)
    data = prepared(resolved, limits)
    if data is None:
        return folder, None, resolved
    shards = [open_split(resolved, data, split) for split in ("train", "valid")]
    check_room(resolved, shards[0].alphabet.size, world)
    resolved = with_absolute_paths(resolved)
    folder.mkdir(parents=True, exist_ok=True)
    held.enter_context(locked(folder))
    run_folder(resolved, out, resume)  # again: another process may have begun this run, and ended, while the data were prepared
    check_same(folder, resolved)
    return folder, data, resolved


def write_recipe(folder: Path, resolved: Recipe, reasons: dict[str, str]) -> None:
    """recipe.yaml of a run, whole or not there."""
    partial = folder / RECIPE_PARTIAL
    partial.write_text(recipes.dump(resolved, reasons))
    partial.replace(folder / RECIPE)


def with_absolute_paths(recipe: Recipe) -> Recipe:
    """The recipe with every path absolute, so that recipe.yaml alone repeats the run from anywhere."""

    def absolute(path: str | None) -> str | None:
        return str(Path(path).resolve()) if path and Path(path).exists() else path

    prepare = recipe.data.prepare.model_copy(update={"clusters": absolute(recipe.data.prepare.clusters)})
    data = recipe.data.model_copy(update={"path": absolute(recipe.data.path), "prepare": prepare})
    model = recipe.model.model_copy(update={"init_from": absolute(recipe.model.init_from)})
    return recipe.model_copy(update={"data": data, "model": model})


def build(resolved: Recipe, letters: Alphabet, world: World, fresh: bool = True, shards: Shards | None = None) -> tuple[Transformer, AdamW]:
    """Model and optimizer of a resolved recipe on `world`: filled, emulated, spread over the ranks, compiled, as it says.

    A model that is not `fresh` gets its weights from a checkpoint afterwards, and `model.init_from` is not read. Where it upcycles a
    dense model, the first batches of `shards` tell what spreads the load over the experts.
    """

    def balance(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        if shards is None:
            return {}
        batches = (batch.model_inputs() for batch in validation_batches(shards, resolved, BALANCE_SLOTS))
        return on_first(world, lambda: balanced_routers(weights, resolved.model, setup.vocabulary(letters), batches))

    imported = fresh and resolved.model.init_from
    several = world.size > 1 and not imported  # then `distribute` fills it block by block, in its final place
    model = setup.build_model(resolved, letters, torch.device("meta") if several else world.device)
    if imported:
        weights = initial_weights(imported, resolved.model, letters.size, resolved.seed, balance)
        model.load_state_dict(weights)
    if resolved.precision.emulate:
        emulate(model, resolved.precision)
    setup.distribute(model, resolved, world)
    optimizer = setup.build_optimizer(model, resolved, world)
    if resolved.backend.compile:
        setup.compile_blocks(model, resolved)
    return model, optimizer


def copies_fit(recipe: Recipe, shards: Shards, world: World) -> str | None:
    """A sentence for ranks that share a model of which each GPU could hold a copy."""
    chip = chips.of_device(torch.cuda.get_device_name(world.device)) if world.device.type == "cuda" else None
    peak = advised_copy_peak(recipe, shards.alphabet.size, expected_load(recipe, shards), world.size, chip) if chip else None
    return render.copies_fit(chip.name, peak, world.size) if peak else None


def write_evaluation(folder: Path, held_out: perplexity.Perplexity, moe_layers: list[int]) -> None:
    """RUN/evaluation.json: the last validation in full, for the report."""
    results = held_out.results()
    if held_out.counts_LE is not None:
        results["routing"] = {"layers": routing.summary(held_out.counts_LE, moe_layers)}
    (folder / "evaluation.json").write_text(json.dumps({"command": "train", "results": results}, indent=1) + "\n")


def layout(recipe: Recipe) -> str:
    """data_replicate x data_shard x expert of a resolved recipe: other sums of gradients, so other roundings."""
    return f"{recipe.parallel.data_replicate} x {recipe.parallel.data_shard} x {recipe.parallel.expert}"


def other_facts(newest: Path, recipe: Recipe, world: World) -> str:
    """What differs from the machine that wrote a checkpoint, as the end of a sentence; empty if the run goes on bit for bit."""
    meta = checkpoint.read_meta(newest)
    facts = {**checkpoint.torch_facts(world.device), "world": world.size, LAYOUT: layout(recipe)}
    changed = [f"{k} {meta.get(k)} -> {v}" for k, v in facts.items() if meta.get(k, v) != v]
    return f"; with other {', '.join(changed)} it goes on equal to rounding, not bit for bit" if changed else ""


def utilisation(recipe: Recipe, vocabulary: int, device: torch.device, size: int) -> Callable[[list[int], float], float | None]:
    """(targets, real tokens, residues, squared lengths; all ranks) and seconds -> MFU, or None where the peak is unknown."""
    peak = counts.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None

    def mfu(totals: list[int], seconds: float) -> float | None:
        if peak is None:
            return None
        targets, tokens, _, squares = totals
        return counts.training_flops(recipe.model, vocabulary, tokens, squares, targets) / seconds / (peak * size)

    return mfu


def training_summary(outcome: Outcome, folder: Path, metrics: dict) -> Table:
    """The numbers of a run's end, for people."""
    rows = [("steps", f"{outcome.step:,}" + ("" if outcome.finished else "  (stopped; --resume goes on)"))]
    for scheme in ("mask", "8010"):
        value, base = metrics.get(f"valid_perplexity_{scheme}"), metrics.get(f"valid_baseline_{scheme}")
        if value is not None:
            rows.append((f"valid_perplexity_{scheme}", f"{value:.3f}   baseline {base:.3f}   ratio {value / base:.4f}"))
    if "valid_perplexity" in metrics:
        value, base = metrics["valid_perplexity"], metrics["valid_baseline"]
        rows.append(("valid_perplexity", f"{value:.3f}   baseline {base:.3f}   ratio {value / base:.4f}"))
    rows += [
        ("training loss", f"{metrics['loss']:.4f}"),
        ("residues/s", f"{metrics['residues_per_s']:,.0f}"),
        ("peak memory", f"{metrics['peak_memory_gib']:.2f} GiB"),
        ("run", str(folder)),
        ("report", str(folder / "report.html")),
    ]
    return console.settings_table("trained", rows)
