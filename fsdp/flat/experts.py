"""The declaration of experts: parameters of which each rank of a mesh dimension has a part, and computes with it on
tokens that no other rank has.

Experts are placed as in tensor parallelism (``tensor_parallel.py``): cut along dimension 0. The difference is that the
ranks see different data, so that gradients are divided by the number of all of them.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp.comm.consensus import all_gather_object
from fsdp.flat.registration import registered_params
from fsdp.flat.tensor_parallel import EXPERTS, local_of
from fsdp.placement.boxes import chunk_rows, dense_stride, memory_order


class _Declared(NamedTuple):
    """A parameter on one rank: the facts that all ranks compare, and the number of its rows."""

    name: str
    sizes: tuple[int, ...]  # of a row
    dtype: torch.dtype
    requires_grad: bool
    is_dtensor: bool
    rows: int

    def __str__(self) -> str:
        kind = "a DTensor, " if self.is_dtensor else ""
        shape = (self.rows, *self.sizes)
        return f"{self.name!r} of shape {shape}, {kind}{self.dtype}, requires_grad={self.requires_grad}"


def shard_experts(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Declare that the parameters of ``module`` are this rank's experts, and that each rank of ``mesh`` has others.

    Each parameter ``[experts of this rank, ...]`` becomes a ``DTensor`` ``[all experts, ...]`` that is cut along
    dimension 0 over ``mesh``. One that is such a ``DTensor`` already stays the same. The forward of ``module`` gets the
    kind of parameters that it had before: plain parameters of this rank's experts, or ``DTensor`` s. Call it before
    wrapping, on all ranks of ``mesh``; then wrap the module over the ranks that hold the same experts, and the model
    over all ranks::

        mesh = init_device_mesh("cuda", (dp, ep), mesh_dim_names=("dp", "ep"))
        for block in model.blocks:
            fsdp.shard_experts(block.experts, mesh["ep"])
            block.experts = FSDP(block.experts, device_mesh=mesh["dp"])
        model = FSDP(model)

    Sending tokens to the ranks of their experts is up to the model.

    Args:
        module: a module without parameters other than experts. The ranks have as many experts as ``torch.chunk`` gives
            them: equally many, or the last ranks fewer.
        mesh: one dimension of a mesh.

    Returns:
        ``module``.

    Raises:
        TypeError: ``mesh`` is no ``DeviceMesh``.
        ValueError: on every rank, before ``module`` changes: ``mesh`` has several dimensions; a parameter has no
            dimension, is a ``DTensor`` that is placed in another way, or is sharded already; or ranks have different
            parameters, or other numbers of experts.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"shard_experts() needs one dimension of a mesh, as in mesh['ep'], got {type(mesh)}")
    if mesh.ndim != 1:
        raise ValueError(f"shard_experts() needs one dimension of a mesh, as in mesh['ep'], got {mesh}")
    several = all_gather_object(
        _described(module, mesh), mesh.get_group(), "compare experts", torch.device(mesh.device_type)
    )
    rows = _rows_of_all(several, mesh.mesh.tolist())
    params = dict(module.named_parameters())
    made: dict[torch.Tensor, Any] = {  # a parameter with several names stays one
        param: param if isinstance(param, DTensor) else _placed(param, rows[name], mesh)
        for name, param in params.items()
    }
    for owner in module.modules():
        for attribute, param in registered_params(owner):
            vars(owner).setdefault(EXPERTS, {})[attribute] = not isinstance(param, DTensor)
            setattr(owner, attribute, made[param])
    return module


def _described(module: nn.Module, mesh: DeviceMesh) -> list[_Declared] | str:
    """Describe the parameters of ``module`` to the other ranks, or the reason why they cannot be experts."""
    found = []
    for name, param in module.named_parameters():
        whole: Any = param
        placed = isinstance(whole, DTensor)
        if getattr(param, "_fsdp_flattened", False):
            return f"parameter {name!r} is sharded already: declare experts before wrapping"
        if placed and (whole.device_mesh != mesh or whole.placements != (Shard(0),)):
            return (
                f"parameter {name!r} is a DTensor placed as {whole.placements} on {whole.device_mesh}; expected "
                f"(Shard(dim=0),) on {mesh}"
            )
        if param.dim() == 0:
            return f"parameter {name!r} has no dimension; expected [experts of this rank, ...]"
        count, *sizes = local_of(param).shape
        found.append(_Declared(name, tuple(sizes), param.dtype, param.requires_grad, placed, count))
    return found or f"{type(module).__name__} has no parameters"


def _rows_of_all(several: list[list[_Declared] | str], ranks: list[int]) -> dict[str, int]:
    """Return by name the number of rows that each parameter has on all ``ranks`` together. ``several`` has the result
    of :func:`_described` of each.

    Raises:
        ValueError: the parameters cannot be cut.
    """
    rows: dict[str, int] = {}
    described: list[list[_Declared]] = []
    for rank, found in zip(ranks, several):
        if isinstance(found, str):
            raise ValueError(f"shard_experts(), on rank {rank}: {found}")
        described.append(found)
    for of_all in itertools.zip_longest(*described):
        first = of_all[0]
        for rank, each in zip(ranks, of_all):
            if each is None or first is None or each[:-1] != first[:-1]:
                raise ValueError(
                    "shard_experts(): expected the same parameters on all ranks, with other values, but rank "
                    f"{ranks[0]} has {first} and rank {rank} has {each}"
                )
        counts = [each.rows for each in of_all]
        if counts != [end - start for start, end in chunk_rows(sum(counts), len(counts))]:
            raise ValueError(
                f"shard_experts(): the ranks {ranks} have {counts} rows of parameter {first.name!r}; expected equally "
                "many, or the chunks of torch.chunk"
            )
        rows[first.name] = sum(counts)
    return rows


def _placed(param: nn.Parameter, rows: int, mesh: DeviceMesh) -> nn.Parameter:
    """Return ``param``, this rank's part, as a ``DTensor`` of ``rows`` rows over the same memory."""
    local = param.detach()
    shape = torch.Size((rows, *local.shape[1:]))
    stride = dense_stride(shape, memory_order(local.shape, local.stride()))
    whole: Any = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
    placed = nn.Parameter(whole, param.requires_grad)
    vars(placed).update(vars(param))
    return placed
