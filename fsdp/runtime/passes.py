"""The forwards, backwards and calls of one tree that are under way, and the lanes of the tree's groups."""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Iterator, Sequence

import torch
from torch.distributed import ProcessGroup

from fsdp.comm.collectives import agree
from fsdp.comm.lane.history import Pass, hash_of
from fsdp.comm.lane.issuing import GATHER_NEARBY, KINDS, PER_UNIT, REDUCE, Event
from fsdp.comm.lane.lane import ORDER_REMEDY, Lane
from fsdp.runtime.mistakes import warn_of_initial_values, warn_of_steps
from fsdp.runtime.negotiation import REMEDY, Negotiation
from fsdp.runtime.unit import Unit

_RATES = 1 << 32


def _compare_steps(here: int, largest: int) -> None:
    """Warn if the steps of optimizers on this rank, and the ``largest`` ones of any rank, differ."""
    if here != largest:
        warn_of_steps(here // _RATES, largest // _RATES)


class LaneUnits:
    """The units of one tree that communicate over one lane, in an order that is equal on all ranks.

    Attributes:
        lane: of the group.
        name: of the tree in the lane, once the ranks have compared the layouts.
        neighbours: the other lanes of the tree.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.lane = Lane.of(group, device)
        self.name: str | None = None
        self.neighbours: Sequence[Lane] = ()
        self._units: list[weakref.ref[Unit]] = []
        self._places: weakref.WeakKeyDictionary[Unit, int] = weakref.WeakKeyDictionary()
        self._digests: dict[int, list[str | None]] = {}  # of the first values, by rank if they differ
        self._steps, self._rates = 0, 0  # of optimizers since the last vote: their number, and a hash of their rates

    def add(self, unit: Unit) -> None:
        """Add a unit."""
        self._places[unit] = len(self._units)
        self._units.append(weakref.ref(unit))

    def events(self, kind: str, unit: Unit) -> tuple[Event, Event]:
        """Return the events of ``unit`` in the usual and in full precision."""
        usual, full = (Event.of(kind, self._places[unit], unit.name, full_precision=full) for full in (False, True))
        return usual, full

    @property
    def end_number(self) -> int:
        """The number of the event that ends a pass."""
        return PER_UNIT * len(self._units)

    def _present(self) -> list[Unit]:
        return [unit for unit in (reference() for reference in self._units) if unit is not None]

    def join(self) -> None:
        """Compare the layouts of the ranks and the first values, the first time.

        Raises:
            RuntimeError: on every rank, with the first difference.
        """
        if self.name is None:
            layout = [f"{unit.name}: {unit.signature(self.lane.group)}" for unit in self._present()]
            doing, digests = "the first pass or call of a model", list(self._first_values().values())
            self.name, self._digests = self.lane.join(doing, layout, digests)

    def enter(self, what: Pass, *, negotiates: bool) -> bool:
        """Begin ``what`` in the lane; return whether it had not begun there."""
        self.join()
        if self.lane.under_way is what:
            return False
        remedy = REMEDY if negotiates else ORDER_REMEDY
        self.lane.enter(what, self._number_of(what), neighbours=self.neighbours, remedy=remedy, asks=not negotiates)
        if self._digests and not what.call:  # a call may load values
            if self.lane.group.rank() == 0:
                warn_of_initial_values(self._first_values(), self._digests)
            self._digests = {}
        return True

    def end(self, what: Pass, *, wait: bool) -> None:
        """End ``what`` in the lane; see :meth:`Lane.end`. With ``wait`` the ranks compare the steps of optimizers."""
        steps = self._steps * _RATES + self._rates
        if wait:
            self._steps, self._rates = 0, 0
        listener = functools.partial(_compare_steps, steps)
        self.lane.end(None if what.call else self.end_number, wait=wait, value=steps, listener=listener)

    def leave(self, *, compare: bool) -> None:
        """End the pass that is under way in the lane, on whose end the ranks have agreed. With ``compare`` they compare
        the steps of optimizers."""
        self.lane.leave()
        if compare:
            steps = torch.tensor([self._steps * _RATES + self._rates])
            self._steps, self._rates = 0, 0
            here = int(steps)
            agree(steps, self.lane.group, self.lane.device, "agree on the steps of optimizers")
            _compare_steps(here, int(steps))

    def note_step(self, rates: Sequence[str]) -> None:
        """Note the learning rates of a step."""
        self._steps, self._rates = self._steps + 1, hash_of(f"{self._rates} {rates}") % _RATES

    def _number_of(self, what: Pass) -> int:
        """Return a number for ``what`` that is equal on all ranks: names, and other groups, may differ."""
        if what.call:
            kind = what.call
        elif what.is_backward:
            kind = "backward"
        else:
            kind = str(self._places.get(what.caller, "of another group"))
        return hash_of(f"{self.name}/{kind}")

    def _first_values(self) -> dict[str, str | None]:
        """Return a digest of the values with which each parameter was wrapped; None if they were loaded or written."""
        found: dict[str, str | None] = {}
        for unit in self._present():
            for initial in unit.initial:
                found.update({f"{name!r} of {unit.name}": digest for name, digest in initial.digests().items()})
        return found

    def failed(self) -> None:
        """Forget the steps of optimizers: a pass has failed, and the ranks may have made different ones."""
        self._steps, self._rates = 0, 0


class Passes:
    """The passes of one tree that are under way, innermost last, and the lanes, one per group of several ranks.

    Units that are sharded and replicated have two lanes: over the second one the ranks agree on reductions. A backward
    may run inside a forward. A pass begins in a lane with the first collective there.

    Attributes:
        current: the innermost pass.
        forward: the forward that is under way, also while a backward runs inside.
        in_backward: whether a backward is under way.
        suspended: why passes and calls are refused now; empty if they are not.
        meetings: the number of meetings of all ranks after failures.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device, *, negotiate: bool) -> None:
        """``units`` are in the order of the tree. With ``negotiate`` ranks may run different units, and all units have
        the same groups."""
        by_group, further = dict[int, LaneUnits](), dict[int, LaneUnits]()
        for unit in units:
            for position, group in enumerate([*unit.groups_for(REDUCE), *unit.groups_for(GATHER_NEARBY)]):
                member = by_group[id(group)] = by_group.get(id(group)) or LaneUnits(group, device)
                member.add(unit)
                if position > 0:
                    further[id(group)] = member
        self._by_group = by_group
        self._further = list(further.values())
        self._lanes = [member.lane for member in by_group.values()]
        for member in by_group.values():
            member.neighbours = [lane for lane in self._lanes if lane is not member.lane]
        self._negotiation = Negotiation(self._lanes, units) if negotiate and by_group else None
        # by kind and unit: each lane with the events in the usual and in full precision
        self._events: dict[str, dict[int, list[tuple[LaneUnits, tuple[Event, Event]]]]] = {}
        for kind in KINDS:
            self._events[kind] = of_units = {}
            for unit in units:
                members = [by_group[id(group)] for group in unit.groups_for(kind)]
                of_units[id(unit)] = [(member, member.events(kind, unit)) for member in members]
        self._set_under_way()
        self.meetings, self.suspended, self._process = 0, "", os.getpid()

    # -- suspension ----------------------------------------------------------------------------------------------------

    def suspend(self, why: str) -> None:
        """Refuse passes and calls from now on, with ``why`` as the message; allow them again if it is empty."""
        self.suspended = why

    def check_available(self, what: Pass | None = None) -> None:
        """Raise RuntimeError if passes and calls are suspended; ranks in ``what``, the pass or call that so fails on
        this rank, would wait for this one, and get an error as well. Raise it in a forked process too."""
        if self._lanes and os.getpid() != self._process:
            raise RuntimeError("this process was forked from a rank, and is no rank: use the model in the rank alone")
        if self.suspended:
            if what is not None:
                for lane in self._lanes:
                    lane.fail(what, self.suspended)
            raise RuntimeError(self.suspended)

    def join(self) -> None:
        """Meet all ranks, unless the tree was used before, so that they hear of failures of each other."""
        for member in self._by_group.values():
            member.join()

    def _set_under_way(self, *passes: Pass) -> None:
        """Set the passes that are under way, innermost last, and the attributes that follow from them."""
        self._stack = passes
        self.current = passes[-1] if passes else None
        self.forward = next((what for what in passes if what.is_forward), None)
        self.in_backward = any(what.is_backward for what in passes)

    # -- events --------------------------------------------------------------------------------------------------------

    def about_to(self, kind: str, unit: Unit) -> Event:
        """Agree with the ranks of the unit's groups that ``unit`` is gathered or reduced next. Return the event.

        Outside of passes and calls this is a separate call.

        Raises:
            RuntimeError: a peer is about to issue a different event.
        """
        current, full_precision = self.current, unit.precision.is_full and unit.is_mixed
        if current is None:
            with self.calling(kind, f"{kind} of {unit.name}", often=True):
                return self.about_to(kind, unit)
        several = self._events[kind][id(unit)]
        for member, events in several:
            lane = member.lane
            if lane.under_way is not current:
                self._enter(member, current)
            event = events[full_precision]
            if self._negotiation is None:
                lane.agree(event)
            elif lane is self._lanes[0]:
                self._negotiation.agree(event)
        return several[0][1][full_precision] if several else self.event(kind, unit)

    def event(self, kind: str, unit: Unit, *, full_precision: bool = False) -> Event:
        """Return the event of a gather or reduction of ``unit``, over the first group."""
        several = self._events[kind][id(unit)]
        return several[0][1][full_precision] if several else Event(f"{kind} {unit.name}")

    def _enter(self, member: LaneUnits, what: Pass) -> None:
        begins = member.enter(what, negotiates=self._negotiation is not None)
        if begins and self._negotiation is not None and member.lane is self._lanes[0]:
            self._negotiation.begin(what)

    def announce(self, group: ProcessGroup) -> None:
        """Agree with the ranks of ``group`` that the call under way is about to communicate there by other means."""
        member = self._by_group.get(id(group))
        if member is not None and self.current is not None:
            self._enter(member, self.current)
        elif member is not None:
            member.join()

    # -- passes and calls ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def calling(self, call: str, words: str, *, often: bool = False) -> Iterator[None]:
        """Make ``call``, which all ranks have to make alike, inside the context.

        Inside a pass or another call it is a part of that.
        """
        if self._stack:
            yield
            return
        saves = "for one rank to save, use FullStateDictConfig(rank0_only=True)"
        what = Pass(words, call=call, often=often, advice=saves if call.startswith("state_dict(") else "")
        self.check_available(what)
        self.meet(what)
        self._set_under_way(what)
        try:
            yield
            self.end(wait=False)
        except BaseException:
            self.give_up()
            raise

    def begin(self, what: Pass, *, backward_follows: bool = False) -> None:
        """Begin a pass. Where ranks negotiate, a rank without a collective takes part in those of its peers.

        A failure between a forward and the reductions of its backward is reported to the replicas, and to the ranks
        nearby. The layouts are therefore compared before.
        """
        self.check_available(what)
        if backward_follows:
            for member in self._further:
                member.join()
        self._set_under_way(*self._stack, what)
        self._begin_negotiated()

    def _begin_negotiated(self) -> None:
        if self._negotiation is not None and self.current is not None and not self.current.call:
            for member in self._by_group.values():
                self._enter(member, self.current)

    def note_step(self, rates: Sequence[str]) -> None:
        """Note that an optimizer steps units of the tree with these learning rates, one per parameter group. Where
        ranks differ in this, the end of the next backward warns."""
        for member in self._by_group.values():
            member.note_step(rates)

    def end(self, *, wait: bool) -> None:
        """End the innermost pass or call; see :meth:`Lane.end`.

        Raises:
            RuntimeError: the pass differs from that of the peers; it has failed then.
        """
        what = self.current
        if what is None:
            return  # a backward inside a forward failed, and has ended both
        if self._negotiation is not None:
            if not what.call:
                self._negotiation.end()
            for member in self._by_group.values():
                if member.lane.under_way is what:
                    member.leave(compare=wait)
        else:
            for member in self._by_group.values():
                if member.lane.under_way is what:
                    member.end(what, wait=wait)
        self._set_under_way(*self._stack[:-1])
        self._begin_negotiated()

    # -- failures ------------------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """End the passes under way, which failed. If one had begun in a lane, all ranks of all lanes have to meet."""
        failed = self._stack
        self._set_under_way()
        for member in self._by_group.values():
            member.failed()
        if any(lane.under_way is what for lane in self._lanes for what in failed):
            for lane in self._lanes:
                lane.fail(failed[-1])

    def fail_abandoned_backward(self) -> None:
        """Fail the backward that is under way in the lanes. Called where no backward is running.

        It may be one of another tree, which was deleted while autograd's thread still held the failed graph.
        """
        for lane in self._lanes:
            if lane.under_way is not None and lane.under_way.is_backward:
                lane.fail(lane.under_way)

    @property
    def given_up(self) -> bool:
        """Whether the ranks have to meet: a pass has failed, or peers reported, in a call next to the training, a pass
        that this rank has not begun."""
        return any(lane.has_failed for lane in self._lanes)

    def meet(self, what: Pass) -> None:
        """After a failure, meet all ranks of all lanes before ``what``; see :meth:`Lane.recover`."""
        if any(lane.has_failed and lane.failure is None for lane in self._lanes):  # in a call next to the training
            for member in self._by_group.values():
                member.failed()
                member.lane.fail(Pass("call before"), first=False)
        if self.given_up:
            for lane in self._lanes:
                lane.recover(what)
            self.meetings += 1
