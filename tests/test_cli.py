"""The commands, end to end on the CPU with a tiny model: exit codes, one-sentence errors, files, resume."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from bmoe import cli
from bmoe import recipe as recipes
from bmoe.parallel import launch

REPOSITORY = Path(__file__).parent.parent
PROTEINS = REPOSITORY / "tests" / "data" / "uniprot_500.fasta.gz"
TINY = f"""
name: tiny
data: {{path: shards, fasta: {PROTEINS}, max_length: 64, tokens_per_batch: 256, prepare: {{valid_fraction: 0.1}}}}
model: {{layers: 2, width: 32, heads: 2, moe: {{experts: 4, top_k: 2, expert_width: 16, bias_update: 0.001, jitter: 0.01}}}}
precision: {{kind: fp32}}
optimizer: {{lr: 1.0e-3}}
schedule: {{warmup_steps: 5}}
training: {{steps: 20, tokens_per_step: 512, validate_every: 10, validation_tokens: 2048}}
checkpoint: {{every: 10, keep: 5}}
logging: {{every: 5}}
"""
TIMES = {"residues_per_s", "tokens_per_s", "step_s", "data_wait_s", "peak_memory_gib", "mfu"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory with the tiny recipe in it."""
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(TINY)
    Path("in.fasta").write_text(">a one\nMKV\n>b: two\nMKW\n")
    return tmp_path


def bmoe(capsys, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    capsys.readouterr()
    code = cli.run(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, *arguments: str) -> str:
    """The one sentence of a refused request."""
    code, _, err = bmoe(capsys, *arguments)
    assert code == 2 and "Traceback" not in err
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert lines
    return "\n".join(lines)


def records(run: str) -> list[dict]:
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in Path(run, "metrics.jsonl").read_text().splitlines()]


def tensors(run: str, step: int) -> dict[str, torch.Tensor]:
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    return _load_state_dict_from_keys(storage_reader=FileSystemReader(Path(run, "checkpoints", f"step-{step:010d}")))


def flat(tree: dict, prefix: str = "") -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + str(key): value}
    return found


def test_ten_and_ten_steps_are_twenty_bit_for_bit(here, capsys):
    """Weights, moments and every metric but times; the run writes everything that the contract names."""
    assert bmoe(capsys, "train", "tiny.yaml", "--device", "cpu", "--out", "whole", "--json", "r.json")[0] == 0
    assert bmoe(capsys, "train", "tiny.yaml", "--device", "cpu", "--out", "halves", "--stop-at", "10")[0] == 0
    assert Path("halves/checkpoints/latest").read_text().strip() == "step-0000000010"
    assert bmoe(capsys, "train", "tiny.yaml", "--device", "cpu", "--out", "halves", "--resume")[0] == 0
    assert records("whole") == records("halves")
    a, b = flat(tensors("whole", 20)), flat(tensors("halves", 20))
    assert a.keys() == b.keys() and len(a) > 40
    assert all(torch.equal(a[name], b[name]) for name in a)

    last = records("whole")[-1]
    for key in (
        "loss",
        "lr",
        "grad_norm",
        "tokens",
        "fill",
        "skipped_steps",
        "balance_loss",
        "z_loss",
        "load_max_over_mean",
        "load_entropy",
        "dead_experts",
        "valid_loss",
        "valid_perplexity_8010",
        "valid_perplexity_mask",
        "valid_baseline_8010",
        "valid_baseline_mask",
    ):
        assert key in last, key
    assert [r["step"] for r in records("whole")] == [1, 5, 10, 15, 20]
    assert len(last["balance_loss"]) == 2 and last["loss"] < records("whole")[0]["loss"]
    for file in ("recipe.yaml", "metrics.jsonl", "report.html", "evaluation.json"):
        assert Path("whole", file).is_file()
    saved = json.loads(Path("r.json").read_text())
    assert saved["command"] == "train" and saved["results"]["step"] == 20 and saved["recipe"]["name"] == "tiny"

    changed = [name for name in a if name.startswith("model.")]
    start = flat(tensors("halves", 10))
    assert all(not torch.equal(start[n], b[n]) for n in changed if "inverse_frequency" not in n), "some weight never trains"

    code, out, _ = bmoe(capsys, "eval", "whole", "--device", "cpu", "--json", "e.json", "--report", "e.html")
    assert code == 0 and "fully masked" in out and Path("e.html").is_file()
    found = json.loads(Path("e.json").read_text())["results"]
    for scheme in ("8010", "mask"):
        assert found[f"perplexity_{scheme}"] == pytest.approx(last[f"valid_perplexity_{scheme}"], rel=1e-6)
        assert found[f"baseline_{scheme}"] == pytest.approx(last[f"valid_baseline_{scheme}"], rel=1e-9)
    assert sum(entry["sequences"] for entry in found["by_length"]) == found["sequences"]
    code, out, _ = bmoe(capsys, "export", "whole", "--to", "hf")
    assert code == 0 and Path("hf/config.json").is_file() and Path("hf/tokenizer.json").is_file()

    repeated = recipes.load("whole/recipe.yaml")
    assert Path(repeated.data.path).is_absolute() and repeated.backend.experts == "grouped"
    assert "# auto" in Path("whole/recipe.yaml").read_text()


