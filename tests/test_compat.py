"""`enable_dcp()`: torch's own state-dict functions for models of this package, unchanged for all remaining models."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import (  # before they are enabled
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp import checkpoint
from fsdp.compat import disable_dcp, enable_dcp, torchs_optim
from tests.harness.optim_states import (
    FSDP,
    adamw,
    assert_same,
    assert_same_states,
    block,
    compiled,
    dcp_enabled,
    ours,
    quiet,
    row_major,
    same_state,
    settle_all,
    torchs,
    train,
    trained,
)
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.versions import needs

NamedOptimizer = torchs_optim._NamedOptimizer


def names_in_torch() -> dict[str, Any]:
    return {**vars(torch_state_dict), **{f"_NamedOptimizer.{k}": v for k, v in vars(NamedOptimizer).items()}}


# -- models of this package --------------------------------------------------------------------------------------------

FULL = {"full_state_dict": True}
CHOICES: list[dict[str, bool]] = [
    {},
    {"cpu_offload": True},
    {"flatten_optimizer_state_dict": True},
    {**FULL},
    {**FULL, "cpu_offload": True},
    {**FULL, "flatten_optimizer_state_dict": True},
    {**FULL, "cpu_offload": True, "broadcast_from_rank0": True},
]


@needs(2, 7, "cannot do this for torch's FSDP1")
@on_ranks(2, 3)
def test_torchs_functions_save_and_load_as_for_torchs_fsdp1(world_size: int) -> None:
    """Every form of state equals that of `fsdp.checkpoint` and of torch's FSDP1.

    In one mode on two ranks, and in the other on three.
    """
    for uop in (False, True):
        model, optimizer = trained(uop)
        theirs = torchs(uop, module=row_major())
        their_optimizer = train(adamw(theirs.parameters()))
        for number, chosen in enumerate(CHOICES):
            if uop == ((number + world_size) % 2 == 0):  # by turns
                continue
            case, options = f"use_orig_params={uop}, {chosen}", StateDictOptions(**chosen)
            with dcp_enabled():
                saved = get_state_dict(model, optimizer, options=options)
                if number == 3:
                    assert_same(deep(get_model_state_dict(model, options=options)), deep(saved[0]), case)
                    assert_same(deep(get_optimizer_state_dict(model, optimizer, options=options)), deep(saved[1]), case)
                if "cpu_offload" not in chosen or not chosen.get("full_state_dict"):  # torch's fails on CPU
                    expected = quiet(get_state_dict, theirs, their_optimizer, options=options)
                    assert_same(deep(saved[0]), deep(expected[0]), f"{case}, model as torch's FSDP1")
                    assert_same(deep(saved[1]), deep(expected[1]), f"{case}, optimizer as torch's FSDP1")
            own = checkpoint.get_state_dict(model, optimizer, options=options)
            assert_same(deep(own[0]), deep(saved[0]), f"{case}, fsdp.checkpoint")
            assert_same(deep(own[1]), deep(saved[1]), f"{case}, fsdp.checkpoint")
            if chosen == CHOICES[4]:
                assert (saved == ({}, {})) is (dist.get_rank() > 0)
                whole = checkpoint.get_state_dict(model, optimizer, options=StateDictOptions(**FULL))
                if dist.get_rank() == 0:
                    assert_same(deep(dict(enumerate(own))), deep(dict(enumerate(whole))), f"{case}, without offload")
                continue  # only rank 0 has state to load
            target = ours(uop, module=row_major(1))
            target_optimizer = adamw(target.parameters())
            with dcp_enabled():
                if number % 2 == 0:
                    given = {"model_state_dict": saved[0], "optim_state_dict": saved[1]}
                    found = set_state_dict(target, target_optimizer, **given, options=options)
                else:
                    set_optimizer_state_dict(target, target_optimizer, saved[1], options=options)
                    found = set_model_state_dict(target, saved[0], options=options)
            assert (found.missing_keys, found.unexpected_keys) == ([], [])
            same_state(target, target_optimizer, model, optimizer, case)


def deep(value: Any) -> Any:
    """Settle sharded values, and sort each parameter's states."""
    if isinstance(value, dict):
        return {key: deep(inner) for key, inner in sorted(value.items())}
    if isinstance(value, tuple):
        return tuple(map(deep, value))
    return settle_all({"": value})[""]


def half_frozen(seed: int = 0) -> nn.Module:
    """Return a model with tied parameters and a unit that is frozen as a whole, as torch's FSDP1 requires."""
    model = row_major(seed)
    model.blocks[1].requires_grad_(False)
    return model


