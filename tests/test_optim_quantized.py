"""States of 8-bit optimizers keep their layout, and their values within one rounding, in dicts and checkpoints.

The optimizers are stand-ins for torchao's and bitsandbytes'; `scripts/clients.py` runs the latter.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import max_pool1d
from torch.optim import Optimizer

from fsdp import FullyShardedDataParallel, OptimStateKeyType
from fsdp.checkpoint import load, load_plain, save
from fsdp.optim import WholeParamOptimizer
from tests.harness.optim_states import FORMS, transfer
from tests.harness.pairs import pairwise
from tests.harness.pool import on_ranks

FSDP = FullyShardedDataParallel
aten = torch.ops.aten
FOUR = 4  # elements of a block
HIDDEN = "__bnb_optimizer_quant_state__"
ROW = 256  # elements of a block of the libraries
RISE = torch.linspace(0, 1, 129)[1:] ** 3
BOOKS = {"1": torch.cat([-RISE[:-1].flip(0), torch.zeros(1), RISE]), "2": torch.linspace(0, 1, 256) ** 3}


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
        return cls(codes, torch.zeros(codes.numel() // FOUR), like.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], self.dtype

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Int8({self.codes}, {self.scales})"

    def dequantize(self) -> Tensor:
        return (self.codes.view(-1, FOUR) / 127 * self.scales[:, None]).view(self.codes.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default):
            return cls(func(args[0].codes), func(args[0].scales), args[0].dtype)
        if func is not aten.copy_.default:
            raise NotImplementedError(f"Int8 has no {func}")
        target, source = args
        blocks = (source.dequantize() if isinstance(source, Int8) else source).float().reshape(-1, FOUR)
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
                    even = param.numel() % FOUR == 0
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


def made(kind: str, params: Any, lr: float = 1e-3) -> Optimizer:
    """Return an optimizer that has states of 8 bits."""
    return (Adam8 if kind == "Adam8" else StandIn)(params, lr=lr)


def plain_model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 300, dtype=dtype), nn.Tanh(), nn.Linear(300, 8, dtype=dtype))


def plain_like(model: FSDP) -> nn.Module:
    return plain_model(next(model.parameters()).dtype)


def build(use_orig_params: bool = True, dtype: torch.dtype = torch.float32) -> FSDP:
    """Return a model with states in blocks, the last of which are cut, and in float32."""
    inner: Any = plain_model(dtype)
    inner[2] = FSDP(inner[2], use_orig_params=use_orig_params)
    return FSDP(inner, use_orig_params=use_orig_params)


def step(model: nn.Module, optimizer: Optimizer, steps: int = 1) -> None:
    for number in range(steps):
        for param in filter(torch.numel, model.parameters()):
            param.grad = torch.sin((7 + number) * param.detach())  # zero in the padding
        optimizer.step()
        optimizer.zero_grad()


def layout(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the names, classes, dtypes and shapes of each parameter's states."""

    def described(value: Any) -> Any:
        return (type(value), value.dtype, value.shape) if isinstance(value, Tensor) else type(value)

    states = [optimizer.state.get(param) for group in optimizer.param_groups for param in group["params"]]
    return [{name: described(value) for name, value in state.items()} for state in states if state]


def full(model: FSDP, optimizer: Optimizer) -> dict[str, Any]:
    with FSDP.state_dict_type(model, *FORMS["full"]):
        found = FSDP.optim_state_dict(model, optimizer)
    assert all("fsdp_quantized" in group for group in found["param_groups"])
    states: dict[str, Any] = found["state"]
    return states


def saved(path: Path) -> dict[str, Any]:
    optimizer = load_plain(path).optimizer
    assert optimizer is not None
    states: dict[str, Any] = optimizer["state"]
    return states


