"""The waits of each rank, and the one rule by which ranks that have diverged are found.

The ranks of a group begin several kinds of things, each kind in one order: collectives, meetings at the store, calls
next to the training such as ``fsdp.checkpoint.save()``. A :class:`Sequence` counts one kind on one rank.

A rank that waits longer than :data:`fsdp.comm.threads.PATIENCE` posts, on a board of the default group, the count that
it waits for the other ranks to reach, and its own counts. It reads the posts of a few ranks.

*Ranks differ if each waits for a count that the other has not reached.* Among ranks of several groups this is a cycle
of waits. The first rank that finds one ends the sequences of the cycle: it writes the words of each rank into the
store, and every rank that waits past these counts raises them. A rank that fails ends its sequences in the same way, at
its own counts. After that the sequences go on under the next generation, once all ranks have met.

[Note: Old posts]
A post may be older than the present state of its rank, and does not mislead. Two ranks that run the same program on one
thread begin the same things in one order, so of two ranks one is ahead in every sequence. If each was ahead of the
other in one sequence, even at different moments, they have diverged. Sequences that different threads of a rank advance
are not compared.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Several
from typing import Any, NamedTuple

import torch.distributed as dist

from fsdp.comm import threads
from fsdp.comm.groups import default_group, is_registered, rank_names
from fsdp.comm.waiting.board import Board, machine, start_of
from fsdp.comm.waiting.work import OutOfStep

logger = logging.getLogger("fsdp")

NEXT = 8  # ranks whose posts one look compares
LONGEST = 6  # waits in a cycle: two ranks of one group, four of hybrid sharding
UNEVEN = "If a rank ran out of batches before the others, loop with `for batch in fsdp.join(model, loader)`"
AFTER_FAILURE = "the first pass or call after a failure"
FIRST_USES, BESIDE = "first uses", "beside"  # sequences; with the first uses count meetings after failures
_AFTER_DEATH = "If it failed, start again, and resume from the last checkpoint; else it has left out a call"
_FEWER_BATCHES = "Did a rank run out of batches? Then loop with `for batch in fsdp.join(model, loader)`"
REMEDY = f"Call it on every rank, in the same order: is it inside `if rank == 0`? {UNEVEN}"


class Count(NamedTuple):
    """The place of a rank in a sequence.

    Attributes:
        generation: the number of failures after which the sequence went on.
        number: the number of things that have begun since.
        sign: tells two things with one number apart; 0 if nothing does.
    """

    generation: int
    number: int
    sign: int = 0

    def reaches(self, other: Count) -> bool:
        return self[:2] > other[:2] or self == other


NOTHING, NEVER = Count(0, 0), Count(-1, 0)


class Sequence:
    """Things that the ranks of one group begin in one order, as this rank counts them.

    Attributes:
        name: the name in the group.
        key: the name among all sequences; equal on all ranks.
        ranks: the global ranks of the group.
        generation, number, sign: see :class:`Count`.
        doing: the latest thing, as text that follows "rank 0": "runs the backward".
        remedy: for errors, if all ranks in a cycle have one; else the general one.
        advice: see :class:`~fsdp.comm.lane.history.Pass`.
        thread: the thread that began the latest thing.
        rank: this rank; None if ``torch.distributed`` does not know the group.
    """

    def __init__(self, group: dist.ProcessGroup, name: str, *, step: int = 1, renews: bool = True) -> None:
        """
        Args:
            name: equal on all ranks, and unique among the sequences of the group.
            step: the count of one thing.
            renews: whether the first thing after the end of a generation begins the next one.
        """
        self.name, self.key = name, f"{getattr(group, 'group_name', '')}/{name}"
        self._step, self._renews = step, renews
        self.ranks = rank_names(group)
        self.generation = self.number = self.sign = 0
        self.doing = self.remedy = self.advice = ""
        self.thread: int | None = None
        self.rank = this_rank() if is_registered(group) else None
        if self.rank is not None:
            self.rank.sequences[self.key] = self

    @property
    def count(self) -> Count:
        """The count of this rank."""
        return Count(self.generation, self.number, self.sign)

    @property
    def has_ended(self) -> bool:
        """Whether this rank has raised, or caused, the end of the present generation."""
        return self.rank is not None and self.rank.end_of(self.key).generation >= self.generation

    @property
    def ended_here(self) -> bool:
        """Whether this rank has raised, or caused, an end of the present generation at its own count or later."""
        return self.has_ended and self.rank is not None and self.rank.end_of(self.key).number >= self.number

    def note_end(self) -> None:
        """Note that this rank has raised the end of the present generation, if it has ended: the ends of other
        sequences, for the same reason, are noted with it."""
        if self.rank is not None:
            self.rank.reason_of_end(self.key, Count(self.generation, self.number + 1))

    @property
    def reason(self) -> str:
        """Why the latest generation has ended that this rank knows of."""
        return "" if self.rank is None else self.rank.ends.get(self.key, (NEVER, ""))[1]

    def next_ranks(self, turn: int = 0) -> list[int]:
        """Return :data:`NEXT` other ranks, the next ones at each ``turn``: a look costs the same in any group."""
        size, own = len(self.ranks), 0 if self.rank is None else self.ranks.index(self.rank.number)
        places = [(turn * NEXT + number) % max(1, size - 1) for number in range(min(NEXT, size - 1))]
        return [self.ranks[(own + 1 + place) % size] for place in places]

    def does(self, doing: str, *, remedy: str = "", advice: str = "", on_this_thread: bool = True) -> None:
        """Describe what this rank does in this sequence from now on.

        ``on_this_thread``: False for a backward, which has threads of its own.
        """
        if self.rank is not None:
            self.rank.does(doing)
        self.doing, self.remedy, self.advice = doing, remedy, advice
        if on_this_thread:
            self.thread = threading.get_ident()

    def begin(self, sign: int = 0) -> Count:
        """Begin the next thing; return the count."""
        if self._renews and self.has_ended and self.rank is not None:
            self.renew(self.rank.end_of(self.key).generation + 1)
        self.number, self.sign = self.number + self._step, sign
        return self.count

    def leave(self, before: Count) -> None:
        """Return to the count ``before`` the latest thing, which this rank has left."""
        self.generation, self.number, self.sign = before

    def renew(self, generation: int) -> None:
        """Continue with ``generation``, in which nothing has begun."""
        self.generation, self.number, self.sign = generation, 0, 0

    def end(self, words: str, *others: Sequence) -> None:
        """End the present generation, and those of ``others``, after the counts of this rank.

        Ranks that wait for more raise ``words``, or the reason that this rank has raised.
        """
        if self.rank is not None:
            several = [self, *others]
            reason = next((each.reason for each in several if each.has_ended), words)
            self.rank.end({each.key: Count(each.generation, each.number + 1) for each in several}, reason)


class _Waiting(NamedTuple):
    """A wait of some rank, as it is posted."""

    awaited: Count
    ranges: list[list[int]]  # of the ranks of the sequence; see :func:`_ranges_of`
    words: str  # for the position, after "rank 0"
    doing: str  # for the pass or call, after "rank 0"
    remedy: str
    events: list[list[Any]]  # see :attr:`fsdp.comm.lane.history.History.recent`

    def lacks(self, rank: int, begun: Count) -> bool:
        """Return whether this wait needs ``rank``, which has ``begun`` so much."""
        return rank in self.ranks and not begun.reaches(self.awaited)

    @property
    def ranks(self) -> list[int]:
        return [rank for each in self.ranges for rank in range(*each)]


class _Post(NamedTuple):
    """One rank and its process, with its counts and its waits, as it posts them."""

    life: str  # tells the default groups apart that were made on one store
    process: list[Any]  # the machine, and the number and the start of the process there
    counts: Mapping[str, tuple[Count, int | None]]  # by sequence: the count, and the thread that advances it
    waits: Mapping[str, _Waiting]  # by sequence

    @staticmethod
    def of(said: Any) -> _Post:
        """Restore a post from JSON."""
        life, process, counts, waits = said
        return _Post(
            life,
            process,
            {key: (Count(*count), thread) for key, (count, thread) in counts.items()},
            {key: _Waiting(Count(*count), *rest) for key, (count, *rest) in waits.items()},
        )

    def begun(self, key: str) -> Count:
        return self.counts[key][0] if key in self.counts else NOTHING

    def same_thread(self, one: str, other: str) -> bool:
        """Return whether one thread of the rank may advance both sequences."""
        several = {self.counts[key][1] for key in (one, other) if key in self.counts}
        return None in several or len(several) < 2


class _Step(NamedTuple):
    """One wait in a cycle."""

    rank: int
    key: str
    waiting: _Waiting


class Wait:
    """A wait of this rank for the other ranks of a sequence to reach a count; compares the ranks while it lasts."""

    def __init__(
        self,
        sequence: Sequence,
        count: Count,
        words: str,
        *,
        label: str = "",
        events: Iterable[Several[Any]] = (),
        waited: float = 0.0,
        tell: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """
        Args:
            words: the position of this rank, as text that follows "rank 0".
            label: the position in the present pass or call.
            events: the latest events of a lane.
            waited: seconds that the rank has waited so far.
            tell: called with the reason if the ranks differ.
        """
        self.sequence, self.count, self.words, self._label = sequence, count, words, label
        self.events = events
        self._began, self._tell = time.monotonic() - waited, tell
        self._reported = self._posted = False
        self._turn = 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def look(self, timeout: float = math.inf) -> None:
        """Compare the ranks after :data:`fsdp.comm.threads.PATIENCE`.

        Raises:
            OutOfStep: the ranks differ, the sequence has ended before this count, or the process of a rank has ended.
            RuntimeError: this rank has waited for longer than ``timeout`` seconds.
        """
        self._compare()
        if self.seconds > timeout:
            raise RuntimeError(self.late("waited"))

    def _compare(self) -> None:
        rank = self.sequence.rank
        if rank is None:
            return
        self._posted = True
        rank.waits[id(self)] = self
        rank.post()
        posts, self._turn = rank.posts(self.sequence.next_ranks(self._turn)), self._turn + 1
        own = f"rank {rank.number} {self.words}"
        if (reason := rank.reason_of_end(self.sequence.key, self.count)) is not None:
            found = reason if own in reason else f"{own}. {reason}"
        elif (reason := rank.difference(self, posts)) is not None:
            found = reason
        elif dead := rank.ended_of(posts):
            reason = f"the process of {ranks_as_text(dead)} has ended"
            found = f"{reason}, and {own}, and waits for it. {_AFTER_DEATH}. {REMEDY}"
            rank.end({self.sequence.key: self.count}, found)  # for ranks on other machines
        else:
            self._report_if_long(rank)
            return
        self._tell(reason)
        raise OutOfStep(found)

    def _report_if_long(self, rank: _Rank) -> None:
        if not self._reported and self.seconds >= threads.NOTICE.total_seconds():
            self._reported = True
            first = rank.board.is_first(f"reported/{self.sequence.key}/{self.count}")
            level = logging.WARNING if first else logging.INFO
            if logger.isEnabledFor(level):  # the report reads the posts of all ranks
                logger.log(level, "%s", self.late("has waited"))

    def over(self) -> None:
        """Withdraw the post of this wait, which is over or was given up."""
        rank = self.sequence.rank
        if self._posted and rank is not None:
            self._posted = False
            rank.waits.pop(id(self), None)
            rank.post()

    def late(self, waited: str) -> str:
        """Describe a wait of this length, with the remedy; ``waited`` is the verb."""
        said = self.report(f"{waited} {self.seconds:.0f} s")
        return f"{said}. {_hint(self.sequence.doing, self.sequence.advice)}"

    def report(self, waited: str) -> str:
        """Describe how long this rank has ``waited``, for which ranks, and what these ranks did last."""
        rank, label = self.sequence.rank, f" ({self._label})" if self._label else ""
        doing = _noun(self.sequence.doing or self.words)
        if rank is None:
            return f"this rank {waited} in {doing}{label} for the other ranks"
        missing = by_text(rank.missing(self))
        ranks = "; and for ".join(f"{ranks_as_text(several)}, {words}" for words, several in missing.items())
        return f"rank {rank.number} {waited} in {doing}{label} for {ranks or 'the other ranks'}"


class _Rank:
    """This rank: its sequences, its long waits, and the board on which ranks post them.

    Attributes:
        number: the global rank.
        latest, before: the latest thing that this rank has begun, of any sequence, and the thing before that.
        ends: by sequence, the end that this rank has raised or caused: the first count that is out of reach, and why.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.number: int = group.rank()
        self.board = Board(group, "waits")
        self.latest = self.before = ""
        self.sequences: weakref.WeakValueDictionary[str, Sequence] = weakref.WeakValueDictionary()
        self.waits: dict[int, Wait] = {}
        self.ends: dict[str, tuple[Count, str]] = {}
        self._life = uuid.uuid4().hex
        self._process = [machine(), os.getpid(), start_of(os.getpid())]
        self.post()

    def _own(self) -> _Post:
        alive = [found for reference in self.sequences.valuerefs() if (found := reference()) is not None]
        counts = {each.key: (each.count, each.thread) for each in alive}
        waits = {}
        for wait in list(self.waits.values()):
            sequence = wait.sequence
            doing, events = sequence.doing or wait.words, [list(event) for event in list(wait.events)]
            ranges, remedy = _ranges_of(sequence.ranks), sequence.remedy
            waits[sequence.key] = _Waiting(wait.count, ranges, wait.words, doing, remedy, events)
        return _Post(self._life, self._process, counts, waits)

    def does(self, doing: str) -> None:
        """Note the latest thing; the same string, in another sequence, is the same thing."""
        if doing is not self.latest:
            self.before, self.latest = self.latest, doing

    def post(self) -> None:
        """Post the counts and the waits of this rank."""
        self.board.post("rank", self._own())

    def posts(self, ranks: Iterable[int]) -> dict[int, _Post]:
        """Return the latest posts of other ranks."""
        others = [rank for rank in ranks if rank != self.number]
        return {rank: _Post.of(said) for rank, said in self.board.posted("rank", others).items()}

    def ended_of(self, posts: Mapping[int, _Post]) -> list[int]:
        """Return the ranks of ``posts`` whose processes, on this machine, have ended."""
        here = {rank: post.process for rank, post in posts.items() if post.process[0] == self._process[0] != ""}
        return [rank for rank, (_, process, start) in here.items() if start_of(process) != start]

    def difference(self, wait: Wait, posts: Mapping[int, _Post]) -> str | None:
        """Find a cycle of waits that begins with ``wait`` and one of ``posts``; end the sequences of the cycle."""
        own, key = self._own(), wait.sequence.key
        first = _Step(self.number, key, own.waits[key])
        cycle = self._cycle([first], posts, {self.number: own, **posts})
        if cycle is None or any(self._end_before(step.key, step.waiting.awaited) for step in cycle):
            return None  # or a rank of the cycle is about to raise why its sequence has ended
        found = _difference(cycle)
        self.end({step.key: step.waiting.awaited for step in cycle}, found)
        return found

    def _cycle(self, path: list[_Step], ranks: Iterable[int], posts: dict[int, _Post]) -> list[_Step] | None:
        """Follow the waits from the end of ``path`` to ``ranks``, until they come back to this rank."""
        last, first, own = path[-1], path[0], posts[self.number]
        for rank in ranks:
            if rank not in posts or not last.waiting.lacks(rank, posts[rank].begun(last.key)):
                continue
            for key, waiting in posts[rank].waits.items():
                if not posts[rank].same_thread(last.key, key):
                    continue
                further = [*path, _Step(rank, key, waiting)]
                if waiting.lacks(self.number, own.begun(key)) and own.same_thread(key, first.key):
                    return further
                if len(further) < LONGEST and rank not in [step.rank for step in path]:
                    others = [other for other in waiting.ranks if other not in (rank, self.number)][:NEXT]
                    posts.update(self.posts(other for other in others if other not in posts))
                    if (found := self._cycle(further, others, posts)) is not None:
                        return found
        return None

    def end(self, counts: Mapping[str, Count], words: str) -> None:
        """End sequences: ranks that wait for these counts or more raise ``words``.

        These ranks also note the ends of calls of ``fsdp.checkpoint`` that this rank has noted. A rank of another group
        reads no other end. Without the note it would begin its next call in the generation that has ended.
        """
        beside = {key: end for key, (end, _) in [*self.ends.items()] if key.endswith(f"/{BESIDE}")}
        said = [{**beside, **counts}, words, self.number, self._life]
        for key, count in counts.items():
            self.board.replace(f"ends/{key}/{count.generation}", said, functools.partial(self._is_earlier, key, count))
        self._note_end(counts, words)

    def _is_earlier(self, key: str, count: Count, there: Any) -> bool:
        """Return whether a sequence that ends at ``count`` ends before the end that is ``there``."""
        counts, _, rank, life = there
        return count.number < counts[key][1] or not self._is_present(rank, life)

    def _is_present(self, rank: int, life: str) -> bool:
        """Return whether ``rank`` has written in this default group: a store may keep the ends of an earlier one."""
        post = self.board.read(f"rank/{rank}")
        return post is not None and post[0] == life

    def _note_end(self, counts: Mapping[str, Several[int]], words: str) -> None:
        for key, count in counts.items():
            self.ends[key] = max(self.end_of(key), Count(*count)), words

    def end_of(self, key: str) -> Count:
        """Return the entry of ``ends``; one before all counts if there is none."""
        return self.ends.get(key, (NEVER, ""))[0]

    def reason_of_end(self, key: str, count: Count) -> str | None:
        """Return why a sequence has ended before ``count``, which this rank raises; None if it has not ended."""
        if (found := self._end_before(key, count)) is None:
            return None
        self._note_end(*found)
        return found[1]

    def _end_before(self, key: str, count: Count) -> tuple[Mapping[str, Several[int]], str] | None:
        """Return the counts that end with a sequence before ``count``, and the reason; None if it has not ended."""
        found = self.board.read(f"ends/{key}/{count.generation}")
        if found is None:
            return None
        counts, words, rank, life = found
        return (counts, words) if counts[key][1] <= count.number and self._is_present(rank, life) else None

    def missing(self, wait: Wait) -> dict[int, str]:
        """Describe each rank whose post does not show that it has reached the count of ``wait``."""
        key, found = wait.sequence.key, dict[int, str]()
        others = [rank for rank in wait.sequence.ranks if rank != self.number]
        posts = self.posts(others)
        ended = self.ended_of(posts)
        last = f"which last took part in {_noun(self.before)}" if self.before else "of which nothing was heard"
        for rank in others:
            post = posts.get(rank)
            if rank in ended:
                found[rank] = "whose process has ended"
            elif post is None or not post.waits:
                found[rank] = last
            elif not post.begun(key).reaches(wait.count):
                found[rank] = f"which {next(iter(post.waits.values())).words}"
        return found


