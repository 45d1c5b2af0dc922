"""Sequences with one label a residue, cleaned so that nothing of a test sequence is trained on.

Tables of chains hold the same chain many times: as duplicates, as whole-number repeats (homomers written end to end), and
inside larger complexes. Repeats are reduced to one copy, equal sequences kept once (not at all if their labels differ), and
sequences that share a fifth of their 8-mers are one group, which is never cut by a split.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bmoe.data import random
from bmoe.errors import RequestError
from bmoe.evaluation.files import read_table

DSSP = "HGIEBTSC~-PL "  # helix H G I, strand E B, the rest is coil
THREE = {**dict.fromkeys("HGI", "H"), **dict.fromkeys("EB", "E")}
WORD, SHARED = 8, 0.2
SPLITS = {"train": 0.6, "valid": 0.15, "test": 0.25}
SPLIT_SEED, SPLIT = 20, 102


@dataclass(frozen=True)
class Labelled:
    """sequences, labels: text of equal length each. group: number per sequence. counts: what was read and removed."""

    sequences: list[str]
    labels: list[str]
    group: list[int]
    counts: dict[str, int]

    @property
    def is_secondary_structure(self) -> bool:
        """Whether at least 99 % of the labels are letters of DSSP."""
        number = Counter("".join(self.labels))
        return sum(number[letter] for letter in DSSP) >= 0.99 * number.total()


def read_labelled(path: str | Path) -> Labelled:
    """Read a table with a column `sequence` (or the first) and one of labels: the first other whose cells are as long as the
    sequences. RequestError for rows that do not fit."""
    names, rows = read_table(path)
    lower = [name.lower() for name in names]
    first = lower.index("sequence") if "sequence" in lower else 0
    others = [i for i in range(len(names)) if i != first]
    if not others:
        raise RequestError(f"{path} has one column; it needs `sequence` and labels of the same length")
    second = next((i for i in others if all(len(row[i]) == len(row[first]) for row in rows[:20])), others[0])
    known: dict[str, str | None] = {}
    repeats = 0
    for number, row in enumerate(rows):
        sequence, label = row[first].upper(), row[second]
        if len(sequence) != len(label):
            raise RequestError(f"{path}, row {number + 2}: {len(sequence)} residues and {len(label)} labels in {names[second]!r}")
        size = period(sequence)
        repeats += size < len(sequence)
        sequence, label = sequence[:size], label[:size]
        known[sequence] = label if known.setdefault(sequence, label) == label else None
    kept = {s: label for s, label in known.items() if label is not None}
    if not kept:
        raise RequestError(f"{path} has no sequence with one labelling")
    counts = {"read": len(rows), "repeats": repeats, "conflicting": len(known) - len(kept), "sequences": len(kept)}
    return Labelled(list(kept), list(kept.values()), related(list(kept)), counts)


def period(text: str) -> int:
    """Length of the shortest prefix that, repeated a whole number of times, is the text."""
    return (text + text).find(text, 1)


def related(sequences: list[str]) -> list[int]:
    """A number per sequence, equal for those connected by pairs of which the shorter shares SHARED of its 8-mers."""
    holders: dict[str, list[int]] = {}
    sizes = []
    for i, sequence in enumerate(sequences):
        words = {sequence[k : k + WORD] for k in range(len(sequence) - WORD + 1)} or {sequence}
        sizes.append(len(words))
        for word in words:
            holders.setdefault(word, []).append(i)
    common: Counter[tuple[int, int]] = Counter()
    for members in holders.values():
        common.update((a, b) for k, a in enumerate(members) for b in members[k + 1 :])
    parent = list(range(len(sequences)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for (a, b), number in common.items():
        if number >= SHARED * min(sizes[a], sizes[b]):
            first, second = sorted((root(a), root(b)))
            parent[second] = first
    return [root(i) for i in range(len(sequences))]


def split(labelled: Labelled, budget: int, longest: int) -> dict[str, list[int]]:
    """Numbers of the sequences of train, valid and test: whole groups in a fixed random order, each split filled to its share
    of `budget` residues, a sequence counting at most `longest`."""
    groups: dict[int, list[int]] = {}
    for i, number in enumerate(labelled.group):
        groups.setdefault(number, []).append(i)
    first = np.array(list(groups))
    order = first[np.argsort(random.uniform(random.key(SPLIT_SEED, SPLIT, 0, first), 0), kind="stable")]
    total = sum(min(len(s), longest) for s in labelled.sequences)
    room = {name: share * min(budget, total) for name, share in SPLITS.items()}
    out: dict[str, list[int]] = {name: [] for name in SPLITS}
    for number in order.tolist():
        name = max(room, key=room.__getitem__)
        if room[name] <= 0:
            break
        out[name] += groups[number]
        room[name] -= sum(min(len(labelled.sequences[i]), longest) for i in groups[number])
    return out
