"""The agreements of one tree, and which passes and calls of it are under way."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from fsdp.comm.streams import Streams
from fsdp.runtime.agreement import Agreement, Member, Pass
from fsdp.runtime.negotiation import Negotiation


class Agreements:
    """The agreements of one tree, one per group of several ranks."""

    def __init__(
        self, members: Iterable[tuple[Any, Member]], device: torch.device, streams: Streams, *, negotiate: bool
    ) -> None:
        """``members`` are (group or None, unit), in the order of the tree. With ``negotiate`` ranks may run different
        ones of them, and there is one group."""
        by_group: dict[int, tuple[Any, list[Member]]] = {}
        for group, member in members:
            if group is not None:
                by_group.setdefault(id(group), (group, []))[1].append(member)
        for _, units in by_group.values():
            for place, unit in enumerate(units):
                unit.place = place
        kind = Negotiation if negotiate else Agreement
        self._negotiate = negotiate
        self._by_group = {key: kind(group, units, device, streams) for key, (group, units) in by_group.items()}
        self.meetings = 0  # after which whatever the ranks have each done before does not count
        self._passes: list[Pass] = []  # under way: a backward may run inside a forward

    def about_to(self, kind: str, group: Any, member: Member) -> None:
        """``member`` is about to communicate over ``group``; outside of passes and calls that is a call by itself."""
        agreement = self._by_group.get(id(group))
        if agreement is None:
            return
        if not self._passes:
            with self.calling(kind, f"{kind} of {member.name}", often=True):
                self.about_to(kind, group, member)
            return
        agreement.come_to(self._passes[-1])
        agreement.about_to(kind, member)

    def announce(self, group: Any) -> None:
        """The call under way is about to communicate over ``group`` in a manner of its own: see that all ranks of it
        make this call."""
        agreement = self._by_group.get(id(group))
        if agreement is not None:
            agreement.come_to(self._passes[-1] if self._passes else None)

    @contextlib.contextmanager
    def calling(self, call: str, words: str, *, often: bool = False) -> Iterator[None]:
        """Inside, ``call``, which all ranks have to make alike. In each group it begins with the first communication.
        Inside a pass or another call it is a part of that."""
        if self._passes:
            yield
            return
        self.meet()
        self._passes.append(Pass(words, call=call, often=often))
        try:
            yield
            self.end(wait=False)
        except BaseException:
            self.forget_pass()
            raise

    def begin(self, what: Pass) -> None:
        """A pass begins; in each group that will be with the first collective. A rank that has none in a pass has to
        take part in those of others, where ranks negotiate."""
        self._passes.append(what)
        self._begin_at_once()

    def _begin_at_once(self) -> None:
        if self._negotiate and self._passes and not self._passes[-1].call:
            for agreement in self._by_group.values():
                agreement.come_to(self._passes[-1])

    def end(self, *, wait: bool) -> None:
        """The innermost pass or call is over, unless it failed; see :meth:`Agreement.end`."""
        if not self._passes:
            return  # a backward inside a forward failed, and has ended both
        what = self._passes[-1]
        for agreement in self._by_group.values():
            if agreement.under_way is what:
                agreement.end(wait=wait)
        self._passes.pop()  # where that raises, the pass has failed
        self._begin_at_once()

    def forget_pass(self) -> None:
        """What is under way failed. If any of it had begun, all ranks meet before the next thing: who knows where the
        others are, also in groups to which it had not come."""
        failed, self._passes = self._passes, []
        if any(agreement.under_way is what for agreement in self._by_group.values() for what in failed):
            for agreement in self._by_group.values():
                agreement.give_up()

    @property
    def given_up(self) -> bool:
        """Whether the ranks have to meet."""
        return any(agreement.given_up for agreement in self._by_group.values())

    def meet(self) -> None:
        """After a failure, wait for all ranks; see :meth:`Agreement.meet`."""
        if not self.given_up:
            return
        for agreement in self._by_group.values():
            agreement.come()
        for agreement in self._by_group.values():
            agreement.meet()
        self.meetings += 1
