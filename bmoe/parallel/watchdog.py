"""A watchdog for hangs: when nothing goes on for a long time, it says which rank is where, and ends the run.

Every rank has a thread that looks at the time of the last `beat`. When that is too long ago, it writes down where its main
thread is: the collective of torch.distributed that it waits in, if any, and the line of bmoe. A little later it reads what
the others wrote. The rank that is in no collective, or in an earlier step, or silent, is the one that the others wait for.

Files in a folder, not the network: that is what may be broken.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from bmoe.parallel.launch import is_launched, leave_reason
from bmoe.parallel.world import World, wait

PACKAGE = Path(__file__).parent.parent
HANG_SECONDS = 900.0  # far above any step, compilation included, and above any batch of a validation


class Watchdog:
    """Use as a context manager around the loop, and `beat` once a step and between the parts of what may take longer. Does nothing
    for one process that no launcher started: a debugger may hold it, and nobody waits for it.

    Args:
        folder: shared by the ranks. limit: seconds without a beat that are a hang.
    """

    def __init__(self, world: World, folder: Path, limit: float = HANG_SECONDS):
        self.world, self.folder, self.limit = world, folder, limit
        self.step, self.last, self.main = 0, time.monotonic(), threading.get_ident()
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._watch, name="bmoe-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.world.size > 1 or is_launched():
            self._file(self.world.rank).unlink(missing_ok=True)
            self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopped.set()

    def beat(self, step: int) -> None:
        """Step `step` begins, or goes on."""
        self.step, self.last = step, time.monotonic()

    def _file(self, rank: int) -> Path:
        return self.folder / f"stalled-rank-{rank}.json"

    def _watch(self) -> None:
        while not self.stopped.wait(min(self.limit / 10, 10.0)):
            if time.monotonic() - self.last < self.limit:
                continue
            self._file(self.world.rank).write_text(json.dumps({"step": self.step, **where(self.main, self.world.device)}))
            if self.stopped.wait(min(self.limit / 2, 30.0)):  # the others' watchdogs come to the same end
                return
            sentence = self._sentence()
            leave_reason(sentence)
            sys.stderr.write(sentence + "\n")
            sys.stderr.flush()
            os._exit(1)  # the main thread cannot be woken

    def _sentence(self) -> str:
        found = {rank: json.loads(self._file(rank).read_text()) for rank in range(self.world.size) if self._file(rank).is_file()}
        return describe(found, self.world.size, self.limit)


def describe(found: dict[int, dict], size: int, seconds: float) -> str:
    """One sentence from what each stalled rank wrote: {rank: {step, collective, line}}."""
    silent = [rank for rank in range(size) if rank not in found]
    first = min((facts["step"] for facts in found.values()), default=0)
    late = [rank for rank, facts in found.items() if facts["step"] == first or facts["collective"] is None]
    idle = [rank for rank in late if found[rank]["collective"] is None]
    waiting = {rank: facts for rank, facts in found.items() if facts["collective"] is not None}
    example = next(iter(waiting.values()), None)
    others = f", while the others wait in {example['collective']} at {example['line']}" if example else ""
    began = f"no step ended for {seconds:.0f} seconds: "
    if size == 1:
        return f"{began}the process is at {found[0]['line']}, in step {first}"
    if silent:
        return f"{began}rank {silent[0]} does not answer{others}, in step {first}"
    if idle:
        return f"{began}rank {idle[0]} is in no collective but at {found[idle[0]]['line']}, in step {found[idle[0]]['step']}{others}"
    return f"{began}rank {late[0]} waits in {found[late[0]]['collective']} at {found[late[0]]['line']}, in step {first}"


def where(thread: int, device: torch.device) -> dict:
    """The collective that a thread waits in (None if it is in none) and its innermost line of bmoe (of anything,
    where it is not in bmoe)."""
    frame: FrameType | None = sys._current_frames().get(thread)
    collective, line = pending_on_device() if device.type == "cuda" and dist.is_initialized() else None, None
    innermost = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else "its end"
    while frame is not None:
        file, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if frame.f_code is wait.__code__:
            collective = frame.f_locals["collective"]
        elif file.name == "distributed_c10d.py" and hasattr(dist, name):
            collective = name
        elif line is None and PACKAGE in file.parents:
            line = f"{file.relative_to(PACKAGE.parent)}:{frame.f_lineno}"
        frame = frame.f_back
    return {"collective": collective, "line": line or innermost}


def pending_on_device() -> str | None:
    """The first collective that NCCL's flight recorder of this process holds as not completed, or None."""
    entries = json.loads(torch._C._distributed_c10d._dump_nccl_trace_json(includeCollectives=True, onlyActive=True)).get("entries", [])
    return entries[0]["profiling_name"] if entries else None
