"""Snapshots of tensors, by which writes of users are detected."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

# For ``map`` over the parameters of a unit, which several checks of each pass do: 5 % of the host time of a small unit.
version_of = operator.attrgetter("_version")
flag_of = operator.attrgetter("requires_grad")


@dataclass(frozen=True)
class Change:
    """The difference between two snapshots at one position."""

    index: int
    replaced: bool  # another tensor object
    moved: bool  # another data pointer, as after ``tensor.data = other``
    written: bool  # another version, as after an in-place operation
    flag: bool  # another ``requires_grad``


class Values:
    """Identity and version of several tensors at one moment. A write through ``tensor.data`` changes neither."""

    __slots__ = ("ids", "versions")

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.ids = list(map(id, tensors))
        self.versions = list(map(version_of, tensors))

    def are_those_of(self, tensors: Sequence[Any]) -> bool:
        """Compare with ``tensors`` now: whether no tensor was replaced or written in place."""
        return self.ids == list(map(id, tensors)) and self.versions == list(map(version_of, tensors))

    def are_those_in(self, other: Values) -> bool:
        """Compare with ``other``: whether no tensor was replaced or written in place."""
        return self.ids == other.ids and self.versions == other.versions

    def changed(self, tensors: Sequence[Any]) -> list[int]:
        """Return the indices of the tensors that were replaced or written in place."""
        return [i for i, t in enumerate(tensors) if self.ids[i] != id(t) or self.versions[i] != t._version]


class Snapshot(Values):
    """Identity, version, data pointer and ``requires_grad`` of several tensors at one moment.

    A write through ``tensor.data`` leaves all of these equal. No function of Python is called per tensor.
    """

    __slots__ = ("_has_dtensors", "flags", "pointers")

    def __init__(self, tensors: Sequence[Any]) -> None:
        super().__init__(tensors)
        self._has_dtensors = any(isinstance(tensor, DTensor) for tensor in tensors)
        self.pointers = self._pointers_of(tensors)
        self.flags = list(map(flag_of, tensors))

    def has_data_and_flags(self, tensors: Sequence[Any]) -> bool:
        """Compare data pointers and ``requires_grad`` of the same ``tensors`` now. In-place writes do not count."""
        if self.flags != list(map(flag_of, tensors)):
            return False
        return self.pointers == self._pointers_of(tensors)

    def _pointers_of(self, tensors: Sequence[Any]) -> list[int]:
        """Return data pointers; for a tensor without elements the address of the storage."""
        if self._has_dtensors:
            tensors = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        pointers = list(map(torch.Tensor.data_ptr, tensors))
        if 0 in pointers:
            return [pointer or tensor.untyped_storage()._cdata for pointer, tensor in zip(pointers, tensors)]
        return pointers

    def diff(self, later: Snapshot) -> list[Change]:
        """Return the changes between this snapshot and a ``later`` one, in the order of the tensors."""
        if self.are_those_in(later) and self.pointers == later.pointers and self.flags == later.flags:
            return []
        before = zip(self.ids, self.pointers, self.versions, self.flags)
        after = zip(later.ids, later.pointers, later.versions, later.flags)
        return [
            Change(index, *(one != other for one, other in zip(then, now, strict=True)))
            for index, (then, now) in enumerate(zip(before, after, strict=True))
            if then != now
        ]
