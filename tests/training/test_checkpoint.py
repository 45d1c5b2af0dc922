"""Checkpoints on disk: whole or not there, kept by age and by validation, and clear words when the disk or a file is broken."""

import hashlib
import pickle
import resource
import shutil
from pathlib import Path

import pytest
import torch

from bmoe.errors import RequestError, RunError
from bmoe.parallel import launch
from bmoe.parallel.world import World
from bmoe.training import checkpoint, digests
from bmoe.training.checkpoint import Checkpoints


def tensors(value: float = 1.0) -> list[tuple[str, torch.Tensor]]:
    return [
        ("model.weight", torch.full((200, 30), value)),
        ("optimizer.m.weight", torch.full((200, 30), -value)),
        ("optimizer.skipped", torch.tensor(3)),
    ]


def save(run: Path, step: int, value: float = 1.0, background: bool = False, keep: int = 3, **meta) -> None:
    Checkpoints(run, keep, background).save(step, tensors(value), {"step": step, **meta})


def load(path: Path) -> dict[str, torch.Tensor]:
    state = {name: torch.zeros_like(t) for name, t in tensors()}
    checkpoint.load(path, state)
    return state


def newest(run: Path) -> Path | None:
    return checkpoint.newest_whole(run / "checkpoints")


@pytest.mark.parametrize("background", [True, False])
def test_what_is_saved_is_loaded(tmp_path, background):
    writer = Checkpoints(tmp_path, 2, background)
    state = tensors(1.0)
    writer.save(7, state, {"step": 7})
    state[0][1].fill_(9.0)  # training goes on while the files are written
    writer.wait()
    assert newest(tmp_path).name == (tmp_path / "checkpoints" / "latest").read_text().strip() == "step-0000000007"
    assert checkpoint.read_meta(newest(tmp_path)) == {"step": 7}
    for name, tensor in tensors(1.0):
        assert torch.equal(load(newest(tmp_path))[name], tensor)


def test_host_copies_are_used_again_and_hold_the_new_values(tmp_path):
    writer = Checkpoints(tmp_path, 2, True)
    writer.save(1, tensors(1.0), {})
    before = {name: t.data_ptr() for name, t in writer.host.items()}
    writer.save(2, tensors(2.0), {})
    writer.wait()
    assert {name: t.data_ptr() for name, t in writer.host.items()} == before
    assert load(newest(tmp_path))["model.weight"].unique().tolist() == [2.0]


def test_the_newest_and_the_best_are_kept(tmp_path):
    for step, loss in enumerate([2.0, 1.0, 3.0, None, float("nan"), 1.5, 1.6], start=1):
        save(tmp_path, step, keep=2, valid_loss=loss)
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == [checkpoint.folder_name(s) for s in (2, 6, 7)]
    assert checkpoint.best_whole(tmp_path / "checkpoints").name == checkpoint.folder_name(2)


def test_what_a_kill_leaves_is_not_taken_for_a_checkpoint(tmp_path):
    save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    (folder / "step-0000000002.partial").mkdir()
    (folder / "step-0000000002.partial" / "meta.json").write_text("{}")
    (folder / "latest.partial").write_text("step-0000000002")
    (folder / "step-0000000009").mkdir()  # was being removed
    assert newest(tmp_path).name == "step-0000000001"
    save(tmp_path, 3)
    assert newest(tmp_path).name == "step-0000000003"
    assert not list(folder.glob("*.partial"))


def test_a_users_copy_is_neither_taken_for_a_checkpoint_nor_deleted(tmp_path):
    save(tmp_path, 2)
    folder = tmp_path / "checkpoints"
    copies = [folder / name for name in ("step-2-before-lr-change", "step-99", "step-0000000002-copy", "step-mine.partial")]
    for copy in copies:
        shutil.copytree(newest(tmp_path), copy)
    assert newest(tmp_path).name == "step-0000000002"
    for step in (3, 4, 5):
        save(tmp_path, step, keep=1)
    assert {p.name for p in folder.glob("step-*")} == {"step-0000000005"} | {copy.name for copy in copies}
    assert (folder / "latest").read_text() == "step-0000000005\n"
    assert checkpoint.find(copies[0]) == copies[0] and load(copies[0])["model.weight"].unique().tolist() == [1.0]
    shutil.rmtree(newest(tmp_path))
    assert checkpoint.resume_point(tmp_path, World(torch.device("cpu"))) is None


