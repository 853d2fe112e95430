"""The order in which units run, recorded and replayed: whom to gather next.

A forward runs the units in some order, a backward in another. Each is recorded as it happens; the next one of the same
kind follows the record and finds there which unit will be needed next. A unit that comes at another place than recorded
moves the cursor, and where the record says nothing, nothing is gathered ahead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

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

    def upcoming(self, count: int) -> list[T]:
        """The next ``count`` units, as far as the record tells."""
        return self._recorded[self._cursor : self._cursor + count]


class PrefetchLimits:
    """How many units a tree gathers ahead, readable and writable by the names that tools know from FSDP1.

    Reading tells of the first unit, writing goes to all of them; what is written for the backward, only to those that
    gather ahead there at all.
    """

    def __init__(self, units: Sequence[Any], in_backward: Sequence[Any]) -> None:
        self._units = units
        self._in_backward = in_backward

    @property
    def _forward_prefetch_limit(self) -> int:
        return int(self._units[0].policy.forward_prefetch)

    @_forward_prefetch_limit.setter
    def _forward_prefetch_limit(self, count: int) -> None:
        self._set(self._units, "forward_prefetch", count)

    @property
    def _backward_prefetch_limit(self) -> int:
        return int(self._units[0].policy.backward_prefetch)

    @_backward_prefetch_limit.setter
    def _backward_prefetch_limit(self, count: int) -> None:
        self._set(self._in_backward, "backward_prefetch", count)

    @staticmethod
    def _set(units: Sequence[Any], name: str, count: Any) -> None:
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"a prefetch limit is a number of units, 0 or more, but got {count!r}")
        for unit in units:
            unit.policy = dataclasses.replace(unit.policy, **{name: count})
