"""Process groups: the ranks over which a unit is sharded and replicated, and the properties of a group.

Of groups and backends unknown to ``torch.distributed`` only the rank and the size are used.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
    """The ranks over which a unit is sharded and replicated. A group of one rank has no process group.

    This class defines the sharding strategies: with a shard group of one rank the parameters are not sharded; with a
    replica group of several ranks gradients are reduced across replicas. Hybrid strategies have both: the ranks of a
    shard group hold the shards of one replica, and the ranks of a replica group hold the same shard of each.
    """

    shard: Any
    shard_rank: int
    shard_size: int
    replica: Any
    replica_rank: int
    replica_size: int
    forced: bool = False  # separate buffers and collectives even in a shard group of one rank
    hybrid: bool = False  # a hybrid strategy: a communication hook reduces within the shard group only
    tp: Any = None  # the ranks of tensor parallelism, or of experts
    experts: Any = None  # ``tp`` if its ranks have different experts, and see different data
    mesh: DeviceMesh | None = field(default=None, compare=False)  # that the groups come from

    @cached_property
    def sharded(self) -> bool:
        return self.shard_size > 1 or self.forced

    @property
    def data_parallel_size(self) -> int:
        return self.shard_size * self.replica_size

    @property
    def data_ranks(self) -> int:
        """The number of ranks that hold the unit, or if it has experts, other experts, and see different data."""
        return self.data_parallel_size * (1 if self.experts is None else self.experts.size())

    @property
    def has_parts(self) -> bool:
        """Whether each rank has a part of the unit in sharded state dicts."""
        return self.sharded or (self.experts is not None and self.shard is not None)

    @cached_property
    def replica_ranks(self) -> tuple[int, ...]:
        """The global ranks that hold the same shard as this one; none if there is no replica group."""
        return tuple(group_ranks(self.replica)) if is_registered(self.replica) else ()

    @cached_property
    def reduces(self) -> bool:
        """Whether gradients are communicated."""
        return self.sharded or self.replica_size > 1

    @staticmethod
    def of(process_group: Any, *, replicate: bool) -> Groups:
        """Return the groups of a unit that is sharded, or with ``replicate`` replicated, over ``process_group``.

        Uses ``rank()`` and ``size()`` of the group only.
        """
        rank, size = process_group.rank(), process_group.size()
        if replicate:
            return Groups(None, 0, 1, process_group if size > 1 else None, rank, size)
        return Groups(process_group, rank, size, None, 0, 1, environment.FORCE_SHARDED.value)

    @staticmethod
    def of_pair(shard: dist.ProcessGroup, replica: dist.ProcessGroup) -> Groups:
        """Return the groups of a hybrid strategy.

        Uses ``rank()`` and ``size()`` of the groups only. A shard group of one rank means replication over all ranks,
        a replica group of one rank means sharding over all ranks.
        """
        sharded = replace(Groups.of(shard, replicate=False), hybrid=True)
        if replica.size() == 1:
            return sharded
        kept = shard if sharded.sharded else None
        return replace(sharded, shard=kept, replica=replica, replica_rank=replica.rank(), replica_size=replica.size())


def check_groups(strategy: ShardingStrategy, group: Any, mesh: DeviceMesh | None, policy: Any) -> None:
    """Check the arguments of a wrapper that choose the ranks.

    Raises:
        TypeError: ``mesh`` is no mesh, or ``group`` no process group.
        ValueError: the arguments of a wrapper contradict each other, or exclude this rank.
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
    """Return dimension 0 of ``mesh``, or for hybrid strategies the pair (dimension 1, dimension 0)."""
    if strategy in HYBRID_SHARDING_STRATEGIES:
        return mesh.get_group(1), mesh.get_group(0)
    return mesh.get_group(0)


def default_group() -> Any:
    """Return the default process group.

    Raises:
        RuntimeError: it does not exist; with the remedy.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "FullyShardedDataParallel needs a process group, and torch.distributed's default one does not exist: call "
            "torch.distributed.init_process_group() first (under torchrun without arguments), or pass process_group="
        )
    return dist.group.WORLD


def rank_names(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks of ``group``, or 0 to size - 1 where the group is unknown to torch.distributed."""
    try:
        return group_ranks(group)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError):
        return list(range(group.size()))


def group_ranks(group: dist.ProcessGroup) -> list[int]:
    """Return the global ranks of the ranks of ``group``."""
    return list(dist.get_process_group_ranks(group))


def is_registered(group: dist.ProcessGroup) -> bool:
    """Return whether ``group`` is registered in ``torch.distributed``, and not destroyed."""
    try:
        return group is not None and bool(group_ranks(group))
    except (KeyError, ValueError):
        return False


def backend_of(group: dist.ProcessGroup, device: torch.device) -> str:
    """Return the backend of ``group`` on ``device`` ("gloo", "nccl", ...); "unknown" if torch.distributed has none."""
    try:
        return str(group._get_backend(device).name()).lower()
    except (AttributeError, RuntimeError, ValueError, TypeError, KeyError):
        return "fake" if _backend_and_store(group)[0] == "fake" else "unknown"  # in torch 2.6 that backend has no name


