"""Gathers and reductions through memory that the ranks of one host share.

Each process has one :class:`Segment`, a sparse file without a name that its peers map: reduce buffers are allocated
from it (``flat/memory.py``), and shards are copied into it for a gather. A :class:`Channel` is what the ranks of one
group do with their segments. To communicate a rank *posts*: it writes down, in its own segment, where its part of the
collective lies. Once all have posted each reads the others' parts: a gather copies them, a reduction adds up this
rank's slice of every buffer in rank order 0..N-1, so its result has the bits of the direct exchange.

[Note: Posts]
Every rank of a group posts the same collectives in the same order, and numbers them. A post has the number, what it is
for, how many bytes and where; a reader compares the first three with its own, so ranks that are out of step find out at
once. The number is written last, and processors on which this file works (x86-64) show stores in their order. Posting
waits for nothing but a slot, of which there are many, and whoever waits, for whatever, finishes all that it has issued
as far as the others have posted: so no wait depends on itself. Collectives end in order; ``_DONE`` is the number of the
last one that a rank has read, and tells the others that the memory behind their posts is theirs again.

[Note: Nothing is left]
A segment has no name, only processes of the same user can open it, and it goes with the last process that maps it. Its
pages are reserved before they are written (a page that the system cannot give would else kill the process) and given
back while nothing trains.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import platform
import random
import select
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from fsdp.comm import waiting
from fsdp.comm.board import machine
from fsdp.comm.groups import group_timeout
from fsdp.comm.waiting import HostWork, OutOfStep

_SUPPORTED = sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")

_HEADERS = 1 << 26  # bytes at the start of a segment for the headers of channels; but few pages of it are ever used
_HEADER = 1 << 13
_SLOT = 128  # bytes of a post: four words, and a label
_LABEL, _TEXT = 32, _SLOT - 32
_SLOTS = _HEADER // _SLOT - 1  # the first has what is not a post
_DONE, _ELSEWHERE = 0, 1  # words of the first
_EVENT, _NBYTES, _WHERE = 1, 2, 3  # words of a post, behind its number
_NEVER = 1 << 62
_EPOCH = 1 << 32  # posts of a channel between two failures

_SPINS = 100  # looks before a wait sleeps
_SHORTEST, _LONGEST = 0.00003, 0.001  # seconds between two looks, and in a wait that takes longer than _SOON
_SOON = 0.02
_LOOK_AROUND = 0.1  # seconds between two looks for processes that have ended
_UNREAD = 3  # blocks of a size that may wait for slow readers before a fast rank waits for them


class _Mapping:
    """A segment, this process's own or a peer's, as this process sees it."""

    def __init__(self, file: int, nbytes: int) -> None:
        self._map = mmap.mmap(file, nbytes)
        self._map.madvise(mmap.MADV_DONTDUMP)
        self.memory = memoryview(self._map)
        self.words = self.memory[:_HEADERS].cast("q")
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
        self._map.madvise(mmap.MADV_REMOVE, offset, nbytes)


class _Peer:
    """A rank's process, maybe this one, and its segment."""

    def __init__(self, mapping: _Mapping, process: int) -> None:
        self.mapping = mapping
        self._process = process
        weakref.finalize(self, os.close, process)

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))


# -- memory ------------------------------------------------------------------------------------------------------------


class _Block:
    """A piece of the segment. What its last post told others to read is not used again before they have."""

    __slots__ = ("_patience", "_reader", "lent", "nbytes", "offset", "reserved")

    def __init__(self, offset: int, nbytes: int) -> None:
        self.offset, self.nbytes = offset, nbytes
        self.reserved = False  # whether there is memory behind it
        self.lent: Any = None  # refers to what holds it
        self._reader: tuple[Channel, int] | None = None
        self._patience = 0.0  # seconds that it is worth to wait for the readers

    def posted(self, channel: Channel, number: int) -> None:
        self._reader, self._patience = (channel, number), waiting.PATIENCE.total_seconds()

    @property
    def is_read(self) -> bool:
        if self._reader is not None and self._reader[0].is_read(self._reader[1]):
            self._reader = None
        return self._reader is None

    def wait(self) -> None:
        """Until it is read; not for long, and not again."""
        if not self.is_read and self._reader is not None and self._patience:
            patience, self._patience = self._patience, 0.0
            self._reader[0].until(lambda: self.is_read, patience)


