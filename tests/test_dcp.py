"""`get_state_dict`, `set_state_dict` and friends: what torch's do for torch's FSDP1, through torch's own storage."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast

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
from tests.harness.pool import run_ranks
from tests.test_optim_state import (
    adamw,
    assert_same,
    assert_same_states,
    build,
    ours,
    quiet,
    row_major,
    settle_all,
    torchs,
    train,
)

FULL = StateDictOptions(full_state_dict=True)


def trained(uop: bool, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    model = ours(uop, module=row_major(seed), **options)
    return model, train(adamw(model.parameters()))


def same_state(model: nn.Module, optimizer: Any, other: nn.Module, other_optimizer: Any, what: str) -> None:
    assert_same_states(optimizer.state_dict(), other_optimizer.state_dict(), what)
    for param, expected in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(param, expected), what


def check_like_torch() -> None:
    rank = dist.get_rank()
    for uop in (False, True):
        model, optimizer = trained(uop)
        theirs = torchs(uop, module=row_major())
        their_optimizer = train(adamw(theirs.parameters()))
        for chosen in (
            {},
            {"cpu_offload": True},
            {"full_state_dict": True},
            {"full_state_dict": True, "cpu_offload": True},
        ):
            what = f"use_orig_params={uop}, {chosen}"
            options = torch_state_dict.StateDictOptions(**chosen)
            mine = get_state_dict(model, optimizer, options=options)
            if len(chosen) == 2:  # torch's fails on CPU, where everything is offloaded already
                whole = get_state_dict(model, optimizer, options=FULL)
                assert_same(settle_all(mine), ({}, {}) if rank > 0 else settle_all(whole), what)
                continue
            expected = quiet(torch_state_dict.get_state_dict, theirs, their_optimizer, options=options)
            assert_same(settle_all(mine[0]), settle_all(expected[0]), f"{what}, model")
            assert_same(settle_all(mine[1]["state"]), settle_all(expected[1]["state"]), f"{what}, optimizer")
            assert_same(mine[1]["param_groups"], expected[1]["param_groups"], f"{what}, groups")


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_gives_what_torchs_gives(world_size: int) -> None:
    """Both modes, full and sharded, with and without offload; torch's options are taken."""
    run_ranks(world_size, check_like_torch)


def check_round_trips() -> None:
    rank = dist.get_rank()
    for uop in (False, True):
        model, optimizer = trained(uop)
        for options, given in (
            (None, None),
            (FULL, None),
            (StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=True), {}),
            (StateDictOptions(flatten_optimizer_state_dict=True), None),
            (StateDictOptions(ragged=True), None),
        ):
            saved = get_state_dict(model, optimizer, options=options)
            if given is not None and rank > 0:
                assert saved == ({}, {})
            other = ours(uop, module=row_major(1))
            other_optimizer = adamw(other.parameters())
            found = set_state_dict(
                other, other_optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=options
            )
            assert (found.missing_keys, found.unexpected_keys) == ([], [])
            same_state(other, other_optimizer, model, optimizer, f"use_orig_params={uop}, {options}")


def check_options() -> None:
    model, _ = trained(True)
    fresh = ours(True, module=row_major())
    fresh_optimizer = adamw(fresh.parameters())
    before = copy.deepcopy(fresh_optimizer.state_dict())
    initial = get_optimizer_state_dict(fresh, fresh_optimizer, options=FULL)
    assert initial["param_groups"][0]["lr"] == 0.01
    assert initial["state"]["bias"].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert_same(fresh_optimizer.state_dict(), before, "a fresh optimizer stays as it is")
    assert all(param.grad is None for param in fresh.parameters())

    blocks = get_model_state_dict(model, submodules={dict(model.named_modules())["_fsdp_wrapped_module.blocks"]})
    assert sorted({name.split(".")[0] for name in blocks}) == ["blocks"]
    options = StateDictOptions(keep_submodule_prefixes=False)
    short = get_model_state_dict(
        model, submodules={dict(model.named_modules())["_fsdp_wrapped_module.blocks"]}, options=options
    )
    assert [f"blocks.{name}" for name in short] == list(blocks)
    for module in (model, ours(False, module=row_major())):
        for name, param in module.named_parameters():
            if name.endswith(("tokens.weight", "blocks.0._fsdp_wrapped_module._flat_param")):
                param.requires_grad_(False)
        left = get_model_state_dict(module, options=StateDictOptions(ignore_frozen_params=True))
        gone = set(get_model_state_dict(module)) - set(left)
        frozen = {"tokens.weight", "head.weight"}  # one parameter
        assert gone == (frozen if module is model else {n for n in get_model_state_dict(module) if "blocks.0" in n})

    several = [adamw(model.blocks.parameters()), adamw([model.bias, model.conv.weight])]
    for one in several:
        train(one)
    joined = get_optimizer_state_dict(model, several, options=FULL)
    assert [sorted(group["params"]) for group in joined["param_groups"]][1] == ["bias", "conv.weight"]
    others = [adamw(model.blocks.parameters()), adamw([model.bias, model.conv.weight])]
    set_optimizer_state_dict(model, others, joined, options=FULL)
    for one, other in zip(several, others):
        assert_same_states(other.state_dict(), one.state_dict(), "several optimizers")
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