def test_resume_rules(here, capsys):
    train = ("train", "tiny.yaml", "--device", "cpu", "--set", "training.steps=2", "--set", "training.validate_every=2")
    assert bmoe(capsys, *train, "--resume")[0] == 0  # --resume without a checkpoint starts
    sentence = refused(capsys, *train)
    assert "runs/tiny exists already" in sentence and "--resume" in sentence and "--out" in sentence
    assert "optimizer.lr" in refused(capsys, *train, "--resume", "--set", "optimizer.lr=1e-5")
    assert bmoe(capsys, *train, "--resume", "--set", "training.steps=3", "--set", "backend.experts=loop")[0] == 0
    assert records("runs/tiny")[-1]["step"] == 3


def test_stop_at_a_step_that_is_done_trains_no_further(here, capsys):
    train = ("train", "tiny.yaml", "--device", "cpu", "--set", "training.validate_every=20")
    assert bmoe(capsys, *train, "--stop-at", "4")[0] == 0
    assert bmoe(capsys, *train, "--resume", "--stop-at", "2")[0] == 0
    assert records("runs/tiny")[-1]["step"] == 4


def test_prepared_data_that_the_recipe_does_not_describe_is_refused(here, capsys):
    train = ("train", "tiny.yaml", "--device", "cpu", "--set", "training.steps=1")
    assert bmoe(capsys, *train)[0] == 0
    assert "data.prepare.valid_fraction" in refused(capsys, *train, "--out", "b", "--set", "data.prepare.valid_fraction=0.3")
    Path("other.fasta").write_text(">a\nMKV\n")
    assert "data.fasta" in refused(capsys, *train, "--out", "b", "--set", f"data.fasta={Path('other.fasta').absolute()}")


def test_an_emulated_run_is_evaluated_as_it_was_validated(here, capsys):
    sets = ("precision.kind=mxfp8", "precision.emulate=true", "model.moe.expert_width=32", "training.steps=2", "training.validate_every=2",
            "precision.statistics_every=2")  # fmt: skip
    assert bmoe(capsys, "train", "tiny.yaml", "--device", "cpu", *(x for s in sets for x in ("--set", s)))[0] == 0
    last = records("runs/tiny")[-1]
    assert last["quantisation"]["input_1"]["error"][0] > 0
    assert bmoe(capsys, "eval", "runs/tiny", "--device", "cpu", "--json", "e.json")[0] == 0
    found = json.loads(Path("e.json").read_text())["results"]
    assert found["perplexity_mask"] == pytest.approx(last["valid_perplexity_mask"], rel=1e-6)


def test_a_killed_line_of_metrics_is_cut_off(here, capsys):
    train = ("train", "tiny.yaml", "--device", "cpu", "--set", "training.validate_every=20")
    assert bmoe(capsys, *train, "--stop-at", "10")[0] == 0
    with Path("runs/tiny/metrics.jsonl").open("a") as file:
        file.write('{"step": 15, "loss": 1.0}\n{"step": 20, "lo')
    assert bmoe(capsys, *train, "--resume", "--stop-at", "11")[0] == 0
    assert [r["step"] for r in records("runs/tiny")] == [1, 5, 10, 11]


