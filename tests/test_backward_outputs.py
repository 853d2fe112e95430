"""Gradients equal the plain model's for all kinds of inputs and outputs of units."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fsdp.runtime.nested import tensors_in
from tests.harness.lockstep import Data, Reference, assert_at_rest
from tests.harness.models import MlpBlock
from tests.harness.passes import MODES, WIDTH, by_turns, describe, seeded, wrapped
from tests.harness.pool import on_ranks


class Holder:
    def __init__(self, wide: Tensor, narrow: Tensor) -> None:
        self.inner = [wide, {"narrow": narrow}]
        self.itself = self


PACKS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, None, b),
    "object": Holder,
    "nested": lambda a, b: ({"x": [a], "y": 1}, [], {"text": (b, b)}),
}


def unpack(value: Any) -> tuple[Tensor, Tensor]:
    """Find the wide and the narrow tensor of a nest, by their last dimension."""
    found = {tensor.shape[-1]: tensor for tensor in tensors_in(value)}
    return found[WIDTH], found[3]


class PackedBlock(nn.Module):
    """A block that takes and returns two tensors in a container, and keeps the output for comparison."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.wide, self.narrow = nn.Linear(WIDTH, WIDTH), nn.Linear(3, 3)

    def forward(self, packed: Any) -> Any:
        wide, narrow = unpack(packed)
        wide = torch.tanh(self.wide(wide))
        narrow = torch.tanh(self.narrow(narrow)) + wide[:, :3]
        self.kept = PACKS[self.kind](wide, narrow)
        self.kept_nodes = [t.grad_fn for t in unpack(self.kept)]
        return self.kept


class PackedModel(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([PackedBlock(kind) for _ in range(3)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *, side: Any) -> Any:
        value = PACKS[self.kind](x, unpack(side)[1])
        for block in self.blocks:
            output = block(value)
            if output is not block.kept or [t.grad_fn for t in unpack(output)] != block.kept_nodes:
                raise AssertionError(f"{self.kind}: the output is not the module's own")
            value = output
        wide, narrow = unpack(value)
        self.kept = PACKS[self.kind](self.head(wide), narrow * 2)
        return self.kept


def _packed_program(kind: str) -> Callable[[nn.Module, Data], Iterator[Any]]:
    def program(model: nn.Module, data: Data) -> Iterator[Any]:
        x, y = data.tensor(0, 4, WIDTH), data.tensor(1, 4, 3)

        def call(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            output = model(x, side=PACKS[kind](x, y))
            kept = next(m for m in model.modules() if isinstance(m, PackedModel)).kept
            assert output is kept
            return unpack(output)

        wide, narrow = call(x, y)
        (wide.square().mean() + narrow.square().mean()).backward()  # all outputs are used
        yield {"x": x.grad, "y": y.grad}
        wide, narrow = call(x, y.detach())  # one output is not used, one input needs no gradient
        wide.square().mean().backward()
        yield {"x": x.grad, "y": y.grad}
        wide, narrow = call(x.detach(), y)  # parameters of the root are not reached
        narrow.square().mean().backward()
        yield {"x": x.grad, "y": y.grad}
        wide, narrow = call(x.detach(), y.detach())
        wide.mul_(2.0)  # callers change outputs in place, a leaf of the graph or not
        narrow.add_(1.0)
        (wide.square().mean() + narrow.square().mean()).backward()
        yield {"wide": wide.detach()}

    program.__name__ = kind
    return program


@on_ranks(2)
def test_containers_of_inputs_and_outputs() -> None:
    """Outputs stay the module's objects; some are changed in place or unused. All containers are in test_nested.py."""
    for number, kind in enumerate(PACKS):
        build = seeded(PackedModel, kind)
        reference = Reference(build, _packed_program(kind))
        for mode in by_turns(number):
            reference.check(wrapped(build, mode, PackedBlock), f"{kind}, {describe(mode)}")


class InPlace(nn.Module):
    """A block with several inputs that require grad, which it changes, returns, or returns views of."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear, self.gain = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Any:
        if self.how == "input changed":
            x.mul_(2.0)
            return torch.tanh(self.linear(x)) * self.gain, y
        if self.how == "view of the input changed":
            x[:, 1:3].add_(y[:, 1:3] * self.gain[1:3])
            return self.linear(x), y
        if self.how == "input returned":
            return x, self.linear(y) * self.gain
        if self.how == "changed input returned":
            return x.add_(self.linear(y)), y * self.gain
        if self.how == "view of the input returned":
            return x.view(-1, WIDTH), self.linear(x + y) * self.gain
        if self.how == "output a view":
            both = torch.cat([self.linear(x), self.linear(y) * self.gain])
            return both[: len(x)], both[len(x) :]
        if self.how == "detached":
            return self.linear(x.detach()) * self.gain + y, y
        if self.how == "input unused":
            return self.linear(y) * self.gain, y * 2
        assert self.how == "output changed"
        return self.linear(x) * self.gain, self.linear(y)


class InPlaceModel(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList([InPlace(how) for _ in range(3)])

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = x * 1.0, y * 1.0  # leaves may not be changed in place
        for block in self.blocks:
            x, y = block(x, y)
            if self.how == "output changed":
                x.mul_(0.5).relu_()
                y += x
            elif self.how == "output a view":
                x = x * 2
                y = torch.sin(y)
        return x, y


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


IN_PLACE = (
    "input changed",
    "view of the input changed",
    "input returned",
    "changed input returned",
    "view of the input returned",
    "output a view",
    "detached",
    "input unused",
    "output changed",
)


@on_ranks(2)
def test_inputs_and_outputs_changed_in_place_or_passed_through() -> None:
    for number, how in enumerate(IN_PLACE):
        build = seeded(InPlaceModel, how)
        reference = Reference(build, _two_inputs)
        for mode in by_turns(number)[: 2 + (number % 3 == 0)]:
            reference.check(wrapped(build, mode, InPlace), f"{how}, {describe(mode)}")


class GivesWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(x)), self.linear.weight


class TiedOutside(nn.Module):
    """A model in which a unit returns a weight that the parent computes with; the root returns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = GivesWeight(), MlpBlock(WIDTH, WIDTH)
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h, weight = self.first(x)
        return F.linear(self.second(h), weight, self.bias), self.bias, weight


def _weights_out(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 3, WIDTH)
    output, _, _ = model(x)
    output.square().mean().backward()
    yield {"x": x.grad}
    output, bias, weight = model(x)
    (output.square().mean() + bias.square().sum()).backward()
    yield {"x": x.grad}
    _, bias, _ = model(x)
    bias.sum().backward()
    yield {}
    _, _, weight = model(x)
    torch.autograd.backward([weight], [torch.full((WIDTH, WIDTH), 2.0)])
    yield {}
    output, _, _ = model(x)
    output.sum().backward()
    yield {"x": x.grad}


@on_ranks(2)
def test_forward_may_return_parameters() -> None:
    """Parameters of the root and of a nested unit, read after the unit's forward."""
    build = seeded(TiedOutside)
    reference = Reference(build, _weights_out)
    for mode in MODES:
        # Returned parameters stay readable until the next forward, so their unit is not at rest.
        model = wrapped(build, mode, GivesWeight, MlpBlock)
        reference.check(model, describe(mode), at_rest=False)
        with torch.no_grad():
            model.second(torch.randn(3, WIDTH))
        assert_at_rest(model, describe(mode))
