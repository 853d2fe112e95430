"""What the ranks of a group write for each other into the store through which they met: at any time, beside the
collectives, so that a rank can be heard which takes no part in them."""

from __future__ import annotations

import json
import os
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp.comm.groups import default_group, group_store

_SHORTEST, _LONGEST = 0.0002, 0.01  # seconds between two looks into the store


class Board:
    """A part of one group's store. Without a store (a stand-in) nobody is heard, and everybody agrees."""

    def __init__(self, group: Any, name: str) -> None:
        """``name`` is the same on all ranks, and that of no other board of the group."""
        self._group, self._name = group, name
        self._rank, self._size = group.rank(), group.size()
        self._lives: dict[int, list[Any]] = {}  # as they were read: they do not change

    def _path(self, key: str) -> str:
        return f"fsdp/{self._name}/{key}"

    def write(self, key: str, value: Any) -> None:
        """``value`` is anything that JSON holds."""
        store = group_store(self._group)
        if store is not None:
            store.set(self._path(key), json.dumps(value))

    def read(self, key: str) -> Any:
        """What was written; None if nothing was."""
        store = group_store(self._group)
        if store is None or not store.check([self._path(key)]):
            return None
        return json.loads(store.get(self._path(key)))

    def erase(self, *keys: str) -> None:
        store = group_store(self._group)
        if store is not None:
            for key in keys:
                store.delete_key(self._path(key))

    def sign(self, key: str) -> int:
        """How many ranks have signed ``key``, with this one."""
        store = group_store(self._group)
        return self._size if store is None else int(store.add(self._path(key), 1))

    def await_written(self, keys: list[str], patience: timedelta, look: Callable[[], None]) -> None:
        """Wait until all of ``keys`` are written; call ``look``, which may raise, whenever ``patience`` is over.

        Looks into the store again and again: a wait inside the store cannot be interrupted.
        """
        store = group_store(self._group)
        paths, pause, looked = [self._path(key) for key in keys], _SHORTEST, time.monotonic()
        while store is not None and not store.check(paths):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
            if time.monotonic() - looked > patience.total_seconds():
                look()
                looked = time.monotonic()

    # -- signs of life -------------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Write by what other ranks on this machine can tell whether this process is still there."""
        machine, pid = _machine(), os.getpid()
        self.write(f"life/{self._rank}", [machine, pid, _start_of(pid)])

    def dead(self) -> list[int]:
        """The ranks whose processes have ended, as far as this machine can tell. Only those that have lived."""
        found = []
        for rank in (rank for rank in range(self._size) if rank != self._rank):
            life: list[Any] | None = self._lives.get(rank) or self.read(f"life/{rank}")
            if life is None:
                continue
            self._lives[rank] = life
            if life[0] and life[0] == _machine() and _start_of(life[1]) != life[2]:
                found.append(rank)
        return found


def processes() -> Board | None:
    """Of the default group (None without one), for signs of life alone: its first call gives this process's own."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = default_group()
    if group not in _processes:
        _processes[group] = Board(group, "processes")
        _processes[group].live()
    return _processes[group]


_processes: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()


def _machine() -> str:
    """What names processes as this process does: this start of the system, and the names it sees; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _start_of(pid: int) -> int:
    """When the process began, in the system's own measure; -1 if there is none that runs."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])
