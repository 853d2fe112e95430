"""Ranges that profilers show: the actions of the engine on units and collectives, by name."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

RANGE = "FullyShardedDataParallel."  # the beginning of the name of each range
NOTHING: AbstractContextManager[Any] = nullcontext()

profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled


def profiled(action: str, of: str) -> AbstractContextManager[Any]:
    """Return a context that profilers show as a range ``action`` of a unit or, for a wait, of a collective."""
    return torch.autograd.profiler.record_function(f"{RANGE}{action} {of}") if profiler_runs() else NOTHING
