"""How true `bmoe profile` and `bmoe train --dry-run` are on this machine: memory, step time, overhead, repeatability.

    python benchmarks/profile_accuracy.py [--only memory|steps] [--shapes esm2_moe] [--limit 600] [--json FILE] [--device cpu]

memory    the allocator's peak over three steps against the closed form: whole shipped recipes, with at most two batches a step,
          in bf16 and FP8, with each kind of recomputation. Steps are those of training, recorded as CUDA graphs where they are
          (a replayed step allocates nothing, so the peak is that of the eager steps and of the recording). Blocks are not
          compiled here, which the closed form is told; that costs tens of seconds a case and changes what routed rows,
          attention by varlen and dense feed-forwards keep. `steps` measures compiled models, in bf16 without recomputation.
steps     roofline: time of undisturbed steps against the prediction for this chip, compiled; bf16, with time left fp8_current.
          overhead: steps as `bmoe profile` times them against the same steps bare, as training runs them: one clock around
          all, and no wait in between. Blocks of both take turns, so that a drifting clock hits both.
          repeat: the same profile twice, judged by `bmoe profile --compare`: is a ratio of 1 within the bounds?

Every shape has a process of its own, which is started anew if a case ends it or takes longer than `--case-limit`. Cases run
beside each other as far as their memory fits, since neighbours change nothing in what one allocates; whatever is timed runs
alone. Other work on the GPU is waited for as far as memory goes. Every result is printed and written when it comes. What the
time limit leaves out is listed as not run. On a CPU nothing can be compared, and tiny shapes only try the path.

Matrices are drawn on the device, so the models are not those of training bit for bit: the CPU would need most of the time.
"""

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from crew import Crew, Order
from torch import Tensor

from bmoe import recipe as recipes
from bmoe.jobs.profile import build
from bmoe.jobs.stepping import step_of
from bmoe.model import transformer
from bmoe.parallel.world import World
from bmoe.profiling import chips, compare, footprint, measure, memory, predict, profile
from bmoe.profiling.estimate import expected_load, open_data
from bmoe.profiling.fit import with_values
from bmoe.profiling.measure import Subject
from bmoe.profiling.work import parameters
from bmoe.recipe import ModelSection, Recipe

WHOLE = {  # shipped recipes; the largest first
    "protein_moe_fine": "protein_moe_fine",
    "esm2_moe": "esm2_moe",
    "genome_mixtral": "genome_mixtral",
    "esm2_moe_8m, 65536 slots": "esm2_moe_8m data.tokens_per_batch=65536",
    "esm2_moe_8m": "esm2_moe_8m",
    "esm2_moe_tiny": "esm2_moe_tiny",
}
SIXTEEN = "esm2_moe data.tokens_per_batch=16384"
SHAPES = {
    "esm2_moe_8m, 65536 slots": "esm2_moe_8m data.tokens_per_batch=65536",
    "esm2_moe, 6 layers": f"{SIXTEEN} model.layers=6",
    "protein_moe_fine, 6 layers": "protein_moe_fine model.layers=6",
    "genome_mixtral, 8 layers": "genome_mixtral model.layers=8",
    "encoder 12 x 1024, F 2816": f"{SIXTEEN} model.layers=12 model.width=1024 model.heads=16 model.moe.expert_width=2816",
    "encoder 4 x 2048, F 5632": f"{SIXTEEN} model.layers=4 model.width=2048 model.heads=32 model.moe.expert_width=5632",
}
TINY = {
    "esm2_moe_tiny": "esm2_moe_tiny",
    "2 x 256": "esm2_moe_tiny model.layers=2 model.width=256",
}
RECOMPUTE = ("none", "experts", "full")
CONTEXT_GIB = 1.0  # a process's share of the GPU besides its tensors


