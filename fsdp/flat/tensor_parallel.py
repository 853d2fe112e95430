"""Parameters of tensor parallelism: ``DTensor`` s over another dimension of the mesh than that which units shard over.

A bucket flattens what this rank has of such a parameter, its *local tensor*, as it flattens any other parameter, and
the shard group's ranks, which all have the same local tensor, share that. Modules compute with ``DTensor`` s again:
leaves, and what is summoned, are made around views of the full buffer. What users and optimizers hold between the steps
are plain parameters, as with all that is sharded.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp.comm.groups import Groups, rank_names


def local_of(tensor: Any) -> Any:
    """What this rank has of a ``DTensor``, in the memory that it has; anything else as it is."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True, eq=False)
class TensorParallel:
    """How tensor parallelism has placed a parameter on the ranks of one mesh dimension: cut along one of its own
    dimensions, by the rule of ``torch.chunk``, or the same on all.

    Attributes:
        spec: that of the ``DTensor``.
    """

    spec: DTensorSpec

    @staticmethod
    def of(param: DTensor, name: str, groups: Groups | None) -> TensorParallel:
        """How ``param``, which errors call ``name``, is placed; ``groups`` are what it is to be sharded over.

        Raises:
            NotImplementedError: it is placed over several mesh dimensions, or neither cut in chunks nor replicated.
            ValueError: it is placed over ranks that it is to be sharded over, or this rank's part is no chunk.
        """
        mesh, found = param.device_mesh, TensorParallel(param._spec)
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
        """Of the whole parameter, on all ranks together."""
        return tuple(self.spec.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def group(self) -> Any:
        """The ranks that it is placed on."""
        return self.spec.mesh.get_group(0)

    @cached_property
    def dim(self) -> int | None:
        """Along which it is cut; None if every rank has all of it."""
        placement = self.spec.placements[0]
        return placement.dim % len(self.shape) if isinstance(placement, Shard) else None

    def _bounds(self, rank: int) -> list[tuple[int, int]]:
        """In each dimension, where in the whole the part of ``rank`` of the group begins and ends."""
        bounds = [(0, size) for size in self.shape]
        if self.dim is not None:
            size = self.shape[self.dim]
            chunk = -(-size // self.spec.mesh.size())
            bounds[self.dim] = min(rank * chunk, size), min((rank + 1) * chunk, size)
        return bounds

    def offsets(self, rank: int) -> tuple[int, ...]:
        """Where in the whole the part of ``rank`` of the group begins."""
        return tuple(start for start, _ in self._bounds(rank))

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """The shape of the part of ``rank`` of the group."""
        return tuple(end - start for start, end in self._bounds(rank))

    def around(self, local: torch.Tensor, *, requires_grad: bool) -> Any:
        """The parameter, a ``DTensor``, of which this rank has ``local``, in that memory."""
        assert self.spec.tensor_meta is not None
        meta = TensorMeta(self.spec.shape, self.spec.tensor_meta.stride, local.dtype)
        spec = DTensorSpec(self.spec.mesh, self.spec.placements, tensor_meta=meta)
        return nn.Parameter(DTensor(local, spec, requires_grad=False), requires_grad)

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """What this rank has of ``whole``, a plain tensor, as a view of it."""
        if self.dim is None:
            return whole
        rank = self.spec.mesh.get_local_rank()
        return whole.narrow(self.dim, self.offsets(rank)[self.dim], self.local_shape(rank)[self.dim])

    def local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """What this rank has of ``grad``, once that is placed as the parameter is: what the ranks computed from parts
        of the input is summed up over them. All of them have to call."""
        if not isinstance(grad, DTensor):
            return grad
        if grad.placements != self.spec.placements:
            grad = grad.redistribute(placements=self.spec.placements)
        return grad.to_local()
