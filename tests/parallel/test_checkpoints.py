"""Checkpoints of several ranks: any layout loads any other, and resumes equal undisturbed runs."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

_spec = importlib.util.spec_from_file_location("runs", Path(__file__).parent.parent / "training" / "runs.py")
runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(runs)


def everywhere(ranks, case: str, layout: tuple[int, int, int], **arguments):
    """Run a case in a layout, on one process in this one. Returns what rank 0 returns."""
    size = int(np.prod(layout))
    if size == 1:
        return getattr(runs, case)(0, 1, layout=layout, **arguments)
    return ranks(size).run(case, layout=layout, **arguments)[0]


def assert_equal_tensors(one: dict, two: dict) -> None:
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name


def test_any_layout_loads_any_other(ranks, tmp_path):
    """EP 4 -> 1 -> 2 -> FSDP 4 -> 1, HSDP and whole copies in between: the same bits, and the same loss."""
    first = tmp_path / "first"
    everywhere(ranks, "part", (1, 1, 4), folder=str(first), steps=4)
    want, folder, losses = runs.final_tensors(first), first, []
    assert want["model.blocks.0.ffn.experts.gate_up"].shape == (8, 48, 32)
    for number, layout in enumerate([(1, 1, 4), (1, 1, 1), (1, 1, 2), (1, 4, 1), (1, 1, 1), (2, 1, 2), (1, 2, 2), (2, 1, 1), (1, 2, 1)]):
        out = tmp_path / str(number)
        losses.append(everywhere(ranks, "reload", layout, folder=str(folder), out=str(out)))
        assert_equal_tensors(runs.final_tensors(out), want)
        folder = out
    assert max(losses) - min(losses) < 1e-6 * losses[0]


@pytest.mark.parametrize("layout", [(1, 1, 2), (1, 2, 1), (2, 1, 1)])
def test_resumed_at_the_same_world_size_bit_for_bit(ranks, tmp_path, layout):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    everywhere(ranks, "part", layout, folder=str(whole), steps=6)
    assert everywhere(ranks, "part", layout, folder=str(parts), steps=6, stop_at=3) == 3
    everywhere(ranks, "part", layout, folder=str(parts), steps=6)
    assert_equal_tensors(runs.final_tensors(parts), runs.final_tensors(whole))
    assert runs.records(parts) == runs.records(whole)


def test_resumed_at_another_world_size_in_the_same_order_of_samples(ranks, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    everywhere(ranks, "part", (1, 1, 1), folder=str(whole), steps=6)
    for stop, layout in ((2, (1, 1, 4)), (4, (1, 1, 1)), (None, (1, 2, 1))):
        everywhere(ranks, "part", layout, folder=str(parts), steps=6, stop_at=stop)
    for got, want in zip(runs.records(parts), runs.records(whole), strict=True):
        assert got["tokens"] == want["tokens"]  # the same sequences: their lengths are random
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-4)
    for folder in (whole, parts):
        meta = runs.checkpoint.read_meta(runs.checkpoint.newest_whole(folder / "checkpoints"))
        assert meta["position"] == runs.checkpoint.read_meta(runs.checkpoint.newest_whole(whole / "checkpoints"))["position"]


@pytest.mark.parametrize("ahead", [1, 5])
def test_how_far_loader_threads_have_read_ahead_changes_nothing(tmp_path, monkeypatch, ahead):
    """A stop finds steps in the queue that were not trained: they are no part of the state, whatever their number."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    runs.part(0, 1, folder=str(whole), steps=6)
    monkeypatch.setattr("bmoe.data.loader.PREFETCH", ahead)
    for stop in (1, 4, None):
        runs.part(0, 1, folder=str(parts), steps=6, stop_at=stop)
    assert_equal_tensors(runs.final_tensors(parts), runs.final_tensors(whole))
    assert runs.records(parts) == runs.records(whole)
    metas = [runs.checkpoint.read_meta(runs.checkpoint.newest_whole(folder / "checkpoints")) for folder in (whole, parts)]
    assert metas[0]["position"] == metas[1]["position"]


def test_damage_that_one_rank_finds_is_known_to_all_and_the_one_before_is_taken(ranks, tmp_path):
    """Each rank compares its share of the files; the run ends as the undisturbed one."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    everywhere(ranks, "part", (1, 1, 2), folder=str(whole), steps=6)
    everywhere(ranks, "part", (1, 1, 2), folder=str(parts), steps=6, stop_at=4)
    newest = runs.checkpoint.newest_whole(parts / "checkpoints")
    file = max(newest.glob("__1_*.distcp"), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    everywhere(ranks, "part", (1, 1, 2), folder=str(parts), steps=6)
    assert (newest.parent / (newest.name + ".damaged")).is_dir() and newest.name == "step-0000000004"
    assert_equal_tensors(runs.final_tensors(parts), runs.final_tensors(whole))
    assert runs.records(parts) == runs.records(whole)


@pytest.mark.parametrize("layout", [(1, 1, 2), (2, 1, 1)])
def test_a_bf16_run_goes_on_over_two_ranks(ranks, tmp_path, layout):
    """From split masters on one process to fp32 shards or copies on two, and back."""
    options = {"steps": 6, "kind": "bf16", "experts": "grouped", "folder": str(tmp_path)}
    runs.part(0, 1, stop_at=2, **options)
    before = runs.final_tensors(tmp_path)
    ranks(2).run("part", layout=layout, stop_at=4, **options)
    runs.part(0, 1, **options)
    after = runs.final_tensors(tmp_path)
    assert after.keys() == before.keys() and {t.dtype for n, t in after.items() if not n.startswith("optimizer.skipped")} == {torch.float32}
    losses = [record["loss"] for record in runs.records(tmp_path)]
    assert len(losses) == 6 and losses[-1] < losses[0]


@pytest.mark.parametrize("culprit, background", [(0, True), (0, False), (1, True)])
def test_an_error_of_a_save_on_one_rank_ends_all(ranks, tmp_path, culprit, background):
    for told, left in ranks(2).run("broken_save", folder=str(tmp_path), culprit=culprit, background=background):
        assert "cannot write a checkpoint into" in told and "EOFError: Ran out of input" in told and not left
