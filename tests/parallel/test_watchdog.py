"""A hang is found, and the sentence names the rank and the collective."""

import importlib.util
import threading
import time
from functools import partial
from pathlib import Path

import torch

from bmoe.parallel import launch
from bmoe.parallel.watchdog import Watchdog, describe, where
from bmoe.parallel.world import wait
from bmoe.training import loop

_spec = importlib.util.spec_from_file_location("runs", Path(__file__).parent.parent / "training" / "runs.py")
runs = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(runs)
PROGRAM = f"import runpy; runpy.run_path({str(Path(__file__).parent / 'launched.py')!r}, run_name='__main__')"


def test_a_rank_that_does_not_come_to_a_collective_is_named(tmp_path):
    code, sentence, _ = launch.run(["one hangs", str(tmp_path)], 2, tmp_path / "logs", PROGRAM)
    assert code == 1
    assert "rank 1 is in no collective but at launched.py:" in sentence, sentence
    assert "in step 7" in sentence and "the others wait in all_reduce at bmoe/parallel/world.py" in sentence


def test_what_takes_long_and_makes_progress_is_no_hang(tmp_path, monkeypatch):
    """A validation of many batches, and the check, the end of the save before and a save one after the other."""
    monkeypatch.setenv(launch.PIDS, str(tmp_path))  # else there is no watchdog
    monkeypatch.setattr(loop, "Watchdog", partial(Watchdog, limit=1.5))
    ended = []
    monkeypatch.setattr("bmoe.parallel.watchdog.os._exit", ended.append)
    for module, name in ((loop, "check_replicas"), (runs.checkpoint.Checkpoints, "wait"), (runs.checkpoint.Checkpoints, "save")):
        monkeypatch.setattr(module, name, lambda *_: time.sleep(0.9))
    build, batches = runs.setup.build_model, []

    def slow(*arguments):
        model = build(*arguments)
        model.final_norm.register_forward_hook(lambda *_: None if model.training else batches.append(time.sleep(0.3)))
        return model

    monkeypatch.setattr(runs.setup, "build_model", slow)
    recipe = runs.make_recipe(1, batches=1)
    recipe = recipe.model_copy(update={"training": recipe.training.model_copy(update={"validation_tokens": 400})})
    runs.train(tmp_path / "run", recipe)
    assert len(batches) * 0.3 > 1.5 + 0.75 and ended == [] and not list(tmp_path.rglob("stalled-rank-*"))


def facts(step: int, collective: str | None) -> dict:
    return {"step": step, "collective": collective, "line": "bmoe/x.py:1"}


def test_the_culprit_is_the_one_the_others_wait_for():
    both = {0: facts(5, "all_reduce"), 1: facts(5, "all_reduce")}
    assert "rank 2 does not answer" in describe(both, 3, 60)
    assert "rank 1 waits in all_to_all_single" in describe({0: facts(5, "all_reduce"), 1: facts(4, "all_to_all_single")}, 2, 60)
    assert "rank 0 is in no collective" in describe({0: facts(5, None), 1: facts(5, "all_reduce")}, 2, 60)
    assert describe({0: facts(5, None)}, 1, 60) == "no step ended for 60 seconds: the process is at bmoe/x.py:1, in step 5"


def test_who_waits_for_a_collective_that_was_started_before_is_in_it():
    class Work(threading.Event):
        def wait(self) -> None:
            entered.set()
            super().wait(60)

    work, entered = Work(), threading.Event()
    thread = threading.Thread(target=wait, args=(work, "all_to_all_single"))
    thread.start()
    entered.wait(60)
    found = where(thread.ident, torch.device("cpu"))
    work.set()
    thread.join()
    assert found["collective"] == "all_to_all_single"
