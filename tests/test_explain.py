"""Hints under uncaught errors of torch that a sharded parameter caused."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from fsdp.runtime.explain import explain
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Unit
from tests.harness.pool import on_ranks


def plain_model() -> nn.Module:
    """Build a unit that stores a tensor whose gradient needs `up`, and returns the input, and a head."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.stored = m.up(x).tanh() @ m.up.weight
        return x

    torch.manual_seed(0)
    part = Unit(forward, up=nn.Linear(5, 47))  # a shape of no other test: a hint names all parameters that fit
    return nn.Sequential(OrderedDict(part=part, head=nn.Sequential(nn.Linear(5, 43))))


def build(**options: Any) -> Any:
    policy = ModuleWrapPolicy({Unit, nn.Sequential})
    return FullyShardedDataParallel(plain_model(), **{"auto_wrap_policy": policy, "use_orig_params": True, **options})


def batch() -> Tensor:
    return torch.ones(2, 5)


def hint_of(program: Callable[[], Any]) -> str:
    """Return the hint for the exception that `program` raises."""
    try:
        program()
    except Exception as error:
        return explain(error)
    raise AssertionError("no exception")


@on_ranks(2)
def test_error_about_the_shape_of_a_shard_is_explained() -> None:
    """Outside of the unit a parameter is 1-D: the hint adds the parameter's name and the remedy to torch's error."""
    model = build()
    weight: Any = max(model.module.head.parameters(), key=Tensor.numel)
    inits = [lambda: nn.init.xavier_uniform_(weight), lambda: weight.norm(dim=1)]
    inits += [lambda: F.linear(torch.ones(2, 3), model.module.part.up.weight)]
    for use in (*inits, lambda: model.module.head[0].weight.grad.norm(dim=1)):
        hint = hint_of(use)
        assert "weight' of " in hint and "is sharded" in hint and "FSDP.summon_full_params(model)" in hint, hint
        assert " of 215 elements" in hint or " of 235 elements" in hint
    with model.summon_full_params(model):
        assert hint_of(lambda: weight.norm(dim=7)) == ""
    whole = build(sharding_strategy=ShardingStrategy.NO_SHARD)
    assert hint_of(lambda: whole.module.head[0].weight.norm(dim=7)) == ""
    assert hint_of(lambda: torch.ones(3).norm(dim=7)) == ""


@pytest.mark.parametrize("flat", [False, True])
@on_ranks(2)
def test_backward_that_reads_a_released_parameter_names_it(flat: bool) -> None:
    """Torch's error is only about a variable "at version 1073741824"."""
    model = build(use_orig_params=not flat)
    model(batch())
    hint = hint_of(lambda: model.module.part.stored.sum().backward())
    assert "needs 'up.weight' of " in hint and "fsdp.mark_side_output(tensor)" in hint, hint
    model = build(use_orig_params=not flat)
    model.module.head.set_unshard_in_backward(False)
    x = batch().requires_grad_()
    hint = hint_of(lambda: model(x).sum().backward())
    assert "needs '0.weight' of " in hint and "set_unshard_in_backward(False)" in hint, hint


@on_ranks(2)
def test_plain_optimizer_state_for_flat_parameters_is_explained() -> None:
    model, plain = build(use_orig_params=False), plain_model()
    optimizer, plain_optimizer = (torch.optim.SGD(module.parameters()) for module in (model, plain))
    hint = hint_of(lambda: optimizer.load_state_dict(plain_optimizer.state_dict()))
    assert "FSDP.optim_state_dict_to_load(model, optimizer, saved)" in hint
    assert hint_of(lambda: plain_optimizer.load_state_dict(optimizer.state_dict())) == ""


@on_ranks(2)
def test_file_of_sharded_tensors_that_torch_refuses_is_explained() -> None:
    model, file = build(), io.BytesIO()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates ShardedTensor
        torch.save(state, file)
    file.seek(0)
    assert "weights_only=False" in hint_of(lambda: torch.load(file))


@on_ranks(2)
def test_python_prints_the_hint_under_the_traceback() -> None:
    model = build()
    assert hint_of(lambda: model.module.head(batch()[:, :3], 2, 3)) == "", "an error of the program"
    assert hint_of(lambda: FullyShardedDataParallel(model.module.head[0].weight)) == "", "an error of this package"
    weight = model.module.head[0].weight
    try:
        weight.norm(dim=7)
    except IndexError as error:
        with contextlib.redirect_stderr(io.StringIO()) as printed:
            sys.excepthook(type(error), error, error.__traceback__)
    lines = printed.getvalue().splitlines()
    assert "IndexError" in lines[-2] and lines[-1].startswith("fsdp: parameter '0.weight' of ")
