"""A small network, its training, and a process group without processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp import FullyShardedDataParallel
from tests.harness.twin import average, values

WIDTH = 5


is_2_13 = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="known of this version of torch")


class StandIn:
    """The members of a process group that a constructor reads."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        modules = [m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.layers = nn.Sequential(*modules)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def net(layers: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(layers)


def build(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    """Wrap without the warning that one rank does not shard."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FullyShardedDataParallel: the group has one rank", UserWarning)
        return FullyShardedDataParallel(module, **options)


def torchs(module: nn.Module, strategy: str = "FULL_SHARD", blocks: Iterable[type] = (), **options: Any) -> Any:
    """Wrap with torch's FSDP1, and each module of the classes `blocks`; without the warning about NO_SHARD's end."""
    from torch.distributed import fsdp

    if blocks:
        options["auto_wrap_policy"] = fsdp.wrap.ModuleWrapPolicy(set(blocks))
    kind = fsdp.ShardingStrategy[strategy]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fsdp.FullyShardedDataParallel(module, sharding_strategy=kind, device_id=torch.device("cpu"), **options)


def batch(step: int, rank: int | None = None) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def sgd(module: nn.Module) -> Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module, optimizer: Optimizer | None = None, first: int = 0, steps: int = 2, rank: int | None = None
) -> None:
    optimizer = optimizer or sgd(model)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()


def train_plain(module: nn.Module, world_size: int, first: int = 0, steps: int = 2) -> dict[str, Tensor]:
    """Train a plain model with the mean of the gradients of all ranks, summed in rank order. Return the parameters."""
    optimizer = sgd(module)
    for step in range(first, first + steps):
        average(module, world_size, lambda rank: module(batch(step, rank)).square().mean().backward())  # noqa: B023
        optimizer.step()
    return values(module)


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Return the type and message of the error that `function` raises; warnings are ignored."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(*args, **kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"
