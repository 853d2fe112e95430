"""The passes and events of one lane in the order of this rank.

Ranks that follow the same history need not talk. The history therefore predicts the next event of a pass, and the next
pass; only a deviation from the prediction has to be announced (:mod:`fsdp.comm.lane.lane`). The prediction is a
function of passes and events that all ranks have agreed on, so it is identical on all ranks.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import deque
from typing import Any

import torch

_MASK = (1 << 62) - 1
_CAPACITY = 1 << 15  # events that are remembered; forgotten ones are agreed on again


def hash_of(text: str) -> int:
    """Return a hash that is equal on all ranks, and not negative when it is read as an int64."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


class Pass:
    """A forward or backward of a tree, or another call in which its ranks communicate.

    Attributes:
        words: for errors: "forward of the root unit", "backward", "state_dict() of the root unit".
        call: identifies a call that all ranks have to make: "state_dict()"; empty for a forward or backward.
        often: whether the call belongs to every step, so that it is announced only where it is unexpected.
        advice: what to do where one rank alone should make the call, for the notice of a long wait.
        is_backward: whether this is a backward.
        kind: tells passes and calls apart; equal on all ranks.
    """

    __slots__ = ("_caller", "advice", "call", "is_backward", "kind", "often", "words")

    def __init__(
        self, words: str, caller: Any = None, *, call: str = "", often: bool = False, advice: str = ""
    ) -> None:
        """``caller`` is the unit whose forward this is, kept weakly; None for a backward or a call."""
        self.words, self.call, self.often, self.advice = words, call, often, advice
        self._caller = None if caller is None else weakref.ref(caller)
        self.is_backward = caller is None and not call
        evaluates = not (self.is_backward or call or torch.is_grad_enabled())
        self.kind = call or ("backward" if self.is_backward else "evaluation" if evaluates else "forward")

    @property
    def caller(self) -> Any:
        """The unit whose forward this is; None for a backward or a call."""
        return None if self._caller is None else self._caller()

    @property
    def is_forward(self) -> bool:
        return self._caller is not None

    @property
    def doing(self) -> str:
        """The words that follow "rank 0" in an error."""
        return f"has called {self.words}" if self.call else f"runs the {self.words}"


class Habit:
    """Predicts the next pass of a lane from the previous two. Holds a bounded number of entries."""

    LONGEST = 64  # passes since the last call that are told apart

    def __init__(self) -> None:
        self._followed: dict[tuple[int, ...], int] = {}  # by the last pass and the number of passes since a call
        self._last, self._count = (0, 0), 0
        self._forward: int | None = None  # the latest forward, predicted unless the history has a better match

    def _contexts(self) -> list[tuple[int, ...]]:
        """Return the keys to look up, the most specific one first."""
        counted = [(self._last[-1], self._count, 0)] if self._count < self.LONGEST else []
        return [*counted, self._last]

    @property
    def expected(self) -> int | None:
        """The number of the predicted pass."""
        known = (self._followed[context] for context in self._contexts() if context in self._followed)
        return next(known, self._forward)

    def note(self, number: int, what: Pass) -> None:
        """Learn that the pass ``what``, with this number, came next."""
        for context in self._contexts():
            self._followed[context] = number
        self._last = (self._last[-1], number)
        self._count = 0 if what.call else min(self._count + 1, self.LONGEST)
        if what.is_forward:
            self._forward = number


class History:
    """The order of passes and events as this rank has seen it.

    Attributes:
        latest: the latest pass that has begun.
        passes: the number of passes that have begun.
        rounds: the number of these without backwards, each of which belongs to the forward before it.
        position: the number of events in the latest pass.
        so_far: a hash of the events of the latest pass.
        begun: a hash of the latest pass and of the one before.
        label: of the latest event, for errors; empty at the begin of a pass.
        recent: the latest events, for errors, each with the number of the pass, the position in it, the number of the
            event, and the label. The begin of a pass has position -1, and the words for the pass.
    """

    def __init__(self) -> None:
        # hash of the events so far -> the event that followed, and the hash with it; the oldest first
        self._followers: dict[int, tuple[int, int]] = {}
        self._habit = Habit()
        self.latest: Pass | None = None
        self.passes = self.rounds = self.position = 0
        self.so_far = self.begun = 0
        self.label = ""
        self.recent: deque[tuple[int, int, int, str]] = deque(maxlen=32)

    def begin(self, number: int, what: Pass) -> int | None:
        """Begin the pass ``what``; return the number of the pass that was expected."""
        expected = self._habit.expected
        self._habit.note(number, what)
        so_far = hash_of(str(number))
        self.begun, self.so_far, self.position = (self.so_far * 1000003 + so_far) & _MASK, so_far, 0
        self.label = ""
        # in one line: an interrupt must leave a pass that has begun and is counted, or neither
        self.latest, self.passes, self.rounds = what, self.passes + 1, self.rounds + (not what.is_backward)
        self.recent.append((self.passes, -1, number, what.words))
        return expected

    def follow(self, label: str, number: int) -> bool:
        """Note an event if it is the expected one; return whether it is."""
        follower = self._followers.get(self.so_far)
        if follower is None or follower[0] != number:
            return False
        self.label = label
        self.recent.append((self.passes, self.position, number, label))
        self.so_far = follower[1]
        self.position += 1
        return True

    def about_to(self, label: str, number: int) -> None:
        """Show the next event to the other ranks, in errors, before this rank has agreed on it."""
        self.label = label
        self.recent.append((self.passes, self.position, number, label))

    @property
    def has_follower(self) -> bool:
        """Whether the next event is known."""
        return self.so_far in self._followers

    def note(self, number: int) -> None:
        """Record an event that all ranks have agreed on."""
        follower = number, (self.so_far * 1000003 + number + 1) & _MASK
        if self._followers.get(self.so_far) != follower:
            self._followers[self.so_far] = follower
            if len(self._followers) > _CAPACITY:
                del self._followers[next(iter(self._followers))]
        self.so_far = follower[1]
        self.position += 1
