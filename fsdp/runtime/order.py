"""The order in which units run, recorded and replayed: whom to gather next.

A forward runs the units in some order, a backward in another. Each is recorded as it happens; the next one of the same
kind follows the record and finds there which unit will be needed next. A unit that comes at another place than recorded
moves the cursor, and where the record says nothing, nothing is gathered ahead.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ExecutionOrder(Generic[T]):
    """One per kind of pass: of forwards by the unit that was called, of backwards by the first unit reached."""

    def __init__(self) -> None:
        self._latest: dict[tuple[bool, T], list[T]] = {}  # of each kind the last pass, or the one under way
        self._recorded: list[T] = []
        self._current: list[T] = []
        self._cursor = 0

    def start(self, first: T, *, backward: bool) -> None:
        """A pass begins; the one before it becomes the record, also if nothing had to be gathered in it."""
        self._recorded, self._current, self._cursor = self._latest.get((backward, first), []), [], 0
        self._latest[backward, first] = self._current

    def stop(self) -> None:
        """The pass is over; what runs until the next one is recorded for nobody."""
        self._recorded, self._current = [], []

    def record(self, unit: T) -> None:
        """``unit`` runs now."""
        self._current.append(unit)
        for position in range(self._cursor, len(self._recorded)):
            if self._recorded[position] is unit:
                self._cursor = position + 1
                return

    @property
    def recorded(self) -> list[T]:
        """The units of the last pass of this kind, in order."""
        return self._recorded

    def upcoming(self, count: int) -> list[T]:
        """The next ``count`` units, as far as the record tells."""
        return self._recorded[self._cursor : self._cursor + count]
