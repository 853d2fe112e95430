"""`get_state_dict`, `set_state_dict` and friends: the counterparts of torch's functions for models of this package."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.nn.parallel import DistributedDataParallel

from fsdp.checkpoint import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    load,
    save,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.harness.models import Net
from tests.harness.optim_states import (
    adamw,
    assert_same,
    assert_same_states,
    compiled,
    ours,
    parts,
    quiet,
    row_major,
    same_state,
    settle_all,
    train,
    trained,
)
from tests.harness.pool import on_ranks, run_ranks

FULL = StateDictOptions(full_state_dict=True)


@on_ranks(2)
def test_options_and_several_optimizers() -> None:
    """Tied frozen parameters, fresh optimizers, and parameters that a state dict lacks; see test_compat for others."""
    model, _ = trained(True)
    fresh = ours(True, module=row_major())
    fresh_optimizer = adamw(fresh.parameters())
    before = copy.deepcopy(fresh_optimizer.state_dict())
    initial = get_optimizer_state_dict(fresh, fresh_optimizer, options=FULL)
    assert initial["param_groups"][0]["lr"] == 0.01
    assert initial["state"]["bias"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert_same(fresh_optimizer.state_dict(), before, "a fresh optimizer stays as it is")
    assert all(param.grad is None for param in fresh.parameters())

    model.tokens.weight.requires_grad_(False)
    trained_only = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert get_model_state_dict(model).keys() - trained_only.keys() == {"tokens.weight", "head.weight"}  # tied
    model.tokens.weight.requires_grad_(True)

    several = [adamw(model.blocks.parameters()), adamw([model.bias, model.conv.weight])]
    for each in several:
        train(each)
    joined = get_optimizer_state_dict(model, several, options=FULL)
    assert [sorted(group["params"]) for group in joined["param_groups"]][1] == ["bias", "conv.weight"]
    targets = [adamw(model.blocks.parameters()), adamw([model.bias, model.conv.weight])]
    set_optimizer_state_dict(model, targets, joined, options=FULL)
    for source, target in zip(several, targets):
        assert_same_states(target.state_dict(), source.state_dict(), "several optimizers")
    for broadcast in (False, True):
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        with pytest.raises(RuntimeError, match=r"the optimizer trains 'tokens.weight', 'conv.bias', which no"):
            set_optimizer_state_dict(model, adamw(model.parameters()), joined, options=options)
        with pytest.raises(KeyError, match="param_groups"):
            set_optimizer_state_dict(model, adamw(model.parameters()), {"state": {}}, options=options)
    partly = adamw(model.parameters())
    set_optimizer_state_dict(model, partly, joined, options=StateDictOptions(full_state_dict=True, strict=False))
    with pytest.raises(ValueError, match="full_state_dict must be True"):
        get_model_state_dict(model, options=StateDictOptions(broadcast_from_rank0=True))
    with pytest.raises(TypeError, match="options must be StateDictOptions"):
        get_model_state_dict(model, options={"full_state_dict": True})  # type: ignore[arg-type]


@on_ranks(2)
def test_state_of_rank_0_is_broadcast_to_all_kinds_of_models() -> None:
    """Partly wrapped and compiled models and DDP load the whole state, or raise and load none."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    good = row_major(1).state_dict()
    for number in range(3):
        model: Any = row_major()
        if number == 0:
            model.blocks[0] = ours(True, module=model.blocks[0])
            model.conv = ours(False, module=model.conv)
        else:
            model = DistributedDataParallel(model) if number == 1 else compiled(model)
        found = set_model_state_dict(model, good if dist.get_rank() == 0 else {}, options=options)
        assert (found.missing_keys, found.unexpected_keys) == ([], [])
        assert_same(dict(get_model_state_dict(model, options=FULL)), dict(good), "handed out")
        bad = {key: value + 1 for key, value in good.items() if key != "bias"}
        bad |= {"conv.bias": torch.ones(9), "blocks.2.scale": torch.ones(1)}
        with pytest.raises(RuntimeError) as caught:
            set_model_state_dict(model, bad if dist.get_rank() == 0 else {}, options=options)
        for words in (
            'Unexpected key(s) in state_dict: "blocks.2.scale"',
            'Missing key(s) in state_dict: "bias"',
            "size mismatch for conv.bias: copying a param with shape torch.Size([9])",
        ):
            assert words in str(caught.value)
        assert_same(dict(get_model_state_dict(model, options=FULL)), dict(good), "nothing was loaded")
        part = {"bias": good["bias"] + 1, "blocks.0.scale": good["blocks.0.scale"] + 1}
        loose = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
        found = set_model_state_dict(model, {**part, "x": part["bias"]} if dist.get_rank() == 0 else {}, options=loose)
        assert set(found.missing_keys) == set(good) - set(part)
        assert found.unexpected_keys == ["x"]
        assert_same(dict(get_model_state_dict(model, options=FULL)), {**good, **part}, "not strict")


