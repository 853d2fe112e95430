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
from fsdp.checkpoint.files import Manifest
from fsdp.checkpoint.peers import Route, copy_files
from fsdp.checkpoint.rank_file import RankFile
from fsdp.checkpoint.save_checkpoint import Save, Written, described
from fsdp.comm.consensus import Ranks
from fsdp.comm.waiting.board import machine

_ALIKE = files.INDEX, files.MANIFEST  # files that are the same on all hosts
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
    for _, directory in files.numbered(local.path, files.NAME):
        with contextlib.suppress(OSError, RuntimeError):  # a damaged manifest is none; another host has it
            manifest = files.read_manifest(directory / files.MANIFEST)
            found.append(Found(source, directory.name, manifest.time, manifest.checksum))
    return found


class _Holdings(NamedTuple):
    """The files of a checkpoint on some hosts.

    Attributes:
        sizes: of all files of the checkpoint, by name; none if no host has the manifest.
        whole: the ranks that have verified a file on their hosts, by name.
        damaged: the errors of other files.
    """

    sizes: dict[str, int]
    whole: dict[str, list[int]]
    damaged: list[str]

    @staticmethod
    def joined(several: Sequence[_Holdings]) -> _Holdings:
        result = _Holdings({}, {}, [])
        for one in several:
            result.sizes.update(one.sizes)
            result.damaged.extend(one.damaged)
            for name, ranks in one.whole.items():
                result.whole.setdefault(name, []).extend(ranks)
        return result


class Gathering:
    """The files of one checkpoint of the hosts, for a load on these ranks.

    Attributes:
        directory: of the checkpoint on this host.
        problem: why it cannot be loaded; "" if it can.
    """

    def __init__(self, ranks: Ranks, local: Local, found: Found) -> None:
        """Verify the files on the hosts, and copy index and manifest to hosts that lack them."""
        self._ranks, self._checksum, self.directory = ranks, found.checksum, local.path / found.name
        self._hosts = ranks.round("find the hosts", lambda: [_host_name()], lambda hosts: hosts, joined)
        label = "verify the files of the hosts"
        self._holdings = ranks.round(label, self._verified, lambda of_all: of_all, _Holdings.joined)
        sizes, whole, damaged = self._holdings
        lost = [name for name in sizes or [files.MANIFEST] if name not in whole]
        self.problem = "; ".join([f"no host has {', '.join(lost)} whole", *damaged]) if lost else ""
        if not self.problem:
            self.fetch(lambda: () if self._manifest() and (self.directory / files.INDEX).exists() else _ALIKE)

    def _manifest(self) -> Manifest | None:
        """Return the manifest on this host; None if it is damaged, or of another checkpoint."""
        with contextlib.suppress(OSError, RuntimeError):
            manifest = files.read_manifest(self.directory / files.MANIFEST)
            return manifest if manifest.checksum == self._checksum else None
        return None

    def _verified(self) -> _Holdings:
        """Verify this rank's share of the files on its host; give damaged ones another name."""
        rank, manifest, damaged = self._ranks.rank, self._manifest(), list[str]()
        if manifest is None:
            return _Holdings({}, {}, damaged)
        sizes, whole = {name: record.size for name, record in manifest.files.items()}, {files.MANIFEST: [rank]}
        sizes[files.MANIFEST] = (self.directory / files.MANIFEST).stat().st_size
        here = [other for other, host in enumerate(self._hosts) if host == self._hosts[rank]]
        names = [*map(files.rank_name, range(manifest.ranks)), files.INDEX]
        for name in names[here.index(rank) :: len(here)]:
            path, record = self.directory / name, manifest.files[name]
            if not path.exists():
                continue
            try:
                if name == files.INDEX:
                    files.read_verified(path, record)
                else:
                    with contextlib.ExitStack() as stack:
                        RankFile(path, record, stack).verify()
                whole[name] = [rank]
            except (OSError, RuntimeError) as error:
                damaged.append(str(error))
                files.disk.rename(path, self.directory / f".{name}.damaged")
        return _Holdings(sizes, whole, damaged)

    def fetch(self, needed: Callable[[], Sequence[str]]) -> None:
        """Copy files from other hosts until ``needed``, which lists files that this rank lacks, lists none on any
        rank."""
        ranks, label = self._ranks, "find files of other hosts"
        while routes := ranks.round(label, lambda: [(ranks.rank, name) for name in needed()], self._routes, joined):
            copy = partial(copy_files, ranks, routes, self._holdings.sizes, self.directory)
            ranks.together("copy from other hosts", copy)

    def _routes(self, lacked: Sequence[tuple[int, str]]) -> list[Route]:
        """Return the routes of all ranks: one for each file that a host lacks."""
        first: dict[tuple[str, str], int] = {}  # by host and name: the rank that gets the file
        for rank, name in lacked:
            first.setdefault((self._hosts[rank], name), rank)
        routes = []
        for number, ((_, name), rank) in enumerate(first.items()):
            sources = self._holdings.whole[name]
            routes.append(Route(sources[number % len(sources)], rank, name))
        return routes