@needs(2, 7, "cannot do this for torch's FSDP1")
@on_ranks(2)
def test_options_of_torchs_functions() -> None:
    """Results for frozen and tied parameters, submodules and partial states equal those for torch's FSDP1."""
    for uop in (False, True):
        model, theirs = ours(uop, module=half_frozen()), torchs(uop, module=half_frozen())
        optimizer, their_optimizer = train(adamw(model.parameters())), train(adamw(theirs.parameters()))
        with dcp_enabled():
            for number, chosen in enumerate(({}, {"ignore_frozen_params": True}, {"keep_submodule_prefixes": False})):
                full = (number + uop) % 2 == 0  # by turns
                options, case = StateDictOptions(**chosen, full_state_dict=full), f"{uop}, {chosen}, {full}"
                state = get_state_dict(model, optimizer, options=options)
                expected = quiet(get_state_dict, theirs, their_optimizer, options=options)
                assert_same(deep(state), deep(expected), case)
                blocks = [{dict(m.named_modules())["_fsdp_wrapped_module.blocks"]} for m in (model, theirs)]
                state = quiet(get_model_state_dict, model, submodules=blocks[0], options=options)
                expected = quiet(get_model_state_dict, theirs, submodules=blocks[1], options=options)
                keep = options.keep_submodule_prefixes
                assert state and all(name.startswith("blocks.") is keep for name in state)
                assert_same(deep(state), deep(expected), f"{case}, submodules")
            whole = StateDictOptions(full_state_dict=True)
            everything = quiet(get_model_state_dict, model, submodules={model.module}, options=whole)
            assert_same(deep(everything), deep(get_model_state_dict(model, options=whole)), "all submodules")
            part = quiet(get_model_state_dict, model, submodules={model.blocks[0].module}, options=whole)
            target = ours(uop, module=half_frozen(1))
            loose = StateDictOptions(full_state_dict=True, strict=False)
            found = set_model_state_dict(target, {**part, "nobody": torch.ones(1)}, options=loose)
            assert found.unexpected_keys == ["nobody"] and "bias" in found.missing_keys
            assert_same({k: get_model_state_dict(target, options=whole)[k] for k in part}, part, "loaded")
            with pytest.raises(RuntimeError, match="bias"):
                set_model_state_dict(target, part, options=whole)
            by_module = {model.blocks[1]: {k.removeprefix("blocks.0."): v.flip(0) for k, v in part.items()}}
            by_module[model.blocks[1]]["linear.weight"] = torch.ones(5, 3)
            by_module[model.blocks[1]]["linear.bias"] = torch.ones(5)
            quiet(set_model_state_dict, model, by_module, options=loose)
            assert get_model_state_dict(model, options=whole)["blocks.1.linear.weight"].eq(1).all()
            assert get_state_dict(model, (), options=whole)[1] == {}
            alone = ours(uop, module=half_frozen())  # optimizer state alone, from rank 0
            alone_optimizer = adamw(alone.parameters())
            saved = get_optimizer_state_dict(model, optimizer, options=whole)
            given = {"model_state_dict": {}, "optim_state_dict": saved if dist.get_rank() == 0 else {}}
            from_rank0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            assert set_state_dict(alone, alone_optimizer, **given, options=from_rank0) == ([], [])
            assert_same_states(alone_optimizer.state_dict(), optimizer.state_dict(), f"use_orig_params={uop}, alone")
            with pytest.raises(ValueError, match="full_state_dict must be True"):
                get_state_dict(model, optimizer, options=StateDictOptions(broadcast_from_rank0=True))


@on_ranks(2)
def test_state_of_parents_several_optimizers_and_patched_models() -> None:
    """Also of compiled models; an optimizer of another model is refused."""
    model, optimizer = trained(True)
    plain = row_major()
    plain_optimizer = train(adamw(plain.parameters()))
    whole = StateDictOptions(full_state_dict=True)
    with dcp_enabled():
        expected = quiet(get_state_dict, plain, plain_optimizer)
        parent = nn.ModuleDict({"inner": model})
        saved = get_state_dict(parent, optimizer, options=whole)
        assert_same(deep(saved[0]), deep({f"inner.{k}": v for k, v in expected[0].items()}), "a parent")
        assert sorted(saved[1]["state"]) == sorted(f"inner.{name}" for name in expected[1]["state"])
        of_compiled = get_state_dict(compiled(model), optimizer, options=whole)
        assert_same(deep(of_compiled[0]), deep(expected[0]), "compiled")

        fresh = adamw(ours(True, module=row_major()).parameters())
        with pytest.raises(KeyError, match="not in the model"):
            get_optimizer_state_dict(model, fresh)
        blocks, rest = adamw(model.blocks.parameters()), adamw([model.bias, model.conv.weight])
        joined = get_optimizer_state_dict(model, [blocks, rest], options=whole)
        assert len(joined["param_groups"]) == 2 and "step" in joined["state"]["bias"]
        fresh_pair = [adamw(model.blocks.parameters()), adamw([model.bias, model.conv.weight])]
        train(blocks)
        saved = get_state_dict(model, blocks, options=whole)
        joined = get_optimizer_state_dict(model, [blocks, rest], options=whole)
        set_optimizer_state_dict(model, fresh_pair, joined, options=whole)
        assert_same_states(fresh_pair[0].state_dict(), blocks.state_dict(), "several optimizers")

        target = ours(True, module=row_major(1))
        target_optimizer = adamw(target.parameters())
        for patched, its_optimizer in ((model, optimizer), (target, target_optimizer)):
            torch_state_dict._patch_model_state_dict(patched, options=whole)
            torch_state_dict._patch_optimizer_state_dict(patched, optimizers=its_optimizer, options=whole)
        assert_same(deep(model.state_dict()), deep(saved[0]), "patched")
        target.load_state_dict(model.state_dict())
        target_optimizer.load_state_dict(optimizer.state_dict())
        for patched in (model, target, optimizer, target_optimizer):
            del patched.state_dict, patched.load_state_dict
        same_state(target, target_optimizer, model, optimizer, "patched")


