"""Messages and meetings of the ranks of a group at the group's store, next to the collectives.

A rank that takes no part in a collective can still be read here. This file alone reads, writes or polls a store.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import ProcessGroup

from fsdp.comm import threads
from fsdp.comm.groups import group_store

_SHORTEST, _LONGEST = 0.0002, 0.01  # seconds between two looks into the store of few ranks
_CROWD = 64  # larger groups look less often: one process serves the store to all ranks


class Board:
    """A part of one group's store. Without a store (a fake group) every read is empty and every meeting is over.

    The store ends with the rank that serves it. Writes are lost then, reads are empty, and a meeting raises.
    """

    def __init__(self, group: ProcessGroup, name: str | None) -> None:
        """``name`` is the same on all ranks, and unique among the boards of the group; None for a board of no store."""
        self._group, self._name = weakref.ref(group), name  # boards are cached by group, and must not keep it alive
        self._rank, self._size = group.rank(), group.size()
        self._longest = _LONGEST * max(1.0, self._size / _CROWD)
        self._signed = ""  # the latest meeting: a rank that leaves and returns signs once
        self._said = "", ""  # the latest comparison, and the key that counts this rank
        self._spent: list[str] = []  # keys of the latest meeting

    @property
    def _store(self) -> Any | None:
        group = self._group()
        return None if self._name is None or group is None else group_store(group)

    def _path(self, key: str) -> str:
        return f"fsdp/{self._name}/{key}"

    def write(self, key: str, value: object) -> None:
        """Write ``value``, anything that JSON holds."""
        store = self._store
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(self._path(key), json.dumps(value))

    def read(self, key: str) -> Any:
        """Read a value; None if none was written."""
        store, path = self._store, self._path(key)
        with contextlib.suppress(RuntimeError):
            if store is not None and store.check([path]):
                return json.loads(store.get(path))
        return None

    def post(self, key: str, value: object) -> None:
        """Write this rank's message under ``key``."""
        self.write(f"{key}/{self._rank}", value)

    def posted(self, key: str, ranks: Iterable[int] | None = None) -> dict[int, Any]:
        """Return the messages under ``key`` by rank, of those of ``ranks`` (None: of all) that have written one."""
        messages = {rank: self.read(f"{key}/{rank}") for rank in (range(self._size) if ranks is None else ranks)}
        return {rank: value for rank, value in messages.items() if value is not None}

    def wait_for_posts(self, key: str, patience: timedelta, enough: Callable[[dict[int, Any]], bool]) -> dict[int, Any]:
        """Return the messages under ``key`` once they are ``enough``, or ``patience`` is over."""
        until = time.monotonic() + patience.total_seconds()
        while not enough(messages := self.posted(key)) and time.monotonic() < until and self._store is not None:
            time.sleep(self._longest)
        return messages

    def exchange(self, key: str, value: object, look: Callable[[], None]) -> dict[int, Any]:
        """Return the ``value`` of every rank under ``key``, in rank order; nothing without a store.

        ``look``: as for :meth:`meet`.
        """
        self.post(key, value)
        self.meet(key, look)
        return self.posted(key)

    def compare(self, key: str, value: object, look: Callable[[], None]) -> dict[int, Any] | None:
        """Wait as in :meth:`meet`; return None if all ranks have the same ``value``, else the value of each rank.

        ``value`` is anything that JSON holds. A rank that leaves the meeting and returns counts with its first value.
        Equal values cost a rank the same in a group of any size.
        """
        store = self._store
        if store is None:
            return None
        self.post(key, value)
        if self._said[0] != key:
            digest = hashlib.blake2b(json.dumps(value).encode(), digest_size=8).hexdigest()
            self._said = key, self._path(f"{key}/{digest}")
            store.add(self._said[1], 1)
        self.meet(key, look)
        self._spent.append(self._said[1])
        return None if store.add(self._said[1], 0) == self._size else self.posted(key)

    def meet(self, key: str, look: Callable[[], None], sign: str = "count") -> None:
        """Wait until all ranks have arrived at ``key`` with the same ``sign``.

        Polls the store, because a wait inside the store cannot be interrupted. Calls ``look``, which may raise, every
        :data:`fsdp.comm.threads.PATIENCE`.
        """
        store = self._store
        if store is None:
            return
        signed, met = (self._path(f"{key}/{word}") for word in (sign, "met"))
        signed_before, self._signed = self._signed, signed
        if signed != signed_before and store.add(signed, 1) == self._size:
            store.set(met, "true")
            for path in self._spent:  # all ranks have left that meeting
                store.delete_key(path)
        pause, looked = _SHORTEST, time.monotonic()
        while not store.check([met]):
            time.sleep(pause)
            pause = min(2 * pause, self._longest)
            if time.monotonic() - looked > threads.PATIENCE.total_seconds():
                look()
                looked = time.monotonic()
        self._spent = [signed, met]

    def is_first(self, key: str) -> bool:
        """Return whether this rank is the first to call this for ``key``."""
        store = self._store
        with contextlib.suppress(RuntimeError):
            return store is None or bool(store.add(self._path(key), 1) == 1)
        return True

    def replace(self, key: str, value: object, is_better: Callable[[Any], bool]) -> None:
        """Write ``value`` if there is none, or ``is_better`` than the present one; other ranks may do so now."""
        store, path, text, found = self._store, self._path(key), json.dumps(value), ""
        try:
            while store is not None:
                expected, found = found, store.compare_set(path, found, text).decode()
                if found in (text, expected) or not is_better(json.loads(found)):
                    return
        except RuntimeError:  # the store is gone, or of a class that cannot compare: the last writer counts then
            if (present := self.read(key)) is None or is_better(present):
                self.write(key, value)


def machine() -> str:
    """Identify the system that numbers processes by the boot and the process namespace; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def start_of(pid: int) -> int:
    """Return the start time of a process on this machine, in the unit of the system; -1 if it does not run."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return -1 if fields[0] in "ZX" else int(fields[19])
