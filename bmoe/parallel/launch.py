"""Starting ranks and joining them: local processes by torch's elastic launcher, or an environment that is there already.

`run` starts one process a GPU (or `--procs` on the CPU) with the same command line. A process that finds a rank in its
environment (ours, torchrun's, a PyTorchJob's, srun's) is a rank and joins its peers in `world_from_environment`.

A rank that fails leaves one sentence in its error file, and the launcher shows the sentence of the rank that failed first:
ranks that merely lost a peer are not the reason. Rank 0 keeps the terminal; the others write to LOGS/rank-N.out and .err.
Signals to the launcher go on to all ranks, which checkpoint and leave with 75 or 130.

With restarts allowed, `run` starts all ranks again when one was killed, crashed, hung or lost its network. What would only
happen again is not tried again: a refused request, a step that is not finite, a full disk, an end by a signal. One process
can be started like this too: it is a world of its own, without peers, which tells the launcher how it ended.
"""

import ctypes
import json
import logging
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from bmoe.errors import FaultError, RequestError, RunError
from bmoe.parallel.world import World

PATIENCE = timedelta(minutes=30)  # of a collective; the watchdog speaks up long before
PIDS = "BMOE_RANK_PIDS"  # folder where ranks started by `run` leave their process ids
BEGAN = "BMOE_BEGAN"  # time.monotonic() of the command that started them
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # set by torch's launcher for each rank
PR_SET_PDEATHSIG = 1  # linux/prctl.h
LOST_PEER = "lost the connection to the other ranks"
STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Place(NamedTuple):
    """A rank among its peers, and its number on its machine."""

    rank: int
    size: int
    local_rank: int


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """Where this process stands, or None if it is no rank of several.

    torchrun, the elastic launcher and PyTorchJob set RANK and WORLD_SIZE; srun sets SLURM_PROCID and SLURM_STEP_NUM_TASKS
    (SLURM_NTASKS alone is also set where nothing was started by srun). Raises RequestError for a broken environment.
    """
    try:
        if "RANK" in environment and "WORLD_SIZE" in environment:
            found = Place(int(environment["RANK"]), int(environment["WORLD_SIZE"]), int(environment.get("LOCAL_RANK", 0)))
        elif "SLURM_PROCID" in environment and "SLURM_STEP_NUM_TASKS" in environment:
            names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
            found = Place(*(int(environment[name]) for name in names))
        else:
            return None
    except (ValueError, KeyError) as error:
        raise RequestError(f"the launcher's environment is broken ({error}); RANK, WORLD_SIZE and LOCAL_RANK should be numbers") from None
    if not 0 <= found.rank < found.size:
        raise RequestError(f"the launcher's environment is broken: rank {found.rank} of {found.size}; ranks count from 0")
    return found if found.size > 1 else None


