"""Snapshots of tensors, by which writes of users are detected."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch

# For ``map`` over the parameters of a unit, which several checks of each pass do: 5 % of the host time of a small unit.
version_of = operator.attrgetter("_version")
flag_of = operator.attrgetter("requires_grad")
hooks_of = operator.attrgetter("_backward_hooks")
accumulation_hooks_of = operator.attrgetter("_post_accumulate_grad_hooks")


class Values(NamedTuple):
    """Identity and version of several tensors at one moment. A write through ``tensor.data`` changes neither."""

    ids: list[int]
    versions: list[int]

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> Values:
        return Values(list(map(id, tensors)), list(map(version_of, tensors)))

    def changed(self, later: Values) -> list[int]:
        """Return the indices of the tensors that were replaced or written in place before ``later``."""
        return [index for index, (one, other) in enumerate(zip(zip(*self), zip(*later), strict=True)) if one != other]


class Snapshot:
    """Values, data pointer and ``requires_grad`` of several tensors at one moment.

    A write through ``tensor.data`` leaves all of these equal. No function of Python is called per tensor.
    """

    __slots__ = ("flags", "pointers", "values")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.values, self.flags = Values.of(tensors), list(map(flag_of, tensors))
        self.pointers = _pointers_of(tensors)

    def has_data_and_flags(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Compare data pointers and ``requires_grad`` of the same ``tensors`` now. In-place writes do not count."""
        if self.flags != list(map(flag_of, tensors)):
            return False
        return self.pointers == _pointers_of(tensors)

    def moved(self, later: Snapshot) -> list[int]:
        """Return the indices of the tensors with other data in ``later``, as after ``tensor.data = other``."""
        return [index for index, (one, other) in enumerate(zip(self.pointers, later.pointers)) if one != other]


def _pointers_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return data pointers; instead of 0, as of a tensor without elements, the address of the storage."""
    pointers = list(map(torch.Tensor.data_ptr, tensors))
    if 0 in pointers:
        return [pointer or tensor.untyped_storage()._cdata for pointer, tensor in zip(pointers, tensors)]
    return pointers
