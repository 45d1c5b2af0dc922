"""Speed of the evaluation beside the cost of its forward passes.

    python benchmarks/eval_speed.py --structures DIR --mutations CSV --wildtype FASTA --column NAME
        [--recipes esm2_moe_8m,esm2_moe] [--slots 65536,16384] [--seconds 60] [--json FILE]

Random weights; sequences with the lengths of UniRef90. First the throughput of a plain forward pass is measured, FLOP/s over
full batches, with the head on 15 % of the rows, as `bmoe profile` and training have it. Then every task runs whole, host code
and transfers included, and its seconds are set beside the seconds that the FLOPs of its own forward passes (real tokens, real
lengths, the rows the head runs on) take at that throughput. Wanted: a ratio of at most 1.5.

    pseudo      pseudo-perplexity of a budget of token slots
    masked, wt  the mutation scan by masked and wild-type marginals
    pll         the pseudo-log-likelihoods of a few of its variants
    contacts features   of all pairs of all chains
    contacts    all of it: also reading the structures, families by alignment, regressions, intervals

The last has work that is no forward pass of anything; its ratio says how much. Medians of the repeats after a first run, which counts
by itself, and says so, where no time is left for another. Lines come as they are measured; what fails says why, and the rest goes on.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import nn

from bmoe import recipe as recipes
from bmoe.data.alphabet import Alphabet, alphabet
from bmoe.errors import RequestError, RunError
from bmoe.evaluation import contacts, mutations, pseudo
from bmoe.evaluation.contact_features import pair_features
from bmoe.evaluation.files import read_fasta
from bmoe.evaluation.forward import batch_slots, packed, wrap
from bmoe.evaluation.variants import read_variants
from bmoe.model import counts
from bmoe.model.transformer import Transformer
from bmoe.parallel.world import World
from bmoe.profiling.synthetic import SyntheticShards
from bmoe.recipe import Recipe
from bmoe.training import setup

HEAD_SHARE = 0.15
BATCHES = 8  # of a throughput measurement
PLL_VARIANTS = 4
PROBLEMS = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, OSError, RequestError, RunError)  # also out of memory


class Work:
    """Forward hook that counts what passes through a model: real tokens, squared lengths, rows of the head."""

    def __init__(self):
        self.tokens = self.pairs = self.rows = 0.0

    def __call__(self, _module: nn.Module, _args: tuple, arguments: dict) -> None:
        lengths = arguments["cu_seqlens"].cpu().numpy().astype(np.int64)
        lengths = np.diff(lengths)
        select = arguments.get("select_M")
        self.tokens += float(lengths.sum())
        self.pairs += float((lengths**2).sum())
        self.rows += float(lengths.sum() if select is None else select.shape[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default="esm2_moe_8m,esm2_moe")
    parser.add_argument("--slots", default="65536,16384", help="data.tokens_per_batch of each recipe")
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--budget", type=int, default=262_144, help="token slots of the pseudo-perplexity")
    parser.add_argument("--seconds", type=float, default=60.0, help="no new measurement after these")
    parser.add_argument("--structures", required=True)
    parser.add_argument("--mutations", required=True)
    parser.add_argument("--wildtype", required=True)
    parser.add_argument("--column")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, stop = torch.device(arguments.device), time.monotonic() + arguments.seconds
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    found: dict = {"device": name, "torch": torch.__version__, "models": []}
    for recipe_name, slots in zip(arguments.recipes.split(","), map(int, arguments.slots.split(",")), strict=True):
        overrides = [*arguments.overrides, f"data.tokens_per_batch={slots}", f"training.tokens_per_step={slots}"]
        recipe, _ = setup.resolve(recipes.load(recipes.find(recipe_name)[0], overrides), World(device))
        entry = {"recipe": recipe.name, "slots": slots, "tasks": {}}
        found["models"].append(entry)
        say(f"{recipe.name}, {slots} slots a batch\n")
        try:
            for line in measure(recipe, arguments, device, stop, entry):
                say(line)
                if arguments.json:
                    arguments.json.write_text(json.dumps(found, indent=1) + "\n")
        except PROBLEMS as problem:
            say(f"  {recipe.name} cannot be measured: {type(problem).__name__}: {problem}\n")
        if device.type == "cuda":
            torch.cuda.empty_cache()


def say(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def random_model(recipe: Recipe, letters: Alphabet, device: torch.device) -> Transformer:
    """A model with random weights, made on the device: filling 2.8 billion from the seed on a CPU takes a minute."""
    with device:
        model = Transformer(recipe.model, setup.vocabulary(letters), recipe.backend, recipe.precision)
    model.rotary.initialize()
    torch.manual_seed(0)
    with torch.no_grad():
        for index in model.moe_layers:
            model.blocks[index].ffn.router.selection_bias.zero_()
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, (0.4 / recipe.model.width) ** 0.5)
            else:
                parameter.fill_(0.0 if key.endswith("bias") else 1.0)
    if recipe.precision.kind != "fp32":
        setup.to_compute_dtype(model)
    return model.eval()


def measure(recipe: Recipe, arguments: argparse.Namespace, device: torch.device, stop: float, entry: dict) -> Iterator[str]:
    """Throughput and tasks of one model, into `entry` as they come, and a line of each. A task that fails says why and costs no other."""
    if time.monotonic() > stop:
        yield "  no time is left for it\n"
        return
    letters = alphabet(recipe.data.alphabet)
    model, shards = random_model(recipe, letters, device), SyntheticShards(recipe)
    entry["forward_tflops"] = throughput(model, recipe, shards, device) / 1e12
    yield f"  forward {entry['forward_tflops']:.3g} TFLOP/s\n"
    chains, wildtype = contacts.read_chains(arguments.structures), read_fasta(arguments.wildtype, letters)[0][1]
    sequences = [wrap(letters, letters.encode(chain.sequence.encode())) for chain in chains]
    known = [chain.known() for chain in chains]
    text = "".join(letters.symbols[i] for i in wildtype)
    sites = read_variants(arguments.mutations, text, arguments.column).sites

    def scored(method: str, number: int | None = None) -> Callable[[], object]:
        return lambda: mutations.score(model, recipe, letters, wildtype, sites[:number], method, device)

    tasks: dict[str, Callable[[], object]] = {
        "pseudo": lambda: pseudo.evaluate(model, shards, recipe, device=device, budget=arguments.budget),
        "masked": scored("masked_marginal"),
        "contacts features": lambda: pair_features(model, sequences, known, batch_slots(recipe, device), device),
        "contacts": lambda: contacts.evaluate(model, recipe, letters, arguments.structures, device),
        "wt": scored("wt_marginal"),
        "pll": scored("pll", PLL_VARIANTS),
    }
    for name, task in tasks.items():
        if time.monotonic() > stop:
            yield f"  no time is left for {name}\n"
            continue
        work = Work()
        handle = model.register_forward_pre_hook(work, with_kwargs=True)
        try:
            first = timed(task, device)
            handle.remove()
            taken = []
            while len(taken) < arguments.repeats and time.monotonic() + first < stop:
                taken.append(timed(task, device))
        except PROBLEMS as problem:
            yield f"  {name:18s} failed: {type(problem).__name__}: {str(problem)[:300]}\n"
            continue
        finally:
            handle.remove()
        flops = counts.forward_flops(recipe.model, letters.size, work.tokens, work.pairs, work.rows)
        least = flops / (entry["forward_tflops"] * 1e12)
        seconds = statistics.median(taken) if taken else first
        entry["tasks"][name] = {
            "seconds": seconds, "fastest": min(taken, default=first), "slowest": max(taken, default=first), "repeats": len(taken),
            "first": first, "tokens": work.tokens, "tflop": flops / 1e12, "forward_s": least, "ratio": seconds / least,
        }  # fmt: skip
        yield line(name, entry["tasks"][name])


def throughput(model: Transformer, recipe: Recipe, shards: SyntheticShards, device: torch.device) -> float:
    """FLOP/s of forward passes over full batches that are on the device already."""
    slots, longest, letters = recipe.data.tokens_per_batch, recipe.data.max_length, shards.alphabet
    rows, filled = [], 0
    while filled < slots * (BATCHES + 1):
        rows.append(wrap(letters, shards.sequence(len(rows))[: longest - 2]))
        filled += rows[-1].size
    batches = list(packed(rows, slots, device))[:BATCHES]
    work, inputs = Work(), []
    for batch in batches:
        size = int(batch.bounds[-1])
        select = torch.arange(0, size, round(1 / HEAD_SHARE), device=device)
        inputs.append({**batch.inputs, "select_M": select})
        work(model, (), inputs[-1])

    @torch.no_grad()
    def run() -> None:
        for arguments in inputs:
            model(**arguments)

    run()
    seconds = statistics.median(timed(run, device) for _ in range(3))
    return counts.forward_flops(recipe.model, letters.size, work.tokens, work.pairs, work.rows) / seconds


def timed(task: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    task()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def line(name: str, task: dict) -> str:
    only = "" if task["repeats"] else "  (first run, no time to repeat it)"
    return (
        f"  {name:18s} {task['seconds'] * 1e3:9.1f} ms [{task['fastest'] * 1e3:.1f}, {task['slowest'] * 1e3:.1f}]"
        f"  forward passes {task['forward_s'] * 1e3:9.1f} ms ({task['tokens']:,.0f} tokens)  ratio {task['ratio']:.2f}{only}\n"
    )


if __name__ == "__main__":
    main()
