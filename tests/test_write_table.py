"""The table of what users write: what is done x when x with which parameters, each cell with the numbers of a plain
model to which the same is done, or with an error that this file knows by name."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FlatParameter
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks, run_ranks
from tests.test_writes import FULL, GRAD_OP, NONE, Mode, batch, build, layer_of, loss_of, pair, part_of, summon


class Side:
    """A model, plain or wrapped, whose first layer's parameters are written to; `names` are those of the layer."""

    def __init__(self, plain: bool, mode: Mode) -> None:
        self.model: nn.Module = build() if plain else pair(mode)[1]
        self.plain, self.mode = plain, mode

    @property
    def layer(self) -> Any:
        return layer_of(self.model, 0)

    @property
    def linear(self) -> nn.Linear:
        return self.layer.linear

    @property
    def params(self) -> list[nn.Parameter]:
        """What users see of the layer's parameters now."""
        return list(self.layer.parameters())

    def values(self, factor: float) -> list[Tensor]:
        """New values for each of `params`, in the shape that it has."""
        wanted = {f"linear.{name}": (p * factor).detach() for name, p in build().layers[0].linear.named_parameters()}
        params = self.params
        if len(params) == 1 and isinstance(params[0], FlatParameter):
            flat = torch.cat([value.flatten() for value in wanted.values()])
            if params[0].shape == flat.shape:
                return [flat]
            padded = nn.functional.pad(flat, (0, -len(flat) % dist.get_world_size()))
            return [padded.chunk(dist.get_world_size())[dist.get_rank()].clone()]
        named = zip(params, wanted.items(), strict=True)
        return [
            value if self.plain else part_of(self.model, param, f"layers.0.{name}", value).clone()
            for param, (name, value) in named
        ]

    @property
    def whole(self) -> bool:
        return self.plain or self.linear.weight.shape == (7, 5)

    def summoned(self, **options: bool) -> Any:
        return contextlib.nullcontext() if self.plain else summon(self.model, **options)

    def no_sync(self) -> Any:
        return contextlib.nullcontext() if self.plain else self.model.no_sync()


def _assign_data(side: Side) -> None:
    for param, value in zip(side.params, side.values(0.5)):
        param.data = value


def _copy_data(side: Side) -> None:
    for param, value in zip(side.params, side.values(0.5)):
        param.data.copy_(value)


def _copy(side: Side) -> None:
    with torch.no_grad():
        for param, value in zip(side.params, side.values(0.5)):
            param.copy_(value)


def _replace(side: Side) -> None:
    value = (build().layers[0].linear.weight * 0.5).detach()
    if not side.plain:
        value = part_of(side.model, side.linear.weight, "layers.0.linear.weight", value).clone()
    side.linear.weight = nn.Parameter(value)


def _replace_by_another_shape(side: Side) -> None:
    side.linear.weight = nn.Parameter(torch.zeros(2, 3))


def _clear_grad(side: Side) -> None:
    for param in side.params:
        param.grad = None


def _zero_grad(side: Side) -> None:
    for param in side.params:
        if param.grad is not None:
            param.grad.zero_()


def _scale_grad(side: Side) -> None:
    for param in side.params:
        if param.grad is not None:
            param.grad.mul_(0.5)


def _new_grad(side: Side) -> None:
    for param in side.params:
        if param.grad is not None:
            param.grad = param.grad * 0.5


def _grad_of_another_shape(side: Side) -> None:
    for param in side.params:
        param.grad = torch.zeros(2, 3, 4)


def _freeze_all(side: Side) -> None:
    for param in side.params:
        param.requires_grad_(False)


def _freeze_and_thaw(side: Side) -> None:
    _freeze_all(side)
    for param in side.params:
        param.requires_grad_(True)


def _go_on_with_a_copy(side: Side) -> None:
    side.model = copy.deepcopy(side.model)


def _copy_the_module(side: Side) -> None:
    copied = copy.deepcopy(side.layer)
    assert_bit_equal(copied.state_dict(), build().layers[0].state_dict())


def _load(side: Side) -> None:
    side.model.load_state_dict({name: value * 0.5 for name, value in build().state_dict().items()})


def _apply(side: Side) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(0.25)
            nn.init.constant_(module.bias, 0.5)

    side.model.apply(fill)


def _to_double(side: Side) -> None:
    side.model.to(torch.float64)


