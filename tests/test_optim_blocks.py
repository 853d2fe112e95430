"""States of bitsandbytes' 8-bit optimizers come back through state dicts and checkpoints, in its layout.

A stand-in has that layout, and runs everywhere. bitsandbytes itself runs where it is installed.
"""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp import FullyShardedDataParallel, OptimStateKeyType
from fsdp.checkpoint import (
    StateDictOptions,
    get_optimizer_state_dict,
    load,
    load_plain,
    save,
    set_optimizer_state_dict,
)
from fsdp.optim import WholeParamOptimizer
from tests.harness.optim_states import FORMS, assert_resumed_losses_are_equal, transfer
from tests.harness.optim_states import train_on_sines as train
from tests.harness.pool import on_ranks, run_ranks

FSDP = FullyShardedDataParallel
without_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)

HIDDEN = "__bnb_optimizer_quant_state__"
ROW = 256  # elements of a block
RISE = torch.linspace(0, 1, 129)[1:] ** 3
BOOKS = {"1": torch.cat([-RISE[:-1].flip(0), torch.zeros(1), RISE]), "2": torch.linspace(0, 1, 256) ** 3}


class StandIn(Optimizer):
    """Adam with bitsandbytes' states, in plain tensors that ``state_dict()`` hides, and with its ``load_state_dict()``,
    which runs no hooks. As there, the code book with a sign has 1 and not -1, and small states are in float32."""

    small = 512
    hidden = ("state1", "qmap1", "absmax1", "state2", "qmap2", "absmax2")

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    state["step"] = 0
                    for number in ("1", "2"):
                        state.update(self.empty(param, number))
                state["step"] += 1
                grad = param.grad.float()
                m, v = (self.values(state, number) for number in ("1", "2"))
                m, v = torch.lerp(m, grad, 0.1), torch.lerp(v, grad.square(), 0.1)
                self.keep(state, "1", m)
                self.keep(state, "2", v)
                param -= group["lr"] * m / (v.sqrt() + 1e-3)

    def empty(self, param: Tensor, number: str) -> dict[str, Tensor]:
        if param.numel() < self.small:
            return {f"state{number}": torch.zeros_like(param, dtype=torch.float32)}
        codes, scales = torch.zeros_like(param, dtype=torch.uint8), torch.zeros(-(-param.numel() // ROW))
        return {f"state{number}": codes, f"qmap{number}": BOOKS[number], f"absmax{number}": scales}

    def values(self, state: dict[str, Any], number: str) -> Tensor:
        codes: Tensor = state[f"state{number}"]
        if codes.dtype != torch.uint8:
            return codes
        scales = state[f"absmax{number}"].repeat_interleave(ROW)[: codes.numel()]
        return BOOKS[number][codes.long()] * scales.view(codes.shape)

    def keep(self, state: dict[str, Any], number: str, values: Tensor) -> None:
        if f"qmap{number}" not in state:
            state[f"state{number}"].copy_(values)
            return
        blocks = list(values.flatten().split(ROW))
        scales = torch.stack([block.abs().max() for block in blocks])
        codes = [
            (block[:, None] / scale.clamp(min=1e-30) - BOOKS[number]).abs().argmin(1)
            for block, scale in zip(blocks, scales)
        ]
        state[f"state{number}"].copy_(torch.cat(codes).view(values.shape))
        state[f"absmax{number}"].copy_(scales)

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        for key, state in found["state"].items():
            found["state"][key] = {name: value for name, value in state.items() if name not in self.hidden}
            found["state"][key][HIDDEN] = {name: state[name] for name in self.hidden if name in state}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        given = copy.deepcopy(state_dict)
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in given["param_groups"] for key in group["params"]]
        state = {param: given["state"][key] for key, param in zip(keys, params, strict=True) if key in given["state"]}
        for of_param in state.values():
            of_param.update(of_param.pop(HIDDEN, {}))
        groups = [{**new, "params": old["params"]} for new, old in zip(given["param_groups"], self.param_groups)]
        self.__setstate__({"state": defaultdict(dict, state), "param_groups": groups})


REAL = ("AdamW8bit", "PagedAdamW8bit", "Lion8bit")
KINDS = ["stand-in", *(pytest.param(kind, marks=without_bitsandbytes) for kind in REAL)]


def made(kind: str, model: nn.Module, lr: float = 1e-3) -> Optimizer:
    """Return an optimizer that has states in blocks from 512 elements on."""
    if kind == "stand-in":
        return StandIn(model.parameters(), lr=lr)
    import bitsandbytes

    warnings.filterwarnings("ignore", "Paged optimizers are not supported on CPU", UserWarning)
    found: Optimizer = getattr(bitsandbytes.optim, kind)(model.parameters(), lr=lr, min_8bit_size=512)
    return found


def broad(use_orig_params: bool = True) -> FSDP:
    """Return a model with states in blocks, the last of which are cut, and in float32."""
    torch.manual_seed(0)
    inner = FSDP(nn.Linear(300, 8), use_orig_params=use_orig_params)
    return FSDP(nn.Sequential(nn.Linear(8, 300), nn.Tanh(), inner), use_orig_params=use_orig_params)


def tensors(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return a copy of each parameter's states."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [copy.deepcopy(dict(optimizer.state[param])) for param in params if optimizer.state.get(param)]


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 0
    assert any(value.dtype == torch.uint8 for state in expected for value in state.values() if type(value) is Tensor)
    for one, other in zip(found, expected):
        assert one.keys() == other.keys()
        for name, value in other.items():
            assert type(one[name]) is type(value), name
            alike = torch.equal(one[name], value) and one[name].dtype == value.dtype if type(value) is Tensor else None
            assert one[name] == value if alike is None else alike, name


@pytest.mark.parametrize("form", ["full", "rank 0", "sharded", "ragged", "dcp", "save", "one pass"])
@pytest.mark.parametrize("uop", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_codes_and_scales_come_back_bit_for_bit(kind: str, uop: bool, form: str, tmp_path: Path) -> None:
    """In the optimizer's own layout, without the mark, although no largest magnitude of a block need have a code."""
    model = broad(uop)
    optimizer, fresh = made(kind, model), made(kind, model)
    train(model, optimizer, 3)
    transfer(form, model, optimizer, fresh, tmp_path)
    assert_equal(tensors(fresh), tensors(optimizer))
    assert all(group.keys() == optimizer.param_groups[0].keys() for group in fresh.param_groups)
    assert fresh.param_groups[0]["lr"] == 1e-3
    train(model, fresh, 1)


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_losses_resumed_with_blocks_are_those_without_interruption(kind: str, tmp_path: Path) -> None:
    assert_resumed_losses_are_equal(broad, partial(made, kind), tmp_path)


def _save_blocks(kind: str, path: Path) -> None:
    model = broad(False)
    optimizer = made(kind, model)
    train(model, optimizer, 3)
    save(path, model, optimizer)


def _load_blocks(kind: str, path: Path) -> None:
    torch.manual_seed(0)
    model = FSDP(nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 8)), use_orig_params=True)
    optimizer = made(kind, model)
    load(path, model, optimizer)
    books = {name: book for state in optimizer.state.values() for name, book in state.items() if "qmap" in name}
    saved = load_plain(path).optimizer
    assert books and saved is not None
    with FSDP.state_dict_type(model, *FORMS["full"]):
        found = FSDP.optim_state_dict(model, optimizer)["state"]
    for name, states in saved["state"].items():
        for number in ("1", "2"):
            book, old = books[f"qmap{number}"], states[f"state{number}"].flatten()
            error = max(book.diff().max() / 2, (1 + book[0]) * (book[0] < 0))  # of one rounding, in a block up to 1
            largest = nn.functional.max_pool1d(old.abs()[None], 2 * ROW - 1, 1, ROW - 1)[0]  # of any block around
            assert ((found[name][f"state{number}"].flatten() - old).abs() <= error * largest).all(), name


@pytest.mark.parametrize("kind", ["stand-in", pytest.param("AdamW8bit", marks=without_bitsandbytes)])
def test_blocks_load_at_another_number_of_ranks_within_one_rounding(kind: str, tmp_path: Path) -> None:
    """Also into another wrapping, and from flat parameters into original ones."""
    run_ranks(2, _save_blocks, kind, tmp_path)
    run_ranks(3, _load_blocks, kind, tmp_path)


@pytest.mark.parametrize("kind", ["stand-in", pytest.param("AdamW8bit", marks=without_bitsandbytes)])
@on_ranks(2)
def test_blocks_of_plain_optimizers_load_in_both_directions(kind: str, tmp_path: Path) -> None:
    """Through checkpoints, and through dicts with other keys."""
    model = broad()
    plain = nn.Sequential(nn.Linear(8, 300), nn.Tanh(), nn.Linear(300, 8))
    optimizer, of_plain, back = made(kind, model), made(kind, plain), made(kind, plain)
    train(plain, of_plain, 2)
    load(save(tmp_path / "plain", plain, of_plain), model, optimizer)
    load(save(tmp_path / "wrapped", model, optimizer), plain, back)
    with FSDP.state_dict_type(model, *FORMS["full"]):
        saved = FSDP.optim_state_dict(model, optimizer)
    of_plain.load_state_dict(FSDP.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, plain, optim=of_plain))
    assert_equal(tensors(of_plain), tensors(back))
    assert all("fsdp_quantized" not in group for group in of_plain.param_groups)
    names = FSDP.rekey_optim_state_dict(of_plain.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=of_plain)
    fresh = made(kind, model)
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, names))
    assert {"qmap1", "absmax2"} <= {name for state in fresh.state.values() for name in state}
    train(plain, of_plain, 1)
    train(model, fresh, 1)


