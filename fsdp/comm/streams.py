"""Streams and events, with no-op versions on CPU. The only file that depends on the kind of the device.

[Note: Memory across streams]
A block of memory is allocated, reused and freed on the stream that owns it. Any other stream that uses it records an
event, and the owner waits for that event *on the stream* before it reuses the block. So the engine needs no
``record_stream`` of the allocator, the same bytes are used at every step, and the host never blocks.

There are four streams: the compute stream (the current stream of the user's code), one for gathers, one for
reductions, and one for the means over replicas of hybrid sharding. These means go between machines, and would delay the
next reduction. On CPU there are none: a collective is an asynchronous ``Work``, started before the compute that hides
it and waited for at first use.

Autograd runs a hook on the stream on which its node was made, and the node of a leaf may be older than the training.
The engine therefore handles gradients on the stream of the forward, ``joined`` with that of the hook.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from fsdp.comm.host_memory import place
from fsdp.comm.profiling import NOTHING

logger = logging.getLogger("fsdp")

StreamEvent = Any  # torch.StreamEvent, or None on devices without streams
Stream = Any  # torch.Stream, or None on devices without streams


class HostStreams:
    """A device without streams: every operation is over when its call returns, and events are None."""

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

    def record(self) -> StreamEvent:
        return None

    def wait(self, event: StreamEvent) -> None:
        return None

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def host_memory(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def fetch(self, tensor: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, StreamEvent]:
        return tensor, None

    def on_host(self, event: StreamEvent) -> AbstractContextManager[None]:
        return NOTHING

    def settle(self) -> None:
        return None


class AcceleratorStreams:
    """The streams of an accelerator next to the compute stream, which is the current stream."""

    asynchronous_work = False  # collectives run on the stream that is current when they are called

    def __init__(self, device: torch.device) -> None:
        # A gather that queues behind the compute stalls the step. So does a reduction before a gather, as a
        # communicator keeps the order of collectives.
        self._gather, self._reduce = torch.Stream(device, priority=-1), torch.Stream(device, priority=-1)
        self._replica: torch.Stream | None = None  # made at first use
        self._uploaded: StreamEvent = None  # after the last upload, which the gather stream has queued
        self._device = device
        self._index = device.index  # torch finds the stream of a number twice as fast as that of a device

    def on_gather_stream(self) -> AbstractContextManager[None]:
        return self._on(self._gather)

    def on_reduce_stream(self) -> AbstractContextManager[None]:
        return self._on(self._reduce)

    def on_replica_stream(self) -> AbstractContextManager[None]:
        self._replica = self._replica or torch.Stream(self._device, priority=-1)
        return self._on(self._replica)

    def on_device(self) -> AbstractContextManager[None]:
        """Make the device the current one inside, for collectives that torch.distributed puts on the current device."""
        return self._on(torch.accelerator.current_stream(self._index))

    def current(self) -> Stream:
        """Return the current stream."""
        return torch.accelerator.current_stream(self._index)

    @contextlib.contextmanager
    def joined(self, stream: Stream) -> Iterator[None]:
        """Make ``stream`` the current one inside (None: no change).

        It waits for the operations of the current stream before, which in turn waits for the operations inside.
        """
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
        """Return whether the operations of the current stream are captured into a graph."""
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def look_beside_captures(self) -> None:
        """Allow this thread to poll events while a second one captures a graph; a poll would invalidate the capture."""
        if self._device.type == "cuda":
            _ignore_captures_of_other_threads()

    def record(self) -> StreamEvent:
        """Record an event on the stream that is current *now*; hooks may run on another stream than the forward."""
        return self.current().record_event()

    def wait(self, event: StreamEvent) -> None:
        """Make the current stream, not the host, wait for ``event``."""
        if event is not None:
            self.current().wait_event(event)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``tensor`` on the device, the same object if it is there. Called on the gather stream.

        Host memory may be written only after :meth:`settle`.
        """
        there = tensor.to(self._device, non_blocking=True)
        if there is not tensor:
            self._uploaded = self._gather.record_event()
        return there

    def host_memory(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Allocate host memory; ``pinned``: page-locked, by the allocator of torch.

        Raises:
            RuntimeError: the memory cannot be locked.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def fetch(self, tensor: torch.Tensor, into: torch.Tensor) -> tuple[torch.Tensor, StreamEvent]:
        """Copy into the host memory ``into`` (bytes); return the copy, and the event after which it holds the values.

        The host does not wait if the memory is page-locked.
        """
        copy = place(into, tensor)
        copy.copy_(tensor, non_blocking=True)
        return copy, self.record()

    def on_host(self, event: StreamEvent) -> AbstractContextManager[None]:
        """Make the host wait for ``event``; inside the context it may use data fetched before."""
        event.synchronize()
        return NOTHING

    def settle(self) -> None:
        """Make the host wait for the uploads: the host memory that they read may be written then.

        The gathers that follow them are not waited for, so the host launches the next pass while the device computes.
        """
        if self._uploaded is not None:
            self._uploaded.synchronize()
            self._uploaded = None

    @contextlib.contextmanager
    def _on(self, stream: torch.Stream) -> Iterator[None]:
        before = torch.accelerator.current_stream(self._index)
        device = torch.accelerator.current_device_index()
        torch.accelerator.set_stream(stream)  # also makes its device the current one
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            if device != self._index:
                torch.accelerator.set_device_index(device)


_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal: captures on other threads do not restrict this one


def _ignore_captures_of_other_threads() -> None:
    """Set the capture mode of this thread, as the watchdog of torch's NCCL backend does.

    If the CUDA runtime is not found by name (another platform, or a static link), a poll may invalidate a capture.
    """
    with contextlib.suppress(OSError):  # not found, as by the name "libcudart.so.None" with ROCm
        runtime = ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
        runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_THREAD_LOCAL)))


Streams = HostStreams | AcceleratorStreams


@functools.cache
def streams_for(device: torch.device) -> Streams:
    """Return the streams of ``device``, which all models on it share.

    An allocator keeps freed memory per stream: with separate streams each model would reserve memory of its own.
    """
    return HostStreams() if device.type == "cpu" else AcceleratorStreams(device)


def compute_and_gather_stream(device: torch.device) -> tuple[Stream, Stream]:
    """Return the two streams for callers outside of the engine; on CPU, torch's object for its one stream, twice."""
    streams, current = streams_for(device), torch.get_device_module(device).current_stream()
    return (current, current) if isinstance(streams, HostStreams) else (current, streams._gather)


def default_device() -> torch.device:
    """Return the default device of modules: the current device of the accelerator, else the CPU."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator: Any = torch.accelerator.current_accelerator()
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def device_count() -> int:
    """Return the number of accelerator devices of this process; 0 without an accelerator."""
    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def resolve_device(device: int | str | torch.device) -> torch.device:
    """Return ``device`` as a ``torch.device``, with the index of the current device if none was given.

    Raises:
        ValueError: ``device`` is neither the CPU nor a device of the accelerator of this process.
    """
    default = default_device()
    is_number = isinstance(device, int) and default.type != "cpu"  # else the number is of no accelerator
    kind = default.type if is_number else str(device).partition(":")[0]
    if kind not in ("cpu", default.type):
        raise ValueError(
            f"device_id={device!r} is not available: torch finds {device_count()} devices of an accelerator, and the "
            f"default device is {str(default)!r}. Leave device_id out, or pass 'cpu'"
        )
    return default if str(device) == default.type else torch.device(device)
