"""tokenizer.json of an alphabet: one token a letter (or byte pairs), read the way `bmoe prepare` reads letters.

White space is dropped, case ignored, every unknown letter is an `<unk>` of its own (so that positions stay those of the
residues), and `<cls>` comes first. An encoder's sequence ends with `<eos>`; a decoder's is left open, to be continued.
"""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from bmoe.data.alphabet import Alphabet, dna


def build_tokenizer(alphabet: Alphabet, closed: bool = True) -> Tokenizer:
    """The tokenizer of an alphabet; `closed` appends `<eos>`."""
    symbols = alphabet.symbols
    specials = {name: symbols[getattr(alphabet, f"{name}_id")] for name in ("cls", "pad", "eos", "unk", "mask")}
    if alphabet.tokenizer is None:
        tokenizer = Tokenizer(models.WordLevel({symbol: i for i, symbol in enumerate(symbols)}, unk_token=specials["unk"]))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
        letters = alphabet
    else:
        tokenizer = Tokenizer.from_str(alphabet.tokenizer.to_str())
        letters = dna()
    aliases = [normalizers.Replace(other, letter) for other, letter in _aliases(letters)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(Regex(r"\s+"), ""), *aliases])
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials.values()])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{specials['cls']} $A" + (f" {specials['eos']}" if closed else ""),
        special_tokens=[(specials[name], symbols.index(specials[name])) for name in ("cls", "eos")],
    )
    return tokenizer


def _aliases(letters: Alphabet) -> list[tuple[str, str]]:
    """(text, letter it stands for): lower case, and U for T in DNA."""
    known = {chr(code): letters.symbols[letters.table[code]] for code in range(128) if letters.table[code] != letters.unk_id}
    return [(text, letter) for text, letter in known.items() if text != letter]


def write_tokenizer(alphabet: Alphabet, folder: Path, max_length: int, closed: bool = True) -> None:
    """tokenizer.json and tokenizer_config.json, for AutoTokenizer."""
    build_tokenizer(alphabet, closed).save(str(folder / "tokenizer.json"))
    tokens = {f"{name}_token": alphabet.symbols[getattr(alphabet, f"{name}_id")] for name in ("cls", "pad", "eos", "unk", "mask")}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **tokens,
        "bos_token": tokens["cls_token"],
        "model_max_length": max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")
