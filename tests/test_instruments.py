"""Faults in collectives: the comparison of a model with its plain twin detects each.

A fault that is not detected would show that the tests that use it cannot fail. Faults of ranks are in
test_out_of_step.py, and missing waits between streams in test_streams.py.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import ShardingStrategy
from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER
from fsdp.wrap import ModuleWrapPolicy
from tests.harness import process_groups
from tests.harness.lockstep import assert_local_parameters
from tests.harness.pool import of_all_ranks, on_ranks
from tests.harness.process_groups import delay_collectives
from tests.harness.sharded import wrap
from tests.harness.small import batch, net, sgd
from tests.harness.strategies import FULL_SHARD, HYBRID_SHARD, NO_SHARD
from tests.harness.twin import Twin


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    return model(batch(step, rank)).square().mean()


def first_difference(strategy: ShardingStrategy) -> str:
    """Train two steps next to a plain twin; return the difference of this rank's parameters, or the error."""
    os.environ["FSDP_COLLECTIVES"] = "native"
    options: dict[str, Any] = {"process_group": dist.new_group()}
    if strategy is HYBRID_SHARD:
        alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
        options["process_group"] = (alone[dist.get_rank()], dist.group.WORLD)
    model = wrap(net(), strategy, True, wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)
    twin = Twin(model, net(), loss_of, sgd)
    try:
        for step in range(2):
            twin.zero_grad()
            twin.backward(step)
            twin.update()
        assert_local_parameters(model, twin.values(), 0, "after two steps")
    except (RuntimeError, AssertionError) as error:
        return str(error)
    return ""


Change = Callable[[Tensor, Tensor, dict[int, Tensor]], Any]


class Done:
    """A work after its wait. Gloo's reduce-scatter would write the output again at each further wait."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *timeout: Any) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


@contextmanager
def changed(name: str, change: Change) -> Iterator[None]:
    """Call `change(before, output, kept)` after each call of a function of torch.distributed.

    `before` is a copy of the output from before the call, or this rank's own contribution to a reduce-scatter.
    `kept` is the same dictionary at each call. Integer control messages are unchanged.
    """
    real, kept = getattr(dist, name), dict[int, Tensor]()

    @functools.wraps(real)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(real).bind(*args, **kwargs)
        output, source = (*bound.arguments.values(), None)[:2]
        if not output.is_floating_point():
            return real(*args, **kwargs)
        before = (source.chunk(dist.get_world_size())[dist.get_rank()] if name == REDUCE_SCATTER else output).clone()
        bound.arguments["async_op"] = True
        work = real(*bound.args, **bound.kwargs)
        work.wait()
        change(before, output.data, kept)
        return Done(work)

    with mock.patch.object(dist, name, replacement):
        yield


GATHERS: dict[str, Change] = {
    "is stale": lambda before, output, kept: output.copy_(kept.setdefault(output.numel(), output.clone())),
    "exchanges shards": lambda before, output, kept: output.copy_(output.roll(output.numel() // 2)),
    "loses the last element": lambda before, output, kept: output[: output.numel() // 2][-1:].zero_(),
    "is rounded": lambda before, output, kept: output.copy_(output.to(torch.bfloat16)),
}
REDUCTIONS: dict[str, Change] = {
    "has one contribution": lambda before, output, kept: output.copy_(before),
    "is stale": GATHERS["is stale"],
    "adds up and does not average": lambda before, output, kept: output.mul_(dist.get_world_size()),
}
COLLECTIVES = [
    *((FULL_SHARD, ALL_GATHER, change) for change in GATHERS),
    *((FULL_SHARD, REDUCE_SCATTER, change) for change in REDUCTIONS),
    (NO_SHARD, "all_reduce", "is stale"),
    (HYBRID_SHARD, "all_reduce", "has one contribution"),
]


@on_ranks(2)
def test_training_without_a_fault_equals_the_plain_model() -> None:
    for strategy in (FULL_SHARD, NO_SHARD, HYBRID_SHARD):
        assert first_difference(strategy) == ""


@pytest.mark.parametrize(("strategy", "name", "change"), COLLECTIVES)
@on_ranks(2)
def test_twins_detect_wrong_results_of_collectives(strategy: ShardingStrategy, name: str, change: str) -> None:
    with changed(name, {**GATHERS, **REDUCTIONS}[change]):
        assert any(of_all_ranks(first_difference(strategy)))


@on_ranks(2)
def test_twins_detect_a_missing_wait() -> None:
    """Values in flight are NaN."""
    left_out = mock.patch.object(process_groups._DelayedWork, "wait", lambda self, *timeout: True)
    with pytest.raises(RuntimeError, match="never waited for"), delay_collectives(), left_out:
        assert first_difference(FULL_SHARD)
