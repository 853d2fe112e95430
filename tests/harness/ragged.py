"""Dense tensors of random shapes and memory orders."""

from __future__ import annotations

import math
import random

import torch
from torch import Tensor

from fsdp.flat.layout import contiguous_stride


def random_tensor(rng: random.Random) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape and strides of a dense tensor: up to five dimensions, sizes of 1 often and 0 rarely, any memory
    order.
    """
    shape = tuple(rng.choice((1, 1, 2, 3, 4, 5, 7) if rng.random() > 0.02 else (0,)) for _ in range(rng.randrange(6)))
    if rng.random() < 0.5:
        return shape, contiguous_stride(shape)
    order = rng.sample(range(len(shape)), len(shape))
    in_order = contiguous_stride(tuple(shape[dim] for dim in order))
    return shape, tuple(in_order[order.index(dim)] for dim in range(len(shape)))


def numbered(shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
    """Return a tensor whose every element is the offset of that element in memory."""
    return torch.arange(math.prod(shape)).as_strided(shape, stride)