def check_plain() -> None:
    """The same calls for a plain model, DDP and a compiled one, and from there into a wrapped one."""
    plain = row_major()
    plain_optimizer = train(adamw(plain.parameters()))
    compiled = row_major()
    compiled.blocks[0] = quiet(torch.compile, compiled.blocks[0])
    for model in (row_major(), DistributedDataParallel(row_major()), compiled, quiet(torch.compile, row_major())):
        optimizer = train(adamw(model.parameters()))
        saved = get_state_dict(model, optimizer)
        assert sorted(saved[0]) == sorted(build().state_dict())
        assert sorted(saved[1]["state"]) == sorted(dict(build().named_parameters()))
        other = copy.deepcopy(row_major(1)) if model is not compiled else compiled
        other_optimizer = adamw(other.parameters())
        set_state_dict(other, other_optimizer, model_state_dict=saved[0], optim_state_dict=saved[1])
        assert_same_states(other_optimizer.state_dict(), plain_optimizer.state_dict(), "plain")
        for uop in (False, True):
            wrapped = ours(uop, module=row_major(1))
            wrapped_optimizer = adamw(wrapped.parameters())
            found = set_model_state_dict(wrapped, saved[0], options=FULL)
            assert (found.missing_keys, found.unexpected_keys) == ([], [])
            set_optimizer_state_dict(wrapped, wrapped_optimizer, saved[1], options=FULL)
            same_state(wrapped, wrapped_optimizer, *trained(uop), "from a plain model")


def test_it_goes_back_in_every_form() -> None:
    """Sharded, full, from rank 0, flattened."""
    run_ranks(2, check_round_trips)


def test_options_and_several_optimizers() -> None:
    """User-pain 25: frozen parameters, submodules, fresh optimizers, what a dict does not know."""
    run_ranks(2, check_options)


def test_what_only_rank_0_has_is_handed_out_to_all_kinds_of_models() -> None:
    """All of it or nothing; partly wrapped and plain models and DDP."""
    run_ranks(2, check_handed_out)


def test_plain_and_wrapped_models_exchange_state() -> None:
    """Plain, DDP, compiled."""
    run_ranks(2, check_plain)


