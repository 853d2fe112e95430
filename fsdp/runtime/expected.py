"""Which gradients the backwards under way have still to bring to a unit, by graph task.

See [Note: When a unit's backward is over] in ``backward.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp.flat.flat_param import FlatParamHandle
from fsdp.runtime import hooks

LeafKey = tuple[int, int]  # bucket, index; see ``FlatParamHandle.all_leaves``


class ExpectedLeaves:
    """The leaves of one unit: hooked once each, and expected by the graph tasks that reach them.

    Attributes:
        of_task: by graph task, the leaves it has still to deliver. One that delivered all stays, with nothing, so that
            it is not asked again.
    """

    def __init__(self, handles: Sequence[FlatParamHandle], arrived: Callable[[LeafKey, torch.Tensor], None]) -> None:
        """``arrived`` is told of each leaf whose gradient of the running graph task is complete."""
        self._handles, self._arrived = handles, arrived
        self.of_task: dict[int, set[LeafKey]] = {}
        self._hooked: set[int] = set()  # the ids of the leaves that are, frozen ones among them
        # key and accumulator of each leaf that requires grad, by the leaf's id; held so that they stay
        self._accumulators: dict[int, tuple[LeafKey, Any]] = {}
        self.watch()

    def watch(self) -> None:
        """Hook the leaves that require grad now, as far as they are not yet."""
        with torch.inference_mode(False), torch.enable_grad():
            for key, leaf in self._leaves():
                if leaf.requires_grad and id(leaf) not in self._accumulators:
                    self._accumulators[id(leaf)] = (key, hooks.accumulator_of(leaf))
                    if id(leaf) not in self._hooked:
                        self._hooked.add(id(leaf))
                        hooks.on_accumulated(leaf, functools.partial(self._arrived, key))

    def renew(self) -> None:
        """The leaves changed their dtype or device, or train on another stream: the old nodes match nothing, or run
        there. Where a graph holds an old one, it stays."""
        self._accumulators.clear()  # a node lives as long as somebody holds it
        self._hooked &= {id(leaf) for _, leaf in self._leaves()}  # a DTensor of another dtype is another leaf
        self.watch()

    def _leaves(self) -> list[tuple[LeafKey, torch.Tensor]]:
        return [((bucket, i), leaf) for bucket, handle in enumerate(self._handles) for i, leaf in handle.all_leaves]

    def of_this_task(self) -> set[LeafKey]:
        """What the running graph task has still to deliver; found out when it is first seen."""
        task = hooks.current_backward()
        if task not in self.of_task:
            self.of_task[task] = hooks.those_that_run(self._accumulators.values())
        return self.of_task[task]

    def __bool__(self) -> bool:
        """Whether any task has gradients to deliver."""
        return any(self.of_task.values())

    @property
    def seen(self) -> bool:
        """Whether a backward under way has been here."""
        return bool(self.of_task)

    def forget(self) -> None:
        """The backward is over, or failed."""
        self.of_task.clear()
