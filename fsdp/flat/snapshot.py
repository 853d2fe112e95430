"""Snapshots of tensors, by which writes of users are detected."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

# For ``map`` over the parameters of a unit, which several checks of each pass do: 5 % of the host time of a small unit.
version_of = operator.attrgetter("_version")
flag_of = operator.attrgetter("requires_grad")
layout_of = operator.attrgetter("layout")
hooks_of = operator.attrgetter("_backward_hooks")
accumulation_hooks_of = operator.attrgetter("_post_accumulate_grad_hooks")


def changed(before: Sequence[object], now: Sequence[object]) -> list[int]:
    """Return the positions at which two equally long sequences differ."""
    return [position for position, (one, other) in enumerate(zip(before, now, strict=True)) if one != other]


class Snapshot:
    """Version, data pointer and ``requires_grad`` of several tensors at one moment.

    A write through ``tensor.data`` leaves all of these equal. No function of Python is called per tensor.
    """

    __slots__ = ("flags", "pointers", "versions")

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.versions, self.flags = list(map(version_of, tensors)), list(map(flag_of, tensors))
        self.pointers = pointers_of(tensors)

    def has_data_and_flags(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Compare data pointers and ``requires_grad`` of the same ``tensors`` now. In-place writes do not count."""
        return self.flags == list(map(flag_of, tensors)) and self.pointers == pointers_of(tensors)


def pointers_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return data pointers; instead of 0, as of a tensor without elements, the address of the storage."""
    pointers = list(map(torch.Tensor.data_ptr, tensors))
    if 0 in pointers:
        return [pointer or tensor.untyped_storage()._cdata for pointer, tensor in zip(pointers, tensors)]
    return pointers