def test_eval_of_damaged_and_foreign_checkpoints(here, capsys):
    train = ("train", "tiny.yaml", "--device", "cpu", "--set", "training.steps=1")
    assert bmoe(capsys, *train)[0] == 0
    checkpoint = Path("runs/tiny/checkpoints/step-0000000001")
    assert "does not exist" in refused(capsys, "eval", "nowhere")
    assert "neither a run nor a checkpoint" in refused(capsys, "eval", ".")
    recipe = Path("runs/tiny/recipe.yaml").read_text()
    Path("runs/tiny/recipe.yaml").write_text(recipe.replace("layers: 2", "layers: 3"))
    assert "has no model.blocks.2" in refused(capsys, "eval", str(checkpoint), "--device", "cpu")
    Path("runs/tiny/recipe.yaml").write_text(recipe.replace("expert_width: 16", "expert_width: 32"))
    assert "shape" in refused(capsys, "eval", str(checkpoint), "--device", "cpu")
    Path("runs/tiny/recipe.yaml").write_text(recipe)
    (data,) = checkpoint.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:1000])
    assert "damaged" in refused(capsys, "eval", str(checkpoint), "--device", "cpu")
    (checkpoint / ".metadata").write_bytes(b"garbage")
    assert "damaged (.metadata has 7 bytes of" in refused(capsys, "eval", str(checkpoint), "--device", "cpu")
    (checkpoint / ".metadata").unlink()
    assert "cannot be read" in refused(capsys, "eval", str(checkpoint), "--device", "cpu")


