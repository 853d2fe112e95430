"""Ranges and log lines of a step, and outputs that are views and are changed in place."""

from __future__ import annotations

import copy
import logging
import os
from typing import Any
from unittest import TestCase, mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel
from tests.harness.models import Net
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_gradients
from tests.harness.switches import batch, build

FORWARD, BACKWARD = ["_pre_forward", "forward", "_post_forward"], ["_pre_backward_hook", "_post_backward_hook"]


@on_ranks(1)
def test_profilers_name_each_unit_and_its_work() -> None:
    # a single rank communicates with itself, because a profiler takes seconds to start per rank
    os.environ["FSDP_FORCE_SHARDED"] = "1"
    model = build()
    for _ in range(2):
        model(batch(0)).sum().backward()
        model.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        model(batch(0)).sum().backward()
    seen = {event.name for event in profiler.events() if event.name.startswith("FullyShardedDataParallel.")}
    for unit in ("the root unit", "unit 'embed'", "unit 'layers.0'", "unit 'layers.2'"):
        for what in (*FORWARD, *BACKWARD, "reduce"):
            assert f"FullyShardedDataParallel.{what} {unit}" in seen, (what, unit, seen)
    assert "FullyShardedDataParallel._root_pre_forward the root unit" in seen
    assert "FullyShardedDataParallel.gather the root unit" in seen
    assert "FullyShardedDataParallel.prefetch unit 'layers.1'" in seen
    with mock.patch("torch.autograd.profiler.record_function", side_effect=AssertionError("without a profiler")):
        model(batch(0)).sum().backward()


@on_ranks(2)
def test_the_log_names_the_rank_the_forward_and_the_units() -> None:
    """The log has a line for each gather and reduction, in debug mode only."""
    model = build()
    with TestCase().assertLogs("fsdp", logging.INFO) as logged:
        for _ in range(2):
            model(batch(0)).sum().backward()
        assert not logged.records
        with mock.patch.dict("os.environ", FSDP_DEBUG="1"):
            model(batch(0)).sum().backward()
    here, lines = f"rank {dist.get_rank()}, forward 3: ", [record.getMessage() for record in logged.records]
    assert all(line.startswith(here) for line in lines), lines
    first = [line.removeprefix(here) for line in lines[:3]]
    assert first == ["gather the root unit", "prefetch unit 'embed'", "prefetch unit 'layers.0'"], first
    assert sum(line.startswith(f"{here}reduce ") for line in lines) == 5


@on_ranks(2)
def test_outputs_that_are_views_may_be_changed_in_place() -> None:
    """Autograd drops the hooks of such a view, and with them the gather that the gradient would have started."""

    def views(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = m.second(torch.tanh(m.first(x)))
        return y.view(2, -1), y[:, :2]

    def changing(m: Any, x: Tensor) -> Tensor:
        y, z = m.part(x)
        y += 1
        z.mul_(y.detach().sum())
        return y.square().sum() + z.sum()

    torch.manual_seed(3)
    plain = Net(changing, part=Net(views, first=nn.Linear(4, 4), second=nn.Linear(4, 4)))
    part = FullyShardedDataParallel(copy.deepcopy(plain.part), use_orig_params=True)
    model = FullyShardedDataParallel(Net(changing, part=part), use_orig_params=True)
    for seed in range(2):
        x = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
        for whole in (plain, model):
            whole.zero_grad()
            whole(x).backward()
        wanted = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
        assert len(wanted) == 4
        assert_bit_equal(full_gradients(model), wanted)
