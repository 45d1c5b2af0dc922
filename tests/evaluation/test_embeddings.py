"""Embeddings are the model's own states, whatever shares the batch, under the identifiers of the FASTA."""

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from bmoe.errors import RequestError
from bmoe.evaluation import embeddings
from bmoe.evaluation.forward import wrap

CPU = torch.device("cpu")


def alone(model, letters, text: str) -> torch.Tensor:
    """State after the final norm, found from the head's input."""
    tokens = torch.from_numpy(wrap(letters, letters.encode(text.encode())))
    n, kept = len(tokens), []
    handle = model.head.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        model(tokens, torch.arange(n), torch.zeros(n, dtype=torch.long), torch.tensor([0, n]).int(), n, n)
    handle.remove()
    return kept[0][1:-1]


@pytest.fixture
def setting(make_recipe, make_model, proteins, tmp_path):
    recipe = make_recipe()
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"tokens_per_batch": 24})})  # two batches
    (tmp_path / "x.fasta").write_text(">a first\nMKTAYIAKQR\nQISF\n>b\nACDEFG*\n> c\nmktw-w\n")
    return make_model(recipe), recipe, proteins.alphabet, tmp_path


def test_residues_and_means(setting):
    model, recipe, letters, folder = setting
    found = embeddings.embed(model, recipe, letters, folder / "x.fasta", folder / "r.safetensors", CPU)
    mean = embeddings.embed(model, recipe, letters, folder / "x.fasta", folder / "m.safetensors", CPU, mode="mean")
    assert found["sequences"] == 3 and found["residues"] == 25 and found["layer"] == 3 and mean["mode"] == "mean"
    residues, means = load_file(folder / "r.safetensors"), load_file(folder / "m.safetensors")
    assert set(residues) == {"a", "b", "c"}
    for name, text in [("a", "MKTAYIAKQRQISF"), ("b", "ACDEFG"), ("c", "MKTWW")]:
        expected = alone(model, letters, text)
        assert torch.allclose(residues[name], expected, atol=1e-5)
        assert torch.allclose(means[name], expected.mean(0), atol=1e-5)
    with safe_open(folder / "r.safetensors", "pt") as file:
        assert file.metadata() == {"model": recipe.name, "alphabet": "protein", "mode": "residue", "layer": "3"}


def test_layer_0_is_the_embedding_table_scaled_as_the_model_does(setting):
    model, recipe, letters, folder = setting
    embeddings.embed(model, recipe, letters, folder / "x.fasta", folder / "e.safetensors", CPU, layer=0)
    rows = load_file(folder / "e.safetensors")["b"]
    expected = model.embedding[letters.encode(b"ACDEFG").astype(int)] * (1 - 0.12)  # no mask in the sequence: r = 0
    assert torch.allclose(rows, expected, atol=1e-6)


def test_requests_that_cannot_be_met(setting):
    model, recipe, letters, folder = setting

    def embed(text, **more):
        (folder / "y.fasta").write_text(text)
        return embeddings.embed(model, recipe, letters, folder / "y.fasta", folder / "y.safetensors", CPU, **more)

    with pytest.raises(RequestError, match="x occurs twice"):
        embed(">x 1\nMK\n>x 2\nMR\n")
    with pytest.raises(RequestError, match="no FASTA record.*name a FASTA file"):
        embed("MKTA\n")
    with pytest.raises(RequestError, match="no letters; take it out"):
        embed(">x\n>y\nMK\n")
    with pytest.raises(RequestError, match="--layer 9: the model has layers 0 .* to 3"):
        embed(">x\nMK\n", layer=9)
    with pytest.raises(RequestError, match="residue or mean"):
        embed(">x\nMK\n", mode="max")


def test_a_model_of_no_numbers_writes_nothing(setting):
    model, recipe, letters, folder = setting
    with torch.no_grad():
        model.embedding.fill_(torch.nan)
    with pytest.raises(RequestError, match="embeddings that are no numbers"):
        embeddings.embed(model, recipe, letters, folder / "x.fasta", folder / "n.safetensors", CPU)
    assert not (folder / "n.safetensors").exists()
