"""`bmoe export` and `model.init_from` from the command line: a dense model goes out, comes back as it was, and as experts."""

import json
from pathlib import Path

import pytest

from bmoe import cli
from bmoe.interop.huggingface import load_pretrained

PROTEINS = Path(__file__).parent.parent / "data" / "uniprot_500.fasta.gz"
DENSE = f"""
name: dense
data: {{path: shards, fasta: {PROTEINS}, max_length: 64, tokens_per_batch: 512, prepare: {{valid_fraction: 0.1}}}}
model: {{layers: 2, width: 32, heads: 2, ffn_width: 32, moe: null}}
precision: {{kind: fp32}}
optimizer: {{lr: 3.0e-2}}
schedule: {{warmup_steps: 2}}
training: {{steps: 12, tokens_per_step: 512, validate_every: 12, validation_tokens: 2048}}
"""
STANDSTILL = ("training.steps=1", "training.validate_every=1", "optimizer.lr=1e-12", "schedule.warmup_steps=0", "optimizer.weight_decay=0")
EXPERTS = "model.moe={experts: 4, top_k: 2, expert_width: 16}"  # the feed-forward of 32 split in two, twice


def run(*arguments: str) -> int:
    return cli.run(list(arguments))


def trained(name: str, *settings: str) -> dict:
    flags = [part for setting in settings for part in ("--set", setting)]
    assert run("train", "dense.yaml", "--device", "cpu", "--out", name, "--json", "out.json", *flags) == 0
    return json.loads(Path("out.json").read_text())["results"]


def test_out_and_back_and_upcycled(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("dense.yaml").write_text(DENSE)
    dense = trained("dense")
    assert run("export", "dense", "--to", "folder", "--verify", "--json", "export.json") == 0
    verified = json.loads(Path("export.json").read_text())["results"]["verified"]
    assert verified["max_difference"] <= verified["tolerance"] and verified["sequences"] == 8
    said = capsys.readouterr()
    assert "trust_remote_code=True" in said.out and "logits differ by" in said.out and "{" not in said.out and "Loading" not in said.err

    start = trained("fresh", *STANDSTILL)
    again = trained("again", *STANDSTILL, "model.init_from=folder")
    moe = trained("moe", *STANDSTILL, "model.init_from=folder", EXPERTS, "model.ffn_width=null")
    for found in (again, moe):
        for scheme in ("8010", "mask"):
            key = f"valid_perplexity_{scheme}"
            assert found[key] == pytest.approx(dense[key], rel=1e-5) and abs(start[key] / dense[key] - 1) > 0.01

    many = "model.moe={experts: 32, top_k: 2, expert_width: 32}"
    first = trained("many", *STANDSTILL, "model.init_from=folder", many, "model.ffn_width=null", "data.tokens_per_batch=2048",
                    "training.tokens_per_step=2048")  # fmt: skip
    assert first["dead_experts"] == [0, 0] and max(first["load_max_over_mean"]) < 3  # the seed's routers: over 5, and dead ones

    assert run("export", "moe", "--to", "moe_folder", "--verify") == 0
    weights, keys = load_pretrained("moe_folder")
    assert keys["moe"]["experts"] == 4 and weights["blocks.0.ffn.experts.down"].shape == (4, 32, 16)
    capsys.readouterr()
    assert run("train", "dense.yaml", "--device", "cpu", "--out", "x", "--set", "model.init_from=folder", "--set", "model.width=64") == 2
    assert "model.width (32 there, 64 here)" in capsys.readouterr().err
