"""Page-locked copies of a GPU's tensors: right, fast at their first use, and gone without a trace."""

import gc
import time

import pytest
import torch

from bmoe.training import checkpoint, host_memory

pytestmark = pytest.mark.gpu


def seconds(action) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def test_memory_that_was_locked_is_ordinary_memory_again():
    """Copies to the GPU from what is allocated where locked copies were. Left locked, they end with `invalid argument`."""
    on_gpu = [torch.full((n, 1 << 18), float(n), device="cuda") for n in range(1, 65)]
    for _ in range(2):
        twins = [host_memory.host_twin(x).copy_(x, non_blocking=True) for x in on_gpu]
        torch.cuda.synchronize()
        assert all(twin.is_pinned() and torch.equal(twin[-1], torch.full((1 << 18,), float(n))) for n, twin in enumerate(twins, start=1))
        del twins
        gc.collect()
        for n in range(1, 65):
            fresh = torch.full((65 - n, 1 << 18), 0.5)
            assert float(fresh.cuda().sum()) == fresh.numel() / 2


def test_a_refusal_to_lock_is_no_error_of_what_comes_next():
    memory = host_memory.host_twin(torch.zeros(1 << 20, device="cuda"))
    assert not host_memory._lock(memory.data_ptr(), 1 << 22), "it is locked already"
    assert float(torch.ones(10, device="cuda").sum()) == 10


def test_the_first_copy_is_not_much_slower_than_the_next(capsys):
    x = torch.ones(4, 1 << 27, device="cuda")  # 2 GiB
    kept: list[torch.Tensor] = []
    pageable = seconds(lambda: kept.append(x.cpu()))
    first = seconds(lambda: kept.append(host_memory.host_twin(x).copy_(x, non_blocking=True)))
    again = seconds(lambda: kept[1].copy_(x, non_blocking=True))
    with capsys.disabled():
        print(f"\n2 GiB to the host: pageable {pageable:.3f} s, first locked {first:.3f} s, again {again:.3f} s")
    assert first < 1.5 * pageable


def test_memory_of_the_first_save_is_locked_while_the_run_starts(tmp_path):
    state = {f"model.{n}": torch.full((1 << 22,), float(n), device="cuda") for n in range(8)} | {"model.steps": torch.ones(3)}
    with checkpoint.Checkpoints(tmp_path, 1, background=True) as writer:
        writer.get_ready(state.items())
        torch.zeros(1 << 20, device="cuda").sum()  # work goes on
        writer.save(1, state.items(), {"step": 1})
        places = {name: twin.data_ptr() for name, twin in writer.host.items()}
        assert all(writer.host[name].is_pinned() == tensor.is_cuda for name, tensor in state.items())
        writer.save(2, state.items(), {"step": 2})
        assert places == {name: twin.data_ptr() for name, twin in writer.host.items()}
    found = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    checkpoint.load(checkpoint.newest_whole(tmp_path / "checkpoints"), found)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


def test_a_run_that_ends_at_once_waits_for_its_memory(tmp_path):
    with pytest.raises(KeyError), checkpoint.Checkpoints(tmp_path, 1, background=True) as writer:
        writer.get_ready([("model.w", torch.ones(1 << 28, device="cuda"))])
        raise KeyError
    assert writer.locking is None and writer.host["model.w"].is_pinned()
