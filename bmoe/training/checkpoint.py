"""Checkpoints: torch.distributed.checkpoint folders that appear whole or not at all.

    RUN/checkpoints/step-0000001000/   tensors under canonical names, and meta.json
    RUN/checkpoints/latest             name of the newest folder, written after it is whole

A checkpoint is written as `step-….partial` and renamed when all is on disk. So a folder without that ending is whole, whatever
killed the run, and `latest` never names half a checkpoint. Tensors are staged on the CPU first; with `async` the files are
then written by a thread while training goes on.

Names: model.NAME (fp32 masters, buffers), optimizer.m.NAME, optimizer.v.NAME. Experts are [experts, out, in] whatever the
implementation and layout.
"""

import json
import os
import shutil
import threading
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from bmoe.errors import RequestError, RunError

PARTIAL = ".partial"
META = "meta.json"


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
    state = "is neither a run nor a checkpoint" if path.exists() else "does not exist"
    raise RequestError(f"{path} {state}; name a run folder (runs/NAME) or one of its checkpoints")


def newest_whole(directory: Path) -> Path | None:
    """The checkpoint that `latest` names, or the newest whole folder if `latest` is missing or names none."""
    whole = sorted(p for p in directory.glob("step-*") if not p.name.endswith(PARTIAL) and (p / META).is_file())
    latest = directory / "latest"
    if latest.is_file() and (directory / latest.read_text().strip()) in whole[-1:]:
        return directory / latest.read_text().strip()
    return whole[-1] if whole else None


def load(checkpoint: Path, state: dict[str, Tensor]) -> None:
    """Fill the tensors of `state` in place. Raises RequestError naming what is missing, misshapen or unreadable."""
    reader = FileSystemReader(checkpoint)
    try:
        known = reader.read_metadata().state_dict_metadata
    except (OSError, EOFError, ValueError, RuntimeError) as error:
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
        raise RequestError(f"{checkpoint} is damaged ({str(error).splitlines()[0]}); use another checkpoint of the run") from None


class Checkpoints:
    """Writes the checkpoints of a run.

    Args:
        run: the run's folder. keep: newest checkpoints kept. background: write in a thread. rank: only rank 0 renames.
    """

    def __init__(self, run: Path, keep: int, background: bool, rank: int = 0):
        self.directory, self.keep, self.background, self.rank = run / "checkpoints", keep, background, rank
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def save(self, step: int, state: dict[str, Tensor], meta: dict) -> None:
        """Save `state` as the checkpoint of `step`; returns when it is staged (background) or on disk."""
        self.wait()
        staged = {name: _to_cpu(tensor) for name, tensor in state.items()}
        if self.background:
            self.thread = threading.Thread(target=self._guarded, args=(step, staged, meta), name="bmoe-checkpoint")
            self.thread.start()
        else:
            self._guarded(step, staged, meta)
            self.wait()

    def wait(self) -> None:
        """Wait for the write in progress. Raises RunError if it failed."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            error, self.error = self.error, None
            good = newest_whole(self.directory)
            kept = f"the last good checkpoint is {good}" if good else "there is no earlier checkpoint"
            raise RunError(f"cannot write a checkpoint into {self.directory} ({error}); {kept}") from error

    def _guarded(self, step: int, state: dict[str, Tensor], meta: dict) -> None:
        try:
            self._write(step, state, meta)
        except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
            self.error = error
            if self.rank == 0:
                shutil.rmtree(self.directory / (folder_name(step) + PARTIAL), ignore_errors=True)

    def _write(self, step: int, state: dict[str, Tensor], meta: dict) -> None:
        final = self.directory / folder_name(step)
        partial = self.directory / (folder_name(step) + PARTIAL)
        if self.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        dcp.save(state, storage_writer=FileSystemWriter(partial, sync_files=True), process_group=self.group, no_dist=self.group is None)
        if self.rank != 0:
            return
        _write_synced(partial / META, json.dumps(meta, indent=1))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        _sync_directory(self.directory)
        _write_synced(self.directory / "latest.partial", final.name + "\n")
        (self.directory / "latest.partial").replace(self.directory / "latest")
        _sync_directory(self.directory)
        whole = sorted(p for p in self.directory.glob("step-*") if not p.name.endswith(PARTIAL))
        for old in whole[: -self.keep]:
            shutil.rmtree(old)


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


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
