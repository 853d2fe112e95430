"""Counts of the calls that each rank has begun, by which ranks detect that they wait in different calls.

The ranks of a group begin three kinds of things, each in one order: passes and calls of trees (``comm/lane.py``), calls
beside the training, such as ``fsdp.checkpoint.save()`` (``comm/consensus.py``), and the first uses of trees
(``comm/arrivals.py``). :class:`Calls` counts one such sequence on one rank. Of two ranks that run the same program one
is ahead, in every sequence. If a rank is ahead in one sequence and behind in another, the two have diverged: each is in
a call that the second has not made.

A rank that waits longer than :data:`fsdp.comm.threads.PATIENCE` posts its counts on a board of the default group, and
compares them with the counts of a few peers. Counts that are out of date do no harm: they are the counts of an
earlier moment, and are compared as such. After a failure the counts of a sequence are void until the ranks have met.

Divergences between passes of trees alone are not reported here: the lane compares them in more detail.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from fsdp.comm import threads
from fsdp.comm.board import Board
from fsdp.comm.groups import default_group, is_member_of, rank_names
from fsdp.comm.work import OutOfStep

logger = logging.getLogger("fsdp")

BESIDE, TREES = OF_A_GROUP = "beside", "trees"  # sequences that every rank of a group has, maybe empty
NEXT = 8  # ranks that are compared in one look
KEPT = 10  # times as long as a rank waits before it looks, the counts of a divergence stay posted
UNEVEN = "If a rank ran out of batches before the others, loop with `for batch in fsdp.join(model, loader)`"
REMEDY = f"Call it on every rank, in the same order: is it inside `if rank == 0`? {UNEVEN}"

_Said = Mapping[str, Sequence[Any]]  # a rank's post: by sequence, what it has begun, or None, and the words for it


class Calls:
    """The passes or calls that the ranks of one group begin in one order, as this rank counts them.

    Attributes:
        key: the name of the sequence; equal on all ranks.
        begun: the count of this rank, in lexicographic order; None after a failure.
        doing: words for that, after "rank 0": "runs the backward", "has called fsdp.checkpoint.save()".
        accused: another rank was ahead here, and this rank has raised that; until ``forgive``.
    """

    def __init__(self, group: Any, name: str) -> None:
        """``name`` is equal on all ranks, and unique among the sequences of the group."""
        self.name, self.key, self.ranks = name, f"{getattr(group, 'group_name', '')}/{name}", rank_names(group)
        self.begun: list[int] | None = []
        self.doing = ""
        self.accused = False
        self.thread: int | None = None  # that began the latest pass or call
        self._before: tuple[list[int], str] = [], ""  # the count before that, and words for the latest of any sequence
        self._turn = 0
        self._process = _process()
        if self._process is not None:
            self._process.add(self)

    @property
    def is_of_present_group(self) -> bool:
        """Whether the group has not been destroyed; always true for a group that torch does not know."""
        group, _, _ = self.key.rpartition("/")
        return not group or is_member_of(group)

    def began(self, number: list[int], doing: str, *, on_this_thread: bool = True) -> None:
        """Count the next pass or call, which begins. ``on_this_thread``: False for a backward, which has threads of its
        own."""
        if self._process is not None:
            self._before = self.begun or [], self._process.latest
        self.begun, self.doing = number, doing
        if self._process is not None:
            self._process.is_at(self)
        if on_this_thread:
            self.thread = threading.get_ident()

    def failed(self) -> None:
        """Void the count of this rank until its next pass or call begins: the latest one has failed."""
        self.begun = None
        if self._process is not None:
            self._process.correct()

    def forgive(self) -> bool:
        """Return whether this rank was ``accused``, and end that."""
        accused, self.accused = self.accused, False
        return accused

    def post(self) -> None:
        """Post this rank's counts for its peers."""
        if self._process is not None:
            self._process.post()

    def met(self) -> None:
        """Withdraw the posts of an earlier divergence: all ranks of the group have met."""
        if self._process is not None:
            self._process.forget_evidence()

    def raise_if_diverged(self) -> None:
        """Post this rank's counts, and compare them with those of a few ranks of the group, by turns.

        Raises:
            OutOfStep: a peer makes different calls.
        """
        found = self.difference()
        if found is not None:
            raise OutOfStep(found)

    def difference(self) -> str | None:
        """Return the message of ``raise_if_diverged``, or None."""
        others = len(self.ranks) - 1
        if self._process is None or others < 1:
            return None
        self._process.post()
        own = self.ranks.index(self._process.rank) if self._process.rank in self.ranks else 0
        turns = range(self._turn, self._turn + min(NEXT, others))
        self._turn = turns.stop % others
        return self._process.difference([self.ranks[(own + 1 + turn % others) % len(self.ranks)] for turn in turns])

    def learn(self) -> None:
        """Mark the sequences in which this rank is behind its peers as diverged."""
        if self._process is not None:
            self._process.difference(self.ranks)

    def last_of_others(self) -> dict[int, str]:
        """Describe the last pass or call of each rank that has not begun this rank's latest one."""
        if self._process is None:
            return {}
        return self._process.missing(self, *self._before)

    def report_wait(self, seconds: float, where: str = "") -> None:
        """Warn on stderr, once for all ranks that wait here, that this rank has waited for so long. ``where`` is the
        position in the call."""
        words = self.in_words(f"has waited {seconds:.0f} s", where)
        first = self._process is None or self._process.board.is_first(f"reported/{self.key}/{self.begun}")
        logger.log(logging.WARNING if first else logging.INFO, "%s. %s", words, hint(self.doing))

    def in_words(self, waited: str, where: str = "") -> str:
        """Describe how long this rank has ``waited``, for which ranks, and what these ranks did last."""
        rank = self._process.rank if self._process is not None else 0
        at = f" ({where})" if where else ""
        return f"rank {rank} {waited} in {_noun(self.doing)}{at} for {missing_in_words(self.last_of_others())}"


