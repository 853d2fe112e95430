"""Meetings of all ranks of a process group before a tree, or a call without a tree, uses the group for the first time.

A failure in one tree leaves collectives in the group that only some ranks have issued, and the tree may be gone by now,
on ranks without an error. So before the first use all ranks meet at the group's store, and compare their progress.
Equal progress costs a handful of operations on the store at any number of ranks. Else all ranks start anew
(:meth:`fsdp.comm.lane.Lane.begin`).

A rank that waits for a collective sees the ranks that wait for it here: see :meth:`Arrivals.gone_on`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fsdp import environment
from fsdp.comm.board import Board, processes
from fsdp.comm.calls import TREES, Calls, Waited, ranks_in_words
from fsdp.comm.groups import group_timeout, is_registered
from fsdp.comm.issuing import NEW_GROUP
from fsdp.comm.work import OutOfStep


class Arrivals:
    """The meetings of the ranks of one group before a pass, a call or a tree begins there.

    Attributes:
        count: the number of meetings that are over.
        board: the part of the group's store that they use.
        calls: counts the meetings, to find ranks that are in different calls.
    """

    def __init__(self, group: Any, names: Sequence[int]) -> None:
        """``names`` are the global ranks of the group."""
        self.count = 0
        self.board = Board(group, "trees")
        self.calls = Calls(group, TREES)
        self._names, self._rank = names, names[group.rank()]
        self._timeout = group_timeout(group).total_seconds()
        # From now on peers detect the end of this process. Ranks of an unknown group are not named by global ranks.
        self._processes = processes() if is_registered(group) else None

    def meet(self, doing: str, progress: Sequence[int], state: Sequence[Any], *, trusted: bool) -> list[Any] | None:
        """Wait for all ranks; return the state of each rank if they differ, or if this rank is not ``trusted``.

        Args:
            doing: words that follow "is about to begin".
            progress: the collectives that this rank has issued.
            state: anything that JSON holds.
            trusted: whether equal states need no exchange.

        Raises:
            OutOfStep: on every rank, if they are about to begin different things.
            RuntimeError: a rank is late or has ended, or the environment variables differ.
        """
        self.calls.began([self.count + 1], f"is about to begin {doing}")
        try:
            return self._meet(doing, progress, state, trusted)
        except BaseException:
            self.calls.failed()
            self.board.post("here", [self.count, doing, [], False])  # this rank waits no more
            raise

    def _meet(self, doing: str, progress: Sequence[int], state: Sequence[Any], trusted: bool) -> list[Any] | None:
        look, variables, key = self.looking(doing, progress), environment.alike(), str(self.count)
        if self.board.meet_alike(key, [doing, state, variables], look) and trusted:
            self.count += 1
            return None
        said = self.board.exchange(f"{key}/states", [doing, state, variables], look)
        self.count += 1
        if len({what for what, *_ in said.values()}) > 1:
            each = "; ".join(f"rank {self._names[rank]} is about to begin {what}" for rank, (what, *_) in said.items())
            raise OutOfStep(f"The ranks do not make the same calls: {each}. All of them have to do the same")
        for name, here in variables.items():
            by_value: dict[Any, list[int]] = {}
            for rank, (_, _, theirs) in said.items():
                by_value.setdefault(theirs.get(name), []).append(self._names[rank])
            if set(by_value) - {here}:
                different = " and ".join(f"{value!r} on {ranks_in_words(at)}" for value, at in by_value.items())
                raise RuntimeError(f"the environment variable {name} is {different}: set it alike on all ranks")
        return [theirs for _, theirs, _ in said.values()]

    def looking(self, doing: str, progress: Sequence[int], number: int | None = None) -> Callable[[], None]:
        """Return a function for a rank to call while it waits for its peers.

        ``number``: of the meeting that the wait belongs to; None: the next one.
        """
        waited, number = Waited(), self.count if number is None else number

        def look() -> None:
            self.board.post("here", [number, doing, progress, True])
            self.slow()
            waited.report_if_long(self.calls)
            if waited.seconds > self._timeout:
                here = {rank for rank, said in self.board.posted("here").items() if said[0] == number}
                missing = [name for rank, name in enumerate(self._names) if rank not in here]
                raise RuntimeError(
                    f"rank {self._rank} is about to begin {doing}, and timed out: within {self._timeout:.0f} s "
                    f"{ranks_in_words(missing) if missing else 'another rank'} did not come. All ranks of a process "
                    "group have to wrap models on it, and use each for the first time, together"
                )

        return look

    def slow(self) -> None:
        """Inspect the peers during a long wait.

        Raises:
            RuntimeError: the process of a rank has ended, even of one that has never used the group.
            OutOfStep: peers are in different calls.
        """
        if ended := self.ended():
            raise RuntimeError(
                f"the process of {ranks_in_words(ended)} has ended, and all ranks have to come to the first use of a "
                f"model: {NEW_GROUP}; or start again, and resume from the last checkpoint"
            )
        self.calls.raise_if_diverged()

    def ended(self) -> list[int]:
        """Return the global ranks of the group whose processes have ended; see :meth:`Board.dead`."""
        dead = self._processes.dead() if self._processes is not None else []
        return [rank for rank in self._names if rank in dead]

    def gone_on(self, progress: Sequence[int], has_met: Callable[[], bool] | None = None) -> str | None:
        """Describe the ranks that wait here for this rank, while it waits for a collective of theirs.

        A rank that has issued as much as this one, by ``progress``, is not lacking. ``has_met``: this rank waits at
        the store instead, until this returns True.
        """
        posts = self.board.posted_next("here")
        here = {rank: said for rank, said in posts.items() if said[0] == self.count and said[3]}
        found = [
            f"rank {self._names[rank]} is about to begin {doing}"
            for rank, (_, doing, theirs, _) in here.items()
            if self._names[rank] != self._rank
            and (has_met is not None or any(there < here for there, here in zip(theirs, progress)))
        ]
        return "; ".join(found) if found and (has_met is None or not has_met()) else None
