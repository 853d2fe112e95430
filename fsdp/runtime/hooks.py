"""Hooks of autograd, modules and optimizers, reports of their errors, and queries to autograd.

Hooks are registered in this file only. An error raised in a hook propagates to the caller of ``backward()``, with a
note of the rank and the unit.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.autograd.graph import Node
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from fsdp import patches
from fsdp.comm.profiling import NOTHING
from fsdp.comm.versions import set_frame_callback, skip_code
from fsdp.runtime.mistakes import (
    check_reduced,
    warn_of_empty_groups,
    warn_of_habits,
    warn_of_stale,
    warn_of_unowned,
)

if TYPE_CHECKING:
    from fsdp.runtime.unit import Unit

logger = logging.getLogger("fsdp")

Params = ParamSpec("Params")
Result = TypeVar("Result")
Key = TypeVar("Key")

OWN_HOOK = "fsdp"  # key of the package's post-accumulate hook of a tensor
NO_BACKWARD = -1  # the result of current_backward() outside of a backward


def untraced(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Return ``function`` so that torch.compile breaks the graph at a call, and compiles neither it nor the callees.

    ``torch.compiler.disable`` does the same, but would import the whole compiler into every program.
    """

    @functools.wraps(function)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        before = set_frame_callback(None)
        try:
            return function(*args, **kwargs)
        finally:
            if before is not None:
                set_frame_callback(before)

    return breaks_graph(run)


