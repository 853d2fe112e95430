"""Rank processes for tests: `run_ranks(world_size, fn, *args)` runs a module-level function on every rank.

There is one pool per world size, started at first use and kept; only the ranks of the latest one run. Ranks are forked
from a `template` that has imported torch and the package. There are two templates (or RANK_TEMPLATES of the
environment) for neighboring ranks, with different hash seeds, so sets have different orders on neighbors. A pool is
killed and replaced after any failure, so a failure never leaks into the next test, and when jobs have left many threads
or replaced the default group. A failing job shows one message: the traceback of the rank that failed first, the exit
code of a dead rank, or at a timeout the Python stacks of stuck ranks.

`on_ranks(world_size)` decorates a test whose body runs on the ranks. `run_fresh` runs one job in new processes, for
tests that break the process group or kill a rank.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import os
import pickle
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.harness.template import Request, Template

START_TIMEOUT = 120.0  # seconds until every rank of a new pool must have reported
TEMPLATES = int(os.environ.get("RANK_TEMPLATES", "2"))
WORN = 24  # threads left by earlier jobs in a rank: gloo's threads wake up a hundred times a second
GRACE = 1.0  # seconds for further reports after the first failure
TIDY_UP = b""  # message after all answers: end the groups of the last job; ranks do not answer
STACK_SIGNAL = signal.SIGUSR1  # asks a rank to write its Python stack
REPOSITORY = Path(__file__).resolve().parents[2]


class RankFailure(Exception):
    """A job failed. The message is complete; `rank` failed first, with an exception of type name `kind`."""

    def __init__(self, message: str, rank: int, kind: str) -> None:
        super().__init__(message)
        self.rank, self.kind = rank, kind


@dataclass(frozen=True)
class Died:
    """Result of a rank that ended without an answer: the exit code, negative for a signal."""

    exit_code: int

    def __str__(self) -> str:
        if self.exit_code < 0:
            return f"was killed by {signal.Signals(-self.exit_code).name}"
        return f"exited with code {self.exit_code}"


@dataclass(frozen=True)
class Failed:
    """Report of a rank whose function raised. `when` is the machine's monotonic clock, shared by all ranks."""

    when: float
    kind: str
    text: str


@dataclass(frozen=True)
class Returned:
    """Report of a rank whose function returned: the value, and numbers of collectives in the default group by kind.

    `threads` is their number at the start; `replaced` says whether the default group was replaced or is broken.
    """

    payload: bytes
    collectives: tuple[int, ...]
    threads: int
    replaced: bool


class _Rank:
    """One process and the parent's ends of the pipes."""

    def __init__(
        self, rank: int, world_size: int, port: int, folder: Path, group_timeout: float, env: Mapping[str, str]
    ) -> None:
        self.rank = rank
        environment = {**os.environ, "PYTHONPATH": _path(), **_rank_env(rank, world_size), **env}
        self.log_path, self.stack_path = folder / f"rank{rank}.log", folder / f"rank{rank}.stack"
        ours, theirs = socket.socketpair()
        alive, self._lifeline = os.pipe()  # the process exits when the parent's end closes
        arguments = tuple(str(x) for x in (rank, world_size, port, group_timeout, self.stack_path))
        request = Request(arguments, environment, list(sys.path), os.getcwd())
        with open(self.log_path, "wb") as log:
            self.process = _template(rank % TEMPLATES).fork(request, [theirs.fileno(), alive], log.fileno())
        theirs.close()
        os.close(alive)
        self.connection = Connection(ours.detach())

    def log_tail(self, lines: int = 15) -> str:
        text = self.log_path.read_text(errors="replace").strip().splitlines()[-lines:]
        return "".join(f"\n  | {line}" for line in text)

    def close(self) -> None:
        """End and reap the process. Idempotent."""
        if self.connection.closed:
            return
        self.connection.close()
        os.close(self._lifeline)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.process.close()


def _path() -> str:
    return os.pathsep.join([str(REPOSITORY), *(entry for entry in sys.path if entry and entry != str(REPOSITORY))])


_templates: dict[int, Template] = {}
_also_imported: list[str] = []