def missing_in_words(last: Mapping[int, str]) -> str:
    """Describe the ranks that are missing. ``last`` has their last pass or call in words, by rank."""
    if not last:
        return "the other ranks"
    by_words: dict[str, list[int]] = {}
    for rank, words in last.items():
        by_words.setdefault(words, []).append(rank)
    return "; and for ".join(
        f"{ranks_in_words(ranks)}, which {words}" if words else f"{ranks_in_words(ranks)}, of which nothing was heard"
        for words, ranks in by_words.items()
    )


def ranks_in_words(ranks: Iterable[int]) -> str:
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


def hint(doing: str) -> str:
    """Return the likely mistake where a rank waits long, and the remedy."""
    if doing.startswith("has called"):
        saves = "; for one rank to save, use FullStateDictConfig(rank0_only=True)" if " state_dict(" in doing else ""
        return (
            "Is the call inside `if rank == 0`? Then take it out: every rank has to make it" + saves + ". Did a rank "
            "run out of batches? Then loop with `for batch in fsdp.join(model, loader)`"
        )
    return (
        "Did a rank run out of batches? Then loop with `for batch in fsdp.join(model, loader)`. Is another rank in a "
        "call inside `if rank == 0`? Then take it out: every rank has to make it"
    )


def _noun(doing: str) -> str:
    """Return "the backward" for "runs the backward"."""
    for verb in ("has called ", "runs ", "is about to begin ", "comes to "):
        doing = doing.removeprefix(verb)
    return doing or "a call"


