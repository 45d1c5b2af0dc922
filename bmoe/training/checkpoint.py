"""Checkpoints: torch.distributed.checkpoint folders that appear whole or not at all.

    RUN/checkpoints/step-0000001000/   tensors under canonical names, digests.json of all files, and meta.json
    RUN/checkpoints/latest             name of the newest folder, written after it is whole

A checkpoint is written as `step-….partial`, each rank its own parts, checked, and renamed when all is on disk. So a folder
without that ending is whole, whatever killed the run, and `latest` never names half a checkpoint. Tensors are copied to the
host first, one after the other; with `async` the files are then written and hashed by a thread while training goes on.

Before a checkpoint is read, its files are compared with their digests. A resume sets a damaged one aside (`step-….damaged`)
and takes the one before. Where none is left it refuses, and goes on refusing until the user has moved what was set aside.

The newest `keep` checkpoints stay, and the one with the lowest valid_loss. What else lies there, such as a user's copy under a name
of its own, is neither taken for a checkpoint nor deleted.

Names: model.NAME (fp32 masters, buffers), optimizer.m.NAME, optimizer.v.NAME. Experts are [experts, out, in] whatever the
implementation and layout, so any layout loads what any other has saved.
"""

import contextlib
import json
import math
import os
import pickle
import re
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from bmoe.errors import RequestError, RunError
from bmoe.parallel.launch import is_lost_peer, on_first
from bmoe.parallel.world import World
from bmoe.training.digests import DIGESTS, damage, digest, digest_text, dump
from bmoe.training.host_memory import host_twin, lock, pageable_twin
from bmoe.training.optimizer import local

PARTIAL, DAMAGED = ".partial", ".damaged"
META, LATEST = "meta.json", "latest"
NAME = re.compile(r"step-\d{10}")  # `folder_name`

warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # torch says so at every save of one process


def folder_name(step: int) -> str:
    return f"step-{step:010d}"


def read_meta(checkpoint: Path) -> dict:
    """meta.json of a checkpoint folder. Raises RequestError if it is not a whole checkpoint."""
    try:
        meta = json.loads((checkpoint / META).read_text())
    except (OSError, ValueError):
        raise RequestError(f"{checkpoint} is not a checkpoint ({META} is missing or broken); name a folder checkpoints/step-…") from None
    return meta


def find(path: Path) -> Path:
    """The checkpoint that a run folder or a checkpoint folder means. Raises RequestError if there is none."""
    if (path / META).is_file():
        return path
    if (path / "checkpoints").is_dir():
        newest = newest_whole(path / "checkpoints")
        if newest is not None:
            return newest
        raise RequestError(f"{path} has no whole checkpoint yet; train it further with --resume")
    if (path / "config.json").is_file():
        raise RequestError(
            f"{path} is a Hugging Face folder; evaluate the run that it was exported from, or train from it with model.init_from: {path}"
        )
    state = "is neither a run nor a checkpoint" if path.exists() else "does not exist"
    raise RequestError(f"{path} {state}; name a run folder (runs/NAME) or one of its checkpoints")


def newest_whole(directory: Path) -> Path | None:
    """The newest whole checkpoint, or None. `latest` can only be missing or older, if the run was killed between two renames."""
    whole = _whole(directory)
    return whole[-1] if whole else None


def best_whole(directory: Path) -> Path | None:
    """The checkpoint with the lowest valid_loss, or None if none was validated."""
    losses = {path: _valid_loss(path) for path in _whole(directory)}
    known = {path: loss for path, loss in losses.items() if loss is not None and math.isfinite(loss)}
    return min(known, key=known.__getitem__) if known else None


def _valid_loss(checkpoint: Path) -> float | None:
    try:
        return read_meta(checkpoint).get("valid_loss")
    except RequestError:  # damaged, so not the best
        return None


def _whole(directory: Path) -> list[Path]:
    """Oldest first: names of ten digits sort as numbers."""
    return sorted(p for p in directory.glob("step-*") if NAME.fullmatch(p.name) and (p / META).is_file())


