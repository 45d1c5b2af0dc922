"""What the commands say of a checkpoint whose bits have flipped."""

from pathlib import Path

from bmoe import cli

PROTEINS = Path(__file__).parent.parent / "data" / "uniprot_500.fasta.gz"
TINY = f"""
name: tiny
data: {{path: shards, fasta: {PROTEINS}, max_length: 64, tokens_per_batch: 256, prepare: {{valid_fraction: 0.1}}}}
model: {{layers: 1, width: 32, heads: 2, moe: {{experts: 4, top_k: 2, expert_width: 16}}}}
precision: {{kind: fp32}}
training: {{steps: 6, tokens_per_step: 256, validate_every: 6, validation_tokens: 1024}}
checkpoint: {{every: 2, keep: 5}}
"""


def test_eval_refuses_it_and_a_resume_takes_the_one_before(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    train = ["train", "tiny.yaml", "--device", "cpu", "--out", "run"]
    assert cli.run([*train, "--stop-at", "4"]) == 0
    file = next(Path("run/checkpoints/step-0000000004").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    capsys.readouterr()

    assert cli.run(["eval", "run", "--device", "cpu"]) == 2
    refused = capsys.readouterr().err
    assert f"step-0000000004 is damaged ({file.name} has other bytes than were written" in refused and "Traceback" not in refused
    assert cli.run(["eval", "run/checkpoints/step-0000000002", "--device", "cpu"]) == 0

    capsys.readouterr()
    assert cli.run([*train, "--resume"]) == 0
    told = capsys.readouterr().err
    assert f"step-0000000004 is damaged ({file.name}" in told and "resuming run after step 2" in told
    names = sorted(p.name for p in Path("run/checkpoints").glob("step-*"))
    assert names == [f"step-000000000{n}" for n in (2, 4)] + ["step-0000000004.damaged", "step-0000000006"]
    assert cli.run(["eval", "run", "--device", "cpu"]) == 0
