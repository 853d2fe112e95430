"""Gradients, memory and collectives of models with frozen or unused parameters."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.lockstep import CLEAR, STEP, Data, Reference
from tests.harness.models import BlockWithUnused, LoraBlock, MlpBlock, Net, Unit, in_turn
from tests.harness.passes import (
    KINDS,
    WIDTH,
    check_parity,
    clear,
    loss_of,
    mlp,
    seeded,
    set_requires_grad,
    wrapped,
)
from tests.harness.poison import poisoned_memory
from tests.harness.pool import on_ranks
from tests.harness.sharded import wrap
from tests.harness.strategies import FULL, MODES, NONE, by_turns, describe
from tests.harness.versions import RELEASE


@on_ranks(2)
def test_a_part_of_a_flat_parameter_cannot_be_frozen() -> None:
    """The error names the parameters that are frozen together, and the option to freeze them one by one."""
    model = wrapped(seeded(mlp), (FULL, False), MlpBlock)
    model.blocks[1].module.linear.weight.requires_grad_(False)
    words = r"'linear.weight', 'linear.bias'.* are one flat parameter, .*Pass use_orig_params=True to freeze them one"
    with pytest.raises(RuntimeError, match=words):
        loss_of(model, torch.randn(3, WIDTH))


def _freeze(
    model: nn.Module, data: Data, *, prefix: str, starts: bool = True, need_input: bool = True
) -> Iterator[Any]:
    """Run steps in which `prefix` is frozen and unfrozen in turns; the optimizer does not step frozen parameters."""
    for step in range(6):
        if step % 2 == 0:
            set_requires_grad(model, prefix, starts == (step % 4 == 0))
        x = data.tensor(step, 3, WIDTH)
        if not need_input:
            x = x.detach()
        loss_of(model, x).backward()
        yield {"x": x.grad}
        if step == 4:
            loss_of(model, x).backward()
            yield {"x": x.grad}
        yield STEP


def lora(checkpointing: str = "none") -> nn.Module:
    """Build a frozen input layer, blocks with adapters, maybe checkpointed, and a trained head."""
    return Net(
        lambda m, x: m.head(in_turn(m.blocks, m.embed(x), checkpointing if torch.is_grad_enabled() else "none")),
        embed=nn.Linear(WIDTH, 13).requires_grad_(False),
        blocks=nn.ModuleList([LoraBlock(13) for _ in range(3)]),
        head=nn.Linear(13, WIDTH),
    )


@on_ranks(2)
def test_freezing_and_unfreezing() -> None:
    """Whole units and parts of them, later and from the start; frozen parameters have no gradient."""
    cases: list[tuple[Callable[[], nn.Module], type[nn.Module], dict[str, Any], bool]] = [
        # model, class of units, arguments of the program, whether flat parameters support it
        (mlp, MlpBlock, {"prefix": "blocks.1."}, True),
        (mlp, MlpBlock, {"prefix": "blocks.", "need_input": False}, True),
        (mlp, MlpBlock, {"prefix": "", "starts": False}, True),
        (mlp, MlpBlock, {"prefix": "blocks.1.linear.weight", "starts": False}, False),
        (mlp, MlpBlock, {"prefix": "embed.bias"}, False),
        (lora, LoraBlock, {"prefix": "blocks.1.base.", "starts": False}, True),
        (lora, LoraBlock, {"prefix": "embed.", "starts": False, "need_input": False}, True),
    ]
    for number, (make, unit, arguments, flat_too) in enumerate(cases):
        reference = Reference(seeded(make), partial(_freeze, **arguments))
        modes = by_turns(number)[: 2 + (number == 0)] if flat_too else [mode for mode in MODES if mode[1]]
        for turn, mode in enumerate(modes):
            debug = str((number + turn) % 2)
            with mock.patch.dict(os.environ, FSDP_DEBUG=debug):
                reference.check(wrapped(seeded(make), mode, unit), f"{arguments}, {describe(mode)}, debug={debug}")


def _freeze_between(model: nn.Module, data: Data, *, way: str, every: int = 1) -> Iterator[Any]:
    """Freeze every trained parameter, or every second one, for another forward between a forward and a backward."""
    for step in range(2):
        trained = [param for param in model.parameters() if param.requires_grad][::every]
        x, y = data.tensor(step, 3, WIDTH), data.tensor(10 + step, 3, WIDTH)
        loss = loss_of(model, x)
        for param in trained:
            param.requires_grad_(False)
        if way in ("no_grad", "inference_mode"):
            with torch.no_grad() if way == "no_grad" else torch.inference_mode():
                model(y)
        elif way == "backward while frozen":
            loss_of(model, y).backward()
            yield {"y": y.grad}
        elif way == "one backward for both":
            loss = loss + loss_of(model, y)
        else:
            assert way == "frozen until the end"
            loss.backward()
            yield {"x": x.grad}
        for param in trained:
            param.requires_grad_(True)
        if way != "frozen until the end":
            loss.backward()
            yield {"x": x.grad, "y": y.grad}
        yield STEP


@pytest.mark.parametrize("checkpointing", KINDS)
@on_ranks(2)
def test_parameters_frozen_between_a_forward_and_its_backward(checkpointing: str) -> None:
    """A backward uses the `requires_grad` at its beginning, as on a plain module.

    Gradients of parameters that were frozen for a forward in between, and are trained again, are kept.
    """
    ways, turn = ["no_grad", "inference_mode", "backward while frozen"], KINDS.index(checkpointing)
    if checkpointing == "none":  # else a recomputation would save other tensors than the forward did
        ways += ["one backward for both", "frozen until the end"]
    build = seeded(lora, checkpointing)
    for number, way in enumerate(ways):
        modes = by_turns(turn + number)[: 3 if number == turn else 2]
        check_parity(build, partial(_freeze_between, way=way), LoraBlock, modes=modes, case=way)
    model = wrap(build(), FULL, turn % 2 == 1, wrap_policy=ModuleWrapPolicy({LoraBlock}), reduce_unused=True)
    Reference(build, partial(_freeze_between, way="no_grad")).check(model, "reduce_unused")
    # A flat parameter has one flag for the whole unit.
    program = partial(_freeze_between, way="no_grad", every=2)
    check_parity(build, program, LoraBlock, modes=[(FULL, True)], case="every second parameter")


class _NoGradient(torch.autograd.Function):
    """A function that uses a parameter and returns no gradient for it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor) -> Tensor:
        return x * param.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        return grads[0], None


