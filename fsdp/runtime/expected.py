"""The gradients that the backwards under way have still to bring to a unit, by graph task, and those that arrived.

See [Note: When a unit's backward is over] in ``backward.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.released import PLAIN_KINDS
from fsdp.runtime import hooks
from fsdp.runtime.outside import OutsideUses

LeafKey = tuple[int, int]  # bucket, index; see ``FlatParamHandle.all_leaves``
Arrival = tuple[LeafKey, torch.Tensor | None]  # a leaf and its gradient; None if a hook on the leaf has taken that
SMALL = 1 << 16  # bytes: so large a gradient may lie beside its slot for a while


class Arrived:
    """The gradients of one unit's leaves that are complete and not yet copied into their slots.

    A gradient is copied as soon as it arrives, except a small one while :attr:`task` says that the backward will pass
    the unit later: small ones are then copied together. The reduction that follows the last gradient waits for the same
    moment, because autograd may hold that gradient until its hook has returned.

    The hooks of the leaves refer to this object, so it refers to no leaf: a reference cycle would keep a deleted model
    until the next garbage collection.

    Attributes:
        gradients: the arrivals, in their order.
        task: the graph task that has entered the unit and not passed it, if it is the only one; else None.
        all_taken: whether the last expected gradient was copied, and the unit has not been reduced since.
    """

    __slots__ = ("_look", "all_taken", "gradients", "task")

    def __init__(self, look: Callable[[], None]) -> None:
        """``look`` copies the gradients that have arrived."""
        self._look = look
        self.gradients: list[Arrival] = []
        self.task: int | None = None
        self.all_taken = False

    def end_wait(self) -> None:
        """Copy the gradients that wait, and from now on each one when it arrives."""
        if self.gradients:
            self._look()
        self.task = None

    @hooks.breaks_graph
    def arrive(self, key: LeafKey, may_wait: bool, leaf: torch.Tensor) -> None:
        """Note that the gradient of ``leaf`` is complete."""
        if self.task is not None and self.task != hooks.current_backward():
            self.end_wait()  # this gradient is of another graph task
        self.gradients.append((key, leaf.grad))
        leaf.grad = None
        if self.task is None or not may_wait:
            self._look()

    def take(self) -> list[Arrival]:
        """Return and forget the arrivals."""
        taken = self.gradients[:]
        del self.gradients[: len(taken)]  # another thread may bring more
        return taken


class ExpectedLeaves:
    """The leaves of one unit, each with a hook, and the ones that each graph task has still to deliver.

    Attributes:
        arrived: the gradients that have come.
        of_task: by graph task, the leaves it has still to deliver. A task that delivered all keeps an empty set, so
            that autograd is not asked again.
        lost: leaves that were unfrozen when the backward began, which reaches them and has not done so since. Where it
            had done so before, while they were frozen, autograd has dropped their gradients.
    """

    def __init__(self, handles: Sequence[FlatParamHandle], look: Callable[[], None], outside: OutsideUses) -> None:
        """``look`` copies the gradients that have arrived. ``outside`` hooks the tensors that are no leaves."""
        self._handles, self.arrived, self._outside = handles, Arrived(look), outside
        self.of_task: dict[int, set[LeafKey]] = {}
        self._hooked: set[int] = set()  # the ids of the leaves with a hook, frozen ones among them
        # key and accumulator of each leaf that requires grad, by the leaf's id; held so that they stay
        self._accumulators: dict[int, tuple[LeafKey, Any]] = {}
        self._keys: list[LeafKey] = []
        self._nodes: list[Any] = []
        self.lost: set[LeafKey] = set()
        self._until_found: list[Any] = []  # the hooks by which gradients of these are found
        self.watch()

    def watch(self, *, awaits_unfrozen: bool = False) -> None:
        """Hook the leaves that require grad now, unless they are hooked already. With ``awaits_unfrozen`` a backward
        begins, and its gradients of leaves that required none until now are ``lost`` until they arrive."""
        leaves, before = self._leaves(), set(map(id, self._nodes))
        wholes = [len(handle.layout.params) for handle in self._handles]  # the index of the flat vector's own leaf
        with torch.inference_mode(False), torch.enable_grad():
            for key, leaf in leaves:
                if leaf.requires_grad and id(leaf) not in self._accumulators:
                    self._accumulators[id(leaf)] = (key, hooks.accumulator_of(leaf))
                    if id(leaf) not in self._hooked:
                        self._hooked.add(id(leaf))
                        may_wait = type(leaf) in PLAIN_KINDS and leaf.nbytes <= SMALL and key[1] != wholes[key[0]]
                        hooks.on_accumulated(leaf, functools.partial(self.arrived.arrive, key, may_wait))
        # of a frozen leaf nothing is expected: autograd drops what reaches it
        trained = [self._accumulators[id(leaf)] for _, leaf in leaves if leaf.requires_grad]
        self._keys = [key for key, _ in trained]
        self._nodes = [node for _, node in trained]
        if awaits_unfrozen:
            self._await(pair for pair in trained if id(pair[1]) not in before)
        self._outside.watch()

    def _await(self, unfrozen: Iterable[tuple[LeafKey, Any]]) -> None:
        """Note of these leaves, by key and accumulator, the ones that the running graph task reaches, until it does."""
        pairs = list(unfrozen)
        for key, node in hooks.those_that_run(pairs, [node for _, node in pairs]):
            self.lost.add(key)
            self._until_found.append(hooks.on_leaf_gradient(node.variable, functools.partial(_found, self.lost, key)))

    def renew(self) -> None:
        """Make new graph nodes for the leaves: they changed their dtype or device, or train on another stream, which
        the old nodes do not follow. A graph that holds an old node keeps it."""
        self._outside.renew()
        self._accumulators.clear()
        self._nodes.clear()  # a node lives as long as somebody holds it
        self._hooked &= {id(leaf) for _, leaf in self._leaves()}  # a DTensor of another dtype is another leaf
        self.watch()

    def _leaves(self) -> list[tuple[LeafKey, torch.Tensor]]:
        return [((bucket, i), leaf) for bucket, handle in enumerate(self._handles) for i, leaf in handle.all_leaves]

    def of_this_task(self) -> set[LeafKey]:
        """Return the leaves that the running graph task has still to deliver; autograd tells when first asked."""
        task = hooks.current_backward()
        expected = self.of_task.get(task)
        if expected is None:
            expected = self.of_task[task] = hooks.those_that_run(self._keys, self._nodes)
        return expected

    def enter(self) -> None:
        """Note that the running graph task has entered a call of the unit: small gradients wait until it has passed
        the call, unless other tasks have reached the unit as well."""
        self.of_this_task()
        if len(self.of_task) == 1:
            self.arrived.task = hooks.current_backward()
        else:
            self.arrived.end_wait()

    def came(self, task: int, arrivals: Iterable[Arrival]) -> None:
        """Note that ``task`` has delivered these gradients."""
        self.of_task[task].difference_update([key for key, _ in arrivals])

    def __bool__(self) -> bool:
        """Whether any task has gradients to deliver."""
        return any(self.of_task.values())

    @property
    def seen(self) -> bool:
        """Whether a backward under way has been here."""
        return bool(self.of_task)

    def forget(self) -> None:
        """Forget the backward: it is over, or failed."""
        if self._until_found:
            for handle in self._until_found:
                handle.remove()
            self._until_found.clear()
            self.lost.clear()
        self.of_task.clear()
        self.arrived.task, self.arrived.all_taken = None, False
        self.arrived.gradients.clear()


@hooks.breaks_graph
def _found(lost: set[LeafKey], key: LeafKey, _: torch.Tensor | None) -> None:
    """The gradient of leaf ``key`` arrives, or autograd knows that there is none."""
    lost.discard(key)
