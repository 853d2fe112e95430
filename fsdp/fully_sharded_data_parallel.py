"""``FullyShardedDataParallel``: thin methods over the engine. The names beside it are those of torch's module."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
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
    as_backward_prefetch,
    as_cpu_offload,
    as_flag,
    as_flat_param_key,
    as_mixed_precision,
    as_sharding_strategy,
)
from fsdp.checkpoint.load_state_dict import LoadingHooks
from fsdp.checkpoint.optim_names import name_to_param as _get_fqn_to_param  # noqa: F401, the names that tools know
from fsdp.checkpoint.optim_names import param_to_name as _get_param_to_fqn  # noqa: F401
from fsdp.checkpoint.optim_watch import watch_state_of
from fsdp.checkpoint.state_dict import SavingHooks
from fsdp.checkpoint.wrapper_methods import StateDictMethods
from fsdp.comm.board import processes
from fsdp.comm.collectives import LOW_PRECISION_HOOKS as LOW_PRECISION_HOOKS
from fsdp.comm.groups import HYBRID_SHARDING_STRATEGIES as HYBRID_SHARDING_STRATEGIES
from fsdp.comm.groups import Groups, check_groups
from fsdp.comm.nodes import choose_groups
from fsdp.comm.user_warnings import warn_user
from fsdp.comm.versions import skip_code
from fsdp.flat.flat_param import FlatParameter, FlatParamHandle
from fsdp.flat.names import WRAPPED_MODULE, members_of, own_modules
from fsdp.flat.ownership import Ignored, check_initialisers, check_not_wrapped, has_meta, owned_params
from fsdp.flat.registration import drop_gradients
from fsdp.module_groups import has_groups
from fsdp.names.ddp import DDPNames, refuse_unknown_arguments, refused_attribute
from fsdp.names.fsdp1 import FSDP1Names, _get_module_fsdp_state_if_fully_sharded_module  # noqa: F401, for tools
from fsdp.names.fsdp2 import UnshardHandle, register_forward_method, register_fsdp_forward_method
from fsdp.runtime.autograd_grad import watch_autograd_grad
from fsdp.runtime.backward import Running
from fsdp.runtime.build import (
    Membership,
    UnitOptions,
    build_unit,
    copy_unit,
    inside_checkpoint,
    shard_info,
    strategy_in_use,
    warn_without_forward,
)
from fsdp.runtime.clip import _get_grad_norm as _get_grad_norm  # FSDP1 has it here
from fsdp.runtime.clip import clip_grad_norm_, watch_torchs_clipping
from fsdp.runtime.comm_hook import register_comm_hook
from fsdp.runtime.context import RootContext
from fsdp.runtime.full_params import SummonOptions, full_params, summon, without_shards
from fsdp.runtime.hooks import breaks_graph
from fsdp.runtime.nested import to_device
from fsdp.runtime.policy import UnitPolicy, tree_policy
from fsdp.runtime.ranges import ranged
from fsdp.runtime.unit import Phase, units_of
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
    """Shards a module's parameters, gradients and optimizer state over the ranks of a process group.

    Afterwards ``module`` keeps its class and identity, but this rank holds only its shard of the parameters that the
    unit owns: those of the subtree that no nested ``FullyShardedDataParallel`` has. They are gathered while the unit
    computes, in forward and in backward, and gradients arrive averaged over the ranks, sharded, in ``.grad``.

    With ``use_orig_params=True`` hooks that users register on a parameter fire: ``register_hook`` ones with the whole
    gradient of this rank, before it is reduced, and ``register_post_accumulate_grad_hook`` ones in both modes once
    ``.grad`` holds this rank's part of the reduced gradient, during the backward and on the ranks that have a part.

    Build the optimizer after wrapping (with ``use_orig_params=True`` before is fine as well), call the wrapped module
    and not its parts, and run the same units in the same order on every rank.

    Args:
        module: the module to wrap, in place.
        process_group: the ranks to shard over; the default group if None. For hybrid strategies the pair (ranks to
            shard over, ranks to replicate over); if None, made of the default group, once: the ranks of a machine, and
            those in the same place on all machines. Only ``rank()`` and ``size()`` are used here.
        sharding_strategy: see :class:`fsdp.api.ShardingStrategy`; None is ``FULL_SHARD``.
        cpu_offload: whether shards and gradients live in host memory; see :class:`fsdp.api.CPUOffload`.
        auto_wrap_policy: which submodules become units of their own; see :mod:`fsdp.wrap`.
        backward_prefetch: see :class:`fsdp.api.BackwardPrefetch`; None gathers nothing ahead.
        mixed_precision: the dtypes of compute, reduction, buffers and outputs; see :class:`fsdp.api.MixedPrecision`.
        ignored_modules: modules to leave alone, with all that is below them.
        param_init_fn: called on each module of a unit that has meta parameters or buffers, to give that module's own
            ones memory and values; without it, ``reset_parameters()`` of each module is.
        device_id: where the parameters are moved before they are flattened, and where the unit computes: anything that
            ``torch.device()`` accepts. Without it they stay where they are if that is an accelerator; parameters on
            CPU are moved to the accelerator's current device, with a warning, where there is one.
        sync_module_states: give parameters and buffers rank 0's values. Without it ranks are warned if theirs differ.
        forward_prefetch: changes nothing: with or without it, ``forward_prefetch_distance`` units are gathered before
            the current one computes.
        limit_all_gathers: True: beside the root, the units around the one that computes, and those that their strategy
            keeps, at most ``1 + distance`` units have memory at a time: a prefetch is held back until there is
            room, and what is idle makes room for what is needed. The host never waits for it. False: nothing is held
            back or sent away (a checkpointed segment that was recomputed stays as a whole, for instance); memory then
            depends on the program alone, the same at every step. It is the same for all instances under one root.
        use_orig_params: True: ``parameters()`` keeps giving the user's own ``nn.Parameter`` objects, each holding this
            rank's 1-D part (possibly empty). False: it gives one flat parameter per bucket.
        ignored_states: parameters, or else modules, to leave alone.
        reduce_unused: allow ranks to run different units (a branch that depends on the data, an expert that got no
            input), which without it is an error that names them. Ranks may skip units and call them in any order and
            any number of times, in forward and in backward: before each gather and each reduction they agree on what is
            next, and those that have no use for it take part, with zeros as their gradient. A unit that no rank runs
            keeps its gradients, None if it has none; with ``use_orig_params`` so does a parameter of any unit, unless a
            hook or optimizer waits for it during the backward. The same on every rank have to be the passes (each
            forward and backward of the outermost module, also without gradients), ``no_sync()``, and which parameters
            require grad; in a tree, this argument and the process group (or pair of groups). The price: nothing is
            prefetched, and the host waits for an all-reduce of 24 bytes in each group before each collective and at the
            end of each pass, and for one more of a byte per parameter after a backward that does not use all of a unit.
        device_mesh: a mesh instead of groups: of one dimension, the ranks to shard over; for hybrid strategies of two,
            (replicate, shard), in the other order than the pair of groups.
        forward_prefetch_distance, backward_prefetch_distance: how many of the next units to gather while this one
            computes, in the order in which the units ran in the last forward or backward; the first pass has no order
            to follow, and gathers each unit when it is needed. 0: none ahead, for the least memory. 1 hides a gather
            behind one unit's compute; each further one costs the memory of a unit, and hides a slower network, or
            units too small to hide the next.
        reshard_after_forward: True: units are resharded after forward and gathered for backward, the root as well;
            False: they are not, as under ``SHARD_GRAD_OP``; None: as the strategy says, which exempts the root. A
            number of ranks, which divides that of the shard group (those of a machine, for instance): units stay
            sharded over so many consecutive ones, and the first backward after a forward gathers among these, as does
            a unit that is called again in the same forward. Each rank keeps 1/number of the full parameters until the
            unit's backward is over, in the dtype that is computed in. 1 is False, all ranks are True.
        keep_gathered_nbytes: so many bytes of full parameters (in the dtype that is computed in, without the root's)
            stay gathered from forward to backward, those of the units that ran last, whose backward comes first; and
            inside ``no_sync`` from backward to forward. Each saves a gather. 0 is ``FULL_SHARD``, all there are is
            ``SHARD_GRAD_OP``. The same for all instances under one root.
        coalesce_nbytes: neighbours among the units that ``auto_wrap_policy`` chooses (children of one module with the
            same arguments, no units inside) become one of at most so many bytes, as by :meth:`group`. Or by a policy.
        flat_param_key: with ``use_orig_params=False``, divide each unit's flat parameter by label: called with the name
            of a parameter in its unit and the parameter, it returns a hashable label, the same on every rank, and
            parameters with equal labels become one flat parameter. So weights and biases may have different options:
            ``flat_param_key=lambda name, param: param.dim() > 1``, see :func:`fsdp.param_groups`.
        broadcast_buffers: give all ranks the buffers of rank 0 (running statistics, for instance) when a forward of the
            outermost module begins, as ``DistributedDataParallel`` does, which has it on by default: one broadcast per
            dtype, but after forwards in ``no_sync()`` or without gradients. The same for all instances under one root.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or two of them contradict each other.
        RuntimeError: there is no process group, or parameters lie on several accelerator devices.
        NotImplementedError: a feature that is not supported yet.
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
        keep_gathered_nbytes: int = 0,
        broadcast_buffers: bool = False,
        coalesce_nbytes: int = 0,
        flat_param_key: FlatParamKey | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be an nn.Module, got {type(module).__name__}")
        strategy = as_sharding_strategy(sharding_strategy)
        self.backward_prefetch = as_backward_prefetch(backward_prefetch)
        self.mixed_precision = as_mixed_precision(mixed_precision)
        self.cpu_offload = as_cpu_offload(cpu_offload)
        if ignored_modules is not None and ignored_states is not None:
            raise ValueError("Cannot pass both ignored_modules and ignored_states at the same time; pass only one")
        if param_init_fn is not None and not callable(param_init_fn):
            raise ValueError(f"Expected param_init_fn to be callable but got {type(param_init_fn)}")
        flat_param_key = as_flat_param_key(flat_param_key, use_orig_params)
        self.forward_prefetch = as_flag(forward_prefetch, "forward_prefetch")
        self.limit_all_gathers = as_flag(limit_all_gathers, "limit_all_gathers")
        policy = UnitPolicy.chosen(
            tree_policy(
                use_orig_params=use_orig_params,
                limit_all_gathers=self.limit_all_gathers,
                reduce_unused=reduce_unused,
                broadcast_buffers=broadcast_buffers,
                keep_gathered_nbytes=keep_gathered_nbytes,
            ),
            strategy,
            self.backward_prefetch,
            reshard_after_forward=reshard_after_forward,
            distances=(forward_prefetch_distance, backward_prefetch_distance),
            forward_prefetch=self.forward_prefetch,
        )
        check_groups(strategy, process_group, device_mesh, auto_wrap_policy)
        warn_without_forward(module)
        hybrid = strategy in HYBRID_SHARDING_STRATEGIES
        chosen = choose_groups(strategy, process_group, device_mesh)
        if hybrid:
            self.process_group, self._inter_node_pg = chosen
            groups = Groups.of_pair(*chosen)
        else:
            self.process_group = chosen
            groups = Groups.of(chosen, replicate=strategy is ShardingStrategy.NO_SHARD)
        policy = policy.within(groups)
        self.rank: int = self.process_group.rank()
        self.world_size: int = self.process_group.size()
        processes()  # from now on the others can tell whether this one has ended
        unit_name = f"the {' and '.join(type(member).__name__ for member in members_of(module).values())} unit"
        ignored = Ignored.of(module, ignored_modules, ignored_states)
        check_not_wrapped(module, ignored)
        wraps_inside = auto_wrap_policy is not None or has_groups(module) or coalesce_nbytes
        if param_init_fn is None and (wraps_inside or has_meta(module, ignored)):  # before any of the tree is changed
            check_initialisers(module, ignored, unit_name)
            owned_params(module, ignored, unit_name, groups)
        if wraps_inside:
            auto_wrap(
                module,
                auto_wrap_policy,
                set(ignored.modules),
                set(ignored.params),
                FullyShardedDataParallel,
                {
                    "process_group": chosen if device_mesh is None else None,
                    "device_mesh": device_mesh,
                    "sharding_strategy": strategy,
                    "cpu_offload": cpu_offload,
                    "backward_prefetch": backward_prefetch,
                    "mixed_precision": mixed_precision and dataclasses.replace(self.mixed_precision, output_dtype=None),
                    "param_init_fn": param_init_fn,
                    "device_id": device_id,
                    "sync_module_states": sync_module_states,
                    "forward_prefetch": forward_prefetch,
                    "limit_all_gathers": limit_all_gathers,
                    "use_orig_params": use_orig_params,
                    "ignored_states": ignored.params,
                    "reduce_unused": reduce_unused,
                    "forward_prefetch_distance": forward_prefetch_distance,
                    "backward_prefetch_distance": backward_prefetch_distance,
                    "reshard_after_forward": reshard_after_forward,
                    "keep_gathered_nbytes": keep_gathered_nbytes,
                    "broadcast_buffers": broadcast_buffers,
                    "coalesce_nbytes": coalesce_nbytes,
                    "flat_param_key": flat_param_key,
                },
            )

        self.sharding_strategy = strategy_in_use(strategy, groups)
        options = UnitOptions(
            groups,
            policy,
            self.mixed_precision,
            self.cpu_offload,
            param_init_fn,
            device_id,
            sync_module_states,
            flat_param_key,
        )
        with torch.inference_mode(False):
            self._fsdp_unit = build_unit(module, unit_name, ignored, options)
        self._device_mesh = device_mesh
        self._membership = Membership(self._fsdp_unit)
        modules = list(dict.fromkeys(owner for _, owner in own_modules(module)))
        self._fsdp_saving = SavingHooks(self._membership, modules)
        self._fsdp_loading = LoadingHooks(self._membership, modules)
        self._surround(module, "")
        watch_state_of(self._fsdp_unit)
        watch_torchs_clipping()
        watch_autograd_grad()

    def _surround(self, module: nn.Module, place: str) -> None:
        """Stand for ``module``, whose parameters have names in the unit that begin with ``place``."""
        self._fsdp_wrapped_module, self._fsdp_place = module, place
        self._fsdp_loading.register([self])

    # -- the module ----------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The wrapped module; a checkpoint wrapper around it is looked through."""
        return inside_checkpoint(self._fsdp_wrapped_module)

    def __getattr__(self, name: str) -> Any:
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
        """Run the wrapped module with its parameters gathered. The outermost unit moves tensor arguments to its
        device."""
        module: Any = self._modules[WRAPPED_MODULE]  # sooner than through __getattr__
        return self._run(module, args, kwargs)

    @breaks_graph
    def _run(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        unit = self._fsdp_unit
        context, running, args, kwargs = self._enter_forward(args, kwargs)
        try:
            return unit.post_forward(context, running, function(*args, **kwargs), self._fsdp_place)
        except BaseException:
            unit.abort_forward(context, running)
            raise

    @ranged("_pre_forward", "_fsdp_unit.name")
    def _enter_forward(self, args: Any, kwargs: Any) -> tuple[RootContext, Running, Any, Any]:
        unit = self._fsdp_unit
        context = self._join_context()
        if unit is context.root:
            args, kwargs = to_device(args, self.compute_device), to_device(kwargs, self.compute_device)
        call, (args, kwargs) = unit.pre_forward(context, (args, kwargs))
        return context, Running(call, unit.name), args, kwargs

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """As ``nn.Module.apply``, with each unit's parameters whole while ``fn`` sees its modules, and written back.

        Raises:
            ValueError: a forward or backward is under way.
        """
        self._assert_state([TrainingState.IDLE, TrainingState.SUMMON_FULL_PARAMS])
        if self.training_state is TrainingState.SUMMON_FULL_PARAMS:
            return super().apply(fn)
        with self.summon_full_params(self, recurse=False, writeback=True):
            return super().apply(fn)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        """Apply ``.to()``, ``.half()``, ``.cuda()`` and the like to the shards, their gradients and the buffers.

        The parameters that an optimizer holds stay the same objects. Summoned ones are changed as a plain module's.
        """
        unit, units = self._fsdp_unit, units_of(self)
        if unit.parent_is_built:
            return self  # a param_init_fn of the parent empties modules below it; these have their values already
        if all(inner.phase is Phase.SUMMONED for inner in units):
            with without_shards(unit):
                return super()._apply(fn, recurse)
        for inner in units:
            inner.check_can_change()
            inner.follow_parameters()
        unit.precision.release_buffers(self.compute_device)
        for views in unit.views:
            views.registration.unregister()
        try:
            super()._apply(fn, recurse)
        finally:
            for views in unit.views:
                views.registration.use_resting()
        device = unit.device
        if unit.changes_shards(fn, self._fsdp_place):
            with torch.no_grad():
                device = unit.apply_to_shards(fn) if unit.handles else fn(torch.empty(0, device=device)).device
        if unit.context is not None:
            unit.precision.place_buffers(device, full_precision=unit.precision.wants_full)
        if device != unit.device:
            unit.device = device
            for wrapper in self.fsdp_modules(self):
                wrapper._membership.leave()
        return self

    # -- the tree ------------------------------------------------------------------------------------------------------

    def _join_context(self) -> RootContext:
        """The context of the tree that this unit is in; without one, it becomes the root of everything below it."""
        if "_is_fsdp_managed_module" in self.__dict__ and not self._fsdp_unit.has_parent:  # so torch's own marks it
            raise RuntimeError(
                f"{self._fsdp_unit.name} lies in a module that torch's own FSDP has wrapped, and the two cannot be "
                "nested: wrap the whole model with one of them"
            )
        return self._membership.join()

    def check_is_root(self) -> bool:
        """Whether this is the outermost instance of its tree; undecided, it becomes that."""
        self._join_context()
        return bool(self._is_root)

    def _check_root(self, words: str, kind: type[Exception] = RuntimeError) -> None:
        if not self.check_is_root():
            raise kind(f"{words}, and this one is inside another: call it on the outermost wrapped module")

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """All instances in ``module``, itself included, depth first; with ``root_only``, those that are roots."""
        found = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        return [instance for instance in found if instance.check_is_root()] if root_only else found

    def reset_iter_state(self) -> None:
        """Bring the tree back to rest after a forward or backward that raised; gradients not yet attached are dropped.

        Happens by itself at the next forward. Calling it gives memory back at once.
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
        """Inside, the parameters of the instances in ``module`` have their full shapes and values on every rank.

        All ranks have to enter with the same arguments. A forward inside computes with what is shown. Costs the memory
        of the full parameters; :func:`fsdp.full_params` goes unit by unit.

        Args:
            recurse: all instances below; else only ``module`` itself, if it is one.
            writeback: on exit each rank keeps what its own part was changed to. Without it changes are lost, except
                under ``NO_SHARD``, where the live tensors are shown.
            rank0_only: show them on rank 0 of each shard group only; the others see shards.
            offload_to_cpu: show copies on CPU.
            with_grads: show the full gradients in ``.grad`` as well (``use_orig_params=True`` only).

        Raises:
            NotImplementedError: options that do not go together.
            AssertionError: in a forward or backward of an instance, or inside another such context.
        """
        options = SummonOptions(writeback, rank0_only, offload_to_cpu, with_grads)
        wrappers = [m for m in FullyShardedDataParallel.fsdp_modules(module) if recurse or m is module]
        for wrapper in wrappers:
            options.check(wrapper._fsdp_unit)
        if offload_to_cpu and not rank0_only:
            warn_user(
                "summon_full_params(offload_to_cpu=True) without rank0_only=True makes a CPU copy of the full "
                "parameters on every rank"
            )
        with torch.inference_mode(False):
            units = {wrapper._fsdp_unit: wrapper._join_context() for wrapper in wrappers}
        with summon(list(units.items()), options):
            yield

    # -- gradients -----------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``."""
        lists_itself = type(self).named_parameters is not FullyShardedDataParallel.named_parameters
        if lists_itself or not set_to_none or not drop_gradients(self):
            super().zero_grad(set_to_none)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate unsharded gradients without communication, visible as ``.grad``; the first
        backward outside reduces them. Costs the memory of the full gradients. Read when the backward runs, not the
        forward.

        Under ``SHARD_GRAD_OP`` full parameters stay from one backward inside to the next forward, which gathers them
        again only where they were written in between. The version counters tell, those of the parameters that the
        model shows, so what is written past these (into ``param.data``, or through numpy) is not seen before the
        accumulation ends.

        Raises:
            RuntimeError: not called on the root.
            ValueError: a forward or backward is under way.
        """
        self._check_root("no_sync() should only be called on the root FSDP instance")
        self._assert_state(TrainingState.IDLE)
        units = units_of(self)
        before = [unit.synchronize for unit in units]
        for unit in units:
            unit.synchronize = False
        try:
            yield
        finally:
            for unit, value in zip(units, before):
                unit.synchronize = value

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale all gradients of the tree, in place, so that their total norm is at most ``max_norm``.

        The norm is that of all gradients as one vector: those of every unit, wherever their parts are, and those of
        parameters that no unit manages. Of what differs between ranks, ignored parameters for instance, it has the mean
        of the p-th powers. All ranks have to call it, after the gradients are reduced; ranks without gradients take
        part. One all-reduce per shard group, normally one; replicas count once, and where ignored parameters make them
        differ there is one more over them.

        Args:
            max_norm: the gradients are multiplied by ``max_norm / (norm + 1e-6)`` where that is less than 1.
            norm_type: the p of the p-norm: a number other than 0, or inf.
            error_if_nonfinite: raise if the norm is NaN or infinite. The host has to wait for it then.

        Returns:
            the norm before clipping (0-d), the same on every rank: in float64 if parameters or gradients of the tree
            have that, else in float32. On an accelerator the host has not waited for it; where
            parameters are offloaded it lies on CPU. NaN or infinite where any gradient is, and then the gradients are
            scaled by it all the same.

        Raises:
            RuntimeError: not called on the root; there are gradients from ``no_sync`` that are not reduced yet; or
                ``error_if_nonfinite`` asks for it (gradients stay as they are).
            ValueError: a forward or backward is under way, or there is no such norm.
        """
        self._check_root("clip_grad_norm_() should only be called on the root FSDP instance")
        for wrapper in self.fsdp_modules(self):
            wrapper._assert_state(TrainingState.IDLE)
        units = units_of(self)
        return clip_grad_norm_(
            self._fsdp_unit, units, self.parameters(), max_norm, norm_type, error_if_nonfinite=error_if_nonfinite
        )

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Let ``hook`` reduce the gradients of every unit from now on, in place of the collective and the division.

        It is called when a unit's gradients are complete, on the stream of the reductions, and has to be through with
        its work (for that stream) when it returns None. What it leaves in the padding is dropped.

        * sharded: ``hook(state, grad, shard)`` writes this rank's part of the reduced gradient into ``shard``, from
          ``grad``, the whole padded gradient of one rank (1-D, in the reduce dtype), which it may use up;
        * ``NO_SHARD``, which one rank always is: ``hook(state, grad)`` reduces ``grad`` in place;
        * hybrid: as the one or the other, inside the shard group (``process_group`` of the instance), and what the hook
          leaves is then averaged over the replicas.

        torch's ``allreduce_hook``, ``reduce_scatter_hook``, ``fp16_compress_hook`` and ``bf16_compress_hook`` do, on
        any device. The compressing ones get gradients in the parameters' own dtype.

        Raises:
            AssertionError: not called on the root; or a hook is there already.
            RuntimeError: ``set_gradient_divide_factor`` or ``set_requires_all_reduce(False)`` is in force.
            ValueError: ``hook`` is not callable.
            TypeError: it does not take the arguments that the units will pass.
        """
        self._check_root("register_comm_hook() can only be called on a root instance", AssertionError)
        register_comm_hook(units_of(self), state, hook)

    # -- copies --------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        """An independent model with the same values and no gradients, over the same ranks; nothing is communicated.

        Raises:
            RuntimeError: an instance in it runs, or is inside ``summon_full_params``.
        """
        copied = memo[id(self)] = type(self).__new__(type(self))
        for shared in (self.process_group, self.__dict__.get("_inter_node_pg")):
            memo[id(shared)] = shared
        unit, is_first = self._fsdp_unit, id(self._fsdp_unit) not in memo
        if is_first:  # of the wrappers around the unit's modules, nearly always the only one
            memo[id(unit)] = copy_unit(unit, lambda: copy.deepcopy(unit.module, memo), memo)
            memo[id(self._membership)] = Membership(memo[id(unit)])
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        if is_first:
            for hooks in (copied._fsdp_saving, copied._fsdp_loading):
                hooks.belong_to(copied._membership)
            watch_state_of(copied._fsdp_unit)
        copied._publish_lists()
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError("a FullyShardedDataParallel module cannot be pickled: save its state_dict() instead")


skip_code(FullyShardedDataParallel.forward.__code__)  # which is no more than where the graph breaks
