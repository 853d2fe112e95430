"""`fsdp.compat.patch()` and its command: programs for torch's FSDP1 run on this package."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
import torch.distributed.fsdp as torchs
import torch.distributed.fsdp._common_utils as common
import torch.distributed.fsdp._runtime_utils as runtime
import torch.distributed.fsdp._unshard_param_utils as unshard
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp.compat import disable_dcp, enable_dcp, patch, unpatch
from fsdp.flat.flat_param import FlatParameter
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.programs import run_python

NAMES = {
    "torch.distributed.fsdp": torchs,
    "torch.distributed.fsdp.fully_sharded_data_parallel": torchs.fully_sharded_data_parallel,
    "torch.distributed.fsdp.api": torchs.api,
    "torch.distributed.fsdp.wrap": torchs.wrap,
    "torch.distributed.fsdp._common_utils": common,
    "torch.distributed.fsdp._runtime_utils": runtime,
    "torch.distributed.fsdp._unshard_param_utils": unshard,
}


@contextlib.contextmanager
def patched(**options: bool) -> Iterator[list[str]]:
    changed = patch(**options)
    try:
        yield changed
    finally:
        unpatch()


def everything() -> dict[str, Any]:
    scaler = importlib.import_module("torch.distributed.fsdp.sharded_grad_scaler")
    modules = {**NAMES, scaler.__name__: scaler, "state_dict": torch_dcp.state_dict}
    return {f"{place}.{name}": value for place, module in modules.items() for name, value in vars(module).items()}


def client(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a module that has imported some of torch's names."""
    module: Any = types.ModuleType("a_client")
    module.FSDP, module.Strategy = torchs.FullyShardedDataParallel, torchs.ShardingStrategy
    module.fully_shard = 1
    monkeypatch.setitem(sys.modules, "a_client", module)
    return module


