"""Which forwards, backwards and calls of one tree are under way, and what its groups' ranks agree on in them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fsdp.comm.streams import Streams
from fsdp.runtime.agreement import GATHER_NEARBY, KINDS, REDUCE, Agreement, Member
from fsdp.runtime.habit import Pass
from fsdp.runtime.negotiation import Negotiation


class Passes:
    """The passes of one tree that are under way, innermost last, and its agreements, one per group of several ranks.
    Units that are sharded and replicated have two: over the second one the ranks agree on reductions.

    A backward may run inside a forward. A pass begins in a group with the first collective there.

    Attributes:
        current: the innermost.
        forward: the forward that is under way, also if a backward runs inside.
        in_backward: whether a backward is under way.
        meetings: of all ranks, after failures: whatever the ranks have each done before does not count.
    """

    def __init__(self, members: Iterable[Member], device: torch.device, streams: Streams, *, negotiate: bool) -> None:
        """``members`` are the units, in the order of the tree. With ``negotiate`` ranks may run different ones of them,
        and all have the same groups."""
        members = list(members)
        by_group: dict[int, tuple[Any, list[Member]]] = {}
        further: dict[int, None] = {}
        for member in members:
            for position, group in enumerate([*member.groups_for(REDUCE), *member.groups_for(GATHER_NEARBY)]):
                units = by_group.setdefault(id(group), (group, []))[1]
                if position == 0:
                    member.set_place(len(units))
                else:
                    further[id(group)] = None
                units.append(member)
        kind = Negotiation if negotiate else Agreement
        self._negotiate = negotiate
        self._by_group = {key: kind(group, units, device, streams) for key, (group, units) in by_group.items()}
        several = list(self._by_group.values())
        if len(several) > 1 and isinstance(several[0], Negotiation) and isinstance(several[1], Negotiation):
            several[0].lead(several[1])
        self._agreements = {
            kind: {
                id(member): [
                    (agreement, agreement.said_of(kind, member))
                    for agreement in (self._by_group[id(group)] for group in member.groups_for(kind))
                ]
                for member in members
            }
            for kind in KINDS
        }
        self._further = [self._by_group[key] for key in further]
        for agreement in self._by_group.values():
            agreement.others = [weakref.ref(other) for other in self._by_group.values() if other is not agreement]
        self._now_under_way()
        self.meetings = 0

    # -- which pass is this? -------------------------------------------------------------------------------------------

    def _now_under_way(self, *passes: Pass) -> None:
        """These are from here on, innermost last. Who asks which pass this is, at every gradient, finds the answer."""
        self._stack = passes
        self.current = passes[-1] if passes else None
        self.forward = next((what for what in passes if what.caller is not None), None)
        self.in_backward = any(what.is_backward for what in passes)

    # -- what begins and ends ------------------------------------------------------------------------------------------

    def about_to(self, kind: str, member: Member) -> None:
        """``member`` is about to gather or reduce: see that the ranks of its groups agree. Outside of passes and calls
        that is a call by itself."""
        current, full_precision = self.current, member.in_full_precision
        for agreement, said in self._agreements[kind][id(member)]:
            if current is None:
                with self.calling(kind, f"{kind} of {member.name}", often=True):
                    self.about_to(kind, member)
                return
            if agreement.under_way is not current or Agreement.latest is not agreement.ref:
                agreement.come_to(current)
            words, event = said[full_precision]
            agreement.about_to(kind, member, words, event)

    def announce(self, group: Any) -> None:
        """The call under way is about to communicate over ``group`` in a manner of its own: see that all ranks of it
        make this call."""
        agreement = self._by_group.get(id(group))
        if agreement is not None:
            agreement.come_to(self.current)

    @contextlib.contextmanager
    def calling(self, call: str, words: str, *, often: bool = False) -> Iterator[None]:
        """Inside, ``call``, which all ranks have to make alike. Inside a pass or another call it is a part of that."""
        if self._stack:
            yield
            return
        if self.diverged:
            self.give_up()
        self.meet()
        self._now_under_way(Pass(words, call=call, often=often))
        try:
            yield
            self.end(wait=False)
        except BaseException:
            self.give_up()
            raise

    def begin(self, what: Pass, *, backward_follows: bool = False) -> None:
        """A pass begins. A rank that has no collective in it has to take part in those of others, where ranks
        negotiate.

        What goes wrong between a forward and the reductions of its backward is told to the replicas, and to the ranks
        nearby, which therefore have to know each other before.
        """
        if backward_follows:
            for agreement in self._further:
                agreement.check_layout()
        self._now_under_way(*self._stack, what)
        self._begin_at_once()

    def _begin_at_once(self) -> None:
        if self._negotiate and self.current is not None and not self.current.call:
            for agreement in self._by_group.values():
                agreement.come_to(self.current)

    def end(self, *, wait: bool) -> None:
        """The innermost pass or call is over, unless it failed; see :meth:`Agreement.end`."""
        what = self.current
        if what is None:
            return  # a backward inside a forward failed, and has ended both
        for agreement in self._by_group.values():
            if agreement.under_way is what:
                agreement.come_to(what)
                agreement.end(wait=wait)
        self._now_under_way(*self._stack[:-1])  # where what comes before raises, the pass has failed
        self._begin_at_once()

    def give_up(self) -> None:
        """What is under way failed. If any of it had begun, all ranks meet before the next thing: who knows where the
        others are, also in groups to which it had not come."""
        failed = self._stack
        self._now_under_way()
        if self.diverged:
            for agreement in self._by_group.values():
                agreement.give_up_unbegun()
        elif any(agreement.under_way is what for agreement in self._by_group.values() for what in failed):
            for agreement in self._by_group.values():
                agreement.give_up(failed[-1])

    @property
    def diverged(self) -> bool:
        """Whether this rank was told, in a call beside the training, of a pass or call that it has not begun."""
        return any(agreement.diverged for agreement in self._by_group.values())

    @property
    def given_up(self) -> bool:
        """Whether the ranks have to meet."""
        return any(agreement.gave_up is not None for agreement in self._by_group.values())

    def meet(self) -> None:
        """After a failure, wait for all ranks; see :meth:`Agreement.meet`."""
        if not self.given_up:
            return
        for agreement in self._by_group.values():
            agreement.come()
        for agreement in self._by_group.values():
            agreement.meet()
        self.meetings += 1
