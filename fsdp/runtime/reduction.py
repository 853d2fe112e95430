"""From gradient slots to the gradient that the optimizer sees: reduce-scatter, average, ``.grad`` of the shard.

A leaf's gradient is copied into its slot as soon as autograd has it (the cast to the reduce dtype is part of the
copy) and dropped; those of small leaves wait for each other. When the unit's last leaf has delivered, the slots nobody
wrote are zeroed and the whole vector is reduced. What comes out is attached as ``.grad`` at the end of the backward.

Without synchronisation (``no_sync``) the slots belong to the ``accumulator`` instead.

[Note: Replicas]
Where units are sharded and replicated, what comes out of the reduction inside the shard group is averaged over the
replicas. An accelerator begins with that behind the reduction, on a stream of its own. On CPU the host has to wait for
the reduction first; it does so when the next one begins, which hid this one, and at the end. Not where memory runs
short: ranks get there in different places of what they do, and collectives of a group have one order.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import sys
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch

from fsdp.comm import host_memory
from fsdp.comm.collectives import Communicator, Pending, Tag
from fsdp.comm.host_memory import HostBuffers
from fsdp.comm.recording import NOTHING
from fsdp.comm.streams import Event, Streams
from fsdp.flat.full_copy import BufferState, SlotBuffer, parameter_views
from fsdp.flat.memory import MemoryPool, PooledTensor
from fsdp.flat.views import BucketViews
from fsdp.flat.visible import flag_of
from fsdp.runtime.accumulator import Accumulator
from fsdp.runtime.comm_hook import CommHook

_READABLE = (BufferState.UNSHARDED, BufferState.RESIDENT)
_hooks_of: Callable[[torch.Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
_PLAIN = {torch.Tensor}
_IN_BACKWARD = "torch.distributed.optim.apply_optimizer_in_backward"  # what hangs optimizers on parameters
_dict_of: Callable[[torch.Tensor], dict[str, Any]] = operator.attrgetter("__dict__")


@dataclass(eq=False, slots=True)
class InFlight:
    """A reduction under way, and the memory it reads until it is complete."""

    pending: Pending  # what reads `source`
    source: SlotBuffer | None
    average: Callable[[], Pending] | None  # begins the mean over replicas of its result, where that is to come
    at_once: bool  # whether the result is attached as soon as it is complete, not at the end of the backward
    finish: Callable[[], None]  # attaches the result
    averaged: Pending | None = field(default=None, init=False)  # what ``average`` has begun


class ReductionQueue:
    """The reductions under way in one tree, oldest first, and the memory of their buffers.

    At most ``max_buffers`` full vectors wait for their reduction; another one waits for the oldest.
    """

    def __init__(self, pool: MemoryPool, streams: Streams, max_buffers: int) -> None:
        self.pool, self.streams, self.max_buffers = pool, streams, max_buffers
        self.outlast_backward = False  # whether a backward has ended with reductions under way
        self._in_flight: deque[InFlight] = deque()
        self._reading: deque[InFlight] = deque()  # those that are bounded
        self._to_average: deque[InFlight] = deque()

    def allocate(self, buffer: SlotBuffer) -> None:
        """Give ``buffer`` memory; called on the compute stream, which owns it."""
        for item in self._reading:
            if item.source is buffer:  # its last reduction still reads the slots
                self._complete_all_but(0)
                break
        self._complete_all_but(self.max_buffers - 1)
        assert buffer.pooled is not None
        self.pool.allocate(buffer.pooled)

    def free(self, buffer: SlotBuffer) -> None:
        if buffer.pooled is not None:
            self.pool.free(buffer.pooled, None)

    def add(self, item: InFlight, *, bounded: bool) -> None:
        """``bounded``: its completion frees memory."""
        self._in_flight.append(item)
        if bounded:
            self._reading.append(item)
        if self._to_average and self.streams.asynchronous_work:  # see [Note: Replicas]
            self._average_all()
        if item.average is not None:
            self._to_average.append(item)
        if self._to_average and not self.streams.asynchronous_work:
            self._average_all()
        self._complete_all_but(self.max_buffers)

    def _average_all(self) -> None:
        while self._to_average:
            item = self._to_average.popleft()
            assert item.average is not None
            begin, item.average = item.average, None
            item.averaged = begin()
            self._attach_at_once(item)

    def _complete_all_but(self, count: int) -> None:
        while len(self._reading) > count:
            item = self._reading[0]
            self._complete(item)
            if item.at_once:
                self._attach_at_once(item)

    def _attach_at_once(self, item: InFlight) -> None:
        if item.at_once and item.source is None and item.average is None:
            self._settle([item])
            self._in_flight.remove(item)
            item.finish()

    def _complete(self, item: InFlight) -> None:
        if item.source is not None:
            item.pending.wait_for_sum()  # where that is interrupted, the memory stays in use
            self.free(item.source)
            item.source = None
            if item in self._reading:
                self._reading.remove(item)

    def _settle(self, items: Collection[InFlight]) -> None:
        """Their results are there when this returns."""
        for item in items:
            self._complete(item)
            if item.averaged is not None:
                item.averaged.wait_for_sum()
        Pending.divide(item.averaged or item.pending for item in items)

    def drain(self, *, attach: bool) -> None:
        """Wait for every reduction, in order, and attach the results (or, after an error, drop them)."""
        if attach:
            self._average_all()  # all are under way before one is waited for
        self._to_average.clear()
        self._settle(self._in_flight)
        while self._in_flight:
            item = self._in_flight.popleft()
            if attach:
                item.finish()
        self.outlast_backward = False
        self.pool.rest()


class BucketGradients:
    """The gradient of one bucket during and between backwards.

    Attributes:
        accumulator: the gradients that are not reduced.
        partial: what earlier backwards have reduced, but not over replicas.
        target: where this backward writes; None while it has written nothing that is not reduced or shown.
        used: by index, the leaves that this rank has gradients of in what is reduced and not attached yet; empty where
            that makes no difference.
        altered: whether what is reduced is divided by another number, or a hook's to change.
    """

    def __init__(self, views: BucketViews, *, keep_low_precision: bool = False, finds_unused: bool = False) -> None:
        """``keep_low_precision``: ``.grad`` has the compute dtype, not the parameter's. ``finds_unused``: a parameter
        that no rank uses gets no gradient; else zeros, if others of the unit are used."""
        self.handle, self.views = views.handle, views
        self._keep_low_precision, self._finds_unused = keep_low_precision, finds_unused
        self.used: set[int] = set()
        self._unused: set[int] = set()  # of what this backward reduces, the leaves that no rank has gradients of
        self._hook: CommHook | None = None  # reduces in place of the communicator
        self._on_host = HostBuffers()  # of offloaded gradients
        self._scratch: SlotBuffer | None = None  # the reduce buffer; with memory from the pool in each backward
        self.target: SlotBuffer | None = None
        self._awaited = False  # whether somebody waits for gradients of this backward during it
        self.hooked = False  # whether hooks of users', or tensor parallelism, have their say before that
        self._continues = False  # whether that is the accumulator of earlier backwards
        self._leaves = set(range(len(self.handle.copy.all_leaves)))  # all of them, by index
        self._written: set[int] = set()  # the leaves, by index, whose slots this backward has written
        self._adopted: set[int] = set()  # positions that this backward's target has accumulated gradients of
        self.accumulator = Accumulator(views)
        self.partial: torch.Tensor | None = None
        self.altered = False

    @property
    def trainable(self) -> bool:
        return any(map(flag_of, self.handle.leaves))

    @property
    def reduces(self) -> bool:
        """Whether a synchronised backward makes another tensor of what the slots hold: reduced, cast or moved."""
        handle = self.handle
        if handle.groups.reduces or self._hook is not None or self.altered:
            return True
        return handle.reduce_dtype != self.dtype or handle.keeps_gradients_on_host

    @property
    def dtype(self) -> torch.dtype:
        """What ``.grad`` has after a synchronised backward."""
        return self.handle.full.dtype if self._keep_low_precision else self.handle.layout.dtype

    @property
    def accumulates(self) -> bool:
        """Whether gradients of earlier backwards wait to be reduced, or reduced over replicas."""
        return self.partial is not None or (self.accumulator.is_visible and self.reduces)

    @property
    def waits(self) -> bool:
        """Whether something may be to do for it at the end of a backward."""
        return self.target is not None or bool(self.accumulator.exposed) or self.partial is not None

    @property
    def lacks(self) -> bool:
        """Whether this rank has no gradient of a parameter that requires one in what is reduced."""
        visible = self.views.visible
        return any(each.param.requires_grad and self.used.isdisjoint(each.members) for each in visible)

    def note_used(self, used: set[int]) -> None:
        """What is ``used`` on any rank, in what was reduced so far. Without this it counts as all."""
        self._unused |= self._leaves - used
        self._unused = set()  # of the next backward

    def use_hook(self, hook: CommHook) -> None:
        """Reduce by ``hook`` from now on."""
        self._hook = hook
        if hook.compresses:  # from the parameters' own dtype, and back to it
            self.handle.layout = dataclasses.replace(self.handle.layout, reduce_dtype=self.handle.layout.dtype)
            self._keep_low_precision = False

    def forget_buffers(self) -> None:
        """The bucket has changed its dtype or device."""
        if self._hook is not None:
            self.use_hook(self._hook)  # the layout is a new one
        self._scratch = None
        self.accumulator.forget()

    # -- during a backward ---------------------------------------------------------------------------------------------

    def check(self, grads: dict[int, torch.Tensor], *, reads_parameters: bool) -> None:
        """Raises RuntimeError where gradients of leaves, by index, came in a way that is not supported.
        ``reads_parameters``: the backward needs the values of the bucket."""
        handle = self.handle
        if reads_parameters and handle.copy.state not in _READABLE:
            raise RuntimeError(
                f"a backward reached parameter {handle.name_of(next(iter(grads)))!r} of {handle.unit_name} while "
                "its values were sharded, before it reached an output of the wrapped module: through a tensor that the "
                "forward stored, or that a hook took. Return that tensor, or mark it inside the forward by "
                "fsdp.mark_side_output(tensor)"
            )
        if any(map(flag_of, grads.values())):
            index = next(index for index, grad in grads.items() if grad.requires_grad)
            raise RuntimeError(
                f"the gradient of parameter {handle.name_of(index)!r} of {handle.unit_name} requires grad itself: "
                "gradients of gradients (create_graph=True) of sharded parameters are not supported. Compute such "
                "terms on the plain module"
            )

    def open(self, queue: ReductionQueue, *, synchronize: bool) -> None:
        """Take a buffer for this backward; what users left of the accumulator is continued."""
        layout, device = self.handle.layout, self.handle.device
        self.hooked = self.views.has_hooks
        self._awaited = self._is_awaited
        accumulator, self._adopted, self._written = None, set(), set()
        if self.accumulator.exposed:
            accumulator, self._adopted = self.accumulator.reuse()
            self._written = {index for position in self._adopted for index in self.views.visible[position].members}
        self._continues = accumulator is not None
        if accumulator is not None:
            self.target = SlotBuffer(layout, accumulator)
        elif self.handle.groups.sharded and synchronize:
            if self._scratch is None or self._scratch.flat.dtype != self.handle.reduce_dtype:
                flat = torch.empty(layout.padded_numel, dtype=self.handle.reduce_dtype, device=device)
                self._scratch = SlotBuffer(layout, flat)
                self._scratch.pooled = PooledTensor(flat)
            queue.allocate(self._scratch)
            self.target = self._scratch
        else:  # users will hold this memory as .grad: it cannot be taken back
            new = queue.pool.empty if self.handle.groups.sharded else torch.empty
            self.target = SlotBuffer(layout, new(layout.padded_numel, dtype=self.handle.reduce_dtype, device=device))

    def add(self, grads: dict[int, torch.Tensor], weight: float = 1.0, *, outside: bool = False) -> None:
        """Put gradients of leaves, by index, into their slots, ``weight`` times; of the whole vector's leaf, into all
        slots. ``outside``: of tensors that stand for the leaves outside of forward, whose hooks autograd has called."""
        assert self.target is not None
        if outside:
            grads = {index: self.views.local_gradient(index, grad) for index, grad in grads.items()}
        elif self.hooked:
            grads = {index: self.views.hooked(index, grad) for index, grad in grads.items()}
        if weight != 1:
            grads = {index: grad * weight for index, grad in grads.items()}
        slots, its = self.target.slots, list(grads.values())
        together = len(its) > 1 and len(slots) not in grads and self._written.isdisjoint(grads)
        if together and set(map(type, its)) == _PLAIN:
            try:
                torch._foreach_copy_([slots[index] for index in grads], its)
                self._written.update(grads)
                return
            except RuntimeError:
                pass  # there is a sparse one among them
        for index, grad in grads.items():
            self._add(index, grad)

    def _add(self, index: int, grad: torch.Tensor) -> None:
        assert self.target is not None
        if grad.layout != torch.strided:
            grad = grad.to_dense()
        if index == len(self.target.slots):
            for each, part in enumerate(parameter_views(self.handle.layout, grad.contiguous())):
                self._add(each, part)
            return
        slot = self.target.slots[index]
        if index in self._written:
            slot.add_(grad)
        else:
            slot.copy_(grad)
            self._written.add(index)

    def reduce(
        self,
        communicator: Communicator,
        queue: ReductionQueue,
        tag: Tag,
        *,
        to_replicas: bool = True,
        hook: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        """Start the reduction of what the slots hold; the result is attached when the queue is drained, after ``hook``
        has had it. Where it is not to go ``to_replicas``, it is kept until one does, which it is added to."""
        unused: set[int] = set()
        if self._finds_unused:
            self.used |= self._written
            if not self._awaited:  # else it is attached before the ranks can agree
                unused = self._unused
            if not self.handle.groups.reduces:
                self.note_used(self.used)
        source = self._seal()
        self.target = source  # until the queue has it: if something raises, it goes where an open one goes
        if self._continues:
            self.accumulator.conceal()
        sharded, adopted = self.handle.groups.sharded, self._adopted
        shard = source.flat
        if sharded:
            shard = host_memory.recycled(self.handle.layout.shard_numel, shard)
        streams, on_host = queue.streams, queue.streams.asynchronous_work
        written = None if on_host else streams.record()
        offloaded: list[tuple[torch.Tensor, Event]] = []
        replicated = self.handle.groups.replica is not None
        waits = replicated and not to_replicas
        earlier, self.partial = (self.partial, None) if not waits else (None, self.partial)
        by_hook = self._hook is not None and self.handle.groups.hybrid

        def fetch(pending: Pending) -> Pending:
            """On the stream of the last collective."""
            if hook is not None and not streams.asynchronous_work:
                hook(shard)
                pending.extend()
            if self.handle.keeps_gradients_on_host:
                grad, pinned = shard.to(self.dtype), self.handle.offload.pin_memory
                memory = self._on_host.take(grad.nbytes, functools.partial(streams.host_memory, pinned=pinned))
                offloaded.append(streams.fetch(grad, memory))
                pending.extend()
            return pending

        def average() -> Pending:
            with streams.on_replica_stream():
                pending.wait()
                if earlier is not None:
                    shard.add_(earlier)
                return fetch(communicator.average(shard, tag))

        averages = average if replicated and not waits and (sharded or by_hook or earlier is not None) else None
        with NOTHING if on_host else streams.on_reduce_stream():
            if written is not None:
                streams.wait(written)
            if not sharded and (waits or earlier is not None):
                pending = Pending(None, streams)
            elif self._hook is None:
                pending = communicator.reduce(shard, source.flat, tag, to_write=source.pooled is None)
            else:
                self._hook.reduce(shard, source.flat, tag.label)
                for start, end in self.handle.layout.shard_gaps(self.handle.groups.shard_rank):
                    shard[start:end].zero_()
                pending = Pending(None, streams)
            if averages is None and not waits and (hook is not None or not on_host):
                fetch(pending)

        def finish() -> None:
            nonlocal earlier
            earlier = None  # held until here, where the stream of the replicas has read it
            if waits:
                self.partial = shard if self.partial is None else self.partial.add_(shard)
                return
            self.used = set()
            if hook is not None and streams.asynchronous_work:
                hook(shard)
            if not offloaded:
                self._attach(shard, adopted, unused)
                return
            grad, there = offloaded[0]
            with streams.on_host(there):
                self._attach(grad, adopted, unused)

        self.target = None
        queue.add(InFlight(pending, source, averages, self._awaited, finish), bounded=sharded)

    @property
    def _is_awaited(self) -> bool:
        """Whether somebody waits for a gradient during the backward."""
        params = self.views.params
        if any(map(_hooks_of, params)):
            return True
        if _IN_BACKWARD not in sys.modules:
            return False
        return any(map(operator.contains, map(_dict_of, params), itertools.repeat("_in_backward_optimizers")))

    def _announce(self) -> None:
        """The gradients are complete: call the parameters' hooks, and step the optimizers that torch's
        ``_apply_optimizer_in_backward`` has hung on them."""
        if not self._awaited:
            return
        for held in self.views.visible:
            param: Any = held.param
            if held.absent or param.grad is None or not param.requires_grad:
                continue
            for hook in tuple((param._post_accumulate_grad_hooks or {}).values()):
                hook(param)
            for optimizer in getattr(param, "_in_backward_optimizers", ()):
                optimizer.step()
                optimizer.zero_grad()

    def expose(self, *, complete: bool) -> None:
        """End a backward without reduction: the unsharded gradient becomes ``.grad``, accumulated so far.

        It is ``complete`` where nothing has to be reduced.
        """
        unused = self._leaves - self._written if self._finds_unused else set()
        self.accumulator.expose(self._seal(), unused, continues=self._continues, hides_sharded=self.reduces)
        if complete:
            self._announce()

    def abandon(self, queue: ReductionQueue) -> None:
        """Forget what this backward wrote (it failed); an accumulator stays as far as it got."""
        target, self.target = self.target, None
        self.used, self._unused = set(), set()
        if target is not None and queue.streams.asynchronous_work:
            self._scratch = None  # a reduction that nobody can wait for may still read it, and holds it
        elif target is not None:
            with queue.streams.on_reduce_stream():
                last_use = queue.streams.record()  # by a reduction, or a communication hook that raised
            queue.streams.wait(last_use)
            queue.free(target)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _seal(self) -> SlotBuffer:
        """End writing: slots that nobody wrote, and the padding, hold whatever the memory held before; zero them."""
        target, self.target = self.target, None
        assert target is not None
        stale: list[torch.Tensor] = []
        if len(self._written) < len(target.slots):
            stale = [slot for index, slot in enumerate(target.slots) if index not in self._written and slot.numel()]
        stale += target.padding
        if stale:
            torch._foreach_zero_(stale)
        return target

    def _attach(self, shard: torch.Tensor, adopted: set[int], unused: set[int]) -> None:
        """Make the reduced gradient visible, or add it, in the parameter's dtype, to what is there.

        ``adopted``: the positions with gradients accumulated before this backward. ``unused``: the leaves that no rank
        has gradients of.
        """
        present, added = [], []
        grads = self.views.sharded_grads(shard if shard.dtype == self.dtype else shard.to(self.dtype))
        wide = self.views.sharded_grads(shard.to(self.handle.layout.dtype)) if self._keep_low_precision else grads
        for position in self.views.present:
            visible, grad = self.views.visible[position], grads[position]
            frozen = not visible.param.requires_grad and position not in adopted
            if frozen:  # what was accumulated before it was frozen is still its gradient
                continue
            if unused and unused.issuperset(visible.members):
                continue
            current = visible.param.grad
            if current is None:
                self.views.set_grad(position, grad)
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
        self._announce()
