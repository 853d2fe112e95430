"""Which gradients the backwards under way have still to bring to a unit, by graph task.

See [Note: When a unit's backward is over] in ``backward.py``.
"""

from __future__ import annotations

import functools
import threading
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

    Hooks hold this, and so it holds no leaf: what refers to itself lives until the collector comes.

    Attributes:
        all_taken: whether the last of all was taken, and nothing has followed on that.
        gradients: which leaf's, and it, or None where a hook on the leaf has taken it.
        hooks: of the small leaves.
        nested: whether a graph task other than the one that entered the unit has ever brought one.
        small: which leaf has which id, of these.
        task: the only graph task that has reached the unit, while it has not passed the unit; else None.
    """

    __slots__ = ("_look", "all_taken", "gradients", "hooks", "nested", "small", "task")

    def __init__(self, look: Callable[[], None]) -> None:
        """``look`` looks at them, and takes them."""
        self._look = look
        self.gradients: list[tuple[LeafKey, torch.Tensor | None]] = []
        self.task: int | None = None
        self.all_taken = self.nested = False
        self.hooks = hooks.SharedHooks(self._small_arrived)
        self.small: dict[int, LeafKey] = {}

    def end_wait(self) -> None:
        """What comes is looked at when it comes, and what is there now."""
        if self.gradients:
            self._look()
        self.task = None

    @hooks.breaks_graph
    def _small_arrived(self, leaf: torch.Tensor) -> None:
        """The gradient of ``leaf`` is complete."""
        self.large(self.small[id(leaf)], leaf, waits=True)

    @hooks.breaks_graph
    def large(self, key: LeafKey, leaf: torch.Tensor, *, waits: bool = False) -> None:
        """As ``_small_arrived``, of one that is large, unless it ``waits`` for others if that is of use."""
        if self.task is not None and self.task != hooks.current_backward():
            self.nested = True
            self.end_wait()  # this one is of another graph task
        self.gradients.append((key, leaf.grad))
        leaf.grad = None
        if self.task is None or not waits:
            self._look()

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
        left_by: the thread on which autograd leaves gradients on the leaves now; see ``stay``.
    """

    def __init__(self, handles: Sequence[FlatParamHandle], look: Callable[[], None]) -> None:
        """``look`` looks at the gradients that have arrived."""
        self._handles, self.arrived = handles, Arrived(look)
        self.of_task: dict[int, set[LeafKey]] = {}
        self._hooked: set[int] = set()  # the ids of the leaves that are, frozen ones among them
        # key and accumulator of each leaf that requires grad, by the leaf's id; held so that they stay
        self._accumulators: dict[int, tuple[LeafKey, Any]] = {}
        self._nodes: list[Any] = []
        self._all_small: list[tuple[LeafKey, torch.Tensor]] = []  # what requires grad, if no gradient of it is large
        self._small_keys: frozenset[LeafKey] = frozenset()  # theirs
        self.left_by: int | None = None
        self.is_new = False  # whether the call that was entered last was the first one of a backward
        self._was_hooked = False  # whether a backward has brought gradients by hooks
        self.watch()

    def watch(self) -> None:
        """Hook the leaves that require grad now, as far as they are not yet."""
        leaves, arrived = self._leaves(), self.arrived
        wholes = [len(handle.layout.params) for handle in self._handles]  # what stands for all, and hardly anybody uses
        with torch.inference_mode(False), torch.enable_grad():
            for key, leaf in leaves:
                if leaf.requires_grad and id(leaf) not in self._accumulators:
                    self._accumulators[id(leaf)] = (key, hooks.accumulator_of(leaf))
                    if id(leaf) in self._hooked:
                        continue
                    self._hooked.add(id(leaf))
                    if type(leaf) in PLAIN_KINDS and leaf.nbytes <= SMALL and key[1] != wholes[key[0]]:
                        arrived.small[id(leaf)] = key
                        hooks.share(leaf, arrived.hooks)
                    else:
                        hooks.on_accumulated(leaf, functools.partial(arrived.large, key))
        self._keys = [key for key, _ in self._accumulators.values()]
        self._nodes = [node for _, node in self._accumulators.values()]
        trained = [(key, leaf) for key, leaf in leaves if leaf.requires_grad and key[1] != wholes[key[0]]]
        self._all_small = trained if arrived.small.keys() >= {id(leaf) for _, leaf in trained} else []
        self._small_keys = frozenset([key for key, _ in self._all_small])

    def renew(self) -> None:
        """The leaves changed their dtype or device, or train on another stream: the old nodes match nothing, or run
        there. Where a graph holds an old one, it stays."""
        self._accumulators.clear()
        self._nodes.clear()  # a node lives as long as somebody holds it
        self._hooked &= {id(leaf) for _, leaf in self._leaves()}  # a DTensor of another dtype is another leaf
        self.arrived.small = {of: key for of, key in self.arrived.small.items() if of in self._hooked}
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

    def enter(self) -> set[LeafKey]:
        """The running graph task has entered a call of the unit, and tells when it has passed that: gradients of small
        leaves may wait for it, unless other tasks have reached the unit as well. Returns what the task has still to
        deliver."""
        self.is_new = not self.of_task
        expected = self.of_this_task()
        if len(self.of_task) == 1:
            self.arrived.task = hooks.current_backward()
        else:
            if self.left_by == threading.get_ident():
                self.end_stay()
            self.arrived.end_wait()
        return expected

    def brings_all(self, expected: set[LeafKey]) -> bool:
        """Whether the task that has just entered a call, the first one, brings the gradients of all leaves, which are
        small, by itself: as far as the backwards before tell, of which each unit's first has hooks for that.
        ``expected`` is what it has to deliver."""
        told = self._was_hooked and not self.arrived.nested
        return told and self.is_new and bool(self._all_small) and expected >= self._small_keys

    def stay(self) -> None:
        """Autograd leaves gradients on the leaves from here on and calls nobody, and who comes by the unit looks there
        (``collect``): hooks would cost more than all else that is done for small gradients."""
        self.left_by = threading.get_ident()
        self.arrived.hooks.clear()

    def collect(self) -> None:
        """Gradients that autograd has left on the leaves have arrived."""
        for key, leaf in self._all_small:
            grad = leaf.grad
            if grad is not None:
                leaf.grad = None
                self.arrived.gradients.append((key, grad))

    def end_stay(self) -> None:
        """The same, and those that are to come will be brought by hooks."""
        if self.left_by is not None:
            self.collect()
            self.left_by = None
            self.arrived.hooks.resume()

    def __bool__(self) -> bool:
        """Whether any task has gradients to deliver."""
        return any(self.of_task.values())

    @property
    def seen(self) -> bool:
        """Whether a backward under way has been here."""
        return bool(self.of_task)

    def forget(self) -> None:
        """The backward is over, or failed."""
        self._was_hooked = self._was_hooked or bool(self.of_task)
        self.end_stay()
        self.of_task.clear()
        self.arrived.task, self.arrived.all_taken = None, False
        self.arrived.gradients.clear()