@on_ranks(2)
def test_gradient_dropped_by_autograd_raises() -> None:
    """Autograd drops the gradient of a parameter that was frozen for the last forward and is reached before an
    output.

    The error names it. A function without a gradient of a parameter is no error.
    """

    def forward(m: Any, x: Tensor, mark: bool) -> Tensor:
        y = m.linear(x) * _NoGradient.apply(torch.ones(1), m.without)
        m.stored = m.scale * 2  # the backward reaches it before the output
        if mark:
            fsdp.mark_side_output(m.stored)
        return y

    ways = (True, False) if RELEASE >= (2, 7) else (True,)  # torch 2.6 calls no hook of a frozen parameter
    for orig, mark, returned in itertools.product((True, False), (True, False), ways):
        scale, without = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        net = Net(forward, linear=nn.Linear(WIDTH, WIDTH), scale=scale, without=without)
        model = wrap(net, NONE, orig, wrap_policy=None)
        for reached in (True, True, False):
            x = torch.randn(3, WIDTH)
            y = model(x, mark)
            loss = (model.module.stored.sum() if reached else 0) + (y.sum() if returned or not reached else 0)
            model.requires_grad_(False)
            with torch.no_grad():
                model(x, mark)
            model.requires_grad_(True)
            if mark or not reached:
                loss.backward()
                clear(model)
            else:
                with pytest.raises(RuntimeError, match=r"'scale' of the root unit is lost.*mark_side_output"):
                    loss.backward()
                assert all(param.grad is None for param in model.parameters())


def switch() -> Unit:
    """Build two branches, and a bucket that only the second one uses."""

    def forward(m: Any, x: Tensor, which: str) -> Tensor:
        if which == "second":
            x = x * m.precise.sum().float()
        return torch.tanh(getattr(m, which)(x))

    first, second, never = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    precise = nn.Parameter(torch.randn(3, dtype=torch.float64))
    return Unit(forward, first=first, second=second, never=never, precise=precise)


def switched() -> nn.Module:
    """Build blocks of which each pass uses one branch or none."""

    def forward(m: Any, x: Tensor, branches: Sequence[str]) -> Tensor:
        for block, branch in zip(m.blocks, branches):
            if branch != "skip":
                x = block(x, branch)
        return m.plain(x)

    return Net(forward, blocks=nn.ModuleList([switch() for _ in range(3)]), plain=BlockWithUnused(WIDTH))


def _switching(model: nn.Module, data: Data) -> Iterator[Any]:
    for index, branches in enumerate(
        [
            ("first", "first", "first"),
            ("second", "first", "second"),
            ("skip", "second", "first"),
            ("first", "skip", "skip"),
        ]
        * 2
    ):
        x = data.tensor(index, 3, WIDTH)
        model(x, branches).square().mean().backward()
        yield {"x": x.grad}
        if index % 3 != 1:
            yield CLEAR


@on_ranks(2)
def test_unused_parameters_get_zeros_and_unused_units_none() -> None:
    """No slot keeps bytes of an earlier pass, of another unit, or of fresh memory."""
    reference = Reference(seeded(switched), _switching)
    for mode in MODES:
        debug = str(int(mode in by_turns(1)))
        with mock.patch.dict(os.environ, FSDP_DEBUG=debug):
            model = wrapped(seeded(switched), mode, Unit, BlockWithUnused)
            reference.check(model, f"{describe(mode)}, debug={debug}")
    with poisoned_memory():
        for mode in by_turns(0):
            model = wrapped(seeded(switched), mode, Unit, BlockWithUnused)
            reference.check(model, f"{describe(mode)}, fresh memory is NaN")
