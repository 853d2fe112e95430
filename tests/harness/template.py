"""A process that has imported what ranks need and forks one whenever `pool` asks: `python -m tests.harness.template`,
with the names of more modules.

An interpreter that imports torch and the package costs seconds of a processor, a fork costs milliseconds. The template
does nothing else: it starts no thread, runs no kernel and joins no group, so nothing is inherited half alive. So are
the pytest processes of `scripts/run_tests.py`, from one that has collected the tests (see `handout`).

`Template` is the end in the process that asks, and in those forked from it: they may ask, too. A request is one byte
with file descriptors. One of them is a socket for this request alone: what was asked for lies in it, pickled, the
answer is the process id, and in the end it says how that process ended, since only its parent, the template, learns.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

CONTROL = "TEMPLATE_CONTROL"  # in the environment: the descriptor that requests come from
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
    """A process that was forked, as `subprocess.Popen` would show it."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self._status = status
        self.sentinel = status.fileno()  # readable when the template has told that it has ended
        self._code: int | None = None
        self._reading = threading.Lock()

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
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return code

    def _wait(self, timeout: float | None) -> int | None:
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        if poll.poll(None if timeout is None else max(0.0, timeout) * 1000):
            with self._reading:
                if self._code is None:
                    text = self._status.recv(16)
                    self._code = int(text) if text else -signal.SIGKILL  # the template has ended: nobody will ever know
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self._status.close()


class Template:
    """Starts at once and imports beside the caller; the first `fork` waits for it. Any thread may call it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """`command` is told in CONTROL where requests come from. It serves them until nobody can ask any more."""
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  (open until `close`)
        self.process = subprocess.Popen(
            [sys.executable, *command],
            env={**environment, CONTROL: str(theirs.fileno())},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        self._socket = ours

    @property
    def alive(self) -> bool:
        """Whether somebody reads the requests; nothing is ever written there."""
        return self._socket.fileno() >= 0 and not select.select([self._socket], [], [], 0)[0]

    def fork(self, request: Request, descriptors: Sequence[int], output: int) -> Forked:
        """A process that has these descriptors and writes to `output`."""
        status, theirs = socket.socketpair()
        try:
            with theirs, Connection(os.dup(status.fileno())) as connection:
                connection.send(request)
                socket.send_fds(self._socket, [b"\0"], [theirs.fileno(), output, *descriptors])
                theirs.close()
                return Forked(connection.recv(), status)
        except (OSError, EOFError) as error:
            status.close()
            raise RuntimeError(f"the process that forks others has ended:\n{self.said()}") from error

    def said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def close(self) -> None:
        """Let go of it: it ends when all have. What it has forked lives on: ranks end with the test's process."""
        self._socket.close()
        self.process.wait()  # at once in a process that has not started it
        self._log.close()


# -- in the template ---------------------------------------------------------------------------------------------


def control() -> socket.socket:
    return socket.socket(fileno=int(os.environ.pop(CONTROL)))


def serve(control: socket.socket, at_end: Callable[[], object] = bool) -> tuple[Request, list[int]]:
    """Fork at every request. Returns in the forked processes only: what was asked for, and the descriptors."""
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    assert threads == 1, f"{threads} threads: a fork has only one of them, and what the others were doing stays undone"
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the others' to answer
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes.fileno())
    statuses: dict[int, int] = {}  # descriptors by process id
    while True:
        ready, _, _ = select.select([control, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _tell_ends(statuses)
            continue
        try:
            _, found, _, _ = socket.recv_fds(control, 1, 8)
        except ConnectionError:
            found = []
        if not found:
            at_end()
            os._exit(0)  # all who could ask have closed their ends, or ended
        status, output, *descriptors = found
        connection = Connection(os.dup(status))
        request = connection.recv()  # it was there before the descriptors came
        pid = os.fork()
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupt)
            connection.close()
            for end in (control, woken, wakes):
                end.close()
            for other in (*statuses.values(), status):
                os.close(other)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.close(output)
            return request, descriptors
        statuses[pid] = status
        for descriptor in (output, *descriptors):
            os.close(descriptor)
        with contextlib.suppress(ConnectionError), connection:
            connection.send(pid)


def _tell_ends(statuses: dict[int, int]) -> None:
    while statuses:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        end = statuses.pop(pid)
        try:
            os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
        except ConnectionError:
            pass  # nobody wants to know
        os.close(end)


def main() -> None:
    if hasattr(os, "SCHED_BATCH"):
        # Woken threads do not take the processor from those that run: where ranks outnumber processors, a thread of
        # gloo's that receives would do so with one that sends, which holds a lock that it then spins for.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the test's process's to answer
    requests = control()
    gc.disable()  # nothing of what is imported goes: looking for what does takes a fifth of the time
    for name in (*IMPORTED, *sys.argv[1:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a rank leaves these pages shared
    gc.enable()
    request, (pipe, lifeline) = serve(requests)
    os.chdir(request.folder)
    sys.path[:] = request.path
    os.environ.clear()
    os.environ.update(request.environment)
    sys.argv[1:] = [str(pipe), str(lifeline), *request.arguments]


if __name__ == "__main__":
    main()
    sys.modules["tests.harness.worker"].main()
