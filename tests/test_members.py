"""Attributes of torch's FSDP1 that tools read: same names, and same values in the same situation."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.distributed.algorithms._comm_hooks import LOW_PRECISION_HOOKS
from torch.distributed.algorithms._comm_hooks.default_hooks import LowPrecisionState

import fsdp
from fsdp import MixedPrecision, StateDictType
from fsdp.api import TrainingState
from fsdp.flat.names import clean
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Net
from tests.harness.pool import on_ranks
from tests.harness.small import WIDTH, StandIn, batch, build, error_of, net, torchs
from tests.harness.strategies import both_modes

NAMES = ["_has_params", "_flat_param", "params", "_is_root", "training_state", "rank", "world_size", "process_group"]
NAMES += ["compute_device", "sharding_strategy", "mixed_precision", "cpu_offload", "backward_prefetch"]
NAMES += ["forward_prefetch", "limit_all_gathers", "_use_orig_params", "_device_mesh", "_state_dict_type"]
NAMES += ["_state_dict_config", "_optim_state_dict_config", "_comm_hook", "_comm_hook_state", "_sync_gradients"]
NAMES += ["_gradient_predivide_factor", "_gradient_postdivide_factor"]
METHODS = ["_mixed_precision_enabled_for_buffers", "_low_precision_hook_enabled", "check_is_root"]


def describe_value(value: Any) -> Any:
    """Return a description that does not depend on the module of the class."""
    import torch.distributed.fsdp.api as torch_api

    if isinstance(value, torch.Tensor):
        return type(value).__name__, tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, (list, tuple)):
        return [describe_value(item) for item in value]
    if hasattr(value, "name") and hasattr(value, "value"):
        return type(value).__name__, value.name
    if dataclasses.is_dataclass(value):  # compare torch's fields
        torchs_own = getattr(torch_api, type(value).__name__)
        return type(value).__name__, {
            field.name: getattr(value, field.name) for field in dataclasses.fields(torchs_own)
        }
    return value


def read_attributes(model: Any, names: list[str]) -> dict[str, Any]:
    found = {name: describe_value(getattr(model, name)) for name in names}
    found["is the default group"] = found.pop("process_group") is dist.group.WORLD
    found["current device"] = model._device_handle.current_device()
    found["its flat parameter"] = model._handle is None or model._handle.flat_param is model._flat_param
    if model.backward_prefetch is not None:
        found["backward limit"] = model._exec_order_data._backward_prefetch_limit
    found["has a forward limit"] = hasattr(model._exec_order_data, "_forward_prefetch_limit")
    return found


@both_modes
@on_ranks(2)
def test_private_attributes_equal_torchs(use_orig_params: bool) -> None:
    def both(module: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
        options["use_orig_params"] = use_orig_params
        return build(module(), **options), torchs(module(), **options)

    pairs = [
        both(net),
        both(net, backward_prefetch=None, forward_prefetch=True, limit_all_gathers=False),
        both(lambda: nn.Sequential(nn.Tanh())),
    ]
    for ours, expected in pairs:
        assert repr(ours) == repr(expected)
        for stage in ("built", "asked", "used", "in no_sync", "shown"):
            if stage == "asked":
                for name in METHODS:
                    assert getattr(ours, name)() == getattr(expected, name)(), name
            elif stage == "used":
                for model in (ours, expected):
                    model(batch(0)).sum().requires_grad_().backward()
                assert len(ours._all_handles) == len(expected._all_handles)
            for model in (ours, expected):
                model.inside = model.no_sync() if stage == "in no_sync" else warnings.catch_warnings()
                model.inside = model.summon_full_params(model) if stage == "shown" else model.inside
                model.inside.__enter__()
            names = [name for name in NAMES if stage != "shown" or name not in ("params", "_flat_param")]
            actual, torchs_own = read_attributes(ours, names), read_attributes(expected, names)
            differ = {name: (actual[name], torchs_own[name]) for name in actual if actual[name] != torchs_own[name]}
            assert not differ, f"{stage}: {differ}"
            for model in (ours, expected):
                model.inside.__exit__(None, None, None)
    ours, expected = pairs[0]
    for model in (ours, expected):
        assert not model._low_precision_hook_enabled()
        model.register_comm_hook(LowPrecisionState(dist.group.WORLD), LOW_PRECISION_HOOKS[1])
        assert model._low_precision_hook_enabled() and model._comm_hook is LOW_PRECISION_HOOKS[1]
        assert isinstance(model._comm_hook_state, LowPrecisionState)
        model.mixed_precision.buffer_dtype = torch.bfloat16
        assert model._mixed_precision_enabled_for_buffers()
        model._reset_lazy_init()
        assert model._is_root is None and model.check_is_root()


def test_prefetch_limits_apply_to_all_units_of_the_tree() -> None:
    """Before and after the first use, by the names that tools write to."""
    module = net()
    inner = module.layers = build(module.layers, process_group=StandIn(0, 1))
    model = build(module, process_group=StandIn(0, 1))
    model._exec_order_data._forward_prefetch_limit = 3
    model(batch(0, 0)).sum().backward()
    model._exec_order_data._backward_prefetch_limit = 2
    for instance in (model, inner):
        limits = instance._exec_order_data
        assert (limits._forward_prefetch_limit, limits._backward_prefetch_limit) == (3, 2)
        assert (instance._fsdp_unit.policy.forward_prefetch, instance._fsdp_unit.policy.backward_prefetch) == (3, 2)
    inner._exec_order_data._backward_prefetch_limit = 0
    assert model._exec_order_data._backward_prefetch_limit == 2
    never = build(net(), process_group=StandIn(0, 1), backward_prefetch=None)
    never._exec_order_data._backward_prefetch_limit = 2
    assert never._fsdp_unit.policy.backward_prefetch == 0
    for wrong in (-1, "all", None):
        assert error_of(setattr, limits, "_forward_prefetch_limit", wrong).startswith("ValueError: a prefetch limit is")
    assert limits._forward_prefetch_limit == 3


def test_default_state_dict_settings_are_not_shared() -> None:
    first, second = (build(net(), process_group=StandIn()) for _ in range(2))
    assert first._state_dict_config == second._state_dict_config == fsdp.FullStateDictConfig()
    assert first._state_dict_config is not second._state_dict_config
    assert first._optim_state_dict_config is not second._optim_state_dict_config
    assert first.mixed_precision == MixedPrecision() and first.training_state is TrainingState.IDLE
    assert first.compute_device.type == "cpu" and first.module.head.in_features == WIDTH


def tied() -> nn.Module:
    """Build a unit with one parameter under three names, a nested unit, and a layer to ignore."""
    embed, head, other = (nn.Linear(4, 4, bias=False) for _ in range(3))
    head.weight = other.weight = embed.weight
    inner, left_out = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    return Net(
        lambda m, x: m.left_out(m.inner(m.other(m.head(m.embed(x))))),
        embed=embed,
        head=head,
        other=other,
        inner=inner,
        left_out=left_out,
    )


def wrapped(engine: Any, use_orig_params: bool) -> Any:
    torch.manual_seed(0)
    module = tied()
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


@both_modes
@on_ranks(2)
def test_flat_parameters_and_handles_have_torchs_values(use_orig_params: bool) -> None:
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


@on_ranks(2)
def test_registrations_keep_no_module_alive() -> None:
    """A copy of the model names its own modules, and a pickled description has none. State dicts stay of one type."""
    model = wrapped(fsdp, False)
    model.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    twin = copy.deepcopy(model)
    assert model.get_state_dict_type(twin) == model.get_state_dict_type(model)
    infos = twin._flat_param._shared_param_infos
    assert infos[0].module is twin.module.head and infos[1].prim_module is twin.module.embed
    assert [info.param_name for info in infos[:2]] == ["weight", "weight"]
    assert [info.module for info in pickle.loads(pickle.dumps(infos))] == [None, None]
    del twin
    assert infos[0].module is None