@on_ranks(2)
def test_state_of_torchs_named_optimizers() -> None:
    def named(model: nn.Module) -> Any:
        params = dict(model.named_parameters())
        return quiet(NamedOptimizer, params, torch.optim.AdamW, None, model, lr=0.01, weight_decay=0.1)

    for uop in (False, True):
        model = ours(uop, module=row_major())
        optimizer = named(model)
        optimizer.init_state()
        train(optimizer._optimizer)
        saved = FSDP.optim_state_dict(model, optimizer)
        with dcp_enabled():
            target = named(model)
            target.init_state()
            target.load_state_dict(saved)
            assert_same(FSDP.optim_state_dict(model, target), saved, f"use_orig_params={uop}")
            plain = row_major()
            of_plain = named(plain)
            of_plain.init_state()
            again = of_plain.state_dict()
            train(of_plain._optimizer)
            of_plain.load_state_dict(again)
            assert_same_states(of_plain.state_dict(), again, "a plain module's")


# -- through torch's storage -------------------------------------------------------------------------------------------


class AppState(Stateful):
    """The application state of the tutorials of torch.distributed.checkpoint."""

    def __init__(self, model: nn.Module, optimizer: Any, options: StateDictOptions) -> None:
        self.model, self.optimizer, self.options = model, optimizer, options

    def state_dict(self) -> dict[str, Any]:
        parts = get_state_dict(self.model, self.optimizer, options=self.options)
        return dict(zip(("model", "optim"), parts, strict=True))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
            options=self.options,
        )


def save_app(path: str, uop: bool, full: bool, asynchronous: bool) -> None:
    with dcp_enabled():
        state = {"app": AppState(*trained(uop), StateDictOptions(full_state_dict=full))}
        if asynchronous:
            quiet(torch_dcp.async_save, state, checkpoint_id=path).result()
        else:
            quiet(torch_dcp.save, state, checkpoint_id=path)


def load_app(path: str, uop: bool, full: bool) -> None:
    model = ours(uop, blocks=uop, module=row_major(1))
    optimizer = adamw(model.parameters())
    planner = torch_dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)
    with dcp_enabled():
        state = {"app": AppState(model, optimizer, StateDictOptions(full_state_dict=full))}
        quiet(torch_dcp.load, state, checkpoint_id=path, planner=None if full else planner)
    expected = ours(uop, blocks=uop, module=row_major())
    same_state(model, optimizer, expected, train(adamw(expected.parameters())), f"use_orig_params={uop}")


@pytest.mark.parametrize(("saving", "loading", "uop"), [(2, 3, False), (3, 1, True), (1, 2, True)])
def test_applications_save_and_load_at_another_number_of_ranks(
    tmp_path: Path, saving: int, loading: int, uop: bool
) -> None:
    """`Stateful` objects, with sharded and full state, also saved in the background."""
    for number, (saved_full, loaded_full) in enumerate(((False, False), (True, False), (False, True))):
        path = str(tmp_path / str(number))
        run_ranks(saving, save_app, path, uop, saved_full, number == 1)
        run_ranks(loading, load_app, path, (number + loading) % 2 == 0, loaded_full)


# -- models of torch ---------------------------------------------------------------------------------------------------


