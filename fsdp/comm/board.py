"""What the ranks of a group write for each other into the store through which they met: at any time, beside the
collectives, so that a rank can be heard which takes no part in them. No other file reads, writes or polls a store."""

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

import torch.distributed as dist

from fsdp.comm import waiting
from fsdp.comm.groups import default_group, group_store

_SHORTEST, _LONGEST = 0.0002, 0.01  # seconds between two looks into the store of few ranks
_CROWD = 64  # more than so many ranks look the less often: one process serves the store to all of them
_NEXT = 8  # of so many ranks one reads what they have posted, where not all have to be heard


class Board:
    """A part of one group's store. Without a store (a fake group) nobody is heard, and everybody agrees.

    The store may go with the rank that served it: what is written then is lost, nothing is read, and a wait raises.
    """

    def __init__(self, group: Any, name: str | None) -> None:
        """``name`` is the same on all ranks, and that of no other board of the group; None for a board of no store."""
        self._group, self._name = weakref.ref(group), name  # boards are kept by group: they must not keep it
        self._rank, self._size = group.rank(), group.size()
        self._longest = _LONGEST * max(1.0, self._size / _CROWD)
        self._turn = 0  # where ``posted_next`` goes on
        self._journals: dict[str, dict[int, Any]] = {}  # as they were read: what is in them does not change
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
        return self.posted_by(key, range(self._size))

    def posted_next(self, key: str) -> dict[int, Any]:
        """As ``posted``, of the next few ranks after this one; at the next call of those after them: so a look costs
        as much in a group of any size. Where some ranks do one thing and the rest another, somebody is next to one of
        the rest, whichever they are: that one has to tell the others what it saw."""
        others = self._size - 1
        turns = range(self._turn, self._turn + min(_NEXT, others))
        self._turn = turns.stop % max(1, others)
        return self.posted_by(key, sorted((self._rank + 1 + turn % others) % self._size for turn in turns))

    def posted_by(self, key: str, ranks: Iterable[int]) -> dict[int, Any]:
        """The messages under ``key`` of those of ``ranks`` that have written one."""
        messages = {rank: self.read(f"{key}/{rank}") for rank in ranks}
        return {rank: value for rank, value in messages.items() if value is not None}

    def wait_for_posts(self, key: str, patience: timedelta, enough: Callable[[dict[int, Any]], bool]) -> dict[int, Any]:
        """The messages under ``key`` once they are ``enough``, or ``patience`` is over."""
        until = time.monotonic() + patience.total_seconds()
        while not enough(messages := self.posted(key)) and time.monotonic() < until and self._store is not None:
            time.sleep(self._longest)
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
            pause = min(2 * pause, self._longest)
            if time.monotonic() - looked > waiting.PATIENCE.total_seconds():
                look()
                looked = time.monotonic()
        self._spent = [signed, met]

    def has_met(self, key: str) -> bool:
        """Whether all ranks have come to ``key``."""
        return self.read(f"{key}/met") is not None

    def release(self, key: str) -> None:
        """Let the ranks that wait at ``key`` go on, although not all have come."""
        self.write(f"{key}/met", True)

    def is_first(self, key: str) -> bool:
        """Whether this rank is the first to ask that of ``key``."""
        store = self._store
        if store is None:
            return True
        with contextlib.suppress(RuntimeError):
            return bool(store.add(self._path(key), 1) == 1)
        return True

    # -- signs of life -------------------------------------------------------------------------------------------------

    def live(self) -> None:
        """Write by what other ranks on this machine can tell whether this process is still there."""
        pid = os.getpid()
        if here := machine():
            self._log(f"lives/{here}", [self._rank, pid, _start_of(pid)])

    def dead(self) -> list[int]:
        """The ranks whose processes have ended, as far as the ranks of their machines have looked, or this machine can
        tell. Only those that have lived. A look costs as many operations on the store in a group of any size."""
        lives = {rank: life for rank, *life in self._logged(f"lives/{machine()}")}  # the latest of each
        ended = {rank: life for rank, *life in self._logged("deaths")}
        for rank, life in lives.items():
            if _start_of(life[0]) == life[1]:
                ended.pop(rank, None)
            elif ended.get(rank) != life:
                ended[rank] = life
                self._log("deaths", [rank, *life])
        return sorted(ended)

    def _log(self, key: str, value: Any) -> None:
        """Write ``value`` as one more of what ranks have logged under ``key``."""
        store = self._store
        if store is not None:
            with contextlib.suppress(RuntimeError):
                self.write(f"{key}/{store.add(self._path(key), 1)}", value)

    def _logged(self, key: str) -> list[Any]:
        """What all ranks have logged under ``key``; each thing is read once."""
        store, read = self._store, self._journals.setdefault(key, {})
        with contextlib.suppress(RuntimeError):
            for number in range(1, 1 + (0 if store is None else store.add(self._path(key), 0))):
                if number not in read and (value := self.read(f"{key}/{number}")) is not None:
                    read[number] = value
        return list(read.values())


def processes() -> Board | None:
    """Of the default group (None without one), for signs of life alone: its first call gives this process's own."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = default_group()
    board = _processes.get(group)
    if board is None:
        board = _processes[group] = Board(group, "processes")
        board.live()
    return board


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
