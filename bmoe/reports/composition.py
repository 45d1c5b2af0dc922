"""Amino-acid composition beside a reference: Swiss-Prot as its release statistics publish it."""

SWISSPROT = {  # percent of residues; UniProtKB/Swiss-Prot protein knowledgebase release statistics, section 5
    "A": 8.25, "Q": 3.93, "L": 9.64, "S": 6.65, "R": 5.52, "E": 6.71, "K": 5.80, "T": 5.36, "N": 4.06, "G": 7.07,
    "M": 2.41, "W": 1.10, "D": 5.46, "H": 2.27, "F": 3.86, "Y": 2.92, "C": 1.38, "I": 5.91, "P": 4.74, "V": 6.85,
}  # fmt: skip


def beside_swissprot(composition: dict[str, float]) -> list[tuple[str, float, float | None]]:
    """(letter, percent found, percent in Swiss-Prot or None), the most frequent first, equally frequent ones by letter."""
    letters = sorted(set(composition) | set(SWISSPROT), key=lambda letter: (-composition.get(letter, 0.0), letter))
    return [(letter, 100 * composition.get(letter, 0.0), SWISSPROT.get(letter)) for letter in letters]
