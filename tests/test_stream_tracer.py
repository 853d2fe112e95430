"""Tests of `tests.harness.stream_tracer`: detection of races and of calls that make the host wait."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fsdp.runtime import hooks
from tests.harness.pool import on_ranks
from tests.harness.stream_tracer import SimulatedStream, StreamRace, trace_streams
from tests.harness.versions import RELEASE


def test_an_event_covers_only_what_came_before_it() -> None:
    with trace_streams(check=False) as tracer:
        streams = tracer.streams
        x = torch.zeros(3)
        made = streams.record()
        x.add_(1)
        with streams.on_gather_stream():
            streams.wait(made)
            x.clone()
    with pytest.raises(StreamRace, match=r"aten\.add_\S* on the compute stream"):
        tracer.check()


def test_simulated_streams_compare_as_torch_streams() -> None:
    """A `torch.Stream` is neither equal nor unequal to None, so code must not test `stream != None`."""
    one, other = SimulatedStream("one"), SimulatedStream("other")
    assert operator.eq(one, one) and not operator.ne(one, one)
    assert operator.ne(one, other) and not operator.eq(one, other)
    assert not operator.ne(one, None) and not operator.eq(one, None)


def test_calls_that_make_the_host_wait_are_recorded() -> None:
    with trace_streams() as tracer:
        x = torch.ones(3)
        x.sum().item()
        x[x > 0]
        torch.accelerator.synchronize()
    noted = [text.partition(" at ")[0] for text in tracer.host_synchronisations]
    assert noted == ["aten._local_scalar_dense.default", "aten.index.Tensor", "synchronize"]


def trace_backward_on_other_streams() -> list[list[str]]:
    """Trace a leaf's hook without ordering, one whose result the caller's stream reads, and the nodes of forwards."""
    found = []
    for reads_in_hook, reads_after in ((True, False), (False, True)):
        with trace_streams(check=False) as tracer:
            streams, other = tracer.streams, SimulatedStream("other")
            leaf, memory, made = torch.ones(3, requires_grad=True), torch.zeros(3), []
            with tracer.on(other):
                node = hooks.accumulator_of(leaf)

            def hook(param: Tensor) -> None:
                made.append(memory.clone() if reads_in_hook else param.detach().clone())  # noqa: B023

            hooks.on_accumulated(leaf, hook)
            loss = leaf.square().sum()
            with streams.on_reduce_stream():
                memory.add_(1) if reads_in_hook else None
            tracer.races.clear()
            loss.backward()
            if reads_after:
                made[0].clone()  # the caller has waited for the leaves' streams
            del node
        found.append(tracer.races)
    return found


def test_autograd_runs_a_node_on_the_stream_of_its_forward() -> None:
    unordered, ordered = trace_backward_on_other_streams()
    assert len(unordered) == 1 and "aten.clone.default on the other stream" in unordered[0]
    assert ordered == []


@on_ranks(1)
def test_collectives_run_on_the_current_stream_and_give_no_work_to_wait_for() -> None:
    with trace_streams(check=False) as tracer:
        streams = tracer.streams
        x = torch.ones(3)
        dist.all_reduce(x, async_op=True).wait()
        with streams.on_reduce_stream():
            dist.all_reduce(x)
    races, noted = tracer.races, tracer.host_synchronisations
    assert len(races) == 1 and races[0].endswith("allreduce_ (no unit) on the reduce stream, as memory of no unit")
    if RELEASE >= (2, 7):  # older collectives do not say whether they are asynchronous
        assert len(noted) == 1 and noted[0].startswith("allreduce_ (no unit) hands out a work object")
