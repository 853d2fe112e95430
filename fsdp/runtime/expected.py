"""Which gradients the backwards under way have still to bring to a unit, by graph task.

See [Note: When a unit's backward is over] in ``backward.py``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch

from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.released import PLAIN_KINDS
from fsdp.runtime import hooks

LeafKey = tuple[int, int]  # bucket, index; see ``FlatParamHandle.all_leaves``
Leaves = set[LeafKey] | frozenset[LeafKey]
Batch = tuple[int, Collection[int], dict[int, torch.Tensor]]  # bucket, leaves of it, and their gradients as far as any
SMALL = 1 << 16  # bytes: so large a gradient may lie beside its slot for a while


class Arrived:
    """The gradients of one unit's leaves that are complete, until somebody takes them.

    That is at once; but where :attr:`task` says that the backward will come by the unit again, those of small leaves
    wait for that, to be taken together. So does what follows on the last of all: autograd may hold that one until its
    hook has returned.

    Hooks hold this, and so it holds no leaf: what refers to itself lives until the collector comes.

    Attributes:
        all_taken: whether the last of all was taken, and nothing has followed on that.
        gradients: of which leaves, and they, but for those that a hook on the leaf has taken.
        hooks: of the small leaves.
        nested: whether a graph task other than the one that entered the unit has ever brought one.
        small: which leaf has which id, of these.
        task: the only graph task that has reached the unit, while it has not passed the unit; else None.
    """

    __slots__ = ("_look", "all_taken", "gradients", "hooks", "nested", "small", "task")

    def __init__(self, look: Callable[[], None]) -> None:
        """``look`` looks at them, and takes them."""
        self._look = look
        self.gradients: list[Batch] = []
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
        (bucket, index), grad = key, leaf.grad
        self.gradients.append((bucket, (index,), {} if grad is None else {index: grad}))
        leaf.grad = None
        if self.task is None or not waits:
            self._look()

    def take(self) -> list[Batch]:
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
        lost: leaves that were unfrozen when the backward began, which reaches them and has not done so since. Where it
            had done so before, while they were frozen, autograd has dropped their gradients.
    """

    def __init__(self, handles: Sequence[FlatParamHandle], look: Callable[[], None]) -> None:
        """``look`` looks at the gradients that have arrived."""
        self._handles, self.arrived = handles, Arrived(look)
        self.of_task: dict[int, Leaves] = {}
        self._hooked: set[int] = set()  # the ids of the leaves that are, frozen ones among them
        # key and accumulator of each leaf that requires grad, by the leaf's id; held so that they stay
        self._accumulators: dict[int, tuple[LeafKey, Any]] = {}
        self._nodes: list[Any] = []
        # bucket, and indices and leaves of what requires grad, if no gradient of it is large; and the keys of all these
        self._all_small: list[tuple[int, list[tuple[int, torch.Tensor]]]] = []
        self._small_keys: frozenset[LeafKey] = frozenset()
        self.left_by: int | None = None
        self._supposed: int | None = None  # the task that is supposed to bring all of the small ones
        self._thread = 0  # on which it runs
        self._all_there = False  # whether all of them were there when they were looked for last
        self._was_hooked = False  # whether a backward has brought gradients by hooks
        self.lost: set[LeafKey] = set()
        self._until_found: list[Any] = []  # the hooks by which gradients of these are found
        self.watch()

    def watch(self, *, awaits_unfrozen: bool = False) -> None:
        """Hook the leaves that require grad now, unless they are hooked already. With ``awaits_unfrozen`` a backward
        begins, and its gradients of leaves that required none until now are ``lost`` until they arrive."""
        leaves, arrived, before = self._leaves(), self.arrived, set(map(id, self._nodes))
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
        # of a frozen leaf nothing is expected: autograd drops what reaches it
        trained = [self._accumulators[id(leaf)] for _, leaf in leaves if leaf.requires_grad]
        self._keys = [key for key, _ in trained]
        self._nodes = [node for _, node in trained]
        if awaits_unfrozen:
            self._await(pair for pair in trained if id(pair[1]) not in before)
        small = [(key, leaf) for key, leaf in leaves if leaf.requires_grad and key[1] != wholes[key[0]]]
        if not arrived.small.keys() >= {id(leaf) for _, leaf in small}:
            small = []
        self._small_keys = frozenset([key for key, _ in small])
        several: dict[tuple[int, torch.dtype], list[tuple[int, torch.Tensor]]] = {}  # each dtype has leaves of its own
        for (bucket, index), leaf in small:
            several.setdefault((bucket, leaf.dtype), []).append((index, leaf))
        self._all_small = [(bucket, its) for (bucket, _), its in several.items()]

    def _await(self, unfrozen: Iterable[tuple[LeafKey, Any]]) -> None:
        """Note of these leaves, by key and accumulator, the ones that the running graph task reaches, until it does."""
        pairs = list(unfrozen)
        for key, node in hooks.those_that_run(pairs, [node for _, node in pairs]):
            self.lost.add(key)
            self._until_found.append(hooks.on_leaf_gradient(node.variable, functools.partial(_found, self.lost, key)))

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

    def of_this_task(self) -> Leaves:
        """What the running graph task has still to deliver; found out when it is first seen."""
        task = hooks.current_backward()
        expected = self.of_task.get(task)
        if expected is None:
            expected = self.of_task[task] = hooks.those_that_run(self._keys, self._nodes)
        elif task == self._supposed:
            self._find_out()
            expected = self.of_task[task]
        return expected

    def enter(self) -> bool:
        """The running graph task has entered a call of the unit. Returns whether gradients may ``stay`` on the leaves:
        they are all small, and as far as the backwards before tell, of which each unit's first has hooks for that, the
        task, the first one, brings them all by itself. Else they have to be told of: ``wait``."""
        if not self.of_task:
            return self._was_hooked and not self.arrived.nested and bool(self._all_small)
        return False

    def wait(self) -> None:
        """Hooks tell of the gradients of the running graph task, which tells when it has passed the call: those of
        small leaves wait for that, unless other tasks have reached the unit as well."""
        self.of_this_task()
        if len(self.of_task) == 1:
            self.arrived.task = hooks.current_backward()
        else:
            if self.left_by == threading.get_ident():
                self.end_stay()
            self.arrived.end_wait()

    def stay(self) -> None:
        """Autograd leaves gradients on the leaves from here on and calls nobody, and who comes by the unit looks there
        (``collect``): hooks would cost more than all else that is done for small gradients. If not all are there then,
        autograd is asked which are to come."""
        task = hooks.current_backward()
        self.arrived.task = self._supposed = task
        self.of_task[task] = self._small_keys
        self.left_by = self._thread = threading.get_ident()
        self.arrived.hooks.clear()

    def _find_out(self) -> None:
        """What is supposed to come, and does not, is not expected any more; where that can be told now: not inside of
        another task that runs in the middle of this one, nor on another thread."""
        task, running = self._supposed, hooks.current_backward()
        if task is None or task < running or self._thread != threading.get_ident():
            return
        self._supposed, left = None, self.of_task[task]
        come = hooks.those_that_run(self._keys, self._nodes) if task == running else set[LeafKey]()
        self.of_task[task] = left & come
        if not self and len(left) < len(self._small_keys):
            self.arrived.all_taken = True

    def came(self, task: int, batches: Sequence[Batch]) -> None:
        """These, which ``task`` was to deliver, are taken."""
        if self._all_there and task == self._supposed and self.of_task[task] is self._small_keys:
            self._supposed, self.of_task[task] = None, frozenset()
        elif self.of_task[task]:
            self.of_task[task] = self.of_task[task].difference(
                (bucket, index) for bucket, indices, _ in batches for index in indices
            )
            self._find_out()

    def collect(self, *, last: bool) -> None:
        """Gradients that autograd has left on the leaves have arrived. ``last``: who passes the unit looks for them."""
        count, arrived = 0, self.arrived.gradients
        for bucket, leaves in self._all_small:
            found = {}
            for index, leaf in leaves:
                grad = leaf.grad
                if grad is not None:
                    found[index] = grad
                    leaf.grad = None
            if found:
                count += len(found)
                arrived.append((bucket, found.keys(), found))
        self._all_there = count == len(self._small_keys)
        if last and not count:
            self._find_out()

    def end_stay(self) -> None:
        """The same, and those that are to come will be brought by hooks."""
        if self.left_by is not None:
            self.collect(last=True)
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
        if self._until_found:
            for handle in self._until_found:
                handle.remove()
            self._until_found.clear()
            self.lost.clear()
        self.of_task.clear()
        self._supposed = None
        self.arrived.task, self.arrived.all_taken = None, False
        self.arrived.gradients.clear()


@hooks.breaks_graph
def _found(lost: set[LeafKey], key: LeafKey, _: torch.Tensor | None) -> None:
    """The gradient of leaf ``key`` arrives, or autograd knows that there is none."""
    lost.discard(key)
