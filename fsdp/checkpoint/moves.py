"""Which elements move from which rank to which, and moving them: one message per pair of ranks for many tensors.

State leaves and comes back by this one mechanism. Each *item* is a vector of elements, of which ranks hold intervals
and need intervals; what a rank sends to another is the overlap of what it holds with what that one needs. So gathering
on one rank, gathering on all, scattering from one, and going from flat shards to chunks of rows and back are the same
thing with other intervals. All ranks compute all messages from the same items, and nothing but elements travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fsdp.comm.collectives import Communicator, Letter, Tag, Watch, direct_threshold, exchange, mail
from fsdp.comm.groups import Groups
from fsdp.comm.streams import streams_for

_ALIGNMENT = 16  # bytes; where each message starts, so that every dtype's elements can be viewed in it


class Span(NamedTuple):
    """The elements ``start`` to ``end`` (half-open), on ``rank``."""

    rank: int
    start: int
    end: int


@dataclass(frozen=True)
class Item:
    """A vector to move. ``holds`` are disjoint, one per rank. ``needs`` may overlap; None: every rank needs all."""

    dtype: torch.dtype
    holds: Sequence[Span]
    needs: Sequence[Span] | None

    @property
    def nbytes(self) -> int:
        """Of what is held, on all ranks together."""
        return sum(end - start for _, start, end in self.holds) * self.dtype.itemsize

    def for_all(self, size: int) -> Item:
        """With what every one of ``size`` ranks needs in place of None."""
        end = max((held.end for held in self.holds), default=0)
        return Item(self.dtype, self.holds, [Span(rank, 0, end) for rank in range(size)])


# (number of the item, start, end) -> those elements, which this rank holds, 1-D
Read = Callable[[int, int, int], torch.Tensor]
# (number of the item, start, elements): they have arrived, and may be overwritten when it returns
Write = Callable[[int, int, torch.Tensor], None]
# (number of the item, start, end) -> the memory where those elements belong, in one run; None if it is elsewhere
Place = Callable[[int, int, int], torch.Tensor | None]


class _Part(NamedTuple):
    """One run of elements in a message: from byte ``offset`` on."""

    item: int
    start: int
    end: int
    offset: int


class _Message:
    """What one rank sends to another: runs of elements, large dtypes first, so that all are aligned."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self._nbytes = 0

    def append(self, number: int, start: int, end: int, itemsize: int) -> None:
        self.parts.append(_Part(number, start, end, self._nbytes))
        self._nbytes += (end - start) * itemsize

    @property
    def nbytes(self) -> int:
        return -(-self._nbytes // _ALIGNMENT) * _ALIGNMENT


class Mover:
    """Moves items among the ranks of one group, batch after batch, through memory that is reused.

    While a batch travels, the one before it is written: two are there at a time. What is large goes directly from where
    it lies to where it belongs, where the group moves large messages best so.
    """

    def __init__(self, group: Any, rank: int, size: int, device: torch.device) -> None:
        """``device`` is where ``group`` can communicate; ``group`` may be None where ``size`` is 1."""
        self.group, self.rank, self.size, self.device = group, rank, size, device
        self._streams = streams_for(device)
        self._communicator = Communicator(Groups(group, rank, size, None, 0, 1), self._streams)
        direct = size > 1 and self._streams.asynchronous_work
        self._direct_min = direct_threshold(group, device) if direct else float("inf")  # bytes
        self._memory: dict[tuple[str, int], torch.Tensor] = {}
        self._moves, self._letters = 0, 0
        self._finish: Callable[[], None] | None = None  # of the batch that travels

    def move(
        self,
        items: Sequence[Item],
        read: Read,
        write: Write,
        label: str,
        *,
        place: Place | None = None,
        done: Callable[[], None] | None = None,
        watch: Watch | None = None,
    ) -> None:
        """Start moving ``items``. All ranks of the group have to come with equal ones.

        At most one collective; none where nothing has to travel. When the next batch has started, or in ``flush``,
        ``write`` has been called for all that this rank needs and that did not arrive in its ``place``, and then
        ``done``. Nobody touches the elements before.
        """
        order = sorted(range(len(items)), key=lambda number: -items[number].dtype.itemsize)
        numbered = [(number, items[number]) for number in order]
        gathers = any(item.needs is None for item in items)
        assert not gathers or all(item.needs is None for item in items)
        if gathers and any(self.goes_directly(item, held) for item in items for held in item.holds):
            numbered, gathers = [(number, item.for_all(self.size)) for number, item in numbered], False
        self._moves += 1
        if gathers:
            arrive = self._gather(numbered, read, write, Tag(label, _TAGS + self._moves), watch)
        else:
            arrive = self._exchange(numbered, read, write, place or _nowhere, label, watch)
        self.flush()

        def finish() -> None:
            arrive()
            if done is not None:
                done()

        self._finish = finish

    def flush(self) -> None:
        """Everything that was moved has been written when this returns."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def goes_directly(self, item: Item, span: Span) -> bool:
        """Whether these elements travel by themselves, without being copied on the way."""
        return (span.end - span.start) * item.dtype.itemsize >= self._direct_min

    def _exchange(
        self, items: list[tuple[int, Item]], read: Read, write: Write, place: Place, label: str, watch: Watch | None
    ) -> Callable[[], None]:
        outgoing = [_Message() for _ in range(self.size)]
        incoming = [_Message() for _ in range(self.size)]
        own: list[tuple[int, int, int]] = []
        letters: list[Letter] = []
        late: list[tuple[int, int, torch.Tensor]] = []  # what has no place of its own to arrive in
        first = self._letters = self._letters + 1  # of the messages; then what goes directly
        for number, item in items:
            for held in item.holds:
                for needed in item.needs or ():
                    if (found := _overlap(held, needed)) is None:
                        continue
                    if held.rank == needed.rank:
                        if held.rank == self.rank:
                            own.append((number, *found))
                    elif self.goes_directly(item, Span(needed.rank, *found)):
                        self._letters += 1  # on every rank
                        if held.rank == self.rank:
                            values = read(number, *found).to(self.device).contiguous().view(torch.uint8)
                            letters.append(Letter(True, needed.rank, values, _TAGS + self._letters))
                        elif needed.rank == self.rank:
                            goal = place(number, *found)
                            if goal is None:
                                goal = torch.empty(found[1] - found[0], dtype=item.dtype, device=self.device)
                                late.append((number, found[0], goal))
                            letters.append(Letter(False, held.rank, goal.view(torch.uint8), _TAGS + self._letters))
                    elif held.rank == self.rank:
                        outgoing[needed.rank].append(number, *found, item.dtype.itemsize)
                    elif needed.rank == self.rank:
                        incoming[held.rank].append(number, *found, item.dtype.itemsize)
        dtypes = {number: item.dtype for number, item in items}
        pending, received = None, self._buffer("received", incoming)
        if any(_travels(item) for _, item in items):
            sent = self._buffer("sent", outgoing)
            _pack(sent, outgoing, dtypes, read)
            arriving, leaving = [message.nbytes for message in incoming], [message.nbytes for message in outgoing]
            if self._letters == first:
                tag = Tag(label, _TAGS + first)
                pending = exchange(received, sent, arriving, leaving, self.group, self._streams, tag, watch)
            else:
                for is_sent, pieces in ((True, sent.split(leaving)), (False, received.split(arriving))):
                    for rank, piece in enumerate(pieces):
                        if piece.numel() > 0:
                            letters.append(Letter(is_sent, rank, piece, _TAGS + first))
                pending = mail(letters, self.group, self._streams, label, watch)

        def arrive() -> None:
            for number, start, end in own:
                write(number, start, read(number, start, end))
            if pending is not None:
                pending.wait()
                _unpack(received, incoming, dtypes, write)
                for number, start, values in late:
                    write(number, start, values)

        return arrive

    def _gather(
        self, items: list[tuple[int, Item]], read: Read, write: Write, tag: Tag, watch: Watch | None
    ) -> Callable[[], None]:
        messages = [_Message() for _ in range(self.size)]
        for number, item in items:
            for rank, start, end in item.holds:
                messages[rank].append(number, start, end, item.dtype.itemsize)
        nbytes = max(message.nbytes for message in messages)
        dtypes = {number: item.dtype for number, item in items}
        received = self._resized("received", nbytes * self.size)
        rows = [received[rank * nbytes :][:nbytes] for rank in range(self.size)]
        _pack(rows[self.rank], [messages[self.rank]], dtypes, read)
        pending = (
            self._communicator.gather(received, rows[self.rank], tag, watch) if self.size > 1 and nbytes > 0 else None
        )

        def arrive() -> None:
            if pending is not None:
                pending.wait()
            for row, message in zip(rows, messages):
                _unpack(row, [message], dtypes, write)

        return arrive

    def _buffer(self, name: str, messages: list[_Message]) -> torch.Tensor:
        return self._resized(name, sum(message.nbytes for message in messages))

    def _resized(self, name: str, nbytes: int) -> torch.Tensor:
        """Memory that the batch before the last one used."""
        place = name, self._moves % 2
        if place not in self._memory or self._memory[place].numel() < nbytes:
            self._memory.pop(place, None)
            self._memory[place] = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return self._memory[place][:nbytes]


def _pack(buffer: torch.Tensor, messages: list[_Message], dtypes: dict[int, torch.dtype], read: Read) -> None:
    for view, part in _views(buffer, messages, dtypes):
        view.copy_(read(part.item, part.start, part.end))


def _unpack(buffer: torch.Tensor, messages: list[_Message], dtypes: dict[int, torch.dtype], write: Write) -> None:
    for view, part in _views(buffer, messages, dtypes):
        write(part.item, part.start, view)


class Movers:
    """One :class:`Mover` per group, made at first use."""

    def __init__(self) -> None:
        self._by_group: dict[tuple[Any, torch.device], Mover] = {}

    def over(self, group: Any, rank: int, size: int, device: torch.device) -> Mover:
        return self._by_group.setdefault((group, device), Mover(group, rank, size, device))

    def flush(self) -> None:
        for mover in self._by_group.values():
            mover.flush()


def _nowhere(number: int, start: int, end: int) -> None:
    return None


_TAGS = 1 << 24  # direct messages of a step have smaller numbers


def _travels(item: Item) -> bool:
    """Whether some rank needs what it does not hold."""
    holds = {held.rank: held for held in item.holds}
    return any(
        needed.rank not in holds or needed.start < holds[needed.rank].start or needed.end > holds[needed.rank].end
        for needed in item.needs or ()
        if needed.start < needed.end
    )


def _overlap(held: Span, needed: Span) -> tuple[int, int] | None:
    start, end = max(held.start, needed.start), min(held.end, needed.end)
    return (start, end) if start < end else None


def _views(
    buffer: torch.Tensor, messages: list[_Message], dtypes: dict[int, torch.dtype]
) -> Iterator[tuple[torch.Tensor, _Part]]:
    """Each part of ``messages``, which lie in ``buffer`` one after the other, as a tensor of its dtype."""
    begin = 0
    for message in messages:
        for part in message.parts:
            dtype = dtypes[part.item]
            first = begin + part.offset
            nbytes = (part.end - part.start) * dtype.itemsize
            yield buffer[first : first + nbytes].view(dtype), part
        begin += message.nbytes


def batches(items: Sequence[Item], limit: int) -> Iterator[range]:
    """The numbers of ``items`` in runs of at most ``limit`` bytes each, or of one item that is larger."""
    first, total = 0, 0
    for number, item in enumerate(items):
        if total + item.nbytes > limit and number > first:
            yield range(first, number)
            first, total = number, 0
        total += item.nbytes
    if first < len(items):
        yield range(first, len(items))
