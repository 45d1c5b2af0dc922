"""Forks the ranks of small gloo worlds, each of which runs cases by name until told to stop. Started by conftest.Nursery once for
all tests, because importing takes every rank longer than most cases do."""

import os
import signal
import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client, Connection

import cases
import runs
import torch
import torch._dynamo  # noqa: F401 - FSDP2 asks for it when a model is first sharded
import torch.distributed as dist
import torch.distributed.checkpoint  # noqa: F401


def rank(address: str, store: str, number: int, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=number, world_size=size, timeout=timedelta(seconds=150))
    with Client(address) as line:
        line.send(number)
        while True:
            name, arguments = line.recv()
            try:
                case = getattr(cases, name, None) or getattr(runs, name)
                line.send((True, case(number, size, **arguments)))
            except BaseException:  # noqa: B036 - shown by the test that asked
                line.send((False, traceback.format_exc()))


def fork(orders: Connection, *arguments) -> int:
    """The process id of a new rank."""
    pid = os.fork()
    if pid == 0:
        orders.close()
        try:
            rank(*arguments)
        except EOFError:  # the tests are gone
            os._exit(0)
        except BaseException:  # noqa: B036 - no rank may go on as its parent would
            traceback.print_exc()
            os._exit(1)
    return pid


def main(address: str) -> None:
    """Orders are (address, store, size), answered by process ids, and lists of those whose time is over."""
    born: set[int] = set()
    with Client(address) as orders:
        try:
            while True:
                order = orders.recv()
                if isinstance(order, tuple):
                    where, store, size = order
                    found = [fork(orders, where, store, number, size) for number in range(size)]
                    born.update(found)
                    orders.send(found)
                else:
                    end(order)
                    born.difference_update(order)
                    orders.send(None)
        except EOFError:
            end(born)


def end(pids) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main(sys.argv[1])
