"""Packed batches and small models."""

import pytest
import torch

from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, ModelSection, MoESection

PROTEIN = Vocabulary(size=33, pad_id=1, mask_id=32)


def pack(sequences: list[torch.Tensor], tail: int = 0, pad_id: int = 1) -> dict:
    """Model inputs of sequences packed one after the other, with a tail of dummy slots in its own segment."""
    parts = [*sequences, torch.full((tail,), pad_id)] if tail else list(sequences)
    lengths = torch.tensor([len(part) for part in parts])
    ends = lengths.cumsum(0)
    return {
        "tokens_T": torch.cat(parts),
        "positions_T": torch.cat([torch.arange(n) for n in lengths]),
        "segments_T": torch.repeat_interleave(torch.arange(len(parts)), lengths),
        "cu_seqlens": torch.cat((torch.zeros(1, dtype=torch.int64), ends)).to(torch.int32),
        "max_seqlen": int(lengths.max()),
        "real_tokens": int(ends[-1]) - tail,
    }


def proteins(*lengths: int, masked: float = 0.2, seed: int = 0) -> list[torch.Tensor]:
    """Random residues between `<cls>` and `<eos>`, some of them `<mask>`."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for length in lengths:
        tokens = torch.randint(4, 24, (length,), generator=generator)
        tokens[torch.rand(length, generator=generator) < masked] = PROTEIN.mask_id
        tokens[0], tokens[-1] = 0, 2
        out.append(tokens)
    return out


def build(seed: int = 0, backend: dict | None = None, moe: dict | None | str = "small", vocabulary=PROTEIN, **model) -> Transformer:
    """A model of 2 layers of width 32 unless told otherwise; `moe=None` is dense. Random biases, norms and router bias."""
    if moe is not None:
        moe = MoESection(**({"experts": 4, "top_k": 2, "expert_width": 24} | ({} if moe == "small" else moe)))
    section = ModelSection(**({"layers": 2, "width": 32, "heads": 4, "ffn_width": 48} | model), moe=moe)
    network = Transformer(section, vocabulary, BackendSection(**({"experts": "loop"} | (backend or {}))))
    network.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("bias") or name.endswith("norm.weight"):
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
            else:
                parameter *= 2.0
    return network


@pytest.fixture(name="pack")
def _pack():
    return pack


@pytest.fixture(name="proteins")
def _proteins():
    return proteins


@pytest.fixture(name="build")
def _build():
    return build
