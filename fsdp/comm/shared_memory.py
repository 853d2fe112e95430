"""Gathers and reductions through memory that the ranks of one host share.

Each process has one :class:`Segment`, a sparse file without a name that its peers map: full and reduce buffers are
allocated from it (``flat/memory.py``). A :class:`Channel` is what the ranks of one group do with their segments. To
communicate a rank *posts*: it writes down, in its own segment, where its part of the collective lies. Once all have
posted each reads the others' parts: a gather copies the slice that each has of its own shard in its own full buffer, a
reduction adds up this rank's slice of every buffer in rank order 0..N-1, so its result has the bits of the direct
exchange. What lies outside of the segment is copied into it first.

[Note: Posts]
Every rank of a group posts the same collectives in the same order, and numbers them. A post has the number, what it is
for, how many bytes and where; a reader compares the first three with its own, so ranks that are out of step find out at
once. The number is written last, and processors on which this file works (x86-64) show stores in their order. Posting
waits for nothing but a slot, of which there are many, and whoever waits, for whatever, finishes all that it has issued
as far as the others have posted: so no wait depends on itself. Collectives end in order; ``_DONE`` is the number of the
last one that a rank has read, or dropped and never will, and tells the others that the memory behind their posts is
theirs again.

What the ranks ask each other (:class:`fsdp.comm.collectives.Vote`) goes the same way, in :class:`Posts` of its own:
different questions that meet are no error here, but an answer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent import futures
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch

from fsdp.comm.board import Board, machine
from fsdp.comm.calls import UNEVEN
from fsdp.comm.groups import group_ranks, group_timeout
from fsdp.comm.ledger import Gather
from fsdp.comm.segment import HEADER, SUPPORTED, Block, Mapping, Peer, Segment
from fsdp.comm.waiting import HostWork, OutOfStep, TimedOut, in_thread, watch_of

_T = TypeVar("_T")

PARTS = 4  # that one post may tell of: a unit has hardly more buckets
_SLOT = 128  # bytes of a post: three words, of each part where it is, and a label
_LABEL, _TEXT = 8 * (3 + PARTS), _SLOT - 8 * (3 + PARTS)
_HALF = HEADER // 2  # of collectives, and of questions
_SLOTS = _HALF // _SLOT - 1  # the first has what is not a post
_WORDS = _SLOT // 8
_DONE, _ELSEWHERE = 0, 1  # words of the first
_EVENT, _NBYTES, PLACE = 1, 2, 3  # words of a post, behind its number
_NEVER = 1 << 62
_text_of = functools.lru_cache(4096)(lambda label: label.encode()[:_TEXT].ljust(_TEXT, b"\0"))  # as a post has it
_EPOCH = 1 << 32  # posts of a channel between two failures

_SPINS = 100  # looks before a wait sleeps
_SHORTEST, _LONGEST = 0.00003, 0.004  # seconds between two looks: at first, and in a wait that takes long
_PART = 0.02  # of what a wait has taken so far: a look comes so much late, and costs less the longer it takes
_LOOK_AROUND = 0.1  # seconds between two looks for processes that have ended


class Condition(HostWork):
    """Something that the ranks of a channel bring about.

    ``finish`` is called when all have posted, maybe again after an interrupt, and not at all once nobody waits for it.
    """

    def __init__(self, channel: Channel, holds: Callable[[], bool], finish: Callable[[], None] | None = None) -> None:
        self._channel, self._holds, self.finish = channel, holds, finish

    def wait(self, patience: timedelta | None = None) -> None:
        channel = self._channel
        if not channel.until(self._holds, channel.timeout if patience is None else patience.total_seconds()):
            raise TimedOut(channel.timeout) if patience is None else RuntimeError("the collective is still under way")

    def is_completed(self) -> bool:
        return self._channel.broken is not None or self._holds()


# What this rank has posted: number, event, bytes, label, and who waits for it.
_UnderWay: TypeAlias = "tuple[int, int, int, str, weakref.ref[Condition]]"


class Posts:
    """What the ranks of a channel post one after the other, all of them the same; see [Note: Posts]."""

    def __init__(self, channel: Channel, rank: int, mappings: Sequence[Mapping], headers: Sequence[int]) -> None:
        """``headers``: the offset of each rank's posts in its segment, in bytes."""
        self.number = self._elsewhere = 0  # of the last post; how many went another way
        self._channel, self._rank = channel, rank
        self._own = mappings[rank]
        self._words = [mapping.words for mapping in mappings]
        self._mappings = mappings
        self._starts = [header // 8 + _WORDS for header in headers]  # of each rank's posts, in words
        self._others = [other for other in range(len(mappings)) if other != rank]
        self._place = headers[rank] // 8  # of what is not a post, in words
        self._firsts = {other: (mapping.words, headers[other] // 8) for other, mapping in enumerate(mappings)}
        self._read = 0  # all have read what this rank has posted up to there, and maybe more
        self.under_way: deque[_UnderWay] = deque()

    def said(self, rank: int, number: int, word: int) -> int:
        """A word of the post of that number."""
        return self._words[rank][self._starts[rank] + number % _SLOTS * _WORDS + word]

    def next(self, label: str) -> int:
        """The number of the next post, once its slot may be written."""
        number, channel = self.number + 1, self._channel
        if channel.broken is None and (channel.collectives.under_way or channel.questions.under_way):
            channel.advance()  # what can be read by now is memory that others wait for
        oldest = number - _SLOTS
        if oldest > self._read:
            if not self.is_read(oldest) and not channel.until(lambda: self.is_read(oldest), channel.timeout):
                raise RuntimeError(f"{label}: other ranks are too far behind")
            self._read = min(words[place + _DONE] for words, place in self._firsts.values())
        return number

    def post(
        self,
        number: int,
        event: int,
        nbytes: int,
        label: str,
        wheres: Sequence[int],
        finish: Callable[[], None],
        *,
        until_read: bool = False,
    ) -> HostWork:
        """``number``: what ``next`` has returned; ``wheres``: up to ``PARTS``. It is over when this rank has read the
        others' posts, or with ``until_read`` when all have."""
        words, done, at = self._own.words, self._place + _DONE, self._starts[self._rank] + number % _SLOTS * _WORDS
        self._own.memory[at * 8 + _LABEL : at * 8 + _SLOT] = _text_of(label)
        words[at + _EVENT], words[at + _NBYTES] = event, nbytes
        for place, where in enumerate(wheres, at + PLACE):
            words[place] = where
        holds = functools.partial(self.is_read, number) if until_read else lambda: words[done] >= number
        work = Condition(self._channel, holds, finish)
        self.number = number
        self.under_way.append((number, event, nbytes, label, weakref.ref(work, self._note_dropped)))
        words[at] = number
        return work

    def is_read(self, number: int) -> bool:
        """Whether all, this one among them, have read what this rank has posted up to there."""
        for words, place in self._firsts.values():
            if words[place + _DONE] < number:
                return False
        return True

    def _have_posted(self, what: _UnderWay) -> bool:
        """
        Raises:
            OutOfStep: some have posted something else.
        """
        own, event, nbytes, label, _ = what
        all_have, place = True, own % _SLOTS * _WORDS
        for rank in self._others:
            words, at = self._words[rank], self._starts[rank] + place
            number = words[at]
            if number < own:
                all_have = False
            elif (number, words[at + _EVENT], words[at + _NBYTES]) != (own, event, nbytes):
                text = bytes(self._mappings[rank].memory[at * 8 + _LABEL : at * 8 + _SLOT]).rstrip(b"\0")
                theirs = f"{text.decode(errors='replace')!r} ({words[at + _NBYTES]} bytes)"
                names = self._channel.names
                here = f"rank {names[self._rank]} is at {label!r} ({nbytes} bytes)"
                raise OutOfStep(f"the ranks are out of step: {here}, and rank {names[rank]} is at {theirs}")
        return all_have

    def advance(self) -> None:
        """Finish what all have posted, in order."""
        words, done = self._own.words, self._place + _DONE
        while self.under_way:
            what = self.under_way[0]
            number, *_, reference = what
            if number > words[done]:  # else an interrupt came right here
                if not self._have_posted(what):
                    return
                work = reference()
                if work is not None and work.finish is not None:
                    work.finish()
                words[done] = number  # from here on it is over, for this rank and for the others
            self.under_way.popleft()

    def _note_dropped(self, _: object) -> None:
        """Nobody waits for what is under way any more: the others need not keep what this rank will not read."""
        place = self._place + _DONE
        for number, *_, reference in tuple(self.under_way):
            if reference() is not None or not self._channel.usable:
                return
            self._own.words[place] = max(self._own.words[place], number)

    @property
    def progress(self) -> tuple[int, int]:
        """How far this rank has come, and how often it went or proposes to go another way."""
        return self.number, self._own.words[self._place + _ELSEWHERE]

    def renew(self) -> None:
        """Forget the posts that only some ranks have made, and go on with a number that no rank has reached."""
        self.under_way.clear()
        self.number = self._elsewhere = (self.number // _EPOCH + 1) * _EPOCH
        self._own.words[self._place + _DONE] = self._own.words[self._place + _ELSEWHERE] = self.number

    def read_no_more(self) -> None:
        """The others need not wait for this rank to read what they post."""
        self._own.words[self._place + _DONE] = _NEVER

    def miss(self, rank: int) -> None:
        """Its process has ended: nobody waits for it."""
        self._firsts.pop(rank, None)

    # -- other ways ----------------------------------------------------------------------------------------------------

    def propose_elsewhere(self) -> HostWork:
        """This rank has to communicate in another way next. It can if all have to, which ``goes_elsewhere`` tells after
        the wait for this."""
        self._own.words[self._place + _ELSEWHERE] = proposal = self._elsewhere + 1
        return Condition(self._channel, lambda: self._first_to_post() or self._all_propose(proposal))

    def goes_elsewhere(self) -> bool:
        """Whether the next one goes another way, on all ranks; see ``propose_elsewhere``."""
        elsewhere = not self._first_to_post()
        self._elsewhere += elsewhere
        self._own.words[self._place + _ELSEWHERE] = self._elsewhere
        return elsewhere

    def _first_to_post(self) -> bool:
        """Whether some rank has posted what this one has yet to post."""
        number = self.number + 1
        return any(self.said(rank, number, 0) >= number for rank in self._others)

    def _all_propose(self, proposal: int) -> bool:
        return all(words[place + _ELSEWHERE] >= proposal for words, place in self._firsts.values())


class Channel:
    """The ranks of one group, which all share memory. Used by one thread at a time; see [Note: Posts].

    Attributes:
        timeout: seconds that a collective may take.
        names: what people call its ranks.
        broken: why nothing more comes from the others, until ``renew``.
        segment: this process's.
        usable: whether this is the process that made it, not one that was forked from that.
        collectives, questions: what its ranks post.
    """

    def __init__(self, group: Any, own: Segment, peers: Sequence[Peer], headers: Sequence[int]) -> None:
        """``headers``: the offset of each rank's header in its segment, in bytes."""
        self.timeout = group_timeout(group).total_seconds()
        self.names = group_ranks(group)
        self.broken: RuntimeError | None = None
        self.usable = True
        self.rank, self.segment, self._peers = group.rank(), own, peers
        self._mappings = [peer.mapping for peer in peers]
        self.others = [rank for rank in range(len(peers)) if rank != self.rank]
        self.collectives = Posts(self, self.rank, self._mappings, headers)
        self.questions = Posts(self, self.rank, self._mappings, [header + _HALF for header in headers])

    # -- what the ranks do together ------------------------------------------------------------------------------------

    def gather(self, parts: Sequence[Gather], label: str, event: int, *, until_read: bool = False) -> HostWork:
        """Fill each of up to ``PARTS`` vectors with every rank's shard of it. Where the vector lies in the segment, the
        others copy this rank's piece out of it; with ``until_read`` the wait is for them as well. ``event``: what it is
        for, the same on all ranks."""
        posts, size = self.collectives, len(self._mappings)
        wheres: list[int] = []
        copied: list[Block] = []
        number, total = posts.next(label), 0
        targets: list[Sequence[torch.Tensor]] = []
        try:
            for part in parts:
                shard, lent, pieces = part.shard, self.segment.lent_at(part.full.data_ptr()), part.pieces(size)
                if lent is None:
                    copied.append(self._copy_out(shard))
                    wheres.append(copied[-1].offset)
                else:
                    lent.posted(self, number)
                    wheres.append(lent.offset + self.rank * shard.nbytes)
                pieces[self.rank].copy_(shard)
                targets.append(pieces)
                total += shard.nbytes
        finally:
            self._leave(copied, number)  # not before all is copied: nobody reads what is not posted

        def finish() -> None:
            for rank in self.others:
                for word, pieces in enumerate(targets, PLACE):
                    piece, offset = pieces[rank], posts.said(rank, number, word)
                    piece.copy_(self._mappings[rank].piece(offset, piece.numel(), piece.dtype))

        return posts.post(number, event, total, label, wheres, finish, until_read=until_read)

    def reduce(
        self,
        out: torch.Tensor,
        full: torch.Tensor,
        label: str,
        event: int,
        add_up: Callable[[torch.Tensor, Sequence[torch.Tensor]], None],
        *,
        until_read: bool = False,
    ) -> HostWork:
        """Have ``add_up`` write the sum of all ranks' pieces of ``full``, in rank order, into ``out``. Nothing is
        copied where ``full`` lies in the segment. ``event``, ``until_read``: as for ``gather``."""
        posts, start = self.collectives, self.rank * out.nbytes
        number, lent = posts.next(label), self.segment.lent_at(full.data_ptr())
        if lent is None:
            lent = self._copy_out(full)
            self._leave([lent], number)
        else:
            lent.posted(self, number)

        def finish() -> None:
            numel, dtype = out.numel(), out.dtype
            pieces: list[torch.Tensor] = []
            for rank, mapping in enumerate(self._mappings):
                pieces.append(mapping.piece(posts.said(rank, number, PLACE) + start, numel, dtype))
            add_up(out, pieces)

        return posts.post(number, event, full.nbytes, label, [lent.offset], finish, until_read=until_read)

    def ask(self, number: int, largest: int, label: str, said: list[tuple[int, int]]) -> HostWork:
        """Have ``said`` become what each rank says: its ``number`` and ``largest``."""
        posts, several = self.questions, range(len(self._mappings))
        post = posts.next(label)

        def finish() -> None:
            said[:] = [(posts.said(rank, post, PLACE), posts.said(rank, post, PLACE + 1)) for rank in several]

        return posts.post(post, 0, 0, label, [number, largest], finish)

    def _copy_out(self, source: torch.Tensor) -> Block:
        """Where the others will find a copy of ``source``."""
        block = self.segment.take(source.nbytes)
        self.segment.mapping.piece(block.offset, source.numel(), source.dtype).copy_(source)
        return block

    def _leave(self, copied: Sequence[Block], number: int) -> None:
        """The others find them by the post of that ``number``; once they have read it the memory is free."""
        for block in copied:
            block.posted(self, number)
            self.segment.leave(block)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def is_read(self, number: int) -> bool:
        """Whether all have read the collectives of this rank up to there."""
        return self.collectives.is_read(number)

    def advance(self) -> None:
        """Finish what all have posted, in order."""
        if self.broken is not None:
            raise self.broken
        if self.collectives.under_way:
            try:
                self.collectives.advance()
            except OutOfStep as error:
                self.broken = error
                raise
        if self.questions.under_way:
            self.questions.advance()

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until something ``holds`` that the others bring about, and finish meanwhile what they have posted;
        False if it does not within so many seconds.

        Raises:
            RuntimeError: a process has ended that has not brought it about.
            OutOfStep: the ranks do different things.
        """
        for _ in range(_SPINS):
            self.advance()
            if holds():
                return True
            os.sched_yield()  # to whom it waits for, where there are fewer cores than ranks
        started = looked = now = time.monotonic()
        while True:
            time.sleep(min(max(_SHORTEST, _PART * (now - started)), _LONGEST))
            now, ended = time.monotonic(), list[int]()
            if now - looked > _LOOK_AROUND:  # before the last look at what they have posted
                looked, ended = now, [rank for rank in self.others if self._peers[rank].has_ended]
            self.advance()
            if holds():
                return True
            if ended:
                for rank in ended:
                    self.collectives.miss(rank)
                    self.questions.miss(rank)
                names = ", ".join(f"rank {self.names[rank]}" for rank in ended)
                why = f"it failed, or left out this call, which takes all ranks. {UNEVEN}"
                self.broken = RuntimeError(f"the process of {names} has ended: {why}")
                raise self.broken
            if now - started > seconds:
                return False

    def renew(self) -> None:
        """All ranks have met after a failure: what all have posted is finished, what only some have is forgotten."""
        self.broken = None
        with contextlib.suppress(RuntimeError):
            self.advance()
        self.broken = None
        self.collectives.renew()
        self.questions.renew()

    def reads_no_more(self) -> Callable[[], None]:
        """Return a function for the end of the group: the other ranks no longer wait for this rank to read their
        posts. It does not keep the channel's group alive."""
        several, process = (self.collectives, self.questions), os.getpid()

        def tell() -> None:
            if os.getpid() == process:  # a fork would speak for another
                for posts in several:
                    posts.read_no_more()

        return tell


# -- who shares memory -------------------------------------------------------------------------------------------------

_segments: list[Segment] = []  # this process's own, once there is one
_boards: weakref.WeakKeyDictionary[Any, Board] = weakref.WeakKeyDictionary()
_connecting: weakref.WeakKeyDictionary[Any, futures.Future[Channel | None]] = weakref.WeakKeyDictionary()
_channels: weakref.WeakKeyDictionary[Any, Channel | None] = weakref.WeakKeyDictionary()
_problems: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
_on_one_host: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
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
    if group not in _on_one_host:  # a question that costs each of thousands of ranks no more than each of few
        _on_one_host[group] = _ask(group, lambda board, look: board.meet_alike("host", machine(), look))
    if not _on_one_host[group]:
        _problems[group] = "its ranks are on different hosts, or in different containers"
        return None
    row = _own_row()
    rows = _tell(group, "segment", row)
    problem, peers = _apart(rows, group), list[Peer]()
    if not problem:
        try:
            peers = [_peer(*said[:4]) for said in rows]
        except (OSError, ValueError) as error:
            problem = f"rank {group_ranks(group)[group.rank()]} cannot open the memory of another one: {error}"
    attempt = "/".join(str(said) for said in rows[0]) if rows else ""  # a store may remember an earlier one
    problems = _tell(group, f"opened/{attempt}", problem)
    if any(problems) or not peers:
        _problems[group] = next(filter(None, problems), problem)
        return None
    channel = Channel(group, _own_segment(), peers, [said[4] for said in rows])
    weakref.finalize(group, channel.reads_no_more())
    return channel


def _own_row() -> list[Any]:
    """Describe this rank's segment and a new header in it; or say why it has none."""
    try:
        own = _own_segment()
        return [os.getpid(), own.file, own.nonce, own.capacity, own.new_header()]
    except (OSError, ValueError) as error:
        return [str(error)]


def _apart(rows: Sequence[Sequence[Any]], group: Any) -> str:
    """Why ranks that have told these cannot share memory; "" if they may."""
    if len(rows) < group.size():
        return "the group has no store in which they could agree"
    names = group_ranks(group)
    for rank, row in enumerate(rows):
        if len(row) == 1:
            return f"rank {names[rank]} has none: {row[0]}"
    return ""


def why_not(group: Any) -> str:
    """Why the ranks of ``group`` share no memory, where they have decided so."""
    return _problems.get(group, "")


def _tell(group: Any, key: str, value: Any) -> list[Any]:
    """Every rank's ``value``, in rank order."""
    return list(_ask(group, lambda board, look: board.exchange(key, value, look)).values())


def _ask(group: Any, how: Callable[[Board, Callable[[], None]], _T]) -> _T:
    """What the ranks find by ``how``, through the store, unless they do not come."""
    board, started, watch = _boards.setdefault(group, Board(group, "memory")), time.monotonic(), watch_of(group)

    def look() -> None:
        if watch is not None:
            watch.slow()
        if time.monotonic() - started > group_timeout(group).total_seconds():
            raise TimedOut(group_timeout(group).total_seconds())

    return how(board, look)


def _own_segment() -> Segment:
    """
    Raises:
        OSError: the system does not allow it.
    """
    if not SUPPORTED or not machine():
        raise OSError("only Linux on x86-64 is known to show what others write in its order")
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
    """This process's, if it has one."""
    return _segments[0] if _segments else None


def channel_of(group: Any) -> Channel | None:
    """The channel of ``group``, if its ranks have decided to have one."""
    known = group in _channels or group in _connecting  # of what was interrupted, the others may know the end
    channel = connect(group) if known else None
    return channel if channel is not None and channel.usable else None


def lent_at(address: int) -> Block | None:
    """The block of this process's segment that was allocated there."""
    return _segments[0].lent_at(address) if _segments else None


def known_channel(group: Any) -> Channel | None:
    """The channel of ``group``, if its ranks share memory and this process takes part."""
    channel = None if group is None else _channels.get(group)
    return channel if channel is not None and channel.usable else None


def posted_in(group: Any) -> list[int]:
    """What this rank has posted in ``group``, in numbers that are equal on all ranks where nobody waits for a post."""
    channel = _channels.get(group)
    return [] if channel is None else [*channel.collectives.progress, *channel.questions.progress]


def is_broken(group: Any) -> bool:
    """Whether nothing more comes from the other ranks, until ``renew``."""
    channel = _channels.get(group)
    return channel is not None and channel.broken is not None


def renew(group: Any) -> None:
    """See :meth:`Channel.renew`."""
    channel = _channels.get(group)
    if channel is not None:
        channel.renew()
