"""Process groups: which ranks a unit is sharded and replicated over, and what a group can tell of itself.

Groups and backends that ``torch.distributed`` does not know are asked for their rank and size only.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp import environment
from fsdp.api import ShardingStrategy
from fsdp.comm.user_warnings import warn_user

HYBRID_SHARDING_STRATEGIES = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]


@dataclass(frozen=True)
class Groups:
    """The ranks a unit is sharded over and the ranks it is replicated over. A group of one rank has no process group.

    Sharding strategies are facts of this class: a shard group of one rank means the parameters are not sharded, a
    replica group of several that gradients are reduced across replicas. With hybrid strategies both may have several:
    the ranks of a shard group have the parts of one replica, those of a replica group the same part of each.
    """

    shard: Any | None
    shard_rank: int
    shard_size: int
    replica: Any | None
    replica_rank: int
    replica_size: int
    forced: bool = False  # communicate and keep separate buffers even in a shard group of one rank
    hybrid: bool = False  # the strategy is: what reduces inside the shard group leaves the replicas to the engine
    tp: Any | None = None  # the ranks that tensor parallelism has placed the unit's parameters on

    @cached_property
    def sharded(self) -> bool:
        return self.shard_size > 1 or self.forced

    @property
    def data_parallel_size(self) -> int:
        return self.shard_size * self.replica_size

    @cached_property
    def reduces(self) -> bool:
        """Whether a gradient has to be communicated at all."""
        return self.sharded or self.replica_size > 1

    @staticmethod
    def of(process_group: Any, *, replicate: bool) -> Groups:
        """One group that the parameters are sharded over, or with ``replicate`` replicated over.

        Asks the group for ``rank()`` and ``size()`` only.
        """
        rank, size = process_group.rank(), process_group.size()
        if replicate:
            return Groups(None, 0, 1, process_group if size > 1 else None, rank, size)
        return Groups(process_group, rank, size, None, 0, 1, _forced())

    @staticmethod
    def of_pair(shard: Any, replica: Any) -> Groups:
        """The groups of a hybrid strategy, asked for ``rank()`` and ``size()`` only. Where there is one rank to shard
        over, it is as if all were replicated; where there is one replica, as if all were sharded."""
        forced, size = _forced(), replica.size()
        sharded = Groups(shard, shard.rank(), shard.size(), None, 0, 1, forced, hybrid=True)
        if size == 1:
            return sharded
        kept = shard if sharded.sharded else None
        return replace(sharded, shard=kept, replica=replica, replica_rank=replica.rank(), replica_size=size)


def _forced() -> bool:
    return environment.FORCE_SHARDED.value


def check_groups(strategy: ShardingStrategy, group: Any, mesh: DeviceMesh | None, policy: Any) -> None:
    """
    Raises:
        TypeError: ``mesh`` is no mesh, or ``group`` no process group.
        ValueError: the arguments of a wrapper do not go together, or this rank is in none of the groups.
    """
    for each in group if isinstance(group, tuple) else (group,):
        if each is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(
                f"process_group: rank {dist.get_rank()} does not belong to this group (new_group() returned "
                "GroupMember.NON_GROUP_MEMBER here). Pass each rank a group that it belongs to, or wrap on the ranks "
                "of the group only"
            )
    if mesh is not None and not hasattr(mesh, "get_group"):
        raise TypeError(f"device_mesh must be a DeviceMesh, got {type(mesh)}")
    if isinstance(mesh, DeviceMesh) and mesh.get_coordinate() is None:
        raise ValueError(
            f"device_mesh: rank {dist.get_rank()} does not belong to this mesh of ranks {mesh.mesh.tolist()}. Pass "
            "each rank a mesh that it belongs to, or wrap on the ranks of the mesh only"
        )
    if mesh is not None and group is not None:
        raise ValueError("Cannot pass both process_group and device_mesh; pass only one of them")
    if strategy not in HYBRID_SHARDING_STRATEGIES:
        if group is not None and not isinstance(group, tuple) and not hasattr(group, "size"):
            raise TypeError(f"process_group must be a process group or None, got {group!r}")
        if isinstance(group, tuple):
            raise ValueError(f"a pair of process groups is for hybrid strategies, and sharding_strategy is {strategy}")
        if mesh is not None and mesh.ndim > 1:
            warn_user(
                f"{strategy} shards over the first of the {mesh.ndim} dimensions of device_mesh: ranks that differ in "
                "another one train apart. Pass the one dimension that is meant, or a hybrid strategy, which replicates "
                "over the first and shards over the second"
            )
        return
    if group is None and mesh is None and policy is None:
        raise ValueError(
            f"{strategy} without an auto_wrap_policy requires explicit specification of process group or device_mesh"
        )
    if mesh is not None and mesh.ndim != 2:
        raise ValueError(f"{strategy} needs a device_mesh with ndim=2 (replicate, shard), got ndim={mesh.ndim}")
    is_pair = isinstance(group, tuple) and len(group) == 2 and all(hasattr(each, "size") for each in group)
    if group is not None and not is_pair:
        kind = tuple(type(each) for each in group) if isinstance(group, tuple) else type(group)
        raise ValueError(
            f"{strategy}: Expected process_group to be passed in as a pair (shard group, replica group), got {kind}"
        )


def groups_of_mesh(strategy: ShardingStrategy, mesh: DeviceMesh) -> Any:
    """What ``process_group`` would be: dimension 0, or for hybrid strategies (dimension 1, dimension 0)."""
    if strategy in HYBRID_SHARDING_STRATEGIES:
        return mesh.get_group(1), mesh.get_group(0)
    return mesh.get_group(0)


def default_group() -> Any:
    """The default process group; RuntimeError with the remedy where there is none."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "FullyShardedDataParallel needs a process group, and torch.distributed's default one does not exist: call "
            "torch.distributed.init_process_group() first (under torchrun without arguments), or pass process_group="
        )
    return dist.group.WORLD


