"""Costs of saving and loading optimizer state: collectives, messages, memory."""

from __future__ import annotations

import warnings

import pytest
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from fsdp import RaggedOptimStateDictConfig, StateDictType
from fsdp.wrap import ModuleWrapPolicy
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
    ragged = RaggedOptimStateDictConfig()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, None, ragged), record_collectives() as log:
        FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))
    assert all(str(record.label).startswith("agree") for record in log.records), "parts of ranks stay where they are"
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
