"""The process of one rank, forked by `template` for `pool`. Serves jobs until the test's process ends."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import linecache
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp.flat import layout
from fsdp.runtime import arrivals
from tests.harness.pool import STACK_SIGNAL, TIDY_UP, Failed, Returned

_kept: list[Any] = []  # process groups that end with the process


def main() -> None:
    pipe, lifeline, rank, world_size, port = map(int, sys.argv[1:6])
    group_timeout, stack_path = float(sys.argv[6]), sys.argv[7]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    threading.Thread(target=_exit_with_parent, args=(lifeline,), daemon=True).start()
    stack_file = open(stack_path, "w")  # noqa: SIM115  (open for the life of the process)
    faulthandler.enable()  # a crash leaves its stack in the log
    faulthandler.register(STACK_SIGNAL, file=stack_file, all_threads=True)
    torch.set_num_threads(1)
    # Only a loss of power shows unsynced data; tests of that simulate a disk.
    os.fsync = os.fstat  # type: ignore[assignment]
    arrivals.SMALL = 64  # bytes: small models have gradients of both kinds
    if os.environ.get("LEAVES_AT_ODD_OFFSETS") == "1":
        placed = layout._placed
        layout._placed = lambda spec, offset: placed(spec, offset | 1)
    seed_the_cpu_only()
    dist.set_debug_level_from_env()  # the template's value is cached by torch
    connection = Connection(pipe)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=group_timeout)
    )
    connection.send(Returned(pickle.dumps(None), (0,), 0, False))
    jobs = 0
    while True:
        try:
            job = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        if job == TIDY_UP:
            jobs += 1
            _tidy_up(jobs)
        else:
            connection.send(_answer(job))


def seed_the_cpu_only() -> None:
    """Disable seeding of accelerators: `torch.manual_seed` would store a stack per call, which is slow."""
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None  # type: ignore[assignment]


def _exit_with_parent(lifeline: int) -> None:
    os.read(lifeline, 1)  # returns when the parent's end closes
    os._exit(1)


def _answer(job: bytes) -> Returned | Failed:
    filters, call = pickle.loads(job)
    threads = len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else threading.active_count()
    try:
        with _clean_state(), warnings.catch_warnings():
            for text in filters:
                _add_warning_filter(text)
            fn, args, kwargs = pickle.loads(call)
            payload = pickle.dumps(fn(*args, **kwargs))
    except (Exception, SystemExit) as error:
        return Failed(time.monotonic(), type(error).__name__, describe(error, __file__))
    return Returned(payload, _collectives(), threads, _is_replaced())


def _collectives() -> tuple[int, ...]:
    """Return this rank's numbers of collectives in the default group: by the backend and in shared memory."""
    package, group = sys.modules.get("fsdp.comm.transport.shared_memory"), dist.group.WORLD
    channel = None if package is None else package.known_channel(group)
    posted = () if channel is None else (channel.collectives.number, channel.questions.number)
    return group._get_sequence_number_for_group(), *posted


def _is_replaced() -> bool:
    """Return whether the default group is broken, or a new group carries its collectives after a failure.

    `_tidy_up` destroys the new group, so collectives of the next job would begin with another replacement.
    """
    package = sys.modules.get("fsdp.comm.lane.lane")
    lane = None if package is None else package._lanes.get(dist.group.WORLD)
    return lane is not None and bool(lane.carrier.closed or lane.carrier.number > 0)


def _tidy_up(jobs: int) -> None:
    """End the groups of the last job, once no rank is in the last collective any more.

    New groups of the next job have the same names on all ranks. Gloo's threads of a group wake up a hundred times a
    second until the group is freed. Meshes refer to groups, and caches of DTensor refer to meshes.
    """
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    if torch.__version__ < "2.7":  # the end of a gloo group waits for collectives that peers have not issued
        _kept.extend(groups)
    for group in groups:
        dist.destroy_process_group(group)
    if groups:
        gc.collect()  # quick: imported modules are frozen
        for mesh in [one for one in gc.get_objects() if type(one) is DeviceMesh]:
            vars(mesh).get("_pg_registry", {}).clear()
    dist.distributed_c10d._world.group_count = 1000 * jobs


@contextmanager
def _clean_state() -> Iterator[None]:
    """Start every job with the same seeds and settings, and restore them afterwards."""
    random.seed(0)
    torch.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    env = dict(os.environ)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(env)
        torch.set_num_threads(1)
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        if torch.are_deterministic_algorithms_enabled():  # the call imports the compiler
            torch.use_deterministic_algorithms(False)
        dist.set_debug_level_from_env()
        gc.enable()


def _add_warning_filter(text: str) -> None:
    """Add a filter `action:message:category:module:line`, the later parts optional, as in pytest's configuration."""
    action, message, category, module, line = (*text.split(":"), "", "", "", "")[:5]
    kind: type[Warning] = Warning
    if category:
        where, _, name = category.strip().rpartition(".")
        kind = getattr(importlib.import_module(where or "builtins"), name)
    warnings.filterwarnings(action.strip(), message.strip(), kind, module.strip(), int(line or 0))  # type: ignore[arg-type]


def describe(error: BaseException, harness: str) -> str:
    """Return the traceback below the file `harness` and, for a bare assertion, the values on its line."""
    tb = error.__traceback__
    while tb is not None and tb.tb_frame.f_code.co_filename == harness:
        tb = tb.tb_next
    text = "".join(traceback.format_exception(type(error), error, tb)).rstrip()
    if isinstance(error, AssertionError) and not str(error):
        while tb is not None and tb.tb_next is not None:
            tb = tb.tb_next
        if tb is not None:
            text += _values(tb.tb_frame, tb.tb_lineno)
    return text


def _values(frame: FrameType, line: int) -> str:
    """Return the local variables named on the failing line."""
    source = linecache.getline(frame.f_code.co_filename, line)
    words = dict.fromkeys(word for word in _identifiers(source) if word in frame.f_locals)
    return "".join(f"\n  where {word} = {_short(frame.f_locals[word])}" for word in words)


def _identifiers(source: str) -> list[str]:
    return "".join(c if c.isidentifier() or c.isdigit() else " " for c in source).split()


def _short(value: Any, limit: int = 300) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[:limit] + "..."
