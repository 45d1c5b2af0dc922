"""What `bmoe prepare` is asked to do: the flags of the command, checked."""

from dataclasses import asdict, dataclass

from bmoe.data.alphabet import is_bpe
from bmoe.data.blocks import LIMIT
from bmoe.errors import RequestError

POLICIES = ("unknown", "drop", "error")
FORMATS = ("fasta", "fastq", "genbank", "embl", "swissprot")
UNIREF = "uniref"  # value of `clusters`: read the cluster off UniRef headers


@dataclass(frozen=True)
class PrepareOptions:
    """Options that decide the bytes written. RequestError for values that cannot be meant.

    Attributes:
        alphabet: `protein`, `dna` or `dna-bpe:N`.
        format: of the inputs: fasta, fastq, genbank, embl or swissprot.
        valid_fraction, test_fraction: shares of sequences (or clusters) held out.
        clusters: TSV of members and representatives, or `uniref`; None splits by sequence.
        dedup: keep the first of equal sequences.
        min_length, max_length: in residues, after cleaning; None keeps every length.
        on_invalid: what a letter outside the alphabet does: becomes `<unk>`, drops its record, or stops the run.
        internal_stop: the same for a `*` inside a sequence; a trailing `*` is removed.
        gaps: `remove` takes `-` and `.` out; `invalid` treats them as letters outside the alphabet.
        n_runs: DNA: `split` cuts records at long runs of N, `keep` leaves them.
        soft_mask: DNA: remember which bases were lower case.
        keep_headers: store header lines.
        seed: of the split.
    """

    alphabet: str = "protein"
    format: str = "fasta"
    valid_fraction: float = 0.005
    test_fraction: float = 0.0
    clusters: str | None = None
    dedup: bool = True
    min_length: int = 2
    max_length: int | None = None
    on_invalid: str = "unknown"
    internal_stop: str = "unknown"
    gaps: str = "remove"
    n_runs: str = "split"
    soft_mask: bool = True
    keep_headers: bool = True
    seed: int = 0

    def __post_init__(self):
        if self.alphabet not in ("protein", "dna") and not is_bpe(self.alphabet):
            raise RequestError(f"--alphabet {self.alphabet} is unknown: use protein, dna or dna-bpe:N")
        if is_bpe(self.alphabet) and not 32 <= int(self.alphabet.partition(":")[2]) <= 65_536:
            raise RequestError(f"--alphabet {self.alphabet}: a byte-pair encoding has 32 to 65536 tokens")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise RequestError(f"--{name.replace('_', '-')} {getattr(self, name)} is unknown: use {', '.join(choices)}")
        held_out = self.valid_fraction + self.test_fraction
        if not (0 <= self.valid_fraction < 1 and 0 <= self.test_fraction < 1 and held_out < 1):
            shares = f"--valid-fraction {self.valid_fraction:g} and --test-fraction {self.test_fraction:g}"
            raise RequestError(f"{shares}: each is a share from 0 to 1, and together they leave something to train on")
        if self.min_length < 0:
            raise RequestError(f"--min-length {self.min_length}: a number of residues is 0 or more")
        if self.max_length is not None and self.max_length < max(self.min_length, 1):
            raise RequestError(f"--max-length {self.max_length} is below --min-length {self.min_length} or below 1: nothing could be kept")
        if self.dna and self.max_length is not None and self.max_length > LIMIT // 2:
            raise RequestError(f"--max-length of DNA is at most {LIMIT // 2:,}: longer records are read in pieces")

    @property
    def dna(self) -> bool:
        return self.alphabet != "protein"

    def as_dict(self) -> dict:
        """Plain values, for the manifest."""
        return asdict(self)


_CHOICES = {
    "format": FORMATS,
    "on_invalid": POLICIES,
    "internal_stop": POLICIES,
    "gaps": ("remove", "invalid"),
    "n_runs": ("split", "keep"),
}