ACTIONS = {
    "data = new": _assign_data,
    "data.copy_": _copy_data,
    "copy_": _copy,
    "replaced": _replace,
    "another shape": _replace_by_another_shape,
    "grad = None": _clear_grad,
    "grad.zero_": _zero_grad,
    "grad.mul_": _scale_grad,
    "grad = new": _new_grad,
    "grad of another shape": _grad_of_another_shape,
    "frozen": _freeze_all,
    "frozen and thawed": _freeze_and_thaw,
    "deepcopy": _go_on_with_a_copy,
    "deepcopy of a module": _copy_the_module,
    "load_state_dict": _load,
    "apply": _apply,
    "to": _to_double,
}
Act = Callable[[Side], None]


def _built(side: Side, act: Act) -> None:
    act(side)


def _between(side: Side, act: Act) -> None:
    loss = loss_of(side.model, 0)
    act(side)
    loss.backward()


def _inside_forward(side: Side, act: Act) -> None:
    def inside() -> None:
        side.layer.inside = lambda: None
        with torch.no_grad():
            act(side)

    side.layer.inside = inside
    with torch.no_grad():
        loss_of(side.model, 0)


def _after_backward(side: Side, act: Act) -> None:
    loss_of(side.model, 0).backward()
    act(side)


def _accumulating(side: Side, act: Act) -> None:
    with side.no_sync():
        loss_of(side.model, 0).backward()
        act(side)
        loss_of(side.model, 1).backward()


def _summoned(side: Side, act: Act) -> None:
    loss_of(side.model, 0).backward()
    with side.summoned():
        act(side)


def _summoned_with_grads(side: Side, act: Act) -> None:
    loss_of(side.model, 0).backward()
    with side.summoned(with_grads=True):
        act(side)


def _in_a_state_dict_hook(side: Side, act: Act) -> None:
    handle = side.layer.register_state_dict_pre_hook(lambda *_: act(side))
    side.model.state_dict()
    handle.remove()


def _after_a_failure(side: Side, act: Act) -> None:
    def fail() -> None:
        raise ArithmeticError

    layer_of(side.model, 1).inside = fail
    with pytest.raises(ArithmeticError):
        loss_of(side.model)
    layer_of(side.model, 1).inside = lambda: None
    act(side)


def _evaluating(side: Side, act: Act) -> None:
    side.model.eval()
    with torch.no_grad():
        loss_of(side.model)
        act(side)
    side.model.train()


MOMENTS = {
    "built": _built,
    "between": _between,
    "in forward": _inside_forward,
    "after backward": _after_backward,
    "in no_sync": _accumulating,
    "summoned": _summoned,
    "summoned with grads": _summoned_with_grads,
    "in a state dict hook": _in_a_state_dict_hook,
    "after a failure": _after_a_failure,
    "evaluating": _evaluating,
}


def outcome(side: Side, moment: str, action: str) -> tuple[str, dict[str, Tensor]]:
    """What is left after two steps more, or which error came. A step more, as what is refused is so at an entry."""
    try:
        MOMENTS[moment](side, ACTIONS[action])
        dtype = next(side.model.parameters()).dtype
        for seed in (2, 3):
            side.model(batch(seed).to(dtype)).square().mean().backward()
            torch.optim.SGD([p for p in side.model.parameters() if p.requires_grad], lr=0.5).step()
            side.model.zero_grad()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}", {}
    return "", {name: value.clone() for name, value in side.model.state_dict().items()}


# Cells in which a plain model goes on and a sharded one refuses: (action, moment, use_orig_params), each a pattern.
REFUSED = [
    ("copy_|replaced|apply", "between", "", "was changed in place, or replaced, between a forward and its backward"),
    ("data = new", "in forward", "", "was given other data inside of a forward"),
    ("data.copy_", "in forward", "", "is written, where it is a gathered copy"),
    ("data.copy_", "in no_sync", "", "was changed through .data while it stays gathered"),
    ("copy_", "in forward", "", "was changed in place inside of a forward"),
    ("replaced", "in forward", "", "'linear.weight' of unit 'layers.0' was replaced inside of a forward"),
    ("frozen", "in forward", "", "was frozen inside of a forward"),
    ("deepcopy", "in forward|summoned.*", "", "can be copied only while it does not run"),
    ("deepcopy", "in a state dict hook", "", "cannot be copied in its hooks"),
    ("deepcopy of a module", ".*", "", "copy.deepcopy of the Linear alone would be without its parameters"),
    ("load_state_dict", "in forward", "", "in the middle of the forward of the root unit"),
    ("apply", "in forward", "", "expected to be in states"),
    # torch compares a gradient with the parameter that is there, which has another shape than the gradient has
    ("grad = new", "in no_sync|summoned", "", "attempting to assign a gradient of size"),
    ("to", "between", "", "was moved or cast between a forward and its backward"),
    ("load_state_dict", "between", "", "was changed in place, or replaced, between a forward and its backward"),
]

