"""`bmoe eval` as a command: each flag reaches what it is for, and is refused where it has nothing to do; models side by side."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bmoe import cli
from bmoe import recipe as recipes
from bmoe.data.alphabet import alphabet
from bmoe.data.options import PrepareOptions
from bmoe.data.prepare import prepare
from bmoe.data.shards import Shards
from bmoe.errors import RequestError
from bmoe.jobs.evaluate import Wanted
from bmoe.jobs.evaluate import evaluate as evaluate_runs
from bmoe.training.checkpoint import Checkpoints
from bmoe.training.state import model_tensors

TESTS = Path(__file__).parent.parent
SCAN = {"--mutations": "scan.csv", "--wildtype": "wt.fasta"}


@pytest.fixture
def run(make_recipe, make_model, tmp_path, monkeypatch):
    """run(kind, name=kind) makes a run folder of that name, and gives its model; the working directory has small inputs."""
    monkeypatch.chdir(tmp_path)
    Path("wt.fasta").write_text(">wt\nMKTAYIAKQR\n")
    Path("scan.csv").write_text("mutant,y\nM1A,1\nK2C:R10W,2\nT3S,3\nT3P,0\n")

    def make(kind: str, name: str | None = None, seed: int = 0, data: Path | None = None, **options):
        recipe = make_recipe(kind, **options)
        recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"path": str(data)})}) if data else recipe
        model, folder = make_model(recipe, seed), Path(name or kind)
        folder.mkdir()
        (folder / "recipe.yaml").write_text(recipes.dump(recipe))
        Checkpoints(folder, keep=1, background=False).save(1, model_tensors(model).items(), {"step": 1})
        return model

    return make


def evaluated(kind: str, flags: dict[str, object], *more: str) -> dict:
    arguments = [str(part) for pair in flags.items() for part in pair]
    assert cli.run(["eval", kind, "--device", "cpu", "--json", "out.json", *arguments, *more]) == 0
    return json.loads(Path("out.json").read_text())["results"]


def test_scores_and_embeddings_are_renamed_to_their_place(run):
    """A second name of the old file keeps what was in it."""
    run("encoder")
    for name in ("s.csv", "x.safetensors"):
        Path(name).write_text("old")
        os.link(name, f"{name}.old")
    evaluated("encoder", SCAN | {"--scores": "s.csv", "--embed": "wt.fasta", "--out": "x.safetensors"})
    for name in ("s.csv", "x.safetensors"):
        assert Path(f"{name}.old").read_text() == "old" and Path(name).stat().st_size > 3
    assert not list(Path().glob("*.partial"))


def test_layer_and_mode_choose_the_embedding(run):
    model = run("encoder")
    flags = {"--embed": "wt.fasta", "--out": "x.safetensors"}
    assert evaluated("encoder", flags)["embeddings"]["layer"] == len(model.blocks)
    assert load_file("x.safetensors")["wt"].shape == (10, 32)
    evaluated("encoder", flags | {"--layer": 0, "--mode": "mean"})
    table = model.embedding[alphabet("protein").encode(b"MKTAYIAKQR").astype(int)] * (1 - 0.12)  # token dropout without masks
    assert torch.allclose(load_file("x.safetensors")["wt"], table.mean(0), atol=1e-6)


def test_method_chooses_the_scores_in_its_order(run):
    run("encoder")
    both = evaluated("encoder", SCAN)["mutations"]
    assert list(both["methods"]) == ["masked_marginal", "wt_marginal"]
    found = evaluated("encoder", SCAN | {"--scores": "s.csv"}, "--method", "pseudo-log-likelihood", "--method", "masked-marginal")
    assert list(found["mutations"]["methods"]) == ["pll", "masked_marginal"] and found["mutations"]["method"] == "pll"
    assert Path("s.csv").read_text().splitlines()[0] == "mutant,y,pll,masked_marginal"
    assert found["mutations"]["methods"]["masked_marginal"] == both["methods"]["masked_marginal"]


def test_the_method_must_be_one_of_the_model_s(run, capsys):
    run("decoder")
    assert list(evaluated("decoder", SCAN)["mutations"]["methods"]) == ["log_likelihood"]
    arguments = [part for pair in SCAN.items() for part in pair]
    assert cli.run(["eval", "decoder", "--device", "cpu", *arguments, "--method", "masked-marginal"]) == 2
    assert "a decoder are scored by log-likelihood, not masked-marginal" in capsys.readouterr().err


def test_temperature_and_top_k_change_the_samples(run):
    run("decoder")
    flags = {"--generate": 3, "--prompt": "MK"}
    plain = evaluated("decoder", flags)["generation"]
    assert plain["temperature"] == 1.0 and plain["top_k"] is None
    greedy = evaluated("decoder", flags | {"--top-k": 1})["generation"]
    cold = evaluated("decoder", flags | {"--temperature": 1e-4})["generation"]
    sequences = [[sample["sequence"] for sample in found["samples"]] for found in (plain, greedy, cold)]
    assert len(set(sequences[0])) == 3 and len(set(sequences[1])) == 1 and sequences[1] == sequences[2]


@pytest.mark.parametrize(("flags", "words"), [
    (SCAN | {"--scores": "gone/s.csv"}, "--scores gone/s.csv: there is no folder"),
    ({"--embed": "wt.fasta", "--out": "gone/x.safetensors"}, "--out gone/x.safetensors: there is no folder"),
    ({"--embed": "wt.fasta", "--out": "."}, "--out .: cannot be written"),
])  # fmt: skip
def test_files_that_could_not_be_written_are_refused_before_any_work(tmp_path, monkeypatch, capsys, flags, words):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["eval", "no_run", "--device", "cpu", *[part for pair in flags.items() for part in pair]]) == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(("wanted", "words"), [
    ({"mutations": "x.csv"}, "--wildtype FASTA go together"),
    ({"column": "y"}, "--mutations, which is missing"),
    ({"scores": "s.csv"}, "--mutations, which is missing"),
    ({"methods": ("masked-marginal",)}, "--mutations, which is missing"),
    ({"mutations": "x.csv", "wildtype": "w.fasta", "methods": ("masked_marginals",)}, "there are masked-marginal, wildtype-marginal"),
    ({"embed": "x.fasta"}, "--out FILE.safetensors go together"),
    ({"mode": "mean"}, "--embed FASTA writes, which is missing"),
    ({"layer": 0}, "--embed FASTA writes, which is missing"),
    ({"embed": "x.fasta", "out": "x.safetensors", "mode": "max"}, "residue or mean"),
    ({"prompt": "MK"}, "--generate N, which is missing"),
    ({"temperature": 0.5}, "--generate N, which is missing"),
    ({"top_k": 3}, "--generate N, which is missing"),
])  # fmt: skip
def test_flags_without_their_companion_are_refused(wanted, words):
    with pytest.raises(RequestError, match=words):
        Wanted(**wanted).check()


EVERYTHING = SCAN | {"--by": "OS", "--structures": TESTS / "data" / "structures", "--probe": "ss.tsv"}
EVERYTHING |= {"--embed": "wt.fasta", "--out": "x.safetensors"}


@pytest.fixture
def shards(run, tmp_path, make_proteins):
    """Real proteins, prepared, and a table of secondary structures that follow from the residue."""
    prepare([TESTS / "data" / "uniprot_500.fasta.gz"], tmp_path / "shards", PrepareOptions(valid_fraction=0.2))
    rows = ["".join("H" if x < "L" else "E" if x < "S" else "~" for x in s) for s in make_proteins(40, 60, seed=7)]
    lines = [f"{s}\t{t}\n" for s, t in zip(make_proteins(40, 60, seed=7), rows, strict=True)]
    Path("ss.tsv").write_text("sequence\tss8\n" + "".join(lines))
    return tmp_path / "shards"


def test_everything_at_once_has_the_keys_of_the_contract(run, shards):
    run("encoder", data=shards)
    found = evaluated("encoder", EVERYTHING | {"--report": "r.html"}, "--pseudo", "--routing")
    for scheme in ("8010", "mask"):
        assert found[f"perplexity_{scheme}_low"] < found[f"perplexity_{scheme}"] < found[f"perplexity_{scheme}_high"]
        assert 10 < found[f"baseline_{scheme}"] < 20
    assert {"spearman", "spearman_low", "spearman_high", "n"} <= found["mutations"].keys()
    assert found["contacts"]["chains"] == 2 and found["probe"]["three_state"]["classes"] == 3
    assert {"layers", "residue", "position", "structure", "next_layer"} <= found["routing"].keys()
    assert found["pseudo"]["sequences"] > 1 and found["embeddings"]["sequences"] == 1
    assert len(found["by_group"]) > 5 and all(len(entry["group"]) > 3 for entry in found["by_group"])  # names of organisms
    assert sum(entry["targets"] for entry in found["by_group"]) == sum(entry["targets"] for entry in found["by_length"]) == found["targets"]
    page = Path("r.html").read_text()
    for title in ("Held-out sequences", "Mutations", "Contacts", "Secondary structure", "Routing", "Embeddings"):
        assert f">{title}<" in page
    assert "http" not in page.replace("http://www.w3.org", "")  # nothing is loaded from elsewhere


def test_a_model_named_twice_is_refused_before_it_is_read():
    with pytest.raises(RequestError, match="nowhere/ is named twice"):
        evaluate_runs(["./nowhere/", "elsewhere", "nowhere"], Wanted(), data=None, split="valid", device=torch.device("cpu"))


def test_a_checkpoint_of_no_numbers_is_refused(run, capsys):
    model, folder = run("encoder"), Path("encoder")
    with torch.no_grad():
        model.embedding[3, 1] = torch.inf
    Checkpoints(folder, keep=1, background=False).save(2, model_tensors(model).items(), {"step": 2})
    assert cli.run(["eval", "encoder", "--device", "cpu"]) == 2
    assert "step-0000000002: embedding has values that are no numbers; name an earlier checkpoint of the run" in capsys.readouterr().err


def test_a_split_is_hashed_once_for_all_models(run, shards, monkeypatch):
    run("encoder", "a", data=shards)
    run("encoder", "b", data=shards)
    (shards.parent / "same").symlink_to(shards)
    run("encoder", "c", data=shards.parent / "same")
    hashed, check = [], Shards.check
    monkeypatch.setattr(Shards, "check", lambda split: hashed.append(split.split) or check(split))
    evaluated("a", {}, "b", "c")
    assert hashed == ["valid"]


def test_models_side_by_side(run, shards, capsys):
    """Each has the numbers of a run by itself; pairs are on the same targets; a dense model has no routing and spoils nothing."""
    run("encoder", "moe", data=shards)
    run("encoder", "dense", seed=1, data=shards, moe=None)
    alone = [evaluated(name, {}) for name in ("moe", "dense")]
    both = evaluated("moe", {}, "dense", "--routing", "--report", "r.html")["runs"]
    assert [found["run"] for found in both] == ["moe", "dense"] and "dense is dense" in capsys.readouterr().err
    for one, found in zip(alone, both, strict=True):
        assert found["perplexity_mask"] == one["perplexity_mask"] and found["by_length"] == one["by_length"]
    ratio = both[1]["compared"]["schemes"]["mask"]
    assert both[1]["compared"]["to"] == "moe" and "compared" not in both[0] and "routing" not in both[1]
    assert ratio["ratio"] == pytest.approx(both[1]["perplexity_mask"] / both[0]["perplexity_mask"]) and ratio["low"] < ratio["high"]
    scored = evaluated("moe", SCAN, "dense")["runs"]
    assert scored[1]["compared"]["schemes"] == {} and list(scored[1]["compared"]["differences"]) == ["mutations"]
    gain = scored[1]["mutations"]["spearman"] - scored[0]["mutations"]["spearman"]
    assert scored[1]["compared"]["differences"]["mutations"]["difference"] == pytest.approx(gain)
    assert "residue" in both[0]["routing"] and "Side by side" in Path("r.html").read_text()
    assert cli.run(["eval", "dense", "--device", "cpu", "--routing"]) == 2 and "dense" in capsys.readouterr().err
    assert cli.run(["eval", "moe", "dense", "--device", "cpu", "--embed", "wt.fasta", "--out", "x.safetensors"]) == 2
