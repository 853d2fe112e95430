"""How a rank waits for a collective: it looks now and then at what the other ranks do.

Whoever knows that is the group's :class:`Watch`: the agreement of the latest pass or call there, see :func:`watch`. On
CPU some works can only be waited for to the end (:class:`BlockingWork`): a thread does, and the rank looks around.

A collective on an accelerator is over when its event is. Where the ranks are out of step it never is: the host that
waits for the device, anywhere in the user's program, waits until the backend's own watchdog kills the process. So one
thread per process looks at the oldest event that is not over (:class:`Watcher`). Takes it long, the thread asks what
the other ranks do, and if they are out of step it logs the words, ends the group, which lets the device and so the host
go on, and has the next collective of the group raise.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist

from fsdp.comm.groups import backend_of, group_timeout
from fsdp.comm.recording import Told

logger = logging.getLogger("fsdp")

_T = TypeVar("_T")

PATIENCE = timedelta(seconds=1)  # how long to wait for a collective before looking what the other ranks do
NOTICE = timedelta(seconds=10)  # how long a rank waits before it says so on stderr
IDLE = 1.0  # seconds without a request for memory, after which what is spare is given back
_PAUSE = 0.1  # seconds between two looks at an event


class OutOfStep(RuntimeError):
    """The ranks are doing different things."""


class TimedOut(RuntimeError):
    """Other ranks did not come within so many seconds, the timeout of the process group."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"the other ranks did not come within {seconds:.0f} s, the timeout of the process group")
        self.seconds = seconds


_CLOSED = "connection closed", "connection reset", "timed out", "pair closure"  # as gloo says that


class Watch(Protocol):
    """Knows what the ranks are doing while one of them waits."""

    def slow(self) -> None:
        """The wait takes long. Raises RuntimeError if the ranks are out of step."""

    def explain(self) -> str:
        """What the ranks did last."""

    def tell(self, seconds: float, label: str) -> None:
        """Say on stderr that this rank has waited so long for what the ``label`` says."""

    def late(self, seconds: float, label: str) -> str:
        """The error's message where that took longer than the timeout of the process group."""


_watches: dict[int, weakref.ref[Watch]] = {}  # by the id of the group


def watch(group: Any, by: Watch) -> None:
    """What is issued in ``group`` from now on is watched ``by`` this one as long as it lives: of several trees that
    communicate over the group, the one that does now."""
    if id(group) not in _watches:
        weakref.finalize(group, _watches.pop, id(group))
    _watches[id(group)] = weakref.ref(by)


def watch_of(group: Any) -> Watch | None:
    """By whom ``group`` is watched now."""
    reference = _watches.get(id(group))
    return None if reference is None else reference()


class Daemon(threading.Thread):
    """A thread of the package that waits for work. It ends by ``stop()``, which test suites call of daemons that a test
    has left, or with the process; whoever needs it again makes another."""

    def __init__(self, run: Callable[[], None], end: Callable[[], None], name: str = "fsdp wait") -> None:
        """Start to ``run``, which returns once ``end`` was called."""
        super().__init__(target=run, name=name, daemon=True)
        self._end = end
        self.start()

    def stop(self) -> None:
        """End after the work that is under way, and wait for that."""
        self._end()
        self.join()


class _Thread:
    """Runs one action after another, and is used again: of each new thread some memory is never given back."""

    idle: ClassVar[list[_Thread]] = []
    _lock = threading.RLock()  # around a choice of who runs an action, which may not be one that ends

    def __init__(self) -> None:
        self._actions: queue.SimpleQueue[tuple[Callable[[], Any], futures.Future[Any]] | None] = queue.SimpleQueue()
        self._ends = False
        Daemon(self._run, self._end)

    @staticmethod
    def start(action: Callable[[], Any], result: futures.Future[Any]) -> None:
        """Run ``action`` in an idle thread, or a new one."""
        with _Thread._lock:
            thread = _Thread.idle.pop() if _Thread.idle else _Thread()
            thread._actions.put((action, result))

    def _end(self) -> None:
        with _Thread._lock:
            self._ends = True
            if self in _Thread.idle:
                _Thread.idle.remove(self)
            self._actions.put(None)

    def _run(self) -> None:
        while (item := self._actions.get()) is not None:
            action, result = item
            try:
                result.set_result(action())
            except BaseException as error:
                result.set_exception(error)
            del item, action, result
            with _Thread._lock:
                if not self._ends:
                    _Thread.idle.append(self)


