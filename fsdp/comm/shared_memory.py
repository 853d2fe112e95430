"""Gathers and reductions through memory that the ranks of one host share.

Each process has one :class:`Segment`, a sparse file without a name that its peers map: full and reduce buffers are
allocated from it (``flat/memory.py``). A :class:`Channel` is what the ranks of one group do with their segments. To
communicate a rank *posts*: it writes down, in its own segment, where its part of the collective lies. Once all have
posted each reads the others' parts: a gather copies the slice that each has of its own shard in its own full buffer, a
reduction adds up this rank's slice of every buffer in rank order 0..N-1, so its result has the bits of the direct
exchange. What lies outside of the segment, because users may write it or debugging does, is copied into it first.

[Note: Posts]
Every rank of a group posts the same collectives in the same order, and numbers them. A post has the number, what it is
for, how many bytes and where; a reader compares the first three with its own, so ranks that are out of step find out at
once. The number is written last, and processors on which this file works (x86-64) show stores in their order. Posting
waits for nothing but a slot, of which there are many, and whoever waits, for whatever, finishes all that it has issued
as far as the others have posted: so no wait depends on itself. Collectives end in order; ``_DONE`` is the number of the
last one that a rank has read, and tells the others that the memory behind their posts is theirs again.
"""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from fsdp.comm.board import Board, machine
from fsdp.comm.groups import group_ranks, group_timeout
from fsdp.comm.segment import HEADER, SUPPORTED, Block, Mapping, Peer, Segment
from fsdp.comm.waiting import HostWork, OutOfStep, in_thread, watch_of

_SLOT = 128  # bytes of a post: four words, and a label
_LABEL, _TEXT = 32, _SLOT - 32
_SLOTS = HEADER // _SLOT - 1  # the first has what is not a post
_DONE, _ELSEWHERE = 0, 1  # words of the first
_EVENT, _NBYTES, _WHERE = 1, 2, 3  # words of a post, behind its number
_NEVER = 1 << 62
_EPOCH = 1 << 32  # posts of a channel between two failures