def slurm_address(environment: Mapping[str, str]) -> tuple[str, int]:
    """(host, port) where the ranks of a Slurm step meet: its first node, and a port from the numbers of job and step.

    The node list is Slurm's notation, `gpu[03-05,9],login1`. Raises RequestError outside Slurm.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST")
    if not nodes:
        raise RequestError(
            "RANK and WORLD_SIZE name a rank of several, and MASTER_ADDR and MASTER_PORT do not say where they meet: start the ranks by "
            "torchrun, which sets them, or set them on every rank to the machine of rank 0 and a free port there"
        )
    first = re.match(r"([^\[,]+)(?:\[([^\],\-]+)[^\]]*\])?([^,\[]*)", nodes)
    host = "".join(part or "" for part in first.groups()) if first else nodes
    step = environment.get("SLURM_STEP_ID") or environment.get("SLURM_STEPID") or 0
    return host, 20_000 + (31 * int(environment.get("SLURM_JOB_ID", 0)) + int(step)) % 20_000  # 31: the next job's steps are far


def world_from_environment(device: str) -> World:
    """Join the other ranks, if the environment names any. `device`: "cpu" or "cuda". The world has no mesh yet.

    Raises RequestError if this rank has no GPU or knows no meeting place, FaultError if the others do not come.
    """
    found = place()
    if found is None:
        if is_launched():
            _report_to_launcher(0)
        return World(torch.device("cuda", 0) if device == "cuda" else torch.device("cpu"))
    here = torch.device("cpu")
    if device == "cuda":
        visible = torch.cuda.device_count()
        index = 0 if visible == 1 else found.local_rank  # Slurm may show each task its own GPU only
        if index >= visible:
            raise RequestError(f"rank {found.rank} wants GPU {index} of its machine, which shows {visible}; start fewer ranks there")
        here = torch.device("cuda", index)
        torch.cuda.set_device(here)
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        host, port = slurm_address(os.environ)
        os.environ.setdefault("MASTER_ADDR", host)
        os.environ.setdefault("MASTER_PORT", str(port))
    if is_launched():
        _report_to_launcher(found.rank)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    try:
        with endable():
            dist.init_process_group(
                backend, rank=found.rank, world_size=found.size, timeout=PATIENCE, device_id=here if device == "cuda" else None
            )
    except (dist.DistError, ValueError, OSError) as error:
        meeting = f"{os.environ['MASTER_ADDR']}:{os.environ.get('MASTER_PORT')}"
        sentence = f"rank {found.rank} of {found.size} cannot meet the others at {meeting} ({_first_line(error)})"
        leave_reason(sentence)
        raise FaultError(sentence) from error
    return World(here, found.rank, found.size)


def _report_to_launcher(rank: int) -> None:
    """Say where signals reach this rank, and have the kernel ask it to save and leave when the launcher is killed: nobody
    would stop it otherwise."""
    Path(os.environ[PIDS], str(rank)).write_text(str(os.getpid()))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def on_first(world: World, function: Callable[[], Any]) -> Any:
    """What `function` returns on rank 0, on every rank; a RequestError it raises is raised on every rank. Collective."""
    if world.size == 1:
        return function()
    box: list[Any] = [None, None]
    if world.rank == 0:
        try:
            box[0] = function()
        except RequestError as error:
            box[1] = str(error)
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        raise RequestError(box[1])
    return box[0]


@contextmanager
def rank_of(world: World) -> Iterator[None]:
    """The life of a rank: what ends it is left for the launcher, and a good end waits for all. Nothing for one process that
    no launcher started.

    A lost peer becomes a RunError of one sentence.
    """
    if world.size == 1 and not is_launched():
        yield
        return
    try:
        yield
        world.barrier()
    except (RequestError, RunError) as error:
        refused = isinstance(error, RequestError)
        leave_reason(str(error), 2 if refused else 1, again=_may_pass(error))
        if refused or world.device.type == "cpu":  # else gloo's threads abort at exit; NCCL's may wait for ranks that still run
            _part(world)
        raise
    except (dist.DistError, RuntimeError) as error:
        if not is_lost_peer(error):
            leave_reason(_told(error), again=_may_pass(error))
            raise
        sentence = f"rank {world.rank} {LOST_PEER} ({_network_fault(error)}); the one that ended first says why"
        leave_reason(sentence)
        raise RunError(sentence) from error
    except SystemExit:
        raise
    except BaseException as error:
        leave_reason(_told(error), again=_may_pass(error))
        raise
    _part(world)


def _part(world: World) -> None:
    if world.size > 1:
        dist.destroy_process_group()


def _may_pass(error: BaseException) -> bool:
    """Whether the same work may not meet an error again."""
    if isinstance(error, FaultError | ConnectionError):
        return True
    return not (isinstance(error, RequestError | RunError | OSError | KeyboardInterrupt) or _is_out_of_memory(error))


def _is_out_of_memory(error: BaseException) -> bool:
    """Of a GPU or of the machine; torch's allocator of the CPU raises a plain RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _told(error: BaseException) -> str:
    """What a rank says of an error that is not meant for users, in one sentence."""
    if _is_out_of_memory(error):
        return f"out of memory ({_first_line(error)}); lower data.tokens_per_batch, or make the model smaller"
    return f"{type(error).__name__}: {_first_line(error)}"


