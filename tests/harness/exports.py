"""A model with buffers, tied and ignored parameters, whose weights are exported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Stacked
from tests.harness.sharded import wrap
from tests.harness.strategies import FULL

WIDTH, WORDS = 7, 13


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.linear(x)) * self.conv.weight.sum()


class Model(Stacked):
    """A head tied to the embedding, running statistics, and a parameter that the wrapper ignores."""

    def __init__(self) -> None:
        super().__init__(WORDS, WIDTH, (Block() for _ in range(3)))
        self.ignored = nn.Parameter(torch.ones(3))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * self.ignored.sum()


def build(
    use_orig_params: bool, strategy: ShardingStrategy = FULL, *, as_it_is: bool = False, **options: Any
) -> FullyShardedDataParallel:
    torch.manual_seed(11)
    model = Model()
    if not as_it_is:
        options["ignored_states"] = [model.ignored]
    return wrap(model, strategy, use_orig_params, wrap_policy=ModuleWrapPolicy({Block}), **options)


def train(model: nn.Module, steps: int = 1) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.numel()], lr=0.01)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)  # equal batches, so that running statistics are equal
        model(torch.randint(WORDS, (4,), generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def expected(model: nn.Module, dtype: torch.dtype | None) -> dict[str, Tensor]:
    state = model.state_dict()
    return {n: v.to(dtype) if dtype is not None and v.is_floating_point() else v for n, v in state.items()}


def copied(stream: Any) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in stream}
