"""``FullyShardedDataParallel``: thin methods over the engine, and the other names of torch's module."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._composable_state import _State
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    FlatParamKey,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    HandleTrainingState,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    TrainingState,
)
from fsdp.checkpoint.load_state_dict import LoadingHooks
from fsdp.checkpoint.optim_names import name_to_param as _get_fqn_to_param  # noqa: F401, the names that tools know
from fsdp.checkpoint.optim_names import param_to_name as _get_param_to_fqn  # noqa: F401
from fsdp.checkpoint.optim_watch import watch_state_of
from fsdp.checkpoint.state_dict import SavingHooks
from fsdp.checkpoint.wrapper_methods import StateDictMethods, refuse_torchs_functions
from fsdp.comm.collectives import LOW_PRECISION_HOOKS as LOW_PRECISION_HOOKS
from fsdp.comm.groups import HYBRID_SHARDING_STRATEGIES as HYBRID_SHARDING_STRATEGIES
from fsdp.comm.versions import STATE_DICTS_ASK, skip_code
from fsdp.comm.waiting.waits import this_rank
from fsdp.flat.flat_param import FlatParameter, FlatParamHandle
from fsdp.flat.names import WRAPPED_MODULE, members_of, own_modules
from fsdp.flat.ownership import (
    Ignored,
    check_initialisers,
    check_not_wrapped,
    meta_modules,
    owned_params,
    torchs_base_of,
    warn_of_shared_memory,
)
from fsdp.flat.registration import drop_gradients
from fsdp.module_groups import has_groups
from fsdp.names.ddp import DDPNames, refuse_unknown_arguments, refused_attribute
from fsdp.names.fsdp1 import FSDP1Names, _get_module_fsdp_state_if_fully_sharded_module  # noqa: F401, for tools
from fsdp.names.fsdp2 import UnshardHandle, register_forward_method, register_fsdp_forward_method
from fsdp.runtime.asked_gradients import follow_inputs
from fsdp.runtime.build import (
    Membership,
    build_unit,
    copy_unit,
    inside_checkpoint,
    shard_info,
    warn_without_forward,
)
from fsdp.runtime.call import ForwardCall
from fsdp.runtime.clip import _get_grad_norm as _get_grad_norm  # FSDP1 has it here
from fsdp.runtime.clip import clip_grad_norm_, watch_torchs_clipping
from fsdp.runtime.comm_hook import register_comm_hook
from fsdp.runtime.context import RootContext
from fsdp.runtime.full_params import SummonOptions, full_params, summon
from fsdp.runtime.half_migrated import refuse_torchs_methods
from fsdp.runtime.hooks import breaks_graph
from fsdp.runtime.moving import apply_to_unit
from fsdp.runtime.options import WrapOptions
from fsdp.runtime.ranges import ranged
from fsdp.runtime.undo import undone_by
from fsdp.runtime.unit import units_of
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy, auto_wrap

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CustomPolicy",
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "FlatParamHandle",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "HYBRID_SHARDING_STRATEGIES",
    "HandleTrainingState",
    "LOW_PRECISION_HOOKS",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "ModuleWrapPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ProcessGroupType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "TrainingState",
    "UnshardHandle",
    "full_params",
    "register_forward_method",
    "register_fsdp_forward_method",
    "shard_info",
]

FLAT_PARAM = "_flat_param"
FSDP_WRAPPED_MODULE = WRAPPED_MODULE
FSDP_PREFIX = f"{WRAPPED_MODULE}."
ProcessGroupType = ProcessGroup | tuple[ProcessGroup, ProcessGroup] | None


class FullyShardedDataParallel(FSDP1Names, DDPNames, StateDictMethods, _State):
    """A module whose parameters, gradients and optimizer state are sharded over the ranks of a process group.

    ``module`` keeps its class and identity. This rank holds only a shard of the unit's parameters: those of the
    subtree that no nested ``FullyShardedDataParallel`` owns. They are gathered while the unit computes, in forward and
    in backward. Gradients arrive in ``.grad``, averaged over the ranks and sharded.

    Hooks on parameters: with ``use_orig_params=True``, ``register_hook`` functions receive this rank's full gradient
    before the reduction. In both modes ``register_post_accumulate_grad_hook`` functions run during the backward when
    ``.grad`` holds the reduced gradient, on the ranks that have a part of the parameter.

    Build the optimizer after wrapping; with ``use_orig_params=True`` it may also be built before. Call the wrapped
    module and not the modules inside it. Run the same units in the same order on every rank.

    Outside of the unit's forward, parameters, gradients and optimizer states are this rank's parts. Code that takes
    them for whole ones raises no error where the shapes fit:

    * ``p.norm()`` in a loss, or the weight of another unit in a forward: compute it in the forward of the module that
      owns the parameter.
    * ``p.normal_()`` on one rank: call it on all ranks, inside ``summon_full_params``.
    * ``dist.all_reduce(p.grad)``: leave it out. Gradients are averaged already, and ranks have parts of other sizes.
    * A dict of ``named_parameters()`` as a checkpoint: use ``state_dict()``.
    * ``torch.func.functional_call(model, parameters, inputs)`` from outside: it assigns the parameters, and they stay.
      Call it on a plain model that has loaded ``state_dict()``, or in a unit's forward on a module inside the unit.
    * An average written into the values of ``state_dict()``, which are copies: write into the ``parameters()`` of the
      copied model, from those of the model, or load the dict by ``load_state_dict``.
    * ``AveragedModel`` of the plain module, updated with the wrapped one: make it of the wrapped one.

    Args:
        module: the module to wrap, in place.
        process_group: the ranks to shard over; None: the default group. Hybrid strategies take a pair (shard group,
            replica group). None then shards within each machine and replicates across machines. Only ``rank()`` and
            ``size()`` are used here.
        sharding_strategy: see :class:`fsdp.api.ShardingStrategy`; None is ``FULL_SHARD``.
        cpu_offload: keep shards and gradients in host memory; see :class:`fsdp.api.CPUOffload`.
        auto_wrap_policy: which submodules become units of their own; see :mod:`fsdp.wrap`.
        backward_prefetch: see :class:`fsdp.api.BackwardPrefetch`; None: no prefetch.
        mixed_precision: the dtypes of compute, reduction, buffers and outputs; see :class:`fsdp.api.MixedPrecision`.
        ignored_modules: modules to leave alone, with their whole subtrees.
        param_init_fn: called on each module of a unit with meta parameters or buffers, to allocate and initialize the
            module's own ones. Default: each module's ``reset_parameters()``. Buffers that are allocated and not written
            are arbitrary; a load warns of those that the files do not have.
        device_id: the device that the unit computes on; parameters are moved there before they are flattened. Anything
            that ``torch.device()`` accepts. Without it, parameters stay on their accelerator. Parameters on CPU are
            moved to the current accelerator device, with a warning, if there is one.
        sync_module_states: give parameters and buffers rank 0's values. Without it, a warning names values that differ.
        forward_prefetch: accepted for compatibility; ``forward_prefetch_distance`` decides.
        limit_all_gathers: True: at most ``1 + distance`` full buffers exist at a time, besides those of the root, the
            units around the running one, and units that the strategy keeps. Prefetches are delayed and idle units are
            resharded to make room; the host never waits. False: neither. Equal for all instances under one root.
        use_orig_params: True: ``parameters()`` yields the user's own ``nn.Parameter`` objects, each with this rank's
            1-D part, which may be empty. False: it yields one flat parameter per bucket.
        ignored_states: parameters or modules to leave alone.
        reduce_unused: allow ranks to run different units, in any order and number, in forward and backward: branches
            that depend on the data, experts without input. Without it that is an error. Ranks agree before each gather
            and reduction; a rank that does not run the unit contributes zeros. A unit that no rank runs keeps the
            gradients; with ``use_orig_params`` so does a parameter, unless a hook or optimizer waits for it during the
            backward. Passes, ``no_sync()`` and ``requires_grad`` have to be the same on every rank, and the process
            group the same in the whole tree. The price: no prefetch; the host waits for an all-reduce of 32 bytes per
            group before each collective and after each pass, and for one byte per parameter after a backward that
            leaves parts of a unit unused.
        device_mesh: a mesh instead of groups: 1-D to shard over, or for hybrid strategies 2-D (replicate, shard), the
            reverse order of the pair of groups.
        forward_prefetch_distance, backward_prefetch_distance: number of units to gather ahead while a unit computes, in
            the order of the last forward or backward. The first pass has no order, and gathers each unit when it runs.
            0: least memory. 1 hides a gather behind one unit's compute. Each additional unit costs memory, and hides a
            slower network or very small units.
        reshard_after_forward: True: reshard all units after forward, the root too. False: keep them, as
            ``SHARD_GRAD_OP``. None: the strategy decides, and exempts the root. A divisor of the shard group's size,
            such as the ranks of a machine: units stay sharded over so many consecutive ranks, and the backward gathers
            among these. Each rank keeps 1/number of the full parameters until then. 1 is False, all ranks are True.
        flat_param_key: with ``use_orig_params=False``, one flat parameter per label. ``flat_param_key(name, param)``
            gets the parameter's name in the unit, and returns a hashable label, the same on every rank. Weights and
            biases may so have different options: ``lambda name, param: param.dim() > 1``; see :func:`param_groups`.
        broadcast_buffers: give all ranks rank 0's buffers, such as running statistics, when a forward of the outermost
            module begins, except after forwards in ``no_sync()`` or without gradients. One broadcast per dtype.
            ``DistributedDataParallel`` has it on by default. Equal for all instances under one root.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or two arguments contradict each other.
        RuntimeError: there is no process group, or parameters lie on several accelerator devices.
        NotImplementedError: a combination of features that is not supported.
    """

    @refuse_unknown_arguments
    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | str | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        reduce_unused: bool = False,
        forward_prefetch_distance: int = 1,
        backward_prefetch_distance: int = 1,
        reshard_after_forward: bool | int | None = None,
        broadcast_buffers: bool = False,
        flat_param_key: FlatParamKey | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
        if ignored_modules is not None and ignored_states is not None:
            raise ValueError("Cannot pass both ignored_modules and ignored_states at the same time; pass only one")
        options = WrapOptions.of(
            auto_wrap_policy=auto_wrap_policy,
            process_group=process_group,
            device_mesh=device_mesh,
            sharding_strategy=sharding_strategy,
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            mixed_precision=mixed_precision,
            param_init_fn=param_init_fn,
            device_id=device_id,
            sync_module_states=sync_module_states,
            forward_prefetch=forward_prefetch,
            limit_all_gathers=limit_all_gathers,
            use_orig_params=use_orig_params,
            reduce_unused=reduce_unused,
            forward_prefetch_distance=forward_prefetch_distance,
            backward_prefetch_distance=backward_prefetch_distance,
            reshard_after_forward=reshard_after_forward,
            broadcast_buffers=broadcast_buffers,
            flat_param_key=flat_param_key,
        )
        warn_without_forward(module)
        if options.sharding_strategy in HYBRID_SHARDING_STRATEGIES:
            self.process_group, self._inter_node_pg = options.process_group
        else:
            self.process_group = options.process_group
        self.rank: int = self.process_group.rank()
        self.world_size: int = self.process_group.size()
        this_rank()  # from now on peers notice the end of this process
        unit_name = f"the {' and '.join(type(member).__name__ for member in members_of(module).values())} unit"
        ignored = Ignored.of(module, ignored_modules, ignored_states)
        self._ignored_modules = set(ignored.modules)
        check_not_wrapped(module, ignored)
        warn_of_shared_memory(module, ignored)
        wraps_inside = auto_wrap_policy is not None or has_groups(module)
        if param_init_fn is None and (wraps_inside or meta_modules(module, ignored)):  # before the tree is changed
            check_initialisers(module, ignored, unit_name)
            owned_params(module, ignored, unit_name, options.groups)
        if wraps_inside:
            inner = options.for_inner_units(ignored.params)
            auto_wrap(
                module, auto_wrap_policy, set(ignored.modules), set(ignored.params), FullyShardedDataParallel, inner
            )

        self.sharding_strategy = options.strategy_in_use(module)
        self.backward_prefetch, self.mixed_precision = options.backward_prefetch, options.precision
        self.cpu_offload, self.forward_prefetch = options.cpu_offload, options.forward_prefetch
        self.limit_all_gathers = options.limit_all_gathers
        with torch.inference_mode(False):
            self._fsdp_unit = build_unit(module, unit_name, ignored, options)
        self._membership = Membership(self._fsdp_unit)
        modules = list(dict.fromkeys(owner for _, owner in own_modules(module)))
        self._fsdp_saving = SavingHooks(self._membership, modules)
        self._fsdp_loading = LoadingHooks(self._membership, modules)
        self._surround(module, "")
        watch_state_of(self._fsdp_unit)
        watch_torchs_clipping()
        follow_inputs()
        refuse_torchs_methods()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise TypeError where torch's ``fully_shard()`` makes the class of a module that is wrapped already."""
        super().__init_subclass__(**kwargs)
        if found := torchs_base_of(cls, fully_shard=True):
            raise TypeError(
                f"{found} cannot be a base of {cls.__name__}: fully_shard() of torch was called on a module of this "
                "package's FullyShardedDataParallel, whose parameters are sharded already. Wrap the whole model with "
                "one of the two; the model is of no use now"
            )

    def _surround(self, module: nn.Module, place: str) -> None:
        """Wrap ``module``; ``place`` is the prefix of the module in the names of the unit's parameters."""
        self._fsdp_wrapped_module, self._fsdp_place = module, place
        self._fsdp_loading.register([self])

    # -- the module ----------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module, without a checkpoint wrapper around it."""
        return inside_checkpoint(self._fsdp_wrapped_module)

    def __getattr__(self, name: str) -> Any:
        if not STATE_DICTS_ASK and name == WRAPPED_MODULE:  # the first attribute that they read then
            refuse_torchs_functions(sys._getframe(1))
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED_MODULE:  # before the constructor has set it
                raise
        try:
            return getattr(self._fsdp_wrapped_module, name)
        except AttributeError as error:
            if refused := refused_attribute(name):
                raise AttributeError(refused) from error
            raise

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the wrapped module with the parameters gathered. The root moves tensor arguments to the device."""
        module: Any = self._modules[WRAPPED_MODULE]  # faster than through __getattr__
        return self._run(module, args, kwargs)

    @breaks_graph
    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        calls: list[ForwardCall] = []
        try:
            args, kwargs = self._enter_forward(calls, args, kwargs)
            with calls[0].shown:
                output = function(*args, **kwargs)
            return calls[0].leave(output, self._fsdp_place)
        except BaseException:
            for call in calls:
                call.abort()
            raise

    @ranged("_pre_forward", "_fsdp_unit.name")
    def _enter_forward(self, calls: list[ForwardCall], args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Enter a new call, which is appended to ``calls`` before that: the caller aborts it after an error here."""
        calls.append(ForwardCall(self._fsdp_unit, self._join_context()))
        return calls[0].enter((args, kwargs))

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Apply ``fn`` to each module with the full parameters, and write them back to the shards.

        Raises:
            ValueError: during a forward or backward.
        """
        self._assert_state([TrainingState.IDLE, TrainingState.SUMMON_FULL_PARAMS])
        if self.training_state is TrainingState.SUMMON_FULL_PARAMS:
            return super().apply(fn)
        with self.summon_full_params(self, recurse=False, writeback=True):
            return super().apply(fn)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        """Apply ``.to()``, ``.half()``, ``.cuda()`` and so on to the shards, their gradients and the buffers.

        Parameters that an optimizer holds stay the same objects. Summoned parameters change as in a plain module."""
        unit = self._fsdp_unit
        if self._membership.parent_is_built:
            return self  # a param_init_fn of the parent empties modules below it; these have their values already
        apply_to_modules = functools.partial(super()._apply, fn, recurse)
        if apply_to_unit(unit, units_of(self), self._fsdp_place, fn, apply_to_modules):
            for wrapper in self.fsdp_modules(self):
                wrapper._membership.leave()
        return self

    # -- the tree ------------------------------------------------------------------------------------------------------

    def _join_context(self) -> RootContext:
        """Return the context of this unit's tree. Without a tree this instance becomes the root of a new one."""
        if "_is_fsdp_managed_module" in self.__dict__ and not self._membership.has_parent:  # set by torch's own FSDP
            raise RuntimeError(
                f"{self._fsdp_unit.name} lies in a module that torch's own FSDP has wrapped, and the two cannot be "
                "nested: wrap the whole model with one of them"
            )
        return self._membership.join()

    def check_is_root(self) -> bool:
        """Return True if this is the root of a tree. Without a tree this instance becomes a root."""
        self._join_context()
        return bool(self._is_root)

    def _check_root(self, words: str, kind: type[Exception] = RuntimeError) -> None:
        if not self.check_is_root():
            raise kind(f"{words}, and this one is inside another: call it on the outermost wrapped module")

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Return all instances in ``module``, itself included, depth first; with ``root_only`` the roots alone."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [instance for instance in found if instance.check_is_root()] if root_only else found

    def reset_iter_state(self) -> None:
        """Return the tree to rest after a forward or backward that raised. Unfinished reductions are dropped.

        The next forward does this by itself. Calling it releases memory at once.
        """
        context = self._fsdp_unit.context
        if context is not None:
            context.reset()

    # -- parameters ----------------------------------------------------------------------------------------------------

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(
        module: nn.Module,
        recurse: bool = True,
        writeback: bool = True,
        rank0_only: bool = False,
        offload_to_cpu: bool = False,
        with_grads: bool = False,
    ) -> Iterator[None]:
        """Show the full parameters of the instances in ``module`` on every rank inside the context.

        All ranks have to enter with the same arguments. A forward inside uses the shown parameters; a backward inside,
        or of a forward inside, raises RuntimeError. The context costs the memory of the full parameters;
        :func:`fsdp.full_params` iterates unit by unit.

        Args:
            recurse: include all instances below; else only ``module`` itself, if it is one.
            writeback: on exit each rank writes back to the shard. Without it changes are lost, except
                under ``NO_SHARD``, where the live tensors are shown.
            rank0_only: show them on rank 0 of each shard group only; the other ranks see shards.
            offload_to_cpu: show copies on CPU.
            with_grads: show the full gradients in ``.grad`` as well (``use_orig_params=True`` only).

        Raises:
            NotImplementedError: a combination of options that is not supported.
            AssertionError: during a forward or backward of an instance, or inside another such context.
        """
        options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        wrappers = [m for m in FullyShardedDataParallel.fsdp_modules(module) if recurse or m is module]
        for wrapper in wrappers:
            options.check(wrapper._fsdp_unit)
        with torch.inference_mode(False):
            units = {wrapper._fsdp_unit: wrapper._join_context() for wrapper in wrappers}
        with summon(list(units.items()), options):
            yield

    # -- gradients -----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset gradients, as ``nn.Module.zero_grad``."""
        lists_itself = type(self).named_parameters is not FullyShardedDataParallel.named_parameters
        if lists_itself or not set_to_none or not drop_gradients(self):
            super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients inside the context, without communication, visible as ``.grad``.

        The first backward outside reduces them. The context counts when the backward runs, not the forward. It costs
        the memory of the full gradients.

        Under ``SHARD_GRAD_OP`` full parameters stay gathered from one backward inside to the next forward. That forward
        gathers them again only if version counters show a write. A write past the counters, through ``param.data`` or
        numpy, is not seen before the accumulation ends.

        Raises:
            RuntimeError: not called on the root.
            ValueError: during a forward or backward.
        """
        self._check_root("no_sync() should only be called on the root FSDP instance")
        self._assert_state(TrainingState.IDLE)
        units = units_of(self)
        before = [unit.synchronize for unit in units]

        def synchronize() -> None:
            for unit, value in zip(units, before):
                unit.set_synchronize(value)

        with undone_by(synchronize):
            for unit in units:
                unit.set_synchronize(False)
            yield

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients of the tree in place so that their total norm is at most ``max_norm``.

        The norm is that of one vector of all gradients: of every unit, over all ranks, and of parameters that no unit
        owns. For gradients that differ between ranks, such as those of ignored parameters, the mean of the p-th powers
        counts. All ranks have to call it after the gradients are reduced; ranks without gradients take part. There is
        one all-reduce per shard group, normally one. Replicas count once; if ignored parameters differ between them,
        there is one more all-reduce over the replicas.

        Args:
            max_norm: gradients are multiplied by ``max_norm / (norm + 1e-6)`` where that is less than 1.
            norm_type: the p of the p-norm: a number other than 0, or inf.
            error_if_nonfinite: raise if the norm is NaN or infinite. The host then waits for the norm.

        Returns:
            the norm before clipping (0-dim), the same on every rank, in float64 if parameters or gradients have that,
            else in float32. On an accelerator the host has not waited for it; with offloaded parameters it is on CPU.
            It is NaN or infinite if any gradient is, and the gradients are scaled by it all the same.

        Raises:
            RuntimeError: not called on the root; gradients of ``no_sync`` are not reduced yet; or the norm is not
                finite with ``error_if_nonfinite`` (gradients stay as they are).
            ValueError: during a forward or backward, or an invalid ``norm_type``.
        """
        self._check_root("clip_grad_norm_() should only be called on the root FSDP instance")
        for wrapper in self.fsdp_modules(self):
            wrapper._assert_state(TrainingState.IDLE)
        units = units_of(self)
        return clip_grad_norm_(
            self._fsdp_unit, units, self.parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce the gradients of every unit by ``hook``, in place of the collective and the division.

        The hook runs when a unit's gradients are complete, on the stream of the reductions. It has to finish the work,
        in the order of that stream, before it returns None. Values that it leaves in the padding are dropped.

        * sharded: ``hook(state, grad, shard)`` writes this rank's part of the reduced gradient into ``shard``. ``grad``
          is the full padded gradient of this rank (1-D, in the reduce dtype), which the hook may overwrite.
        * ``NO_SHARD``, and any group of one rank: ``hook(state, grad)`` reduces ``grad`` in place.
        * hybrid: one of the two inside the shard group (``process_group`` of the instance); the result is then averaged
          over the replicas.

        torch's ``allreduce_hook``, ``reduce_scatter_hook``, ``fp16_compress_hook`` and ``bf16_compress_hook`` work on
        any device. The compressing ones get gradients in the parameters' own dtype.

        Collectives of the hook are the program's own: if the hook raises on one rank, the other ranks wait in theirs
        until the timeout of the group, whose connections are then broken. Wrap the model on a new group after that.

        Raises:
            AssertionError: not called on the root, or a hook is registered already.
            RuntimeError: ``set_gradient_divide_factor`` or ``set_requires_all_reduce(False)`` is in force.
            ValueError: ``hook`` is not callable.
            TypeError: ``hook`` does not take the arguments of the strategy.
        """
        self._check_root("register_comm_hook() can only be called on a root instance", AssertionError)
        register_comm_hook(units_of(self), state, hook)

    # -- copies --------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        """Copy the model: equal values, no gradients, the same ranks. There is no communication.

        Raises:
            RuntimeError: an instance in it runs, or is inside ``summon_full_params``.
        """
        copied = memo[id(self)] = type(self).__new__(type(self))
        for shared in (self.process_group, self.__dict__.get("_inter_node_pg")):
            memo[id(shared)] = shared
        unit, is_first = self._fsdp_unit, id(self._fsdp_unit) not in memo
        if is_first:  # of the wrappers of this unit; only a group has several
            memo[id(unit)] = copy_unit(unit, lambda: copy.deepcopy(unit.module, memo), memo)
            memo[id(self._membership)] = self._membership.copied(memo[id(unit)])
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if is_first:
            for hooks in (copied._fsdp_saving, copied._fsdp_loading):
                hooks.belong_to(copied._membership)
            watch_state_of(copied._fsdp_unit)
        copied._publish_lists()
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a FullyShardedDataParallel module cannot be pickled: save its state_dict() instead")


skip_code(FullyShardedDataParallel.forward.__code__)  # the graph breaks in it at once
