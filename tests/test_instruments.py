"""Faults in collectives, hooks, streams and optimizers: the property that each endangers detects it.

A fault that is not detected would show that the test of that property cannot fail. Faults of ranks are in
test_out_of_step.py.
"""

from __future__ import annotations

import copy
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
from torch import Tensor

from fsdp import ShardingStrategy
from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER
from fsdp.runtime import hooks
from tests.harness import process_groups
from tests.harness.agreeing import UNEQUAL, WIDTH, Chain, build, new_group
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.process_groups import delay_collectives
from tests.harness.strategies import FULL_SHARD, HYBRID_SHARD, NO_SHARD
from tests.harness.stream_tracer import StreamTracer, Sync, trace_streams

# -- equality with the plain model -------------------------------------------------------------------------------------


def first_difference(strategy: ShardingStrategy) -> str:
    """Train two steps beside a plain model; return the difference of the third losses on this rank, or an error."""
    os.environ["FSDP_COLLECTIVES"] = "native"
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = Chain(UNEQUAL)
    single_rank_group = [dist.new_group([each]) for each in range(size)][rank]
    group = (single_rank_group, dist.group.WORLD) if strategy is HYBRID_SHARD else new_group()
    model = build(copy.deepcopy(plain), group, strategy, use_orig_params=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain)]
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        inputs = [torch.randn(2, WIDTH, generator=generator) for _ in range(size)]
        try:
            loss = model(inputs[rank]).square().mean()
            if step == 2:  # this forward uses the parameters after two steps
                torch.testing.assert_close(loss, plain(inputs[rank]).square().mean())
                return ""
            loss.backward()
        except (RuntimeError, AssertionError) as error:
            return str(error)
        for each in inputs:
            (plain(each).square().mean() / size).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    raise AssertionError("the last step returns")


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
    "is not made": lambda before, output, kept: output.copy_(before),
    "is stale": lambda before, output, kept: output.copy_(kept.setdefault(output.numel(), output.clone())),
    "exchanges shards": lambda before, output, kept: output.copy_(output.roll(output.numel() // 2)),
    "lacks the other shard": lambda before, output, kept: output.chunk(2)[1 - dist.get_rank()].zero_(),
    "loses the last element": lambda before, output, kept: output[: output.numel() // 2][-1:].zero_(),
    "is rounded": lambda before, output, kept: output.copy_(output.to(torch.bfloat16)),
}
REDUCTIONS: dict[str, Change] = {
    "has one contribution": GATHERS["is not made"],
    "is stale": GATHERS["is stale"],
    "adds up and does not average": lambda before, output, kept: output.mul_(dist.get_world_size()),
    "exchanges shards": GATHERS["exchanges shards"],
    "has the wrong sign": lambda before, output, kept: output.neg_(),
}
COLLECTIVES = [
    *((FULL_SHARD, ALL_GATHER, change) for change in GATHERS),
    *((FULL_SHARD, REDUCE_SCATTER, change) for change in REDUCTIONS),
    *((NO_SHARD, "all_reduce", change) for change in list(REDUCTIONS)[:2]),
    (HYBRID_SHARD, "all_reduce", "has one contribution"),
]


@on_ranks(2)
def test_training_without_a_fault_equals_the_plain_model() -> None:
    for strategy in (FULL_SHARD, NO_SHARD, HYBRID_SHARD):
        assert first_difference(strategy) == ""


@pytest.mark.parametrize(("strategy", "name", "change"), COLLECTIVES)
def test_parity_detects_wrong_results_of_collectives(strategy: ShardingStrategy, name: str, change: str) -> None:
    assert any(run_ranks(2, difference_of_collective, strategy, name, change))


def difference_of_collective(strategy: ShardingStrategy, name: str, change: str) -> str:
    with changed(name, {**GATHERS, **REDUCTIONS}[change]):
        return first_difference(strategy)


@on_ranks(2)
def test_parity_detects_a_missing_wait() -> None:
    """Values in flight are NaN."""
    left_out = mock.patch.object(process_groups._DelayedWork, "wait", lambda self, *timeout: True)
    with pytest.raises(RuntimeError, match="never waited for"), delay_collectives(), left_out:
        assert first_difference(FULL_SHARD)


@on_ranks(2)
def test_parity_detects_a_lost_gradient() -> None:
    """The hook of one leaf is never called."""
    real = hooks.on_accumulated

    def lose(leaf: Any, callback: Callable[[Tensor], None]) -> None:
        real(leaf, (lambda grad: None) if leaf.shape == (3, WIDTH) else callback)

    with mock.patch.object(hooks, "on_accumulated", lose):
        assert first_difference(FULL_SHARD)


@on_ranks(2)
def test_parity_detects_an_optimizer_that_skips_one_rank() -> None:
    step = torch.optim.SGD.step
    with mock.patch.object(torch.optim.SGD, "step", step if dist.get_rank() == 0 else lambda self: None):
        assert first_difference(FULL_SHARD)


# -- streams -----------------------------------------------------------------------------------------------------------


def trace(drop: tuple[Sync, ...]) -> StreamTracer:
    os.environ["FSDP_FORCE_SHARDED"] = "1"
    torch.manual_seed(0)
    with trace_streams(drop=drop, check=False) as tracer:
        model = build(Chain(UNEQUAL), dist.group.WORLD, use_orig_params=True)
        tracer.watch(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracer


@on_ranks(1)
def test_stream_tracer_detects_missing_waits() -> None:
    """All waits of one stream for one other stream are dropped at a time."""
    full_trace = trace(())
    assert not full_trace.races
    pairs = {(sync.by, sync.on) for sync in full_trace.syncs}
    assert len(pairs) >= 4, pairs
    for pair in sorted(pairs):
        dropped = tuple(sync for sync in full_trace.syncs if (sync.by, sync.on) == pair)
        assert trace(dropped).races, f"{pair[0]} does not wait for {pair[1]}, without an error"
