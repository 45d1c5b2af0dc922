"""Sequences for a profile without data: real lengths, random residues.

Proteins have the lengths of UniRef90: a log-normal with the mean and deviation of ln(length) over 10,000 clusters (median
257, mean 332 residues). Random residues cost exactly what real ones do, but routing on them says nothing about a trained
model's balance. DNA comes as records of four windows.
"""

import numpy as np

from bmoe.data.alphabet import Alphabet, alphabet, dna, is_bpe
from bmoe.recipe import Recipe

LOG_LENGTH_MEAN, LOG_LENGTH_DEVIATION = 5.550, 0.716
SEQUENCES = 20_000


class SyntheticShards:
    """Stands in for `data.shards.Shards`: what the sampler and the packing read of it."""

    clusters = None

    def __init__(self, recipe: Recipe, seed: int = 0):
        self.alphabet: Alphabet = dna() if is_bpe(recipe.data.alphabet) else alphabet(recipe.data.alphabet)
        self.seed = seed
        generator = np.random.default_rng(seed)
        if recipe.data.alphabet == "protein":
            lengths = generator.lognormal(LOG_LENGTH_MEAN, LOG_LENGTH_DEVIATION, SEQUENCES)
            self.lengths = np.clip(lengths, 20, 35_000).astype(np.int64)
        else:
            self.lengths = np.full(SEQUENCES // 4, 4 * recipe.data.window, np.int64)

    def __len__(self) -> int:
        return self.lengths.size

    def sequence(self, index: int) -> np.ndarray:
        """Uniform standard residues, the same for the same index."""
        generator = np.random.default_rng((self.seed, index))
        return generator.choice(self.alphabet.residues, self.lengths[index]).astype(self.alphabet.dtype)

    def soft_mask(self, index: int) -> None:
        """Nothing is soft-masked."""
