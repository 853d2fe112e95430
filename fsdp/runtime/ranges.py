"""Ranges for profilers, the step recorder and the log: the actions of each unit, by the unit's name.

Profilers show ranges ``FullyShardedDataParallel.<action> <unit>``, with the actions ``forward``, ``_root_pre_forward``,
``_pre_forward``, ``_post_forward``, ``_pre_backward_hook``, ``_post_backward_hook``, ``gather``, ``prefetch`` and
``reduce``. With ``FSDP_DEBUG=1`` each of the last three writes a line to the log ``fsdp``, at level INFO, with the rank
and the number of the tree's forward. Inside ``fsdp.trace`` waits for collectives are ranges as well.
Otherwise a range costs two tests.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fsdp import environment
from fsdp.comm.recording import NOTHING, Told
from fsdp.comm.versions import set_frame_callback
from fsdp.runtime.hooks import breaks_graph

logger = logging.getLogger("fsdp")

Method = TypeVar("Method", bound=Callable[..., Any])

profiler_runs: Callable[[], bool] = torch.autograd._profiler_enabled


def profiled(action: str, unit_name: str) -> AbstractContextManager[Any]:
    """Return a context that profilers show as a range of ``unit_name``."""
    if (told := Told.recorder) is not None:
        return told.span(action, unit_name)
    if not profiler_runs():
        return NOTHING
    return torch.autograd.profiler.record_function(f"FullyShardedDataParallel.{action} {unit_name}")


def logs() -> bool:
    """Return whether gathers and reductions are written to the log."""
    return logger.isEnabledFor(logging.INFO) and environment.DEBUG.value


def log(action: str, unit_name: str, forward: int) -> None:
    """Write a line to the log. ``forward`` is the number of the tree's forward."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    logger.info("rank %d, forward %d: %s %s", rank, forward, action, unit_name)


def ranged(action: str, name: str) -> Callable[[Method], Method]:
    """Decorate a method or function as ``untraced`` and ``profiled``. ``name`` is the path of the unit's name in the
    first argument."""
    name_of = operator.attrgetter(name)

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
            before = set_frame_callback(None)
            try:
                if Told.recorder is None and not profiler_runs():
                    return method(owner, *args, **kwargs)
                with profiled(action, name_of(owner)):
                    return method(owner, *args, **kwargs)
            finally:
                if before is not None:
                    set_frame_callback(before)

        return breaks_graph(run)  # type: ignore[return-value]

    return decorate
