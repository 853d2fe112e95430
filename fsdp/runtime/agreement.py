"""Do the ranks agree on what they are about to do? An error in words instead of a hang, an abort or wrong numbers.

A collective whose ranks mean different things hangs, aborts the process or, if the sizes happen to be equal, mixes up
the data of two units. So each group of ranks agrees on two things.

*The layout*, once, before the first collective: sizes, dtypes, strategies and the number and order of units.

*The order*, at every collective. Each rank keeps a record of what followed on what came before in a pass (a forward
or a backward). While it follows the record, which all ranks have agreed on, nothing needs to be said. Where the record
is empty (the first step) the ranks compare notes by a small all-reduce before the collective. Where one rank is about
to leave the record, the others may not be, so it announces that through the group's store and goes on once all have
announced the same. A rank that waits long for a collective announces what it waits for, so that one which left the
record alone learns that it is alone, and both raise. At the end of a pass the ranks compare a hash of it; of a forward
nobody waits for the answer before the next pass ends. A pass begins in a group with the first collective there: where
a tree has several groups, as with experts, a group knows nothing of the passes that do not concern it.

With ``reduce_unused`` the order may differ between ranks, and is settled as they go; see :class:`Negotiation`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

from fsdp.comm.collectives import (
    PATIENCE,
    Agreeing,
    OutOfStep,
    agree,
    debug_detail,
    gather_numbers,
    group_store,
    group_timeout,
)
from fsdp.comm.streams import Streams

GATHER, REDUCE, END = "gather", "reduce", "end"
MAX_BUCKETS = 64  # of a unit
_KINDS = (GATHER, REDUCE)
_END = 2 * len(_KINDS)  # times the number of members: the event that a pass ends
_MASK = (1 << 62) - 1
HEARING = timedelta(seconds=1)  # how long to wait for what the other ranks have to say
_BACKWARD, _ELSEWHERE = -1, -2  # numbers of a backward, and of the forward of a unit that another group serves


class Member(Protocol):
    """A unit as the agreement knows it."""

    name: str
    place: int  # its number among the members of its agreement, equal on every rank; set by ``Agreements``

    @property
    def handles(self) -> Sequence[Any]: ...

    @property
    def in_full_precision(self) -> bool:
        """Whether its messages have the parameters' own dtypes, and usually have others."""

    def signature(self) -> str:
        """What its collectives depend on, in words."""

    def reduction(self) -> str:
        """What a backward that begins now would reduce of it, in words."""

    def take_part(self, kind: str, ticket: Ticket, *, full_precision: bool) -> None:
        """Other ranks gather or reduce the unit, and this one has no use for it: see that they can."""


class Ticket(NamedTuple):
    """One collective of a pass: where it comes, and what it is. For whoever waits for it."""

    agreement: weakref.ref[Agreement]  # which keeps its latest tickets
    position: int
    event: int  # the member and the kind, by number: names may differ between ranks
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else "end the pass"

    def slow(self) -> None:
        """The collective takes long: raises if the ranks turn out to be out of step."""
        agreement = self.agreement()
        if agreement is not None:
            agreement.look_around()

    def explain(self) -> str:
        """What the ranks did last, for the error of a collective that failed."""
        agreement = self.agreement()
        return agreement.last_words() if agreement is not None else ""


class Pass(NamedTuple):
    """A forward or backward of a tree."""

    words: str
    caller: Member | None = None  # the unit whose forward it is; None: a backward
    trains: bool = False  # whether it is a forward in training mode


