"""Reports that ranks exchange when one of them waits for long, and the differences that follow from them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

END_WORDS = "end the pass"


class Entry(NamedTuple):
    """One event of a pass: the number of the pass, the position in it, the number of the event, and its label."""

    number: int
    position: int
    event: int
    label: str


class Report(NamedTuple):
    """The state of a rank in one lane, as its peers see it."""

    met: int  # the number of meetings; reports from before the latest one are void
    number: int  # of the pass
    kind: int  # of the pass; equal on all ranks
    words: str  # for the pass
    is_call: bool
    begun: int  # a hash of the pass and of all events of the one before
    progress: Sequence[int]  # the collectives that the rank has issued; see ``Lane._progress``
    failure: Sequence[Any] | None  # the fields of ``Failure`` in ``lane.py``
    announces: int | None  # the position for which the rank waits until all ranks announce the same event
    recent: list[Entry]

    @staticmethod
    def of(values: list[Any]) -> Report:
        """Restore a report from JSON."""
        return Report(*values)._replace(recent=[Entry(*entry) for entry in values[-1]])

    @property
    def doing(self) -> str:
        return f"the {self.words}" if self.words else "what comes before the first pass"

    @property
    def of_pass(self) -> list[Entry]:
        """The recent events of the current pass."""
        return [entry for entry in self.recent if entry.number == self.number]

    @property
    def runs(self) -> str:
        """The pass or call in words that follow "rank 0"."""
        return f"has called {self.words}" if self.is_call else f"runs {self.doing}"

    @property
    def where(self) -> str:
        """The progress of the rank in words that follow "rank 0"."""
        if not self.of_pass:
            return f"has called {self.words}" if self.is_call else f"begins {self.doing}"
        latest = self.of_pass[-1].label
        return f"is at the end of {self.doing}" if latest == END_WORDS else f"is about to {latest}, in {self.doing}"

    @property
    def place(self) -> tuple[int, int]:
        """The progress of the rank as numbers: the pass, and the position in it."""
        return self.number, self.of_pass[-1].position if self.of_pass else -1

    def did_around(self, place: tuple[int, int]) -> str:
        """Describe the events just before ``place`` and since."""
        words = [entry.label for entry in self.recent if (entry.number, entry.position) >= (place[0], place[1] - 1)]
        return " -> ".join(words[:4]) or "something else"


def first_difference(texts: Mapping[int, str]) -> str:
    """Describe the first difference between the models that the ranks have wrapped.

    Args:
        texts: by rank a line per unit: the name, and after ": " the facts that have to be equal.
    """
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
    """Find ranks in passes of one number that are different, or that follow different passes."""
    for field, before in (("kind", ""), ("begun", " after something else")):
        if len({getattr(report, field) for report in here.values()}) > 1:
            return "; ".join(f"rank {rank} {report.runs}{before}" for rank, report in sorted(here.items()))
    return None


def different_order(here: Mapping[int, Report]) -> str | None:
    """Find ranks in the same pass with different events at the same position."""
    by_place = {rank: {entry.position: entry for entry in report.of_pass} for rank, report in here.items()}
    for position in sorted({position for entries in by_place.values() for position in entries}):
        there = {rank: entries[position] for rank, entries in by_place.items() if position in entries}
        if len({entry.event for entry in there.values()}) > 1:
            doing = "; ".join(f"rank {rank} is about to {entry.label}" for rank, entry in sorted(there.items()))
            return f"in {next(iter(here.values())).doing}, at its collective {position}, {doing}"
    return None


def passed_by(waiting: int, other: int, reports: Mapping[int, Report]) -> str | None:
    """Find whether ``other`` is past the position for which rank ``waiting`` waits to be joined."""
    position = reports[waiting].announces
    if position is None or reports[other].place <= (reports[waiting].number, position):
        return None
    place = reports[waiting].number, position
    return (
        f"rank {waiting} {reports[waiting].where} (collective {position}), and waits for all ranks to do the same; "
        f"rank {other} did {reports[other].did_around(place)}, and {reports[other].where}"
    )


def left_alone(other: int, own: Report, rank: int, reports: Mapping[int, Report]) -> str | None:
    """Find whether ``other`` failed in a pass or call in which ``rank`` continues, or which ``rank`` has ended."""
    failure = reports[other].failure
    if failure is None:
        return None
    number, count, words, issued = failure
    if own.number < number:
        return None
    has_issued_more = any(there < here for there, here in zip(issued, own.progress))
    if own.number == number and own.place[1] < count and not own.is_call and not has_issued_more:
        return None
    return f"rank {other} failed in the {words} (collective {max(count, 0)}), and rank {rank} {own.where}"
