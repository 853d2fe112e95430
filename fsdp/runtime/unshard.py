"""Gathering and resharding the units of one tree: which full buffers have memory, and why.

[Note: Idle units]
A unit may be gathered without being in use: it was prefetched, or the forward was recomputed and the backward follows.
It stays while there is room (``Unsharder.make_room``) and is resharded first when there is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

import torch

from fsdp.comm.lane.issuing import GATHER, GATHER_NEARBY, Event
from fsdp.comm.profiling import profiled
from fsdp.comm.streams import Streams
from fsdp.flat.flat_param import gather
from fsdp.flat.full_copy import BufferState
from fsdp.flat.memory import MemoryPool
from fsdp.runtime.order import ExecutionOrder
from fsdp.runtime.passes import Passes
from fsdp.runtime.ranges import log
from fsdp.runtime.unit import Unit


class Residence(Enum):
    """The reason why a unit's full buffers have memory."""

    SHARDED = auto()  # they have none
    PREFETCHED = auto()  # the unit will run soon
    IN_USE = auto()  # the modules compute with them
    RECOMPUTED = auto()  # the forward was recomputed, and the backward follows
    KEPT = auto()  # the strategy keeps them for the next pass
    AWAITED = auto()  # a part of the unit's modules has run in this pass

    __hash__ = object.__hash__  # Enum's own is a Python function


_IDLE = (Residence.PREFETCHED, Residence.RECOMPUTED)
_COMPUTING = (Residence.IN_USE, Residence.RECOMPUTED)
_KEPT = frozenset([Residence.KEPT, Residence.AWAITED])


@dataclass(eq=False, slots=True)
class Gathered:
    """The full buffers of a unit while they have memory.

    Attributes:
        why: the reason.
        generation: the forward of the tree for which they were filled.
        versions: of the shards when a backward left the buffers to the next forward; None if that has to gather again.
    """

    why: Residence
    generation: int = -1
    versions: list[list[int]] | None = None


