"""A run that was stopped and resumed is the run that was not, bit for bit."""

import importlib.util
import json
import signal
from pathlib import Path

import pytest
import torch

from bmoe.jobs import train
from bmoe.parallel.world import World
from bmoe.training import checkpoint

_spec = importlib.util.spec_from_file_location("runs", Path(__file__).parent / "runs.py")
runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(runs)


def assert_same(first: Path, second: Path) -> None:
    one, two = runs.final_tensors(first), runs.final_tensors(second)
    assert one.keys() == two.keys()
    for name in one:
        assert torch.equal(one[name], two[name]), name
    assert runs.records(first) == runs.records(second)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    outcome, _ = runs.train(folder, runs.make_recipe(10))
    assert (outcome.step, outcome.finished, outcome.signal) == (10, True, 0)
    return folder


def test_five_steps_and_five_are_ten(undisturbed, tmp_path):
    torch.manual_seed(1)
    outcome, _ = runs.train(tmp_path, runs.make_recipe(10), limits=runs.Limits(stop_at=5))
    assert (outcome.step, outcome.finished) == (5, False)
    torch.manual_seed(2)  # nothing may depend on the global generator
    runs.train(tmp_path, runs.make_recipe(10))
    assert_same(undisturbed, tmp_path)


def test_a_signal_saves_within_the_step(undisturbed, tmp_path):
    limits = runs.Limits()

    def after(record: dict) -> None:
        if record["step"] == 3:
            limits.take(signal.SIGTERM)  # what the handler does, while step 3 is being reported

    outcome, _ = runs.train(tmp_path, runs.make_recipe(10), limits=limits, observer=runs.Watcher(after))
    assert (outcome.step, outcome.signal) == (4, signal.SIGTERM)
    runs.train(tmp_path, runs.make_recipe(10))
    assert_same(undisturbed, tmp_path)


def test_time_is_a_limit(tmp_path):
    outcome, _ = runs.train(tmp_path, runs.make_recipe(10), limits=runs.Limits(max_seconds=0.0))
    assert (outcome.step, outcome.finished, outcome.signal) == (1, False, 0)
    assert runs.checkpoint.newest_whole(tmp_path / "checkpoints").name == "step-0000000001"


def test_the_best_checkpoint_stays(tmp_path):
    runs.train(tmp_path, runs.make_recipe(16, every=1, keep=2, lr=0.05))
    losses = {r["step"]: r["valid_loss"] for r in runs.records(tmp_path) if "valid_loss" in r}
    best = min(losses, key=losses.__getitem__)
    assert best < 15, losses
    kept = {int(p.name[5:]) for p in (tmp_path / "checkpoints").glob("step-*")}
    assert kept == {15, 16, best}
    assert runs.checkpoint.best_whole(tmp_path / "checkpoints").name == runs.checkpoint.folder_name(best)


def test_steps_that_are_not_finite_stop_the_run_and_name_the_sequences(tmp_path):
    recipe = runs.make_recipe(10, every=3)
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"max_skipped_steps": 3})})
    runs.train(tmp_path, recipe, limits=runs.Limits(stop_at=3))
    setup = runs.setup.build_model

    def broken(*arguments):
        model = setup(*arguments)
        model.blocks[0].ffn.register_forward_hook(lambda module, inputs, output: output * float("inf"))
        return model

    runs.setup.build_model = broken
    try:
        with pytest.raises(runs.RunError, match=r"step 6: .* 3 steps in a row.*nonfinite-step-6-rank-0.json.*step-0000000003"):
            runs.train(tmp_path, recipe)
    finally:
        runs.setup.build_model = setup
    assert runs.records(tmp_path)[-1]["skipped_steps"] == 2
    listed = runs.json.loads((tmp_path / "nonfinite-step-6-rank-0.json").read_text())
    assert len(listed["batches"]) == 4 and all(batch["sequence_ids"] for batch in listed["batches"])
    assert runs.checkpoint.newest_whole(tmp_path / "checkpoints").name == "step-0000000003"


