"""How true `bmoe profile` and `bmoe train --dry-run` are on this machine: memory, step time, overhead, repeatability.

    python benchmarks/profile_accuracy.py [--device cpu] [--limit 600] [--json FILE]

memory    the allocator's peak over two steps against the closed form, per shape x precision x recomputation. Eager, then for
          bf16 compiled too (each compilation costs tens of seconds); the closed form is asked for the same.
roofline  time of undisturbed steps against the prediction for this chip, compiled, bf16; with time left fp8_current too.
overhead  steps as `bmoe profile` times them against the same steps bare, as training runs them: one clock around all, and
          no wait in between. Blocks of both take turns, so that a drifting clock hits both.
repeat    the same profile twice, judged by `bmoe profile --compare`: is a ratio of 1 within the bounds?

Every shape has a process of its own. Memory is measured and models are compiled in all of them at once, as neighbours change
nothing in what one allocates; whatever is timed runs alone. What the time limit leaves out is listed as not run. On a CPU
nothing can be compared, and tiny shapes only try the path.
"""

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
import traceback
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from statistics import median

import torch

from bmoe import recipe as recipes
from bmoe.errors import RequestError, RunError
from bmoe.jobs.profile import build
from bmoe.jobs.stepping import step_of
from bmoe.parallel.world import World
from bmoe.profiling import chips, compare, measure, memory, predict, profile
from bmoe.profiling.estimate import expected_load, open_data, with_values
from bmoe.profiling.measure import Subject
from bmoe.recipe import Recipe

SHAPES = {
    "esm2_moe_8m": "esm2_moe_8m data.tokens_per_batch=65536",
    "esm2_moe, 6 layers": "esm2_moe model.layers=6 data.tokens_per_batch=16384",
    "protein_moe_fine, 6 layers": "protein_moe_fine model.layers=6 data.tokens_per_batch=16384",
    "genome_mixtral, 8 layers": "genome_mixtral model.layers=8 data.tokens_per_batch=16384",
    "encoder 12 x 1024, F 2816": "esm2_moe model.layers=12 model.width=1024 model.heads=16 model.moe.expert_width=2816 "
    "data.tokens_per_batch=16384",
    "encoder 4 x 2048, F 5632": "esm2_moe model.layers=4 model.width=2048 model.heads=32 model.moe.expert_width=5632 "
    "data.tokens_per_batch=16384",
}
TINY = {
    "esm2_moe_tiny": "esm2_moe_tiny data.tokens_per_batch=1024",
    "2 x 256": "esm2_moe_tiny model.layers=2 model.width=256 data.tokens_per_batch=1024",
}
RECOMPUTE = ("none", "experts", "full")
NOT_RUN = "not run: the time limit came first"


def load(shape: str, precision: str, recompute: str, compiled: bool) -> Recipe:
    """A shape's recipe in a precision, with one batch a step."""
    name, *settings = shape.split()
    settings += [f"precision.kind={precision}", f"backend.recompute={recompute}", f"backend.compile={'true' if compiled else 'false'}"]
    recipe = recipes.load(recipes.find(name)[0], settings)
    return with_values(recipe, "training", tokens_per_step=recipe.data.tokens_per_batch)


