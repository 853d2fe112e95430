"""A process that has imported what ranks need and forks one whenever `pool` asks: `python -m tests.harness.template`.

An interpreter that imports torch and the package costs seconds of a processor, a fork costs milliseconds. The template
does nothing else: it starts no thread, runs no kernel and joins no group, so nothing is inherited half alive.

`Template` is the end in the test's process. A request is one byte with file descriptors, then the rest, pickled; the
answer is the process id. How a rank ended comes through a pipe of its own, since only its parent, the template, learns.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

IMPORTED = (
    "pytest",  # by every file of tests
    "torch._dynamo",  # by the first optimizer in each process
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "fsdp.checkpoint.load_checkpoint",
    "fsdp.compat",  # brings torch.distributed.optim, which compiles scripts
    "tests.harness.lockstep",
    "tests.harness.process_groups",
    "tests.harness.sharded",
    "tests.harness.worker",
)


@dataclass(frozen=True)
class Request:
    """What a rank starts with; `arguments` are those of `worker.main`, after its two descriptors."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    path: Sequence[str]
    folder: str


class Forked:
    """A rank, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.sentinel = status  # readable when the template has told that it has ended
        self._code: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self._code is None:
            self._wait(None if self._is_over() else 0)
        return self._code

    def _is_over(self) -> bool:
        """Also before the template, for want of a processor, has told. Without /proc, its word alone counts."""
        try:
            with open(f"/proc/{self.pid}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0] in "ZX"
        except (FileNotFoundError, ProcessLookupError):
            return os.path.isdir("/proc/self")

    def wait(self, timeout: float | None = None) -> int:
        code = self._code if self._code is not None else self._wait(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(f"rank with process id {self.pid}", timeout or 0.0)
        return code

    def _wait(self, timeout: float | None) -> int | None:
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        if poll.poll(None if timeout is None else max(0.0, timeout) * 1000):
            text = os.read(self.sentinel, 16)
            self._code = int(text) if text else -signal.SIGKILL  # the template has ended: nobody will ever know
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        os.close(self.sentinel)


class Template:
    """Starts at once and imports beside the caller; the first `fork` waits for it."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (open until `close`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            env=dict(environment),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        self._socket = ours
        self._connection = Connection(os.dup(ours.fileno()))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and not self._connection.closed

    def fork(self, request: Request, pipe: int, lifeline: int, output: int) -> Forked:
        """A rank that has `pipe` and `lifeline`, and writes to `output`."""
        status, theirs = os.pipe()
        try:
            socket.send_fds(self._socket, [b"\0"], [pipe, lifeline, output, theirs])
            self._connection.send(request)
            return Forked(self._connection.recv(), status)
        except (OSError, EOFError) as error:
            os.close(status)
            self._log.seek(0)
            text = self._log.read().decode(errors="replace")
            raise RuntimeError(f"the process that forks ranks has ended:\n{text}") from error
        finally:
            os.close(theirs)

    def close(self) -> None:
        """End it. The ranks live on: they end with the test's process."""
        self._connection.close()
        self._socket.close()
        self._process.wait()
        self._log.close()


# -- in the template ---------------------------------------------------------------------------------------------


def serve(control: socket.socket) -> tuple[Request, int, int]:
    """Fork at every request. Returns in the ranks only: what was asked for, the pipe and the lifeline."""
    connection = Connection(os.dup(control.fileno()))
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    statuses: dict[int, int] = {}  # pipes by process id
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _tell_ends(statuses)
            continue
        try:
            _, found, _, _ = socket.recv_fds(control, 1, 4)
        except ConnectionError:
            found = []
        if not found:
            os._exit(0)  # the test's process has closed its end, or ended
        *descriptors, status = found
        request = connection.recv()
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            connection.close()
            for end in (control, woken, wakes):
                end.close()
            for other in (*statuses.values(), status):
                os.close(other)
            pipe, lifeline, output = descriptors
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            return request, pipe, lifeline
        statuses[pid] = status
        for descriptor in descriptors:
            os.close(descriptor)
        connection.send(pid)


def _tell_ends(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        end = statuses.pop(pid)
        try:
            os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
        except BrokenPipeError:
            pass  # nobody wants to know
        os.close(end)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test's process's to answer
    if hasattr(os, "SCHED_BATCH"):
        # Woken threads do not take the processor from those that run: where ranks outnumber processors, a thread of
        # gloo's that receives would do so with one that sends, which holds a lock that it then spins for.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    control = socket.socket(fileno=int(sys.argv[1]))
    gc.disable()  # nothing of what is imported goes: looking for what does takes a fifth of the time
    for name in IMPORTED:
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    assert threads == 1, f"{threads} threads: a fork has only one of them, and what the others were doing stays undone"
    gc.collect()
    gc.freeze()  # a collection in a rank leaves these pages shared
    gc.enable()
    request, pipe, lifeline = serve(control)
    os.chdir(request.folder)
    sys.path[:] = request.path
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv[1:] = [str(pipe), str(lifeline), *request.arguments]


if __name__ == "__main__":
    main()
    sys.modules["tests.harness.worker"].main()
