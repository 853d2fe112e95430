"""torch's own sharded tensors: every rank of a group has at most one chunk of the first dimension.

The chunks are those of ``torch.chunk``, so the last ranks may have none. They are what sharded state dicts hold unless
the form without communication is asked for. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _get_device_module
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor.placement_types import Placement

from fsdp.flat.layout import contiguous_stride


def chunk_rows(rows: int, count: int) -> list[tuple[int, int]]:
    """The (start, end) of each of ``count`` chunks of ``rows`` rows, by the rule of ``torch.chunk``; the last may be
    empty."""
    size = -(-rows // count)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(count)]


def one_chunk_each(
    local: torch.Tensor, ranges: Sequence[tuple[int, int]], shape: Sequence[int], group: Any
) -> ShardedTensor:
    """A ``ShardedTensor`` of ``shape`` of which rank i of ``group`` has the rows of ``ranges[i]``, an empty range
    nothing. ``local`` are this rank's rows; they are not copied."""
    metadata = []
    for rank, (start, end) in enumerate(ranges):
        if start < end:
            placement = _placement(dist.get_global_rank(group, rank), local.device.type)
            offsets, sizes = [start, *(0 for _ in shape[1:])], [end - start, *shape[1:]]
            metadata.append((rank, ShardMetadata(offsets, sizes, placement)))
    own = [Shard(local, shard) for rank, shard in metadata if rank == group.rank()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        own,
        sharded_tensor_metadata=ShardedTensorMetadata(
            shards_metadata=[shard for _, shard in metadata],
            size=torch.Size(shape),
            tensor_properties=TensorProperties(
                dtype=local.dtype,
                layout=torch.strided,
                requires_grad=False,
                memory_format=torch.contiguous_format,
                pin_memory=False,
            ),
        ),
        process_group=group,
    )


def _placement(rank: int, device_type: str) -> str:
    if device_type == "cpu":
        return f"rank:{rank}/cpu"
    return f"rank:{rank}/{device_type}:{rank % _get_device_module(device_type).device_count()}"


def chunk_of(whole: torch.Tensor, group: Any, *, mesh: DeviceMesh | None, offload: bool) -> torch.Tensor:
    """This rank's rows of ``whole``, copied, as a ``DTensor`` over ``mesh`` if there is one, else as a
    ``ShardedTensor`` over ``group``; on CPU with ``offload``. What has no rows is copied whole."""
    target = torch.device("cpu") if offload else whole.device
    if whole.dim() == 0 or whole.numel() == 0:
        return whole.to(target, copy=True)
    ranges = chunk_rows(whole.shape[0], group.size())
    start, end = ranges[group.rank()]
    rows = whole[start:end].to(target, copy=True, memory_format=torch.contiguous_format)
    return as_chunk(rows, whole.shape, group, mesh)


def as_chunk(rows: torch.Tensor, shape: Sequence[int], group: Any, mesh: DeviceMesh | None) -> torch.Tensor:
    """``rows``, those of this rank of a tensor of ``shape``, as a ``DTensor`` over ``mesh`` if there is one, else as a
    ``ShardedTensor`` over ``group``."""
    if mesh is None:
        return one_chunk_each(rows, chunk_rows(shape[0], group.size()), shape, group)
    size, stride = torch.Size(shape), contiguous_stride(tuple(shape))
    return DTensor.from_local(rows, mesh, placements(mesh), run_check=False, shape=size, stride=stride)


def is_sharded(value: Any) -> bool:
    """Whether ``value`` is one of torch's sharded tensors."""
    return isinstance(value, ShardedTensor) or (
        isinstance(value, DTensor) and not all(placement.is_replicate() for placement in value.placements)
    )


def kind_of(value: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape of a tensor, or of what a sharded one is a part of."""
    if isinstance(value, ShardedTensor):  # its own methods warn that it is deprecated
        return value.metadata().tensor_properties.dtype, tuple(value.metadata().size)
    return value.dtype, tuple(value.shape)


def placements(mesh: DeviceMesh) -> list[Placement]:
    """Rows over the last dimension of ``mesh``, replicated over the others."""
    return [*(Replicate() for _ in range(mesh.ndim - 1)), ShardOf(0)]


class Rows:
    """A sharded tensor that somebody else made, as rows: which rank of a group has which, and those of this rank."""

    def __init__(self, tensor: torch.Tensor, group: Any) -> None:
        """``tensor`` is a ``ShardedTensor`` or a ``DTensor``; ``group`` the ranks that will exchange the rows.

        Raises:
            AssertionError: it is cut up in another way than by rows, one chunk per rank at most, over this group.
        """
        self.shape = tuple(tensor.metadata().size if isinstance(tensor, ShardedTensor) else tensor.shape)
        self.numel_of_row = math.prod(self.shape[1:])
        self.ranges = [(0, 0)] * group.size()
        if isinstance(tensor, DTensor):
            self._read_dtensor(tensor, group)
        else:
            assert isinstance(tensor, ShardedTensor)
            self._read_sharded_tensor(tensor, group)
        if sum(end - start for start, end in self.ranges) != self.shape[0]:
            raise AssertionError(f"the ranks of the group have rows {self.ranges} of a tensor of shape {self.shape}")

    def _read_dtensor(self, tensor: DTensor, group: Any) -> None:
        mesh = tensor.device_mesh
        if list(tensor.placements) != placements(mesh):
            raise AssertionError(
                f"a DTensor placed as {tuple(tensor.placements)}; expected rows over the last dimension of the mesh"
            )
        if dist.get_process_group_ranks(mesh.get_group(mesh.ndim - 1)) != dist.get_process_group_ranks(group):
            raise AssertionError("a DTensor over a device mesh of other ranks than those the parameter is sharded over")
        self.ranges = chunk_rows(self.shape[0], group.size())
        self.local = tensor.to_local().detach()

    def _read_sharded_tensor(self, tensor: ShardedTensor, group: Any) -> None:
        shards = tensor.local_shards()
        if len(shards) > 1:
            raise AssertionError(f"Expects 0 or 1 shard per rank but got {len(shards)} shards on this rank")
        ranks = dist.get_process_group_ranks(group)
        for metadata in tensor.metadata().shards_metadata:
            rank = metadata.placement.rank()  # type: ignore[union-attr]
            if rank not in ranks or any(metadata.shard_offsets[1:]) or metadata.shard_sizes[1:] != [*self.shape[1:]]:
                raise AssertionError(
                    f"a chunk at {metadata.shard_offsets} of size {metadata.shard_sizes} on rank {rank}; expected "
                    "rows, on the ranks that the parameter is sharded over"
                )
            start = metadata.shard_offsets[0]
            self.ranges[ranks.index(rank)] = (start, start + metadata.shard_sizes[0])
        self.local = (
            shards[0].tensor.detach()
            if shards
            else torch.empty(0, *self.shape[1:], dtype=tensor.metadata().tensor_properties.dtype)
        )
