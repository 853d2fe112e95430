"""FSDP1's private attributes of wrappers, handles and flat parameters have the values that torch's have."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import fsdp
from fsdp.flat.names import clean
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.pool import on_ranks, run_ranks


class Tied(nn.Module):
    """A unit with one parameter under three names, a nested unit, and a layer to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, self.other = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.head.weight = self.other.weight = self.embed.weight
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.left_out = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left_out(self.inner(self.other(self.head(self.embed(x)))))


def wrapped(engine: Any, use_orig_params: bool) -> Any:
    torch.manual_seed(0)
    module = Tied()
    policy = torch.distributed.fsdp.wrap.ModuleWrapPolicy if engine is not fsdp else ModuleWrapPolicy
    model = engine.FullyShardedDataParallel(
        module,
        auto_wrap_policy=policy({nn.Sequential}),
        ignored_modules=[module.left_out],
        use_orig_params=use_orig_params,
        device_id=torch.device("cpu"),
    )
    model(torch.ones(2, 4))  # torch's streams are made by the first forward
    return model


def names_in(root: nn.Module, objects: Any) -> set[str]:
    """Return the plain names of modules and parameters of `root`."""
    found = [*root.named_modules(), *root.named_parameters()]
    return {clean(name) for name, each in found if any(each is one for one in objects)}


def of_flat_param(model: Any) -> list[Any]:
    flat = model._flat_param
    paths = {module: name for name, module in model.module.named_modules()}
    shared = [
        (info.param_name, paths[info.module], info.module_name)
        + (info.prim_param_name, paths[info.prim_module], info.prim_module_name)
        for info in flat._shared_param_infos
    ]
    return [shared, list(flat._strides), flat._num_params, flat._fqns]


def compare(use_orig_params: bool) -> None:
    ours, theirs = wrapped(fsdp, use_orig_params), wrapped(torch.distributed.fsdp, use_orig_params)
    assert len(of_flat_param(ours)[0]) == 2
    assert of_flat_param(ours) == of_flat_param(theirs)
    for model in (ours, theirs):
        assert names_in(model, model._ignored_modules) == {"left_out", "left_out.0", "left_out.1"}
        assert len(model._ignored_params) == 4
    assert names_in(ours, ours._ignored_params) == names_in(theirs, theirs._ignored_params)
    assert names_in(ours, ours._fully_sharded_module_to_handle) == {"", "inner"}
    assert names_in(theirs, theirs._fully_sharded_module_to_handle) == {""}, "torch's instances know their own alone"
    for name in ("_default_stream", "_unshard_stream", "_pre_unshard_stream"):
        assert type(getattr(ours, name)) is type(getattr(theirs, name)), name
    handle = ours._handle
    handle.unshard()
    assert handle._get_padded_unsharded_flat_param().shape == handle.flat_param._padded_unsharded_size
    assert handle._get_padded_unsharded_flat_param().untyped_storage().nbytes() > 0
    handle.reshard(True)
    assert handle._get_padded_unsharded_flat_param().untyped_storage().nbytes() == 0


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_values_are_torchs(use_orig_params: bool) -> None:
    run_ranks(2, compare, use_orig_params)


@on_ranks(2)
def test_registrations_keep_no_module_alive() -> None:
    """A copy of the model names its own modules, and a pickled description has none."""
    model = wrapped(fsdp, False)
    twin = copy.deepcopy(model)
    infos = twin._flat_param._shared_param_infos
    assert infos[0].module is twin.module.head and infos[1].prim_module is twin.module.embed
    assert [info.param_name for info in infos[:2]] == ["weight", "weight"]
    assert [info.module for info in pickle.loads(pickle.dumps(infos))] == [None, None]
    del twin
    assert infos[0].module is None
