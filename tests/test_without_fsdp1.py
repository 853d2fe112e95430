"""Programs written for torch's FSDP1 run, through `fsdp.compat`, with a torch that has no FSDP1."""

from __future__ import annotations

import importlib
import io
import sys
import warnings
from collections.abc import Collection
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp.compat import patch
from tests.harness.pool import run_fresh
from tests.harness.programs import run_python
from tests.harness.versions import needs

CASES: dict[str, Collection[str]] = {"no module": (), "public modules": ("api", "sharded_grad_scaler", "wrap")}
pytestmark = needs(2, 13, "has an FSDP2 that imports other names of FSDP1's modules")


def output_of(folder: Path, program: Collection[str], stays: Collection[str]) -> str:
    """Return the output of a program for which torch has FSDP1's modules of the names in ``stays`` alone."""
    arguments = ["-m", "tests.harness.without_fsdp1", ",".join(stays), *program]
    code, printed = run_python(*arguments, folder=folder)
    assert code == 0, printed
    return printed


# The imports of accelerate, transformers, peft, Lightning and Composer, at the places where these have them.
TOOLS = """
import functools
from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy

def accelerates_wrapper(model, block):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
    from torch.distributed.fsdp.fully_sharded_data_parallel import (
        FullOptimStateDictConfig, FullStateDictConfig, ShardedOptimStateDictConfig, ShardedStateDictConfig,
    )
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.fsdp.fully_sharded_data_parallel import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy, transformer_auto_wrap_policy

    assert not isinstance(model, FSDPModule) and size_based_auto_wrap_policy and ShardedGradScaler(enabled=False)
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={block})
    model = FSDP(model, sharding_strategy=ShardingStrategy(1), cpu_offload=CPUOffload(False),
                 auto_wrap_policy=policy, backward_prefetch=BackwardPrefetch(1), mixed_precision=MixedPrecision(),
                 use_orig_params=True, limit_all_gathers=True)
    apply_activation_checkpointing(model, auto_wrap_policy=policy)
    assert type(model) is FSDP
    return model, (StateDictType(3), ShardedStateDictConfig(), ShardedOptimStateDictConfig())

def pefts_policy(block):
    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={block})
    adapters = functools.partial(lambda_auto_wrap_policy, lambda_fn=lambda module: False)
    return functools.partial(_or_policy, policies=[adapters, layers])

def transformers_finds(model):
    import torch.distributed.fsdp
    return isinstance(model, torch.distributed.fsdp.FullyShardedDataParallel)

def composers_names(model):
    from torch.distributed.fsdp._common_utils import clean_tensor_name
    from torch.distributed.fsdp._runtime_utils import _post_backward_final_callback
    return [clean_tensor_name(tensor_name=name) for name, _ in model.named_parameters()]

def lightnings_wrapper(make, block):
    from torch.distributed.fsdp import FullyShardedDataParallel, OptimStateKeyType
    from torch.distributed.fsdp.api import FullOptimStateDictConfig, FullStateDictConfig, StateDictType
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap

    with enable_wrap(wrapper_cls=FullyShardedDataParallel, use_orig_params=True):
        model = make()
        model[1] = wrap(model[1])
    policy = ModuleWrapPolicy({block})
    assert policy._module_classes == {block}
    model = FullyShardedDataParallel(module=model, use_orig_params=True)
    configurations = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)
    return model, (StateDictType.FULL_STATE_DICT, *configurations), OptimStateKeyType.PARAM_ID
"""
SCRIPT = """
import sys
import torch, torch._dynamo, torch.distributed as dist, torch.multiprocessing as mp
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, FlatParameter
import tools

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2))

def step(model, optimizer):
    torch.manual_seed(dist.get_rank())
    model(torch.randn(3, 4)).square().mean().backward()
    norm = model.clip_grad_norm_(0.1)
    optimizer.step()
    optimizer.zero_grad()
    return f"{norm.item():.6f}"

def train(rank, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    say = print if rank == 0 else lambda *args: None
    model, sharded = tools.accelerates_wrapper(make(), nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    say("accelerate", tools.transformers_finds(model), step(model, optimizer), step(model, optimizer))
    with FSDP.state_dict_type(model, *sharded):
        dcp.save({"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)},
                 checkpoint_id=f"{folder}/saved")
    say("continues", step(model, optimizer))
    assert tools.composers_names(model) == [name for name, _ in make().named_parameters()]
    model, _ = tools.accelerates_wrapper(make(), nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    full = StateDictOptions(full_state_dict=True)
    with FSDP.state_dict_type(model, *sharded):
        state = {"model": model.state_dict(), "optim": get_state_dict(model, optimizer)[1]}
        dcp.load(state, checkpoint_id=f"{folder}/saved")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optim"]))
    say("resumes", step(model, optimizer))
    whole, states = get_state_dict(model, optimizer, options=full)
    set_state_dict(model, optimizer, model_state_dict=whole, optim_state_dict=states, options=full)
    say("peft", *whole, len(states["state"]), step(model, optimizer))
    model = FSDP(make(), auto_wrap_policy=tools.pefts_policy(nn.Linear))
    assert all(isinstance(param, FlatParameter) for param in model.parameters())
    with FSDP.summon_full_params(model, recurse=True, writeback=False):
        say("summon", *[tuple(param.shape) for param in model[1].parameters()])
    model, full, ids = tools.lightnings_wrapper(make, nn.Linear)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    say("lightning", tools.transformers_finds(model[1]), step(model, optimizer))
    with FSDP.state_dict_type(model, *full):
        states = FSDP.rekey_optim_state_dict(FSDP.optim_state_dict(model, optimizer), ids, model)
    say("rekeyed", *states["state"])
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.start_processes(train, (sys.argv[1],), nprocs=2, start_method="fork")
"""


