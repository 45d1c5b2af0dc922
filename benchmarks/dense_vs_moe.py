"""Is a mixture of experts worth it? The same proteins, steps and settings for a MoE model and three dense ones.

    python benchmarks/dense_vs_moe.py FASTA... --out DIR --structures DIR --probe TSV --mutations CSV --wildtype FASTA --column NAME
        [--recipe esm2_moe_8m] [--set section.key=value] [--steps 870] [--seeds 2] [--train-seconds 240] [--eval-seconds 120]

All train at once, as processes of one device (small models leave a large GPU idle), with the recipe's settings, on the same
batches and masks. They differ in the feed-forward alone:

    moe           the recipe
    dense-active  dense, as wide as the experts that a token visits: equal ACTIVE parameters, and so equal training FLOPs, but
                  for the router (both differences are in the table)
    dense-flops   dense, as wide as all experts together: equal TOTAL parameters; as many steps as take the training FLOPs of moe
    dense-total   the same for all steps: equal total parameters and equal tokens, at a multiple of the FLOPs (upper reference)

With `--seeds 2` moe and dense-active train again from another seed (weights, order and masks), since the difference of two runs
means little beside that of two seeds. These runs are stopped if the others would not be done in time.

Then `bmoe eval` judges every run: perplexity (with intervals, and in pairs with moe), the mutations' Spearman, the probe of
secondary structure, contacts cross-validated by family. DIR/results.json and DIR/results.md hold what there is so far and are
written anew after every step; a second call with the same DIR goes on where the first one stopped.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import torch

from bmoe import recipe as recipes
from bmoe.data.shards import Shards
from bmoe.evaluation import pairs as paired
from bmoe.jobs import evaluate as job
from bmoe.jobs.evaluate import Wanted
from bmoe.model import counts
from bmoe.training.metrics import MetricsLog, finite

BMOE = [sys.executable, "-c", "from bmoe.cli import main; main()"]
VALIDATION_TOKENS = 524_288  # more than the held-out split has
ENDING = 30.0  # seconds of the last validation and the report, which compile anew
GRACE = 25.0  # seconds that a stopped run has to write its checkpoint


@dataclass
class Contestant:
    """One run. parameters, flops: of its model; flops a token, forward and backward."""

    name: str
    seed: int
    steps: int
    overrides: list[str]
    parameters: counts.Parameters
    flops: float
    seen: list[tuple[float, int]] = field(default_factory=list)  # (time, step) of the log's growth

    @property
    def label(self) -> str:
        return self.name if self.seed == 0 else f"{self.name}.seed{self.seed}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("fasta", nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", default="esm2_moe_8m")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="of every run")
    parser.add_argument("--steps", type=int, default=870)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--valid-fraction", default="0.03")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--train-seconds", type=float, default=240.0)
    parser.add_argument("--eval-seconds", type=float, default=120.0)
    parser.add_argument("--threads", default="2", help="OMP_NUM_THREADS of every process")
    parser.add_argument("--structures")
    parser.add_argument("--probe")
    parser.add_argument("--mutations")
    parser.add_argument("--wildtype")
    parser.add_argument("--column")
    parser.add_argument("--judge", type=Path, help=argparse.SUPPRESS)  # a process of the evaluation
    arguments = parser.parse_args()
    if arguments.judge:
        judge(arguments.judge, arguments)
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    os.environ |= {"OMP_NUM_THREADS": arguments.threads, "TORCHINDUCTOR_COMPILE_THREADS": arguments.threads, "NO_COLOR": "1"}
    started = time.monotonic()
    data = arguments.out / "data"
    subprocess.run([*BMOE, "prepare", *arguments.fasta, "--out", str(data), "--valid-fraction", arguments.valid_fraction], check=True)
    runs = contestants(arguments, data)
    seconds = {"prepare": time.monotonic() - started}
    write(arguments.out, runs, seconds)
    train(runs, arguments, data, started + seconds["prepare"] + arguments.train_seconds)
    seconds["train"] = time.monotonic() - started - seconds["prepare"]
    write(arguments.out, runs, seconds)
    evaluate(runs, arguments, seconds)
    sys.stdout.write((arguments.out / "results.md").read_text())


def contestants(arguments: argparse.Namespace, data: Path) -> list[Contestant]:
    """The runs, most important first."""
    recipe = recipes.load(recipes.find(arguments.recipe)[0], arguments.overrides)
    moe, shards = recipe.model, Shards(data, "train")
    tokens_S = np.minimum(shards.lengths + 2, recipe.data.max_length).astype(float)
    pairs = float((tokens_S**2).sum() / tokens_S.sum())  # squared lengths a token
    vocabulary = shards.alphabet.size

    def one(name: str, width: int | None, steps: int, seed: int = 0) -> Contestant:
        overrides = [] if width is None else ["model.moe=null", f"model.ffn_width={width}"]
        section = moe if width is None else moe.model_copy(update={"moe": None, "ffn_width": width})
        flops = counts.training_flops(section, vocabulary, 1.0, pairs, recipe.objective.mask_fraction)
        return Contestant(name, seed, steps, overrides, counts.parameters(section, vocabulary), flops)

    experts = moe.moe
    active = (experts.top_k + experts.shared_experts) * experts.expert_width
    every = (experts.experts + experts.shared_experts) * experts.expert_width
    steps = arguments.steps
    first, narrow, wide = one("moe", None, steps), one("dense-active", active, steps), one("dense-total", every, steps)
    matched = one("dense-flops", every, max(round(steps * first.flops / wide.flops), 1))
    repeated = [one(c.name, None if c is first else active, steps, seed) for seed in range(1, arguments.seeds) for c in (first, narrow)]
    return [first, narrow, matched, wide, *repeated]


# ---------------------------------------------------------------------------------------------------------------------
# Training


def train(runs: list[Contestant], arguments: argparse.Namespace, data: Path, deadline: float) -> None:
    """Train all runs at once until `deadline` (monotonic seconds); what is not done by then saves a checkpoint and stops."""
    processes: dict[str, subprocess.Popen] = {}
    for run in runs:
        folder = arguments.out / run.label
        if progress(folder) >= run.steps:
            continue
        settings = [
            *arguments.overrides, *run.overrides, f"data.path={data}", "data.fasta=null", f"seed={run.seed}", f"training.steps={run.steps}",
            f"training.validate_every={run.steps}", f"training.validation_tokens={VALIDATION_TOKENS}", "checkpoint.keep=1",
            f"checkpoint.every={run.steps}",
        ]  # fmt: skip
        command = [*BMOE, "train", arguments.recipe, "--device", arguments.device, "--out", str(folder), "--resume"]
        command += [part for value in settings for part in ("--set", value)]
        processes[run.label] = start(command, arguments.out / f"{run.label}.train.log")
    repeats = {run.label for run in runs if run.seed}
    while any(p.poll() is None for p in processes.values()):
        time.sleep(1.0)
        now = time.monotonic()
        behind = any(late(run, arguments.out, now, deadline) for run in runs if not run.seed and run.label in processes)
        for label, process in processes.items():
            if process.poll() is None and (now > deadline or (behind and label in repeats)):
                process.send_signal(signal.SIGTERM)
        if now > deadline + GRACE:
            break
    for process in processes.values():
        if process.poll() is None:
            process.kill()
            process.wait()


def late(run: Contestant, out: Path, now: float, deadline: float) -> bool:
    """Whether a run, going on as in its last 15 seconds, would miss the deadline."""
    step = progress(out / run.label)
    if step and (not run.seen or step > run.seen[-1][1]):
        run.seen.append((now, step))
    recent = [entry for entry in run.seen if entry[0] > now - 15.0]
    if step >= run.steps or len(recent) < 2 or recent[-1][0] - recent[0][0] < 8.0:
        return False
    rate = (recent[-1][1] - recent[0][1]) / (recent[-1][0] - recent[0][0])
    return recent[-1][0] + (run.steps - recent[-1][1]) / rate > deadline - ENDING


def progress(folder: Path) -> int:
    """The last step in a run's log; 0 before the first."""
    records = MetricsLog(folder / "metrics.jsonl").read()
    return records[-1]["step"] if records else 0


