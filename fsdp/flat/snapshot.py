"""Snapshots of tensors, by which writes of users are detected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Change:
    """The difference between two snapshots at one position."""

    index: int
    replaced: bool  # another tensor object
    moved: bool  # another data pointer, as after ``tensor.data = other``
    written: bool  # another version, as after an in-place operation
    flag: bool  # another ``requires_grad``


class Snapshot:
    """Identity, data pointer, version and ``requires_grad`` of several tensors at one moment.

    A write through ``tensor.data`` changes none of these. No function of Python is called per tensor.
    """

    __slots__ = ("flags", "ids", "pointers", "versions")

    def __init__(self, tensors: Sequence[Any], *, origin: int = 0) -> None:
        """Record ``tensors``. Pointers are relative to ``origin``, for views of a buffer whose memory is exchanged."""
        self.ids = list(map(id, tensors))
        self.pointers = _pointers_of(tensors, origin)
        self.versions = [tensor._version for tensor in tensors]
        self.flags = [tensor.requires_grad for tensor in tensors]

    def has_values(self, tensors: Sequence[Any]) -> bool:
        """Compare identities and versions with those of ``tensors`` now."""
        return self.ids == list(map(id, tensors)) and self.versions == [tensor._version for tensor in tensors]

    def has_data_and_flags(self, tensors: Sequence[Any]) -> bool:
        """Compare data pointers and ``requires_grad`` with those of ``tensors`` now. In-place writes do not count."""
        flags = [tensor.requires_grad for tensor in tensors]
        return self.flags == flags and self.pointers == _pointers_of(tensors, 0)

    def has_values_of(self, other: Snapshot) -> bool:
        """Compare identities and versions: whether no tensor was replaced or written in place."""
        return self.ids == other.ids and self.versions == other.versions

    def diff(self, later: Snapshot) -> list[Change]:
        """Return the changes between this snapshot and a ``later`` one, in the order of the tensors."""
        before = zip(self.ids, self.pointers, self.versions, self.flags)
        after = zip(later.ids, later.pointers, later.versions, later.flags)
        return [
            Change(index, *(one != other for one, other in zip(then, now, strict=True)))
            for index, (then, now) in enumerate(zip(before, after, strict=True))
            if then != now
        ]


def _pointers_of(tensors: Sequence[Any], origin: int) -> list[int]:
    """Return data pointers relative to ``origin``; for a tensor without elements the address of the storage."""
    plain = [tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return [pointer - origin if (pointer := tensor.data_ptr()) else tensor.untyped_storage()._cdata for tensor in plain]
