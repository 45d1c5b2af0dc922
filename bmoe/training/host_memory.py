"""Host memory for copies of a GPU's tensors: page-locked, so that the GPU writes into it at full speed and in the background,
and in huge pages where the system has them, so that locking takes a five-hundredth of the page faults.

Memory is unlocked before it goes back to the system: CUDA refuses copies of anything that comes to lie on a page which it
still takes for locked. torch's own allocator of locked memory takes up to twice what is asked for, a power of two.
"""

import contextlib
import mmap
import sys

import torch
from torch import Tensor

from bmoe.training.optimizer import local


class _Pages(mmap.mmap):
    """Anonymous memory that tensors keep alive; unlocked before it is unmapped."""

    locked_at: int | None = None

    def __del__(self) -> None:
        if self.locked_at is not None and not sys.is_finalizing():  # the end of the process unlocks all
            _unlock(self.locked_at)


def host_twin(tensor: Tensor) -> Tensor:
    """A tensor like `tensor` in the host's memory, not filled; of a DTensor with this rank's part only. Locked for a GPU's."""
    twin = pageable_twin(tensor)
    if tensor.is_cuda:
        lock(twin)
    return twin


def pageable_twin(tensor: Tensor) -> Tensor:
    """The same in ordinary memory, which the system hands out when it is first written to."""
    with torch.no_grad():
        return torch.empty_like(tensor.detach(), device="cpu", memory_format=torch.contiguous_format)


@torch.no_grad()
def lock(twin: Tensor) -> None:
    """Give a twin locked memory; what was in it is lost. The current device of the calling thread must be the rank's."""
    part = local(twin)
    if part.numel():
        part.set_(_locked(part))


def _locked(like: Tensor) -> Tensor:
    """Locked memory of the shape and dtype of `like`, zero."""
    size = like.numel() * like.element_size()
    pages = _Pages(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=like.dtype, count=like.numel()).view(like.shape)
    memory.zero_()  # the system hands the pages out here, to several threads, and not one by one while CUDA is locked
    if _lock(memory.data_ptr(), size):
        pages.locked_at = memory.data_ptr()
    return memory


def _lock(address: int, size: int) -> bool:
    """Whether the system locked the pages. Where it refuses, copies are only slower."""
    if not int(torch.cuda.cudart().cudaHostRegister(address, size, 0)):
        return True
    with contextlib.suppress(RuntimeError):  # CUDA tells of the refusal once more, at the next launch
        torch.zeros(1, device="cuda")
    return False


def _unlock(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
