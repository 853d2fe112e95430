"""Redistribution: move elements of tensors from one placement to another.

Gathering on one or all ranks, scattering, broadcasting, and moving between flat shards and chunks of rows are the same
operation with other placements. A rank sends the overlap of the local source boxes with the receiver's target boxes.
All ranks compute their messages from the same placements, so only elements travel: one message per pair of ranks for
many tensors.

    source = Placement.intervals(shape, stride, spans, ranks)      # flat shards
    target = Placement.whole(shape, ranks, only=owner)
    item = Item(torch.float32, stride, source, target, inputs=local_parts, outputs=[(Box.whole(shape), memory)])
    channel = Channel(group, device)
    redistribute([item], channel, "gather for the optimizer")      # start
    channel.flush()                                                # waits until ``memory`` is written
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fsdp.comm.collectives import (
    Communicator,
    Event,
    Gather,
    Transfer,
    broadcast,
    direct_threshold,
    exchange,
    send_and_receive,
)
from fsdp.comm.groups import Groups
from fsdp.comm.streams import streams_for
from fsdp.placement.boxes import Box, Part, Placement, box_view, copy_parts, elements_of, memory_order, overlaps

_ALIGNMENT = 16  # bytes; each message begins at a multiple, so that it can be viewed in any dtype
_TAGS = 1 << 24  # above the tags of a step's direct messages


class Item(NamedTuple):
    """A tensor to move; ``dtype``, ``stride`` and placements are equal on all ranks.

    Attributes:
        dtype: dtype of the messages; inputs are cast to it, and outputs from it.
        stride: strides of the whole tensor, which define the order of the elements in a message.
        source, target: placements before and after.
        inputs: this rank's tensors, which together cover the boxes that it holds in ``source``.
        outputs: this rank's memory for its boxes of ``target``, or for some of them; the rest is dropped.
    """

    dtype: torch.dtype
    stride: tuple[int, ...]
    source: Placement
    target: Placement
    inputs: Sequence[Part]
    outputs: Sequence[Part]

    @property
    def nbytes(self) -> int:
        """Bytes on all ranks together, before the move."""
        return self.source.numel * self.dtype.itemsize

    def read(self, box: Box) -> torch.Tensor:
        """Return the elements of ``box``, a box inside one of the inputs."""
        return next(outer.cut(box, values) for outer, values in self.inputs if outer.overlap(box) == box)

    def memory(self, box: Box, device: torch.device) -> torch.Tensor | None:
        """Return output memory that can receive the elements of ``box`` directly, as a 1-D view, or None."""
        for outer, memory in self.outputs:
            if outer.overlap(box) == box and memory.device == device and memory.dtype == self.dtype:
                in_order = outer.cut(box, memory).permute(memory_order(box.sizes, self.stride))
                return in_order.as_strided((box.numel,), (1,)) if in_order.is_contiguous() else None
        return None


class _Message:
    """The boxes that one rank sends to another, large dtypes first, so that all are aligned."""

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
            copy_parts([(box, values)], item.outputs)

    def _views(self, buffer: torch.Tensor) -> Iterator[tuple[Item, Box, torch.Tensor]]:
        for item, box, begin in self._boxes:
            elements = buffer[begin : begin + box.numel * item.dtype.itemsize].view(item.dtype)
            yield item, box, box_view(elements, box, 0, item.stride)


def _pieces(messages: Mapping[int, _Message], buffer: torch.Tensor) -> Iterator[tuple[int, _Message, torch.Tensor]]:
    """Cut ``buffer`` into the consecutive messages, in the order of ranks."""
    begin = 0
    for rank, message in sorted(messages.items()):
        yield rank, message, buffer[begin : begin + message.nbytes]
        begin += message.nbytes


class Channel:
    """A process group with reusable message buffers, over which batches are redistributed in order.

    One batch is unpacked while the next is in flight, so at most two batches have buffers. Over gloo a large box is
    sent and received without a buffer. On an accelerator an exchange is packed and sent on the gather stream, next to
    the work of the current stream, on which the batch is unpacked.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        """Make a channel over ``group`` (None: this rank alone) with buffers on ``device``."""
        self.group, self.device = group, device
        self.rank: int = 0 if group is None else group.rank()
        self.size: int = 1 if group is None else group.size()
        self._streams = streams_for(device)
        self._communicator = Communicator(Groups(group, self.rank, self.size, None, 0, 1), self._streams)
        direct = self.size > 1 and self._streams.asynchronous_work
        self._direct_min = direct_threshold(group, device) if direct else float("inf")  # bytes
        self._memory: dict[tuple[str, int], torch.Tensor] = {}
        self.batches = 0
        self._turn = 0  # which of the two sets of buffers the last batch uses
        self._numbers: dict[tuple[int, bool], int] = {}  # direct messages so far, by peer and direction
        self._finish: Callable[[], None] | None = None  # waits for the batch in flight and unpacks it

    def flush(self) -> None:
        """Wait until everything given to :func:`redistribute` is in the outputs."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()

    def send(self, items: Sequence[Item], label: str) -> None:
        """Start one batch by one collective: a gather or a broadcast if every rank receives everything."""
        items = sorted(items, key=lambda item: -item.dtype.itemsize)
        self.batches += 1
        self._turn ^= self._finish is not None
        event = Event(label, _TAGS + self.batches)
        if not all(item.target.is_replicated for item in items):
            finish = self._exchange(items, label)
        elif all(rank == 0 for item in items for rank, _ in item.source.held):
            finish = self._broadcast(items)
        elif any(item.source.largest * item.dtype.itemsize >= self._direct_min for item in items):
            finish = self._exchange(items, label)
        else:
            finish = self._gather(items, event)
        self.flush()
        self._finish = finish

    # -- three ways to start a batch: each returns a function that waits and unpacks -----------------------------------

    def _exchange(self, items: list[Item], label: str) -> Callable[[], None]:
        outgoing, incoming = defaultdict[int, _Message](_Message), defaultdict[int, _Message](_Message)
        transfers: list[Transfer] = []
        staged: list[tuple[Item, Box, torch.Tensor]] = []  # received into memory of their own, then copied
        # All ranks must choose the same collective; an upper bound avoids a look at every pair of ranks.
        large = (min(item.source.largest, item.target.largest) * item.dtype.itemsize for item in items)
        direct = max(large) >= self._direct_min
        for item in items:
            for sender, receiver, box in overlaps(item.source, item.target, self.rank):
                without_buffer = box.numel * item.dtype.itemsize >= self._direct_min
                if sender == self.rank:
                    if without_buffer:
                        elements = elements_of(item.read(box).to(self.device, item.dtype), item.stride)
                        transfers.append(self._transfer(True, receiver, elements))
                    else:
                        outgoing[receiver].append(item, box)
                elif without_buffer:
                    transfers.append(self._transfer(False, sender, self._arriving(item, box, staged)))
                else:
                    incoming[sender].append(item, box)
        leaving, arriving = self._sizes(outgoing), self._sizes(incoming)
        ready = self._streams.record()
        with self._streams.on_gather_stream():
            self._streams.wait(ready)
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
                copy_parts(item.inputs, item.outputs)
            pending.wait()
            for _, message, piece in _pieces(incoming, received):
                message.unpack(piece)
            for item, box, elements in staged:
                copy_parts([(box, box_view(elements, box, 0, item.stride))], item.outputs)
            read = self._streams.record()
            with self._streams.on_gather_stream():  # which may be given the memory of the buffers
                self._streams.wait(read)

        return finish

    def _sizes(self, messages: Mapping[int, _Message]) -> list[int]:
        return [messages[rank].nbytes if rank in messages else 0 for rank in range(self.size)]

    def _arriving(self, item: Item, box: Box, staged: list[tuple[Item, Box, torch.Tensor]]) -> torch.Tensor:
        elements = item.memory(box, self.device)
        if elements is None:
            elements = torch.empty(box.numel, dtype=item.dtype, device=self.device)
            staged.append((item, box, elements))
        return elements

    def _transfer(self, sent: bool, rank: int, values: torch.Tensor) -> Transfer:
        """Make the next numbered transfer to or from ``rank``; both sides count alike."""
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

    def _gather(self, items: list[Item], event: Event) -> Callable[[], None]:
        messages = defaultdict[int, _Message](_Message)
        for item in items:
            for rank, boxes in item.source.held:
                for box in boxes:
                    messages[rank].append(item, box)
        nbytes = max(message.nbytes for message in messages.values())
        received = self._buffer("received", nbytes * self.size)
        pieces = received.view(self.size, nbytes)
        messages[self.rank].pack(pieces[self.rank])
        pending = self._communicator.gather([Gather(received, pieces[self.rank])], event)

        def finish() -> None:
            pending.wait()
            for rank, message in messages.items():
                message.unpack(pieces[rank])

        return finish

    def _buffer(self, name: str, nbytes: int) -> torch.Tensor:
        """Return a buffer that no batch in flight uses, reused if it is large enough and not twice too large."""
        kept = self._memory.pop((name, self._turn), None)
        if kept is None or not nbytes <= kept.numel() < 2 * nbytes:
            kept = None  # free it before the next allocation
            kept = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        self._memory[name, self._turn] = kept
        return kept[:nbytes]


class Channels:
    """One :class:`Channel` per group, made at first use."""

    def __init__(self) -> None:
        self._by_group: dict[tuple[Any, torch.device], Channel] = {}

    def over(self, group: Any, device: torch.device) -> Channel:
        """Return the channel of ``group`` on ``device``."""
        if (group, device) not in self._by_group:
            self._by_group[group, device] = Channel(group, device)
        return self._by_group[group, device]

    def flush(self) -> None:
        """Flush every channel."""
        for channel in self._by_group.values():
            channel.flush()


def redistribute(items: Sequence[Item], channel: Channel, label: str, *, limit: int = 32 << 20) -> None:
    """Start to move ``items``; ``channel.flush()`` waits for them.

    All ranks of the channel call it with equal placements. One collective moves up to ``limit`` bytes, or one larger
    item. An item whose placement does not change is copied without communication. An item that no rank holds or
    receives is skipped. Inputs and outputs must not be used before the flush. ``label`` names the call in errors.
    """
    travelling: list[Item] = []
    for item in items:  # local copies first: if one raises, no message has been sent
        if item.source == item.target or channel.size == 1:
            copy_parts(item.inputs, item.outputs)
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
