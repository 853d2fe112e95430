"""Memory of this process that the other processes of the host map, for :mod:`fsdp.comm.transport.channel`.

[Note: Nothing is left]
A segment is a sparse file without a name. Only processes of the same user can open it, and it ends with the last
process that maps it. Pages are reserved before they are written, because a missing page would kill the process. They
are returned to the system after a second without an allocation. So consecutive steps find their memory, and a program
at rest holds none.
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
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from fsdp.comm import threads
from fsdp.comm.host_memory import MAP_FIXED, MAP_NORESERVE, map_at

SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")
HEADER = 1 << 13  # bytes for the posts of a channel

_HEADERS = 1 << 26  # bytes at the start of a segment for headers; but few pages of it are ever used


class _Here(threading.local):
    """The state of this thread.

    Attributes:
        may_wait: whether the thread may wait for readers; see ``without_waiting``.
    """

    may_wait = True


_here = _Here()


@contextlib.contextmanager
def without_waiting() -> Iterator[None]:
    """Wait for no reader on this thread inside the context; memory that is still read is returned later.

    The caller may be the garbage collector, in the middle of another wait.
    """
    before, _here.may_wait = _here.may_wait, False
    try:
        yield
    finally:
        _here.may_wait = before


class Readers(Protocol):
    """Processes that read the posts of this one, in order."""

    def is_read(self, number: int) -> bool:
        """Return whether all have read the posts up to ``number``."""

    def wait_for_readers(self, number: int) -> None:
        """Wait for them to read the posts up to ``number``, for a limited time.

        Raises:
            RuntimeError: some cannot read any more.
        """


class Mapping:
    """A mapped segment, of this process or of a peer."""

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
        """Return a cached tensor of ``numel`` elements at ``offset`` bytes."""
        key = offset, numel, dtype
        if key not in self._pieces:
            if len(self._pieces) > 4096:
                self._pieces.clear()
            with torch.inference_mode(False):  # it is also written outside of inference mode
                piece = torch.frombuffer(self.memory, dtype=dtype, count=max(numel, 1), offset=offset)[:numel]
            self._pieces[key] = piece
        return self._pieces[key]

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return pages to the system, for all processes that map them; a fork returns none."""
        if not self._in_fork:
            with contextlib.suppress(OSError):  # locked pages stay
                self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)

    def part(self) -> None:
        """Separate a fork from its parent: later writes stay in the fork."""
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
    """The process of a rank, maybe this one, and its segment."""

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
    """A piece of the segment, reused only after the peers have read the last post in it."""

    __slots__ = ("_reader", "lent", "nbytes", "offset", "reserved", "storage")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes
        self.reserved = False  # whether the system has given memory
        self.lent: Any = None  # a weak reference to the holder
        self.storage: torch.UntypedStorage | None = None  # a storage of the block without another holder
        self._reader: tuple[Readers, int] | None = None

    def posted(self, readers: Readers, number: int) -> None:
        self._reader = readers, number

    @property
    def readers(self) -> Readers | None:
        """The processes of which some have yet to read this block."""
        if self._reader is not None and self._reader[0].is_read(self._reader[1]):
            self._reader = None
        return None if self._reader is None else self._reader[0]

    @property
    def is_read(self) -> bool:
        return self.readers is None

    def wait_for(self, readers: Readers | None) -> None:
        """Wait until ``readers`` have read this block. A failure is reported where the readers are needed."""
        if readers is not None and self.readers is readers and self._reader is not None and _here.may_wait:
            with contextlib.suppress(RuntimeError):
                readers.wait_for_readers(self._reader[1])


