"""Make items before they are asked for, in a thread."""

import contextlib
import queue
import threading
from collections.abc import Iterator


def ahead(items: Iterator, depth: int) -> Iterator:
    """The same items, made by a thread that is up to `depth` of them ahead; its error is raised in its place."""
    made: queue.Queue = queue.Queue(depth)
    stopped = threading.Event()

    def put(item) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                made.put(item, timeout=1.0)
                return

    def work() -> None:
        try:
            for item in items:
                put((item, None))
                if stopped.is_set():
                    return
            put(None)
        except BaseException as error:  # whatever it is, it belongs to the reader of the items
            put((None, error))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        while (entry := made.get()) is not None:
            item, error = entry
            if error is not None:
                raise error
            yield item
    finally:
        stopped.set()
        with contextlib.suppress(queue.Empty):
            made.get_nowait()
        thread.join()
