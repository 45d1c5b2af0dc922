"""Host memory for checkpoints: unlocked before the system gets it back, whoever lets go of it last."""

import gc

import pytest
import torch

from bmoe.training import host_memory


@pytest.fixture
def log(monkeypatch):
    """Addresses locked and unlocked, in order."""
    found = []
    monkeypatch.setattr(host_memory, "_lock", lambda address, size: found.append(("lock", address, size)) or True)
    monkeypatch.setattr(host_memory, "_unlock", lambda address: found.append(("unlock", address, mapped(address))))
    return found


def mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        return any(int(line.split("-")[0], 16) <= address < int(line.split("-")[1].split()[0], 16) for line in maps)


@pytest.mark.parametrize("shape, dtype", [((), torch.int64), ((3,), torch.bfloat16), ((1000, 700), torch.float32)])
def test_memory_is_unlocked_while_it_is_still_ours(log, shape, dtype):
    like = torch.empty(shape, dtype=dtype)
    memory = host_memory._locked(like)
    assert memory.shape == like.shape and memory.dtype == dtype and memory.is_contiguous()
    address, rows = memory.data_ptr(), memory.flatten()[:1]
    assert log == [("lock", address, like.numel() * like.element_size())]
    memory.fill_(3)
    del memory
    gc.collect()
    assert len(log) == 1 and rows.item() == 3, "a view is left"
    del rows
    gc.collect()
    assert log[1:] == [("unlock", address, True)]
    assert not mapped(address)


def test_where_the_system_refuses_nothing_is_unlocked(monkeypatch):
    monkeypatch.setattr(host_memory, "_lock", lambda *_: False)
    monkeypatch.setattr(host_memory, "_unlock", lambda _: pytest.fail("was never locked"))
    memory = host_memory._locked(torch.empty(100))
    memory.fill_(1)
    del memory
    gc.collect()


@pytest.mark.parametrize("tensor", [torch.ones(3, 4).T, torch.tensor(3), torch.empty(0, 5), torch.ones(8)[::2]])
def test_a_twin_is_a_tensor_of_its_own(tensor):
    twin = host_memory.host_twin(tensor).copy_(tensor)
    assert torch.equal(twin, tensor) and twin.is_contiguous() and (twin.data_ptr() != tensor.data_ptr() or not tensor.numel())
