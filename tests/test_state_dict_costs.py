"""Costs of saving and loading state: collectives, messages and memory."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from fsdp import FullStateDictConfig, RaggedOptimStateDictConfig, StateDictType
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.meter import NOISE, Meter, Peak, needs_meter
from tests.harness.models import Net, Unit
from tests.harness.optim_states import adamw, train
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import wrap
from tests.harness.states import FULL, KINDS, kind_of, rich


@pytest.mark.parametrize("mode", [False, True])
@on_ranks(2)
def test_state_dicts_gather_each_unit_at_most_once(mode: bool) -> None:
    """Loading full values needs no communication, except for four numbers."""
    model = rich(mode)
    with kind_of(model, "full"):
        model.state_dict()  # the first call compares the ranks
    units = ["gather the root unit", "gather unit 'blocks.0'", "gather unit 'blocks.1.0'"]
    by_kind = {"full": "all_gather", "rank 0": "all_to_all", "sharded": "all_to_all", "local": None, "ragged": None}
    for kind, op in by_kind.items():
        with FSDP.state_dict_type(model, *settings_of(kind)):
            with record_collectives() as log:
                state = model.state_dict()
            moved = [r for r in log.records if r.label in units]
            assert Counter((r.op, r.label) for r in moved) == Counter((op, unit) for unit in units if op), kind
            if kind == "rank 0":
                continue
            with record_collectives() as log:
                model.load_state_dict(state)
            moved = [r for r in log.records if r.label in units]
            expected = Counter(("all_to_all", unit) for unit in units if kind == "sharded")
            assert Counter((r.op, r.label) for r in moved) == expected, kind
            if kind == "sharded":
                continue
            agreed = [r for r in log.records if r not in moved]
            assert [(r.op, r.nbytes) for r in agreed] == [("all_reduce", 32)], kind


@pytest.mark.parametrize("uop", [False, True])
@on_ranks(2)
def test_optimizer_state_takes_one_collective_per_unit(uop: bool) -> None:
    """One exchange of descriptions, then one collective per unit for all states; ranks receive only requested parts."""
    plain, state = nn.Sequential(*(nn.Linear(70, 70) for _ in range(6))), (70 * 70 + 70) * 4  # bytes of a unit
    model = wrap(plain, use_orig_params=uop, wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = train(adamw(model.parameters()), steps=1)
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
    assert {str(record.label).split()[0] for record in log.records} == {"agree", "load"}, "parts stay where they are"
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
    assert log.records[0].nbytes == 32, "whether every rank has the same to send"


SQUARE = 256 * 256 * 4


def settings_of(kind: str) -> tuple[Any, ...]:
    return (FULL, FullStateDictConfig(rank0_only=True)) if kind == "rank 0" else KINDS[kind]


def make_wide() -> FSDP:
    """Wrap a root with parameters before and after the units; a square matrix has a quarter of a megabyte."""

    def square() -> nn.Module:
        return nn.Linear(256, 256, bias=False)

    units = nn.Sequential(*(Unit(square=square()) for _ in range(6)))
    net = Net(first=square(), units=units, last=square())
    return wrap(net, wrap_policy=ModuleWrapPolicy({Unit}), use_orig_params=True)


def _peak(kind: str) -> tuple[int, int]:
    """Return the peak of bytes while the state is collected, and the bytes held afterwards, beyond those before."""
    model, meter = make_wide(), Meter()
    with FSDP.state_dict_type(model, *settings_of(kind)):
        with Peak(meter):  # imports at first use leave cycles of tracebacks
            model.state_dict()
        gc.collect()
        before = meter.at_rest()
        with Peak(meter) as highest:
            state = model.state_dict()
        held = meter.at_rest() - before
    del state
    return highest.nbytes - before, held


@needs_meter
@on_ranks(2)
def test_a_full_state_dict_needs_memory_for_one_further_unit() -> None:
    """Root parameters are included; with rank0_only, the remaining ranks need the part of one unit that they send."""
    total, largest, slack = 8 * SQUARE, 2 * SQUARE, 2 * NOISE  # the root's parameters are the largest unit
    most, held = _peak("full")
    assert abs(held - total) <= slack, f"{held:,}, expected {total:,}"
    assert total + SQUARE - slack <= most <= total + largest + slack, f"{most:,}"
    most, held = _peak("rank 0")
    if dist.get_rank() == 0:
        assert abs(held - total) <= slack and most <= total + largest + slack, f"{most:,}"
    else:
        assert most <= SQUARE + slack and held <= slack
    assert max(_peak("ragged")) <= slack


def _peak_of_loading(kind: str) -> int:
    """Return the peak of bytes during a load, beyond those before."""
    model, meter = make_wide(), Meter()
    with FSDP.state_dict_type(model, *settings_of(kind)):
        state = model.state_dict()
        with Peak(meter):
            model.load_state_dict(state)
        dist.barrier()
        gc.collect()
        before = meter.at_rest()
        with Peak(meter) as highest:
            model.load_state_dict(state)
    return highest.nbytes - before


@needs_meter
@on_ranks(2)
def test_loading_needs_no_memory_except_for_received_values() -> None:
    """If each rank has the values, no memory is needed; if rank 0 distributes them, at most this rank's part."""
    slack = 2 * NOISE
    for kind in ("full", "ragged"):
        assert _peak_of_loading(kind) <= slack, kind
    most = _peak_of_loading("rank 0")
    assert dist.get_rank() == 0 or most <= 4 * SQUARE + slack, f"{most:,}, and its part of the model are four squares"


@on_ranks(2)
def test_a_load_keeps_no_value_of_the_dict_alive() -> None:
    model = wrap(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2)))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    references = [weakref.ref(value) for value in state.values()]
    gc.collect()
    gc.disable()
    model.load_state_dict(state)
    state.clear()
    assert [reference() for reference in references] == [None] * len(references)
