"""Files that are there whole or not at all: written beside their place, and renamed."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial"


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """Where to write what becomes the file `path` at the end; if writing fails, what is there stays as it is.

    A pipe or a device, as /dev/stdout may be, is written to itself. OSError if the file cannot be written.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    target = path.resolve()  # a link stays one
    partial = target.with_name(target.name + PARTIAL)
    try:
        yield partial
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
