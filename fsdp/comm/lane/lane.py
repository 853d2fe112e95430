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

*After a failure* the progress of the other ranks is unknown. All ranks meet at the store before the next pass or call.

After each meeting, before a first use as after a failure, the lane has a new history, and its sequences a new
generation. If all ranks have issued the same, the carrier stays in use. Otherwise a new one, over the same ranks, takes
its place.

A lane is independent of units: it gets passes, events, labels and callables.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed import ProcessGroup

from fsdp import environment
from fsdp.comm.groups import is_registered, rank_names
from fsdp.comm.lane.history import History, Pass, hash_of
from fsdp.comm.lane.issuing import Event, Issuer, Question
from fsdp.comm.transport.channel import Channel
from fsdp.comm.transport.native import NEW_GROUP
from fsdp.comm.waiting import waits
from fsdp.comm.waiting.board import Board
from fsdp.comm.waiting.waits import Count, Wait, by_text, ranks_as_text
from fsdp.comm.waiting.work import OutOfStep, TimedOut

_T = TypeVar("_T")

END_WORDS = "end the pass"
PARAMETERS = ", with the parameters "  # in the text of a unit, before them; they are separated by "; "
ORDER_REMEDY = (
    "All ranks have to run the same units in the same order, unless the model is wrapped with reduce_unused=True"
)
_REPLIES = timedelta(seconds=5)  # how long to wait for the words of other ranks that have found the same difference


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

    generation: int
    position: int
    so_far: int
    number: int  # of collectives
    issued: int  # of these, by carriers
    sound: bool  # whether the carrier may stay in use
    failed: bool


