"""Methods of torch's FSDP1 raise for models of this package, and work for torch's own in the same process."""

from __future__ import annotations

import re
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import OptimStateKeyType, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchPolicy

from fsdp import FullyShardedDataParallel, patches
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.pool import on_ranks
from tests.harness.programs import run_python

CPU = torch.device("cpu")


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def trained(model: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return optimizer


# The arguments of each method: a model, its optimizer, states of that optimizer, or the value itself.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "__init__": ("model",),
    "clip_grad_norm_": ("model", 0.1),
    "fsdp_modules": ("model",),
    "no_sync": ("model",),
    "summon_full_params": ("model",),
    "get_state_dict_type": ("model",),
    "set_state_dict_type": ("model", StateDictType.SHARDED_STATE_DICT),
    "state_dict_type": ("model", StateDictType.FULL_STATE_DICT),
    "optim_state_dict": ("model", "optimizer"),
    "optim_state_dict_to_load": ("model", "optimizer", "full"),
    "rekey_optim_state_dict": ("full", OptimStateKeyType.PARAM_ID, "model"),
    "full_optim_state_dict": ("model", "optimizer", None, False),
    "scatter_full_optim_state_dict": ("full", "model", None, "optimizer"),
    "shard_full_optim_state_dict": ("full", "model", None, "optimizer"),
    "flatten_sharded_optim_state_dict": ("sharded", "model", "optimizer"),
    "sharded_optim_state_dict": ("model", "optimizer"),
}


def call(method: str, **given: Any) -> Any:
    """Call a method of torch's FSDP1, and enter the context that it may return. Return states by parameter."""
    arguments = [given[each] if each in list(given) else each for each in ARGUMENTS[method]]
    if method == "__init__":
        return TorchFSDP(nn.Sequential(*arguments), device_id=CPU)
    result = getattr(TorchFSDP, method)(*arguments)
    with result if isinstance(result, AbstractContextManager) else nullcontext():
        states = result["state"] if isinstance(result, dict) else {}
    return sorted(map(str, states)) or str(result)


@on_ranks(2)
def test_methods_of_torch_raise_for_our_models() -> None:
    listed = {patch.what.rpartition(".")[2] for patch in patches.TORCHS_FSDP1}
    assert ARGUMENTS.keys() == listed
    for use_orig_params in (False, True):
        policy = ModuleWrapPolicy({nn.Linear})
        model = FullyShardedDataParallel(net(), auto_wrap_policy=policy, use_orig_params=use_orig_params)
        optimizer = trained(model)
        state = FullyShardedDataParallel.full_optim_state_dict(model, optimizer, rank0_only=False)
        for around in (model, model.module, nn.ModuleDict({"inner": model})):
            for name in ARGUMENTS:
                words = (
                    f"torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel.{name}(): this model"
                )
                words += " belongs to the package fsdp: import from fsdp in this file too, or call fsdp.compat.patch()"
                with pytest.raises(TypeError, match=f"^{re.escape(words)}$"):
                    call(name, model=around, optimizer=optimizer, full=state, sharded=state)
        assert list(get_model_state_dict(model)) == list(net().state_dict()), "torch's function asks for fsdp_modules()"


@on_ranks(2)
def test_methods_of_torch_work_for_torchs_models() -> None:
    warnings.simplefilter("ignore")  # torch's warnings about its formats
    FullyShardedDataParallel(net())
    assert all(patches.TORCHS_FSDP1)
    results = []
    for _ in range(2):  # with the patches, and without
        model: Any = TorchFSDP(net(), auto_wrap_policy=TorchPolicy({nn.Linear}), device_id=CPU, use_orig_params=True)
        optimizer = trained(model)
        full = TorchFSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        sharded = TorchFSDP.sharded_optim_state_dict(model, optimizer)
        given = {"model": model, "optimizer": optimizer, "full": full, "sharded": sharded}
        results.append({name: call(name, **given) for name in ARGUMENTS})
        whole = results[-1].pop("__init__")
        assert isinstance(whole, TorchFSDP) and whole.module[0] is model
        patches.take_back()
    assert {name: re.sub("0x[0-9a-f]+", "", str(result)) for name, result in results[0].items()} == {
        name: re.sub("0x[0-9a-f]+", "", str(result)) for name, result in results[1].items()
    }


LATE = """
import sys
import torch
from torch import nn
import fsdp

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = fsdp.FullyShardedDataParallel(nn.Linear(2, 2))
assert "torch.distributed.fsdp" not in sys.modules
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
model(torch.ones(1, 2)).sum().backward()

def call():
    try:
        with TorchFSDP.summon_full_params(model):
            return "entered"
    except TypeError as error:
        return str(error).partition(": ")[2]

print(call())
fsdp.patches.take_back()
print(call())
"""


def test_methods_of_torch_raise_if_torchs_module_is_imported_after_the_wrapping(tmp_path: Path) -> None:
    """From the first forward on, until `take_back`."""
    (tmp_path / "late.py").write_text(LATE)
    sentence = "this model belongs to the package fsdp: import from fsdp in this file too, or call fsdp.compat.patch()"
    assert run_python("late.py", folder=tmp_path) == (0, f"{sentence}\nentered\n")
