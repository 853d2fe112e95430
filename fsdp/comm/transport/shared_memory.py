"""The memory that ranks of one host share: which groups share some, and how their ranks connect.

Each process has one :class:`Segment`, a sparse file without a name that its peers map. Full and reduce buffers are
allocated from it (``flat/memory.py``). Ranks of one group that can share memory connect their segments by a
:class:`~fsdp.comm.transport.channel.Channel`, at the first collective of the group.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent import futures
from typing import Any

from torch.distributed import ProcessGroup

from fsdp.comm.groups import group_ranks
from fsdp.comm.threads import in_thread
from fsdp.comm.transport.channel import Channel
from fsdp.comm.transport.segment import SUPPORTED, Block, Mapping, Peer, Segment
from fsdp.comm.waiting.board import Board, machine

_segments: list[Segment] = []  # of this process, once there is one
_lock = threading.Lock()  # held while it is made
_peers: weakref.WeakValueDictionary[int, Peer] = weakref.WeakValueDictionary()  # by the nonce of their segment


class Sharing:
    """The memory that the ranks of one group share: undecided at first, then a channel or none.

    Attributes:
        why_not: why the ranks share none, once they have decided so.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.why_not = ""
        self._group, self._board = weakref.ref(group), Board(group, "memory")
        self._channel: Channel | None = None
        self._decision: futures.Future[Channel | None] | None = None
        self._on_one_host: bool | None = None  # once the ranks have compared their machines

    @staticmethod
    def of(group: ProcessGroup) -> Sharing:
        """Return the shared memory of ``group``."""
        if group not in _sharings:
            _sharings[group] = Sharing(group)
        return _sharings[group]

    @property
    def channel(self) -> Channel | None:
        """The channel, if the ranks share memory and this process takes part."""
        return self._channel if self._channel is not None and self._channel.usable else None

    def connect(self, look: Callable[[], None] = lambda: None) -> Channel | None:
        """Return the channel; None unless all ranks share memory.

        The first time all ranks have to call: they decide through the store. ``look`` compares the ranks in a long
        wait.

        Raises:
            RuntimeError: a peer is late, or is in a different call.
        """
        if self._decision is None:
            self._decision = in_thread(lambda: self._connect(look))  # not interrupted: the peers continue
        try:
            self._channel = self._decision.result()
        except RuntimeError:
            self._decision = None
            raise
        return self.channel

    @property
    def is_undecided(self) -> bool:
        """Whether the ranks have yet to begin to connect."""
        return self._decision is None

    def resume(self) -> Channel | None:
        """Return the channel, after the end of a :meth:`connect` that was interrupted: the peers may have decided."""
        return self.channel if self._decision is None else self.connect()

    def _connect(self, look: Callable[[], None]) -> Channel | None:
        group: Any = self._group()
        if self._on_one_host is None:  # costs the same per rank in a group of any size
            self._on_one_host = self._board.compare("host", machine(), look) is None
        if not self._on_one_host:
            self.why_not = "its ranks are on different hosts, or in different containers"
            return None
        rows = list(self._board.exchange("segment", _own_row(), look).values())
        problem, peers = _apart(rows, group), list[Peer]()
        if not problem:
            try:
                peers = [_peer(*said[:4]) for said in rows]
            except (OSError, ValueError) as error:
                problem = f"rank {group_ranks(group)[group.rank()]} cannot open the memory of another one: {error}"
        attempt = "/".join(str(said) for said in rows[0]) if rows else ""  # separates attempts in one store
        problems = self._board.exchange(f"opened/{attempt}", problem, look).values()
        if any(problems) or not peers:
            self.why_not = next(filter(None, problems), problem)
            return None
        channel = Channel(group, _own_segment(), peers, [said[4] for said in rows])
        weakref.finalize(group, channel.reads_no_more())
        return channel

    def forget(self) -> None:
        """Forget the channel in a fork, which takes no part."""
        if self._channel is not None:
            self._channel.usable = False

    def advance(self) -> None:
        """Finish the collectives that all ranks have posted."""
        if self.channel is not None:
            self.channel.advance()

    def renew(self) -> None:
        """Start anew; see :meth:`Channel.renew`."""
        if self._channel is not None:
            self._channel.renew()


_sharings: weakref.WeakKeyDictionary[ProcessGroup, Sharing] = weakref.WeakKeyDictionary()


def _forget_in_child() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that the child lacks may have held it
    for sharing in _sharings.values():
        sharing.forget()
    _segments.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def _own_row() -> list[Any]:
    """Describe the segment of this rank and a new header in it, or the reason why there is none."""
    try:
        own = _own_segment()
        return [os.getpid(), own.file, own.nonce, own.capacity, own.new_header()]
    except (OSError, ValueError) as error:
        return [str(error)]


def _apart(rows: Sequence[Sequence[Any]], group: ProcessGroup) -> str:
    """Return why ranks with these descriptions cannot share memory; "" if they can."""
    if len(rows) < group.size():
        return "the group has no store in which they could agree"
    names = group_ranks(group)
    for rank, row in enumerate(rows):
        if len(row) == 1:
            return f"rank {names[rank]} has none: {row[0]}"
    return ""


def _own_segment() -> Segment:
    """Return the segment of this process; the first call makes it.

    Raises:
        OSError: the system does not allow it.
    """
    if not SUPPORTED or not machine():
        raise OSError("only Linux on x86-64 is known to show what others write in its order")
    with _lock:
        if not _segments:
            _segments.append(Segment())
    return _segments[0]


def _peer(process: int, file: int, nonce: int, nbytes: int) -> Peer:
    """Map the segment of another process.

    Raises:
        OSError: there is no such segment.
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
    """Return the segment of this process, if it has one."""
    return _segments[0] if _segments else None


def lent_at(address: int) -> Block | None:
    """Return the block of this process's segment at ``address``, if there is one."""
    return _segments[0].lent_at(address) if _segments else None


def known_channel(group: ProcessGroup | None) -> Channel | None:
    """Return the channel of ``group``, if its ranks have connected, and this process takes part."""
    sharing = None if group is None else _sharings.get(group)
    return None if sharing is None else sharing.channel
