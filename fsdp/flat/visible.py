"""What users hold of a bucket, and the marks by which it is seen that they have changed it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp.flat.tensor_parallel import local_of

# For many tensors at once: of each its address, how often it was changed in place, whether it requires grad, ``.grad``.
address_of: Callable[[torch.Tensor], int] = torch.Tensor.data_ptr  # half of what operator.methodcaller() costs
version_of: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
flag_of: Callable[[torch.Tensor], bool] = operator.attrgetter("requires_grad")
grad_of: Callable[[torch.Tensor], Any] = operator.attrgetter("grad")


class Visible(NamedTuple):
    """A parameter that users and optimizers hold."""

    name: str
    param: nn.Parameter
    members: Sequence[int]  # the leaves, by index, that it stands for
    absent: bool  # this rank's shard holds nothing of it


def memories_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Of each another one after ``tensor.data = other``. A tensor without elements points nowhere, but has a storage,
    too."""
    found = []
    for tensor in tensors:
        plain = tensor if type(tensor) is nn.Parameter else local_of(tensor)
        found.append(plain.data_ptr() or plain.untyped_storage()._cdata)
    return found


def looks_of(tensors: Iterable[torch.Tensor | None]) -> list[tuple[int, int, int] | None]:
    """Of each what changes when it is replaced, given other data, or written in place."""
    return [None if tensor is None else (id(tensor), tensor._version, memories_of([tensor])[0]) for tensor in tensors]


def flags_of(tensors: Iterable[torch.Tensor | None]) -> list[bool | None]:
    return [None if tensor is None else tensor.requires_grad for tensor in tensors]


def stepped_params(optimizer: Any) -> list[Any]:
    """Return the parameters of which ``optimizer`` reads ``.grad``.

    For ``fsdp.optim.WholeParamOptimizer`` these are the model's parameters, not those in its groups.
    """
    own = getattr(optimizer, "stepped_params", None)
    return [param for group in optimizer.param_groups for param in group["params"]] if own is None else list(own())
