"""A small model whose parameters users write to, wrapped and plain."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.sharded import wrap
from tests.harness.strategies import Mode
from tests.harness.summoned import pieces

summon = FullyShardedDataParallel.summon_full_params


class Layer(nn.Module):
    """A linear layer whose forward calls a hook."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.inside: Callable[[], Any] = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        self.inside()
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Two layers that become units, and a root with further parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(5, 7), Layer(7, 4)])
        self.head = nn.Linear(4, 3)
        self.penalty = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        x = self.head(x)
        if self.penalty:
            # parameters outside of the layers' units
            own = [param for name, param in self.named_parameters() if "layers" not in name]
            assert {param.dtype for param in own} == {x.dtype}
            x = x + self.penalty * sum(param.square().sum() for param in own)
        return x


def build() -> Net:
    torch.manual_seed(3)
    return Net()


def pair(mode: Mode, **options: Any) -> tuple[Net, FullyShardedDataParallel]:
    return build(), wrap(build(), *mode, wrap_policy=ModuleWrapPolicy({Layer}), **options)


def layer_of(model: nn.Module, index: int) -> Any:
    layer = model.layers[index]
    return layer.module if isinstance(layer, FullyShardedDataParallel) else layer


def batch(seed: int = 0) -> Tensor:
    """Return a batch, equal on every rank, so that the mean of the gradients equals each of them."""
    return torch.randn(2, 5, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    return model(batch(seed)).square().mean()


def local_part(model: nn.Module, param: Any, name: str, value: Tensor) -> Tensor:
    """Return the elements of `value` (of the parameter `name`) that `param` holds on this rank."""
    if param.shape == value.shape:
        return value
    return pieces(model, {name: value})[name]
