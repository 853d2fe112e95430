"""One lane per process group: every collective of the group is checked, numbered, started and waited for here.

The collectives of a group have one order, shared by all trees that use it. Two things have to be equal on all ranks.

*The layout* of each tree is compared once, when the ranks meet before the first use of the tree: sizes, dtypes,
strategies, and the order of units.

*The order* is checked at every event. While a rank follows its :class:`~fsdp.comm.history.History`, which all ranks
share, it costs no message. In the first step, where the history is empty, the ranks compare each event by a small
all-reduce. A rank that deviates from the history announces the event through the group's store, and continues once all
ranks have announced the same. At the end of a backward the ranks compare a hash of the pass, so that a wrong sum never
reaches the optimizer's step; the end of a forward costs no message. A pass begins in a lane with the first collective
there. Further calls that communicate (``state_dict()``, ``clip_grad_norm_()``, ...) begin and end like passes, and are
announced unless they belong to every step.

A rank that waits longer than :data:`fsdp.comm.threads.PATIENCE` posts a :class:`~fsdp.comm.diagnosis.Report` on the
group's store and reads those of its peers. The first rank that finds a difference writes it there, and all raise it.

*After a failure* the progress of the peers is unknown. All ranks meet at the store before the next pass or call,
and forget the history. If all ranks failed at the same event, the group stays in use. Otherwise some ranks have issued
collectives that its peers have not, and a new group over the same ranks carries the lane from there on.

A lane is independent of units: it gets passes, events, labels and callables.
"""

from __future__ import annotations

import functools
import math
import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from fsdp.comm import calls, threads
from fsdp.comm.arrivals import Arrivals
from fsdp.comm.board import Board
from fsdp.comm.calls import Calls, Waited, hint
from fsdp.comm.diagnosis import (
    END_WORDS,
    Report,
    different_order,
    different_passes,
    first_difference,
    left_alone,
    passed_by,
)
from fsdp.comm.groups import rank_names
from fsdp.comm.history import History, Pass, hash_of
from fsdp.comm.issuing import NEW_GROUP, Event, Issuer, Question
from fsdp.comm.work import OutOfStep, TimedOut

ORDER_REMEDY = (
    "All ranks have to run the same units in the same order, unless the model is wrapped with reduce_unused=True"
)
_RECOVERY = 10  # times PATIENCE: a rank waits so long for peers to recover from a failure that they have reported
_REPLIES = timedelta(seconds=1)  # how long to wait for the reports of the peers


class Failure(NamedTuple):
    """The pass that failed on this rank: its number, the events in it that were issued (-1: it had not begun, or none
    may have been), words, and ``Lane._progress``."""

    number: int
    position: int
    words: str
    progress: list[int]


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

    meetings: int
    passes: int
    rounds: int
    position: int
    so_far: int
    issued: int  # by the carrier
    since: int  # of these, since the latest meeting
    broken: bool  # whether the connections of the carrier are closed


