"""What the units of one tree share: streams, order, memory, reductions, and where in a step they are."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

import torch

from fsdp.comm.groups import Groups
from fsdp.comm.segment import without_waiting
from fsdp.comm.streams import Stream, Streams, streams_for
from fsdp.comm.versions import set_versions
from fsdp.flat.memory import pool_for
from fsdp.flat.ownership import own_buffers, synchronize
from fsdp.runtime import hooks
from fsdp.runtime.habit import Pass
from fsdp.runtime.passes import Passes
from fsdp.runtime.ranges import logs, profiled
from fsdp.runtime.reduction import ReductionQueue
from fsdp.runtime.residency import Residency
from fsdp.runtime.unit_buffers import UnitBuffers


class _EndOfBackward:
    """The callback at the end of a backward; lives as long as the graph task that it is queued on."""

    def __init__(self, context: RootContext) -> None:
        self._context = context
        self._called = False

    @hooks.untraced
    def __call__(self) -> None:
        self._called = True
        self._context.finish_backward()

    def __del__(self) -> None:
        # The backward raised. Where autograd's device thread is the last to drop the graph task, the program goes on
        # beside it, and resets the tree at its next call.
        context = self._context
        if not self._called and context._end_of_backward() is self and context.is_on_thread:
            context.reset_failed_backward()


def backward_of_summoned(unit_name: str) -> RuntimeError:
    """Return the error for a backward inside ``summon_full_params``, or of a forward inside."""
    return RuntimeError(
        f"a backward of {unit_name} inside summon_full_params, or of a forward inside: the gradients would not be "
        "reduced. Run forward and backward outside of summon_full_params"
    )


class RootContext:
    """Owned by the root's wrapper; units refer to it weakly. The graph of a forward keeps it alive."""

    def __init__(self, root: UnitBuffers, units: Iterable[tuple[str, UnitBuffers, frozenset[int]]]) -> None:
        """Takes the units over from the contexts they were in. ``units`` are (name, unit, the units around it)."""
        self.streams: Streams = streams_for(root.device)
        self.compute: Stream = None  # that of the latest outermost forward: all that is done to gradients is done on it
        self.root = root
        pool = pool_for(root.device, self.streams, root.groups.shard)
        self.reductions = ReductionQueue(pool, self.streams, root.policy.tree.reduce_buffers)
        self._end_of_backward: Callable[[], _EndOfBackward | None] = lambda: None
        self._thread = 0  # that of the outermost forward
        self._unfrozen: list[UnitBuffers] = []  # those of which leaves were frozen or unfrozen as the backward began
        self._sends_buffers = True  # whether the next forward is to begin with the first rank's
        self.units: list[UnitBuffers] = []
        for index, (name, unit, ancestors) in enumerate(units):
            unit.join(self, self.streams, index, f"unit {name!r}" if name else "the root unit", ancestors)
            self.units.append(unit)
        self.passes = Passes(self.units, root.device, self.streams, negotiate=root.policy.tree.reduce_unused)
        self.residency = Residency(root, self.units, self.streams, self.passes)
        self.size_pools()

    def size_pools(self) -> None:
        """Let the pools keep as much spare memory as a pass may need."""
        self.reductions.max_buffers = self.root.policy.tree.reduce_buffers
        ahead = max(max(unit.policy.forward_prefetch, unit.policy.backward_prefetch) for unit in self.units)
        self.residency.farthest = max(1, ahead)
        others = (unit.full_nbytes for unit in self.units if unit is not self.root)
        largest = max(others, default=self.root.full_nbytes)
        for pool, blocks in ((self.residency.pool, 1 + ahead), (self.reductions.pool, self.reductions.max_buffers)):
            pool.kept_nbytes, pool.kept_block_nbytes = blocks * largest, 2 * largest

    def __del__(self) -> None:
        """Units may live on without their tree: nothing stays gathered, and the gather stream, whose memory it was,
        waits for the last use. The collector calls this anywhere: on any stream, and the host waits for nobody."""
        if not hasattr(self, "residency") or sys.is_finalizing():
            return  # its constructor raised; or the process ends
        with self.joined(), without_waiting():
            for unit in self.residency:
                if not unit.is_gathering:  # who knows till when; the gather keeps its memory alive
                    self.residency.forget_output(unit)
                    self.residency.reshard(unit)
            self.residency.trim()
            self.reductions.pool.trim()

    @contextlib.contextmanager
    def calling(self, call: str, *, often: bool = False) -> Iterator[None]:
        """Inside, something that communicates and that all ranks have to call alike. One that calls it alone sends
        nothing: it raises, and so do the others, with the name of the call.

        Whoever communicates inside, other than by a unit's gathers, calls :meth:`Passes.announce` before. With
        ``often`` the ranks are not asked where the call comes in the same place of a step as before.
        """
        if hooks.current_backward() == hooks.NO_BACKWARD:
            self.reset_failed_backward()
        try:
            with self.passes.calling(call, f"{call} of {self.root.name}", often=often):
                yield
            if self.passes.forward is None and not self.passes.in_backward:
                self.residency.trim()  # what the call has gathered through, and no pass wants
        except BaseException:
            if self.passes.given_up:
                self.reset()
            raise

    def release(self, unit: UnitBuffers) -> None:
        """Let ``unit`` go to another context."""
        self.residency.forget_output(unit)
        self.residency.reshard(unit)
        self.units.remove(unit)

    # -- forward -------------------------------------------------------------------------------------------------------

    def enter_forward(self, unit: UnitBuffers) -> None:
        """``unit`` is about to run; the outermost one begins a new forward of the tree."""
        if hooks.current_backward() != hooks.NO_BACKWARD:
            with hooks.own_operations():
                self.enter_backward(unit)
        elif self.passes.forward is None:
            with hooks.own_operations(), profiled("_root_pre_forward", unit.name):
                self._begin_forward(unit)
            self._thread = threading.get_ident()
        elif self._thread != threading.get_ident():
            raise NotImplementedError(
                f"the forward of {unit.name} was called on another thread than the forward that is under way around "
                "it: the units of one tree run one after the other. Call wrapped modules on one thread, and only what "
                "lies inside of one on others"
            )

    def _begin_forward(self, unit: UnitBuffers) -> None:
        if self.passes.failed or self.passes.in_backward or self.passes.diverged:  # the last pass ended in an error
            self._clear()
        self._adopt_stream()
        self.residency.forget_kept()
        for other in self.units:
            self.residency.refresh(other)
        self.residency.generation += 1
        self.residency.logged = logs()
        self.residency.expects_backward = torch.is_grad_enabled()
        self.residency.start_order(unit, backward=False)
        try:
            forward = Pass(f"forward of {unit.name}", unit, trains=unit.module.training)
            self.passes.begin(forward, backward_follows=self.residency.expects_backward)
            self.residency.gathers_follow_compute()
            self._send_buffers()
        except BaseException:
            self.reset()  # the unit has not begun, and does not end
            raise

    def _send_buffers(self) -> None:
        """Where that was asked for, give all ranks the buffers of the first, when DDP does: unless the forward before
        was one of an accumulation, or without gradients."""
        sends, self._sends_buffers = self._sends_buffers, torch.is_grad_enabled() and self.root.synchronize
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
            set_versions(buffers, versions)  # backwards that have saved them may be to come

    def _adopt_stream(self) -> None:
        """Allocate and handle the gradients of the backward on the stream that is current now."""
        stream = self.streams.current()
        if stream is None:
            return
        if self.compute is None or stream != self.compute:  # a torch.Stream is neither equal nor unequal to None
            self.compute = stream
            for unit in self.units:  # autograd would run the leaves' hooks on another stream, with a warning
                unit.arrivals.renew()

    def joined(self) -> AbstractContextManager[None]:
        """Inside, work goes to the stream that owns the gradients' memory, in order with that of the current one."""
        return self.streams.joined(self.compute)

    def exit_forward(self, unit: UnitBuffers, *, backward_follows: bool, failed: bool = False) -> None:
        """``unit`` runs no more; with the outermost one the forward of the tree is over."""
        forward = self.passes.forward  # None: a backward inside of it has failed
        if hooks.current_backward() != hooks.NO_BACKWARD or (forward is not None and forward.caller is not unit):
            return
        self.residency.order.stop()
        if failed:
            self.reset()
            return
        self.residency.end_forward(backward_follows=backward_follows)
        self.residency.settle_offloaded()  # in any case: no backward may come, and the shards may be written
        if not backward_follows:
            self.residency.forget_kept()
            self.residency.rest()
        self.passes.end(wait=False)  # last: where a wait fails for what was prefetched, the pass has failed

    # -- backward ------------------------------------------------------------------------------------------------------

    def enter_backward(self, unit: UnitBuffers) -> None:
        """A backward has reached ``unit``. The first time, see to its end: a recomputation, which comes before the task
        nested in it, or the output that started it all makes sure that this happens in the outermost graph task."""
        if unit.summoned is not None:
            raise backward_of_summoned(unit.name)
        abandoned = self.passes.in_backward and self._end_of_backward() is None  # by a backward that raised
        if self.passes.in_backward and not (self.passes.failed or abandoned):
            return
        if self.passes.failed or abandoned:
            self._clear()
        self._unfrozen = [other for other in self.units if other.follow_flags()]  # before ranks agree on what it brings
        self.residency.start_order(unit, backward=True)
        self.passes.begin(Pass("backward"))
        end = _EndOfBackward(self)
        self._end_of_backward = weakref.ref(end)
        hooks.at_end_of_backward(end)

    def finish_backward(self) -> None:
        try:
            with torch.no_grad(), self.joined():
                for unit in self._unfrozen:
                    unit.check_unfrozen()
                for unit in self.units:
                    unit.end_backward()
                self.passes.end(wait=True)
                if self.root.policy.tree.is_last_backward:
                    self.reductions.drain(attach=True)
                else:
                    self.reductions.outlast_backward = True
        except BaseException as error:
            hooks.report(error, self.root.name, "end of backward")
            self.reset()
            raise
        self.residency.order.stop()
        self.residency.forget_kept()
        self.residency.settle_offloaded()
        self.residency.rest()

    @property
    def is_on_thread(self) -> bool:
        """Whether this is the thread of the latest outermost forward."""
        return self._thread == threading.get_ident()

    def reset_failed_backward(self) -> None:
        """Reset if a backward has begun and not ended. Called where none is running, so that one has raised."""
        if self.passes.in_backward:
            self.reset()

    def reset(self) -> None:
        """Bring every unit back to rest after a forward or backward that failed; the gradients it has not attached yet
        are dropped. Waits for nothing: other ranks may be gone. What is still under way is waited for by the next pass.
        """
        with self.joined(), without_waiting():
            for unit in self.units:
                unit.reset()
        self.passes.give_up()
        self.passes.failed = True
        self.residency.forget_kept()
        self.residency.order.stop()

    def _clear(self) -> None:
        """Wait for the other ranks, and for what a failed pass left under way."""
        for unit in self.units:
            unit.follow_parameters()  # what users have put on the modules since, before ours is put there again
        self.reset()
        self.passes.meet()
        with self.joined():
            for unit in self.units:
                self.residency.reshard(unit)
            self.reductions.drain(attach=False)
        self.passes.failed = False
        self.residency.trim()
