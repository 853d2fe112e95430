"""FSDP1's private names: attributes, handles of flat parameters, and functions that trainers and libraries call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import BackwardPrefetch, HandleShardingStrategy, HandleTrainingState, MixedPrecision, TrainingState
from fsdp.comm.collectives import predivisor
from fsdp.comm.streams import compute_and_gather_stream
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.full_copy import BufferState
from fsdp.flat.names import clean
from fsdp.runtime.build import Membership
from fsdp.runtime.nested import to_device
from fsdp.runtime.unit import Phase, Unit, units_in

_HANDLE_STATES = {
    Phase.IDLE: HandleTrainingState.IDLE,
    Phase.FORWARD: HandleTrainingState.FORWARD,
    Phase.BACKWARD: HandleTrainingState.BACKWARD_PRE,
    Phase.SUMMONED: HandleTrainingState.SUMMON_FULL_PARAMS,
}


class FSDP1Names(nn.Module):
    """Mixin: FSDP1's private attributes of the wrapper."""

    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision
    _fsdp_unit: Unit
    _ignored_modules: set[nn.Module]
    _membership: Membership

    @property
    def compute_device(self) -> torch.device:
        """The device that the unit computes on."""
        return self._fsdp_unit.device

    @property
    def _device_handle(self) -> Any:
        """Return torch's module for the unit's type of device, such as ``torch.cuda``."""
        return torch.get_device_module(self.compute_device)

    @property
    def _default_stream(self) -> Any:
        """The stream that the unit computes on, which is the current one."""
        return compute_and_gather_stream(self.compute_device)[0]

    @property
    def _unshard_stream(self) -> Any:
        """The stream of the gathers; on CPU, which has no streams, the current one."""
        return compute_and_gather_stream(self.compute_device)[1]

    @property
    def _pre_unshard_stream(self) -> Any:
        """The stream that shards are cast on before a gather: that of the gathers."""
        return self._unshard_stream

    @property
    def _device_mesh(self) -> DeviceMesh | None:
        return self._fsdp_unit.groups.mesh

    @_device_mesh.setter
    def _device_mesh(self, value: DeviceMesh | None) -> None:
        self._fsdp_unit.set_mesh(value)

    @property
    def _gradient_predivide_factor(self) -> float:
        """The divisor that FSDP1 applies to gradients before the sum; the post-divide factor follows the sum."""
        return predivisor(self._fsdp_unit.groups.data_parallel_size)

    @property
    def _gradient_postdivide_factor(self) -> float:
        return self._fsdp_unit.groups.data_parallel_size / self._gradient_predivide_factor

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def training_state(self) -> TrainingState:
        """``FORWARD_BACKWARD`` during a forward or backward of the unit, ``SUMMON_FULL_PARAMS`` inside that context,
        else ``IDLE``."""
        phase = self._fsdp_unit.phase
        if phase is Phase.SUMMONED:
            return TrainingState.SUMMON_FULL_PARAMS
        return TrainingState.IDLE if phase is Phase.IDLE else TrainingState.FORWARD_BACKWARD

    def _assert_state(self, state: TrainingState | list[TrainingState]) -> None:
        names = [s.name for s in (state if isinstance(state, list) else [state])]
        if self.training_state.name not in names:
            raise ValueError(f"{self._fsdp_unit.name} is in {self.training_state}, expected to be in states {names}")

    @property
    def _is_root(self) -> bool | None:
        """True if this instance is the root of a tree; None before the tree exists."""
        return self._membership.is_root

    @_is_root.setter
    def _is_root(self, value: bool | None) -> None:
        """Make this instance a root (True), or dissolve the tree of a root (False, None).

        Tools assign this around ``summon_full_params()`` of an inner instance, which FSDP1 would make a root. Here
        an instance inside another keeps its tree.
        """
        if value:
            self._membership.join()
        elif self._membership.is_root:
            self._membership.leave()

    def _reset_lazy_init(self) -> None:
        """Dissolve the tree of this root; the next forward or call builds it again."""
        self._membership.leave()

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Make later gathers wait for the current stream. Needed between an optimizer's step and ``_unshard``."""
        self._membership.join().unsharder.gathers_follow_compute()

    @property
    def _all_fsdp_states(self) -> list[FSDP1Names]:
        """All instances in this module, this one included, depth first."""
        return [module for module in self.modules() if isinstance(module, FSDP1Names)]

    # -- parameters ----------------------------------------------------------------------------------------------------

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameters, one per bucket."""
        return [handle.flat_param for handle in self._fsdp_unit.handles]

    @property
    def _flat_param(self) -> nn.Parameter | None:
        return self.params[0] if self._has_params else None

    @property
    def _has_params(self) -> bool:
        return bool(self._fsdp_unit.handles)

    @property
    def _ignored_params(self) -> set[nn.Parameter]:
        """The parameters in this module that no unit owns."""
        return {param for param in self.parameters() if vars(param).get("_fsdp_ignored")}

    @property
    def _handle(self) -> HandleNames | None:
        return HandleNames(self, self._fsdp_unit.handles[0]) if self._has_params else None

    @property
    def _all_handles(self) -> list[HandleNames]:
        states = {state._fsdp_unit: state for state in reversed(self._all_fsdp_states)}
        return [HandleNames(states[unit], handle) for _, unit, _ in units_in(self) for handle in unit.handles]

    @property
    def _fully_sharded_module_to_handle(self) -> dict[nn.Module, HandleNames]:
        """The handle of each wrapped module; modules without parameters have none."""
        found = {state._fsdp_unit.module: state._handle for state in self._all_fsdp_states}
        return {module: handle for module, handle in found.items() if handle is not None}

    # -- choices -------------------------------------------------------------------------------------------------------

    @property
    def _use_orig_params(self) -> bool:
        return self._fsdp_unit.policy.tree.use_orig_params

    @property
    def _use_full_prec_in_eval(self) -> bool:
        """True if the unit computes in full precision in eval mode (``FSDP_USE_FULL_PREC_IN_EVAL=1``)."""
        return self._fsdp_unit.precision.full_in_eval

    @property
    def _sync_gradients(self) -> bool:
        """True if a backward reduces this unit's gradients; ``no_sync`` sets False for the whole tree."""
        return self._fsdp_unit.synchronize

    @_sync_gradients.setter
    def _sync_gradients(self, value: bool) -> None:
        self._fsdp_unit.set_synchronize(value)

    @property
    def _exec_order_data(self) -> PrefetchLimits:
        return PrefetchLimits(self)

    def _mixed_precision_enabled_for_buffers(self) -> bool:
        return self.mixed_precision.buffer_dtype is not None

    def _low_precision_hook_enabled(self) -> bool:
        """Return True if the communication hook is one of torch's two that compress gradients."""
        hook = self._fsdp_unit.policy.comm_hook
        return hook is not None and hook.compresses

    @property
    def _comm_hook(self) -> Callable[..., Any] | None:
        hook = self._fsdp_unit.policy.comm_hook
        return hook.function if hook is not None else None

    @property
    def _comm_hook_state(self) -> Any:
        hook = self._fsdp_unit.policy.comm_hook
        return hook.state if hook is not None else None


