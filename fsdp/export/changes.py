"""``changes``: the elements of this rank's shards that differ from a snapshot, without communication.

After an optimizer's step few elements of a bf16 copy differ. Each rank compares its shard with the snapshot, in the
target dtype, and the program sends the changes of all ranks to the processes that hold copies of the weights.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.state_dict import check_no_experts
from fsdp.comm.groups import default_group
from fsdp.export.weights import target_dtype, tensors_of
from fsdp.flat.layout import contiguous_stride
from fsdp.placement.boxes import memory_order
from fsdp.runtime.unit import units_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Change(NamedTuple):
    """Changed elements of one tensor.

    Attributes:
        name: in the plain model.
        indices: of the elements in the flattened tensor (row-major); 1-D, int32 where the tensor is small enough.
        values: the new values; 1-D, in the dtype of the snapshot.
        tied: other names of the same parameter.
    """

    name: str
    indices: torch.Tensor
    values: torch.Tensor
    tied: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the values as bytes, since torch does not pickle each dtype (float8)."""
        return _unpickled, (self.name, self.indices, self.values.view(torch.uint8), self.tied, self.values.dtype)


def _unpickled(name: str, indices: torch.Tensor, data: torch.Tensor, tied: Any, dtype: torch.dtype) -> Change:
    return Change(name, indices, data.view(dtype), tied)


