"""The optional recorder of a step, used by ``fsdp.trace``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

NOTHING: AbstractContextManager[Any] = nullcontext()


class Recorder(Protocol):
    """Records spans of time."""

    def span(self, what: str, of: str) -> AbstractContextManager[Any]:
        """Return a context around an action ``what`` ("wait") on ``of`` (the label of a collective, or a unit)."""


class Told:
    """The current recorder, as an attribute that the hot path reads."""

    recorder: Recorder | None = None


def recorder() -> Recorder | None:
    """Return the current recorder."""
    return Told.recorder


def tell(new: Recorder | None) -> None:
    """Record by ``new`` from now on; None ends the recording.

    Raises:
        RuntimeError: another recorder is active.
    """
    if new is not None and Told.recorder is not None:
        raise RuntimeError("a step is being traced already: leave that trace before another begins")
    Told.recorder = new
