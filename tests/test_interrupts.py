"""A KeyboardInterrupt at any line of the package: nothing stays behind, and the next step is right."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel
from tests.harness.agreeing import Chain, build, train
from tests.harness.interrupts import Lines
from tests.harness.lockstep import assert_at_rest
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks

WIDTHS = (3,)


def summon(model: Any, **options: bool) -> None:
    with FullyShardedDataParallel.summon_full_params(model, **options):
        pass


def accumulate(model: Any) -> None:
    with model.no_sync():
        pass


def gradients_of(model: Any) -> dict[str, Any]:
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


def interrupt_everywhere(use: Callable[[Any], None], use_orig_params: bool, stride: int, *, keeps_grads: bool) -> int:
    """Interrupt `use` of a model at each line, or each `stride`-th one, at other lines in either mode, and compare with
    a model that was not interrupted; return the number of interrupts.

    With `keeps_grads` the model has to be at rest with its gradients, and trains after every third interrupt only.
    """
    os.environ["FSDP_FORCE_SHARDED"] = "1"
    torch.manual_seed(0)
    plain = Chain(WIDTHS)
    model = build(copy.deepcopy(plain), dist.group.WORLD, use_orig_params=use_orig_params)
    for _ in range(2):
        model.zero_grad()
        train(model)
    registered, count = list(model.named_parameters()), 0
    values, gradients = ({name: each.detach().clone() for name, each in registered}, gradients_of(model))
    while True:
        lines = Lines(count * stride + (stride // 2) * use_orig_params)
        try:
            with lines.traced():
                use(model)
        except KeyboardInterrupt:
            pass
        if not lines.place:
            return count
        assert [name for name, _ in model.named_parameters()] == [name for name, _ in registered], lines.place
        assert all(now is before for now, (_, before) in zip(model.parameters(), registered)), lines.place
        if keeps_grads:  # and no gather is under way, which only the next pass waits for
            assert_at_rest(model, lines.place)
            assert_bit_equal(gradients_of(model), gradients, lines.place)
        if not keeps_grads or count % 3 == 0:
            model.zero_grad()
            train(model)
            assert_bit_equal(gradients_of(model), gradients, lines.place)
            assert_at_rest(model, lines.place)
            assert_bit_equal(dict(model.named_parameters()), values, lines.place)
        count += 1


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(1)
def test_interrupt_at_any_line_of_summon_full_params_leaves_nothing_summoned(use_orig_params: bool) -> None:
    """As the context begins, and as it ends; parameters and gradients are those of before."""
    assert interrupt_everywhere(summon, use_orig_params, 2, keeps_grads=True) > 250
    if use_orig_params:
        assert interrupt_everywhere(lambda model: summon(model, with_grads=True), True, 14, keeps_grads=True) > 50


@on_ranks(1)
def test_interrupt_at_any_line_of_no_sync_leaves_synchronization_on() -> None:
    """Else gradients would silently not be reduced any more."""
    assert interrupt_everywhere(accumulate, True, 1, keeps_grads=True) > 5


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(1)
def test_interrupt_at_any_line_of_a_step_leaves_no_gradient_behind(use_orig_params: bool) -> None:
    """Forward and backward. Gradients that were on their way are not added to those of the next step."""
    assert interrupt_everywhere(train, use_orig_params, 10, keeps_grads=False) > 100
