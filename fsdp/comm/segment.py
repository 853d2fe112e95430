"""Memory of this process that other processes of the host can map: what :mod:`fsdp.comm.shared_memory` moves.

[Note: Nothing is left]
A segment is a sparse file without a name. Only processes of the same user can open it, and it goes with the last
process that maps it. Its pages are reserved before they are written (a page that the system cannot give would else kill
the process) and given back once nothing has asked for any for a second: so steps that follow each other find it as they
left it, and what rests, or does something else, holds none.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import random
import select
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from fsdp.comm import waiting
from fsdp.comm.host_memory import MAP_FIXED, MAP_NORESERVE, map_at

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")
HEADER = 1 << 13  # bytes for the posts of a channel

_PATIENCE = 10  # times as long as a rank waits for a collective before it looks around, it waits for memory to be read
_HEADERS = 1 << 26  # bytes at the start of a segment for headers; but few pages of it are ever used


class _Here(threading.local):
    """This thread.

    Attributes:
        may_wait: whether it may wait for readers; see ``without_waiting``.
    """

    may_wait = True


_here = _Here()


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Inside, nothing waits on this thread for others to read memory: whoever calls may be the collector, which comes
    anywhere, in the middle of another wait as well. Memory that is still read is given back later."""
    before, _here.may_wait = _here.may_wait, False
    try:
        yield
    finally:
        _here.may_wait = before


class Readers(Protocol):
    """Processes that read what this one has posted, in order."""

    def is_read(self, number: int) -> bool:
        """Whether all have read it up to there."""

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until something ``holds`` that they bring about; False if it does not within so many seconds."""


class Mapping:
    """A segment, this process's own or a peer's, as this process sees it."""

    def __init__(self, file: int, nbytes: int) -> None:
        self._map = mmap.mmap(file, nbytes)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self._address = torch.frombuffer(self._map, dtype=torch.uint8).data_ptr()
        self._file, self._nbytes, self._in_fork = os.dup(file), nbytes, False
        weakref.finalize(self, os.close, self._file)
        _mappings.add(self)
        self.memory = memoryview(self._map)
        self.words = self.memory.cast("q")
        self._pieces: dict[tuple[int, int, torch.dtype], torch.Tensor] = {}

    def piece(self, offset: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """``numel`` elements at ``offset`` bytes."""
        key = offset, numel, dtype
        if key not in self._pieces:
            if len(self._pieces) > 4096:
                self._pieces.clear()
            with torch.inference_mode(False):  # it is written outside as well
                piece = torch.frombuffer(self.memory, dtype=dtype, count=max(numel, 1), offset=offset)[:numel]
            self._pieces[key] = piece
        return self._pieces[key]

    def give_back(self, offset: int, nbytes: int) -> None:
        """Give pages to the system, for all processes that map them. A fork has none to give."""
        if not self._in_fork:
            with contextlib.suppress(OSError):  # pages that the process has locked stay
                self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def part(self) -> None:
        """Part from the process that this one was forked from: what is written from here on stays in this process."""
        self._in_fork = True
        with contextlib.suppress(OSError):  # a system without so much address space: the pages stay shared
            access, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE
            map_at(self._address, self._nbytes, access, flags, self._file)


_mappings: weakref.WeakSet[Mapping] = weakref.WeakSet()


def _part_in_child() -> None:
    for mapping in _mappings:
        mapping.part()


os.register_at_fork(after_in_child=_part_in_child)


class Peer:
    """A rank's process, maybe this one, and its segment."""

    def __init__(self, mapping: Mapping, process: int) -> None:
        self.mapping = mapping
        self._process = process
        weakref.finalize(self, os.close, process)

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))


