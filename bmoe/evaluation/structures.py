"""Protein chains from PDB and mmCIF files: sequence, backbone, and which residues touch.

Two residues are in contact when their C-beta atoms are nearer than 8 A. The C-beta is placed from N, CA and C for every
residue, so that glycine has one and all are alike; geometry (1.522 A, 1.927 rad, -2.143 rad) as in ESM and trRosetta.
Residues count by their order in the chain, whatever their numbers and insertion codes are. Heterogens, as selenomethionine and free
amino acids are written, belong to the chain where a peptide bond holds them; so do unknown residues, as X.
"""

import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from Bio.Data.PDBData import protein_letters_3to1_extended
from Bio.PDB.MMCIFParser import MMCIFParser
from Bio.PDB.PDBExceptions import PDBConstructionException, PDBConstructionWarning
from Bio.PDB.PDBParser import PDBParser

from bmoe.errors import RequestError
from bmoe.evaluation.files import read_text

CONTACT = 8.0  # A
BOND, NEIGHBOURS = 2.0, 4.5  # A at most: C and N of a peptide bond (1.33), CA of bonded residues (3.8; 2.9 if cis)
UNKNOWN = "X"
BACKBONE = ("N", "CA", "C")
ENDINGS = {".pdb": PDBParser, ".ent": PDBParser, ".cif": MMCIFParser, ".mmcif": MMCIFParser}
PACKED = ("", ".gz", ".bz2", ".xz")


@dataclass(frozen=True)
class Chain:
    """name: file and chain. sequence: one letter a residue. backbone: N, CA, C in A, float64 [n, 3, 3], nan where missing."""

    name: str
    sequence: str
    backbone: np.ndarray

    def contacts(self) -> np.ndarray:
        """Whether each two residues touch, bool [n, n]; see `known` for those that can be judged."""
        beta = c_beta(self.backbone)
        distance = np.sqrt(((beta[:, None] - beta[None]) ** 2).sum(axis=-1))
        return np.nan_to_num(distance, nan=np.inf) < CONTACT

    def known(self) -> np.ndarray:
        """Residues whose backbone is complete, bool [n]."""
        return np.isfinite(self.backbone).all(axis=(1, 2))

    def breaks(self) -> int:
        """How often residues are missing, or not bonded: CA of neighbours too far apart."""
        return int((np.linalg.norm(np.diff(self.backbone[:, 1], axis=0), axis=1) > NEIGHBOURS).sum())


def c_beta(backbone: np.ndarray) -> np.ndarray:
    """Where the C-beta is, [n, 3], from N, CA, C [n, 3, 3]: bonded to CA at 1.522 A, angle to N 1.927, dihedral C-N-CA -2.143."""
    n, ca, c = backbone[:, 0], backbone[:, 1], backbone[:, 2]
    back = _unit(n - ca)
    normal = _unit(np.cross(n - c, back))
    return ca + 1.522 * (
        np.cos(1.927) * back + np.sin(1.927) * np.cos(-2.143) * np.cross(normal, back) - np.sin(1.927) * np.sin(-2.143) * normal
    )


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def read_chains(directory: str | Path, shortest: int = 30) -> list[Chain]:
    """All protein chains of at least `shortest` residues of the structure files in a folder, equal sequences once.

    Of each file the first model. RequestError for a folder without structures or a file that cannot be read.
    """
    folder = Path(directory)
    files = sorted(p for p in folder.glob("*") if _ending(p)) if folder.is_dir() else []
    if not files:
        raise RequestError(f"{directory} holds no structures (.pdb, .ent, .cif, also .gz)")
    chains: dict[str, Chain] = {}
    for path in files:
        for chain in read_structure(path):
            if len(chain.sequence) >= shortest:
                chains.setdefault(chain.sequence, chain)
    if not chains:
        raise RequestError(f"{directory} holds no protein chain of at least {shortest} residues")
    return list(chains.values())


def _ending(path: Path) -> str | None:
    name = path.name.lower()
    return next((e for e in ENDINGS if any(name.endswith(e + p) for p in PACKED)), None)


def read_structure(path: Path) -> list[Chain]:
    """The protein chains of the first model of a file."""
    ending = _ending(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PDBConstructionWarning)  # gaps and odd occupancies are no business of ours
        try:
            structure = ENDINGS[ending](QUIET=True).get_structure(path.name, io.StringIO(read_text(path)))
            models = list(structure)
        except (PDBConstructionException, ValueError, KeyError, IndexError) as error:
            raise RequestError(f"{path} is no structure that can be read ({error}); take it out of the folder") from None
    if not models:
        raise RequestError(f"{path} has no atoms; take it out of the folder")
    stem = path.name[: path.name.lower().index(ending)]
    return [found for chain in models[0] if (found := _chain(stem, chain)) is not None]


def _chain(stem: str, chain) -> Chain | None:
    letters, backbone, residues = [], [], list(chain)
    for before, residue, after in zip([None, *residues], residues, [*residues[1:], None], strict=False):
        letter = protein_letters_3to1_extended.get(residue.get_resname().strip(), UNKNOWN)
        if residue.id[0] == " " and letter != UNKNOWN:
            belongs = any(atom in residue for atom in BACKBONE)
        else:  # the caps of a chain are bonded too, and have no CA
            belongs = "CA" in residue and (_bonded(before, residue) or _bonded(residue, after))
        if belongs:
            letters.append(letter)
            backbone.append([residue[atom].coord if atom in residue else (np.nan,) * 3 for atom in BACKBONE])
    if set(letters) <= {UNKNOWN}:
        return None
    return Chain(f"{stem}:{chain.id.strip() or '-'}", "".join(letters), np.array(backbone, np.float64))


def _bonded(first, second) -> bool:
    """Whether a peptide bond leads from one residue to the other."""
    if first is None or second is None or not all(name in residue for residue, name in ((first, "C"), (second, "N"))):
        return False
    return float(np.linalg.norm(first["C"].coord - second["N"].coord)) < BOND
