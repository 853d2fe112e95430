"""Checkpoints of hosts: each host keeps the files of its ranks, and copies of the files of other hosts.

A directory of a host is a directory of checkpoints (:mod:`fsdp.checkpoint.files`) in which a checkpoint has the same
manifest and index as on the other hosts, and some of the files. No file is shared, so the ranks agree on success, and
then each host publishes by a rename of its own. Two checkpoints are kept: if a host ends between the renames, every
host still has the one before.

A load compares what the hosts have, and takes the newest checkpoint of which each file is whole on some host. A file
that a host lacks, because its memory is lost or another number of ranks reads, comes from a host that has it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.optim import Optimizer

from fsdp import environment
from fsdp.checkpoint import files
from fsdp.checkpoint.peers import Route, copy_files
from fsdp.checkpoint.rank_file import RankFile
from fsdp.checkpoint.save_checkpoint import Save, Written, described
from fsdp.comm.consensus import Ranks
from fsdp.comm.waiting.board import machine

_KEPT = 2  # checkpoints on a host

_T = TypeVar("_T")


class Local:
    """A directory of each host, in memory or on a disk of its own, for checkpoints that outlive the processes.

    Every rank has to make one, and the ranks of a host with the same directory. Checkpoints in it are for the next
    start of the same job, on the same hosts or on all but a few: save to a shared directory as well, less often.

    Hosts are told apart by the name and the boot of the system, or by the variable ``FSDP_HOST``, where containers of
    one system have directories of their own.

    Args:
        path: the directory on this host, which is made if it does not exist, such as ``/dev/shm/run``.
        copies: the number of other hosts that keep a copy of each file. The files of up to ``copies`` lost hosts are
            still there. 0: if a host is lost, the checkpoint is.

    Raises:
        ValueError: ``copies`` is negative.

    Example::

        local = fsdp.checkpoint.Local("/dev/shm/run")
        extra = fsdp.checkpoint.load([local, "checkpoints"], model, optimizer)
        for step in range(0 if extra is None else extra["step"] + 1, steps):
            train()
            if step % 10 == 0:
                local.save(model, optimizer, extra={"step": step})
            if step % 1000 == 0:
                fsdp.checkpoint.save("checkpoints", model, optimizer, extra={"step": step})
    """

    def __init__(self, path: str | Path, copies: int = 1) -> None:
        if copies < 0:
            raise ValueError(f"copies must be a number of other hosts, 0 or more, but got {copies}")
        self.path, self.copies = Path(path).absolute(), copies

    def __repr__(self) -> str:
        return f"Local({str(self.path)!r}, copies={self.copies})"

    def save(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        extra: Any = None,
        *,
        trusted: bool = False,
        process_group: Any = None,
    ) -> Path:
        """Save as :func:`fsdp.checkpoint.save` does, to the directories of the hosts. All ranks have to call.

        The memory of a host takes two checkpoints, and a third one during a save, each of ``1 + copies`` times the
        bytes of its ranks.

        Returns:
            the directory of the new checkpoint on this host.

        Raises, on every rank if on one, with the checkpoint before intact:
            ValueError: there are not more hosts than ``copies``.
            The errors of :func:`fsdp.checkpoint.save`.
        """
        saving = _LocalSave(Ranks.of(process_group), self, trusted)
        return saving.now("fsdp.checkpoint.Local.save()", model, optimizer, extra, progress=False)

    def async_save(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        extra: Any = None,
        *,
        trusted: bool = False,
        process_group: Any = None,
    ) -> Future[Path]:
        """Save as :meth:`save` does, but return as soon as everything is copied; see
        :func:`fsdp.checkpoint.async_save`."""
        saving = _LocalSave(Ranks.of(process_group), self, trusted)
        return saving.later("fsdp.checkpoint.Local.async_save()", model, optimizer, extra)


def joined(several: Sequence[list[_T]]) -> list[_T]:
    return [*chain(*several)]


def _host_name() -> str:
    return environment.HOST.value or f"{socket.gethostname()} {machine()}".strip()


# -- saving ------------------------------------------------------------------------------------------------------------


class _LocalSave(Save):
    """A checkpoint on the way to the directories of the hosts."""

    def __init__(self, ranks: Ranks, local: Local, trusted: bool) -> None:
        super().__init__(ranks, local.path, _KEPT, trusted=trusted)
        self._local = local

    def published(self, *, progress: bool) -> Path:
        """Write, copy and publish the checkpoint; see :meth:`Save.published`."""
        ranks, root = self.ranks, self._local.path
        hosts, number = ranks.round("find the hosts", lambda: [(_host_name(), _newest(root))], self._decided, joined)
        directory = files.temporary_of(files.numbered_path(root, number))
        publishes = hosts.index(hosts[ranks.rank]) == ranks.rank  # for this host
        self.directory = directory if publishes else None
        ranks.together("begin a checkpoint", lambda: files.make_directories(directory))
        records, table, manifest = ranks.round(
            "write a checkpoint",
            lambda: self.written(directory, progress=progress),
            lambda written: (written.records, *described(written, self.keys, ranks.size)),
            Written.joined,
        )
        sizes = {name: record.size for name, record in records.items()}
        routes = _copies(hosts, self._local.copies)
        ranks.together("copy to other hosts", lambda: copy_files(ranks, routes, sizes, directory))
        publish = partial(files.publish, directory, table, manifest) if publishes else lambda: None
        ranks.together("publish a checkpoint", publish)
        return files.final_of(directory)

    def discard(self, directory: Path) -> None:
        """Remove the files, published or not: another host may not have published them."""
        for path in (directory, files.final_of(directory)):
            with contextlib.suppress(OSError):  # the save raises the first error
                files.disk.remove(path)

    def _decided(self, said: Sequence[tuple[str, int]]) -> tuple[list[str], int]:
        """Return the host of each rank, and the number of the checkpoint."""
        hosts = [host for host, _ in said]
        if self._local.copies >= len({*hosts}):
            found = ", ".join(map(repr, dict.fromkeys(hosts)))
            raise ValueError(
                f"copies={self._local.copies} takes as many other hosts, but the ranks are on {len({*hosts})} alone "
                f"({found}): pass copies=0 to keep the files of a host there alone. (FSDP_HOST names the host of a "
                "rank, for tests and containers.)"
            )
        return hosts, 1 + max(number for _, number in said)


def _newest(root: Path) -> int:
    """Return the highest number of a checkpoint on this host, whole or not; 0 if there is none."""
    if not root.is_dir():
        return 0
    numbered = [*files.numbered(root, files.NAME), *files.numbered(root, files.UNFINISHED)]
    return max((number for number, _ in numbered), default=0)


def _copies(hosts: Sequence[str], copies: int) -> list[Route]:
    """Return the ways of each rank's file to ranks of the next ``copies`` hosts."""
    by_host: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        by_host.setdefault(host, []).append(rank)
    several = [*by_host.values()]
    routes = []
    for number, here in enumerate(several):
        for distance in range(1, copies + 1):
            there = several[(number + distance) % len(several)]
            routes += [Route(rank, there[place % len(there)], files.rank_name(rank)) for place, rank in enumerate(here)]
    return routes


