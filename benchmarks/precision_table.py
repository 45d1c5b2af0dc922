"""Validation loss of one recipe in several precisions, on real proteins: is a low precision within the noise of the seeds?

    python benchmarks/precision_table.py FASTA... [--recipe esm2_moe_8m] [--steps 870] [--limit 600] [--json FILE]

Every run is a `bmoe train` with the same batches of 65,536 slots, schedule and validation masks; bf16 runs with several
seeds, whose spread is the noise, and every other run has the first of these seeds, so that its difference is to the run
with the same initial weights, order and masks. Several runs share one device at the same time: losses count, not speeds.
A run that cannot start (a GPU without the format, a library too old) is reported with its reason, and every run when it ends.
The table has every step that was validated, with the runs that got there before the time limit. Interrupted runs in --folder
go on when the same command is given again.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bmoe.training.metrics import MetricsLog

COMMAND = [sys.executable, "-c", "from bmoe.cli import main; main()"]
KINDS = ("fp8_current", "fp8_row", "mxfp8:emulated", "fp8_block:emulated", "fp8_block")


class Run(NamedTuple):
    """One training run: its precision (as `kind` or `kind:emulated`) and its seed."""

    precision: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.precision.replace(':', '-')}-seed{self.seed}"

    def settings(self) -> list[str]:
        """Overrides of the recipe."""
        kind, _, emulated = self.precision.partition(":")
        return [f"precision.kind={kind}", f"precision.emulate={'true' if emulated else 'false'}", f"seed={self.seed}"]


def bmoe(*arguments: str) -> list[str]:
    """The command line of a bmoe command, in this Python."""
    return [*COMMAND, *arguments]


def prepare(fasta: list[str], folder: Path, valid_fraction: float) -> None:
    """Prepare the sequences once for all runs."""
    subprocess.run(bmoe("prepare", *fasta, "--out", str(folder), "--valid-fraction", str(valid_fraction)), check=True)


def start(run: Run, arguments: argparse.Namespace, data: Path, folder: Path, deadline: float) -> subprocess.Popen:
    """Start a run; its output goes to FOLDER/NAME.log."""
    slots, steps = arguments.tokens_per_step, arguments.steps
    settings = [
        *run.settings(), f"data.path={data}", f"data.tokens_per_batch={arguments.tokens_per_batch or slots}",
        f"training.tokens_per_step={slots}", f"training.steps={steps}", f"training.validate_every={max(1, steps // arguments.validations)}",
        f"training.validation_tokens={arguments.validation_tokens}", "checkpoint.every=1000000", "logging.every=50", *arguments.set,
    ]  # fmt: skip
    command = bmoe("train", arguments.recipe, "--out", str(folder / run.name), "--resume")
    command += ["--max-time", f"{max(1.0, deadline - time.monotonic()):.0f}s"]
    command += ["--device", arguments.device] if arguments.device else []
    for setting in settings:
        command += ["--set", setting]
    with (folder / f"{run.name}.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "2"})


def run_all(runs: list[Run], parallel: int, begin: Callable[[Run], subprocess.Popen], deadline: float) -> dict[Run, subprocess.Popen]:
    """Keep `parallel` runs going, and say when one ends. At the deadline they stop by themselves, and what has not 15 seconds
    later is ended."""
    processes: dict[Run, subprocess.Popen] = {}
    waiting, began, ended = list(runs), time.monotonic(), set()

    def going() -> list[subprocess.Popen]:
        for run, process in processes.items():
            if run not in ended and process.poll() is not None:
                ended.add(run)
                sys.stdout.write(f"{time.monotonic() - began:5.0f} s  {run.name}: exit code {process.returncode}\n")
                sys.stdout.flush()
        return [process for process in processes.values() if process.poll() is None]

    while going() or waiting:
        if waiting and len(going()) < parallel and time.monotonic() < deadline:
            run = waiting.pop(0)
            processes[run] = begin(run)
            continue
        if time.monotonic() > deadline + 15:
            for process in going():
                process.kill()
                process.wait()
            break
        time.sleep(0.2)
    return processes


def outcome(run: Run, process: subprocess.Popen, folder: Path) -> dict:
    """What a run left: its validations by step, its speed, or the reason why it did not run."""
    log = (folder / f"{run.name}.log").read_text().strip().splitlines()
    file = folder / run.name / "metrics.jsonl"
    records = MetricsLog(file).read() if file.is_file() else []
    validations = {r["step"]: r for r in records if r.get("valid_loss") is not None}
    failed = process.returncode != 0 and not validations
    later = [r["step_s"] for r in records[1:]]
    return {
        "precision": run.precision,
        "seed": run.seed,
        "exit_code": process.returncode,
        "problem": (log[-1] if log else f"exit code {process.returncode}") if failed else None,
        "last_step": records[-1]["step"] if records else 0,
        "step_s_beside_the_others": statistics.median(later) if later else None,
        "peak_memory_gib": records[-1].get("peak_memory_gib") if records else None,
        "skipped_steps": records[-1]["skipped_steps"] if records else None,
        "validations": {step: {k: v for k, v in r.items() if k.startswith("valid_")} for step, r in validations.items()},
    }


def table(outcomes: list[dict]) -> dict[int, dict]:
    """Step -> losses of the runs that validated it: bf16's mean and spread over seeds, and the others' differences to bf16."""
    steps = sorted({step for o in outcomes for step in o["validations"]})
    return {step: at_step(step, [o for o in outcomes if step in o["validations"]]) for step in steps}


def at_step(step: int, ran: list[dict]) -> dict:
    """One row of the table."""
    loss = {(o["precision"], o["seed"]): o["validations"][step]["valid_loss"] for o in ran}
    noise = [value for (precision, _), value in loss.items() if precision == "bf16"]
    deviation = statistics.stdev(noise) if len(noise) > 1 else None
    rows = []
    for o in ran:
        same_seed = loss.get(("bf16", o["seed"]))
        value = loss[o["precision"], o["seed"]]
        row = {"precision": o["precision"], "seed": o["seed"], **o["validations"][step]}
        if o["precision"] != "bf16" and same_seed is not None:
            row["difference_to_bf16"] = value - same_seed
            row["difference_over_seed_deviation"] = (value - same_seed) / deviation if deviation else None
        rows.append(row)
    spread = (
        {"seeds": len(noise), "mean": statistics.mean(noise), "deviation": deviation, "range": max(noise) - min(noise)} if noise else None
    )
    return {"bf16": spread, "rows": rows}


def text(summary: dict[int, dict], outcomes: list[dict]) -> str:
    """The table for a terminal."""
    lines = []
    for step, found in summary.items():
        noise = found["bf16"]
        head = f"validation loss after step {step}"
        if noise and noise["deviation"] is not None:
            head += f"; bf16: mean {noise['mean']:.4f}, deviation {noise['deviation']:.4f} over {noise['seeds']} seeds"
        lines.append(head)
        for row in found["rows"]:
            line = f"  {row['precision']:20s} seed {row['seed']}  {row['valid_loss']:.4f}"
            if "difference_to_bf16" in row:
                over = row["difference_over_seed_deviation"]
                line += f"  {row['difference_to_bf16']:+.4f} to bf16" + (
                    f" = {over:+.1f} deviations of the seeds" if over is not None else ""
                )
            lines.append(line)
    for o in outcomes:
        if o["problem"]:
            lines.append(f"  {o['precision']} seed {o['seed']}: did not run: {o['problem']}")
        elif o["step_s_beside_the_others"]:
            speed = f"{o['step_s_beside_the_others'] * 1e3:.0f} ms a step beside the others, {o['peak_memory_gib']:.2f} GiB"
            code = f", ended with exit code {o['exit_code']}" if o["exit_code"] else ""
            lines.append(f"  {o['precision']} seed {o['seed']}: {o['last_step']} steps, {o['skipped_steps']} skipped, {speed}{code}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fasta", nargs="+", help="protein FASTA files")
    parser.add_argument("--recipe", default="esm2_moe_8m")
    parser.add_argument("--seeds", type=int, default=3, help="bf16 runs")
    parser.add_argument("--precisions", default=",".join(KINDS), help="kinds beside bf16; kind:emulated rounds in software")
    parser.add_argument("--steps", type=int, default=870)
    parser.add_argument("--validations", type=int, default=10)
    parser.add_argument("--tokens-per-step", type=int, default=65536)
    parser.add_argument("--tokens-per-batch", type=int, help="default: the whole step")
    parser.add_argument("--validation-tokens", type=int, default=524288)
    parser.add_argument("--valid-fraction", type=float, default=0.03)
    parser.add_argument("--parallel", type=int, default=3, help="runs at a time")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--device", help="cpu or cuda; default as bmoe train")
    parser.add_argument("--set", action="append", default=[], help="more overrides of the recipe")
    parser.add_argument("--folder", help="keep data and runs here (and resume them)")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    began = time.monotonic()
    deadline = began + arguments.limit - 20
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        prepare(arguments.fasta, folder / "data", arguments.valid_fraction)
        kinds = [kind for kind in arguments.precisions.split(",") if kind]
        runs = [Run("bf16", 0), *(Run(kind, 0) for kind in kinds), *(Run("bf16", seed) for seed in range(1, arguments.seeds))]
        processes = run_all(runs, arguments.parallel, lambda run: start(run, arguments, folder / "data", folder, deadline), deadline)
        outcomes = [outcome(run, process, folder) for run, process in processes.items()]
    summary = table(outcomes)
    outcomes += [{**run._asdict(), "validations": {}, "problem": "the time limit came first"} for run in runs if run not in processes]
    sys.stdout.write(text(summary, outcomes))
    if arguments.json:
        facts = {"recipe": arguments.recipe, "steps": arguments.steps, "tokens_per_step": arguments.tokens_per_step}
        body = {**facts, "seconds": time.monotonic() - began, "summary": summary, "runs": outcomes}
        Path(arguments.json).write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