@pytest.fixture
def broken_steps(monkeypatch) -> set[int]:
    """The steps whose gradients are not finite, of runs of 4 batches a step."""
    build, steps, passes = runs.setup.build_model, set(), [0]

    def poison(model, inputs, output):
        passes[0] += model.training
        step = -(-passes[0] // 4)
        return output * (float("inf") if model.training and step in steps else 1.0)

    def broken(*arguments):
        model = build(*arguments)
        model.final_norm.register_forward_hook(lambda norm, inputs, output: poison(model, inputs, output))
        return model

    monkeypatch.setattr(runs.setup, "build_model", broken)
    return steps


def with_training(recipe, **values):
    return recipe.model_copy(update={"training": recipe.training.model_copy(update=values)})


def test_a_row_of_broken_steps_is_noticed_after_its_end(tmp_path, broken_steps):
    """The host looks at steps 1, 3 and 6; steps 2 to 5 are broken."""
    recipe = with_training(runs.make_recipe(10, every=100), max_skipped_steps=3, validate_every=100)
    recipe = recipe.model_copy(update={"logging": recipe.logging.model_copy(update={"every": 100})})
    broken_steps |= {2, 3, 4, 5}
    with pytest.raises(runs.RunError, match="step 6: the gradient was not finite 4 steps in a row"):
        runs.train(tmp_path, recipe)


def test_rows_of_broken_steps_that_are_short_enough_do_not_add_up(tmp_path, broken_steps):
    broken_steps |= {1, 2, 4, 5, 7, 8}
    outcome, _ = runs.train(tmp_path, with_training(runs.make_recipe(9, every=100), max_skipped_steps=3))
    assert outcome.finished and runs.records(tmp_path)[-1]["skipped_steps"] == 6


def test_a_run_goes_on_after_a_skipped_step_as_if_undisturbed(tmp_path, broken_steps):
    """Bias corrections count the steps that were taken."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    broken_steps.add(2)
    runs.train(whole, runs.make_recipe(6))
    broken_steps |= {6 + 2}  # passes are counted on
    runs.train(parts, runs.make_recipe(6), limits=runs.Limits(stop_at=3))
    runs.train(parts, runs.make_recipe(6))
    assert [record["skipped_steps"] for record in runs.records(parts)] == [0, 1, 1, 1, 1, 1]
    assert_same(whole, parts)


def test_bf16_weights_come_back_with_their_fp32_masters(tmp_path):
    recipe = runs.make_recipe(4, kind="bf16", experts="grouped")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _, trainer = runs.train(whole, recipe)
    assert trainer.optimizer.low and trainer.model.embedding.dtype == torch.bfloat16
    runs.train(parts, recipe, limits=runs.Limits(stop_at=2))
    runs.train(parts, recipe)
    assert_same(whole, parts)
    saved = runs.final_tensors(whole)["model.blocks.0.ffn.experts.gate_up"]
    assert saved.dtype == torch.float32 and not torch.equal(saved, saved.bfloat16().float())


def test_a_jump_of_the_loss_is_told_and_the_run_goes_on(tmp_path, monkeypatch):
    models, build = [], runs.setup.build_model
    monkeypatch.setattr(runs.setup, "build_model", lambda *arguments: models.append(build(*arguments)) or models[-1])

    def after(record: dict) -> None:
        if record["step"] == 14:
            models[0].embedding.data *= 30.0

    watcher = runs.Watcher(after)
    outcome, _ = runs.train(tmp_path, runs.make_recipe(16, every=100), observer=watcher)
    assert outcome.finished and len(watcher.notes) == 2 and watcher.notes[0].startswith("step 15: the loss jumped to ")


def test_what_makes_a_resume_equal_only_to_rounding_is_said(tmp_path):
    """Another layout of the same ranks sums gradients in another order."""
    recipe, world = runs.make_recipe(4, (2, 2, 1)), World(torch.device("cpu"), 0, 4)
    known = {**checkpoint.torch_facts(world.device), "world": 4}
    for meta, said in (({"layout": "2 x 2 x 1"}, ""), ({}, ""), ({"layout": "1 x 1 x 4"}, "layout 1 x 1 x 4 -> 2 x 2 x 1")):
        (tmp_path / checkpoint.META).write_text(json.dumps({**known, **meta}))
        told = train.other_facts(tmp_path, recipe, world)
        assert said in told and bool(told) is bool(said)