def _backend_and_store(group: dist.ProcessGroup) -> tuple[str | None, Any]:
    """Return the name of the backend and the store with which ``group`` was made; None for an unknown group."""
    found: tuple[str | None, Any] = dist.distributed_c10d._world.pg_map.get(group, (None, None))
    return found


def group_store(group: dist.ProcessGroup) -> Any | None:
    """Return the store of ``group``, with keys of its own; None for a fake or unknown group."""
    return None if backend_of(group, torch.device("cpu")) == "fake" else _backend_and_store(group)[1]


def group_timeout(group: dist.ProcessGroup) -> timedelta:
    """Return the timeout of the collectives of ``group``."""
    try:
        device = next(iter(group._device_types))
        return timedelta(seconds=group._get_backend(device).options._timeout.total_seconds())
    except (AttributeError, RuntimeError, StopIteration):
        return dist.default_pg_timeout if hasattr(dist, "default_pg_timeout") else timedelta(minutes=30)


def control_device(group: dist.ProcessGroup, device: torch.device) -> torch.device:
    """Return the device of control messages: the CPU if the group, or a side group, serves it; else ``device``.

    On ``device``, where the models compute, a control message would queue behind the compute.
    """
    host = torch.device("cpu")
    if backend_of(group, host) != "unknown" or backend_of(group, device) == "unknown":
        return host
    return host if group_store(group) is not None and dist.is_gloo_available() else device


def make_group(parts: Sequence[Sequence[int]], like: dist.ProcessGroup, name: str) -> dist.ProcessGroup:
    """Make a process group of the part that contains this rank. All ranks of ``like`` have to call.

    Unlike ``torch.distributed.new_group()`` this involves no other ranks, and does not count the groups of each rank.

    Args:
        parts: the ranks of ``like``, as global ranks, in disjoint parts.
        like: a group with the backend and the timeout of the new one.
        name: unique among the groups of these ranks: it separates their connections.

    Raises:
        NotImplementedError: the default group is bound to a device, and ``like`` has not all of its ranks.
    """
    c10d, default, rank = dist.distributed_c10d, default_group(), dist.get_rank()
    backend, timeout = dist.get_backend_config(like), group_timeout(like)
    if default.bound_device_id is not None:  # torch splits the communicator, on all ranks and part by part
        if like.size() != default.size():
            raise NotImplementedError(
                f"{name}: not all ranks take part, and a default group that is bound to a device makes no groups "
                "without all; call init_process_group() without device_id, or shard over all ranks"
            )
        several = [dist.new_group(list(ranks), timeout, backend) for ranks in parts]
        return next(each for each, ranks in zip(several, parts, strict=True) if rank in ranks)
    ranks = next(list(each) for each in parts if rank in each)
    own_name: Any = f"{like.group_name}, {name}, from rank {ranks[0]}"
    store = c10d._world.pg_map[default][1]
    made, _ = c10d._new_process_group_helper(
        len(ranks), ranks.index(rank), ranks, dist.Backend(backend), store, own_name, timeout=timeout
    )
    c10d._world.pg_group_ranks[made] = {each: place for place, each in enumerate(ranks)}
    return made


def make_control_group(group: dist.ProcessGroup, device: torch.device, number: int) -> dist.ProcessGroup:
    """Make a gloo group next to ``group``, which serves accelerators only. All ranks of ``group`` have to call.

    Args:
        device: the CPU.
        number: a different one each time.

    Raises:
        RuntimeError: gloo finds no network interface.
    """
    # not new_group(): it takes all ranks of the default group, and keeps each group for ever
    store: Any = group_store(group)
    place = dist.PrefixStore(f"fsdp control {number}/", store), group.rank(), group.size()
    side, gloo = dist.ProcessGroup(*place), dist.ProcessGroup.BackendType.GLOO
    side._set_default_backend(gloo)
    try:
        backend = _gloo(place, group_timeout(group))
    except RuntimeError as error:
        raise RuntimeError(
            "the ranks exchange control messages over gloo next to a process group that serves accelerators only, "
            f"and gloo cannot connect them: {error}. Set GLOO_SOCKET_IFNAME to a network interface that all ranks "
            "can reach (as NCCL_SOCKET_IFNAME does for NCCL), or make the process group with gloo for CPU tensors "
            "(init_process_group('cpu:gloo,cuda:nccl'))"
        ) from error
    side._register_backend(device, gloo, backend)
    return side


def _gloo(place: tuple[Any, int, int], timeout: timedelta) -> Any:
    """Make a gloo backend that connects two ranks at their first message, so that a rank of N opens a few sockets
    instead of N - 1; before torch 2.8, one that connects all ranks now.

    Devices that are given replace those that torch makes of GLOO_SOCKET_IFNAME.
    """
    kind: Any = dist.ProcessGroupGloo
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    try:
        devices = [kind.create_device(interface=name, lazy_init=True) for name in names]
        devices = devices or [kind.create_default_device(lazy_init=True)]
    except TypeError:  # torch has no such argument
        return kind(*place, timeout)
    options = kind._Options()
    options._devices, options._timeout = devices, timeout
    return kind(*place, options)
