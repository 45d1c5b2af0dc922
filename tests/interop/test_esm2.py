"""Import of ESM-2 checkpoints in both namings; Hugging Face's model with random weights is the oracle."""

from argparse import Namespace

import pytest
import torch
from transformers import EsmConfig, EsmForMaskedLM

from bmoe.errors import RequestError
from bmoe.interop.esm2 import HEADS, from_esm2
from bmoe.interop.hub.modeling_bmoe import BmoeForMaskedLM
from bmoe.interop.huggingface import export, load_pretrained, pack
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, ModelSection


def config(layers, width, heads, **options):
    return EsmConfig(
        vocab_size=33, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
        position_embedding_type="rotary", emb_layer_norm_before=False, layer_norm_eps=1e-5, mask_token_id=32, pad_token_id=1,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **{"token_dropout": True, **options},
    )  # fmt: skip


def random_esm(*shape, **options):
    torch.manual_seed(0)
    model = EsmForMaskedLM(config(*shape, **options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def transformer(weights, keys):
    model = Transformer(ModelSection(**keys), Vocabulary(33, 1, 32), BackendSection(experts="loop"))
    model.load_state_dict(weights)
    return model


def fair_naming(weights):
    """The names of fair-esm's .pt files, with their prefixes and their rotary frequencies in every layer."""
    pairs = {
        "esm.embeddings.word_embeddings": "embed_tokens",
        "esm.encoder.layer": "layers",
        "esm.encoder.emb_layer_norm_after": "emb_layer_norm_after",
        "attention.self.query": "self_attn.q_proj",
        "attention.self.key": "self_attn.k_proj",
        "attention.self.value": "self_attn.v_proj",
        "attention.output.dense": "self_attn.out_proj",
        "attention.LayerNorm": "self_attn_layer_norm",
        "intermediate.dense": "fc1",
        "output.dense": "fc2",
        "LayerNorm": "final_layer_norm",
    }
    out = {}
    for name, value in weights.items():
        if "contact_head" in name or "rotary" in name or name == "lm_head.decoder.weight":
            continue
        for theirs, fair in pairs.items():
            name = name.replace(theirs, fair)
        out["encoder." + ("" if name.startswith("lm_head") else "sentence_encoder.") + name] = value
    out["encoder.lm_head.weight"] = weights["lm_head.decoder.weight"]
    for n in range(2):
        frequencies = weights["esm.rotary_embeddings.inv_freq"]
        out[f"encoder.sentence_encoder.layers.{n}.self_attn.rot_emb.inv_freq"] = frequencies
    return out


def rows(sequences):
    letters = "LAGVSERTIDPKQNFYMHWCXBUZO.-"
    out = [torch.tensor([0, *(4 + letters.index(c) if c in letters else 3 for c in text), 2]) for text in sequences]
    for row in out:
        row[3::7] = 32
    return out


@pytest.mark.parametrize("token_dropout", [True, False])
@pytest.mark.parametrize("shape", [(2, 32, 4), (6, 320, 20), (12, 480, 20)], ids=["tiny", "8M", "35M"])
def test_folder_of_hugging_face_gives_its_logits(shape, token_dropout, sequences, tmp_path):
    """Alone, and padded with an attention mask."""
    reference = random_esm(*shape, token_dropout=token_dropout)
    reference.save_pretrained(tmp_path)
    model, batch = transformer(*load_pretrained(tmp_path)), rows(sequences)
    ours = model(**pack(batch)).logits.split([len(row) for row in batch])
    padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=1)
    with torch.no_grad():
        together = reference(input_ids=padded, attention_mask=(padded != 1).long()).logits
        for i, row in enumerate(batch):
            alone = reference(input_ids=row[None], attention_mask=torch.ones_like(row[None])).logits[0]
            torch.testing.assert_close(ours[i], alone, rtol=0, atol=1e-4)
            torch.testing.assert_close(ours[i], together[i, : len(row)], rtol=0, atol=1e-4)


def test_hidden_states_of_an_export_are_those_of_hugging_face(sequences, make, tmp_path):
    """All of them: the embeddings, each layer, and the last after the final norm."""
    reference = random_esm(2, 32, 4)
    reference.save_pretrained(tmp_path / "esm")
    canonical, keys = load_pretrained(tmp_path / "esm")
    model, recipe, names = make(**keys)
    model.load_state_dict(canonical)
    export(model, recipe, tmp_path / "ours", names)
    other = BmoeForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    for row in rows(sequences):
        inputs = {"input_ids": row[None], "attention_mask": torch.ones_like(row[None]), "output_hidden_states": True}
        with torch.no_grad():
            theirs, ours = reference(**inputs).hidden_states, other(**inputs).hidden_states
        assert len(ours) == len(theirs) == 3
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def test_a_head_of_its_own_is_kept(sequences, tmp_path):
    """In both namings; of a fair-esm file whose matrix is the embedding nothing is kept twice."""
    reference = random_esm(2, 32, 4, tie_word_embeddings=False)
    weights = dict(reference.state_dict())
    assert not torch.equal(weights["lm_head.decoder.weight"], weights["esm.embeddings.word_embeddings.weight"])
    reference.save_pretrained(tmp_path)
    torch.save({"model": fair_naming(weights)}, tmp_path / "esm2_t2.pt")
    for place in (tmp_path, tmp_path / "esm2_t2.pt"):
        canonical, keys = load_pretrained(place)
        assert keys["tie_head"] is False
        model = transformer(canonical, keys)
        for row in rows(sequences):
            with torch.no_grad():
                theirs = reference(input_ids=row[None], attention_mask=torch.ones_like(row[None])).logits[0]
            torch.testing.assert_close(model(**pack([row])).logits, theirs, rtol=0, atol=1e-4)
    _, keys = from_esm2(fair_naming(random_esm(2, 32, 4).state_dict()))
    assert keys["tie_head"] is True


@pytest.mark.parametrize("name", ["embed_positions.weight", "emb_layer_norm_before.bias", "layers.0.self_attn.bias_k"])
def test_files_of_esm_1b_are_refused(name):
    weights = fair_naming(random_esm(2, 32, 4).state_dict())
    with pytest.raises(RequestError, match=f"the tensor {name}, which ESM-2 does not have"):
        from_esm2(weights | {f"encoder.sentence_encoder.{name}": torch.zeros(32)})


def test_a_file_of_hugging_face_without_config_is_refused_if_it_is_esm_1b():
    weights = random_esm(2, 32, 4).state_dict()
    from_esm2(weights | {"esm.embeddings.position_embeddings.weight": torch.zeros(9, 32)})  # ESM-2's folders have one too
    with pytest.raises(RequestError, match=r"the tensor esm.embeddings.layer_norm.weight, which ESM-2 does not have"):
        from_esm2(weights | {"esm.embeddings.layer_norm.weight": torch.ones(32)})


@pytest.mark.parametrize("shape", [(layers, width, heads) for (layers, width), heads in HEADS.items()], ids=str)
def test_all_published_shapes_by_key_and_shape(shape):
    """On the meta device: every tensor finds its place, heads are found without a config."""
    with torch.device("meta"):
        weights = EsmForMaskedLM(config(*shape)).state_dict()
        canonical, keys = from_esm2({name: value for name, value in weights.items() if "inv_freq" not in name}, tied=True)
        model = Transformer(ModelSection(**keys), Vocabulary(33, 1, 32), BackendSection(experts="loop"))
    assert {n: v.shape for n, v in canonical.items()} == {n: v.shape for n, v in model.state_dict().items()}
    assert keys["heads"] == shape[2] and keys["ffn_width"] == 4 * shape[1]


def test_fair_esm_naming_and_pickle(tmp_path):
    reference = random_esm(2, 32, 4)
    weights = dict(reference.state_dict())
    weights["esm.rotary_embeddings.inv_freq"] = weights["esm.rotary_embeddings.inv_freq"].half().float()
    body = {"args": Namespace(layers=2), "cfg": {"model": Namespace(encoder_layers=2)}, "model": fair_naming(weights)}
    torch.save(body, tmp_path / "esm2_t2.pt")
    torch.save({"model": {}}, tmp_path / "esm2_t2-contact-regression.pt")
    expected, keys = from_esm2(weights)
    for place in (tmp_path, tmp_path / "esm2_t2.pt"):
        found, found_keys = load_pretrained(place)
        assert found_keys == keys and keys["heads"] == 4
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
    stored = weights["esm.rotary_embeddings.inv_freq"]
    assert torch.equal(transformer(expected, keys).rotary.inverse_frequency, stored), "stored frequencies are kept"


def test_a_pickle_that_runs_code_is_not_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    torch.save({"model": {"x": Evil()}}, tmp_path / "weights.pt")
    with pytest.raises(RequestError, match="weights.pt"):
        load_pretrained(tmp_path / "weights.pt")
    assert not (tmp_path / "pwned").exists()


def test_refusals(tmp_path):
    weights = random_esm(2, 32, 4).state_dict()
    with pytest.raises(RequestError, match="how many heads"):
        from_esm2({name: value for name, value in weights.items() if "inv_freq" not in name})
    with pytest.raises(RequestError, match="no tensor lm_head.dense.bias"):
        from_esm2({name: value for name, value in weights.items() if name != "lm_head.dense.bias"})
    EsmForMaskedLM(config(2, 32, 4)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"rotary"', '"absolute"'))
    with pytest.raises(RequestError, match="position_embedding_type is absolute"):
        load_pretrained(tmp_path)