# -- loading -----------------------------------------------------------------------------------------------------------


class Found(NamedTuple):
    """A checkpoint to load.

    Attributes:
        source: the number of the directory, in the order in which they were given.
        name: of the checkpoint.
        time: of the save.
        checksum: of the manifest.
    """

    source: int
    name: str
    time: float
    checksum: str


def look(source: int, local: Local) -> list[Found]:
    """Return the checkpoints of which this host has parts."""
    found = []
    for _, directory in files.numbered(local.path, files.NAME) if local.path.is_dir() else ():
        with contextlib.suppress(OSError, RuntimeError):  # a damaged manifest is none; another host has it
            manifest = files.read_manifest(directory / files.MANIFEST)
            found.append(Found(source, directory.name, manifest.time, manifest.checksum))
    return found


class _Head(NamedTuple):
    """The files of a checkpoint that are alike on all hosts."""

    manifest: bytes
    table: bytes


class _Holdings(NamedTuple):
    """The whole parts of a checkpoint on some hosts.

    Attributes:
        hosts: by rank.
        whole: the ranks that have verified a file on their hosts, by name.
        damaged: the errors of other files.
        head: None if no host has it.
    """

    hosts: dict[int, str]
    whole: dict[str, list[int]]
    damaged: list[str]
    head: _Head | None

    @staticmethod
    def joined(several: Sequence[_Holdings]) -> _Holdings:
        whole: dict[str, list[int]] = {}
        for one in several:
            for name, ranks in one.whole.items():
                whole[name] = [*whole.get(name, ()), *ranks]
        hosts = {rank: host for one in several for rank, host in one.hosts.items()}
        damaged = [text for one in several for text in one.damaged]
        return _Holdings(hosts, whole, damaged, next((one.head for one in several if one.head is not None), None))