def _template(number: int) -> Template:
    template = _templates.get(number)
    if template is None or not template.alive:
        alone = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}  # numpy and the compiler start threads
        template = _templates[number] = Template(
            ["-m", Template.__module__, *_also_imported],
            {**os.environ, "PYTHONPATH": _path(), "PYTHONHASHSEED": "random", **alone},
        )
    return template


def start_templates(count: int = TEMPLATES, *, also: Sequence[str] = ()) -> None:
    """Start templates, which import the default modules and `also` beside the caller."""
    _also_imported.extend(also)
    for number in range(min(count, TEMPLATES)):
        _template(number)


def _rank_env(rank: int, world_size: int) -> dict[str, str]:
    """Return the variables that torchrun sets, and gloo's loopback device."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",
        "OMP_NUM_THREADS": "1",
    }


class Pool:
    """`world_size` rank processes with gloo as the default group. `run` may be called until the first failure."""

    def __init__(self, world_size: int, *, group_timeout: float = 30.0, env: Mapping[str, str] | None = None) -> None:
        self.world_size = world_size
        self.is_worn = False
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        # Port 0: the system picks a free port.
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=START_TIMEOUT)
        )
        self.ranks: list[_Rank] = []
        try:
            start_templates(world_size)
            for rank in range(world_size):
                self.ranks.append(_Rank(rank, world_size, self._store.port, self._folder, group_timeout, env or {}))
            self._collect(START_TIMEOUT, may_die=False, doing="starting")
        except BaseException:
            self.close()
            raise

    def run(self, job: bytes, timeout: float, may_die: bool = False) -> list[Any]:
        """Return results by rank. On failure close the pool and raise `RankFailure`."""
        __tracebackhide__ = True
        try:
            for rank in self.ranks:
                try:
                    rank.connection.send_bytes(job)
                except OSError:
                    pass  # it died since the last job: reported by the sentinel below
            answers = self._collect(timeout, may_die, doing="running")
            counts = {a.collectives for a in answers if isinstance(a, Returned)}
            if len(counts) > 1 and not may_die:
                each = ", ".join(str(a.collectives) for a in answers)
                raise RankFailure(f"ranks ran different numbers of collectives on the default group: {each}", 0, "")
            self.is_worn = any(isinstance(a, Returned) and (a.threads > WORN or a.replaced) for a in answers)
            for rank in self.ranks:
                with contextlib.suppress(OSError):
                    rank.connection.send_bytes(TIDY_UP)
        except BaseException:
            self.close()
            raise
        return [pickle.loads(a.payload) if isinstance(a, Returned) else a for a in answers]

    def _collect(self, timeout: float, may_die: bool, doing: str) -> list[Any]:
        """Return one answer per rank: `Returned`, or with `may_die` also `Died`."""
        __tracebackhide__ = True
        deadline = time.monotonic() + timeout
        starved = [_seconds_without_processor(rank) for rank in self.ranks]
        answers: dict[int, Returned | Failed | Died] = {}
        failed = False
        while len(answers) < self.world_size:
            waiting = [rank for rank in self.ranks if rank.rank not in answers]
            ready = _ready(waiting, deadline - time.monotonic())
            if not ready and not failed:
                # Time in which other work had the processors does not count.
                now = [_seconds_without_processor(rank) for rank in self.ranks]
                deadline += max(after - before for after, before in zip(now, starved, strict=True))
                starved = now
            for rank in ready:
                answers[rank.rank] = answer = _receive(rank)
                if not failed and (isinstance(answer, Failed) or (isinstance(answer, Died) and not may_die)):
                    failed = True
                    deadline = min(deadline, time.monotonic() + GRACE)
            if time.monotonic() >= deadline:
                break
        if failed:
            self._raise_first(answers)
        stuck = [rank for rank in self.ranks if rank.rank not in answers]
        if stuck:
            names = ", ".join(str(rank.rank) for rank in stuck)
            stacks = "".join(f"\n\nrank {rank.rank}:\n{text}" for rank, text in zip(stuck, _stacks(stuck), strict=True))
            message = f"timeout: rank {names} of {self.world_size} still {doing} after {timeout:g} s{stacks}"
            raise RankFailure(message, stuck[0].rank, "timeout")
        return [answers[rank] for rank in range(self.world_size)]

    def _raise_first(self, answers: Mapping[int, Returned | Failed | Died]) -> None:
        """Raise for the rank that failed first, with a line on each further failure and the stacks of remaining ranks.

        A death has precedence, because it makes peers fail.
        """
        __tracebackhide__ = True
        for index, answer in answers.items():
            if isinstance(answer, Died):
                text = f"rank {index} of {self.world_size} {answer}{self.ranks[index].log_tail()}"
                raise RankFailure(text, index, "died")
        failures = {index: answer for index, answer in answers.items() if isinstance(answer, Failed)}
        first = min(failures, key=lambda index: failures[index].when)
        text = f"rank {first} of {self.world_size} failed:\n{failures[first].text}"
        for index in sorted(set(failures) - {first}):
            failure = failures[index]
            text += f"\n\nrank {index} failed {failure.when - failures[first].when:.1f} s later: {_in_short(failure)}"
        stuck = [rank for rank in self.ranks if rank.rank not in answers]
        for rank, stack in zip(stuck, _stacks(stuck), strict=True):
            text += f"\n\nrank {rank.rank} was still running:\n{stack}"
        raise RankFailure(text, first, failures[first].kind)

    def send_signal(self, number: int) -> None:
        for rank in self.ranks:
            if not rank.connection.closed:
                rank.process.send_signal(number)

    @property
    def alive(self) -> bool:
        return bool(self.ranks) and all(r.process.poll() is None and not r.connection.closed for r in self.ranks)

    def close(self) -> None:
        """End every process and remove the pool's files. Idempotent."""
        for rank in self.ranks:
            rank.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _in_short(failure: Failed) -> str:
    """Return the error and the lines that led to it: "ValueError: no batch left (test_a.py:3 > test_a.py:7)"."""
    places = re.findall(r'^ +File ".*?([^/"]+)", line (\d+)', failure.text, re.MULTILINE)
    errors = re.findall(rf"^(?:\w+\.)*{failure.kind}\b.*", failure.text, re.MULTILINE)
    return f"{errors[-1] if errors else failure.kind} ({' > '.join(f'{file}:{line}' for file, line in places)})"