@dataclass(frozen=True)
class Changes:
    """The changes of one rank's shards from one version to the next. It can be pickled.

    Attributes:
        version: the version that they lead to; the first changes after a snapshot lead to version 1.
        rank, ranks: the rank whose shards changed, and the number of ranks.
        checksum: a digest of the names, indices and values, and of the values that were there before.
        tensors: in CPU memory or on the model's device, as the shards are.
    """

    version: int
    rank: int
    ranks: int
    checksum: bytes
    tensors: tuple[Change, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of indices and values."""
        return sum(each.indices.nbytes + each.values.nbytes for each in self.tensors)


@dataclass
class Snapshot:
    """This rank's shards as they were, in the target dtype; made by :func:`snapshot`, updated by :func:`changes`.

    Attributes:
        dtype: of floating-point tensors; None for the dtypes that they have.
        version: how often :func:`changes` was called.
    """

    dtype: torch.dtype | None
    version: int = 0
    values: dict[str, torch.Tensor] = field(default_factory=dict)


def snapshot(model: nn.Module, dtype: torch.dtype | None = None) -> Snapshot:
    """Copy this rank's shards of ``model`` in ``dtype``, to find :func:`changes` later. No communication.

    It costs the memory of the shards in that dtype. Take it when the receiver has the same weights, after a loop over
    :func:`fsdp.export.weights` of the same dtype.

    Raises:
        ValueError: ``model`` has no wrapped modules in it.
        NotImplementedError: a parameter is placed by tensor parallelism.
        RuntimeError: a forward or backward is under way.
    """
    made = Snapshot(dtype)
    for (name, *_), part in _parts(model):
        made.values[name] = part.local.to(target_dtype(part.dtype, dtype), copy=True)
    return made


def changes(model: nn.Module, snapshot: Snapshot) -> Changes:
    """Find the elements of this rank's shards that differ from ``snapshot``, bit for bit, and update ``snapshot``.

    No communication. Only the first replica reports changes, and only rank 0 those of tensors that no unit owns. Call
    it equally often on every rank, so that the versions agree; bring the results of all ranks to :func:`apply_changes`.

    Raises:
        ValueError: the parameters of the model are not those of the snapshot.
        RuntimeError: a forward or backward is under way.
        NotImplementedError: ranks hold different experts.
    """
    parts = _parts(model)
    shapes = [(name, part.local.shape) for (name, *_), part in parts]
    if shapes != [(name, values.shape) for name, values in snapshot.values.items()]:
        raise ValueError("the snapshot is of another model, or of another rank's shards: take it anew")
    found: list[Change] = []
    digest = hashlib.blake2b(digest_size=16)
    for (name, *tied), part in parts:
        before = snapshot.values[name]
        now = part.local.to(before.dtype)
        places = _different(now, before).nonzero().view(-1)
        if not places.numel():
            continue
        values, old = now[places], before[places]
        indices = _row_major(places + part.start, part.shape, part.stride())
        change = Change(name, indices, values, tuple(tied))
        _add_to(digest, change, old)
        found.append(change)
        before[places] = values
    snapshot.version += 1
    group = default_group()
    return Changes(snapshot.version, group.rank(), group.size(), digest.digest(), tuple(found))


def _different(now: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Return which elements of two 1-D tensors of one dtype differ in a bit."""
    if now.is_complex():
        return _different(*(torch.view_as_real(each).view(-1) for each in (now, before))).view(-1, 2).any(1)
    integer = _BITS[now.itemsize]
    return now.view(integer) != before.view(integer)


def apply_changes(state_dict: Mapping[str, torch.Tensor], parts: Iterable[Changes], *, version: int) -> int:
    """Write the changes of all ranks into the tensors of ``state_dict``, in place::

        version = 0                                        # the weights that were sent at the time of the snapshot
        version = fsdp.export.apply_changes(model.state_dict(), changes_of_all_ranks, version=version)

    Everything is checked before anything is written.

    Args:
        state_dict: tensors by name in the plain model, in the dtypes of the snapshot, on any device, with any strides.
            Of a tied parameter one name is enough.
        parts: one :class:`Changes` of each rank.
        version: the version that the tensors have.

    Returns:
        the version that they have now.

    Raises:
        ValueError: changes of a rank are missing or there twice; they lead from another version; a name, dtype or index
            does not fit ``state_dict``; or a checksum is wrong: changes were damaged, or the tensors differ from those
            of the sender.
    """
    parts = list(parts)
    ranks = parts[0].ranks if parts else 1
    if sorted(part.rank for part in parts) != list(range(ranks)):
        raise ValueError(f"expected the changes of ranks 0 to {ranks - 1}, each once, got {[p.rank for p in parts]}")
    for part in parts:
        if part.version != version + 1:
            raise ValueError(
                f"the changes of rank {part.rank} lead to version {part.version}, and the tensors have version "
                f"{version}: apply each version in turn, or send all weights anew"
            )
        _check(state_dict, part)
    with torch.no_grad():
        for change in (change for part in parts for change in part.tensors):
            for _, tensor in _receivers(state_dict, change):
                view, places = _places(tensor, change)
                view[places] = change.values.to(tensor.device)
    return version + 1


def _receivers(state_dict: Mapping[str, torch.Tensor], change: Change) -> list[tuple[str, torch.Tensor]]:
    return [(name, state_dict[name]) for name in (change.name, *change.tied) if name in state_dict]


def _places(tensor: torch.Tensor, change: Change) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return a view of ``tensor``, and the index of the changed elements in it."""
    indices = change.indices.to(tensor.device, torch.int64)
    if tensor.is_contiguous():
        return tensor.detach().view(-1), (indices,)
    return tensor.detach(), torch.unravel_index(indices, tensor.shape)


def _check(state_dict: Mapping[str, torch.Tensor], part: Changes) -> None:
    digest = hashlib.blake2b(digest_size=16)
    intact = True
    for change in part.tensors:
        found: list[torch.Tensor] = []
        for name, tensor in _receivers(state_dict, change):
            repeats = any(size > 1 and step == 0 for size, step in zip(tensor.shape, tensor.stride()))
            if tensor.dtype != change.values.dtype or repeats:
                raise ValueError(
                    f"{name!r} must be a tensor of {change.values.dtype}, as the snapshot was, with memory for each "
                    f"element, but it has {tensor.dtype} and strides {tensor.stride()}"
                )
            indices = change.indices
            if indices.numel() and not 0 <= int(indices.min()) <= int(indices.max()) < tensor.numel():
                raise ValueError(f"the changes of {name!r} have indices beyond its {tensor.numel()} elements")
            view, places = _places(tensor, change)
            found.append(view[places].cpu())
        if not found:
            names = " or ".join(map(repr, (change.name, *change.tied)))
            raise ValueError(f"the changes of rank {part.rank} have {names}, which the state dict has not")
        intact = intact and not any(bool(_different(other, found[0]).any()) for other in found[1:])
        _add_to(digest, change, found[0])
    if not intact or digest.digest() != part.checksum:
        raise ValueError(
            f"the checksum of the changes of rank {part.rank} is wrong: they were damaged on their way, or the tensors "
            "are not those that the sender had in this version. Send all weights anew, and take a new snapshot"
        )


def _add_to(digest: hashlib.blake2b, change: Change, before: torch.Tensor) -> None:
    digest.update(change.name.encode())
    for tensor in (change.indices, change.values, before):
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())


def _row_major(places: torch.Tensor, shape: Sequence[int], stride: tuple[int, ...]) -> torch.Tensor:
    """Return the row-major indices of elements that are counted in memory order."""
    if stride != contiguous_stride(tuple(shape)):
        row_major, rest = torch.zeros_like(places), places
        steps = contiguous_stride(tuple(shape))
        for dim in reversed(memory_order(shape, stride)):
            row_major += rest % shape[dim] * steps[dim]
            rest = rest // shape[dim]
        places = row_major
    return places if math.prod(shape) > torch.iinfo(torch.int32).max else places.int()


def _parts(model: nn.Module) -> list[tuple[tuple[str, ...], RaggedTensor]]:
    """List names and elements that this rank compares: parts of parameters, and on rank 0 the tensors of no unit."""
    if not units_of(model):
        raise ValueError(f"expected a model with wrapped modules in it, but {type(model).__name__} has none")
    tensors, found = tensors_of(model, "fsdp.export.changes()"), list[tuple[tuple[str, ...], RaggedTensor]]()
    check_no_experts(model, "fsdp.export.changes()")
    for names, _, shape, unit, held, value in tensors:
        if unit is not None and held is not None and unit.groups.replica_rank == 0:
            found.append((names, held.part))
        elif value is not None and default_group().rank() == 0:
            found.append((names, RaggedTensor(value.detach().reshape(-1), shape, 0)))
    return found
