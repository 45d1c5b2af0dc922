"""tokenizer.json reads letters as `bmoe prepare` does; ESM-2's own tokenizer is the oracle where it is per residue."""

import pytest
import torch
import transformers

from bmoe.data.alphabet import alphabet
from bmoe.data.blocks import Piece
from bmoe.data.bpe import learn
from bmoe.interop.tokenizer import build_tokenizer, write_tokenizer

TEXTS = ["MKTLLG", "mktllg", "MXBUZO.-", "M??J*K", "ACDEFGHIKLMNPQRSTVWY", "", "A\u00e9K"]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["protein", "dna"])
def test_letters_as_the_alphabet_reads_them(name, text):
    names = alphabet(name)
    expected = [names.cls_id, *names.encode(text.encode("latin-1")).tolist(), names.eos_id]
    assert build_tokenizer(names).encode(text).ids == expected


def test_unknown_runs_stay_one_token_each():
    names = alphabet("protein")
    assert build_tokenizer(names).encode("MJJJK").ids == [0, 20, 3, 3, 3, 15, 2]


def test_white_space_specials_and_decoding():
    names = alphabet("protein")
    tokenizer = build_tokenizer(names)
    ids = tokenizer.encode("MK\nT <mask>LLG\r\n").ids
    assert ids == tokenizer.encode("MKT<mask>LLG").ids == [0, 20, 15, 11, 32, 4, 4, 6, 2]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<cls>MKT<mask>LLG<eos>"
    assert tokenizer.decode(ids) == "MKTLLG"


def test_esm2s_own_tokenizer_agrees(tmp_path):
    """Except for runs of unknown letters, which it makes one token."""
    names = alphabet("protein")
    (tmp_path / "vocab.txt").write_text("\n".join(names.symbols))
    oracle = transformers.EsmTokenizer(str(tmp_path / "vocab.txt"))
    for text in ("MKTLLG", "MXBUZO.-", "ACDEFGHIKLMNPQRSTVWY", "M<mask>K", "MJK"):
        assert build_tokenizer(names).encode(text).ids == oracle(text)["input_ids"]


def test_auto_tokenizer(tmp_path):
    names = alphabet("protein")
    write_tokenizer(names, tmp_path, 1024)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.model_max_length == 1024 and len(tokenizer) == 33
    specials = (tokenizer.cls_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.mask_token_id)
    assert specials == (0, 1, 2, 3, 32)
    batch = tokenizer(["MKT", "M"], padding=True, return_tensors="pt")
    assert torch.equal(batch["input_ids"], torch.tensor([[0, 20, 15, 11, 2], [0, 20, 2, 1, 1]]))
    assert batch["attention_mask"].sum(1).tolist() == [5, 3]


def test_decoders_prompt_is_left_open():
    assert build_tokenizer(alphabet("dna"), closed=False).encode("acgu").ids == [0, 5, 6, 7, 8]


def test_byte_pairs(tmp_path):
    learn(iter([Piece(b">x\n" + b"ACGTTACGTTGGACGTT" * 50, 854)]), 40, tmp_path)
    names = alphabet("dna-bpe:40", tmp_path)
    tokenizer = build_tokenizer(names)
    for text in ("ACGTTACGTTGG", "acguuNNRY", "AC??GT"):
        assert tokenizer.encode(text).ids == [names.cls_id, *names.encode(text.encode()).tolist(), names.eos_id]
    assert tokenizer.decode(tokenizer.encode("ACGTTGG").ids) == "ACGTTGG"
