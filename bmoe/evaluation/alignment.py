"""Scores of local alignments with affine gaps (Smith and Waterman 1981; Gotoh 1982), compiled: of one sequence with many.

Legend: m letters of the one sequence, n of all others together, S other sequences, L letters of the scoring matrix.
"""

import numpy as np
from numba import uint64

from bmoe.data.compiled import compiled


def best_scores(
    first_m: np.ndarray, others_n: np.ndarray, ends_S: np.ndarray, score_LL: np.ndarray, first: int, further: int
) -> np.ndarray:
    """The score of the best local alignment of `first_m` with each of the others, int32 [S].

    Sequences are numbers of letters, uint8, the others one after the other up to `ends_S`, int64. score_LL: int32. A gap of k letters costs
    first + (k - 1) further, with first >= further.
    """
    best_S, work_2n = np.zeros(ends_S.size, np.int32), np.empty((2, np.diff(ends_S, prepend=0).max(initial=0)), np.int32)
    _fill(first_m, others_n, ends_S, score_LL, np.int32(first), np.int32(further), work_2n, best_S)
    return best_S


@compiled
def _fill(first_m, others_n, ends_S, score_LL, first, further, work_2n, best_S):
    begin = uint64(0)
    for s in range(uint64(ends_S.size)):
        end = uint64(ends_S[s])
        best_S[s] = _best(first_m, others_n[begin:end], score_LL, first, further, work_2n[0], work_2n[1])
        begin = end


@compiled
def _best(first_m, other_n, score_LL, first, further, above_n, down_n):
    """Row by row. above_n: best alignments that end at a place of `other_n` and the row before; down_n: those that end in a gap there."""
    size, zero = uint64(other_n.size), np.int32(0)
    for j in range(size):
        above_n[j] = down_n[j] = zero
    best = zero
    for i in range(uint64(first_m.size)):
        score_L = score_LL[uint64(first_m[i])]
        corner = along = zero
        for j in range(size):
            above = above_n[j]
            down = max(above - first, down_n[j] - further)
            here = max(max(corner + score_L[uint64(other_n[j])], zero), down)
            corner, down_n[j], above_n[j] = above, down, max(here, along)
            along = max(here - first, along - further)  # a gap along the row is never best begun at the end of another
            best = max(best, here)
    return best
