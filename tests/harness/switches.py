"""A small model whose units' switches are set, and its plain twin."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.chains import Part

FULL, GRAD_OP, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD
HYBRID, HYBRID_2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2


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
