"""Streams and events; do-nothing ones on CPU. The only file that knows the device kind.

[Note: Memory across streams]
A block of memory is allocated, reused and freed on the stream that owns it. Whoever else used it leaves an event, and
the owner waits for that event *on the stream* before the block is used again. So nothing depends on the allocator's
own stream recording, the same bytes are used at every step, and the host never blocks.

Four streams take part: the compute stream (whatever is current when the user's code runs), one for gathers, one for
reductions and one for the means over replicas of hybrid sharding, which go between machines and would hold up the next
reduction. On CPU there are none: a collective is an asynchronous ``Work``, launched before the compute that hides it
and waited for at its first use.

Autograd runs a hook on the stream on which its node was made, and a leaf's node may be older than the training: so the
engine does what it does to gradients on the stream of the forward, ``joined`` with the hook's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from fsdp.comm.host_memory import locked_pages, place
from fsdp.comm.recording import NOTHING

logger = logging.getLogger("fsdp")

Event = Any  # torch.Event, or None on devices without streams
Stream = Any  # torch.Stream, or None on devices without streams


class HostStreams:
    """A device without streams: every operation is over when its call returns, and events mean nothing."""

    asynchronous_work = True  # collectives overlap as Work handles

    def on_gather_stream(self) -> AbstractContextManager[None]:
        return NOTHING

    def on_reduce_stream(self) -> AbstractContextManager[None]:
        return NOTHING

    def on_replica_stream(self) -> AbstractContextManager[None]:
        return NOTHING

    def on_device(self) -> AbstractContextManager[None]:
        return NOTHING

    def current(self) -> Stream:
        return None

    def joined(self, stream: Stream) -> AbstractContextManager[None]:
        return NOTHING

    def is_capturing(self) -> bool:
        return False

    def look_beside_captures(self) -> None:
        return None

    def record(self) -> Event:
        return None

    def wait(self, event: Event) -> None:
        return None

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def host_memory(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def fetch(self, tensor: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, Event]:
        return tensor, None

    def on_host(self, event: Event) -> AbstractContextManager[None]:
        return NOTHING

    def settle(self) -> None:
        return None


class AcceleratorStreams:
    """An accelerator's streams beside the compute stream, which is whatever stream is current."""

    asynchronous_work = False  # collectives run on the stream that is current when they are called

    def __init__(self, device: torch.device) -> None:
        # What queues behind the compute stalls everything: a gather, and a reduction that a gather comes after, since a
        # communicator keeps the order in which its collectives were issued.
        self._gather, self._reduce = torch.Stream(device, priority=-1), torch.Stream(device, priority=-1)
        self._replica: torch.Stream | None = None  # made where it is needed
        self._device = device

    def on_gather_stream(self) -> AbstractContextManager[None]:
        return self._on(self._gather)

    def on_reduce_stream(self) -> AbstractContextManager[None]:
        return self._on(self._reduce)

    def on_replica_stream(self) -> AbstractContextManager[None]:
        self._replica = self._replica or torch.Stream(self._device, priority=-1)
        return self._on(self._replica)

    def on_device(self) -> AbstractContextManager[None]:
        """The device is the current one inside: for what torch.distributed puts on whatever device that is."""
        return self._on(torch.accelerator.current_stream(self._device))

    def current(self) -> Stream:
        """The stream that is current now."""
        return torch.accelerator.current_stream(self._device)

    @contextlib.contextmanager
    def joined(self, stream: Stream) -> Iterator[None]:
        """``stream`` is the current one inside. It follows what the one that is current now was given before, and that
        follows what ``stream`` is given inside. None: the current stream."""
        before = self.current()
        if stream is None or stream == before:
            yield
            return
        stream.wait_stream(before)
        try:
            with self._on(stream):
                yield
        finally:
            before.wait_stream(stream)

    def is_capturing(self) -> bool:
        """Whether what is given to the current stream goes into a graph, and nothing happens before that is run."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def look_beside_captures(self) -> None:
        """Let this thread ask for events while another one captures a graph, which that would spoil otherwise."""
        if self._device.type == "cuda":
            _ignore_captures_of_other_threads()

    def record(self) -> Event:
        """An event on the stream that is current *now*; hooks may run on another stream than the forward did."""
        return self.current().record_event()

    def wait(self, event: Event) -> None:
        """The current stream, not the host, waits for ``event``."""
        if event is not None:
            self.current().wait_event(event)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """``tensor`` on the device, the same object if it is there. Host memory may be written only after ``settle``
        on the gather stream."""
        return tensor.to(self._device, non_blocking=True)

    def host_memory(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """So many bytes of host memory; ``pinned``: page-locked, and on CUDA given back when nothing holds them.

        Raises:
            RuntimeError: so much cannot be locked.
        """
        if not pinned or self._device.type != "cuda":
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        with self.on_device():
            return self.lock_pages(nbytes, _lock_pages, _unlock_pages)

    def lock_pages(
        self, nbytes: int, lock: Callable[[int, int], None], unlock: Callable[[int], object]
    ) -> torch.Tensor:
        """Page-lock host memory by ``lock`` and ``unlock``. Torch's allocator does not know it, so nothing but this
        keeps it until copies of it that are queued are over."""
        return locked_pages(nbytes, lock, unlock, self._copies_under_way)

    def _copies_under_way(self) -> Sequence[Event]:
        """Events after the copies between host and device that are queued now, on whatever stream."""
        streams = (self._gather, self._reduce, self.current())
        return [stream.record_event() for stream in streams if not stream.query()]

    def fetch(self, tensor: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, Event]:
        """A copy in the host memory ``into`` (bytes), and the event after which it holds the values; the host does not
        wait where that memory is page-locked."""
        copy = place(into, tensor)
        copy.copy_(tensor, non_blocking=True)
        return copy, self.record()

    def on_host(self, event: Event) -> AbstractContextManager[None]:
        """The host waits for ``event``, and works inside on what has been fetched before it."""
        event.synchronize()
        return NOTHING

    def settle(self) -> None:
        """The host waits for the gather stream: what that has read of host memory may be written."""
        self._gather.synchronize()

    @contextlib.contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream(self._device)
        device = torch.accelerator.current_device_index()
        torch.accelerator.set_stream(stream)  # makes its device the current one as well
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            if device != self._device.index:
                torch.accelerator.set_device_index(device)


def _lock_pages(address: int, nbytes: int) -> None:
    runtime: Any = torch.cuda.cudart()
    error = int(runtime.cudaHostRegister(address, nbytes, 1))  # for every context of the process
    if error != 0:
        raise RuntimeError(
            f"{nbytes} bytes of host memory cannot be page-locked (CUDA error {error}): free some, raise the limit "
            "(ulimit -l), or pass CPUOffload(pin_memory=False)"
        )


_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: captures of other threads forbid this one nothing


def _ignore_captures_of_other_threads() -> None:
    """Set the capture mode of this thread, as the watchdog of torch's NCCL backend does. Where the CUDA runtime is not
    found by its name (of another platform, or linked statically), a look at an event may spoil a capture."""
    version = torch.version.cuda
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{version.split('.')[0]}") if version is not None else None
    except OSError:
        return
    if runtime is not None:
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


def _unlock_pages(address: int) -> None:
    runtime: Any = torch.cuda.cudart()
    error = int(runtime.cudaHostUnregister(address))
    if error != 0:
        logger.warning("host memory at %#x cannot be unlocked (CUDA error %d): it stays page-locked", address, error)


Streams = HostStreams | AcceleratorStreams


@functools.cache
def streams_for(device: torch.device) -> Streams:
    """The streams of ``device``. All models on it share them: an allocator keeps freed memory per stream, so streams of
    their own would have each model reserve its own."""
    return HostStreams() if device.type == "cpu" else AcceleratorStreams(device)


def default_device() -> torch.device:
    """Where modules go when nobody says: the current device of the accelerator, or the CPU where there is none."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return (
        torch.device(accelerator.type, torch.accelerator.current_device_index())
        if accelerator is not None
        else torch.device("cpu")
    )


def device_count() -> int:
    """How many devices of the accelerator this process sees; 0 where there is none."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def resolve_device(device: int | str | torch.device) -> torch.device:
    """``device`` as a ``torch.device`` with an index where its type has one (the current device when none was
    given).

    Raises:
        ValueError: a number, where there is no accelerator.
    """
    if isinstance(device, int) and not torch.accelerator.is_available():
        raise ValueError(
            f"device_id={device} is a device of an accelerator, and there is none: leave device_id out, or pass 'cpu'"
        )
    resolved: Any = torch.device(device)
    if resolved.index is not None or resolved.type == "cpu" or not torch.accelerator.is_available():
        return torch.device(resolved)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and resolved.type == accelerator.type:
        return torch.device(resolved.type, torch.accelerator.current_device_index())
    return torch.device(resolved)
