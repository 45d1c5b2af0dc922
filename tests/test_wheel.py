"""The three lines of the README from an empty folder, with the built wheel and nothing of the checkout."""

import gzip
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PROTEINS = REPOSITORY / "tests" / "data" / "uniprot_500.fasta.gz"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with the unpacked wheel, as pip would install it."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(place), str(REPOSITORY)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = place.glob("bmoe-*.whl")
    zipfile.ZipFile(wheel).extractall(place / "site")
    return place / "site"


def bmoe(installed: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PYTHONPATH": str(installed)}
    code = f"import bmoe; assert bmoe.__file__.startswith({str(installed)!r}); from bmoe.cli import main; main()"
    return subprocess.run([sys.executable, "-P", "-c", code, *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def test_three_lines_from_an_empty_folder(installed, tmp_path):
    (tmp_path / "uniref50.fasta").write_bytes(gzip.decompress(PROTEINS.read_bytes()))
    first = bmoe(installed, tmp_path, "prepare", "uniref50.fasta")
    assert first.returncode == 0, first.stderr
    assert (tmp_path / "data" / "uniref50" / "manifest.json").is_file()

    shrink = (
        "model.layers=2",
        "model.width=40",
        "model.heads=2",
        "model.moe.expert_width=16",
        "data.max_length=32",
        "data.tokens_per_batch=128",
        "training.tokens_per_step=128",
        "training.steps=2",
        "training.validation_tokens=256",
    )
    sets = [part for value in shrink for part in ("--set", value)]
    second = bmoe(installed, tmp_path, "train", "recipes/esm2_moe.yaml", "--device", "cpu", *sets)
    assert second.returncode == 0, second.stderr
    assert "ships with bmoe" in second.stderr
    assert (tmp_path / "runs" / "esm2_moe" / "report.html").is_file()

    narrow = ("model.layers=2", "model.width=64", "model.heads=2", "model.moe.expert_width=64")
    sets = [part for value in narrow for part in ("--set", value)]
    third = bmoe(installed, tmp_path, "profile", "--precision", "mxfp8", "--json", "profile.json", *sets)
    assert third.returncode == 0, third.stderr
    results = json.loads((tmp_path / "profile.json").read_text())["results"]
    assert results["unmet_conditions"] and results["emulated"] and "b200" in results["predicted"]


def test_the_proteins_of_the_tiny_recipe_are_in_the_wheel(installed):
    assert (installed / "bmoe" / "recipes" / "data" / "uniprot_4k.fasta.gz").is_file()
    assert (installed / "bmoe" / "interop" / "hub" / "modeling_bmoe.py").is_file()
