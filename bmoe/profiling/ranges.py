"""The model's parts as ranges in a Chrome trace, on tracks of their own: one of the host, and on CUDA one of the device.

A part begins where the part before it ends, often inside an operator of the backward pass, so its range would cross that
operator's and no viewer could nest the two. While the step runs, its borders are therefore points (`Points`): empty ranges
of torch's profiler, on its clock. In the file `with_ranges` puts ranges in their place. The device's begin with the first and
end with the last of the kernels that were launched between two borders.
"""

import gzip
import json
import tempfile
from bisect import bisect_right
from itertools import pairwise
from pathlib import Path

import torch

from bmoe.profiling.timeline import Timeline

POINT = "bmoe part: "
TRACKS = 10**7  # as a process id: above the system's
LAUNCHES, LAUNCHED = ("cuda_runtime", "cuda_driver"), ("kernel", "gpu_memcpy", "gpu_memset")


class Points(Timeline):
    """Tells torch's profiler where a part begins, and takes no time itself."""

    def enter(self, part: str | None) -> None:
        """A point in the profiler's trace; None: what follows is of no part."""
        with torch.profiler.record_function(POINT + (f"{part} {self.phase}" if part else "")):
            pass


def with_ranges(events: list[dict]) -> list[dict]:
    """The `traceEvents` of a file with ranges in place of the points."""
    points = sorted((e["ts"], e["name"].removeprefix(POINT)) for e in events if _is_point(e) and e.get("cat") == "user_annotation")
    starts = [start for start, _ in points]
    launched_at = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in LAUNCHES and "correlation" in e["args"]}
    on_device: dict[int, tuple[float, float]] = {}
    for event in events:
        if event.get("cat") in LAUNCHED and (launch := launched_at.get(event["args"].get("correlation"))) is not None:
            index, end = bisect_right(starts, launch) - 1, event["ts"] + event["dur"]
            low, high = on_device.get(index, (event["ts"], end))
            on_device[index] = min(low, event["ts"]), max(high, end)
    found = [event for event in events if not _is_point(event)]
    for index, ((start, name), (end, _)) in enumerate(pairwise(points)):
        spans = [(start, end), *([on_device[index]] if index in on_device else [])]
        for track, (first, last) in enumerate(spans if name else ()):
            found.append({"ph": "X", "cat": "bmoe", "name": name, "pid": TRACKS, "tid": track, "ts": first, "dur": last - first})
    named = [("process_name", 0, "parts of the model"), ("thread_name", 0, "host"), *([("thread_name", 1, "device")] if on_device else [])]
    return found + [{"ph": "M", "name": kind, "pid": TRACKS, "tid": track, "args": {"name": text}} for kind, track, text in named]


def _is_point(event: dict) -> bool:
    return str(event.get("name", "")).startswith(POINT)


def write(profiler: torch.profiler.profile, file: str | Path) -> None:
    """The profiler's Chrome trace, with ranges for the points in it; compressed if the name ends in .gz."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(raw))
        body = json.loads(raw.read_text())
    body["traceEvents"] = with_ranges(body["traceEvents"])
    with (gzip.open if str(file).endswith(".gz") else open)(file, "wt") as out:
        json.dump(body, out)