REFUSALS = [
    (["train", "nothing.yaml"], "there is no such recipe"),
    (["train", "in.fasta"], "in.fasta holds sequences and is no recipe; prepare it first"),
    (["train", "tiny.yaml", "--set", "name=../x"], "name should be a word of letters"),
    (["train", "esm2_mo"], "did you mean esm2_moe"),
    (["train", "tiny.yaml", "--set", "training.stpes=3"], "did you mean training.steps?"),
    (["train", "tiny.yaml", "--set", "training.steps=many"], "training.steps should be a whole number"),
    (["train", "tiny.yaml", "--set", "model.moe.top_k=5"], "model.moe.top_k: 5 exceeds"),
    (["train", "tiny.yaml", "--max-time", "soon"], "--max-time soon"),
    (["train", "tiny.yaml", "--device", "cpu", "--set", "precision.kind=mxfp8"], "not a multiple of 32"),
    (["train", "tiny.yaml", "--device", "cpu", "--set", "precision.kind=fp8_block"], "needs an NVIDIA GPU"),
    (["train", "tiny.yaml", "--device", "cpu", "--set", "backend.attention=varlen"], "varlen needs a GPU"),
    (["train", "tiny.yaml", "--device", "cpu", "--set", "data.fasta=null"], "has no prepared sequences"),
    (["train", "tiny.yaml", "--device", "cpu", "--set", "data.fasta=none.fasta"], "none.fasta does not exist; in a recipe it is relative"),
    (["train", "tiny.yaml", "--device", "cpu", "--set", "data.path=tiny.yaml"], "data.path: tiny.yaml is a file: run `bmoe prepare"),
    (["train", "tiny.yaml", "--device", "cpu", "--set", "data.prepare.valid_fraction=0"], "no sequence in its valid split"),
    (["train", "tiny.yaml", "--device", "cpu", "--set", "parallel.data_shard=2"], "1 ranks"),
    (["train", "tiny.yaml", "--device", "cpu", "--out", "/proc/nowhere"], "/proc/nowhere"),
    (["train", "tiny.yaml", "--procs", "2"], "--device cpu"),
    (["train", "tiny.yaml", "--device", "gpu"], "use cpu or cuda"),
    (["train", "tiny.yaml", "--world", "4"], "--dry-run"),
    (["train", "tiny.yaml", "--json", "/nonexistent/x.json"], "no folder /nonexistent"),
    (["eval", "runs/tiny", "--report", "/nonexistent/x.html"], "no folder /nonexistent"),
    (["profile", "tiny.yaml", "--precision", "fp9"], "use one of fp32"),
    (["profile", "tiny.yaml", "--report", "/nonexistent/x.html"], "no folder /nonexistent"),
    (["profile", "--compare", "a.json", "b.json", "--report", "x.html"], "--compare takes no --report"),
    (["profile", "tiny.yaml", "--compare", "a.json", "b.json"], "--compare takes no recipe"),
    (["profile", "--compare", "a.json"], "requires 2 arguments; see bmoe profile --help"),
    (["train", "tiny.yaml", "--gpus", "1", "--device", "cpu"], "exclude each other"),
    (["train", "tiny.yaml", "--dry-run", "--world", "3"], "not a multiple"),
    (["train", "tiny.yaml", "--dry-run", "--world", "2", "--set", "parallel.data_shard=1"], "data_shard x expert = 1, and this run has 2"),
    (["train", "tiny.yaml", "--dry-run", "--world", "1", "--set", "parallel.expert=2"], "1 x 2 does not divide the 1 ranks"),
    (["train", "tiny.yaml", "--dry-run", "--world", "4", "--gpus", "2"], "give one of them"),
    (["train", "tiny.yaml", "--dry-run", "--resume", "--stop-at", "5"], "--dry-run takes no --resume; leave it out"),
    (["train", "tiny.yaml", "--dry-run", "--max-time", "1h"], "--dry-run takes no --max-time; leave it out"),
    (["train", "tiny.yaml", "--dry-run", "--out", "run"], "--dry-run takes no --out; leave it out"),
    (["train"], "Missing argument"),
    (["fly"], "No such command"),
    (["prepare"], "needs an input"),
    (["prepare", "missing.fasta"], "missing.fasta"),
    (["prepare", "a.fasta", "b.fasta"], "--out DIR is needed"),
    (["prepare", "-"], "--out DIR is needed"),
    (["prepare", "tiny.yaml", "--part", "x", "--out", "o"], "i/n"),
    (["prepare", "--merge", "a"], "--out DIR"),
    (["prepare", "tiny.yaml", "--part", "1/3"], "--part i/n needs --out"),
    (["prepare", "tiny.yaml", "--json", "/nonexistent/x.json"], "no folder /nonexistent"),
    (["prepare", "tiny.yaml", "--part", "\u00b2/3", "--out", "o"], "i/n"),
    (["prepare", "tiny.yaml", "--verify", "."], "--verify takes no inputs"),
    (["prepare", "--verify", ".", "--seed", "3"], "--verify takes no --seed"),
    (["prepare", "--merge", "a", "b", "--out", "c", "--no-dedup"], "--merge takes no --dedup"),
    (["prepare", "--merge", "tiny.yaml", "--out", "c"], "tiny.yaml is a file: name a folder"),
    (["prepare", "--verify", ""], "--verify is empty"),
    (["prepare", "tiny.yaml", "--out", ""], "--out is empty"),
    (["prepare", ""], "an input has an empty name"),
    (["prepare", "tiny.yaml", "--out", "tiny.yaml"], "--out tiny.yaml is a file"),
    (["prepare", "/dev/null"], "--out DIR is needed for several inputs, globs, pipes"),
    (["prepare", str(PROTEINS), "--out", "/proc/nowhere"], "/proc/nowhere"),
    (["train", "."], "is a folder, not a recipe"),
    (["train", "tiny.yaml", "--dry-run", "--set", "model.init_from=nowhere"], "model.init_from"),
    (["prepare", "--verify", "."], "manifest.json is missing"),
    (["export", "nowhere", "--to", "x"], "does not exist"),
]


@pytest.mark.parametrize("arguments,part", REFUSALS, ids=[" ".join(a) for a, _ in REFUSALS])
def test_wrong_requests_exit_with_2_and_one_sentence(here, capsys, arguments, part):
    assert part in refused(capsys, *arguments)


@pytest.mark.parametrize("command", ["train", "profile"])
@pytest.mark.parametrize(
    "expert, step, part", [(4, 1024, "1 x 4 does not divide the 2 ranks"), (1, 256, "is not a multiple of data.tokens_per_batch x ranks")]
)
def test_a_layout_that_does_not_divide_is_refused_before_ranks_start(here, capsys, monkeypatch, command, expert, step, part):
    monkeypatch.setattr(launch, "run", lambda *_, **__: pytest.fail("ranks were started"))
    sets = ("--set", f"parallel.expert={expert}", "--set", f"training.tokens_per_step={step}")
    assert part in refused(capsys, command, "tiny.yaml", "--device", "cpu", "--procs", "2", *sets)
    assert not Path("shards").exists() and not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gpus_that_are_not_here(here, capsys):
    assert "no CUDA GPU" in refused(capsys, "train", "tiny.yaml", "--gpus", "8")
    assert "no CUDA GPU" in refused(capsys, "train", "tiny.yaml", "--device", "cuda")


