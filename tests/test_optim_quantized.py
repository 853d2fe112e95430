"""Optimizer states in a quantized class keep that class, and their values, through state dicts and checkpoints."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from fsdp import FullyShardedDataParallel, OptimStateKeyType
from fsdp.checkpoint import load, load_plain, save
from fsdp.optim import WholeParamOptimizer
from tests.harness.optim_states import FORMS, assert_resumed_losses_are_equal, transfer
from tests.harness.optim_states import train_on_sines as train
from tests.harness.pool import on_ranks, run_ranks

FSDP = FullyShardedDataParallel
aten = torch.ops.aten
BLOCK = 4


class Int8(Tensor):
    """A tensor in blocks of four: codes from -127 to 127, and the largest magnitude of each block."""

    codes: Tensor
    scales: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Int8:
        made: Int8 = torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=dtype, device=codes.device)
        made.codes, made.scales = codes, scales
        return made

    @classmethod
    def zeros(cls, like: Tensor) -> Int8:
        codes = torch.zeros_like(like, dtype=torch.int8)
        return cls(codes, torch.zeros(codes.numel() // BLOCK), like.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], self.dtype

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8({self.codes}, {self.scales})"

    def dequantize(self) -> Tensor:
        return (self.codes.view(-1, BLOCK) / 127 * self.scales[:, None]).view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scales), args[0].dtype)
        if func is not aten.copy_.default:
            raise NotImplementedError(f"Int8 has no {func}")
        target, source = args
        blocks = (source.dequantize() if isinstance(source, Int8) else source).float().reshape(-1, BLOCK)
        target.scales.copy_(blocks.abs().amax(1))
        of_one = blocks / target.scales.clamp(min=1e-30)[:, None]
        target.codes.copy_((of_one * 127).round().to(torch.int8).view(target.codes.shape))
        return target


class Adam8(Optimizer):
    """Adam whose moments are :class:`Int8`, except for sizes that have no whole blocks."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    even = param.numel() % BLOCK == 0
                    state["step"] = torch.tensor(0.0)
                    for name in ("m", "v"):
                        state[name] = Int8.zeros(param) if even else torch.zeros_like(param)
                state["step"] += 1
                m, v = (one.dequantize() if isinstance(one, Int8) else one for one in (state["m"], state["v"]))
                grad = param.grad.float()
                m, v = torch.lerp(m.float(), grad, 0.1), torch.lerp(v.float(), grad.square(), 0.1)
                state["m"].copy_(m)
                state["v"].copy_(v)
                param -= group["lr"] * m / (v.sqrt() + 1e-3)


def build(use_orig_params: bool) -> FSDP:
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), FSDP(nn.Linear(16, 8), use_orig_params=use_orig_params))
    return FSDP(inner, use_orig_params=use_orig_params)


def quantized(optimizer: Optimizer) -> list[tuple[type, Any, Any]]:
    """Return class, codes and scales of each state with dimensions."""
    return [
        (type(value), getattr(value, "codes", value), getattr(value, "scales", value))
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    ]


@pytest.mark.parametrize("form", ["full", "rank 0", "sharded", "dcp", "save", "one pass"])
@pytest.mark.parametrize("uop", [True, False])
@on_ranks(2)
def test_states_come_back_in_their_class_bit_for_bit(uop: bool, form: str, tmp_path: Path) -> None:
    """The class can represent the largest value of a block, so that quantizing once more changes no code."""
    model = build(uop)
    optimizer = Adam8(model.parameters())
    train(model, optimizer, 3)
    fresh = Adam8(model.parameters())
    transfer(form, model, optimizer, fresh, tmp_path)
    before, after = quantized(optimizer), quantized(fresh)
    assert len(before) == len(after) > 0 and any(kind is Int8 for kind, _, _ in before)
    for (kind, *expected), (found, *values) in zip(before, after):
        assert kind is found
        assert all(torch.equal(one, other) for one, other in zip(expected, values))
    assert all(set(group) == {"params", "lr"} for group in fresh.param_groups), "the mark is not the optimizer's"
    assert fresh.param_groups[0]["lr"] == 0.01, "the rate of the step that makes the states must not stay"


@on_ranks(2)
def test_resumed_losses_are_those_of_a_run_without_interruption(tmp_path: Path) -> None:
    assert_resumed_losses_are_equal(lambda: build(True), lambda model, lr=0.01: Adam8(model.parameters(), lr), tmp_path)


