"""Which units of one tree have their full buffers in memory, and why.

[Note: Idle units]
A unit may be gathered without being in use: gathered ahead, or left so by a recomputation whose backward is about to
come. It stays while there is room (``RootContext.make_room``) and is resharded first when there is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum, auto
from typing import Generic, TypeVar

T = TypeVar("T")


class Residence(Enum):
    """Why a unit's full buffers have memory."""

    SHARDED = auto()  # they have none
    PREFETCHED = auto()  # it will be needed soon
    IN_USE = auto()  # the modules compute with them, or they are shown, or returned by a forward
    RECOMPUTED = auto()  # its forward was recomputed, its backward follows
    KEPT = auto()  # its strategy keeps it for the next pass


_IDLE = (Residence.PREFETCHED, Residence.RECOMPUTED)
_NEXT = {
    Residence.SHARDED: (Residence.PREFETCHED, Residence.IN_USE),
    Residence.PREFETCHED: (Residence.IN_USE, Residence.KEPT, Residence.SHARDED),
    Residence.IN_USE: (Residence.PREFETCHED, Residence.RECOMPUTED, Residence.KEPT, Residence.SHARDED),
    Residence.RECOMPUTED: (Residence.PREFETCHED, Residence.IN_USE, Residence.KEPT, Residence.SHARDED),
    Residence.KEPT: (Residence.PREFETCHED, Residence.IN_USE, Residence.SHARDED),
}


class Residency(Generic[T]):
    """Of every unit of one tree, why it is gathered. What is not sharded is never in it."""

    def __init__(self) -> None:
        self._of: dict[T, Residence] = {}  # those that are gathered, in the order in which they became what they are

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._of))

    def of(self, unit: T) -> Residence:
        return self._of.get(unit, Residence.SHARDED)

    def gathers(self, unit: T, why: Residence) -> None:
        """``unit`` gets memory, or its memory is filled again."""
        before = self._of.pop(unit, Residence.SHARDED)
        if why is not before and why not in _NEXT[before]:
            raise AssertionError(f"a unit went from {before.name} to {why.name}")
        if why is not Residence.SHARDED:
            self._of[unit] = why

    def becomes(self, unit: T, why: Residence) -> bool:
        """If ``unit`` is gathered, it is so for another reason from here on, or not at all; returns whether it was."""
        if unit not in self._of:
            return False
        self.gathers(unit, why)
        return True

    @property
    def idle(self) -> list[T]:
        """What is gathered and not in use, the oldest first; see [Note: Idle units]."""
        return [unit for unit, why in self._of.items() if why in _IDLE]
