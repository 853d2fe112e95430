"""Ranks that need not run the same units."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fsdp.comm.collectives import Vote, agree
from fsdp.comm.consensus import hash_of
from fsdp.comm.streams import Streams
from fsdp.runtime.agreement import (
    BACKWARD,
    GATHER,
    KINDS,
    PER_MEMBER,
    Agreement,
    Member,
)
from fsdp.runtime.diagnosis import END_WORDS
from fsdp.runtime.habit import Pass


class Negotiation(Agreement):
    """Ranks that need not run the same units agree, before every collective, on what it is.

    Each rank proposes what it needs next, gathering or reducing some unit or ending the pass. All of them then do what
    comes first among the proposals, whether they need it or not: one that does not lets the gathered values go, and
    adds to a reduction what it has of the gradient, if only zeros. Whoever proposed something else proposes it again.
    A pass is over when all ranks propose its end, so they may call units in any order and any number of times. The
    result does not depend on what comes first, as gathers may be repeated and sums taken in parts. What does depend on
    it is how much is done in vain, so things come first in the order in which they did in the last such pass; at first
    that is the order of the tree, backwards in a backward.

    A backward has two ends: if any rank proposes the second one, which says that it has no gradient of a parameter in a
    unit that it used, they tell each other which ones they have. What none has gets no gradient.

    Where the units are replicated as well, the ranks of a shard group and then those of a replica group choose, from
    what the former have chosen: so what comes first is the same on all ranks, and all gather what one needs.
    """

    REMEDY = "Units may differ under reduce_unused=True; forwards and backwards have to be the same on every rank"

    def __init__(self, group: Any, members: Sequence[Member], device: torch.device, streams: Streams) -> None:
        super().__init__(group, members, device, streams)
        self._end = PER_MEMBER * len(members)
        self._turns: dict[int, dict[int, int]] = {}  # number of a pass -> event -> when it has its turn, if known
        self._done: list[int] = []  # in the pass under way
        self._understood = ""  # what the ranks have to agree on besides
        self._replicas: Negotiation | None = None
        self._follows = False  # it proposes nothing of its own

    def lead(self, replicas: Negotiation) -> None:
        """From now on choose together with the ranks of ``replicas``, in each pass."""
        self._replicas, replicas._follows = replicas, True

    def begin(self, what: Pass) -> None:
        super().begin(what)
        self._done = []
        text = f"runs the {what.words}"
        if what.caller is None:
            plans = [f"{member.name}: {member.reduction()}" for member in self._present()]
            text = "\n".join([text, *plans])
        self._understood = text

    def _ask_to_begin(self) -> None:
        """Each proposal tells which pass it is for."""

    def about_to(self, kind: str, member: Member, words: str, event: int) -> None:
        if not self._follows:
            self._propose(words, event)

    def end(self, *, wait: bool) -> None:
        """The pass is over for this rank: help the others with what they have still to do."""
        if self._pass.call or self._follows:  # all ranks do the same in a call
            self.under_way = None
            return
        lacking = self._pass.is_backward and any(member.lacks_gradients for member in self._present())
        if self._propose(END_WORDS, self._end + lacking) > self._end:
            self._agree_on_used()
        number, last = self._kind, {event: position for position, event in enumerate(self._done)}
        order = sorted(last, key=lambda event: last[event])
        turns = sorted(self._turn(event) for event in order)
        self._turns.setdefault(number, {}).update(zip(order, turns))
        self._understood = f"has ended the {self._pass.words}"
        self.under_way = None

    def _turn(self, event: int) -> int:
        """When ``event`` has its turn in this pass; what is lower comes first."""
        number = self._kind
        place, rest = divmod(event, PER_MEMBER)
        first = len(self._members) - 1 - place if number == BACKWARD else place
        return self._turns.get(number, {}).get(event, first * PER_MEMBER + rest)

    def _agree_on_used(self) -> None:
        members = self._present()
        flags = [member.used() for member in members]
        used = torch.cat(flags)
        for agreement in (self, self._replicas):
            if agreement is not None:
                agree(used, agreement._group, self._device, "agree on the parameters that are used")
        for member, theirs in zip(members, used.split([len(each) for each in flags])):
            member.note_used(theirs.tolist())

    def _note(self, words: str) -> None:
        """For the other ranks: what this one is about to do here. What is proposed may differ between ranks, so there
        is no number to compare."""
        self._recent.append((self._passes, self._position, 0, words))

    def _propose(self, words: str, event: int) -> int:
        """Returns what was done last: ``event``, or the end."""
        while True:
            self._note(words)
            chosen = self._choose(words, event)
            if chosen >= self._end:
                return chosen
            self._done.append(chosen)
            member, what = self._members[chosen // PER_MEMBER](), KINDS[chosen % PER_MEMBER // 2]
            assert member is not None
            if self._detailed and what == GATHER:
                self._compare_handles(member)
            if chosen != event:
                self._note(f"{what} {member.name}")
            self._position += 1
            if chosen == event:
                return chosen
            member.take_part(what, full_precision=bool(chosen % 2))

    def _choose(self, words: str, event: int) -> int:
        """The proposal that comes first. The event travels along, in case a failure left ranks with other turns."""
        turn = self._end if event >= self._end else self._turn(event)
        chosen = self._largest(words, (self._end - turn) << 24 | event)
        if self._replicas is not None and not self._pass.call:
            self._replicas._note(words)
            chosen = self._replicas._largest(words, chosen)
            self._replicas._position += 1
        return chosen & ((1 << 24) - 1)

    def _largest(self, words: str, proposal: int) -> int:
        """That of all ranks of the group."""
        understood = hash_of(f"{self._passes} {self._kind} {self._understood.partition(chr(10))[2]}")
        chosen = Vote(understood, self._group, self._device, f"agree to {words}", largest=proposal).result()
        if chosen is None:
            found = self._first_misunderstanding(self._all_texts(self._understood))
            raise self._out_of_step(self._in_words(found, {self._rank: self._report()}))
        return chosen

    def _first_misunderstanding(self, texts: list[str]) -> str:
        for lines in zip(*(text.split("\n") for text in texts)):
            if len(set(lines)) > 1:
                return "; ".join(f"rank {rank} {line}" for rank, line in zip(self._names, lines))
        return "; ".join(f"rank {rank} {text.splitlines()[0]}" for rank, text in zip(self._names, texts))