def resume_point(run: Path, world: World, note: Callable[[str], None] = lambda text: None) -> Path | None:
    """The newest undamaged checkpoint of a run, the same on every rank; None if it never had one. Collective.

    Damaged ones that are newer are renamed, and `note` is told of each. Raises RequestError if all are damaged.
    """
    directory = run / "checkpoints"
    for path in on_first(world, lambda: _whole(directory)[::-1]):
        fault = damage(path)
        if fault is None:
            return path
        aside = on_first(world, lambda path=path: _set_aside(path))
        note(f"{path} is damaged ({fault}); it is set aside as {aside.name}")
    left = on_first(world, lambda: sorted(p.name for p in directory.glob("step-*") if NAME.fullmatch(p.name.removesuffix(DAMAGED))))
    if left:
        raise RequestError(
            f"no checkpoint of {run} can be used: {', '.join(left)} in {directory} {'is' if len(left) == 1 else 'are'} damaged; "
            "put a good copy there, or move what is damaged away and --resume starts again from step 0"
        )
    return None


def _set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, and have `latest` name the newest of the others, if there is one."""
    aside = checkpoint.with_name(checkpoint.name + DAMAGED)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        checkpoint.rename(aside)
        _name_latest(checkpoint.parent)
        return aside
    except OSError as error:
        raise RequestError(f"{checkpoint} is damaged and cannot be renamed ({error.strerror}); move it away") from None


def load(checkpoint: Path, state: dict[str, Tensor], checked: bool = False) -> None:
    """Fill the tensors of `state` in place. Collective, if there are ranks.

    checked: its files have just been compared with their digests (`resume_point`). Raises RequestError naming what is missing,
    misshapen or damaged.
    """
    fault = None if checked else damage(checkpoint)
    if fault is not None:
        raise RequestError(f"{checkpoint} is damaged ({fault}); use another checkpoint of the run")
    reader = FileSystemReader(checkpoint)
    try:
        known = reader.read_metadata().state_dict_metadata
    except (OSError, EOFError, ValueError, RuntimeError, LookupError, AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise RequestError(f"{checkpoint} cannot be read ({type(error).__name__}); use another checkpoint of the run") from None
    for name, tensor in state.items():
        if name not in known:
            raise RequestError(f"{checkpoint} has no {name}; it is of another model than the recipe's")
        if tuple(known[name].size) != tuple(tensor.shape):
            raise RequestError(
                f"{checkpoint} has {name} of shape {tuple(known[name].size)}, and the recipe's model needs {tuple(tensor.shape)}"
            )
    extra = [n for n in known if n.startswith("model.") and n not in state and any(k.startswith("model.") for k in state)]
    if extra:
        raise RequestError(f"{checkpoint} has {extra[0]}, which the recipe's model lacks; it is of another model")
    try:
        dcp.load(state, storage_reader=reader, no_dist=not dist.is_initialized())
    except (OSError, EOFError, RuntimeError, dcp.api.CheckpointException) as error:
        _raise_lost_peer(error)
        raise RequestError(f"{checkpoint} is damaged ({_cause(error)}); use another checkpoint of the run") from None


class Checkpoints:
    """Writes the checkpoints of a run.

    Args:
        run: the run's folder. keep: newest checkpoints kept. background: write in a thread. rank: only rank 0 renames.
    """

    def __init__(self, run: Path, keep: int, background: bool, rank: int = 0):
        self.directory, self.keep, self.background, self.rank = run / "checkpoints", keep, background, rank
        self.thread: threading.Thread | None = None
        self.locking: threading.Thread | None = None
        self.error: BaseException | None = None
        self.bytes = 0  # of the whole checkpoint being written, all ranks together
        self.host: dict[str, Tensor] = {}
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None  # of the thread alone

    def get_ready(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Lock the host memory that the saves will need in a thread, while the run starts: at the first save training would stand
        still for it. `tensors`: as `save` gets them. Only for a GPU's tensors that are written in the background."""
        if not self.background or not torch.cuda.is_initialized():
            return
        for name, tensor in tensors:
            if tensor.is_cuda:
                self.host[name] = pageable_twin(tensor)
        self.locking = threading.Thread(target=self._lock_host, args=(torch.cuda.current_device(),), name="bmoe-host-memory", daemon=True)
        self.locking.start()

    def _lock_host(self, device: int) -> None:
        torch.cuda.set_device(device)  # a thread begins with the first
        with contextlib.suppress(OSError, RuntimeError):  # what is not locked is copied all the same, only slower
            for twin in self.host.values():
                lock(twin)

    def save(self, step: int, tensors: Iterable[tuple[str, Tensor]], meta: dict) -> None:
        """Save named tensors as the checkpoint of `step`; returns when they are copied (background) or on disk.

        meta: goes into meta.json; `valid_loss`, if it is there, decides which checkpoint is best. Collective. Raises RunError
        if this or the previous checkpoint could not be written.
        """
        self.wait()
        staged = {name: self._stage(name, tensor) for name, tensor in tensors}
        self.bytes = sum(t.numel() * t.element_size() for t in staged.values())  # a DTensor's numel is that of the whole
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        if self.background:
            self.thread = threading.Thread(target=self._guarded, args=(step, staged, meta), name="bmoe-checkpoint", daemon=True)
            self.thread.start()
        else:
            self._guarded(step, staged, meta)
            self.wait()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the write in progress become whole, also when training ends by an error (which is then the one to tell)."""
        if kind is None:
            self.wait()
            return
        self._join_locking()
        if self.thread is not None:
            self.thread.join()

    def _join_locking(self) -> None:
        if self.locking is not None:
            self.locking.join()
            self.locking = None

    def wait(self) -> None:
        """Wait for what the threads do. Raises RunError if a write failed, but RuntimeError if another rank has ended meanwhile."""
        self._join_locking()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            _raise_lost_peer(error)
            good = newest_whole(self.directory)
            kept = f"the last good checkpoint is {good}" if good else "there is no earlier checkpoint"
            raise RunError(f"cannot write a checkpoint into {self.directory} ({self._why(error)}); {kept}") from error

    def _why(self, error: BaseException) -> str:
        """The cause in one line. torch's writer hides the system's error when a disk is full (2.13: "unexpected pos 704 vs 598")."""
        with contextlib.suppress(OSError):
            free = shutil.disk_usage(self.directory).free
            if free < self.bytes:  # so it is before and after what was written has been removed
                return f"the disk is full: a checkpoint takes {self.bytes / 1e6:,.0f} MB, and {free / 1e6:,.0f} MB are free"
        return _cause(error)

    def _stage(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of this rank's part in host memory, which the next save uses again."""
        if name not in self.host:
            self.host[name] = host_twin(tensor)
        local(self.host[name]).copy_(local(tensor.detach()), non_blocking=True)
        return self.host[name]

    def _guarded(self, step: int, state: dict[str, Tensor], meta: dict) -> None:
        try:
            self._write(step, state, meta)
        except (Exception, dcp.api.CheckpointException) as error:  # the second is no Exception; of a thread nobody else would hear it
            self.error = error
            if self.rank == 0:
                shutil.rmtree(self.directory / (folder_name(step) + PARTIAL), ignore_errors=True)

    def _write(self, step: int, state: dict[str, Tensor], meta: dict) -> None:
        partial = self.directory / (folder_name(step) + PARTIAL)
        self._on_rank_0(lambda: self._begin(partial))
        writer = FileSystemWriter(partial, sync_files=True, thread_count=1)  # torch 2.11-2.13 lose the errors of further threads
        dcp.save(state, storage_writer=writer, process_group=self.group, no_dist=self.group is None)
        digests = self._digests(partial)
        self._on_rank_0(lambda: self._finish(partial, self.directory / folder_name(step), digests, meta))

    def _digests(self, partial: Path) -> dict[str, dict]:
        """Of every file: each rank hashes what it has written. Any error is an OSError on every rank."""
        found: list[dict | str] = [{}]
        try:
            names = [*partial.glob(f"__{self.rank}_*"), *(partial.glob(".metadata") if self.rank == 0 else ())]
            found = [{path.name: digest(path) for path in names}]
        except Exception as error:  # the other ranks wait for this one's word
            found = [_cause(error)]
        if self.group is not None:
            mine, found = found[0], [None] * self.group.size()
            dist.all_gather_object(found, mine, group=self.group)
        if fault := next((f for f in found if isinstance(f, str)), None):
            raise OSError(fault)
        return {name: facts for part in found for name, facts in part.items()}

    def _on_rank_0(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0 while the others wait. Any error of it is an OSError on every rank."""
        fault: list[str | None] = [None]
        if self.rank == 0:
            try:
                action()
            except Exception as error:  # the other ranks wait for this one's word
                fault[0] = _cause(error)
        if self.group is not None:
            dist.broadcast_object_list(fault, src=0, group=self.group)
        if fault[0] is not None:
            raise OSError(fault[0])

    def _begin(self, partial: Path) -> None:
        for left in self.directory.glob("step-*" + PARTIAL):  # by a run that was killed
            if NAME.fullmatch(left.name.removesuffix(PARTIAL)):
                shutil.rmtree(left)
        (self.directory / (LATEST + PARTIAL)).unlink(missing_ok=True)
        partial.mkdir(parents=True)

    def _finish(self, partial: Path, final: Path, digests: dict[str, dict], meta: dict) -> None:
        _check_files(partial, digests)
        text = json.dumps(meta, indent=1)
        _write_synced(partial / DIGESTS, dump(digests | {META: digest_text(text)}))
        _write_synced(partial / META, text)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync_directory(self.directory)
        _name_latest(self.directory, final)
        whole = _whole(self.directory)
        for old in set(whole[: -self.keep]) - {best_whole(self.directory), final}:
            (old / META).unlink()  # first, so that a kill in the middle leaves no folder that looks whole
            shutil.rmtree(old)


def _name_latest(directory: Path, checkpoint: Path | None = None) -> None:
    """Have `latest` name a checkpoint, by default the newest one; remove it if there is none."""
    checkpoint = checkpoint or newest_whole(directory)
    partial = directory / (LATEST + PARTIAL)
    if checkpoint is None:
        (directory / LATEST).unlink(missing_ok=True)
    else:
        _write_synced(partial, checkpoint.name + "\n")
        partial.replace(directory / LATEST)
    _sync_directory(directory)


def _check_files(folder: Path, digests: dict[str, dict]) -> None:
    """Whether every part of every tensor is on disk in full length, in a file that was hashed. Raises OSError."""
    facts = FileSystemReader(folder).read_metadata()
    stored = {(index.fqn, index.offset) for index in facts.storage_data}
    for name, tensor in facts.state_dict_metadata.items():
        for chunk in tensor.chunks:
            if (name, chunk.offsets) not in stored:
                raise OSError(f"a part of {name} was not written")
    for info in facts.storage_data.values():
        if info.relative_path not in digests:
            raise OSError(f"{folder / info.relative_path} was not hashed")
        size = (folder / info.relative_path).stat().st_size
        if size < info.offset + info.length:
            raise OSError(f"{folder / info.relative_path} has {size} bytes of {info.offset + info.length}")


def _cause(error: BaseException) -> str:
    """One line for an error; of a failure on several ranks, the first rank's."""
    if isinstance(error, dcp.api.CheckpointException) and error.failures:
        rank, (inner, _) = min(error.failures.items())
        return f"rank {rank}: {_cause(inner)}"
    text = (str(error).strip().splitlines() or [""])[0]
    if isinstance(error, OSError | RuntimeError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _raise_lost_peer(error: BaseException) -> None:
    """Raise RuntimeError if reading or writing ended because another rank has: no fault of the files, and a restart helps."""
    if dist.is_initialized() and is_lost_peer(lost := RuntimeError(_cause(error))):
        raise lost from error


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def torch_facts(device: torch.device) -> dict:
    """What a bitwise repetition needs to be the same."""
    return {"torch": torch.__version__, "device": device.type, "threads": torch.get_num_threads()}