def _ready(ranks: Sequence[_Rank], timeout: float) -> list[_Rank]:
    """Return ranks that have answered or died; wait at most `timeout` seconds for the first."""
    poll = select.poll()
    by_fd: dict[int, _Rank] = {}
    for rank in ranks:
        # A descendant of the rank can hold the pipe open, so the process itself is watched, too.
        for fd in (rank.connection.fileno(), rank.process.sentinel):
            by_fd[fd] = rank
            poll.register(fd, select.POLLIN)
    found = {by_fd[fd].rank: by_fd[fd] for fd, _ in poll.poll(max(0.0, timeout) * 1000)}
    return list(found.values())


def _seconds_without_processor(rank: _Rank) -> float:
    """Return how long the main thread of `rank` was ready to run while all processors were busy; 0 without Linux."""
    try:
        with open(f"/proc/{rank.process.pid}/schedstat") as file:  # nanoseconds of running and of waiting, a count
            return int(file.read().split()[1]) / 1e9
    except (FileNotFoundError, ProcessLookupError):
        return 0.0


def _receive(rank: _Rank) -> Returned | Failed | Died:
    try:
        if rank.connection.poll(0):
            return rank.connection.recv()
    except (EOFError, OSError):
        pass
    try:
        return Died(rank.process.wait(timeout=5))
    except subprocess.TimeoutExpired:  # closed the pipe and still runs: treated as dead
        rank.process.kill()
        return Died(rank.process.wait())


def _stacks(ranks: Sequence[_Rank], limit: int = 40) -> list[str]:
    """Return the Python stacks of all threads of these ranks, most recent call first, as written by faulthandler."""
    for rank in ranks:
        rank.process.send_signal(STACK_SIGNAL)
    texts = []
    deadline = time.monotonic() + 2.0
    for rank in ranks:
        text = ""
        while time.monotonic() < deadline:
            text = rank.stack_path.read_text(errors="replace") if rank.stack_path.exists() else ""
            if "in main" in text:  # the outermost frame of the main thread, written last
                break
            time.sleep(0.02)
        threads = [block for block in text.split("\n\n") if "_exit_with_parent" not in block]
        lines = [line for block in threads for line in block.splitlines() if "<frozen runpy>" not in line]
        texts.append("\n".join(lines[:limit]) or "no stack: the process does not answer signals")
    return texts