def test_what_was_just_written_is_kept_beside_later_ones(tmp_path):
    """As when a user has put another run's checkpoint there."""
    for step in (7, 8, 3):
        save(tmp_path, step, keep=1)
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step-*")) == [checkpoint.folder_name(s) for s in (3, 8)]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-0000000003\n"


def test_killed_between_the_two_renames_the_newer_one_counts(tmp_path):
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "checkpoints" / "latest").write_text("step-0000000001\n")
    assert newest(tmp_path).name == "step-0000000002"


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_is_said_and_the_last_good_one_stays(tmp_path, background):
    save(tmp_path, 1)
    writer = Checkpoints(tmp_path, 3, background)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # no file may grow beyond: as a full disk, a failed write
    try:
        with pytest.raises(RunError, match="cannot write a checkpoint.*the last good checkpoint is .*step-0000000001"):
            writer.save(2, tensors(2.0), {})
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list((tmp_path / "checkpoints").glob("*.partial"))
    assert load(newest(tmp_path))["model.weight"].unique().tolist() == [1.0]


def test_a_full_disk_is_named_where_torch_hides_it(tmp_path, monkeypatch):
    """torch's writer reports a short write as a wrong position; the disk's own numbers say what it was."""

    def short(*arguments, **options):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    usage = shutil.disk_usage(tmp_path)
    for free, words in ((2_000_000, "the disk is full: a checkpoint takes 4 MB, and 2 MB are free"), (10**9, "unexpected pos 704")):
        monkeypatch.setattr(checkpoint.dcp, "save", short)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: usage._replace(free=free))
        with pytest.raises(RunError, match=words):
            Checkpoints(tmp_path, 1, False).save(1, [("model.w", torch.zeros(1_000_000))], {})


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_rank_that_dies_while_all_save_is_no_fault_of_the_disk(tmp_path, monkeypatch, wrapped):
    """The rank that is left names neither a checkpoint nor a disk, so that a restart goes on."""
    writer = Checkpoints(tmp_path, 3, True)
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:12459: Connection reset by peer")
    writer.error = checkpoint.dcp.api.CheckpointException("save", {1: (broken, [])}) if wrapped else broken
    monkeypatch.setattr(checkpoint.dist, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="Connection reset by peer") as caught:
        writer.wait()
    assert not isinstance(caught.value, RunError) and launch.is_lost_peer(caught.value)


def test_a_checkpoint_is_checked_before_it_counts(tmp_path, monkeypatch):
    save(tmp_path, 1)
    write = checkpoint.dcp.save

    def lose_bytes(state, storage_writer, **options):
        write(state, storage_writer=storage_writer, **options)
        largest = max((tmp_path / "checkpoints").glob("*.partial/*.distcp"), key=lambda p: p.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:-100])

    monkeypatch.setattr(checkpoint.dcp, "save", lose_bytes)
    with pytest.raises(RunError, match="bytes of"):
        save(tmp_path, 2)
    assert newest(tmp_path).name == "step-0000000001"


@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("where", ["_check_files", "digest"])
@pytest.mark.parametrize("error", [EOFError("Ran out of input"), pickle.UnpicklingError("invalid load key"), KeyError("storage_data")])
def test_no_error_of_a_save_is_lost(tmp_path, monkeypatch, background, where, error):
    """Of a broken .metadata unpickling says anything; the command line takes EOFError for the end of its input."""

    def broken(*arguments):
        raise error

    save(tmp_path, 1)
    monkeypatch.setattr(checkpoint, where, broken)
    writer = Checkpoints(tmp_path, 3, background)
    words = f"cannot write a checkpoint into .*{type(error).__name__}: .*last good checkpoint is .*01$"
    with pytest.raises(RunError, match=words) as caught:
        writer.save(2, tensors(2.0), {})
        writer.wait()
    assert "\n" not in str(caught.value)
    assert newest(tmp_path).name == "step-0000000001" and not list((tmp_path / "checkpoints").glob("*.partial"))


