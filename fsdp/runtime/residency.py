"""Which units of one tree have their full buffers in memory, and why; gathering and resharding them.

[Note: Idle units]
A unit may be gathered without being in use: prefetched, or left so by a recomputation whose backward is about to
come. It stays while there is room (``Residency.make_room``) and is resharded first when there is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Generic, TypeVar

import torch

from fsdp.comm.recording import NOTHING
from fsdp.comm.streams import Streams
from fsdp.flat.flat_param import gather
from fsdp.flat.full_copy import BufferState
from fsdp.flat.memory import pool_for
from fsdp.runtime.agreement import GATHER, GATHER_NEARBY
from fsdp.runtime.order import ExecutionOrder
from fsdp.runtime.passes import Passes
from fsdp.runtime.ranges import communicates
from fsdp.runtime.unit_buffers import UnitBuffers

T = TypeVar("T")


class Residence(Enum):
    """Why a unit's full buffers have memory."""

    SHARDED = auto()  # they have none
    PREFETCHED = auto()  # it will be needed soon
    IN_USE = auto()  # the modules compute with them, or they are shown, or returned by a forward
    RECOMPUTED = auto()  # its forward was recomputed, its backward follows
    KEPT = auto()  # its strategy keeps it for the next pass
    AWAITED = auto()  # some of its modules have run in this pass, and others are to come

    __hash__ = object.__hash__  # Enum's own is a Python function


_IDLE = (Residence.PREFETCHED, Residence.RECOMPUTED)
_KEPT = frozenset([Residence.KEPT, Residence.AWAITED])
_NEXT = {
    Residence.SHARDED: (Residence.PREFETCHED, Residence.IN_USE),
    Residence.PREFETCHED: (Residence.IN_USE, Residence.KEPT, Residence.SHARDED),
    Residence.IN_USE: tuple(why for why in Residence if why is not Residence.IN_USE),
    Residence.RECOMPUTED: (Residence.PREFETCHED, Residence.IN_USE, Residence.KEPT, Residence.SHARDED),
    Residence.KEPT: (Residence.PREFETCHED, Residence.IN_USE, Residence.SHARDED),
    Residence.AWAITED: (Residence.PREFETCHED, Residence.IN_USE, Residence.KEPT, Residence.SHARDED),
}
_FOLLOWS = {(before, why) for before, several in _NEXT.items() for why in (before, *several)}


class Residences(Generic[T]):
    """Of every unit of one tree, why it is gathered. What is not sharded is never in it."""

    def __init__(self) -> None:
        # those that are gathered, in the order in which they became what they are; those that are kept, which may be
        # many, apart
        self._of: dict[T, Residence] = {}
        self._kept: dict[T, Residence] = {}
        self._ahead = 0  # so many of those that come next were looked at: they are gathered, as far as they are to be

    def __iter__(self) -> Iterator[T]:
        return iter([*self._kept, *self._of])

    def of(self, unit: T) -> Residence:
        return self._of.get(unit) or self._kept.get(unit, Residence.SHARDED)

    def becomes(self, unit: T, why: Residence, *, gathered: bool = False) -> bool:
        """If ``unit`` is gathered, it is so for another reason from here on, or not at all; returns whether it was.
        With ``gathered`` it gets memory, or its memory is filled again."""
        before = self._of.pop(unit, None) or self._kept.pop(unit, None)
        if before is None:
            if not gathered:
                return False
            before = Residence.SHARDED
        if (before, why) not in _FOLLOWS:
            raise AssertionError(f"a unit went from {before.name} to {why.name}")
        if why is not Residence.SHARDED:
            (self._kept if why in _KEPT else self._of)[unit] = why
        elif before is not Residence.IN_USE:
            self._ahead = 0
        return True

    @property
    def idle(self) -> list[T]:
        """What is gathered and not in use, the oldest first; see [Note: Idle units]."""
        return [unit for unit, why in self._of.items() if why in _IDLE]


