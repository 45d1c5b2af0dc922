"""`bmoe profile`: what a recipe costs on this machine, and what it would cost in a precision or on a chip not here.

A precision that this machine runs is measured. If the whole recipe does not fit the machine's memory or about a minute,
fewer layers and tokens (on a CPU fewer experts too) are measured and the rest is scaled up, labelled. A precision it lacks is
reported: the unmet conditions, numerics by emulation, and a prediction for named chips.
"""

import gc
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from bmoe.errors import RequestError
from bmoe.model import counts
from bmoe.parallel.world import World
from bmoe.precision import conditions, machine
from bmoe.profiling import ceilings, footprint, measure, memory, numerics, predict
from bmoe.profiling.baseline import Forced, others, wanted
from bmoe.profiling.bottleneck import bottleneck
from bmoe.profiling.estimate import expected_load, open_data, predictions
from bmoe.profiling.fit import with_values
from bmoe.profiling.measure import Build, Steps, Subject, training_step
from bmoe.profiling.race import Counts, Ours, Take, allocated, race, results_of
from bmoe.profiling.trace import traced as traced_step
from bmoe.profiling.work import Load, Work, model_flops, parameters, scores_share
from bmoe.recipe import MoESection, Recipe

SECONDS = 40.0  # for the measured steps; building and marked steps come on top
WARMUP = {"cuda": 4, "cpu": 1}
LOOP_STEPS = 3  # of the slowest baseline, unless steps are asked for
FORMULA = "3 x (2 x active matrix parameters x real tokens + attention as masked) / (step_s x peak), recomputation not counted"


