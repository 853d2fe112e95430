"""Kinds of state dicts, and a model with every kind of entry."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import Optimizer

from fsdp import FullStateDictConfig, FullyShardedDataParallel, RaggedStateDictConfig, ShardingStrategy, StateDictType
from fsdp.checkpoint import StateDictOptions, get_state_dict
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.sharded import wrap
from tests.harness.strategies import FULL_SHARD

FULL, LOCAL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


KINDS: dict[str, tuple[Any, ...]] = {
    "full": (FULL,),
    "full on CPU": (FULL, FullStateDictConfig(offload_to_cpu=True)),
    "sharded": (SHARDED,),
    "local": (LOCAL,),
    "ragged": (SHARDED, RaggedStateDictConfig()),
}


@contextmanager
def kind_of(model: nn.Module, kind: str) -> Iterator[None]:
    """Set a kind, and ignore warnings about parameters that are not sharded."""
    with warnings.catch_warnings(), FullyShardedDataParallel.state_dict_type(model, *KINDS[kind]):
        warnings.filterwarnings("ignore", "StateDictType.* which is not sharded", UserWarning)
        yield


@contextmanager
def swapping(on: bool = True) -> Iterator[None]:
    """Let `nn.Module` swap tensors instead of copying values."""
    torch.__future__.set_swap_module_params_on_conversion(on)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def full_state(model: nn.Module) -> dict[str, Tensor]:
    with kind_of(model, "full"):
        return model.state_dict()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.again = nn.Linear(5, 5)
        self.again.weight = self.inner.weight
        self.register_buffer("steps", torch.tensor(3))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.scale = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.inner(x)) * self.scale


class Rich(nn.Module):
    """Buffers between parameters, ties, a module registered twice, transposed memory, frozen and ignored parameters,
    and units with fewer rows than ranks.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.norm = nn.BatchNorm1d(5)
        self.blocks = nn.Sequential(Tied(), nn.Sequential(checkpoint_wrapper(Tied())))
        self.left = nn.Linear(5, 3)
        self.right = self.left
        self.image = nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
        self.frozen = nn.Parameter(torch.randn(7), requires_grad=False)
        self.ignored = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        self.register_buffer("table", torch.randn(3, 2))
        self.last = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.right(self.left(self.blocks(self.norm(x)))) + self.image.sum())


def rich(mode: bool, strategy: ShardingStrategy = FULL_SHARD, seed: int = 0, **more: Any) -> FullyShardedDataParallel:
    module = Rich(seed)
    return wrap(module, strategy, mode, wrap_policy=ModuleWrapPolicy({Tied}), ignored_modules=[module.ignored], **more)


def whole(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Copy all parameters, buffers, optimizer state and hyperparameters by name, as tensors."""
    options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
    of_model, of_optimizer = get_state_dict(model, optimizer, options=options)
    everything = {key: value for key, value in {**of_model, **of_optimizer}.items() if value is not None}
    return {key: torch.as_tensor(value).clone() for key, value in everything.items() if not isinstance(value, dict)}