class PrefetchLimits:
    """The prefetch distances of a tree, readable and writable by FSDP1's names.

    A read returns the distance of the first unit. A write sets all units; the backward distance only where
    ``backward_prefetch`` is not None.
    """

    def __init__(self, first: FSDP1Names) -> None:
        self._first = first

    @property
    def _forward_prefetch_limit(self) -> int:
        return int(self._first._fsdp_unit.policy.forward_prefetch)

    @_forward_prefetch_limit.setter
    def _forward_prefetch_limit(self, count: int) -> None:
        self._set("forward_prefetch", count)

    @property
    def _backward_prefetch_limit(self) -> int:
        return int(self._first._fsdp_unit.policy.backward_prefetch)

    @_backward_prefetch_limit.setter
    def _backward_prefetch_limit(self, count: int) -> None:
        self._set("backward_prefetch", count)

    def _set(self, name: str, count: Any) -> None:
        if not isinstance(count, int) or count < 0:
            raise ValueError(f"a prefetch limit is a number of units, 0 or more, but got {count!r}")
        choice: dict[str, Any] = {name: count}
        for state in self._first._all_fsdp_states:
            if name != "backward_prefetch" or state.backward_prefetch:
                state._fsdp_unit.choose(**choice)


@dataclasses.dataclass(unsafe_hash=True, repr=False)
class HandleNames:
    """One bucket of a unit under the names of FSDP1's ``FlatParamHandle``.

    A unit has one handle per bucket, and is gathered and resharded as a whole: ``unshard`` and ``reshard`` of one
    handle act on all of them.
    """

    _state: FSDP1Names
    _bucket: FlatParamHandle

    @property
    def flat_param(self) -> Any:
        """The bucket's :class:`fsdp.FlatParameter`."""
        return self._bucket.flat_param

    # -- memory --------------------------------------------------------------------------------------------------------

    def unshard(self) -> None:
        """Gather the unit's parameters for the next forward, and wait.

        Raises:
            AssertionError: during a forward or backward of the unit, or inside ``summon_full_params``.
        """
        self._state._membership.join().unsharder.unshard_by_hand(self._state._fsdp_unit)()

    def pre_unshard(self) -> bool:
        """Return False: ``unshard`` needs no preparation."""
        return False

    def post_unshard(self) -> None:
        """Return at once: ``unshard`` leaves no temporary memory."""

    def reshard(self, free_unsharded_flat_param: bool) -> None:
        """Release the unit's full buffers. False has no effect, since modules show shards outside of forward.

        Raises:
            RuntimeError: during a forward or backward of the unit, or inside ``summon_full_params``.
        """
        if free_unsharded_flat_param:
            self._state._fsdp_unit.reshard_by_hand()

    def needs_unshard(self) -> bool:
        """Return True if a gather has to fill the full buffer."""
        return self._bucket.groups.sharded and self._bucket.copy.state is BufferState.SHARDED

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        """Return True if ``tensor`` has the size of this rank's shard, not of the full buffer."""
        return self.uses_sharded_strategy and tensor.numel() == self._bucket.layout.shard_numel

    def flat_param_to(self, *args: Any, **kwargs: Any) -> None:
        """Apply ``.to(*args, **kwargs)`` to the flat parameter and the gradients, on this rank alone.

        Trainers move shards to host memory between their phases. The unit computes on the same device as before, as
        with ``CPUOffload``. The optimizer's state has to be moved too.
        """
        self._state._fsdp_unit.change_shard(self._bucket, lambda tensor: tensor.to(*args, **kwargs))

    def _get_padded_unsharded_flat_param(self) -> torch.Tensor:
        """Return the full buffer, whose memory is there while the unit is unsharded."""
        return self._bucket.full

    # -- facts ---------------------------------------------------------------------------------------------------------

    @property
    def process_group(self) -> Any | None:
        """The shard group, else the replica group; None for one rank alone."""
        groups = self._bucket.groups
        return groups.shard if groups.sharded else groups.replica

    @property
    def rank(self) -> int:
        """This rank's number in ``process_group``."""
        groups = self._bucket.groups
        return groups.shard_rank if groups.sharded else groups.replica_rank

    @property
    def world_size(self) -> int:
        """The number of ranks in ``process_group``."""
        groups = self._bucket.groups
        return groups.shard_size if groups.sharded else groups.replica_size

    @property
    def device(self) -> torch.device:
        """The device that the unit computes on."""
        return self._bucket.device

    @property
    def uses_sharded_strategy(self) -> bool:
        return self._bucket.groups.sharded

    @property
    def _sharding_strategy(self) -> HandleShardingStrategy:
        strategy: Any = self._state.sharding_strategy
        return HandleShardingStrategy[strategy.name]

    @property
    def _training_state(self) -> HandleTrainingState:
        return _HANDLE_STATES[self._state._fsdp_unit.phase]

    @property
    def _use_orig_params(self) -> bool:
        return self._state._use_orig_params

    @property
    def _offload_params(self) -> bool:
        return self._bucket.offload.offload_params

    @property
    def _fwd_bwd_param_dtype(self) -> torch.dtype:
        return self._bucket.layout.compute_dtype

    @property
    def _reduce_dtype(self) -> torch.dtype:
        return self._bucket.layout.reduce_dtype

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The dtype of the shard. Trainers assign it, and ``flat_param.data`` besides, to upcast parameters."""
        return self._bucket.layout.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        self.flat_param_to(dtype)


# -- functions of torch's private modules, for instances of this package ---------------------------------------------


def _get_module_fsdp_state(module: nn.Module) -> FSDP1Names | None:
    """Return ``module`` if it is a wrapper, else None."""
    return module if isinstance(module, FSDP1Names) else None


def _get_module_fsdp_state_if_fully_sharded_module(module: nn.Module) -> FSDP1Names | None:
    """Return ``module`` if it is a wrapper, else None."""
    return _get_module_fsdp_state(module)


def _has_fsdp_params(state: Any, module: nn.Module) -> bool:
    return state._has_params


def _module_handle(state: Any, module: nn.Module) -> Any:
    return state._handle


def _get_param_to_fqns(model: nn.Module, dedup_shared_params: bool = True) -> dict[nn.Parameter, list[str]]:
    """Map each parameter of ``model`` to the names in the plain model; a flat parameter has those of its members."""
    names: dict[nn.Parameter, list[str]] = {}
    for path, param in model.named_parameters(remove_duplicate=False):
        name = clean(path)
        members: Sequence[str] = vars(param).get("_fqns", ())  # of a flat parameter
        found = [name.rpartition("_flat_param")[0] + fqn for fqn in members] or [name]
        if param not in names or not dedup_shared_params:
            names.setdefault(param, []).extend(found)
    return names


def _lazy_init(state: Any, root_module: nn.Module) -> Any:
    """Build the tree of ``state``, if it has none, and return ``state``."""
    state.check_is_root()
    return state


def _root_pre_forward(state: Any, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Build the tree of ``state``; move the inputs of a root to the device. The forward casts them."""
    if state.check_is_root():
        args, kwargs = to_device(args, state.compute_device), to_device(kwargs, state.compute_device)
    return args, kwargs


def _unshard(state: Any, handle: Any, unshard_stream: Any, pre_unshard_stream: Any) -> None:
    """Gather the unit of ``handle``. The streams that are passed are ignored: the engine has a gather stream."""
    if handle is not None:
        handle.unshard()


def _reshard(state: Any, handle: Any, free_unsharded_flat_param: bool) -> None:
    if handle is not None:
        handle.reshard(free_unsharded_flat_param)


def _post_backward_final_callback(state: Any, module: nn.Module) -> None:
    """Return the tree to rest, as tools ask for after a failed backward."""
    state.reset_iter_state()


@contextlib.contextmanager
def _unshard_params_for_summon(
    module: nn.Module, state: Any, writeback: bool, rank0_only: bool, offload_to_cpu: bool, with_grads: bool
) -> Iterator[None]:
    """Show the full parameters of ``state`` alone, without the instances inside it."""
    options = {"rank0_only": rank0_only, "offload_to_cpu": offload_to_cpu, "with_grads": with_grads}
    with state.summon_full_params(state, recurse=False, writeback=writeback, **options):
        yield
