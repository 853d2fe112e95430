"""Cleanup that an interrupt at any line cannot skip."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def undone_by(undo: Callable[[], object]) -> Iterator[None]:
    """Call ``undo``, which has to be idempotent, when the block ends. Do the work that it undoes inside of the block.

    ``undo`` is called twice: a KeyboardInterrupt may end one of the calls, and Python lets none come before the first.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(undo)
        stack.callback(undo)
        yield
