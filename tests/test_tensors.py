"""Full parameters and gradients of sharded parameters."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision
from tests.harness.oracle import assert_bit_equal, clean_name
from tests.harness.pool import on_ranks
from tests.harness.strategies import FULL, GRAD_OP, NO_SHARD
from tests.harness.switches import Net, batch, build


def plain_net() -> Net:
    torch.manual_seed(4)
    return Net()


def train(model: nn.Module) -> None:
    model(batch(0)).square().mean().backward()


@on_ranks(2)
def test_full_tensor_returns_full_parameters_and_gradients() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for options in ({"sharding_strategy": FULL}, {"sharding_strategy": NO_SHARD}, {"mixed_precision": precision}):
        model, plain = build(**options), plain_net()
        theirs = dict(plain.named_parameters())
        names = {clean_name(name): param for name, param in model.named_parameters()}
        assert {name: fsdp.global_shape(p) for name, p in names.items()} == {
            name: p.shape for name, p in theirs.items()
        }
        assert_bit_equal({name: fsdp.full_tensor(param) for name, param in names.items()}, theirs)
        assert all(fsdp.full_grad(param) is None for param in names.values())
        train(model)
        if "mixed_precision" not in options:
            train(plain)
            found = {name: fsdp.full_grad(param) for name, param in names.items()}
            assert_bit_equal(found, {name: param.grad for name, param in theirs.items()})
        names["head.bias"].grad = None
        assert fsdp.full_grad(names["head.bias"]) is None
        assert fsdp.num_params(model) == fsdp.num_params(plain) == sum(p.numel() for p in plain.parameters())
        model.layers.requires_grad_(False)
        plain.layers.requires_grad_(False)
        assert fsdp.num_params(model, only_trainable=True) == fsdp.num_params(plain, only_trainable=True)
        for call in (fsdp.full_tensor, fsdp.full_grad):
            words = rf"{call.__name__}\(\) in the middle of"
            with model.summon_full_params(model), pytest.raises(RuntimeError, match=words):
                call(next(iter(model.parameters())))


@on_ranks(2)
def test_full_tensor_splits_flat_parameters() -> None:
    model, plain = build(use_orig_params=False, sharding_strategy=GRAD_OP), plain_net()
    train(model)
    train(plain)
    wanted = torch.cat([p.flatten() for p in plain.head.parameters()])
    flat = model._flat_param
    assert fsdp.global_shape(flat) == (wanted.numel(),)
    assert torch.equal(fsdp.full_tensor(flat), wanted)
    found = fsdp.full_grad(flat)
    assert found is not None
    assert torch.equal(found, torch.cat([p.grad.flatten() for p in plain.head.parameters()]))  # type: ignore[union-attr]
    assert fsdp.num_params(model) == fsdp.num_params(plain)
    with pytest.raises(ValueError, match=r"'head.weight' and 'head.bias' are in one flat parameter"):
        fsdp.param_groups(model, weight_decay=0.1)


@on_ranks(2)
def test_parameters_outside_of_units_are_returned_unchanged() -> None:
    ignored = nn.Linear(3, 2)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(2, 3), ignored), ignored_modules=[ignored])
    assert fsdp.global_shape(ignored.weight) == (2, 3) and fsdp.full_grad(ignored.weight) is None
    copied = fsdp.full_tensor(ignored.weight)
    assert torch.equal(copied, ignored.weight) and copied.data_ptr() != ignored.weight.data_ptr()
    assert fsdp.num_params(model) == 9 + 8