def start(command: list[str], log: Path) -> subprocess.Popen:
    with log.open("w") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def evaluate(runs: list[Contestant], arguments: argparse.Namespace, seconds: dict[str, float]) -> None:
    """Judge every run in a process of its own, and all of them together for the pairs; writes the table whenever one is done.

    Runs from another seed that were stopped early are left out.
    """
    began = time.monotonic()
    trained = [run for run in runs if (arguments.out / run.label / "checkpoints").is_dir()]
    trained = [run for run in trained if not run.seed or progress(arguments.out / run.label) >= run.steps]
    waiting = [run for run in trained if not judged(arguments.out / run.label)]
    processes: dict[str, subprocess.Popen] = {}
    if len(trained) > 1 and waiting:
        together = [str(arguments.out / run.label) for run in trained]
        command = [*BMOE, "eval", *together, "--device", arguments.device, "--json", str(arguments.out / "pairs.json")]
        processes["pairs"] = start(command, arguments.out / "pairs.log")
    for run in waiting:
        command = [sys.executable, __file__, *sys.argv[1:], "--judge", str(arguments.out / run.label)]
        processes[run.label] = start(command, arguments.out / f"{run.label}.eval.log")
    running = set(processes)
    while running and time.monotonic() - began < arguments.eval_seconds:
        time.sleep(0.5)
        done = {label for label in running if processes[label].poll() is not None}
        if done:
            running -= done
            seconds["eval"] = time.monotonic() - began
            write(arguments.out, runs, seconds)
    for label in running:
        processes[label].kill()
        processes[label].wait()
    seconds["eval"] = time.monotonic() - began
    write(arguments.out, runs, seconds)


