"""No pass uses a copy of parameters from before a change or a replacement."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from tests.harness.lockstep import STEP, Data, Reference
from tests.harness.meter import Meter, needs_meter
from tests.harness.models import MlpBlock
from tests.harness.passes import WIDTH, clear, loss_of, mlp, seeded, wrapped
from tests.harness.pool import on_ranks
from tests.harness.sharded import wrap
from tests.harness.strategies import FULL, GRAD_OP, MODES, NONE, describe

# -- stale copies ------------------------------------------------------------------------------------------------


@needs_meter
@on_ranks(2)
def test_autocast_keeps_no_cast_of_a_resharded_unit() -> None:
    """Autocast would keep a cast of each weight until the block ends."""
    width, count, meter = 500, 6, Meter()
    unit, cast = 4 * width * width, 2 * width * width  # float32, bfloat16
    x = torch.randn(2, width)

    def autocast() -> torch.autocast:
        return torch.autocast("cpu", dtype=torch.bfloat16)

    for orig in (True, False):
        blocks = seeded(lambda: nn.Sequential(*(MlpBlock(width, width) for _ in range(count))))
        model = wrapped(blocks, (FULL, orig), MlpBlock)
        seen: list[int] = []
        model[-1].module.register_forward_hook(lambda *args: seen.append(meter.live()))  # noqa: B023
        for _ in range(2):  # the first pass fills caches and records the order of the units
            with autocast():
                loss_of(model, x).backward()
                clear(model)
                with torch.no_grad():
                    model(x)
        base = meter.baseline()
        with autocast():
            with torch.no_grad():
                model(x)
            held = {"in the last unit's forward": seen[-1] - base - 2 * unit, "after it": meter.at_rest() - base}
            loss_of(model, x).backward()
            clear(model)
            held["after a backward"] = meter.at_rest() - base
        assert all(nbytes < 1.5 * cast for nbytes in held.values()), f"use_orig_params={orig}: {held}, a cast is {cast}"


def _inference_first(model: nn.Module, data: Data) -> Iterator[Any]:
    x = data.tensor(0, 3, WIDTH)
    with torch.inference_mode():
        first = model(x)
    for _ in range(3):
        loss_of(model, x).backward()
        yield {"x": x.grad, "first": first}
        with torch.inference_mode():
            model.eval()
            first = model(x)
            model.train()
        yield STEP


@on_ranks(2)
def test_training_after_inference_mode() -> None:
    """Gradients equal the plain model's, and parameters of a model wrapped in inference mode are ordinary ones."""
    reference = Reference(seeded(mlp), _inference_first)
    for mode in MODES:
        reference.check(wrapped(seeded(mlp), mode, MlpBlock), f"then trained, {describe(mode)}")
        with torch.inference_mode():
            model = wrapped(seeded(mlp), mode, MlpBlock)
            params = list(seeded(mlp)().parameters())
        assert not any(p.is_inference() for p in model.parameters()) and params[0].is_inference()
        reference.check(model, f"made in inference mode, {describe(mode)}")


# -- parameters that users replace -------------------------------------------------------------------------------


@on_ranks(2)
def test_replacing_one_registration_of_a_shared_parameter_is_refused() -> None:

    def tied() -> nn.Module:
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        net[2].weight = net[0].weight
        return net

    x = torch.randn(3, WIDTH)
    for strategy in (FULL, GRAD_OP, NONE):
        model = wrap(seeded(tied)(), strategy, True)
        shared = model[0].weight
        assert model[2].weight is shared
        model[2].weight = nn.Parameter(shared.detach().clone())
        with pytest.raises(NotImplementedError, match=r"Cannot writeback '2.weight'.*shared"):
            model(x)
        model[2].weight = shared
        shared.data = shared.data * 0.5  # new data for both registrations is allowed
        plain = seeded(tied)()
        with torch.no_grad():
            plain[0].weight.mul_(0.5)
            assert torch.equal(model(x), plain(x))


@on_ranks(2)
def test_check_for_replaced_parameters_can_be_skipped() -> None:
    with mock.patch.dict(os.environ, FSDP_SKIP_WRITEBACK_CHECK="1"):
        model = wrapped(seeded(mlp), (FULL, True), MlpBlock)
    plain, x = seeded(mlp)(), torch.randn(3, WIDTH)
    model.blocks[1].module.linear.weight = nn.Parameter(torch.zeros(5))
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))
