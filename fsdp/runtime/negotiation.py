"""Trees whose ranks may run different units: ``reduce_unused=True``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from fsdp.comm.collectives import agree
from fsdp.comm.lane.history import Pass
from fsdp.comm.lane.issuing import PER_UNIT, Event
from fsdp.comm.lane.lane import END_WORDS, Lane
from fsdp.runtime.unit import Unit

REMEDY = "Units may differ under reduce_unused=True; forwards and backwards have to be the same on every rank"
_NUMBER_BITS = 24  # of an event; the bits above order the proposals


class Negotiation:
    """Agrees with the peers, before every collective of a tree, on the unit that it is for.

    Each rank proposes its next event: it gathers or reduces a unit, or ends the pass. All ranks then do the event that
    is first among the proposals, and the ranks that proposed a different one propose it again. A rank that does not
    need the event drops the gathered values, or adds zeros (or the gradients that it has) to the sum. A pass ends when
    all ranks propose the end, so ranks may run units in any order and any number of times. The result does not depend
    on the order of events: gathers may be repeated, and sums taken in parts. To save collectives, events are ordered as
    in the last such pass, at first as in the tree, in reverse for a backward.

    A backward has two ends. If any rank proposes the second one, because it lacks a gradient of a unit that it used,
    the ranks exchange which parameters have gradients. A parameter without a gradient on any rank gets none.

    With replicas, the ranks of a shard group choose among themselves, then those of a replica group among the choices:
    all ranks do the same event, and gather a unit that one of them needs.
    """

    def __init__(self, lanes: Sequence[Lane], units: Sequence[Unit]) -> None:
        """``lanes``: of the shard group, and of the replica group if there is one. ``units``: in the tree's order."""
        self._lane, self._replicas = lanes[0], lanes[1] if len(lanes) > 1 else None
        self._units = [weakref.ref(unit) for unit in units]
        self._end = PER_UNIT * len(units)
        self._turns: dict[str, dict[int, int]] = {}  # by pass: event -> turn in the last such pass
        self._pass = Pass("")
        self._done: list[int] = []  # the events of the pass
        self._understood = ""  # facts that have to be equal on all ranks, besides the events

    def begin(self, what: Pass) -> None:
        """Begin a pass."""
        self._pass, self._done = what, []
        text = f"runs the {what.words}"
        if what.is_backward:
            plans = [f"{unit.name}: {unit.reduction()}" for unit in self._present()]
            text = "\n".join([text, *plans])
        self._understood = text

    def agree(self, event: Event) -> None:
        """Take part in the events of the peers, until all ranks do ``event``."""
        self._propose(event)

    def end(self) -> None:
        """Take part in the events of the peers until all of them end the pass."""
        lacking = self._pass.is_backward and any(map(_lacks_some, self._present()))
        if self._propose(Event(END_WORDS, self._end + lacking)) > self._end:
            self._agree_on_used()
        last = {event: position for position, event in enumerate(self._done)}
        order = sorted(last, key=lambda event: last[event])
        turns = sorted(self._turn(event) for event in order)
        self._turns.setdefault(self._pass.words, {}).update(zip(order, turns))
        self._understood = f"has ended the {self._pass.words}"

    def _present(self) -> list[Unit]:
        return [unit for unit in (reference() for reference in self._units) if unit is not None]

    def _turn(self, event: int) -> int:
        """Return the turn of ``event`` in this pass; the lowest is first."""
        unit, rest = divmod(event, PER_UNIT)
        first = len(self._units) - 1 - unit if self._pass.is_backward else unit
        return self._turns.get(self._pass.words, {}).get(event, first * PER_UNIT + rest)

    def _agree_on_used(self) -> None:
        def to_maximum(used: torch.Tensor) -> None:
            for lane in (self._lane, self._replicas):
                if lane is not None:
                    agree(used, lane.group, lane.device, "agree on the parameters that are used")

        agree_on_used(self._present(), to_maximum)

    def _propose(self, event: Event) -> int:
        """Take part until all ranks do ``event``, or end the pass; return the event that was done last."""
        while True:
            chosen = self._choose(event)
            if chosen >= self._end:
                return chosen
            self._done.append(chosen)
            if chosen == event.number:
                return chosen
            number, kind, full_precision = Event.parts_of(chosen)
            unit = self._units[number]()
            context = None if unit is None else unit.context
            assert unit is not None and context is not None  # the tree is alive
            self._lane.note(f"{kind} {unit.name}")
            context.take_part(unit, kind, full_precision=full_precision)

    def _choose(self, event: Event) -> int:
        """Return the first of the proposals. The event is part of the vote: the turns of ranks may differ."""
        turn = self._end if event.number >= self._end else self._turn(event.number)
        chosen = self._largest(self._lane, event.label, (self._end - turn) << _NUMBER_BITS | event.number)
        if self._replicas is not None and not self._pass.call:
            chosen = self._largest(self._replicas, event.label, chosen)
        return chosen & ((1 << _NUMBER_BITS) - 1)

    def _largest(self, lane: Lane, label: str, proposal: int) -> int:
        """Return the largest proposal of all ranks of ``lane``."""
        chosen = lane.choose(label, self._understood.partition("\n")[2], proposal)
        if chosen is None:
            raise lane.misunderstanding(self._understood)
        return chosen


def _lacks_some(unit: Unit) -> bool:
    """Return whether this rank reduces gradients of ``unit``, and some parameter has none."""
    return any(bucket.used for bucket in unit.gradients) and any(bucket.lacks for bucket in unit.gradients)


def agree_on_used(units: Sequence[Unit], to_maximum: Callable[[torch.Tensor], None]) -> None:
    """Let each rank note the leaves of ``units`` that any rank has a gradient of. ``to_maximum`` gives flags, of uint8
    on CPU, their maximum over the ranks."""
    buckets = [bucket for unit in units for bucket in unit.gradients]
    counts = [len(bucket.handle.leaves) for bucket in buckets]
    own = [index in bucket.used for bucket, count in zip(buckets, counts) for index in range(count)]
    flags = torch.tensor(own, dtype=torch.uint8, device="cpu")
    to_maximum(flags)
    for bucket, of_bucket in zip(buckets, flags.split(counts)):
        bucket.note_used(set(of_bucket.nonzero().flatten().tolist()))
