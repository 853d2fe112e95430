"""The table of user writes: actions x moments x modes.

Each cell compares with a plain model to which the same action is applied, or expects an error listed in this file.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FlatParameter, FullStateDictConfig, FullyShardedDataParallel, StateDictType
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks
from tests.harness.sharded import wrap
from tests.harness.strategies import FULL, GRAD_OP, MODES, NONE, Mode
from tests.harness.writes import Layer, batch, build, layer_of, local_part, loss_of, summon


class Subject:
    """A model, plain or wrapped, whose first layer's parameters are written to."""

    def __init__(self, plain: bool, mode: Mode) -> None:
        self.model: nn.Module = build() if plain else wrap(build(), *mode, wrap_policy=ModuleWrapPolicy({Layer}))
        self.plain, self.mode = plain, mode

    @property
    def layer(self) -> Any:
        return layer_of(self.model, 0)

    @property
    def linear(self) -> nn.Linear:
        return self.layer.linear

    @property
    def params(self) -> list[nn.Parameter]:
        """Return the parameters of the layer as users see them now."""
        return list(self.layer.parameters())

    def values(self, factor: float) -> list[Tensor]:
        """Return new values for each of `params`, in the visible shape."""
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
            value if self.plain else local_part(self.model, param, f"layers.0.{name}", value).clone()
            for param, (name, value) in named
        ]

    def summoned(self, **options: bool) -> Any:
        return contextlib.nullcontext() if self.plain else summon(self.model, **options)

    def no_sync(self) -> Any:
        return contextlib.nullcontext() if self.plain else self.model.no_sync()


Act = Callable[[Subject], None]


def written(change: Callable[[nn.Parameter, Tensor], Any]) -> Act:
    """Return an action that gives each parameter a new value."""

    def act(subject: Subject) -> None:
        for param, value in zip(subject.params, subject.values(0.5)):
            change(param, value)

    return act


def changed(change: Callable[[nn.Parameter], Any], *, with_grad: bool = False) -> Act:
    """Return an action that changes each parameter, or each that has a gradient."""

    def act(subject: Subject) -> None:
        for param in subject.params:
            if param.grad is not None or not with_grad:
                change(param)

    return act


def _replace(subject: Subject) -> None:
    value = (build().layers[0].linear.weight * 0.5).detach()
    if not subject.plain:
        value = local_part(subject.model, subject.linear.weight, "layers.0.linear.weight", value).clone()
    subject.linear.weight = nn.Parameter(value)


def _copy_the_module(subject: Subject) -> None:
    copied = copy.deepcopy(subject.layer)
    assert_bit_equal(copied.state_dict(), build().layers[0].state_dict())


def _load_from_rank_0(subject: Subject) -> None:
    state = {name: value * 0.5 for name, value in build().state_dict().items()}
    if subject.plain:
        subject.model.load_state_dict(state)
        return
    full, of_rank_0 = StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(subject.model, full, of_rank_0):
        subject.model.load_state_dict(state if dist.get_rank() == 0 else {})


def _apply(subject: Subject) -> None:
    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.fill_(0.25)
            nn.init.constant_(module.bias, 0.5)

    subject.model.apply(fill)


ACTIONS: dict[str, Act] = {
    "data = new": written(lambda param, value: setattr(param, "data", value)),
    "data.copy_": written(lambda param, value: param.data.copy_(value)),
    "copy_": written(torch.no_grad()(lambda param, value: param.copy_(value))),
    "replaced": _replace,
    "another shape": lambda subject: setattr(subject.linear, "weight", nn.Parameter(torch.zeros(2, 3))),
    "grad = None": changed(lambda param: setattr(param, "grad", None)),
    "grad.zero_": changed(lambda param: param.grad.zero_(), with_grad=True),
    "grad.mul_": changed(lambda param: param.grad.mul_(0.5), with_grad=True),
    "grad = new": changed(lambda param: setattr(param, "grad", param.grad * 0.5), with_grad=True),
    "grad of another shape": changed(lambda param: setattr(param, "grad", torch.zeros(2, 3, 4))),
    "frozen": changed(lambda param: param.requires_grad_(False)),
    "frozen and thawed": changed(lambda param: param.requires_grad_(False).requires_grad_(True)),
    "deepcopy": lambda subject: setattr(subject, "model", copy.deepcopy(subject.model)),
    "deepcopy of a module": _copy_the_module,
    "load_state_dict": lambda subject: subject.model.load_state_dict(
        {name: value * 0.5 for name, value in build().state_dict().items()}
    ),
    "apply": _apply,
    "to": lambda subject: subject.model.to(torch.float64),
}
OTHER_ACTIONS: dict[str, Act] = {
    "load_state_dict of rank 0": _load_from_rank_0,
    "data = new, on the module": lambda subject: setattr(
        subject.linear.weight, "data", subject.linear.weight.data * 0.5
    ),
}


