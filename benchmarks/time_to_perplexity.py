"""Seconds of training to a validation perplexity: `bmoe train` beside Hugging Face's Mixtral on the same masked proteins.

    python benchmarks/time_to_perplexity.py DATA [--recipe esm2_moe_8m] [--perplexity 14.1] [--limit 180] [--json FILE]

DATA is a folder of `bmoe prepare`. All have the recipe's dimensions, learning rates, AdamW with fp32 masters, clipping, and the
same sequences with the same masks in the same order; a run ends at the perplexity (80/10/10), at the recipe's last step or at
the limit. Theirs reads rectangles padded to data.max_length, with as many rows a step as ours has sequences on average, and
attends to both sides by torch's SDPA under a mask of the padding; its layers are compiled, or its experts loop (`hf-loop`).
It has no balance loss, which would cost it time. Seconds are of training steps, compiling included and validation left out.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bmoe import recipe as recipes
from bmoe.data.loader import TrainingLoader, validation_batches
from bmoe.data.packing import NO_TARGET, Batch
from bmoe.data.sampler import Position
from bmoe.data.shards import Shards
from bmoe.profiling.baseline import mixtral
from bmoe.profiling.measure import synchronise
from bmoe.recipe import Recipe
from bmoe.training.metrics import MetricsLog
from bmoe.training.optimizer import is_matrix, learning_rate

COMMAND = [sys.executable, "-c", "from bmoe.cli import main; main()"]


class Reached(NamedTuple):
    """One validation, after `step` steps and `seconds` of training."""

    step: int
    seconds: float
    perplexity: float


class Rows(NamedTuple):
    """One rectangle: ids_SL, targets_SL (NO_TARGET: no loss) int64, real_SL bool; S rows of L slots."""

    ids_SL: Tensor
    targets_SL: Tensor
    real_SL: Tensor


def crops(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, targets) of each crop of a packed batch, masks included."""
    for begin, end in zip(batch.cu_seqlens[: batch.sequence_ids.numel()].tolist(), batch.cu_seqlens[1:].tolist(), strict=False):
        yield batch.tokens_T[begin:end], batch.targets_T[begin:end]


def rectangle(found: list[tuple[Tensor, Tensor]], width: int, rows: int) -> Rows:
    """Crops as the rows of a rectangle. Rows that are left over are real without targets, so that attention has what to see."""
    ids = torch.zeros(rows, width, dtype=torch.int64)
    targets = torch.full((rows, width), NO_TARGET)
    real = torch.zeros(rows, width, dtype=torch.bool)
    real[len(found) :] = True
    for row, (tokens_T, targets_T) in enumerate(found):
        ids[row, : tokens_T.numel()], targets[row, : tokens_T.numel()], real[row, : tokens_T.numel()] = tokens_T, targets_T, True
    return Rows(ids, targets, real)


