"""Byte-pair encoding over bases, learnt from the beginning of the input (Sennrich et al., ACL 2016; for DNA: DNABERT-2)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bmoe.data import fasta
from bmoe.data.alphabet import DNA_LETTERS, DNA_SPECIALS, TOKENIZER_FILE, dna
from bmoe.data.blocks import Piece
from bmoe.errors import RequestError

SAMPLE = 16_000_000  # bases to learn from
WORD = 512  # bases of one training example
LONGEST = 16  # bases of one token


def learn(pieces: Iterator[Piece], size: int, out: Path) -> None:
    """Learn `size` tokens from the first SAMPLE bases and write `tokenizer.json`. RequestError if there is nothing to learn from."""
    from tokenizers import Tokenizer, models, trainers  # imported here: only this alphabet needs it

    words = list(_words(pieces))
    if not words:
        raise RequestError("there is no base to learn a byte-pair encoding from: the input has no sequence")
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(DNA_SPECIALS),
        initial_alphabet=list(DNA_LETTERS),
        limit_alphabet=len(DNA_LETTERS),
        show_progress=False,
        max_token_length=LONGEST,
    )
    tokenizer.train_from_iterator(words, trainer)
    temporary = out / (TOKENIZER_FILE + ".partial")
    tokenizer.save(str(temporary))
    temporary.replace(out / TOKENIZER_FILE)


def _words(pieces: Iterator[Piece]) -> Iterator[str]:
    letters = dna()
    codes, symbols = fasta.codes_of(letters), np.frombuffer(("?" * 5 + DNA_LETTERS).encode(), np.uint8)
    seen = 0
    for piece in pieces:
        data = b">\n" + piece.data if piece.continued else piece.data
        if not data:
            continue
        records = fasta.parse(data, codes, letters.unk_id, True)
        for begin, end in zip(records.bounds[:-1].tolist(), records.bounds[1:].tolist(), strict=True):
            text = symbols[records.ids[begin:end]].tobytes().decode()
            for run in text.replace("?", "N").split("NNNN"):
                yield from (run[k : k + WORD] for k in range(0, len(run), WORD))
            seen += end - begin
            if seen >= SAMPLE:
                return