class Agreement:
    """What the ranks of one group have agreed on; its members are the tree's units that communicate over the group."""

    REMEDY = (
        "All ranks have to run the same units in the same order, unless the model is wrapped with reduce_unused=True"
    )

    def __init__(self, group: Any, members: Sequence[Member], device: torch.device, streams: Streams) -> None:
        """``device`` is where the members compute, and ``streams`` are its."""
        self._ref = weakref.ref(self)
        self._group = group
        self._device = device
        self._streams = streams
        self._rank, self._size = group.rank(), group.size()
        self._members = [weakref.ref(member) for member in members]
        self._nonce: int | None = None  # of this tree's keys in the store; known once the layout is agreed on
        self._record: dict[int, int] = {}  # what came before -> what followed
        self._before = 0  # a hash of the pass so far
        self._pass = (_BACKWARD, "")  # the last one that began: its number, which all ranks agree on, and its words
        self._passes = 0
        self._position = 0
        self._under_way: Pass | None = None
        self._gave_up: tuple[int, int] | None = None  # the last pass failed: its number, and how far it had come
        self._trained = False  # a forward in training mode has begun
        self._detailed = False  # see ``_compare_handles``
        self._together = True  # no rank has begun anything since all of them were asked
        self._questions: deque[tuple[Ticket, Agreeing]] = deque()  # not yet answered
        self._recent: deque[Ticket] = deque(maxlen=16)  # of the pass under way

    # -- the layout ----------------------------------------------------------------------------------------------------

    def check_layout(self) -> None:
        """Compare the layouts, the first time.

        Raises:
            RuntimeError: on every rank, with the first difference.
        """
        if self._nonce is not None:
            return
        lines = [f"{member.name}: {member.signature()}" for member in self._present()]
        digest = _hash("\n".join(line.partition(": ")[2] for line in lines))
        votes = torch.tensor([digest, -digest, random.SystemRandom().getrandbits(62)], device="cpu")
        agree(votes, self._group, self._device, "agree on the layout")
        if votes[:2].tolist() != [digest, -digest]:
            raise OutOfStep(self._first_difference(self._all_texts("\n".join(lines))))
        self._nonce = int(votes[2])

    def _present(self) -> list[Member]:
        return [member for member in (reference() for reference in self._members) if member is not None]

    def _first_difference(self, texts: list[str]) -> str:
        units = [text.split("\n") if text else [] for text in texts]
        for position in range(max(map(len, units))):
            there = [lines[position] if position < len(lines) else "none: no such unit" for lines in units]
            for rank in range(1, self._size):
                if there[rank].partition(": ")[2] != there[0].partition(": ")[2]:
                    return (
                        f"the ranks have wrapped different models. The first difference is at unit {position} of the "
                        f"group: rank 0 has {there[0]}; rank {rank} has {there[rank]}. Build and wrap the same model "
                        "on every rank"
                    )
        raise AssertionError("the digests differ, and the texts do not")

    def _all_texts(self, own: str) -> list[str]:
        """Every rank's text; all ranks have to ask."""
        data = own.encode()
        length = torch.tensor([len(data)], device="cpu")
        agree(length, self._group, self._device, "agree on what differs")
        table = torch.zeros(self._size, int(length), dtype=torch.int64, device="cpu")
        table[self._rank, : len(data)] = torch.tensor(list(data), dtype=torch.int64, device="cpu")
        agree(table, self._group, self._device, "agree on what differs")
        return [bytes(row[row > 0].tolist()).decode() for row in table]

    # -- the order -----------------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> Pass | None:
        """The pass that has begun here and not ended."""
        return self._under_way

    def begin(self, what: Pass) -> None:
        """A pass begins."""
        self._pass, self._position = (self._number(what), what.words), 0
        before, self._before = self._before, _hash(str(self._pass[0]))
        self._passes += 1
        self._recent.clear()
        self._detailed = what.trains and not self._trained and debug_detail()
        self._trained = self._trained or what.trains
        event = (before * 1000003 + self._before) & _MASK
        if (
            self._gave_up is not None
        ):  # if that was this rank's fate alone, others are anywhere in the pass: send nothing yet
            self._announce(Ticket(self._ref, -1, event, "begin", f"the {what.words}"), event)
        else:
            self._ask_to_begin(event)
        self._under_way, self._gave_up = what, None

    def _number(self, what: Pass) -> int:
        """What the ranks have to agree on of a pass: names may differ between ranks, and so may the other groups."""
        if what.caller is None:
            return _BACKWARD
        return what.caller.place if any(member is what.caller for member in self._present()) else _ELSEWHERE

    def _ask_to_begin(self, event: int) -> None:
        """Ask whether all ranks begin this pass here.

        After a backward all ranks are together. After anything else some may be about to begin another pass, whose
        messages have other sizes, and gloo aborts the process when such messages meet. Where the group serves the CPU,
        the first collective waits for the answer.
        """
        together, self._together = self._together, False
        if not together:
            self._ask_later(event, f"agree to begin the {self._pass[1]}")

    def end(self, *, wait: bool) -> None:
        """The pass is over. With ``wait`` all ranks have to be through, and are asked whether theirs was the same.

        Raises:
            RuntimeError: they are not through, or this pass was not the same.
        """
        self._detailed = False
        self._next(END, "", _END * len(self._members))
        if wait:
            self._ask_later(self._before, f"agree on the {self._pass[1]}")
            self._look_at_answers()
            self._together = True
        self._under_way = None

    def _ask_later(self, value: int, label: str) -> None:
        ticket = Ticket(self._ref, self._position, -1, END, "")
        self._questions.append((ticket, Agreeing(value, self._group, self._device, label, self._streams)))

    def _look_at_answers(self) -> None:
        while self._questions and self._questions[0][1].answered():
            asked, question = self._questions.popleft()
            if question.differs(asked):
                raise self._out_of_step(self._what_differs(self._talk(HEARING)))

    def forget_pass(self) -> None:
        """The pass under way failed, if there is one."""
        self._questions.clear()
        if self._under_way is not None:
            self._gave_up, self._under_way = (self._passes, self._position), None

    def about_to(self, kind: str, member: Member) -> Ticket:
        """``member`` is about to gather or reduce. Returns once the ranks agree, as far as they have to be asked.

        Raises:
            RuntimeError: another rank is about to do something else.
        """
        ticket = self._next(kind, _words(member), _event(kind, member))
        if self._detailed and kind == GATHER:
            self._compare_handles(member)
        return ticket

    def _compare_handles(self, member: Member) -> None:
        """Compare what is gathered in the form in which torch's FSDP1 does at debug level DETAIL, in the first forward
        in training mode: how many handles, and which."""
        handles = [member.place * MAX_BUCKETS + bucket for bucket in range(len(member.handles))]
        for numbers in ([len(handles)], handles):
            by_rank = gather_numbers(numbers, self._group, self._device, f"agree to gather {member.name}")
            if any(other != by_rank[0] for other in by_rank):
                found = "; ".join(f"rank {rank} gathers handles {theirs}" for rank, theirs in enumerate(by_rank))
                raise self._out_of_step(
                    f"in the {self._pass[1]}, where rank {self._rank} gathers {member.name}, {found}"
                )

    def _next(self, kind: str, name: str, event: int) -> Ticket:
        self._look_at_answers()
        ticket = Ticket(self._ref, self._position, event, kind, name)
        recorded = self._record.get(self._before)
        self._recent.append(ticket)
        if recorded is None or self._detailed:
            self._ask_all(ticket, event)
        elif recorded != event:
            self._announce(ticket, event)
        self._record[self._before] = event
        self._before = (self._before * 1000003 + event + 1) & _MASK
        self._position += 1
        return ticket

    def _ask_all(self, ticket: Ticket, event: int) -> None:
        votes = torch.tensor([event, -event, 0], device="cpu")
        agree(votes, self._group, self._device, f"agree to {ticket}", ticket)
        if votes[:2].tolist() != [event, -event]:
            raise self._out_of_step(self._what_differs(self._talk(HEARING)))

    def _announce(self, ticket: Ticket, event: int) -> None:
        store = group_store(self._group)
        if store is None:
            return
        self.look_around()
        key = self._path(f"{self._passes}/{ticket.position}")
        if store.add(f"{key}/{event}", 1) == self._size:
            store.set(f"{key}/all", "agreed")
            return
        started = looked = time.monotonic()
        while not store.check([f"{key}/all"]):
            time.sleep(0.002)
            now = time.monotonic()
            if now - looked > PATIENCE.total_seconds():
                self.look_around()
                looked = now
            if now - started > group_timeout(self._group).total_seconds():
                raise RuntimeError(
                    f"rank {self._rank} left the recorded order, or a pass that failed, to {ticket}, and waited in "
                    f"vain for the other ranks to do the same. {self.last_words()}"
                )

    def look_around(self) -> None:
        """Tell the others how far this rank is; raises if another one has said that it did something else."""
        store = group_store(self._group)
        if store is not None and store.check([self._path("broken")]):
            broken = store.get(self._path("broken")).decode()
            raise OutOfStep(f"rank {self._rank} is at {self._own_words()}. {broken}")
        said = self._talk(timedelta(0))
        if self._first_mismatch(said) is not None:
            raise self._out_of_step(self._what_differs(said))

    # -- words ---------------------------------------------------------------------------------------------------------

    def _own(self) -> dict[str, Any]:
        """What this rank has to tell the others."""
        own: dict[str, Any] = {"number": self._passes, "pass": self._pass, "gave up": self._gave_up}
        own.update({str(ticket.position): (ticket.event, str(ticket)) for ticket in self._recent})
        return dict(json.loads(json.dumps(own)))  # in the form that it has when it comes from another rank

    def _talk(self, patience: timedelta) -> dict[int, dict[str, Any]]:
        """Tell the other ranks what this one did last in the pass, and hear what they have told within ``patience``.

        Goes through the store. By rank: the number of the pass, what it is, and its latest collectives by position.
        """
        own = self._own()
        said = {self._rank: own}
        store = group_store(self._group)
        if store is None:
            return said
        until = time.monotonic() + patience.total_seconds()
        with contextlib.suppress(RuntimeError):  # the store may have gone with the rank that served it
            store.set(self._path(f"said/{self._rank}"), json.dumps(own))
            while True:
                for rank in range(self._size):
                    if rank != self._rank and store.check([self._path(f"said/{rank}")]):
                        said[rank] = json.loads(store.get(self._path(f"said/{rank}")))
                if self._first_mismatch(said) is not None or time.monotonic() >= until:
                    break
                time.sleep(0.02)
        return said

    def _first_mismatch(self, said: dict[int, dict[str, Any]]) -> str | None:
        """What the ranks do differently, in words; None as far as one can see."""
        for rank, words in said.items():
            number, count = words["gave up"] or (-1, 0)  # before the first pass they count from 0
            if number == self._passes and self._recent and self._recent[-1].position >= count:
                return (
                    f"rank {rank} gave up the {self._pass[1]} at its collective {count}, and rank {self._rank} is "
                    f"about to {self._recent[-1]}"
                )
        here = {rank: words for rank, words in said.items() if words["number"] == self._passes}
        passes = {rank: words["pass"] for rank, words in here.items()}
        if len({number for number, _ in passes.values()}) > 1:
            return "; ".join(f"rank {rank} runs the {what}" for rank, (_, what) in sorted(passes.items()))
        for position in range(self._position + len(self._recent) + 1):
            there = {rank: words[str(position)] for rank, words in here.items() if str(position) in words}
            if len({event for event, _ in there.values()}) > 1:
                doing = "; ".join(f"rank {rank} is about to {what}" for rank, (_, what) in sorted(there.items()))
                return f"in the {self._pass[1]}, at its collective {position}, {doing}"
        return None

    def _what_differs(self, said: dict[int, dict[str, Any]]) -> str:
        """What the ranks do differently, or else what each does."""
        return self._first_mismatch(said) or "; ".join(
            f"rank {rank} is at {_last_of(words)}" for rank, words in sorted(said.items())
        )

    def _out_of_step(self, found: str) -> OutOfStep:
        message = f"Forward order differs across ranks, or what follows from it in backward: {found}. {self.REMEDY}"
        store = group_store(self._group)
        if store is not None:
            with contextlib.suppress(RuntimeError):
                store.set(self._path("broken"), message)
        return OutOfStep(message)

    def _own_words(self) -> str:
        return _last_of(self._own())

    def last_words(self) -> str:
        """What the ranks did last, as far as they have told."""
        words = []
        said = self._talk(HEARING)
        for rank in range(self._size):
            if rank in said:
                recent = " -> ".join(_recent_of(said[rank])[-4:])
                words.append(f"rank {rank}: {recent or 'nothing yet'} in the {said[rank]['pass'][1]}")
            else:
                words.append(f"rank {rank}: nothing heard")
        return f"Last collectives of {'; '.join(words)}"

    def _path(self, key: str) -> str:
        return f"fsdp/{self._nonce or 0:x}/{key}"