_pools: dict[int, Pool] = {}
_warning_filters: list[str] = []


def set_warning_filters(filters: Sequence[str]) -> None:
    """Set warning filters of further jobs in pytest's form: action:message:category:module:line."""
    _warning_filters[:] = filters


def run_ranks(world_size: int, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """Run `fn(*args, **kwargs)` on `world_size` kept ranks and return results by rank.

    `fn` is a module-level function of an importable module. Arguments and results are pickled, so results hold plain
    values and detached CPU tensors. The default process group exists (gloo), seeds are 0, torch runs one thread, and
    warnings are treated as in the test session. Raises `RankFailure`, also after `timeout` seconds, in which time that
    a rank was ready to run while other work had the processors does not count.
    """
    __tracebackhide__ = True
    job = _job(fn, args, kwargs)
    pool = _pools.get(world_size)
    if pool is None or not pool.alive:
        if pool is not None:
            pool.close()
        pool = _pools[world_size] = Pool(world_size)
    for other in _pools.values():  # a stopped process takes no time: gloo's threads wake up a hundred times a second
        other.send_signal(signal.SIGCONT if other is pool else signal.SIGSTOP)
    results = pool.run(job, timeout)
    if pool.is_worn:  # at once: idle threads would disturb further pools
        pool.close()
    return results


def of_all_ranks(value: Any) -> list[Any]:
    """Return the value that each rank of the default group passes."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def run_fresh(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60.0,
    group_timeout: float = 30.0,
    env: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Like `run_ranks` in new processes, with `env` set before they join and a group timeout in seconds.

    A rank may die: the result is then a `Died`. An exception on any rank still fails the whole job.
    """
    __tracebackhide__ = True
    job = _job(fn, args, kwargs)
    pool = Pool(world_size, group_timeout=group_timeout, env=env)
    try:
        return pool.run(job, timeout, may_die=True)
    finally:
        pool.close()


def on_ranks(*world_sizes: int | str, timeout: float = 60.0) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the decorated test's body on kept ranks, as `run_ranks` does, with the test's arguments.

    Several numbers of ranks are cases of the parameter `world_size`. A string names the parameter of the test that
    holds the number, or as "run.world_size" an attribute of it. The test is a function of its module's top level.
    Parameters and fixtures are pickled, so `tmp_path` can be used and `monkeypatch` cannot. Marks stay above the
    decorator:

        @pytest.mark.parametrize("strategy", STRATEGIES)
        @on_ranks(2, 3)
        def test_training_equals_the_plain_model(strategy: ShardingStrategy, world_size: int) -> None: ...
    """
    (how,) = world_sizes if len(world_sizes) == 1 else ("world_size",)

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*args: Any, **kwargs: Any) -> None:
            __tracebackhide__ = True
            where = body.__module__, body.__qualname__
            size = how
            if isinstance(size, str):
                name, *attributes = size.split(".")
                size = functools.reduce(getattr, attributes, kwargs[name])
            run_ranks(size, _run_body, where, args, kwargs, timeout=timeout)

        return pytest.mark.parametrize("world_size", world_sizes)(test) if len(world_sizes) > 1 else test

    return decorate


def _run_body(where: tuple[str, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    module, name = where
    getattr(importlib.import_module(module), name).__wrapped__(*args, **kwargs)


def _job(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    if "<" in fn.__qualname__ or fn.__module__ == "__main__":
        raise TypeError(f"rank processes import the function by name: {fn.__qualname__} is not at module level")
    # Pickled apart from the filters, so that a failing import is the job's failure.
    return pickle.dumps((list(_warning_filters), pickle.dumps((fn, args, kwargs))))


def shutdown() -> None:
    """Close every pool. The next `run_ranks` starts new ones."""
    while _pools:
        _pools.popitem()[1].close()


def end_templates() -> None:
    """Close templates, which end when no further process uses them."""
    while _templates:
        _templates.popitem()[1].close()


@atexit.register
def _end() -> None:
    shutdown()
    end_templates()
