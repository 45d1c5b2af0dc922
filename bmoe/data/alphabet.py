"""Alphabets: which letters a model reads, and the ids of their tokens.

- `protein`: the 33 tokens of ESM-2 in ESM-2's order (Lin et al., Science 379, 2023), so that weights can be exchanged.
- `dna`: single bases, their IUPAC codes and five specials; `U` reads as `T`.
- `dna-bpe:N`: N tokens of byte-pair encoding over the bases, learnt from the input; the folder of the shards holds it as
  `tokenizer.json`.

Letters are read without case. A letter that an alphabet does not know is `unk_id`.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bmoe.errors import RequestError

PROTEIN = ("<cls>", "<pad>", "<eos>", "<unk>", *"LAGVSERTIDPKQNFYMHWCXBUZO.-", "<null_1>", "<mask>")
DNA_SPECIALS = ("<cls>", "<pad>", "<eos>", "<unk>", "<mask>")
BASES = "ACGT"
DNA_LETTERS = BASES + "NRYSWKMBDHV"  # IUPAC nucleotide codes (NC-IUB 1984)
DNA_COMPLEMENT = "TGCA" + "NYRSWMKVHDB"  # of each of them
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True)
class Alphabet:
    """Letters and their token ids.

    Attributes:
        name: `protein`, `dna` or `dna-bpe:N`.
        symbols: text of every id, so that `size` (V) is their number.
        cls_id, pad_id, eos_id, unk_id, mask_id: ids of the specials.
        residues: ids of the standard letters (int64): 20 amino acids, 4 bases, or every token of a byte-pair encoding.
        dtype: of stored ids, uint8 or (more than 256 tokens) uint16.
        table: 256 bytes, letter -> id of the single-letter alphabet; unknown letters are `unk_id`.
        tokenizer: the byte-pair encoder, or None.
        complement: id -> id of the complementary base (single bases only), or None; reverse it for the other strand.
    """

    name: str
    symbols: tuple[str, ...]
    cls_id: int
    pad_id: int
    eos_id: int
    unk_id: int
    mask_id: int
    residues: np.ndarray = field(repr=False, compare=False)
    dtype: type = field(repr=False)
    table: bytes = field(repr=False)
    tokenizer: object = field(default=None, repr=False, compare=False)
    complement: np.ndarray | None = field(default=None, repr=False, compare=False)

    @property
    def size(self) -> int:
        return len(self.symbols)

    def encode(self, letters: bytes) -> np.ndarray:
        """Ids of letters without specials: one per letter, or the byte-pair tokens."""
        if self.tokenizer is None:
            return np.frombuffer(letters.translate(self.table), np.uint8)
        return np.array(self.tokenizer.encode(fold_dna(letters)).ids, self.dtype)

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids, specials by their name."""
        return "".join(self.symbols[i] for i in ids)


def letter_table(letters: dict[str, int], unknown: int) -> bytes:
    """256 bytes that take a letter of either case to its id."""
    table = bytearray([unknown]) * 256
    for letter, number in letters.items():
        table[ord(letter)] = table[ord(letter.lower())] = number
    return bytes(table)


def fold_dna(letters: bytes) -> str:
    """Upper case, `U` as `T`, every byte outside the IUPAC codes as `?` (unknown to the encoder)."""
    return letters.translate(_FOLD).decode("ascii")


_FOLD = letter_table({letter: ord(letter) for letter in DNA_LETTERS} | {"U": ord("T")}, ord("?"))


def protein() -> Alphabet:
    """ESM-2's alphabet of 33 tokens."""
    ids = {symbol: number for number, symbol in enumerate(PROTEIN)}
    table = letter_table({s: n for s, n in ids.items() if len(s) == 1}, ids["<unk>"])
    return Alphabet("protein", PROTEIN, 0, 1, 2, 3, ids["<mask>"], np.arange(4, 24), np.uint8, table)


def dna() -> Alphabet:
    """Single bases with IUPAC codes; ids 5..8 are A C G T."""
    symbols = (*DNA_SPECIALS, *DNA_LETTERS)
    ids = {symbol: number for number, symbol in enumerate(symbols)}
    table = letter_table({s: ids[s] for s in DNA_LETTERS} | {"U": ids["T"]}, ids["<unk>"])
    complement = np.array([*range(len(DNA_SPECIALS)), *(ids[letter] for letter in DNA_COMPLEMENT)], np.uint8)
    return Alphabet("dna", symbols, 0, 1, 2, 3, 4, np.arange(5, 9), np.uint8, table, complement=complement)


def dna_bpe(name: str, tokenizer_file: Path) -> Alphabet:
    """A byte-pair encoding over the bases, read from its `tokenizer.json`. RequestError if the file is missing or other."""
    from tokenizers import Tokenizer  # imported here: only this alphabet needs it

    if not tokenizer_file.is_file():
        raise RequestError(f"{tokenizer_file} is missing: the alphabet {name} is read from the folder that `bmoe prepare` wrote")
    tokenizer = Tokenizer.from_str(tokenizer_file.read_text())
    symbols = tuple(tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size()))
    if symbols[: len(DNA_SPECIALS)] != DNA_SPECIALS:
        raise RequestError(f"{tokenizer_file} is no tokenizer of {name}: its first tokens should be {' '.join(DNA_SPECIALS)}")
    dtype = np.uint8 if len(symbols) <= 256 else np.uint16
    return Alphabet(name, symbols, 0, 1, 2, 3, 4, np.arange(len(DNA_SPECIALS), len(symbols)), dtype, dna().table, tokenizer)


def alphabet(name: str, directory: str | Path | None = None) -> Alphabet:
    """The alphabet of that name; `directory` is the folder of shards that holds the tokenizer of `dna-bpe:N`."""
    if name == "protein":
        return protein()
    if name == "dna":
        return dna()
    if is_bpe(name):
        if directory is None:
            raise RequestError(f"the alphabet {name} is learnt from its input: name the folder that `bmoe prepare` wrote")
        return dna_bpe(name, Path(directory) / TOKENIZER_FILE)
    raise RequestError(f"the alphabet {name!r} is unknown: use protein, dna or dna-bpe:N")


def is_bpe(name: str) -> bool:
    """Whether the name is `dna-bpe:N`."""
    kind, _, size = name.partition(":")
    return kind == "dna-bpe" and size.isdigit()