class Lane(Issuer):
    """The order of collectives in one process group, as this rank sees it.

    Attributes:
        under_way: the pass that has begun here and not ended.
        failure: the words of the pass that failed since the ranks last met; None if none has.
        names: the global ranks of the group.
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self.under_way: Pass | None = None
        self.failure: str | None = None
        self._failed_first = False  # whether an error of this rank was the first that it knows of
        self.names = rank_names(group)
        self._rank = self.names[group.rank()]  # global
        self._meetings = waits.Sequence(group, "meetings", renews=False)  # at the store, in passes
        self._uses = waits.Sequence(group, waits.FIRST_USES)
        self._history = History()
        self._latest = _NO_PASS
        self._questions: deque[Question] = deque()  # in flight
        self._together = True  # no rank has begun a pass since all ranks were asked
        self._board = Board(group, "lane")
        self._settled: tuple[int, int] | None = None  # the count when all ranks were last known to have issued the same

    @staticmethod
    def of(group: ProcessGroup, device: torch.device | None = None) -> Lane:
        """Return the lane of ``group``. The first call needs the ``device`` on which the models compute."""
        lane = _lanes.get(group)
        if lane is None:
            lane = _lanes[group] = Lane(group, device if device is not None else torch.device("cpu"))
        elif device is not None and device.type != "cpu":
            lane.device = device  # the group was used for host tensors before
        return lane

    # -- the first use of a tree ---------------------------------------------------------------------------------------

    def join(self, doing: str, layout: Sequence[str], values: Sequence[Any] = ()) -> tuple[str, dict[int, Any]]:
        """Meet all ranks before the first use of a tree, and compare the layouts and the values.

        Args:
            doing: words that follow "is about to begin".
            layout: a line per unit: the name, and after ": " the facts that have to be equal.
            values: anything that JSON holds, which may differ.

        Returns:
            A name of the tree, and if the ``values`` differ, those of each rank.

        Raises:
            RuntimeError: on every rank, with the first difference; or the ranks cannot meet.
        """
        self.begin(doing)
        try:
            question = self.compare(layout, values)
            by_rank = {} if question.unanimous else self._of_all_ranks(values)
        except BaseException as error:
            if not isinstance(error, OutOfStep):  # which all ranks raise
                self._end_meeting(doing)
            self.fail(Pass(doing, call=doing))
            raise
        return str(self.collectives.generation), by_rank

    def compare(self, layout: Sequence[str], values: Sequence[Any] = ()) -> Question:
        """Compare the layouts, as in :meth:`join`; return the vote, which is unanimous if the values are equal.

        Raises:
            OutOfStep: on every rank, with the first difference between the layouts.
        """
        digest = hash_of("\n".join(line.partition(": ")[2] for line in layout))
        question = self.ask("agree on the layout", digest, largest=hash_of(str(values)))
        if question.result() is None:
            raise OutOfStep(first_difference(self._of_all_ranks("\n".join(layout))))
        return question

    def begin(self, doing: str) -> None:
        """Meet all ranks before a first use of the group; ``doing`` follows "is about to begin" in errors.

        Afterwards all ranks have issued the same collectives, on a new carrier if need be.

        Raises:
            OutOfStep: on every rank, if they are about to begin different things, or the environment variables differ.
            RuntimeError: a rank is late or has ended; or they cannot connect.
        """
        generation = self.collectives.generation
        try:
            self._meet(doing)
        except BaseException:
            if not self._uses.has_ended and self.collectives.generation == generation:
                self._renew(generation + 1)  # the others may have met, and wait for this rank there
            self._end_meeting(doing)
            raise

    def _end_meeting(self, doing: str) -> None:
        if not self._uses.has_ended:
            self._uses.end(f"rank {self._rank} failed in {doing}", self.collectives, self._meetings)

    def _meet(self, doing: str, where: str = "", check: Callable[[], None] = lambda: None) -> None:
        """Meet all ranks, and begin anew.

        Args:
            doing: the pass or call that follows; equal on all ranks.
            where: more words for it.
            check: called while this rank waits, and once all ranks have met; may raise.
        """
        state, words = self._state(), f"is about to begin {doing}{where}"
        self._uses.does(words)
        with self._meeting(self._uses, words) as (key, look):

            def look_and_check() -> None:
                look()
                check()

            by_place = self._board.compare(key, [doing, environment.alike(), state], look_and_check) or {}
            check()
            said = {self.names[place]: theirs for place, theirs in by_place.items()}
            if (difference := _difference(said)) is not None:  # on all ranks
                self._end_meeting(doing)
                raise difference
            several = {State(*theirs) for _, _, theirs in said.values()} or {state}
            alike = len(several) == 1
            if not alike or state.failed:  # else memory may still be read
                self.sharing.renew()
            if (alike and state.sound) or not any(each.issued or not each.sound for each in several):
                self.carrier.finish_messages(self)
            else:
                self.carrier = self.carrier.connect_next(look)
            self._begin_anew(several)

    def _begin_anew(self, states: Iterable[State]) -> None:
        """Begin the next generation: all ranks have met, in these ``states``."""
        self._history, self._latest = History(), _NO_PASS
        self._questions.clear()
        self.failure, self._failed_first, self._together = None, False, True
        self.issued = max(state.issued for state in states)
        self._renew(1 + max(state.generation for state in states))
        self.settle()

    def _renew(self, generation: int) -> None:
        for sequence in (self.collectives, self._meetings):
            sequence.renew(generation)

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
        self.under_way = what  # before it counts: an error from here on is one of this pass
        expected = self._history.begin(number, what)
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
            label = f"agree on the {self._latest.what.words}"
            self._questions.append(self.ask(label, self._history.so_far, largest=value, listener=listener))
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
            raise self._out_of_step(waits.first_different_event(events) or {self._rank: self._where})

    def _announce(self, number: int) -> None:
        """Announce the next event, or the begin of a pass, and wait until all ranks have announced the same."""
        sign = hash_of(f"{self._history.passes}/{self._history.position}/{number}")
        with self._meeting(self._meetings, self._where, sign) as (key, look):
            self._board.meet(key, look, sign=str(sign))

    # -- votes of ranks that run different units -----------------------------------------------------------------------

    def choose(self, label: str, understood: str, proposal: int) -> int | None:
        """Return the largest ``proposal`` of all ranks, and count the event; None if they have not ``understood`` the
        same text. ``label`` describes this rank's proposal."""
        history = self._history
        self.note(label)
        digest = hash_of(f"{history.passes} {self._latest.number} {understood}")
        chosen = self.ask(f"agree to {label}", digest, largest=proposal).result()
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

    def fail(self, what: Pass, why: str = "", *, first: bool = True) -> None:
        """Report that ``what``, which may not have reached this lane, failed on this rank, and ``why`` if others should
        know. All ranks have to meet before the next pass or call. ``first``: False if this rank raised what others
        have found."""
        self._questions.clear()
        self.carrier.hold_messages()
        if not self.collectives.generation:  # the ranks have not met yet
            return
        if self.failure is None:
            history, self._failed_first = self._history, first and not self.has_failed
            has_begun = self.under_way is not None and self.under_way is history.latest
            history.rounds += not (has_begun or what.is_backward)
            at = f" (at {history.label})" if has_begun and history.label else ""
            self.failure = f"{what.words}, because {why}" if why else what.words
            self.end_sequences(f"rank {self._rank} failed in the {self.failure}{at}")
            self._board.post("failed", [self.collectives.generation, history.rounds, what.kind])
        self.leave()

    @property
    def has_failed(self) -> bool:
        """Whether all ranks have to meet: a pass has failed, or the sequences have ended."""
        return self.failure is not None or self.collectives.has_ended or self._meetings.has_ended

    def diverged(self, error: OutOfStep) -> None:
        for lane in (self, *self._latest.neighbours):
            lane.end_sequences(str(error))

    def end_sequences(self, words: str) -> None:
        """Have the ranks that wait for more than this rank has begun raise ``words``."""
        self.collectives.end(words, self._meetings)

    def recover(self, what: Pass) -> None:
        """Meet all ranks after a failure, before ``what``, and go on as if only the layouts had been agreed on.

        Raises:
            OutOfStep: other ranks noticed the failure of this rank in ``what``, which so fails on all ranks.
            RuntimeError: the ranks do not come, or cannot connect.
        """
        if not self.has_failed:
            return
        coming = [self.collectives.generation, self._history.rounds + 1, what.kind]
        peers = [self.names.index(rank) for rank in self._uses.next_ranks()]

        def check() -> None:
            failed = self._board.posted("failed", peers) if self._failed_first else {}
            if noticed := [self.names[place] for place, there in failed.items() if there == coming]:
                raise OutOfStep(
                    f"rank {self._rank} failed in the {self.failure}, and {ranks_as_text(noticed)} noticed that in the "
                    f"next pass or call ({what.words}), which fails here as well"
                )

        try:
            self._meet(waits.AFTER_FAILURE, f" in the {self.failure}" if self.failure else "", check)
        except BaseException:
            for lane in (self, *self._latest.neighbours):
                lane._failed_first = False  # this pass or call has failed for that
            raise

    def _state(self) -> State:
        history, collectives, carrier = self._history, self.collectives, self.carrier
        counts = history.position, history.so_far, collectives.number
        sound = not (carrier.closed or carrier.is_destroyed or self.in_doubt is carrier)
        return State(collectives.generation, *counts, self.issued, sound, self.has_failed)

    # -- waiting -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _meeting(self, sequence: waits.Sequence, words: str, sign: int = 0) -> Iterator[tuple[str, Callable[[], None]]]:
        """Begin a meeting at the store; yield the key of it, and the function to call during a long wait there.

        Args:
            words: for this rank, after "rank 0".
            sign: see :class:`~fsdp.comm.waiting.waits.Count`.
        """
        in_pass, before = sequence is self._meetings, sequence.count
        lanes = [self, *self._latest.neighbours] if in_pass else ()
        if sequence.rank is not None and not is_registered(self.group):  # without its store no meeting would wait
            raise RuntimeError(f"the process group was destroyed on rank {self._rank}: {NEW_GROUP}")

        def look() -> None:
            for lane in lanes:  # other ranks of the pass may wait for this one to read their memory
                lane.sharing.advance()
            wait.look(self.timeout)

        try:
            count = sequence.begin(sign)
            wait = self._wait(sequence, count, words)
            try:
                yield f"{sequence.name}/{count.generation}/{count.number}", look
            finally:
                wait.over()
        except BaseException:
            if not in_pass:
                sequence.leave(before)  # the next meeting of this rank is the same one
            raise

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
        with self._meeting(self._meetings, "is about to share memory") as (_, look):
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
        error = OutOfStep(waits.order_differs(words, self._latest.remedy))
        self.diverged(error)
        return error

    def failed(self, error: RuntimeError, number: int, label: str, *, on_host: bool, in_memory: bool) -> RuntimeError:
        """Return the error to raise where a collective failed or timed out; see ``Watch`` in ``work.py``."""
        closed = "" if in_memory else self.carrier.note_error(error, self.timeout)
        wait = self.waiting(number, label, self.timeout if isinstance(error, TimedOut) else 0.0)
        if isinstance(error, TimedOut):
            return RuntimeError(f"{wait.late('waited')}{closed}")
        words = f" {wait.report('waits')}" if on_host else ""
        return RuntimeError(f"{label}: the collective failed or timed out: {error}.{words}{closed}")