def test_empty_fasta_and_corrupt_shards(here, capsys):
    Path("empty.fasta").write_text("")
    assert "empty.fasta" in refused(capsys, "prepare", "empty.fasta")
    assert not Path("data/empty/manifest.json").exists()
    assert bmoe(capsys, "prepare", str(PROTEINS), "--out", "shards", "--valid-fraction", "0.1")[0] == 0
    code, _, err = bmoe(capsys, "prepare", str(PROTEINS), "--out", "shards", "--valid-fraction", "0.1")
    assert code == 0 and "already prepared" in err
    Path("elsewhere").mkdir()
    copy = Path("elsewhere", PROTEINS.name)
    copy.write_bytes(PROTEINS.read_bytes())
    assert bmoe(capsys, "prepare", str(copy), "--out", "shards", "--valid-fraction", "0.1")[0] == 0  # the same file elsewhere
    assert "other options" in refused(capsys, "prepare", str(PROTEINS), "--out", "shards", "--valid-fraction", "0.2")
    shard = Path("shards/train-00000.tokens")
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert "train-00000.tokens" in refused(capsys, "train", "tiny.yaml", "--device", "cpu")
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "train-00000.tokens" in refused(capsys, "prepare", "--verify", "shards")
    shard.write_bytes(content)
    assert bmoe(capsys, "prepare", "--verify", "shards")[0] == 0


def test_debug_shows_the_traceback_before_or_after_the_command(here, capsys):
    assert "--debug" in bmoe(capsys, "--help")[1]
    for arguments in (["--debug", "train", "no.yaml"], ["train", "no.yaml", "--debug"]):
        with pytest.raises(recipes.RecipeError):
            cli.run(arguments)


def test_default_folder_of_a_preparation(here, capsys):
    Path("some.proteins.fasta.gz").write_bytes(PROTEINS.read_bytes())
    assert bmoe(capsys, "prepare", "some.proteins.fasta.gz", "--json", "p.json")[0] == 0
    results = json.loads(Path("p.json").read_text())["results"]
    assert Path("data/some.proteins/manifest.json").is_file()
    assert results["records_read"] == 500 and results["records_kept"] + sum(results["records_dropped"].values()) == 500
    for key in ("residues", "splits", "seconds", "mb_per_s"):
        assert key in results
    code, again, _ = bmoe(capsys, "prepare", "some.proteins.fasta.gz", "--json", "p.json")
    results = json.loads(Path("p.json").read_text())["results"]
    assert code == 0 and "speed" not in again and results["seconds"] is results["mb_per_s"] is None


def test_a_preparation_killed_after_its_manifest_is_completed(here, capsys):
    assert bmoe(capsys, "prepare", str(PROTEINS), "--out", "shards")[0] == 0
    page = Path("shards/report.html").read_text()
    Path("shards/report.html").unlink()
    Path("shards/.prepare").mkdir()
    assert bmoe(capsys, "prepare", str(PROTEINS), "--out", "shards")[0] == 0
    assert Path("shards/report.html").read_text() == page and not Path("shards/.prepare").exists()


def test_data_that_cannot_be_meant_is_doubted_in_a_sentence(here, capsys):
    proteins = ">a\nMKVLLE\n>b\nMKWLLE\n"
    for number, (text, flags, doubt) in enumerate(
        [
            (">a\nAUGGCUAUUCAA\n", (), "look like DNA or RNA: 100% of their letters"),
            (f">a\n{'ACGT' * 12}MK\n", (), "look like DNA or RNA: 96% of their letters"),
            (">a\n12345678MK\n", (), "80% of the letters are no amino acids"),
            (proteins, ("--alphabet", "dna"), "do not look like DNA"),
            (proteins, ("--clusters", "one.tsv"), "the cluster table lists 0 of 2 records"),
            (proteins, (), ""),
        ]
    ):
        Path("in.fasta").write_text(text)
        Path("one.tsv").write_text("x\ty\n")
        code, _, err = bmoe(capsys, "prepare", "in.fasta", "--out", f"o{number}", *flags)
        assert code == 0 and (doubt in err if doubt else not err.strip()), err
    code, out, _ = bmoe(capsys, "prepare", "in.fasta", "--out", "held", "--valid-fraction", "0.999")
    assert code == 0 and "The split train is empty" in out


