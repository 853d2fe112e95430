"""A small model in every mode, and the plain model that takes the same steps on the batches of all ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp import FullyShardedDataParallel, shard_info
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.sharded import wrap
from tests.harness.small import WIDTH, batch
from tests.harness.strategies import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, Mode
from tests.harness.twin import Twin

summon = FullyShardedDataParallel.summon_full_params


class Net(nn.Module):
    """Three units of one layer. The root owns a frozen, a transposed and an unused parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.shift = nn.Parameter(torch.rand(WIDTH), requires_grad=False)
        self.mix = nn.Parameter(torch.rand(WIDTH, WIDTH).t())
        self.register_buffer("scale", torch.rand(1))
        self.never = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return F.linear(x * self.gain * self.scale + self.shift, self.mix)

    def generate(self, x: Tensor, *, steps: int = 2) -> Tensor:
        for _ in range(steps):
            x = self.forward(x)
        return x


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def build(mode: Mode, module: nn.Module | None = None, **options: Any) -> Any:
    if dist.get_world_size() > 2:  # the plain model's bits need sums in rank order, which an all-reduce does not have
        os.environ["FSDP_COLLECTIVES"] = "direct"
    options = {"wrap_policy": ModuleWrapPolicy({nn.Linear}), **options}
    return wrap(net() if module is None else module, mode.strategy, mode.use_orig_params, **options)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with powers of two: a step has the same bits on a flat vector as on each parameter, fused or not."""
    return torch.optim.SGD(module.parameters(), lr=0.125, momentum=0.5)


def loss_of(model: nn.Module, step: int, rank: int | None = None) -> Tensor:
    return model(batch(step, rank).to(next(model.buffers()).dtype)).square().mean()


def backward(model: nn.Module, step: int, rank: int | None = None) -> None:
    loss_of(model, step, rank).backward()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    backward(model, step)
    optimizer.step()


def make_twin(mode: Mode, module: nn.Module | None = None) -> Twin:
    return Twin(build(mode, module), net(), loss_of, sgd)


def pieces(model: nn.Module, whole: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Return this rank's part of `whole` by name, in memory order."""
    found = {}
    for unit in shard_info(model):
        for bucket in unit.buckets:
            for record, piece in zip(bucket.layout.params, bucket.pieces, strict=True):
                value = whole.get(unit.full_name(record))
                if value is not None:
                    ordered = torch.empty_strided(record.shape, record.stride, dtype=value.dtype).copy_(value)
                    part = ordered.as_strided((record.numel,), (1,))[piece.start : piece.end]
                    found[unit.full_name(record)] = part
    return found


def enter(*args: Any, **kwargs: Any) -> None:
    with summon(*args, **kwargs):
        pass


def modes(turn: bool) -> list[tuple[int, Mode]]:
    """Return world sizes with modes: full sharding on two ranks has both values of `use_orig_params`.

    One rank shards nothing, and three ranks differ in how parameters are cut: one mode each is enough.
    """
    two = [Mode(FULL_SHARD, False), Mode(FULL_SHARD, True), Mode(SHARD_GRAD_OP, turn), Mode(NO_SHARD, not turn)]
    return [(1, Mode(FULL_SHARD, not turn)), *((2, mode) for mode in two), (3, Mode(FULL_SHARD, turn))]


def modes_of_two_ranks(turn: bool) -> list[Mode]:
    return [mode for world_size, mode in modes(turn) if world_size == 2]


class Problem(Exception):
    pass
