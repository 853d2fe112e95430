"""Warnings that point at the user's own line, however deep in the package they are raised."""

from __future__ import annotations

import sys
import warnings

_PASSED = ("contextlib", "fsdp", "torch")


def warn_user(text: str) -> None:
    """Warn as from the innermost frame that lies outside of this package and of torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