@on_ranks(2)
def test_names_depend_on_the_wrapper_and_not_on_attribute_names(tmp_path: Path) -> None:
    """A DDP or compiled module inside a plain one, and modules with the attribute names of wrappers.

    Parameters without elements have optimizer state even before the first step.
    """

    def wrapped(module: nn.Module) -> nn.Module:
        return ours(True, blocks=False, module=module)

    kinds: list[tuple[str, Any]] = [("inner", DistributedDataParallel), ("inner", compiled), ("_orig_mod", nn.Identity)]
    for name, around in [*kinds, ("_orig_mod", wrapped), ("module", wrapped)]:
        none = nn.Parameter(torch.zeros(0, 4))
        plain = Net(**{name: nn.Linear(2, 3)}, head=nn.Linear(3, 2), none=none)
        model = copy.deepcopy(plain)
        if around is not nn.Identity:
            model.add_module(name, around(model.get_submodule(name)))
        optimizer, of_plain = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
        expected = torch_state_dict.get_optimizer_state_dict(plain, of_plain)["state"]
        for options in (FULL, StateDictOptions()):
            case = f"{name}, {around}, {options}"
            state = get_state_dict(model, optimizer, options=options)
            assert state[0].keys() == plain.state_dict().keys(), case
            assert state[1]["state"].keys() == expected.keys(), case
            assert_same(settle_all(state[1]["state"]["none"]), expected["none"], case)
            set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options)
            assert_same(dict(get_model_state_dict(model, options=FULL)), dict(plain.state_dict()), case)
        loose = StateDictOptions(strict=False)
        found = set_model_state_dict(model, {"head.bias": torch.ones(2)}, options=loose)
        assert set(found.missing_keys) == plain.state_dict().keys() - {"head.bias"}, name
        by_module: Any = {model: {"head.bias": torch.ones(2)}, model.get_submodule(name): {"bias": torch.ones(3)}}
        found = set_model_state_dict(model, by_module, options=loose)
        assert set(found.missing_keys) == plain.state_dict().keys() - {"head.bias", f"{name}.bias"}, name
        assert get_model_state_dict(model, options=FULL)[f"{name}.bias"].tolist() == [1, 1, 1], name
        with pytest.raises(ValueError, match="a Linear is not in it"):
            set_model_state_dict(model, {nn.Linear(1, 1): {}}, options=loose)  # type: ignore[dict-item]
        save(tmp_path, model)
        load(tmp_path, plain)
        assert_same(dict(plain.state_dict()), dict(get_model_state_dict(model, options=FULL)), f"{name}, {around}")


def save_by_torch(path: str, uop: bool, ragged: bool) -> None:
    quiet(torch_dcp.save, parts(*trained(uop), ragged), checkpoint_id=path)


def load_by_torch(path: str, uop: bool, ragged: bool) -> None:
    planner = torch_dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)  # flattening drops tensors without rows here
    model = ours(uop, blocks=uop, module=row_major(1))
    optimizer = adamw(model.parameters())
    state = parts(model, optimizer, ragged)
    quiet(torch_dcp.load, state, checkpoint_id=path, planner=None if ragged else planner)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    expected = ours(uop, blocks=uop, module=row_major())
    expected_optimizer = train(adamw(expected.parameters()))
    same_state(model, optimizer, expected, expected_optimizer, f"use_orig_params={uop}")


@pytest.mark.parametrize(("saving", "loading", "uop"), [(2, 3, False), (3, 1, True), (1, 2, True)])
def test_torchs_storage_carries_state_to_other_numbers_of_ranks(
    tmp_path: Path, saving: int, loading: int, uop: bool
) -> None:
    """State is written and read as torch's sharded tensors or as ragged tensors."""
    for number, (writes, reads) in enumerate(((False, True), (True, False))):
        path = str(tmp_path / str(number))
        run_ranks(saving, save_by_torch, path, uop, writes)
        run_ranks(loading, load_by_torch, path, (number + loading) % 2 == 0, reads)
