"""`fsdp.describe`: the figures equal the model's, and remarks name probable mistakes."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.optim import HostOptimizer
from fsdp.tools.text import Report, in_bytes
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Stacked
from tests.harness.pool import on_ranks

WIDTH = 7


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


class Net(Stacked):
    """A frozen embedding tied to the output, two equal blocks, and a third partly frozen."""

    def __init__(self) -> None:
        super().__init__(5, WIDTH, (Block() for _ in range(3)), norm=True)
        self.head.weight.requires_grad_(False)
        self.blocks[2].get_submodule("linear").requires_grad_(False)


def _wrapped(module: nn.Module, *kinds: type[nn.Module], **options: Any) -> FullyShardedDataParallel:
    policy = ModuleWrapPolicy(kinds) if kinds else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(module, auto_wrap_policy=policy, **options)


@on_ranks(2)
def test_figures_equal_those_of_parameters_and_gradients() -> None:
    for options in ({}, {"use_orig_params": True}, {"sharding_strategy": ShardingStrategy.NO_SHARD}):
        model = _wrapped(Net(), Block, **options)
        found = fsdp.describe(model)
        model(torch.ones(2, 3, dtype=torch.long)).sum().backward()
        params = list(model.parameters())
        buckets = [bucket for unit in fsdp.shard_info(model) for bucket in unit.buckets]
        assert sum(unit.param_nbytes for unit in found.units) == sum(bucket.flat_param.nbytes for bucket in buckets)
        if not options.get("use_orig_params"):
            grads = [p.grad.nbytes for p in params if p.grad is not None]
            assert sum(unit.grad_nbytes for unit in found.units) == sum(grads)
        assert found.numel == fsdp.num_params(model) == fsdp.num_params(Net())
        frozen = found.numel - fsdp.num_params(model, only_trainable=True)
        assert sum(unit.frozen_numel for unit in found.units) == frozen
        assert [unit.name for unit in found.units] == ["", "blocks.0", "blocks.1", "blocks.2"]
        assert [unit.depth for unit in found.units] == [0, 1, 1, 1]
        padded = sum(bucket.layout.padded_numel for bucket in buckets)
        assert found.numel + sum(unit.padding for unit in found.units) == padded
        if "sharding_strategy" in options:
            assert {(unit.shards, unit.full_nbytes) for unit in found.units} == {(1, 0)}
            assert not any("gathered" in remark for remark in found.remarks)
    kept = _wrapped(Net(), Block, reshard_after_forward=False)
    assert {unit.strategy for unit in fsdp.describe(kept).units} == {"FULL_SHARD, kept after forward"}


@on_ranks(2)
def test_units_of_a_host_optimizer_say_which_states_they_have() -> None:
    model = _wrapped(Net(), Block, cpu_offload=CPUOffload(offload_params=True))
    optimizer = HostOptimizer(model, torch.optim.AdamW)
    assert all(unit.strategy.endswith("on the host (0 B of states)") for unit in fsdp.describe(model).units)
    model(torch.ones(2, 3, dtype=torch.long)).sum().backward()
    optimizer.step()
    for unit in fsdp.describe(model).units:
        trained = unit.grad_nbytes  # two states for each trained number, and the step
        assert unit.strategy == f"FULL_SHARD, stepped on the host ({in_bytes(2 * trained + 4)} of states)", unit
    of_one = _wrapped(Net(), use_orig_params=True, cpu_offload=CPUOffload(offload_params=True))  # a unit of several
    of_several = HostOptimizer(of_one, torch.optim.AdamW)
    of_one(torch.ones(2, 3, dtype=torch.long)).sum().backward()
    of_several.step()
    states = sum(value.nbytes for state in of_several.state.values() for value in state.values())
    assert f"({in_bytes(states)} of states)" in fsdp.describe(of_one).units[0].strategy
    del optimizer
    assert {unit.strategy for unit in fsdp.describe(model).units} == {"FULL_SHARD"}


def test_tools_refuse_arguments_that_are_no_model_or_no_parameter() -> None:
    with pytest.raises(ValueError, match=r"describe\(\) is for wrapped models, and nothing in this Net is: wrap it"):
        fsdp.describe(Net())
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    tools: list[Callable[[Any], Any]] = [
        fsdp.describe,
        fsdp.num_params,
        fsdp.shard_info,
        lambda model: fsdp.param_groups(model, weight_decay=0.1),
        lambda model: fsdp.trace(model).__enter__(),
        lambda model: next(iter(fsdp.join(model, []))),
        lambda model: fsdp.FullyShardedDataParallel.optim_state_dict(model, optimizer),
    ]
    wrong = {"a str": "x", "a NoneType": None, "a SGD": optimizer, "the class Linear: make one": nn.Linear}
    for tool, (kind, value) in itertools.product(tools, wrong.items()):
        with pytest.raises(TypeError, match=f"expected a model, an nn.Module, but got {kind}"):
            tool(value)
    for of_tensors in (fsdp.full_tensor, fsdp.full_grad, fsdp.global_shape):
        with pytest.raises(TypeError, match=r"expected a parameter, one of model.parameters\(\), but got a Linear"):
            of_tensors(nn.Linear(1, 1))  # type: ignore[operator]
    with pytest.raises(TypeError, match=r"group\(\) expects a list of modules, .* got a Linear"):
        fsdp.FullyShardedDataParallel.group(nn.Linear(1, 1))  # type: ignore[arg-type]


@on_ranks(2)
def test_remarks_name_probable_mistakes() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [
        _wrapped(Net()),
        _wrapped(Net(), nn.LSTM),
        _wrapped(Net(), nn.LayerNorm),
        nn.ModuleList([_wrapped(Block()), nn.Linear(2, 3)]),
        _wrapped(nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300)), nn.Linear),
    ]
    whole, nothing, most, unmanaged, fine = ("\n".join(fsdp.describe(model).remarks) for model in models)
    text = str(fsdp.describe(_wrapped(Net(), Block, mixed_precision=precision)))
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    dtypes = "float32 -> bfloat16 -> float32"
    assert rows[1] == ["(root) Net", "49", "18.9%", "1", "71%", "FULL_SHARD", "2", dtypes, "100 B", "28 B", "100 B"]
    assert rows[2][:6] == ["blocks.0 to blocks.1: 2 x Block", "70", "27.0%", "0", "0%", "FULL_SHARD"]
    assert rows[3][:6] == ["blocks.2 Block", "70", "27.0%", "0", "80%", "FULL_SHARD"]
    assert rows[4][:2] == ["4 units", "259"]
    assert "* 3 units are below 100 kB (blocks.0, blocks.1, blocks.2): gathering so little" in text
    hint = "; auto_wrap_policy=ModuleWrapPolicy({Layer}) makes a unit"
    for one_unit in (whole, nothing):
        assert f"the whole model is one unit, gathered at once: no policy, or none that matched{hint}" in one_unit
    assert f"and most of the model is gathered at once: wrap more of the modules in it{hint}" in most
    assert unmanaged.startswith("all that is wrapped is one unit, gathered at once")
    assert "9 numbers are in parameters that no unit owns: every rank holds all of them" in unmanaged
    assert fine == ""


def test_format_of_sizes_and_tables() -> None:
    sizes = [0, 999, 1000, 999_400, 999_600, 12_345_678, 7_100_000_000, 2_500_000_000_000]
    assert [in_bytes(size) for size in sizes] == [
        *("0 B", "999 B", "1.00 kB", "999 kB", "1.00 MB", "12.3 MB", "7.10 GB", "2.50 TB")
    ]

    class Small(Report):
        def _parts(self) -> tuple[list[str], list[list[str]], list[str]]:
            return ["above"], [["a", "bc"], ["  def", "1"], ["g", "234"]], ["* below"]

    assert str(Small()) == repr(Small()) == "above\na       bc\n  def    1\ng      234\n* below"


def test_unknown_name_of_the_package_raises() -> None:
    with pytest.raises(AttributeError, match="module 'fsdp' has no attribute 'nothing'"):
        fsdp.nothing  # type: ignore[attr-defined]  # noqa: B018
