"""SIGKILL at any moment loses nothing but time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("number", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_runs_end_as_the_undisturbed_one(tmp_path, number):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent.parent)}
    done = subprocess.run(
        [sys.executable, str(HERE / "kills.py"), str(number), "0", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": equal") == number