def test_the_folder_of_a_directory_has_its_name(here, capsys):
    Path("mine.v2/sub").mkdir(parents=True)
    Path("mine.v2/a.fasta").write_text(">a\nMKV\n")
    assert bmoe(capsys, "prepare", "mine.v2/")[0] == 0 and Path("data/mine.v2/manifest.json").is_file()
    os.chdir("mine.v2/sub")
    assert bmoe(capsys, "prepare", "..")[0] == 0 and Path("data/mine.v2/manifest.json").is_file()


def test_train_prepares_with_a_report_and_goes_on_where_that_was_interrupted(here, capsys, monkeypatch):
    from bmoe import console

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    train = ("train", "tiny.yaml", "--device", "cpu", "--set", "training.steps=1")
    with monkeypatch.context() as patch:
        patch.setattr(console.PreparationView, "update", interrupted)
        code, _, err = bmoe(capsys, *train)
        assert code == 130 and "interrupted; train and prepare go on" in err
    assert Path("shards/.prepare/journal").is_file() and not Path("shards/manifest.json").exists()
    assert bmoe(capsys, *train)[0] == 0
    assert Path("shards/report.html").is_file()


def test_a_byte_that_flips_in_a_shard_ends_training_with_its_name(here, capsys):
    assert bmoe(capsys, "train", "tiny.yaml", "--device", "cpu", "--stop-at", "1")[0] == 0
    tokens = Path("shards/train-00000.tokens")
    content = bytearray(tokens.read_bytes())
    content[-1] ^= 1
    tokens.write_bytes(content)
    said = refused(capsys, "train", "tiny.yaml", "--device", "cpu", "--resume", "--set", "training.steps=20000")
    assert "train-00000.tokens is corrupt" in said and "--verify" in said
    valid = Path("shards/valid-00000.tokens")
    content = bytearray(valid.read_bytes())
    content[0] ^= 1
    valid.write_bytes(content)
    assert "valid-00000.tokens is corrupt" in refused(capsys, "eval", "runs/tiny", "--device", "cpu")
    valid.unlink()
    arguments = ("--out", "shards", "--valid-fraction", "0.1")
    assert "valid-00000.tokens is missing" in refused(capsys, "prepare", str(PROTEINS), *arguments)


def run_in_background(*arguments: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", "from bmoe.cli import main; main()", *arguments], env=environment, stderr=subprocess.PIPE, text=True
    )


def test_an_interrupt_saves_and_leaves_with_130(here):
    process = run_in_background(
        "train", "tiny.yaml", "--device", "cpu", "--set", "training.steps=100000", "--set", "checkpoint.every=100000"
    )
    deadline = time.monotonic() + 120
    while not (Path("runs/tiny/metrics.jsonl").exists() and len(records("runs/tiny")) >= 2):
        assert process.poll() is None and time.monotonic() < deadline, process.stderr.read()
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    step = records("runs/tiny")[-1]["step"]
    assert Path("runs/tiny/checkpoints/latest").read_text().strip() == f"step-{step:010d}"


def test_a_dry_run_of_too_many_ranks_names_a_step_that_they_can_share(here, capsys):
    asked = ["train", "esm2_moe", "--dry-run", "--world", "512", "--chip", "b200"]
    code, _, err = bmoe(capsys, *asked)
    assert code == 2
    proposed = err.strip().split("--set ")[-1]
    assert proposed == f"training.tokens_per_step={512 * 32768}"  # the least multiple of 512 batches that is no smaller than the recipe's
    code, out, _ = bmoe(capsys, *asked, "--set", proposed)
    assert code == 0
    assert "divides training.tokens_per_step is 32,768" in " ".join(out.split())  # the step's share is the limit here, not the memory
    assert "backend on cpu" in out


