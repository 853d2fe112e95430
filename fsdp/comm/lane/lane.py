"""One lane per process group: every collective of the group is checked, numbered, started and waited for here.

The collectives of a group have one order, shared by all trees that use it. Two things have to be equal on all ranks.

*The layout* of each tree is compared once, when the ranks meet before the first use of the tree: sizes, dtypes,
strategies, and the order of units.

*The order* is checked at every event. While a rank follows its :class:`~fsdp.comm.lane.history.History`, which all
ranks share, it costs no message. In the first step, where the history is empty, the ranks compare each event by a small
all-reduce. A rank that deviates from the history announces the event through the group's store, and continues once all
ranks have announced the same. At the end of a backward the ranks compare a hash of the pass, so that a wrong sum never
reaches the optimizer's step; the end of a forward costs no message. A pass begins in a lane with the first collective
there. Other calls that communicate (``state_dict()``, ``clip_grad_norm_()``, ...) begin and end like passes, and are
announced unless they belong to every step.

Every wait of a rank counts in one of two sequences: the collectives of the lane, and the meetings at the group's store
(:mod:`fsdp.comm.waiting.waits`). Ranks that wait for each other raise the difference, and so do ranks that wait for one
that has failed.

*After a failure* the progress of the other ranks is unknown. All ranks meet at the store before the next pass or call,
and forget the history. If all ranks failed at the same event, the group stays in use. Otherwise some ranks have issued
collectives that others have not, and a new group over the same ranks carries the lane from there on.

A lane is independent of units: it gets passes, events, labels and callables.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch

from fsdp import environment
from fsdp.comm import threads
from fsdp.comm.groups import rank_names
from fsdp.comm.lane.history import History, Pass, hash_of
from fsdp.comm.lane.issuing import NEW_GROUP, Event, Issuer, Question
from fsdp.comm.transport.channel import Channel
from fsdp.comm.waiting import waits
from fsdp.comm.waiting.board import Board
from fsdp.comm.waiting.waits import FIRST_USES, Count, Wait, first_different_event, hint, order_differs, ranks_as_text
from fsdp.comm.waiting.work import OutOfStep, TimedOut

_T = TypeVar("_T")

END_WORDS = "end the pass"
ORDER_REMEDY = (
    "All ranks have to run the same units in the same order, unless the model is wrapped with reduce_unused=True"
)
_RECOVERY = 10  # times PATIENCE: a rank waits so long for ranks that have seen a failure to meet after it
_REPLIES = timedelta(seconds=1)  # how long to wait for the words of other ranks that have found the same difference


class Entered(NamedTuple):
    """A pass or call that has begun in a lane: its number, the remedy for ranks that deviate, and the other lanes of
    the tree."""

    what: Pass
    number: int
    remedy: str
    neighbours: Sequence[Lane]


_NO_PASS = Entered(Pass(""), -1, ORDER_REMEDY, ())


class State(NamedTuple):
    """The progress of a rank at a meeting. Ranks with equal states have issued the same collectives."""

    passes: int
    rounds: int
    position: int
    so_far: int
    number: int  # of collectives
    issued: int  # of these, by the carrier
    since: int  # of these, since the ranks last began anew
    broken: bool  # whether the connections of the carrier are closed


class Lane(Issuer):
    """The order of collectives in one process group, as this rank sees it.

    Attributes:
        under_way: the pass that has begun here and not ended.
        failure: the words of the pass that failed, after which all ranks have to meet; None if they need not.
        names: the global ranks of the group.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        self.under_way: Pass | None = None
        self.failure: str | None = None
        self.names = rank_names(group)
        self._meetings = waits.Sequence(group, "meetings")  # at the store, in passes
        self._uses = waits.Sequence(group, FIRST_USES)
        self._recoveries = waits.Sequence(group, "recoveries")
        self._used = 0  # the number of meetings before first uses
        self._history = History()
        self._latest = _NO_PASS
        self._questions: deque[Question] = deque()  # in flight
        self._joins = False  # a tree has joined, and no pass has begun since
        self._together = True  # no rank has begun a pass since all ranks were asked
        self._found_alone = False  # this rank failed in a way of its own, not because the ranks differ
        self._at_renewal = 0  # ``issued`` when the ranks last began anew
        self._board = Board(group, "lane")
        self._settled: tuple[int, int] | None = None  # the count when all ranks were last known to have issued the same

    @property
    def _rank(self) -> int:
        """The global rank of this process."""
        return self.names[self.group.rank()]

    @staticmethod
    def of(group: Any, device: torch.device | None = None) -> Lane:
        """Return the lane of ``group``. The first call needs the ``device`` on which the models compute."""
        lane = _lanes.get(group)
        if lane is None:
            lane = _lanes[group] = Lane(group, device if device is not None else torch.device("cpu"))
        elif device is not None and device.type != "cpu":
            lane.device = device  # the group was used for host tensors before
        return lane

    # -- the first use of a tree ---------------------------------------------------------------------------------------

    def join(self, doing: str, layout: Sequence[str]) -> str:
        """Meet all ranks before the first use of a tree, and compare the layouts; return a name of the tree.

        Args:
            doing: words that follow "is about to begin".
            layout: a line per unit: the name, and after ": " the facts that have to be equal.

        Raises:
            RuntimeError: on every rank, with the first difference; or the ranks cannot meet.
        """
        self.begin(doing)
        try:
            digest = hash_of("\n".join(line.partition(": ")[2] for line in layout))
            if self.ask("agree on the layout", digest).result() is None:
                raise OutOfStep(first_difference(self._of_all_ranks("\n".join(layout))))
        except BaseException as error:
            if not isinstance(error, OutOfStep):  # which all ranks raise
                self._uses.end(f"rank {self._rank} failed in {doing}", self.collectives, self._meetings)
            self.fail(Pass(doing, call=doing))
            raise
        self._history.make_room(len(layout))
        self._joins = True
        return f"{self._uses.generation}.{self._uses.number}"

    def begin(self, doing: str) -> None:
        """Meet all ranks before a first use of the group; ``doing`` follows "is about to begin" in errors.

        Afterwards all ranks have issued the same collectives, on a new carrier if need be.

        Raises:
            OutOfStep: on every rank, if they are about to begin different things.
            RuntimeError: a rank is late or has ended, or the environment variables differ; or they cannot connect.
        """
        state, variables = self._state(), environment.alike()
        may_continue = self.failure is None and not self._has_ended and not state.broken and not self.sharing.is_broken
        said = [doing, may_continue, state, variables]
        words = f"is about to begin {doing}"
        self._uses.does(words)
        try:
            with self._meeting(self._uses, self._uses.next, words) as (key, look):
                alike = self._board.meet_alike(key, said, look)
                if not (alike and may_continue):
                    by_place = self._board.exchange(f"{key}/states", said, look)
                    _compare({self.names[place]: theirs for place, theirs in by_place.items()})
                    self._renew([State(*theirs) for _, _, theirs, _ in by_place.values()], look)
        except BaseException:
            if not self._uses.has_ended:  # ranks that have met wait for this one in the next collective or meeting
                self._uses.end(f"rank {self._rank} failed in {doing}", self.collectives, self._meetings)
            raise
        self._used += 1
        self.settle()

    def prepare(self, doing: str) -> None:
        """Call :meth:`begin` if this rank has issued anything since :meth:`settle`, or the carrier was destroyed."""
        if len(self.names) > 1 and (self._settled != self.collectives.count[:2] or self.carrier.is_destroyed):
            self.begin(doing)

    def settle(self) -> None:
        """Note that everything issued so far is over, on all ranks."""
        self._settled = self.collectives.count[:2]

    # -- passes and the order of events --------------------------------------------------------------------------------

    def enter(self, what: Pass, number: int, *, neighbours: Sequence[Lane], remedy: str, asks: bool = True) -> None:
        """Begin a pass or a call here, with the first collective of it.

        An unexpected pass is announced, and so are most calls: a rank that is alone with one sends no data, and the
        ranks that wait for it find out.

        Args:
            number: identifies the pass on all ranks.
            neighbours: the other lanes of the tree.
            remedy: for errors.
            asks: whether the events of the pass have to be the same on all ranks.
        """
        self.under_way, self.due = what, True  # before it counts: an error from here on is one of this pass
        expected = self._history.begin(number, what)
        if self._joins:  # all ranks have just met
            self._joins, expected = False, None
        self._latest = Entered(what, number, remedy, neighbours)
        self.begin_pass()
        remedy = "" if what.call else remedy
        doing = what.doing
        for sequence in (self.collectives, self._meetings):
            sequence.does(doing, remedy=remedy, advice=what.advice, on_this_thread=not what.is_backward)
        together, self._together = self._together, bool(what.call)
        if what.call:
            is_expected = together and what.often and expected == number
        else:
            is_expected = together and expected in (number, None)
        if is_expected:
            return
        if together or what.call:
            self._announce(self._history.begun)
        elif asks:
            # After a backward or a call all ranks are together. After a forward some may be about to begin another
            # pass, with other message sizes, and gloo aborts the process when such messages meet.
            self._questions.append(self.ask(f"agree to begin the {what.words}", self._history.begun))

    def agree(self, event: Event) -> None:
        """Return once the ranks agree on ``event``, the next one; no message is sent if it follows the history.

        Raises:
            OutOfStep: another rank is about to issue a different event.
        """
        self.due = True
        history = self._history
        if not self._questions and history.follow(event.label, event.number):
            return
        if not history.has_follower:
            history.about_to(event.label, event.number)
        self._look_at_answers()
        if history.follow(event.label, event.number):
            return
        if history.has_follower:
            history.about_to(event.label, event.number)
            self._announce(event.number)
        else:
            self._check(self.ask(f"agree to {event.label}", event.number))
            self.due = True
        history.note(event.number)

    def end(self, number: int | None, *, wait: bool, value: int, listener: Callable[[int], None]) -> None:
        """End the pass or call that is under way.

        Args:
            number: the event that ends the pass; None for a call, which communicates the same wherever it is called.
            wait: whether all ranks have to be at the end, and are asked whether theirs was the same pass.
            value, listener: with ``wait``, the ``listener`` is called with the largest ``value`` of any rank.

        Raises:
            OutOfStep: they are not, or it was not.
        """
        if number is not None:
            self.agree(Event(END_WORDS, number))
        if wait:
            question = self.ask(f"agree on the {self._latest.what.words}", self._history.so_far, largest=value)
            self._questions.append(question.telling(listener))
            self._look_at_answers()
            self._together = True
        self.leave()

    def leave(self) -> None:
        """End the pass that is under way without a check: the ranks have agreed on its end."""
        self.under_way = None
        self.end_pass()

    def _look_at_answers(self) -> None:
        """Check the votes in flight: all of them on CPU, else those whose result is there."""
        while self._questions and (self.device.type == "cpu" or self._questions[0].poll()):
            self._check(self._questions.popleft())

    def _check(self, question: Question) -> None:
        """Raise the difference between the ranks if they have not voted alike."""
        if question.result() is None:
            events = self._of_all_ranks(list(self._history.recent), question.place)
            raise self._out_of_step(first_different_event(events) or {self._rank: self._where})

    def _announce(self, number: int) -> None:
        """Announce the next event, or the begin of a pass, and wait until all ranks have announced the same."""
        sign = hash_of(f"{self._history.passes}/{self._history.position}/{number}")
        with self._meeting(self._meetings, self._meetings.number + 1, self._where, sign) as (key, look):
            self._board.meet(key, look, sign=str(sign))

    def compare_values(self, values: Sequence[Any], doing: str) -> list[Any] | None:
        """Compare ``values``, anything that JSON holds, through the store; None if alike, else those of each rank."""
        words = f"is {doing}"
        with self._meeting(self._meetings, self._meetings.number + 1, words, hash_of(words)) as (key, look):
            if self._board.meet_alike(key, list(values), look):
                return None
            return list(self._board.exchange(f"{key}/each", list(values), look).values())

    # -- votes of ranks that run different units -----------------------------------------------------------------------

    def choose(self, label: str, understood: str, proposal: int) -> int | None:
        """Return the largest ``proposal`` of all ranks, and count the event; None if they have not ``understood`` the
        same text. ``label`` describes this rank's proposal."""
        history = self._history
        self.note(label)
        digest = hash_of(f"{history.passes} {self._latest.number} {understood}")
        chosen = self.ask(f"agree to {label}", digest, largest=proposal).result()
        self.due = True
        history.position += chosen is not None
        return chosen

    def note(self, label: str) -> None:
        """Note the next event, for errors, where events may differ between ranks."""
        self._history.about_to(label, 0)

    def misunderstanding(self, text: str) -> OutOfStep:
        """Return the error where the ranks have understood different texts; all of them have to call.

        ``text`` has a line per fact; the first differing line is reported.
        """
        texts = {rank: text.split("\n") for rank, text in self._of_all_ranks(text).items()}
        lines = [several for several in zip(*texts.values()) if len(set(several)) > 1] or [*zip(*texts.values())]
        return self._out_of_step(dict(zip(texts, lines[0])))

    # -- failures ------------------------------------------------------------------------------------------------------

    def fail(self, what: Pass, why: str = "") -> None:
        """Report that ``what``, which may not have reached this lane, failed on this rank, and ``why`` if others should
        know. All ranks have to meet before the next pass or call."""
        self._questions.clear()
        self.hold_messages()
        if not self._used:
            return
        if self.failure is None:
            history, at = self._history, ""
            if self.under_way is None or self.under_way is not history.latest:
                history.rounds += not what.is_backward
            elif history.label:
                at = f" (at {history.label})"
            self.failure = f"{what.words}, because {why}" if why else what.words
            self._found_alone = not self._has_ended
            self.end_sequences(f"rank {self._rank} failed in the {self.failure}{at}")
        self.leave()

    @property
    def _has_ended(self) -> bool:
        """Whether this rank has raised, or caused, the end of the present sequences."""
        return self.collectives.has_ended or self._meetings.has_ended

    @property
    def diverged(self) -> bool:
        """Whether this rank has raised, in a call next to the training, that the ranks of the lane have diverged."""
        return self.failure is None and self._has_ended

    def end_sequences(self, words: str) -> None:
        """Have the ranks that wait for more than this rank has begun raise ``words``."""
        self.collectives.end(words, self._meetings)

    def recover(self) -> None:
        """Meet all ranks after a failure, and go on as if only the layouts had been agreed on.

        Raises:
            RuntimeError: some ranks failed in a later pass than this rank, which so fails here as well; the next call
                is in step with theirs. Or they do not come, or cannot connect.
        """
        if self.failure is None:
            return
        sequence, doing = self._recoveries, f"comes to the meeting of all ranks after a failed {self.failure}"
        sequence.does(doing)
        with self._meeting(sequence, self.collectives.generation + 1, doing) as (key, look):
            started, patience = time.monotonic(), _RECOVERY * threads.PATIENCE.total_seconds()

            def look_for_ended_training() -> None:
                look()
                is_late = self._found_alone and time.monotonic() - started > patience
                if is_late and (ranks := self.collectives.ended_on()):
                    raise self._failed_later(ranks)

            by_place = self._board.exchange(key, self._state(), look_for_ended_training)
            states = {self.names[place]: State(*said) for place, said in by_place.items()} or {
                self._rank: self._state()
            }
            later = [rank for rank, state in states.items() if state.rounds > self._history.rounds]
            if self._found_alone and later:
                raise self._failed_later(later)
            self._renew([*states.values()], look)

    def _failed_later(self, ranks: Sequence[int]) -> OutOfStep:
        """Return the error for a rank that failed one pass before ``ranks`` noticed."""
        self._found_alone = False
        return OutOfStep(
            f"rank {self._rank} failed in the {self.failure}, and {ranks_as_text(ranks)} raised an error for that in a "
            "later pass or call, which fails here as well"
        )

    def _state(self) -> State:
        history, since = self._history, self.issued - self._at_renewal
        broken = self.broken is not None or self.in_doubt or self.carrier.is_destroyed
        counts = history.passes, history.rounds, history.position, history.so_far, self.collectives.number
        return State(*counts, self.issued, since, broken)

    def _renew(self, states: Sequence[State], look: Callable[[], None]) -> None:
        """Begin anew: all ranks have met, and these are their ``states``."""
        self.sharing.renew()
        alike = len(set(states)) == 1 and not states[0].broken
        if alike:
            self.finish_messages()
        elif any(state.since or state.broken for state in states):
            self.replace_carrier(look)
        self._history.forget(passes=max(state.passes for state in states), rounds=max(state.rounds for state in states))
        self._latest = _NO_PASS  # the passes before the meeting may differ between ranks
        self.issued = self._at_renewal = max(state.issued for state in states)
        self._questions.clear()
        self._together = True
        self.failure = None
        generation = self.collectives.generation + 1
        for sequence in (self.collectives, self._meetings):
            sequence.renew(generation)

    # -- waiting -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _meeting(
        self, sequence: waits.Sequence, number: int, words: str, sign: int = 0
    ) -> Iterator[tuple[str, Callable[[], None]]]:
        """Begin a meeting at the store; yield the key of it, and the function to call during a long wait there.

        Args:
            number: of the meeting in ``sequence``; again the same after an interrupt.
            words: for this rank, after "rank 0".
            sign: see :class:`~fsdp.comm.waiting.waits.Count`.
        """
        in_pass = sequence is self._meetings  # where it has ended, this rank raises that, until all ranks have met
        generation = self.collectives.generation if in_pass else None
        wait = self._wait(sequence, sequence.begin(number, sign, generation), words)
        lanes = [self, *self._latest.neighbours] if in_pass else ()

        def look() -> None:
            for lane in lanes:  # other ranks of the pass may wait for this one to read their memory
                lane.sharing.advance()
            wait.look()
            if wait.seconds > self.timeout:
                raise RuntimeError(self._late(wait))

        try:
            yield f"{sequence.name}/{sequence.generation}/{number}", look
        finally:
            wait.over()

    def _wait(self, sequence: waits.Sequence, count: Count, words: str, label: str = "", waited: float = 0.0) -> Wait:
        neighbours = self._latest.neighbours

        def tell(reason: str) -> None:
            for other in neighbours:
                other.end_sequences(reason)

        events = self._history.recent if sequence in (self.collectives, self._meetings) else ()
        return Wait(sequence, count, words, label=label, events=events, waited=waited, tell=tell)

    def waiting(self, number: int, label: str, waited: float = 0.0) -> Wait:
        """Return the wait for the collective ``number``; see :class:`~fsdp.comm.waiting.work.Watch`."""
        latest = self.collectives.count
        # a work on an accelerator may be older than the generation, which counts anew
        count = latest._replace(number=min(number, latest.number))
        what = self._latest.what
        asks = label.startswith("agree ")
        words = self._where if asks or not what.words else f"is about to {label}, in the {what.words}"
        return self._wait(self.collectives, count, words, label, waited)

    def connect(self) -> Channel | None:
        """Return the memory that the ranks share; the first time all ranks have to call."""
        if not self.sharing.is_undecided:
            return self.sharing.connect()
        with self._meeting(self._meetings, self._meetings.number + 1, "is about to share memory") as (_, look):
            return self.sharing.connect(look)

    # -- words ---------------------------------------------------------------------------------------------------------

    @property
    def _where(self) -> str:
        """The position of this rank as text that follows "rank 0"."""
        what, label = self._latest.what, self._history.label
        if not label or not what.words:
            return what.doing if what.words else "comes before the first pass"
        return (
            f"is at the end of the {what.words}" if label == END_WORDS else f"is about to {label}, in the {what.words}"
        )

    def _of_all_ranks(self, value: _T, place: int | None = None) -> dict[int, _T]:
        """Return the ``value`` of each rank: all ranks have found, by the vote at ``place``, that they differ."""
        key = f"differ/{self.collectives.generation}/{place or self.collectives.number}"
        self._board.post(key, value)
        values = self._board.wait_for_posts(key, _REPLIES, lambda posts: len(posts) == len(self.names))
        return {self.names[place]: said for place, said in sorted(values.items())}

    def _out_of_step(self, words: Mapping[int, str]) -> OutOfStep:
        """Return the error where all ranks have found a difference; ranks of the other lanes of the tree get it too."""
        text = order_differs(words, self._latest.remedy)
        for lane in (self, *self._latest.neighbours):
            lane.end_sequences(text)
        return OutOfStep(text)

    def _late(self, wait: Wait) -> str:
        """Return the message of a wait that exceeded the timeout."""
        what = self._latest.what
        waited = wait.report(f"waited {wait.seconds:.0f} s")
        return f"{waited}. {hint(what.doing, what.advice)}. {self._explain()}"

    def failed(self, error: RuntimeError, number: int, label: str, *, on_host: bool, in_memory: bool) -> RuntimeError:
        """Return the error to raise where a collective failed or timed out; see ``Watch`` in ``work.py``."""
        closed = "" if in_memory else self._note_closed(error)
        if isinstance(error, TimedOut):
            return RuntimeError(f"{self._late(self.waiting(number, label, error.seconds))}{closed}")
        words = f" {self._explain()}" if on_host else ""
        return RuntimeError(f"{label}: the collective failed or timed out: {error}.{words}{closed}")

    def _explain(self) -> str:
        """Describe the position of each rank, if it was posted."""
        if not self._used:
            return f"If a rank has failed, {NEW_GROUP}"
        return f"The ranks have reported: {self.collectives.positions(self._where)}"


