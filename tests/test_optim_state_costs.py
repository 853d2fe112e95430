"""Costs of saving and loading optimizer state: collectives, messages, memory."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp.wrap import ModuleWrapPolicy
from tests.harness.meter import NOISE, Meter, Peak, needs_meter
from tests.harness.optim_states import FSDP, adamw, train
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives


def big(uop: bool) -> tuple[FSDP, Optimizer, int]:
    """Return a model, the trained optimizer, and the bytes of one state of the largest unit."""
    plain = nn.Sequential(*(nn.Linear(700, 700) for _ in range(6)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=uop)
    return model, train(adamw(model.parameters()), steps=1), (700 * 700 + 700) * 4


@pytest.mark.parametrize("uop", [False, True])
@on_ranks(2)
def test_optimizer_state_takes_one_collective_per_unit(uop: bool) -> None:
    """One exchange of descriptions, then one collective per unit for all states; ranks receive only requested parts."""
    model, optimizer, state = big(uop)
    world_size, group = dist.get_world_size(), tuple(range(dist.get_world_size()))
    for save, op in (
        (lambda: FSDP.full_optim_state_dict(model, optimizer, rank0_only=True), "all_to_all"),
        (lambda: FSDP.full_optim_state_dict(model, optimizer, rank0_only=False), "all_gather"),
        (lambda: FSDP.sharded_optim_state_dict(model, optimizer), "all_to_all"),
    ):
        with record_collectives() as log:
            saved = save()
        moved = [record for record in log.records if not str(record.label).startswith("agree")]
        if op == "all_gather" and {record.op for record in moved} == {"exchange"}:
            op = "exchange"  # the direct all-gather
        assert [(record.op, record.group) for record in moved] == [(op, group)] * 6
        agreed = [record.op for record in log.records if record.label == "agree on the optimizer's states"]
        assert agreed == ["all_reduce", "all_reduce", "all_gather", "all_reduce"]  # no failure, lengths, objects, alike
        assert moved[0].label == "optimizer state of unit '0'"
    received = moved[0].output_nbytes
    assert received <= 2 * state / world_size + 64, "of sharded states each rank gets its chunk only"

    full = FSDP.full_optim_state_dict(model, optimizer)
    with record_collectives() as log:
        FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer)
    assert [record.op for record in log.records] == ["all_reduce"] * 3 + ["all_to_all"] * 6
    assert all(record.output_nbytes <= 2 * state / world_size + 64 for record in log.records[3:])
    with record_collectives() as log:
        if dist.get_rank() == 0:
            FSDP.shard_full_optim_state_dict(full, model, optim=optimizer)
    assert log.records == []
    with record_collectives() as log:
        FSDP.flatten_sharded_optim_state_dict(saved, model, optimizer)
    assert [record.op for record in log.records] == ["all_reduce"] + ["all_to_all"] * 6
    assert log.records[0].nbytes == 24, "whether every rank has the same to send"


def least_peak(function: Callable[[], Any]) -> int:
    """Return the least peak of three calls after a first one, in bytes beyond the memory at rest.

    Threads of the backend may allocate during one of them.
    """
    function()
    meter, peaks = Meter(), []
    for _ in range(3):
        dist.barrier()
        gc.collect()
        before = meter.at_rest()
        with Peak(meter) as peak:
            result = function()
        peaks.append(peak.nbytes - before)
        del result
    return min(peaks)


@needs_meter
@pytest.mark.parametrize("uop", [False, True])
@on_ranks(2)
def test_memory_is_the_result_and_two_parts_of_a_unit(uop: bool) -> None:
    """Ranks without a result hold only the part they send."""
    model, optimizer, state = big(uop)
    units, rank, size = 6, dist.get_rank(), dist.get_world_size()
    for rank0_only in (True, False):
        used = least_peak(lambda: FSDP.full_optim_state_dict(model, optimizer, rank0_only=rank0_only))  # noqa: B023
        # Two parts are in flight at a time, and a part holds both states of such a small unit: full where the result is
        # assembled, this rank's slice where a peer reads it.
        received = 0 if rank0_only and rank > 0 else 4 * state
        bound = units * received / 2 + received + 4 * state / size + 2 * NOISE
        assert used <= bound, f"rank0_only={rank0_only}, rank {rank}: {used:,} bytes, and {bound:,.0f} allowed"

    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=True)
    used = least_peak(lambda: FSDP.scatter_full_optim_state_dict(full or None, model, optim=optimizer))
    # This rank's result, and two parts in flight: full ones on rank 0, slices on the remaining ranks.
    bound = 2 * units * state / size + 4 * state / (1 if rank == 0 else size) + 2 * NOISE
    assert used <= bound, f"scattered, rank {rank}: {used:,} bytes, and {bound:,.0f} allowed"