def is_lost_peer(error: BaseException) -> bool:
    """Whether another rank's end broke this one's collective."""
    text = str(error)
    return isinstance(error, dist.DistError) or "closed by peer" in text or "Connection reset" in text or "gloo" in text


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _network_fault(error: BaseException) -> str:
    """What a broken collective says, without gloo's place in its own source and its advice."""
    return re.sub(r"^\[\S+:\d+\] |\.? (This is typically|Check the logs).*", "", _first_line(error))


def leave_reason(sentence: str, code: int = 1, again: bool = True) -> None:
    """Leave the sentence that ends this rank for the launcher, in the form torch's launchers read; the first one stays.

    code: the exit code it stands for. The process itself may yet end by SIGABRT, when a library's threads outlive the others.
    again: whether a restart may help.
    """
    file = os.environ.get(ERROR_FILE)
    if file is None or Path(file).exists():
        return
    extra = {"py_callstack": "", "timestamp": str(int(time.time())), "again": again}
    facts = {"message": sentence, "errorCode": code, "extraInfo": extra}
    Path(file).write_text(json.dumps({"message": facts}))


def is_launched() -> bool:
    """Whether `run` started this process, so that the launcher tells the user why it ended."""
    return PIDS in os.environ


def began() -> float | None:
    """time.monotonic() of the command that started this rank, restarts or not; None if `run` did not start it."""
    return float(os.environ[BEGAN]) if BEGAN in os.environ else None


def signals_to(take: Callable[[int], None]) -> AbstractContextManager[None]:
    """Every signal that asks for a stop is given to `take`, a SIGINT too."""
    return _handled(lambda number, _: take(number))


def endable() -> AbstractContextManager[None]:
    """A wait for peers, who may never come: no handler would run before its end, so a signal ends this process. Not a rank of `run`,
    whose peers come or whose launcher ends it."""
    return nullcontext() if is_launched() else _handled(signal.SIG_DFL)


@contextmanager
def _handled(handler: Callable | signal.Handlers) -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        for number in STOPPING:
            signal.signal(number, handler)  # which may raise at once
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class End(NamedTuple):
    """How a start of all ranks ended: exit code, why if a rank failed, and whether another start may end better."""

    code: int
    reason: str | None
    again: bool = False


def run(
    arguments: list[str],
    procs: int,
    logs: Path,
    code: str = "from bmoe.cli import main; main()",
    restarts: int = 0,
    resume: tuple[str, ...] = (),
    note: Callable[[int, str], None] = lambda number, reason: None,
    caught: list[int] | None = None,
) -> End:
    """Start `procs` ranks of this program with `arguments` and wait.

    code: what a rank runs, with `arguments` as sys.argv[1:]. logs: folder for the ranks' output and error files; those of
    restart N go into restart-N there. restarts: how often all ranks may be started anew, with the further arguments `resume`;
    `note` is told of each (its number from 1, what ended the start before). caught: signals that have come already, for the
    ranks; grows.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # `_reason` says it in one sentence
    if procs > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // procs)))
    os.environ[BEGAN] = str(time.monotonic())
    for old in logs.glob("restart-*"):
        shutil.rmtree(old, ignore_errors=True)
    caught = [] if caught is None else caught
    try:
        with signals_to(caught.append):
            for number in range(restarts + 1):
                end = _start_once(
                    [*arguments, *(resume if number else ())], procs, logs / f"restart-{number}" if number else logs, code, caught
                )
                if not end.again or caught:
                    return end
                if number < restarts:
                    note(number + 1, end.reason)
        return end._replace(reason=end.reason + f"; given up after {restarts} restart{'s' * (restarts > 1)}") if restarts else end
    finally:
        del os.environ[BEGAN]


def _start_once(arguments: list[str], procs: int, logs: Path, code: str, caught: list[int]) -> End:
    """One start of all ranks, by torch's elastic launcher. caught: signals sent to this process, which grows meanwhile."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logs.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=procs,
        run_id=f"bmoe-{os.getpid()}",
        max_restarts=0,  # the launcher's own would also repeat what can only fail again
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        logs_specs=_rank_logs(logs),
    )
    outcome: list[ChildFailedError | BaseException] = []

    def launch() -> None:
        try:
            elastic_launch(config, sys.executable)("-c", code, *arguments)
        except BaseException as error:  # noqa: B036 - raised or explained by the main thread
            outcome.append(error)

    with tempfile.TemporaryDirectory(prefix="bmoe-ranks-") as pids:
        os.environ[PIDS] = pids
        try:
            _wait_and_forward(threading.Thread(target=launch, name="bmoe-launcher"), Path(pids), procs, caught)
        finally:
            del os.environ[PIDS]
    if not outcome:
        return End(0, None)
    if not isinstance(outcome[0], ChildFailedError):
        raise outcome[0]
    return _explain(outcome[0].failures, caught[-1] if caught else 0, logs, procs)


