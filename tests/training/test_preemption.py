"""A signal from a scheduler: the step is finished and saved, the exit code asks for another turn, and the run goes on from there."""

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from bmoe import cli
from bmoe.jobs import common, train
from bmoe.parallel import launch
from bmoe.parallel.world import World
from bmoe.training.stopping import Limits, Stopping
from tests_tiny import tiny


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_with_75(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny(training={"steps": 100_000}, checkpoint={"every": 100_000}, logging={"every": 1}))

    def send() -> None:
        while not Path("run/metrics.jsonl").is_file():
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    command = ["train", "tiny.yaml", "--device", "cpu", "--out", "run"]
    assert cli.run(command) == 75
    saved = Path("run/checkpoints/latest").read_text().strip()
    step = int(saved.removeprefix("step-"))
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == step
    assert cli.run([*command, "--resume", "--stop-at", str(step + 1)]) == 0
    assert Path("run/checkpoints/latest").read_text().strip() == f"step-{step + 1:010d}"


def signal_at(monkeypatch, moment: str, number: int):
    """Send this process a signal when `train` comes to a function of its own; does so once."""
    module, _, name = moment.rpartition(".")
    module = {"": train, "state": train.state, "common": common}[module]
    function = getattr(module, name)

    def sent(*arguments, **options):
        monkeypatch.setattr(module, name, function)
        os.kill(os.getpid(), number)
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, sent)


@pytest.mark.parametrize("moment", ["ensure_data", "common.prepare", "open_split", "build"])
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGINT, 130)])
def test_a_signal_before_the_first_step_ends_the_run_in_one_sentence(tmp_path, monkeypatch, capsys, moment, number, code):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny())
    command = ["train", "tiny.yaml", "--device", "cpu", "--out", "run", "--resume"]
    signal_at(monkeypatch, moment, number)
    assert cli.run(command) == code
    told = capsys.readouterr().err
    if number == signal.SIGINT and moment in ("ensure_data", "common.prepare"):  # a preparation has a sentence of its own
        assert "interrupted; train and prepare go on from what they have saved with --resume" in told
    else:
        sentence = f"{signal.Signals(number).name} came before the first step; there is no checkpoint yet, and --resume starts from step 0"
        assert told.count(sentence) == 1
    assert not Path("run/checkpoints").exists() and not Path("run/metrics.jsonl").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert cli.run(command) == 0


def test_a_second_signal_does_not_break_off_what_the_first_winds_up(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny())
    wound_up = []

    def twice(recipe):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            wound_up.append(recipe.name)

    monkeypatch.setattr(train, "ensure_data", twice)
    assert cli.run(["train", "tiny.yaml", "--device", "cpu", "--out", "run"]) == 75
    assert wound_up == ["tiny"] and "SIGTERM came before the first step" in capsys.readouterr().err


class Two(World):
    """This rank's vote beside another's, and what comes to this rank while they are summed."""

    def __init__(self, other: list[int], meanwhile=lambda: None):
        super().__init__(torch.device("cpu"), 0, 2)
        self.other, self.meanwhile = torch.tensor(other), meanwhile

    def sum(self, tensor):
        self.meanwhile()
        return tensor + self.other


def test_the_ctrl_c_that_another_rank_told_of_first_is_no_second_one():
    """A terminal's reaches all ranks, this one a moment after they have agreed: it must not break off the save."""
    limits = Limits()
    assert Stopping(limits, Two([0, 1, 0])).asked() and limits.signal == signal.SIGINT
    limits.take(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        limits.take(signal.SIGINT)


def test_a_signal_after_the_vote_stops_no_rank_by_itself():
    """All time is used up, which is no signal: the other ranks go on to the first step, and would wait for this one there."""
    limits = Limits(max_seconds=0.0)
    stopping = Stopping(limits, Two([1, 0, 0], lambda: limits.take(signal.SIGTERM)))
    assert not stopping.asked() and limits.signal == signal.SIGTERM
    assert stopping.asked()


@pytest.mark.parametrize("moment", ["open_split", "build", "state.load_state"])
def test_a_run_that_did_not_go_on_saves_nothing_again(tmp_path, monkeypatch, capsys, moment):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny())
    command = ["train", "tiny.yaml", "--device", "cpu", "--out", "run"]
    assert cli.run([*command, "--stop-at", "2"]) == 0
    before = {path: path.stat().st_mtime_ns for path in Path("run/checkpoints").rglob("*")}
    signal_at(monkeypatch, moment, signal.SIGTERM)
    assert cli.run([*command, "--resume"]) == 75
    assert "SIGTERM came before the first step; --resume goes on from run/checkpoints/step-0000000002\n" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in Path("run/checkpoints").rglob("*")} == before
    assert cli.run([*command, "--resume"]) == 0
    assert "resuming run after step 2" in capsys.readouterr().err


RANK_1_IS_SENT_SIGTERM = """
import os, signal
from bmoe import cli
from bmoe.jobs import train
build = train.build
def sent(recipe, letters, world, **options):
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return build(recipe, letters, world, **options)
train.build = sent
cli.main()
"""


def test_ranks_agree_on_a_stop_before_the_first_step(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent.parent.parent))
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny(training={"tokens_per_step": 512}, parallel={"expert": 2}))
    monkeypatch.setattr(launch, "run", partial(launch.run, code=RANK_1_IS_SENT_SIGTERM))
    assert cli.run(["train", "tiny.yaml", "--device", "cpu", "--procs", "2", "--out", "run"]) == 75
    told = capfd.readouterr().err
    assert told.count("SIGTERM came before the first step; there is no checkpoint yet") == 1 and "error" not in told
    assert not Path("run/checkpoints").exists()