def assert_rounded_once(kind: str, found: Any, expected: Any, optimizer: Optimizer, *, flat: bool) -> None:
    """Compare values, which may differ by half a step between two codes, times the largest magnitude of their block, or
    by the least value of a code book that ends before -1."""
    books = {name: book for state in optimizer.state.values() for name, book in state.items() if "qmap" in name}
    assert found.keys() == expected.keys() and len(found) == 4
    for name, states in expected.items():
        assert found[name].keys() == states.keys()
        for state, value in states.items():
            if not isinstance(value, Tensor) or value.dim() == 0:
                assert found[name][state] == value
                continue
            old, new, row = value.flatten().float(), found[name][state].flatten().float(), FOUR
            error = 0.5 / 127 + (2**-7 if value.dtype == torch.bfloat16 else 0.0)
            if kind != "Adam8":
                book, row = books.get(state.replace("state", "qmap")), ROW
                error = 0.01 if book is None else float(max(book.diff().max() / 2, (1 + book[0]) * (book[0] < 0)))
            largest = max_pool1d(old.abs()[None], 2 * row - 1, 1, row - 1)[0]  # of any block around
            if flat:  # the block may have elements of the next parameter
                largest = torch.stack([values[state].abs().max() for values in expected.values()]).max()
            assert ((new - old).abs() <= 1.001 * error * largest).all(), (name, state)


Route = Callable[[str, FSDP, Path], tuple[Optimizer, Any, Optimizer, Any]]


def through(form: str) -> Route:
    """Move states from one optimizer of the model to another."""

    def route(kind: str, model: FSDP, root: Path) -> tuple[Optimizer, Any, Optimizer, Any]:
        optimizer, fresh = made(kind, model.parameters()), made(kind, model.parameters())
        step(model, optimizer, 3)
        transfer(form, model, optimizer, fresh, root)
        return optimizer, full(model, optimizer), fresh, full(model, fresh)

    return route


def from_plain(kind: str, model: FSDP, root: Path) -> tuple[Optimizer, Any, Optimizer, Any]:
    """Save a plain model, and load into the wrapped one."""
    plain = plain_like(model)
    optimizer, fresh, stepped = made(kind, plain.parameters()), *(made(kind, model.parameters()) for _ in range(2))
    step(plain, optimizer, 3)
    path = save(root, plain, optimizer)
    load(path, model, fresh)
    step(model, stepped)
    return stepped, saved(path), fresh, full(model, fresh)


def to_plain(kind: str, model: FSDP, root: Path) -> tuple[Optimizer, Any, Optimizer, Any]:
    """Save the wrapped model, and load into a plain one."""
    plain = plain_like(model)
    optimizer, fresh, stepped = made(kind, model.parameters()), *(made(kind, plain.parameters()) for _ in range(2))
    step(model, optimizer, 3)
    path = save(root, model, optimizer)
    load(path, plain, fresh)
    step(plain, stepped)
    return stepped, saved(path), fresh, saved(save(root, plain, fresh))


def by_other_keys(kind: str, model: FSDP, root: Path) -> tuple[Optimizer, Any, Optimizer, Any]:
    """Load a dict of numbers into a plain optimizer, and a dict of names that this one makes into the wrapped model."""
    plain = plain_like(model)
    optimizer, fresh, of_plain = (made(kind, each.parameters()) for each in (model, model, plain))
    step(model, optimizer, 3)
    with FSDP.state_dict_type(model, *FORMS["full"]):
        given = FSDP.optim_state_dict(model, optimizer)
    of_plain.load_state_dict(FSDP.rekey_optim_state_dict(given, OptimStateKeyType.PARAM_ID, plain, optim=of_plain))
    before = saved(save(root, plain, of_plain))
    names = FSDP.rekey_optim_state_dict(of_plain.state_dict(), OptimStateKeyType.PARAM_NAME, plain, optim=of_plain)
    fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, names))
    return optimizer, before, fresh, full(model, fresh)


