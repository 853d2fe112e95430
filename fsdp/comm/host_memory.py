"""Host memory in large pieces: what an accelerator copies to and from without blocking, or every step needs anew.

What an allocator of page-locked memory hands out is rounded up to a power of two, and kept for ever. Shards, their
gradients and copies for a save are large and few: each gets pages of its own, which are locked while something holds
them, and then given back.

To touch memory for the first time costs a page fault, which takes a microsecond for 4 KiB, as long as a copy of 8 KiB
does. So does what every step needs anew, and a full state. In pages of 2 MiB it costs a seventh of that.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack


class _Pages(mmap.mmap):
    """Pages that are unlocked before they are given back."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def locked_pages(nbytes: int, lock: Callable[[int, int], None], unlock: Callable[[int], object]) -> torch.Tensor:
    """``nbytes`` bytes (uint8), locked by ``lock(address, nbytes)``, until nothing holds them any more."""
    pages = _Pages(-1, max(nbytes, 1))
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    address = memory.data_ptr()
    lock(address, memory.numel())
    pages.unlock = lambda: unlock(address)
    return memory[:nbytes]


_HUGE_PAGE = 1 << 21
_MAY_BE_HUGE = hasattr(mmap, "MADV_HUGEPAGE")


def empty(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A 1-D tensor of undefined values; what is large has huge pages, where the system lets those who ask have them."""
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < 2 * _HUGE_PAGE or not _MAY_BE_HUGE:
        return torch.empty(numel, dtype=dtype, device=device)
    # More addresses than bytes, to begin where a huge page does; what is not written takes no memory.
    pages = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    skipped = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    with contextlib.suppress(OSError):  # a system that was built without them
        pages.madvise(mmap.MADV_HUGEPAGE, skipped, nbytes // _HUGE_PAGE * _HUGE_PAGE)
    return torch.frombuffer(pages, dtype=dtype, count=numel, offset=skipped)


def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """As :func:`empty`, of any shape."""
    numel = 1 + sum((n - 1) * step for n, step in zip(size, stride)) if all(size) else 0
    return empty(numel, dtype=dtype, device=device).as_strided(size, stride)


class HostBuffers:
    """Pieces of host memory of one size, each used again once nobody holds what was in it last."""

    def __init__(self) -> None:
        self._lent: list[tuple[torch.Tensor, StorageWeakRef]] = []  # the memory, and who has it

    def take(self, nbytes: int, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """``nbytes`` bytes (uint8) that nobody else holds; ``make`` makes those of which there are none left."""
        self._lent = [(memory, by) for memory, by in self._lent if memory.numel() == nbytes]
        position = next((i for i, (_, by) in enumerate(self._lent) if by.expired()), None)
        memory = make(nbytes) if position is None else self._lent.pop(position)[0]
        lent = from_dlpack(to_dlpack(memory))  # a storage of its own, whose end tells that all views are gone
        self._lent.append((memory, StorageWeakRef(lent.untyped_storage())))
        return lent


def place(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with the shape and dtype of ``like`` in the first bytes of ``memory``."""
    return memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)