def _in_fork() -> None:
    """Forget the threads, which a fork has not."""
    _Thread.idle.clear()
    _Thread._lock = threading.RLock()


os.register_at_fork(after_in_child=_in_fork)


def in_thread(action: Callable[[], _T]) -> futures.Future[_T]:
    """What ``action`` returns, or raises, in a thread of its own: it keeps no process alive, as those of an executor
    do, and no signal interrupts it."""
    result: futures.Future[_T] = futures.Future()
    _Thread.start(action, result)
    return result


@contextlib.contextmanager
def told_if_long(rank: int, where: str) -> Iterator[None]:
    """Inside, ``rank`` waits for something that has no look function. If that takes longer than :data:`NOTICE`, it is
    told on stderr; ``where`` is what comes after "has waited 10 s"."""
    over = threading.Event()

    def tell() -> None:
        if not over.wait(NOTICE.total_seconds()):
            logger.warning("rank %d has waited %.0f s %s", rank, NOTICE.total_seconds(), where)

    in_thread(tell)
    try:
        yield
    finally:
        over.set()


class WhenIdle:
    """Has spare memory given back once nothing has asked for any, or given any back, for :data:`IDLE` seconds."""

    def __init__(self, give_back: Callable[[], bool]) -> None:
        """``give_back`` returns whether it has to be called again. A thread waits from here on."""
        self._give_back = give_back
        self._asked, self._waits = 0.0, False
        self._wait: queue.SimpleQueue[bool] = queue.SimpleQueue()  # which a collection may interrupt; False: to end
        self._ended = False
        Daemon(self._run, self._end)

    def asked(self) -> None:
        """Memory was asked for. Spare memory is given back again from here on if the thread was stopped."""
        self._asked = time.monotonic()
        if self._ended:
            self._ended = False
            Daemon(self._run, self._end)

    def _end(self) -> None:
        self._wait.put(False)

    def came_back(self) -> None:
        """There is spare memory. This starts no thread: the collector may call it in the middle of a start."""
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


class HostWork:
    """What the host waits for, as long as it likes. A wait that is given up may begin again.

    Each wait asks whether something is one, which takes ten times as long of an abstract class: so it is none.
    """

    def wait(self, patience: timedelta | None = None) -> None:
        """
        Raises:
            RuntimeError: it failed, or takes longer than ``patience``; None: than the group allows.
        """
        raise NotImplementedError

    def is_completed(self) -> bool:
        """Whether it is over, or has failed."""
        raise NotImplementedError


_PATIENT = (dist.Work, HostWork)


