"""Where a run begins and goes on: which folders --resume takes, what it says, and that it loses nothing."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from bmoe import cli
from bmoe.parallel import launch
from tests_tiny import PROTEINS, tiny

TRAIN = ["train", "tiny.yaml", "--device", "cpu", "--out", "run"]
TIMES = ("residues_per_s", "tokens_per_s", "step_s", "data_wait_s", "peak_memory_gib")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny(logging={"every": 1}))


def records(file: str) -> list[dict]:
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in Path(file).read_text().splitlines()]


def test_resume_starts_in_a_missing_or_an_empty_folder_only(here, capsys):
    Path("data").mkdir()
    Path("data/genome.fa").write_text(">a\nACGT\n")
    Path("file").write_text("")
    for out, words in (("data", "data is no run: it has genome.fa but no recipe.yaml"), ("file", "file is no folder")):
        for more in ([], ["--resume"]):
            assert cli.run([*TRAIN[:-1], out, *more]) == 2
            told = capsys.readouterr().err
            assert words in told and "--out" in told
    assert [p.name for p in Path("data").iterdir()] == ["genome.fa"]

    Path("run").mkdir()
    Path("run/recipe.partial").write_text("name: ti")  # killed in the first moment
    assert cli.run([*TRAIN, "--resume", "--stop-at", "2"]) == 0
    assert "run has no checkpoint: starting from step 0\n" in capsys.readouterr().err
    assert cli.run([*TRAIN, "--resume"]) == 0
    assert "resuming run after step 2" in capsys.readouterr().err
    assert cli.run(TRAIN) == 2 and "add --resume" in capsys.readouterr().err


def test_a_run_without_a_good_checkpoint_is_not_begun_anew_without_consent(here, capsys):
    assert cli.run([*TRAIN, "--stop-at", "3"]) == 0
    before = records("run/metrics.jsonl")
    for file in Path("run/checkpoints").glob("step-*/*.distcp"):
        file.write_bytes(b"\0" * file.stat().st_size)
    capsys.readouterr()
    for _ in range(2):
        assert cli.run([*TRAIN, "--resume"]) == 2
        told = capsys.readouterr().err
        assert "step-0000000002.damaged, step-0000000003.damaged in run/checkpoints are damaged" in told and "move" in told
    assert records("run/metrics.jsonl") == before

    Path("run/checkpoints").rename("aside")
    assert cli.run([*TRAIN, "--resume"]) == 0
    assert "starting from step 0; the metrics of its 3 steps before are kept as metrics-1.jsonl" in capsys.readouterr().err
    assert records("run/metrics-1.jsonl") == before == records("run/metrics.jsonl")[:3]


def test_one_process_is_started_again_too(here, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))

    def kill() -> None:
        while not list(Path("run/checkpoints").glob("step-*10")):
            time.sleep(0.005)
        os.kill(int(Path(os.environ[launch.PIDS], "0").read_text()), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    steps = ["--set", "training.steps=100", "--set", "training.validate_every=100", "--set", "checkpoint.every=10"]
    assert cli.run([*TRAIN, *steps, "--restarts", "1"]) == 0
    told = capsys.readouterr().err
    assert "the process was killed by SIGKILL (out of memory?); restart 1 of 1: it goes on from run/checkpoints/step-" in told
    assert cli.run([*TRAIN[:-1], "whole", *steps]) == 0
    assert records("run/metrics.jsonl") == records("whole/metrics.jsonl")

    assert cli.run([*TRAIN[:-1], "bad", "--restarts", "2", "--set", "optimizer.lr=1e38", "--set", "training.max_skipped_steps=2"]) == 1
    told = capsys.readouterr().err
    assert "the gradient was not finite" in told and "restart 1" not in told


def test_a_run_goes_on_with_its_own_sequences_only(here, capsys):
    """Where they lie may change, but not what they are: a checkpoint says how far their order has been read."""
    Path("tiny.yaml").write_text(tiny(data={"fasta": None}))
    Path("other.fasta").write_text("".join(f">{i}\n{'MKV' * 20}{'A' * i}\n" for i in range(60)))
    for fasta, folder in ((PROTEINS, "shards"), (PROTEINS, "again"), ("other.fasta", "other")):
        assert cli.run(["prepare", str(fasta), "--out", folder, "--valid-fraction", "0.1"]) == 0
    assert cli.run([*TRAIN, "--stop-at", "2"]) == 0
    capsys.readouterr()
    assert cli.run([*TRAIN, "--resume", "--set", "data.path=other"]) == 2
    told = capsys.readouterr().err
    assert "other has other sequences in its train split than run/checkpoints/step-0000000002 was trained on" in told
    assert cli.run([*TRAIN, "--resume", "--set", "data.path=again"]) == 0
