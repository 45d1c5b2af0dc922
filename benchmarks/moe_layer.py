"""MoE layer, forward + backward, on one GPU: our expert implementations and the Hugging Face baselines side by side.

    python benchmarks/moe_layer.py [--experts triton,grouped,...] [--shapes 0,1,2] [--repeats 20] [--json FILE]

Prints, per shape and per routing (natural, forced balanced), milliseconds, TFLOP/s, the fraction of an 8192^3 bf16
matrix product timed in the same process, and the ratio to hf-grouped-compiled.
"""

import argparse
import json
import sys

import torch
import triton

from bmoe.profiling.layer import BASELINES, SHAPES, LayerTiming, matmul_peak, measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", default="hf-loop,hf-grouped,hf-grouped-compiled,grouped,triton")
    parser.add_argument("--shapes", default="0,1,2", help="indices into bmoe.profiling.layer.SHAPES")
    parser.add_argument("--routing", default="natural,balanced")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = torch.device("cuda")
    peak = matmul_peak(device)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "gpu": torch.cuda.get_device_name()}
    out = sys.stdout.write
    out(f"{versions} peak {peak:.0f} TFLOP/s\n")
    timings: list[LayerTiming] = []
    for index in map(int, arguments.shapes.split(",")):
        for routing in arguments.routing.split(","):
            rows = measure(
                SHAPES[index],
                arguments.experts.split(","),
                device,
                balanced=routing == "balanced",
                repeats=arguments.repeats,
                peak_tflops=peak,
            )
            torch.cuda.empty_cache()
            timings += rows
            out(f"{SHAPES[index].name}, {routing} routing\n{table(rows)}")
            sys.stdout.flush()
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"versions": versions, "peak_tflops": peak, "layers": [t.as_dict() for t in timings]}, file)


def table(rows: list[LayerTiming]) -> str:
    """One line per contestant; the ratio is the time of hf-grouped-compiled over its own."""
    base = next((row.milliseconds for row in rows if row.contestant == BASELINES[-1]), None)
    lines = []
    for row in rows:
        ratio = "" if base is None else f"  x{base / row.milliseconds:5.2f}"
        lines.append(
            f"  {row.contestant:20s} {row.milliseconds:8.3f} ms [{row.fastest:.3f}, {row.slowest:.3f}]"
            f" {row.tflops:6.0f} TFLOP/s  {row.fraction_of_peak:.3f} of peak{ratio}  {row.peak_memory_gib:.2f} GiB\n"
        )
    return "".join(lines)


if __name__ == "__main__":
    main()