def judge(folder: Path, arguments: argparse.Namespace) -> None:
    """What `bmoe eval` finds of one run, a part at a time; FOLDER/eval.json has the parts that are done."""
    scan = {"mutations": arguments.mutations, "wildtype": arguments.wildtype, "column": arguments.column}
    parts = {"pseudo": Wanted(pseudo=True)}
    parts |= {"probe": Wanted(probe=arguments.probe)} if arguments.probe else {}
    parts |= {"contacts": Wanted(structures=arguments.structures)} if arguments.structures else {}
    parts |= {"mutations": Wanted(**scan, scores=str(folder / "scores.csv"))} if arguments.mutations else {}
    found: dict = {}
    seconds: dict[str, float] = {}
    for name, part in parts.items():
        began = time.monotonic()
        results, _ = job.evaluate([str(folder)], part, data=None, split="valid", device=torch.device(arguments.device))
        seconds[name] = time.monotonic() - began
        found |= results[0]
        partial = folder / "eval.partial"
        body = {"results": found, "seconds": seconds, "whole": len(seconds) == len(parts)}
        partial.write_text(json.dumps(finite(body), allow_nan=False))
        partial.replace(folder / "eval.json")


def judged(folder: Path) -> bool:
    """Whether a run was evaluated whole after its last training step."""
    file = folder / "eval.json"
    return file.is_file() and json.loads(file.read_text())["whole"] and file.stat().st_mtime > (folder / "metrics.jsonl").stat().st_mtime


# ---------------------------------------------------------------------------------------------------------------------
# The table


def write(out: Path, runs: list[Contestant], seconds: dict[str, float]) -> None:
    """results.json and results.md from what is on disk."""
    rows = [row(out, run, runs[0]) for run in runs]
    body = {"seconds": seconds, "runs": rows, "pairs": pairs(out, runs)}
    (out / "results.json").write_text(json.dumps(finite(body), indent=1, allow_nan=False) + "\n")
    (out / "results.md").write_text(markdown(body))


def row(out: Path, run: Contestant, moe: Contestant) -> dict:
    """What a run is and what it reached so far."""
    folder = out / run.label
    records = MetricsLog(folder / "metrics.jsonl").read()
    step = records[-1]["step"] if records else 0
    tokens = run.parameters.total, run.parameters.active
    found: dict = {
        "run": run.label, "model": run.name, "seed": run.seed, "total_parameters": tokens[0], "active_parameters": tokens[1],
        "active_over_moe": tokens[1] / moe.parameters.active, "step": step, "steps": run.steps, "flops_per_token": run.flops,
        "training_flops_over_moe": run.flops * run.steps / (moe.flops * moe.steps),
        "loss": records[-1]["loss"] if records else None,
    }  # fmt: skip
    results = together(out).get(run.label, {})
    if (folder / "eval.json").is_file():
        results = results | json.loads((folder / "eval.json").read_text())["results"]
    if results:
        found |= {k: v for k, v in results.items() if k.startswith(("perplexity", "baseline", "ratio", "bigram"))}
        found |= {"valid_sequences": results.get("sequences"), "targets": results.get("targets"), "pseudo": results.get("pseudo")}
        if scan := results.get("mutations"):
            found["mutations"] = {k: v for k, v in scan.items() if k not in ("points", "dropped", "group")}
        if probe := results.get("probe"):
            found["probe"] = {k: v for k, v in probe.items() if k != "per_sequence"}
        if contacts := results.get("contacts"):
            found["contacts"] = {k: v for k, v in contacts.items() if k != "maps"}
    return found


def together(out: Path) -> dict[str, dict]:
    """Run -> its results in pairs.json, as far as that is there."""
    file = out / "pairs.json"
    return {Path(r["run"]).name: r for r in json.loads(file.read_text())["results"]["runs"]} if file.is_file() else {}


