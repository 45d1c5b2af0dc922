"""Sequences in memory that look like one split of prepared shards, small recipes and models."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from bmoe import recipe as recipes
from bmoe.data.alphabet import alphabet
from bmoe.model.transformer import Transformer, Vocabulary


class MemoryShards:
    """What the evaluation needs of `bmoe.data.shards.Shards`."""

    clusters, directory, split = None, "memory", "valid"

    def __init__(self, sequences: list[str], headers: list[str] | None = None, letters: str = "protein"):
        self.alphabet = alphabet(letters)
        self._ids = [self.alphabet.encode(s.encode()) for s in sequences]
        self._headers = headers
        self.lengths = np.array([ids.size for ids in self._ids], np.int64)

    def __len__(self) -> int:
        return len(self._ids)

    def sequence(self, index: int) -> np.ndarray:
        return self._ids[index]

    def header(self, index: int) -> str | None:
        return None if self._headers is None else self._headers[index]

    def soft_mask(self, index: int) -> None:
        return None


def random_proteins(number: int, longest: int, seed: int = 0) -> list[str]:
    generator = np.random.default_rng(seed)
    return ["".join(generator.choice(list("ACDEFGHIKLMNPQRSTVWY"), generator.integers(2, longest))) for _ in range(number)]


def small_recipe(kind: str = "encoder", slots: int = 512, **model) -> recipes.Recipe:
    moe = {"experts": 4, "top_k": 2, "expert_width": 16, "dense_layers": 1}
    return recipes.validate(
        {
            "data": {"max_length": 128, "tokens_per_batch": slots},
            "model": {"kind": kind, "layers": 3, "width": 32, "heads": 4, "moe": moe, **model},
            "objective": {"kind": "mlm" if kind == "encoder" else "clm"},
            "precision": {"kind": "fp32"},
            "training": {"tokens_per_step": slots, "validation_tokens": 4096},
        }
    )


def small_model(recipe: recipes.Recipe, seed: int = 0, scale: float = 4.0) -> Transformer:
    """A random model whose outputs are far from uniform."""
    letters = alphabet(recipe.data.alphabet)
    model = Transformer(recipe.model, Vocabulary(letters.size, letters.pad_id, letters.mask_id), recipe.backend)
    model.initialize(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(scale)
    return model.eval()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder BMOE_REAL_DATA: public samples too large, or not free enough, for the repository."""
    folder = Path(os.environ.get("BMOE_REAL_DATA", "no such folder"))
    if not folder.is_dir():
        pytest.skip("BMOE_REAL_DATA does not name the folder of real samples")
    return folder


@pytest.fixture(scope="session")
def memory_shards():
    return MemoryShards


@pytest.fixture(scope="session")
def make_proteins():
    return random_proteins


@pytest.fixture(scope="session")
def make_recipe():
    return small_recipe


@pytest.fixture(scope="session")
def make_model():
    return small_model


@pytest.fixture(scope="session")
def proteins() -> MemoryShards:
    sequences = random_proteins(40, 200)
    return MemoryShards(sequences, [f"sp|P{i:05d}|X OS={'Homo sapiens' if i % 3 else 'Mus musculus'} OX={i}" for i in range(40)])
