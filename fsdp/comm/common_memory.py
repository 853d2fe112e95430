"""Full buffers that the ranks of one host have in common: each writes its slice of one block, and nobody copies.

[Note: Common blocks]
Where ranks share memory a gather usually copies the peers' slices into a buffer of this rank's own. With
``FSDP_COLLECTIVES=common`` those of forwards and backwards, whose buffers nobody may write, fill one block for all. It
lies in the segment of one rank, by turns; when it is made the others find it by a post. In front of it is a page with a
word of each rank: the number of the gather whose values it reads there, 0 once it has released them, ``_LEFT`` when it
has no use for the block any more. Nobody writes a slice while another rank reads what an earlier gather has brought.

Each rank chooses for itself, and all alike, as they gather and release in the same order: of the free blocks that fit
the one that was allocated first, unless that was a moment ago: slower ranks may still read it. The posts tell which
one it is; ranks that differ are out of step. After a failure the ranks meet, and all earlier blocks are forgotten, as
some may have gathered what others have not.
"""

from __future__ import annotations

import mmap
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fsdp.comm.ledger import issue_in_memory
from fsdp.comm.segment import Block, Readers
from fsdp.comm.shared_memory import PLACE, Channel, Condition, segment
from fsdp.comm.waiting import HostWork, OutOfStep

_CPU = torch.device("cpu")
_LEFT = 1 << 62
_JUST_NOW = 2  # of the latest allocations
_NEW = -1  # the event of a post that tells where a block is; those of gathers are none below zero


class Sharers(NamedTuple):
    """Who may have the buffers of a gather in common, and what it is for."""

    channel: Channel
    group: Any
    label: str


class CommonBlock(Block):
    """A block of one rank's segment, as one of the ranks that have it in common sees it.

    Attributes:
        epoch: of the channel, when it was made.
        turn: of its last allocation.
        sharers: for whom that was.
    """

    __slots__ = ("_at", "_own", "_words", "channel", "epoch", "sharers", "turn")

    def __init__(self, sharers: Sharers, owner: int, offset: int, nbytes: int, own: Block | None) -> None:
        """``own``: what the owner has taken of its segment for it, from ``offset`` on."""
        super().__init__(offset + mmap.PAGESIZE, nbytes)
        self.owner, self.channel, self.sharers, self.turn = owner, sharers.channel, sharers, 0
        channel, self.epoch = self.channel, self.channel.collectives.epoch
        self._words, self._at, self._own = channel.mapping_of(owner).words, offset // 8, own

    @property
    def memory(self) -> memoryview:
        assert self.owner is not None
        return self.channel.mapping_of(self.owner).memory[self.offset : self.offset + self.nbytes]

    @property
    def is_read(self) -> bool:
        """Never, before it is released: what it has is read by others as well, who may be slow."""
        return False

    def posted(self, readers: Readers, number: int) -> None:
        """This rank is about to write its slice for that gather: once nobody reads what is there."""
        channel, _, label = self.sharers
        posts = channel.collectives
        self._say(number)
        if not self._reading(number):
            return

        def over() -> bool:  # or some have chosen another block, and would wait for this rank
            behind = self._reading(number)
            return not behind or any(posts.said(rank, number, 0) == number for rank in behind)

        issue_in_memory([lambda: Condition(channel, over)], _CPU, self.sharers.group, label).wait()
        if behind := self._reading(number):
            words = " and ".join(f"rank {channel.names[rank]}" for rank in behind)
            raise OutOfStep(f"{label}: the ranks are out of step: {words} gathers into other memory, and reads this")

    def _reading(self, number: int) -> list[int]:
        """The other ranks that read what an earlier gather has brought."""
        return [rank for rank in self.channel.others if 0 < self._words[self._at + rank] < number]

    def release(self) -> None:
        """This rank reads it no more."""
        self._say(0)

    def drop(self) -> None:
        """This rank has no use for it any more. It is its owner's again once no other one has."""
        self._say(_LEFT)
        if self._own is not None and (there := segment()) is not None:
            self._own.posted(_Users(self.channel, self._words, self._at), 0)
            there.leave(self._own)

    def _say(self, number: int) -> None:
        if self.channel.usable:  # a fork would speak for another
            self._words[self._at + self.channel.rank] = number


