"""From gradient slots to the gradient that the optimizer sees: reduce-scatter, average, ``.grad`` of the shard.

A leaf's gradient is copied into its slot as soon as autograd has it (the cast to the reduce dtype is part of the
copy) and dropped. When the unit's last leaf has delivered, the slots nobody wrote are zeroed and the whole vector is
reduced. What comes out is attached as ``.grad`` at the end of the backward.

Without synchronisation (``no_sync``) the slots belong to an *accumulator* instead, which is what users see as ``.grad``
until the next synchronised backward adds to it and reduces it. They own it: what they set to None is dropped, what they
zero or change in place is changed. A sharded gradient from an earlier synchronised backward is parked meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fsdp.comm.collectives import Communicator, Pending, Tag
from fsdp.comm.streams import Streams
from fsdp.flat.flat_param import FlatParamHandle, MemoryPool, SlotBuffer, assign_full_grad
from fsdp.flat.views import BucketViews


@dataclass
class _InFlight:
    """A reduction under way, and the memory it reads."""

    pending: Pending
    source: SlotBuffer
    finish: Callable[[], None]  # attaches the result
    returned: bool = False


class ReductionQueue:
    """The reductions under way in one tree, oldest first, and the memory of their buffers.

    At most ``MAX_BUFFERS`` lent buffers wait for their reduction; taking another one waits for the oldest.
    """

    MAX_BUFFERS = 2

    def __init__(self, pool: MemoryPool, streams: Streams) -> None:
        self.pool = pool
        self.streams = streams
        self._in_flight: deque[_InFlight] = deque()

    def lend(self, buffer: SlotBuffer) -> None:
        """Give ``buffer`` memory; called on the compute stream, which owns it."""
        if buffer.lent is None:
            return
        waiting = [item for item in self._in_flight if item.source.lent is not None and not item.returned]
        for item in waiting[: max(0, len(waiting) - self.MAX_BUFFERS + 1)]:
            self._complete(item)
        if any(item.source is buffer and not item.returned for item in waiting):
            for item in waiting:  # the same bucket again while its last reduction still reads the slots
                self._complete(item)
        self.pool.lend(buffer.lent)

    def give_back(self, buffer: SlotBuffer) -> None:
        if buffer.lent is not None:
            self.pool.take_back(buffer.lent, None)

    def add(self, pending: Pending, source: SlotBuffer, finish: Callable[[], None]) -> None:
        self._in_flight.append(_InFlight(pending, source, finish))

    def _complete(self, item: _InFlight) -> None:
        if not item.returned:
            item.pending.wait()
            self.give_back(item.source)
            item.returned = True

    def drain(self, *, attach: bool) -> None:
        """Wait for every reduction, in order, and attach the results (or, after an error, drop them)."""
        while self._in_flight:
            item = self._in_flight.popleft()
            self._complete(item)
            if attach:
                item.finish()
        self.pool.trim()


class BucketGradients:
    """The gradient of one bucket during and between backwards."""

    def __init__(self, handle: FlatParamHandle, views: BucketViews) -> None:
        self.handle = handle
        self.views = views
        count = len(handle.leaves)
        self._scratch: SlotBuffer | None = None  # the reduce buffer; its memory is lent for each backward
        self._target: SlotBuffer | None = None  # where this backward writes
        self._written = [False] * count
        self._accumulator: SlotBuffer | None = None  # unsharded gradients of earlier backwards, visible as .grad
        self._exposed: list[torch.Tensor] = []  # the views of it that are .grad now, one per visible parameter
        self._exposed_version = 0
        self._parked: list[torch.Tensor | None] = []  # sharded gradients that the accumulator hides

    @property
    def trainable(self) -> bool:
        return any(leaf.requires_grad for leaf in self.handle.leaves)

    @property
    def is_open(self) -> bool:
        """Whether this backward has written something that is not yet reduced or shown."""
        return self._target is not None

    # -- during a backward ---------------------------------------------------------------------------------------------

    def open(self, queue: ReductionQueue, *, synchronize: bool) -> None:
        """Take a buffer for this backward; what users left of the accumulator is continued."""
        self._adopt()
        if self._accumulator is not None:
            self._target = self._accumulator
            return
        self._written = [False] * len(self._written)
        if self.handle.groups.sharded and synchronize:
            if self._scratch is None:
                self._scratch = SlotBuffer(self.handle.layout, self.handle.device, lent=True)
            queue.lend(self._scratch)
            self._target = self._scratch
        else:  # users will hold this memory as .grad: it cannot be taken back
            self._target = SlotBuffer(self.handle.layout, self.handle.device, lent=False)

    def add(self, index: int, grad: torch.Tensor) -> None:
        """Put the gradient of leaf ``index`` into its slot."""
        assert self._target is not None
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        slot = self._target.slots[index]
        if self._written[index]:
            slot.add_(grad)
        else:
            slot.copy_(grad)
            self._written[index] = True

    def reduce(self, communicator: Communicator, queue: ReductionQueue, tag: Tag) -> None:
        """Start the reduction of what the slots hold; the result is attached when the queue is drained."""
        source = self._seal()
        if source is self._accumulator:
            self._conceal()
        groups = self.handle.groups
        shard = source.flat
        if groups.sharded:
            shard = torch.empty(self.handle.layout.shard_numel, dtype=shard.dtype, device=shard.device)
        streams = queue.streams
        written = streams.record()
        with streams.on_reduce_stream():
            streams.wait(written)
            pending = communicator.reduce(shard, source.flat, tag)
        queue.add(pending, source, lambda: self._attach(shard))

    def expose(self) -> None:
        """End a backward without synchronisation: the unsharded gradient becomes ``.grad``, accumulated so far."""
        accumulator = self._seal()
        first_time = self._accumulator is None
        self._accumulator = accumulator
        if first_time:
            self._exposed = self.views.full_grads(accumulator)
            self._parked = [None] * len(self._exposed)
        for position, (visible, grad) in enumerate(zip(self.views.visible, self._exposed)):
            before = visible.param.grad
            if before is grad or not visible.param.requires_grad:
                continue
            if before is not None:
                if self.handle.groups.reduces:
                    self._parked[position] = before
                else:  # one rank: sharded and unsharded gradients are the same thing
                    grad.add_(before)
            assign_full_grad(visible.param, grad)
        self._exposed_version = accumulator.flat._version

    def abandon(self, queue: ReductionQueue) -> None:
        """Forget what this backward wrote (it failed); an accumulator stays as far as it got."""
        if self._target is not None and self._target is not self._accumulator:
            queue.give_back(self._target)
        self._target = None

    # -- inside --------------------------------------------------------------------------------------------------------

    def _seal(self) -> SlotBuffer:
        """End writing: slots that nobody wrote, and the padding, hold whatever the memory held before; zero them."""
        target, self._target = self._target, None
        assert target is not None
        stale = [slot for slot, written in zip(target.slots, self._written) if not written and slot.numel()]
        stale += [target.flat[start:end] for start, end in self.handle.layout.gaps]
        if stale:
            torch._foreach_zero_(stale)
        self._written = [True] * len(self._written)  # zeros count as written if the buffer lives on
        return target

    def _adopt(self) -> None:
        """Find out what became of the accumulator while it was visible."""
        if self._accumulator is None:
            return
        touched = self._accumulator.flat._version != self._exposed_version
        kept = False
        for position, (visible, exposed) in enumerate(zip(self.views.visible, self._exposed)):
            grad = visible.param.grad
            if grad is exposed:
                kept = True
                parked = self._parked[position]
                if touched and parked is not None:  # zeroed in place: then the hidden part goes as well
                    parked.masked_fill_(exposed.any().logical_not(), 0)
                continue
            if grad is not None and grad.shape == exposed.shape:
                exposed.copy_(grad)
                visible.param.grad = None
                assign_full_grad(visible.param, exposed)
                kept = True
                continue
            self._parked[position] = grad
            for member in visible.members:
                self._written[member] = False
        if not kept:
            self._conceal()

    def _conceal(self) -> None:
        """Take the accumulator out of sight, and bring back what it hid."""
        for visible, exposed, parked in zip(self.views.visible, self._exposed, self._parked):
            if visible.param.grad is exposed:
                visible.param.grad = parked
        self._accumulator = None
        self._exposed, self._parked = [], []

    def _attach(self, shard: torch.Tensor) -> None:
        """Make the reduced gradient visible, or add it to what is there."""
        if shard.dtype != self.handle.layout.dtype:
            shard = shard.to(self.handle.layout.dtype)
        present, added = [], []
        for visible, grad in zip(self.views.visible, self.views.sharded_grads(shard)):
            if visible.absent or not visible.param.requires_grad:
                continue
            if visible.param.grad is None:
                visible.param.grad = grad
            else:
                present.append(visible.param.grad)
                added.append(grad)
        if present:
            torch._foreach_add_(present, added)