def test_damage_and_strangers_are_named(tmp_path):
    save(tmp_path, 1)
    good = newest(tmp_path)
    with pytest.raises(RequestError, match="has no model.other"):
        checkpoint.load(good, {"model.other": torch.zeros(1)})
    with pytest.raises(RequestError, match=r"shape \(200, 30\).*\(30, 200\)"):
        checkpoint.load(good, {"model.weight": torch.zeros(30, 200)})
    with pytest.raises(RequestError, match="not a checkpoint"):
        checkpoint.read_meta(tmp_path)
    largest = max(good.glob("*.distcp"), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    with pytest.raises(RequestError, match="is damaged .*distcp has .* bytes of"):
        load(good)
    (good / "digests.json").unlink()
    with pytest.raises(RequestError, match="digests.json is missing"):
        load(good)


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("pattern", ["*.distcp", ".metadata", "meta.json", "digests.json"])
def test_one_flipped_bit_anywhere_is_found(tmp_path, monkeypatch, pattern, place):
    monkeypatch.setattr(digests, "PART", 10_000)  # several parts a file
    save(tmp_path, 1)
    good = newest(tmp_path)
    load(good)
    flip(next(good.glob(pattern)), place)
    named = "" if pattern == "digests.json" else pattern.strip("*")  # a digest that changed accuses its file
    with pytest.raises(RequestError, match=rf"step-0000000001 is damaged \(.*{named}.*use another checkpoint"):
        load(good)


def flip(file: Path, place: float = 0.5, bit: int = 3) -> None:
    data = bytearray(file.read_bytes())
    data[int(place * (len(data) - 1))] ^= 1 << bit
    file.write_bytes(data)


def test_a_resume_sets_a_damaged_checkpoint_aside_and_takes_the_one_before(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    flip(next((tmp_path / "checkpoints" / "step-0000000003").glob("*.distcp")))
    (tmp_path / "checkpoints" / "step-0000000002" / ".metadata").unlink()
    world, told = World(torch.device("cpu")), []
    assert checkpoint.resume_point(tmp_path, world, told.append).name == "step-0000000001"
    assert "step-0000000003 is damaged (__0_0.distcp has other bytes than were written, between 0 and" in told[0]
    assert "step-0000000002 is damaged (.metadata cannot be read" in told[1] and len(told) == 2
    aside = sorted(p.name for p in (tmp_path / "checkpoints").glob("*.damaged"))
    assert aside == ["step-0000000002.damaged", "step-0000000003.damaged"]
    assert newest(tmp_path).name == "step-0000000001" == (tmp_path / "checkpoints" / "latest").read_text().strip()
    save(tmp_path, 2, keep=1)  # what was set aside counts for nothing
    assert checkpoint.resume_point(tmp_path, world).name == "step-0000000002"
    flip(newest(tmp_path) / "meta.json")
    for _ in range(2):  # a second attempt does not begin a new run over the old one
        with pytest.raises(RequestError, match=r"no checkpoint of .* can be used: step-.*2.damaged, .* are damaged; put a good copy"):
            checkpoint.resume_point(tmp_path, world)
    assert not (tmp_path / "checkpoints" / "latest").exists()
    for folder in (tmp_path / "checkpoints").glob("step-*"):
        folder.rename(tmp_path / folder.name)
    assert checkpoint.resume_point(tmp_path, world) is None


def test_a_checkpoint_that_lost_its_meta_is_not_taken_for_none(tmp_path):
    save(tmp_path, 1)
    (newest(tmp_path) / "meta.json").unlink()
    with pytest.raises(RequestError, match=r"step-0000000001 in .* is damaged"):
        checkpoint.resume_point(tmp_path, World(torch.device("cpu")))


def test_a_damaged_meta_does_not_stop_a_save(tmp_path):
    save(tmp_path, 1, valid_loss=1.0)
    (newest(tmp_path) / "meta.json").write_text("{")
    save(tmp_path, 2, keep=2, valid_loss=2.0)
    assert checkpoint.best_whole(tmp_path / "checkpoints").name == "step-0000000002"


def test_files_are_hashed_in_parts_as_a_whole_would_be(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "PART", 1000)
    data = bytes(range(256)) * 17
    (tmp_path / "file").write_bytes(data)
    found = digests.digest(tmp_path / "file")
    assert found == {"bytes": 4352, "sha256": [hashlib.sha256(data[begin : begin + 1000]).hexdigest() for begin in range(0, 4352, 1000)]}


def test_paths_of_runs_and_checkpoints_are_understood(tmp_path):
    with pytest.raises(RequestError, match="does not exist"):
        checkpoint.find(tmp_path / "nowhere")
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(RequestError, match="no whole checkpoint yet"):
        checkpoint.find(tmp_path)
    save(tmp_path, 1)
    assert checkpoint.find(tmp_path) == checkpoint.find(newest(tmp_path)) == newest(tmp_path)


def test_an_exported_folder_is_named_as_what_it_is(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(RequestError, match=r"is a Hugging Face folder; .*model\.init_from"):
        checkpoint.find(tmp_path)
