"""Ranks as threads of the test's own process: `run_threads(world_size, fn, *args)`, beside `pool.run_ranks`.

The default group is torch's threaded one, which copies tensors between threads. No process starts and no argument is
pickled, so a job costs milliseconds, and `fn` and its arguments may be closures and live objects. The group has
neither point-to-point messages nor a debug level. Ranks share warnings, the environment and torch's default
generator, so jobs that change these need processes.

Threads also check that state kept per process does not belong to one rank.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

from tests.harness.pool import GRACE, RankFailure
from tests.harness.worker import describe

_running = threading.Lock()  # torch's threaded group exists once per process


class _Rank(threading.Thread):
    """One rank with its result or failure."""

    def __init__(
        self, rank: int, world_size: int, store: Any, run: Callable[[], Any], ended: threading.Semaphore
    ) -> None:
        super().__init__(name=f"rank {rank}", daemon=True)  # a stuck rank does not keep the process alive
        self.rank, self._world_size, self._store, self._run, self._ended = rank, world_size, store, run, ended
        self.result: Any = None
        self.failure: tuple[float, str, str] | None = None  # time, exception type and traceback
        self.is_over = False

    def run(self) -> None:
        try:
            dist.init_process_group("threaded", rank=self.rank, world_size=self._world_size, store=self._store)
            try:
                self.result = self._run()
            finally:
                dist.destroy_process_group()
        except BaseException as error:
            if not threaded.ProcessLocalGroup._terminate.is_set():  # otherwise torch ends this rank because of a peer
                self.failure = (time.monotonic(), type(error).__name__, describe(error, __file__))
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            self.is_over = True
            self._ended.release()

    def stack(self) -> str:
        frame = sys._current_frames().get(self.ident or 0)
        return "".join(traceback.format_stack(frame)[-20:]) if frame is not None else "no stack: it has just ended"


def run_threads(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `world_size` threads that are ranks and return results by rank.

    Every rank gets the same argument objects. The default generator is seeded once for all ranks. Raises
    `RankFailure` with the traceback of the rank that failed first, or at the timeout with the stacks of stuck ranks,
    whose threads are abandoned.
    """
    __tracebackhide__ = True
    with _running:
        torch.manual_seed(0)
        ended, store = threading.Semaphore(0), dist.HashStore()
        ranks = [_Rank(rank, world_size, store, lambda: fn(*args, **kwargs), ended) for rank in range(world_size)]
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        threaded.ProcessLocalGroup.reset()
        threaded._install_threaded_pg()
        try:
            for rank in ranks:
                rank.start()
            stuck = _wait(ranks, ended, time.monotonic() + timeout)
        finally:
            threaded._uninstall_threaded_pg()
            torch._C._distributed_c10d._set_thread_isolation_mode(False)
    failed = sorted((rank for rank in ranks if rank.failure is not None), key=lambda rank: rank.failure or ())
    if failed:
        assert failed[0].failure is not None
        _, kind, text = failed[0].failure
        raise RankFailure(f"rank {failed[0].rank} of {world_size} failed:\n{text}", failed[0].rank, kind)
    if stuck:
        names, stacks = ", ".join(map(str, stuck)), "".join(f"\n\nrank {rank}:\n{text}" for rank, text in stuck.items())
        message = f"timeout: rank {names} of {world_size} still running after {timeout:g} s{stacks}"
        raise RankFailure(message, next(iter(stuck)), "timeout")
    return [rank.result for rank in ranks]


def _wait(ranks: list[_Rank], ended: threading.Semaphore, deadline: float) -> dict[int, str]:
    """Wait for all ranks, until the deadline or shortly after the first failure; return stacks of running ranks.

    Ranks that wait for peers are ended.
    """
    for _ in ranks:
        if not ended.acquire(timeout=max(0.0, deadline - time.monotonic())):
            break
        if any(rank.failure is not None for rank in ranks):
            deadline = min(deadline, time.monotonic() + GRACE)
    stuck = {rank.rank: rank.stack() for rank in ranks if not rank.is_over}
    if stuck:
        threaded.ProcessLocalGroup.exception_handle(TimeoutError())
        for rank in ranks:
            rank.join(GRACE)
    return stuck
