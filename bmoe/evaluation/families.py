"""Families of sequences, so that no relative of a test chain is trained on.

Two sequences are related when the expected number of chance alignments as good as their best local one is at most 0.002
(Karlin and Altschul 1990; BLOSUM62, a gap of k residues costs 11 + k: lambda 0.267, K 0.041); a family is everything that is
connected by such pairs.
"""

import itertools
import math

from Bio.Align import PairwiseAligner, substitution_matrices

LAMBDA, K = 0.267, 0.041
EXPECTED = 2e-3


def families(sequences: list[str]) -> list[int]:
    """The family of each sequence: equal numbers, same family; numbered in the order of their first members."""
    aligner = PairwiseAligner(
        mode="local", substitution_matrix=substitution_matrices.load("BLOSUM62"), open_gap_score=-12, extend_gap_score=-1
    )
    legal = [sequence.translate(str.maketrans("UOJ", "CKL")) for sequence in sequences]
    parent = list(range(len(legal)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    for (i, a), (j, b) in itertools.combinations(enumerate(legal), 2):
        if K * len(a) * len(b) * math.exp(-LAMBDA * aligner.score(a, b)) <= EXPECTED:
            first, second = sorted((root(i), root(j)))
            parent[second] = first
    numbers: dict[int, int] = {}
    return [numbers.setdefault(root(i), len(numbers)) for i in range(len(legal))]


def folds(family: list[int], count: int) -> list[list[int]]:
    """Members of each of at most `count` folds, whole families together, sizes as even as greedy filling makes them."""
    members: dict[int, list[int]] = {}
    for i, number in enumerate(family):
        members.setdefault(number, []).append(i)
    out: list[list[int]] = [[] for _ in range(min(count, len(members)))]
    for group in sorted(members.values(), key=len, reverse=True):
        min(out, key=len).extend(group)
    return out
