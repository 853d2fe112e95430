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


def profiled(what: str, unit_name: str) -> AbstractContextManager[Any]:
    """Around what ``unit_name`` does: a range, where a profiler runs."""
    if (told := Told.recorder) is not None:
        return told.span(what, unit_name)
    if not profiler_runs():
        return NOTHING
    return torch.autograd.profiler.record_function(f"FullyShardedDataParallel.{what} {unit_name}")


def logs() -> bool:
    """Whether what communicates is to be told of in the log."""
    return logger.isEnabledFor(logging.INFO) and environment.DEBUG.value


def communicates(what: str, unit_name: str, forward: int, *, logged: bool) -> AbstractContextManager[Any]:
    """As ``profiled``, and if it is ``logged`` a line in the log, for what a unit does in or after its tree's
    ``forward``-th forward."""
    if logged:
        rank = dist.get_rank() if dist.is_initialized() else 0
        logger.info("rank %d, forward %d: %s %s", rank, forward, what, unit_name)
    elif Told.recorder is None and not profiler_runs():
        return NOTHING
    return profiled(what, unit_name)


def ranged(what: str, name: str) -> Callable[[Method], Method]:
    """For what the engine does for a unit: ``untraced``, and ``profiled`` around all of it. ``name`` says where the
    object that the method is of has the name of the unit."""
    name_of = operator.attrgetter(name)

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
            before = set_frame_callback(None)
            try:
                if Told.recorder is None and not profiler_runs():
                    return method(owner, *args, **kwargs)
                with profiled(what, name_of(owner)):
                    return method(owner, *args, **kwargs)
            finally:
                if before is not None:
                    set_frame_callback(before)

        return breaks_graph(run)  # type: ignore[return-value]

    return decorate
