"""FSDP2's switches under the tracer of streams: see ``test_streams.py``."""

from __future__ import annotations

import logging

import torch

from fsdp import MixedPrecision
from tests.harness.pool import run_ranks
from tests.harness.stream_tracer import SimulatedStream, trace_streams
from tests.test_streams import Tower, Training

NEARBY = (
    Training.steps,
    Training.several_forwards,
    Training.checkpointing,
    Training.failures,
    Training.summoning,
    Training.deletion,
)


def trace_reshard_ranks() -> tuple[list[str], list[str]]:
    logging.getLogger("fsdp").setLevel(logging.CRITICAL)  # a part of the program fails on purpose
    with trace_streams(check=False) as tracer:
        precision = MixedPrecision(torch.bfloat16, torch.float32)
        training = Training(tracer, Tower((7, 13, 5, 7)), reshard_after_forward=2, mixed_precision=precision)
        training.step()
        tracer.host_synchronisations.clear()
        for part in NEARBY:
            part(training)
    return tracer.races, tracer.host_synchronisations


def test_an_all_reduce_hook_runs_on_the_given_stream() -> None:
    """`set_all_reduce_hook(stream=...)`: the stream follows the reduction, and `.grad` follows the stream."""
    for races, waits, used in run_ranks(2, trace_hook):
        assert not races, "\n".join(races)
        assert not waits, "\n".join(waits)
        assert used == {"user"}


def trace_hook() -> tuple[list[str], list[str], set[str]]:
    used = set()
    with trace_streams(check=False) as tracer:
        training = Training(tracer, Tower((7, 13, 5, 7)))

        def hook(shard: torch.Tensor) -> None:
            used.add(tracer.current.name)
            shard.mul_(2)

        training.model.set_all_reduce_hook(hook, stream=SimulatedStream("user"))
        training.step()
        tracer.host_synchronisations.clear()
        training.steps()
    return tracer.races, tracer.host_synchronisations, used


def test_no_race_when_units_reshard_over_some_ranks() -> None:
    for races, waits in run_ranks(4, trace_reshard_ranks):
        assert not races, "\n".join(races)
        assert not waits, "\n".join(waits)
