"""Which cluster a sequence belongs to: from a table of members and representatives, or from UniRef headers.

A cluster is known by a 64-bit hash of its representative's name, so parts prepared on different machines agree.
"""

import re
from pathlib import Path

import numpy as np

from bmoe.data.compression import decompressed, kind_of
from bmoe.data.fasta import Records, first_word
from bmoe.data.hashing import name_hashes
from bmoe.data.options import UNIREF
from bmoe.errors import RequestError

_UNIREF50 = re.compile(rb"\bUniRef50_[\w-]+")
_REPRESENTATIVE = re.compile(rb"\bRepID=(\S+)")
LINES = 32 << 20


class Clusters:
    """Cluster of every record.

    With a table: 16 bytes per line of it. A record that the table does not list is a cluster of its own, and counted.
    """

    def __init__(self, member: np.ndarray | None = None, cluster: np.ndarray | None = None):
        """member: sorted hashes of member names, uint64; cluster: hash of each one's representative. None: UniRef headers."""
        self._member, self._cluster = member, cluster

    @classmethod
    def of_table(cls, name: str) -> "Clusters":
        """From the table `name`, or from UniRef headers."""
        return cls() if name == UNIREF else cls(*load(name))

    def of(self, records: Records, counts: dict[str, int]) -> np.ndarray:
        """Cluster of each record as int64 [R]."""
        if self._member is None:
            return name_hashes([_uniref(records.headers[r]) for r in range(records.line.size)]).view(np.int64)
        found = records.identifier.copy()  # alone, unless the table knows it
        known = self._look_up(records.identifier, found)
        rows = np.flatnonzero(~known).tolist()
        if rows:  # `sp|P12345|NAME`: tables often list the accession alone
            names = [records.name(r).split(b"|") for r in rows]
            pairs = [(r, name[1]) for r, name in zip(rows, names, strict=True) if len(name) > 1]
            at = np.array([r for r, _ in pairs], np.int64)
            part = found[at]
            known[at] = self._look_up(name_hashes([name for _, name in pairs]), part)
            found[at] = part
        alone = int(np.count_nonzero(~known))
        if alone:
            counts["unclustered_records"] = counts.get("unclustered_records", 0) + alone
        return found.view(np.int64)

    def _look_up(self, keys: np.ndarray, found: np.ndarray) -> np.ndarray:
        place = np.minimum(np.searchsorted(self._member, keys), self._member.size - 1)
        known = self._member[place] == keys
        found[known] = self._cluster[place[known]]
        return known


def _uniref(header: bytes) -> bytes:
    """Name of a record's UniRef cluster: a UniRef50 name in its header, else RepID=, else its identifier."""
    found = _UNIREF50.search(header)
    if found:
        return found.group()
    found = _REPRESENTATIVE.search(header)
    return found.group(1) if found else first_word(header)


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Sorted member hashes and their clusters from a TSV (may be compressed).

    Two columns, in either order: the one without repeats is the member (MMseqs2 writes the representative first).
    RequestError for a missing file, a line without two columns, or a member with two representatives.
    """
    path = Path(name)
    try:
        with path.open("rb") as file:
            kind = kind_of(file.read(8))
            file.seek(0)
            chunks = decompressed(file, kind, name) if kind else iter(lambda: file.read(LINES), b"")
            first, second = _columns(chunks, name)
    except OSError as error:
        raise RequestError(f"--clusters {name} cannot be read: {error.strerror}; name a table, or `uniref` for UniRef headers") from None
    if not first.size:
        raise RequestError(f"the cluster table {name} is empty: each line has a member, a tab and its representative")
    for member, cluster in ((first, second), (second, first)):
        order = np.argsort(member, kind="stable")
        ordered = member[order]
        if not (ordered[1:] == ordered[:-1]).any():
            return ordered, cluster[order]
    raise RequestError(f"the cluster table {name} lists members twice: in one of its two columns every name stands once")


def _columns(chunks, name: str) -> tuple[np.ndarray, np.ndarray]:
    columns: tuple[list, list] = ([], [])
    rest, number = b"", 0
    for chunk in chunks:
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        number = _add(lines, number, name, columns)
    _add([rest], number, name, columns)
    return tuple(np.unique(np.stack([np.concatenate(c) if c else np.zeros(0, np.uint64) for c in columns]), axis=1))


def _add(lines: list[bytes], number: int, name: str, columns: tuple[list, list]) -> int:
    fields = []
    for k, line in enumerate(lines, number + 1):
        words = line.split()
        if len(words) == 2:
            fields.append(words)
        elif words:
            columns = "one column" if len(words) == 1 else f"{len(words)} columns"
            raise RequestError(f"{name}:{k} has {columns}: each line of a cluster table has a member, a tab and its representative")
    for column, names in zip(columns, zip(*fields, strict=True) if fields else ((), ()), strict=True):
        column.append(name_hashes(list(names)))
    return number + len(lines)
