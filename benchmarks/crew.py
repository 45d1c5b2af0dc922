"""Processes that each hold one model on one GPU and follow orders, and whoever gives the orders: no case takes the others along.

A worker does one order at a time; several work at once as far as memory allows. One that ends, takes too long, or whose GPU
refuses everything after an error is replaced, and the next order finds a new process. Results come back as they are ready.
"""

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from bmoe.errors import RequestError, RunError

NOT_RUN = "not run: the time limit came first"
PATIENCE = 20.0  # seconds to wait for memory that others use, before an order is tried all the same
ENDED = "its process ended; the reason is on stderr"


def is_fatal(problem: str) -> bool:
    """Whether a process is of no more use: it ended, or its GPU refuses everything since an error."""
    return problem == ENDED or problem.startswith("AcceleratorError") or "CUDA error" in problem


def serve(make: Callable[[str, str], object], what: str, device: str, pipe: Connection) -> None:
    """A worker's process: (method of what `make` made, arguments) in, result or problem out, until the pipe closes."""
    sys.stdout = sys.stderr
    worker = make(what, device)
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:  # nobody gives orders any more
            return
        began = time.monotonic()
        try:
            result = getattr(worker, method)(**arguments)
        except (RuntimeError, ValueError, RequestError, RunError) as problem:  # out of memory, or what the machine lacks
            traceback.print_exc()
            lines = str(problem).strip().splitlines()
            result = {"problem": f"{type(problem).__name__}: {lines[0] if lines else ''}"}
        if "problem" in result and not is_fatal(result["problem"]):
            worker.drop()
        pipe.send(result | {"took_s": time.monotonic() - began})


class Order(NamedTuple):
    """What one worker is to do, and GiB of the GPU that it takes."""

    name: str
    method: str
    arguments: dict
    gib: float = 0.0


class Crew:
    """Workers by name; they follow orders until the deadline.

    `make(what, device)` builds a worker in its process; it has methods that take keywords and return dicts, and `drop`, which frees
    what it holds. `kinds`: name -> what. `room_gib`: of the device for all orders together; `free_gib()`: what nobody uses of it now.
    """

    def __init__(
        self,
        make: Callable,
        kinds: dict[str, str],
        device: str,
        deadline: float,
        case_limit: float,
        room_gib: float,
        free_gib: Callable[[], float] = lambda: float("inf"),
    ):
        self.make, self.kinds, self.device = make, kinds, device
        self.deadline, self.case_limit, self.room_gib, self.free_gib = deadline, case_limit, room_gib, free_gib
        self.context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = {}, {}
        for name in kinds:
            self._begin(name)

    def _begin(self, name: str) -> None:
        self.pipes[name], theirs = self.context.Pipe()
        self.processes[name] = self.context.Process(target=serve, args=(self.make, self.kinds[name], self.device, theirs))
        self.processes[name].start()
        theirs.close()

    def _end(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].join()

    def follow(self, orders: list[Order]) -> Iterator[tuple[Order, dict]]:
        """Every order with its result, as they come. A worker does one at a time, its own in their sequence; several workers
        at once as far as memory allows."""
        waiting, active, idle_since = list(orders), {}, time.monotonic()
        while waiting or active:
            self._hand_out(waiting, active, patient=time.monotonic() < idle_since + PATIENCE)
            if not active and time.monotonic() >= self.deadline:
                break
            if not active:  # others use the device: wait for them a while
                time.sleep(1.0)
                continue
            idle_since = time.monotonic()
            first = min(self.deadline, *(began + self.case_limit for _, began in active.values()))
            ready = wait([self.pipes[name] for name in active], max(0.0, first - time.monotonic()))
            for name in [name for name in active if self.pipes[name] in ready]:
                order, _ = active.pop(name)
                yield order, self._result(name)
            now = time.monotonic()
            for name in [name for name, (_, began) in active.items() if now >= min(self.deadline, began + self.case_limit)]:
                order, _ = active.pop(name)
                self._end(name)
                over = now >= self.deadline
                yield order, {"problem": NOT_RUN if over else f"took longer than {self.case_limit:.0f} s"}
                if not over:
                    self._begin(name)
        for order in waiting:
            yield order, {"problem": NOT_RUN}

    def _hand_out(self, waiting: list[Order], active: dict, patient: bool) -> None:
        seen = set(active)
        for order in list(waiting):
            fits = sum(other.gib for other, _ in active.values()) + order.gib <= self.room_gib and order.gib <= self.free_gib()
            alone = not active and not patient
            if time.monotonic() < self.deadline and order.name not in seen and (fits or alone):
                self.pipes[order.name].send((order.method, order.arguments))
                active[order.name] = order, time.monotonic()
                waiting.remove(order)
            seen.add(order.name)

    def _result(self, name: str) -> dict:
        """A worker's answer. One that ended, or whose GPU refuses everything after an error, is replaced."""
        try:
            result = self.pipes[name].recv()
        except EOFError:
            result = {"problem": ENDED}
        if is_fatal(result.get("problem", "")):
            self._end(name)
            self._begin(name)
        return result

    def close(self) -> None:
        """End the workers."""
        for name in self.processes:
            self._end(name)
