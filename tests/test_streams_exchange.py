"""Streams of the exchanges between shards and owners of whole parameters, in traces of simulated streams."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullyShardedDataParallel
from fsdp.optim import WholeParamOptimizer
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.pool import on_ranks
from tests.harness.stream_tracer import StreamTracer, Sync, trace_streams

UNITS, WIDTH, STEPS = 3, 6, 2
EXCHANGE = "WholeParamOptimizer"


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def trace(*drop: Sync) -> StreamTracer:
    """Trace steps with owners, without the synchronisations of `drop`."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(WIDTH + unit, WIDTH + unit + 1) for unit in range(UNITS)))
    with trace_streams(drop=drop, check=False) as tracer:
        model = FullyShardedDataParallel(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
        tracer.watch(model)
        optimizer = WholeParamOptimizer(model, sgd, select=lambda name, shape: len(shape) == 2, rest=sgd)
        for _ in range(STEPS):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        del model, optimizer
    return tracer


@on_ranks(2)
def test_exchanges_race_with_nothing() -> None:
    assert trace().races == []


@on_ranks(2)
def test_exchanges_run_beside_the_computation() -> None:
    """Each is issued on the gather stream, and does not come after the unit that is stepped meanwhile."""
    tracer = trace()
    exchanges = [each for each in tracer.collectives if each.label == EXCHANGE]
    assert len(exchanges) == UNITS + STEPS * 2 * UNITS  # the first ones show the values to the inner optimizer
    assert {each.stream for each in exchanges} == {tracer.streams.gather}


@on_ranks(2)
def test_each_synchronisation_of_an_exchange_is_needed() -> None:
    syncs: list[Any] = [None, None]
    dist.all_gather_object(syncs, trace().syncs)
    own = sorted({sync for found in syncs for sync in found if sync.recorded.file == "placement/redistribute.py"})
    assert len(own) == 2
    for sync in own:
        races: list[Any] = [None, None]  # on an owner, or on the rank that sends to it
        dist.all_gather_object(races, trace(sync).races)
        assert any(races), f"{sync} is superfluous"
