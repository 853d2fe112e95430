"""What the ranks of a group write for each other into the store through which they met: at any time, beside the
collectives, so that a rank can be heard which takes no part in them. No other file reads, writes or polls a store."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fsdp.comm import waiting
from fsdp.comm.groups import default_group, group_store

_SHORTEST, _LONGEST = 0.0002, 0.01  # seconds between two looks into the store


class Board:
    """A part of one group's store. Without a store (a fake group) nobody is heard, and everybody agrees.

    The store may go with the rank that served it: what is written then is lost, nothing is read, and a wait raises.
    """

    def __init__(self, group: Any, name: str | None) -> None:
        """``name`` is the same on all ranks, and that of no other board of the group; None for a board of no store."""
        self._group, self._name = weakref.ref(group), name  # boards are kept by group: they must not keep it
        self._rank, self._size = group.rank(), group.size()
        self._lives: dict[int, list[Any]] = {}  # as they were read: they do not change
        self._signed = ""  # the latest: who gives up to wait, and comes again, signs once
        self._said = "", ""  # the latest meeting of ranks that are to be alike, and where this one is counted
        self._spent: list[str] = []  # keys of the latest meeting

    @property
    def _store(self) -> Any | None:
        group = self._group()
        return None if self._name is None or group is None else group_store(group)

    def _path(self, key: str) -> str:
        return f"fsdp/{self._name}/{key}"

    def write(self, key: str, value: Any) -> None:
        """``value`` is anything that JSON holds."""
        store = self._store
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(self._path(key), json.dumps(value))

    def read(self, key: str) -> Any:
        """What was written; None if nothing was."""
        store, path = self._store, self._path(key)
        with contextlib.suppress(RuntimeError):
            if store is not None and store.check([path]):
                return json.loads(store.get(path))
        return None

    def post(self, key: str, value: Any) -> None:
        """Write this rank's message under ``key``."""
        self.write(f"{key}/{self._rank}", value)

    def posted(self, key: str) -> dict[int, Any]:
        """The messages of the ranks under ``key``, by rank, of those that have written one."""
        messages = {rank: self.read(f"{key}/{rank}") for rank in range(self._size)}
        return {rank: value for rank, value in messages.items() if value is not None}

    def wait_for_posts(self, key: str, patience: timedelta, enough: Callable[[dict[int, Any]], bool]) -> dict[int, Any]:
        """The messages under ``key`` once they are ``enough``, or ``patience`` is over."""
        until = time.monotonic() + patience.total_seconds()
        while not enough(messages := self.posted(key)) and time.monotonic() < until and self._store is not None:
            time.sleep(_LONGEST)
        return messages

    def exchange(self, key: str, value: Any, look: Callable[[], None]) -> dict[int, Any]:
        """What every rank says under ``key``, by rank, in rank order; ``look`` as for ``meet``. Nothing without a
        store."""
        self.post(key, value)
        self.meet(key, look)
        return self.posted(key)

    def meet_alike(self, key: str, value: Any, look: Callable[[], None]) -> bool:
        """``meet``; whether all ranks have come with the same ``value``, anything that JSON holds. Of who gives up to
        wait, and comes again, the first one counts."""
        store = self._store
        if store is None:
            return True
        if self._said[0] != key:
            digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
            self._said = key, self._path(f"{key}/{digest}")
            store.add(self._said[1], 1)
        self.meet(key, look)
        self._spent.append(self._said[1])
        return bool(store.add(self._said[1], 0) == self._size)

    def meet(self, key: str, look: Callable[[], None], sign: str = "count") -> None:
        """Wait until all ranks have come to ``key``, with the same ``sign``; call ``look``, which may raise, whenever
        :data:`fsdp.comm.waiting.PATIENCE` is over.

        Looks into the store again and again: a wait inside the store cannot be interrupted.
        """
        store = self._store
        if store is None:
            return
        signed, met = (self._path(f"{key}/{word}") for word in (sign, "met"))
        signed_before, self._signed = self._signed, signed
        if signed != signed_before and store.add(signed, 1) == self._size:
            store.set(met, "true")
            for path in self._spent:  # all ranks have seen it, as they are here
                store.delete_key(path)
        pause, looked = _SHORTEST, time.monotonic()
        while not store.check([met]):
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
            if time.monotonic() - looked > waiting.PATIENCE.total_seconds():
                look()
                looked = time.monotonic()
        self._spent = [signed, met]

    def has_met(self, key: str) -> bool:
        """Whether all ranks have come to ``key``."""
        return self.read(f"{key}/met") is not None

    # -- signs of life -------------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Write by what other ranks on this machine can tell whether this process is still there."""
        pid = os.getpid()
        self.post("life", [machine(), pid, _start_of(pid)])

    def dead(self) -> list[int]:
        """The ranks whose processes have ended, as far as this machine can tell. Only those that have lived."""
        found = []
        for rank in (rank for rank in range(self._size) if rank != self._rank):
            life: list[Any] | None = self._lives.get(rank) or self.read(f"life/{rank}")
            if life is None:
                continue
            self._lives[rank] = life
            if life[0] and life[0] == machine() and _start_of(life[1]) != life[2]:
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


def machine() -> str:
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