def _compare(said: Mapping[int, Sequence[Any]]) -> None:
    """Compare what the ranks ``said`` about a first use of the group.

    Raises:
        OutOfStep: they are about to begin different things.
        RuntimeError: the environment variables differ.
    """
    if len({doing for doing, *_ in said.values()}) > 1:
        each = "; ".join(f"rank {rank} is about to begin {doing}" for rank, (doing, *_) in said.items())
        raise OutOfStep(f"The ranks do not make the same calls: {each}. All of them have to do the same")
    for name in next(iter(said.values()))[3]:
        by_value: dict[Any, list[int]] = {}
        for rank, (*_, variables) in said.items():
            by_value.setdefault(variables.get(name), []).append(rank)
        if len(by_value) > 1:
            different = " and ".join(f"{value!r} on {ranks_as_text(at)}" for value, at in by_value.items())
            raise RuntimeError(f"the environment variable {name} is {different}: set it alike on all ranks")


def first_difference(texts: Mapping[int, str]) -> str:
    """Describe the first difference between the models that the ranks have wrapped.

    Args:
        texts: by rank a line per unit: the name, and after ": " the facts that have to be equal.
    """
    units = {rank: text.split("\n") if text else [] for rank, text in texts.items()}
    for position in range(max(map(len, units.values()))):
        there = {rank: [*lines, *["none: no such unit"] * position][position] for rank, lines in units.items()}
        first = next(iter(there))
        for rank, line in there.items():
            if line.partition(": ")[2] != there[first].partition(": ")[2]:
                return (
                    f"the ranks have wrapped different models. The first difference is at unit {position} of the "
                    f"group: rank {first} has {there[first]}; rank {rank} has {line}. Build and wrap the same model on "
                    "every rank"
                )
    return "the ranks have wrapped different models, and some did not say which"


_lanes: weakref.WeakKeyDictionary[Any, Lane] = weakref.WeakKeyDictionary()
