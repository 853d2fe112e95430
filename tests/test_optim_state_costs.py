"""What optimizer state costs on its way out and in: collectives, messages, memory."""

from __future__ import annotations

import gc
import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp import FullStateDictConfig, StateDictType
from fsdp.checkpoint import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.meter import NOISE, Meter, Peak, meter_available
from tests.harness.pool import run_ranks
from tests.harness.process_groups import record_collectives
from tests.test_optim_state import FSDP, adamw, assert_same, ours, train


def big(uop: bool) -> tuple[FSDP, Optimizer, int]:
    """A model, its trained optimizer, and the bytes of one state of its largest unit."""
    plain = nn.Sequential(*(nn.Linear(700, 700) for _ in range(6)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = FSDP(plain, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=uop)
    return model, train(adamw(model.parameters()), steps=1), (700 * 700 + 700) * 4


def check_counts(uop: bool) -> None:
    model, optimizer, state = big(uop)
    world_size, group = dist.get_world_size(), tuple(range(dist.get_world_size()))
    for what, op in (
        (lambda: FSDP.full_optim_state_dict(model, optimizer, rank0_only=True), "all_to_all"),
        (lambda: FSDP.full_optim_state_dict(model, optimizer, rank0_only=False), "all_gather"),
        (lambda: FSDP.sharded_optim_state_dict(model, optimizer), "all_to_all"),
    ):
        with record_collectives() as log:
            saved = what()
        moved = [record for record in log.records if not str(record.label).startswith("agree")]
        if op == "all_gather" and {record.op for record in moved} == {"exchange"}:
            op = "exchange"  # the direct form of it
        assert [(record.op, record.group) for record in moved] == [(op, group)] * 6
        agreed = [record.op for record in log.records if record.label == "agree on the optimizer's states"]
        assert agreed == ["all_reduce", "all_gather"]
        assert moved[0].label == "optimizer state of unit '0'"
    received = moved[0].output_nbytes
    assert received <= 2 * state / world_size + 64, "of sharded states each rank gets its chunk only"

    full = FSDP.full_optim_state_dict(model, optimizer)
    with record_collectives() as log:
        FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer)
    assert [record.op for record in log.records] == ["all_reduce"] * 2 + ["all_to_all"] * 6
    assert all(record.output_nbytes <= 2 * state / world_size + 64 for record in log.records[2:])
    with record_collectives() as log:
        if dist.get_rank() == 0:
            FSDP.shard_full_optim_state_dict(full, model, optim=optimizer)
    assert log.records == []
    with record_collectives() as log:
        FSDP.flatten_sharded_optim_state_dict(saved, model, optimizer)
    assert [record.op for record in log.records] == ["all_reduce"] + ["all_to_all"] * 6
    assert log.records[0].nbytes == 24, "whether every rank has the same to send"


def check_direct(uop: bool) -> None:
    group = dist.new_group()  # its messages are not the same number on all ranks
    model = ours(uop, process_group=group)
    optimizer = train(adamw(model.parameters()))
    found, ops = {}, {}
    for way in ("native", "direct"):
        os.environ["FSDP_COLLECTIVES"] = way
        with record_collectives() as log:
            on_rank0 = FSDP.full_optim_state_dict(model, optimizer, rank0_only=True)
            everywhere = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
            sharded = FSDP.sharded_optim_state_dict(model, optimizer)
            scattered = FSDP.scatter_full_optim_state_dict(on_rank0 or None, model, optim=optimizer, group=group)
            flattened = FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer)
            weights = [full_model_state(model, rank0_only) for rank0_only in (True, False)]
        found[way] = [on_rank0, everywhere, sharded, scattered, flattened, *weights]
        moved = [record for record in log.records if not str(record.label).startswith(("agree", "describe"))]
        ops[way] = {record.op for record in moved if record.dtype in (torch.float32, torch.uint8)}
    os.environ["FSDP_COLLECTIVES"] = "auto"
    del model
    dist.destroy_process_group(group)
    assert_same(found["direct"], found["native"], "direct messages")
    assert ops["direct"] <= {"exchange"} and "exchange" not in ops["native"]


def full_model_state(model: FSDP, rank0_only: bool) -> dict[str, Any]:
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=rank0_only)):
        return model.state_dict()


def check_memory(uop: bool) -> None:
    model, optimizer, state = big(uop)
    units, rank = 6, dist.get_rank()
    for rank0_only in (True, False):
        FSDP.full_optim_state_dict(model, optimizer, rank0_only=rank0_only)
        dist.barrier()
        gc.collect()
        meter = Meter()
        before = meter.at_rest()
        with Peak(meter) as peak:
            saved = FSDP.full_optim_state_dict(model, optimizer, rank0_only=rank0_only)
        result = 2 * units * state if saved else 0
        # two parts are on their way at a time, and a part holds both states of such a small unit: whole where they come
        # together, and what this rank has of them where others read it
        sent, received = 4 * state / dist.get_world_size(), 4 * state if saved else 0
        most, bound = peak.nbytes - before, result + received + sent + 2 * NOISE
        assert most <= bound, f"rank0_only={rank0_only}, rank {rank}: {most:,} bytes, and {bound:,.0f} allowed"
        del saved

    full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=True)
    for _ in range(2):
        dist.barrier()
        gc.collect()
        before = meter.at_rest()
        with Peak(meter) as peak:
            loadable = FSDP.scatter_full_optim_state_dict(full or None, model, optim=optimizer)
        del loadable
    # what this rank will hold, and two parts on their way: rank 0 has whole ones, the others their own
    ours_of_it, part = (
        2 * units * state / dist.get_world_size(),
        2 * state / (1 if rank == 0 else dist.get_world_size()),
    )
    assert peak.nbytes - before <= ours_of_it + 2 * part + 2 * NOISE, f"handed out, rank {rank}"


class Counted(dict[str, Any]):
    """Counts the entries that are visited."""

    visits = 0

    def items(self) -> Any:
        for item in super().items():
            self.visits += 1
            yield item

    def keys(self) -> Any:
        for key in super().__iter__():
            self.visits += 1
            yield key

    __iter__ = keys


def check_flattened() -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    for layers in (2, 20):
        model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(layers)))
        optimizer = train(adamw(model.parameters()))
        flat = Counted(get_optimizer_state_dict(model, optimizer, options=options))
        set_optimizer_state_dict(model, optimizer, flat, options=options)
        assert 0 < flat.visits <= 3 * len(flat), f"{flat.visits} visits of {len(flat)} entries"


def test_a_flattened_dict_is_walked_a_few_times_whatever_the_number_of_parameters() -> None:
    """Once for each parameter is quadratic: ten thousand parameters took minutes."""
    run_ranks(1, check_flattened)


@pytest.mark.parametrize("uop", [False, True])
def test_one_collective_per_unit(uop: bool) -> None:
    """Descriptions once, then one collective per unit for all its states; each gets what it asked."""
    run_ranks(2, check_counts, uop)


@pytest.mark.parametrize("world_size", [2, 3])
def test_direct_messages_carry_the_same(world_size: int) -> None:
    """Elements that go from where they lie to where they belong, out of the shards and back into them."""
    for uop in (False, True):
        run_ranks(world_size, check_direct, uop)


@pytest.mark.skipif(not meter_available(), reason="needs a byte meter")
@pytest.mark.parametrize("uop", [False, True])
def test_memory_is_the_result_and_two_parts_of_a_unit(uop: bool) -> None:
    """And on ranks that get nothing, only what they send."""
    run_ranks(2, check_memory, uop)
