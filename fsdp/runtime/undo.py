"""What is undone although an interrupt may come at any line."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Enclose what ``undo`` undoes, which is idempotent. Enter the context before that is done.

    ``undo`` is called twice: a KeyboardInterrupt may end one of the calls, and Python lets none come before the first.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(undo)
        stack.callback(undo)
        yield