class Residency(Residences[UnitBuffers]):
    """Gathers and reshards the units of one tree; what is not sharded is never in it.

    Attributes:
        pool: the memory of the full buffers.
        order: that in which units are gathered.
        generation: counts outermost forwards: what was gathered before is not trusted by the next.
        expects_backward: whether the outermost forward runs with gradients enabled.
        farthest: how many of the next units any unit wants to be gathered.
        logged: whether what is gathered and reduced is told of in the log.
    """

    def __init__(self, root: UnitBuffers, units: list[UnitBuffers], streams: Streams, passes: Passes) -> None:
        """``units``, the root among them, may lose some later on."""
        super().__init__()
        self.pool = pool_for(root.device, streams, root.groups.shard)
        self.passes = passes
        self.order: ExecutionOrder[UnitBuffers] = ExecutionOrder()
        self.generation, self.farthest = 0, 1
        self.expects_backward = self.logged = False
        self._root, self._units, self._streams, self._on_host = root, units, streams, streams.asynchronous_work
        self._keeps = True  # whether some handle may have kept something for its next gather
        self._meetings = 0  # of the ranks, when the order was begun
        self._offloads = any(handle.offload.offload_params for unit in units for handle in unit.handles)

    def start_order(self, unit: UnitBuffers, *, backward: bool) -> None:
        """A pass begins with ``unit``. Ranks that have met after a failure remember different orders, and would gather
        different units ahead."""
        if self._meetings != self.passes.meetings:
            self.order, self._meetings = ExecutionOrder(), self.passes.meetings
        self.order.start(unit, backward=backward)
        self._ahead = 0

    def stays(self, unit: UnitBuffers) -> bool:
        """Whether ``unit`` stays gathered from forward to backward."""
        resharded = unit.policy.reshard_after_forward
        return unit is self._root if resharded is None else not resharded

    # -- gathering -----------------------------------------------------------------------------------------------------

    def gather(self, unit: UnitBuffers, why: Residence = Residence.IN_USE) -> None:
        """Start filling the full buffers of ``unit``; see :meth:`Communicator.gather`."""
        nearby = unit.nearby is not None and unit.is_nearby
        if unit.groups.sharded:
            self.passes.about_to(GATHER_NEARBY if nearby else GATHER, unit)
        again = self.expects_backward and unit.precision.casts and unit.nearby is None and not self.stays(unit)
        if again:
            again = self.passes.forward is not None and not self.passes.in_backward
            self._keeps = self._keeps or again
        communicator = unit.nearby if nearby else unit.communicator
        assert communicator is not None
        what = "prefetch" if why is Residence.PREFETCHED else "gather"
        shown = communicates(what, unit.name, self.generation, logged=self.logged)
        with shown, NOTHING if self._on_host else self._streams.on_gather_stream():
            gather(
                unit.handles,
                self.pool,
                communicator,
                unit.gather_tags[0],
                keep_cast=again,
                nearby=nearby,
            )
        unit.generation, unit.kept_versions = self.generation, None
        self.becomes(unit, why, gathered=True)

    def unshard(self, unit: UnitBuffers, *, refill: bool) -> None:
        """The modules hold the full parameters when this returns, and the current stream may read them.

        With ``refill``, a copy that an earlier forward left is gathered again: the shards may have changed since. Where
        a backward of ``no_sync`` kept it, their versions tell.
        """
        if self._of.get(unit) is Residence.PREFETCHED and unit.generation == self.generation:  # nearly always
            self.order.record(unit)
            self._ahead = 0
            for handle in unit.handles:
                handle.wait()
        elif unit.gathers:
            earlier, gathered = refill and unit.generation != self.generation, unit.is_gathered
            stale = earlier and unit.kept_versions != unit.versions
            if not gathered or earlier or self._of.get(unit) is Residence.PREFETCHED:
                self.order.record(unit)
                self._ahead = 0
            if not gathered:
                self.make_room(unit)
                self.gather(unit)
            elif stale:
                torch.clear_autocast_cache()  # its casts are of what was there before
                self.gather(unit)
            elif earlier:
                for view in unit.views:
                    view.check_kept()
                unit.generation = self.generation
            unit.wait()
        for view in unit.views:
            view.registration.use_leaves(view.take_over if view.check_writeback else None)
        self.becomes(unit, Residence.IN_USE)

    def gather_by_hand(self, unit: UnitBuffers) -> None:
        """See :meth:`Unit.unshard_by_hand`."""
        if not unit.is_gathered:
            self.make_room(unit)
        for handle in unit.handles:
            handle.forget_kept()  # what an earlier pass has kept of the shards may be out of date
        self.gathers_follow_compute()
        self.gather(unit, Residence.PREFETCHED)
        unit.generation = self.generation + 1
        self.settle_offloaded()

    def gathers_follow_compute(self) -> None:
        """Gathers from now on read what has been written on the current stream, by the optimizer for instance."""
        updated = self._streams.record()
        with self._streams.on_gather_stream():
            self._streams.wait(updated)

    def settle_offloaded(self) -> None:
        """Shards in host memory may be written from here on: what the device reads of them has been read."""
        if self._offloads:
            self._streams.settle()

    def forget_kept(self) -> None:
        """Shards may have changed: the next gathers read them again."""
        keeps, self._keeps = self._keeps, False
        for unit in self._units if keeps else ():
            for handle in unit.handles:
                handle.forget_kept()

    # -- resharding ----------------------------------------------------------------------------------------------------

    def reshard(self, unit: UnitBuffers, *, backward_follows: bool = False) -> None:
        """Give the memory of the full buffers back; the modules show shards. Idempotent.

        Where ``backward_follows``, this rank keeps its part of what its policy has stay with the ranks nearby, unless
        an earlier forward has gathered it. It is cut on the stream that has filled the buffer, and will gather it.
        """
        for view in unit.views:
            view.registration.use_resting()
        if unit.in_output or not self.becomes(unit, Residence.SHARDED):
            return
        on_host, last_use, nearby = self._on_host, None, None
        if not on_host:
            unit.wait()  # a prefetch that nothing used: the optimizer must not modify the shard during it
            last_use = self._streams.record()
        if backward_follows and unit.nearby is not None and unit.generation == self.generation:
            nearby = unit.nearby if unit.policy.unshard_in_backward else None
            self._keeps = self._keeps or nearby is not None
        with NOTHING if on_host else self._streams.on_gather_stream():
            for handle in unit.handles:
                if handle.copy.state is BufferState.GATHERING:  # the same; for the others the host has waited
                    handle.wait()
                if nearby is not None:
                    handle.keep_part(nearby.groups)
                handle.release(self.pool, last_use)
        torch.clear_autocast_cache()  # it keeps a cast of every leaf until the outermost autocast block ends

    def keep(self, unit: UnitBuffers, why: Residence = Residence.KEPT) -> None:
        """Leave ``unit`` gathered for the next pass; what users change in between is the shard, not the copy."""
        unit.use_resting()
        self.becomes(unit, why)

    def keep_to_others(self, unit: UnitBuffers) -> None:
        """Some modules of ``unit`` have run: keep it for the others, at the latest to the end of the pass. Nobody else
        gets less room for that."""
        if self.of(unit) is Residence.IN_USE:
            self.keep(unit, Residence.AWAITED)

    def end_forward(self, *, backward_follows: bool) -> None:
        """The forward of the tree is over: reshard what no backward will read, and modules that were awaited did not
        come."""
        for unit in self.idle if backward_follows else self:
            self.reshard(unit)
        for unit in [unit for unit, why in self._kept.items() if why is Residence.AWAITED]:
            if not self.keep_to_backward(unit):
                self.reshard(unit, backward_follows=True)

    def keep_to_backward(self, unit: UnitBuffers) -> bool:
        """``unit`` has run, and a backward is to come: keep it for that if its strategy or the budget says so. Returns
        whether it stays."""
        stays = self.stays(unit) or (unit.policy.tree.keep_gathered_nbytes != 0 and self._fits_budget(unit))
        if stays:
            self.keep(unit)
        return stays

    def _fits_budget(self, unit: UnitBuffers) -> bool:
        """Whether ``unit`` may stay gathered for the next pass, which comes to it before it comes to those that were
        kept before it: the first of these make room. The root is not counted."""
        if unit.policy.tree.keep_gathered_nbytes == 0:
            return False
        if unit is self._root or not unit.gathers:
            return True
        room = unit.policy.tree.keep_gathered_nbytes - unit.full_nbytes
        if room < 0:
            return False
        kept = [other for other, why in self._kept.items() if why is Residence.KEPT and not self.stays(other)]
        excess = sum(other.full_nbytes for other in kept if other is not unit) - room
        for other in kept:
            if excess > 0 and other is not unit:
                self.reshard(other, backward_follows=not self.passes.in_backward)
                excess -= other.full_nbytes
        return True

    def end_backward(self, unit: UnitBuffers) -> None:
        """Reshard; but where the strategy keeps a unit after forward and its gradients accumulate unsharded, or users
        want it so, it stays for the next forward, which gathers it again only if a shard was written in between."""
        kept = not unit.policy.reshard_after_backward
        if not unit.synchronize and unit.is_gathered:
            kept = kept or unit.policy.reshard_after_forward is False or self._fits_budget(unit)
        for handle in unit.handles if self._keeps else ():
            handle.forget_kept()
        if not (kept and unit.is_gathered):
            self.reshard(unit)
            return
        unit.kept_versions = unit.versions
        self.keep(unit)

    def forget_output(self, unit: UnitBuffers) -> None:
        """What an earlier forward returned may lose its values now."""
        if unit.in_output:
            unit.in_output = False
            self.reshard(unit)

    def trim(self) -> None:
        """Give the pool's spare memory back."""
        with self._streams.on_gather_stream():
            self.pool.trim()

    def rest(self) -> None:
        """The pass is over: what the next one will not want goes back at once, and the rest if none comes soon."""
        with self._streams.on_gather_stream():
            self.pool.rest()

    # -- precision -----------------------------------------------------------------------------------------------------

    def compute_in(self, unit: UnitBuffers, full_precision: bool) -> None:
        """Compute in the parameters' own dtypes from here on, or in those of the mixed precision again; and so the
        buffers.

        Raises:
            RuntimeError: a backward of the unit is under way in the other dtypes.
        """
        if unit.full_precision is not full_precision:
            self.cast_parameters(unit, full_precision)
        if unit.precision.asked.buffer_dtype is not None:
            unit.precision.cast_buffers(unit.device, full_precision=full_precision)

    def cast_parameters(self, unit: UnitBuffers, full_precision: bool) -> None:
        """As ``compute_in``, without the buffers."""
        if unit.full_precision is full_precision or not unit.handles:
            return
        if unit.arrivals.expected and any(handle.casts for handle in unit.handles):
            raise RuntimeError(
                f"{unit.name} would have to compute in mixed and in full precision at once. Forwards in eval mode with "
                "FSDP_USE_FULL_PREC_IN_EVAL=1 are in full precision: give graphs of different precision backwards of "
                "their own"
            )
        self.forget_output(unit)
        self.reshard(unit)
        for handle in unit.handles:
            handle.compute_in_full_precision(full_precision)
        unit.full_precision = full_precision
        unit.arrivals.watch()

    def refresh(self, unit: UnitBuffers) -> None:
        """Follow what the user did to the module's mode and to the visible parameters since the last forward."""
        if unit.in_output:
            self.forget_output(unit)
        if unit.summoned is None:  # now, so that the right thing is prefetched
            full_precision = unit.precision.full_in_eval and unit.precision.wants_full
            if unit.full_precision is not full_precision or unit.precision.asked.buffer_dtype is not None:
                self.compute_in(unit, full_precision)
        unit.follow_parameters()

    # -- room ----------------------------------------------------------------------------------------------------------

    def _has_room(self, unit: UnitBuffers, room: int) -> bool:
        """Whether one more unit fits beside ``room`` others, not counting the root, the ancestors of ``unit`` and units
        that are kept. While a unit computes, as many others may be gathered as are to be prefetched."""
        for other in self._of:
            limited = other is not self._root and other.policy.reshard_after_forward is not False
            room -= limited and other.index not in unit.ancestors
        return room >= 0

    def make_room(self, unit: UnitBuffers) -> None:
        """Reshard idle units, oldest first, as far as ``unit`` needs their room."""
        policy = unit.policy
        distance = policy.backward_prefetch if self.passes.in_backward else policy.forward_prefetch
        for other in self.idle if policy.tree.limit_all_gathers else ():
            if self._has_room(unit, distance):
                return
            self.reshard(other)

    def prefetch(self, unit: UnitBuffers, *, begins: bool = False) -> None:
        """Start gathering the units that come after ``unit``, as far as the record, the policy and the room allow; or
        those that users have listed, once ``unit`` ``begins``."""
        if self._ahead >= self.farthest:
            return
        in_backward, policy = self.passes.in_backward, unit.policy
        if policy.tree.reduce_unused:
            return
        if in_backward and policy.prefetch_after_gradients:
            under_way = [o for o in self if o.arrivals.pending and self.of(o) is not Residence.AWAITED]
            if any(other.index not in unit.ancestors for other in under_way):
                return
        listed = unit.listed(in_backward) if unit.listed is not None else None
        if listed is not None and not begins:
            return
        distance = policy.backward_prefetch if in_backward else policy.forward_prefetch
        for candidate in self.order.upcoming(distance) if listed is None else listed:
            if candidate in self._of or candidate.is_gathered or candidate.summoned is not None:
                continue
            if in_backward and not candidate.policy.unshard_in_backward:
                continue
            if listed is None and policy.tree.limit_all_gathers and not self._has_room(candidate, distance):
                return
            self.gather(candidate, Residence.PREFETCHED)
        if listed is None:
            self._ahead = distance
