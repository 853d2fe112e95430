"""The gradients of one unit's leaves during a backward: which are expected, and which have arrived.

See [Note: When a unit's backward is over] in ``call.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import Node
from torch.utils.hooks import RemovableHandle

from fsdp.flat.views import BucketViews
from fsdp.runtime import hooks

if TYPE_CHECKING:
    from fsdp.runtime.unit import Unit

LeafKey = tuple[int, int]  # bucket, index; see ``FlatParamHandle.all_leaves``
SMALL = 1 << 16  # bytes: gradients up to this size may be held next to their slots


class Arrivals:
    """The leaves of one unit, each with a hook, and the gradients that backwards deliver to them.

    The hook of a leaf takes the gradient off the leaf. A small gradient is held until a large one or the last expected
    one arrives, so that many are copied into their slots together.

    The hooks refer to the unit weakly. Otherwise they would form reference cycles with the leaves, and a deleted model
    would stay until the next garbage collection.

    Attributes:
        expected: by graph task, the leaves that the task still has to deliver. A task that delivered all keeps an empty
            set, so that autograd is asked once.
        held: by bucket and index, the gradients that have arrived and are not copied yet.
        lost: leaves that were unfrozen when the backward began and whose gradients have not arrived since. Autograd has
            dropped such a gradient if the backward had reached the leaf before, while it was frozen.
    """

    def __init__(self, views: Sequence[BucketViews], unit_ref: Callable[[], Unit | None]) -> None:
        """``unit_ref`` is a weak reference to the unit, whose tree takes the gradients."""
        self.expected: dict[int, set[LeafKey]] = {}
        self.held: list[dict[int, torch.Tensor]] = [{} for _ in views]
        self.lost: set[LeafKey] = set()
        self._views, self._handles, self._unit_ref = views, [each.handle for each in views], unit_ref
        self._hooked: set[int] = set()  # the ids of the leaves with a hook, frozen ones among them
        # key and accumulator of each leaf that requires grad, by the leaf's id; held so that they stay
        self._accumulators: dict[int, tuple[LeafKey, Node]] = {}
        self._keys: list[LeafKey] = []  # of the leaves that require grad now, like the nodes
        self._nodes: list[Node] = []
        self._until_found: list[RemovableHandle] = []  # handles of the hooks that remove leaves from ``lost``
        self.watch()

    # -- the leaves ----------------------------------------------------------------------------------------------------

    def watch(self, *, awaits_unfrozen: bool = False) -> None:
        """Hook the leaves that require grad now and are not hooked yet. With ``awaits_unfrozen`` a backward begins, and
        gradients of leaves that required none until now are ``lost`` until they arrive."""
        leaves, before = self._leaves(), set(map(id, self._nodes))
        wholes = [len(handle.layout.params) for handle in self._handles]  # the index of the flat vector's own leaf
        with torch.inference_mode(False), torch.enable_grad():
            for key, leaf in leaves:
                if leaf.requires_grad and id(leaf) not in self._accumulators:
                    self._accumulators[id(leaf)] = (key, hooks.accumulator_of(leaf))
                    if id(leaf) not in self._hooked:
                        self._hooked.add(id(leaf))
                        small = type(leaf) is torch.nn.Parameter and leaf.nbytes <= SMALL and key[1] != wholes[key[0]]
                        hooks.on_accumulated(leaf, functools.partial(_arrive, self._unit_ref, key, small))
        # A frozen leaf is not expected: autograd drops the gradient.
        trained = [self._accumulators[id(leaf)] for _, leaf in leaves if leaf.requires_grad]
        self._keys = [key for key, _ in trained]
        self._nodes = [node for _, node in trained]
        if awaits_unfrozen:
            self._await(pair for pair in trained if id(pair[1]) not in before)
        for each in self._views:
            for index, tensor in each.used_outside():
                hooks.refuse_gradients(tensor, each.handle.name_of(index), each.handle.unit_name)

    def _await(self, unfrozen: Iterable[tuple[LeafKey, Any]]) -> None:
        """Add to ``lost``, until they are reached, the leaves that the running graph task reaches; given by key and
        accumulator."""
        pairs = list(unfrozen)
        for key, node in hooks.those_that_run(pairs, [node for _, node in pairs]):
            self.lost.add(key)
            self._until_found.append(hooks.on_leaf_gradient(node.variable, functools.partial(_found, self.lost, key)))

    def renew(self) -> None:
        """Make new graph nodes for the leaves, whose dtype, device or stream has changed. The old nodes do not follow
        such a change. A graph that holds an old node keeps it."""
        self._accumulators.clear()
        self._nodes.clear()  # a node lives as long as it is referenced
        self._hooked &= {id(leaf) for _, leaf in self._leaves()}  # a DTensor of another dtype is another leaf
        self.watch()

    def _leaves(self) -> list[tuple[LeafKey, torch.Tensor]]:
        return [((bucket, i), leaf) for bucket, handle in enumerate(self._handles) for i, leaf in handle.all_leaves]

    # -- a backward ----------------------------------------------------------------------------------------------------

    def enter(self) -> set[LeafKey]:
        """Note that the running graph task reaches the unit. Return the leaves that it still has to deliver."""
        task = hooks.current_backward()
        remaining = self.expected.get(task)
        if remaining is None:
            remaining = self.expected[task] = hooks.those_that_run(self._keys, self._nodes)
        return remaining

    @property
    def pending(self) -> bool:
        """Whether a graph task still has to deliver gradients."""
        return any(self.expected.values())

    def take(self) -> list[dict[int, torch.Tensor]]:
        """Return the held gradients, by bucket and index, and hold none."""
        taken = self.held[:]
        for number, grads in enumerate(taken):
            if grads:  # each bucket in one assignment: another thread may add meanwhile
                self.held[number] = {}
        return taken

    def drop(self) -> None:
        """Drop what a failed backward has left on the leaves, where an interrupt ended a hook."""
        for _, leaf in self._leaves():
            leaf.grad = None

    def forget(self) -> None:
        """Forget the backward, which is over or has failed."""
        if self._until_found:
            for handle in self._until_found:
                handle.remove()
            self._until_found.clear()
            self.lost.clear()
        self.expected.clear()
        for grads in self.held:
            grads.clear()


@hooks.breaks_graph
def _arrive(unit_ref: Callable[[], Unit | None], key: LeafKey, small: bool, leaf: torch.Tensor) -> None:
    """Take the gradient of ``leaf``, which is complete for the running graph task."""
    unit = unit_ref()
    if unit is None:
        return
    arrivals: Arrivals = unit.arrivals
    task = hooks.current_backward()
    remaining = arrivals.expected.get(task)
    if remaining is None:
        unit.tree.leaf_reached(unit)
        remaining = arrivals.expected[task]
    grad = leaf.grad
    if grad is not None:  # else a hook on the leaf took it
        bucket, index = key
        held = arrivals.held[bucket]
        if index in held:  # from another graph task; a slot is written once per copy
            unit.tree.gradients_arrived(unit)
            held = arrivals.held[bucket]
        held[index] = grad
        leaf.grad = None
    remaining.discard(key)
    if not (small and remaining):
        unit.tree.gradients_arrived(unit)


@hooks.breaks_graph
def _found(lost: set[LeafKey], key: LeafKey, _: torch.Tensor | None) -> None:
    """Remove leaf ``key``, which the backward reaches, from ``lost``."""
    lost.discard(key)
