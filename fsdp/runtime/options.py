"""The arguments of one wrapper, validated once, with the groups and the policy that follow from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp.api import (
    BackwardPrefetch,
    CPUOffload,
    FlatParamKey,
    MixedPrecision,
    ShardingStrategy,
    as_backward_prefetch,
    as_cpu_offload,
    as_flag,
    as_flat_param_key,
    as_mixed_precision,
    as_sharding_strategy,
)
from fsdp.comm.groups import HYBRID_SHARDING_STRATEGIES, Groups, check_groups
from fsdp.comm.nodes import choose_groups
from fsdp.comm.user_warnings import warn_user
from fsdp.flat.names import own_modules
from fsdp.flat.tensor_parallel import EXPERTS
from fsdp.runtime.policy import UnitPolicy

_FLAGS = ("forward_prefetch", "limit_all_gathers", "use_orig_params", "broadcast_buffers")


@dataclass(frozen=True)
class WrapOptions:
    """The options of one unit: the validated arguments of ``FullyShardedDataParallel``, which documents them.

    Attributes:
        arguments: all of them, by name.
        groups: the ranks and groups that the unit communicates over.
        policy: when the unit is gathered, resharded and reduced.
        precision: ``mixed_precision``, with all defaults in the place of None.
        process_group: the shard group; with hybrid strategies the pair (shard group, replica group).
    """

    arguments: Mapping[str, Any]
    groups: Groups
    policy: UnitPolicy
    precision: MixedPrecision
    process_group: Any
    sharding_strategy: ShardingStrategy
    cpu_offload: CPUOffload
    backward_prefetch: BackwardPrefetch | None
    param_init_fn: Callable[[nn.Module], None] | None
    device_id: int | str | torch.device | None
    sync_module_states: bool
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool
    flat_param_key: FlatParamKey | None

    @staticmethod
    def of(*, auto_wrap_policy: Any, **arguments: Any) -> WrapOptions:
        """Validate the arguments of a wrapper, then choose its process groups. Hybrid strategies and
        ``reshard_after_forward=<number>`` create groups here, on all ranks together.

        Raises:
            TypeError, ValueError: an argument is of the wrong kind, or two arguments contradict each other.
            RuntimeError: there is no process group.
            NotImplementedError: a combination that is not supported.
        """
        strategy = as_sharding_strategy(arguments["sharding_strategy"])
        precision = as_mixed_precision(arguments["mixed_precision"])
        if arguments["param_init_fn"] is not None and not callable(arguments["param_init_fn"]):
            raise ValueError(f"Expected param_init_fn to be callable but got {type(arguments['param_init_fn'])}")
        arguments["use_orig_params"] = arguments["use_orig_params"] or False  # callers may pass None
        arguments |= {name: as_flag(arguments[name], name) for name in _FLAGS}
        validated = arguments | {
            "sharding_strategy": strategy,
            "backward_prefetch": as_backward_prefetch(arguments["backward_prefetch"]),
            "mixed_precision": None if arguments["mixed_precision"] is None else precision,
            "cpu_offload": as_cpu_offload(arguments["cpu_offload"]),
            "flat_param_key": as_flat_param_key(arguments["flat_param_key"], arguments["use_orig_params"]),
        }
        policy = UnitPolicy.of(validated)
        check_groups(strategy, validated["process_group"], validated["device_mesh"], auto_wrap_policy)
        validated["process_group"] = choose_groups(strategy, validated["process_group"], validated["device_mesh"])
        if strategy in HYBRID_SHARDING_STRATEGIES:
            groups = Groups.of_pair(*validated["process_group"])
        else:
            groups = Groups.of(validated["process_group"], replicate=strategy is ShardingStrategy.NO_SHARD)
        groups = dataclasses.replace(groups, mesh=validated["device_mesh"])
        own = {each.name: validated[each.name] for each in dataclasses.fields(WrapOptions) if each.name in validated}
        return WrapOptions(validated, groups, policy.within(groups), precision, **own)

    def for_inner_units(self, ignored_params: Iterable[nn.Parameter]) -> dict[str, Any]:
        """Return the constructor's arguments for the units that a policy makes inside of this one.

        They cast no outputs: ``output_dtype`` is about the output of the module that the user wraps.
        """
        arguments, precision = dict(self.arguments), self.arguments["mixed_precision"]
        if arguments["device_mesh"] is not None:
            arguments["process_group"] = None
        if precision is not None:
            arguments["mixed_precision"] = dataclasses.replace(precision, output_dtype=None)
        return {**arguments, "ignored_states": ignored_params}

    def strategy_in_use(self, module: nn.Module) -> ShardingStrategy:
        """Return the strategy for ``module``, or ``NO_SHARD`` if the group has one rank: with a warning, except for
        experts, of which there may be no copies."""
        strategy, groups = self.sharding_strategy, self.groups
        if groups.shard_size > 1 or strategy is ShardingStrategy.NO_SHARD or groups.forced:
            return strategy
        if not any(EXPERTS in vars(owner) for _, owner in own_modules(module)):
            warn_user(
                f"FullyShardedDataParallel: the group has one rank, so there is nothing to shard over; {strategy} "
                f"works like NO_SHARD here{', over the replica group' if groups.replica is not None else ''}"
            )
        return ShardingStrategy.NO_SHARD
