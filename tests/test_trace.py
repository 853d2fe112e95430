"""`fsdp.trace` records the collectives and waits of a step, and no events outside of the context."""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.comm.profiling import RANGE, profiler_runs
from fsdp.runtime.unit import units_in
from fsdp.tools.trace import Event, exposed_parts
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.chains import Part
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives

LAYERS = ["0", "1", "2"]


def _build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Part(40) for _ in LAYERS), nn.Linear(40, 3))


def _step(model: nn.Module) -> None:
    model(torch.ones(4, 40)).square().mean().backward()


def _saved(t: fsdp.Trace, model: nn.Module) -> None:
    with tempfile.TemporaryDirectory() as directory:
        name = "trace.json" if dist.get_rank() == 0 else "trace.rank1.json"
        path = t.save(f"{directory}/trace.json")
        assert path == Path(directory, name)
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        picture = ElementTree.fromstring(t.save(Path(directory, "step.svg")).read_text())
        with pytest.raises(ValueError, match=r"expected a name that ends in .json \(for Perfetto\) or .svg"):
            t.save(Path(directory, "trace.txt"))
    words = [text.text or "" for text in picture.findall("{http://www.w3.org/2000/svg}text")]
    assert re.fullmatch(rf"rank {dist.get_rank()}: [\d.]+ ms, of which [\d.]+ ms are exposed waits", words[0])
    assert words[1:5] == ["(root)", *LAYERS]
    assert len(t.events) == len(picture.findall("{http://www.w3.org/2000/svg}rect"))
    ranges = Counter(event["name"] for event in events)
    assert all(ranges[f"{RANGE}forward {unit.name}"] == 1 for _, unit, _ in units_in(model))


@on_ranks(2)
def test_a_trace_records_the_collectives_and_waits_of_a_step() -> None:
    policy = ModuleWrapPolicy({Part})
    model = FullyShardedDataParallel(_build(), auto_wrap_policy=policy)
    for _ in range(2):
        model.zero_grad()
        with fsdp.trace(model) as t, record_collectives() as log:
            _step(model)
    planned = fsdp.plan(_build, world_size=2, policy=policy, device="cpu")[fsdp.ShardingStrategy.FULL_SHARD]
    counted = {phase: [event for event in t.events if event.phase == phase] for phase in ("gather", "reduce")}
    for phase, events in counted.items():
        assert len(events) == len(log.units(phase)), [event.title for event in events]
    assert sum(event.nbytes for event in counted["gather"]) == planned.gathered_nbytes
    assert sum(event.nbytes for event in counted["reduce"]) == planned.reduced_nbytes
    phases = [(event.phase, event.unit) for event in t.events if event.computes]
    assert phases == [
        *(("forward", unit) for unit in ["", *LAYERS]),
        *(("backward", unit) for unit in ["", *reversed(LAYERS)]),
    ]
    assert [event.unit for event in counted["reduce"]] == ["", *reversed(LAYERS)]
    waits = [event for event in t.events if event.phase == "wait"]
    assert {event.of for event in waits} == {"gather", "reduce"}
    for wait in waits:  # each wait lies within the collective that it waits for
        inside = [e for e in t.events if (e.unit, e.phase) == (wait.unit, wait.of) and e.start <= wait.start <= e.end]
        assert inside and wait.end <= inside[-1].end
    spent = sum(event.end - event.start for event in waits if event.unit == "1" and event.of == "gather")
    assert t.exposed("1", "gather") == spent > 0
    rows = [re.split(r"  +", row.strip()) for row in str(t).splitlines()]
    assert [(row[0], row[3], row[6]) for row in rows[1:]] == [
        ("(root)", "1", "1"),
        *((unit, "2", "1") for unit in LAYERS),
    ]
    known = len(t.events)
    _step(model)
    assert not profiler_runs() and len(t.events) == known  # the trace has ended
    _saved(t, model)
    with (
        fsdp.trace(model),
        pytest.raises(RuntimeError, match="a trace or profiler is active already"),
        fsdp.trace(model),
    ):
        pass
    assert not profiler_runs()
    with fsdp.trace(model) as nothing:
        pass
    with pytest.raises(RuntimeError, match="recorded nothing to save: run a forward"):
        nothing.save("nothing.svg")
    with pytest.raises(ValueError, match=r"trace\(\) is for wrapped models, and nothing in this Part is"):
        fsdp.trace(Part(40)).__enter__()


@on_ranks(2)
def test_an_all_reduce_of_replicas_has_the_planned_bytes() -> None:
    model = FullyShardedDataParallel(_build(), sharding_strategy=fsdp.ShardingStrategy.NO_SHARD)
    with fsdp.trace(model) as t:
        _step(model)
    planned = fsdp.plan(_build, world_size=2, device="cpu")[fsdp.ShardingStrategy.NO_SHARD]
    assert sum(event.nbytes for event in t.events if event.phase == "reduce") == planned.reduced_nbytes > 0


def test_collectives_of_an_accelerator_are_exposed_while_no_unit_computes() -> None:
    """On an accelerator the host does not wait for collectives."""
    compute = [Event("a", "forward", 1.0, 2.0), Event("b", "forward", 1.5, 3.0)]
    gathers = [Event("a", "gather", 0.0, 1.0), Event("b", "gather", 0.5, 1.5), Event("c", "gather", 2.5, 4.0)]
    waits = [(event.unit, event.start, event.end, event.of) for event in exposed_parts([*compute, *gathers])]
    assert waits == [("a", 0.0, 1.0, "gather"), ("b", 0.5, 1.0, "gather"), ("c", 3.0, 4.0, "gather")]
