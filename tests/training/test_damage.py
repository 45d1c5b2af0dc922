"""What the commands say of a checkpoint whose bits have flipped."""

from pathlib import Path

from bmoe import cli
from tests_tiny import tiny


def test_eval_refuses_it_and_a_resume_takes_the_one_before(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(tiny(training={"steps": 6}))
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
