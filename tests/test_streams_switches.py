"""FSDP2's switches under the tracer of streams: see ``test_streams.py``."""

from __future__ import annotations

import logging

import torch

from fsdp import MixedPrecision
from tests.harness.pool import on_ranks
from tests.harness.stream_tracer import SimulatedStream, trace_streams
from tests.test_streams import BlockTower, Training

NEARBY = (
    Training.steps,
    Training.several_forwards,
    Training.checkpointing,
    Training.failures,
    Training.summoning,
    Training.deletion,
)


@on_ranks(2)
def test_an_all_reduce_hook_runs_on_the_given_stream() -> None:
    """`set_all_reduce_hook(stream=...)`: the stream follows the reduction, and `.grad` follows the stream."""
    used = set()
    with trace_streams(check=False) as tracer:
        training = Training(tracer, BlockTower((7, 13, 5, 7)))

        def hook(shard: torch.Tensor) -> None:
            used.add(tracer.current.name)
            shard.mul_(2)

        training.model.set_all_reduce_hook(hook, stream=SimulatedStream("user"))
        training.step()
        tracer.host_synchronisations.clear()
        training.steps()
    races = tracer.races
    waits = tracer.host_synchronisations
    assert not races, "\n".join(races)
    assert not waits, "\n".join(waits)
    assert used == {"user"}


@on_ranks(4)
def test_no_race_when_units_reshard_over_some_ranks() -> None:
    logging.getLogger("fsdp").setLevel(logging.CRITICAL)  # a part of the program fails on purpose
    with trace_streams(check=False) as tracer:
        precision = MixedPrecision(torch.bfloat16, torch.float32)
        training = Training(tracer, BlockTower((7, 13, 5, 7)), reshard_after_forward=2, mixed_precision=precision)
        training.step()
        tracer.host_synchronisations.clear()
        for part in NEARBY:
            part(training)
    races = tracer.races
    waits = tracer.host_synchronisations
    assert not races, "\n".join(races)
    assert not waits, "\n".join(waits)
