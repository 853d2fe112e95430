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
    return torch.frombuffer(_mapped(nbytes), dtype=dtype, count=numel)


def _mapped(nbytes: int) -> memoryview:
    """Map so many bytes of anonymous memory, with huge pages where they fit."""
    # More addresses than bytes, to begin at a huge page; pages that are not written take no memory.
    huge = nbytes // _HUGE_PAGE * _HUGE_PAGE if nbytes >= 2 * _HUGE_PAGE and _MAY_BE_HUGE else 0
    mapped = mmap.mmap(-1, nbytes + (_HUGE_PAGE if huge else 0), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -torch.frombuffer(mapped, dtype=torch.uint8).data_ptr() % _HUGE_PAGE if huge else 0
    if huge:
        with contextlib.suppress(OSError):  # a system that was built without them
            mapped.madvise(mmap.MADV_HUGEPAGE, start, huge)
    return memoryview(mapped)[start : start + nbytes]


_RECYCLED = 1 << 20  # bytes; smaller tensors use the allocator of torch


class _Left:
    """Memory without holders, for the next request of that size; unmapped after a second without a request."""

    def __init__(self) -> None:
        self._spare: dict[int, list[memoryview]] = {}
        self._lent: dict[int, weakref.ref[memoryview]] = {}
        self._when_idle: WhenIdle | None = None
        os.register_at_fork(after_in_child=self._in_fork)

    def take(self, nbytes: int) -> memoryview:
        if self._when_idle is None:
            self._when_idle = WhenIdle(self._forget)
        self._when_idle.asked()
        when_idle, spare, lent = self._when_idle, self._spare.setdefault(nbytes, []), self._lent
        try:
            memory = spare.pop()
        except IndexError:
            memory = _mapped(nbytes)
        holder = memory[:]

        def back(_: object) -> None:
            del lent[id(memory)]
            spare.append(memory)
            when_idle.came_back()

        lent[id(memory)] = weakref.ref(holder, back)
        return holder

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
    if device.type != "cpu":
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
