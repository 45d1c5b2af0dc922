"""Chains from real structures: the placed C-beta is where the crystal has it, and odd files behave."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from Bio.PDB.mmcifio import MMCIFIO
from Bio.PDB.PDBParser import PDBParser

from bmoe.errors import RequestError
from bmoe.evaluation.structures import c_beta, read_chains, read_structure

DATA = Path(__file__).parent.parent / "data" / "structures"


def atoms(path: Path):
    return PDBParser(QUIET=True).get_structure("x", gzip.open(path, "rt"))[0]


def test_c_beta_lies_on_the_crystal_s():
    path = DATA / "1A8O_A.pdb.gz"
    (chain,) = read_structure(path)
    residues = [r for c in atoms(path) for r in c if "CA" in r]
    assert len(chain.sequence) == len(residues) == 66
    placed = c_beta(chain.backbone)
    distances = [np.linalg.norm(placed[i] - r["CB"].coord) for i, r in enumerate(residues) if "CB" in r]
    assert len(distances) > 55 and np.mean(distances) < 0.1 and np.max(distances) < 0.4


def test_selenomethionine_is_methionine_and_water_is_nothing(tmp_path):
    text = gzip.open(DATA / "1A8O_A.pdb.gz", "rt").read()
    lines = [line for line in text.splitlines() if line.startswith("ATOM")]
    changed = [f"HETATM{x[6:17]}MSE{x[20:]}" if x[17:20] == "ASP" else x for x in lines]
    water = "HETATM 9999  O   HOH A 901      21.554  34.953  27.691  1.00 19.26           O"
    (tmp_path / "x.pdb").write_text("\n".join([*changed, water]) + "\n")
    (plain,), (chain,) = read_structure(DATA / "1A8O_A.pdb.gz"), read_structure(tmp_path / "x.pdb")
    assert plain.sequence.startswith("DIRQGPKEPFRDYVDRFYKTLRAEQ")
    assert chain.sequence == plain.sequence.replace("D", "M")


def test_free_amino_acids_are_no_part_of_the_chain(tmp_path):
    """A glutamate and an alanine of the chain's name, after its end and far from it."""
    lines = [line for line in gzip.open(DATA / "1A8O_A.pdb.gz", "rt").read().splitlines() if line.startswith(("ATOM", "HETATM"))]
    ligands = []
    for number, name, place in ((901, "GLU", 60.0), (902, "ALA", 80.0)):
        for k, atom in enumerate(("N", "CA", "C", "O")):
            ligands.append(f"HETATM{9000 + k:5d}  {atom:<3} {name} A{number:4d}    {place + 1.4 * k:8.3f}{0.0:8.3f}{0.0:8.3f}  1.00 20.00")
    (tmp_path / "x.pdb.gz").write_bytes(gzip.compress(("\n".join([*lines, "TER", *ligands]) + "\n").encode()))
    (plain,), (chain,) = read_structure(DATA / "1A8O_A.pdb.gz"), read_structure(tmp_path / "x.pdb.gz")
    assert len(atoms(tmp_path / "x.pdb.gz")["A"]) == len(atoms(DATA / "1A8O_A.pdb.gz")["A"]) + 2
    assert chain.sequence == plain.sequence


@pytest.mark.parametrize("record", ["ATOM  ", "HETATM"])
def test_unknown_residues_of_the_chain_are_x(tmp_path, record):
    text = gzip.open(DATA / "1A8O_A.pdb.gz", "rt").read()
    lines = [line for line in text.splitlines() if line.startswith("ATOM")]
    changed = [f"{record}{x[6:17]}UNK{x[20:]}" if x[17:20] == "ASP" else x for x in lines]
    (tmp_path / "x.pdb").write_text("\n".join(changed) + "\n")
    (plain,), (chain,) = read_structure(DATA / "1A8O_A.pdb.gz"), read_structure(tmp_path / "x.pdb")
    assert chain.sequence == plain.sequence.replace("D", "X")
    assert np.array_equal(chain.backbone, plain.backbone)
    (tmp_path / "x.pdb").write_text("\n".join(f"{x[:17]}UNK{x[20:]}" for x in lines) + "\n")
    assert read_structure(tmp_path / "x.pdb") == []  # nothing for a model to read