def _between(subject: Subject, act: Act) -> None:
    loss = loss_of(subject.model, 0)
    act(subject)
    loss.backward()


def _inside_forward(subject: Subject, act: Act) -> None:
    def inside() -> None:
        subject.layer.inside = lambda: None
        with torch.no_grad():
            act(subject)

    subject.layer.inside = inside
    with torch.no_grad():
        loss_of(subject.model, 0)


def _after_backward(subject: Subject, act: Act) -> None:
    loss_of(subject.model, 0).backward()
    act(subject)


def _accumulating(subject: Subject, act: Act) -> None:
    with subject.no_sync():
        loss_of(subject.model, 0).backward()
        act(subject)
        loss_of(subject.model, 1).backward()


def _before_the_step(subject: Subject, act: Act) -> None:
    loss_of(subject.model, 0).backward()
    act(subject)
    torch.optim.SGD([p for p in subject.model.parameters() if p.requires_grad], lr=0.5).step()


def _unsharded_ahead(subject: Subject, act: Act) -> None:
    """Unshard all units, write, and unshard those again whose values are outdated."""
    units = [] if subject.plain else [subject.model, *subject.model.layers]
    loss_of(subject.model, 0)
    for unit in units:
        unit.unshard()
    act(subject)
    for unit in units:
        unit.unshard()


def _summoned_in_no_sync(subject: Subject, act: Act) -> None:
    with subject.no_sync():
        loss_of(subject.model, 0).backward()
        with subject.summoned():
            act(subject)
        loss_of(subject.model, 1).backward()


def _summoned(subject: Subject, act: Act, **options: bool) -> None:
    loss_of(subject.model, 0).backward()
    with subject.summoned(**options):
        act(subject)


def _in_a_load_hook(subject: Subject, act: Act) -> None:
    handle = subject.layer.register_load_state_dict_pre_hook(lambda *_: act(subject))
    subject.model.load_state_dict(build().state_dict())
    handle.remove()


def _in_a_state_dict_hook(subject: Subject, act: Act) -> None:
    handle = subject.layer.register_state_dict_pre_hook(lambda *_: act(subject))
    subject.model.state_dict()
    handle.remove()


def _after_a_failure(subject: Subject, act: Act) -> None:
    def fail() -> None:
        raise ArithmeticError

    layer_of(subject.model, 1).inside = fail
    with pytest.raises(ArithmeticError):
        loss_of(subject.model)
    layer_of(subject.model, 1).inside = lambda: None
    act(subject)


def _evaluating(subject: Subject, act: Act) -> None:
    subject.model.eval()
    with torch.no_grad():
        loss_of(subject.model)
        act(subject)
    subject.model.train()


MOMENTS: dict[str, Callable[[Subject, Act], None]] = {
    "built": lambda subject, act: act(subject),
    "between": _between,
    "in forward": _inside_forward,
    "after backward": _after_backward,
    "in no_sync": _accumulating,
    "before the step": _before_the_step,
    "unsharded ahead": _unsharded_ahead,
    "summoned": _summoned,
    "summoned with grads": partial(_summoned, with_grads=True),
    "in a state dict hook": _in_a_state_dict_hook,
    "after a failure": _after_a_failure,
    "evaluating": _evaluating,
}
OTHER_MOMENTS = {"in a load hook": _in_a_load_hook, "summoned in no_sync": _summoned_in_no_sync}


def outcome(subject: Subject, moment: str, action: str) -> tuple[str, dict[str, Tensor]]:
    """Return the state after a further step and forward, since some writes are refused later, or the error."""
    try:
        (MOMENTS | OTHER_MOMENTS)[moment](subject, (ACTIONS | OTHER_ACTIONS)[action])
        dtype = next(subject.model.parameters()).dtype
        subject.model(batch(2).to(dtype)).square().mean().backward()
        torch.optim.SGD([p for p in subject.model.parameters() if p.requires_grad], lr=0.5).step()
        subject.model.zero_grad()
        out = subject.model(batch(3).to(dtype))
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AssertionError) as error:
        return f"{type(error).__name__}: {error}", {}
    return "", {name: value.clone() for name, value in subject.model.state_dict().items()} | {"output": out.detach()}


@functools.cache
def expected_outcome(moment: str, action: str) -> tuple[str, dict[str, Tensor]]:
    return outcome(Subject(True, Mode(FULL, True)), moment, action)


