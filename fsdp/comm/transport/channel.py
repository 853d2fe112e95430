"""Gathers and reductions of one group in memory that its ranks share.

A :class:`Channel` connects the segments (``segment.py``) of the ranks of one group. To communicate, a rank *posts* in
its own segment where its part of the collective lies. Once all ranks have posted, each reads the parts of its peers. A
gather copies the slice that each rank has of its own shard in its own full buffer. A reduction adds up this rank's
slice of every buffer in rank order 0..N-1, so the result has the bits of the direct exchange. Tensors outside of the
segment are copied into it first.

[Note: Posts]
Every rank of a group posts the same collectives in the same order, and numbers them. A post has the number, the event,
the number of bytes and the place. A reader compares the first three with its own: ranks that are out of sync
raise at once. The number is written last; the processors on which this file works (x86-64) show stores in their order.

A post waits only for a free slot, of which there are many. A rank that waits, for any reason, finishes everything that
it has issued that all ranks have posted, so no wait depends on itself. Collectives end in order. ``_DONE`` is the
number of the last one that a rank has read, or dropped for good: the memory behind earlier posts is free again.

Votes (:meth:`fsdp.comm.lane.issuing.Issuer.ask`) go the same way, in :class:`Posts` of their own. Different questions
that meet are no error there, but an answer.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeAlias

import torch
from torch.distributed import ProcessGroup

from fsdp.comm import threads
from fsdp.comm.groups import group_ranks, group_timeout
from fsdp.comm.transport.native import Gather
from fsdp.comm.transport.segment import HEADER, Block, Mapping, Peer, Segment
from fsdp.comm.waiting.waits import UNEVEN
from fsdp.comm.waiting.work import HostWork, OutOfStep, TimedOut

PARTS = 4  # vectors in one post: units rarely have more buckets
_SLOT = 128  # bytes of a post: three words, the place of each part, and a label
_LABEL, _TEXT = 8 * (3 + PARTS), _SLOT - 8 * (3 + PARTS)
_HALF = HEADER // 2  # bytes for collectives; the rest is for votes
_SLOTS = _HALF // _SLOT - 1  # the first slot holds the two words that follow
_WORDS = _SLOT // 8
_DONE, _ELSEWHERE = 0, 1  # words of the first slot
_EVENT, _NBYTES, PLACE = 1, 2, 3  # words of a post, behind its number
_NEVER = 1 << 62
_text_of = functools.lru_cache(4096)(
    lambda label: label.encode()[:_TEXT].ljust(_TEXT, b"\0")
)  # the label in the form of a post
_EPOCH = 1 << 32  # numbers of posts between two failures

_SPINS = 100  # looks before a wait sleeps
_SHORTEST, _LONGEST = 0.00003, 0.004  # seconds between two looks: at first, and in a wait that takes long
_PART = 0.02  # of the wait so far: the pause between two looks grows with the wait
_LOOK_AROUND = 0.1  # seconds between two looks for processes that have ended
_FOR_READERS = 10  # times threads.PATIENCE: how long a rank waits for peers to read its memory


class Condition(HostWork):
    """A condition that the ranks of a channel bring about.

    ``finish`` is called when all ranks have posted, maybe again after an interrupt, but not once the condition was
    dropped.
    """

    def __init__(self, channel: Channel, holds: Callable[[], bool], finish: Callable[[], None] | None = None) -> None:
        self._channel, self._holds, self.finish = channel, holds, finish

    def wait(self, patience: timedelta | None = None) -> None:
        channel = self._channel
        if not channel.until(self._holds, channel.timeout if patience is None else patience.total_seconds()):
            raise TimedOut(channel.timeout) if patience is None else RuntimeError("the collective is still under way")

    def is_completed(self) -> bool:
        return self._channel.ended is not None or self._holds()


# A post of this rank: number, event, bytes, label, and the condition that waits for it.
_UnderWay: TypeAlias = "tuple[int, int, int, str, weakref.ref[Condition]]"


class Posts:
    """The posts of the ranks of a channel, the same on all ranks and in one order; see [Note: Posts]."""

    def __init__(self, channel: Channel, rank: int, mappings: Sequence[Mapping], headers: Sequence[int]) -> None:
        """``headers``: the offset of the posts in each rank's segment, in bytes."""
        self.number = 0  # of the last post
        self._channel, self._rank = channel, rank
        self._own = mappings[rank]
        self._words = [mapping.words for mapping in mappings]
        self._mappings = mappings
        self._starts = [header // 8 + _WORDS for header in headers]  # of each rank's posts, in words
        self._others = [other for other in range(len(mappings)) if other != rank]
        self._place = headers[rank] // 8  # of the first slot, in words
        self._firsts = {other: (mapping.words, headers[other] // 8) for other, mapping in enumerate(mappings)}
        self._read = 0  # all ranks have read the posts of this rank up to there
        self.under_way: deque[_UnderWay] = deque()

    def said(self, rank: int, number: int, word: int) -> int:
        """Return a word of the post ``number`` of ``rank``."""
        return self._words[rank][self._starts[rank] + number % _SLOTS * _WORDS + word]

    def next(self, label: str) -> int:
        """Return the number of the next post, once its slot is free."""
        number, channel = self.number + 1, self._channel
        if channel.collectives.under_way or channel.questions.under_way:
            channel.advance()  # frees memory that peers wait for
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
        """Post a collective; it is over when this rank has read the posts of its peers.

        Args:
            number: the result of :meth:`next`.
            wheres: up to ``PARTS`` places.
            finish: reads the posts of the peers.
            until_read: whether it is over only when all ranks have read.
        """
        words, done, at = self._own.words, self._place + _DONE, self._starts[self._rank] + number % _SLOTS * _WORDS
        self._own.memory[at * 8 + _LABEL : at * 8 + _SLOT] = _text_of(label)
        words[at + _EVENT], words[at + _NBYTES] = event, nbytes
        for place, where in enumerate(wheres, at + PLACE):
            words[place] = where
        holds = functools.partial(self.is_read, number) if until_read else lambda: words[done] >= number
        work = Condition(self._channel, holds, finish)
        self.under_way.append((number, event, nbytes, label, weakref.ref(work, self._note_dropped)))
        self.number = words[at] = number  # in one line: an interrupt must leave a post that is counted, or neither
        return work

    def is_read(self, number: int) -> bool:
        """Return whether all ranks, this one included, have read the posts of this rank up to ``number``."""
        for words, place in self._firsts.values():
            if words[place + _DONE] < number:
                return False
        return True

    def _have_posted(self, what: _UnderWay) -> bool:
        """Return whether all ranks have made this post.

        Raises:
            OutOfStep: a peer has posted a different collective.
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
        """Finish the collectives that all ranks have posted, in order."""
        words, done = self._own.words, self._place + _DONE
        while self.under_way:
            what = self.under_way[0]
            number, *_, reference = what
            if number > words[done]:  # else an interrupt came just before the next line
                if not self._have_posted(what):
                    return
                work = reference()
                if work is not None and work.finish is not None:
                    work.finish()
                words[done] = number  # from here on it is over, on all ranks
            self.under_way.popleft()

    def _note_dropped(self, _: object) -> None:
        """Release the memory of peers behind posts that this rank has dropped, and will not read."""
        place = self._place + _DONE
        for number, *_, reference in tuple(self.under_way):
            if reference() is not None or not self._channel.usable:
                return
            self._own.words[place] = max(self._own.words[place], number)

    @property
    def proposals(self) -> dict[int, int]:
        """By rank, how often it has proposed to communicate by ``torch.distributed``."""
        return {rank: words[place + _ELSEWHERE] for rank, (words, place) in self._firsts.items()}

    def propose(self, count: int) -> None:
        """Publish ``count`` as the number of this rank's proposals."""
        self._own.words[self._place + _ELSEWHERE] = count

    def renew(self) -> None:
        """Forget the posts of only some ranks, and continue with a number that no rank has reached."""
        self.under_way.clear()
        self.number = (self.number // _EPOCH + 1) * _EPOCH
        self._own.words[self._place + _DONE] = self.number

    def read_no_more(self) -> None:
        """End reading: the peers no longer wait for this rank."""
        self._own.words[self._place + _DONE] = _NEVER

    @property
    def is_behind(self) -> bool:
        """Whether some rank has made a post that this rank has yet to make."""
        number = self.number + 1
        return any(self.said(rank, number, 0) >= number for rank in self._others)


class Channel:
    """The ranks of one group, which all share memory. Used by one thread at a time; see [Note: Posts].

    Attributes:
        timeout: seconds that a collective may take.
        names: the global ranks.
        ended: the error of every wait that needs a process which has ended.
        segment: of this process.
        usable: whether this process made the channel; False in a fork.
        collectives, questions: the posts.
    """

    def __init__(self, group: ProcessGroup, own: Segment, peers: Sequence[Peer], headers: Sequence[int]) -> None:
        """``headers``: the offset of the header in each rank's segment, in bytes."""
        self.timeout = group_timeout(group).total_seconds()
        self.names = group_ranks(group)
        self.ended: RuntimeError | None = None
        self.usable = True
        self.rank, self.segment, self._peers = group.rank(), own, peers
        self._mappings = [peer.mapping for peer in peers]
        self.others = [rank for rank in range(len(peers)) if rank != self.rank]
        self.collectives = Posts(self, self.rank, self._mappings, headers)
        self.questions = Posts(self, self.rank, self._mappings, [header + _HALF for header in headers])
        self._elsewhere = 0  # the number of passes in which all ranks communicated by torch.distributed
        self._overdue = 0  # the last post that readers have not read in time

    # -- collectives of all ranks --------------------------------------------------------------------------------------

    def gather(self, parts: Sequence[Gather], label: str, event: int) -> HostWork:
        """Fill each of up to ``PARTS`` vectors with every rank's shard of it.

        Peers copy this rank's piece out of the vector, if that lies in the segment. ``event`` is equal on all
        ranks.
        """
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
            self._leave(copied, number)  # after the copies: ranks read only what is posted

        def finish() -> None:
            for rank in self.others:
                for word, pieces in enumerate(targets, PLACE):
                    piece, offset = pieces[rank], posts.said(rank, number, word)
                    piece.copy_(self._mappings[rank].piece(offset, piece.numel(), piece.dtype))

        return posts.post(number, event, total, label, wheres, finish)

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
        """Write the sum of all ranks' pieces of ``full`` into ``out`` by ``add_up``, which gets them in rank order.

        ``full`` is copied unless it lies in the segment. ``event`` is equal on all ranks. With ``until_read`` the work
        is over only when all ranks have read.
        """
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
        """Fill ``said`` with the ``number`` and the ``largest`` of each rank."""
        posts, several = self.questions, range(len(self._mappings))
        post = posts.next(label)

        def finish() -> None:
            said[:] = [(posts.said(rank, post, PLACE), posts.said(rank, post, PLACE + 1)) for rank in several]

        return posts.post(post, 0, 0, label, [number, largest], finish)

    def propose_elsewhere(self) -> HostWork:
        """Propose that the next pass communicates by ``torch.distributed``; after the wait :meth:`goes_elsewhere`."""
        self.collectives.propose(proposal := self._elsewhere + 1)
        return Condition(self, lambda: self._is_behind or min(self.collectives.proposals.values()) >= proposal)

    def goes_elsewhere(self) -> bool:
        """Return whether all ranks have proposed; then no rank has posted yet."""
        elsewhere = not self._is_behind
        self._elsewhere += elsewhere
        self.collectives.propose(self._elsewhere)
        return elsewhere

    @property
    def _is_behind(self) -> bool:
        return self.collectives.is_behind or self.questions.is_behind

    def _copy_out(self, source: torch.Tensor) -> Block:
        """Copy ``source`` into the segment."""
        block = self.segment.take(source.nbytes, self)
        self.segment.mapping.piece(block.offset, source.numel(), source.dtype).copy_(source)
        return block

    def _leave(self, copied: Sequence[Block], number: int) -> None:
        """Release the blocks ``copied`` once the peers have read the post ``number``."""
        for block in copied:
            block.posted(self, number)
            self.segment.leave(block)

    # -- waiting -------------------------------------------------------------------------------------------------------

    def is_read(self, number: int) -> bool:
        """Return whether all ranks have read the collectives of this rank up to ``number``."""
        return self.collectives.is_read(number)

    def wait_for_readers(self, number: int) -> None:
        """Wait for all ranks to read up to ``number``, for a limited time, and not while they are overdue.

        Raises:
            RuntimeError: the process of a rank has ended.
            OutOfStep: the ranks are out of sync.
        """
        if self.is_read(self._overdue):
            seconds = _FOR_READERS * threads.PATIENCE.total_seconds()
            if not self.until(lambda: self.is_read(number), seconds):
                self._overdue = number

    def advance(self) -> None:
        """Finish the collectives that all ranks have posted, in order.

        Raises:
            OutOfStep: a peer has posted a different collective.
        """
        if self.collectives.under_way:
            self.collectives.advance()
        if self.questions.under_way:
            self.questions.advance()

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until ``holds()`` is True, and finish meanwhile what all ranks have posted.

        Returns False if that takes longer than ``seconds``.

        Raises:
            RuntimeError: the process of a rank has ended.
            OutOfStep: the ranks are out of sync.
        """
        for _ in range(_SPINS):
            self.advance()
            if holds():
                return True
            os.sched_yield()  # to a rank that shares the core
        started = looked = now = time.monotonic()
        while True:
            time.sleep(min(max(_SHORTEST, _PART * (now - started)), _LONGEST))
            now, ended = time.monotonic(), list[int]()
            if now - looked > _LOOK_AROUND:  # before the last look at their posts
                looked, ended = now, [rank for rank in self.others if self._peers[rank].has_ended]
            self.advance()
            if holds():
                return True
            if ended:
                names = ", ".join(f"rank {self.names[rank]}" for rank in ended)
                why = f"it failed, or left out this call, which takes all ranks. {UNEVEN}"
                self.ended = RuntimeError(f"the process of {names} has ended: {why}")
                raise self.ended
            if now - started > seconds:
                return False

    def renew(self) -> None:
        """Start anew after a meeting of all ranks: finish the posts of all, forget the posts of only some."""
        with contextlib.suppress(RuntimeError):
            self.advance()
        self._elsewhere = (self._elsewhere // _EPOCH + 1) * _EPOCH  # a rank may have failed before it counted a pass
        self.collectives.propose(self._elsewhere)
        self.collectives.renew()
        self.questions.renew()

    def reads_no_more(self) -> Callable[[], None]:
        """Return a function for the end of the group: the peers no longer wait for this rank to read their
        posts. It does not keep the channel's group alive."""
        several, process = (self.collectives, self.questions), os.getpid()

        def read_no_more() -> None:
            if os.getpid() == process:  # a fork must not write for its parent
                for posts in several:
                    posts.read_no_more()

        return read_no_more
