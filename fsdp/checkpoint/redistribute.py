"""Moving elements from one placement to another: one message per pair of ranks for many tensors.

All state that travels does so by this one function: gathering on one rank, gathering on all, scattering or broadcasting
from one, and going from flat shards to chunks of rows and back differ in their placements only. What a rank sends to
another is the overlap of the boxes that it has with those that the other gets. Each computes its own messages from the
same placements, once for all tensors that are placed alike, and nothing but elements travels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fsdp.checkpoint.placement import Box, Part, Placement, box_view, copy_parts, elements_of, memory_order, overlaps
from fsdp.comm.collectives import (
    Communicator,
    Gather,
    Tag,
    Transfer,
    broadcast,
    direct_threshold,
    exchange,
    send_and_receive,
)
from fsdp.comm.groups import Groups
from fsdp.comm.streams import streams_for

_ALIGNMENT = 16  # bytes; where each message starts, so that every dtype's elements can be viewed in it
_TAGS = 1 << 24  # direct messages of a step have smaller numbers


class Item(NamedTuple):
    """A tensor to move.

    Attributes:
        dtype: in which it travels.
        stride: of the whole tensor, which tells the order of the elements in a message.
        source, target: what each rank has, and what each gets.
        has: this rank's parts of the source.
        gets: memory for what this rank wants of its part of the target.
    """

    dtype: torch.dtype
    stride: tuple[int, ...]
    source: Placement
    target: Placement
    has: Sequence[Part]
    gets: Sequence[Part]

    @property
    def nbytes(self) -> int:
        """Of what there is, on all ranks together."""
        return self.source.numel * self.dtype.itemsize

    def read(self, box: Box) -> torch.Tensor:
        """The elements of ``box``, which is in one of the parts that this rank has."""
        return next(held.cut(box, values) for held, values in self.has if held.overlap(box) == box)

    def memory(self, box: Box, device: torch.device) -> torch.Tensor | None:
        """Where the elements of ``box`` can arrive on ``device``, 1-D and in the order of a message."""
        for needed, memory in self.gets:
            if needed.overlap(box) == box and memory.device == device and memory.dtype == self.dtype:
                in_order = needed.cut(box, memory).permute(memory_order(box.sizes, self.stride))
                return in_order.as_strided((box.numel,), (1,)) if in_order.is_contiguous() else None
        return None


class _Message:
    """What one rank sends to another: boxes, large dtypes first, so that all are aligned."""

    def __init__(self) -> None:
        self._boxes: list[tuple[Item, Box, int]] = []
        self._end = 0

    def append(self, item: Item, box: Box) -> None:
        self._boxes.append((item, box, self._end))
        self._end += box.numel * item.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return -(-self._end // _ALIGNMENT) * _ALIGNMENT

    def pack(self, buffer: torch.Tensor) -> None:
        for item, box, values in self._views(buffer):
            values.copy_(item.read(box))

    def unpack(self, buffer: torch.Tensor) -> None:
        for item, box, values in self._views(buffer):
            copy_parts([(box, values)], item.gets)

    def _views(self, buffer: torch.Tensor) -> Iterator[tuple[Item, Box, torch.Tensor]]:
        for item, box, begin in self._boxes:
            elements = buffer[begin : begin + box.numel * item.dtype.itemsize].view(item.dtype)
            yield item, box, box_view(elements, box, 0, item.stride)


def _pieces(messages: Mapping[int, _Message], buffer: torch.Tensor) -> Iterator[tuple[int, _Message, torch.Tensor]]:
    """The messages by rank, each with its part of the buffer in which they lie one after the other."""
    begin = 0
    for rank, message in sorted(messages.items()):
        yield rank, message, buffer[begin : begin + message.nbytes]
        begin += message.nbytes


class Channel:
    """The ranks of a group as they redistribute tensors, batch after batch, through memory that is reused.

    While a batch travels, the one before it is put in place: two are there at a time, and one where each is flushed
    before the next. What is large goes directly from where it lies to where it belongs, where the group moves large
    messages best so.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        """``device`` is where ``group`` can communicate; a group of None is this rank alone."""
        self.group, self.device = group, device
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self._streams = streams_for(device)
        self._communicator = Communicator(Groups(group, self.rank, self.size, None, 0, 1), self._streams)
        direct = self.size > 1 and self._streams.asynchronous_work
        self._direct_min = direct_threshold(group, device) if direct else float("inf")  # bytes
        self._memory: dict[tuple[str, int], torch.Tensor] = {}
        self._batches = 0
        self._turn = 0  # whose memory the last batch has
        self._numbers: dict[tuple[int, bool], int] = {}  # of the direct messages from or to each rank
        self._finish: Callable[[], None] | None = None  # of the batch that travels

    def flush(self) -> None:
        """All that was given to :func:`redistribute` has arrived when this returns."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def send(self, items: Sequence[Item], label: str) -> None:
        """Start moving a batch, by one collective: a gather or a broadcast where every rank gets all."""
        items = sorted(items, key=lambda item: -item.dtype.itemsize)
        self._batches += 1
        self._turn ^= self._finish is not None
        tag = Tag(label, _TAGS + self._batches)
        if not all(item.target.is_everywhere for item in items):
            finish = self._exchange(items, label)
        elif all(rank == 0 for item in items for rank, _ in item.source.held):
            finish = self._broadcast(items)
        elif any(item.source.largest * item.dtype.itemsize >= self._direct_min for item in items):
            finish = self._exchange(items, label)
        else:
            finish = self._gather(items, tag)
        self.flush()
        self._finish = finish

    # -- the three ways to move a batch: each starts, and returns what waits and puts in place -------------------------

    def _exchange(self, items: list[Item], label: str) -> Callable[[], None]:
        outgoing, incoming = defaultdict[int, _Message](_Message), defaultdict[int, _Message](_Message)
        transfers: list[Transfer] = []
        late: list[tuple[Item, Box, torch.Tensor]] = []  # what cannot arrive where it belongs
        # whether any rank may send anything directly: all have to know, and none looks at all pairs of ranks for that
        large = (min(item.source.largest, item.target.largest) * item.dtype.itemsize for item in items)
        direct = max(large) >= self._direct_min
        for item in items:
            for giver, taker, box in overlaps(item.source, item.target, self.rank):
                goes_directly = box.numel * item.dtype.itemsize >= self._direct_min  # without a copy on the way
                if giver == self.rank:
                    if goes_directly:
                        elements = elements_of(item.read(box).to(self.device, item.dtype), item.stride)
                        transfers.append(self._transfer(True, taker, elements))
                    else:
                        outgoing[taker].append(item, box)
                elif goes_directly:
                    transfers.append(self._transfer(False, giver, self._arriving(item, box, late)))
                else:
                    incoming[giver].append(item, box)
        leaving, arriving = self._sizes(outgoing), self._sizes(incoming)
        sent, received = self._buffer("sent", sum(leaving)), self._buffer("received", sum(arriving))
        for _, message, piece in _pieces(outgoing, sent):
            message.pack(piece)
        if direct:
            for is_sent, messages, buffer in ((True, outgoing, sent), (False, incoming, received)):
                transfers += [self._transfer(is_sent, rank, piece) for rank, _, piece in _pieces(messages, buffer)]
            pending = send_and_receive(transfers, self.group, self._streams, label, self.device)
        else:
            pending = exchange(received, sent, arriving, leaving, self.group, self._streams, label)

        def finish() -> None:
            for item in items:
                copy_parts(item.has, item.gets)
            pending.wait()
            for _, message, piece in _pieces(incoming, received):
                message.unpack(piece)
            for item, box, elements in late:
                copy_parts([(box, box_view(elements, box, 0, item.stride))], item.gets)

        return finish

    def _sizes(self, messages: Mapping[int, _Message]) -> list[int]:
        return [messages[rank].nbytes if rank in messages else 0 for rank in range(self.size)]

    def _arriving(self, item: Item, box: Box, late: list[tuple[Item, Box, torch.Tensor]]) -> torch.Tensor:
        elements = item.memory(box, self.device)
        if elements is None:
            elements = torch.empty(box.numel, dtype=item.dtype, device=self.device)
            late.append((item, box, elements))
        return elements

    def _transfer(self, sent: bool, rank: int, values: torch.Tensor) -> Transfer:
        """The next one to or from ``rank``, which counts alike."""
        number = self._numbers[rank, sent] = self._numbers.get((rank, sent), 0) + 1
        return Transfer(sent, rank, values.view(torch.uint8), _TAGS + number)

    def _broadcast(self, items: list[Item]) -> Callable[[], None]:
        message = _Message()
        for item in items:
            for box in item.source.boxes[0]:
                message.append(item, box)
        buffer = self._buffer("received", message.nbytes)
        if self.rank == 0:
            message.pack(buffer)
        broadcast([buffer], self.group)
        return lambda: message.unpack(buffer)

    def _gather(self, items: list[Item], tag: Tag) -> Callable[[], None]:
        messages = defaultdict[int, _Message](_Message)
        for item in items:
            for rank, boxes in item.source.held:
                for box in boxes:
                    messages[rank].append(item, box)
        nbytes = max(message.nbytes for message in messages.values())
        received = self._buffer("received", nbytes * self.size)
        pieces = received.view(self.size, nbytes)
        messages[self.rank].pack(pieces[self.rank])
        pending = self._communicator.gather([Gather(received, pieces[self.rank])], tag)

        def finish() -> None:
            pending.wait()
            for rank, message in messages.items():
                message.unpack(pieces[rank])

        return finish

    def _buffer(self, name: str, nbytes: int) -> torch.Tensor:
        """Memory that no batch under way has: that of an earlier one, unless it is too small, or twice as large."""
        kept = self._memory.pop((name, self._turn), None)
        if kept is None or not nbytes <= kept.numel() < 2 * nbytes:
            kept = None  # before there is another one
            kept = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._memory[name, self._turn] = kept
        return kept[:nbytes]


class Channels:
    """One :class:`Channel` per group, made at first use."""

    def __init__(self) -> None:
        self._by_group: dict[tuple[Any, torch.device], Channel] = {}

    def over(self, group: Any, device: torch.device) -> Channel:
        if (group, device) not in self._by_group:
            self._by_group[group, device] = Channel(group, device)
        return self._by_group[group, device]

    def flush(self) -> None:
        for channel in self._by_group.values():
            channel.flush()


def redistribute(items: Sequence[Item], channel: Channel, label: str, *, limit: int = 32 << 20) -> None:
    """Start moving ``items``. All ranks of the channel have to come with the same placements.

    One collective per ``limit`` bytes, or per item that is larger; none for what does not travel. All has arrived when
    the channel has been flushed, and nobody touches the values before.
    """
    travelling: list[Item] = []
    for item in items:  # all that stays first: where a copy raises, nothing has been sent
        if item.source == item.target or channel.size == 1:
            copy_parts(item.has, item.gets)
        elif item.source.numel > 0 and any(item.target.boxes):
            travelling.append(item)
    batch: list[Item] = []
    for item in travelling:
        if batch and sum(other.nbytes for other in batch) + item.nbytes > limit:
            channel.send(batch, label)
            batch = []
        batch.append(item)
    if batch:
        channel.send(batch, label)