# By default group: ranks may be threads of one process.
_ranks: weakref.WeakKeyDictionary[dist.ProcessGroup, _Rank] = weakref.WeakKeyDictionary()


def this_rank() -> _Rank | None:
    """Return this rank of the default group, None without one. From now on other ranks notice the end of its
    process."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = default_group()
    if group not in _ranks:
        _ranks[group] = _Rank(group)
    return _ranks[group]


def _ranges_of(ranks: Several[int]) -> list[list[int]]:
    """Return arguments of ``range`` for ``ranks``: few for a group of any size, unless the distances are uneven."""
    distance = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    even = [ranks[0], ranks[-1] + (1 if distance > 0 else -1), distance]
    return [even] if list(range(*even)) == list(ranks) else [[rank, rank + 1, 1] for rank in ranks]


# -- words -------------------------------------------------------------------------------------------------------------


def _difference(cycle: Several[_Step]) -> str:
    """Describe ranks that wait for each other."""
    steps = {step.rank: step.waiting for step in sorted(cycle)}
    groups = {step.rank: step.key.rpartition("/")[0] for step in cycle}
    makes_calls = any(not waiting.remedy for waiting in steps.values())
    words = {rank: waiting.doing if makes_calls else waiting.words for rank, waiting in steps.items()}
    if len({*groups.values()}) > 1 and len({*words.values()}) == 1:  # the same in different groups
        words = {rank: f"{text} over the process group {groups[rank]!r}" for rank, text in words.items()}
    elif len({*groups.values()}) == 1 and not makes_calls:
        words |= first_different_event({rank: waiting.events for rank, waiting in steps.items()})
    if not makes_calls:
        return order_differs(words, next(iter(steps.values())).remedy)
    each = "; ".join(f"rank {rank} {text}" for rank, text in words.items())
    return f"The ranks do not make the same calls: {each}. {REMEDY}"


def order_differs(words: Mapping[int, str], remedy: str) -> str:
    """Return the message for ranks with different events, with the ``words`` for each rank."""
    each = "; ".join(_said_of(ranks, text) for text, ranks in by_text(words).items())
    return (
        f"Forward order differs across ranks, or what follows from it in backward: {each}. {remedy}. If one rank "
        f"evaluates alone, evaluate on all ranks. {UNEVEN}"
    )


def first_different_event(events: Mapping[int, Iterable[Several[Any]]]) -> dict[int, str]:
    """Describe the first place at which ranks of one lane had different events; nothing if there is none.

    ``events``: by rank, see :attr:`fsdp.comm.lane.history.History.recent`.
    """
    by_place = {rank: {(number, at): said for number, at, *said in several} for rank, several in events.items()}
    for number, at in sorted({place for entries in by_place.values() for place in entries}):
        there = {rank: entries[number, at] for rank, entries in by_place.items() if (number, at) in entries}
        if len({event for event, _ in there.values()}) > 1:
            if at < 0:
                return {rank: f"runs the {words}" for rank, (_, words) in there.items()}
            passes = {rank: by_place[rank].get((number, -1), (0, "same pass"))[1] for rank in there}
            return {rank: f"is about to {label}, in the {passes[rank]}" for rank, (_, label) in there.items()}
    return {}


def by_text(texts: Mapping[int, str]) -> dict[str, list[int]]:
    """Return the ranks of each text, in the order of the first ranks."""
    found: dict[str, list[int]] = {}
    for rank, text in texts.items():
        found.setdefault(text, []).append(rank)
    return found


def _said_of(ranks: Several[int], doing: str) -> str:
    """Return "rank 0 runs the backward", or "ranks 0-1 run the backward"."""
    verb, _, rest = doing.partition(" ")
    plural = {"is": "are", "has": "have"}.get(verb, verb.removesuffix("s"))
    return f"{ranks_as_text(ranks)} {plural if len(ranks) > 1 else verb} {rest}"


def ranks_as_text(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0-3 and 5"."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    *words, last = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    noun = "ranks" if words or "-" in last else "rank"
    return f"{noun} {', '.join(words)} and {last}" if words else f"{noun} {last}"


def _hint(doing: str, advice: str) -> str:
    """Return the likely mistakes where a rank waits long, and the remedies."""
    if doing.startswith("has called"):
        alone = "Is the call inside `if rank == 0`? Then take it out: every rank has to make it"
        return f"{alone}{'; ' if advice else ''}{advice}. {_FEWER_BATCHES}"
    if AFTER_FAILURE in doing:
        return "Have these ranks gone on without an error? Then catch no error on one rank alone, or tell them of it"
    alone = "Is another rank in a call inside `if rank == 0`? Then take it out: every rank has to make it"
    return f"{_FEWER_BATCHES}. {alone}"


def _noun(doing: str) -> str:
    """Return "the backward" for "runs the backward"."""
    for verb in ("has called ", "runs ", "is about to begin ", "comes to "):
        doing = doing.removeprefix(verb)
    return doing or "a call"
