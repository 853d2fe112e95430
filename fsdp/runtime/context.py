"""What the units of one tree share: streams, order, memory, reductions, and where in a step they are."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fsdp.comm.streams import Stream, Streams, streams_for
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.memory import pool_for
from fsdp.runtime import hooks
from fsdp.runtime.agreement import Pass
from fsdp.runtime.expected import ExpectedLeaves
from fsdp.runtime.order import ExecutionOrder
from fsdp.runtime.passes import Passes
from fsdp.runtime.reduction import ReductionQueue
from fsdp.runtime.residency import Residence, Residency


@dataclass(frozen=True)
class UnitPolicy:
    """When a unit is resharded and which ones are gathered ahead while it computes.

    Attributes:
        reshard_after_forward: whether it is gathered again for backward.
        forward_prefetch, backward_prefetch: how many of the next units to gather ahead. The default is one: asked for
            only after the unit before it was resharded, a gather would get that unit's memory and wait for its
            compute, even where the host runs ahead.
        prefetch_after_gradients: in backward, gather ahead only once the gradients under way are computed.
        limit_gathers: no more full buffers than this unit's and those to gather ahead of it. Without it nothing is
            held back, and nothing idle resharded, for want of room.
        reduce_unused: whether a rank may skip the unit where others do not. Nothing is gathered ahead then, as what
            comes next may not be what came last time.
        use_orig_params: whether users see their own parameters, or flat ones.
    """

    reshard_after_forward: bool = True
    forward_prefetch: int = 1
    backward_prefetch: int = 1
    prefetch_after_gradients: bool = False
    limit_gathers: bool = True
    reduce_unused: bool = False
    use_orig_params: bool = False

    def order_in_words(self) -> str:
        """What the order of collectives depends on."""
        when = "after" if self.prefetch_after_gradients else "before"
        limited = "" if self.limit_gathers else ", not limited"
        return f"{self.backward_prefetch} ahead {when} gradients{limited}"


class TreeUnit(Protocol):
    """A unit as its tree sees it; ``Unit`` is the one there is, and tells what each of these does."""

    module: nn.Module
    name: str
    index: int
    place: int
    ancestors: frozenset[int]
    device: torch.device
    handles: list[FlatParamHandle]
    expected: ExpectedLeaves
    policy: UnitPolicy

    @property
    def group(self) -> Any | None: ...

    @property
    def is_gathered(self) -> bool: ...

    @property
    def is_gathering(self) -> bool: ...

    def signature(self) -> str: ...

    def reduction(self) -> str: ...

    @property
    def in_full_precision(self) -> bool: ...

    def take_part(self, kind: str, *, full_precision: bool) -> None: ...

    def join(self, context: RootContext, index: int, name: str, ancestors: frozenset[int]) -> None: ...

    def refresh(self, context: RootContext) -> None: ...

    def follow_parameters(self) -> None: ...

    def gather(self, context: RootContext, why: Residence = ...) -> None: ...

    def reshard(self, context: RootContext) -> None: ...

    def forget_output(self, context: RootContext) -> None: ...

    def end_backward(self, context: RootContext) -> None: ...

    def reset(self, context: RootContext) -> None: ...


class _EndOfBackward:
    """The callback at the end of a backward; lives as long as the graph task that it is queued on."""

    def __init__(self, context: RootContext) -> None:
        self._context = context
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._context.finish_backward()

    def __del__(self) -> None:
        context = self._context
        if not self._called and context.passes.in_backward and context._end_of_backward() is self:
            context.reset()  # the backward raised, and no later pass has found out


class RootContext:
    """What the units of one tree share: streams, order, memory pools, reductions, and where in a step they are.

    Owned by the root's wrapper; units refer to it weakly. The graph of a forward keeps it alive.
    """

    def __init__(self, root: TreeUnit, units: Iterable[tuple[str, TreeUnit, frozenset[int]]]) -> None:
        """Takes the units over from the contexts they were in. ``units`` are (name, unit, the units around it)."""
        self.streams: Streams = streams_for(root.device)
        self.compute: Stream = None  # that of the latest outermost forward: all that is done to gradients is done on it
        self.root = root
        self.order: ExecutionOrder[TreeUnit] = ExecutionOrder()
        self._meetings = 0  # of the ranks, when the order was begun
        self.gather_pool = pool_for(root.device, self.streams)
        self.reductions = ReductionQueue(pool_for(root.device, self.streams), self.streams)
        self.residency: Residency[TreeUnit] = Residency()
        self.generation = 0  # counts outermost forwards: what was gathered before is not trusted by the next
        self.expects_backward = False  # whether the outermost forward runs with gradients enabled
        self._end_of_backward: Callable[[], _EndOfBackward | None] = lambda: None
        self._thread = 0  # that of the outermost forward
        self.units: list[TreeUnit] = []
        for index, (name, unit, ancestors) in enumerate(units):
            unit.join(self, index, f"unit {name!r}" if name else "the root unit", ancestors)
            self.units.append(unit)
        ahead = max(max(unit.policy.forward_prefetch, unit.policy.backward_prefetch) for unit in self.units)
        for pool, blocks in ((self.gather_pool, 1 + ahead), (self.reductions.pool, self.reductions.MAX_BUFFERS)):
            pool.kept_nbytes = blocks * self._largest_unit()
            pool.kept_block_nbytes = 2 * self._largest_unit()
        self.passes = Passes(self.units, root.device, self.streams, negotiate=root.policy.reduce_unused)

    def _largest_unit(self) -> int:
        """Bytes of the largest unit's full buffers; of the root's only where there is no other."""
        sizes = [sum(handle.full_nbytes for handle in unit.handles) for unit in self.units if unit is not self.root]
        return max(sizes, default=sum(handle.full_nbytes for handle in self.root.handles))

    def __del__(self) -> None:
        """Units may live on without their tree: nothing stays gathered, and the gather stream, whose memory it was,
        waits for the last use."""
        if not hasattr(self, "residency"):
            return  # its constructor raised
        for unit in self.residency:
            if not (self.passes.failed and unit.is_gathering):  # who knows till when; the gather keeps its memory alive
                unit.forget_output(self)
                unit.reshard(self)
        self._trim()

    @contextlib.contextmanager
    def calling(self, call: str, *, often: bool = False) -> Iterator[None]:
        """Inside, something that communicates and that all ranks have to call alike. One that calls it alone sends
        nothing: it raises, and so do the others, with the name of the call.

        Whoever communicates inside, other than by a unit's gathers, calls :meth:`Passes.announce` before. With
        ``often`` the ranks are not asked where the call comes in the same place of a step as before.
        """
        if self.passes.in_backward and hooks.current_backward() == hooks.NO_BACKWARD:
            self.reset()  # the backward raised, and nobody has told
        try:
            with self.passes.calling(call, f"{call} of {self.root.name}", often=often):
                yield
        except BaseException:
            if self.passes.given_up:
                self.reset()
            raise

    def release(self, unit: TreeUnit) -> None:
        """Let ``unit`` go to another context."""
        unit.forget_output(self)
        unit.reshard(self)
        self.units.remove(unit)

    # -- forward -------------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: TreeUnit) -> None:
        """``unit`` is about to run; the outermost one begins a new forward of the tree."""
        if hooks.current_backward() != hooks.NO_BACKWARD:
            self.enter_backward(unit)
        elif self.passes.forward is None:
            self._begin_forward(unit)
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident():
            raise NotImplementedError(
                f"the forward of {unit.name} was called on another thread than the forward that is under way around "
                "it: the units of one tree run one after the other. Call wrapped modules on one thread, and only what "
                "lies inside of one on others"
            )

    def _begin_forward(self, unit: TreeUnit) -> None:
        if self.passes.failed or self.passes.in_backward:  # the last pass ended in an error
            self._clear()
        self._adopt_stream()
        self._forget_casts()
        for other in self.units:
            other.forget_output(self)
            other.refresh(self)
        self.generation += 1
        self.expects_backward = torch.is_grad_enabled()
        self._start_order(unit, backward=False)
        try:
            self.passes.begin(Pass(f"forward of {unit.name}", unit, trains=unit.module.training))
            self.gathers_follow_compute()
        except BaseException:
            self.reset()  # the unit has not begun, and does not end
            raise

    def _adopt_stream(self) -> None:
        """What the backward does to gradients, and allocates for them, will be on the stream that is current now."""
        stream = self.streams.current()
        if stream != self.compute:
            self.compute = stream
            for unit in self.units:  # autograd would run the leaves' hooks on another stream, with a warning
                unit.expected.renew()

    def joined(self) -> AbstractContextManager[None]:
        """Inside, work goes to the stream that owns the gradients' memory, in order with that of the current one."""
        return self.streams.joined(self.compute)

    def _start_order(self, unit: TreeUnit, *, backward: bool) -> None:
        """Ranks that have met after a failure remember different orders, and would gather different units ahead."""
        if self._meetings != self.passes.meetings:
            self.order, self._meetings = ExecutionOrder(), self.passes.meetings
        self.order.start(unit, backward=backward)

    @property
    def backward_follows(self) -> bool:
        """Whether this is a forward whose units will be gathered again for backward."""
        return self.expects_backward and self.passes.forward is not None and not self.passes.in_backward

    def _forget_casts(self) -> None:
        for unit in self.units:
            for handle in unit.handles:
                handle.forget_cast()

    def gathers_follow_compute(self) -> None:
        """Gathers from now on read what has been written on the current stream, by the optimizer for instance."""
        updated = self.streams.record()
        with self.streams.on_gather_stream():
            self.streams.wait(updated)

    def exit_forward(self, unit: TreeUnit, *, backward_follows: bool, failed: bool = False) -> None:
        """``unit`` runs no more; with the outermost one the forward of the tree is over."""
        forward = self.passes.forward  # None: a backward inside of it has failed
        if hooks.current_backward() != hooks.NO_BACKWARD or (forward is not None and forward.caller is not unit):
            return
        self.order.stop()
        if failed:
            self.reset()
            return
        for unit in self.residency.idle if backward_follows else self.residency:
            unit.reshard(self)
        self.settle_offloaded()  # in any case: no backward may come, and the shards may be written
        if not backward_follows:
            self._forget_casts()
            self._trim()
        self.passes.end(wait=False)  # last: where a wait fails for what was gathered ahead, the pass has failed

    # -- backward ------------------------------------------------------------------------------------------------------

    def enter_backward(self, unit: TreeUnit) -> None:
        """A backward has reached ``unit``. The first time, see to its end: a recomputation, which comes before the task
        nested in it, or the output that started it all makes sure that this happens in the outermost graph task."""
        if self.passes.in_backward and not self.passes.failed:
            return
        if self.passes.failed:
            self._clear()
        self._start_order(unit, backward=True)
        self.passes.begin(Pass("backward"))
        end = _EndOfBackward(self)
        self._end_of_backward = weakref.ref(end)
        hooks.at_end_of_backward(end)

    def finish_backward(self) -> None:
        try:
            with torch.no_grad(), self.joined():
                for unit in self.units:
                    unit.end_backward(self)
                self.passes.end(wait=True)
                self.reductions.drain(attach=True)
        except BaseException as error:
            hooks.report(error, self.root.name, "end of backward")
            self.reset()
            raise
        self.order.stop()
        self._forget_casts()
        self.settle_offloaded()
        self._trim()

    def settle_offloaded(self) -> None:
        """Shards in host memory may be written from here on: what the device reads of them has been read."""
        if any(handle.offload.offload_params for unit in self.units for handle in unit.handles):
            self.streams.settle()

    def reset(self) -> None:
        """Bring every unit back to rest after a forward or backward that failed; the gradients it has not attached yet
        are dropped. Waits for nothing: other ranks may be gone. What is still under way is waited for by the next pass.
        """
        with self.joined():
            for unit in self.units:
                unit.reset(self)
        self.passes.give_up()
        self.passes.failed = True
        self._forget_casts()
        self.order.stop()

    def _clear(self) -> None:
        """Wait for the other ranks, and for what a failed pass left under way."""
        for unit in self.units:
            unit.follow_parameters()  # what users have put on the modules since, before ours is put there again
        self.reset()
        self.passes.meet()
        with self.joined():
            for unit in self.units:
                unit.reshard(self)
            self.reductions.drain(attach=False)
        self.passes.failed = False
        self._trim()

    # -- room ----------------------------------------------------------------------------------------------------------

    def _distance(self, unit: TreeUnit) -> int:
        """How many units to gather ahead while ``unit`` computes."""
        return unit.policy.backward_prefetch if self.passes.in_backward else unit.policy.forward_prefetch

    def _has_room(self, unit: TreeUnit, computing: TreeUnit) -> bool:
        """Whether one more unit fits while ``computing`` does: 1 + the prefetch distance, not counting the root, the
        ancestors of ``unit`` and units that their strategy keeps."""
        if not computing.policy.limit_gathers:
            return True
        counted = (
            other
            for other in self.residency
            if other is not self.root and other.policy.reshard_after_forward and other.index not in unit.ancestors
        )
        return sum(1 for _ in counted) <= self._distance(computing)

    def make_room(self, unit: TreeUnit) -> None:
        """Reshard idle units, oldest first, as far as ``unit`` needs their room."""
        for other in self.residency.idle:
            if self._has_room(unit, unit):
                return
            other.reshard(self)

    def gather_ahead(self, unit: TreeUnit) -> None:
        """Start gathering the units that come after ``unit``, as far as the record, the policy and the room allow."""
        if unit.policy.reduce_unused:
            return
        waits = self.passes.in_backward and unit.policy.prefetch_after_gradients
        if waits and any(other.expected and other.index not in unit.ancestors for other in self.residency):
            return
        for candidate in self.order.upcoming(self._distance(unit)):
            if candidate.is_gathered:
                continue
            if not self._has_room(candidate, unit):
                return
            candidate.gather(self, Residence.PREFETCHED)

    def trim_at_rest(self) -> None:
        """Give the pools' spare memory back, unless a pass is under way that will want it."""
        if self.passes.forward is None and not self.passes.in_backward:
            self._trim()

    def _trim(self) -> None:
        """Give the pools' spare memory back."""
        with self.streams.on_gather_stream():
            self.gather_pool.trim()
