"""Small models with random weights, and transformers kept off the network and out of the user's cache."""

import os
import tempfile

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("HF_MODULES_CACHE", tempfile.mkdtemp(prefix="hf_modules_"))

import pytest
import torch

from bmoe.data.alphabet import alphabet
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, DataSection, ModelSection, MoESection, Recipe

SEQUENCES = (  # the first residues of human insulin, lysozyme C and haemoglobin alpha, and one with unknown letters
    "MALWMRLLPLLALLALWGPDPAAAFVNQHLCGSHLVEALYLVCGERGFFYTPKTRREAEDLQVGQVELGG",
    "MKALIVLGLVLLSVTVQGKVFERCELARTLKRLGMDGYRGISLANWMCLAKWESGYNTRATNYNAGDRSTDYG",
    "MVLSPADKTNVKAAWGKVGAHAGEYGAEALERMFLSFPTTKTYFPHFDLSHGSAQVKGHGKKVADALTNAVAH",
    "MXXJJ*BZ",
)


def randomize(model: Transformer, seed: int = 0) -> Transformer:
    """Random norms, biases and router biases too, and logits of O(1), so that no tensor can be left out unseen."""
    model.initialize(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or name.endswith("norm.weight"):
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
            else:
                parameter *= 2.0
    return model


@pytest.fixture
def make():
    """make(moe=None or a dict, alphabet name, **model keys) -> (model, recipe, alphabet)."""

    def make(moe=None, letters="protein", seed=0, **keys):
        section = ModelSection(**({"layers": 2, "width": 32, "heads": 4} | keys), moe=MoESection(**moe) if moe else None)
        names = alphabet(letters)
        model = Transformer(section, Vocabulary(names.size, names.pad_id, names.mask_id), BackendSection(experts="loop"))
        recipe = Recipe(
            name="small",
            model=section,
            data=DataSection(alphabet=letters, max_length=128, window=64, tokens_per_batch=256),
        )
        return randomize(model, seed), recipe, names

    return make


@pytest.fixture
def sequences():
    return SEQUENCES
