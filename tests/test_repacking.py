"""Modules that repack their frozen weights in evaluation, as bitsandbytes' `Linear4bit` does on CPUs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp import ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_parameters, wrap
from tests.harness.strategies import FULL, GRAD_OP


class Repacking(nn.Module):
    """A layer whose first evaluation transposes the weight in memory, which later forwards expect."""

    def __init__(self, *, frozen: bool = True, to: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.float64), requires_grad=not frozen)
        self.scale = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.packed, self.to_dtype = False, to

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training and not self.packed:
            self.weight.data = self.weight.detach().t().contiguous().to(self.to_dtype).reshape(-1, 1)
            self.packed = True
        weight = self.weight.reshape(5, 3).t() if self.packed else self.weight
        return (x @ weight.to(x.dtype).t()) * self.scale


def build(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Repacking(**options), nn.Linear(3, 5, dtype=torch.float64), Repacking(**options))


@pytest.mark.parametrize("strategy", [FULL, GRAD_OP])
@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_a_repacked_frozen_weight_goes_to_the_shards(use_orig_params: bool, strategy: ShardingStrategy) -> None:
    """Evaluation and training equal those of the plain model, bit for bit, before and after the change."""
    plain = build()
    model = wrap(copy.deepcopy(plain), strategy, use_orig_params, wrap_policy=ModuleWrapPolicy({Repacking}))
    x = torch.arange(10.0, dtype=torch.float64).reshape(2, 5)
    sgd = [torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1) for each in (plain, model)]
    for number in range(3):
        outputs = []
        for each, optimizer in zip((plain, model), sgd):
            each.eval()
            for context in (torch.no_grad(), torch.inference_mode()):
                with context:
                    outputs.append(each(x).clone())
            each.train()
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3]), number
    packed = {name: value.reshape(-1) for name, value in plain.state_dict().items()}
    assert_bit_equal({name: value.reshape(-1) for name, value in full_parameters(model).items()}, packed)


@on_ranks(2)
def test_other_replacements_are_errors() -> None:
    """A trainable weight, other sizes of elements, and a forward with gradients."""
    for options, grad in (({"frozen": False}, False), ({"to": torch.float32}, False), ({}, True)):
        model = wrap(build(**options), FULL, True, wrap_policy=ModuleWrapPolicy({Repacking})).eval()
        with (
            torch.set_grad_enabled(grad),
            pytest.raises(RuntimeError, match="was given other data inside of a forward"),
        ):
            model(torch.ones(2, 5, dtype=torch.float64))