def run_with_fsdp1(folder: str) -> str:
    """Return the output of the program on the present ranks, of which each ends afterwards."""
    sys.path.insert(0, folder)
    patch()
    printed = io.StringIO()
    with (
        redirect_stdout(printed),
        warnings.catch_warnings(),
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
    ):
        warnings.simplefilter("ignore")
        importlib.import_module("train").train(dist.get_rank(), folder)
    return printed.getvalue()


def test_programs_train_as_with_fsdp1(tmp_path: Path) -> None:
    """They print the same norms and names."""
    for name in ("with", "without"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tools.py").write_text(TOOLS)
        (tmp_path / name / "train.py").write_text(SCRIPT)
    expected = run_fresh(2, run_with_fsdp1, str(tmp_path / "with"))[0]
    kind, *_ = zip(*(line.split() for line in expected.splitlines()))
    assert kind == ("accelerate", "continues", "resumes", "peft", "summon", "lightning", "rekeyed")
    assert expected.splitlines()[1].split()[1] == expected.splitlines()[2].split()[1], "the resumed run is the run"
    folder = tmp_path / "without"
    assert output_of(folder, ["-m", "fsdp.compat", "train.py", str(folder)], ()) == expected


BACK = """
import importlib, sys
import torch.distributed.checkpoint.state_dict as states
import torch.distributed.fsdp as torchs
import torch.distributed.fsdp._common_utils as common

def everything():
    modules = {name: module for name, module in sys.modules.items() if name.startswith("torch.distributed.fsdp")}
    return {f"{place}.{name}": value for place, module in modules.items() for name, value in vars(module).items()} | {
        f"{each.__name__}.{name}": value for each in (torchs, common, states) for name, value in vars(each).items()
    } | modules

def imports(name):
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None

from fsdp.compat import disable_dcp, enable_dcp, patch, unpatch
import fsdp
names = ("api", "wrap", "sharded_grad_scaler", "_runtime_utils", "fully_sharded_data_parallel")
names = [f"torch.distributed.fsdp.{name}" for name in names]
print(*(imports(name) is not None for name in names), hasattr(torchs, "FullyShardedDataParallel"))
before = everything()
enable_dcp()
print(sum(value is not before[name] for name, value in everything().items()))
disable_dcp()
changed = patch()
print(torchs.FullyShardedDataParallel is fsdp.FullyShardedDataParallel,
      torchs.wrap.CustomPolicy is fsdp.wrap.CustomPolicy)
print(all(imports(name) for name in names), torchs.fully_shard is before["torch.distributed.fsdp.fully_shard"])
import torch.distributed.fsdp._runtime_utils
print(torch.distributed.fsdp._runtime_utils._lazy_init.__module__, common._get_module_fsdp_state.__module__)
print({"torch.distributed.fsdp.StateDictType", "torch.distributed.fsdp._runtime_utils._lazy_init"} <= set(changed))
unpatch()
after = everything()
print(after.keys() == before.keys(), all(value is before[name] for name, value in after.items()))
"""


@pytest.mark.parametrize("case", CASES)
def test_unpatch_takes_added_modules_and_names_back(tmp_path: Path, case: str) -> None:
    (tmp_path / "back.py").write_text(BACK)
    lines = output_of(tmp_path, ["back.py"], CASES[case]).splitlines()
    public = case == "public modules"
    assert lines[0] == f"{public} {public} {public} False False False"
    assert lines[1:] == ["4", "True True", "True True", "fsdp.names.fsdp1 fsdp.names.fsdp1", "True", "True True"]