def pairs(out: Path, runs: list[Contestant]) -> list[dict]:
    """Every run against moe: ratio of perplexities on the same targets, differences of the mutations' Spearman, of long-range
    P@L and of the probe's accuracy, each with a paired 95 % bootstrap interval."""
    against = {label: results["compared"] for label, results in together(out).items() if results.get("compared")}
    compared = {label: entry["schemes"] for label, entry in against.items() if Path(entry["to"]).name == runs[0].label}
    first = out / runs[0].label
    found = []
    for run in runs[1:]:
        folder = out / run.label
        entry = {"run": run.label, "to": runs[0].label, "perplexity": compared.get(run.label, {})}
        if all((f / "eval.json").is_file() and judged(f) for f in (folder, first)):
            entry |= differences(folder, first)
        found.append(entry)
    return found


@cache
def differences(here: Path, there: Path) -> dict[str, dict]:
    """Paired differences of two evaluated runs."""
    return paired.differences(*(measured(folder / "eval.json") for folder in (here, there)))


def measured(file: Path) -> dict:
    """The results of a run; null stands for a chain without long pairs."""
    results = json.loads(file.read_text())["results"]
    for chain in results.get("contacts", {}).get("per_chain", []):
        chain["long_p_at_l"] = math.nan if chain["long_p_at_l"] is None else chain["long_p_at_l"]
    return results


def markdown(body: dict) -> str:
    """The tables for people."""
    head = ["run", "total", "active", "steps", "FLOPs", "perplexity `<mask>`", "ratio to baseline", "pseudo-perplexity", "DMS Spearman"]
    head += ["SS8 accuracy", "SS3 accuracy", "long P@L", "long P@L/5"]
    lines = [line(head), line(["---"] * len(head))]
    for r in body["runs"]:
        probe, contacts = r.get("probe") or {}, (r.get("contacts") or {}).get("long", {})
        pseudo, scan = r.get("pseudo") or {}, r.get("mutations") or {}
        lines.append(
            line([
                r["run"], f"{r['total_parameters'] / 1e6:.2f} M", f"{r['active_parameters'] / 1e6:.3f} M", f"{r['step']}/{r['steps']}",
                f"{r['training_flops_over_moe']:.3f}", interval(r, "perplexity_mask", 2), interval(r, "ratio_mask", 3),
                interval({"x": pseudo.get("pseudo_perplexity"), "x_low": pseudo.get("low"), "x_high": pseudo.get("high")}, "x", 2),
                interval(scan, "spearman", 3), interval(probe, "accuracy", 3), interval(probe.get("three_state") or {}, "accuracy", 3),
                interval(contacts, "p_at_l", 3), interval(contacts, "p_at_l5", 3),
            ])
        )  # fmt: skip
    trivial = next((r for r in body["runs"] if "baseline_mask" in r), {})
    probe, contacts = trivial.get("probe") or {}, (trivial.get("contacts") or {}).get("long", {})
    lines.append(
        line([
            "without learning", "", "", "", "", number(trivial.get("baseline_mask"), 2), "1", "", "0", number(probe.get("majority"), 3),
            number((probe.get("three_state") or {}).get("majority"), 3), number(contacts.get("p_at_l_by_separation"), 3),
            number(contacts.get("p_at_l5_by_separation"), 3),
        ])
    )  # fmt: skip
    lines += ["", f"Held out: {trivial.get('valid_sequences', '-')} sequences, {trivial.get('targets', '-')} targets. 95 % intervals."]
    lines += [
        "",
        line(
            ["against moe", "perplexity `<mask>`, ratio", *(f"{what}, difference" for what in ("DMS Spearman", "long P@L", "SS8 accuracy"))]
        ),
        line(["---"] * 5),
    ]
    for pair in body["pairs"]:
        cells = [interval(named(pair["perplexity"].get("mask"), "ratio"), "x", 4)]
        cells += [interval(named(pair.get(key), "difference"), "x", 3) for key in ("mutations", "contacts", "probe")]
        lines.append(line([pair["run"], *cells]))
    spent = ", ".join(f"{name} {value:.0f}" for name, value in body["seconds"].items())
    return "\n".join([*lines, "", f"Seconds: {spent}.", ""])


def named(entry: dict | None, key: str) -> dict:
    return {} if not entry else {"x": entry[key], "x_low": entry["low"], "x_high": entry["high"]}


def line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def number(value: float | None, digits: int) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def interval(values: dict, key: str, digits: int) -> str:
    """`value (low to high)`."""
    if values.get(key) is None:
        return "-"
    low, high = (number(values.get(f"{key}_{end}"), digits) for end in ("low", "high"))
    return f"{number(values[key], digits)} ({low} to {high})"


if __name__ == "__main__":
    main()
