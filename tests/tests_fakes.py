"""Sequences in memory that look like Shards."""

import numpy as np

from bmoe.data.alphabet import alphabet


class Memory:
    """Shards over a list of strings."""

    def __init__(self, sequences, name="protein", clusters=None, soft=None):
        self.alphabet = alphabet(name)
        self.ids = [self.alphabet.encode(s.encode()) for s in sequences]
        self.lengths = np.array([len(i) for i in self.ids], np.int64)
        self.clusters = None if clusters is None else np.array(clusters)
        self.soft = soft

    def __len__(self):
        return len(self.ids)

    def sequence(self, index):
        return self.ids[index]

    def soft_mask(self, index):
        return None if self.soft is None else self.soft[index]


def proteins(count, seed=0, longest=300):
    """Random proteins of 2 .. longest residues."""
    rng = np.random.default_rng(seed)
    return ["".join(rng.choice(list("ACDEFGHIKLMNPQRSTVWY"), size=rng.integers(2, longest + 1))) for _ in range(count)]


class RealLengths(Memory):
    """Shards of `count` random proteins whose lengths are spread as real ones are: log-normal around 270, 20 to 3,000."""

    def __init__(self, count, seed=0):
        super().__init__([])
        draw = np.random.default_rng(seed)
        self.lengths = np.clip(draw.lognormal(5.6, 0.7, count), 20, 3000).astype(np.int64)
        self.ids = [draw.choice(self.alphabet.residues, n).astype(np.uint8) for n in self.lengths]
