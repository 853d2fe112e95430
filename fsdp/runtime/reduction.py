"""From gradient slots to the gradient that the optimizer sees: reduce-scatter, average, ``.grad`` of the shard.

A leaf's gradient is copied into a slot, which casts it to the reduce dtype, and dropped. When the unit's last leaf
has delivered, unwritten slots are zeroed and the whole vector is reduced. The result is attached as
``.grad`` at the end of the backward. Without synchronization (``no_sync``) the slots belong to the ``accumulator``
instead.

[Note: Stages of a reduction]
A :class:`Reduction` has these stages, of which a bucket may lack some:

1. ``start``: reduce-scatter within the shard group, or the user's communication hook.
2. ``average``: add the partial sums of earlier backwards, then all-reduce over the replica group.
3. ``_transform``: the user's all-reduce hook, then the copy to host memory.
4. ``finish``: attach the result as ``.grad``, or keep it as a partial sum.

An accelerator runs stages 1 to 3 one behind the other, on streams of their own. On CPU a collective is a work handle,
and the host waits for stage 1 before it starts stage 2: when the next reduction starts, which hid the first one, and at
the end of the backward. It does not do so when memory runs short. Ranks get there at different places, and collectives
of a group have one order.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp.comm import host_memory
from fsdp.comm.collectives import Communicator, Event, Work
from fsdp.comm.host_memory import HostBuffers
from fsdp.comm.streams import StreamEvent, Streams
from fsdp.flat.flat_param import assign_grad
from fsdp.flat.full_copy import BufferState, SlotBuffer, parameter_views
from fsdp.flat.memory import MemoryPool
from fsdp.flat.snapshot import accumulation_hooks_of, flag_of, layout_of
from fsdp.flat.views import BucketViews
from fsdp.runtime import hooks
from fsdp.runtime.accumulator import Accumulator
from fsdp.runtime.policy import UnitPolicy

_READABLE = (BufferState.UNSHARDED, BufferState.RESIDENT)
_IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"  # the module that sets optimizers on parameters


@dataclass(eq=False, slots=True)
class Slots:
    """The gradient of one bucket that the backward under way is writing.

    Attributes:
        buffer: the memory that is written.
        written: the leaves, by index, whose slots hold a gradient.
        accumulated: positions whose gradients of earlier backwards are in ``buffer``, which is the accumulator then;
            None for another buffer.
        hooked: users' hooks or tensor parallelism change gradients before they are written.
        awaited: hooks or optimizers of the program run during the backward, when the gradient is complete.
    """

    buffer: SlotBuffer
    written: set[int]
    accumulated: set[int] | None
    hooked: bool
    awaited: bool

    def write(self, grads: dict[int, torch.Tensor]) -> None:
        """Put gradients of leaves, by index, into their slots; of the whole vector's leaf, into all slots."""
        slots, values = self.buffer.slots, list(grads.values())
        several = len(values) > 1 and len(slots) not in grads and self.written.isdisjoint(grads)
        plain = set(map(type, values)) == {torch.Tensor} and set(map(layout_of, values)) == {torch.strided}
        if several and plain:
            torch._foreach_copy_(list(map(slots.__getitem__, grads)), values)  # one kernel
            self.written.update(grads)
            return
        for index, grad in grads.items():
            self._write_one(index, grad)

    def _write_one(self, index: int, grad: torch.Tensor) -> None:
        slots = self.buffer.slots
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        if index == len(slots):
            for each, part in enumerate(parameter_views(self.buffer.layout, grad.contiguous())):
                self._write_one(each, part)
        elif index in self.written:
            slots[index].add_(grad)
        else:
            slots[index].copy_(grad)
            self.written.add(index)

    def zero_the_rest(self) -> None:
        """Zero the padding and the unwritten slots, which hold old values."""
        stale: list[torch.Tensor] = []
        slots = self.buffer.slots
        if len(self.written) < len(slots):
            stale = [slot for index, slot in enumerate(slots) if index not in self.written and slot.numel()]
        stale += self.buffer.padding
        if stale:
            torch._foreach_zero_(stale)


