"""A hang is found, and the sentence names the rank and the collective."""

import threading
from pathlib import Path

import torch

from bmoe.parallel import launch
from bmoe.parallel.watchdog import describe, where
from bmoe.parallel.world import wait

PROGRAM = f"import runpy; runpy.run_path({str(Path(__file__).parent / 'launched.py')!r}, run_name='__main__')"


def test_a_rank_that_does_not_come_to_a_collective_is_named(tmp_path):
    code, sentence, _ = launch.run(["one hangs", str(tmp_path)], 2, tmp_path / "logs", PROGRAM)
    assert code == 1
    assert "rank 1 is in no collective but at launched.py:" in sentence, sentence
    assert "in step 7" in sentence and "the others wait in all_reduce at bmoe/parallel/world.py" in sentence


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
