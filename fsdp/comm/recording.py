"""Whom a rank tells what it does, and for how long: a recorder, while there is one. Without one it costs a question."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class _Nothing:
    """As ``contextlib.nullcontext``, but both calls are of a C function, which takes whatever comes and returns what is
    false, so that exceptions go on. A step comes by here often."""

    __enter__ = __exit__ = "".format


NOTHING: AbstractContextManager[Any] = _Nothing()  # type: ignore[assignment]


class Recorder(Protocol):
    """Is told of spans of time."""

    def span(self, what: str, of: str) -> AbstractContextManager[Any]:
        """Around ``what`` the rank does with, or waits for, ``of``."""


class Told:
    """Who is told now: where this is asked often, it is asked here."""

    recorder: Recorder | None = None


def recorder() -> Recorder | None:
    """Who is told now."""
    return Told.recorder


def tell(new: Recorder | None) -> None:
    """Tell ``new`` from now on, or nobody.

    Raises:
        RuntimeError: somebody else is told already.
    """
    if new is not None and Told.recorder is not None:
        raise RuntimeError("a step is being traced already: leave that trace before another begins")
    Told.recorder = new