class Worker:
    """One shape in one process: holds the model that it built last."""

    def __init__(self, shape: str, device: torch.device):
        self.shape, self.device, self.subject, self.take = shape, device, None, None

    def _build(self, precision: str, recompute: str, compiled: bool) -> Subject:
        self.subject = self.take = None
        self._release()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        recipe = load(self.shape, precision, recompute, compiled)
        self.shards, _ = open_data(recipe)
        self.subject = build(recipe, self.device)
        self.take = step_of(self.subject, World(self.device))
        return self.subject

    def _release(self) -> None:
        """Give unused memory back: the other shapes' processes use the same GPU."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def memory(self, precision: str, recompute: str, compiled: bool) -> dict:
        """GiB in closed form and by the allocator: over everything so far, and over two steps after the first."""
        before = torch.cuda.memory_allocated(self.device) / memory.GIB if self.device.type == "cuda" else None
        subject = self._build(precision, recompute, compiled)
        first = self._steps_peak(4 if subject.recipe.backend.graphs is True else 1)  # until the steps are replayed
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        measured = self._steps_peak(2)
        recipe = subject.recipe
        sizes = memory.by_category(recipe, self.shards.alphabet.size, expected_load(recipe, self.shards))
        return {
            "experts": recipe.backend.experts,
            "attention": recipe.backend.attention,
            "replayed": recipe.backend.graphs is True,
            "predicted": sizes,
            "measured_peak": measured,
            "first_step_peak": first,
            "allocated_before": before,
            "error": sizes["peak"] / measured - 1 if measured else None,
        }

    def _steps_peak(self, steps: int) -> float | None:
        measure.whole_steps(self.subject, self.shards, self.device, 0, steps, take=self.take)
        return torch.cuda.max_memory_allocated(self.device) / memory.GIB if self.device.type == "cuda" else None

    def roofline(self, steps: int) -> dict:
        """Seconds of a step of the model in hand, measured and predicted for this chip (on a CPU: for an H200)."""
        recipe = self.subject.recipe
        found = measure.whole_steps(self.subject, self.shards, self.device, 5, steps, take=self.take)
        here = chips.of_device(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        predicted = predict.step(recipe, self.shards.alphabet.size, expected_load(recipe, self.shards), here or chips.find("h200"))
        return {
            "chip": predicted["chip"],
            "precision": recipe.precision.kind,
            "experts": recipe.backend.experts,
            "attention": recipe.backend.attention,
            "replayed": recipe.backend.graphs is True,
            "measured_s": found.middle,
            "seconds": found.seconds,
            "data_wait_s": found.wait_s,
            "predicted_s": predicted["step_s"],
            "predicted_parts": {name: part["seconds"] for name, part in predicted["parts"].items()},
            "predicted_optimizer_s": predicted["optimizer_s"],
            "error": predicted["step_s"] / found.middle - 1 if here else None,
        }

    def parts(self) -> dict:
        """Measured parts of the model in hand, as `bmoe profile` marks them (blocks uncompiled)."""
        found = measure.parts(self.subject, self.shards, self.device, 2)
        self._release()
        return {name: {key: part[key] for key in ("forward_s", "backward_s")} for name, part in found.items()}

    def overhead(self, steps: int, blocks: int) -> dict:
        """Mean seconds of a step in blocks of bare and of timed steps, in turn."""
        bare, timed = [], []
        for _ in range(blocks):
            bare.append(self.bare_seconds(steps))
            found = measure.whole_steps(self.subject, self.shards, self.device, 1, steps, take=self.take).seconds
            timed.append(sum(found) / len(found))
        return {"bare_s": bare, "timed_s": timed, "steps": steps, "overhead": median(timed) / median(bare) - 1}

    def bare_seconds(self, steps: int) -> float:
        """Mean seconds of a step as training runs it: the device is waited for before the first and after the last."""
        with measure.loader(self.subject, self.shards, self.device) as stream:
            for number in range(steps + 1):
                if number == 1:
                    measure.synchronise(self.device)
                    began = time.perf_counter()
                self.take(stream.next().batches)
            measure.synchronise(self.device)
        return (time.perf_counter() - began) / steps

    def repeat(self, steps: int) -> dict:
        """Two profiles of the same recipe, each with its own model, and the verdict of `--compare`."""
        self.subject = self.take = None
        compiled, precision = self.device.type == "cuda", "bf16" if self.device.type == "cuda" else "fp32"
        recipe = load(self.shape, precision, "none", compiled)
        stepping = partial(step_of, world=World(self.device))
        runs = [profile(recipe, build, device=self.device, steps=steps, stepping=stepping) for _ in range(2)]
        changed = compare(*runs)["step"]
        mean = sum(runs[0]["measured"]["steps"]) / len(runs[0]["measured"]["steps"])
        return {**changed, "agree": not changed["changed"], "bounds": [[r["step_s_low"], r["step_s_high"]] for r in runs], "mean_s": mean}


def serve(shape: str, device: str, pipe: Connection) -> None:
    """A worker's process: (method, arguments) in, result or problem out, until the pipe closes."""
    sys.stdout = sys.stderr
    worker = Worker(shape, torch.device(device))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:  # nobody gives orders any more
            return
        began = time.monotonic()
        try:
            result = getattr(worker, method)(**arguments)
        except (
            RuntimeError,
            ValueError,
            RequestError,
            RunError,
        ) as problem:  # out of memory, or what the machine lacks: it stands in the results
            traceback.print_exc()
            result = {"problem": f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"}
        pipe.send(result | {"took_s": time.monotonic() - began})


class Crew:
    """All workers; orders go to one of them, or to all at once, until the deadline."""

    def __init__(self, shapes: dict[str, str], device: str, deadline: float):
        self.deadline, self.pipes, self.processes = deadline, {}, []
        context = multiprocessing.get_context("spawn")
        for name, shape in shapes.items():
            self.pipes[name], theirs = context.Pipe()
            process = context.Process(target=serve, args=(shape, device, theirs))
            process.start()
            theirs.close()
            self.processes.append(process)
        self.lost: set[str] = set()

    def together(self, names: list[str], orders: list[tuple[str, dict]]) -> dict[str, list[dict]]:
        """Every named worker runs all orders, one after the other, all workers at once."""
        results = {name: [] for name in names}
        waiting = [name for name in names if name not in self.lost]
        for name in waiting:
            self.pipes[name].send(orders[0])
        while waiting:
            ready = wait([self.pipes[name] for name in waiting], max(0.0, self.deadline - time.monotonic()))
            if not ready:
                self.lost |= set(waiting)  # still busy: they take no more orders
                break
            for name in [name for name in waiting if self.pipes[name] in ready]:
                try:
                    results[name].append(self.pipes[name].recv())
                except EOFError:
                    results[name].append({"problem": "its process ended"})
                    self.lost.add(name)
                if len(results[name]) < len(orders) and name not in self.lost and time.monotonic() < self.deadline:
                    self.pipes[name].send(orders[len(results[name])])
                else:
                    waiting.remove(name)
        for found in results.values():
            found += [{"problem": NOT_RUN}] * (len(orders) - len(found))
        return results

    def alone(self, name: str, method: str, **arguments) -> dict:
        """One worker runs one order; all others idle."""
        return self.together([name], [(method, arguments)])[name][0]

    def close(self) -> None:
        """End the workers."""
        for process in self.processes:
            process.kill()
            process.join()


def summary(results: dict) -> dict:
    """The numbers that matter."""
    cases = [case for case in results["memory"] if case.get("error") is not None]
    errors = [abs(case["error"]) for case in cases]
    steps = [abs(case["error"]) for case in results["roofline"] if case.get("error") is not None]
    low = [abs(c["error"]) for c in results["roofline"] if c.get("error") is not None and c["precision"] == "bf16"]
    return {
        "memory_cases": len(errors),
        "memory_within_10_percent": sum(error <= 0.1 for error in errors),
        "memory_worst_error": max(errors, default=None),
        "roofline_cases": len(steps),
        "roofline_median_error": median(steps) if steps else None,
        "roofline_median_error_bf16": median(low) if low else None,
        "overhead": {case["shape"]: case.get("overhead") for case in results["overhead"]},
        "repeats_agree": {case["shape"]: case.get("agree") for case in results["repeat"]},
    }


def text(results: dict) -> str:
    """Tables for a terminal."""

    def percent(value: float | None) -> str:
        return f"{value:+.1%}" if value is not None else "-"

    lines = ["memory: shape, precision, recompute, compiled: predicted, measured peak GiB, error"]
    for case in results["memory"]:
        head = f"  {case['shape']:28s} {case['precision']:12s} {case['recompute']:8s} {'compiled' if case['compiled'] else 'eager':8s}"
        if "problem" in case or case["measured_peak"] is None:
            lines.append(f"{head} {case.get('problem', 'no allocator to ask')}")
        else:
            lines.append(f"{head} {case['predicted']['peak']:7.2f} {case['measured_peak']:7.2f} {percent(case['error'])}")
    lines.append("roofline: predicted, measured ms, error")
    for case in results["roofline"]:
        numbers = case.get("problem") or f"{case['predicted_s'] * 1e3:8.2f} {case['measured_s'] * 1e3:8.2f} {percent(case['error'])}"
        lines.append(f"  {case['shape']:28s} {case.get('precision', ''):12s} {numbers}")
    lines += [f"overhead: {case['shape']}: {case.get('problem') or percent(case['overhead'])}" for case in results["overhead"]]
    for case in results["repeat"]:
        verdict = case.get("problem") or f"{percent(case['ratio'] - 1)}, within noise: {case['agree']}"
        lines.append(f"repeat: {case['shape']}: {verdict}")
    return "\n".join([*lines, json.dumps(summary(results))]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    began = time.monotonic()
    cuda = arguments.device.startswith("cuda")
    shapes, kinds = (SHAPES, ("bf16", "fp8_current")) if cuda else (TINY, ("fp32",))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    results: dict = {"memory": [], "roofline": [], "overhead": [], "repeat": []}
    crew, names = Crew(shapes, arguments.device, began + arguments.limit), list(shapes)
    passed = {}

    def note(phase: str) -> None:
        passed[phase] = time.monotonic() - began
        versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else arguments.device}
        if arguments.json:
            body = {"versions": versions, "passed_s": passed, "summary": summary(results), **results}
            Path(arguments.json).write_text(json.dumps(body, indent=1) + "\n")

    def memories(cases: list[tuple[str, str, bool]]) -> None:
        keys = ("precision", "recompute", "compiled")
        orders = [("memory", dict(zip(keys, case, strict=True))) for case in cases]
        for name, found in crew.together(names, orders).items():
            results["memory"] += [{"shape": name, **order[1], **case} for order, case in zip(orders, found, strict=True)]

    def rooflines(extra: bool) -> None:
        for name in names:
            results["roofline"].append({"shape": name, **crew.alone(name, "roofline", steps=arguments.steps)})
            if extra:
                results["roofline"][-1]["measured_parts"] = crew.alone(name, "parts")

    try:
        memories([(kind, recompute, False) for kind in kinds for recompute in RECOMPUTE])
        note("memory, eager")
        if cuda:
            memories([(kinds[0], "none", True)])
            note("memory, compiled")
        rooflines(extra=True)
        note("roofline")
        for name in names[:2]:
            results["overhead"].append({"shape": name, **crew.alone(name, "overhead", steps=8, blocks=3)})
        note("overhead")
        results["repeat"].append({"shape": names[1], **crew.alone(names[1], "repeat", steps=arguments.steps)})
        note("repeat")
        if cuda:
            memories([("fp8_current", "none", True)])
            rooflines(extra=False)
            memories([("bf16", "full", True), ("bf16", "experts", True)])
            note("with the time left")
    finally:
        crew.close()
    sys.stdout.write(text(results))


if __name__ == "__main__":
    main()
