"""Meshes whose names are unique within this process."""

from __future__ import annotations

import itertools

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# torch caches results by a mesh's ranks and names; a cached mesh has groups that ended with an earlier job.
numbers = itertools.count()


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    """Make a mesh over all ranks, with dimension names "a" and "b" and a unique number."""
    number = next(numbers)
    return init_device_mesh("cpu", shape, mesh_dim_names=tuple(f"{name}{number}" for name in "ab"[: len(shape)]))