class Lane(Issuer):
    """The order of collectives in one process group, as this rank sees it.

    Attributes:
        under_way: the pass that has begun here and not ended.
        failure: the failure after which all ranks have to meet; None if there is none.
        names: the global ranks of the group.
        arrivals: the meetings before the first use of a tree.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        super().__init__(group, device)
        self.under_way: Pass | None = None
        self.failure: Failure | None = None
        self.names = rank_names(group)
        self.arrivals = Arrivals(group, self.names)
        self._history = History()
        self._latest = _NO_PASS
        self._questions: deque[Question] = deque()  # in flight
        self._trees: weakref.WeakSet[Any] = weakref.WeakSet()  # the trees that have joined
        self._joins = False  # a tree has joined, and no pass has begun since
        self._together = True  # no rank has begun a pass since all ranks were asked
        self._announces: int | None = None  # the position that this rank waits for its peers to announce
        self._announced: deque[tuple[int, int]] = deque(maxlen=4)  # pass and position of the latest announcements
        self._accused = False  # this rank knows that the ranks are out of sync
        self._at_meeting = 0  # ``issued`` at the latest meeting
        self._board = Board(group, None)  # of the passes, once the ranks agree on a layout; silent before
        self._calls: Calls | None = None  # of the passes, from then on
        self._settled: list[int] = []  # progress when all ranks were last known to have issued the same

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

    def join(self, tree: Any, doing: str, layout: Sequence[str]) -> int:
        """Meet all ranks before the first use of a tree, and compare the layouts; return the number of the tree.

        Args:
            tree: held weakly.
            doing: words that follow "is about to begin".
            layout: a line per unit: the name, and after ": " the facts that have to be equal.

        Raises:
            RuntimeError: on every rank, with the first difference; or the ranks cannot meet.
        """
        self.begin(doing)
        number = self.arrivals.count
        digest = hash_of("\n".join(line.partition(": ")[2] for line in layout))
        name = self.ask("agree on the layout", digest, largest=random.SystemRandom().getrandbits(62)).result()
        if name is None:
            look = self.arrivals.looking("the comparison of models", self._progress())
            texts = self.arrivals.board.exchange(f"{number}/layout", "\n".join(layout), look)
            raise self._accuse(first_difference(dict(zip(self.names, texts.values()))))
        if self._calls is None:
            self._board = Board(self.group, f"{name:x}")  # a store may remember an earlier lane
            self._calls = Calls(self.group, f"{name:x}")
        self._history.make_room(len(layout))
        self._trees.add(tree)
        self._joins = True
        return number

    def begin(self, doing: str) -> None:
        """Meet all ranks before a first use of the group; ``doing`` follows "is about to begin" in errors.

        Afterwards all ranks have issued the same collectives, on a new carrier if need be.

        Raises:
            RuntimeError: see :meth:`Arrivals.meet`; or the ranks cannot connect.
        """
        if self._calls is not None and not self._trees:
            self._calls.failed()  # the trees whose passes were counted are gone
        state, progress = self._state(), self._progress()
        trusted = self.failure is None and not state.broken and not self.sharing.is_broken
        number = self.arrivals.count
        states = self.arrivals.meet(doing, progress, [trusted, progress, state], trusted=trusted)
        if states is not None:
            look = self.arrivals.looking(doing, progress, number)  # the rank still belongs to this meeting
            self._renew([State(*theirs) for _, _, theirs in states], look)
        self._settled = self._progress()

    def prepare(self, doing: str) -> None:
        """Call :meth:`begin` if this rank has issued anything since :meth:`settle`, or the carrier was destroyed."""
        if len(self.names) > 1 and (self._settled != self._progress() or self.carrier.is_destroyed):
            self.begin(doing)

    def settle(self) -> None:
        """Note that everything issued so far is over, on all ranks."""
        self._settled = self._progress()

    def _progress(self) -> list[int]:
        """Return counts that are equal on all ranks where no collective is left over."""
        return [self.issued, *self.sharing.posted()]

    # -- passes and the order of events --------------------------------------------------------------------------------

    def enter(self, what: Pass, number: int, *, neighbours: Sequence[Lane], remedy: str, asks: bool = True) -> None:
        """Begin a pass or a call here, with the first collective of it.

        An unexpected pass is announced, and so are most calls: a rank that is alone with one sends no data, and the
        ranks that wait for it find out.

        Args:
            number: identifies the pass on all ranks.
            neighbours: the remaining lanes of the tree.
            remedy: for errors.
            asks: whether the events of the pass have to be the same on all ranks.
        """
        self.under_way, self.due = what, True  # before it counts: an error from here on is one of this pass
        expected = self._history.begin(number, what)
        if self._joins:  # all ranks have just met
            self._joins, expected = False, None
        self._latest = Entered(what, number, remedy, neighbours)
        self.begin_pass()
        if self._calls is not None:
            progress = [self._history.meetings, self._history.passes]
            self._calls.began(progress, what.doing, on_this_thread=not what.is_backward)
        together, self._together = self._together, bool(what.call)
        as_before = together and (expected == number if what.call else expected in (number, None))
        as_before = as_before and (what.often or not what.call)
        if not as_before and (together or what.call):
            self._announce(f"begin the {what.words}", -1, self._history.begun)
        elif not together and asks:
            # After a backward or a call all ranks are together. After a forward some may be about to begin another
            # pass, with other message sizes, and gloo aborts the process when such messages meet.
            self._questions.append(self.ask(f"agree to begin the {what.words}", self._history.begun))

    def agree(self, event: Event) -> None:
        """Return once the ranks agree on ``event``, the next one; no message is sent if it follows the history.

        Raises:
            OutOfStep: a peer is about to issue a different event.
        """
        self.due = True
        if not self._questions and self._history.follow(event.label, event.number):
            return
        self._look_at_answers()
        if not self._history.has_follower:
            self._history.report(event.label, event.number)
            self._check(self.ask(f"agree to {event.label}", event.number))
            self.due = True
            self._history.note(event.number)
        elif not self._history.follow(event.label, event.number):
            self._history.report(event.label, event.number)
            self._announce(event.label, self._history.position, event.number)
            self._history.note(event.number)

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
        self.under_way = None
        self.end_pass()

    def leave(self) -> None:
        """End the pass that is under way without a check: the ranks have agreed on its end."""
        self.under_way = None
        self.end_pass()

    def _look_at_answers(self) -> None:
        """Check the votes in flight: all of them on CPU, else those whose result is there."""
        while self._questions and (self.device.type == "cpu" or self._questions[0].poll()):
            self._check(self._questions.popleft())

    def _check(self, question: Question) -> None:
        """Raise the difference between the ranks, or the progress of each, if they have not voted alike."""
        if question.result() is None:
            reports = self._exchange_reports(_REPLIES)
            each = "; ".join(f"rank {rank} {report.where}" for rank, report in sorted(reports.items()))
            raise self._out_of_step(self._first_mismatch(reports) or self._in_words(each, reports))

    def _announce(self, label: str, position: int, number: int) -> None:
        """Announce an event on the board, and wait until all ranks have announced the same."""
        self._announces = position
        self._raise_if_reported()
        self._board.post("report", self._report())
        why = "" if position < 0 else f"to {label}, which did not come here before"
        try:
            self._meet(f"{self._history.passes}/{position}", why, sign=str(number))
        finally:
            self._announces = None
        self._announced.append((self._history.passes, position))

    def compare_values(self, key: str, values: Sequence[Any], doing: str) -> list[Any] | None:
        """Compare ``values``, anything that JSON holds, through the store; None if alike, else those of each rank."""
        look_around = self._looking(key, doing)

        def look() -> None:
            look_around()
            reports = self._exchange_reports()
            alone = [f"rank {rank} failed in the {said.failure[2]}" for rank, said in reports.items() if said.failure]
            if alone and not self._board.has_met(key):  # it failed before it arrived here
                here = f"{alone[0]}, and rank {self._rank} {reports[self._rank].where}"
                raise self._out_of_step(self._in_words(here, {}))

        if self._board.meet_alike(key, list(values), look):
            return None
        self._board.post(f"{key}/each", list(values))
        self._board.meet(f"{key}/each", look)
        return list(self._board.posted(f"{key}/each").values())

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
        """Show the next event to the peers, where events may differ between ranks."""
        self._history.report(label, 0)

    def misunderstanding(self, text: str) -> OutOfStep:
        """Return the error where the ranks have understood different texts; all of them have to call.

        ``text`` has a line per fact; the first differing line is reported.
        """
        key = f"understood/{self._history.passes}/{self._history.position}"
        texts = list(self._board.exchange(key, text, self._looking(key, "")).values())
        found = "; ".join(f"rank {rank} {text.splitlines()[0]}" for rank, text in zip(self.names, texts))
        for lines in zip(*(text.split("\n") for text in texts)):
            if len(set(lines)) > 1:
                found = "; ".join(f"rank {rank} {line}" for rank, line in zip(self.names, lines))
                break
        return self._out_of_step(self._in_words(found, {self._rank: self._report()}))

    # -- failures ------------------------------------------------------------------------------------------------------

    def fail(self, what: Pass, why: str = "") -> None:
        """Report that ``what``, which may not have reached this lane, failed on this rank, and ``why`` if peers should
        know. All ranks have to meet before the next pass or call."""
        self._questions.clear()
        self.hold_messages()
        if self._calls is None:
            return
        self._calls.failed()
        if self.failure is None:
            history, words = self._history, f"{what.words}, because {why}" if why else what.words
            place = history.passes, history.position - self.due
            if self.under_way is None or self.under_way is not history.latest:
                place = history.passes + 1, -1
                history.rounds += not what.is_backward
            self.failure = Failure(*place, words, self._progress())
        self.under_way = None
        self.end_pass()
        if not self._accused:  # else the peers have the reason
            self._board.post("report", self._report())

    def fail_unbegun(self) -> None:
        """Report that the peers failed in a pass which they reported, and which this rank has not begun."""
        self._accused = True
        self.fail(Pass("call before"))

    @property
    def diverged(self) -> bool:
        """Whether peers reported, in a call beside the training, that they are in a pass of this lane."""
        return self._calls is not None and self._calls.accused

    def post_state(self) -> None:
        """Post the progress of this rank for the meeting: in all lanes of a tree before :meth:`recover` in any."""
        if self.failure is not None:
            self._board.post(f"states/{self._history.meetings}", self._state())

    def recover(self) -> None:
        """Meet all ranks after a failure, and go on as if only the layouts had been agreed on.

        Raises:
            RuntimeError: some ranks failed in a later pass than this rank, which so fails here as well; the next call
                has come as far as they have. Or they do not come, or cannot connect.
        """
        if self.failure is None:
            return
        assert self._calls is not None
        key = f"come/{self._history.meetings}"
        doing = f"comes to the meeting of all ranks after a failed {self.failure.words}"
        self._calls.began([self._history.meetings + 1, 0], doing)
        try:
            self._meet(key, "", patience=_RECOVERY * threads.PATIENCE.total_seconds())
            states = self._states()
            further = [rank for rank, state in states.items() if state.rounds > self._history.rounds]
            if further and not self._accused:
                why = self._reported() or f"rank {self.names[further[0]]} failed after that"
                raise self._accuse(f"rank {self._rank} {self._report().where}. {why}", why)
            self._renew(list(states.values()), self._looking(key, ""))
        except BaseException:
            self._calls.failed()
            raise

    def _state(self) -> State:
        history, since = self._history, self.issued - self._at_meeting
        broken = self.broken is not None or self.in_doubt or self.carrier.is_destroyed
        counts = history.meetings, history.passes, history.rounds, history.position, history.so_far
        return State(*counts, self.issued, since, broken)

    def _states(self) -> dict[int, State]:
        posted = self._board.posted(f"states/{self._history.meetings}")
        return {self.names.index(self._rank): self._state()} | {rank: State(*said) for rank, said in posted.items()}

    def _renew(self, states: Sequence[State], look: Callable[[], None]) -> None:
        """Start anew: all ranks have met, and these are their ``states``."""
        self.sharing.renew()
        alike = len({state._replace(meetings=0) for state in states}) == 1 and not states[0].broken
        if alike:
            self.finish_messages()
        elif any(state.since or state.broken for state in states):
            self.replace_carrier(look)
        self._history.forget(
            meetings=max(state.meetings for state in states),
            passes=max(state.passes for state in states),
            rounds=max(state.rounds for state in states),
        )
        self._latest = _NO_PASS  # the passes before the meeting may differ between ranks
        self.issued = self._at_meeting = max(state.issued for state in states)
        self._questions.clear()
        self._together = True
        self.failure, self._accused = None, False
        if self._calls is not None:
            self._calls.forgive()
            self._calls.met()

    # -- waiting -------------------------------------------------------------------------------------------------------

    def _meet(self, key: str, why: str, sign: str = "count", patience: float = math.inf) -> None:
        """Wait until all ranks have arrived at ``key`` on the board, and compare the ranks meanwhile."""
        self._board.meet(key, self._looking(key, why, patience), sign)

    def _looking(self, key: str, why: str, patience: float = math.inf) -> Callable[[], None]:
        """Return a function for a rank to call while it waits at ``key``.

        Peers that have seen a failure, and are missing after ``patience`` seconds, may have ended their training.
        """
        waited = Waited()

        def look() -> None:
            self.slow()
            waited.report_if_long(self._calls)
            met = functools.partial(self._board.has_met, key)
            self._raise_if_left(met)
            tired = waited.seconds > patience and not self._accused
            if tired and (reported := self._reported()) is not None and not met():
                raise self._accuse(f"rank {self._rank} {self._report().where}. {reported}", reported)
            if waited.seconds > self.timeout:
                raise RuntimeError(self.late(waited.seconds, why))

        return look

    def slow(self) -> None:
        """Report this rank's progress during a long wait.

        Raises:
            OutOfStep: a peer has reported a different position, or has ended.
        """
        if self._calls is None:
            self.arrivals.slow()
            return
        self._raise_if_reported()
        found = self._first_mismatch(self._exchange_reports())
        if found is not None:
            raise self._out_of_step(found)
        self._raise_if_left()
        if (found := self._calls.difference()) is not None:
            raise self._out_of_step(found)
        if dead := self.arrivals.ended():
            ended = f"the process of {calls.ranks_in_words(dead)} has ended"
            raise self._accuse(
                f"{ended}, and rank {self._rank}, which {self._report().where}, waits for it. {self._explain()}. If it "
                f"has not failed, it has left out a call. {calls.REMEDY}",
                ended,
            )

    def _raise_if_left(self, has_met: Callable[[], bool] | None = None) -> None:
        """Raise if peers wait for this rank at the first use of another tree."""
        found = self.arrivals.gone_on(self._progress(), has_met)
        if found is not None:
            here = f"{found}, and rank {self._rank} {self._report().where}"
            raise self._out_of_step(f"The ranks do not make the same calls: {here}. {calls.REMEDY}")

    def _reported(self) -> str | None:
        """Read the difference that some rank has found since the latest meeting."""
        found: str | None = self._board.read(f"broken/{self._history.meetings}")
        return found

    def _raise_if_reported(self) -> None:
        """Raise the difference that another rank has found, unless this rank failed itself."""
        reported = self._reported()
        if reported is not None and self.failure is None:
            raise self._accuse(f"rank {self._rank} {self._report().where}. {reported}", reported)

    # -- words ---------------------------------------------------------------------------------------------------------

    def _report(self) -> Report:
        what, number, *_ = self._latest
        history = self._history
        said = number, what.words, bool(what.call), history.begun, self._progress(), self.failure
        return Report(history.meetings, history.passes, *said, self._announces, history.entries)

    def _exchange_reports(self, patience: timedelta | None = None) -> dict[int, Report]:
        """Post this rank's report, and return the reports of ranks that have met as often, by rank.

        ``patience``: wait so long for all of them; None: read those of a few ranks, by turns.
        """
        own = self._report()
        self._board.post("report", own)

        def latest(posted: dict[int, Any]) -> dict[int, Report]:
            several = [
                (rank, Report.of(values)) for rank, values in posted.items() if values[0] == self._history.meetings
            ]
            return {self.names[rank]: report for rank, report in several} | {self._rank: own}

        def differ(posted: dict[int, Any]) -> bool:
            return self._first_mismatch(latest(posted)) is not None

        if patience is None:
            return latest(self._board.posted_next("report"))
        return latest(self._board.wait_for_posts("report", patience, differ))

    def _first_mismatch(self, reports: dict[int, Report]) -> str | None:
        """Describe the first difference between the ranks; None if none is visible, or this rank failed itself."""
        own = reports[self._rank]
        if own.failure is not None:
            return None
        here = {rank: report for rank, report in reports.items() if report.number == own.number}
        found = [different_passes(here), different_order(here)]
        found += [left_alone(rank, own, self._rank, reports) for rank in reports if rank != self._rank]
        for rank in reports:
            if (reports[rank].number, reports[rank].announces) not in self._announced:
                found.append(passed_by(rank, self._rank, reports))
            if own.announces is not None and not self._board.has_met(f"{self._history.passes}/{own.announces}"):
                found.append(passed_by(self._rank, rank, reports))
        return next((self._in_words(words, reports) for words in found if words is not None), None)

    def _in_words(self, found: str, reports: dict[int, Report]) -> str:
        if any(report.is_call and report.number >= self._history.passes for report in reports.values()):
            return f"The ranks do not make the same calls: {found}. {calls.REMEDY}"
        alike = len({(report.kind, report.number) for report in reports.values()}) < 2
        more = "" if alike else ". If one rank evaluates alone, evaluate on all ranks. " + calls.UNEVEN
        remedy = f"{self._latest.remedy}{more}"
        return f"Forward order differs across ranks, or what follows from it in backward: {found}. {remedy}"

    def _out_of_step(self, message: str) -> OutOfStep:
        """Write the difference for the peers, and return the error for this rank."""
        self._board.write(f"broken/{self._history.meetings}", message)
        return self._accuse(message)

    def _accuse(self, message: str, why: str = "") -> OutOfStep:
        """Return the error for this rank; the ranks of the tree's remaining lanes, which it leaves, get ``why``."""
        self._accused = True
        if self._calls is not None:
            self._calls.learn()
        for other in self._latest.neighbours:
            if other._calls is not None and not other._accused:
                other._accused = True
                other._board.write(f"broken/{other._history.meetings}", why or message)
        return OutOfStep(message)

    def report_wait(self, seconds: float, label: str) -> None:
        """Report a long wait on stderr."""
        known = self._calls if self._calls is not None else self.arrivals.calls
        known.report_wait(seconds, label)

    def late(self, seconds: float, label: str) -> str:
        """Return the message of a wait that exceeded the timeout."""
        known = self._calls if self._calls is not None else self.arrivals.calls
        words = known.in_words(f"waited {seconds:.0f} s", label)
        return f"{words}. {hint(self._latest.what.doing)}. {self._explain()}"

    def failed(self, error: RuntimeError, label: str, *, on_host: bool, in_memory: bool) -> RuntimeError:
        """Return the error to raise where a collective failed or timed out; see :class:`~fsdp.comm.work.Watch`."""
        closed = "" if in_memory else self._note_closed(error)
        if isinstance(error, TimedOut):
            return RuntimeError(f"{self.late(error.seconds, label)}{closed}")
        words = f" {self._explain()}" if on_host else ""
        return RuntimeError(f"{label}: the collective failed or timed out: {error}.{words}{closed}")

    def _explain(self) -> str:
        """Describe the last collectives of each rank, as far as the ranks have reported them."""
        if self._calls is None:
            return f"If a rank has failed, {NEW_GROUP}"
        words: list[str] = []
        reports, dead = self._exchange_reports(_REPLIES), self.arrivals.ended()
        for rank in self.names:
            if rank in dead:
                words.append(f"rank {rank}: its process has ended")
            elif rank in reports:
                recent = " -> ".join(entry.label for entry in reports[rank].of_pass[-4:])
                words.append(f"rank {rank}: {recent or 'nothing yet'} in {reports[rank].doing}")
            else:
                words.append(f"rank {rank}: nothing heard")
        return f"Last collectives of {'; '.join(words)}"


_lanes: weakref.WeakKeyDictionary[Any, Lane] = weakref.WeakKeyDictionary()
