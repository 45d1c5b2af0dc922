"""All ranks start again when one dies, from the newest checkpoint; what would only happen again is not tried again."""

import importlib.util
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from bmoe import cli
from bmoe.errors import FaultError, RequestError, RunError
from bmoe.parallel import launch
from bmoe.parallel.world import World
from tests_tiny import tiny

HERE = Path(__file__).parent
PROGRAM = f"import runpy; runpy.run_path({str(HERE / 'launched.py')!r}, run_name='__main__')"
_spec = importlib.util.spec_from_file_location("runs", HERE.parent / "training" / "runs.py")
runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(runs)


@pytest.mark.parametrize(
    "scene, restarts, starts, code, words",
    [
        ("one is killed", 2, 3, 1, "rank 1 was killed by SIGKILL"),
        ("one crashes", 1, 2, 1, "ZeroDivisionError: a bug of rank 1"),
        ("one fails", 2, 1, 1, "the disk of rank 1 is full"),
        ("all refuse", 2, 1, 2, "model.width: 3 is not a multiple"),
    ],
)
def test_what_may_pass_is_tried_again_as_often_as_allowed(tmp_path, scene, restarts, starts, code, words):
    told: list[str] = []
    found, sentence, again = launch.run(
        [scene, str(tmp_path)], 2, tmp_path / "logs", PROGRAM, restarts, ("--resume",), lambda n, reason: told.append(f"{n}: {reason}")
    )
    assert found == code and again == (starts > 1)
    begun = (tmp_path / "starts-1").read_text().splitlines()
    assert begun == ["", *["--resume"] * (starts - 1)]
    assert [line[:3] for line in told] == [f"{n}: " for n in range(1, starts)] and all(words in line for line in told)
    assert words in sentence and "\n" not in sentence and ("given up after" in sentence) == (starts > 1)
    assert (tmp_path / "logs" / f"restart-{starts - 1}").exists() == (starts > 1)  # each start keeps its own logs
    assert launch.BEGAN not in os.environ and launch.PIDS not in os.environ


def test_a_refused_request_leaves_no_logs_behind_and_takes_none_away(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent.parent))
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny(training={"tokens_per_step": 512}))
    command = ["train", "tiny.yaml", "--device", "cpu", "--procs", "2", "--set", "precision.kind=fp8_block"]
    assert cli.run([*command, "--out", "new"]) == 2
    assert "needs an NVIDIA GPU" in capfd.readouterr().err and not Path("new.logs").exists()
    Path("old.logs").mkdir()
    Path("old.logs/rank-7.err").write_text("of the start before")
    assert cli.run([*command, "--out", "old"]) == 2
    assert Path("old.logs/rank-7.err").is_file()


@pytest.mark.parametrize(
    "error, again, code",
    [
        (FaultError("the weights of rank 1 have drifted"), True, 1),
        (ConnectionError("rank 1 is gone"), True, 1),
        (ZeroDivisionError("a bug"), True, 1),
        (torch.OutOfMemoryError("no memory on rank 1"), False, 1),
        (MemoryError("no memory on rank 1"), False, 1),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"), False, 1),
        (OSError("no such file"), False, 1),
        (RunError("the gradient was not finite"), False, 1),
        (RequestError("model.width"), False, 2),
    ],
)
def test_a_rank_leaves_whether_its_end_may_pass(tmp_path, monkeypatch, error, again, code):
    monkeypatch.setenv(launch.PIDS, str(tmp_path))
    monkeypatch.setenv(launch.ERROR_FILE, str(tmp_path / "reason.json"))
    with pytest.raises(type(error)), launch.rank_of(World(torch.device("cpu"))):
        raise error
    left = json.loads((tmp_path / "reason.json").read_text())["message"]
    assert str(error) in left["message"] and (left["extraInfo"]["again"], left["errorCode"]) == (again, code)


def killer(folder: Path, what: str = "checkpoints/step-*[0-9]") -> None:
    """Kill rank 1 once, when a file of the run has come."""

    def kill() -> None:
        while not list(folder.glob(what)):
            time.sleep(0.02)
        os.kill(int(Path(os.environ[launch.PIDS], "1").read_text()), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def test_the_command_says_it_in_one_line_and_goes_on(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent.parent))
    monkeypatch.chdir(tmp_path)
    training = {"steps": 12, "tokens_per_step": 512}
    Path("tiny.yaml").write_text(tiny(training=training, parallel={"expert": 2}, checkpoint={"every": 1, "keep": 3}, logging={"every": 4}))
    killer(Path("killed"))
    train = ["train", "tiny.yaml", "--device", "cpu", "--procs", "2"]
    assert cli.run([*train, "--out", "killed", "--restarts", "1"]) == 0
    told = [line for line in capfd.readouterr().err.splitlines() if "restart 1 of 1" in line]
    assert len(told) == 1 and "rank 1 was killed by SIGKILL" in told[0] and "all ranks go on from killed/checkpoints/step-" in told[0]
    assert cli.run([*train, "--out", "whole"]) == 0
    assert capfd.readouterr().err.count("running on") == 1  # of the command and its ranks
    one, two = runs.final_tensors(Path("killed")), runs.final_tensors(Path("whole"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert runs.records(Path("killed")) == runs.records(Path("whole"))
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run([*train[:4], "--out", "alone", "--restarts", "1"]) == 2
    refused = capfd.readouterr().err
    assert "torchrun --max-restarts" in refused and not Path("alone").exists()


@pytest.mark.parametrize(
    "what, every, words",
    [
        ("checkpoints/step-*[0-9]", 1, "--resume goes on from run/checkpoints/step-00000"),
        ("metrics.jsonl", 100_000, "there is no checkpoint yet, and --resume starts from step 0"),
    ],
)
def test_without_restarts_a_killed_rank_s_sentence_says_where_to_go_on(tmp_path, monkeypatch, capfd, what, every, words):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent.parent))
    monkeypatch.chdir(tmp_path)
    training = {"steps": 100_000, "tokens_per_step": 512}
    Path("tiny.yaml").write_text(tiny(training=training, checkpoint={"every": every, "keep": 3}, logging={"every": 1}))
    killer(Path("run"), what)
    assert cli.run(["train", "tiny.yaml", "--device", "cpu", "--procs", "2", "--out", "run"]) == 1
    (told,) = [line for line in capfd.readouterr().err.splitlines() if "rank 1 was killed by SIGKILL" in line]
    assert words in told


def test_a_restart_has_no_more_time_than_was_left(monkeypatch):
    assert launch.began() is None
    monkeypatch.setenv(launch.BEGAN, "12.5")
    assert launch.began() == 12.5