class Segment:
    """This process's memory that others read."""

    def __init__(self) -> None:
        self.capacity = _HEADERS + 2 * mmap.PAGESIZE * os.sysconf("SC_PHYS_PAGES")
        self.file = os.memfd_create("fsdp")
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, self.capacity)
        self.mapping = _Mapping(self.file, self.capacity)
        self._address = self.mapping.piece(0, 1, torch.uint8).data_ptr()
        self._headers = 1
        os.posix_fallocate(self.file, 0, mmap.PAGESIZE)
        self.mapping.words[0] = self.nonce = random.SystemRandom().getrandbits(62)
        self.peer = _Peer(self.mapping, os.pidfd_open(os.getpid()))
        self._end = _HEADERS
        self._blocks: list[_Block] = []  # by offset
        self._free: list[_Block] = []  # the one that came back first is the first
        self._lent: dict[int, _Block] = {}  # by address
        self._lock = threading.Lock()  # a model may be collected anywhere, which gives memory back

    def new_header(self) -> int:
        """Where a new channel has its header, of zeros. It stays: some peer may look at it for ever."""
        offset = self._headers * _HEADER
        if offset == _HEADERS:
            raise OSError("no more headers")
        os.posix_fallocate(self.file, offset, _HEADER)
        self._headers += 1
        return offset

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """At least ``nbytes`` bytes, undefined, until nothing holds the storage any more.

        Raises:
            OSError: the system has not so much.
        """
        block = self.take(nbytes)
        memory = self.mapping.memory[block.offset : block.offset + block.nbytes]
        address = self._address + block.offset

        def come_back(_: object) -> None:
            del self._lent[address]
            self._free.append(block)

        self._lent[address] = block
        block.lent = weakref.ref(memory, come_back)
        return torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()

    def lent_at(self, address: int) -> _Block | None:
        """The block of memory that was allocated there."""
        return self._lent.get(address)

    def take(self, nbytes: int) -> _Block:
        """A block of at least ``nbytes``, for the caller to ``leave``."""
        with self._lock:
            return self._take(nbytes)

    def _take(self, nbytes: int) -> _Block:
        nbytes = -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        fitting = [block for block in self._free if nbytes <= block.nbytes <= 2 * nbytes]
        read = [block for block in fitting if block.is_read]
        if not read and len(fitting) >= _UNREAD:
            fitting[0].wait()
            read = [block for block in fitting if block.is_read]
        if read:
            block = max(read, key=lambda block: block.reserved)
            self._free.remove(block)
        else:
            self._shrink_to(4 * nbytes)
            block = _Block(self._end, nbytes)
            self._blocks.append(block)
            self._end += nbytes
        if not block.reserved:
            try:
                if self._end > self.capacity:
                    raise OSError(errno.ENOSPC, "no address space is left")
                os.posix_fallocate(self.file, block.offset, block.nbytes)
            except OSError as error:
                self._free.append(block)
                words = f"{nbytes} bytes that the ranks of this host share: {error.strerror}. Free memory, or set "
                raise OSError(error.errno, f"{words}FSDP_COLLECTIVES=direct on all ranks") from error
            block.reserved = True
        return block

    def leave(self, block: _Block) -> None:
        self._free.append(block)

    @property
    def held_nbytes(self) -> int:
        """Bytes that there is memory behind, headers included."""
        return os.fstat(self.file).st_blocks * 512

    def trim(self, *, patient: bool = False) -> None:
        """Give back the memory that nothing holds and nobody reads. ``patient``: the others are about to have read
        it."""
        if not self._lock.acquire(blocking=False):
            return  # in the middle of ``take``
        try:
            if patient:
                with contextlib.suppress(RuntimeError):  # whoever needs them will hear
                    for block in tuple(self._free):
                        block.wait()
            self._shrink_to(0)
            while self._blocks and self._blocks[-1] in self._free and not self._blocks[-1].reserved:
                block = self._blocks.pop()
                self._free.remove(block)
                self._end = block.offset
        finally:
            self._lock.release()

    def _shrink_to(self, nbytes: int) -> None:
        total = sum(block.nbytes for block in self._free if block.reserved)
        for block in self._free:
            if total > nbytes and block.reserved and block.is_read:
                self.mapping.give_back(block.offset, block.nbytes)
                block.reserved = False
                total -= block.nbytes


