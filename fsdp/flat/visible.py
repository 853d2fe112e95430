"""What users hold of a bucket, and the marks by which it is seen that they have changed it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fsdp.flat.tensor_parallel import local_of


@dataclass(frozen=True)
class Visible:
    """A parameter that users and optimizers hold."""

    name: str
    param: nn.Parameter
    members: Sequence[int]  # the leaves, by index, that it stands for
    absent: bool  # this rank's shard holds nothing of it


def memories_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Of each another one after ``tensor.data = other``. A tensor without elements points nowhere, but has a storage,
    too."""
    plain = [tensor if type(tensor) is nn.Parameter else local_of(tensor) for tensor in tensors]
    return [tensor.data_ptr() or tensor.untyped_storage()._cdata for tensor in plain]


def looks_of(tensors: Iterable[torch.Tensor | None]) -> list[tuple[int, int, int] | None]:
    """Of each what changes when it is replaced, given other data, or written in place."""
    return [None if tensor is None else (id(tensor), tensor._version, memories_of([tensor])[0]) for tensor in tensors]


def flags_of(tensors: Iterable[torch.Tensor | None]) -> list[bool | None]:
    return [None if tensor is None else tensor.requires_grad for tensor in tensors]
