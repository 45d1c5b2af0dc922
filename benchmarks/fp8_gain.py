"""What precision `fp8_row` gains over our own bf16 on one Hopper GPU: single MoE layers and a whole training step, in turns.

    python benchmarks/fp8_gain.py [--repeats 15] [--layers 4] [--slots 32768] [--json FILE]

Layers: router, experts and combine, forward and backward with random tokens, each recorded as a CUDA graph, four replays a
timing; in FP8 both with weights quantised in the pass and with weights held, as a step of several batches holds them after
its first. Whole step: a decoder of layers of the first shape, whose experts' products take more than 60 % of the step, on
random full-length sequences of 1,024 tokens, replayed as in training: clip, AdamW with fp32 masters and moments. The
share of the experts' products is that of their kernels in one profiled bf16 step. All numbers are medians; bf16 and FP8 take
turns, so that a drifting clock favours neither.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np
import torch

from bmoe import recipe as recipes
from bmoe.data.alphabet import alphabet
from bmoe.data.loader import TrainingLoader
from bmoe.data.sampler import Position
from bmoe.jobs.train import build
from bmoe.parallel.world import World
from bmoe.profiling.layer import SHAPES, Layer, LayerShape, time_ms
from bmoe.profiling.measure import synchronise
from bmoe.training import setup
from bmoe.training.step import Stepper

PRECISIONS = ("bf16", "fp8_row")
HELD = "fp8_row, weights held"
LENGTH = 1024
REPLAYS = 4


class FullLength:
    """Random proteins that fill max_length with their two specials."""

    clusters = None

    def __init__(self, sequences: int):
        self.alphabet, draw = alphabet("protein"), np.random.default_rng(0)
        self.lengths = np.full(sequences, LENGTH - 2, np.int64)
        self.ids = draw.choice(self.alphabet.residues, (sequences, LENGTH - 2)).astype(np.uint8)

    def __len__(self) -> int:
        return len(self.ids)

    def sequence(self, index: int) -> np.ndarray:
        return self.ids[index]

    def soft_mask(self, index: int) -> None:
        return None


def recorded(shape: LayerShape, precision: str, device: torch.device) -> tuple[Callable[[], None], float]:
    """(replay of a layer's forward and backward, memory of the recording's peak in GiB)."""
    torch.manual_seed(1)
    layer = Layer("triton", shape, None, precision.split(",")[0]).cast(device, torch.bfloat16)
    if precision == HELD:
        next(module for module in layer.modules() if hasattr(module, "hold")).hold()
    x_TD = torch.randn(shape.tokens, shape.width, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy_TD = torch.randn_like(x_TD)

    def step() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(layer(x_TD), [x_TD, *layer.parameters()], dy_TD)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> None:
        graph.replay()
        assert results is not None  # what the graph writes stays alive with it

    return replay, (torch.cuda.max_memory_allocated() - before) / 2**30


def layer_gain(shape: LayerShape, repeats: int, device: torch.device) -> dict:
    """Milliseconds of each way, in turns."""
    steps = {way: recorded(shape, way, device) for way in (*PRECISIONS, HELD)}
    times: dict[str, list[float]] = {way: [] for way in steps}
    for repeat in range(repeats + 2):
        for way, (replay, _) in steps.items():
            spent = time_ms(replay, device, REPLAYS)
            if repeat >= 2:
                times[way].append(spent)
    median = {way: statistics.median(spent) for way, spent in times.items()}
    turns = {way: sorted(a / b for a, b in zip(times["bf16"], times[way], strict=True)) for way in (PRECISIONS[1], HELD)}
    return {
        "shape": shape.name,
        "ms": median,
        "ratios": {way: statistics.median(ratios) for way, ratios in turns.items()},
        "turns": {way: (ratios[0], ratios[-1]) for way, ratios in turns.items()},
        "tflops": {way: shape.flops / spent / 1e9 for way, spent in median.items()},
        "peak_gib": {way: memory for way, (_, memory) in steps.items()},
    }


class Model:
    """A whole model that trains in one precision; its loader lives as long as `stack`."""

    def __init__(self, precision: str, layers: int, slots: int, device: torch.device, stack: ExitStack):
        shape = SHAPES[0]
        moe = {"experts": shape.experts, "top_k": shape.top_k, "expert_width": shape.expert_width}
        recipe = recipes.validate(
            {
                "data": {"max_length": LENGTH, "tokens_per_batch": slots},
                "model": {"kind": "decoder", "layers": layers, "width": shape.width, "heads": shape.width // 128, "moe": moe},
                "objective": {"kind": "clm"},
                "precision": {"kind": precision},
                "training": {"steps": 100, "tokens_per_step": slots},
            }
        )
        world = World(device)
        resolved, _ = setup.resolve(recipe, world)
        self.stepper = Stepper(resolved, *build(resolved, alphabet("protein"), world), device)
        loader = TrainingLoader(FullLength(400), resolved, Position(0, 0), pin=device.type == "cuda")
        self.loader = stack.enter_context(loader)
        self.losses: list[float] = []

    def steps(self, count: int) -> float:
        """Seconds of a step over `count` steps."""
        synchronise(self.stepper.device)
        begin = time.perf_counter()
        for _ in range(count):
            batch = self.loader.next().batches[0]
            totals = torch.tensor([batch.targets, int(batch.real_tokens), 0, 0])
            sums = self.stepper.backward(batch, totals)
            self.stepper.update(1e-4)
        synchronise(self.stepper.device)
        spent = (time.perf_counter() - begin) / count
        self.losses.append(float(sums.loss))
        return spent

    def share_of_products(self) -> float:
        """Of the experts' products in the time of all kernels of a step."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.steps(1)
        spent = {event.key: event.self_device_time_total for event in profile.key_averages()}
        return sum(time for key, time in spent.items() if "quack" in key) / sum(spent.values())