def of_backward(event: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a method that a hook of autograd calls with a unit as the first argument: it is ``untraced``, and its
    errors are reported as errors of ``event``."""

    def decorate(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def run(context: Any, unit: Any, *args: Any) -> None:
            before = set_frame_callback(None)
            try:
                method(context, unit, *args)
            except BaseException as error:
                unit.fail(error, event)
                raise
            finally:
                if before is not None:
                    set_frame_callback(before)

        return breaks_graph(run)

    return decorate


def breaks_graph(function: Callable[Params, Result]) -> Callable[Params, Result]:
    """Mark ``function`` so that torch.compile breaks the graph at a call. Its callees are compiled on their own."""
    marked: Any = function
    skip_code(marked.__code__)  # for calls from code that is not compiled
    marked._torchdynamo_disable = True  # for calls from code that is compiled
    marked._torchdynamo_disable_msg = "a unit of FullyShardedDataParallel gathers and frees parameters"
    return function


# The number of the graph task that runs on this thread, or ``NO_BACKWARD``. Reentrant checkpointing nests tasks.
current_backward: Callable[[], int] = torch._C._current_graph_task_id


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback``, which is ``untraced``, at the end of the running graph task."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def accumulator_of(leaf: torch.Tensor) -> Node:
    """Return the graph node that accumulates ``leaf``'s gradient. Requires grad mode.

    The node stays the same as long as it is referenced and the leaf keeps its dtype and device. A node that was kept
    across such a change matches no graph.
    """
    return leaf.view_as(leaf).grad_fn.next_functions[0][0]  # type: ignore[union-attr, return-value]


# The sequence number that the next graph node made on this thread will have; the later it is made, the larger.
next_node_number: Callable[[], int] = torch.autograd._get_sequence_nr


# The running graph node of the backward on this thread; None in a graph that runs compiled.
current_node: Callable[[], Node | None] = torch._C._current_autograd_node


def those_that_run(keys: Sequence[Key], nodes: Sequence[Node]) -> set[Key]:
    """Return the keys of the ``nodes``, one each, that the running graph task reaches."""
    try:
        return set(itertools.compress(keys, map(torch._C._will_engine_execute_node, nodes)))
    except RuntimeError:
        return set(itertools.compress(keys, map(_will_run_or_return, nodes)))


def goes_on() -> bool:
    """Return whether the running graph task continues beyond the running node; autograd.grad() may end there. True in a
    graph that runs compiled."""
    node = current_node()
    following = [] if node is None else [edge[0] for edge in node.next_functions if edge[0] is not None]
    return node is None or bool(those_that_run(range(len(following)), following))


def _will_run_or_return(node: Node) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError as error:
        # autograd.grad() returns the gradient of this leaf instead of accumulating it, and autograd raises.
        if "autograd.grad" in str(error):
            return True
        raise


_SELECTIVE = tuple(
    getattr(torch.utils.checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(torch.utils.checkpoint, name)
)


def own_operations() -> AbstractContextManager[None]:
    """Return a context for the engine's own operations inside the forward of a module.

    Selective activation checkpointing records the operations of a forward, may keep their results, and requires the
    same operations in the recomputation. The engine's operations depend on which units are gathered and where memory is
    free, and their results must not be replayed. The context hides them.
    """
    if not torch._C._len_torch_dispatch_stack():
        return NOTHING
    if any(isinstance(mode, _SELECTIVE) for mode in _get_current_dispatch_mode_stack()):
        return _disable_current_modes()
    return NOTHING


def on_gradient(tensor: torch.Tensor, callback: Callable[[torch.Tensor], None], key: str) -> None:
    """Call ``callback``, which is ``untraced``, with each complete gradient of ``tensor``, after the hooks that are
    there already. The key of a first hook is ``key``."""
    node: Any = tensor.grad_fn
    if node is None or type(tensor) is not torch.Tensor or tensor._backward_hooks is not None:
        tensor.register_hook(callback)
        return
    tensor._backward_hooks = OrderedDict({key: callback})  # without a handle, because it is never removed
    node._register_hook_dict(tensor)


def on_saved(callback: Callable[[torch.Tensor], None]) -> AbstractContextManager[None]:
    """Return a context in which ``callback`` is called with every tensor that autograd saves."""

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        callback(tensor)
        return tensor

    saved: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    return saved


def on_leaf_gradient(leaf: torch.Tensor, callback: Callable[[torch.Tensor | None], None]) -> RemovableHandle:
    """Call ``callback``, which is ``untraced``, each time a backward reaches ``leaf``, with a gradient or with None.
    Return a handle that removes the hook."""
    return leaf.register_hook(callback)


class _LeafHook(dict[str, Callable[[torch.Tensor], None]]):
    """The one post-accumulate hook of a leaf. Registering a second one raises."""

    def __setitem__(self, key: Any, hook: Any) -> None:
        raise RuntimeError(
            "register_post_accumulate_grad_hook() inside of the forward of a wrapped module, where parameters are not "
            "those that get the reduced gradients. Register the hook outside, on what model.parameters() yields"
        )


def on_accumulated(leaf: Any, callback: Callable[[torch.Tensor], None]) -> None:
    """Call ``callback``, which is ``untraced``, each time a gradient has been added to ``leaf.grad``."""
    leaf._post_accumulate_grad_hooks = _LeafHook({OWN_HOOK: callback})


def refuse_gradients(tensor: Any, name: str, unit_name: str) -> None:
    """Let a backward raise RuntimeError where autograd itself adds a gradient to ``tensor.grad``.

    ``tensor`` is parameter ``name``, as users hold it, of a unit that is not sharded. Forwards of the unit compute with
    a leaf instead, and ``tensor.grad`` is reserved for reduced gradients.
    """
    if OWN_HOOK in (tensor._post_accumulate_grad_hooks or ()):
        return

    @untraced
    def refuse(_: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            f"a backward reached parameter {name!r} of {unit_name} past the forward of the unit: the loss, or a module "
            "inside of the unit that was called by itself, has used it. That gradient, which .grad has now, is of this "
            "rank alone. Use the parameter inside the forward of the wrapped module, or register the method that uses "
            "it by register_forward_method(); call zero_grad() before the next backward"
        )

    tensor._post_accumulate_grad_hooks = OrderedDict({OWN_HOOK: refuse, **(tensor._post_accumulate_grad_hooks or {})})


def around_forward(
    module: torch.nn.Module, enter: Callable[[Any, Any, Any], Any], leave: Callable[[Any, Any, Any], Any]
) -> None:
    """Call ``enter(module, args, kwargs)`` before all other hooks of each forward of ``module``, and
    ``leave(module, args, output)`` after the forward. The result of ``enter`` replaces the arguments."""
    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    module.register_forward_hook(leave)


def forward_refused(module: torch.nn.Module, why: Callable[[], str]) -> tuple[Any, str, _Refusal]:
    """Return (dictionary, key, hook): the hook refuses forwards of ``module`` while the dictionary has it under the
    key. ``why`` returns the reason for the error."""
    return module._forward_pre_hooks, "fsdp_sharded", _Refusal(why)  # torch's own keys are integers


class _Refusal:
    """A forward pre-hook of a module whose parameters are sharded now. A call of the module alone would compute with
    this rank's parts."""

    def __init__(self, why: Callable[[], str]) -> None:
        self._why = why

    def __call__(self, module: torch.nn.Module, inputs: object) -> NoReturn:
        raise RuntimeError(f"a {type(module).__name__} was called by itself: {self._why()}")

    def __deepcopy__(self, memo: dict[int, Any]) -> _Refusal:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"cannot pickle a module: {self._why()}")


