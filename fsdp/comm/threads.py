"""Daemon threads of the package: they end on request, survive interrupts of the program, and are reused.

[Note: The end of the interpreter]
A thread of gloo drops the tensors of a collective after the wait for it is over, and needs the interpreter's lock for
that. Once the interpreter ends, such a thread is ended by force, and the process with it ("terminate called without an
active exception"). ``destroy_process_group()`` joins the threads of groups that nothing holds, and a wrapped model
holds its groups. So the exit of a program waits until gloo's threads sleep.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, TypeVar

logger = logging.getLogger("fsdp")

_T = TypeVar("_T")

PATIENCE = timedelta(seconds=1)  # a wait of this length makes a rank inspect its peers
NOTICE = timedelta(seconds=10)  # a wait of this length is reported on stderr
IDLE = 1.0  # seconds without an allocation after which spare memory is returned to the system


class Daemon(threading.Thread):
    """A daemon thread. Test suites call ``stop()`` on threads that a test has left; the next user starts another."""

    def __init__(self, run: Callable[[], None], end: Callable[[], None], name: str = "fsdp wait") -> None:
        """Start ``run``, which has to return after ``end`` was called."""
        super().__init__(target=run, name=name, daemon=True)
        self._end = end
        self.start()

    def stop(self) -> None:
        """End the thread after the action in progress, and join it."""
        self._end()
        self.join()


class _Worker:
    """A reused thread that runs one action at a time: each new thread costs memory that is never returned."""

    idle: ClassVar[list[_Worker]] = []
    _lock = threading.RLock()  # held while a worker is chosen, so that the worker is not ending

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[tuple[Callable[[], Any], futures.Future[Any]] | None] = queue.SimpleQueue()
        self._ends = False
        Daemon(self._run, self._end)

    @staticmethod
    def start(action: Callable[[], Any], result: futures.Future[Any]) -> None:
        """Run ``action`` in an idle worker, or in a new one."""
        with _Worker._lock:
            worker = _Worker.idle.pop() if _Worker.idle else _Worker()
            worker._actions.put((action, result))

    def _end(self) -> None:
        with _Worker._lock:
            self._ends = True
            if self in _Worker.idle:
                _Worker.idle.remove(self)
            self._actions.put(None)

    def _run(self) -> None:
        while (item := self._actions.get()) is not None:
            action, result = item
            try:
                result.set_result(action())
            except BaseException as error:  # the caller's, who reads the future
                result.set_exception(error)
            del item, action, result
            with _Worker._lock:
                if not self._ends:
                    _Worker.idle.append(self)


def _forget_workers() -> None:
    """Forget the workers after a fork: the child has no threads."""
    _Worker.idle.clear()
    _Worker._lock = threading.RLock()


os.register_at_fork(after_in_child=_forget_workers)


def in_thread(action: Callable[[], _T]) -> futures.Future[_T]:
    """Run ``action`` in a thread and return a future of the result.

    Unlike a thread of an executor, this one does not keep the process alive. Signals do not interrupt it.
    """
    result: futures.Future[_T] = futures.Future()
    _Worker.start(action, result)
    return result


@contextlib.contextmanager
def reported_if_long(rank: int, where: str) -> Iterator[None]:
    """Report a wait inside the context on stderr once it takes longer than :data:`NOTICE`.

    Args:
        rank: the number of the waiting rank.
        where: words that follow "rank 0 has waited 10 s".
    """
    over = threading.Event()

    def report() -> None:
        if not over.wait(NOTICE.total_seconds()):
            logger.warning("rank %d has waited %.0f s %s", rank, NOTICE.total_seconds(), where)

    in_thread(report)
    try:
        yield
    finally:
        over.set()


class WhenIdle:
    """Calls a function once memory was neither requested nor returned for :data:`IDLE` seconds."""

    def __init__(self, give_back: Callable[[], bool]) -> None:
        """Start a thread that calls ``give_back``; the call returns True to be repeated later."""
        self._give_back = give_back
        self._asked, self._waits = 0.0, False
        self._wait: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False ends the thread; safe in a garbage collection
        self._ended = False
        Daemon(self._run, self._end)

    def asked(self) -> None:
        """Note a request for memory. Restarts the thread if it was stopped."""
        self._asked = time.monotonic()
        if self._ended:
            self._ended = False
            Daemon(self._run, self._end)

    def _end(self) -> None:
        self._wait.put(False)

    def came_back(self) -> None:
        """Note that memory was returned. Starts no thread: the garbage collector may be the caller."""
        self._asked = time.monotonic()
        if not self._waits:
            self._waits = True
            self._wait.put(True)

    def _run(self) -> None:
        while self._wait.get():
            while (left := self._asked + IDLE - time.monotonic()) > 0:
                time.sleep(left)
            self._waits = False
            if self._give_back():
                self.came_back()
        self._ended = True


def _gloo_runs() -> bool:
    """Return whether a thread of gloo in this process is not asleep; False on systems without ``/proc``."""
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has ended
            name, _, state = (task / "stat").read_text().partition("(")[2].rpartition(") ")
            if "gloo" in name and state[0] != "S":
                return True
    return False


@atexit.register
def _let_gloo_finish() -> None:
    """Wait until gloo's threads sleep, at most a second. See [Note: The end of the interpreter].

    A thread that waits for the interpreter's lock sleeps too, and takes the lock during the pause between two looks.
    """
    end, asleep = time.monotonic() + 1, 0
    while asleep < 2 and time.monotonic() < end:
        asleep = 0 if _gloo_runs() else asleep + 1
        time.sleep(0.001)