def _recent_of(words: dict[str, Any]) -> list[str]:
    """The latest collectives in what a rank said."""
    return [what[1] for position, what in words.items() if position.isdigit()]


def _last_of(words: dict[str, Any]) -> str:
    what = f"the {words['pass'][1]}" if words["pass"][1] else "what comes before the first pass"
    return f"{(_recent_of(words) or ['the begin'])[-1]} in {what}"


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") & _MASK


def _event(kind: str, member: Member) -> int:
    return (member.place * len(_KINDS) + _KINDS.index(kind)) * 2 + member.in_full_precision


def _words(member: Member) -> str:
    return f"{member.name} in full precision" if member.in_full_precision else member.name


class Negotiation(Agreement):
    """Ranks that need not run the same units agree, before every collective, on what it is.

    Each rank proposes what it needs next, gathering or reducing some unit or ending the pass. All of them then do what
    comes first among the proposals, whether they need it or not: one that does not lets the gathered values go, and
    adds to a reduction what it has of the gradient, if only zeros. Whoever proposed something else proposes it again.
    A pass is over when all ranks propose its end, so they may call units in any order and any number of times. The
    result does not depend on what comes first, as gathers may be repeated and sums taken in parts. What does depend on
    it is how much is done in vain, so things come first in the order in which they did in the last such pass; at first
    that is the order of the tree, backwards in a backward.
    """

    REMEDY = "Units may differ under reduce_unused=True; forwards and backwards have to be the same on every rank"

    def __init__(self, group: Any, members: Sequence[Member], device: torch.device, streams: Streams) -> None:
        super().__init__(group, members, device, streams)
        self._end = _END * len(members)
        self._turns: dict[int, dict[int, int]] = {}  # number of a pass -> event -> when it has its turn, if known
        self._done: list[int] = []  # in the pass under way
        self._understood = ""  # what the ranks have to agree on besides

    def begin(self, what: Pass) -> None:
        super().begin(what)
        self._done = []
        text = f"runs the {what.words}"
        if what.caller is None:
            plans = [f"{member.name}: {member.reduction()}" for member in self._present()]
            text = "\n".join([text, *plans])
        self._understood = text

    def _ask_to_begin(self, event: int) -> None:
        """Each proposal tells which pass it is for."""

    def about_to(self, kind: str, member: Member) -> Ticket:
        return self._propose(kind, _words(member), _event(kind, member))

    def end(self, *, wait: bool) -> None:
        """The pass is over for this rank: help the others with what they have still to do."""
        self._propose(END, "", self._end)
        number, last = self._pass[0], {event: position for position, event in enumerate(self._done)}
        order = sorted(last, key=lambda event: last[event])
        turns = sorted(self._turn(event) for event in order)
        self._turns.setdefault(number, {}).update(zip(order, turns))
        self._understood = f"has ended the {self._pass[1]}"
        self._under_way = None

    def _turn(self, event: int) -> int:
        """When ``event`` has its turn in this pass; what is lower comes first."""
        number = self._pass[0]
        place, rest = divmod(event, _END)
        first = len(self._members) - 1 - place if number == _BACKWARD else place
        return self._turns.get(number, {}).get(event, first * _END + rest)

    def _propose(self, kind: str, name: str, event: int) -> Ticket:
        while True:
            # What is proposed may differ between ranks, and so its ticket has no number to compare.
            ticket = Ticket(self._ref, self._position, 0, kind, name)
            self._recent.append(ticket)
            chosen = self._choose(event, ticket)
            self._position += 1
            if chosen == self._end:
                return ticket
            self._done.append(chosen)
            member, what = self._members[chosen // _END](), _KINDS[chosen % _END // 2]
            assert member is not None
            if self._detailed and what == GATHER:
                self._compare_handles(member)
            if chosen == event:
                return ticket
            ticket = Ticket(self._ref, ticket.position, 0, what, member.name)
            self._recent.append(ticket)
            member.take_part(what, ticket, full_precision=bool(chosen % 2))

    def _choose(self, event: int, ticket: Ticket) -> int:
        """The proposal that comes first. The event travels along, in case a failure left ranks with other turns."""
        turn = self._end if event == self._end else self._turn(event)
        understood = _hash(f"{self._passes} {self._pass[0]} {self._understood.partition(chr(10))[2]}")
        votes = torch.tensor([(self._end - turn) << 24 | event, understood, -understood], device="cpu")
        agree(votes, self._group, self._device, f"agree to {ticket}", ticket)
        if votes[1:].tolist() != [understood, -understood]:
            raise self._out_of_step(self._first_misunderstanding(self._all_texts(self._understood)))
        return int(votes[0]) & ((1 << 24) - 1)

    def _first_misunderstanding(self, texts: list[str]) -> str:
        for lines in zip(*(text.split("\n") for text in texts)):
            if len(set(lines)) > 1:
                return "; ".join(f"rank {rank} {line}" for rank, line in enumerate(lines))
        return "; ".join(f"rank {rank} {text.splitlines()[0]}" for rank, text in enumerate(texts))


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
        self._passes: list[Pass] = []  # under way: a backward may run inside a forward

    def about_to(self, kind: str, group: Any, member: Member) -> Ticket | None:
        agreement = self._by_group.get(id(group))
        if agreement is None:
            return None
        agreement.check_layout()
        if self._passes and agreement.under_way is not self._passes[-1]:
            agreement.begin(self._passes[-1])
        return agreement.about_to(kind, member)

    def begin(self, what: Pass) -> None:
        """A pass begins; in each group that will be with the first collective. A rank that has none in a pass has to
        take part in those of others, where ranks negotiate."""
        self._passes.append(what)
        self._begin_at_once()

    def _begin_at_once(self) -> None:
        if self._negotiate and self._passes:
            for agreement in self._by_group.values():
                agreement.check_layout()
                agreement.begin(self._passes[-1])

    def end(self, *, wait: bool) -> None:
        """The innermost pass is over, unless it failed; see :meth:`Agreement.end`."""
        if not self._passes:
            return  # a backward inside a forward failed, and has ended both
        what = self._passes.pop()
        for agreement in self._by_group.values():
            if agreement.under_way is what:
                agreement.end(wait=wait)
        self._begin_at_once()

    def forget_pass(self) -> None:
        self._passes.clear()
        for agreement in self._by_group.values():
            agreement.forget_pass()
