"""The tables of docs/scaling.md are what the predictions say today, and the files of docs/launch are well formed."""

import importlib.util
import subprocess
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).parent.parent.parent / "docs"


@pytest.mark.parametrize("chip", ["h100", "b200", "gb200"])
def test_tables_are_current(chip):
    spec = importlib.util.spec_from_file_location("table", DOCS / "scaling" / "table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    assert table.table(chip) in (DOCS / "scaling.md").read_text(), "run: python docs/scaling/table.py"


def test_launch_files_are_well_formed():
    for script in (DOCS / "launch" / "slurm.sbatch", DOCS / "launch" / "torchrun.sh"):
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    job = yaml.safe_load((DOCS / "launch" / "pytorchjob.yaml").read_text())
    assert job["kind"] == "PyTorchJob" and job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