class Case(NamedTuple):
    """How a shape runs: `precision` as `kind` or `kind/experts`, recomputation, compiled blocks, most batches of a step."""

    precision: str
    recompute: str = "none"
    compiled: bool = False
    batches: int = 1

    def recipe(self, shape: str) -> Recipe:
        """The shape's recipe with these."""
        name, *settings = shape.split()
        kind, _, experts = self.precision.partition("/")
        settings += [f"precision.kind={kind}", f"backend.recompute={self.recompute}", f"backend.experts={experts or 'auto'}"]
        recipe = recipes.load(recipes.find(name)[0], [*settings, f"backend.compile={'true' if self.compiled else 'false'}"])
        slots = recipe.data.tokens_per_batch
        return with_values(recipe, "training", tokens_per_step=min(recipe.training.tokens_per_step, self.batches * slots))


def _drawn_on(device: torch.device):
    """`transformer.initial_value` with matrices drawn on `device`, all with the same deviation."""
    exact = transformer.initial_value

    def value(name: str, shape: torch.Size, model: ModelSection, seed: int) -> Tensor:
        small = len(shape) < 2 or name.endswith("bias")
        return exact(name, shape, model, seed) if small else torch.randn(shape, device=device).mul_(0.02)

    return value


class Worker:
    """One shape in one process: holds the model that it built last."""

    def __init__(self, shape: str, device: str):
        self.shape, self.device = shape, torch.device(device)
        self.cuda = self.device.type == "cuda"
        if self.cuda:
            transformer.initial_value = _drawn_on(self.device)
        self.drop()

    def drop(self) -> None:
        """Free the model, and give all unused memory back: other processes use the same GPU."""
        self.case = self.subject = self.take = self.shards = None
        self._free()

    def _free(self) -> None:
        gc.collect()
        if self.cuda:
            torch._C._cuda_clearCublasWorkspaces()  # one a stream, and every model has a stream of its own
            torch.cuda.empty_cache()

    def _hold(self, case: Case) -> Subject:
        """The model of a case: the one in hand, or built."""
        if self.case != case:
            self.drop()
            recipe = case.recipe(self.shape)
            self.shards, _ = open_data(recipe)
            self.subject = build(recipe, self.device)
            self.take, self.case = step_of(self.subject, World(self.device)), case
        return self.subject

    def _peak(self) -> float | None:
        """GiB that the allocator counted at most since the last call; on a CPU None."""
        if not self.cuda:
            return None
        peak = torch.cuda.max_memory_allocated(self.device) / memory.GIB
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def _steps(self, steps: int) -> measure.Steps:
        return measure.whole_steps(self.subject, self.shards, self.device, 0, steps, take=self.take)

    def memory(self, case: Case, keep: bool = False) -> dict:
        """GiB in closed form and by the allocator: while building, over a first step, whose tensors are counted, and over
        the next three."""
        self.drop()
        self._peak()
        before = torch.cuda.memory_allocated(self.device) / memory.GIB if self.cuda else None
        subject = self._hold(case)
        recipe, building = subject.recipe, self._peak()
        counted, _ = footprint.by_category(subject, self.shards, self.device)
        first = self._peak()
        self._free()
        self._steps(3)  # the recording is among them
        measured = self._peak()
        sizes = memory.by_category(recipe, self.shards.alphabet.size, expected_load(recipe, self.shards))
        found = {
            "experts": recipe.backend.experts,
            "attention": recipe.backend.attention,
            "replayed": recipe.backend.graphs is True,
            "batches": recipe.training.tokens_per_step // recipe.data.tokens_per_batch,
            "predicted": sizes,
            "counted": counted,
            "measured_peak": measured,
            "building_peak": building,
            "first_step_peak": first,
            "allocated_before": before,
            "reserved": torch.cuda.memory_reserved(self.device) / memory.GIB if self.cuda else None,
            "error": sizes["peak"] / measured - 1 if measured else None,
        }
        if not keep:
            self.drop()
        return found

    def roofline(self, case: Case, steps: int) -> dict:
        """Seconds of a step, measured and predicted for this chip (on a CPU: for an H200)."""
        recipe = self._hold(case).recipe
        found = measure.whole_steps(self.subject, self.shards, self.device, 5, steps, take=self.take)
        here = chips.of_device(torch.cuda.get_device_name(self.device)) if self.cuda else None
        load = expected_load(recipe, self.shards)
        predicted = predict.step(recipe, self.shards.alphabet.size, load, here or chips.find("h200"))
        return {
            "chip": predicted["chip"],
            "experts": recipe.backend.experts,
            "attention": recipe.backend.attention,
            "replayed": recipe.backend.graphs is True,
            "settings": self.shape,
            "load": asdict(load),
            "measured_s": found.middle,
            "seconds": found.seconds,
            "data_wait_s": found.wait_s,
            "predicted_s": predicted["step_s"],
            "predicted_parts": {name: part["seconds"] for name, part in predicted["parts"].items()},
            "predicted_optimizer_s": predicted["optimizer_s"],
            "error": predicted["step_s"] / found.middle - 1 if here else None,
        }

    def parts(self, case: Case) -> dict:
        """Measured parts, as `bmoe profile` marks them (blocks uncompiled)."""
        self._hold(case)
        found = measure.parts(self.subject, self.shards, self.device, 2)
        return {"parts": {name: {key: part[key] for key in ("forward_s", "backward_s")} for name, part in found.items()}}

    def overhead(self, case: Case, steps: int, blocks: int) -> dict:
        """Mean seconds of a step in blocks of bare and of timed steps, in turn, which of them first in turn too."""
        self._hold(case)
        self._steps(5)  # until the steps are replayed
        bare, timed = [], []
        for number in range(blocks):
            for mine in (bare, timed) if number % 2 else (timed, bare):
                mine.append(self._bare_seconds(steps) if mine is bare else self._timed_seconds(steps))
        ratios = [t / b - 1 for t, b in zip(timed, bare, strict=True)]
        replayed = self.subject.recipe.backend.graphs is True
        return {"bare_s": bare, "timed_s": timed, "steps": steps, "ratios": ratios, "overhead": median(ratios), "replayed": replayed}

    def _timed_seconds(self, steps: int) -> float:
        found = measure.whole_steps(self.subject, self.shards, self.device, 1, steps, take=self.take).seconds
        return sum(found) / len(found)

    def _bare_seconds(self, steps: int) -> float:
        """Mean seconds of a step as training runs it: the device is waited for before the first and after the last."""
        with measure.loader(self.subject, self.shards, self.device) as stream:
            for number in range(steps + 1):
                if number == 1:
                    measure.synchronise(self.device)
                    began = time.perf_counter()
                self.take(stream.next().batches)
            measure.synchronise(self.device)
        return (time.perf_counter() - began) / steps

    def repeat(self, case: Case, steps: int) -> dict:
        """Two profiles of the same recipe, each with its own model, and the verdict of `--compare`."""
        self.drop()
        recipe, stepping = case.recipe(self.shape), partial(step_of, world=World(self.device))
        runs = []
        for _ in range(2):
            runs.append(profile(recipe, build, device=self.device, steps=steps, stepping=stepping))
            self.drop()
        changed = compare(*runs)["step"]
        bounds = [[r["step_s_low"], r["step_s_high"]] for r in runs]
        return {**changed, "agree": not changed["changed"], "bounds": bounds, "replayed": runs[0]["replayed"]}


