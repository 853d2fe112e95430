"""Ranges for profilers and the log: the actions of each unit, by the unit's name.

Profilers show ranges ``FullyShardedDataParallel.<action> <unit>``, with the actions ``forward``, ``_root_pre_forward``,
``_pre_forward``, ``_post_forward``, ``_pre_backward_hook``, ``_post_backward_hook``, ``gather``, ``prefetch`` and
``reduce``, and ``wait`` for the waits of the host for a collective. With ``FSDP_DEBUG=1`` each gather, prefetch and
reduction writes a line to the log ``fsdp``, at level INFO, with the rank and the number of the tree's forward. Without
a profiler a range costs one test.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fsdp import environment
from fsdp.comm.profiling import profiled, profiler_runs
from fsdp.comm.versions import set_frame_callback
from fsdp.runtime.hooks import breaks_graph

logger = logging.getLogger("fsdp")

Method = TypeVar("Method", bound=Callable[..., Any])


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
        def run(owner: Any, *args: Any) -> Any:
            before = set_frame_callback(None)
            try:
                if not profiler_runs():
                    return method(owner, *args)
                with profiled(action, name_of(owner)):
                    return method(owner, *args)
            finally:
                if before is not None:
                    set_frame_callback(before)

        return breaks_graph(run)  # type: ignore[return-value]

    return decorate