class _Users(NamedTuple):
    """The other ranks that have a block in common with its owner."""

    channel: Channel
    words: memoryview
    at: int

    def is_read(self, number: int) -> bool:
        return all(self.words[self.at + rank] == _LEFT for rank in self.channel.others)

    def until(self, holds: Callable[[], bool], seconds: float) -> bool:
        return self.channel.until(holds, seconds)


class CommonMemory:
    """The blocks that one pool, and those of the other ranks, allocate of a channel; see [Note: Common blocks]."""

    def __init__(self) -> None:
        self._free: list[CommonBlock] = []
        self._epoch, self._made, self._turn = -1, 0, 0

    def __del__(self) -> None:
        """Units may give blocks back that outlive their tree's pool."""
        if not sys.is_finalizing():
            self.keep(0, 0)

    def allocate(self, nbytes: int, sharers: Sharers) -> torch.UntypedStorage | None:
        """At least ``nbytes`` bytes, the same on all ranks, until nothing holds the storage any more; None if the rank
        whose turn it is has no room. All ranks have to ask.

        Raises:
            RuntimeError: they do not.
        """
        if self._epoch != sharers.channel.collectives.epoch:  # the ranks have met after a failure
            self.keep(0, 0)
            self._epoch, self._made, self._turn = sharers.channel.collectives.epoch, 0, 0
        self._turn += 1
        fitting = [block for block in self._free if nbytes <= block.nbytes <= 2 * nbytes]
        first = min(fitting, key=lambda block: block.turn, default=None)
        if first is not None and self._turn - first.turn > _JUST_NOW:
            self._free.remove(first)
        else:
            first = self._make(nbytes, sharers)
        if first is None:
            return None
        block, reference, here = first, weakref.ref(self), segment()
        block.sharers, block.turn = sharers, self._turn
        assert here is not None

        def come_back() -> None:
            block.release()
            memory = reference()
            if memory is not None and memory._epoch == block.epoch:
                memory._free.append(block)
            else:
                block.drop()
                here.trim()

        return here.lend(block, block.memory, come_back)

    def _make(self, nbytes: int, sharers: Sharers) -> CommonBlock | None:
        """A new block; None if its owner has no room."""
        channel, here, label = sharers.channel, segment(), sharers.label
        assert here is not None
        nbytes = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        owner = self._made % len(channel.names)
        self._made += 1
        own: Block | None = None
        found: list[int] = []

        def start() -> HostWork:
            nonlocal own
            posts, where = channel.collectives, 0
            number = posts.next(label)
            if owner == channel.rank:
                try:
                    own = here.take(nbytes + mmap.PAGESIZE)
                except OSError:
                    pass  # the others have to know
                else:
                    where, at = own.offset, own.offset // 8
                    for rank in range(len(channel.names)):
                        here.mapping.words[at + rank] = 0

            def finish() -> None:
                found.append(posts.said(owner, number, PLACE))

            return posts.post(number, _NEW, nbytes, f"{label}, in new memory", [where], finish)

        issue_in_memory([start], _CPU, sharers.group, label).wait()
        return CommonBlock(sharers, owner, found[0], nbytes, own) if found[0] else None

    def keep(self, nbytes: int, block_nbytes: int) -> None:
        """Keep of the free blocks no more than ``nbytes``, of up to ``block_nbytes``: those allocated last."""
        total = 0
        for block in sorted(self._free, key=lambda block: -block.turn):
            total += block.nbytes
            if block.nbytes > block_nbytes or total > nbytes:
                total -= block.nbytes
                self._free.remove(block)
                block.drop()
