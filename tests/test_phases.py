"""`fsdp.offload` and `onload`: all tensors leave the device between two phases, and training continues bit for bit.

Tensors on a device are tested in `tests/device/situations.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.optim import WholeParamOptimizer
from tests.harness.agreeing import impatient, new_group, raises_soon
from tests.harness.exports import WORDS, build
from tests.harness.models import Net
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_parameters
from tests.harness.strategies import FULL, NONE


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    model(torch.randint(WORDS, (4,), generator=generator)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_training_with_offload_between_steps_is_bit_equal(use_orig_params: bool) -> None:
    for strategy in (FULL, NONE):
        results = []
        for moved in (False, True):
            model = build(use_orig_params, strategy)
            optimizer = torch.optim.AdamW([p for p in model.parameters() if p.numel()], lr=0.01)
            for number in range(4):
                step(model, optimizer, number)
                if moved and number % 2:
                    with fsdp.offloaded(model, optimizer):
                        pass
                elif moved:
                    fsdp.offload(model)
                    fsdp.onload(model)
            results.append(full_parameters(model))
        assert_bit_equal(results[1], results[0])


@on_ranks(2)
def test_calls_on_an_offloaded_model_raise_with_the_remedy() -> None:
    model = build(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.numel()], lr=0.1)
    step(model, optimizer, 0)

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    whole = WholeParamOptimizer(model, sgd, select=lambda name, shape: True, rest=sgd)
    optimizers: list[Any] = [optimizer, whole]
    fsdp.offload(model, optimizers)
    batch = torch.zeros(4, dtype=torch.int64)
    calls = {
        "forward": lambda: model(batch),
        "step": optimizer.step,
        "whole step": whole.step,
        "state dict": model.state_dict,
        "summon": lambda: FullyShardedDataParallel.summon_full_params(model).__enter__(),
        "export": lambda: next(iter(fsdp.export.weights(model))),
        "reduce": model.reduce_gradients,
    }
    for name, call in calls.items():
        with pytest.raises(RuntimeError, match=r"the model is offloaded: call fsdp.onload\(model, optimizer\) before"):
            call()
            raise AssertionError(name)
    fsdp.onload(model, optimizers)
    with pytest.raises(RuntimeError, match="the model is not offloaded"):
        fsdp.onload(model)
    step(model, optimizer, 1)
    whole.step()


@on_ranks(2)
def test_offload_is_refused_with_unreduced_gradients_and_in_a_forward() -> None:
    model = build(True)
    with model.no_sync():
        model(torch.zeros(4, dtype=torch.int64)).sum().backward()
    with pytest.raises(RuntimeError, match="gradients from no_sync"):
        fsdp.offload(model)
    model.reduce_gradients()

    def forward(m: Any, x: Tensor) -> Tensor:
        with pytest.raises(RuntimeError, match="is in FORWARD"):
            fsdp.offload(outer)
        return x

    outer = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 3), Net(forward)))
    outer(torch.ones(1, 3))
    with pytest.raises(ValueError, match="expected a model with wrapped modules"):
        fsdp.offload(nn.Linear(2, 2))
    with pytest.raises(ZeroDivisionError), fsdp.offloaded(model):
        raise ZeroDivisionError
    model(torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_offload_is_refused_between_a_forward_and_its_backward(use_orig_params: bool) -> None:
    """It is allowed once the backward has run, or the outputs are deleted, or where there is no graph."""
    batch = torch.zeros(4, dtype=torch.int64)
    for strategy in (FULL, NONE):
        model = build(use_orig_params, strategy)
        loss = model(batch).square().mean()
        with torch.no_grad():
            model(batch)
        with pytest.raises(RuntimeError, match=r"between a forward of .* and its backward: run the backward before"):
            fsdp.offload(model)
        loss.backward()
        with fsdp.offloaded(model):
            pass
        output = model(batch)
        del output
        with torch.no_grad():
            output = model(batch)
        with fsdp.offloaded(model):
            assert output.isfinite().all()


@pytest.mark.parametrize(("used", "forgets"), [(False, False), (True, False), (True, True)])
@on_ranks(2)
@impatient
def test_forward_of_a_model_that_one_rank_has_offloaded_raises_on_all_ranks(used: bool, forgets: bool) -> None:
    """Also where that rank alone has forgotten `onload`, or the model was not used before. Training then goes on."""
    odd, batch = dist.get_rank() == 1, torch.zeros(4, dtype=torch.int64)
    model = build(True, process_group=new_group())
    for _ in range(2 if used else 0):
        model(batch).sum().backward()
    if odd or forgets:
        fsdp.offload(model)
    if forgets and not odd:
        fsdp.onload(model)
    with raises_soon() as caught:
        model(batch)
    error = str(caught.value)
    assert "the model is offloaded: call fsdp.onload(model, optimizer) before" in error, error
    assert odd or "rank 1 failed in the forward of the root unit" in error, error
    if odd:
        fsdp.onload(model)
    model.zero_grad()
    model(batch).sum().backward()
    assert all(param.grad is not None for param in model.parameters() if param.numel())
