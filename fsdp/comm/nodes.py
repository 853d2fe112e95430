"""Process groups that the package makes itself.

Hybrid sharding without explicit groups uses one group within each machine and one across the machines. With
``reshard_after_forward=int`` units stay sharded over parts of their group after forward.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import ShardingStrategy
from fsdp.comm.groups import (
    HYBRID_SHARDING_STRATEGIES,
    default_group,
    group_ranks,
    groups_of_mesh,
    is_registered,
    make_group,
)
from fsdp.comm.lane.lane import Lane
from fsdp.comm.streams import default_device, device_count


def node_groups(world: ProcessGroup) -> _Pair:
    """Return two groups: the ranks of this machine, and the ranks at this rank's place on all machines.

    The first call makes them, on all ranks of the default group ``world``; later calls return the same groups. A
    machine has ``LOCAL_WORLD_SIZE`` consecutive ranks, as set by torchrun; without that as many as it has accelerator
    devices, or all of them where there are none.

    Raises:
        ValueError: on every rank, if the machines have different numbers of ranks, or the last one too few.
    """
    made = _node_groups.setdefault(world, [])
    if not made or not all(map(is_registered, made[-1])):
        size, count = world.size(), os.environ.get("LOCAL_WORLD_SIZE")
        here = int(count) if count is not None else device_count() or size
        lane = Lane.of(world, default_device())
        lane.prepare("a model with hybrid sharding")
        if lane.ask("agree on the ranks of a machine", here).result() is None or size % here:
            raise ValueError(
                f"hybrid sharding without process groups shards within each machine: they would all have to have as "
                f"many ranks, and of {size} ranks this machine has {here} (LOCAL_WORLD_SIZE, else the number of "
                "devices). Pass process_group=(shard group, replica group), or a device_mesh"
            )
        machines = [range(first, first + here) for first in range(0, size, here)]
        places = [range(place, size, here) for place in range(here)]
        number = f"group {len(made)}"  # a store keeps the keys of destroyed groups
        pair = make_group(machines, world, f"machine, {number}"), make_group(places, world, f"place, {number}")
        made.append(pair)
    return made[-1]


def nearby_group(group: ProcessGroup, count: int) -> ProcessGroup:
    """Return the group of ``count`` consecutive ranks of ``group`` that contains this rank.

    The first call makes it, on all ranks of ``group``; later calls return the same group. ``count`` divides the size.

    Raises:
        ValueError: on every rank, if they ask for different numbers.
    """
    made = _nearby_groups.setdefault(group, {}).setdefault(count, [])
    if not made or not is_registered(made[-1]):
        lane = Lane.of(group, default_device())
        lane.prepare("a model with reshard_after_forward")
        if lane.ask("agree on the ranks to reshard over", count).result() is None:
            raise ValueError(
                f"reshard_after_forward is {count} on rank {dist.get_rank()}, and another number on other ranks"
            )
        ranks = group_ranks(group)
        parts = [ranks[first : first + count] for first in range(0, len(ranks), count)]
        made.append(make_group(parts, group, f"reshard over {count}, group {len(made)}"))
    return made[-1]


_Pair = tuple[ProcessGroup, ProcessGroup]  # the ranks of a node, and the counterparts of this rank on all nodes
_node_groups: weakref.WeakKeyDictionary[ProcessGroup, list[_Pair]] = weakref.WeakKeyDictionary()
_nearby_groups: weakref.WeakKeyDictionary[ProcessGroup, dict[int, list[ProcessGroup]]] = weakref.WeakKeyDictionary()


def choose_groups(strategy: ShardingStrategy, process_group: Any, device_mesh: DeviceMesh | None) -> Any:
    """Return the process group that a unit is sharded over, or for hybrid strategies the pair (shard, replica).

    Without either argument that is the default group, or the pair that :func:`node_groups` makes of it.
    """
    if device_mesh is not None:
        return groups_of_mesh(strategy, device_mesh)
    if process_group is not None:
        return process_group
    return node_groups(default_group()) if strategy in HYBRID_SHARDING_STRATEGIES else default_group()
