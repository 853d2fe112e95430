"""The tree of units under one outermost wrapped module: the passes of a step, and the resources that units share."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch

from fsdp.comm.groups import Groups
from fsdp.comm.lane.history import Pass
from fsdp.comm.lane.issuing import REDUCE
from fsdp.comm.profiling import profiled
from fsdp.comm.streams import Stream, Streams, streams_for
from fsdp.comm.transport.segment import without_waiting
from fsdp.comm.versions import set_versions
from fsdp.flat.memory import pool_for
from fsdp.flat.ownership import own_buffers, synchronize
from fsdp.runtime import hooks
from fsdp.runtime.data_ranks import data_ranks
from fsdp.runtime.passes import Passes
from fsdp.runtime.ranges import log, logs
from fsdp.runtime.reduction import ReductionQueue
from fsdp.runtime.unit import Phase, Unit
from fsdp.runtime.unshard import Unsharder


class _EndOfBackward:
    """The callback at the end of a backward. It lives as long as the graph task that it is queued on."""

    def __init__(self, context: RootContext) -> None:
        self._context = context
        self._ended = False

    @hooks.untraced
    def __call__(self) -> None:
        self._context.finish_backward()
        self._ended = True

    def __del__(self) -> None:
        # The backward raised. Where autograd's device thread is the last to drop the graph task, the
        # program goes on meanwhile, and resets the tree at the next call.
        context = self._context
        if not self._ended and context._end_of_backward() is self and context.is_on_thread:
            context.reset_failed_backward()


def backward_of_summoned(unit_name: str) -> RuntimeError:
    """Return the error for a backward inside ``summon_full_params``, or of a forward inside."""
    return RuntimeError(
        f"a backward of {unit_name} inside summon_full_params, or of a forward inside: the gradients would not be "
        "reduced. Run forward and backward outside of summon_full_params"
    )


class RootContext:
    """One tree of units. The root's wrapper owns it, and units refer to it weakly. The graph of a forward keeps it
    alive.

    Attributes:
        streams: of the device that the root computes on.
        compute: the stream of the latest outermost forward, which all work on gradients follows; None on CPU.
        reductions: the reductions in flight.
        passes: the passes under way, and their agreement between ranks.
        unsharder: gathers and reshards the units.
        failed: a pass ended in an error, or is about to; the next pass cleans up before it begins.
    """

    def __init__(self, root: Unit, units: Iterable[tuple[str, Unit, frozenset[int]]]) -> None:
        """Take the units over from the contexts that they were in. ``units``: (name, unit, indices of the units
        around)."""
        self.streams: Streams = streams_for(root.device)
        self.compute: Stream = None
        self.failed = False
        self.root = root
        reduce_pool, gather_pool = (pool_for(root.device, self.streams, root.groups.shard) for _ in range(2))
        self.reductions = ReductionQueue(reduce_pool, self.streams, root.policy.tree.reduce_buffers)
        self._end_of_backward: Callable[[], _EndOfBackward | None] = lambda: None
        self._thread = 0  # of the outermost forward
        self._unfrozen: list[Unit] = []  # units with leaves that were frozen or unfrozen as the backward began
        self._awaited: Callable[[], object] = lambda: None  # the last call whose graph waits for a backward
        self._sends_buffers = True  # the next forward may begin with the buffers of rank 0
        self.units: list[Unit] = []
        units = list(units)
        ranks = data_ranks([unit for _, unit, _ in units])
        for index, (name, unit, ancestors) in enumerate(units):
            unit.join(self, self.streams, index, f"unit {name!r}" if name else "the root unit", ancestors, ranks)
            self.units.append(unit)
        self.passes = Passes(self.units, root.device, negotiate=root.policy.tree.reduce_unused)
        self.unsharder = Unsharder(root, self.units, self.streams, self.passes, gather_pool)
        self.size_pools()

    def size_pools(self) -> None:
        """Let the pools keep as much spare memory as a pass may need."""
        self.reductions.set_max_buffers(self.root.policy.tree.reduce_buffers)
        ahead = max(max(unit.policy.forward_prefetch, unit.policy.backward_prefetch) for unit in self.units)
        others = (unit.full_nbytes for unit in self.units if unit is not self.root)
        largest = max(others, default=self.root.full_nbytes)
        for pool, blocks in ((self.unsharder.pool, 1 + ahead), (self.reductions.pool, self.reductions.max_buffers)):
            pool.keep_up_to(blocks * largest, largest_block=2 * largest)

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        """Reshard the units, which may live on without their tree; the gather stream, which owns the memory, waits for
        the last use. The garbage collector may call this on any stream, so the host must not wait for peers."""
        if not hasattr(self, "unsharder") or _is_finalizing():
            return  # the constructor raised, or the process ends
        with self.streams.joined(self.compute), without_waiting():
            for unit in self.unsharder:
                self.unsharder.reshard(unit, waits=False)
            self.unsharder.trim()
            self.reductions.pool.trim()

    @contextlib.contextmanager
    def calling(self, call: str, *, often: bool = False, gathers: bool = True) -> Iterator[None]:
        """Enclose a call that communicates, and that all ranks have to make. A rank that makes it alone sends no data:
        it raises, and so do its peers, with the name of the call.

        Before communication inside, except gathers of units, :meth:`Passes.announce` has to be called. With
        ``often`` the ranks do not ask each other if the call is at the same place of a step as before. A call that
        ``gathers`` needs memory that no pass does, and returns all spare memory at the end.
        """
        if hooks.current_backward() == hooks.NO_BACKWARD:
            self.reset_failed_backward()
            self.passes.fail_abandoned_backward()
        try:
            with self.passes.calling(call, f"{call} of {self.root.name}", often=often):
                yield
            if gathers and self.passes.forward is None and not self.passes.in_backward:
                self.unsharder.trim()
        except BaseException:
            if self.passes.given_up:
                self.reset()
            raise

    def release(self, unit: Unit) -> None:
        """Give ``unit`` to another context."""
        self.unsharder.reshard(unit)
        self.units.remove(unit)

    # -- forward -------------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: Unit) -> None:
        """Note that ``unit`` is about to run; the outermost one begins a new forward of the tree.

        Raises:
            NotImplementedError: a forward of the tree runs on another thread.
        """
        if hooks.current_backward() != hooks.NO_BACKWARD:
            with hooks.own_operations():
                self.enter_backward(unit)
        elif self.passes.forward is None:
            self._thread = threading.get_ident()
            with hooks.own_operations(), profiled("_root_pre_forward", unit.name):
                self._begin_forward(unit)
        elif self._thread != threading.get_ident():
            raise NotImplementedError(
                f"the forward of {unit.name} was called on another thread than the forward that is under way around "
                "it: the units of one tree run one after the other. Call wrapped modules on one thread, and only what "
                "lies inside of one on others"
            )

    def _begin_forward(self, unit: Unit) -> None:
        self.passes.fail_abandoned_backward()
        forward = Pass(f"forward of {unit.name}", unit)
        if self.failed or self.passes.in_backward or self.passes.given_up:  # after an error
            self._clear(forward)
        self._adopt_stream()
        self.unsharder.forget_slices()
        for other in self.units:
            self.unsharder.refresh(other)
        self.unsharder.begin_forward(unit, expects_backward=torch.is_grad_enabled(), logged=logs())
        self.passes.begin(forward, backward_follows=self.unsharder.expects_backward)
        self.unsharder.gathers_follow_compute()
        self._send_buffers()

    def _send_buffers(self) -> None:
        """Broadcast the buffers of rank 0, if the policy asks for it, at the forwards at which DDP does: not after a
        forward of an accumulation, or without gradients."""
        sends = self._sends_buffers
        self._sends_buffers = torch.is_grad_enabled() and self.root.synchronize
        if not (sends and self.root.policy.tree.broadcast_buffers):
            return
        by_groups: dict[Groups, list[torch.Tensor]] = {}
        for unit in self.units:
            by_groups.setdefault(unit.groups, []).extend(own_buffers(unit.module))
        for groups, buffers in by_groups.items():
            for group in (groups.replica, groups.shard) if buffers else ():
                self.passes.announce(group)
            versions = [buffer._version for buffer in buffers]
            synchronize(buffers, groups)
            set_versions(buffers, versions)  # backwards to come may have saved them

    def _adopt_stream(self) -> None:
        """Allocate and process the gradients of the backward on the current stream."""
        stream = self.streams.current()
        if stream is None:
            return
        if self.compute is None or stream != self.compute:  # a torch.Stream is neither equal nor unequal to None
            self.compute = stream
            for unit in self.units:  # else autograd runs the leaves' hooks on the former stream, with a warning
                unit.arrivals.renew()

    def exit_forward(self, *, backward_of: object | None) -> None:
        """Note that the forward of the tree is over. ``backward_of`` is the call of which a backward may follow."""
        self.unsharder.order.stop()
        self.unsharder.end_forward(backward_follows=backward_of is not None)
        self.unsharder.settle_offloaded()  # even before a backward, which may be left out; shards may be written
        if backward_of is not None:
            self._awaited = weakref.ref(backward_of)
        else:
            self.unsharder.forget_slices()
            self.unsharder.rest()
        self.passes.end(wait=False)  # last: where the wait for a prefetched unit fails, the pass has failed

    def check_no_backward_follows(self, call: str) -> None:
        """Raise RuntimeError if the graph of the last forward is there, and no backward has run since."""
        if self._awaited() is not None:
            raise RuntimeError(
                f"{call} between a forward of {self.root.name} and its backward: run the backward before, or delete "
                "what the forward returned and the losses of it, or compute it under torch.no_grad()"
            )

    # -- backward ------------------------------------------------------------------------------------------------------

    def enter_backward(self, unit: Unit) -> None:
        """Note that a backward has reached ``unit``. The first time, begin the backward and queue the callback at the
        end.

        The callback belongs to the outermost graph task: an output of a unit, or a recomputation, is reached there
        before a nested task runs.
        """
        if unit.summoned is not None:
            raise backward_of_summoned(unit.name)
        abandoned = self.passes.in_backward and self._end_of_backward() is None  # by a backward that raised
        if self.passes.in_backward and not (self.failed or abandoned):
            return
        backward = Pass("backward")
        if self.failed or abandoned:
            self._clear(backward)
        self._awaited = lambda: None
        self._unfrozen = [other for other in self.units if other.follow_flags()]  # before the ranks compare reductions
        self.unsharder.start_order(unit, backward=True)
        self.passes.begin(backward)
        end = _EndOfBackward(self)
        self._end_of_backward = weakref.ref(end)
        hooks.at_end_of_backward(end)

    @hooks.of_backward("gradient of a parameter")
    def leaf_reached(self, unit: Unit) -> None:
        """Let the running graph task enter ``unit`` through a leaf."""
        self.enter_backward(unit)
        unit.arrivals.enter()

    @hooks.of_backward("gradient of a parameter")
    def gradients_arrived(self, unit: Unit) -> None:
        """Copy the gradients of ``unit`` that are held into their slots. After the last expected one, reduce the
        unit."""
        with self.streams.joined(self.compute):
            self._write_arrived(unit)
            if unit.arrivals.pending:
                return
            self.unsharder.prefetch(unit)  # before the reduction: a gather is waited for sooner
            with profiled("_post_backward_hook", unit.name):
                self.reduce(unit)
                if not (unit.calls or unit.open_calls):
                    self.unsharder.end_backward(unit)
                    self.unsharder.prefetch(unit)

    def _write_arrived(self, unit: Unit) -> None:
        for bucket, grads in zip(unit.gradients, unit.arrivals.take()):
            if grads:
                bucket.write(grads, self.reductions, unit.weight, synchronize=unit.synchronize)

    def finish_backward(self) -> None:
        """End the backward: reduce the rest, wait for the reductions, attach their results, and reshard."""
        try:
            with torch.no_grad(), self.streams.joined(self.compute):
                for unit in self._unfrozen:
                    unit.check_unfrozen()
                for unit in self.units:
                    self._end_backward_of(unit)
                if not self.root.policy.tree.reduce_unused:  # with it, peers may reduce more until all propose the end
                    self.reductions.start_last()  # before the vote: a rank that fails here fails in the pass
                self.passes.end(wait=True)
                if self.root.policy.tree.is_last_backward:
                    self.reductions.drain(attach=True)
                else:
                    self.reductions.leave_in_flight()
        except BaseException as error:
            hooks.report(error, self.root.name, "end of backward")
            self.reset()
            raise
        self.unsharder.order.stop()
        self.unsharder.forget_slices()
        self.unsharder.settle_offloaded()
        self.unsharder.rest()

    def _end_backward_of(self, unit: Unit) -> None:
        if any(unit.arrivals.held):
            self._write_arrived(unit)
        self.reduce(unit, at_end=True)
        unit.arrivals.forget()
        unit.open_calls.clear()
        if not unit.calls:  # a backward may run inside a forward, whose unit continues to compute
            self.unsharder.end_backward(unit)

    def reduce(self, unit: Unit, *, at_end: bool = False) -> None:
        """Reduce the gradients that this backward has written. At the end of the backward, reduce those as well that
        earlier backwards have accumulated, or show those that are not to be reduced."""
        buckets, synchronize = unit.gradients, unit.synchronize
        if not [each for each in buckets if each.slots is not None or (at_end and synchronize and each.accumulates)]:
            return
        if synchronize and [each for each in buckets if each.reduces]:
            event = self.passes.about_to(REDUCE, unit)
            if self.unsharder.logged:
                log("reduce", unit.name, self.unsharder.generation)
            with profiled("reduce", unit.name):
                unit.reduce(self.reductions, event)
            return
        for bucket in buckets if at_end else ():
            if bucket.trainable:
                bucket.expose(self.reductions, complete=synchronize)

    def take_part(self, unit: Unit, kind: str, *, full_precision: bool) -> None:
        """Take part in a gather or reduction that only peers need. This rank drops the values, or adds the
        gradients that it has so far, so that an incomplete gradient is sent in two parts."""
        event = self.passes.event(kind, unit, full_precision=full_precision)
        if kind == REDUCE:
            if unit.phase is Phase.IDLE:
                self.unsharder.cast_parameters(unit, full_precision)
            with self.streams.joined(self.compute):
                unit.reduce(self.reductions, event)
            return
        with self.streams.on_gather_stream():
            parts = [handle.part_for_others(self.streams, full_precision=full_precision) for handle in unit.handles]
            pending = unit.communicator.gather(parts, event)
        pending.wait()  # on the compute stream: a later write to the shard must not overtake the gather

    def fail(self) -> None:
        """Note that the pass under way fails."""
        self.failed = True

    @property
    def is_on_thread(self) -> bool:
        """Whether this is the thread of the latest outermost forward."""
        return self._thread == threading.get_ident()

    def reset_failed_backward(self) -> None:
        """Reset if a backward has begun and not ended. Called where none is running, so that it has raised."""
        if self.passes.in_backward:
            self.reset()

    def reset(self) -> None:
        """Bring every unit to rest after a forward or backward that failed, and drop the gradients that are not
        attached.

        Does not wait, because peers may be gone. The next pass waits for collectives that are in flight.
        """
        with self.streams.joined(self.compute), without_waiting():
            for unit in self.units:
                for bucket in unit.gradients:
                    bucket.abandon(self.reductions)
                unit.calls.clear()
                unit.open_calls.clear()
                unit.arrivals.drop()
                unit.arrivals.forget()
                self.unsharder.reshard(unit, waits=False)
        self.passes.give_up()
        self.failed = True
        self.unsharder.forget_slices()
        self.unsharder.order.stop()

    def _clear(self, what: Pass) -> None:
        """Wait for the peers before ``what``, and for collectives that a failed pass left in flight."""
        for unit in self.units:
            unit.follow_parameters()  # what users have registered on the modules since, before shards are again
        self.reset()
        self.passes.meet(what)
        with self.streams.joined(self.compute):
            for unit in self.units:
                self.unsharder.reshard(unit)
            self.reductions.drain(attach=False)
        self.failed = False
        self.unsharder.trim()
