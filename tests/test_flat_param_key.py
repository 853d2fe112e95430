"""`flat_param_key` divides flat parameters by label, and `fsdp.param_groups` returns groups for an optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

import fsdp
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Net
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_gradients, full_parameters
from tests.harness.strategies import FULL_SHARD, NO_SHARD

MATRICES = 0.3  # the weight decay of parameters of two or more dimensions


class Block(nn.Module):
    """Sizes that do not divide, a weight that is not row-major, a tied weight, a scalar and a second dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 5, 2)
        self.conv.weight = nn.Parameter(self.conv.weight.detach().transpose(0, 2).contiguous().transpose(0, 2))
        self.norm = nn.LayerNorm(5)
        self.one, self.two = nn.Linear(5, 5), nn.Linear(5, 5)
        self.two.weight = self.one.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.ones(5, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(torch.tanh(self.one(self.norm(self.conv(x).mean(-1))))) * self.gain * self.wide.to(x.dtype)
        return x + y.sum(-1).view(-1, 1, 1)


def plain_model() -> nn.Module:
    blocks = nn.Sequential(Block(), Block())
    return Net(lambda m, x: m.head(m.blocks(x).mean(-1)), blocks=blocks, head=nn.Linear(3, 2))


def is_matrix(name: str, param: nn.Parameter) -> bool:
    return param.dim() > 1


def build(strategy: ShardingStrategy = FULL_SHARD, **options: Any) -> Any:
    """Wrap a model with one flat parameter per unit, dtype and label, or with original parameters."""
    torch.manual_seed(3)
    options = {"flat_param_key": None if options.get("use_orig_params") else is_matrix, **options}
    return FSDP(plain_model(), sharding_strategy=strategy, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW(fsdp.param_groups(model, weight_decay=MATRICES), lr=0.05)


def backward(model: Any, step: int) -> None:
    x = torch.randn(4, 3, 6, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
    model(x).square().mean().backward()


def train(model: Any, optimizer: AdamW, steps: range) -> None:
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("world_size", "strategy"), [(2, FULL_SHARD), (3, FULL_SHARD), (2, NO_SHARD)])
@on_ranks("world_size")
def test_divided_flat_parameters_train_as_original_parameters(world_size: int, strategy: ShardingStrategy) -> None:
    """Six steps of AdamW with and without weight decay, bit for bit."""
    flat, original = build(strategy), build(strategy, use_orig_params=True)
    backward(flat, 0)
    backward(original, 0)
    assert_bit_equal(full_gradients(flat), full_gradients(original))
    for model in (flat, original):
        model.zero_grad()
        train(model, optimizer_of(model), range(6))
    assert_bit_equal(full_parameters(flat), full_parameters(original))


@on_ranks(2)
def test_unit_has_a_flat_parameter_for_each_dtype_and_label() -> None:
    """A rule is called with names and full shapes of the plain model; frozen parameters are in no group."""
    model = build()
    names = [name.rpartition(".")[2] for name, _ in model.module.blocks[0].named_parameters()]
    assert names == ["_flat_param", "_flat_param_1", "_flat_param_2"]  # matrices, vectors, and the second dtype
    matrices, vectors = fsdp.param_groups(model, weight_decay=MATRICES)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (MATRICES, 0.0)
    assert (len(matrices["params"]), len(vectors["params"])) == (3, 5)
    shapes: dict[str, torch.Size] = {}

    def rule(name: str, shape: torch.Size) -> Mapping[str, Any]:
        shapes[name] = shape
        return {"weight_decay": MATRICES if len(shape) > 1 else 0.0}

    assert fsdp.param_groups(model, rule) == [matrices, vectors]
    assert shapes == {name: param.shape for name, param in plain_model().named_parameters()}
    by_name = FSDP(plain_model(), flat_param_key=lambda name, param: "head" in name)
    groups = fsdp.param_groups(by_name, lambda name, shape: {"lr": 0.5 if "head" in name else 1.0})
    assert [(group["lr"], len(group["params"])) for group in groups] == [(1.0, 2), (0.5, 1)]
    for handle in model._fsdp_unit.handles:  # of the head
        handle.flat_param.requires_grad_(False)
    assert [len(group["params"]) for group in fsdp.param_groups(model, weight_decay=MATRICES)] == [2, 4]


@on_ranks(2)
def test_invalid_labels_and_rules_are_refused() -> None:
    with pytest.raises(TypeError, match=r"flat_param_key must be callable, .* but got True"):
        FSDP(plain_model(), flat_param_key=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"with use_orig_params=True there are none: leave one of the two out"):
        FSDP(plain_model(), flat_param_key=is_matrix, use_orig_params=True)
    with pytest.raises(TypeError, match=r"a hashable label, .* but for 'blocks.0.gain' it returned \["):
        FSDP(plain_model(), flat_param_key=lambda name, param: [name])  # type: ignore[arg-type,return-value]
    model = build()
    both = {"rule": lambda name, shape: {}, "weight_decay": 0.1}
    for got, arguments in (("none", {}), ("both", both)):
        with pytest.raises(TypeError, match=rf"takes either a rule or weight_decay=, and got {got} of them"):
            fsdp.param_groups(model, **arguments)
    with pytest.raises(TypeError, match=r"a dict of options .* for 'head.weight' it returned 3"):
        fsdp.param_groups(model, lambda name, shape: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match=r"'.*conv.weight' and '.*one.weight' are in one flat parameter"):
        fsdp.param_groups(model, lambda name, shape: {"lr": float(shape[0]) if len(shape) == 3 else 0.0})
