"""A small model whose units' switches are set."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.chains import Part
from tests.harness.twin import Twin


class Net(nn.Sequential):
    def __init__(self) -> None:
        embed, layers = nn.Embedding(10, 6), nn.Sequential(Part(6), Part(6), Part(6))
        super().__init__(OrderedDict(embed=embed, layers=layers, head=nn.Linear(6, 2)))


def build(**options: Any) -> Any:
    torch.manual_seed(4)
    policy = ModuleWrapPolicy({Part, nn.Embedding})
    return FullyShardedDataParallel(Net(), auto_wrap_policy=policy, **{"use_orig_params": True, **options})


def batch(step: int) -> Tensor:
    """Return a batch, equal on every rank."""
    return torch.randint(10, (4,), generator=torch.Generator().manual_seed(step))


def per_rank(step: int, rank: int) -> Tensor:
    return torch.randint(10, (4,), generator=torch.Generator().manual_seed(100 * step + rank))


def make_twin(**options: Any) -> Twin:
    """Return models that have one batch on all ranks."""

    def sgd(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9)

    def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
        return model(batch(step)).square().mean()

    model = build(**options)
    torch.manual_seed(4)
    return Twin(model, Net(), loss_of, sgd, ranks=1)