class Gathering:
    """The files of one checkpoint of the hosts, for a load on these ranks.

    Attributes:
        directory: of the checkpoint on this host.
        problem: why it cannot be loaded; "" if it can.
    """

    def __init__(self, ranks: Ranks, local: Local, found: Found) -> None:
        """Verify the files on the hosts, and write manifest and index where they are missing."""
        self._ranks, self._checksum = ranks, found.checksum
        self.directory = local.path / found.name
        host = _host_name()
        hosts = ranks.round("find the hosts", lambda: [host], lambda hosts: hosts, joined)
        here = [rank for rank, other in enumerate(hosts) if other == host]
        self._holdings = _Holdings({}, {}, [], None)  # of all hosts, on rank 0
        label = "verify the files of the hosts"
        self.problem, head = ranks.round(label, lambda: self._verified(host, here), self._compared, _Holdings.joined)
        if head is not None:
            writes = here[0] == ranks.rank
            ranks.together("write the index of a checkpoint", lambda: self._place(head) if writes else None)
            manifest = files.parsed_manifest(self.directory / files.MANIFEST, head.manifest)
            self._sizes = {name: record.size for name, record in manifest.files.items()}

    def _verified(self, host: str, here: Sequence[int]) -> _Holdings:
        """Verify this rank's share of the files on its host; give damaged ones another name."""
        rank, whole, damaged = self._ranks.rank, dict[str, list[int]](), list[str]()
        try:
            content = (self.directory / files.MANIFEST).read_bytes()
            manifest = files.parsed_manifest(self.directory / files.MANIFEST, content)
            head = _Head(content, files.read_verified(self.directory / files.INDEX, manifest.files[files.INDEX]))
        except (OSError, RuntimeError):
            return _Holdings({rank: host}, whole, damaged, None)
        if manifest.checksum != self._checksum:
            return _Holdings({rank: host}, whole, damaged, None)
        names = [name for name in map(files.rank_name, range(manifest.ranks)) if (self.directory / name).exists()]
        for name in names[here.index(rank) :: len(here)]:
            try:
                with RankFile(self.directory / name, manifest.files[name]) as file:
                    file.verify()
                whole[name] = [rank]
            except (OSError, RuntimeError) as error:
                damaged.append(str(error))
                files.disk.rename(self.directory / name, self.directory / f".{name}.damaged")
        return _Holdings({rank: host}, whole, damaged, head)

    def _compared(self, holdings: _Holdings) -> tuple[str, _Head | None]:
        """Return the problem of the checkpoint, and the contents of manifest and index."""
        self._holdings, head, problem = holdings, holdings.head, "no host has its index"
        if head is not None:
            manifest = files.parsed_manifest(self.directory / files.MANIFEST, head.manifest)
            lost = [name for name in map(files.rank_name, range(manifest.ranks)) if name not in holdings.whole]
            problem = "; ".join([f"no host has {', '.join(lost)} whole", *holdings.damaged]) if lost else ""
        return problem, None if problem else head

    def _place(self, head: _Head) -> None:
        """Write manifest and index on this host, unless they are there."""
        files.make_directories(self.directory)
        for name, content in ((files.INDEX, head.table), (files.MANIFEST, head.manifest)):
            path, partial = self.directory / name, self.directory / f".{name}.tmp"
            if not (path.exists() and path.read_bytes() == content):
                files.write_durably(partial, content)
                files.disk.rename(partial, path)

    def fetch(self, needed: Callable[[], Sequence[str]]) -> None:
        """Copy files from other hosts until ``needed``, which lists files that this rank lacks, lists none on any
        rank."""
        ranks = self._ranks

        def lacked() -> list[tuple[int, str]]:
            return [(ranks.rank, name) for name in needed()]

        while routes := ranks.round("find files of other hosts", lacked, self._routes, joined):
            several = routes  # of this turn
            label = "copy from other hosts"
            ranks.together(label, lambda: copy_files(ranks, several, self._sizes, self.directory))  # noqa: B023

    def _routes(self, lacked: Sequence[tuple[int, str]]) -> list[Route]:
        """Return the routes of all ranks: one for each file that a host lacks."""
        first: dict[tuple[str, str], int] = {}  # by host and name: the rank that gets the file
        for rank, name in lacked:
            first.setdefault((self._holdings.hosts[rank], name), rank)
        routes = []
        for number, ((_, name), rank) in enumerate(first.items()):
            sources = self._holdings.whole[name]
            routes.append(Route(sources[number % len(sources)], rank, name))
        return routes
