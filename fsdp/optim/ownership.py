"""Owners of whole parameters: which rank steps which parameter, and where its optimizer state lies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fsdp.checkpoint.forms import Held
from fsdp.checkpoint.optim_names import Holder, Member, StateInfo
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.state_dict import held_param
from fsdp.flat.layout import contiguous_stride
from fsdp.placement.boxes import dense_stride, elements_of


def cost(shape: Sequence[int]) -> int:
    """Return the relative cost of one step: ``m * n * min(m, n)``, for the parameter viewed as an (m, n) matrix."""
    rows = shape[0] if shape else 1
    columns = math.prod(shape[1:])
    return rows * columns * min(rows, columns)


def assign_owners(shapes: Sequence[Sequence[int]], ranks: int) -> list[int]:
    """Assign each parameter to a rank so that the ranks' total costs are balanced.

    The largest parameter goes first, each to the rank with the least cost so far. The result depends on the arguments
    alone, so that all ranks compute the same.
    """
    owners, load = [0] * len(shapes), [0] * ranks
    for index in sorted(range(len(shapes)), key=lambda index: -cost(shapes[index])):
        owners[index] = min(range(ranks), key=load.__getitem__)
        load[owners[index]] += cost(shapes[index])
    return owners


@dataclass(frozen=True, eq=False)
class WholeHolder(Holder):
    """A sharded parameter whose optimizer state lies whole on one rank of its shard group.

    Attributes:
        owner: that rank.
    """

    owner: int

    any_shape = True

    @cached_property
    def owners(self) -> tuple[int, ...]:
        return (self.owner,)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        return self.members[0].shape if self.rank == self.owner else (0,)

    def held(self, member: Member, state: torch.Tensor, info: StateInfo | None = None) -> Held:
        shape, stride = self._layout(info)
        numel = math.prod(shape)
        local = elements_of(state, stride) if self.rank == self.owner else state.reshape(-1)[:0]
        spans = ((self.owner, 0, numel),) if numel else ()
        part = held_param(self.handle, member.index).part
        whole = RaggedTensor(local, shape, 0, stride, saved_elsewhere=part.saved_elsewhere, replicas=part.replicas)
        return Held(whole, lambda: spans)

    def empty(self, info: StateInfo) -> torch.Tensor:
        if self.rank != self.owner:
            return torch.empty(0, dtype=info.dtype, device=self.param.device)
        return torch.empty_strided(*self._layout(info), dtype=info.dtype, device=self.param.device)

    def part(self, member: Member, state: torch.Tensor) -> torch.Tensor:
        return elements_of(state, self._layout(StateInfo(state.dtype, tuple(state.shape)))[1])

    def _layout(self, info: StateInfo | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shape and the strides of a state."""
        record = self.members[0].record
        shape = record.shape if info is None else info.shape
        if info is not None and info.order is not None:
            return shape, dense_stride(shape, info.order)
        return shape, record.stride if shape == record.shape else contiguous_stride(shape)
