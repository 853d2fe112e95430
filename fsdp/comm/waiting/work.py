"""A collective in flight, and how a rank waits for it.

A wait on the host is interrupted every :data:`fsdp.comm.threads.PATIENCE`: the :class:`Watch` of the process group
(its lane) then compares this rank with its peers, and raises if they are out of sync. Backends whose works can
only be waited for to the end are waited for in a thread (:class:`BlockingWork`).

On an accelerator the host does not wait for a collective, so an out-of-sync rank would hang anywhere in the user's
program until the backend's watchdog kills the process. One thread per process (:class:`Watcher`) therefore polls the
stream events of collectives in flight. If the ranks are out of sync, the thread logs the error and aborts the group,
which releases the device and the host; the next collective of the group raises.
"""

from __future__ import annotations

import atexit
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch.distributed as dist

from fsdp.comm import threads
from fsdp.comm.profiling import NOTHING, profiled, profiler_runs
from fsdp.comm.streams import StreamEvent, Streams
from fsdp.comm.threads import Daemon, in_thread

if TYPE_CHECKING:
    from fsdp.comm.waiting.waits import Wait

logger = logging.getLogger("fsdp")

_PAUSE = 0.1  # seconds between two polls of a stream event


class OutOfStep(RuntimeError):
    """The ranks are out of sync: they do different things."""


class TimedOut(RuntimeError):
    """A wait that exceeded the timeout of the process group."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the other ranks did not come within {seconds:.0f} s, the timeout of the process group")


class Watch(Protocol):
    """Compares this rank with the other ranks while it waits; a lane implements this."""

    timeout: float  # seconds that a collective may take
    carrier: object  # another one once the collectives in flight are abandoned

    def waiting(self, number: int, label: str, waited: float) -> Wait:
        """Return the wait for the collective ``number``, in which this rank has ``waited`` so many seconds."""

    def failed(self, error: RuntimeError, number: int, label: str, *, on_host: bool, in_memory: bool) -> RuntimeError:
        """Return the error to raise where the collective ``number`` failed or timed out with ``error``.

        Args:
            on_host: whether the host waited for it.
            in_memory: whether it went through shared memory.
        """

    def diverged(self, error: OutOfStep) -> None:
        """Tell the ranks that wait elsewhere that this one has found ``error``."""

    def abort(self, words: str) -> None:
        """End the collectives in flight, and have the next one raise OutOfStep with these ``words``."""


class HostWork:
    """An operation that the host waits for. A wait that was interrupted may begin again.

    Not an abstract class: ``isinstance`` is asked at each wait, and takes ten times as long with one.
    """

    def wait(self, patience: timedelta | None = None) -> None:
        """Wait for ``patience``; None: as long as the group's timeout allows.

        Raises:
            RuntimeError: the operation failed, or is not over.
        """
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Return whether the operation is over or has failed."""
        raise NotImplementedError


_INTERRUPTIBLE = (dist.Work, HostWork)