@on_ranks(2)
def test_loads_plain_models_and_their_checkpoints(tmp_path: Path) -> None:
    """A plain model's 8-bit states are saved by ``fsdp.checkpoint`` and loaded into a wrapped model, and back."""
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    of_plain = Adam8(plain.parameters())
    train(plain, of_plain, 2)
    torch.manual_seed(0)
    model = build(False)
    optimizer = Adam8(model.parameters())
    load(save(tmp_path / "plain", plain, of_plain), model, optimizer)
    kinds = {type(value) for state in optimizer.state.values() for value in state.values()}
    assert kinds == {Int8, Tensor}
    back = Adam8(plain.parameters())
    load(save(tmp_path / "wrapped", model, optimizer), plain, back)
    for before, after in zip(of_plain.state.values(), back.state.values(), strict=True):
        assert type(before["m"]) is type(after["m"]) is Int8
        if dist.get_rank() == 0:  # which saved
            old, new = before["m"].dequantize(), after["m"].dequantize()
            assert (old - new).abs().max() <= old.abs().max() / 127


@on_ranks(2)
def test_dicts_of_plain_optimizers_load_in_both_directions() -> None:
    """A plain optimizer's dict has the class itself, and a wrapped model's dict loads into a plain optimizer."""
    model = build(True)
    optimizer = Adam8(model.parameters())
    train(model, optimizer, 2)
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    of_plain = Adam8(plain.parameters())
    with FSDP.state_dict_type(model, *FORMS["full"]):
        saved = FSDP.optim_state_dict(model, optimizer)
    of_plain.load_state_dict(FSDP.rekey_optim_state_dict(saved, OptimStateKeyType.PARAM_ID, plain, optim=of_plain))
    assert {type(state["m"]) for state in of_plain.state.values()} == {Int8}
    assert all(set(group) == {"params", "lr"} for group in of_plain.param_groups)
    names = FSDP.rekey_optim_state_dict(of_plain.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=of_plain)
    fresh = Adam8(model.parameters())
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, names))
    for (kind, *expected), (found, *values) in zip(quantized(optimizer), quantized(fresh), strict=True):
        assert kind is found
        assert all(torch.equal(one, other) for one, other in zip(expected, values))


def _save_on(path: Path) -> None:
    model = build(True)
    optimizer = Adam8(model.parameters())
    train(model, optimizer, 2)
    save(path, model, optimizer)


def _load_on(path: Path) -> None:
    model = build(True)
    optimizer = Adam8(model.parameters())
    load(path, model, optimizer)
    assert Int8 in {type(value) for state in optimizer.state.values() for value in state.values()}
    state = load_plain(path).optimizer
    assert state is not None
    with FSDP.state_dict_type(model, *FORMS["full"]):
        found = FSDP.optim_state_dict(model, optimizer)
    for name, states in found["state"].items():
        for key in ("m", "v"):
            saved = state["state"][name][key]
            assert (states[key] - saved).abs().max() <= saved.abs().max() / 127, name


def test_states_load_at_another_number_of_ranks_within_one_code(tmp_path: Path) -> None:
    """Blocks are cut elsewhere, so that values round once more, each by half a code of the new block."""
    run_ranks(2, _save_on, tmp_path)
    run_ranks(3, _load_on, tmp_path)


@on_ranks(2)
def test_states_of_parameters_in_bfloat16_come_back_within_the_precision(tmp_path: Path) -> None:
    """State dicts hold the dtype that the class shows, so ranks with and without whole blocks agree."""
    torch.manual_seed(0)
    model = FSDP(nn.Linear(5, 7, dtype=torch.bfloat16), use_orig_params=True)
    optimizer = Adam8(model.parameters())
    for param in filter(torch.numel, model.parameters()):
        param.grad = torch.sin(7 * param.detach())
    optimizer.step()
    fresh = Adam8(model.parameters())
    load(save(tmp_path, model, optimizer), model, fresh)
    for (kind, *_), (found, *_) in zip(quantized(optimizer), quantized(fresh), strict=True):
        assert kind is found
    for param, state in optimizer.state.items():
        for name in ("m", "v") if isinstance(state["m"], Int8) else ():
            old, new = state[name].dequantize(), fresh.state[param][name].dequantize()
            assert (old - new).abs().max() <= old.abs().max() / 100


@on_ranks(2)
def test_the_mark_is_there_if_another_rank_has_quantized_states() -> None:
    """Rank 0 has part of no whole block here, and writes the groups of the state dict."""
    model = FSDP(nn.Linear(3, 1, bias=False), use_orig_params=True)
    optimizer = Adam8(model.parameters())
    param = next(model.parameters())
    param.grad = torch.ones_like(param)
    optimizer.step()
    if dist.get_rank() == 1:
        optimizer.state[param]["m"] = _Odd.of(optimizer.state[param]["m"])
    with FSDP.state_dict_type(model, *FORMS["full"]):
        saved = FSDP.optim_state_dict(model, optimizer)
    assert saved["param_groups"][0]["fsdp_quantized"] is True
    assert type(saved["state"]["weight"]["m"]) is Tensor


