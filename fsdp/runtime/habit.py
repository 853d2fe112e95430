"""Passes and calls, and the prediction of the next one."""

from __future__ import annotations

from typing import Any, NamedTuple


class Pass(NamedTuple):
    """A forward or backward of a tree, or another call in which its ranks communicate."""

    words: str
    caller: Any = None  # the unit whose forward it is; None: a backward, or a call
    trains: bool = False  # whether it is a forward in training mode
    call: str = ""  # what all ranks have to call: "state_dict()"; empty for a forward or backward
    often: bool = False  # a call that steps are made of: it need not be announced where it comes as before

    @property
    def is_backward(self) -> bool:
        return self.caller is None and not self.call

    @property
    def doing(self) -> str:
        """The pass or call in words, to follow "rank 0"."""
        return f"has called {self.words}" if self.call else f"runs the {self.words}"


class Habit:
    """Predicts the next pass or call of a tree from the previous ones, so that only deviations have to be announced.

    It is equal on all ranks of a group, and holds a bounded number of entries.
    """

    LONGEST = 64  # passes since the last call, as far as they are told apart

    def __init__(self) -> None:
        self._followed: dict[tuple[int, ...], int] = {}  # by the last one and how many there were since the last call
        self._last, self._count = (0, 0), 0
        self._forward: int | None = None  # the latest, which comes if nothing else is known

    def _contexts(self) -> list[tuple[int, ...]]:
        """Return the keys to look up, from the most to the least specific one."""
        counted = [(self._last[-1], self._count, 0)] if self._count < self.LONGEST else []
        return [*counted, self._last]

    @property
    def expected(self) -> int | None:
        """The number of the pass or call that is predicted to come next."""
        known = (self._followed[context] for context in self._contexts() if context in self._followed)
        return next(known, self._forward)

    def note(self, number: int, what: Pass) -> None:
        """Learn that ``what``, with this number, came next."""
        for context in self._contexts():
            self._followed[context] = number
        self._last = (self._last[-1], number)
        self._count = 0 if what.call else min(self._count + 1, self.LONGEST)
        if what.caller is not None:
            self._forward = number