def model_gain(layers: int, slots: int, repeats: int, device: torch.device) -> dict:
    """Seconds of a step in both precisions, in turns, and the share of the experts' products in bf16."""
    times: dict[str, list[float]] = {precision: [] for precision in PRECISIONS}
    with ExitStack() as stack:
        models = {precision: Model(precision, layers, slots, device, stack) for precision in PRECISIONS}
        for model in models.values():
            model.steps(5)
        for _ in range(repeats):
            for precision, model in models.items():
                times[precision].append(model.steps(3))
        share = models["bf16"].share_of_products()
    median = {precision: statistics.median(spent) for precision, spent in times.items()}
    return {
        "layers": layers,
        "slots": slots,
        "replayed": all(model.stepper.graphs is not None for model in models.values()),
        "step_s": median,
        "ratio": median["bf16"] / median["fp8_row"],
        "share_of_products": share,
        "losses": {precision: model.losses for precision, model in models.items()},
        "peak_gib_of_both": torch.cuda.max_memory_allocated() / 2**30,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--layers", type=int, default=4, help="of the whole model; 0 leaves it out")
    parser.add_argument("--slots", type=int, default=32768)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    out = sys.stdout.write
    results: dict = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "layers": []}
    for shape in (*SHAPES, LayerShape(2 * SHAPES[0].tokens, *list(vars(SHAPES[0]).values())[1:])):
        row = layer_gain(shape, arguments.repeats, device)
        results["layers"].append(row)
        out(f"{row['shape']}: bf16 {row['ms']['bf16']:.3f} ms")
        for way, ratio in row["ratios"].items():
            low, high = row["turns"][way]
            out(f"; {way} {row['ms'][way]:.3f} ms, {ratio:.3f}x (turns {low:.3f} to {high:.3f})")
        out("\n")
        sys.stdout.flush()
        gc.collect()
        torch.cuda.empty_cache()
    if arguments.layers:
        row = model_gain(arguments.layers, arguments.slots, max(3, arguments.repeats // 2), device)
        results["model"] = row
        seconds = ", ".join(f"{precision} {spent * 1e3:.1f} ms" for precision, spent in row["step_s"].items())
        out(f"whole step, {row['layers']} layers, {row['slots']} slots: {seconds}, {row['ratio']:.3f}x; ")
        out(f"experts' products {row['share_of_products']:.2f} of the bf16 step\n")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
