"""A step is repeatable after an exception anywhere in it, on every rank alike.

Exceptions of the model itself, in forward, backward and recomputation, are in test_backward_faults.py. Here memory runs
out at each request of the engine in turn, and an optimizer fails.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from fsdp.flat.memory import MemoryPool, PooledTensor
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.chains import Chain, Outer, Part, batch
from tests.harness.lockstep import assert_at_rest
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_parameters, wrap


def net(recompute: str = "") -> Chain:
    torch.manual_seed(0)
    return Chain(Part(), Outer(), Part(), Part(), segment=recompute)


class MemoryFault:
    """Raises an out-of-memory error at request number `countdown` for buffer memory."""

    def __init__(self) -> None:
        self.countdown = 0
        self.requests = 0

    @contextmanager
    def installed(self) -> Iterator[MemoryFault]:
        real = MemoryPool.allocate

        def allocate(pool: MemoryPool, buffer: PooledTensor) -> None:
            self.requests += 1
            self.countdown -= 1
            if self.countdown == 0:
                raise torch.OutOfMemoryError("there is no more")
            real(pool, buffer)

        with mock.patch.object(MemoryPool, "allocate", allocate):
            yield self


CHOICES: list[dict[str, Any]] = [
    {},
    {"forward_prefetch_distance": 2, "backward_prefetch_distance": 2},
    {"forward_prefetch_distance": 0, "backward_prefetch": None},
    {"limit_all_gathers": False, "backward_prefetch": BackwardPrefetch.BACKWARD_POST},
]
KINDS = list(itertools.product((ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP), (False, True)))


@pytest.mark.parametrize("recompute", ["", "reentrant"])
@on_ranks(2)
def test_a_step_after_running_out_of_memory_equals_one_without_the_error(recompute: str) -> None:
    """Requests for gathers, prefetches and reductions fail, with and without `reset_iter_state()`."""
    os.environ["FSDP_COLLECTIVES"] = "native"
    count = 0
    for number, options in enumerate(CHOICES):
        strategy, use_orig_params = KINDS[number if not recompute else -number]
        policy = ModuleWrapPolicy({Part, Outer})
        model = wrap(net(recompute), strategy, use_orig_params, wrap_policy=policy, **options)

        def step(model: FullyShardedDataParallel) -> tuple[Tensor, dict[str, Tensor | None]]:
            loss = model(batch(0)).square().mean()
            loss.backward()
            grads = {name: param.grad for name, param in model.named_parameters()}
            return loss.detach(), {name: None if grad is None else grad.clone() for name, grad in grads.items()}

        def scale(factor: float) -> None:
            with torch.no_grad():
                for param in model.parameters():  # noqa: B023
                    param.mul_(factor)

        expected = {}
        for factor in (2.0, 0.5):  # the second step has a recorded order
            scale(factor)
            expected[factor] = step(model)
            model.zero_grad()
        factors = itertools.cycle((2.0, 0.5))  # buffers gathered for a failed step are stale
        with MemoryFault().installed() as memory:
            step(model)
            model.zero_grad()
            requests, memory.requests = memory.requests, 0
            # Each request once; with the other choices and recomputations a part of them.
            stride = 1 if number + len(recompute) == 0 else 2 * len(CHOICES)
            for request in range(1 + (2 * number + len(recompute)) % stride, requests + 1, stride):
                what = f"{options}, {strategy}, out of memory at {request} of {requests}"
                memory.countdown = request
                with pytest.raises(torch.OutOfMemoryError):
                    step(model)
                if request // len(CHOICES) % 2:
                    model.reset_iter_state()
                model.zero_grad()
                scale(factor := next(factors))
                loss, grads = step(model)
                assert_bit_equal({"loss": loss}, {"loss": expected[factor][0]}, f"{what}, times {factor}")
                assert_bit_equal(grads, expected[factor][1], f"{what}, times {factor}")
                assert_at_rest(model, what)
                model.zero_grad()
                count += 1
    assert count >= 8, count


@on_ranks(2)
def test_training_continues_after_the_optimizer_raised() -> None:
    """The optimizer raises before any change, or after all changes."""

    def fail(*args: Any) -> None:
        raise ArithmeticError

    for use_orig_params in (False, True):
        found = []
        for faults in (False, True):
            model = wrap(net(), ShardingStrategy.FULL_SHARD, use_orig_params, wrap_policy=ModuleWrapPolicy({Part}))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for number in range(4):
                model(batch(number)).square().mean().backward()
                if faults:
                    register = optimizer.register_step_post_hook if number % 2 else optimizer.register_step_pre_hook
                    handle = register(fail)
                    with pytest.raises(ArithmeticError):
                        optimizer.step()
                    handle.remove()
                if not faults or number % 2 == 0:
                    optimizer.step()
                optimizer.zero_grad()
                assert_at_rest(model, f"step {number}")
            found.append(full_parameters(model))
        assert_bit_equal(found[1], found[0])