_SPINS = 100  # looks before a wait sleeps
_SHORTEST, _LONGEST = 0.00003, 0.001  # seconds between two looks, and in a wait that takes longer than _SOON
_SOON = 0.02
_LOOK_AROUND = 0.1  # seconds between two looks for processes that have ended


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

    def __init__(self, group: Any, own: Segment, peers: Sequence[Peer], headers: Sequence[int]) -> None:
        """``headers``: where each rank's header lies in its segment, in bytes."""
        self.timeout = group_timeout(group).total_seconds()
        self.broken: RuntimeError | None = None
        self.usable = True
        self._rank, self._names = group.rank(), group_ranks(group)
        self._segment, self._words = own, own.mapping.words
        self._mappings = [peer.mapping for peer in peers]
        self._headers = headers
        self._place = headers[self._rank] // 8  # of this rank's header, in words
        self._others = [rank for rank in range(len(peers)) if rank != self._rank]
        self._peers = peers
        self._firsts = {rank: (m.words, headers[rank] // 8) for rank, m in enumerate(self._mappings)}
        self._number = 0  # of the last post
        self._elsewhere = 0  # how many collectives went another way
        self._under_way: deque[_UnderWay] = deque()

    # -- the two collectives -------------------------------------------------------------------------------------------

    def gather(self, full: torch.Tensor, shard: torch.Tensor, label: str, event: int) -> HostWork:
        """Fill ``full`` with every rank's ``shard``. Where ``full`` lies in the segment, the others copy this rank's
        part out of it. ``event``: what it is for, the same on all ranks."""
        number, target, nbytes = self._next(label), full.view(torch.uint8), shard.nbytes
        start = self._rank * nbytes
        target[start : start + nbytes].copy_(shard.view(torch.uint8))
        lent = self._segment.lent_at(full.data_ptr())
        if lent is not None:
            lent.posted(self, number)

        def finish() -> None:
            for rank in self._others:
                part = self._mappings[rank].piece(self._where(rank, number), nbytes, torch.uint8)
                target[rank * nbytes : (rank + 1) * nbytes].copy_(part)

        where = lent.offset + start if lent is not None else self._copy_out(shard, number)
        return self._post(number, event, nbytes, label, where, finish)

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
        if self.broken is None:
            self._advance()  # what can be read by now is memory that others wait for
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
        return all(words[place + _DONE] >= number for words, place in self._firsts.values())

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
                own = f"rank {self._names[self._rank]} is at {what.label!r} ({what.nbytes} bytes)"
                raise OutOfStep(f"the ranks are out of step: {own}, and rank {self._names[rank]} is at {theirs}")
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
                names = ", ".join(f"rank {self._names[rank]}" for rank in ended)
                for rank in ended:
                    self._firsts.pop(rank, None)
                self.broken = RuntimeError(f"the process of {names} has ended")
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
        return all(words[place + _ELSEWHERE] >= proposal for words, place in self._firsts.values())


# -- who shares memory -------------------------------------------------------------------------------------------------

_segments: list[Segment] = []  # this process's own, once there is one
_boards: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()
_connecting: weakref.WeakKeyDictionary[Any, futures.Future[Channel | None]] = weakref.WeakKeyDictionary()
_channels: weakref.WeakKeyDictionary[Any, Channel | None] = weakref.WeakKeyDictionary()
_peers: weakref.WeakValueDictionary[int, Peer] = weakref.WeakValueDictionary()  # by the nonce of their segment


def _forget_in_child() -> None:
    """A fork sees the segments, and takes no part."""
    for channel in _channels.values():
        if channel is not None:
            channel.usable = False
    _segments.clear()
    _channels.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def connect(group: Any) -> Channel | None:
    """The channel of ``group``; None unless its ranks all share memory. The first time all of them have to ask: they
    decide through the store, beside the collectives.

    Raises:
        RuntimeError: the others do not come, or do something else.
    """
    if group not in _channels:
        if group not in _connecting:
            _connecting[group] = in_thread(lambda: _connect(group))  # nothing interrupts it there: the others go on
        try:
            _channels[group] = _connecting[group].result()
        except RuntimeError:
            del _connecting[group]
            raise
        del _connecting[group]
    return _channels[group]


def _connect(group: Any) -> Channel | None:
    row: list[int] = []
    with contextlib.suppress(OSError):
        if SUPPORTED and machine():
            own = _own_segment()
            row = [os.getpid(), own.file, own.nonce, own.capacity, own.new_header()]
    rows = [said[1:] for said in _tell(group, "segment", [machine(), *row]) if said[1:] and said[0] == machine()]
    peers: list[Peer] = []
    with contextlib.suppress(OSError, ValueError):
        if len(rows) == group.size():
            peers = [_peer(*row[:4]) for row in rows]
    if _tell(group, "opened", bool(peers)) != [True] * group.size():
        return None
    channel = Channel(group, _own_segment(), peers, [row[4] for row in rows])
    weakref.finalize(group, channel.reads_no_more())
    return channel


def _tell(group: Any, key: str, value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order."""
    board, started, watch = _boards.setdefault(group, Board(group, "memory")), time.monotonic(), watch_of(group)

    def look() -> None:
        if watch is not None:
            watch.slow()
        if time.monotonic() - started > group_timeout(group).total_seconds():
            raise RuntimeError("agree on shared memory: other ranks do not come")

    board.post(key, value)
    board.meet(key, look)
    return list(board.posted(key).values())


def _own_segment() -> Segment:
    if not _segments:
        _segments.append(Segment())
    return _segments[0]


def _peer(process: int, file: int, nonce: int, nbytes: int) -> Peer:
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
                mapping = Mapping(there, nbytes)
            finally:
                os.close(there)
            if mapping.words[0] != nonce:
                raise OSError("another process has that number here")
        except BaseException:
            os.close(ended)
            raise
        peer = _peers[nonce] = Peer(mapping, ended)
    return peer


def segment() -> Segment | None:
    """This process's, if it has a channel."""
    return _segments[0] if _segments else None


def lent_at(address: int) -> Block | None:
    """The block of this process's segment that was allocated there."""
    return _segments[0].lent_at(address) if _segments else None


def segment_of(group: Any) -> Segment | None:
    """This process's segment, if the ranks of ``group`` share memory."""
    channel = None if group is None else _channels.get(group)
    return segment() if channel is not None and channel.usable else None


def renew(group: Any) -> None:
    """See :meth:`Channel.renew`."""
    channel = _channels.get(group)
    if channel is not None:
        channel.renew()