class BlockingWork(HostWork):
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
    """A collective of a group, or an exchange of messages, as a rank waits for it.

    Attributes:
        label: what it is for.
    """

    __slots__ = ("_on_host", "_watch", "_works", "group", "label")

    def __init__(self, works: Sequence[Any], group: Any, label: str, on_host: bool, ends_alone: bool = False) -> None:
        """``works`` are ``torch.distributed``'s, none where the current stream waits for it anyway. ``on_host``: the
        host waits, as it does not for an accelerator. ``ends_alone``: they end without being waited for, unlike
        messages and a reduce-scatter of gloo's, and works of groups that are written in Python."""
        self.group, self.label = group, label
        self._on_host = on_host
        self._works = works if ends_alone or not works or not on_host else (BlockingWork(works),)
        self._watch = _watches.get(id(group))

    @staticmethod
    def of(several: Sequence[Work]) -> Work:
        """The wait for all of these, of one group and for one thing."""
        first, *others = several
        first._works = [work for each in several for work in each._works] if others else first._works
        return first

    @property
    def watch(self) -> Watch | None:
        return None if self._watch is None else self._watch()

    @property
    def on_host(self) -> list[HostWork]:
        """What the host waits for beside ``torch.distributed``'s own."""
        return [work for work in self._works if isinstance(work, HostWork)]

    def is_completed(self) -> bool:
        """As far as it can tell: what can only be waited for counts as completed."""
        return all(work.is_completed() for work in self._works if isinstance(work, dist.Work))

    def wait(self) -> None:
        """Wait as long as the group's timeout allows, and have the watch look around now and then. Where that is
        interrupted, or the ranks are out of step, it is still under way.

        Raises:
            RuntimeError: the collective failed or timed out, with what it was for and what the ranks did last.
        """
        works, given_up = self._works, False
        if not works:
            return
        if Told.recorder is not None:
            with Told.recorder.span("wait", self.label):
                self._wait(given_up)
            return
        if len(works) == 1 and self._watch is not None and self._on_host and isinstance(works[0], _PATIENT):
            try:  # nearly always it is soon over
                works[0].wait(PATIENCE)
                self._works = ()
                return
            except OutOfStep:
                raise
            except RuntimeError:
                given_up = True  # or it has failed, which the next wait tells
            except Exception:
                self._works = ()
                raise
        self._wait(given_up)

    def _wait(self, given_up: bool) -> None:
        """``given_up``: the first one has just been waited for, as long as a wait goes on before one looks around."""
        while self._works:
            first = self._works[0]
            try:
                watch = None if self._watch is None or not self._on_host else self._watch()
                if watch is None or not isinstance(first, _PATIENT):
                    first.wait()
                else:
                    self._wait_for(first, watch, given_up)
            except OutOfStep:
                raise
            except Exception as error:
                self._works = ()  # it has failed
                if not isinstance(error, RuntimeError):
                    raise
                in_memory = isinstance(first, HostWork) and not isinstance(first, BlockingWork)
                closed = "" if in_memory else watcher.closed(self.group, error)
                if isinstance(error, TimedOut) and self.watch is not None:
                    raise RuntimeError(f"{self.watch.late(error.seconds, self.label)}{closed}") from error
                words = "" if self.watch is None or not self._on_host else f" {self.watch.explain()}"
                what = f"{self.label}: the collective failed or timed out: {error}"
                raise RuntimeError(f"{what}.{words}{closed}") from error
            self._works, given_up = self._works[1:], False

    def _wait_for(self, work: Any, watch: Watch, given_up: bool) -> None:
        started, told, was_over = time.monotonic(), False, False
        if given_up:
            started -= PATIENCE.total_seconds()
        while True:
            if not given_up:
                try:
                    work.wait(PATIENCE)
                    return
                except RuntimeError as error:
                    if was_over:
                        raise  # failed, not just slow
                    timeout = group_timeout(self.group).total_seconds()
                    if time.monotonic() - started > timeout:
                        raise TimedOut(timeout) from error
            given_up, was_over = False, work.is_completed()  # or has failed; it may also have ended since: wait again
            if not was_over:
                watch.slow()
                told = told or self.tells_of(time.monotonic() - started, watch)

    def tells_of(self, seconds: float, watch: Watch) -> bool:
        """Have ``watch`` tell of a wait that has taken ``seconds``, if that is longer than :data:`NOTICE`; returns
        whether it is."""
        if seconds < NOTICE.total_seconds():
            return False
        watch.tell(seconds, self.label)
        return True


class _UnderWay(NamedTuple):
    event: Any
    work: Work


