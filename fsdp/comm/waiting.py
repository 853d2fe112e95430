"""Collectives that do not end are looked after by threads, where the host cannot wait for them bit by bit.

On CPU some works can only be waited for to the end (:class:`BlockingWork`): a thread does, and the rank looks around.

A collective on an accelerator is over when its event is. Where the ranks are out of step it never is: the host that
waits for the device, anywhere in the user's program, waits until the backend's own watchdog kills the process. So one
thread per process looks at the oldest event that is not over (:class:`Watcher`). Takes it long, the thread asks what
the other ranks do, and if they are out of step it logs the words, ends the group, which lets the device and so the host
go on, and has the next collective of the group raise.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from fsdp.comm.groups import backend_of, group_timeout

logger = logging.getLogger("fsdp")

PATIENCE = timedelta(seconds=1)  # how long to wait for a collective before looking what the other ranks do
_PAUSE = 0.1  # seconds between two looks at an event


class OutOfStep(RuntimeError):
    """The ranks are doing different things."""


class Watch(Protocol):
    """Knows what the ranks are doing while one of them waits."""

    def slow(self) -> None:
        """The wait takes long. Raises RuntimeError if the ranks are out of step."""

    def explain(self) -> str:
        """What the ranks did last."""


# For waits in a group that have no watch of their own: that of the latest pass or call of all its ranks.
watches: weakref.WeakKeyDictionary[Any, Watch] = weakref.WeakKeyDictionary()


class BlockingWork:
    """Works that the backend only waits for to the end: a thread does, as nobody here could look around meanwhile.

    It is over when all of them are; waiting for it again, after a wait that was given up, is the same wait.
    """

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works
        self._over: futures.Future[None] | None = None

    def wait(self, patience: timedelta | None = None) -> None:
        """
        Raises:
            RuntimeError: it failed, or takes longer than ``patience``.
        """
        if patience is None and self._over is None:
            self._finish()
            return
        if self._over is None:
            self._over = _Waiter.start(self._finish)
        if not futures.wait([self._over], None if patience is None else patience.total_seconds()).done:
            raise RuntimeError("the wait is not over")
        self._over.result()

    def is_completed(self) -> bool:
        return self._over is not None and self._over.done()

    def _finish(self) -> None:
        for work in self._works:
            work.wait()


def patient(works: Sequence[Any], group: Any, device: torch.device, *, ends_alone: bool) -> Sequence[Any]:
    """``works`` of ``group`` for ``wait_for``. ``ends_alone``: they do without being waited for, unlike messages and a
    reduce-scatter of gloo's, and works of groups that are written in Python."""
    if not works or device.type != "cpu" or (ends_alone and backend_of(group, device) == "gloo"):
        return works
    return (BlockingWork(works),)


def wait_for(work: Any, label: str, watch: Watch | None, group: Any = None) -> None:
    """Wait for a work of ``group``; with ``watch``, look around now and then as long as it takes.

    Raises:
        RuntimeError: the collective failed or timed out, with what ``label`` waited for and what the ranks did last.
    """
    try:
        if watch is None or not isinstance(work, (dist.Work, BlockingWork)):
            work.wait()  # a stand-in is asked nothing else
            return
        deadline = time.monotonic() + group_timeout(group).total_seconds()
        while True:
            was_over = work.is_completed()  # asked before: it may end just after a wait was given up
            try:
                work.wait(PATIENCE)
                return
            except RuntimeError:
                if was_over or time.monotonic() > deadline:  # failed, not just slow
                    raise
            if not work.is_completed():
                watch.slow()
    except OutOfStep:
        raise
    except RuntimeError as error:
        words = "" if watch is None else f" {watch.explain()}"
        raise RuntimeError(f"{label}: the collective failed or timed out: {error}.{words}") from error


class _Waiter:
    """A thread that waits, and is used again. It keeps no process alive, as those of an executor do."""

    idle: ClassVar[list[_Waiter]] = []

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], futures.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="fsdp wait", daemon=True).start()

    @staticmethod
    def start(wait: Callable[[], None]) -> futures.Future[None]:
        try:
            waiter = _Waiter.idle.pop()
        except IndexError:
            waiter = _Waiter()
        over: futures.Future[None] = futures.Future()
        waiter._tasks.put((wait, over))
        return over

    def _run(self) -> None:
        while True:
            wait, over = self._tasks.get()
            try:
                wait()
            except BaseException as error:
                over.set_exception(error)
            else:
                over.set_result(None)
            del wait, over
            _Waiter.idle.append(self)


os.register_at_fork(after_in_child=_Waiter.idle.clear)  # a fork has none of the threads


@dataclass(eq=False)
class _UnderWay:
    event: Any
    watch: Watch
    group: Any
    label: str


class Watcher:
    """Looks after the collectives that it is told to follow, from the first one on."""

    def __init__(self, end_group: Callable[[Any], None]) -> None:
        """``end_group`` has every collective of a group that is under way come to an end."""
        self._end_group = end_group
        self._changed = threading.Condition()
        self._under_way: deque[_UnderWay] = deque()  # oldest first
        self._broken: weakref.WeakKeyDictionary[Any, OutOfStep] = weakref.WeakKeyDictionary()
        self._thread: threading.Thread | None = None

    def check(self, group: Any) -> None:
        """Raises OutOfStep if ``group`` was ended."""
        if self._broken and group in self._broken:
            raise OutOfStep(str(self._broken[group]))

    def follow(self, event: Any, watch: Watch, group: Any, label: str) -> None:
        """``event`` comes after a collective of ``group``."""
        with self._changed:
            self._under_way.append(_UnderWay(event, watch, group, label))
            self._changed.notify()
            if self._thread is None:
                self._thread = threading.Thread(target=self._look_after, name="fsdp collectives", daemon=True)
                self._thread.start()

    def pause(self) -> None:
        """Look at no event: a graph is being captured, which that would spoil. What came before is over."""
        with self._changed:
            self._under_way.clear()

    def _look_after(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._under_way)
                oldest = self._under_way[0]
            self._see_to_the_end(oldest)
            with self._changed:
                if self._under_way and self._under_way[0] is oldest:
                    self._under_way.popleft()

    def _see_to_the_end(self, collective: _UnderWay) -> None:
        looked = time.monotonic()
        while collective in self._under_way and not collective.event.query():
            time.sleep(_PAUSE)
            if time.monotonic() - looked < PATIENCE.total_seconds():
                continue
            looked = time.monotonic()
            try:
                collective.watch.slow()
            except OutOfStep as error:
                words = f"{collective.label}: the ranks are out of step, and the group was ended: {error}"
                logger.error("%s", words)
                self._broken[collective.group] = OutOfStep(words)
                self._end_group(collective.group)
                return
            except RuntimeError:
                pass  # the program went on meanwhile, or the store is gone: it will show


def _end_group(group: Any) -> None:
    """Have what is under way in ``group`` come to an end on this rank, whatever becomes of it; it is of no more use."""
    abort = getattr(group, "abort", None)
    if abort is not None:
        abort()


watcher = Watcher(_end_group)  # of the collectives that no host waits for
