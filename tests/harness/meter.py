"""A byte meter at the allocator's level: what is really held, whatever the program's own flags say.

On the CPU it asks glibc (`mallinfo2`) for the bytes in use, over all arenas and mapped blocks, and the system for those
that this process shares with other ranks; on CUDA it asks torch's caching allocator. Releasing memory by `resize_`,
`_swap_data_ptr_` or deletion shows at once; no sampling is involved.

[Note: Noise] glibc counts everything that C code allocates: tensor headers, autograd nodes, dictionaries, and up to
seven freed chunks of each size below 1 KiB per thread, which stay "in use" in its thread cache. Python's own small
objects come from pools that malloc does not see. So a measured delta is right to within `NOISE` bytes when what runs
in between is small; use sizes well above it, and run the measured code once before measuring (first calls fill caches).
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

NOISE = 64 * 1024  # bytes


class _Mallinfo2(ctypes.Structure):
    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [*zip(_names, [ctypes.c_size_t] * 10, strict=True)]


def _find_mallinfo2() -> Callable[[], _Mallinfo2] | None:
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc 2.33 and later
    if function is not None:
        function.restype, function.argtypes = _Mallinfo2, []
    return function


_mallinfo2 = _find_mallinfo2()


def _segment() -> Any:
    """What this process shares with other ranks, if the package is there and shares anything."""
    package = sys.modules.get("fsdp.comm.shared_memory")
    return None if package is None else package.segment()


def meter_available(device: str = "cpu") -> bool:
    return _mallinfo2 is not None if device == "cpu" else torch.cuda.is_available()


class Peak(TorchDispatchMode):
    """The most bytes that are held after any operation inside, of those that give new tensors."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter, self.nbytes = meter, 0
        self._gives_new: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        gives_new = self._gives_new.get(func)
        if gives_new is None:  # a view and what writes in place allocate nothing, and to ask takes long
            gives_new = self._gives_new[func] = any(r.alias_info is None for r in func._schema.returns)
        if gives_new:
            self.nbytes = max(self.nbytes, self.meter.live())
        return result


class Delta:
    """`nbytes`: how many more bytes are held at the end of the context than at its start (negative: fewer)."""

    nbytes: int = 0

    def assert_is(self, expected: int, tolerance: int = NOISE, what: str = "held") -> None:
        __tracebackhide__ = True
        if abs(self.nbytes - expected) > tolerance:
            raise AssertionError(f"{what}: {self.nbytes:,} bytes, expected {expected:,} (+-{tolerance:,})")


class Meter:
    """Live bytes of one device."""

    def __init__(self, device: str = "cpu") -> None:
        if not meter_available(device):
            raise RuntimeError("no byte meter: glibc 2.33 or later, or a CUDA device, is needed")
        self.device = device

    def live(self) -> int:
        """Bytes allocated and not freed, right now."""
        if self.device != "cpu":
            return torch.cuda.memory_allocated(self.device)
        assert _mallinfo2 is not None
        info = _mallinfo2()
        return info.uordblks + info.hblkhd + (0 if (segment := _segment()) is None else segment.held_nbytes)

    def resting(self) -> int:
        """As `live`, without what a step leaves for the next one and a second of idleness would give back."""
        if self.device == "cpu" and (segment := _segment()) is not None:
            segment.trim()
        return self.live()

    def at_rest(self, quiet: float = 0.06) -> int:
        """Bytes to measure from: the lowest reading that stood for `quiet` seconds.

        A thread of the backend lets go of its last call a moment after that is over, and what it still holds when a
        measurement begins would be missing at the end.
        """
        lowest, since = self.resting(), time.monotonic()
        while time.monotonic() - since < quiet:
            time.sleep(0.012)
            if (now := self.resting()) < lowest:
                lowest, since = now, time.monotonic()
        return lowest

    @contextmanager
    def delta(self, collect: bool = True) -> Iterator[Delta]:
        """Measure a `with` block. Cycles left by earlier code are collected first, those of the block are not."""
        if collect:
            gc.collect()
        delta = Delta()
        before = self.live()
        yield delta
        delta.nbytes = self.live() - before
