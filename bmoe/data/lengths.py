"""How often each length occurs among millions of sequences, exactly, and what is told of it."""

from collections import Counter

import numpy as np

from bmoe.data.compiled import compiled

SHORT = 1 << 16  # longer ones are few: a dictionary has them
QUANTILES = (0, 5, 25, 50, 75, 95, 100)


class Lengths:
    """Counts of lengths. Memory does not depend on the number of sequences, but for those of SHORT or more."""

    def __init__(self):
        self._short = np.zeros(SHORT, np.int64)
        self._long: Counter[int] = Counter()

    def add(self, lengths: np.ndarray) -> None:
        """Count some lengths, int64 [n]."""
        if _count(lengths, self._short):
            self._long.update(lengths[lengths >= SHORT].tolist())

    def counts(self) -> tuple[list[int], list[int]]:
        """Lengths that occur, ascending, and how often each does."""
        short, long = np.flatnonzero(self._short), sorted(self._long)
        return short.tolist() + long, self._short[short].tolist() + [self._long[length] for length in long]

    def restore(self, lengths: list[int], counts: list[int]) -> None:
        """Take what `counts` gave."""
        for length, count in zip(lengths, counts, strict=True):
            if length < SHORT:
                self._short[length] = count
            else:
                self._long[length] = count

    def summary(self) -> dict:
        """Mean, quantiles (the smallest length that at least that share does not exceed), and a histogram over powers of two."""
        lengths, counts = (np.array(numbers, np.int64) for numbers in self.counts())
        if not lengths.size:
            return {"mean": 0.0, "quantiles": {}, "histogram": []}
        ends = np.cumsum(counts)
        total = int(ends[-1])
        places = {q: int(lengths[np.searchsorted(ends, max(int(np.ceil(q / 100 * total)), 1))]) for q in QUANTILES}
        bins = [0, *(1 << k for k in range(1, int(lengths[-1]).bit_length()))]
        edges = np.append(0, ends)[np.searchsorted(lengths, [*bins, lengths[-1] + 1])]  # sequences shorter than each
        histogram = [[start, number] for start, number in zip(bins, np.diff(edges).tolist(), strict=True)]
        first = next(k for k, (_, number) in enumerate(histogram) if number)
        return {
            "mean": round(int((lengths * counts).sum()) / total, 2),
            "quantiles": {str(q): place for q, place in places.items()},
            "histogram": histogram[first:],
        }


@compiled
def _count(lengths, counts):
    """Count the lengths that are short. Returns how many are not."""
    long = 0
    for length in lengths:
        if length < counts.size:
            counts[length] += 1
        else:
            long += 1
    return long
