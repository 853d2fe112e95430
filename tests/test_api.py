"""Options: names, members, values and defaults of torch's, and conversion of torch's own objects."""

from __future__ import annotations

import copy
import dataclasses
import enum
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.api as torch_api
from torch import nn
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState
from torch.distributed.fsdp._flat_param import HandleShardingStrategy
from torch.distributed.fsdp.fully_sharded_data_parallel import OptimStateKeyType

import fsdp
import fsdp.api as api
from fsdp.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

THEIRS = {name: getattr(torch_api, name) for name in torch_api.__all__}
THEIRS |= {cls.__name__: cls for cls in (OptimStateKeyType, TrainingState, HandleTrainingState, HandleShardingStrategy)}
ENUMS = [name for name, cls in THEIRS.items() if issubclass(cls, enum.Enum)]
RECORDS = [name for name, cls in THEIRS.items() if dataclasses.is_dataclass(cls)]


@pytest.mark.parametrize("name", ENUMS)
def test_enums_have_torchs_members_and_values(name: str) -> None:
    ours = getattr(api, name)
    assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in THEIRS[name]]
    assert [ours(i + 1) for i in range(len(ours))] == list(ours)
    assert all(ours[m.name] is m for m in ours)


MORE = {"MixedPrecision": ["output_dtype"], "CPUOffload": ["offload_gradients", "pin_memory"]}  # after torch's fields


@pytest.mark.parametrize("name", RECORDS)
def test_dataclasses_have_torchs_fields_order_and_defaults(name: str) -> None:
    ours, theirs = getattr(api, name), THEIRS[name]
    fields = [f.name for f in dataclasses.fields(theirs)]
    assert [f.name for f in dataclasses.fields(ours)] == fields + MORE.get(name, [])
    assert [base.__name__ for base in ours.__mro__] == [base.__name__ for base in theirs.__mro__]
    if name == "StateDictSettings":
        with pytest.raises(TypeError):
            ours()
        return
    assert [getattr(ours(), f) for f in fields] == [getattr(theirs(), f) for f in fields]
    assert ours() == ours()
    setattr(ours(), fields[0], None)  # not frozen


@pytest.mark.parametrize("name", [*ENUMS, *RECORDS])
def test_choices_can_be_copied_and_pickled(name: str) -> None:
    cls = getattr(api, name)
    value = cls(1) if name in ENUMS else cls(*[None] * 3) if name == "StateDictSettings" else cls()
    assert copy.deepcopy(value) == value
    assert pickle.loads(pickle.dumps(value)) == value


# Normalising


def test_none_means_the_default() -> None:
    assert api.as_sharding_strategy(None) is ShardingStrategy.FULL_SHARD
    assert api.as_backward_prefetch(None) is None
    assert api.as_mixed_precision(None) == MixedPrecision()
    assert api.as_cpu_offload(None) == CPUOffload()


@pytest.mark.parametrize(
    ("normalise", "name"),
    [(api.as_sharding_strategy, "ShardingStrategy"), (api.as_backward_prefetch, "BackwardPrefetch")],
)
def test_members_are_converted_by_name(normalise: Any, name: str) -> None:
    for member in getattr(api, name):
        assert normalise(member) is member
        assert normalise(THEIRS[name][member.name]) is member
    # By name, not by value: releases of torch may number members differently.
    reordered = enum.Enum(name, {m.name: 100 - m.value for m in getattr(api, name)})
    assert all(normalise(member).name == member.name for member in reordered)


def test_own_dataclasses_are_kept_and_torchs_converted() -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    assert api.as_mixed_precision(precision) is precision
    values = {
        "param_dtype": torch.bfloat16,
        "reduce_dtype": torch.float32,
        "buffer_dtype": torch.float16,
        "keep_low_precision_grads": True,
        "cast_forward_inputs": True,
        "cast_root_forward_inputs": False,
        "_module_classes_to_ignore": (nn.LayerNorm,),
    }
    copied = api.as_mixed_precision(torch_api.MixedPrecision(**values))
    assert type(copied) is MixedPrecision
    assert dataclasses.asdict(copied) == {**values, "output_dtype": None}

    offload = CPUOffload(True)
    assert api.as_cpu_offload(offload) is offload
    assert api.as_cpu_offload(torch_api.CPUOffload(offload_params=True)) == offload

    class Derived(torch_api.CPUOffload):
        pass

    assert api.as_cpu_offload(Derived(offload_params=True)) == offload


def test_dataclasses_with_fewer_or_more_fields() -> None:
    older = dataclasses.make_dataclass("MixedPrecision", [("param_dtype", Any)])
    assert api.as_mixed_precision(older(torch.float16)) == MixedPrecision(param_dtype=torch.float16)
    newer = dataclasses.make_dataclass("CPUOffload", [("offload_params", bool), ("pin_nothing", bool)])
    with pytest.raises(ValueError, match=r"cpu_offload is a .*CPUOffload with fields .* pin_nothing"):
        api.as_cpu_offload(newer(True, False))


