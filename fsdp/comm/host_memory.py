"""Host memory in large pieces, which each step uses again.

The first touch of a page costs a page fault: a microsecond for 4 KiB, as long as a copy of 8 KiB. Pages of 2 MiB cost a
seventh of that, and the pages of the previous step cost nothing (:func:`recycled`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack

from fsdp.comm.threads import WhenIdle

_HUGE_PAGE = 1 << 21
_MAY_BE_HUGE = hasattr(mmap, "MADV_HUGEPAGE")


def empty(numel: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a 1-D tensor of undefined values; a large one has huge pages if the system offers them."""
    nbytes = numel * dtype.itemsize
    if device.type != "cpu" or nbytes < 2 * _HUGE_PAGE or not _MAY_BE_HUGE:
        return torch.empty(numel, dtype=dtype, device=device)
    pages = _Mapped(nbytes)
    return torch.frombuffer(pages.memory, dtype=dtype, count=numel)


class _Mapped:
    """An anonymous mapping, ``memory``, of so many bytes."""

    def __init__(self, nbytes: int) -> None:
        # More addresses than bytes, to begin at a huge page; pages that are not written take no memory.
        huge = nbytes // _HUGE_PAGE * _HUGE_PAGE if nbytes >= 2 * _HUGE_PAGE and _MAY_BE_HUGE else 0
        spare = _HUGE_PAGE if huge else 0
        self._map = mmap.mmap(-1, nbytes + spare, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._start = -torch.frombuffer(self._map, dtype=torch.uint8).data_ptr() % _HUGE_PAGE if huge else 0
        self._nbytes = nbytes
        if huge:
            with contextlib.suppress(OSError):  # a system that was built without them
                self._map.madvise(mmap.MADV_HUGEPAGE, self._start, huge)

    @property
    def memory(self) -> memoryview:
        return memoryview(self._map)[self._start : self._start + self._nbytes]

    def offer(self) -> None:
        """Let the system take the pages when memory is short; pages that are written again stay.

        Raises:
            OSError: the process has locked its memory.
        """
        self._map.madvise(mmap.MADV_FREE, self._start, -(-self._nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)


_RECYCLED = 1 << 20  # bytes; smaller tensors use the allocator of torch
_MAY_RECYCLE = hasattr(mmap, "MADV_FREE")


class _Left:
    """Memory without holders, for the next request of that size.

    The system may take it when memory is short. It is unmapped after a second without a request.
    """

    def __init__(self) -> None:
        self._spare: dict[int, list[_Mapped]] = {}
        self._lent: dict[_Mapped, weakref.ref[memoryview]] = {}
        self._when_idle: WhenIdle | None = None
        os.register_at_fork(after_in_child=self._in_fork)

    def take(self, nbytes: int) -> memoryview:
        if self._when_idle is None:
            self._when_idle = WhenIdle(self._forget)
        self._when_idle.asked()
        when_idle, spare, lent = self._when_idle, self._spare.setdefault(nbytes, []), self._lent
        try:
            mapped = spare.pop()
        except IndexError:
            mapped = _Mapped(nbytes)

        def back(_: object) -> None:
            del lent[mapped]
            with contextlib.suppress(OSError):
                mapped.offer()
                spare.append(mapped)
                when_idle.came_back()

        memory = mapped.memory
        lent[mapped] = weakref.ref(memory, back)
        return memory

    def _forget(self) -> bool:
        for spare in self._spare.values():
            spare.clear()
        return False

    def _in_fork(self) -> None:
        """Forget the thread in a fork."""
        self._spare.clear()
        self._when_idle = None


_left = _Left()


def recycled(numel: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor as :func:`empty` does, with the dtype and device of ``like``, for use in every step.

    It may have the memory of an earlier one.
    """
    nbytes = numel * like.itemsize
    if nbytes < _RECYCLED:
        return like.new_empty(numel)
    dtype, device = like.dtype, like.device
    if device.type != "cpu" or not _MAY_RECYCLE:
        return empty(numel, dtype=dtype, device=device)
    return torch.frombuffer(_left.take(nbytes), dtype=dtype, count=numel)


def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor as :func:`empty` does, with any shape and strides."""
    numel = 1 + sum((n - 1) * step for n, step in zip(size, stride)) if all(size) else 0
    return empty(numel, dtype=dtype, device=device).as_strided(size, stride)


class HostBuffers:
    """Pieces of host memory of one size, each reused once the last tensor over it is gone."""

    def __init__(self) -> None:
        self._lent: list[tuple[torch.Tensor, StorageWeakRef]] = []  # the memory, and its holder

    def take(self, nbytes: int, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Return ``nbytes`` bytes (uint8) that no tensor holds; ``make`` allocates them if none are free."""
        self._lent = [(memory, by) for memory, by in self._lent if memory.numel() == nbytes]
        position = next((i for i, (_, by) in enumerate(self._lent) if by.expired()), None)
        memory = make(nbytes) if position is None else self._lent.pop(position)[0]
        lent = from_dlpack(to_dlpack(memory))  # a separate storage, which ends with the last view
        self._lent.append((memory, StorageWeakRef(lent.untyped_storage())))
        return lent


def place(memory: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor with the shape and dtype of ``like`` in the first bytes of ``memory``."""
    return memory[: like.numel() * like.element_size()].view(like.dtype).view(like.shape)


MAP_FIXED, MAP_NORESERVE = 0x10, 0x4000  # of Linux; Python's mmap has the second since 3.13


def map_at(address: int | None, nbytes: int, protection: int, flags: int, file: int) -> int:
    """Map memory at ``address`` by mmap(2), which the mmap of Python does not support; return the address.

    Raises:
        OSError: the system refuses.
    """
    system_call = ctypes.CDLL(None, use_errno=True).mmap
    system_call.restype = ctypes.c_void_p
    system_call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    mapped = system_call(address, nbytes, protection, flags, file, 0)
    if mapped == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
    return int(mapped)