class Unsharder:
    """Gathers and reshards the units of one tree. Units that are not sharded are never gathered.

    Attributes:
        pool: the memory of the full buffers.
        order: the order in which units run, recorded and predicted.
        generation: number of outermost forwards. A forward does not trust what an earlier one has gathered.
        expects_backward: the outermost forward runs with gradients enabled.
        logged: gathers and reductions are written to the log.
    """

    def __init__(self, root: Unit, units: list[Unit], streams: Streams, passes: Passes, pool: MemoryPool) -> None:
        """``units``: of the tree, the root among them."""
        self.pool, self.passes = pool, passes
        self.order: ExecutionOrder[Unit] = ExecutionOrder()
        self.generation = 0
        self.expects_backward = self.logged = False
        self._root, self._streams = root, streams
        self._gathered: dict[Unit, Gathered] = {}  # in the order in which the units got their residence
        self._ahead = 0  # so many of the next units are gathered
        self._with_slices = [unit for unit in units if unit.position.nearby is not None]
        self._meetings = 0  # number of meetings of the ranks when the order was begun
        self._offloads = any(handle.offload.offload_params for unit in units for handle in unit.handles)

    # -- residences ----------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Unit]:
        """Iterate over the gathered units."""
        return iter([*self._gathered])

    def residence_of(self, unit: Unit) -> Residence:
        """Return why ``unit`` is gathered."""
        found = self._gathered.get(unit)
        return Residence.SHARDED if found is None else found.why

    def becomes(self, unit: Unit, why: Residence) -> None:
        """Change the residence of ``unit``, if it is gathered."""
        found = self._gathered.pop(unit, None)
        if found is not None and why is not Residence.SHARDED:
            found.why = why
            self._gathered[unit] = found
        elif found is not None and found.why is not Residence.IN_USE:
            self._ahead = 0

    @property
    def idle(self) -> list[Unit]:
        """The units that are gathered and not in use, oldest first; see [Note: Idle units]."""
        return [unit for unit, found in self._gathered.items() if found.why in _IDLE]

    # -- passes --------------------------------------------------------------------------------------------------------

    def begin_forward(self, unit: Unit, *, expects_backward: bool, logged: bool) -> None:
        """Begin an outermost forward, of ``unit``."""
        self.generation += 1
        self.expects_backward, self.logged = expects_backward, logged
        self.start_order(unit, backward=False)

    def start_order(self, unit: Unit, *, backward: bool) -> None:
        """Begin a pass whose first unit is ``unit``. Ranks that have met after a failure remember different orders,
        would gather different units ahead, and so begin new ones."""
        if self._meetings != self.passes.meetings:
            self.order, self._meetings = ExecutionOrder(), self.passes.meetings
        self.order.start(unit, backward=backward)

    # -- gathering -----------------------------------------------------------------------------------------------------

    def gather(self, unit: Unit, why: Residence = Residence.IN_USE) -> None:
        """Start filling the full buffers of ``unit``; see :meth:`Communicator.gather`."""
        if unit.step_under_way is not None:
            unit.settle_step()
        nearby = unit.position.nearby is not None and unit.has_slices
        kind = GATHER_NEARBY if nearby else GATHER
        event = self.passes.about_to(kind, unit) if unit.groups.sharded else Event("")  # nothing travels
        communicator = unit.position.nearby if nearby else unit.communicator
        assert communicator is not None
        what = "prefetch" if why is Residence.PREFETCHED else "gather"
        if self.logged:
            log(what, unit.name, self.generation)
        with profiled(what, unit.name), self._streams.on_gather_stream():
            gather(unit.handles, self.pool, communicator, event, nearby=nearby)
        self._gathered.pop(unit, None)  # if it is filled again
        self._gathered[unit] = Gathered(why, self.generation)

    def unshard(self, unit: Unit, *, refill: bool) -> None:
        """Register the full parameters on the modules; when this returns, the current stream may read them.

        With ``refill`` a forward begins. A copy that an earlier forward left is gathered again, because the shards may
        have changed since; so is any copy if parameters were assigned inside of this forward. Where a backward of
        ``no_sync`` kept it, the versions of the shards decide. A backward needs the values from before an assignment.
        """
        if unit.step_under_way is not None:
            unit.settle_step()
        assigned = False
        for guard in unit.guards if refill else ():
            assigned = guard.take_assigned() or assigned
        if assigned:
            unit.forget_slices()
            self.gathers_follow_compute()
        if unit.gathers:
            found = self._gathered.get(unit)
            if found is None or found.why not in _COMPUTING:
                self.order.record(unit)
                self._ahead = 0
            if found is None:
                self.make_room(unit)
                self.gather(unit)
            elif assigned or (refill and found.generation != self.generation):
                if assigned or unit.versions() != found.versions:
                    torch.clear_autocast_cache()  # the casts are of old values
                    self.gather(unit)
                else:
                    found.generation = self.generation
            for handle in unit.handles:
                handle.copy.wait()
        if not refill:
            for guard in unit.guards:
                guard.take_assigned()
        for views in unit.views:
            views.registration.push_leaves()
        self.becomes(unit, Residence.IN_USE)

    def unshard_by_hand(self, unit: Unit) -> Callable[[], None]:
        """Start gathering ``unit`` for the next forward. A later change of a shard is too late for that forward.
        Return a function that waits for the gather.

        Raises:
            AssertionError: a forward or backward of the unit is under way.
        """
        unit.check_idle("Cannot manually unshard parameters during forward/backward", AssertionError)
        unit.follow_parameters()
        if unit.gathers:
            if not unit.is_gathered:
                self.make_room(unit)
            unit.forget_slices()
            self.gathers_follow_compute()
            self.gather(unit, Residence.PREFETCHED)
            self._gathered[unit].generation += 1
            self.settle_offloaded()
        return unit.wait

    def gathers_follow_compute(self) -> None:
        """Let gathers from now on read what the current stream, of the optimizer for instance, has written."""
        updated = self._streams.record()
        with self._streams.on_gather_stream():
            self._streams.wait(updated)

    def settle_offloaded(self) -> None:
        """Wait until the device has read the shards in host memory, which may be written from here on."""
        if self._offloads:
            self._streams.settle()

    def forget_slices(self) -> None:
        """Let the next gathers read the shards again, which may have changed."""
        for unit in self._with_slices:
            unit.forget_slices()

    # -- resharding ----------------------------------------------------------------------------------------------------

    def reshard(self, unit: Unit, *, backward_follows: bool = False, waits: bool = True) -> None:
        """Give the memory of the full buffers back, and register shards on the modules. Idempotent.

        A gather under way is waited for, because the optimizer must not change the shard meanwhile. Without ``waits``
        it keeps the buffer: the peers may be gone.

        Where ``backward_follows`` and the policy names a number of ranks, this rank keeps a slice for the gather
        among these, unless an earlier forward has gathered the unit. The gather stream cuts the slice, because it has
        filled the buffer and will gather it.
        """
        for views in unit.views:
            views.registration.pop_leaves()
        found = self._gathered.get(unit)
        if (found is None and not unit.has_memory) or (not waits and unit.is_gathering):
            return
        for handle in unit.handles:
            if handle.copy.state is BufferState.GATHERING:
                handle.copy.wait()
        last_use = self._streams.record()
        slices = backward_follows and found is not None and found.generation == self.generation
        nearby = unit.position.nearby if slices else None
        with self._streams.on_gather_stream():
            if nearby is not None and unit.policy.unshard_in_backward:
                for handle in unit.handles:
                    handle.keep_slice(nearby.groups)
            for handle in unit.handles:
                handle.copy.release(self.pool, last_use)
        self.becomes(unit, Residence.SHARDED)  # last: an interrupt leaves a unit that is resharded again
        torch.clear_autocast_cache()  # it keeps a cast of every leaf until the outermost autocast block ends

    def drop_prefetched(self, unit: Unit) -> None:
        """Reshard ``unit`` if it was gathered for a future forward."""
        if self.residence_of(unit) is Residence.PREFETCHED:
            self.reshard(unit)

    def keep(self, unit: Unit, why: Residence = Residence.KEPT) -> None:
        """Leave ``unit`` gathered for the next pass. Users change the shard in between, not the copy."""
        for views in unit.views:
            views.registration.pop_leaves()
        self.becomes(unit, why)

    def keep_for_group(self, unit: Unit) -> None:
        """Keep ``unit``, of which some modules have run, until the other modules run or the pass ends.

        The unit does not count against the limit of gathered units.
        """
        if self.residence_of(unit) is Residence.IN_USE:
            self.keep(unit, Residence.AWAITED)

    def leave_forward(self, unit: Unit) -> None:
        """Reshard ``unit``, which has run, or keep it for the backward: as its policy says, else only the root."""
        resharded = unit.policy.reshard_after_forward
        if resharded is None:
            resharded = unit is not self._root
        if self.expects_backward and not resharded:
            self.keep(unit)
        else:
            self.reshard(unit, backward_follows=self.expects_backward)

    def end_forward(self, *, backward_follows: bool) -> None:
        """Reshard, at the end of the tree's forward, all units that no backward will read, and units that were kept for
        modules that did not run."""
        for unit in self.idle if backward_follows else self:
            self.reshard(unit)
        for unit in [unit for unit, found in self._gathered.items() if found.why is Residence.AWAITED]:
            self.leave_forward(unit)

    def end_backward(self, unit: Unit) -> None:
        """Reshard ``unit``, unless it is kept for the next forward: by the policy, or, while gradients accumulate
        unsharded, by the strategy. That forward gathers it again only if a shard was written."""
        found = self._gathered.get(unit)
        if found is None:
            if not unit.groups.sharded:  # the full buffers are the shards
                self.reshard(unit)
            return
        if unit.position.nearby is not None:
            unit.forget_slices()
        kept = not unit.policy.reshard_after_backward
        if not unit.synchronize:
            kept = kept or unit.policy.reshard_after_forward is False
        if kept:
            found.versions = unit.versions()
            self.keep(unit)
        else:
            self.reshard(unit)

    def outdate(self, unit: Unit) -> None:
        """Let the next forward gather ``unit`` again, even if no version of a shard has changed."""
        found = self._gathered.get(unit)
        if found is not None:
            found.versions = None

    def trim(self) -> None:
        """Give the pool's spare memory back."""
        with self._streams.on_gather_stream():
            self.pool.trim()

    def rest(self) -> None:
        """Note the end of a pass: the pool gives back what the next one does not need, and the rest after a while."""
        with self._streams.on_gather_stream():
            self.pool.rest()

    # -- precision -----------------------------------------------------------------------------------------------------

    def compute_in(self, unit: Unit, full_precision: bool) -> None:
        """Compute in the parameters' own dtypes from here on, or in those of the mixed precision; so do the buffers.

        Raises:
            RuntimeError: a backward of the unit is under way in the present dtypes.
        """
        if unit.precision.is_full is not full_precision:
            self.cast_parameters(unit, full_precision)
        if unit.precision.asked.buffer_dtype is not None:
            unit.precision.cast_buffers(unit.device, full_precision=full_precision)

    def cast_parameters(self, unit: Unit, full_precision: bool) -> None:
        """Change the compute dtype of the parameters as ``compute_in`` does, without the buffers."""
        if unit.precision.is_full is full_precision or not unit.handles:
            return
        if unit.arrivals.expected and any(
            handle.layout.compute_dtype != handle.layout.dtype for handle in unit.handles
        ):
            raise RuntimeError(
                f"{unit.name} would have to compute in mixed and in full precision at once. Forwards in eval mode with "
                "FSDP_USE_FULL_PREC_IN_EVAL=1 are in full precision: give graphs of different precision backwards of "
                "their own"
            )
        self.reshard(unit)
        for handle in unit.handles:
            handle.compute_in_full_precision(full_precision)
        unit.precision.set_full(full_precision)
        unit.arrivals.watch()

    def refresh(self, unit: Unit) -> None:
        """Follow changes of the module's mode and of the visible parameters since the last forward."""
        if unit.summoned is None:  # now, so that the right copy is prefetched
            self.compute_in(unit, unit.precision.wants_full)
        unit.follow_parameters(settles=False)  # the gather of each unit waits for that unit's step alone

    # -- room ----------------------------------------------------------------------------------------------------------

    def _has_room(self, unit: Unit, room: int) -> bool:
        """Whether one more unit fits next to ``room`` gathered ones. The root, the ancestors of ``unit`` and units that
        are kept do not count. While a unit computes, as many more may be gathered as are to be prefetched."""
        for other, found in self._gathered.items():
            limited = found.why not in _KEPT and other is not self._root
            limited = limited and other.policy.reshard_after_forward is not False
            room -= limited and other.position.index not in unit.position.ancestors
        return room >= 0

    def make_room(self, unit: Unit) -> None:
        """Reshard idle units, oldest first, until ``unit`` has room."""
        policy = unit.policy
        distance = policy.backward_prefetch if self.passes.in_backward else policy.forward_prefetch
        for other in self.idle if policy.tree.limit_all_gathers else ():
            if self._has_room(unit, distance):
                return
            self.reshard(other)

    def prefetch(self, unit: Unit, *, begins: bool = False) -> None:
        """Start gathering the units that run after ``unit``, as far as the record, the policy and the room allow. Units
        that the user has listed are gathered when ``unit`` ``begins``."""
        in_backward, policy = self.passes.in_backward, unit.policy
        distance = policy.backward_prefetch if in_backward else policy.forward_prefetch
        listed = None if policy.prefetch_lists is None else policy.prefetch_lists(in_backward)
        if (self._ahead >= distance if listed is None else not begins) or policy.tree.reduce_unused:
            return
        if in_backward and policy.prefetch_after_gradients:
            for other, found in [*self._gathered.items()]:
                computes = other.arrivals.pending and found.why is not Residence.AWAITED
                if computes and other.position.index not in unit.position.ancestors:
                    return
        for candidate in self.order.upcoming(distance) if listed is None else listed:
            if candidate in self._gathered or candidate.is_gathered or candidate.summoned is not None:
                continue
            if in_backward and not candidate.policy.unshard_in_backward:
                continue
            if listed is None and policy.tree.limit_all_gathers and not self._has_room(candidate, distance):
                return
            self.gather(candidate, Residence.PREFETCHED)
        if listed is None:
            self._ahead = distance