class Watcher:
    """Looks after the collectives that it is told to follow, from the first one on."""

    def __init__(self, end_group: Callable[[Any], None]) -> None:
        """``end_group`` has every collective of a group that is under way come to an end."""
        self._end_group = end_group
        self._changed = threading.Condition()
        self._under_way: deque[_UnderWay] = deque()  # oldest first
        self._broken: weakref.WeakKeyDictionary[Any, OutOfStep] = weakref.WeakKeyDictionary()
        self.any_broken = False  # whether a group was ended, since the beginning: each collective asks
        self._thread: Daemon | None = None
        self._ends = False  # whether the thread was told to end

    def check(self, group: Any) -> None:
        """Raises OutOfStep if ``group`` was ended."""
        if group in self._broken:
            raise OutOfStep(str(self._broken[group]))

    def closed(self, group: Any, error: Exception) -> str:
        """Where ``error`` means that gloo has closed the connections of ``group``, as it does for good when one of its
        collectives has timed out: words for that, which whoever uses the group next gets at once; else nothing."""
        says_so = isinstance(error, TimedOut) or any(words in str(error).lower() for words in _CLOSED)
        if not says_so or backend_of(group, torch.device("cpu")) != "gloo":
            return ""
        what = (
            "the connections of this process group are closed, for a rank has failed, or came later than the group's "
            f"timeout ({group_timeout(group).total_seconds():.0f} s): make a new process group "
            "(torch.distributed.new_group()), and wrap the model on that; or start again, and resume from the last "
            "checkpoint"
        )
        self._broken[group], self.any_broken = OutOfStep(what), True
        return f". From now on {what}"

    def follow(self, event: Any, work: Work, prepare: Callable[[], object] = lambda: None) -> None:
        """Look after ``work``, which ``event`` comes after. The thread calls ``prepare`` before its first look."""
        with self._changed:
            self._under_way.append(_UnderWay(event, work))
            self._changed.notify()
            if self._thread is None:
                self._ends = False
                run = functools.partial(self._look_after, prepare)
                self._thread = Daemon(run, self._end, "fsdp collectives")

    def pause(self) -> None:
        """Look at no event: a graph is being captured, which that would spoil. What came before is over."""
        with self._changed:
            self._under_way.clear()

    def _end(self) -> None:
        with self._changed:
            self._ends = True
            self._changed.notify()

    def _look_after(self, prepare: Callable[[], object]) -> None:
        prepare()
        while True:
            with self._changed:
                waited = not self._under_way
                self._changed.wait_for(lambda: self._under_way or self._ends)
                if not self._under_way:
                    self._thread = None
                    return
                oldest = self._under_way[0]
            if waited:
                time.sleep(_PAUSE)  # and see to several at once: to wake up for each costs the program time
            self._see_to_the_end(oldest)
            with self._changed:
                while self._under_way and (self._under_way[0] is oldest or self._under_way[0].event.query()):
                    self._under_way.popleft()

    def _see_to_the_end(self, collective: _UnderWay) -> None:
        looked, work, told = time.monotonic(), collective.work, False
        began = looked
        while collective in self._under_way and not collective.event.query():
            time.sleep(_PAUSE)
            if time.monotonic() - looked < PATIENCE.total_seconds():
                continue
            looked = time.monotonic()
            try:
                if (watch := work.watch) is not None:
                    watch.slow()
                    told = told or work.tells_of(looked - began, watch)
            except OutOfStep as error:
                words = f"{work.label}: the ranks are out of step, and the group was ended: {error}"
                logger.error("%s", words)
                self._broken[work.group], self.any_broken = OutOfStep(words), True
                self._end_group(work.group)
                return
            except RuntimeError:
                pass  # the program went on meanwhile, or the store is gone: it will show


def _end_group(group: Any) -> None:
    """Have what is under way in ``group`` come to an end on this rank, whatever becomes of it; it is of no more use."""
    abort = getattr(group, "abort", None)
    if abort is not None:
        abort()


watcher = Watcher(_end_group)  # of the collectives that no host waits for
