"""Hints under uncaught errors of torch that a sharded parameter has caused."""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy, StateDictType
from fsdp.runtime.explain import explain
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.pool import run_ranks


class Storing(nn.Module):
    """Stores a tensor whose gradient needs `up`, and returns what needs nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        self.stored = self.up(x).tanh() @ self.up.weight
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.part, self.head = Storing(), nn.Sequential(nn.Linear(5, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


def build(**options: Any) -> Any:
    policy = ModuleWrapPolicy({Storing, nn.Sequential})
    return FullyShardedDataParallel(Net(), **{"auto_wrap_policy": policy, "use_orig_params": True, **options})


def batch() -> Tensor:
    return torch.ones(2, 5)


def hint_of(program: Callable[[], Any]) -> str:
    """The hint for what `program` raises."""
    try:
        program()
    except Exception as error:
        return explain(error)
    raise AssertionError("it raised nothing")


def _uses_outside() -> None:
    model = build()
    weight: Any = max(model.module.head.parameters(), key=Tensor.numel)
    inits = [lambda: nn.init.xavier_uniform_(weight), lambda: weight.norm(dim=1)]
    inits += [lambda: F.linear(torch.ones(2, 3), model.module.part.up.weight)]
    for use in (*inits, lambda: model.module.head[0].weight.grad.norm(dim=1)):
        said = hint_of(use)
        assert "weight' of " in said and "is sharded" in said and "FSDP.summon_full_params(model)" in said, said
        assert " of 15 elements" in said or " of 35 elements" in said
    with model.summon_full_params(model):
        assert hint_of(lambda: weight.norm(dim=7)) == ""
    whole = build(sharding_strategy=ShardingStrategy.NO_SHARD)
    assert hint_of(lambda: whole.module.head[0].weight.norm(dim=7)) == ""
    assert hint_of(lambda: torch.ones(3).norm(dim=7)) == ""


def test_an_error_about_the_shape_of_a_shard_is_explained() -> None:
    """Outside of its unit a parameter is 1-D: torch's error about that gets the parameter's name and the remedy."""
    run_ranks(2, _uses_outside)


def _reads_of_released_parameters(flat: bool) -> None:
    model = build(use_orig_params=not flat)
    model(batch())
    said = hint_of(lambda: model.module.part.stored.sum().backward())
    assert "needs 'up.weight' of " in said and "fsdp.mark_side_output(tensor)" in said, said
    model = build(use_orig_params=not flat)
    model.module.head.set_unshard_in_backward(False)
    x = batch().requires_grad_()
    said = hint_of(lambda: model(x).sum().backward())
    assert "needs '0.weight' of " in said and "set_unshard_in_backward(False)" in said, said


def test_a_backward_that_reads_a_released_parameter_names_it() -> None:
    """Instead of a variable "at version 1073741824" alone, in both modes."""
    for flat in (False, True):
        run_ranks(2, _reads_of_released_parameters, flat)


def _state_of_a_plain_optimizer() -> None:
    model, plain = build(use_orig_params=False), Net()
    optimizer, other = (torch.optim.SGD(module.parameters()) for module in (model, plain))
    said = hint_of(lambda: optimizer.load_state_dict(other.state_dict()))
    assert "FSDP.optim_state_dict_to_load(model, optimizer, saved)" in said
    assert hint_of(lambda: other.load_state_dict(optimizer.state_dict())) == ""


def test_the_state_of_a_plain_optimizer_in_one_of_flat_parameters_is_explained() -> None:
    run_ranks(2, _state_of_a_plain_optimizer)


def _loads_sharded_tensors() -> None:
    model, file = build(), io.BytesIO()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch deprecates ShardedTensor
        torch.save(state, file)
    file.seek(0)
    assert "weights_only=False" in hint_of(lambda: torch.load(file))


def test_a_file_of_sharded_tensors_that_torch_refuses_is_explained() -> None:
    run_ranks(2, _loads_sharded_tensors)


def _own_errors_and_printing() -> None:
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


def test_python_prints_the_hint_under_the_traceback() -> None:
    run_ranks(2, _own_errors_and_printing)


def _optimizers_see_ordinary_parameters() -> None:
    model = build()
    params = list(model.parameters())
    assert {type(param) for param in params} == {nn.Parameter}
    assert sum(param.numel() for param in params) < sum(param.numel() for param in Net().parameters())
    for param in params:
        assert param.shape == (param.numel(),) and torch.isfinite(param.sum())
    optimizer = torch.optim.AdamW(params)
    model(batch()).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert all(param.grad is None or param.grad.shape == param.shape for param in params)


def test_a_sharded_parameter_is_an_ordinary_one_for_optimizers() -> None:
    """With original parameters, shape, number of elements and arithmetic are those of this rank's part. The exact type
    lets optimizers take their kernels for many tensors, and no call of Python is in between."""
    run_ranks(2, _optimizers_see_ordinary_parameters)
