"""Do the ranks agree on what they are about to do? An error in words instead of a hang, an abort or wrong numbers.

A collective whose ranks mean different things hangs, aborts the process or, if the sizes happen to be equal, mixes up
the data of two units. So each group of ranks agrees on two things.

*The layout*, once, before the first collective: sizes, dtypes, strategies and the number and order of units.

*The order*, at every collective. Each rank keeps a record of what followed on what came before in a pass (a forward
or a backward). While it follows the record, which all ranks have agreed on, nothing has to be said. Where the record
is empty (the first step) the ranks compare notes by a small all-reduce before the collective. Where one rank is about
to leave the record, the others may not be, so it announces that through the group's store and goes on once all have
announced the same. A rank that waits long for a collective announces what it waits for, so that one which left the
record alone learns that it is alone, and both raise. At the end of a pass the ranks compare a hash of it; of a forward
nobody waits for the answer before the next pass ends. A pass begins in a group with the first collective there: where
a tree has several groups, as with experts, a group knows nothing of the passes that do not concern it. Nor do replicas
of each other's gathers: they have to agree on reductions. Who is told in one group tells the others, whom it lets down.

What else communicates (``state_dict()``, ``clip_grad_norm_()``, ...) is a call, which begins and ends like a pass. It
is announced before anything is sent, unless steps are made of it and it comes in its usual place.

*After a failure*, of all ranks or of some, nobody knows where the others are. So all ranks meet before anything else,
issue what some have issued and others have not (:mod:`fsdp.comm.ledger`), and forget all but the layout.

With ``reduce_unused`` the order may differ between ranks, and is settled as they go; see :class:`Negotiation`.
"""

from __future__ import annotations

import functools
import math
import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch

from fsdp.comm import beginning, calls, ledger, shared_memory, waiting
from fsdp.comm.board import Board
from fsdp.comm.calls import Calls, Waited, hint
from fsdp.comm.collectives import OutOfStep, Vote, debug_detail, gather_values
from fsdp.comm.consensus import all_gather_object, hash_of
from fsdp.comm.groups import group_timeout, rank_names
from fsdp.comm.streams import Streams
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.initial_values import InitialValues
from fsdp.runtime.diagnosis import (
    END_WORDS,
    Entry,
    Report,
    different_order,
    different_passes,
    first_difference,
    left_alone,
    passed_by,
)
from fsdp.runtime.habit import Habit, Pass
from fsdp.runtime.mistakes import warn_of_initial_values

GATHER, REDUCE, GATHER_NEARBY = "gather", "reduce", "gather from nearby"
MAX_BUCKETS = 64  # of a unit
KINDS = (GATHER, REDUCE, GATHER_NEARBY)
PER_MEMBER = 2 * len(KINDS)  # times the number of members: the event that a pass ends
_MASK = (1 << 62) - 1
_TRIES = 10  # times as long as a rank waits before it looks around, it waits for others to go on after a failure
HEARING = timedelta(seconds=1)  # how long to wait for what the other ranks have to say
# Numbers of a backward, of the forward of a unit that another group serves, and of calls, from here down.
BACKWARD, _ELSEWHERE, _CALLS = -1, -2, -3


class Member(Protocol):
    """A unit as the agreement knows it."""

    name: str
    handles: list[FlatParamHandle]
    initial: Sequence[InitialValues]  # of its buckets, as far as ranks may have different ones

    def set_place(self, place: int) -> None:
        """Take number ``place`` among the members of the first group, equal on every rank."""

    def groups_for(self, kind: str) -> list[Any]:
        """The groups over which it gathers or reduces, in this order; their ranks have to agree on that."""

    @property
    def in_full_precision(self) -> bool:
        """Whether its messages have the parameters' own dtypes, and usually have others."""

    def signature(self, group: Any) -> str:
        """What its collectives over ``group`` depend on, in words."""

    def reduction(self) -> str:
        """What a backward that begins now would reduce of it, in words: ranks that differ in that are out of step."""

    @property
    def lacks_gradients(self) -> bool:
        """Whether this rank has reduced it in the backward under way without gradients of some of its parameters."""

    def used(self) -> torch.Tensor:
        """By bucket and parameter, 1 where this rank has a gradient of it in what it reduces, and 0; on CPU."""

    def note_used(self, flags: list[int]) -> None:
        """Which ones any rank has gradients of."""

    def take_part(self, kind: str, *, full_precision: bool) -> None:
        """Other ranks gather or reduce the unit, and this one need not: let the values go; add to the sum what there
        is, so that a gradient which is not complete goes in two parts."""