def training_rows(recipe: Recipe, shards: Shards, pin: bool) -> Iterator[Rows]:
    """Rectangles of the training stream without end, all of one shape: the mean number of crops of the first steps."""
    with TrainingLoader(shards, recipe, Position(0, 0)) as loader:
        waiting = [[crop for batch in loader.next().batches for crop in crops(batch)] for _ in range(8)]
        rows, queue = max(1, sum(map(len, waiting)) // len(waiting)), [crop for step in waiting for crop in step]
        while True:
            while len(queue) < rows:
                queue += [crop for batch in loader.next().batches for crop in crops(batch)]
            made = rectangle(queue[:rows], recipe.data.max_length, rows)
            queue = queue[rows:]
            yield Rows(*(x.pin_memory() for x in made)) if pin else made


class Theirs:
    """Hugging Face's Mixtral as an encoder, in bf16 with fp32 masters on a GPU and in fp32 on the CPU."""

    def __init__(self, name: str, recipe: Recipe, shards: Shards, device: torch.device):
        self.recipe, self.device = recipe, device
        self.model = mixtral(recipe, shards.alphabet.size, name, device)
        self.masters: list[Tensor] = []
        self.weights = list(self.model.parameters())
        named = [n for n, _ in self.model.named_parameters()]
        if device.type == "cuda":
            self.masters = [p.detach().clone() for p in self.weights]
            self.model.bfloat16()
        stepped = self.masters or self.weights
        matrices = [p for n, p in zip(named, stepped, strict=True) if is_matrix(n, p)]
        vectors = [p for n, p in zip(named, stepped, strict=True) if not is_matrix(n, p)]
        o = recipe.optimizer
        groups = [{"params": matrices, "weight_decay": o.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=device.type == "cuda")
        if name == "hf-grouped-compiled":
            layers = self.model.model.layers
            for index, layer in enumerate(layers):
                layers[index] = torch.compile(layer)

    def loss(self, rows: Rows, reduction: str = "mean") -> Tensor:
        """Cross entropy of the slots with a target, fp32; the head runs on all slots, as transformers has it."""
        ids_SL, targets_SL, real_SL = (x.to(self.device, non_blocking=True) for x in rows)
        hidden_SLD = self.model.model(input_ids=ids_SL, attention_mask=real_SL[:, None, None, :]).last_hidden_state
        logits_NV = self.model.lm_head(hidden_SLD).float().flatten(0, 1)
        return F.cross_entropy(logits_NV, targets_SL.flatten(), ignore_index=NO_TARGET, reduction=reduction)

    def step(self, rows: Rows, lr: float) -> None:
        """One optimizer step."""
        self.loss(rows).backward()
        if self.masters:
            for master, weight in zip(self.masters, self.weights, strict=True):
                master.grad = weight.grad.float()
                weight.grad = None
        stepped = self.masters or self.weights
        if self.recipe.optimizer.clip_norm:
            nn.utils.clip_grad_norm_(stepped, self.recipe.optimizer.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.masters:
            torch._foreach_copy_([w.data for w in self.weights], self.masters)

    @torch.no_grad()
    def perplexity(self, valid: Shards, rows: int) -> float:
        """Of the recipe's validation sequences under 80/10/10, in rectangles of `rows` rows."""
        batches = validation_batches(valid, self.recipe, self.recipe.training.validation_tokens)
        found = [crop for batch in batches for crop in crops(batch)]
        total = count = 0.0
        for begin in range(0, len(found), rows):
            part = rectangle(found[begin : begin + rows], self.recipe.data.max_length, rows)
            total += float(self.loss(part, "sum"))
            count += int((part.targets_SL != NO_TARGET).sum())
        return math.exp(total / count)


def train_theirs(name: str, recipe: Recipe, goal: float, limit: float, device: torch.device) -> list[Reached]:
    """The validations of a baseline."""
    shards, valid = Shards(Path(recipe.data.path), "train"), Shards(Path(recipe.data.path), "valid")
    theirs, stream = Theirs(name, recipe, shards, device), training_rows(recipe, shards, pin=device.type == "cuda")
    seconds, found, training = 0.0, [], recipe.training
    for first in range(1, training.steps + 1, training.validate_every):
        began = time.monotonic()
        last = min(first + training.validate_every, training.steps + 1) - 1
        for step in range(first, last + 1):
            rows = next(stream)
            theirs.step(rows, learning_rate(step, recipe.optimizer.lr, recipe.schedule, training.steps))
        synchronise(device)
        seconds += time.monotonic() - began
        found.append(Reached(last, seconds, theirs.perplexity(valid, rows.ids_SL.shape[0])))
        if found[-1].perplexity <= goal or seconds > limit:
            break
    stream.close()
    return found


def train_ours(settings: list[str], recipe: str, goal: float, limit: float, device: torch.device) -> list[Reached]:
    """The validations of `bmoe train`, up to the first that reached the goal."""
    with tempfile.TemporaryDirectory() as folder:
        command = [*COMMAND, "train", recipe, "--out", folder, "--device", device.type, "--max-time", f"{2 * limit:.0f}s"]
        for setting in settings:
            command += ["--set", setting]
        subprocess.run(command, check=True, stdout=sys.stderr)
        records = MetricsLog(Path(folder) / "metrics.jsonl").read()
    found, seconds, before = [], 0.0, 0
    for record in records:  # a logged step stands for all since the one before
        seconds += record["step_s"] * (record["step"] - before)
        before = record["step"]
        if record.get("valid_loss") is not None:
            found.append(Reached(before, seconds, math.exp(record["valid_loss"])))
            if found[-1].perplexity <= goal:
                break
    return found


def summary(runs: dict[str, list[Reached]], goal: float) -> list[dict]:
    """Of each run: step and seconds at the goal (None: not reached), the same without the first interval, which holds compiling and
    recording, at the mean rate of the others, and the last perplexity."""
    lines = []
    for name, found in runs.items():
        last, reached = found[-1], found[-1].perplexity <= goal
        rate = (last.seconds - found[0].seconds) / (last.step - found[0].step) if len(found) > 1 else None
        lines.append({
            "name": name, "reached": reached, "step": last.step, "seconds": last.seconds,
            "seconds_warm": rate and rate * last.step, "perplexity": last.perplexity, "curve": found,
        })  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", help="folder of bmoe prepare, with a train and a valid split")
    parser.add_argument("--recipe", default="esm2_moe_8m")
    parser.add_argument("--perplexity", type=float, default=14.1, help="the goal, under 80/10/10")
    parser.add_argument(
        "--baselines", help="of hf-grouped-compiled,hf-grouped,hf-loop, by commas; default the first and last, on CPUs the last two"
    )
    parser.add_argument("--limit", type=float, default=180.0, help="seconds of training of one run")
    parser.add_argument("--every", type=int, default=20, help="steps between validations")
    parser.add_argument("--set", action="append", default=[], help="overrides of the recipe; by default one batch a step")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device, goal = torch.device(arguments.device), arguments.perplexity
    steps = [f"training.validate_every={arguments.every}", f"logging.every={arguments.every}", "checkpoint.every=1000000"]
    settings = [f"data.path={Path(arguments.data).resolve()}", "data.fasta=null", *steps, *arguments.set]
    plain = recipes.load(recipes.find(arguments.recipe)[0], settings)
    if not any(setting.startswith("data.tokens_per_batch=") for setting in settings):
        settings.append(f"data.tokens_per_batch={plain.training.tokens_per_step}")
    recipe = recipes.load(recipes.find(arguments.recipe)[0], settings)
    usual = "hf-grouped-compiled,hf-loop" if device.type == "cuda" else "hf-grouped,hf-loop"
    runs = {"bmoe": train_ours(settings, arguments.recipe, goal, arguments.limit, device)}
    tell(runs, goal, arguments)
    for name in (arguments.baselines or usual).split(","):
        runs[name] = train_theirs(name, recipe, goal, arguments.limit, device)
        tell(runs, goal, arguments)


def tell(runs: dict, goal: float, arguments: argparse.Namespace) -> None:
    """Print the last run, and write all so far."""
    lines = summary(runs, goal)
    line = lines[-1]
    state = "reached" if line["reached"] else "NOT reached"
    warm = f" ({line['seconds_warm']:.1f} s warm)" if line["seconds_warm"] else ""
    sys.stdout.write(
        f"{line['name']:20s} perplexity {goal:g} {state} at step {line['step']}: {line['perplexity']:.3f}, "
        f"{line['seconds']:.1f} s{warm}, {line['seconds'] / lines[0]['seconds']:.2f} times bmoe's\n"
    )
    sys.stdout.flush()
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"perplexity": goal, "recipe": arguments.recipe, "runs": lines}, indent=1) + "\n")


if __name__ == "__main__":
    main()
