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
from bmoe.parallel import launch

HERE = Path(__file__).parent
PROGRAM = f"import runpy; runpy.run_path({str(HERE / 'launched.py')!r}, run_name='__main__')"
RUNS = f"import runpy; runpy.run_path({str(HERE.parent / 'training' / 'runs.py')!r}, run_name='__main__')"
_spec = importlib.util.spec_from_file_location("runs", HERE.parent / "training" / "runs.py")
runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(runs)


@pytest.mark.parametrize(
    "scene, restarts, starts, code, words",
    [
        ("one is killed", 2, 3, 1, "rank 1 was killed by SIGKILL"),
        ("one crashes", 1, 2, 1, "ZeroDivisionError: a bug of rank 1"),
        ("one GPU lies", 1, 2, 1, "the weights of rank 1 have drifted"),
        ("one fails", 2, 1, 1, "the disk of rank 1 is full"),
        ("all refuse", 2, 1, 2, "model.width: 3 is not a multiple"),
        ("memory is short", 2, 1, 1, "no memory on rank 1"),
        ("all is well", 2, 1, 0, None),
    ],
)
def test_what_may_pass_is_tried_again_as_often_as_allowed(tmp_path, scene, restarts, starts, code, words):
    told: list[str] = []
    found, sentence = launch.run(
        [scene, str(tmp_path)], 2, tmp_path / "logs", PROGRAM, restarts, ("--resume",), lambda n, reason: told.append(f"{n}: {reason}")
    )
    assert found == code
    begun = (tmp_path / "starts-1").read_text().splitlines()
    assert begun == ["", *["--resume"] * (starts - 1)]
    assert [line[:3] for line in told] == [f"{n}: " for n in range(1, starts)] and all(words in line for line in told)
    if words is None:
        assert sentence is None
    else:
        assert words in sentence and "\n" not in sentence and ("given up after" in sentence) == (starts > 1)
    assert (tmp_path / "logs" / f"restart-{starts - 1}").exists() == (starts > 1)  # each start keeps its own logs
    assert launch.BEGAN not in os.environ and launch.PIDS not in os.environ


def killer(folder: Path, times: int, rank: int = 1) -> None:
    """Kill a rank `times` times, each time when a checkpoint has come since it started."""

    def kill() -> None:
        killed, before = set(), None
        while len(killed) < times:
            time.sleep(0.02)
            file = Path(os.environ.get(launch.PIDS, "nowhere"), str(rank))
            newest = runs.checkpoint.newest_whole(folder / "checkpoints")
            if newest == before or not file.is_file() or (pid := int(file.read_text() or 0)) in killed or not pid:
                continue
            os.kill(pid, signal.SIGKILL)
            killed.add(pid)
            before = runs.checkpoint.newest_whole(folder / "checkpoints")

    threading.Thread(target=kill, daemon=True).start()


def test_a_run_whose_rank_is_killed_ends_as_the_undisturbed_one(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent.parent))
    options, told = {"steps": 16, "layout": [1, 1, 2], "every": 1}, []
    for folder, restarts in ((tmp_path / "killed", 2), (tmp_path / "whole", 0)):
        if restarts:
            killer(folder, 1)
        logs = folder.with_name(folder.name + "-logs")
        ended = launch.run([str(folder), json.dumps(options)], 2, logs, RUNS, restarts, (), lambda n, reason: told.append(reason))
        assert ended == (0, None)
    assert len(told) == 1 and "rank 1 was killed by SIGKILL" in told[0]
    one, two = runs.final_tensors(tmp_path / "killed"), runs.final_tensors(tmp_path / "whole")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert runs.records(tmp_path / "killed") == runs.records(tmp_path / "whole")


def test_steps_that_are_not_finite_are_not_tried_again(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent.parent))
    told: list[str] = []
    options = {"steps": 16, "layout": [1, 2, 1], "every": 100, "lr": 1e38}
    ended = launch.run([str(tmp_path / "run"), json.dumps(options)], 2, tmp_path / "logs", RUNS, 3, (), lambda *a: told.append(a))
    assert ended[0] == 1 and "the gradient was not finite" in ended[1] and not told and "given up" not in ended[1]


PROTEINS = HERE.parent / "data" / "uniprot_500.fasta.gz"
TINY = f"""
name: tiny
data: {{path: shards, fasta: {PROTEINS}, max_length: 64, tokens_per_batch: 256, prepare: {{valid_fraction: 0.1}}}}
model: {{layers: 2, width: 32, heads: 2, moe: {{experts: 4, top_k: 2, expert_width: 16}}}}
precision: {{kind: fp32}}
training: {{steps: 12, tokens_per_step: 512, validate_every: 12, validation_tokens: 1024}}
checkpoint: {{every: 1, keep: 3}}
logging: {{every: 4}}
"""


def test_the_command_says_it_in_one_line_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(HERE.parent.parent))
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    killer(Path("killed"), 1)
    train = ["train", "tiny.yaml", "--device", "cpu", "--procs", "2"]
    assert cli.run([*train, "--out", "killed", "--restarts", "1"]) == 0
    told = [line for line in capsys.readouterr().err.splitlines() if "restart 1 of 1" in line]
    assert len(told) == 1 and "rank 1 was killed by SIGKILL" in told[0] and "all ranks go on from killed/checkpoints/step-" in told[0]
    assert cli.run([*train, "--out", "whole"]) == 0
    one, two = runs.final_tensors(Path("killed")), runs.final_tensors(Path("whole"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    monkeypatch.setenv("RANK", "0"), monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run([*train[:4], "--out", "alone", "--restarts", "1"]) == 2
    refused = capsys.readouterr().err
    assert "torchrun --max-restarts" in refused and not Path("alone").exists()


def test_a_restart_has_no_more_time_than_was_left(monkeypatch):
    assert launch.began() is None
    monkeypatch.setenv(launch.BEGAN, "12.5")
    assert launch.began() == 12.5