def needed_gib(shape: str, case: Case) -> float:
    """GiB of the GPU that a case takes, by the closed form: its steps, or its building, when all masters are still whole."""
    recipe = case.recipe(shape)
    shards, _ = open_data(recipe)
    sizes = memory.by_category(recipe, shards.alphabet.size, expected_load(recipe, shards))
    several = recipe.training.tokens_per_step > recipe.data.tokens_per_batch
    static = sizes["weights"] + sizes["optimizer"] + (sizes["gradients"] if several else 0.0)
    masters = 4 * sum(parameters(recipe.model, shards.alphabet.size)) / memory.GIB
    return 1.1 * max(sizes["peak"], static + masters) + CONTEXT_GIB


def summary(results: dict) -> dict:
    """The numbers that matter."""
    cases = [case for case in results["memory"] if case.get("error") is not None]
    steps = [case for case in results["roofline"] if case.get("error") is not None]
    kinds = sorted({case["precision"] for case in (*cases, *steps)})
    errors = {kind: [abs(c["error"]) for c in cases if c["precision"] == kind] for kind in kinds}
    times = {kind: [abs(c["error"]) for c in steps if c["precision"] == kind] for kind in kinds}
    return {
        "memory": {k: {"cases": len(e), "within_10_percent": sum(x <= 0.1 for x in e), "worst": max(e)} for k, e in errors.items() if e},
        "roofline": {kind: {"cases": len(e), "median": median(e), "worst": max(e)} for kind, e in times.items() if e},
        "overhead": {case["shape"]: case.get("overhead") for case in results["overhead"]},
        "repeats_agree": {case["shape"]: case.get("agree") for case in results["repeat"]},
    }