@pytest.mark.parametrize("uop", [True, False])
@on_ranks(2)
def test_blocks_of_parameters_that_are_not_in_the_dict_stay(uop: bool) -> None:
    """Kept codes are no values that have to be quantized."""
    model, options = broad(uop), StateDictOptions(strict=False)
    optimizer = made("stand-in", model)
    train(model, optimizer, 2)
    before = tensors(optimizer)
    given = get_optimizer_state_dict(model, optimizer, options=options)
    for group in given["param_groups"]:
        group["params"].remove("0.weight")
    del given["state"]["0.weight"]
    set_optimizer_state_dict(model, optimizer, given, options=options)
    assert_equal(tensors(optimizer), before)


class Failing(StandIn):
    """An optimizer that one rank cannot load."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        if dist.get_rank() == 1:
            raise ArithmeticError("on purpose")


@on_ranks(2)
def test_a_failed_load_of_blocks_changes_nothing(tmp_path: Path) -> None:
    """The states are those from before on both ranks, and so are the parameters."""
    model = broad()
    optimizer = made("stand-in", model)
    train(model, optimizer, 2)
    path = save(tmp_path, model, optimizer)
    used = Failing(model.parameters())
    train(model, used, 1)
    before, params = tensors(used), [param.detach().clone() for param in model.parameters()]
    with pytest.raises((RuntimeError, ArithmeticError), match="on purpose"):
        load(path, model, used)
    assert_equal(tensors(used), before)
    assert all(torch.equal(param, old) for param, old in zip(model.parameters(), params, strict=True))


@on_ranks(2)
def test_blocks_beside_whole_parameters_come_back(tmp_path: Path) -> None:
    """The optimizer of whole parameters has blocks of them, in their own shape."""

    def both() -> Optimizer:
        return WholeParamOptimizer(
            model, StandIn, select=lambda _, shape: len(shape) == 2, rest=lambda params: StandIn(params, lr=0.02)
        )

    model = broad()
    optimizer, fresh = both(), both()
    train(model, optimizer, 2)
    load(save(tmp_path, model, optimizer), model, fresh)
    assert_equal(tensors(fresh), tensors(optimizer))


@pytest.mark.parametrize("layout", ["without scales", "of another size", "of several rows", "with gaps"])
@on_ranks(2)
def test_codes_in_an_unknown_layout_are_refused(layout: str, tmp_path: Path) -> None:
    """Codes are not taken for values: the error has the state and the parameter, whether it is hidden or not."""
    model = broad()
    optimizer = made("stand-in", model)
    train(model, optimizer, 1)
    for state in optimizer.state.values():
        if "absmax1" in state:
            scales, codes = state.pop("absmax1"), state["state1"]
            if layout == "of another size":
                state["absmax1"] = scales[::2].clone()
            elif layout == "with gaps":
                state.update(state1=codes.repeat_interleave(2)[::2], absmax1=scales)
            elif layout == "of several rows":
                state.update(state1=codes.expand(2, -1).clone(), absmax1=scales.expand(2, -1).clone())
    words = (
        rf"state '{HIDDEN}' of '0.weight' is a dict of tensors.*of bitsandbytes whose states have the parameter's size"
    )
    with pytest.raises(NotImplementedError, match=words):
        save(tmp_path, model, optimizer)
    shown = Optimizer.state_dict(optimizer)
    with pytest.raises(NotImplementedError, match=r"state 'qmap1' of '0\.weight' has shape"):
        FSDP.optim_state_dict(model, optimizer, shown)


@on_ranks(2)
def test_own_blocks_are_not_taken_for_another_ranks_state() -> None:
    """A code book has as many elements as the second rank's part of the weight."""
    model = FSDP(nn.Linear(2, 512), use_orig_params=True)
    assert [param.numel() for param in model.parameters()] == ([256, 512] if dist.get_rank() else [768, 0])
    optimizer, fresh = made("stand-in", model), made("stand-in", model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fresh.load_state_dict(optimizer.state_dict())
    fresh.step()


@on_ranks(2)
def test_blocks_of_zeros_have_the_code_of_zero() -> None:
    """Their scale is zero, which nothing can be divided by."""
    model = broad()
    optimizer, fresh = made("stand-in", model), made("stand-in", model)
    (0 * model(torch.ones(1, 8)).sum()).backward()
    optimizer.step()
    with FSDP.state_dict_type(model, *FORMS["full"]):
        saved = FSDP.optim_state_dict(model, optimizer)
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, saved))
    codes = [state["state1"] for state in fresh.state.values() if "qmap1" in state]
    assert codes and not any(BOOKS["1"][one.long()].any() for one in codes)
