"""A chain of units under a root with layers at both ends; all units may be one checkpointed segment."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.harness.models import in_turn

WIDTH = 5


class Part(nn.Module):
    """One unit of a chain."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Outer(nn.Sequential):
    """A unit with nested units, the last of which ends together with it."""

    def __init__(self) -> None:
        super().__init__(OrderedDict(before=nn.Linear(WIDTH, WIDTH), inner=nn.Sequential(Part(), Part())))


class Chain(nn.Module):
    """A chain of these units; `segment` ("reentrant", "non-reentrant") checkpoints all units as one."""

    def __init__(self, *units: nn.Module, segment: str = "") -> None:
        super().__init__()
        self.stem, self.units, self.head = nn.Linear(WIDTH, WIDTH), nn.Sequential(*units), nn.Linear(WIDTH, 3)
        self.segment = segment

    def forward(self, x: Tensor) -> Tensor:
        return self.head(in_turn([self.units], self.stem(x), self.segment or "none"))


def batch(step: int) -> Tensor:
    """Return the batch of this rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(2, WIDTH, generator=generator).requires_grad_()