class Agreement:
    """What the ranks of one group have agreed on; its members are the tree's units that communicate over the group.

    It watches what they wait for; see :mod:`fsdp.comm.waiting`.

    Attributes:
        under_way: the pass that has begun here and not ended.
        latest: of all agreements the one that came to a group last, weakly: its ``ref``.
    """

    REMEDY = (
        "All ranks have to run the same units in the same order, unless the model is wrapped with reduce_unused=True"
    )
    latest: ClassVar[Callable[[], Agreement | None]] = lambda: None

    def __init__(self, group: Any, members: Sequence[Member], device: torch.device, streams: Streams) -> None:
        """``device`` is where the members compute, and ``streams`` are its."""
        self._group = group
        self._device = device
        self._host_may_wait = streams.asynchronous_work
        self._members = [weakref.ref(member) for member in members]
        self._places = weakref.WeakKeyDictionary({member: place for place, member in enumerate(members)})
        self.ref = weakref.ref(self)
        self.others: list[weakref.ref[Agreement]] = []  # of the same tree
        self._board = Board(group, None)  # of this tree once the layout is agreed on; nobody is heard before
        self._layout_agreed = False
        self._calls: Calls | None = None  # from then on
        # what came before -> what followed, and the hash with it; the oldest first
        self._record: dict[int, tuple[int, int]] = {}
        self._longest_record = 64 * (len(members) + 1)
        self._habit = Habit()
        self._before = 0  # a hash of the pass so far
        self._begun = 0  # a hash of the pass and of the one before it
        self._pass, self._kind = Pass(""), BACKWARD  # the last that began, and its number, which all ranks agree on
        self._passes = 0
        self._rounds = 0  # of these those that were no backward, which belongs to the forward before it
        self._position = 0
        self.under_way: Pass | None = None
        self._announces: int | None = None  # the position that this rank waits for the others to announce
        self._announced: deque[tuple[int, int]] = deque(maxlen=4)  # the latest announcements of all: pass and position
        # a pass failed, and the ranks have to meet: its number, how far it had come, and words
        self.gave_up: tuple[int, int, str] | None = None
        self._recoveries = 0  # how often the ranks have met after that
        self._accused = False  # this rank has been told that the ranks are out of step
        self._trained = False  # a forward in training mode has begun
        self._detailed = False  # see ``_compare_handles``
        self._compared = False  # the values that the ranks began with; or a pass has failed, maybe before they were
        self._together = True  # no rank has begun anything since all of them were asked
        self._questions: deque[Vote] = deque()  # not yet answered
        self._issuers: dict[str, ledger.Issuer] = {}  # of questions, by what they are for
        self._recent: deque[tuple[int, int, int, str]] = deque(maxlen=32)  # what ``Entry`` has

    # -- the layout ----------------------------------------------------------------------------------------------------

    def check_layout(self) -> None:
        """Compare the layouts, the first time.

        Raises:
            RuntimeError: on every rank, with the first difference.
        """
        if self._layout_agreed:
            return
        beginning.begin(self._group, self._device, "the first pass or call of a model")
        lines = [f"{member.name}: {member.signature(self._group)}" for member in self._present()]
        digest = hash_of("\n".join(line.partition(": ")[2] for line in lines))
        name = Vote(
            digest, self._group, self._device, "agree on the layout", largest=random.SystemRandom().getrandbits(62)
        ).result()
        if name is None:
            raise self._told(first_difference(dict(zip(self._names, self._all_texts("\n".join(lines))))))
        self._layout_agreed = True
        self._board = Board(self._group, f"{name:x}")
        self._board.live()
        self._calls = Calls(self._group, f"{name:x}")

    def _compare_initial_values(self) -> None:
        """In the first pass, have rank 0 warn where the ranks gave parameters different values when they wrapped."""
        self._compared, key, digests = True, "initial values", dict[str, str | None]()
        for member in self._present():
            for initial in member.initial:
                digests.update({f"{name!r} of {member.name}": digest for name, digest in initial.digests().items()})
        look_around = self._looking(key, "comparing the values that the ranks began with")

        def look() -> None:
            look_around()
            reports = self._exchange_reports()
            alone = [
                f"rank {rank} failed in the {words.gave_up[2]}" for rank, words in reports.items() if words.gave_up
            ]
            if alone and not self._board.has_met(key):  # wherever it was: it has not come here
                here = f"{alone[0]}, and rank {self._rank} {reports[self._rank].where}"
                raise self._out_of_step(self._in_words(here, {}))

        if self._board.meet_alike(key, list(digests.values()), look):
            return
        self._board.post(f"{key}/each", list(digests.values()))
        self._board.meet(f"{key}/each", look)
        if self._group.rank() == 0:
            by_rank = dict(zip(self._names, self._board.posted(f"{key}/each").values()))
            warn_of_initial_values(list(digests), by_rank)

    def _present(self) -> list[Member]:
        return [member for member in (reference() for reference in self._members) if member is not None]

    def _all_texts(self, own: str) -> list[str]:
        """Every rank's text; all ranks have to ask."""
        return all_gather_object(own, self._group, "agree on what differs", self._device)

    # -- the order -----------------------------------------------------------------------------------------------------

    def come_to(self, what: Pass | None) -> None:
        """The group is about to be communicated over in ``what``, which begins here if it has not."""
        self.check_layout()
        waiting.watch(self._group, self)
        Agreement.latest = self.ref
        if what is not None and self.under_way is not what:
            self.begin(what)
            if not (self._compared or what.call):  # calls may be what loads others
                self._compare_initial_values()

    def begin(self, what: Pass) -> None:
        """A pass begins, or a call. What does not come as before is announced, and so are most calls: whoever is alone
        with it sends nothing, and the others, who wait for this rank, hear what it waits for."""
        number, expected = self._number(what), self._habit.expected
        self._habit.note(number, what)
        before, self._before = self._before, hash_of(str(number))
        self._begun = (before * 1000003 + self._before) & _MASK
        self._pass, self._kind, self._position = what, number, 0
        self._passes += 1
        self._rounds += not what.is_backward
        self.under_way = what
        if self._calls is not None:
            progress = [self._recoveries, self._passes]
            self._calls.began(progress, what.doing, on_this_thread=not what.is_backward)
        self._detailed = what.trains and not self._trained and debug_detail()
        self._trained = self._trained or what.trains
        together, self._together = self._together, bool(what.call)
        as_before = together and (expected == number if what.call else expected in (number, None))
        as_before = as_before and (what.often or not what.call)
        if not as_before and (together or what.call):
            self._announce(f"begin the {what.words}", -1, self._begun)
        elif not together:
            self._ask_to_begin()

    def _number(self, what: Pass) -> int:
        """What the ranks have to agree on of a pass: names may differ between ranks, and so may the other groups."""
        if what.call:
            return _CALLS - (hash_of(what.call) >> 2)
        if what.caller is None:
            return BACKWARD
        return self._places.get(what.caller, _ELSEWHERE)

    def _ask_to_begin(self) -> None:
        """Ask whether all ranks begin this pass here.

        After a backward or a call all ranks are together. After anything else some may be about to begin another pass,
        whose messages have other sizes, and gloo aborts the process when such messages meet. Where the group serves the
        CPU, the first collective waits for the answer.
        """
        self._ask_later(self._begun, f"agree to begin the {self._pass.words}")

    def end(self, *, wait: bool) -> None:
        """The pass is over. With ``wait`` all ranks have to be through, and are asked whether theirs was the same.

        Raises:
            RuntimeError: they are not through, or this pass was not the same.
        """
        self._detailed = False
        if not self._pass.call:  # what a call communicates is the same wherever it is called
            self._next(END_WORDS, PER_MEMBER * len(self._members))
        if wait:
            self._ask_later(self._before, f"agree on the {self._pass.words}")
            self._look_at_answers()
            self._together = True
        self.under_way = None

    def _ask_later(self, value: int, label: str) -> None:
        self._questions.append(Vote(value, self._group, self._device, label, issuers=self._issuers))

    def _look_at_answers(self) -> None:
        while self._questions and (self._host_may_wait or self._questions[0].is_completed()):
            self._check(self._questions.popleft())

    def _check(self, vote: Vote) -> None:
        """Raises what the ranks do differently, or else what each does, where they have not voted alike."""
        if vote.result() is None:
            reports = self._exchange_reports(HEARING)
            each = "; ".join(f"rank {rank} {words.where}" for rank, words in sorted(reports.items()))
            raise self._out_of_step(self._first_mismatch(reports) or self._in_words(each, reports))

    def give_up(self, what: Pass) -> None:
        """``what`` has failed here, which may not have come to this group. The others are told, and all ranks meet
        before anything else; see ``meet``."""
        self._questions.clear()
        ledger.hold(self._group)
        if self._calls is None:
            return
        self._calls.failed()
        if self.gave_up is None:
            if self.under_way is not None:
                self.gave_up = (self._passes, self._position, what.words)
            else:
                self.gave_up = (self._passes + 1, 0, what.words)
                self._rounds += not what.is_backward
        self.under_way = None
        if not self._accused:  # else the others are told why
            self._board.post("report", self._report())

    @property
    def diverged(self) -> bool:
        """Whether other ranks were in a pass or call of this tree when this rank was told of it in another call."""
        return self._calls is not None and self._calls.accused

    def give_up_unbegun(self) -> None:
        """Other ranks have failed in a pass or call that this one was told of, and has not begun."""
        self._accused = True
        self.give_up(Pass("call before"))

    def come(self) -> None:
        """The first half of ``meet``: in all groups before the second in any."""
        if self.gave_up is not None:
            self._board.post(f"issued/{self._recoveries}", self._issued())

    def _issued(self) -> list[Any]:
        return [self._passes, ledger.latest_issued(self._group), self._rounds]

    def meet(self) -> None:
        """Wait until all ranks have given up, wherever they were, and go on together as if nothing had been agreed on
        but the layout. What some have issued has then been issued by all. Nothing happens unless this one gave up.

        Raises:
            RuntimeError: some gave up in the forward or call after that in which this one did, which so fails here as
                well: who catches that has come as far as they have. Or they do not come, or cannot come together.
        """
        if self.gave_up is None:
            return
        waiting.watcher.check(self._group)
        key = f"come/{self._recoveries}"
        assert self._calls is not None
        meeting = f"comes to the meeting of all ranks after a failed {self.gave_up[2]}"
        self._calls.began([self._recoveries + 1, 0], meeting)
        try:
            self._meet(key, "", patience=_TRIES * waiting.PATIENCE.total_seconds())
        except BaseException:
            self._calls.failed()
            raise
        reports = {self._group.rank(): self._issued()} | self._board.posted(f"issued/{self._recoveries}")
        further = [rank for rank, (_, _, rounds) in reports.items() if rounds > self._rounds]
        if further and not self._accused:
            why = self._broken() or f"rank {self._names[further[0]]} failed after that"
            raise self._told(f"rank {self._rank} {self._report().where}. {why}", why)
        waiting.watch(self._group, self)
        shared_memory.renew(self._group)
        ledger.catch_up(self._group, self._device, {rank: issued for rank, (_, issued, _) in reports.items()})
        self._passes = max(passes for passes, _, _ in reports.values())
        self._rounds = max(rounds for _, _, rounds in reports.values())
        self._record.clear()
        self._recent.clear()
        self._habit, self._together, self._before = Habit(), True, 0
        self.gave_up, self._accused, self._compared = None, False, True
        self._calls.forgive()
        self._calls.met()
        self._recoveries += 1

    def _meet(self, key: str, why: str, sign: str = "count", patience: float = math.inf) -> None:
        """Wait until all ranks have come to ``key`` on the board, and look around meanwhile. Others that were told of a
        failure, and have not come after ``patience`` seconds, may have ended their training."""
        self._board.meet(key, self._looking(key, why, patience), sign)

    def _looking(self, key: str, why: str, patience: float = math.inf) -> Callable[[], None]:
        """What a rank does now and then that waits there."""
        waited = Waited()

        def look() -> None:
            self.slow()
            waited.tell_if_long(self._calls)
            met = functools.partial(self._board.has_met, key)
            self._raise_if_left(met=met)
            tired = waited.seconds > patience and not self._accused
            if tired and (broken := self._broken()) is not None and not met():
                raise self._told(f"rank {self._rank} {self._report().where}. {broken}", broken)
            if waited.seconds > group_timeout(self._group).total_seconds():
                raise RuntimeError(self.late(waited.seconds, why))

        return look

    def said_of(self, kind: str, member: Member) -> tuple[tuple[str, int], tuple[str, int]]:
        """What is said of such a collective of ``member``, and of one in full precision: words, and a number."""
        words, event = f"{kind} {member.name}", (self._places[member] * len(KINDS) + KINDS.index(kind)) * 2
        return (words, event), (f"{words} in full precision", event + 1)

    def about_to(self, kind: str, member: Member, words: str, event: int) -> None:
        """``member`` is about to gather or reduce. Returns once the ranks agree, as far as they have to be asked.

        ``words`` and ``event`` are what ``said_of`` says.

        Raises:
            RuntimeError: another rank is about to do something else.
        """
        known = self._record.get(self._before)
        if known is None or known[0] != event or self._questions or self._detailed:
            self._next(words, event)
            if self._detailed and kind == GATHER:
                self._compare_handles(member)
        else:  # as ``_next`` does it
            self._recent.append((self._passes, self._position, event, words))
            self._before = known[1]
            self._position += 1

    def _compare_handles(self, member: Member) -> None:
        """Compare what is gathered in the form in which torch's FSDP1 does at debug level DETAIL, in the first forward
        in training mode: how many handles, and which."""
        handles = [self._places[member] * MAX_BUCKETS + bucket for bucket in range(len(member.handles))]
        for numbers in ([len(handles)], handles):
            values = torch.tensor(numbers, device="cpu")
            by_rank = gather_values(values, self._group, self._device, f"agree to gather {member.name}").tolist()
            if any(other != by_rank[0] for other in by_rank):
                found = "; ".join(f"rank {rank} gathers handles {theirs}" for rank, theirs in zip(self._names, by_rank))
                found = f"in the {self._pass.words}, where rank {self._rank} gathers {member.name}, {found}"
                raise self._out_of_step(self._in_words(found, {}))

    def _next(self, words: str, event: int) -> None:
        if self._questions:
            self._look_at_answers()
        self._recent.append((self._passes, self._position, event, words))  # for the other ranks
        recorded = self._record.get(self._before)
        then = event, (self._before * 1000003 + event + 1) & _MASK
        if recorded is None or self._detailed:
            self._check(Vote(event, self._group, self._device, f"agree to {words}"))
        elif recorded != then:
            self._announce(words, self._position, event)
        if recorded != then:
            self._record[self._before] = then
            if len(self._record) > self._longest_record:  # what is forgotten is asked for again
                del self._record[next(iter(self._record))]
        self._before = then[1]
        self._position += 1

    def _announce(self, words: str, position: int, event: int) -> None:
        """Say on the board what comes, and wait until all ranks have said the same."""
        self._announces = position
        self._raise_if_broken()
        self._board.post("report", self._report())
        why = "" if position < 0 else f"to {words}, which did not come here before"
        try:
            self._meet(f"{self._passes}/{position}", why, sign=str(event))
        finally:
            self._announces = None
        self._announced.append((self._passes, position))

    def slow(self) -> None:
        """A wait takes long. Tell the others how far this rank is; raises if another one has said that it did something
        else, or is dead."""
        self._raise_if_broken()
        found = self._first_mismatch(self._exchange_reports())
        if found is not None:
            raise self._out_of_step(found)
        self._raise_if_left()
        if self._calls is not None and (found := self._calls.difference()) is not None:
            raise self._out_of_step(found)
        if dead := self._board.dead():
            ended = f"the process of {', '.join(f'rank {self._names[rank]}' for rank in dead)} has ended"
            raise self._told(
                f"{ended}, and rank {self._rank}, which {self._report().where}, waits for it. {self.explain()}. If it "
                f"has not failed, it has left out a call. {calls.REMEDY}",
                ended,
            )

    def _raise_if_left(self, met: Callable[[], bool] | None = None) -> None:
        """Raises where other ranks have gone on to another tree, while this one waits; see ``beginning.gone_on``."""
        found = beginning.gone_on(self._group, met=met)
        if found is not None:
            here = f"{found}, and rank {self._rank} {self._report().where}"
            raise self._out_of_step(f"The ranks do not make the same calls: {here}. {calls.REMEDY}")

    def _broken(self) -> str | None:
        """What some rank has found out since the ranks met."""
        return self._board.read(f"broken/{self._recoveries}")

    def _raise_if_broken(self) -> None:
        """Raises what another rank has found out, unless this one has given up."""
        broken = self._broken()
        if broken is not None and self.gave_up is None:
            raise self._told(f"rank {self._rank} {self._report().where}. {broken}", broken)

    # -- words ---------------------------------------------------------------------------------------------------------

    @functools.cached_property
    def _names(self) -> list[int]:
        """What its ranks are called: a tree may have several groups, and each its rank 0."""
        return rank_names(self._group)

    @property
    def _rank(self) -> int:
        return self._names[self._group.rank()]

    def _report(self) -> Report:
        """What this rank reports to the others."""
        what = self._kind, self._pass.words, bool(self._pass.call), self._begun
        recent = [Entry(*entry) for entry in self._recent]
        return Report(self._recoveries, self._passes, *what, self.gave_up, self._announces, recent)

    def _exchange_reports(self, patience: timedelta | None = None) -> dict[int, Report]:
        """Report to the other ranks what this one did last in the pass, and get what they report within ``patience``;
        None: what a few of them have reported, others at each call.

        By rank, only of those that have met as often as this one.
        """
        own = self._report()
        self._board.post("report", own)

        def latest(posted: dict[int, Any]) -> dict[int, Report]:
            several = [(rank, Report.of(words)) for rank, words in posted.items() if words[0] == self._recoveries]
            return {self._names[rank]: report for rank, report in several} | {self._rank: own}

        def tells(posted: dict[int, Any]) -> bool:
            return self._first_mismatch(latest(posted)) is not None

        if patience is None:
            return latest(self._board.posted_next("report"))
        return latest(self._board.wait_for_posts("report", patience, tells))

    def _first_mismatch(self, reports: dict[int, Report]) -> str | None:
        """What the ranks do differently, in words; None as far as one can see, or where this rank has given up."""
        own = reports[self._rank]
        if own.gave_up is not None:
            return None
        here = {rank: words for rank, words in reports.items() if words.number == own.number}
        found = [different_passes(here), different_order(here)]
        found += [left_alone(rank, own, self._rank, reports) for rank in reports if rank != self._rank]
        for rank in reports:
            if (reports[rank].number, reports[rank].announces) not in self._announced:
                found.append(passed_by(rank, self._rank, reports))
            if own.announces is not None and not self._board.has_met(f"{self._passes}/{own.announces}"):
                found.append(passed_by(self._rank, rank, reports))
        return next((self._in_words(words, reports) for words in found if words is not None), None)

    def _in_words(self, found: str, reports: dict[int, Report]) -> str:
        if any(words.is_call and words.number >= self._passes for words in reports.values()):
            return f"The ranks do not make the same calls: {found}. {calls.REMEDY}"
        alike = len({(words.kind, words.number) for words in reports.values()}) < 2
        more = "" if alike else ". If one rank evaluates alone, evaluate on all ranks. " + calls.UNEVEN
        return f"Forward order differs across ranks, or what follows from it in backward: {found}. {self.REMEDY}{more}"

    def _out_of_step(self, message: str) -> OutOfStep:
        """For this rank to raise; the others are told."""
        self._board.write(f"broken/{self._recoveries}", message)
        return self._told(message)

    def _told(self, message: str, why: str = "") -> OutOfStep:
        """For this rank to raise; those of the other groups of the tree, which it leaves alone, are told ``why``."""
        self._accused = True
        if self._calls is not None:
            self._calls.learn()
        for reference in self.others:
            other = reference()
            if other is not None and other._layout_agreed and not other._accused:
                other._accused = True
                other._board.write(f"broken/{other._recoveries}", why or message)
        return OutOfStep(message)

    def tell(self, seconds: float, label: str) -> None:
        if self._calls is not None:
            self._calls.tell(seconds, label)

    def late(self, seconds: float, label: str) -> str:
        waited = f"waited {seconds:.0f} s"
        words = f"rank {self._rank} {waited} ({label})" if self._calls is None else self._calls.in_words(waited, label)
        return f"{words}. {hint(self._pass.doing)}. {self.explain()}"

    def explain(self) -> str:
        """What the ranks did last, as far as they have told."""
        words: list[str] = []
        reports, dead = self._exchange_reports(HEARING), {self._names[rank] for rank in self._board.dead()}
        for rank in self._names:
            if rank in dead:
                words.append(f"rank {rank}: its process has ended")
            elif rank in reports:
                recent = " -> ".join(entry.words for entry in reports[rank].of_pass[-4:])
                words.append(f"rank {rank}: {recent or 'nothing yet'} in {reports[rank].doing}")
            else:
                words.append(f"rank {rank}: nothing heard")
        return f"Last collectives of {'; '.join(words)}"
