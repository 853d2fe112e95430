"""Switches of FSDP2: the same calls on every unit give the gradients of torch's ``fully_shard``."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from fsdp import FullyShardedDataParallel
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Net
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_gradients


def plain() -> Any:
    """Build two layers, of which a rank may leave the first out of the result."""

    def forward(m: Any, inputs: Tensor, skips: bool) -> Tensor:
        hidden = m.first(inputs)
        return m.second(inputs if skips else hidden)

    torch.manual_seed(3)
    return Net(forward, first=nn.Linear(8, 8), second=nn.Linear(8, 4))


def of_torch() -> Any:
    model, mesh = plain(), init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=False)  # ranks gather alike if one skips a unit
    return model


SWITCHES: dict[str, Callable[[Any], None]] = {
    "as built": lambda unit: None,
    "gathers on the compute stream": lambda unit: unit._set_unshard_async_op(True),
    "sums": lambda unit: unit.set_gradient_divide_factor(1.0),
    "another divisor": lambda unit: unit.set_gradient_divide_factor(8.0),
    "the older name": lambda unit: unit.set_reduce_scatter_divide_factor(4.0),
    "sums in the collective": lambda unit: unit.set_force_sum_reduction_for_comms(True),
    "shared group": lambda unit: unit.set_separate_reduce_scatter_group(False),
}
ON_ROOT: dict[str, Callable[[Any], None]] = {
    "one buffer": lambda root: root.set_reduce_scatter_max_input_buffers(1),
    "unused units": lambda root: root.set_reduce_scatter_unused_params(True),
    "a divisor of the root's own unit": lambda root: root.set_gradient_divide_factor(1.0),
    "a hook of the root's own unit": lambda root: root.set_all_reduce_hook(lambda shard: shard.mul_(3)),
}


def _recurses(method: Callable[..., Any]) -> bool:
    """Return whether a switch sets nested units by default."""
    recurse = inspect.signature(method).parameters.get("recurse")
    return recurse is not None and recurse.default


def test_switches_recurse_where_those_of_fully_shard_do() -> None:
    switches = [
        name for name in vars(FSDPModule) if name.startswith("set_") and hasattr(FullyShardedDataParallel, name)
    ]
    assert len(switches) > 5
    for name in switches:
        ours, torchs = getattr(FullyShardedDataParallel, name), getattr(FSDPModule, name)
        assert _recurses(ours) == _recurses(torchs), name


def _is_known(name: str) -> bool:
    """Return whether FSDP2 of this torch has the switch, and can sum over gloo."""
    switches = [each[name] for each in (SWITCHES, ON_ROOT) if name in each]
    with contextlib.suppress(AttributeError):
        for switch in [*switches, lambda unit: unit.set_force_sum_reduction_for_comms(True)]:
            switch(mock.Mock(spec=FSDPModule))
        return True
    return False


def _case(name: str) -> Any:
    return pytest.param(name, marks=pytest.mark.skipif(not _is_known(name), reason="FSDP2 of this torch lacks it"))


@pytest.mark.parametrize("name", [*map(_case, [*SWITCHES, *ON_ROOT])])
@on_ranks(2)
def test_gradients_are_those_of_fully_shard(name: str) -> None:
    model, reference = (
        FullyShardedDataParallel(plain(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True),
        of_torch(),
    )
    switch = SWITCHES.get(name, lambda unit: None)
    for unit in FullyShardedDataParallel.fsdp_modules(model):
        switch(unit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the older name
        for unit in (module for module in reference.modules() if isinstance(module, FSDPModule)):
            unit.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply inside of a reduction
            switch(unit)
    for root in (model, reference):
        ON_ROOT.get(name, lambda root: None)(root)
    skips = name == "unused units" and dist.get_rank() != 0
    inputs = torch.sin(torch.arange(16.0) + dist.get_rank()).view(2, 8)
    inputs.requires_grad_()  # so that fully_shard reduces the second layer first on both ranks
    for each in (model, reference):
        each(inputs, skips).square().sum().backward()
    expected = {key: param.grad.full_tensor() for key, param in reference.named_parameters() if param.grad is not None}
    assert len(expected) == 4
    assert_bit_equal(full_gradients(model), expected)