def fsdp2(seed: int) -> nn.Module:
    model = row_major(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for each in model.blocks:
        fully_shard(each, mesh=mesh)
    return fully_shard(model, mesh=mesh)


MODELS_OF_TORCH: dict[str, Callable[[int], nn.Module]] = {
    "plain": row_major,
    "DDP": lambda seed: DistributedDataParallel(row_major(seed)),
    "FSDP1": lambda seed: torchs(False, module=row_major(seed)),
    "FSDP1 with original parameters": lambda seed: torchs(True, module=row_major(seed)),
    "FSDP2": fsdp2,
}


def local(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: local(inner) for key, inner in value.items()}
    return value.to_local() if isinstance(value, DTensor) else value


@needs(2, 7, "cannot do this for torch's FSDP1")
@on_ranks(2)
def test_models_of_torch_keep_torchs_state() -> None:
    """Plain modules, DDP, FSDP1 in both modes, FSDP2."""
    for name, build in MODELS_OF_TORCH.items():
        model = build(0)
        optimizer = train(adamw(model.parameters()))
        before = quiet(get_state_dict, model, optimizer)
        with dcp_enabled():
            get_model_state_dict(trained(True)[0])
            saved = quiet(get_state_dict, model, optimizer)
            assert_same(deep(local(saved[0])), deep(local(before[0])), name)
            assert_same(deep(local(saved[1])), deep(local(before[1])), name)
            target = build(1)
            target_optimizer = adamw(target.parameters())
            given = {"model_state_dict": saved[0], "optim_state_dict": saved[1]}
            quiet(set_state_dict, target, target_optimizer, **given)
        for param, expected in zip(target.parameters(), model.parameters(), strict=True):
            assert torch.equal(local(param.detach()), local(expected.detach())), name
        states = [local(each.state_dict()["state"]) for each in (target_optimizer, optimizer)]
        assert_same(deep(states[0]), deep(states[1]), name)


@on_ranks(2)
def test_model_with_units_of_both_engines_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        both = nn.ModuleDict({"theirs": TorchFSDP(block(3, 4), device_id=torch.device("cpu")), "ours": ours(False)})
    with dcp_enabled(), pytest.raises(ValueError, match=r"'theirs' is already wrapped by torch.*no state in common"):
        get_model_state_dict(both)
    for call in (checkpoint.get_model_state_dict, lambda model: checkpoint.get_optimizer_state_dict(model, ())):
        with pytest.raises(ValueError, match=r"torch\.distributed\.checkpoint\.state_dict is for"):
            call(both["theirs"])


# -- enabling and disabling --------------------------------------------------------------------------------------------


@on_ranks(2)
def test_torchs_functions_raise_unless_enabled() -> None:
    """They would return this rank's shards as if they were whole parameters."""
    for uop in (False, True):
        model, optimizer = trained(uop)
        saved = checkpoint.get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        fresh = adamw(model.parameters())
        given = {"model_state_dict": saved[0], "optim_state_dict": saved[1]}
        calls: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
            (get_optimizer_state_dict, (fresh,), {}),
            (get_state_dict, (fresh,), {}),
            (set_optimizer_state_dict, (fresh, saved[1]), {}),
            (set_state_dict, (fresh,), given),
            (set_model_state_dict, (saved[0],), {}),
        ]
        for around in (model, nn.ModuleDict({"inner": model}), compiled(model)):
            for call, args, kwargs in calls:
                words = rf"^{call.__name__}\(\) of torch.* call fsdp.compat.enable_dcp\(\)"
                with pytest.raises(RuntimeError, match=words):
                    call(around, *args, **kwargs)
        assert not fresh.state
        assert_same(deep(get_model_state_dict(model)), deep(saved[0]), "the model's state")
        assert not hasattr(model, "_fqn_modifiers")
        model.module._fqn_modifiers = dict
        assert model._fqn_modifiers is dict


def test_disabling_restores_torchs_functions() -> None:
    before = names_in_torch()
    enable_dcp()
    changed = {name for name, value in names_in_torch().items() if value is not before[name]}
    enable_dcp()
    assert changed == {
        "_get_model_state_dict",
        "_load_model_state_dict",
        "_get_optim_state_dict",
        "_load_optim_state_dict",
        "_NamedOptimizer._pre_load_state_dict",
    }
    disable_dcp()
    after = names_in_torch()
    assert after.keys() == before.keys() and all(value is before[name] for name, value in after.items())
    disable_dcp()
    assert all(value is before[name] for name, value in names_in_torch().items())


def test_version_of_torch_without_the_patched_names_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch_state_dict, "_load_optim_state_dict")
    monkeypatch.setattr(torch_state_dict, "_get_model_state_dict", lambda model, info, more: None)
    monkeypatch.setattr(torch_state_dict, "_StateDictInfo", StateDictOptions)
    before = names_in_torch()
    with pytest.raises(RuntimeError, match="does not fit this version of torch") as caught:
        enable_dcp()
    words = "_get_model_state_dict(model, info), _load_optim_state_dict(model, optimizers, state_dict, info), "
    words += "_StateDictInfo.handle_model, _StateDictInfo.handle_optim, _StateDictInfo.submodule_prefixes. Nothing"
    assert words in str(caught.value)
    assert names_in_torch() == before