def _wait_and_forward(launcher: threading.Thread, pids: Path, procs: int, caught: list[int]) -> None:
    """Run `launcher` (in a thread, so that torch's own handlers stay out) and pass signals on to the ranks, once all of them
    have joined."""
    passed = 0
    launcher.start()
    while launcher.is_alive():
        launcher.join(0.1)
        if passed < len(caught):
            joined = [int(text) for file in pids.iterdir() if (text := file.read_text())]  # one that is being written is empty
            if len(joined) == procs:
                for pid in joined:
                    _send(pid, caught[passed])
                passed += 1


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return  # that rank has ended already


def _explain(failures: Mapping[int, Any], sent: int, logs: Path, procs: int) -> End:
    """What to say of the rank that failed first; ranks that lost a peer, or were stopped by the launcher, come last."""
    left = {rank: _reason(logs, rank) for rank in failures}

    def order(item: tuple[int, Any]) -> tuple:
        rank, failure = item
        reason, stopped = left[rank], failure.exitcode == -signal.SIGTERM
        return (reason is not None and LOST_PEER in reason.reason, stopped and reason is None, failure.timestamp, rank)

    rank, failure = min(failures.items(), key=order)
    code, reason = failure.exitcode, left[rank]
    if code in (75, 130):
        return End(130 if sent == signal.SIGINT else 75, None)
    if reason is not None:
        return reason
    who = f"rank {rank}" if procs > 1 else "the process"
    if sent and code == -sent:  # so early that it knew no signals yet
        return End(130 if sent == signal.SIGINT else 75, f"{who} was ended by {signal.Signals(sent).name} before it began", again=True)
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    errors = logs / f"rank-{rank}.err"  # rank 0 has written to the terminal
    more = f"; see {errors}" if errors.is_file() and errors.stat().st_size else ""
    return End(code if code > 0 else 1, f"{who} {how}{hint}{more}", again=code != 2)


def _reason(logs: Path, rank: int) -> End | None:
    """What a rank left."""
    file = logs / f"rank-{rank}.json"
    if not file.is_file():
        return None
    facts = json.loads(file.read_text())["message"]
    return End(facts["errorCode"], facts["message"], facts["extraInfo"]["again"])


def _rank_logs(logs: Path):
    """Where torch's launcher puts what ranks write: rank 0 to the terminal, the others to files; errors to rank-N.json."""
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.distributed.elastic.multiprocessing.api import LogsDest

    class RankLogs(LogsSpecs):
        def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
            for old in logs.glob("rank-*.json"):
                old.unlink()
            errors = {rank: str(logs / f"rank-{rank}.json") for rank in envs}
            for rank, environment in envs.items():
                environment[ERROR_FILE] = errors[rank]
            shown = {rank: f"rank-{rank}" for rank in envs if rank}
            return LogsDest(
                stdouts={0: "", **{rank: str(logs / f"{name}.out") for rank, name in shown.items()}},
                stderrs={0: "", **{rank: str(logs / f"{name}.err") for rank, name in shown.items()}},
                tee_stdouts={},
                tee_stderrs={},
                error_files=errors,
            )

        @property
        def root_log_dir(self) -> str:
            return str(logs)

    return RankLogs()