class Around(nn.Module):
    """Around a module under any name; one parameter has no elements."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)
        self.head, self.none = nn.Linear(3, 2), nn.Parameter(torch.zeros(0, 4))


def check_names(root: str) -> None:
    def compiled(module: nn.Module) -> Any:
        return quiet(torch.compile, module)

    def wrapped(module: nn.Module) -> nn.Module:
        return ours(True, blocks=False, module=module)

    kinds: list[tuple[str, Any]] = [("inner", DistributedDataParallel), ("inner", compiled), ("_orig_mod", nn.Identity)]
    for name, around in [*kinds, ("_orig_mod", wrapped), ("module", wrapped)]:
        plain = Around(name, nn.Linear(2, 3))
        model = copy.deepcopy(plain)
        if around is not nn.Identity:
            model.add_module(name, around(model.get_submodule(name)))
        optimizer, of_plain = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
        expected = torch_state_dict.get_optimizer_state_dict(plain, of_plain)["state"]
        for options in (FULL, StateDictOptions()):
            what = f"{name}, {around}, {options}"
            state = get_state_dict(model, optimizer, options=options)
            assert state[0].keys() == plain.state_dict().keys(), what
            assert state[1]["state"].keys() == expected.keys(), what
            assert_same(settle_all(state[1]["state"]["none"]), expected["none"], what)
            state = quiet(copy.deepcopy, state)
            quiet(train, optimizer)  # which steps parameters of no unit
            set_state_dict(model, optimizer, model_state_dict=state[0], optim_state_dict=state[1], options=options)
            assert_same(dict(get_model_state_dict(model, options=FULL)), dict(plain.state_dict()), what)
            again = get_optimizer_state_dict(model, optimizer, options=FULL)
            assert again["state"].keys() == expected.keys(), what
            for param, states in expected.items():
                assert_same(settle_all(again["state"][param]), settle_all(states), f"{what}, {param}")
            optimizer = torch.optim.AdamW(model.parameters())
        loose = StateDictOptions(strict=False)
        found = set_model_state_dict(model, {"head.bias": torch.ones(2)}, options=loose)
        assert set(found.missing_keys) == plain.state_dict().keys() - {"head.bias"}, name
        save(root, model)
        load(root, plain)
        assert_same(dict(plain.state_dict()), dict(get_model_state_dict(model, options=FULL)), f"{name}, {around}")


def test_names_go_by_what_wraps_and_not_by_how_it_is_called(tmp_path: Path) -> None:
    """A DDP or a compiled module inside a plain one, modules called as those have their inner ones, and
    parameters without elements, whose state an optimizer that has not stepped has as well."""
    run_ranks(2, check_names, str(tmp_path))


class Told(nn.Module):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def check_handed_out() -> None:
    """Into modules that are not wrapped themselves: partly wrapped, DDP, plain."""
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    good = row_major(1).state_dict()
    for number in range(3):
        model: Any = row_major()
        if number == 0:
            model.blocks[0] = ours(True, module=model.blocks[0])
            model.conv = ours(False, module=model.conv)
        elif number == 1:
            model = DistributedDataParallel(model)
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
        good = row_major(1).state_dict()
    for given, kind, words in (
        (None, (TypeError, RuntimeError), "Expected state_dict to be dict-like, got"),
        ({"_extra_state": lambda: None}, TypeError, "rank 0 has cannot be sent to the other ranks: AttributeError"),
    ):
        told = Told()
        with pytest.raises(kind, match=words):
            set_model_state_dict(told, cast(Any, given) if dist.get_rank() == 0 else {}, options=loose)
        assert told.extra is None


def parts(model: nn.Module, optimizer: Any, ragged: bool) -> dict[str, Any]:
    options = StateDictOptions(ragged=ragged)
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options)))


def save_here(path: str, uop: bool, ragged: bool) -> None:
    quiet(torch_dcp.save, parts(*trained(uop), ragged), checkpoint_id=path)


def load_here(path: str, ragged: bool) -> None:
    planner = torch_dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)  # it drops those without rows here
    for uop in (False, True):
        model = ours(uop, blocks=uop, module=row_major(1))
        optimizer = adamw(model.parameters())
        state = parts(model, optimizer, ragged)
        quiet(torch_dcp.load, state, checkpoint_id=path, planner=None if ragged else planner)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        expected = ours(uop, blocks=uop, module=row_major())
        expected_optimizer = train(adamw(expected.parameters()))
        same_state(model, optimizer, expected, expected_optimizer, f"use_orig_params={uop}")


@pytest.mark.parametrize(("there", "here", "uop"), [(2, 3, False), (3, 1, True), (1, 2, True)])
def test_through_torchs_storage_to_another_number_of_ranks(tmp_path: Path, there: int, here: int, uop: bool) -> None:
    """In torch's sharded tensors and in intervals, written and read in either form."""
    for number, (writes, reads) in enumerate(((False, True), (True, False))):
        path = str(tmp_path / str(number))
        run_ranks(there, save_here, path, uop, writes)
        run_ranks(here, load_here, path, reads)


class Breaks(torch.optim.Adam):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        raise RuntimeError("in the middle of a step")


def test_state_that_could_not_be_made_leaves_none() -> None:
    module = nn.Linear(2, 2)
    optimizer = Breaks(module.parameters())
    with pytest.raises(RuntimeError, match="in the middle"):
        get_optimizer_state_dict(module, optimizer)
    assert not optimizer.state and all(param.grad is None for param in module.parameters())