class Reduction:
    """The reduction of one bucket's gradient, in flight; see [Note: Stages of a reduction].

    Attributes:
        source: the buffer that the first collective reads; None once it is complete.
        shard: the result, ``layout.shard_numel`` elements; ``source`` itself if the unit is not sharded.
        earlier: partial sums of earlier backwards, which were not averaged over replicas.
        is_partial: the result is not averaged over replicas either, and is kept.
        averages: an all-reduce over replicas is still to be started.
        awaited: the result is attached when it is complete, not at the end of the backward.
        accumulated: positions with gradients of earlier backwards in ``source``.
        unused: the leaves, by index, that no rank has a gradient of.
        pending: the first collective.
        averaged: the all-reduce.
        on_host: the result in host memory, and the event after which it is there.
    """

    def __init__(
        self,
        bucket: BucketGradients,
        slots: Slots,
        unused: set[int],
        communicator: Communicator,
        streams: Streams,
        event: Event,
    ) -> None:
        groups, policy = bucket.handle.groups, bucket.policy
        self.bucket, self.communicator, self.streams, self.event = bucket, communicator, streams, event
        self.source: SlotBuffer | None = slots.buffer
        self.shard = slots.buffer.flat
        if groups.sharded:
            self.shard = host_memory.recycled(bucket.handle.layout.shard_numel, self.shard)
        self.is_partial = groups.replica is not None and not policy.requires_all_reduce
        self.earlier: torch.Tensor | None = None
        if not self.is_partial:
            self.earlier, bucket.partial = bucket.partial, None
        follows = groups.sharded or self.earlier is not None or (policy.comm_hook is not None and groups.hybrid)
        self.averages = groups.replica is not None and not self.is_partial and follows
        self.hook = policy.all_reduce_hook
        self.awaited, self.accumulated, self.unused = slots.awaited, slots.accumulated or (), unused
        self.pending: Work
        self.averaged: Work | None = None
        self.on_host: tuple[torch.Tensor, StreamEvent] | None = None

    def start(self) -> None:
        """Start the first collective, behind what the current stream has written."""
        if self.streams.asynchronous_work:
            self.pending = self._first_collective()
            return
        written = self.streams.record()
        with self.streams.on_reduce_stream():
            self.streams.wait(written)
            self.pending = self._first_collective()
            if not (self.averages or self.is_partial):
                self._transform(self.pending)

    def _first_collective(self) -> Work:
        source, handle, hook = self.source, self.bucket.handle, self.bucket.policy.comm_hook
        assert source is not None
        if not handle.groups.sharded and (self.is_partial or self.earlier is not None):
            return Work.done(self.streams)
        if hook is None:
            return self.communicator.reduce(self.shard, source.flat, self.event, to_write=source.pooled is None)
        hook.reduce(self.shard, source.flat, self.event.label)
        for start, end in handle.layout.shard_gaps(handle.groups.shard_rank):
            self.shard[start:end].zero_()
        return Work.done(self.streams)

    def average(self) -> None:
        """Add the partial sums of earlier backwards, and start the all-reduce over the replicas."""
        self.averages = False
        with self.streams.on_replica_stream():
            self.pending.wait()
            if self.earlier is not None:
                self.shard.add_(self.earlier)
            self.averaged = self.communicator.average(self.shard, self.event)
            if not self.streams.asynchronous_work:
                self._transform(self.averaged)

    def _transform(self, pending: Work) -> None:
        """Call the user's hook and copy the result to host memory, behind ``pending``, the last collective, on the
        current stream. Accelerators only; on CPU ``finish`` calls the hook."""
        if self.hook is not None:
            self.hook(self.shard)
            pending.extend()
        if self.bucket.handle.keeps_gradients_on_host:
            self.on_host = self.bucket.copy_to_host(self.shard, self.streams)
            pending.extend()

    def finish(self) -> None:
        """Attach the result, which is complete."""
        self.earlier = None  # held until here, because the replica stream reads it
        if self.is_partial:
            partial = self.bucket.partial
            self.bucket.partial = self.shard if partial is None else partial.add_(self.shard)
            return
        if self.hook is not None and self.streams.asynchronous_work:
            self.hook(self.shard)
        if self.on_host is None:
            self.bucket.attach(self.shard, self.accumulated, self.unused, announces=self.awaited)
            return
        grad, copied = self.on_host
        with self.streams.on_host(copied):
            self.bucket.attach(grad, self.accumulated, self.unused, announces=self.awaited)


