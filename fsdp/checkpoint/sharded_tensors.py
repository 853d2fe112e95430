"""torch's sharded tensors (``DTensor`` and ``ShardedTensor``): making them, and finding the rows of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _get_device_module
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fsdp.comm.groups import Groups, default_group, group_ranks
from fsdp.comm.versions import root_of
from fsdp.placement.boxes import Box, chunk_rows
from fsdp.runtime.unit import Unit


def group_of(groups: Groups) -> Any:
    """Return the group over which a unit's sharded state is cut: the shard group, or else the replica group."""
    return groups.shard or groups.replica or default_group()


def one_chunk_each(
    local: torch.Tensor, ranges: Sequence[tuple[int, int]], shape: Sequence[int], group: Any
) -> ShardedTensor:
    """Make a ``ShardedTensor`` of ``shape`` in which rank i of ``group`` holds the rows of ``ranges[i]`` (empty: no
    chunk). ``local`` contains this rank's rows and is not copied."""
    metadata = []
    for rank, (start, end) in enumerate(ranges):
        if start < end:
            placement = _placement(dist.get_global_rank(group, rank), local.device, own=rank == group.rank())
            offsets, sizes = [start, *(0 for _ in shape[1:])], [end - start, *shape[1:]]
            metadata.append((rank, ShardMetadata(offsets, sizes, placement)))
    own = [Shard(local, shard) for rank, shard in metadata if rank == group.rank()]
    properties = TensorProperties(dtype=local.dtype, pin_memory=local.is_pinned())
    whole = ShardedTensorMetadata([shard for _, shard in metadata], torch.Size(shape), properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(own, whole, process_group=group)


def _placement(rank: int, device: torch.device, *, own: bool) -> str:
    """Describe the placement of a shard on ``rank``. ``device`` is that of this rank's ``own`` shard; for other ranks
    the usual device is assumed."""
    if device.type == "cpu" or own:
        return f"rank:{rank}/{device}"
    return f"rank:{rank}/{device.type}:{rank % _get_device_module(device.type).device_count()}"


def is_sharded(value: Any) -> bool:
    """Return True for a tensor of torch's sharded types of which this rank holds only a part."""
    if not isinstance(value, DTensor):
        return isinstance(value, ShardedTensor)
    return bool(cut_dims(value))


def kind_of(value: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """Return the dtype and the whole shape of a tensor, sharded or not."""
    if isinstance(value, ShardedTensor):  # its methods warn of deprecation
        return value.metadata().tensor_properties.dtype, tuple(value.metadata().size)
    return value.dtype, tuple(value.shape)


def rows_on(mesh: DeviceMesh, group: Any) -> tuple[DeviceMesh, int]:
    """Find the mesh dimension with the ranks of ``group``: in the root mesh of ``mesh``, as torch's FSDP1 does, or in
    ``mesh`` itself, where several dimensions were flattened into one."""
    for one in (root_of(mesh), mesh):
        if (dim := dim_of(one, group)) is not None:
            return one, dim
    ranks = group_ranks(group)
    raise RuntimeError(f"no dimension of {mesh} has the ranks that the parameters are sharded over, {ranks}")


def dim_of(mesh: DeviceMesh, group: Any) -> int | None:
    """Return the dimension of ``mesh`` with the ranks of ``group``, or None."""
    ranks = group_ranks(group)
    return next((dim for dim in range(mesh.ndim) if group_ranks(mesh.get_group(dim)) == ranks), None)


def check_no_mesh(unit: Unit) -> None:
    """Check that the unit has no device mesh, which local state dicts do not support."""
    if unit.groups.mesh is not None:
        raise RuntimeError("DeviceMesh is not compatible with LOCAL_STATE_DICT; use SHARDED_STATE_DICT")


def cut_dims(tensor: DTensor) -> list[int]:
    """List the mesh dimensions along which the ranks hold different parts of ``tensor``."""
    mesh, several = tensor.device_mesh, enumerate(tensor.placements)
    return [dim for dim, placement in several if not placement.is_replicate() and mesh.size(dim) > 1]


def box_at(value: DTensor, position: Mapping[int, int], dims: Sequence[int]) -> tuple[Box, ...]:
    """Return the box of ``value`` at this ``position`` of the mesh if only the dimensions ``dims`` cut the tensor."""
    box = Box.whole(value.shape)
    for dim in dims:
        placement: Any = value.placements[dim]
        along, offsets, sizes = placement.dim % value.dim(), list(box.offsets), list(box.sizes)
        start, end = chunk_rows(sizes[along], value.device_mesh.size(dim))[position[dim]]
        offsets[along], sizes[along] = offsets[along] + start, end - start
        box = Box(tuple(offsets), tuple(sizes))
    return (box,) if box.numel else ()


def group_that_has(value: Any, group: Any, groups: Groups) -> Any:
    """Return the group whose ranks hold the rows of ``value``, a sharded value of ``group`` for a unit of ``groups``.

    Raises:
        AssertionError: ranks that do not take part hold some.
    """
    own, ranks = group_of(groups), group_ranks(group)
    if ranks == group_ranks(own):
        return own
    others = [each for each in (groups.replica, groups.tp) if each is not None]
    near = {*group_ranks(own), *(rank for each in others for rank in group_ranks(each))}
    everyone = groups.data_parallel_size * (groups.tp.size() if groups.tp is not None else 1)
    if near.issuperset(ranks) or (near.issubset(ranks) and len(ranks) == everyone):
        return group
    if isinstance(value, DTensor):
        raise AssertionError(f"a DTensor over the ranks {ranks}, which are not those of the parameter")
    return own  # tensors from files are in the default group


def rows_of_shards(tensor: Any, group: Any) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """Return the rows (start, end) of a ``ShardedTensor`` on each rank of ``group``, and this rank's rows."""
    dtype, shape = kind_of(tensor)
    shards = tensor.local_shards()
    if len(shards) > 1:
        raise AssertionError(f"Expects 0 or 1 shard per rank but got {len(shards)} shards on this rank")
    ranks, ranges = group_ranks(group), [(0, 0)] * group.size()
    for metadata in tensor.metadata().shards_metadata:
        rank = metadata.placement.rank()
        if rank not in ranks or any(metadata.shard_offsets[1:]) or metadata.shard_sizes[1:] != [*shape[1:]]:
            raise AssertionError(
                f"a chunk at {metadata.shard_offsets} of size {metadata.shard_sizes} on rank {rank}; expected "
                "rows, on the ranks that the parameter is sharded over"
            )
        start = metadata.shard_offsets[0]
        ranges[ranks.index(rank)] = (start, start + metadata.shard_sizes[0])
    return ranges, shards[0].tensor.detach() if shards else torch.empty((0, *shape[1:]), dtype=dtype)
