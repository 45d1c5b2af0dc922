"""What is told about a batch of records: counts, places for the log, and a few bytes per sequence."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

NOTES = 10_000  # lines of the log per reason; all are counted
REASONS = ("", "empty", "too_short", "too_long", "invalid", "internal_stop")
EMPTY, TOO_SHORT, TOO_LONG, INVALID, INTERNAL_STOP = range(1, 6)


class Note(NamedTuple):
    """A line of the log: where, who, what, and more."""

    line: int  # within the piece, from 0
    identifier: str
    reason: str
    detail: str = ""


class Refused(Exception):
    """A record that a policy `error` refuses. line: of its header within the piece."""

    def __init__(self, line: int, identifier: str, problem: str):
        super().__init__(line, identifier, problem)
        self.line, self.identifier, self.problem = line, identifier, problem


@dataclass
class Summary:
    """What the ledger must know of a batch of n sequences out of R records.

    records: number of records that begin here. dropped: {reason: records}. letters: {what: number}. notes: for the log.
    lines: lines of the piece. end: offset in the input after it. length, header_length, split, hash, cluster, record: of
    each sequence; record is its record's number in the piece, None where each has one of its own. identifier_hash,
    identifier_line: of every record's identifier (0: none) and its line. mask_runs: uint32 [m, 2], mask_count: of each
    sequence. continued, open: of the piece. skipped_text: lines of text before an input's first record.
    """

    records: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    letters: dict[str, int] = field(default_factory=dict)
    notes: list[Note] = field(default_factory=list)
    lines: int = 0
    end: int = 0
    continued: bool = False
    open: bool = False
    length: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    header_length: np.ndarray | None = None
    split: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint8))
    hash: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    cluster: np.ndarray | None = None
    record: np.ndarray | None = None
    identifier_hash: np.ndarray = field(default_factory=lambda: np.zeros(0, np.uint64))
    identifier_line: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    mask_runs: np.ndarray | None = None
    mask_count: np.ndarray | None = None
    skipped_text: int = 0