class ReductionQueue:
    """The reductions in flight in one tree, oldest first, and the memory of their buffers.

    At most ``max_buffers`` full vectors wait for their reduction. One more waits for the oldest.

    Attributes:
        outlasts_backward: a backward has ended with reductions in flight.
    """

    def __init__(self, pool: MemoryPool, streams: Streams, max_buffers: int) -> None:
        self.pool, self.streams, self.max_buffers = pool, streams, max_buffers
        self.outlasts_backward = False
        self._in_flight: deque[Reduction] = deque()
        self._reading: deque[Reduction] = deque()  # those of sharded buckets whose source is in use
        self._unaveraged: Reduction | None = None  # the last one, while its all-reduce is still to be started

    def set_max_buffers(self, max_buffers: int) -> None:
        """Change the number of full vectors that may wait for their reduction."""
        self.max_buffers = max_buffers

    def allocate(self, buffer: SlotBuffer) -> None:
        """Give ``buffer`` memory. The current stream is the compute stream, which owns the memory."""
        for item in self._reading:
            if item.source is buffer:  # an earlier reduction still reads the slots
                self._complete_all_but(0)
                break
        self._complete_all_but(self.max_buffers - 1)
        assert buffer.pooled is not None
        self.pool.allocate(buffer.pooled)

    def add(self, item: Reduction) -> None:
        """Queue ``item``, which has started."""
        self._in_flight.append(item)
        if item.bucket.handle.groups.sharded:
            self._reading.append(item)
        if self._unaveraged is not None:  # see [Note: Stages of a reduction]
            self.start_last()
        if item.averages:
            self._unaveraged = item
            if not self.streams.asynchronous_work:
                self.start_last()
        self._complete_all_but(self.max_buffers)

    def start_last(self) -> None:
        """Start the all-reduce that the last reduction waits with. Ranks have agreed on it."""
        item, self._unaveraged = self._unaveraged, None
        if item is not None:
            item.average()
            if item.awaited:
                self._attach(item)

    def _complete_all_but(self, count: int) -> None:
        while len(self._reading) > count:
            item = self._reading[0]
            self._complete(item)
            if item.awaited:
                self._attach(item)

    def _attach(self, item: Reduction) -> None:
        """Attach the result of ``item`` before the end of the backward, if all of its collectives have started."""
        if item.source is None and not item.averages:
            self._settle([item])
            self._in_flight.remove(item)
            item.finish()

    def _complete(self, item: Reduction) -> None:
        """Wait for the first collective of ``item``, and free the source."""
        if item.source is not None:
            item.pending.wait()  # where that is interrupted, the memory stays in use
            if item.source.pooled is not None:
                self.pool.free(item.source.pooled, None)
            item.source = None
        if item in self._reading:  # also after an interrupt just before this line
            self._reading.remove(item)

    def _settle(self, items: Collection[Reduction]) -> None:
        """Wait for all collectives of ``items``."""
        for item in items:
            self._complete(item)
            if item.averaged is not None:
                item.averaged.wait()

    def drain(self, *, attach: bool) -> None:
        """Wait for every reduction, in order, and attach the results; after an error, without ``attach``, drop them."""
        if attach:
            self.start_last()  # before waiting for one
        self._unaveraged = None
        self._settle(self._in_flight)
        while self._in_flight:
            item = self._in_flight.popleft()
            if attach:
                item.finish()
        self.outlasts_backward = False
        self.pool.rest()

    def leave_in_flight(self) -> None:
        """Note that a backward ends without ``drain``."""
        self.outlasts_backward = True


