"""A process that imports what ranks need and forks one on each request of `pool`.

Run as `python -m tests.harness.template` with names of more modules. Importing torch and the package costs seconds,
a fork costs milliseconds. The template starts no thread, runs no kernel and joins no group, so a fork inherits no
unfinished state.

`Template` is the client side, in the requesting process and in processes forked from it. A request is one byte with
file descriptors. One of them is a socket for this request, which holds the pickled request, receives the process id,
and reports the exit status at the end, because only the parent (the template) can wait for the process.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

CONTROL = "TEMPLATE_CONTROL"  # environment variable with the descriptor of requests
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
    """Start values of a rank; `arguments` follow the two descriptors in `worker.main`."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    path: Sequence[str]
    folder: str


class Forked:
    """A forked process with the interface of `subprocess.Popen`."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self._status = status
        self.sentinel = status.fileno()  # readable when the template has reported the end
        self._code: int | None = None
        self._reading = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while the process runs."""
        if self._code is None:
            self._wait(None if self._is_over() else 0)
        return self._code

    def _is_over(self) -> bool:
        """Return whether the process has ended, before the template reports it. Without /proc, only that counts."""
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
                    self._code = int(text) if text else -signal.SIGKILL  # the template has ended: the exit code is lost
        return self._code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # ended since, and reaped by the template
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def close(self) -> None:
        self._status.close()


class Template:
    """Starts at once and imports beside the caller; the first `fork` waits for it. Thread-safe."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start `command` with CONTROL set to the descriptor of requests. It serves until no client is left."""
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
        """Return whether the template reads requests; it never writes to this socket."""
        return self._socket.fileno() >= 0 and not select.select([self._socket], [], [], 0)[0]

    def fork(self, request: Request, descriptors: Sequence[int], output: int) -> Forked:
        """Fork a process that has these descriptors and writes to `output`."""
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
        """Release the template, which ends after its last client. Forked processes live on; ranks end with the test."""
        self._socket.close()
        self.process.wait()  # returns at once in processes that did not start it
        self._log.close()


# -- in the template ---------------------------------------------------------------------------------------------


def control() -> socket.socket:
    return socket.socket(fileno=int(os.environ.pop(CONTROL)))


def serve(control: socket.socket) -> tuple[Request, list[int]]:
    """Fork at every request. Return request and descriptors, in forked processes only."""
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1
    assert threads == 1, f"{threads} threads: a fork keeps only one of them"
    woken, wakes = socket.socketpair()
    for end in (woken, wakes):
        end.setblocking(False)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # clients handle Ctrl-C
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
        if not found:  # all clients have closed their ends
            for pid in statuses:
                os.kill(pid, signal.SIGCONT)  # a stopped rank would stay for ever
            os._exit(0)
        status, output, *descriptors = found
        connection = Connection(os.dup(status))
        request = connection.recv()  # sent before the descriptors
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
            pass  # the client has ended
        os.close(end)


def serve_imported(names: Sequence[str]) -> tuple[Request, list[int]]:
    """Import modules and serve. Return as `serve` does, with path, directory and environment of the request."""
    requests = control()
    gc.disable()  # imports leave no garbage, and collections take a fifth of the time
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a fork leaves these pages shared
    gc.enable()
    request, descriptors = serve(requests)
    os.chdir(request.folder)
    sys.path[:] = request.path
    os.environ.clear()
    os.environ.update(request.environment)
    return request, descriptors


def main() -> None:
    if hasattr(os, "SCHED_BATCH"):
        # Woken threads do not preempt running ones. With more ranks than processors, a receiving thread of gloo would
        # preempt a sending one that holds a lock, and then spin for that lock.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test's process handles Ctrl-C
    request, (pipe, lifeline) = serve_imported((*IMPORTED, *sys.argv[1:]))
    sys.argv[1:] = [str(pipe), str(lifeline), *request.arguments]


if __name__ == "__main__":
    main()
    sys.modules["tests.harness.worker"].main()