def percent(value: float | None) -> str:
    """+1.2%, or - for None."""
    return f"{value:+.1%}" if value is not None else "-"


def line(kind: str, case: dict) -> str:
    """One result for a terminal."""
    head = f"{kind:9s} {case['shape']:27s} {case['precision']:14s}"
    if kind == "memory":
        head += f" {case['recompute']:8s} {'compiled' if case['compiled'] else 'eager':8s}"
    if "problem" in case:
        return f"{head} {case['problem']}"
    if kind == "memory":
        if case["measured_peak"] is None:
            return f"{head} no allocator to ask"
        sizes = f"closed form {case['predicted']['peak']:7.3f} GiB, measured {case['measured_peak']:7.3f}, {percent(case['error'])}"
        besides = f"building {case['building_peak']:.2f}, reserved {case['reserved']:.2f}"
        return f"{head} {sizes} ({case['experts']}, {case['attention']}{', replayed' if case['replayed'] else ''}; {besides})"
    if kind == "roofline":
        times = f"predicted {case['predicted_s'] * 1e3:7.2f} ms, measured {case['measured_s'] * 1e3:7.2f}, {percent(case['error'])}"
        return f"{head} {times} ({case['experts']}, {case['attention']}{', replayed' if case['replayed'] else ''})"
    if kind == "overhead":
        low, high = min(case["ratios"]), max(case["ratios"])
        return f"{head} {percent(case['overhead'])} ({percent(low)} to {percent(high)} by block{', replayed' if case['replayed'] else ''})"
    noise = f"{percent(case['low'] - 1)} to {percent(case['high'] - 1)}"
    return f"{head} {percent(case['ratio'] - 1)}, noise {noise}: {'agree' if case['agree'] else 'DIFFER'}"


def points(results: dict) -> str:
    """The measured steps as lines of `bmoe/profiling/validation.py`."""
    found = []
    for case in results["roofline"]:
        if case.get("error") is not None:
            load = case["load"]
            batch = f"Load({load['tokens']}, {load['real']}, {load['pairs']:.0f}, {load['targets']})"
            kind, _, _ = case["precision"].partition("/")
            settings = f"{case['settings']} precision.kind={kind} backend.experts={case['experts']} backend.attention={case['attention']}"
            found.append(f'    Step("{settings}", {batch}, {case["measured_s"]:.4g}),')
    return "\n".join(found)


class Report:
    """Keeps results, prints each when it comes, and writes all of them every time."""

    def __init__(self, file: str | None, cuda: bool, device: str, began: float):
        self.results: dict = {"memory": [], "roofline": [], "overhead": [], "repeat": []}
        self.file, self.began, self.passed = file, began, {}
        self.versions = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else device}

    def add(self, kind: str, case: dict) -> None:
        """A result."""
        self.results[kind].append(case)
        sys.stdout.write(f"{time.monotonic() - self.began:5.0f} s  {line(kind, case)}\n")
        sys.stdout.flush()
        self.write()

    def phase(self, name: str) -> None:
        """A phase has ended."""
        self.passed[name] = time.monotonic() - self.began
        self.write()

    def write(self) -> None:
        """The JSON file as of now."""
        if self.file:
            body = {"versions": self.versions, "passed_s": self.passed, "summary": summary(self.results), **self.results}
            partial_file = Path(f"{self.file}.partial")
            partial_file.write_text(json.dumps(body, indent=1) + "\n")
            partial_file.replace(self.file)