def of_whole_params(kind: str, model: FSDP, root: Path) -> tuple[Optimizer, Any, Optimizer, Any]:
    """The optimizer of the rest is an 8-bit one, and so is the one of whole parameters."""

    def both() -> Optimizer:
        own = partial(made, kind)
        return WholeParamOptimizer(model, own, select=lambda name, _: name.startswith("0."), rest=own)

    optimizer, fresh = both(), both()
    step(model, optimizer, 3)
    path = save(root, model, optimizer)
    load(path, model, fresh)
    return optimizer, saved(path), fresh, saved(save(root, model, fresh))


ROUTES: dict[str, Route] = {
    **{form: through(form) for form in ("full", "rank 0", "sharded", "ragged", "dcp", "save", "one pass")},
    "from a plain model": from_plain,
    "to a plain model": to_plain,
    "by other keys": by_other_keys,
    "whole parameters": of_whole_params,
}


ROUTES_OF_CASES = [
    *(
        (kind, uop, torch.float32, route)
        for kind, uop, route in pairwise(["Adam8", "StandIn"], [True, False], [*ROUTES])
    ),
    *(("Adam8", True, torch.bfloat16, route) for route in ("sharded", "save")),
]


@pytest.mark.parametrize(("kind", "uop", "dtype", "route"), ROUTES_OF_CASES)
@on_ranks(2)
def test_states_come_back_in_their_layout_within_one_rounding(
    kind: str, uop: bool, dtype: torch.dtype, route: str, tmp_path: Path
) -> None:
    """Without the mark of the dicts, and with the rate of the optimizer, which can step."""
    model = build(uop, dtype)
    like, expected, fresh, found = ROUTES[route](kind, model, tmp_path)
    assert layout(fresh) == layout(like)
    assert_rounded_once(kind, found, expected, fresh, flat=not uop)
    assert all(group.keys() == like.param_groups[0].keys() for group in fresh.param_groups)
    assert fresh.param_groups[0]["lr"] == 1e-3, "the rate of the step that makes the states must not stay"
    fresh.step()


class Dicts(Adam8):
    """An optimizer that keeps codes and scales in a dict of tensors, as bitsandbytes' state dicts do."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for state in self.state.values():
            state["blocks"] = {"codes": torch.zeros(3, dtype=torch.uint8), "scales": torch.ones(1)}


@pytest.mark.parametrize("how", ["in a dict", "without scales", "of another size"])
@on_ranks(2)
def test_codes_in_an_unknown_layout_are_refused(how: str, tmp_path: Path) -> None:
    """Codes are not taken for values: the error has the state, the parameter and the remedy."""
    model = build()
    optimizer = Dicts(model.parameters()) if how == "in a dict" else made("StandIn", model.parameters())
    step(model, optimizer)
    for state in optimizer.state.values():
        if "absmax1" in state:
            scales = state.pop("absmax1")
            if how == "of another size":
                state["absmax1"] = scales[::2].clone()
    name = "blocks" if how == "in a dict" else HIDDEN
    words = rf"'{name}' of '0.weight' is a dict of tensors.*save each rank's optimizer.state_dict\(\)"
    with pytest.raises(NotImplementedError, match=words):
        save(tmp_path, model, optimizer)
    with pytest.raises(NotImplementedError, match=r"'0\.weight'"):
        FSDP.optim_state_dict(model, optimizer, Optimizer.state_dict(optimizer))


class Lists(Adam8):
    """An optimizer with a list among the states, which holds tensors."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for param, state in self.state.items():
            state["list"] = [1, 2.5, "a", [None], torch.arange(3.0), param.detach().clone()]


@on_ranks(2)
def test_lists_among_the_states_are_saved_without_pickle(tmp_path: Path) -> None:
    """They are JSON, and tensors in them are tensors of the file, so that no ``trusted`` is needed."""
    model = FSDP(nn.Linear(8, 8, bias=False), use_orig_params=True)

    def made() -> Optimizer:
        return WholeParamOptimizer(model, Lists, select=lambda _, shape: len(shape) == 2)

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
        assert len(one) == len(other) == 6 and torch.equal(one[4], other[4]) and torch.equal(one[5], other[5])
