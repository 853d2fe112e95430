"""A byte meter at the allocator's level, independent of the program's own flags.

On the CPU it asks glibc (`mallinfo2`) for bytes in use over all arenas and mapped blocks, and adds the bytes that
this process shares with other ranks. On CUDA it asks torch's caching allocator. Memory released by `resize_`,
`_swap_data_ptr_` or deletion shows at once, without sampling.

[Note: Noise] glibc counts everything that C code allocates: tensor headers, autograd nodes, dictionaries. Each
thread also caches up to seven freed chunks of each size below 1 KiB, which stay "in use". Python's own small objects
come from pools that malloc does not see. So a measured delta is right within `NOISE` bytes. Use sizes well above it,
and run the measured code once before measuring, because first calls fill caches.
"""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
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
    """Return the package's shared memory of this process, if there is any."""
    package = sys.modules.get("fsdp.comm.transport.shared_memory")
    return None if package is None else package.segment()


def meter_available(device: str = "cpu") -> bool:
    return _mallinfo2 is not None if device == "cpu" else torch.cuda.is_available()


needs_meter = pytest.mark.skipif(not meter_available(), reason="no byte meter: needs glibc 2.33")


class Peak(TorchDispatchMode):
    """The maximum of live bytes after any operation inside that returns new tensors."""

    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self.meter, self.nbytes = meter, 0
        self._gives_new: dict[Any, bool] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        gives_new = self._gives_new.get(func)
        if gives_new is None:  # views and in-place operations allocate no memory, and reading the meter is slow
            gives_new = self._gives_new[func] = any(r.alias_info is None for r in func._schema.returns)
        if gives_new:
            self.nbytes = max(self.nbytes, self.meter.live())
        return result


class Delta:
    """The change of live bytes over the context."""

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
        """Return the bytes allocated and not freed."""
        if self.device != "cpu":
            return torch.cuda.memory_allocated(self.device)
        assert _mallinfo2 is not None
        info = _mallinfo2()
        return info.uordblks + info.hblkhd + (0 if (segment := _segment()) is None else segment.held_nbytes)

    def resting(self) -> int:
        """Return `live` without memory that a step keeps for the next one and an idle second would release."""
        if self.device == "cpu" and (segment := _segment()) is not None:
            segment.trim()
        return self.live()

    def baseline(self) -> int:
        """Collect cycles and return `at_rest`, to measure from.

        A collection between two readings would subtract the garbage of earlier code from the difference.
        """
        gc.collect()
        return self.at_rest()

    def at_rest(self, quiet: float = 0.06) -> int:
        """Return the lowest reading that was stable for `quiet` seconds.

        A thread of the backend releases the last collective a moment after it ended, which would be missing at the
        end of a measurement.
        """
        lowest, since = self.resting(), time.monotonic()
        while time.monotonic() - since < quiet:
            time.sleep(0.012)
            if (now := self.resting()) < lowest:
                lowest, since = now, time.monotonic()
        return lowest

    def beyond(self, base: int, allowed: int = NOISE, patience: float = 2.0) -> int:
        """Return the bytes beyond `base`; wait for at most `allowed`, because threads free sent tensors later."""
        deadline = time.monotonic() + patience
        while (found := self.resting() - base) > allowed and time.monotonic() < deadline:
            time.sleep(0.005)
        return found

    @contextmanager
    def delta(self, collect: bool = True) -> Iterator[Delta]:
        """Measure a `with` block. Cycles of earlier code are collected first, cycles of the block are not."""
        if collect:
            gc.collect()
        delta = Delta()
        before = self.live()
        yield delta
        delta.nbytes = self.live() - before
