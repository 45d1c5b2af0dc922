"""The dense encoder with GELU, LayerNorm and biases is ESM-2: published sizes, and Hugging Face's logits on the same weights."""

import pytest
import torch
from transformers import EsmConfig, EsmForMaskedLM

from bmoe.interop.esm2 import from_esm2
from bmoe.model.transformer import Transformer, Vocabulary
from bmoe.recipe import BackendSection, ModelSection

PUBLISHED = {  # (layers, width, heads): parameters with the contact head, a logistic regression on layers x heads maps
    (6, 320, 20): 7_512_474,
    (12, 480, 20): 33_501_394,
    (30, 640, 20): 148_140_154,
    (33, 1280, 20): 651_043_254,
}


def esm2(layers, width, heads):
    return ModelSection(layers=layers, width=width, heads=heads, norm="layernorm", ffn="gelu", bias=True, moe=None)


def transformer(section):
    return Transformer(section, Vocabulary(33, 1, 32), BackendSection(experts="loop"))


def hugging_face(layers, width, heads, seed=0):
    torch.manual_seed(seed)
    config = EsmConfig(
        vocab_size=33, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=4 * width,
        position_embedding_type="rotary", token_dropout=True, emb_layer_norm_before=False, layer_norm_eps=1e-5,
        mask_token_id=32, pad_token_id=1, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = EsmForMaskedLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("shape, count", PUBLISHED.items(), ids=str)
def test_published_parameter_counts(shape, count):
    """The published numbers include the contact head's layers x heads weights and one bias, which this model has not."""
    with torch.device("meta"):
        model = transformer(esm2(*shape))
    contact_head = shape[0] * shape[2] + 1
    assert sum(parameter.numel() for parameter in model.parameters()) + contact_head == count


def test_parts_of_the_8m_model():
    with torch.device("meta"):
        model = transformer(esm2(6, 320, 20))
    head = sum(parameter.numel() for parameter in model.head.parameters())
    tied = model.embedding.numel()
    total = sum(parameter.numel() for parameter in model.parameters())
    assert (total - head, head, tied) == (7_408_960, 103_393, 33 * 320)


def test_logits_equal_hugging_face(proteins, pack):
    """fp32, random weights of the 8M shape; alone in HF, packed here, and padded in HF with an attention mask."""
    reference = hugging_face(6, 320, 20)
    weights, section = from_esm2(reference.state_dict())
    model = transformer(ModelSection(**section))
    assert ModelSection(**section) == esm2(6, 320, 20).model_copy(update={"ffn_width": 1280})
    model.load_state_dict(weights)
    lengths = (130, 9, 64)
    sequences = proteins(*lengths)
    ours = model(**pack(sequences, tail=21)).logits[: sum(lengths)].split(lengths)
    padded = torch.full((3, 130), 1)
    for row, sequence in zip(padded, sequences, strict=True):
        row[: len(sequence)] = sequence
    with torch.no_grad():
        batch = reference(input_ids=padded, attention_mask=(padded != 1).long()).logits
        for i, sequence in enumerate(sequences):
            alone = reference(input_ids=sequence[None], attention_mask=torch.ones_like(sequence[None])).logits[0]
            assert alone.std() > 0.5, "logits of O(1), or the tolerance means nothing"
            torch.testing.assert_close(ours[i], alone, rtol=0, atol=1e-4)
            torch.testing.assert_close(ours[i], batch[i, : len(sequence)], rtol=0, atol=1e-4)