_segments: list[Segment] = []  # this process's own, once there is one


def segment() -> Segment | None:
    """This process's, if it has a channel."""
    return _segments[0] if _segments else None


# -- communication -----------------------------------------------------------------------------------------------------


class _Condition(HostWork):
    """Something that the ranks of a channel bring about.

    ``finish`` is called when all have posted, maybe again after an interrupt, and not at all once nobody waits for it.
    """

    def __init__(self, channel: Channel, holds: Callable[[], bool], finish: Callable[[], None] | None = None) -> None:
        self._channel, self._holds, self.finish = channel, holds, finish

    def wait(self, patience: timedelta | None = None) -> None:
        channel = self._channel
        if not channel.until(self._holds, channel.timeout if patience is None else patience.total_seconds()):
            raise RuntimeError("the other ranks do not come" if patience is None else "the wait is not over")

    def is_completed(self) -> bool:
        return self._channel.broken is not None or self._holds()


class _UnderWay(NamedTuple):
    """A collective that this rank has posted."""

    number: int
    event: int
    nbytes: int
    label: str
    work: weakref.ref[_Condition]


class Channel:
    """The ranks of one group, which all share memory. Used by one thread at a time; see [Note: Posts].

    Attributes:
        timeout: seconds that a collective may take.
        broken: why nothing more comes from the others, until ``renew``.
        usable: whether this is the process that made it, not one that was forked from that.
    """

    def __init__(self, group: Any, own: Segment, peers: Sequence[_Peer], headers: Sequence[int]) -> None:
        """``headers``: where each rank's header lies in its segment, in bytes."""
        self.timeout = group_timeout(group).total_seconds()
        self.broken: RuntimeError | None = None
        self.usable = True
        self._rank = group.rank()
        self._segment, self._words = own, own.mapping.words
        self._mappings = [peer.mapping for peer in peers]
        self._headers = headers
        self._place = headers[self._rank] // 8  # of this rank's header, in words
        self._others = [rank for rank in range(len(peers)) if rank != self._rank]
        self._peers = peers
        self._firsts = [(mapping.words, header // 8) for mapping, header in zip(self._mappings, headers)]
        self._number = 0  # of the last post
        self._elsewhere = 0  # how many collectives went another way
        self._under_way: deque[_UnderWay] = deque()

    # -- the two collectives -------------------------------------------------------------------------------------------

    def gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, event: int) -> HostWork:
        """Fill ``full`` with every rank's ``shard``. ``event``: what it is for, the same on all ranks."""
        number, target, source = self._next(label), full.view(torch.uint8), shard.view(torch.uint8)
        nbytes = source.numel()

        def finish() -> None:
            for rank, mapping in enumerate(self._mappings):
                part = source if rank == self._rank else mapping.piece(self._where(rank, number), nbytes, torch.uint8)
                target[rank * nbytes : (rank + 1) * nbytes].copy_(part)

        return self._post(number, event, nbytes, label, self._copy_out(source, number), finish)

    def reduce(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        label: str,
        event: int,
        add_up: Callable[[torch.Tensor, Sequence[torch.Tensor]], None],
    ) -> HostWork:
        """Have ``add_up`` write the sum of all ranks' pieces of ``full``, in rank order, into ``out``. Nothing is
        copied where ``full`` lies in the segment. ``event``: what it is for, the same on all ranks."""
        number, start = self._next(label), self._rank * out.nbytes
        lent = self._segment.lent_at(full.data_ptr())
        if lent is not None:
            lent.posted(self, number)

        def finish() -> None:
            several = enumerate(self._mappings)
            add_up(out, [m.piece(self._where(rank, number) + start, out.numel(), out.dtype) for rank, m in several])

        where = lent.offset if lent is not None else self._copy_out(full, number)
        return self._post(number, event, full.nbytes, label, where, finish)

    def _copy_out(self, source: torch.Tensor, number: int) -> int:
        """Where the others find a copy of ``source`` from the post of that ``number`` until they have read it."""
        block = self._segment.take(source.nbytes)
        self._segment.mapping.piece(block.offset, source.numel(), source.dtype).copy_(source)
        block.posted(self, number)
        self._segment.leave(block)
        return block.offset

    # -- posts ---------------------------------------------------------------------------------------------------------

    def _next(self, label: str) -> int:
        """The number of the next post, once its slot may be written."""
        number = self._number + 1
        if not self.is_read(number - _SLOTS) and not self.until(lambda: self.is_read(number - _SLOTS), self.timeout):
            raise RuntimeError(f"{label}: other ranks are too far behind")
        return number

    def _slot(self, rank: int, number: int) -> int:
        """Where ``rank`` has its post of that number, in bytes."""
        return self._headers[rank] + _SLOT * (1 + number % _SLOTS)

    def _post(
        self, number: int, event: int, nbytes: int, label: str, where: int, finish: Callable[[], None]
    ) -> HostWork:
        words, done, slot = self._words, self._place + _DONE, self._slot(self._rank, number)
        self._segment.mapping.memory[slot + _LABEL : slot + _SLOT] = label.encode()[:_TEXT].ljust(_TEXT, b"\0")
        at = slot // 8
        words[at + _EVENT], words[at + _NBYTES], words[at + _WHERE] = event, nbytes, where
        work = _Condition(self, lambda: words[done] >= number, finish)
        self._number = number
        self._under_way.append(_UnderWay(number, event, nbytes, label, weakref.ref(work)))
        words[at] = number
        return work

    def _where(self, rank: int, number: int) -> int:
        return self._mappings[rank].words[self._slot(rank, number) // 8 + _WHERE]

    def is_read(self, number: int) -> bool:
        """Whether all, this one among them, have read what this rank has posted up to there."""
        return all(words[place + _DONE] >= number for words, place in self._firsts)

    def _have_posted(self, what: _UnderWay) -> bool:
        """
        Raises:
            OutOfStep: some have posted something else.
        """
        all_have = True
        for rank in self._others:
            words, at = self._mappings[rank].words, self._slot(rank, what.number) // 8
            number = words[at]
            if number < what.number:
                all_have = False
            elif (number, words[at + _EVENT], words[at + _NBYTES]) != what[:3]:
                text = bytes(self._mappings[rank].memory[at * 8 + _LABEL : at * 8 + _SLOT]).rstrip(b"\0")
                theirs = f"{text.decode(errors='replace')!r} ({words[at + _NBYTES]} bytes)"
                raise OutOfStep(
                    f"the ranks are out of step: rank {self._rank} is at {what.label!r} ({what.nbytes} bytes), its "
                    f"collective {what.number % _EPOCH}, where rank {rank} is at {theirs}"
                )
        return all_have

    def _advance(self) -> None:
        """Finish what all have posted, in order."""
        if self.broken is not None:
            raise self.broken
        done = self._place + _DONE
        while self._under_way:
            what = self._under_way[0]
            if what.number > self._words[done]:  # else an interrupt came right here
                try:
                    if not self._have_posted(what):
                        return
                except OutOfStep as error:
                    self.broken = error
                    raise
                work = what.work()
                if work is not None and work.finish is not None:
                    work.finish()
                self._words[done] = what.number  # from here on it is over, for this rank and for the others
            self._under_way.popleft()

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until something ``holds`` that the others bring about, and finish meanwhile what they have posted;
        False if it does not within so many seconds.

        Raises:
            RuntimeError: a process has ended that has not brought it about.
            OutOfStep: the ranks do different things.
        """
        for _ in range(_SPINS):
            self._advance()
            if holds():
                return True
        started = looked = now = time.monotonic()
        while True:
            time.sleep(_SHORTEST if now - started < _SOON else _LONGEST)
            now, ended = time.monotonic(), list[int]()
            if now - looked > _LOOK_AROUND:  # before the last look at what they have posted
                looked, ended = now, [rank for rank in self._others if self._peers[rank].has_ended]
            self._advance()
            if holds():
                return True
            if ended:
                self.broken = RuntimeError(f"the process of {', '.join(f'rank {rank}' for rank in ended)} has ended")
                raise self.broken
            if now - started > seconds:
                return False

    def renew(self) -> None:
        """All ranks have met after a failure: what all have posted is finished, what only some have is forgotten."""
        self.broken = None
        with contextlib.suppress(RuntimeError):
            self._advance()
        self.broken = None
        self._under_way.clear()
        self._number = self._elsewhere = (self._number // _EPOCH + 1) * _EPOCH
        self._words[self._place + _DONE] = self._words[self._place + _ELSEWHERE] = self._number

    def reads_no_more(self) -> Callable[[], None]:
        """To be called, in the end, so that the others need not wait for this rank to read what they have posted."""
        words, done, process = self._words, self._place + _DONE, os.getpid()

        def tell() -> None:
            if os.getpid() == process:  # a fork would speak for another
                words[done] = _NEVER

        return tell

    # -- other ways ----------------------------------------------------------------------------------------------------

    def propose_elsewhere(self) -> HostWork:
        """This rank has to communicate in another way next. It can if all have to, which ``goes_elsewhere`` tells after
        the wait for this."""
        self._words[self._place + _ELSEWHERE] = proposal = self._elsewhere + 1
        return _Condition(self, lambda: self._first_to_post() or self._all_propose(proposal))

    def goes_elsewhere(self) -> bool:
        """Whether the next collective goes another way, on all ranks; see ``propose_elsewhere``."""
        elsewhere = not self._first_to_post()
        self._elsewhere += elsewhere
        self._words[self._place + _ELSEWHERE] = self._elsewhere
        return elsewhere

    def _first_to_post(self) -> bool:
        """Whether some rank has posted what this one has yet to post."""
        number = self._number + 1
        return any(self._mappings[rank].words[self._slot(rank, number) // 8] >= number for rank in self._others)

    def _all_propose(self, proposal: int) -> bool:
        return all(words[place + _ELSEWHERE] >= proposal for words, place in self._firsts)


# -- who shares memory -------------------------------------------------------------------------------------------------

_channels: weakref.WeakKeyDictionary[Any, Channel | None] = weakref.WeakKeyDictionary()
_peers: weakref.WeakValueDictionary[int, _Peer] = weakref.WeakValueDictionary()  # by the nonce of their segment


def _forget_in_child() -> None:
    """A fork sees the segments, and takes no part."""
    for channel in _channels.values():
        if channel is not None:
            channel.usable = False
    _segments.clear()
    _channels.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def connect(group: Any, agree: Callable[[torch.Tensor], None]) -> Channel | None:
    """The channel of ``group``; None unless its ranks all share memory. The first time all of them have to ask.

    Args:
        agree: replaces integers by the largest of all ranks, element by element.
    """
    if group not in _channels:
        rows = torch.zeros(group.size(), 6, dtype=torch.int64, device="cpu")
        with contextlib.suppress(OSError):
            if _SUPPORTED and machine():
                own = _own_segment()
                place = hashlib.blake2b(machine().encode(), digest_size=7).digest()
                row = [int.from_bytes(place, "big"), os.getpid(), own.file, own.nonce, own.capacity, own.new_header()]
                rows[group.rank()] = torch.tensor(row)
        agree(rows)
        _channels[group] = _open_channel(group, rows.tolist(), agree)
    return _channels[group]


def _own_segment() -> Segment:
    if not _segments:
        _segments.append(Segment())
    return _segments[0]


def _open_channel(group: Any, rows: list[list[int]], agree: Callable[[torch.Tensor], None]) -> Channel | None:
    peers: list[_Peer] = []
    with contextlib.suppress(OSError, ValueError):
        if all(row[0] and row[0] == rows[0][0] for row in rows):
            peers = [_peer(*row[1:5]) for row in rows]
    missing = torch.tensor([not peers], dtype=torch.int64, device="cpu")
    agree(missing)
    if missing:
        return None
    channel = Channel(group, _own_segment(), peers, [row[5] for row in rows])
    weakref.finalize(group, channel.reads_no_more())
    return channel


def _peer(process: int, file: int, nonce: int, nbytes: int) -> _Peer:
    """
    Raises:
        OSError: that is no segment of a process here.
    """
    if nonce == _own_segment().nonce:
        return _own_segment().peer
    peer = _peers.get(nonce)
    if peer is None:
        ended = os.pidfd_open(process)
        try:
            there = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
            try:
                mapping = _Mapping(there, nbytes)
            finally:
                os.close(there)
            if mapping.words[0] != nonce:
                raise OSError("another process has that number here")
        except BaseException:
            os.close(ended)
            raise
        peer = _peers[nonce] = _Peer(mapping, ended)
    return peer


def segment_of(group: Any) -> Segment | None:
    """This process's segment, if the ranks of ``group`` share memory."""
    channel = _channels.get(group)
    return segment() if channel is not None and channel.usable else None


def renew(group: Any) -> None:
    """See :meth:`Channel.renew`."""
    channel = _channels.get(group)
    if channel is not None:
        channel.renew()