class Segment:
    """The memory of this process that its peers read.

    Methods that may wait for memory to be read are given the ``readers`` that come to the same point of the program.
    Readers of a different group, which may be out of use, are not waited for.
    """

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
        self._free: list[Block] = []  # in the order of their return
        self._lent: dict[int, Block] = {}  # by address
        self._lock = threading.Lock()  # a garbage collection may return memory anywhere
        self._when_idle = threads.WhenIdle(self._trim_idle)

    def new_header(self) -> int:
        """Reserve the header of a new channel, filled with zeros, and return its offset in bytes.

        Raises:
            OSError: as many channels as headers fit were made in this process.
        """
        with self._lock:  # groups that two threads use for the first time
            offset = self._headers * HEADER
            if offset == _HEADERS:
                raise OSError(f"this process has shared memory with {_HEADERS // HEADER - 1} groups, and no more fit")
            self._headers += 1
        os.posix_fallocate(self.file, offset, HEADER)
        return offset

    def allocate(self, nbytes: int, readers: Readers | None = None) -> torch.UntypedStorage:
        """Allocate a storage of at least ``nbytes`` undefined bytes, which lasts until its last holder is gone.

        Raises:
            OSError: the system has not enough memory.
        """
        block = self.take(nbytes, readers)
        storage, block.storage = block.storage, None
        return self._lend(block) if storage is None else storage

    def free(self, storage: torch.UntypedStorage) -> None:
        """Take back a storage that no tensor holds, for the next allocation of that size; nothing outside of the
        segment."""
        block = self._lent.get(storage.data_ptr())
        if block is not None:
            block.storage = storage
            self.leave(block)

    def _lend(self, block: Block) -> torch.UntypedStorage:
        """Return a storage over ``block``, which comes back when the last holder is gone."""
        memory = self.mapping.memory[block.offset : block.offset + block.nbytes]
        storage = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
        address = storage.data_ptr()

        def back(_: object) -> None:
            del self._lent[address]
            self.leave(block)

        self._lent[address] = block
        block.lent = weakref.ref(memory, back)
        return storage

    def lent_at(self, address: int) -> Block | None:
        """Return the lent block at ``address``, if there is one."""
        return self._lent.get(address)

    def take(self, nbytes: int, readers: Readers | None = None) -> Block:
        """Take a block of at least ``nbytes``, which the caller has to ``leave``."""
        with self._lock:
            self._when_idle.asked()
            return self._take(nbytes, readers)

    def _take(self, nbytes: int, readers: Readers | None) -> Block:
        nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        unread, block = self._fitting(nbytes, readers)
        if unread is not None and block is None:
            unread.wait_for(readers)  # a fast rank waits for slow readers, to need no more memory than they do
            _, block = self._fitting(nbytes, readers)
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

    def _fitting(self, nbytes: int, readers: Readers | None) -> tuple[Block | None, Block | None]:
        """Find the first free block that fits and that ``readers`` have yet to read, and the first without readers,
        preferably one with memory."""
        unread = read = None
        for block in self._free:
            if not nbytes <= block.nbytes <= 2 * nbytes:
                continue
            if not block.is_read:
                if unread is None and block.readers is readers:
                    unread = block
            elif block.reserved or read is None:
                read = block
                if block.reserved:
                    break
        return unread, read

    def leave(self, block: Block) -> None:
        self._free.append(block)
        self._when_idle.came_back()

    @property
    def held_nbytes(self) -> int:
        """The bytes of memory in use by the system, headers included."""
        return os.fstat(self.file).st_blocks * 512

    # The following methods return at once while a call is active: on a different thread, or on this one, if the garbage
    # collector is the caller.

    def keep(self, nbytes: int, block_nbytes: int, readers: Readers | None = None) -> None:
        """Keep at most ``nbytes`` of free memory, in blocks of up to ``block_nbytes``."""
        total = largest = 0
        for block in self._free:
            if block.reserved:
                total += block.nbytes
                largest = max(largest, block.nbytes)
        if (total <= nbytes and largest <= block_nbytes) or self._lock.locked():
            return
        with self._lock:
            for block in [block for block in self._free if block.reserved and block.nbytes > block_nbytes]:
                block.wait_for(readers)
                if block.is_read:
                    self._give_back(block)
            self._shrink_to(nbytes)
            while self._blocks and self._blocks[-1] in self._free and not self._blocks[-1].reserved:
                block = self._blocks.pop()
                self._free.remove(block)
                self._end = block.offset
                if block.storage is not None:
                    del self._lent[block.storage.data_ptr()]
                    block.lent = block.storage = None

    def trim(self, readers: Readers | None = None) -> None:
        """Return free memory without readers to the system; wait for ``readers`` first."""
        self.keep(0, 0, readers)

    def _trim_idle(self) -> bool:
        """Trim; return whether some memory still has readers."""
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
