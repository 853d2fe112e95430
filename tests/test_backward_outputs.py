"""Gradients equal the plain model's for inputs and outputs that are changed in place or passed through."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp import ShardingStrategy
from tests.harness.lockstep import Data, Reference, assert_at_rest
from tests.harness.models import MlpBlock, Net, Unit
from tests.harness.passes import WIDTH, check_parity, seeded, wrapped
from tests.harness.pool import on_ranks
from tests.harness.strategies import MODES, by_turns, describe

IN_PLACE: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "input changed": lambda m, x, y: (torch.tanh(m.linear(x.mul_(2.0))) * m.gain, y),
    "view of the input changed": lambda m, x, y: (x[:, 1:3].add_(y[:, 1:3] * m.gain[1:3]), (m.linear(x), y))[1],
    "input returned": lambda m, x, y: (x, m.linear(y) * m.gain),
    "changed input returned": lambda m, x, y: (x.add_(m.linear(y)), y * m.gain),
    "view of the input returned": lambda m, x, y: (x.view(-1, WIDTH), m.linear(x + y) * m.gain),
    "output a view": lambda m, x, y: torch.cat([m.linear(x), m.linear(y) * m.gain]).split(len(x)),
    "detached": lambda m, x, y: (m.linear(x.detach()) * m.gain + y, y),
    "input unused": lambda m, x, y: (m.linear(y) * m.gain, y * 2),
    "output changed": lambda m, x, y: (m.linear(x) * m.gain, m.linear(y)),
}


def in_place_model(how: str) -> nn.Module:
    """Build blocks with several inputs that require grad, which they change, return, or return views of."""

    def forward(m: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = x * 1.0, y * 1.0  # leaves may not be changed in place
        for block in m.blocks:
            x, y = block(x, y)
            if how == "output changed":
                x.mul_(0.5).relu_()
                y += x
            elif how == "output a view":
                x = x * 2
                y = torch.sin(y)
        return x, y

    blocks = [
        Unit(IN_PLACE[how], linear=nn.Linear(WIDTH, WIDTH), gain=nn.Parameter(torch.ones(WIDTH))) for _ in range(3)
    ]
    return Net(forward, blocks=nn.ModuleList(blocks))


def _two_inputs(model: nn.Module, data: Data) -> Iterator[Any]:
    x, y = data.tensor(0, 3, WIDTH), data.tensor(1, 3, WIDTH)
    for first, second, use in ((x, y, 3), (x.detach(), y, 3), (x, y.detach(), 1), (x, x, 3), (x, y, 2)):
        a, b = model(first, second)
        (a.square().mean() * (use & 1) + b.sin().mean() * (use >> 1)).backward()
        yield {"x": x.grad, "y": y.grad, "a": a.detach()}
    a, b = model(x, y)
    _, d = model(y, x)
    (a.sum() + d.square().sum()).backward()
    yield {"x": x.grad, "y": y.grad}


@on_ranks(2)
def test_inputs_and_outputs_changed_in_place_or_passed_through() -> None:
    for number, how in enumerate(IN_PLACE):
        modes = by_turns(number)[: 1 + (number % 3 == 0)]
        check_parity(seeded(in_place_model, how), _two_inputs, Unit, modes=modes, case=how)


def shows_a_weight(how: Callable[[Tensor], Tensor]) -> nn.Module:
    """Build a model that returns `how` of a weight of a nested unit, with which the root computes."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        h, weight = m.first(x)
        return F.linear(m.second(h), weight), weight

    first = Unit(lambda m, x: (torch.tanh(m.linear(x)), how(m.linear.weight)), linear=nn.Linear(WIDTH, WIDTH))
    return Net(forward, first=first, second=MlpBlock(WIDTH, WIDTH))


def _weights_out(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 3, WIDTH)
    output, weight = model(x)
    (output.square().mean() + weight.square().sum()).backward()
    yield {"x": x.grad}
    _, weight = model(x)
    torch.autograd.backward([weight], [torch.full((WIDTH, WIDTH), 2.0)])
    yield {}


@on_ranks(2)
def test_forward_returns_a_clone_of_a_parameter_only() -> None:
    """The memory of the parameter itself is released. Where nothing is released, it may be returned as it is."""
    plain, clone, view = (lambda weight: weight), torch.clone, (lambda weight: weight[1:])
    for how, modes in ((clone, MODES), (plain, [mode for mode in MODES if mode[0] is ShardingStrategy.NO_SHARD])):
        build = seeded(shows_a_weight, how)
        reference = Reference(build, _weights_out)
        for mode in modes:
            reference.check(wrapped(build, mode, Unit, MlpBlock), describe(mode))
    for how in (plain, view):
        model = wrapped(seeded(shows_a_weight, how), (ShardingStrategy.FULL_SHARD, True), Unit)
        with pytest.raises(RuntimeError, match=r"'first' returned parameter 'linear.weight', .*: return a clone"):
            model(torch.ones(3, WIDTH))
        assert_at_rest(model, "after the error")
