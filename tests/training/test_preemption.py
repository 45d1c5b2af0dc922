"""A signal from a scheduler: the step is finished and saved, the exit code asks for another turn, and the run goes on from there."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from bmoe import cli
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
    train = ["train", "tiny.yaml", "--device", "cpu", "--out", "run"]
    assert cli.run(train) == 75
    saved = Path("run/checkpoints/latest").read_text().strip()
    step = int(saved.removeprefix("step-"))
    assert len(Path("run/metrics.jsonl").read_text().splitlines()) == step
    assert cli.run([*train, "--resume", "--stop-at", str(step + 1)]) == 0
    assert Path("run/checkpoints/latest").read_text().strip() == f"step-{step + 1:010d}"
