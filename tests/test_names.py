"""Public names of torch's FSDP1 are importable from the same paths of `fsdp`, with the same arguments."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import types
from typing import Any

import pytest
import torch.distributed.fsdp

import fsdp
from tests.harness.versions import RELEASE

PATHS = ["", ".api", ".wrap", ".fully_sharded_data_parallel", ".sharded_grad_scaler"]
ABSENT = {
    # torch's FSDP2, which torch lists at the same level
    ("", "CPUOffloadPolicy"),
    ("", "DataParallelMeshDims"),
    ("", "FSDPModule"),
    ("", "MixedPrecisionPolicy"),
    ("", "OffloadPolicy"),
    ("", "fully_shard"),
    ("", "share_comm_ctx"),
    # a log of torch's scaler; ours raises errors
    (".sharded_grad_scaler", "logger"),
}
ABSENT_METHODS = {
    "_deregister_orig_params_ctx",  # internal to torch's summon_full_params
    "_use_training_state",  # sets the state that _assert_state reads
    "_warn_legacy_optim_state_dict",  # warns of torch's older methods for optimizer state, which are supported here
    "_is_using_optim_input",  # these four are internal to torch's methods for optimizer state
    "_optim_state_dict_impl",
    "_optim_state_dict_to_load_impl",
    "_warn_optim_input",
}
OWN_ARGUMENTS = {
    "CPUOffload": ["offload_gradients", "pin_memory"],
    "MixedPrecision": ["output_dtype"],
    "FullyShardedDataParallel": [
        "reduce_unused",
        "forward_prefetch_distance",
        "backward_prefetch_distance",
        "reshard_after_forward",
        "broadcast_buffers",
        "flat_param_key",
    ],
    "clip_grad_norm_": ["error_if_nonfinite"],
}
OTHER_SIGNATURE = {
    "UnshardHandle",  # only unshard() makes it
    "FlatParamHandle",  # only the wrapper makes it
    "_apply",  # torch's takes any arguments; ours those of nn.Module
}


def names_of_fsdp1(path: str) -> dict[str, Any]:
    """Return the public names that torch's module defines for FSDP, without names imported from elsewhere."""
    module = importlib.import_module(f"torch.distributed.fsdp{path}")
    listed = {name for where, name in ABSENT if where == path}
    assert listed <= set(dir(module)) or RELEASE < (2, 13), "a listed exception is not needed"
    found = {}
    for name in dir(module):
        value = getattr(module, name)
        defined_in = getattr(value, "__module__", None)  # missing for constants and wrong for type aliases
        own = defined_in in (None, "types") or defined_in.startswith("torch.distributed.fsdp")
        if own and not name.startswith("_") and not isinstance(value, types.ModuleType) and (path, name) not in ABSENT:
            found[name] = value
    assert found
    return found


def parameters(function: Any) -> list[tuple[str, Any, str]]:
    """Return (name, kind, default) in order, defaults as text because enums and classes live in different modules."""
    return [(p.name, p.kind, str(p.default)) for p in inspect.signature(function).parameters.values()]


def check_signature(name: str, actual: Any, reference: Any) -> None:
    if name in OTHER_SIGNATURE:
        return
    parameters_here, expected = parameters(actual), parameters(reference)
    assert parameters_here[: len(expected)] == expected, name
    more = parameters_here[len(expected) :]
    assert [argument for argument, _, _ in more] == OWN_ARGUMENTS.get(name, []), name
    refused = inspect.Parameter.VAR_KEYWORD  # with a remedy
    assert all(default != str(inspect.Parameter.empty) or kind is refused for _, kind, default in more), name


@pytest.mark.parametrize("path", PATHS)
def test_every_public_name_of_fsdp1_is_under_the_same_path(path: str) -> None:
    module = importlib.import_module(f"fsdp{path}")
    reference = names_of_fsdp1(path)
    assert not set(reference) - set(dir(module))
    assert not {name for where, name in ABSENT if where == path} & set(dir(module)), "a listed exception is not needed"
    for name, value in reference.items():
        actual = getattr(module, name)
        if isinstance(value, enum.EnumMeta):
            assert [(m.name, m.value) for m in actual] == [(m.name, m.value) for m in value]
        elif callable(value):
            assert inspect.isclass(actual) is inspect.isclass(value), name
            check_signature(name, actual, value)
            if dataclasses.is_dataclass(value):
                fields = [field.name for field in dataclasses.fields(actual)]
                assert fields == [f.name for f in dataclasses.fields(value)] + OWN_ARGUMENTS.get(name, [])
        elif isinstance(value, list):  # enum members or imported functions
            assert [getattr(x, "name", x) for x in actual] == [getattr(x, "name", x) for x in value], name
        else:
            assert actual == value, name


def test_every_method_of_torchs_wrapper_is_here() -> None:
    actual, reference = fsdp.FullyShardedDataParallel, torch.distributed.fsdp.FullyShardedDataParallel
    names = {name for name in dir(reference) if not name.startswith("__")}
    assert names - set(dir(actual)) == ABSENT_METHODS
    for name in sorted(names - ABSENT_METHODS):
        parameters_here, expected = inspect.getattr_static(actual, name), inspect.getattr_static(reference, name)
        for kind in (property, staticmethod, classmethod):
            assert isinstance(parameters_here, kind) is isinstance(expected, kind), name
        if callable(getattr(reference, name)) and name != "__init__":
            check_signature(name, getattr(actual, name), getattr(reference, name))


def test_every_method_of_torchs_policies_and_scaler_is_here() -> None:
    for path, name in (
        (".wrap", "ModuleWrapPolicy"),
        (".wrap", "CustomPolicy"),
        (".sharded_grad_scaler", "ShardedGradScaler"),
    ):
        reference = getattr(importlib.import_module(f"torch.distributed.fsdp{path}"), name)
        actual = getattr(importlib.import_module(f"fsdp{path}"), name)
        for method in (method for method in dir(reference) if callable(getattr(reference, method))):
            if not method.startswith("_") or method in ("__call__", "_run_policy", "_unscale_grads_"):
                check_signature(method, getattr(actual, method), getattr(reference, method))