def measure_memory(crew: Crew, report: Report, kinds: list[str], recomputes: list[str]) -> None:
    """The memory of every whole recipe, precision and recomputation."""
    orders = []
    for name, shape in crew.kinds.items():
        for kind in kinds:
            for recompute in recomputes:
                case = Case(kind, recompute, False, 2)
                orders.append(Order(name, "memory", {"case": case}, needed_gib(shape, case)))
    again = []
    for order, found in crew.follow(orders):
        if found.get("problem", "").startswith("OutOfMemoryError"):
            again.append(order)
        else:
            report.add("memory", {"shape": order.name, **order.arguments["case"]._asdict(), **found})
    for order, found in crew.follow(again):  # others may have needed the memory
        report.add("memory", {"shape": order.name, **order.arguments["case"]._asdict(), **found})
    report.phase("memory")


def measure_steps(crew: Crew, report: Report, kinds: list[str], compiled: bool, steps: int) -> None:
    """Roofline, overhead and repetition of the first kind; then the roofline of the others."""
    names = list(crew.kinds)
    base = Case(kinds[0], compiled=compiled)

    def build_all(case: Case) -> None:
        orders = [Order(name, "memory", {"case": case, "keep": True}) for name in names]
        for order, found in crew.follow(orders):
            report.add("memory", {"shape": order.name, **case._asdict(), **found})

    def timed(kind: str, case: Case, orders: list[Order]) -> None:
        for order in orders:  # one by one: nothing else may run
            found = next(iter(crew.follow([order])))[1]
            report.add(kind, {"shape": order.name, **case._asdict(), **found})

    build_all(base)
    report.phase("build")
    timed("roofline", base, [Order(name, "roofline", {"case": base, "steps": steps}) for name in names])
    report.phase("roofline")
    timed("overhead", base, [Order(name, "overhead", {"case": base, "steps": 10, "blocks": 5}) for name in names[:2]])
    report.phase("overhead")
    timed("repeat", base, [Order(names[min(1, len(names) - 1)], "repeat", {"case": base, "steps": steps})])
    report.phase("repeat")
    for kind in kinds[1:]:
        case = Case(kind, compiled=compiled)
        build_all(case)
        timed("roofline", case, [Order(name, "roofline", {"case": case, "steps": steps}) for name in names])
        report.phase(f"roofline, {kind}")


def chosen(shapes: dict[str, str], parts: str | None) -> dict[str, str]:
    """The shapes whose names are one of `parts`, or contain one that is no name; all without `parts`."""
    wanted = parts.split(",") if parts else [""]
    return {name: shape for name, shape in shapes.items() if any(part == name if part in shapes else part in name for part in wanted)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=("memory", "steps"), help="one half; default both")
    parser.add_argument(
        "--precisions", default="bf16,fp8_current", help="kind or kind/experts, as in fp8_current/te; the first is the base"
    )
    parser.add_argument("--shapes", help="only shapes whose names are or, where none is, contain one of these, by comma")
    parser.add_argument("--recompute", default=",".join(RECOMPUTE), help="kinds of recomputation whose memory is measured")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for everything")
    parser.add_argument("--case-limit", type=float, default=90.0, help="seconds for one case")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--eager", action="store_true", help="do not compile the models of the second half")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    began = time.monotonic()
    cuda = arguments.device.startswith("cuda")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    kinds = arguments.precisions.split(",") if cuda else ["fp32"]
    room = 0.9 * torch.cuda.get_device_properties(0).total_memory / memory.GIB if cuda else float("inf")

    def free() -> float:
        return torch.cuda.mem_get_info()[0] / memory.GIB if cuda else float("inf")

    report = Report(arguments.json, cuda, arguments.device, began)
    halves = (("memory", WHOLE if cuda else TINY), ("steps", SHAPES if cuda else TINY))
    for half, shapes in halves:
        if arguments.only in (None, half):
            wanted = chosen(shapes, arguments.shapes)
            crew = Crew(Worker, wanted, arguments.device, began + arguments.limit, arguments.case_limit, room, free)
            try:
                if half == "memory":
                    measure_memory(crew, report, kinds, arguments.recompute.split(","))
                else:
                    measure_steps(crew, report, kinds, cuda and not arguments.eager, arguments.steps)
            finally:
                crew.close()
    measured = points(report.results)
    sys.stdout.write(f"{measured}\n{json.dumps(summary(report.results))}\n")


if __name__ == "__main__":
    main()
