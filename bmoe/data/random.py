"""Counter-based random numbers: the same draw for the same key, whatever the batch, rank, worker or world size.

A key is a 64-bit hash of (seed, purpose, epoch, item); draw number `counter` of a key is one more hash. Nothing has
state, so a draw needs no history: a resumed run, another rank or another batching sees exactly the same numbers.
The mixing function is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014), which passes BigCrush as a counter
generator with the golden-ratio increment.
"""

import numpy as np

GOLDEN = np.uint64(0x9E3779B97F4A7C15)

# Purposes keep streams of one (seed, epoch, item) apart.
ORDER, CROP, MASK, MEMBER, STRAND = range(1, 6)


def mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser, elementwise on uint64 (a bijection)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key(seed: int, purpose: int, epoch: np.ndarray | int, item: np.ndarray | int) -> np.ndarray:
    """Keys (uint64) of items in their epochs; `epoch` and `item` broadcast."""
    k = mix(_uint64(seed % 2**64) + GOLDEN)
    for part in (purpose, epoch, item):
        k = mix(k + (_uint64(part) + np.uint64(1)) * GOLDEN)
    return k


def bits(keys: np.ndarray, counter: np.ndarray | int) -> np.ndarray:
    """Draw number `counter` of each key: uint64; both broadcast."""
    return mix(_uint64(keys) + (_uint64(counter) + np.uint64(1)) * GOLDEN)


def _uint64(x: np.ndarray | int) -> np.ndarray:
    """As an array of at least one dimension: numpy warns of (wanted) wrap-around only for scalars."""
    return np.atleast_1d(np.asarray(x)).astype(np.uint64)


def uniform(keys: np.ndarray, counter: np.ndarray | int) -> np.ndarray:
    """Draws in [0, 1) with 53 bits, float64."""
    return (bits(keys, counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def below(keys: np.ndarray, counter: np.ndarray | int, bound: np.ndarray | int) -> np.ndarray:
    """Draws of integers in [0, bound), int64. The bias is below bound / 2**53."""
    return (uniform(keys, counter) * np.asarray(bound, dtype=np.float64)).astype(np.int64)


def permute(index: np.ndarray, n: int, permutation_key: np.ndarray) -> np.ndarray:
    """Images of `index` (int64 in [0, n)) under a keyed permutation of [0, n), without storing it.

    A balanced Feistel network of six rounds on the smallest even number of bits that holds n, walked until the image
    falls below n (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). Constant memory, random
    access: an epoch of a billion sequences costs nothing to enter in its middle.
    """
    half = max(1, (max(n - 1, 1).bit_length() + 1) // 2)
    shift, low = np.uint64(half), np.uint64((1 << half) - 1)
    round_keys = bits(permutation_key, np.arange(6))
    out = np.atleast_1d(np.asarray(index)).astype(np.uint64)
    pending = np.arange(out.size)
    while pending.size:
        x = out[pending]
        left, right = x >> shift, x & low
        for round_key in round_keys:
            left, right = right, left ^ (mix(right + round_key) & low)
        x = (left << shift) | right
        out[pending] = x
        pending = pending[x >= n]
    return out.astype(np.int64)
