"""Ranks from every launcher's environment, and signals passed on."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from bmoe import cli
from bmoe.errors import FaultError, RequestError
from bmoe.jobs.common import load_recipe
from bmoe.parallel import launch

PROGRAM = f"import runpy; runpy.run_path({str(Path(__file__).parent / 'launched.py')!r}, run_name='__main__')"


def play(scene: str, folder: Path, restarts: int = 0):
    return launch.run([scene, str(folder)], 2, folder / "logs", PROGRAM, restarts, ("--resume",))


@pytest.mark.parametrize(
    "environment, found",
    [
        ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, (3, 8, 1)),  # torchrun, the elastic launcher
        ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8, 0)),  # PyTorchJob, one rank a pod
        ({"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16"}, (9, 16, 1)),  # srun
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_LOCALID": "0"}, None),  # the batch script itself
        ({"RANK": "0", "WORLD_SIZE": "1"}, None),
        ({}, None),
    ],
)
def test_every_launcher_is_understood(environment, found):
    assert launch.place(environment) == found


@pytest.mark.parametrize("environment", [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "2", "WORLD_SIZE": "2"}])
def test_a_broken_environment_is_refused(environment):
    with pytest.raises(RequestError, match="environment"):
        launch.place(environment)


@pytest.mark.parametrize(
    "nodes, host",
    [
        ("node17", "node17"),
        ("gpu[03-05,9],login1", "gpu03"),
        ("gpu[7]", "gpu7"),
        ("a01,a02", "a01"),
        ("c-1-[2-3].local", "c-1-2.local"),
    ],
)
def test_slurm_ranks_meet_on_the_first_node(nodes, host):
    found, port = launch.slurm_address({"SLURM_STEP_NODELIST": nodes, "SLURM_JOB_ID": "1234567"})
    assert found == host
    assert 20_000 <= port < 40_000


def test_steps_of_slurm_jobs_do_not_meet_each_other():
    """Steps of one job, and of jobs with neighbouring numbers, that share a first node."""
    environments = [
        {"SLURM_STEP_NODELIST": "node17", "SLURM_JOB_ID": str(job), name: str(step)}
        for job in (1234567, 1234568)
        for name in ("SLURM_STEP_ID", "SLURM_STEPID")
        for step in range(4)
    ]
    places = [launch.slurm_address(environment) for environment in environments]
    assert len(set(places)) == 8 and all(20_000 <= port < 40_000 for _, port in places)


@pytest.mark.parametrize("half", [{}, {"MASTER_ADDR": "localhost"}, {"MASTER_PORT": "29500"}])
def test_a_rank_that_knows_no_meeting_place_is_refused_at_once(half, monkeypatch, capsys):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", **half}.items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    assert cli.run(["train", "esm2_moe_tiny", "--device", "cpu", "--out", "unused"]) == 2
    told = capsys.readouterr().err
    assert "MASTER_ADDR and MASTER_PORT" in told and "torchrun" in told and time.monotonic() - began < 60


def test_a_rank_that_cannot_meet_the_others_leaves_the_reason(tmp_path, monkeypatch):
    """It is no rank of a world yet, and says nothing itself: the launcher does."""

    def refused(*arguments, **options):
        raise launch.dist.DistNetworkError("no route to host")

    monkeypatch.setattr(launch.dist, "init_process_group", refused)
    file = tmp_path / "rank-1.json"
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500", launch.ERROR_FILE: str(file)}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(FaultError, match="no route to host"):
        launch.world_from_environment("cpu")
    assert launch._reason(tmp_path, 1) == (1, "rank 1 of 2 cannot meet the others at localhost:29500 (no route to host)", True)


def test_a_rank_whose_peers_never_come_is_ended_by_a_signal(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    waiting = subprocess.Popen(
        [sys.executable, "-c", "from bmoe.cli import main; main()", "train", "esm2_moe_tiny", "--device", "cpu", "--out", str(tmp_path)],
        env=os.environ | place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", int(port))) == 0:  # it holds the store and waits
                    break
            time.sleep(0.1)
        time.sleep(0.5)
        waiting.send_signal(signal.SIGTERM)
        assert waiting.wait(20) == -signal.SIGTERM
    finally:
        waiting.kill()


def test_ranks_meet_once_if_all_is_well(tmp_path):
    assert play("all is well", tmp_path, restarts=2) == (0, None, False)
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["3", "3"]
    assert (tmp_path / "starts-1").read_text() == "\n" and not (tmp_path / "logs" / "restart-1").exists()


def test_a_lost_peer_is_said_without_the_library_s_own_words():
    said = "[/build/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:11401: Connection reset by peer. This is typically caused by "
    said += "a remote worker hanging or bugs in the application. Check the logs of the remote worker before reporting an error. GLHF!"
    error = RuntimeError(said)
    assert launch.is_lost_peer(error)
    assert launch._network_fault(error) == "Read error [127.0.0.1]:11401: Connection reset by peer"
    assert launch._network_fault(RuntimeError("NCCL error: remote process exited")) == "NCCL error: remote process exited"


@pytest.mark.parametrize("written, pointed", [("", False), ("a library's last words\n", True)])
def test_a_killed_rank_s_output_is_named_if_there_is_any(tmp_path, written, pointed):
    class Failure(NamedTuple):
        exitcode: int
        timestamp: int

    (tmp_path / "rank-1.err").write_text(written)
    assert launch._explain({1: Failure(-signal.SIGTERM, 7)}, signal.SIGTERM, tmp_path, 2) == (
        75,
        "rank 1 was ended by SIGTERM before it began",
        True,
    )
    end = launch._explain({1: Failure(-signal.SIGKILL, 7)}, 0, tmp_path, 2)
    assert end.reason.startswith("rank 1 was killed by SIGKILL") and end.again
    assert (f"see {tmp_path}/rank-1.err" in end.reason) is pointed


def test_a_signal_reaches_all_ranks_and_asks_for_a_requeue(tmp_path):
    def send():
        wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send, daemon=True).start()
    assert play("signal", tmp_path) == (75, None, False)


def test_a_signal_that_came_before_the_ranks_is_for_them(tmp_path):
    assert launch.run(["signal", str(tmp_path)], 2, tmp_path / "logs", PROGRAM, caught=[signal.SIGUSR1]) == (75, None, False)


def test_a_signal_waits_for_a_rank_that_is_just_joining(tmp_path, monkeypatch):
    """Its file is there, and its process id is not in it yet."""
    (tmp_path / "0").touch()
    sent = []
    monkeypatch.setattr(launch, "_send", lambda pid, number: sent.append((pid, number)))

    def ranks():
        time.sleep(0.4)
        (tmp_path / "0").write_text("123")
        time.sleep(0.4)

    launch._wait_and_forward(threading.Thread(target=ranks), tmp_path, 1, [signal.SIGTERM])
    assert sent == [(123, signal.SIGTERM)]


def test_ranks_save_and_leave_when_the_launcher_is_killed(tmp_path):
    code = f"from pathlib import Path; from bmoe.parallel import launch; launch.run(['signal', {str(tmp_path)!r}], 2, "
    code += f"Path({str(tmp_path / 'logs')!r}), {PROGRAM!r})"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=environment)
    wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    launcher.kill()
    launcher.wait()
    wait_for(lambda: len(list(tmp_path.glob("left-*"))) == 2)


def wait_for(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    "environment, says",
    [
        ({}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", launch.PIDS: "/tmp/pids"}, False),
    ],
)
def test_one_process_of_all_says_which_recipe_it_takes(environment, says, monkeypatch, capsys):
    """The first of another launcher's ranks; of ours none, as the process that started them has said it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    load_recipe("esm2_moe_tiny", [])
    assert ("ships with bmoe" in capsys.readouterr().err) is says