class _Process:
    """All sequences of this rank, and the board on which ranks post them.

    Attributes:
        latest: the latest pass or call of this rank in words, of any sequence.
    """

    def __init__(self, group: Any) -> None:
        self.rank: int = group.rank()
        self.board = Board(group, "calls")
        self.latest, self._at = "", ""  # the second is the key of the sequence
        self._calls: weakref.WeakValueDictionary[str, Calls] = weakref.WeakValueDictionary()
        self._unseen: set[str] = set()  # sequences that this rank has not begun, and was accused in
        self._has_posted = False
        # Counts at the time of a divergence: peers have to see them even after this rank has continued.
        self._evidence: dict[str, list[Any]] | None = None
        self._evidence_since = 0.0

    def add(self, calls: Calls) -> None:
        calls.accused = calls.key in self._unseen
        self._unseen.discard(calls.key)
        self._calls[calls.key] = calls

    def _alive(self) -> dict[str, Calls]:
        return {calls.key: calls for reference in self._calls.valuerefs() if (calls := reference()) is not None}

    def is_at(self, calls: Calls) -> None:
        """Note that this rank has begun a pass or call of the sequence ``calls``."""
        self.latest, self._at = calls.doing, calls.key
        if self._evidence is not None:
            age = time.monotonic() - self._evidence_since
            if age > KEPT * threads.PATIENCE.total_seconds():
                self.forget_evidence()

    def forget_evidence(self) -> None:
        if self._evidence is not None:
            self._evidence = None
            self.post()

    def post(self) -> None:
        """Post the counts of this rank, and in which sequence it was last."""
        self._has_posted = True
        self.board.post("calls", [self._at, self._counts(), self._evidence])

    def _counts(self) -> dict[str, list[Any]]:
        return {key: [calls.begun, calls.doing] for key, calls in self._alive().items()}

    def correct(self) -> None:
        """Post the counts anew if they were posted: the latest pass or call has failed."""
        if self._has_posted:
            self.post()

    def difference(self, ranks: Iterable[int]) -> str | None:
        """Return the message for the first of ``ranks`` whose calls differ from those of this rank, or None."""
        message = None
        others = [rank for rank in ranks if rank != self.rank]
        for rank, (_, said, evidence) in self.board.posted_by("calls", others).items():
            found = self._compare(rank, said) or (evidence and self._compare(rank, evidence))
            message = message or found
        return message

    def _compare(self, rank: int, said: _Said) -> str | None:
        own = {key: calls for key, calls in self._alive().items() if calls.is_of_present_group}
        ahead: list[Calls] = []
        behind: list[tuple[str, Calls | None]] = []
        for key, calls in own.items():
            nothing: Sequence[Any] = ([] if calls.name in OF_A_GROUP else None, "")
            begun, _ = said.get(key, nothing)
            if rank in calls.ranks and begun is not None and calls.begun is not None:
                if calls.begun > begun:
                    ahead.append(calls)
                elif calls.begun < begun:
                    behind.append((key, calls))
        for key, (begun, _) in said.items():
            group, _, name = key.rpartition("/")
            if key not in own and begun and name in OF_A_GROUP and is_member_of(group) and key not in self._unseen:
                behind.append((key, None))
        for here in ahead:
            for key, there in behind:
                of_one_tree = here.name not in OF_A_GROUP and there is not None and there.name not in OF_A_GROUP
                one_thread = there is None or there.thread is None or there.thread == here.thread
                if one_thread and not of_one_tree:
                    self._evidence, self._evidence_since = self._counts(), time.monotonic()
                    self._accuse(behind)
                    doing = {self.rank: here.doing, rank: str(said[key][1])}
                    each = "; ".join(f"rank {number} {words}" for number, words in sorted(doing.items()))
                    return f"The ranks do not make the same calls: {each}. {REMEDY}"
        return None

    def _accuse(self, behind: Iterable[tuple[str, Calls | None]]) -> None:
        for key, calls in behind:
            if calls is None:
                self._unseen.add(key)
            else:
                calls.accused, calls.begun = True, None

    def missing(self, calls: Calls, preceding: list[int], before: str) -> dict[int, str]:
        """Describe the last pass or call of each rank that has not begun this rank's latest one in ``calls``.

        These ranks took part in everything that this rank did ``before``, the ``preceding`` one in ``calls`` included;
        a post may hold more.
        """
        self.post()
        own, found = self._alive(), dict[int, str]()
        others = [rank for rank in calls.ranks if rank != self.rank]
        posts = self.board.posted_by("calls", others)
        for rank in others:
            at, said, _ = posts.get(rank, ("", {}, None))
            begun = said.get(calls.key, ([], ""))[0]
            if begun and calls.begun and begun >= calls.begun:
                continue
            known = {key: other.begun for key, other in own.items() if rank in other.ranks and other.begun}
            known[calls.key] = preceding
            if at in said and all((said.get(key, ([], ""))[0] or []) >= count for key, count in known.items()):
                found[rank] = f"was last in {_noun(said[at][1])}"
            else:  # since that post it took part in more
                found[rank] = f"last took part in {_noun(before)}" if before else ""
        return found


# By default group: ranks may be threads of one process.
_processes: weakref.WeakKeyDictionary[Any, _Process] = weakref.WeakKeyDictionary()


def _process() -> _Process | None:
    if not dist.is_available() or not dist.is_initialized():
        return None
    group = default_group()
    found = _processes.get(group)
    if found is None:
        found = _processes[group] = _Process(group)
    return found


class Waited:
    """The duration of a wait, reported once it exceeds :data:`fsdp.comm.threads.NOTICE`."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._reported = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def report_if_long(self, calls: Calls | None, where: str = "") -> None:
        if not self._reported and calls is not None and self.seconds >= threads.NOTICE.total_seconds():
            self._reported = True
            calls.report_wait(self.seconds, where)
