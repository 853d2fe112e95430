"""What the successor, ``fully_shard``, has besides: units of several modules, and switches of single units and of whole
trees, by the names that these have there.

A switch is read when it is needed, and stays until it is set again; a copy of a model has those of the original, but
that it synchronises its gradients. All ranks set them alike: they decide what is gathered when.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from fsdp.api import TrainingState, as_flag
from fsdp.checkpoint.state_dict import check_idle
from fsdp.flat.names import ModuleGroup, members_of
from fsdp.module_groups import declare_group
from fsdp.private_names import PrivateNames
from fsdp.runtime.accumulated import reduce_accumulated
from fsdp.runtime.build import join
from fsdp.runtime.unit import Unit, units_of

# of the constructor's arguments
_NOT_OF_GROUPS = {"module", "auto_wrap_policy", "ignored_modules", "ignored_states", "coalesce_nbytes"}


class UnshardHandle:
    """What ``unshard(async_op=True)`` returns."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Let the current stream (on CPU the host) wait until the parameters are gathered; idempotent."""
        self._wait()


class Switches(PrivateNames):
    """What ``FullyShardedDataParallel`` has from here."""

    _check_root: Callable[..., None]
    _run: Callable[..., Any]
    _surround: Callable[[nn.Module, str], None]
    module: Any

    # -- units of several modules --------------------------------------------------------------------------------------

    @classmethod
    def group(cls, modules: Iterable[nn.Module], **arguments: Any) -> None:
        """Let these modules be one unit of the model in which they are, which is wrapped after that.

        The wrapper around the whole model (or around any module that contains all of them, in which they are not
        wrapped yet) puts a wrapper in the place of each, whatever its ``auto_wrap_policy`` says of them; modules inside
        of them become units as it says. What the modules share (tied weights of an embedding and a head) is trained,
        and what they have is gathered together: when the first of them runs, in forward and in backward, until the
        last of them has run, at the latest until the pass is over. In between, the unit has memory beside those that
        the policy of the tree allows. (A backward knows only of modules with parameters that it trains: where they
        have none, the unit is gathered for each.)

            FSDP.group([model.embed, model.head])
            model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))

        Everything has the names that it has in the plain model. With ``use_orig_params=False`` the first of the
        modules, in the order of the model, has the flat parameters, in ``LOCAL_STATE_DICT`` as well.

        Args:
            modules: two or more, none of them inside another, and in no other group. A group may lie inside of the
                modules of another one.
            arguments: what the constructor is called with for this unit in place of what the wrapper was given.

        Raises:
            TypeError, ValueError: the modules are none that can be one unit, or there is no such argument. What only
                the wrapper can know is refused by it: whether all of them are there, and wrapped by nothing else.
        """
        unknown = set(arguments) - (set(inspect.signature(cls).parameters) - _NOT_OF_GROUPS)
        if unknown:
            raise TypeError(f"group() takes no {', '.join(sorted(unknown))}: pass it to the wrapper around the model")
        declare_group(modules, arguments)

    @classmethod
    def _around_group(cls, group: ModuleGroup, arguments: dict[str, Any]) -> dict[nn.Module, Switches]:
        """Of each module of ``group`` the wrapper to take its place; they have one unit."""
        make: Any = cls
        first, wrappers = make(group, **arguments), dict[nn.Module, Switches]()
        for place, member in members_of(group).items():
            wrapper = wrappers[member] = cls.__new__(cls)
            nn.Module.__init__(wrapper)
            wrapper.__dict__.update({name: own for name, own in first.__dict__.items() if name not in wrapper.__dict__})
            wrapper._surround(member, place)
        return wrappers

    # -- gathered and resharded by hand --------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Start gathering this unit's parameters for its next forward, which will use them: what is written to a shard
        in between comes too late for it. The modules hold them while that forward runs.

        Returns:
            with ``async_op`` a handle whose ``wait()`` makes the current stream (on CPU the host) wait for them, else
            None, when that has been waited for.

        Raises:
            AssertionError: a forward or backward of the unit is under way, or it is inside ``summon_full_params``.
        """
        handle = UnshardHandle(self._fsdp_unit.unshard_by_hand(self._membership.join()))
        if async_op:
            return handle
        handle.wait()
        return None

    _unshard = unshard  # in FSDP1

    def reshard(self) -> None:
        """Give the memory of this unit's full parameters back, whatever keeps them; they are gathered when they are
        needed again.

        Raises:
            RuntimeError: a forward or backward of the unit is under way, or it is inside ``summon_full_params``.
        """
        self._fsdp_unit.reshard_by_hand()

    # -- when units are gathered and resharded -------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool | None, recurse: bool = True) -> None:
        """Whether units are resharded when their forward is over, and gathered again for their backward: True is what
        ``FULL_SHARD`` does, and does it for the root as well, over as many ranks as the wrapper was given; False is
        ``SHARD_GRAD_OP``; None: all but the root are.
        """
        given = reshard_after_forward
        if isinstance(given, int) and not isinstance(given, bool):
            raise TypeError(f"reshard_after_forward must be a bool or None, got {given}; a number is for the wrapper")
        self._choose(recurse, reshard_after_forward=None if given is None else as_flag(given, "reshard_after_forward"))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Whether units are resharded when their backward is over. With False they stay gathered for the next forward,
        which gathers them again if a shard was written in between, by an optimizer for instance. With
        ``set_reshard_after_forward(False)`` as well, the passes of one accumulation gather once."""
        self._choose(recurse, reshard_after_backward=as_flag(reshard_after_backward, "reshard_after_backward"))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Whether this unit is gathered for its backward. False is for units whose gradients are computed without their
        parameters, an embedding for instance. A backward that does read one ends in autograd's error of a variable "at
        version 1073741824", with a hint that names the parameter where nobody catches it."""
        self._choose(False, unshard_in_backward=as_flag(unshard_in_backward, "unshard_in_backward"))

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather these units, in this order, before this one computes in forward, instead of those that came next in
        the last one, and whatever ``limit_all_gathers`` and the distance say. An empty list ends that.

        Raises:
            TypeError: one of them is no ``FullyShardedDataParallel``.
            ValueError: one of them is this one, or named twice.
        """
        self._list(modules, backward=False)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """As :meth:`set_modules_to_forward_prefetch`, for the backward."""
        self._list(modules, backward=True)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce the gradients: ``no_sync`` as a switch, which single units have as well. False:
        unsharded gradients are accumulated, and the first backward after it is set to True again reduces them."""
        synchronize, units = as_flag(requires_gradient_sync, "requires_gradient_sync"), self._units(recurse)
        check_idle(units, "set_requires_gradient_sync()")
        for unit in units:
            unit.synchronize = synchronize

    def reduce_gradients(self) -> None:
        """Reduce the gradients that backwards inside ``no_sync()`` have accumulated, without another backward.

        Afterwards ``.grad`` is as if the last of these backwards had run outside ``no_sync()``. It serves loops that
        learn only afterwards which micro-batch was the last, and ranks with different numbers of micro-batches. A rank
        without any contributes zeros. (Forwards that gather parameters need all ranks: loop over ``fsdp.join()``
        there.) The sum over ranks is divided as always, by default by the number of ranks::

            with model.no_sync():
                for batch in batches:
                    loss_of(model, batch).backward()
            model.reduce_gradients()
            optimizer.step()

        All ranks have to call it. It costs one reduction of each unit with gradients, and one small all-reduce. Without
        accumulated gradients it changes nothing.

        Raises:
            RuntimeError: not called on the root, or not called on all ranks.
            ValueError: a forward or backward is under way.
        """
        self._check_root("reduce_gradients() should only be called on the root FSDP instance")
        self._assert_state(TrainingState.IDLE)
        reduce_accumulated(join(self._fsdp_unit), units_of(self))

    def set_gradient_divide_factor(self, factor: float | None, *, recurse: bool = True) -> None:
        """What the sum of the gradients over all ranks is divided by: any positive number, a count of tokens for
        instance, 1 for the sum itself; None: the number of ranks, for the mean.

        Raises:
            TypeError, ValueError: it is no positive finite number.
            RuntimeError: a communication hook reduces the gradients, and divides them.
        """
        if factor is not None:
            if isinstance(factor, bool) or not isinstance(factor, (int, float)):
                raise TypeError(f"the divide factor must be a number or None, got {factor!r}")
            if not 0 < factor < float("inf"):
                raise ValueError(f"the divide factor must be positive and finite, got {factor}")
            if any(unit.comm_hook is not None for unit in self._units(recurse)):
                raise RuntimeError("set_gradient_divide_factor() with a communication hook, which divides by itself")
        self._choose(recurse, gradient_divide_factor=None if factor is None else float(factor))
        for unit in self._units(recurse):
            unit.follow_divisor()

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Whether backwards reduce gradients over the replicas of hybrid sharding. With False they are reduced inside
        the shard groups alone, and what comes of it is kept aside, one shard per unit, in the reduce dtype; the first
        backward after it is set to True again adds it and shows ``.grad``. So an accumulation costs one reduction
        between machines. Nothing but such a backward clears what is kept; ``zero_grad()`` does not.

        Raises:
            RuntimeError: False, and a communication hook reduces the gradients: what it does would be left out.
        """
        wanted = as_flag(requires_all_reduce, "requires_all_reduce")
        if not wanted and any(unit.comm_hook is not None for unit in self._units(recurse)):
            raise RuntimeError("set_requires_all_reduce(False) with a communication hook, which reduces by itself")
        self._choose(recurse, requires_all_reduce=wanted)

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], Any] | None, *, recurse: bool = True) -> None:
        """Call ``hook(shard)`` with each reduced gradient (1-D, this rank's part of a unit's, in the reduce dtype),
        over all groups, before it is shown: it may change it in place, reduce it over ranks that this package knows
        nothing of for instance. On an accelerator it is called on the stream of the reductions. None: no more.

        Raises:
            TypeError: it cannot be called.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"the hook must be callable or None, got {hook!r}")
        units = self._units(recurse)
        check_idle(units, "set_all_reduce_hook()")
        for unit in units:
            unit.all_reduce_hook = hook
            unit.follow_divisor()

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Whether a backward waits, at its end, for the reductions that are under way in this tree. With False they go
        on during what follows, and ``.grad`` has their results after the next backward that does wait.

        Raises:
            RuntimeError: not called on the root.
        """
        self._check_root("set_is_last_backward() should only be called on the root instance")
        self._choose(False, is_last_backward=as_flag(is_last_backward, "is_last_backward"))

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """How many full gradients of this tree may wait for their reduction; the next one waits for the oldest. 2 by
        default; ``recurse`` changes nothing, as they are counted in the whole tree.

        Raises:
            RuntimeError: not called on the root.
            ValueError: not a positive number.
        """
        if type(max_input_buffers) is not int or max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive number of buffers, got {max_input_buffers!r}")
        self._check_root("set_reduce_scatter_max_input_buffers() should only be called on the root instance")
        self._choose(False, reduce_buffers=max_input_buffers)
        join(self._fsdp_unit).size_pools()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _units(self, recurse: bool) -> list[Unit]:
        return units_of(self) if recurse else [self._fsdp_unit]

    def _choose(self, recurse: bool, **choices: Any) -> None:
        units = self._units(recurse)
        check_idle(units, " and ".join(f"a choice of {name}" for name in choices))
        for unit in units:
            unit.choose(**choices)

    def _list(self, modules: Iterable[nn.Module], *, backward: bool) -> None:
        wrappers = list(modules)
        for module in wrappers:
            if not isinstance(module, Switches):
                raise TypeError(f"expected FullyShardedDataParallel modules to prefetch, got {type(module).__name__}")
        if self in wrappers or len(set(wrappers)) < len(wrappers):
            raise ValueError(f"{self._fsdp_unit.name} can prefetch other units, each once")
        check_idle([self._fsdp_unit], "a list of modules to prefetch")
        # in the module's dictionary, where copies of the module have lists of copies
        self.__dict__.setdefault(_LISTS, {})[backward] = wrappers
        self._publish_lists()

    def _publish_lists(self) -> None:
        """Let the unit know what its wrapper is to prefetch, if that was said."""
        if _LISTS in self.__dict__:
            self._fsdp_unit.listed = functools.partial(_listed, weakref.ref(self))


_LISTS = "_fsdp_prefetch_lists"


def _listed(wrapper_ref: weakref.ref[Switches], backward: bool) -> list[Unit] | None:
    wrapper = wrapper_ref()
    if wrapper is None or not wrapper.__dict__[_LISTS].get(backward):
        return None
    context, listed = wrapper._fsdp_unit.context, [other._fsdp_unit for other in wrapper.__dict__[_LISTS][backward]]
    return [unit for unit in listed if unit.gathers and unit.context is context]


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Let ``module.<method_name>()`` run like its forward: with the parameters of its unit gathered.

    Nothing happens if ``module`` is not wrapped, so that code need not know.

    Raises:
        ValueError: the wrapped module has no such method.
    """
    if not isinstance(module, Switches):
        return
    method = getattr(module.module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module.module).__name__} has no method {method_name!r}")
    module.__dict__[method_name] = functools.update_wrapper(_GatheredMethod(module, method_name), method)


class _GatheredMethod:
    """A method of the wrapped module that runs like its forward."""

    def __init__(self, wrapper: Switches, name: str) -> None:
        self._wrapper, self._name = weakref.ref(wrapper), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapper = self._wrapper()
        assert wrapper is not None
        return wrapper._run(getattr(wrapper.module, self._name), args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatheredMethod:
        copied: Any = _GatheredMethod(memo[id(self._wrapper())], self._name)
        functools.update_wrapper(copied, self.__wrapped__)  # type: ignore[attr-defined]
        return copied
