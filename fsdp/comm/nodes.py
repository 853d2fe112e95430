"""The process groups that are made here: those of hybrid sharding where nobody passes any, within each machine and
across the machines; and the parts of a group that units stay sharded over after forward."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp.api import ShardingStrategy
from fsdp.comm.beginning import prepare
from fsdp.comm.collectives import Vote
from fsdp.comm.groups import (
    HYBRID_SHARDING_STRATEGIES,
    default_group,
    group_ranks,
    group_timeout,
    groups_of_mesh,
    is_registered,
)
from fsdp.comm.streams import default_device, device_count


def node_groups(world: Any) -> tuple[Any, Any]:
    """(the ranks of this machine, those in this rank's place on all machines), of the default group ``world``; made
    when they are first asked for, by all ranks together, and the same ones from then on.

    A machine has ``LOCAL_WORLD_SIZE`` consecutive ranks, as torchrun says; without that as many as it has accelerator
    devices, or all of them where there are none.

    Raises:
        ValueError: on every rank, if the machines have different numbers of ranks, or the last one too few.
    """
    made = _node_groups.setdefault(world, [])
    if not made or not all(map(is_registered, made[-1])):
        size, here = world.size(), _ranks_here(world)
        prepare([world], default_device(), "a model with hybrid sharding")
        if Vote(here, world, default_device(), "agree on the ranks of a machine").result() is None or size % here:
            raise ValueError(
                f"hybrid sharding without process groups shards within each machine: they would all have to have as "
                f"many ranks, and of {size} ranks this machine has {here} (LOCAL_WORLD_SIZE, else the number of "
                "devices). Pass process_group=(shard group, replica group), or a device_mesh"
            )
        machines = [range(first, first + here) for first in range(0, size, here)]
        places = [range(place, size, here) for place in range(here)]
        again = _again(made)
        made.append((_among(machines, world, f"machine{again}"), _among(places, world, f"place{again}")))
    return made[-1]


def _ranks_here(world: Any) -> int:
    told = os.environ.get("LOCAL_WORLD_SIZE")
    return int(told) if told is not None else device_count() or int(world.size())


def nearby_group(group: Any, count: int) -> Any:
    """The ``count`` ranks, a factor of all, that this rank is among where ``group``'s are parted in their order; made
    when they are first asked for, by all ranks of ``group`` together, and the same one from then on.

    Raises:
        ValueError: on every rank, if they ask for different numbers.
    """
    made = _nearby_groups.setdefault(group, {}).setdefault(count, [])
    if not made or not is_registered(made[-1]):
        prepare([group], default_device(), "a model with reshard_after_forward")
        if Vote(count, group, default_device(), "agree on the ranks to reshard over").result() is None:
            raise ValueError(
                f"reshard_after_forward is {count} on rank {dist.get_rank()}, and another number on other ranks"
            )
        ranks = group_ranks(group)
        parts = [ranks[first : first + count] for first in range(0, len(ranks), count)]
        made.append(_among(parts, group, f"reshard over {count}{_again(made)}"))
    return made[-1]


def _among(parts: Sequence[Sequence[int]], group: Any, name: str) -> Any:
    """The one of ``parts`` of ``group``'s ranks that has this rank, as a group; all ranks of ``group`` have to come.

    ``name``, another one each time, keeps the group's connections apart from those of others: what ``new_group`` calls
    a group depends on how many each of its ranks knows, some of which others may not have made.

    Raises:
        NotImplementedError: some ranks do not come, and the default group's communicator would have to be split.
    """
    c10d, default, rank = dist.distributed_c10d, default_group(), dist.get_rank()
    backend, timeout = dist.get_backend_config(group), group_timeout(group)
    if default.bound_device_id is not None:  # its communicator is split, by all ranks
        if group.size() == default.size():
            made = [dist.new_group(list(ranks), timeout, backend) for ranks in parts]
            return next(each for each, ranks in zip(made, parts, strict=True) if rank in ranks)
        raise NotImplementedError(
            f"{name}: not all ranks take part, and a default group that is bound to a device makes no groups without "
            "all; call init_process_group() without device_id, or shard over all ranks"
        )
    ranks = next(list(each) for each in parts if rank in each)
    own_name: Any = f"{group.group_name}, {name}, from rank {ranks[0]}"
    made_here, _ = c10d._new_process_group_helper(
        len(ranks),
        ranks.index(rank),
        ranks,
        dist.Backend(backend),
        c10d._world.pg_map[default][1],
        own_name,
        timeout=timeout,
    )
    c10d._world.pg_group_ranks[made_here] = {each: place for place, each in enumerate(ranks)}
    return made_here


def _again(made: Sequence[Any]) -> str:
    """What the next group is called, besides: a store remembers the earlier ones, which have been destroyed."""
    return f", number {len(made)}" if made else ""


_node_groups: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any]]] = weakref.WeakKeyDictionary()
_nearby_groups: weakref.WeakKeyDictionary[Any, dict[int, list[Any]]] = weakref.WeakKeyDictionary()


def choose_groups(strategy: ShardingStrategy, process_group: Any, device_mesh: DeviceMesh | None) -> Any:
    """Return the process group that a unit is sharded over, or for hybrid strategies the pair (shard, replica).

    Without either argument that is the default group, or the pair that :func:`node_groups` makes of it.
    """
    if device_mesh is not None:
        return groups_of_mesh(strategy, device_mesh)
    if process_group is not None:
        return process_group
    return node_groups(default_group()) if strategy in HYBRID_SHARDING_STRATEGIES else default_group()