class _Odd(Int8):
    """A quantized state of any size."""

    @staticmethod
    def of(values: Tensor) -> _Odd:
        return _Odd(values.to(torch.int8), values, values.dtype)

    def dequantize(self) -> Tensor:
        return self.scales


@on_ranks(2)
def test_states_beside_whole_parameters_come_back_in_their_class(tmp_path: Path) -> None:
    """The optimizer of the rest is an 8-bit one, and so is the one of whole parameters."""

    def made(model: FSDP) -> Optimizer:
        return WholeParamOptimizer(
            model, Adam8, select=lambda _, shape: len(shape) == 2, rest=lambda params: Adam8(params, lr=0.02)
        )

    model = build(True)
    optimizer = made(model)
    train(model, optimizer, 2)
    path = save(tmp_path, model, optimizer)
    expected = train(model, optimizer, 2)
    other = build(True)
    fresh = made(other)
    load(path, other, fresh)
    assert {type(value) for state in fresh.state.values() for value in state.values()} == {Int8, Tensor}
    assert train(other, fresh, 2) == expected


class Blocks(Adam8):
    """An optimizer that keeps codes and scales in a dict of tensors, as bitsandbytes' state dicts do."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["blocks"] = {"codes": torch.zeros(3, dtype=torch.uint8), "scales": torch.ones(1)}


@on_ranks(2)
def test_quantized_states_of_no_class_are_refused_with_a_remedy(tmp_path: Path) -> None:
    """The blocks of one shard have no meaning on another: the error has the state, the parameter and the remedy."""
    model = build(True)
    optimizer = Blocks(model.parameters())
    train(model, optimizer, 1)
    words = r"'blocks' of '0.weight' is a dict of tensors.*save each rank's optimizer.state_dict\(\).*such as torchao's"
    with pytest.raises(NotImplementedError, match=words):
        save(tmp_path, model, optimizer)
    with pytest.raises(NotImplementedError, match=words), FSDP.state_dict_type(model, *FORMS["full"]):
        FSDP.optim_state_dict(model, optimizer)


class Lists(Adam8):
    """An optimizer with a list among the states, which holds tensors if it steps whole parameters."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for param, state in self.state.items():
            state["list"] = [1, 2.5, "a", [None]]
            if param.dim() == 2:
                state["list"] += [torch.arange(3.0), param.detach().clone()]


@pytest.mark.parametrize("whole", [False, True])
@on_ranks(2)
def test_lists_among_the_states_are_saved_without_pickle(whole: bool, tmp_path: Path) -> None:
    """They are JSON, and tensors in them are tensors of the file, so that no ``trusted`` is needed."""
    model = FSDP(nn.Linear(8, 8, bias=False), use_orig_params=True)

    def made() -> Optimizer:
        if whole:
            return WholeParamOptimizer(model, Lists, select=lambda _, shape: len(shape) == 2)
        return Lists(model.parameters())

    optimizer, fresh = made(), made()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    path = save(tmp_path, model, optimizer)
    load(path, model, fresh)
    assert b"$pickle" not in (path / "rank_0.safetensors").read_bytes()
    held = [state["list"] for state in optimizer.state.values()]
    found = [state["list"] for state in fresh.state.values()]
    assert len(held) == len(found) >= (0 if dist.get_rank() else 1), "the owner has the state"
    for one, other in zip(held, found):
        assert one[:4] == other[:4] == [1, 2.5, "a", [None]]
        assert len(one) == len(other) == (6 if whole else 4)
        if whole:
            assert torch.equal(one[4], other[4]) and torch.equal(one[5], other[5])


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("uop", [True, False])
@on_ranks(2)
def test_states_of_torchao_come_back_in_their_class(uop: bool, tmp_path: Path) -> None:
    """Within one code of the class, which cannot represent every block's largest negative value."""
    from torchao.optim import AdamW8bit

    torch.compiler.set_stance("force_eager")

    def wide() -> FSDP:
        torch.manual_seed(0)
        return FSDP(nn.Sequential(nn.Linear(8, 2048), nn.Tanh(), nn.Linear(2048, 8)), use_orig_params=uop)

    for form in ("full", "sharded", "save"):
        model = wide()
        optimizer = AdamW8bit(model.parameters(), lr=1e-3)
        train(model, optimizer, 4)
        fresh = AdamW8bit(model.parameters(), lr=1e-3)
        transfer(form, model, optimizer, fresh, tmp_path)
        for before, after in zip(optimizer.state.values(), fresh.state.values(), strict=True):
            for name in before:
                assert type(before[name]) is type(after[name])
                old, new = before[name], after[name]
                if type(old) is not Tensor:
                    old, new = old.dequantize(), new.dequantize()
                assert (old - new).abs().max() <= 0.01 * old.abs().max(), name
        train(model, fresh, 1)  # the optimizer can step
