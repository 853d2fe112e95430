"""Every public name of torch's FSDP1 can be imported from the same path here and takes the same arguments."""

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

PATHS = ["", ".api", ".wrap", ".fully_sharded_data_parallel", ".sharded_grad_scaler"]
ABSENT = {
    # of torch's second FSDP, which shards each parameter by itself; torch lists both at its top level
    ("", "CPUOffloadPolicy"),
    ("", "DataParallelMeshDims"),
    ("", "FSDPModule"),
    ("", "MixedPrecisionPolicy"),
    ("", "OffloadPolicy"),
    ("", "fully_shard"),
    ("", "share_comm_ctx"),
    # a log that torch's scaler writes to; ours are errors
    (".sharded_grad_scaler", "logger"),
}
ABSENT_METHODS = {
    "_deregister_orig_params_ctx",  # how torch's summon_full_params changes what is registered
    "_use_training_state",  # how torch's methods set the state that _assert_state reads
    "_warn_legacy_optim_state_dict",  # what torch's older methods for optimizer state warn with; ours are supported
}
OWN_ARGUMENTS = {
    "CPUOffload": ["offload_gradients", "pin_memory"],
    "MixedPrecision": ["output_dtype"],
    "FullyShardedDataParallel": [
        "reduce_unused",
        "forward_prefetch_distance",
        "backward_prefetch_distance",
        "reshard_after_forward",
        "keep_gathered_nbytes",
        "broadcast_buffers",
        "coalesce_nbytes",
        "flat_param_key",
    ],
    "clip_grad_norm_": ["error_if_nonfinite"],
}
OTHER_SIGNATURE = {
    "UnshardHandle",  # made by unshard() alone, with the wait
    "FlatParamHandle",  # made by the wrapper only
    "_apply",  # torch's takes whatever it gets; ours what nn.Module's does
}


def names_of_fsdp1(path: str) -> dict[str, Any]:
    """The public names of torch's module that are its FSDP's own, and not of what it imports from elsewhere."""
    module = importlib.import_module(f"torch.distributed.fsdp{path}")
    assert {name for where, name in ABSENT if where == path} <= set(dir(module)), "an exception that is none"
    found = {}
    for name in dir(module):
        value = getattr(module, name)
        defined_in = getattr(value, "__module__", None)  # constants do not tell, and aliases of types wrongly
        own = defined_in in (None, "types") or defined_in.startswith("torch.distributed.fsdp")
        if own and not name.startswith("_") and not isinstance(value, types.ModuleType) and (path, name) not in ABSENT:
            found[name] = value
    assert found
    return found


def parameters(function: Any) -> list[tuple[str, Any, str]]:
    """(name, kind, default) in order. Defaults by their text: enum members and classes have torch's or our module."""
    return [(p.name, p.kind, str(p.default)) for p in inspect.signature(function).parameters.values()]


def check_signature(name: str, ours: Any, theirs: Any) -> None:
    if name in OTHER_SIGNATURE:
        return
    mine, expected = parameters(ours), parameters(theirs)
    assert mine[: len(expected)] == expected, name
    more = mine[len(expected) :]
    assert [argument for argument, _, _ in more] == OWN_ARGUMENTS.get(name, []), name
    refused = inspect.Parameter.VAR_KEYWORD  # with a remedy
    assert all(default != str(inspect.Parameter.empty) or kind is refused for _, kind, default in more), name


@pytest.mark.parametrize("path", PATHS)
def test_every_public_name_of_fsdp1_is_under_the_same_path(path: str) -> None:
    module = importlib.import_module(f"fsdp{path}")
    theirs = names_of_fsdp1(path)
    assert not set(theirs) - set(dir(module))
    assert not {name for where, name in ABSENT if where == path} & set(dir(module)), "an exception that is none"
    for name, value in theirs.items():
        ours = getattr(module, name)
        if isinstance(value, enum.EnumMeta):
            assert [(m.name, m.value) for m in ours] == [(m.name, m.value) for m in value]
        elif callable(value):
            assert inspect.isclass(ours) is inspect.isclass(value), name
            check_signature(name, ours, value)
            if dataclasses.is_dataclass(value):
                fields = [field.name for field in dataclasses.fields(ours)]
                assert fields == [f.name for f in dataclasses.fields(value)] + OWN_ARGUMENTS.get(name, [])
        elif isinstance(value, list):  # of enum members, or of functions from elsewhere
            assert [getattr(x, "name", x) for x in ours] == [getattr(x, "name", x) for x in value], name
        else:
            assert ours == value, name


def test_every_method_of_torchs_wrapper_is_here() -> None:
    ours, theirs = fsdp.FullyShardedDataParallel, torch.distributed.fsdp.FullyShardedDataParallel
    names = {name for name in dir(theirs) if not name.startswith("__")}
    assert names - set(dir(ours)) == ABSENT_METHODS
    for name in sorted(names - ABSENT_METHODS):
        mine, expected = inspect.getattr_static(ours, name), inspect.getattr_static(theirs, name)
        for kind in (property, staticmethod, classmethod):
            assert isinstance(mine, kind) is isinstance(expected, kind), name
        if callable(getattr(theirs, name)) and name != "__init__":
            check_signature(name, getattr(ours, name), getattr(theirs, name))


def test_every_method_of_torchs_policies_and_scaler_is_here() -> None:
    for path, name in (
        (".wrap", "ModuleWrapPolicy"),
        (".wrap", "CustomPolicy"),
        (".sharded_grad_scaler", "ShardedGradScaler"),
    ):
        theirs = getattr(importlib.import_module(f"torch.distributed.fsdp{path}"), name)
        ours = getattr(importlib.import_module(f"fsdp{path}"), name)
        for method in (method for method in dir(theirs) if callable(getattr(theirs, method))):
            if not method.startswith("_") or method in ("__call__", "_run_policy", "_unscale_grads_"):
                check_signature(method, getattr(ours, method), getattr(theirs, method))
