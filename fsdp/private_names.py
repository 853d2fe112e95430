"""What other libraries read of the wrapper under FSDP1's own names, beside what is documented."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import BackwardPrefetch, MixedPrecision, TrainingState
from fsdp.comm.collectives import predivisor
from fsdp.runtime.build import Membership
from fsdp.runtime.unit import Phase, Unit, units_in


class PrivateNames(nn.Module):
    """What ``FullyShardedDataParallel`` has from here."""

    backward_prefetch: BackwardPrefetch | None
    mixed_precision: MixedPrecision
    _fsdp_unit: Unit
    _membership: Membership

    @property
    def compute_device(self) -> torch.device:
        """Where the unit computes."""
        return self._fsdp_unit.device

    @property
    def _device_handle(self) -> Any:
        """torch's module for the kind of device the unit computes on, ``torch.cuda`` for instance."""
        return torch.get_device_module(self.compute_device)

    @property
    def _device_mesh(self) -> DeviceMesh | None:
        return self._fsdp_unit.mesh

    @_device_mesh.setter
    def _device_mesh(self, value: DeviceMesh | None) -> None:
        self._fsdp_unit.mesh = value

    @property
    def _gradient_predivide_factor(self) -> float:
        """FSDP1 divides gradients by this before it sums them, and by the other one afterwards."""
        return predivisor(self._fsdp_unit.groups.data_parallel_size)

    @property
    def _gradient_postdivide_factor(self) -> float:
        return self._fsdp_unit.groups.data_parallel_size / self._gradient_predivide_factor

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def training_state(self) -> TrainingState:
        """``FORWARD_BACKWARD`` while this unit's forward or backward is under way, ``SUMMON_FULL_PARAMS`` inside that
        context, else ``IDLE``."""
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
        """Whether this instance is the root of its tree; None while that is not decided."""
        return self._membership.is_root

    @_is_root.setter
    def _is_root(self, value: bool | None) -> None:
        """Decide, or with False or None be undecided again if this is a root: a wrapper around it may take it over.

        Tools assign this around ``summon_full_params()`` of an inner instance, where FSDP1 would make a root of it.
        For an instance inside another one nothing changes.
        """
        if value:
            self._membership.join()
        elif self._membership.is_root:
            self._membership.leave()

    def _reset_lazy_init(self) -> None:
        """Make this instance undecided about its root again."""
        self._membership.leave()

    def _wait_unshard_streams_on_current_stream(self) -> None:
        """Gathers from now on see what the current stream has written: needed between an optimizer step and
        ``_unshard``."""
        self._membership.join().residency.gathers_follow_compute()

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
    def _handle(self) -> Any:
        return self._fsdp_unit.handles[0] if self._has_params else None

    @property
    def _all_handles(self) -> list[Any]:
        return [handle for _, unit, _ in units_in(self) for handle in unit.handles]

    # -- choices -------------------------------------------------------------------------------------------------------

    @property
    def _use_orig_params(self) -> bool:
        return self._fsdp_unit.policy.tree.use_orig_params

    @property
    def _use_full_prec_in_eval(self) -> bool:
        """Whether this unit computes in full precision while its module is in eval mode; from the environment."""
        return self._fsdp_unit.precision.full_in_eval

    @property
    def _sync_gradients(self) -> bool:
        """Whether a backward reduces this unit's gradients; ``no_sync`` turns it off for the whole tree."""
        return self._fsdp_unit.synchronize

    @_sync_gradients.setter
    def _sync_gradients(self, value: bool) -> None:
        self._fsdp_unit.synchronize = value

    @property
    def _exec_order_data(self) -> PrefetchLimits:
        return PrefetchLimits(self)

    def _mixed_precision_enabled_for_buffers(self) -> bool:
        return self.mixed_precision.buffer_dtype is not None

    def _low_precision_hook_enabled(self) -> bool:
        """Whether the communication hook is one of torch's two that compress gradients."""
        hook = self._fsdp_unit.comm_hook
        return hook is not None and hook.compresses

    @property
    def _comm_hook(self) -> Callable[..., Any] | None:
        hook = self._fsdp_unit.comm_hook
        return hook.function if hook is not None else None

    @property
    def _comm_hook_state(self) -> Any:
        hook = self._fsdp_unit.comm_hook
        return hook.state if hook is not None else None


class PrefetchLimits:
    """How many units a tree gathers ahead, readable and writable by the names that tools know from FSDP1.

    Reading tells of the first unit, writing goes to all of them; what is written for the backward, only to those that
    gather ahead there at all.
    """

    def __init__(self, first: PrivateNames) -> None:
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
        for module in self._first.modules():
            if isinstance(module, PrivateNames) and (name != "backward_prefetch" or module.backward_prefetch):
                module._fsdp_unit.choose(**choice)