def _difference(said: Mapping[int, Sequence[Any]]) -> OutOfStep | None:
    """Return the error for ranks that are about to begin different things, or whose environment variables differ.

    ``said``: by rank these words, the variables, and other values.
    """
    if len({doing for doing, *_ in said.values()}) > 1:
        each = "; ".join(f"rank {rank} is about to begin {doing}" for rank, (doing, *_) in said.items())
        return OutOfStep(f"The ranks do not make the same calls: {each}. All of them have to do the same")
    variables = {rank: theirs for rank, (_, theirs, *_) in said.items()}
    for name in next(iter(variables.values()), {}):
        by_value = by_text({rank: repr(theirs.get(name)) for rank, theirs in variables.items()})
        if len(by_value) > 1:
            different = " and ".join(f"{value} on {ranks_as_text(at)}" for value, at in by_value.items())
            return OutOfStep(f"the environment variable {name} is {different}: set it alike on all ranks")
    return None


def _differing(one: str, other: str) -> tuple[str, str]:
    """Return what differs between the lines of two units: the facts, or the first parameter."""
    (here, _, own), (there, _, theirs) = one.partition(PARAMETERS), other.partition(PARAMETERS)
    if here.partition(": ")[2] != there.partition(": ")[2]:
        return here, there
    pairs = itertools.zip_longest(own.split("; "), theirs.split("; "), fillvalue="no more parameters")
    mine, other_one = next(pair for pair in pairs if pair[0] != pair[1])
    return f"{here.partition(': ')[0]} with {mine}", f"{there.partition(': ')[0]} with {other_one}"


def first_difference(texts: Mapping[int, str]) -> str:
    """Describe the first difference between the models that the ranks have wrapped.

    Args:
        texts: by rank a line per unit: the name, after ": " facts that have to be equal, and then the parameters.
    """
    units = {rank: text.split("\n") if text else [] for rank, text in texts.items()}
    for position in range(max(map(len, units.values()))):
        there = {rank: [*lines, *["none: no such unit"] * position][position] for rank, lines in units.items()}
        first = next(iter(there))
        for rank, line in there.items():
            if line.partition(": ")[2] != there[first].partition(": ")[2]:
                here, theirs = _differing(there[first], line)
                return (
                    f"the ranks have wrapped different models. The first difference is at unit {position} of the "
                    f"group: rank {first} has {here}; rank {rank} has {theirs}. Build and wrap the same model on every "
                    "rank"
                )
    return "the ranks have wrapped different models, and some did not say which"


_lanes: weakref.WeakKeyDictionary[ProcessGroup, Lane] = weakref.WeakKeyDictionary()
