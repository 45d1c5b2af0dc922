"""A signal from a scheduler: the step is finished and saved, the exit code asks for another turn, and the run goes on from there."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from bmoe import cli

PROTEINS = Path(__file__).parent.parent / "data" / "uniprot_500.fasta.gz"
TINY = f"""
name: tiny
data: {{path: shards, fasta: {PROTEINS}, max_length: 64, tokens_per_batch: 256, prepare: {{valid_fraction: 0.1}}}}
model: {{layers: 1, width: 32, heads: 2, moe: {{experts: 4, top_k: 2, expert_width: 16}}}}
precision: {{kind: fp32}}
training: {{steps: 100000, tokens_per_step: 256, validate_every: 100000, validation_tokens: 1024}}
checkpoint: {{every: 100000}}
logging: {{every: 1}}
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_leaves_with_75(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)

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
