"""FSDP2's methods: units of several modules, unsharding by hand, and switches of single units and of whole trees.

The names are those of ``torch.distributed.fsdp.FSDPModule``. A switch is read when it is needed and keeps the value
until it is set again. A copy of a model has the same switches, except that it synchronizes gradients. All ranks
have to set them alike, since they decide which unit is gathered or reduced when.
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
from fsdp.comm.streams import Streams
from fsdp.flat.names import ModuleGroup, members_of
from fsdp.module_groups import declare_group
from fsdp.runtime.accumulated import reduce_accumulated
from fsdp.runtime.build import Membership, join
from fsdp.runtime.unit import Unit, units_of

_NOT_OF_GROUPS = {"module", "auto_wrap_policy", "ignored_modules", "ignored_states"}
_PREFETCH_LISTS = "_fsdp_prefetch_lists"  # key in the wrapper's __dict__, where deepcopy finds the lists


class UnshardHandle:
    """The result of ``unshard(async_op=True)``."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Make the current stream (on CPU the host) wait until the parameters are gathered. Idempotent."""
        self._wait()


class FSDP2Names(nn.Module):
    """Mixin: FSDP2's methods of the wrapper."""

    _fsdp_unit: Unit
    _membership: Membership
    _assert_state: Callable[..., None]
    _check_root: Callable[..., None]
    _run: Callable[..., Any]
    _surround: Callable[[nn.Module, str], None]
    module: Any

    # -- units of several modules --------------------------------------------------------------------------------------

    @classmethod
    def group(cls, modules: Iterable[nn.Module], **arguments: Any) -> None:
        """Declare that ``modules`` become one unit of the model that contains them. Call it before wrapping the model.

        The wrapper around a module that contains all of them puts a wrapper in the place of each, even if no
        ``auto_wrap_policy`` chooses them. The policy decides about modules inside them. Parameters that the modules
        share, such as the tied weights of an embedding and a head, are trained as one.

        In forward and in backward the unit is gathered when the first module runs. It is resharded after the
        last one, at the latest at the end of the pass. The memory in between is in addition to the limit of the tree.
        A backward reaches only modules with trainable parameters; before frozen modules the unit is gathered again. ::

            FSDP.group([model.embed, model.head])
            model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Block}))

        Names stay those of the plain model. With ``use_orig_params=False`` the first of the modules, in the order of
        the model, has the flat parameters, in ``LOCAL_STATE_DICT`` as well.

        Args:
            modules: two or more modules, none inside another, none in another group. A group may lie inside a module
                of another group.
            arguments: arguments of the constructor for this unit, instead of those of the wrapper around it.

        Raises:
            TypeError, ValueError: the modules cannot be one unit, or there is no such argument. The wrapper raises
                ValueError if it does not contain all of them, or one of them is wrapped already.
        """
        unknown = set(arguments) - (set(inspect.signature(cls).parameters) - _NOT_OF_GROUPS)
        if unknown:
            raise TypeError(f"group() takes no {', '.join(sorted(unknown))}: pass it to the wrapper around the model")
        declare_group(modules, arguments)

    @classmethod
    def _around_group(cls, group: ModuleGroup, arguments: dict[str, Any]) -> dict[nn.Module, FSDP2Names]:
        """Make one unit of ``group``; return a wrapper for each module."""
        make: Any = cls
        first, wrappers = make(group, **arguments), dict[nn.Module, FSDP2Names]()
        for place, member in members_of(group).items():
            wrapper = wrappers[member] = cls.__new__(cls)
            nn.Module.__init__(wrapper)
            wrapper.__dict__.update({name: own for name, own in first.__dict__.items() if name not in wrapper.__dict__})
            wrapper._surround(member, place)
        return wrappers

    # -- unshard and reshard by hand -----------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Start gathering this unit's parameters for the next forward. Modules hold them while that forward runs.

        A write to a shard between this call and the forward is not seen by the forward.

        Returns:
            with ``async_op`` a handle whose ``wait()`` makes the current stream (on CPU the host) wait for the gather;
            else None, after that wait.

        Raises:
            AssertionError: during a forward or backward of the unit, or inside ``summon_full_params``.
        """
        handle = UnshardHandle(self._membership.join().unsharder.unshard_by_hand(self._fsdp_unit))
        if async_op:
            return handle
        handle.wait()
        return None

    _unshard = unshard  # FSDP1's name

    def reshard(self) -> None:
        """Release the memory of this unit's full parameters. They are gathered again at their next use.

        Raises:
            RuntimeError: during a forward or backward of the unit, or inside ``summon_full_params``.
        """
        self._fsdp_unit.reshard_by_hand()

    # -- when units are gathered and resharded -------------------------------------------------------------------------

    def set_reshard_after_forward(self, reshard_after_forward: bool | None, recurse: bool = True) -> None:
        """Choose whether units are resharded after forward and gathered again for backward.

        Args:
            reshard_after_forward: True: as ``FULL_SHARD``, including the root, over as many ranks as the wrapper was
                given. False: as ``SHARD_GRAD_OP``. None: all units except the root are resharded.
            recurse: set all units of this module; False: this unit alone.
        """
        given = reshard_after_forward
        if isinstance(given, int) and not isinstance(given, bool):
            raise TypeError(f"reshard_after_forward must be a bool or None, got {given}; a number is for the wrapper")
        self._choose(recurse, reshard_after_forward=None if given is None else as_flag(given, "reshard_after_forward"))

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Choose whether units are resharded after backward.

        With False they stay gathered for the next forward. That forward gathers them again if a shard was written in
        between, by an optimizer for example. Together with ``set_reshard_after_forward(False)``, all passes of one
        accumulation share one gather.
        """
        self._choose(recurse, reshard_after_backward=as_flag(reshard_after_backward, "reshard_after_backward"))

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Choose whether this unit is gathered for backward.

        False is for units whose gradients are computed without their parameters, such as an embedding. A backward that
        reads a parameter of such a unit ends in autograd's error about a variable "at version 1073741824".
        """
        self._choose(False, unshard_in_backward=as_flag(unshard_in_backward, "unshard_in_backward"))

    def set_modules_to_forward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather the units of ``modules``, in this order, before this unit computes in forward.

        The list replaces the units that came next in the last forward. ``limit_all_gathers`` and the prefetch distance
        do not limit it. An empty list restores the default.

        Raises:
            TypeError: a module is no ``FullyShardedDataParallel``.
            ValueError: a module is this one, or is named twice.
        """
        self._list(modules, backward=False)

    def set_modules_to_backward_prefetch(self, modules: Sequence[nn.Module]) -> None:
        """Gather the units of ``modules`` before this unit's backward; see :meth:`set_modules_to_forward_prefetch`."""
        self._list(modules, backward=True)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Choose whether backwards reduce the gradients: ``no_sync`` as a switch, also for single units.

        With False, unsharded gradients are accumulated. The first backward after True is set reduces them.
        """
        synchronize, units = as_flag(requires_gradient_sync, "requires_gradient_sync"), self._units(recurse)
        check_idle(units, "set_requires_gradient_sync()")
        for unit in units:
            unit.set_synchronize(synchronize)

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
        accumulated gradients it is a no-op.

        Raises:
            RuntimeError: not called on the root, or not called on all ranks.
            ValueError: a forward or backward is under way.
        """
        self._check_root("reduce_gradients() should only be called on the root FSDP instance")
        self._assert_state(TrainingState.IDLE)
        reduce_accumulated(join(self._fsdp_unit), units_of(self))

    def set_gradient_divide_factor(self, factor: float | None, *, recurse: bool = False) -> None:
        """Set the divisor of the sum of this unit's gradients over its ranks.

        A unit over fewer ranks than the root holds experts by default: other ranks hold other parameters in its place,
        and its gradients are divided by the number of the root's ranks. The number of the unit's own ranks says that
        the others hold copies, which this package does not keep equal.

        Args:
            factor: any positive number, such as a count of tokens, equal on all ranks; 1 for the sum; None for the
                number of ranks of the root's data parallelism, which gives the mean.
            recurse: set all units of this module. The default sets this unit alone, as in FSDP2.

        Raises:
            TypeError, ValueError: ``factor`` is no positive finite number.
            RuntimeError: a communication hook reduces the gradients, and divides them itself.
        """
        if factor is not None:
            if isinstance(factor, bool) or not isinstance(factor, (int, float)):
                raise TypeError(f"the divide factor must be a number or None, got {factor!r}")
            if not 0 < factor < float("inf"):
                raise ValueError(f"the divide factor must be positive and finite, got {factor}")
            if any(unit.policy.comm_hook is not None for unit in self._units(recurse)):
                raise RuntimeError("set_gradient_divide_factor() with a communication hook, which divides by itself")
        self._choose(recurse, gradient_divide_factor=None if factor is None else float(factor))

    def set_reduce_scatter_divide_factor(self, factor: float | None) -> None:
        """Set the divisor of this unit's gradients: the older name of :meth:`set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Choose whether this unit's reductions are plain sums in the collective, divided before or after it.

        By default NCCL averages where that is exact. Zero-copy transfers of NCCL need sums.
        """
        self._choose(False, force_sum_reduction=as_flag(enable, "enable"))

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Refuse a second process group for reductions; gathers and reductions of a unit share one.

        Raises:
            NotImplementedError: ``enable`` is True. The ranks compare the order of all collectives of a group.
        """
        if as_flag(enable, "enable"):
            raise NotImplementedError(
                "set_separate_reduce_scatter_group(True): gathers and reductions share the shard group, over which the "
                "ranks compare their order. Leave the call out"
            )

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Choose whether backwards reduce gradients over the replicas of hybrid sharding.

        With False, gradients are reduced inside the shard groups alone. The results are kept, one shard per unit in
        the reduce dtype. The first backward after True is set adds them and assigns ``.grad``. So an accumulation costs
        one reduction between machines. Only such a backward clears the kept shards; ``zero_grad()`` does not.

        Raises:
            RuntimeError: False with a communication hook, which would be skipped.
        """
        required = as_flag(requires_all_reduce, "requires_all_reduce")
        if not required and any(unit.policy.comm_hook is not None for unit in self._units(recurse)):
            raise RuntimeError("set_requires_all_reduce(False) with a communication hook, which reduces by itself")
        self._choose(recurse, requires_all_reduce=required)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], Any] | None, *, stream: Any = None, recurse: bool = False
    ) -> None:
        """Call ``hook(shard)`` with this unit's reduced gradients before they are assigned to ``.grad``.

        ``shard`` is this rank's 1-D part of a unit's gradient in the reduce dtype, reduced over all groups. The hook
        may change it in place, for example reduce it over ranks outside of this package's groups.

        Args:
            hook: the function, or None to remove it.
            stream: accelerator stream to run the hook on; the stream of the reductions by default. Hybrid sharding
                has a stream of its own for this and takes none; on CPU there are no streams.
            recurse: set all units of this module. The default sets this unit alone, as in FSDP2.

        Raises:
            TypeError: ``hook`` is not callable.
            ValueError: ``stream`` with hybrid sharding, or on CPU.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"the hook must be callable or None, got {hook!r}")
        units = self._units(recurse)
        streams = None if stream is None else join(self._fsdp_unit).streams
        if streams is not None:
            for unit in units:
                if streams.asynchronous_work:
                    raise ValueError(f"set_all_reduce_hook(stream=...): {unit.name} computes on CPU, without streams")
                if unit.groups.replica_size > 1 and unit.groups.sharded:
                    raise ValueError(
                        f"set_all_reduce_hook(stream=...): {unit.name} is sharded and replicated, and the hook runs on "
                        "the stream of the replicas' reductions: leave stream out"
                    )
        check_idle(units, "set_all_reduce_hook()")
        on_stream = hook if hook is None or streams is None else functools.partial(_run_on, stream, streams, hook)
        for unit in units:
            unit.choose(all_reduce_hook=on_stream)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Choose whether a backward waits, at the end, for the reductions of this tree.

        With False they stay in flight, and ``.grad`` has their results after the next backward that waits.

        Raises:
            RuntimeError: not called on the root.
        """
        self._check_root("set_is_last_backward() should only be called on the root instance")
        self._choose(False, is_last_backward=as_flag(is_last_backward, "is_last_backward"))

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set how many full gradients of this tree may wait for their reduction; the next one waits for the oldest.

        The default is 2 (FSDP2's is 1). ``recurse`` has no effect, since the buffers of the whole tree are counted.

        Raises:
            RuntimeError: not called on the root.
            TypeError: no integer.
            ValueError: not a positive number.
        """
        if type(max_input_buffers) is not int:
            raise TypeError(f"max_input_buffers must be an integer, got {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive number of buffers, got {max_input_buffers}")
        self._check_root("set_reduce_scatter_max_input_buffers() should only be called on the root instance")
        self._choose(False, reduce_buffers=max_input_buffers)
        join(self._fsdp_unit).size_pools()

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Choose whether ranks may use different units: the constructor's ``reduce_unused`` as a switch of the tree.

        Unlike FSDP2, which sets single units, all units of a tree have the same choice: ``recurse`` has no effect.

        Raises:
            RuntimeError: not called on the root, or during a forward or backward.
            NotImplementedError: True with ``reshard_after_forward=<number>``.
        """
        chosen = as_flag(reduce_scatter_unused_params, "reduce_scatter_unused_params")
        self._check_root("set_reduce_scatter_unused_params() should only be called on the root instance")
        if chosen and any(unit.policy.reshard_ranks for unit in units_of(self)):
            raise NotImplementedError(
                "set_reduce_scatter_unused_params(True) with reshard_after_forward=<number>: ranks agree over one "
                "group on every gather. Pass reshard_after_forward=True to the wrapper"
            )
        self._choose(True, reduce_unused=chosen)
        self._membership.leave()  # the next forward builds a tree whose ranks negotiate, or one whose ranks do not

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """Choose whether gathers are asynchronous operations of the compute stream, FSDP2's way to avoid fragmentation.

        On CPU gathers are asynchronous in any case.

        Raises:
            NotImplementedError: True on an accelerator. Gathers have a stream of their own, and buffers a pool, so that
                memory is not fragmented.
        """
        if as_flag(async_op, "async_op") and self._fsdp_unit.device.type != "cpu":
            raise NotImplementedError(
                f"_set_unshard_async_op(True): gathers of {self._fsdp_unit.name} run on a stream of their own, from a "
                "pool of buffers, which does not fragment memory. Leave the call out"
            )

    # -- implementation ------------------------------------------------------------------------------------------------

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
            if not isinstance(module, FSDP2Names):
                raise TypeError(f"expected FullyShardedDataParallel modules to prefetch, got {type(module).__name__}")
        if self in wrappers or len(set(wrappers)) < len(wrappers):
            raise ValueError(f"{self._fsdp_unit.name} can prefetch other units, each once")
        check_idle([self._fsdp_unit], "a list of modules to prefetch")
        self.__dict__.setdefault(_PREFETCH_LISTS, {})[backward] = wrappers
        self._publish_lists()

    def _publish_lists(self) -> None:
        """Give the unit access to the wrapper's prefetch lists, if there are any."""
        if _PREFETCH_LISTS in self.__dict__:
            self._fsdp_unit.choose(prefetch_lists=functools.partial(_listed, weakref.ref(self)))


def _listed(wrapper_ref: weakref.ref[FSDP2Names], backward: bool) -> list[Unit] | None:
    """Return the units of a prefetch list that are in the same tree and have full buffers; None without a list."""
    wrapper = wrapper_ref()
    if wrapper is None or not wrapper.__dict__[_PREFETCH_LISTS].get(backward):
        return None
    listed = [other._fsdp_unit for other in wrapper.__dict__[_PREFETCH_LISTS][backward]]
    context = wrapper._fsdp_unit.context
    return [unit for unit in listed if unit.gathers and unit.context is context]


def _run_on(stream: Any, streams: Streams, hook: Callable[[torch.Tensor], Any], shard: torch.Tensor) -> None:
    """Run ``hook`` on a stream of the user's, between two waits of the streams for each other."""
    with streams.joined(stream):
        hook(shard)


def register_forward_method(module: nn.Module, method_name: str) -> None:
    """Make ``module.<method_name>()`` run like a forward: with the parameters of the unit gathered.

    A no-op if ``module`` is not wrapped, so that model code need not check. ::

        fsdp.register_forward_method(model, "generate")

    Raises:
        ValueError: the wrapped module has no such method.
    """
    if not isinstance(module, FSDP2Names):
        return
    method = getattr(module.module, method_name, None)
    if not callable(method):
        raise ValueError(f"{type(module.module).__name__} has no method {method_name!r}")
    module.__dict__[method_name] = functools.update_wrapper(_GatheredMethod(module, method_name), method)


register_fsdp_forward_method = register_forward_method  # FSDP2's name


class _GatheredMethod:
    """A method of the wrapped module that runs like a forward."""

    def __init__(self, wrapper: FSDP2Names, name: str) -> None:
        self._wrapper, self._name = weakref.ref(wrapper), name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wrapper = self._wrapper()
        assert wrapper is not None
        return wrapper._run(getattr(wrapper.module, self._name), args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatheredMethod:
        copied: Any = _GatheredMethod(memo[id(self._wrapper())], self._name)
        functools.update_wrapper(copied, self.__wrapped__)  # type: ignore[attr-defined]
        return copied