class Block:
    """A piece of the segment. What its last post told others to read is not used again before they have."""

    __slots__ = ("_reader", "_worth_waiting", "lent", "nbytes", "offset", "reserved", "storage")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes
        self.reserved = False  # whether there is memory behind it
        self.lent: Any = None  # refers to what holds it
        self.storage: torch.UntypedStorage | None = None  # of it, which nothing else holds
        self._reader: tuple[Readers, int] | None = None
        self._worth_waiting = False  # for the readers

    def posted(self, readers: Readers, number: int) -> None:
        self._reader, self._worth_waiting = (readers, number), True

    @property
    def is_read(self) -> bool:
        if self._reader is not None and self._reader[0].is_read(self._reader[1]):
            self._reader = None
        return self._reader is None

    def wait(self) -> None:
        """Until it is read; not for long, and not again. Where that fails, whoever needs the readers will hear."""
        if not self.is_read and self._reader is not None and self._worth_waiting and _here.may_wait:
            self._worth_waiting = False
            with contextlib.suppress(RuntimeError):
                self._reader[0].until(lambda: self.is_read, _PATIENCE * waiting.PATIENCE.total_seconds())


class Segment:
    """This process's memory that others read."""

    def __init__(self) -> None:
        self.capacity = _HEADERS + 2 * mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES")
        self.file = os.memfd_create("fsdp")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.capacity)
        self.mapping = Mapping(self.file, self.capacity)
        self._headers = 1  # the first page holds the nonce
        os.posix_fallocate(self.file, 0, mmap.PAGESIZE)
        self.mapping.words[0] = self.nonce = random.SystemRandom().getrandbits(62)
        self.peer = Peer(self.mapping, os.pidfd_open(os.getpid()))
        self._end = _HEADERS
        self._blocks: list[Block] = []  # by offset
        self._free: list[Block] = []  # the one that came back first is the first
        self._lent: dict[int, Block] = {}  # by address
        self._lock = threading.Lock()  # a model may be collected anywhere, which gives memory back
        self._when_idle = waiting.WhenIdle(self._trim_idle)

    def new_header(self) -> int:
        """Reserve the header of a new channel, filled with zeros, and return its offset in bytes.

        Raises:
            OSError: as many channels as headers fit were made in this process.
        """
        offset = self._headers * HEADER
        if offset == _HEADERS:
            raise OSError(f"this process has shared memory with {_HEADERS // HEADER - 1} groups, and no more fit")
        os.posix_fallocate(self.file, offset, HEADER)
        self._headers += 1
        return offset

    def allocate(self, nbytes: int, *, keep: bool = True) -> torch.UntypedStorage:
        """At least ``nbytes`` bytes, undefined, until nothing holds the storage any more; then without ``keep`` the
        system gets them back at once, if they are read.

        Raises:
            OSError: the system has not so much.
        """
        block = self.take(nbytes)
        if keep and block.storage is not None:
            storage, block.storage = block.storage, None
            return storage
        self._forget_storage(block)

        def come_back() -> None:
            if not keep and block.is_read:
                self._give_back(block)
            self.leave(block)

        return self.lend(block, self.mapping.memory[block.offset : block.offset + block.nbytes], come_back)

    def free(self, storage: torch.UntypedStorage) -> bool:
        """Take back a storage that nothing else holds, for the next allocation of that size.

        Returns False for a storage of other memory."""
        block = self._lent.get(storage.data_ptr())
        if block is None:
            return False
        block.storage = storage
        self.leave(block)
        return True

    def _forget_storage(self, block: Block) -> None:
        """The one that nothing else holds: its end is not the end of the block."""
        if block.storage is not None:
            del self._lent[block.storage.data_ptr()]
            block.lent = None
            block.storage = None

    def lend(self, block: Block, memory: memoryview, come_back: Callable[[], None]) -> torch.UntypedStorage:
        """``memory``, where ``block`` is, which is to ``come_back`` when nothing holds the storage any more."""
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        address = storage.data_ptr()

        def back(_: object) -> None:
            del self._lent[address]
            come_back()

        self._lent[address] = block
        block.lent = weakref.ref(memory, back)
        return storage

    def lent_at(self, address: int) -> Block | None:
        """The block of memory that was allocated there."""
        return self._lent.get(address)

    def take(self, nbytes: int) -> Block:
        """A block of at least ``nbytes``, for the caller to ``leave``."""
        with self._lock:
            self._when_idle.asked()
            return self._take(nbytes)

    def _take(self, nbytes: int) -> Block:
        nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        fitting, block = self._fitting(nbytes)
        if fitting is not None and block is None:
            fitting.wait()  # a fast rank waits for slow readers, so as not to need more than they do
            _, block = self._fitting(nbytes)
        if block is not None:
            self._free.remove(block)
        else:
            self._shrink_to(nbytes)
            block = Block(self._end, nbytes)
            self._blocks.append(block)
            self._end += nbytes
        if not block.reserved:
            try:
                if block.offset + nbytes > self.capacity:
                    raise OSError(errno.ENOSPC, "no address space is left")
                os.posix_fallocate(self.file, block.offset, block.nbytes)
                block.reserved = True
            except OSError as error:
                words = f"{nbytes} bytes that the ranks of this host share: {error.strerror}. Free memory, or set "
                raise OSError(error.errno, f"{words}FSDP_COLLECTIVES=direct on all ranks") from error
            finally:
                if not block.reserved:
                    self._free.append(block)
        return block

    def _fitting(self, nbytes: int) -> tuple[Block | None, Block | None]:
        """The first free block for so much, and the first that is read, rather one that has memory."""
        first = read = None
        for block in self._free:
            if nbytes <= block.nbytes <= 2 * nbytes:
                first = first or block
                if (block.reserved or read is None) and block.is_read:
                    read = block
                    if block.reserved:
                        break
        return first, read

    def leave(self, block: Block) -> None:
        self._free.append(block)
        self._when_idle.came_back()

    @property
    def held_nbytes(self) -> int:
        """Bytes that there is memory behind, headers included."""
        return os.fstat(self.file).st_blocks * 512

    # What follows does nothing in the middle of another call: of one on another thread, or on this one, where what the
    # collector has found gives its memory back.

    def keep(self, nbytes: int, block_nbytes: int) -> None:
        """Keep of the memory that nothing holds no more than ``nbytes``, in blocks of up to ``block_nbytes``."""
        total = largest = 0
        for block in self._free:
            if block.reserved:
                total += block.nbytes
                largest = max(largest, block.nbytes)
        if (total <= nbytes and largest <= block_nbytes) or not self._lock.acquire(blocking=False):
            return
        try:
            for block in [block for block in self._free if block.reserved and block.nbytes > block_nbytes]:
                block.wait()
                if block.is_read:
                    self._give_back(block)
            self._shrink_to(nbytes)
        finally:
            self._lock.release()

    def trim(self, *, patient: bool = False) -> None:
        """Give back the memory that nothing holds and nobody reads. ``patient``: the others are about to have read
        it."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            for block in tuple(self._free) if patient else ():
                block.wait()
            self._shrink_to(0)
            while self._blocks and self._blocks[-1] in self._free and not self._blocks[-1].reserved:
                block = self._blocks.pop()
                self._free.remove(block)
                self._forget_storage(block)
                self._end = block.offset
        finally:
            self._lock.release()

    def _trim_idle(self) -> bool:
        """``trim``; whether slower ranks have yet to read some of it."""
        self.trim()
        return any(block.reserved for block in tuple(self._free))

    def _shrink_to(self, nbytes: int) -> None:
        total = sum(block.nbytes for block in self._free if block.reserved)
        for block in self._free:
            if total > nbytes and block.reserved and block.is_read:
                self._give_back(block)
                total -= block.nbytes

    def _give_back(self, block: Block) -> None:
        self.mapping.give_back(block.offset, block.nbytes)
        block.reserved = False
