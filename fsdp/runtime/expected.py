"""Which gradients the backwards under way have still to bring to a unit, by graph task.

See [Note: When a unit's backward is over] in ``backward.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.released import PLAIN_KINDS
from fsdp.runtime import hooks

LeafKey = tuple[int, int]  # bucket, index; see ``FlatParamHandle.all_leaves``
SMALL = 1 << 16  # bytes: so large a gradient may lie beside its slot for a while


class Arrived:
    """The gradients of one unit's leaves that are complete, until somebody takes them.

    That is at once; but where :attr:`task` says that the backward will come by the unit again, those of small leaves
    wait for that, to be taken together. So does what follows on the last of all: autograd may hold that one until its
    hook has returned.

    Attributes:
        all_taken: whether the last of all was taken, and nothing has followed on that.
        gradients: which leaf's, and it, or None where a hook on the leaf has taken it.
        task: the only graph task that has reached the unit, while it has not passed the unit; else None.
    """

    __slots__ = ("_look", "all_taken", "gradients", "task")

    def __init__(self, look: Callable[[], None]) -> None:
        """``look`` looks at them, and takes them."""
        self._look = look
        self.gradients: list[tuple[LeafKey, torch.Tensor | None]] = []
        self.task: int | None = None
        self.all_taken = False

    @hooks.breaks_graph
    def small(self, key: LeafKey, leaf: torch.Tensor) -> None:
        """The gradient of ``leaf`` is complete."""
        if self.task is not None and self.task != hooks.current_backward():
            self._end_wait()
        self.gradients.append((key, leaf.grad))
        leaf.grad = None
        if self.task is None:
            self._look()

    @hooks.breaks_graph
    def large(self, key: LeafKey, leaf: torch.Tensor) -> None:
        """As ``small``, without a wait."""
        self.small(key, leaf)
        if self.task is not None:
            self._look()

    def _end_wait(self) -> None:
        """What comes is of another graph task than those that wait."""
        if self.gradients:
            self._look()
        self.task = None

    def take(self) -> list[tuple[LeafKey, torch.Tensor | None]]:
        """All that are there, which are so no more."""
        taken = self.gradients[:]
        del self.gradients[: len(taken)]  # another thread may bring more
        return taken


class ExpectedLeaves:
    """The leaves of one unit: hooked once each, and expected by the graph tasks that reach them.

    Attributes:
        arrived: the gradients that have come.
        of_task: by graph task, the leaves it has still to deliver. One that delivered all stays, with nothing, so that
            it is not asked again.
    """

    def __init__(self, handles: Sequence[FlatParamHandle], look: Callable[[], None]) -> None:
        """``look`` looks at the gradients that have arrived."""
        self._handles, self.arrived = handles, Arrived(look)
        self.of_task: dict[int, set[LeafKey]] = {}
        self._hooked: set[int] = set()  # the ids of the leaves that are, frozen ones among them
        # key and accumulator of each leaf that requires grad, by the leaf's id; held so that they stay
        self._accumulators: dict[int, tuple[LeafKey, Any]] = {}
        self._nodes: list[Any] = []
        self.watch()

    def watch(self) -> None:
        """Hook the leaves that require grad now, as far as they are not yet."""
        with torch.inference_mode(False), torch.enable_grad():
            for key, leaf in self._leaves():
                if leaf.requires_grad and id(leaf) not in self._accumulators:
                    self._accumulators[id(leaf)] = (key, hooks.accumulator_of(leaf))
                    if id(leaf) not in self._hooked:
                        self._hooked.add(id(leaf))
                        small = type(leaf) in PLAIN_KINDS and leaf.nbytes <= SMALL
                        arrives = self.arrived.small if small else self.arrived.large
                        hooks.on_accumulated(leaf, functools.partial(arrives, key))
        self._keys = [key for key, _ in self._accumulators.values()]
        self._nodes = [node for _, node in self._accumulators.values()]

    def renew(self) -> None:
        """The leaves changed their dtype or device, or train on another stream: the old nodes match nothing, or run
        there. Where a graph holds an old one, it stays."""
        self._accumulators.clear()
        self._nodes.clear()  # a node lives as long as somebody holds it
        self._hooked &= {id(leaf) for _, leaf in self._leaves()}  # a DTensor of another dtype is another leaf
        self.watch()

    def _leaves(self) -> list[tuple[LeafKey, torch.Tensor]]:
        return [((bucket, i), leaf) for bucket, handle in enumerate(self._handles) for i, leaf in handle.all_leaves]

    def of_this_task(self) -> set[LeafKey]:
        """What the running graph task has still to deliver; found out when it is first seen."""
        task = hooks.current_backward()
        expected = self.of_task.get(task)
        if expected is None:
            expected = self.of_task[task] = hooks.those_that_run(self._keys, self._nodes)
        return expected

    def may_wait(self) -> None:
        """The running graph task has entered a call of the unit, and tells when it has passed that: gradients of small
        leaves may wait for it, unless other tasks have reached the unit as well."""
        self.arrived.task = hooks.current_backward() if len(self.of_task) == 1 else None

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
        self.arrived.task, self.arrived.all_taken = None, False
        self.arrived.gradients.clear()