class BlockingWork(HostWork):
    """Works of ``torch.distributed`` that can only be waited for to the end, in a thread. Over when all of them are."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._over: futures.Future[None] | None = None

    def wait(self, patience: timedelta | None = None) -> None:
        """Wait for ``patience``; a later call continues the same wait.

        Raises:
            RuntimeError: the operation failed, or is not over.
        """
        if self._over is None:
            self._over = in_thread(self._finish)
        if not futures.wait([self._over], None if patience is None else patience.total_seconds()).done:
            raise RuntimeError("the collective is still under way")
        self._over.result()

    def is_completed(self) -> bool:
        return self._over is not None and self._over.done()

    def _finish(self) -> None:
        for work in self._works:
            work.wait()


class Work:
    """One collective, or one exchange of messages, in flight.

    On CPU ``wait()`` blocks the host; on an accelerator it makes the current stream wait for a stream event. Every
    stream that uses the result has to wait. A wait that raises OutOfStep, or is interrupted, leaves the collective in
    flight: its tensors stay in use. A collective that was abandoned, as not all ranks have issued it, has
    an undefined result, and its wait returns at once.

    Attributes:
        label: words for logs and errors: "gather unit 'blocks.0'".
        watch: compares the ranks during waits; None for an operation without communication.
    """

    def __init__(
        self,
        handles: Sequence[Any] = (),
        watch: Watch | None = None,
        label: str = "",
        *,
        number: int = 0,
        on_host: bool = True,
        ends_alone: bool = False,
    ) -> None:
        """Take the ``handles`` of a collective that was started.

        Args:
            handles: works of ``torch.distributed`` or :class:`HostWork`; none where the current stream waits anyway.
            number: of the collective among those of the ``watch``.
            on_host: whether the host waits.
            ends_alone: whether the handles complete without being waited for. False for messages and reduce-scatters
                of gloo, and for groups written in Python.
        """
        self.label, self.watch, self._number, self._on_host = label, watch, number, on_host
        self._handles = handles if ends_alone or not handles or not on_host else (BlockingWork(handles),)
        self._carrier = None if watch is None else watch.carrier
        self._finish: Callable[[], object] | None = None
        self._event: StreamEvent = None
        self._streams: Streams | None = None

    @staticmethod
    def done(streams: Streams) -> Work:
        """Return the work of an operation without communication, queued on the current stream."""
        return Work().on(streams)

    @staticmethod
    def joined(several: Sequence[Work]) -> Work:
        """Return one work for ``several`` of one group and one label."""
        first, *others = several
        if others:
            first._handles = [handle for each in several for handle in each._handles]
            first._number = others[-1]._number
        return first

    def on(self, streams: Streams) -> Work:
        """Record the stream event after which the result may be used; a no-op on CPU. Returns this work."""
        if not streams.asynchronous_work:
            self._streams, self._event = streams, streams.record()
            if self.watch is not None:
                if streams.is_capturing():
                    watcher.pause()
                else:
                    watcher.follow(self._event, self, streams.look_beside_captures)
        return self

    def then(self, finish: Callable[[], object]) -> Work:
        """Have ``wait()`` call ``finish`` once the collective is over. Returns this work."""
        self._finish = finish
        return self

    def extend(self) -> None:
        """Include the operations that the current stream was given since."""
        if self._streams is not None:
            self._event = self._streams.record()

    @property
    def host_works(self) -> list[HostWork]:
        """The handles that are not works of ``torch.distributed``."""
        return [handle for handle in self._handles if isinstance(handle, HostWork)]

    def poll(self) -> bool:
        """Return whether a wait would not block. Handles that cannot be polled count as complete."""
        return all(handle.is_completed() for handle in self._handles if isinstance(handle, dist.Work))

    def wait(self) -> None:
        """Wait for the result, and finish it.

        Raises:
            OutOfStep: the ranks are out of sync; the collective is still in flight.
            RuntimeError: the collective failed or timed out, with the label and the last collectives of each rank.
        """
        if self._handles:
            with profiled("wait", self.label) if profiler_runs() else NOTHING:
                self._wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        if self._streams is not None:
            self._streams.wait(self._event)

    def _wait(self) -> None:
        watch = self.watch
        assert watch is not None, "a collective has a lane"
        if watch.carrier is not self._carrier:  # abandoned
            self._handles, self._finish = (), None
        while self._handles:
            handle = self._handles[0]
            try:
                if not self._on_host or not isinstance(handle, _INTERRUPTIBLE):
                    handle.wait()
                else:
                    try:
                        handle.wait(threads.PATIENCE)  # nearly always it is over soon
                    except OutOfStep:
                        raise
                    except RuntimeError:
                        self._wait_longer(handle, watch)
            except OutOfStep as error:
                watch.diverged(error)
                raise
            except RuntimeError as error:
                self._handles = ()
                in_memory = isinstance(handle, HostWork) and not isinstance(handle, BlockingWork)
                raise watch.failed(
                    error, self._number, self.label, on_host=self._on_host, in_memory=in_memory
                ) from error
            except Exception:
                self._handles = ()
                raise
            self._handles = self._handles[1:]

    def _wait_longer(self, handle: Any, watch: Watch) -> None:
        """Continue a wait that took longer than :data:`fsdp.comm.threads.PATIENCE`, or has failed."""
        wait = watch.waiting(self._number, self.label, threads.PATIENCE.total_seconds())
        try:
            while True:
                completed = handle.is_completed()  # or failed; or it ended after that wait: the next wait raises
                if not completed:
                    wait.look()
                try:
                    handle.wait(threads.PATIENCE)
                    return
                except RuntimeError as error:
                    gave_up = completed and "timed out" in str(error).lower()  # gloo, after the timeout of the group
                    if completed and not gave_up:
                        raise  # failed, not just slow
                    if gave_up or wait.seconds > watch.timeout:
                        raise TimedOut(watch.timeout) from error
        finally:
            wait.over()

    def waiting(self, waited: float) -> Wait | None:
        """Return the long wait for this collective; None without a watch."""
        return None if self.watch is None else self.watch.waiting(self._number, self.label, waited)


class _InFlight(NamedTuple):
    event: StreamEvent
    work: Work


class Watcher:
    """Polls the collectives in flight on accelerators, from the first one on."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._in_flight: deque[_InFlight] = deque()  # oldest first
        self._thread: Daemon | None = None
        self._ends = False  # whether the thread has to end

    def follow(self, event: StreamEvent, work: Work, prepare: Callable[[], object] = lambda: None) -> None:
        """Poll ``event``, recorded after ``work``. The thread calls ``prepare`` before the first poll."""
        with self._changed:
            self._in_flight.append(_InFlight(event, work))
            self._changed.notify()
            if self._thread is None:
                self._ends = False
                run = functools.partial(self._run, prepare)
                self._thread = Daemon(run, self._end, "fsdp collectives")

    def pause(self) -> None:
        """Poll no event: a graph is being captured, which a poll would invalidate. Earlier collectives are over."""
        with self._changed:
            self._in_flight.clear()

    def stop(self) -> None:
        """End the thread, at the end of the process: Python would kill it in a poll, which aborts the process."""
        thread = self._thread
        if thread is not None and thread.is_alive():  # not in a process that was forked
            self._end()
            thread.join(threads.PATIENCE.total_seconds())

    def _end(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()

    def _run(self, prepare: Callable[[], object]) -> None:
        prepare()
        while True:
            with self._changed:
                waited = not self._in_flight
                self._changed.wait_for(lambda: self._in_flight or self._ends)
                if self._ends:
                    self._thread = None
                    return
                oldest = self._in_flight[0]
            if waited:
                time.sleep(_PAUSE)  # handle several at once: each wake-up costs the program time
            self._poll_until_over(oldest)
            with self._changed:
                while not self._ends and self._in_flight:
                    if self._in_flight[0] is not oldest and not self._in_flight[0].event.query():
                        break
                    self._in_flight.popleft()

    def _poll_until_over(self, collective: _InFlight) -> None:
        began = looked = time.monotonic()
        work, wait = collective.work, None
        try:
            while not self._ends and collective in self._in_flight and not collective.event.query():
                time.sleep(_PAUSE)
                if time.monotonic() - looked < threads.PATIENCE.total_seconds():
                    continue
                looked = time.monotonic()
                wait = wait or work.waiting(looked - began)
                if wait is not None and work.watch is not None and not self._look(wait, work, work.watch):
                    return
        finally:
            if wait is not None:
                wait.over()

    @staticmethod
    def _look(wait: Wait, work: Work, watch: Watch) -> bool:
        """Compare the ranks; return False if they differ, and the group was ended."""
        try:
            wait.look()
        except OutOfStep as error:
            words = f"{work.label}: the ranks are out of step, and the group was ended: {error}"
            logger.error("%s", words)
            watch.abort(words)
            return False
        except RuntimeError:
            pass  # the program went on meanwhile, or the store is gone: the main thread will notice
        return True


watcher = Watcher()  # of the collectives that no host waits for
atexit.register(watcher.stop)