def test_patch_replaces_names_until_unpatch(monkeypatch: pytest.MonkeyPatch) -> None:
    before, early = everything(), client(monkeypatch)
    with patched() as changed:
        for name in set(fsdp.__all__) & set(torchs.__all__) - {"UnshardHandle", "register_fsdp_forward_method"}:
            assert getattr(torchs, name) is getattr(fsdp, name), name
        assert torchs.wrap._or_policy is fsdp.wrap._or_policy
        assert torchs.sharded_grad_scaler.ShardedGradScaler is fsdp.sharded_grad_scaler.ShardedGradScaler
        assert early.FSDP is fsdp.FullyShardedDataParallel and early.Strategy is fsdp.ShardingStrategy
        assert early.fully_shard == 1
        for name in ("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "UnshardHandle"):
            assert getattr(torchs, name) is before[f"torch.distributed.fsdp.{name}"]
        during = everything()
        differing = {name for name in during if during[name] is not before[name]}
        assert {name.removeprefix("torch.distributed.checkpoint.") for name in changed} >= differing
        assert {"a_client.FSDP", "a_client.Strategy"} <= set(changed) and "a_client.fully_shard" not in changed
        assert len(set(changed)) == len(changed)
        assert patch() == [] and enable_dcp() is None and disable_dcp() is None
        after = everything()
        assert all(after[name] is value for name, value in during.items()), "a second call changes nothing"
    after = everything()
    assert after.keys() == before.keys() and all(after[name] is value for name, value in before.items())
    assert early.FSDP is torchs.FullyShardedDataParallel and early.FSDP is not fsdp.FullyShardedDataParallel
    assert unpatch() is None
    with patched(imported=False):
        assert early.FSDP is not fsdp.FullyShardedDataParallel
        assert torchs.FullyShardedDataParallel is fsdp.FullyShardedDataParallel


def test_patch_keeps_enable_dcp_of_the_user() -> None:
    original = torch_dcp.state_dict._get_model_state_dict
    enable_dcp()
    enabled = torch_dcp.state_dict._get_model_state_dict
    with patched():
        assert torch_dcp.state_dict._get_model_state_dict is enabled is not original
    assert torch_dcp.state_dict._get_model_state_dict is enabled
    disable_dcp()
    assert torch_dcp.state_dict._get_model_state_dict is original


def test_patch_changes_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = everything()
    monkeypatch.setattr(runtime, "_lazy_init", lambda one: None)
    with pytest.raises(RuntimeError, match=r"does not fit this version .* lacks _lazy_init\(state, root_module\)"):
        patch()
    monkeypatch.undo()
    assert all(value is before[name] for name, value in everything().items())


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(x)))

    def double(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self(x)


def wrapped(use_orig_params: bool) -> Any:
    torch.manual_seed(0)
    policy = ModuleWrapPolicy({nn.Linear})
    return torchs.FullyShardedDataParallel(Net(), auto_wrap_policy=policy, use_orig_params=use_orig_params)


@on_ranks(2)
def test_private_functions_of_torch_accept_our_modules() -> None:
    x = torch.ones(2, 5)
    with patched():
        for use_orig_params in (False, True):
            model = wrapped(use_orig_params)
            assert type(model) is fsdp.FullyShardedDataParallel
            assert model._is_root is None and runtime._lazy_init(model, root_module=model) is model and model._is_root
            torchs.register_fsdp_forward_method(module=model, method_name="double")
            torch.manual_seed(0)
            assert torch.equal(model.double(x), 2 * Net()(x))
            linear = model.module.inner
            assert common._get_module_fsdp_state(linear) is linear and common._get_module_fsdp_state(nn.ReLU()) is None
            assert isinstance(linear, common._FSDPState) and not isinstance(model.module, common._FSDPState)
            assert common._has_fsdp_params(linear, linear) and not common._has_fsdp_params(model, model)
            assert common._module_handle(linear, linear).flat_param is linear._flat_param
            linear._unshard()
            runtime._reshard(linear, linear._handle, True)
            assert linear._handle.needs_unshard()
            runtime._unshard(linear, linear._handle, None, None)
            assert not linear._handle.needs_unshard()
            runtime._reshard(linear, linear._handle, True)
            assert runtime._root_pre_forward(model, model, (x,), {"y": x}) == ((x,), {"y": x})
            with unshard._unshard_params_for_summon(
                linear, linear, writeback=False, rank0_only=False, offload_to_cpu=False, with_grads=False
            ):
                assert [param.shape for param in linear.module.parameters()] == [(7, 5), (7,)]
            with unshard._unshard_params_for_summon(
                model, model, writeback=False, rank0_only=False, offload_to_cpu=False, with_grads=False
            ):
                assert [param.shape for param in linear.module.parameters()] != [(7, 5), (7,)]  # it is inside
            names = common._get_param_to_fqns(model)
            expected = [["inner.weight", "inner.bias"], ["head.weight", "head.bias"]]
            assert list(names.values()) == ([[n] for both in expected for n in both] if use_orig_params else expected)
            assert use_orig_params or all(isinstance(param, FlatParameter) for param in names)
            model(x).sum().backward()
            alone = torchs.FullyShardedDataParallel(nn.Linear(5, 7), use_orig_params=use_orig_params)
            alone(x)
            assert not alone._handle.needs_unshard(), "a backward may follow"
            runtime._post_backward_final_callback(alone, alone)
            assert alone._handle.needs_unshard()
        original = torchs.fully_shard(Net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        torchs.register_fsdp_forward_method(original, "double")
        assert "double" in vars(original), "torch has done what it does"
        tied = Net()
        tied.head.bias = tied.inner.bias
        names = ["inner.weight", "inner.bias", "head.weight"]
        assert [name for [name] in common._get_param_to_fqns(tied).values()] == names
        every = common._get_param_to_fqns(torchs.FullyShardedDataParallel(tied, use_orig_params=True), False)
        assert list(every.values()) == [["inner.weight"], ["inner.bias", "head.bias"], ["head.weight"]]


FAKE = """
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, StateDictType

def load_fsdp_optimizer(fsdp_plugin, accelerator, optimizer, model, input_dir, fail=False):
    with FSDP.state_dict_type(model, fsdp_plugin.state_dict_type):
        state = {"optimizer": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=input_dir)
        if fail:
            raise ArithmeticError
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))
"""


class Holder:
    """Wraps an optimizer, as accelerate does."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self) -> None:
        raise AssertionError("only the optimizer itself steps")


@contextlib.contextmanager
def imported(folder: str, name: str, early: bool) -> Iterator[Any]:
    """Import the module `name` of `folder` before or after `patch()`; at the end forget its package."""
    with mock.patch.object(sys, "path", [folder, *sys.path]):
        if early:
            importlib.import_module(name)
        with patched():
            yield importlib.import_module(name)
    package = name.partition(".")[0]
    for each in [each for each in sys.modules if each.partition(".")[0] == package]:
        del sys.modules[each]


def check_accelerate(folder: str, early: bool) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch's warnings about formats
    with imported(folder, "accelerate.utils.fsdp_utils", early) as accelerates:
        replaced = accelerates.load_fsdp_optimizer
        plugin: Any = types.SimpleNamespace(state_dict_type=torchs.StateDictType.SHARDED_STATE_DICT)
        model, other = wrapped(True), wrapped(True)
        optimizer, fresh = (torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, other))
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        with torchs.FullyShardedDataParallel.state_dict_type(model, plugin.state_dict_type):
            saved = torchs.FullyShardedDataParallel.optim_state_dict(model, optimizer)
        torch_dcp.save({"optimizer": saved}, checkpoint_id=f"{folder}/saved")
        with pytest.raises(ArithmeticError):
            accelerates.load_fsdp_optimizer(plugin, None, fresh, other, f"{folder}/saved", fail=True)
        assert not fresh.state
        accelerates.load_fsdp_optimizer(plugin, None, Holder(fresh) if early else fresh, other, f"{folder}/saved")
        enabled, loaded = optimizer.state_dict(), fresh.state_dict()
        assert enabled["state"] and enabled["state"].keys() == loaded["state"].keys()
        for key, values in enabled["state"].items():
            assert_bit_equal(loaded["state"][key], values, f"state of parameter {key}")
    assert accelerates.load_fsdp_optimizer is not replaced


@pytest.mark.parametrize("early", [False, True])
def test_accelerate_loads_sharded_state_into_a_new_optimizer(tmp_path: Path, early: bool) -> None:
    (tmp_path / "accelerate/utils").mkdir(parents=True)
    for package in ("accelerate", "accelerate/utils"):
        (tmp_path / package / "__init__.py").touch()
    (tmp_path / "accelerate/utils/fsdp_utils.py").write_text(FAKE)
    run_ranks(2, check_accelerate, str(tmp_path), early)


SCRIPT = """
import sys
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
import torch.multiprocessing as mp
import helper_beside_it

def child(rank):
    print(FSDP.__module__, "in a child", flush=True)

if __name__ == "__main__":
    print(FSDP.__module__, sys.argv[1:], helper_beside_it.HELPS, flush=True)
    mp.spawn(child, nprocs=1)
"""


def test_the_command_runs_a_script_and_what_it_spawns(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "helper_beside_it.py").write_text("HELPS = True\n")
    code, printed = run_python("-m", "fsdp.compat", str(tmp_path / "train.py"), "--lr", "-m", folder=tmp_path)
    ours = "fsdp.fully_sharded_data_parallel"
    assert printed.splitlines() == [f"{ours} ['--lr', '-m'] True", f"{ours} in a child"] and code == 0


def test_the_command_runs_a_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a_module.py").write_text("import sys, torch.distributed.fsdp as f\nprint(f.CPUOffload, sys.argv[1:])")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    compat = importlib.import_module("fsdp.compat.__main__")
    try:
        compat.main(["-m", "a_module", "x"])
    finally:
        unpatch()
    assert capsys.readouterr().out == f"{fsdp.CPUOffload} ['x']\n"
    for arguments, code, words in (
        (["--help"], 0, "usage: fsdp run SCRIPT ARGUMENTS"),
        ([], 2, "usage: fsdp run SCRIPT ARGUMENTS"),
        (["-m"], 2, "usage: fsdp run SCRIPT ARGUMENTS"),
        (["nowhere.py", "-h"], 2, "fsdp run: cannot open nowhere.py: there is no such file\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            compat.main(arguments)
        assert ended.value.code == code and capsys.readouterr()[code // 2].startswith(words)
