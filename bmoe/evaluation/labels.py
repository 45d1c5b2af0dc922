"""Sequences with one label a residue, cleaned so that no relative of a test sequence is trained on.

Tables of chains hold the same chain many times: as duplicates, as whole-number repeats (homomers written end to end), and
inside larger complexes. Repeats are reduced to one copy, and equal sequences kept once (not at all if their labels differ).
Of the rest a random part within a budget of residues is used. Its families (`bmoe.evaluation.families`) are found among the residues
that are used, and a split never cuts one: that takes as long for a table of any size.
"""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bmoe.data import random
from bmoe.errors import RequestError
from bmoe.evaluation.families import families
from bmoe.evaluation.files import read_table

DSSP = "HGIEBTSC~-PL "  # helix H G I, strand E B, the rest is coil
THREE = {**dict.fromkeys("HGI", "H"), **dict.fromkeys("EB", "E")}
SPLITS = {"train": 0.6, "valid": 0.15, "test": 0.25}
SPLIT_SEED, SPLIT = 20, 102


@dataclass(frozen=True)
class Labelled:
    """sequences, labels: text of equal length each. counts: what was read and removed."""

    sequences: list[str]
    labels: list[str]
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
    return Labelled(list(kept), list(kept.values()), counts)


def period(text: str) -> int:
    """Length of the shortest prefix that, repeated a whole number of times, is the text."""
    return (text + text).find(text, 1)


def drawn(labelled: Labelled, budget: int, longest: int) -> list[int]:
    """Numbers of sequences in a fixed random order, until they have `budget` residues, a sequence counting at most `longest`."""
    number = np.arange(len(labelled.sequences))
    order = np.argsort(random.uniform(random.key(SPLIT_SEED, SPLIT, 0, number), 0), kind="stable")
    sizes = np.array([min(len(sequence), longest) for sequence in labelled.sequences])[order]
    return order[np.cumsum(sizes) - sizes < budget].tolist()


def split(labelled: Labelled, budget: int, longest: int, alphabet: str) -> dict[str, list[int]]:
    """Numbers of the sequences of train, valid and test, `drawn`: whole families of their first `longest` letters, the largest first
    and equally large ones in random order, each split filled to its share of the residues. `alphabet`: protein or dna."""
    chosen = drawn(labelled, budget, longest)
    members: dict[int, list[int]] = {}
    for i, family in zip(chosen, families([labelled.sequences[i][:longest] for i in chosen], alphabet), strict=True):
        members.setdefault(family, []).append(i)
    residues = {i: min(len(labelled.sequences[i]), longest) for i in chosen}
    room = {name: share * min(budget, sum(residues.values())) for name, share in SPLITS.items()}
    out: dict[str, list[int]] = {name: [] for name in SPLITS}
    for family in sorted(members.values(), key=len, reverse=True):
        name = max(room, key=room.__getitem__)
        out[name] += family
        room[name] -= sum(residues[i] for i in family)
    return out