units: weakref.WeakSet[Unit] = weakref.WeakSet()  # of this process
# by optimizer: the sizes of the parameter groups when they were last examined, and the units that it steps
_optimizers: weakref.WeakKeyDictionary[Optimizer, tuple[list[int], list[weakref.ref[Unit]]]] = (
    weakref.WeakKeyDictionary()
)


def watch_optimizers() -> None:
    """Call ``before_step()`` of a unit, from now on, before each step of an optimizer that has parameters of it. The
    first step of each optimizer is checked for probable mistakes; see ``mistakes.py``."""
    patches.STEPS.install(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Follow users' changes, and check gradients; those of a closure after each call of it."""
    if torch.compiler.is_compiling() or current_backward() != NO_BACKWARD:
        return None
    sizes = _sizes_of(optimizer)
    known = _optimizers.get(optimizer)
    first = known is None and not _own_steps
    if known is None or known[0] != sizes:
        params = [param for group in optimizer.param_groups for param in group["params"]]
        if not _own_steps:
            warn_of_stale(optimizer, params)
        ids = {id(param) for param in params}
        found = [weakref.ref(unit) for unit in units if any(id(param) in ids for param in unit.visible_params())]
        sharded = [unit for unit_ref in found if (unit := unit_ref()) is not None and unit.is_sharded]
        if not _own_steps and any(unit.summoned is None for unit in sharded):
            warn_of_empty_groups(optimizer)
            if first:
                warn_of_habits(optimizer)
        known = (sizes, found)
        if not _own_steps:
            _optimizers[optimizer] = known
    stepped = [unit for unit_ref in known[1] if (unit := unit_ref()) is not None]
    for unit in stepped:
        unit.before_step()
    if not _own_steps:
        rates = [f"{rate:.6g}" for rate in (group.get("lr") for group in optimizer.param_groups) if _is_on_host(rate)]
        for tree in {unit.context: None for unit in stepped}:
            if tree is not None:
                tree.passes.note_step(rates)
    if first and any(unit.groups.reduces for unit in stepped):
        warn_of_unowned(optimizer, {id(param) for unit in units for param in unit.visible_params()})
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not stepped or not callable(closure):
        _check_reduced(optimizer, stepped, first=first)
        return None

    def checked() -> Any:
        loss = closure()
        for unit in stepped:
            unit.before_step()
        _check_reduced(optimizer, stepped, first=first)
        return loss

    return ((args[0], checked, *args[2:]), kwargs) if len(args) > 1 else (args, kwargs | {"closure": checked})


def _check_reduced(optimizer: Optimizer, stepped: list[Unit], *, first: bool) -> None:
    unsharded = [unit for unit in stepped if any(bucket.accumulator.exposed for bucket in unit.gradients)]
    if unsharded:
        check_reduced(optimizer, unsharded, first=first)


def steps_no_shards(optimizer: Optimizer) -> None:
    """Skip ``optimizer`` before its steps: it never holds visible parameters."""
    _optimizers[optimizer] = (_sizes_of(optimizer), [])


def _is_on_host(rate: object) -> bool:
    return isinstance(rate, (int, float)) or (isinstance(rate, torch.Tensor) and rate.is_cpu and rate.numel() == 1)


def _sizes_of(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]


_own_steps: list[Optimizer] = []  # the optimizers that the package steps now; see ``own_step``


@contextlib.contextmanager
def own_step(optimizer: Optimizer) -> Iterator[None]:
    """Enclose a step of ``optimizer`` by the package itself, to make the state: without checks for mistakes."""
    _own_steps.append(optimizer)
    try:
        yield
    finally:
        _own_steps.pop()


def report(error: BaseException, unit_name: str, event: str) -> None:
    """Add a note of the rank and the unit to ``error``, once, before it propagates to the caller of ``backward()``. The
    log gets it at level INFO only, because the caller shows or handles the error."""
    if getattr(error, "_fsdp_reported", False):
        return
    try:
        error._fsdp_reported = True  # type: ignore[attr-defined]
    except AttributeError:
        pass  # an exception without a dictionary is reported by each hook that it passes
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(f"rank {rank}, {event} of {unit_name}")
    logger.info("rank %d, %s of %s: %s: %s", rank, event, unit_name, type(error).__name__, error)
