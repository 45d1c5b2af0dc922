"""One run at a time in a folder: its rank 0 locks RUN/.lock, and writes there which process it is.

The kernel releases the lock when that process ends, however it ends, so that nothing is in the way of a restart. A file system
without such locks keeps no run from starting.
"""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from bmoe.errors import RequestError

LOCK = ".lock"


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Hold the lock of a run's folder, which exists. Raises RequestError if another process holds it."""
    with (run / LOCK).open("a+") as file:
        _lock(file, run)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def check_free(run: Path) -> None:
    """Raise RequestError if another process holds the lock of a run's folder, which may be missing."""
    if (run / LOCK).is_file():
        with (run / LOCK).open() as file:
            _lock(file, run)


def _lock(file: TextIO, run: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        raise RequestError(f"{run} is in use: {holder} trains there; wait for its end or stop it, or use another --out") from None
    except OSError:  # no locks on this file system
        return