class BucketGradients:
    """The gradient of one bucket during and between backwards.

    Attributes:
        policy: of the unit.
        slots: where the backward under way writes; None if all that it has written is reduced or exposed.
        accumulator: the gradients of backwards without synchronization.
        partial: sums of earlier backwards that were not averaged over replicas.
        used: the leaves, by index, that this rank has gradients of in reductions that are not attached yet; empty
            unless ``reduce_unused``, where a parameter that no rank uses gets no gradient. Otherwise it gets zeros if
            a parameter of the unit is used.
        stepper: steps the parameters during the backward, when ``.grad`` is complete; None for an ordinary optimizer.
        stepped: ``stepper`` was called, and the program has not called the optimizer's ``step`` since.
    """

    def __init__(self, views: BucketViews, policy: UnitPolicy, *, keep_low_precision: bool) -> None:
        """``keep_low_precision``: ``.grad`` has the compute dtype, not the parameter's."""
        self.handle, self.views = views.handle, views
        self.slots: Slots | None = None
        self.accumulator = Accumulator(views)
        self.partial: torch.Tensor | None = None
        self.used: set[int] = set()
        self.stepper: Callable[[], None] | None = None
        self.stepped = False
        self._keep_low_precision = keep_low_precision
        self._unused: set[int] = set()  # the leaves, by index, that no rank has a gradient of in what is reduced next
        self._host_buffers = HostBuffers()  # of offloaded gradients
        self._scratch: SlotBuffer | None = None  # the reduce buffer; it has memory from the pool during a backward
        self._leaves = set(range(len(self.handle.copy.all_leaves)))  # all indices
        self.follow(policy)

    def follow(self, policy: UnitPolicy) -> None:
        """Reduce by ``policy`` from now on."""
        self.policy, handle = policy, self.handle
        if policy.comm_hook is not None and policy.comm_hook.compresses:  # it takes and returns this dtype
            self._keep_low_precision = False
            handle.reduce_in(handle.layout.dtype)

    @property
    def trainable(self) -> bool:
        """Whether a leaf requires grad."""
        return any(leaf.requires_grad for leaf in self.handle.leaves)

    @property
    def reduces(self) -> bool:
        """Whether a synchronized backward makes another tensor of what the slots hold: reduced, cast or moved."""
        handle, policy = self.handle, self.policy
        if handle.groups.reduces or policy.changes_gradients:
            return True
        return handle.reduce_dtype != self.dtype or handle.keeps_gradients_on_host

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of ``.grad`` after a synchronized backward."""
        return self.handle.full.dtype if self._keep_low_precision else self.handle.layout.dtype

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier backwards are not reduced, or not averaged over replicas."""
        return self.partial is not None or (self.accumulator.is_visible and self.reduces)

    @property
    def lacks(self) -> bool:
        """Whether a parameter that requires grad has no gradient on this rank in what is reduced."""
        visible = self.views.visible
        return any(each.param.requires_grad and self.used.isdisjoint(each.members) for each in visible)

    def note_used(self, used: set[int]) -> None:
        """Take over which leaves any rank has used in what was reduced so far. Without this call all count as used."""
        self._unused |= self._leaves - used
        self._unused = set()  # of the next backward

    def forget_buffers(self) -> None:
        """Drop buffers and accumulated gradients: the bucket has another dtype or device, and another layout."""
        self.follow(self.policy)
        self._scratch = None
        self.accumulator.forget()

    # -- during a backward ---------------------------------------------------------------------------------------------

    def write(
        self,
        grads: dict[int, torch.Tensor],
        queue: ReductionQueue,
        weight: float,
        *,
        synchronize: bool,
    ) -> None:
        """Write gradients of leaves, by index, into their slots, ``weight`` times; with weight 0, the slots count as
        unwritten.

        Raises:
            RuntimeError: the gradients arrived in a way that is not supported.
        """
        readable = not self.policy.unshard_in_backward or self.handle.copy.state in _READABLE
        if not readable or any(map(flag_of, grads.values())):
            raise self._refusal(grads)
        slots = self.slots or self.open(queue, synchronize=synchronize)
        if weight == 0:
            return
        if slots.hooked:
            grads = {index: self.views.hooked(index, grad) for index, grad in grads.items()}
        if weight != 1:
            grads = {index: grad * weight for index, grad in grads.items()}
        slots.write(grads)

    def _refusal(self, grads: dict[int, torch.Tensor]) -> RuntimeError:
        """Return the error for gradients of leaves, by index, that require grad, or arrived while the values were
        sharded."""
        unit_name = self.handle.unit_name
        for index, grad in grads.items():
            if grad.requires_grad:
                return RuntimeError(
                    f"the gradient of parameter {self.handle.name_of(index)!r} of {unit_name} requires grad itself: "
                    "gradients of gradients (create_graph=True) of sharded parameters are not supported. Compute such "
                    "terms on the plain module"
                )
        return RuntimeError(
            f"a backward reached parameter {self.handle.name_of(next(iter(grads)))!r} of {unit_name} while its values "
            "were sharded, before it reached an output of the wrapped module: through a tensor that the forward "
            "stored, or that a hook took. Return that tensor, or mark it inside the forward by "
            "fsdp.mark_side_output(tensor)"
        )

    def open(self, queue: ReductionQueue, *, synchronize: bool) -> Slots:
        """Return new slots for this backward, with a buffer. An accumulator, as far as the user left it, is
        continued."""
        layout, handle = self.handle.layout, self.handle
        written, continued = set[int](), None
        accumulator, accumulated = self.accumulator.reuse() if self.accumulator.exposed else (None, set[int]())
        if accumulator is not None:
            buffer, continued = SlotBuffer(layout, accumulator), accumulated
            written.update(index for position in accumulated for index in self.views.visible[position].members)
        elif handle.groups.sharded and synchronize:
            if self._scratch is None or self._scratch.flat.dtype != handle.reduce_dtype:
                flat = torch.empty(layout.padded_numel, dtype=handle.reduce_dtype, device=handle.device)
                self._scratch = SlotBuffer(layout, flat, pooled=True)
            buffer = self._scratch
            queue.allocate(buffer)
        else:  # the user will hold this memory as .grad: it cannot be taken back
            new = queue.pool.empty if handle.groups.sharded else torch.empty
            buffer = SlotBuffer(layout, new(layout.padded_numel, dtype=handle.reduce_dtype, device=handle.device))
        self.slots = Slots(buffer, written, continued, self.views.has_hooks, self._is_awaited)
        return self.slots

    def reduce(self, communicator: Communicator, queue: ReductionQueue, event: Event) -> None:
        """Start the reduction of what the slots hold; of zeros, if nothing was written."""
        slots = self.slots or self.open(queue, synchronize=True)
        unused: set[int] = set()
        if self.policy.tree.reduce_unused:
            self.used |= slots.written
            if not slots.awaited:  # else it is attached before the ranks can agree
                unused = self._unused
            if not self.handle.groups.reduces:
                self.note_used(self.used)
        slots.zero_the_rest()
        if slots.accumulated is not None:
            self.accumulator.conceal()
        item = Reduction(self, slots, unused, communicator, queue.streams, event)
        item.start()
        self.slots = None  # from here on the queue has the buffer; where ``start`` raises, ``abandon`` frees it
        queue.add(item)

    @property
    def _is_awaited(self) -> bool:
        """Whether hooks or optimizers of the program run during the backward, when a gradient is complete."""
        if self.stepper is not None:
            return True
        params: Sequence[Any] = self.views.params
        hooked = list(filter(None, map(accumulation_hooks_of, params)))
        if hooked and any(found.keys() != {hooks.OWN_HOOK} for found in hooked):
            return True
        return _IN_BACKWARD in sys.modules and any("_in_backward_optimizers" in param.__dict__ for param in params)

    def _announce(self) -> None:
        """Call the parameters' hooks, and step the optimizers that torch's ``_apply_optimizer_in_backward`` has set on
        them, or the unit's ``stepper``: the gradients are complete."""
        for held in self.views.visible:
            param: Any = held.param
            if held.absent or param.grad is None or not param.requires_grad:
                continue
            for key, hook in tuple((param._post_accumulate_grad_hooks or {}).items()):
                if key != hooks.OWN_HOOK:
                    hook(param)
            for optimizer in getattr(param, "_in_backward_optimizers", ()):
                optimizer.step()
                optimizer.zero_grad()
        if self.stepper is not None:
            self.stepper()

    def check_not_stepped(self, call: str) -> None:
        """Raise RuntimeError if ``stepper`` has used the gradients that ``call`` is about."""
        if self.stepped:
            raise RuntimeError(
                f"{call}: HostOptimizer(early=True) has stepped {self.handle.unit_name} in the last backward. Call its "
                "step() after each backward that is not under no_sync(); leave out early=True to clip, scale, drop or "
                "add up gradients after a backward"
            )

    def expose(self, queue: ReductionQueue, *, complete: bool) -> None:
        """End a backward without reduction: the unsharded gradient becomes ``.grad``. It is ``complete`` if no
        reduction follows."""
        slots, self.slots = self.slots or self.open(queue, synchronize=False), None
        slots.zero_the_rest()
        unused = self._leaves - slots.written if self.policy.tree.reduce_unused else set()
        continues = slots.accumulated is not None
        self.accumulator.expose(slots.buffer, unused, continues=continues, hides_sharded=self.reduces)
        if complete and slots.awaited:
            self._announce()

    def abandon(self, queue: ReductionQueue) -> None:
        """Drop what a failed backward has written. An accumulator keeps what it has."""
        slots, self.slots = self.slots, None
        self.used, self._unused = set(), set()
        self.stepped = False  # as after a step: the program goes on with a checkpoint
        if slots is not None and queue.streams.asynchronous_work:
            self._scratch = None  # a reduction that cannot be waited for may still read it, and holds it
        elif slots is not None:
            with queue.streams.on_reduce_stream():
                last_use = queue.streams.record()  # by a reduction, or a communication hook that raised
            queue.streams.wait(last_use)
            if slots.buffer.pooled is not None:
                queue.pool.free(slots.buffer.pooled, None)

    # -- the result ----------------------------------------------------------------------------------------------------

    def copy_to_host(self, shard: torch.Tensor, streams: Streams) -> tuple[torch.Tensor, StreamEvent]:
        """Start copying ``shard`` to host memory. Return the copy, in the dtype of ``.grad``, and the event."""
        grad, pinned = shard.to(self.dtype), self.handle.offload.pin_memory
        memory = self._host_buffers.take(grad.nbytes, functools.partial(streams.host_memory, pinned=pinned))
        return streams.fetch(grad, memory)

    def attach(self, shard: torch.Tensor, accumulated: Collection[int], unused: set[int], *, announces: bool) -> None:
        """Make the reduced gradient ``.grad``, or add it, in the parameter's dtype, to the ``.grad`` that is there.

        Positions that are ``accumulated`` get it even if they were frozen since. Leaves that are ``unused`` on all
        ranks get none.
        """
        self.used = set()
        present, added = [], []
        grads = self.views.sharded_grads(shard if shard.dtype == self.dtype else shard.to(self.dtype))
        wide = self.views.sharded_grads(shard.to(self.handle.layout.dtype)) if self._keep_low_precision else grads
        for position in self.views.present:
            visible, grad = self.views.visible[position], grads[position]
            if not visible.param.requires_grad and position not in accumulated:
                continue
            if unused and unused.issuperset(visible.members):
                continue
            current = visible.param.grad
            if current is None:
                assign_grad(visible.param, grad)
            elif (current.shape, current.device) != (grad.shape, grad.device):
                raise AssertionError(
                    f"the gradient of {visible.name!r} of {self.handle.unit_name} is {tuple(current.shape)} on "
                    f"{current.device}, and the one to be added to it {tuple(grad.shape)} on {grad.device}: leave "
                    ".grad as it is between backwards, or set it to None"
                )
            else:
                present.append(current)
                added.append(wide[position])
        if present:
            torch._foreach_add_(present, added)
        if announces:
            self._announce()