def reduced(recipe: Recipe, shards, device: torch.device, steps: int, tflops: float, beside: int = 0) -> Recipe:
    """The part of the recipe that this machine measures in about `SECONDS`: all of it, or fewer tokens, then fewer layers, then, on a
    CPU, fewer experts.

    A step has at most two batches, enough to see gradients accumulate. `beside`: models of this size that are in memory too.
    Fewer tokens leave each of many experts a handful of rows, and most of a step to their optimizer: of experts at least twice as
    many as a token visits remain, and so many that none has more rows than in the whole recipe.
    """
    batches = max(1, recipe.training.tokens_per_step // recipe.data.tokens_per_batch)
    letters = shards.alphabet.size
    whole = recipe.model.moe
    tokens, layers, dense = recipe.data.tokens_per_batch, recipe.model.layers, whole.dense_layers if whole else 0
    experts = whole.experts if whole else 0

    def shrunk() -> Recipe:
        moe = whole and whole.model_copy(update={"dense_layers": min(dense, layers - 1), "experts": experts})
        small = with_values(recipe, "model", layers=layers, moe=moe)
        small = with_values(small, "data", tokens_per_batch=tokens, max_length=min(recipe.data.max_length, tokens))
        return with_values(small, "training", tokens_per_step=tokens * min(batches, 2))

    def too_much(small: Recipe) -> bool:
        load = expected_load(small, shards)
        share = 0.5 if device.type == "cuda" else 0.3  # of the ceiling, cautiously
        seconds = model_flops(small.model, letters, load) * min(batches, 2) / (tflops * 1e12 * share)
        seconds += sum(parameters(small.model, letters)) * (1e-11 if device.type == "cuda" else 1e-7)
        gib = memory.by_category(small, letters, load)
        twice = gib["activations"] if device.type == "cuda" else 0.0  # marked steps run beside the memory of replayed ones
        peak = gib["peak"] + twice + beside * (gib["weights"] + gib["optimizer"])
        return seconds * (steps + WARMUP[device.type] + 3) > SECONDS or peak > 0.9 * ceilings.available_gib(device)

    small = shrunk()
    least = dense + 1 if whole else 1
    while too_much(small):
        if tokens > 1024:
            tokens = max(1024, tokens // 2)
        elif layers > least:
            layers = max(least, layers // 2)
        elif device.type == "cpu" and whole and _halves(whole, experts, tokens / recipe.data.tokens_per_batch):
            experts //= 2
        else:
            break
        small = shrunk()
    return small


def _halves(moe: MoESection, experts: int, tokens: float) -> bool:
    """Whether half of `experts` would do, with `tokens` of the recipe's tokens, as a share: each has at most its rows in the whole
    recipe, and a token still chooses."""
    half, groups = experts // 2, moe.groups or 1
    room = half // groups * (moe.groups_kept or 1)  # experts of the groups that a token chooses from
    return experts % (2 * groups) == 0 and half >= 2 * moe.top_k and room >= moe.top_k and half >= moe.experts * tokens


def _growth(
    names: Iterable[str], small: Recipe, load: Load, recipe: Recipe, full: Load, vocabulary: int, ceiling: dict
) -> dict[str, float]:
    """Part -> the time of its closed-form work in the whole recipe over that in `small`, each at the ceiling that it meets first."""

    def seconds(work: Work) -> float:
        return max(work.flops / (ceiling["matmul_tflops"] * 1e12), work.bytes / (ceiling["copy_gb_per_s"] * 1e9))

    loads = (replace(one, targets=one.real) for one in (load, full))  # a measured batch fills its targets up
    here, there = (measure.works(names, r, vocabulary, one) for r, one in zip((small, recipe), loads, strict=True))
    grown = {name: seconds(there[name]) / seconds(work) for name, work in here.items() if work.bytes}
    return {name: grown[name if name in grown else "experts"] for name in names}


def _whole_step(small: Recipe, recipe: Recipe, steps: Steps, parts: dict, vocabulary: int, full: Load, ceiling: dict) -> dict:
    """Seconds of the whole recipe's step on one device from what was measured of `small`.

    One batch of the whole recipe takes, part by part, as long as the measured part times the growth of its work's time. With nothing
    reduced, it grows only by what a mean batch holds beyond the measured ones.
    """
    ratios = _growth(parts, small, steps.load, recipe, full, vocabulary, ceiling)
    here = small.training.tokens_per_step // small.data.tokens_per_batch
    batches = max(1, recipe.training.tokens_per_step // recipe.data.tokens_per_batch)
    marked = sum(p["seconds"] for n, p in parts.items() if n != "optimizer") * here + parts["optimizer"]["seconds"]
    compiled = bool(small.backend.compile)
    scale = 1.0 if compiled else (steps.middle - steps.wait_s) / marked
    optimizer_s = parts["optimizer"]["seconds"] * scale
    batch_s = (steps.middle - optimizer_s - steps.wait_s) / here
    share = {n: p["seconds"] for n, p in parts.items() if n != "optimizer"}
    grown = sum(s * ratios[n] for n, s in share.items()) / sum(share.values())
    result = {
        "batch_s": batch_s * grown,
        "optimizer_s": optimizer_s * ratios["optimizer"],
        "batches_per_step": batches,
        "part_scale": scale,
    }
    result["step_s"] = result["batch_s"] * batches + result["optimizer_s"] + steps.wait_s
    for name, part in parts.items():
        # Seconds of ONE batch of the whole recipe (optimizer: of one step), scaled so that parts add up to the step.
        for key in ("forward_s", "backward_s", "seconds"):
            part[key] *= scale * ratios[name]
    if steps.wait_s > 0:
        parts["data wait"] = {"forward_s": 0.0, "backward_s": 0.0, "seconds": steps.wait_s, "tflops": None, "gb_per_s": None}
    return result


def _memory(recipe: Recipe, vocabulary: int, load: Load, counted: dict, device: torch.device) -> dict:
    """GiB by category, predicted and (under `measured`) counted; `measured_peak`, of the training steps, where the device has
    an allocator."""
    found: dict = memory.by_category(recipe, vocabulary, load)
    peak = torch.cuda.max_memory_allocated(device) / memory.GIB if device.type == "cuda" else None
    found |= {"measured": {**counted, "peak": peak or counted["peak"]}, "measured_peak": peak}
    found["label"] = "GiB by category in closed form, of what was measured"
    return found


def _measured(recipe: Recipe, built: Ours, shards, device: torch.device, steps: int, ceiling: dict, trace: str | None) -> dict:
    """The measured half of a profile."""
    vocabulary, full, subject = shards.alphabet.size, expected_load(recipe, shards), built.subject
    small = subject.recipe
    counted, counts_LE = footprint.by_category(subject, shards, device)
    half = -(-steps // 2)  # the other half comes last, so that the spread has what drifts over the run
    undisturbed = measure.whole_steps(subject, shards, device, WARMUP[device.type], half, SECONDS / 2, built.take)
    memory_gib = _memory(small, vocabulary, undisturbed.load, counted, device)
    parts = measure.parts(subject, shards, device, 3 if device.type == "cuda" else 1)
    measure.achieved(parts, small, vocabulary, undisturbed.load, ceiling)
    traced = traced_step(subject, shards, device, undisturbed.middle, trace, built.take)
    if steps > half and (device.type == "cuda" or sum(undisturbed.seconds) < SECONDS / 2):
        again = measure.whole_steps(subject, shards, device, 1, steps - half, SECONDS / 2, built.take)
        undisturbed = undisturbed.and_later(again)
    whole = _whole_step(small, recipe, undisturbed, parts, vocabulary, full, ceiling)
    low, high = (edge / undisturbed.middle for edge in undisturbed.bounds)
    step_s, batches = whole["step_s"], whole["batches_per_step"]
    peak = counts.peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    flops = model_flops(recipe.model, vocabulary, full) * batches
    here = small.training.tokens_per_step // small.data.tokens_per_batch
    few, many = (r.model.moe.experts if r.model.moe else None for r in (small, recipe))
    was_reduced = small.model.layers < recipe.model.layers or small.data.tokens_per_batch < recipe.data.tokens_per_batch
    return {
        "step_s": step_s,
        "step_s_low": step_s * low,
        "step_s_high": step_s * high,
        **{key: whole[key] for key in ("batch_s", "optimizer_s", "batches_per_step")},
        "tokens_per_s": full.real * batches / step_s,
        "residues_per_s": full.real * batches / step_s * undisturbed.residue_share,
        "fill": undisturbed.load.real / undisturbed.load.tokens,
        "mfu": flops / step_s / peak if peak else None,
        "mfu_of_measured_ceiling": flops / step_s / (ceiling["matmul_tflops"] * 1e12),
        "mfu_formula": FORMULA,
        "peak_flops": peak,
        "parts": parts,
        "parts_label": _parts_label(small),
        "measured": {
            "layers": small.model.layers, "of_layers": recipe.model.layers,
            "experts": few, "of_experts": many,
            "tokens_per_batch": small.data.tokens_per_batch, "of_tokens_per_batch": recipe.data.tokens_per_batch,
            "batches": here, "of_batches": batches,
            "step_s": undisturbed.middle, "steps": undisturbed.seconds,
            "label": _how_measured(was_reduced, here < batches),
        },
        "experts": small.backend.experts if small.model.moe else None,
        "attention": small.backend.attention,
        "compiled": bool(small.backend.compile),
        "replayed": small.backend.graphs is True,
        "memory": memory_gib,
        "padding": {
            "tail": 1 - undisturbed.load.real / undisturbed.load.tokens,
            "expert_rows": measure.padding_rows(counts_LE, recipe.precision.kind) if recipe.model.moe else 0.0,
            "rectangle": undisturbed.rectangle,
            "label": "shares: dummy tail of the slots; rows that alignment adds to the experts'; padding if a batch were a rectangle",
        },
        "bottleneck": bottleneck(
            parts, batches, scores_share(recipe.model, full), traced.get("gpu_busy_share"), device.type == "cpu"
        ),
        **traced,
    }  # fmt: skip


def _how_measured(reduced: bool, fewer_batches: bool) -> str:
    if reduced:
        return "each part scaled up by its work: a prediction, not a measurement"
    return "measured whole but for the batches, each of which counts as these" if fewer_batches else "measured whole"


def _parts_label(recipe: Recipe) -> str:
    one = "seconds of one batch of the whole recipe, optimizer of one step"
    if recipe.backend.compile:
        return f"{one}; measured with blocks uncompiled, as a compiled block is one piece: they add up to more than the step"
    return f"{one}; from marked steps, scaled to the undisturbed ones"


def unmet(recipe: Recipe, here: machine.Machine) -> list[str]:
    """What this machine or the recipe lacks for the arithmetic of its precision, one sentence each; [] if it runs here."""
    return [] if recipe.precision.emulate else conditions.unmet(recipe.precision.kind, here, recipe.model)


def implementations(recipe: Recipe, device: torch.device, te_runs: bool) -> list[str]:
    """The expert implementations that compute in the recipe's precision here; loop and grouped know no 8-bit products."""
    if recipe.precision.kind in predict.LOW and not recipe.precision.emulate:
        return ["triton" if recipe.precision.kind == "fp8_row" else "te"]
    names = ["loop", "grouped"]
    plain = recipe.model.ffn == "swiglu" and not recipe.model.bias
    if device.type == "cuda" and plain and recipe.precision.kind == "bf16":
        names.append("triton")
    if te_runs and plain and recipe.precision.kind == "bf16":
        names.append("te")
    return names


def profile(
    recipe: Recipe, build: Build, *, device: torch.device, precision: str | None = None, experts: str | None = None,
    baseline: str | None = None, forms: str | None = None, routing: str | None = None, steps: int | None = None, trace: str | None = None,
    stepping: Callable[[Subject], Take] | None = None,
) -> dict:  # fmt: skip
    """Profile a recipe. Returns the results of `--json`; `render.report` shows them.

    `build(recipe, device)` makes the Subject (a resolved recipe's model and optimizer, compiled if it says so). `experts`:
    an implementation, or `all` to compare those that run here on the same weights and batches. `baseline`, `forms`,
    `routing`: what `baseline.wanted` reads. `steps`: of each measurement; None: 10, and 3 of the slowest baseline. `stepping`
    makes the training step that is compared with a baseline; None: the eager one.
    """
    loop, steps = Counts(WARMUP[device.type], steps or LOOP_STEPS), steps or 10
    if precision:
        recipe = with_values(recipe, "precision", kind=precision)
    if experts and experts != "all":
        recipe = with_values(recipe, "backend", experts=experts)
    if experts == "all" and recipe.model.moe is None:
        raise RequestError("--experts all: this recipe has no experts (model.moe is null); leave the flag out")
    asked = wanted(baseline, forms, routing, device)
    here = machine.probe(device)
    kind = recipe.precision.kind
    lacking = unmet(recipe, here)
    shards, source = open_data(recipe)
    compute = torch.float32 if kind == "fp32" else torch.bfloat16
    ceiling = ceilings.measure(device, compute)
    tflops = ceiling["matmul_tflops"]
    results: dict = {
        "recipe": recipe.name, "device": here.device, "precision": kind, "data": source, "ceilings": ceiling,
        "step_s": None, "tokens_per_s": None, "mfu": None, "parts": {}, "memory": {}, "unmet_conditions": lacking,
        "emulated": {}, "predicted": {}, "ratios": {}, "left_out": [],
    }  # fmt: skip
    if lacking:
        flags = {"--trace": trace, "--experts all": experts == "all", "--baseline": baseline}
        results["left_out"] = [flag for flag, given in flags.items() if given]
        ceiling32 = ceiling if compute == torch.float32 else ceilings.measure(device, torch.float32)
        results["emulated"] = numerics.emulated(recipe, shards, device, ceiling32["matmul_tflops"])
        results["predicted"] = predictions(recipe, shards, here.device)
        return results
    names = implementations(recipe, device, not conditions.unmet("fp8_current", here, recipe.model)) if experts == "all" else []
    forced = Forced(device) if asked and "balanced" in asked.routings else None
    small = reduced(recipe, shards, device, steps, tflops)
    release(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def contestant(recipe: Recipe) -> Ours:
        before = allocated(device)
        subject = build(recipe, device)
        if forced:
            forced.install(subject.model)
        take = stepping(subject) if stepping else lambda batches: training_step(subject, batches, device)
        return Ours(subject, take, shards, World(device), Counts(WARMUP[device.type], steps), allocated(device) - before)

    built = contestant(small)
    if device.type == "cuda" and kind in predict.LOW and not recipe.precision.emulate:
        ceiling["low_matmul_tflops"] = ceilings.eight_bits(device)
    results |= _measured(recipe, built, shards, device, steps, ceiling, trace)
    built.reached = int((results["memory"]["measured_peak"] or 0) * memory.GIB)
    results["predicted"] = predictions(recipe, shards, here.device)
    for chip in results["predicted"].values():
        if chip["this_machine"]:
            chip["error"] = chip["step_s"] / results["step_s"] - 1
    if asked:
        single = with_values(recipe, "training", tokens_per_step=recipe.data.tokens_per_batch)
        single = reduced(single, shards, device, steps, tflops, len(asked.baselines) + max(0, len(names) - 1))
        ours = [built if single == small else contestant(single)]
        del built
        ours += [contestant(with_values(single, "backend", experts=name)) for name in names if name != results["experts"]]
        theirs = others(ours[0].subject.recipe, shards, asked, ours[0].counts, loop, World(device), forced)
        found = results_of(race(ours, theirs, asked.routings, forced.switch if forced else lambda _: None, World(device)), ours[0].name)
        results |= {"baseline": found["baseline"]}
        results["ratios"] |= found["ratios"]
        if names:
            runs = [found["baseline"][f"{one.name} packed {asked.routings[0]}"] for one in ours]
            results["experts_compared"] = {one.subject.recipe.backend.experts: run for one, run in zip(ours, runs, strict=True)}
    elif names:
        del built
        release(device)
        results |= compare_experts(recipe, contestant, shards, device, steps, ceiling, names)
    if names:
        runs = results["experts_compared"]
        results["ratios"] |= {f"experts {name}": run["step_s"] / runs[results["experts"]]["step_s"] for name, run in runs.items()}
    return results


def release(device: torch.device) -> None:
    """Give memory of dropped models back: compiled modules are part of cycles, which only the collector takes apart."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def compare_experts(
    recipe: Recipe, contestant: Callable[[Recipe], Ours], shards, device: torch.device, steps: int, ceiling: dict, names: list[str]
) -> dict:
    """Step times of each implementation: the same initial weights and batches, one after the other."""
    compared = {}
    for name in names:
        variant = reduced(with_values(recipe, "backend", experts=name), shards, device, steps, ceiling["matmul_tflops"])
        ours = contestant(variant)
        timed = measure.whole_steps(ours.subject, shards, device, WARMUP[device.type], steps, SECONDS, ours.take)
        low, high = timed.bounds
        real = timed.load.real * (variant.training.tokens_per_step // variant.data.tokens_per_batch)
        compared[name] = {"step_s": timed.middle, "step_s_low": low, "step_s_high": high, "tokens_per_s": real / timed.middle}
        del ours
        release(device)
    return {"experts_compared": compared}