def rank_names(group: Any) -> list[int]:
    """What people call ``group``'s ranks: their global ranks, where torch.distributed knows the group."""
    try:
        return group_ranks(group)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return list(range(group.size()))


def group_ranks(group: Any) -> list[int]:
    """The global ranks of ``group``'s ranks."""
    return list(dist.get_process_group_ranks(group))


def is_registered(group: Any) -> bool:
    """Whether ``group`` is one that ``torch.distributed`` knows, which has not been destroyed."""
    try:
        return group is not None and bool(group_ranks(group))
    except (KeyError, ValueError):
        return False


def is_member_of(name: str) -> bool:
    """Whether this rank is in the process group of that ``group_name``."""
    return name in dist.distributed_c10d._world.pg_names.values()


def backend_of(group: Any, device: torch.device) -> str:
    """What serves ``group`` on ``device``: "gloo", "nccl", ...; "unknown" for what torch.distributed does not know."""
    try:
        return str(group._get_backend(device).name()).lower()
    except (AttributeError, RuntimeError, ValueError, TypeError, KeyError):
        return "unknown"


def group_store(group: Any) -> Any | None:
    """The store through which ``group``'s ranks met; its keys are the group's own. None for a fake group."""
    met: Any = dist.distributed_c10d._world.pg_map.get(group)
    return None if met is None or backend_of(group, torch.device("cpu")) == "fake" else met[1]


def group_timeout(group: Any) -> timedelta:
    """How long a collective of ``group`` may take."""
    try:
        device = next(iter(group._device_types))
        return timedelta(seconds=group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError, StopIteration):
        return dist.default_pg_timeout if hasattr(dist, "default_pg_timeout") else timedelta(minutes=30)


def control_device(group: Any, device: torch.device) -> torch.device:
    """Where ``group``'s ranks exchange small control messages: on CPU, where the group or a side group serves it. On
    ``device``, where the models compute, they would queue behind the compute, and whoever waits for them drain it."""
    host = torch.device("cpu")
    if backend_of(group, host) != "unknown" or backend_of(group, device) == "unknown":
        return host
    return host if group_store(group) is not None and dist.is_gloo_available() else device


def serving_group(group: Any, device: torch.device) -> Any:
    """``group``, or where it serves accelerators only a side group of gloo, which is made at the first call: all ranks
    have to make it.

    Raises:
        RuntimeError: gloo finds no network interface.
    """
    store = group_store(group) if device.type == "cpu" and backend_of(group, device) == "unknown" else None
    if store is None:
        return group
    if group not in _side_groups:
        # not new_group(): that wants all ranks of the default group, and remembers what it makes for ever
        place = dist.PrefixStore("fsdp control/", store), group.rank(), group.size()
        side, gloo = dist.ProcessGroup(*place), dist.ProcessGroup.BackendType.GLOO
        side._set_default_backend(gloo)
        try:
            backend = dist.ProcessGroupGloo(*place, group_timeout(group))
        except RuntimeError as error:
            raise RuntimeError(
                "the ranks exchange control messages over gloo beside a process group that serves accelerators only, "
                f"and gloo cannot connect them: {error}. Set GLOO_SOCKET_IFNAME to a network interface that all ranks "
                "can reach (as NCCL_SOCKET_IFNAME does for NCCL), or make the process group with gloo for CPU tensors "
                "(init_process_group('cpu:gloo,cuda:nccl'))"
            ) from error
        side._register_backend(device, gloo, backend)
        _side_groups[group] = side
    return _side_groups[group]


_side_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