# Cells in which a write is found in debug mode only.
FOUND_IN_DEBUG_MODE = [("data.copy_", "in forward"), ("data.copy_", "in no_sync")]

# Cells in which there is nothing to write to, or what is written lasts no longer than the moment.
NOTHING_THERE = [
    ("to", "summoned.*", ""),  # the shards keep their dtype
    (r"grad( = None|\.zero_|\.mul_| = new)", "summoned", "False"),  # with flat parameters no gradients are shown
]


def _judge(
    plain: tuple[str, dict[str, Tensor]], ours: tuple[str, dict[str, Tensor]], cell: tuple[str, str, bool]
) -> str:
    """What is wrong with a cell."""
    action, moment, use_orig_params = cell
    refused = [
        words
        for a, m, mode, words in REFUSED
        if re.fullmatch(a, action) and re.fullmatch(m, moment) and mode in ("", str(use_orig_params))
    ]
    error, state = ours
    if any(
        re.fullmatch(a, action) and re.fullmatch(m, moment) and mode in ("", str(use_orig_params))
        for a, m, mode in NOTHING_THERE
    ):
        return ""
    if error:
        if plain[0] or any(re.search(words, error) for words in refused):
            return ""
        return error
    if plain[0]:
        return f"no error, and plain has {plain[0]}"
    if list(state) != list(plain[1]):
        return f"names {list(state)}"
    wrong = [name for name, value in plain[1].items() if not torch.equal(value, state[name])]
    return f"other values of {wrong}" if wrong else ""


def _column(moment: str, actions: list[str], modes: list[Mode]) -> list[str]:
    wrong = []
    for action, mode in itertools.product(actions, modes):
        plain = outcome(Side(True, (FULL, True)), moment, action)
        found = _judge(plain, outcome(Side(False, mode), moment, action), (action, moment, mode[1]))
        if found:
            wrong.append(f"{action}, {moment}, {mode}: {found}")
    return wrong


def test_what_is_moved_or_loaded_between_forward_and_backward() -> None:
    for wrong in run_ranks(2, _column, "between", ["to", "load_state_dict"], [(FULL, True), (NONE, False)]):
        assert not wrong


def test_what_state_dict_hooks_write() -> None:
    modes = [(FULL, False), (FULL, True)]
    for wrong in run_ranks(2, _column, "in a state dict hook", ["copy_", "data.copy_", "deepcopy"], modes):
        assert not wrong


def _table() -> list[str]:
    wrong = []
    others = itertools.cycle(itertools.product((GRAD_OP, NONE), (False, True)))
    for number, (moment, action) in enumerate(itertools.product(MOMENTS, ACTIONS)):
        other = next(others)
        mode: Mode = other if number % 8 >= 4 else (FULL, not other[1])
        if moment == "summoned with grads" and not mode[1]:
            continue
        plain = outcome(Side(True, (FULL, True)), moment, action)
        with mock.patch.dict(os.environ, FSDP_DEBUG=str(int((action, moment) in FOUND_IN_DEBUG_MODE))):
            found = _judge(plain, outcome(Side(False, mode), moment, action), (action, moment, mode[1]))
        if found:
            wrong.append(f"{action}, {moment}, {mode[0].name}, use_orig_params={mode[1]}: {found}")
    return wrong


def test_what_is_done_when() -> None:
    """17 actions at 10 moments, by turns in each strategy and mode, half of them fully sharded: every
    action, and every moment, in each of them."""
    for rank, wrong in enumerate(run_ranks(2, _table, timeout=240)):
        assert not wrong, f"rank {rank}:\n" + "\n".join(wrong)


@on_ranks(2)
def test_a_parameter_replaced_in_no_sync_is_gathered_again() -> None:
    """Though the version counters of the old one and of the new one make the same sum."""
    plain = outcome(Side(True, (FULL, True)), "in no_sync", "replaced")
    for use_orig_params in (False, True):
        side = Side(False, (GRAD_OP, use_orig_params))
        assert not _judge(plain, outcome(side, "in no_sync", "replaced"), ("replaced", "in no_sync", use_orig_params))
