"""Everything that the package changes in torch, in Python and in other libraries, and the way back.

The constants at the end list each change with the reason. A change is made at the first use: most when a module is
wrapped, those of :mod:`fsdp.compat` on request. :func:`take_back` undoes them all.

To add one: add a :class:`Patch` to the list, and call its ``install`` where the replacement is defined::

    patches.CLIPPING.install(_warning_of_shards)  # def _warning_of_shards(original): ... return the replacement

The list has no hooks of single modules, tensors and optimizers, which belong to these, and no functions that run at the
end of the interpreter or after a fork: these only end threads of the package and close files.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.optim.optimizer import register_optimizer_step_pre_hook

_lock = threading.Lock()  # ranks may be threads
ABSENT = object()  # for `original`: there was no such name


class Replacement(NamedTuple):
    """A replaced name of a module or class; a new one if ``original`` is ``ABSENT``."""

    owner: Any
    name: str
    original: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"

    def make(self) -> None:
        setattr(self.owner, self.name, self.new)

    @property
    def is_kept(self) -> bool:
        """Whether the name still has the replacement."""
        return inspect.getattr_static(self.owner, self.name, None) is self.new

    def undo(self) -> None:
        if self.original is ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


class Entry:
    """An entry in a ``registry`` of torch or Python. ``add`` adds it, and returns the function that removes it."""

    is_kept = True

    def __init__(self, registry: str, add: Callable[[], Callable[[], object]]) -> None:
        self._registry, self._add = registry, add

    def __str__(self) -> str:
        return f"an entry of {self._registry}"

    def make(self) -> None:
        self._remove = self._add()

    def undo(self) -> None:
        self._remove()


Change = Replacement | Entry


class Changes:
    """Changes that are made for one reason, and undone together in reverse order.

    They are made, and not undone, if the object is true.
    """

    def __init__(self, what: str, reason: str) -> None:
        self.what, self.reason = what, reason
        self._made: list[Change] = []

    def __bool__(self) -> bool:
        return bool(self._made)

    def __iter__(self) -> Iterator[Change]:
        return iter(self._made)

    def make(self, changes: Iterable[Change]) -> None:
        for change in changes:
            change.make()
            self._made.append(change)

    def undo(self, function: str) -> None:
        """Undo the changes, in ``function``, which users have called; a no-op if they are not made.

        Raises:
            RuntimeError: a name was replaced by a third object since; nothing was changed.
        """
        _undo([self], function)


class Patch(Changes):
    """A function of torch that is replaced once a module is wrapped."""

    def __init__(self, owner: str, name: str, reason: str) -> None:
        """``owner`` is the name of a module; of a class in a module, ``module:Class``."""
        super().__init__(f"{owner}.{name}".replace(":", "."), reason)
        self._module, _, self._class = owner.partition(":")
        self._name = name

    def install(self, replacing: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Replace the function by ``replacing(function)``, which gets no ``self`` if it is a static method.

        A no-op if that is done, or if the program has not imported the module.
        """
        with _lock:
            owner: Any = sys.modules.get(self._module)
            if self._made or owner is None:
                return
            owner = getattr(owner, self._class) if self._class else owner
            original = inspect.getattr_static(owner, self._name)
            new: Any = replacing(original)
            if isinstance(original, staticmethod):
                new = staticmethod(new)
            self.make([Replacement(owner, self._name, original, new)])


class StepHook(Changes):
    """A hook that torch calls before each step of each optimizer, once a module is wrapped."""

    def __init__(self, reason: str) -> None:
        super().__init__("the pre-hooks of all optimizers' steps", reason)

    def install(self, hook: Callable[..., Any]) -> None:
        """Register ``hook``; a no-op if that is done."""
        with _lock:
            if not self._made:
                self.make([Entry(self.what, lambda: register_optimizer_step_pre_hook(hook).remove)])


def take_back() -> None:
    """Undo all changes of this process, so that torch, Python and other libraries are as without the package.

    Models that are wrapped already train on, without the checks and warnings of the list. The next wrapped module
    makes its changes again; ``fsdp.compat`` makes others on request.

    Raises:
        RuntimeError: a name was replaced by a third object since; nothing was changed.
    """
    _undo(ALL, "take_back")


def _undo(several: Sequence[Changes], function: str) -> None:
    others = [str(change) for changes in several for change in changes if not change.is_kept]
    if others:
        raise RuntimeError(f"{function}(): {', '.join(others)} was replaced by something else since; undo that first")
    for changes in several:
        while changes._made:
            changes._made.pop().undo()


BACKWARD = Patch(
    "torch.autograd",
    "_engine_run_backward",
    "backward(inputs=params) reaches the leaves of the parameters, and autograd.grad(loss, params) raises",
)
CLIPPING = Patch(
    "torch.nn.utils.clip_grad",
    "_clip_grads_with_norm_",
    "clip_grad_norm_() warns of parameters that are shards, or from before the wrapping",
)
TOTAL_NORM = Patch(
    "torch.nn.utils.clip_grad",
    "_group_tensors_by_device_and_dtype",
    "get_total_norm() warns of gradients that are shards",
)
STEPS = StepHook("a step follows users' changes, and is checked for mistakes; see runtime/hooks.py")
LOADED_STATE = StepHook("the first step checks that loaded state is that of this rank; see checkpoint/optim_watch.py")
DCP = Changes(
    "private functions of torch.distributed.checkpoint.state_dict; see compat.enable_dcp()",
    "the public functions take models of this package",
)
FSDP1 = Changes(
    "names of torch's FSDP1, in all modules, and private functions; see compat.patch()",
    "programs for torch's FSDP1 run on this package",
)
TORCHS_FSDP1 = tuple(
    Patch(
        "torch.distributed.fsdp.fully_sharded_data_parallel:FullyShardedDataParallel",
        name,
        "raises for models of this package, where it does nothing or raises KeyError; see runtime/half_migrated.py",
    )
    for name in (
        *("__init__", "clip_grad_norm_", "fsdp_modules", "no_sync", "summon_full_params"),
        *("get_state_dict_type", "set_state_dict_type", "state_dict_type"),
        *("optim_state_dict", "optim_state_dict_to_load", "rekey_optim_state_dict"),
        *("full_optim_state_dict", "scatter_full_optim_state_dict", "shard_full_optim_state_dict"),
        *("flatten_sharded_optim_state_dict", "sharded_optim_state_dict"),
    )
)
ALL: Sequence[Changes] = (BACKWARD, CLIPPING, TOTAL_NORM, STEPS, LOADED_STATE, DCP, FSDP1, *TORCHS_FSDP1)
