"""A tree is about to use a group for the first time: are the ranks where they take each other to be?

What goes wrong in one tree leaves its mark on the group: some ranks have issued collectives that others have not, and
those wait for whatever comes next. The tree's own ranks meet and catch up before they go on with it (``meet`` of
``fsdp.runtime.agreement``), but it may be gone, with all that it knew, and some ranks may have noticed nothing. So
before a tree's first collective in a group its ranks meet at the group's store, where whoever waits for a collective
can be heard, and compare what each of them has issued there. Where that is the same on all, nothing is left over, and
that is all: a handful of operations on the store, whatever the number of ranks. Else they catch up.

Who waits here for a rank that is still in another tree is seen by that one; see :func:`gone_on`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp import environment
from fsdp.comm import ledger, shared_memory
from fsdp.comm.board import Board, processes
from fsdp.comm.calls import TREES, Calls, Waited, ranks_in_words
from fsdp.comm.groups import group_timeout, rank_names
from fsdp.comm.waiting import OutOfStep, watch, watcher

_REMEDY = "make a new process group (torch.distributed.new_group()), and wrap the model on that"


class _Beginnings:
    """Those of trees in one group, and what this rank's waits for the others' are watched by."""

    def __init__(self, group: Any) -> None:
        self.board = Board(group, "trees")
        self.count = 0  # how many are over, on all ranks
        self.settled: list[int] = []  # what this rank had issued when all were last known to have issued the same
        self._names = rank_names(group)
        self.calls = Calls(group, TREES)
        self.board.live()

    def _ended(self) -> list[int]:
        """Find the ranks whose processes have ended, also those that have wrapped a model and never used the group."""
        known = processes()
        ended = () if known is None else known.dead()
        return sorted({*self.board.dead(), *(i for i, rank in enumerate(self._names) if rank in ended)})

    def slow(self) -> None:
        if dead := self._ended():
            ended = ", ".join(f"rank {self._names[rank]}" for rank in dead)
            raise RuntimeError(
                f"the process of {ended} has ended, and all ranks have to come to the first use of a model: {_REMEDY}; "
                "or start again, and resume from the last checkpoint"
            )
        self.calls.raise_if_diverged()

    def explain(self) -> str:
        return f"If a rank has failed, {_REMEDY}"

    def tell(self, seconds: float, label: str) -> None:
        self.calls.tell(seconds, label)

    def late(self, seconds: float, label: str) -> str:
        return f"{self.calls.in_words(f'waited {seconds:.0f} s', label)}. {self.explain()}"

    def looking(self, group: Any, doing: str, issued: Sequence[int]) -> Callable[[], None]:
        """What a rank does now and then that waits for the others to come."""
        waited = Waited()

        def look() -> None:
            self.board.post("here", [self.count, doing, issued, True])
            self.slow()
            waited.tell_if_long(self.calls)
            timeout = group_timeout(group).total_seconds()
            if waited.seconds > timeout:
                here = {rank for rank, said in self.board.posted("here").items() if said[0] == self.count}
                missing = [name for rank, name in enumerate(self._names) if rank not in here]
                raise RuntimeError(
                    f"rank {self._names[group.rank()]} is about to begin {doing}, and timed out: within {timeout:.0f} "
                    f"s {ranks_in_words(missing) if missing else 'another rank'} did not come. All ranks of a process "
                    "group have to wrap models on it, and use each for the first time, together"
                )

        return look


_known: weakref.WeakKeyDictionary[Any, _Beginnings] = weakref.WeakKeyDictionary()


def _issued(group: Any) -> list[int]:
    """What this rank has issued in ``group``, in numbers that are equal where nothing is left over."""
    return [ledger.issued_in(group), *shared_memory.posted_in(group)]


def begin(group: Any, device: torch.device, doing: str) -> None:
    """A tree is about to do something in ``group`` for the first time: ``doing`` is what, in words. All ranks have to
    come; from then on they have issued the same there.

    Args:
        device: where the ranks' models compute.

    Raises:
        RuntimeError: on every rank, if they cannot come together, some do not come or have ended.
        OutOfStep: on every rank, if they are about to do different things.
    """
    its = _known.get(group)
    if its is None:
        its = _known[group] = _Beginnings(group)
    watch(group, its)
    watcher.check(group)
    its.calls.began([its.count + 1], f"is about to begin {doing}")
    try:
        _begin(its, group, device, doing)
    except BaseException:
        its.calls.failed()
        its.board.post("here", [its.count, doing, [], False])  # it came, and waits no more
        raise
    its.settled = _issued(group)


def _begin(its: _Beginnings, group: Any, device: torch.device, doing: str) -> None:
    issued, number = _issued(group), its.count
    look, broken = its.looking(group, doing, issued), shared_memory.is_broken(group)
    variables = environment.alike()
    if not its.board.meet_alike(str(number), [doing, broken, *issued, variables], look) or broken:
        said = its.board.exchange(f"{number}/issued", [doing, ledger.latest_issued(group), variables], look)
        _catch_up(its, group, device, doing, said)
    its.count += 1


def prepare(groups: Sequence[Any], device: torch.device, doing: str) -> None:
    """As ``begin``, in each of ``groups`` where this rank has issued anything since the last one but what ``settled``
    has told of."""
    for group in groups:
        if group.size() > 1 and ((its := _known.get(group)) is None or its.settled != _issued(group)):
            begin(group, device, doing)


def settled(groups: Sequence[Any]) -> None:
    """What was issued in ``groups`` since ``prepare`` is over, on all ranks."""
    for group in groups:
        if group in _known:
            _known[group].settled = _issued(group)


def _catch_up(its: _Beginnings, group: Any, device: torch.device, doing: str, said: dict[int, Any]) -> None:
    problem, names = "", rank_names(group)
    if len({what for what, *_ in said.values()}) > 1:
        each = "; ".join(f"rank {names[rank]} is about to begin {what}" for rank, (what, *_) in said.items())
        its.count += 1
        raise OutOfStep(f"The ranks do not make the same calls: {each}. All of them have to do the same")
    for name, value in environment.alike().items():
        by_value: dict[Any, list[int]] = {}
        for rank, (_, _, theirs) in said.items():
            by_value.setdefault(theirs.get(name), []).append(names[rank])
        if set(by_value) - {value}:
            each = " and ".join(f"{theirs!r} on {ranks_in_words(ranks)}" for theirs, ranks in by_value.items())
            its.count += 1
            raise RuntimeError(f"the environment variable {name} is {each}: set it alike on all ranks")
    try:
        shared_memory.renew(group)
        ledger.catch_up(group, device, {rank: issued for rank, (_, issued, _) in said.items()})
    except RuntimeError as error:
        problem = str(error)
    look = its.looking(group, doing, _issued(group))
    problems = its.board.exchange(f"{its.count}/caught up", problem, look)
    for rank, problem in problems.items():
        if problem:
            raise RuntimeError(
                f"the ranks were out of step with another model, and cannot go on together: rank {names[rank]}: "
                f"{problem}. Therefore {_REMEDY}"
            )


def gone_on(group: Any, *, met: Callable[[], bool] | None = None) -> str | None:
    """In words, the ranks that wait in ``begin`` for this one, while it waits in ``group`` for what they will not do:
    for a collective that they have not issued, or, until it is ``met``, for all ranks at the store."""
    its = _known.get(group)
    if its is None:
        return None
    own, names = _issued(group), rank_names(group)
    here = {rank: said for rank, said in its.board.posted_next("here").items() if said[0] == its.count and said[3]}
    found = [
        f"rank {names[rank]} is about to begin {doing}"
        for rank, (_, doing, issued, _) in here.items()
        if rank != group.rank() and (met is not None or any(there < mine for there, mine in zip(issued, own)))
    ]
    return "; ".join(found) if found and (met is None or not met()) else None
