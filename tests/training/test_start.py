"""Where a run begins and goes on: which folders --resume takes, what it says, and that it loses nothing."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import yaml

from bmoe import cli
from bmoe import recipe as recipes
from bmoe.errors import RequestError
from bmoe.jobs import train
from bmoe.jobs.room import check_room
from bmoe.model import counts
from bmoe.parallel import launch
from bmoe.parallel.world import World
from bmoe.training import run_lock, setup
from tests_tiny import PROTEINS, tiny

TRAIN = ["train", "tiny.yaml", "--device", "cpu", "--out", "run"]
TIMES = ("residues_per_s", "tokens_per_s", "step_s", "data_wait_s", "peak_memory_gib")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny(logging={"every": 1}))


def records(file: str) -> list[dict]:
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in Path(file).read_text().splitlines()]


def contents(folder: str) -> dict[Path, bytes]:
    """Of the files that are not hidden."""
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file() and not path.name.startswith(".")}


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
    before = contents("run")
    assert cli.run([*TRAIN, "--resume", "--set", "data.path=other"]) == 2
    told = capsys.readouterr().err
    assert "other has other sequences in its train split than run/checkpoints/step-0000000002 was trained on" in told
    assert contents("run") == before  # its recipe.yaml still names the sequences of its checkpoint
    assert cli.run([*TRAIN, "--resume", "--set", "data.path=again"]) == 0


def test_a_folder_has_one_run_at_a_time(here, capsys):
    steps = ["--set", "training.steps=100000", "--set", "checkpoint.every=2"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    first = subprocess.Popen(
        [sys.executable, "-c", "from bmoe.cli import main; main()", *TRAIN, *steps], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        while not list(Path("run/checkpoints").glob("step-*[0-9]")):
            assert first.poll() is None
            time.sleep(0.05)
        Path("run.logs").mkdir()
        Path("run.logs/rank-1.err").write_text("of the run that goes on")
        for procs in ([], ["--procs", "2", "--set", "training.tokens_per_step=512"]):
            assert cli.run([*TRAIN, *steps, "--resume", *procs]) == 2
            told = " ".join(capsys.readouterr().err.split())
            assert f"run is in use: process {first.pid} on {socket.gethostname()} trains there" in told and "--out" in told
        assert Path("run.logs/rank-1.err").is_file()
        assert first.poll() is None
    finally:
        first.kill()
        first.wait()
    written = [record["step"] for record in records("run/metrics.jsonl")]
    assert written == list(range(1, len(written) + 1))
    steps[1] = f"training.steps={len(written) + 2}"
    assert cli.run([*TRAIN, *steps, "--resume"]) == 0  # the kernel has released what SIGKILL left locked


def test_where_files_cannot_be_locked_runs_start_all_the_same(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    with run_lock.locked(tmp_path):
        run_lock.check_free(tmp_path)


def test_a_run_that_another_process_has_made_meanwhile_is_not_begun_anew(here, monkeypatch, capsys):
    ensure_data = train.ensure_data

    def slow(recipe):
        folder = ensure_data(recipe)
        Path("run").mkdir()
        Path("run/recipe.yaml").write_text("of the other")
        return folder

    monkeypatch.setattr(train, "ensure_data", slow)
    assert cli.run(TRAIN) == 2
    assert "run exists already" in capsys.readouterr().err and Path("run/recipe.yaml").read_text() == "of the other"


def test_several_ranks_write_logs_beside_the_current_folder_too(tmp_path, monkeypatch):
    """The name of `.` is empty."""
    Path(tmp_path / "tiny.yaml").write_text(tiny(data={"path": str(tmp_path / "shards")}, training={"tokens_per_step": 512}))
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path / "run")
    asked = []
    monkeypatch.setattr(launch, "run", lambda arguments, ranks, logs, **_: asked.append(logs) or launch.End(0, None))
    assert cli.run(["train", str(tmp_path / "tiny.yaml"), "--device", "cpu", "--procs", "2", "--out", "."]) == 0
    assert asked == [tmp_path / "run.logs"]


def test_a_model_that_no_setting_makes_fit_is_refused_before_it_is_built(here, monkeypatch, capsys):
    monkeypatch.setattr(train, "build", None)
    assert cli.run([*TRAIN, "--set", "model.width=1000000000"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "its weights, gradients and optimizer state take" in told and "this machine has" in told and "make model.width" in told
    assert not Path("run").exists()


def test_what_a_rank_holds_is_16_bytes_a_parameter_and_shares_the_memory_of_its_machine(monkeypatch):
    """fp32: the weight, its gradient and two moments."""
    recipe = recipes.validate(yaml.safe_load(tiny()))
    resolved, _ = setup.resolve(recipe, World(torch.device("cpu")))
    held = 16 * counts.parameters(recipe.model, 33).total
    pages = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": held}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    check_room(resolved, 33, World(torch.device("cpu")))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(RequestError, match=r"for each of its ranks \(2\); make"):
        check_room(resolved, 33, World(torch.device("cpu")))
    pages["SC_PHYS_PAGES"] = 2 * held
    check_room(resolved, 33, World(torch.device("cpu")))
    pages["SC_PHYS_PAGES"] = 2 * held - 2
    with pytest.raises(RequestError, match="GiB a rank"):
        check_room(resolved, 33, World(torch.device("cpu")))