@pytest.mark.parametrize(
    ("normalise", "value", "words"),
    [
        (api.as_sharding_strategy, 1, r"sharding_strategy must be a ShardingStrategy \(FULL_SHARD, .* got 1 of"),
        (api.as_sharding_strategy, "FULL_SHARD", "sharding_strategy .* but got 'FULL_SHARD' of type builtins.str"),
        (api.as_sharding_strategy, BackwardPrefetch.BACKWARD_PRE, "sharding_strategy .*BackwardPrefetch"),
        (api.as_backward_prefetch, True, r"must be a BackwardPrefetch \(BACKWARD_PRE, BACKWARD_POST\)"),
        (api.as_mixed_precision, torch.bfloat16, "mixed_precision must be a MixedPrecision or None, but got torch.bf"),
        (api.as_mixed_precision, MixedPrecision, "not the class"),
        (api.as_cpu_offload, True, "cpu_offload must be a CPUOffload or None, but got True"),
        (api.as_cpu_offload, MixedPrecision(), "cpu_offload must be a CPUOffload"),
    ],
)
def test_wrong_types_are_refused(normalise: Any, value: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        normalise(value)


def test_unknown_member_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sharding_strategy .*SHARD_EVERYTHING, which is not one of these"):
        api.as_sharding_strategy(enum.Enum("ShardingStrategy", ["SHARD_EVERYTHING"]).SHARD_EVERYTHING)


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "buffer_dtype"])
def test_dtypes_must_be_floating_point(field: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        MixedPrecision(**{field: dtype}).validate()
    for dtype in (torch.int8, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=f"MixedPrecision.{field} .*{dtype}"):
            api.as_mixed_precision(MixedPrecision(**{field: dtype}))
        with pytest.raises(ValueError, match=f"MixedPrecision.{field} .*{dtype}"):
            api.as_mixed_precision(torch_api.MixedPrecision(**{field: dtype}))
    with pytest.raises(TypeError, match=f"MixedPrecision.{field} must be a torch.dtype"):
        api.as_mixed_precision(MixedPrecision(**{field: "bf16"}))


def test_ignored_module_classes_must_be_classes() -> None:
    MixedPrecision(_module_classes_to_ignore=()).validate()
    MixedPrecision(_module_classes_to_ignore=[nn.LayerNorm]).validate()
    for classes in (nn.LayerNorm, [nn.LayerNorm(1)], None):
        with pytest.raises(TypeError, match="_module_classes_to_ignore must hold module classes"):
            MixedPrecision(_module_classes_to_ignore=classes).validate()


# Kinds of state dict

KINDS = {"FULL_STATE_DICT": "Full", "LOCAL_STATE_DICT": "Local", "SHARDED_STATE_DICT": "Sharded"}


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict_settings_have_the_defaults_of_their_kind(kind: str) -> None:
    ours, theirs = api.StateDictType[kind], torch_api.StateDictType[kind]
    config, optim_config = (getattr(api, KINDS[kind] + name) for name in ("StateDictConfig", "OptimStateDictConfig"))
    for given in (ours, theirs):
        assert api.as_state_dict_settings(given) == api.StateDictSettings(ours, config(), optim_config())
    own = config(offload_to_cpu=True)
    assert api.as_state_dict_settings(ours, own).state_dict_config is own
    torchs = getattr(torch_api, KINDS[kind] + "OptimStateDictConfig")(offload_to_cpu=False)
    taken = api.as_state_dict_settings(theirs, None, torchs).optim_state_dict_config
    assert taken == optim_config(offload_to_cpu=False)
    assert type(taken) is optim_config


def test_state_dict_configs_of_another_kind_are_refused() -> None:
    kind = api.StateDictType.FULL_STATE_DICT
    for config in (api.LocalStateDictConfig(), torch_api.ShardedStateDictConfig(), api.FullStateDictConfig, 1):
        with pytest.raises(RuntimeError, match=r"Expected state_dict_config of type .*FullStateDictConfig"):
            api.as_state_dict_settings(kind, config)
    with pytest.raises(RuntimeError, match=r"Expected optim_state_dict_config of type .*FullOptimStateDictConfig"):
        api.as_state_dict_settings(kind, None, api.FullStateDictConfig())
    with pytest.raises(TypeError, match="state_dict_type must be a StateDictType"):
        api.as_state_dict_settings(1)


def test_ragged_configs_are_accepted_for_sharded_state_dicts() -> None:
    settings = api.as_state_dict_settings(
        api.StateDictType.SHARDED_STATE_DICT, api.RaggedStateDictConfig(), api.RaggedOptimStateDictConfig()
    )
    assert type(settings.state_dict_config) is api.RaggedStateDictConfig
    assert type(settings.optim_state_dict_config) is api.RaggedOptimStateDictConfig


def test_dir_lists_public_names_only() -> None:
    """Tab completion offers the tools before they are imported, and no implementation details."""
    assert set(dir(fsdp)) == {*fsdp.__all__, "__version__", "checkpoint", "compat", "tools", "wrap"}
    assert all(hasattr(fsdp, name) for name in dir(fsdp))
    assert dir(fsdp.checkpoint) == sorted(fsdp.checkpoint.__all__)


def test_names_of_fsdp2_are_exported() -> None:
    assert fsdp.register_fsdp_forward_method is fsdp.register_forward_method
    assert isinstance(fsdp.UnshardHandle, type) and "UnshardHandle" in fsdp.__all__
