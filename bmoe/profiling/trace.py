"""One step under torch's profiler: what the device ran, when it idled, and how often the host waited for it.

The profiler slows the host down, so idle time is not read off its trace: the device is busy for the union of its kernels'
times, and idle for the rest of an UNDISTURBED step. Gaps are those of the traced step, which shows where they are.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from bmoe.profiling import ranges
from bmoe.profiling.measure import Subject, Take, loader, synchronise, training_step
from bmoe.profiling.timeline import attached

SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
READING = "aten::_local_scalar_dense"  # the host reads a number from a tensor; on a GPU it waits for it
GAP_US = 10.0
STEP = "bmoe step"

KINDS = (  # the first pattern that a kernel's name contains decides
    ("optimizer", r"adamw|multi_tensor|foreach|lpnorm"),
    ("attention", r"flash|fmha|attn|attention|_turn_kernel"),
    ("experts' products", r"group|quack|kernel_cutlass|gatedgemm|gemm_act|gemm_gated"),
    ("other products", r"gemm|nvjet|cutlass|cublas|splitk|_mm_|dot_kernel"),
    ("rounding", r"quantize|cast_transpose|_copies_kernel|amax|^_rows_kernel|^_row_scales|^_weight_kernel"),
    ("routing, rows of experts", r"_count_kernel|_scan_kernel|_place_kernel|_spread_kernel|_combine_kernel|_slots|sort|_route_|topk"),
    ("fused passes", r"triton_"),
    ("copies, fills", r"copy|fill|memcpy|memset|\bcat"),
    ("other passes", r"."),
)  # fmt: skip


def kind_of(kernel: str) -> str:
    """The kind of work of a kernel, by its name."""
    name = kernel.lower()
    return next(kind for kind, pattern in KINDS if re.search(pattern, name))


def union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Spans that overlap or touch merged, in order."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def idle(kernels: list[tuple[str, float, float]], step_s: float) -> dict:
    """Busy share and idle time of a step of `step_s` undisturbed seconds, from (name, start, end) of its kernels in us.

    gaps: the number of those over 10 us in the traced step, and the three longest with the kernels around them.
    """
    merged = union((start, end) for _, start, end in kernels)
    busy_s = sum(end - start for start, end in merged) / 1e6
    last = {end: name for name, _, end in kernels}
    first = {start: name for name, start, _ in kernels}
    gaps = [(b[0] - a[1], last[a[1]], first[b[0]]) for a, b in zip(merged, merged[1:], strict=False) if b[0] - a[1] > GAP_US]
    longest = [{"seconds": width / 1e6, "after": after, "before": before} for width, after, before in sorted(gaps, reverse=True)[:3]]
    return {
        "gpu_busy_s": busy_s,
        "gpu_busy_share": min(1.0, busy_s / step_s),
        "idle_s": max(0.0, step_s - busy_s),
        "idle_gaps": {"over_10_us": len(gaps), "longest": longest, "label": "in the step that the profiler slowed down"},
    }


def traced(
    subject: Subject, shards, device: torch.device, step_s: float, trace: str | Path | None = None, take: Take | None = None
) -> dict:
    """One step under the profiler; `step_s`: what an undisturbed one takes. `take`: the step as training takes it; None:
    `training_step`. Writes a Chrome trace to `trace`: of a second step, in which the model's parts are ranges, or of this one
    where it is compiled or replayed; `trace_label` says which.

    Always: operators, the ten with the most time of their own; host_reads_per_step. On CUDA besides: kernels_per_step,
    kernels by kind with seconds and calls, syncs_per_step, and `idle`.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's library writes start and stop to the terminal otherwise
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with loader(subject, shards, device) as stream:
        batches = stream.next().batches
        synchronise(device)
        with torch.profiler.profile(activities=activities) as profiler:
            with torch.profiler.record_function(STEP):
                take(batches) if take else training_step(subject, batches, device)
            synchronise(device)
        whole = bool(subject.recipe.backend.compile) or subject.recipe.backend.graphs is True  # one piece, without borders inside
        if trace is not None and not whole:
            with torch.profiler.profile(activities=activities) as marked, attached(subject.model, points := ranges.Points(device)):
                training_step(subject, batches, device, points)
                synchronise(device)
            ranges.write(marked, trace)
    if trace is not None and whole:
        profiler.export_chrome_trace(str(trace))
    events = profiler.events()
    step = next(e.time_range for e in events if e.name == STEP and e.device_type == torch.autograd.DeviceType.CPU)
    host = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CPU and step.start <= e.time_range.start <= step.end]
    result: dict = {"operators": _longest(profiler, device), "host_reads_per_step": host.count(READING)}
    if trace is not None:
        parts = "with the model's parts as ranges" if not whole else "without the model's parts: a compiled or replayed step has no borders"
        result["trace_label"] = f"one step in {trace}, {parts}"
    if device.type != "cuda":
        return result
    kernels = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation
    ]  # fmt: skip
    launched = [name for name, _, _ in kernels if not name.startswith(("Memcpy", "Memset"))]
    by_kind: dict[str, dict] = {}
    for name, start, end in kernels:
        entry = by_kind.setdefault(kind_of(name), {"seconds": 0.0, "calls": 0})
        entry["seconds"] += (end - start) / 1e6
        entry["calls"] += 1
    return result | {
        "kernels_per_step": len(launched),
        "kernels": dict(sorted(by_kind.items(), key=lambda item: -item[1]["seconds"])),
        "syncs_per_step": sum(host.count(name) for name in SYNCHRONISING),
        **idle(kernels, step_s),
    }


def _longest(profiler, device: torch.device) -> list[dict]:
    """The ten operators (CPU) or kernels (CUDA) with the most time of their own."""
    cuda = device.type == "cuda"
    rows = []
    for row in profiler.key_averages():
        micro = row.self_device_time_total if cuda else row.self_cpu_time_total
        if micro > 0 and row.key != STEP and (not cuda or row.device_type == torch.autograd.DeviceType.CUDA):
            rows.append({"name": row.key, "calls": row.count, "seconds": micro / 1e6})
    return sorted(rows, key=lambda row: -row["seconds"])[:10]