def test_dry_run_needs_no_data_and_counts_the_flagship(here, capsys):
    code, out, _ = bmoe(capsys, "train", "esm2_moe", "--dry-run", "--world", "8", "--json", "d.json")
    results = json.loads(Path("d.json").read_text())["results"]
    assert code == 0 and "b200" in out
    assert results["parameters"] == pytest.approx(2.8e9, rel=0.01) and results["active_parameters"] == pytest.approx(0.82e9, rel=0.01)
    assert results["batches_per_rank"] == 8 and not Path("data").exists() and not Path("runs").exists()


SHRUNK = [
    "data.max_length=32",
    "data.tokens_per_batch=128",
    "training.tokens_per_step=128",
    "training.steps=2",
    "training.validate_every=2",
    "training.validation_tokens=256",
    "model.layers=2",
    "model.width=40",
    "model.heads=2",
    "data.path=shards",
]


@pytest.mark.parametrize("name", sorted(p.stem for p in recipes.shipped_directory().glob("*.yaml")))
def test_every_shipped_recipe_trains_two_steps_when_shrunk(here, capsys, name):
    shrink = [*SHRUNK, "data.fasta=null"]
    recipe = recipes.load(recipes.shipped_directory() / f"{name}.yaml")
    if recipe.model.moe:
        shrink += ["model.moe.expert_width=16"]
    else:
        shrink += ["model.ffn_width=64"]
    if recipe.data.alphabet == "dna":
        shrink += ["data.window=30", "model.kv_heads=1"]
        source = REPOSITORY / "tests" / "data" / "small_genome.fna"
        Path("genome.fna").write_text(source.read_text() if source.is_file() else GENOME)
        assert bmoe(capsys, "prepare", "genome.fna", "--alphabet", "dna", "--out", "shards", "--valid-fraction", "0.2")[0] == 0
    else:
        assert bmoe(capsys, "prepare", str(PROTEINS), "--out", "shards", "--valid-fraction", "0.1")[0] == 0
    sets = [part for value in shrink for part in ("--set", value)]
    code, out, err = bmoe(capsys, "train", name, "--device", "cpu", *sets)
    assert code == 0, err
    assert "baseline" in out and records(f"runs/{name}")[-1]["step"] == 2


def _genome() -> str:
    import random

    generator = random.Random(0)
    return ">chr\n" + "".join(generator.choice("ACGT") for _ in range(400_000)) + "\n"


GENOME = _genome()


def test_console_draws_a_dashboard_on_a_terminal(monkeypatch):
    """The live view shows loss, speed, experts and validation."""
    import io

    from rich.console import Console

    from bmoe import console

    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    monkeypatch.setattr(console, "err", screen)
    record = {
        "step": 3,
        "loss": 2.5,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "residues_per_s": 1234.0,
        "step_s": 0.5,
        "peak_memory_gib": 1.0,
        "mfu": 0.4,
        "load_max_over_mean": [None, 1.5],
        "skipped_steps": 2,
        "valid_perplexity_mask": 17.0,
    }
    with console.TrainingView("tiny", 10, 0) as view:
        view.record(record)
        view.note("hello")
        view.record(record)
    text = screen.file.getvalue()
    for part in ("2.5000", "1,234 residues/s", "17.0000", "1.50", "non-finite", "hello", "MFU"):
        assert part in text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_at_the_very_end_changes_no_exit_code(number):
    """All is done, and the interpreter takes a second to take torch apart."""
    late = f"import atexit, os; atexit.register(lambda: os.kill(os.getpid(), {int(number)}))"
    found = subprocess.run([sys.executable, "-c", f"{late}; from bmoe.cli import main; main(['--version'])"], capture_output=True)
    assert found.returncode == 0 and not found.stderr


@pytest.mark.parametrize("ask", [lambda: torch.empty(10**16), lambda: np.empty(10**16), lambda: bytearray(10**16)])
@pytest.mark.parametrize("command, words", [("bmoe train", "lower data.tokens_per_batch"), ("bmoe prepare", "fewer --workers")])
def test_a_machine_out_of_memory_is_said_with_what_to_make_smaller(capsys, ask, command, words):
    """However the libraries report it."""
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        ask()
    assert cli.explain(caught.value, command=command) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "this machine is out of memory; " in told and words in told and "should not happen" not in told


def test_a_system_call_without_memory_is_no_fault_of_a_path(capsys):
    assert cli.explain(OSError(errno.ENOMEM, "Cannot allocate memory")) == 1
    assert "out of memory" in capsys.readouterr().err
