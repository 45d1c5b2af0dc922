"""One rank of a small gloo world: runs cases by name until told to stop. Started by conftest.Ranks."""

import sys
import traceback
from datetime import timedelta
from multiprocessing.connection import Client

import cases
import runs
import torch
import torch.distributed as dist


def main(address: str, store: str, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=150))
    with Client(address) as line:
        line.send(rank)
        while (order := line.recv()) is not None:
            name, arguments = order
            try:
                case = getattr(cases, name, None) or getattr(runs, name)
                line.send((True, case(rank, size, **arguments)))
            except BaseException:  # noqa: B036 - shown by the test that asked
                line.send((False, traceback.format_exc()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
