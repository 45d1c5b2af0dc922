"""Families of sequences, so that no relative of a test sequence is trained on.

Two sequences are related when the expected number of chance alignments as good as their best local one is at most 0.002
(Karlin and Altschul 1990); a family is everything that is connected by such pairs. Proteins: BLOSUM62, a gap of k residues costs
11 + k (lambda 0.267, K 0.041). Bases, of one strand: 2 for equal ones, -3 for others, a gap of k costs 5 + 2 k (lambda 0.625, K 0.41).
Both are BLAST's numbers.

All pairs are aligned: sequences of 60,000 letters together are 1.8e9 cells of alignments, 5 s of one core.
"""

from typing import NamedTuple

import numpy as np
from Bio.Align import substitution_matrices

EXPECTED = 2e-3


class Rule(NamedTuple):
    """What alignments score. letters: those of score_LL, int32; `other` stands for all that are none of them. A gap of k costs
    first + (k - 1) further. rate, k: lambda and K of chance alignments."""

    letters: str
    other: str
    score_LL: np.ndarray
    first: int
    further: int
    rate: float
    k: float


def _protein() -> Rule:
    blosum62 = substitution_matrices.load("BLOSUM62")
    return Rule(blosum62.alphabet, "X", np.array(blosum62, np.int32), 12, 1, 0.267, 0.041)


def _dna() -> Rule:
    score_LL = np.where(np.eye(5), 2, -3).astype(np.int32)
    score_LL[4] = -3  # an unknown base is like none, itself included
    return Rule("ACGTN", "N", score_LL, 7, 2, 0.625, 0.41)


RULES = {"protein": _protein, "dna": _dna}
LIKE = str.maketrans("UOJ", "CKL")  # residues that BLOSUM62 does not have


def families(sequences: list[str], alphabet: str = "protein") -> list[int]:
    """The family of each sequence of upper-case letters: equal numbers, same family; numbered in the order of their first members.

    `alphabet`: protein or dna.
    """
    from bmoe.evaluation.alignment import best_scores  # imported here: it loads the compiler

    rule = RULES[alphabet]()
    number_of = np.full(256, rule.letters.index(rule.other), np.uint8)
    number_of[np.frombuffer(rule.letters.encode(), np.uint8)] = np.arange(len(rule.letters))
    codes = [_codes(sequence, alphabet, number_of) for sequence in sequences]
    size_S = np.array([code.size for code in codes], np.int64)
    end_S, all_n = np.cumsum(size_S), np.concatenate([*codes, np.empty(0, np.uint8)])
    parent = list(range(len(codes)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for i, code in enumerate(codes):
        score_R = best_scores(code, all_n[end_S[i] :], end_S[i + 1 :] - end_S[i], rule.score_LL, rule.first, rule.further)
        expected_R = rule.k * code.size * size_S[i + 1 :] * np.exp(-rule.rate * score_R)
        for j in np.flatnonzero(expected_R <= EXPECTED):
            first, second = sorted((root(i), root(i + 1 + int(j))))
            parent[second] = first
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(i), len(numbers)) for i in range(len(codes))]


def _codes(sequence: str, alphabet: str, number_of: np.ndarray) -> np.ndarray:
    legal = sequence.translate(LIKE) if alphabet == "protein" else sequence.replace("U", "T")
    return number_of[np.frombuffer(legal.encode("ascii", "replace"), np.uint8)]


def folds(family: list[int], count: int) -> list[list[int]]:
    """Members of each of at most `count` folds, whole families together, sizes as even as greedy filling makes them."""
    members: dict[int, list[int]] = {}
    for i, number in enumerate(family):
        members.setdefault(number, []).append(i)
    out: list[list[int]] = [[] for _ in range(min(count, len(members)))]
    for group in sorted(members.values(), key=len, reverse=True):
        min(out, key=len).extend(group)
    return out
