"""A chain of units under a root with layers at both ends; all units may be one checkpointed segment."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 5


class Part(nn.Module):
    """One unit of a chain."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Outer(nn.Module):
    """A unit with nested units, the last of which ends together with it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), nn.Sequential(Part(), Part())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))


class Chain(nn.Module):
    """A chain of these units; `segment` ("reentrant", "non-reentrant") checkpoints all units as one."""

    def __init__(self, *units: nn.Module, segment: str = "") -> None:
        super().__init__()
        self.stem, self.units, self.head = nn.Linear(WIDTH, WIDTH), nn.Sequential(*units), nn.Linear(WIDTH, 3)
        self.segment = segment

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.segment:
            return self.head(checkpoint(self.units, x, use_reentrant=self.segment == "reentrant"))
        return self.head(self.units(x))


def batch(step: int) -> Tensor:
    """Return the batch of this rank."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(2, WIDTH, generator=generator).requires_grad_()
