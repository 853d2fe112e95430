"""Parameters of tensor parallelism: ``DTensor`` s over another dimension of the mesh than the shard group's.

A bucket flattens the *local tensor* of such a parameter like a plain parameter. All ranks of a shard group have the
same local tensor, and shard it. Modules compute with ``DTensor`` s: leaves and summoned parameters, made around views
of the full vector. Between steps users and optimizers hold plain parameters, as for all sharded parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp.comm.groups import Groups, rank_names

EXPERTS = "_fsdp_experts"  # of a module: by name of a parameter that holds experts, ``TensorParallel.is_plain``


def local_of(tensor: Any) -> Any:
    """Return the local tensor of a ``DTensor``, without a copy; a plain tensor as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """The placement of a parameter on the ranks of one mesh dimension: cut along one tensor dimension, by the rule of
    ``torch.chunk``, or replicated.

    Attributes:
        spec: the spec of the ``DTensor``.
        experts: the ranks see different data: the parameter was declared by ``fsdp.shard_experts``.
        is_plain: modules compute with the local tensor as a plain parameter, not with a ``DTensor``.
    """

    spec: DTensorSpec
    experts: bool = False
    is_plain: bool = False

    @staticmethod
    def of(param: DTensor, name: str, groups: Groups | None, declared: bool | None = None) -> TensorParallel:
        """Return the placement of ``param``, which errors call ``name``, and which ``groups`` will shard. If it was
        ``declared`` to hold experts, this says whether modules compute with plain parameters.

        Raises:
            NotImplementedError: several mesh dimensions, or a placement that is neither ``Shard`` nor ``Replicate``.
            ValueError: the ranks are those of the shard group, or this rank's part is no chunk.
        """
        mesh, found = param.device_mesh, TensorParallel(param._spec, declared is not None, bool(declared))
        kinds = {type(placement) for placement in param.placements}
        if mesh.ndim != 1 or not kinds <= {Shard, Replicate}:
            raise NotImplementedError(
                f"parameter {name} is a DTensor placed as {tuple(param.placements)} on {mesh}; expected one dimension "
                "of a mesh (mesh['tp']), and Shard or Replicate"
            )
        ranks = mesh.mesh.flatten().tolist()
        for group in (groups.shard, groups.replica) if groups is not None else ():
            shared = set(ranks).intersection(() if group is None else rank_names(group))
            if len(shared) > 1:
                raise ValueError(
                    f"parameter {name} is a DTensor on the ranks {ranks}, and its unit would be sharded over ranks "
                    f"{rank_names(group)}: expected no two ranks in both. Pass the other dimension of the mesh, as in "
                    "device_mesh=mesh['dp']"
                )
        expected, shape = found.local_shape(mesh.get_local_rank()), tuple(local_of(param).shape)
        if shape != expected:
            raise ValueError(
                f"parameter {name} is a DTensor of shape {tuple(param.shape)} placed as {tuple(param.placements)}, of "
                f"which this rank has {shape}; expected the chunks of torch.chunk, {expected} here"
            )
        return found

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter, on all ranks together."""
        return tuple(self.spec.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def group(self) -> ProcessGroup:
        """The group of the ranks that the parameter is placed on."""
        return self.spec.mesh.get_group(0)

    @cached_property
    def dim(self) -> int | None:
        """The dimension that the parameter is cut along; None if it is replicated."""
        placement = self.spec.placements[0]
        return placement.dim % len(self.shape) if isinstance(placement, Shard) else None

    def _bounds(self, rank: int) -> list[tuple[int, int]]:
        """Return the (start, end) of the part of ``rank``, in the group, in each dimension of the whole parameter."""
        bounds = [(0, size) for size in self.shape]
        if self.dim is not None:
            size = self.shape[self.dim]
            chunk = -(-size // self.spec.mesh.size())
            bounds[self.dim] = min(rank * chunk, size), min((rank + 1) * chunk, size)
        return bounds

    def offsets(self, rank: int) -> tuple[int, ...]:
        """Return the offsets of the part of ``rank``, in the group, in the whole parameter."""
        return tuple(start for start, _ in self._bounds(rank))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part of ``rank``, in the group."""
        return tuple(end - start for start, end in self._bounds(rank))

    def around(self, local: torch.Tensor, *, requires_grad: bool) -> Any:
        """Make the parameter, a ``DTensor``, with the local tensor ``local``, over the same memory."""
        assert self.spec.tensor_meta is not None
        meta = TensorMeta(self.spec.shape, self.spec.tensor_meta.stride, local.dtype)
        spec = DTensorSpec(self.spec.mesh, self.spec.placements, tensor_meta=meta)
        return nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``whole``, a plain tensor, as a view."""
        if self.dim is None:
            return whole
        rank = self.spec.mesh.get_local_rank()
        return whole.narrow(self.dim, self.offsets(rank)[self.dim], self.local_shape(rank)[self.dim])

    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the local tensor of ``grad``, redistributed to the placement of the parameter: partial gradients are
        summed over the ranks. All ranks of the group must call."""
        if not isinstance(grad, DTensor):
            return grad
        if grad.placements != self.spec.placements:
            grad = grad.redistribute(placements=self.spec.placements)
        return grad.to_local()
