"""The process groups that are made here: those of hybrid sharding where nobody passes any, within each machine and
across the machines; and the parts of a group that units stay sharded over after forward."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fsdp.comm.collectives import Vote
from fsdp.comm.groups import group_ranks, group_timeout
from fsdp.comm.streams import default_device, device_count


def node_groups(world: Any) -> tuple[Any, Any]:
    """(the ranks of this machine, those in this rank's place on all machines), of the default group ``world``; made
    when they are first asked for, by all ranks together, and the same ones from then on.

    A machine has ``LOCAL_WORLD_SIZE`` consecutive ranks, as torchrun says; without that as many as it has accelerator
    devices, or all of them where there are none.

    Raises:
        ValueError: on every rank, if the machines have different numbers of ranks, or the last one too few.
    """
    if world not in _node_groups:
        rank, size, here = world.rank(), world.size(), _ranks_here(world)
        if Vote(here, world, default_device(), "agree on the ranks of a machine").result() is None or size % here:
            raise ValueError(
                f"hybrid sharding without process groups shards within each machine: they would all have to have as "
                f"many ranks, and of {size} ranks this machine has {here} (LOCAL_WORLD_SIZE, else the number of "
                "devices). Pass process_group=(shard group, replica group), or a device_mesh"
            )
        first, place = rank - rank % here, rank % here
        _node_groups[world] = _new(range(first, first + here), world), _new(range(place, size, here), world)
    return _node_groups[world]


def _ranks_here(world: Any) -> int:
    told = os.environ.get("LOCAL_WORLD_SIZE")
    return int(told) if told is not None else device_count() or int(world.size())


def nearby_group(group: Any, count: int) -> Any:
    """The ``count`` ranks, a factor of all, that this rank is among where ``group``'s are parted in their order; made
    when they are first asked for, by all ranks of ``group`` together, and the same one from then on.

    Raises:
        ValueError: on every rank, if they ask for different numbers.
    """
    parts = _nearby_groups.setdefault(group, {})
    if count not in parts:
        if Vote(count, group, default_device(), "agree on the ranks to reshard over").result() is None:
            raise ValueError(
                f"reshard_after_forward is {count} on rank {dist.get_rank()}, and another number on other ranks"
            )
        first = group.rank() - group.rank() % count
        ranks, backend = group_ranks(group)[first : first + count], dist.get_backend_config(group)
        parts[count] = _new(ranks, group, backend)
    return parts[count]


def _new(ranks: Sequence[int], group: Any, backend: str | None = None) -> Any:
    return dist.new_group(list(ranks), group_timeout(group), backend, use_local_synchronization=True)


_node_groups: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
_nearby_groups: weakref.WeakKeyDictionary[Any, dict[int, Any]] = weakref.WeakKeyDictionary()
