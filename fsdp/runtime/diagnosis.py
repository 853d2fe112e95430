"""What ranks report to each other when one of them waits for long, and what can be seen from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

END_WORDS = "end the pass"


class Entry(NamedTuple):
    """One collective of a pass: in which pass and where in it, and what it was, as a number and in words."""

    number: int
    position: int
    event: int
    words: str


class Report(NamedTuple):
    """What a rank reports of itself to the others."""

    met: int  # how often the ranks have met after a failure; what was reported before is of no use
    number: int  # of its pass
    kind: int  # of pass; equal on all ranks
    words: str  # for the pass
    is_call: bool
    begun: int  # a hash of the pass and of all in the one before it
    gave_up: Sequence[Any] | None  # the pass that failed: its number, how far it had come, and words for it
    announces: int | None  # the position for which it waits until all ranks announce the same
    recent: list[Entry]

    @staticmethod
    def of(values: list[Any]) -> Report:
        """From the form that JSON has given it."""
        return Report(*values)._replace(recent=[Entry(*entry) for entry in values[-1]])

    @property
    def doing(self) -> str:
        return f"the {self.words}" if self.words else "what comes before the first pass"

    @property
    def of_pass(self) -> list[Entry]:
        return [entry for entry in self.recent if entry.number == self.number]

    @property
    def runs(self) -> str:
        """Words for the pass or call, after "rank 0"."""
        return f"has called {self.words}" if self.is_call else f"runs {self.doing}"

    @property
    def where(self) -> str:
        """Words for how far the rank has come, after "rank 0"."""
        if not self.of_pass:
            return f"has called {self.words}" if self.is_call else f"begins {self.doing}"
        latest = self.of_pass[-1].words
        return f"is at the end of {self.doing}" if latest == END_WORDS else f"is about to {latest}, in {self.doing}"

    @property
    def place(self) -> tuple[int, int]:
        """How far it has come."""
        return self.number, self.of_pass[-1].position if self.of_pass else -1

    def did_around(self, place: tuple[int, int]) -> str:
        """What it did just before that place and since, in words."""
        words = [entry.words for entry in self.recent if (entry.number, entry.position) >= (place[0], place[1] - 1)]
        return " -> ".join(words[:4]) or "something else"


def first_difference(texts: Mapping[int, str]) -> str:
    """Of models as each rank has wrapped its own: a line for each unit, with its name and what has to be equal."""
    units = {rank: text.split("\n") if text else [] for rank, text in texts.items()}
    for position in range(max(map(len, units.values()))):
        there = {rank: [*lines, *["none: no such unit"] * position][position] for rank, lines in units.items()}
        first = next(iter(there))
        for rank, line in there.items():
            if line.partition(": ")[2] != there[first].partition(": ")[2]:
                return (
                    f"the ranks have wrapped different models. The first difference is at unit {position} of the "
                    f"group: rank {first} has {there[first]}; rank {rank} has {line}. Build and wrap the same model on "
                    "every rank"
                )
    raise AssertionError("the digests differ, and the texts do not")


def different_passes(here: Mapping[int, Report]) -> str | None:
    """Ranks in passes of the same number that are not the same, or that do not follow on the same."""
    for what, before in (("kind", ""), ("begun", " after something else")):
        if len({getattr(words, what) for words in here.values()}) > 1:
            return "; ".join(f"rank {rank} {words.runs}{before}" for rank, words in sorted(here.items()))
    return None


def different_order(here: Mapping[int, Report]) -> str | None:
    """Ranks in the same pass that do different things at the same place in it."""
    by_place = {rank: {entry.position: entry for entry in words.of_pass} for rank, words in here.items()}
    for position in sorted({position for entries in by_place.values() for position in entries}):
        there = {rank: entries[position] for rank, entries in by_place.items() if position in entries}
        if len({entry.event for entry in there.values()}) > 1:
            doing = "; ".join(f"rank {rank} is about to {entry.words}" for rank, entry in sorted(there.items()))
            return f"in {next(iter(here.values())).doing}, at its collective {position}, {doing}"
    return None


def passed_by(waiting: int, other: int, reports: Mapping[int, Report]) -> str | None:
    """Rank ``waiting`` waits until all announce what ``other`` has gone by; who is where, and what was done there."""
    position = reports[waiting].announces
    if position is None or reports[other].place <= (reports[waiting].number, position):
        return None
    place = reports[waiting].number, position
    return (
        f"rank {waiting} {reports[waiting].where} (collective {position}), and waits for all ranks to do the same; "
        f"rank {other} did {reports[other].did_around(place)}, and {reports[other].where}"
    )


def left_alone(other: int, own: Report, rank: int, reports: Mapping[int, Report]) -> str | None:
    """``other`` gave up a pass that ``rank`` has gone on with, or left behind, or a call in which ``rank`` waits."""
    gave_up = reports[other].gave_up
    if gave_up is None:
        return None
    number, count, words = gave_up
    if own.number < number or (own.number == number and own.place[1] < count and not own.is_call):
        return None
    return f"rank {other} failed in the {words} (collective {count}), and rank {rank} {own.where}"
