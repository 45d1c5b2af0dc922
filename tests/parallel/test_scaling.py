"""The tables of docs/scaling.md are what the predictions say today, and the files of docs/launch are well formed."""

import importlib.util
import re
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


def test_a_row_that_exceeds_its_chip_says_so():
    """0.94 of 79.1 GiB are an H100's for tensors."""
    page = (DOCS / "scaling.md").read_text()
    memory = [line.split(" | ")[5] for line in page.split("## B200")[0].splitlines() if re.match(r"\| \d", line)]
    assert len(memory) == 7 and all((float(cell.split(",")[0]) > 74) is ("does not fit" in cell) for cell in memory)
    assert memory[2] == "77, does not fit"


def test_launch_files_are_well_formed():
    for script in (DOCS / "launch" / "slurm.sbatch", DOCS / "launch" / "torchrun.sh"):
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    job = yaml.safe_load((DOCS / "launch" / "pytorchjob.yaml").read_text())
    assert job["kind"] == "PyTorchJob" and job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] == 1
    container = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    shared = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert container["workingDir"] in shared, "data.path and the run's folder are relative to it, and all pods need both"


@pytest.mark.parametrize("code, requeued", [(75, True), (0, False), (1, False), (143, False)])
def test_the_slurm_script_requeues_what_has_saved_and_nothing_else(tmp_path, code, requeued):
    """With commands of these names that say how they were called. --kill-on-bad-exit would end ranks that are about to leave with 75,
    and srun would return 143 (seen with Slurm 22.05)."""
    for name, body in (("srun", f"exit {code}"), ("scontrol", "exit 0")):
        (tmp_path / name).write_text(f'#!/bin/bash\necho "$@" > {tmp_path}/{name}.called\n{body}\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "17"}
    command = ["bash", str(DOCS / "launch" / "slurm.sbatch"), "my.yaml"]
    assert subprocess.run(command, env=environment, check=False).returncode == code
    called = (tmp_path / "srun.called").read_text()
    assert "--kill-on-bad-exit=0 --wait=" in called and called.endswith("bmoe train my.yaml --out runs/my --resume\n")
    asked = tmp_path / "scontrol.called"
    assert asked.is_file() is requeued and (not requeued or asked.read_text() == "requeue 17\n")
