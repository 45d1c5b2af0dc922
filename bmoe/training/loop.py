"""The training loop: accumulate -> global norm -> clip -> optimizer -> router bias -> schedule -> log."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from bmoe.data.loader import TrainingLoader
from bmoe.data.packing import Batch
from bmoe.data.shards import Shards
from bmoe.errors import RunError
from bmoe.model.load import LOAD_KEYS, load_statistics
from bmoe.parallel import shard
from bmoe.parallel.watchdog import Watchdog
from bmoe.parallel.world import World
from bmoe.precision.statistics import Recorder, recording
from bmoe.recipe import Recipe
from bmoe.training.checkpoint import Checkpoints, newest_whole, torch_facts
from bmoe.training.guards import Spikes, check_replicas, data_checksum, save_batches
from bmoe.training.metrics import MetricsLog, per_layer
from bmoe.training.optimizer import AdamW, learning_rate
from bmoe.training.state import Progress, each_tensor
from bmoe.training.step import Stepper, StepSums
from bmoe.training.stopping import Limits, Stopping


class Observer(Protocol):
    """Who is told how the run goes."""

    def record(self, record: dict) -> None: ...
    def note(self, text: str) -> None: ...


@dataclass
class Outcome:
    """How the loop ended: `signal` is 0 unless a signal ended it."""

    step: int
    signal: int
    finished: bool


class Trainer:
    """One run on one rank.

    Args:
        recipe: resolved. run: the run's folder. model, optimizer: as `setup` built them. progress: where to go on.
        validate: returns the validation metrics, equal on every rank. mfu: (totals, seconds) -> model FLOPs utilisation, or
        None where the peak is unknown; totals as `_step` returns them. facts: what else a checkpoint's meta.json tells of the run.
    """

    def __init__(
        self,
        recipe: Recipe,
        run: Path,
        shards: Shards,
        model: nn.Module,
        optimizer: AdamW,
        world: World,
        progress: Progress,
        observer: Observer,
        validate: Callable[[], dict],
        mfu: Callable[[list[int], float], float | None],
        facts: dict[str, str] | None = None,
    ):
        self.recipe, self.run_folder, self.shards, self.model, self.optimizer, self.world = recipe, run, shards, model, optimizer, world
        self.progress, self.observer, self.validate, self.mfu = progress, observer, validate, mfu
        self.facts = facts or {}
        self.log = MetricsLog(run / "metrics.jsonl")
        self.checkpoints = Checkpoints(run, recipe.checkpoint.keep, recipe.checkpoint.async_, world.rank)
        self.saved_step = progress.step
        self.valid_loss: float | None = None  # of the step, if it was validated
        self.spikes = Spikes()
        self.stepper = Stepper(recipe, model, optimizer, world.device)
        self.watchdog = Watchdog(world, run)
        self.stay_gathered = shard.fits_gathered(model, recipe, world)

    def run(self, limits: Limits) -> Outcome:
        """Train until `training.steps` or a limit; the state is saved whole in any case."""
        steps, stopping = self.recipe.training.steps, Stopping(limits, self.world)
        end = min(steps, limits.stop_at or steps)
        loader = TrainingLoader(
            self.shards, self.recipe, self.progress.position, self.world.rank, self.world.size, pin=self.world.device.type == "cuda"
        )
        self.model.train()
        window = Window()
        with self.checkpoints, loader, self.watchdog:
            if self.progress.step < end:
                self.checkpoints.get_ready(each_tensor(self.model, self.optimizer))
            while self.progress.step < end:
                step = self.progress.step + 1
                self.watchdog.beat(step)
                window.start()
                batches, position = loader.next()
                window.waited()
                lr = learning_rate(step, self.recipe.optimizer.lr, self.recipe.schedule, steps)
                with self._recording(step) as recorder:
                    sums, norm, totals = self._step(batches, lr, step, stopping)
                self.progress = Progress(step, position, self.progress.tokens)
                last = step in (steps, limits.stop_at) or stopping.decided()
                validating = step % self.recipe.training.validate_every == 0 or step == steps
                saving = last or step % self.recipe.checkpoint.every == 0
                window.add(totals)
                if step == 1 or saving or validating or recorder or step % self.recipe.logging.every == 0:
                    self._report(step, lr, sums, norm, totals, window, validating, batches, recorder)
                    window = Window()
                elif step % self.recipe.training.max_skipped_steps == 0:
                    self._stop_if_broken(step, self.optimizer.longest_skipped(), batches)
                if saving:
                    self._save()
                if last:
                    break
        return Outcome(self.progress.step, limits.signal, self.progress.step >= steps)

    def _step(self, batches: list[Batch], lr: float, step: int, stopping: Stopping) -> tuple[StepSums, Tensor, Tensor]:
        """Forward and backward of this rank's batches, then one update. Returns sums, norm, and the step's global totals
        (targets, real tokens, residues, pairs) as int64 [4] on the CPU or, with several ranks, on the device."""
        device = self.world.device
        totals = torch.tensor(
            [
                sum(b.targets for b in batches),
                sum(int(b.real_tokens) for b in batches),
                sum(b.residues for b in batches),
                sum(b.pairs for b in batches),
            ]
        )
        if self.world.size > 1:
            totals, votes = self.world.sum(torch.cat([totals, torch.tensor(stopping.wishes())]).to(device)).split((4, 3))
            stopping.count(votes)
        sums: StepSums | None = None
        for number, batch in enumerate(batches):
            if self.stay_gathered:
                shard.begin_batch(self.model, number, len(batches))
            part = self.stepper.backward(batch, totals, self._jitter_key(step, number))
            sums = part if sums is None else sums + part
        before = self.optimizer.skipped.clone() if self._bias_rate else None
        norm = self.stepper.update(lr)
        if self._bias_rate:
            taken = (self.optimizer.skipped == before).to(torch.float32)
            self.model.update_router_bias(self.world.sum(sums.counts_LE.clone()), self._bias_rate * taken)
        return sums, norm, totals

    def _recording(self, step: int) -> AbstractContextManager[Recorder | None]:
        """Quantisation statistics of this rank's batches, on the steps that the recipe asks for."""
        every = self.recipe.precision.statistics_every
        return recording(self.model) if every and step % every == 0 else nullcontext()

    @property
    def _bias_rate(self) -> float:
        moe = self.recipe.model.moe
        return moe.bias_update if moe else 0.0

    def _jitter_key(self, step: int, number: int) -> int | None:
        """Differs between all batches of a run; the batch's number in the step is the global one."""
        moe = self.recipe.model.moe
        if not moe or moe.jitter == 0.0:
            return None
        per_step = self.recipe.training.tokens_per_step // self.recipe.data.tokens_per_batch
        batch = step * per_step + number * self.world.size + self.world.rank
        return (self.recipe.seed * 1_000_003 + batch) % 2**32

    def _report(
        self,
        step: int,
        lr: float,
        sums: StepSums,
        norm: Tensor,
        totals: Tensor,
        window: "Window",
        validating: bool,
        batches: list[Batch],
        recorder: Recorder | None,
    ) -> None:
        """Log a step; the only place where the host waits for the device."""
        sums = StepSums(self.world.sum(sums.flat.to(torch.float64)).cpu(), sums.layers, sums.experts)
        norm_value, in_a_row = float(norm), self.optimizer.longest_skipped()
        seconds, window_totals = window.close()
        _, tokens, residues, _ = window_totals
        self.progress.tokens += tokens
        loads = [load_statistics(counts_E) for counts_E in sums.counts_LE.numpy()]
        moe_layers, depth = self.model.moe_layers, self.recipe.model.layers
        record = {
            "step": step,
            "loss": float(sums.loss),
            "lr": lr,
            "grad_norm": norm_value,
            "tokens": self.progress.tokens,
            "residues_per_s": residues / seconds,
            "tokens_per_s": tokens / seconds,
            "step_s": seconds / window.steps,
            "data_wait_s": window.wait / window.steps,
            "mfu": self.mfu(window_totals, seconds),
            "peak_memory_gib": peak_memory_gib(self.world.device),
            "fill": int(totals[1]) / self.recipe.training.tokens_per_step,
            "skipped_steps": int(self.optimizer.skipped),
            "balance_loss": per_layer(sums.balance_L.tolist(), moe_layers, depth),
            "z_loss": per_layer(sums.z_L.tolist(), moe_layers, depth),
            "padding_rows": per_layer(sums.padding_L.int().tolist(), moe_layers, depth),
            **{key: per_layer([load[key] for load in loads], moe_layers, depth) for key in LOAD_KEYS},
        }
        self._stop_if_broken(step, in_a_row, batches)
        if recorder:
            record["quantisation"] = recorder.metrics()
        self.valid_loss = None
        if validating:
            record |= self._validated(step)
            self.valid_loss = record.get("valid_loss")
        if self.world.rank == 0:
            self.log.append(record)
            self.observer.record(record)
            jump = self.spikes.note(step, record["loss"])
            if jump is not None:
                self.observer.note(jump)

    def _validated(self, step: int) -> dict:
        """The validation metrics. However long it takes, it is no hang while batches go through the model."""
        hook = self.model.register_forward_pre_hook(lambda *_: self.watchdog.beat(step))
        try:
            return self.validate()
        finally:
            hook.remove()

    def _stop_if_broken(self, step: int, skipped_in_a_row: int, batches: list[Batch]) -> None:
        """Raises RunError after too many non-finite steps in a row, also if others have followed since the last look."""
        if skipped_in_a_row < self.recipe.training.max_skipped_steps:
            return
        good = newest_whole(self.run_folder / "checkpoints")
        file = save_batches(self.run_folder, step, batches, self.world.rank)
        raise RunError(
            f"step {step}: the gradient was not finite {skipped_in_a_row} steps in a row, so training stops; lower optimizer.lr or "
            f"look at the data ({file} lists the last sequences), then --resume from {good or 'the start'}"
        )

    def _save(self) -> None:
        if self.saved_step == self.progress.step:
            return
        step, position = self.progress.step, self.progress.position
        self.watchdog.beat(step)  # and between any two of what may take long: the check, the end of the save before, this one
        check_replicas(self.model, self.optimizer, step, position, data_checksum(self.shards, position), self.world)
        meta = {**self.progress.as_meta(), **torch_facts(self.world.device), "world": self.world.size, "valid_loss": self.valid_loss}
        meta |= self.facts
        self.watchdog.beat(step)
        self.checkpoints.wait()
        self.watchdog.beat(step)
        self.checkpoints.save(self.progress.step, each_tensor(self.model, self.optimizer), meta)
        self.watchdog.beat(step)
        self.saved_step = self.progress.step


class Window:
    """Time and totals of the steps since the last report; validation and saving are outside."""

    def __init__(self):
        self.steps, self.wait, self.seconds, self.totals = 0, 0.0, 0.0, None
        self.began: float | None = None

    def start(self) -> None:
        self.mark = time.monotonic()
        if self.began is None:
            self.began = self.mark

    def waited(self) -> None:
        self.wait += time.monotonic() - self.mark

    def add(self, totals: Tensor) -> None:
        self.steps += 1
        self.totals = totals if self.totals is None else self.totals + totals

    def close(self) -> tuple[float, list[int]]:
        """(seconds, totals); call after the device was waited for."""
        return max(time.monotonic() - self.began, 1e-9), [int(x) for x in self.totals]


def peak_memory_gib(device: torch.device) -> float:
    """Peak of allocated device memory, or of this process's resident memory on the CPU, in GiB."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
