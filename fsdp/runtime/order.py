"""The execution order of units, recorded in one pass to prefetch in the next.

A forward and a backward run the units in different orders. The next pass of the same kind follows the record, which
names the units to prefetch. A unit at an unexpected position moves the cursor. Without a record no unit is
prefetched.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class ExecutionOrder(Generic[T]):
    """The latest order of each kind of pass: forwards by the called unit, backwards by the first unit reached."""

    def __init__(self) -> None:
        self._latest: dict[tuple[bool, T], list[T]] = {}  # the latest pass of each kind, maybe under way
        self._recorded: list[T] = []
        self._current: list[T] = []
        self._cursor = 0

    def start(self, first: T, *, backward: bool) -> None:
        """Begin a pass, which follows the record of the latest pass of that kind."""
        self._recorded, self._current, self._cursor = self._latest.get((backward, first), []), [], 0
        self._latest[backward, first] = self._current

    def stop(self) -> None:
        """End the pass; units that run before the next pass are not recorded."""
        self._recorded, self._current = [], []

    def record(self, unit: T) -> None:
        """Note that ``unit`` runs now."""
        self._current.append(unit)
        for position in range(self._cursor, len(self._recorded)):
            if self._recorded[position] is unit:
                self._cursor = position + 1
                return

    def upcoming(self, count: int) -> list[T]:
        """Return up to ``count`` recorded units that follow."""
        return self._recorded[self._cursor : self._cursor + count]