def test_breaks_are_counted(tmp_path):
    lines = gzip.open(DATA / "1A7G_E.pdb.gz", "rt").read().splitlines(keepends=True)
    (whole,) = read_structure(DATA / "1A7G_E.pdb.gz")
    assert whole.breaks() == 0
    numbers = list(dict.fromkeys(line[22:27] for line in lines if line.startswith("ATOM")))
    gone = {*numbers[10:14], *numbers[40:41], numbers[0]}
    (tmp_path / "x.pdb").write_text("".join(line for line in lines if line[22:27] not in gone))
    (chain,) = read_structure(tmp_path / "x.pdb")
    assert chain.breaks() == 2 and len(chain.sequence) == len(whole.sequence) - 6


def test_glycine_has_a_c_beta():
    (chain,) = read_structure(DATA / "1A8O_A.pdb.gz")
    assert "G" in chain.sequence and np.isfinite(c_beta(chain.backbone)).all()


def test_contacts_against_a_double_loop():
    (chain,) = read_structure(DATA / "1A8O_A.pdb.gz")
    beta, contacts = c_beta(chain.backbone), chain.contacts()
    for i in range(0, 66, 5):
        for j in range(66):
            assert contacts[i, j] == (np.linalg.norm(beta[i] - beta[j]) < 8.0)
    helix = np.mean([contacts[i, i + 4] for i in range(62)])
    assert helix > 0.5  # a protein of helices


def test_a_missing_atom_makes_a_residue_unknown(tmp_path):
    lines = gzip.open(DATA / "1A8O_A.pdb.gz", "rt").read().splitlines(keepends=True)
    number = [line[22:27] for line in lines if line.startswith(("ATOM", "HETATM"))][200]
    kept = [line for line in lines if not (line[22:27] == number and line[12:16].strip() == "N")]
    (tmp_path / "x.pdb").write_text("".join(kept))
    (chain,) = read_structure(tmp_path / "x.pdb")
    assert len(chain.sequence) == 66 and chain.known().sum() == 65
    unknown = np.flatnonzero(~chain.known())[0]
    assert not chain.contacts()[unknown].any()


def test_mmcif_gives_the_same_chain(tmp_path):
    writer = MMCIFIO()
    writer.set_structure(atoms(DATA / "1A8O_A.pdb.gz"))
    writer.save(str(tmp_path / "x.cif"))
    (a,), (b,) = read_structure(tmp_path / "x.cif"), read_structure(DATA / "1A8O_A.pdb.gz")
    assert a.sequence == b.sequence and np.allclose(a.backbone, b.backbone, atol=1e-3)


def test_folders_without_structures_are_refused(tmp_path):
    with pytest.raises(RequestError, match="holds no structures"):
        read_chains(tmp_path)
    (tmp_path / "a.pdb").write_text("HEADER nothing\n")
    with pytest.raises(RequestError, match="no atoms; take it out|no protein chain"):
        read_chains(tmp_path)
    (tmp_path / "a.pdb").unlink()
    (tmp_path / "b.cif").write_text("not a cif\n")
    with pytest.raises(RequestError, match="b.cif.*take it out"):
        read_chains(tmp_path)


def test_the_42_chains(real_data):
    chains = read_chains(real_data / "structures")
    assert len(chains) == 42 and sum(len(c.sequence) for c in chains) == 8969
    inserted = next(c for c in chains if c.name.startswith("4ZHL_U"))
    ids = [r.id for c in atoms(real_data / "structures" / "4ZHL_U.pdb.gz") for r in c if "CA" in r]
    assert any(insertion.strip() for _, _, insertion in ids) and len(inserted.sequence) == len(ids)