# Cells in which a plain model continues and a sharded one refuses: (action, moment, words), each a pattern.
REFUSED = [
    ("copy_|replaced|apply", "between", "was changed in place, or replaced, between a forward and its backward"),
    ("data = new", "in forward", "was given other data inside of a forward"),
    ("data.copy_", "in forward", "is written, where it is a gathered copy"),
    ("data.copy_", "in no_sync", "was changed through .data while it stays gathered"),
    ("copy_", "in forward", "was changed in place inside of a forward"),
    ("replaced", "in forward", "'linear.weight' of unit 'layers.0' was replaced inside of a forward"),
    ("frozen", "in forward", "was frozen inside of a forward"),
    ("deepcopy", "in forward|summoned.*", "can be copied only while it does not run"),
    ("deepcopy", "in a state dict hook", "cannot be copied in its hooks"),
    ("deepcopy of a module", ".*", "copy.deepcopy of the Linear alone would be without its parameters"),
    ("load_state_dict", "in forward", "in the middle of the forward of the root unit"),
    ("apply", "in forward", "expected to be in states"),
    # torch compares a gradient with the present parameter, which differs in shape
    ("grad = new", "in no_sync|summoned", "attempting to assign a gradient of size"),
    ("to", "between", "was moved or cast between a forward and its backward"),
    ("load_state_dict", "between", "was changed in place, or replaced, between a forward and its backward"),
]

# Cells in which a write leaves no trace, and is lost or late.
LEAVES_NO_TRACE = [("data.copy_", "in forward"), ("data.copy_", "in no_sync")]

# Cells without a target of the write, or in which a written value lasts no longer than the moment.
NO_GRADIENTS = "built|between|in forward|unsharded ahead|in a state dict hook|after a failure|evaluating"
NOTHING_THERE = [
    (r"grad( = None|\.zero_|\.mul_| = new)", NO_GRADIENTS, (False, True)),
    ("to", "summoned.*", (False, True)),  # the shards keep their dtype
    (r"grad( = None|\.zero_|\.mul_| = new)", "summoned", (False,)),  # with flat parameters no gradients are shown
]


def explain_difference(mode: Mode, moment: str, action: str) -> str:
    """Return the difference between a cell and the expectation; empty if there is none."""

    def matches(actions: str, moments: str) -> bool:
        return bool(re.fullmatch(actions, action) and re.fullmatch(moments, moment))

    if any(matches(a, m) and mode[1] in modes for a, m, modes in NOTHING_THERE):
        return ""
    error, expected = expected_outcome(moment, action)
    found, state = outcome(Subject(False, mode), moment, action)
    if found:
        refused = any(matches(a, m) and re.search(words, found) for a, m, words in REFUSED)
        return "" if error or refused else found
    if error:
        return f"no error, and plain has {error}"
    if list(state) != list(expected):
        return f"names {list(state)}"
    wrong = [name for name, value in expected.items() if not torch.equal(value, state[name])]
    return f"other values of {wrong}" if wrong else ""


KEPT: list[Mode] = [Mode(GRAD_OP, True), Mode(GRAD_OP, False)]

# Cells in further modes than the one that is their turn.
BESIDES: list[tuple[str, str, Mode]] = [
    *itertools.product(["between"], ["to", "load_state_dict"], [(FULL, True), (NONE, False)]),
    *itertools.product(["in a state dict hook"], ["copy_", "data.copy_", "deepcopy"], [(FULL, False), (FULL, True)]),
    *itertools.product(["in a state dict hook", "in a load hook"], ["frozen"], MODES),
    *itertools.product(["before the step"], ["data = new, on the module"], [*MODES[1:], Mode(NONE, True)]),
    *itertools.product(["unsharded ahead"], ["data = new", "load_state_dict"], MODES),
    # units that stay gathered between the passes
    *itertools.product(["in no_sync"], ["copy_", "data = new", "load_state_dict", "load_state_dict of rank 0"], KEPT),
    *itertools.product(["summoned in no_sync"], ["copy_", "data.copy_"], KEPT),
    ("in no_sync", "replaced", KEPT[0]),
]


@on_ranks(2, timeout=240)
def test_every_write_at_every_moment() -> None:
    """Modes take turns: half of the cells are fully sharded, and each action and moment meets each mode."""
    wrong, cells = [], BESIDES
    others = itertools.cycle(itertools.product((GRAD_OP, NONE), (False, True)))
    for number, (moment, action) in enumerate(itertools.product(MOMENTS, ACTIONS)):
        other = next(others)
        cells = [*cells, (moment, action, other if number % 8 >= 4 else (FULL, not other[1]))]
    for moment, action, mode in cells:
        if (action, moment) in LEAVES_NO_TRACE or (moment == "summoned with grads" and not mode[1]):
            continue
        found = explain_difference(mode, moment, action)
        if found:
            wrong.append(f"{action}, {moment}, {mode[0].name}, use_orig_params={mode[1]}: {found}")
    assert not wrong, "\n".join(wrong)
