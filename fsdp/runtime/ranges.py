"""What profilers and logs show of a step: what each unit does, by its name.

Profilers show it as ranges ``FullyShardedDataParallel.<what> <unit>``: ``forward``, ``_root_pre_forward``,
``_pre_forward``, ``_post_forward``, ``_pre_backward_hook``, ``_post_backward_hook``, ``gather``, ``prefetch`` and
``reduce``. With ``FSDP_DEBUG=1`` each of the last three is a line in the log ``fsdp``, at level INFO, with the rank and
the number of the forward of its tree. Inside ``fsdp.trace`` that is told of them, and profilers are not. Where nobody
asks, it costs two questions per range.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp.comm.recording import Told
from fsdp.comm.streams import NOTHING

logger = logging.getLogger("fsdp")

Method = TypeVar("Method", bound=Callable[..., Any])

_profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled


def profiled(what: str, unit_name: str) -> AbstractContextManager[Any]:
    """Around what ``unit_name`` does: a range, where a profiler runs."""
    if (told := Told.recorder) is not None:
        return told.span(what, unit_name)
    if not _profiler_runs():
        return NOTHING
    return torch.autograd.profiler.record_function(f"FullyShardedDataParallel.{what} {unit_name}")


def communicates(what: str, unit_name: str, forward: int) -> AbstractContextManager[Any]:
    """As ``profiled``, and a line in the log, for what a unit does in or after its tree's ``forward``-th forward."""
    if logger.isEnabledFor(logging.INFO) and os.environ.get("FSDP_DEBUG", "0") == "1":
        rank = dist.get_rank() if dist.is_initialized() else 0
        logger.info("rank %d, forward %d: %s %s", rank, forward, what, unit_name)
    return profiled(what, unit_name)


def ranged(what: str) -> Callable[[Method], Method]:
    """For methods of a unit: ``profiled`` around all of it."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def run(unit: Any, *args: Any, **kwargs: Any) -> Any:
            if Told.recorder is None and not _profiler_runs():
                return method(unit, *args, **kwargs)
            with profiled(what, unit.name):
                return method(unit, *args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate
