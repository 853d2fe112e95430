"""The two passes of a load: everything is verified before anything changes, and then read into what exists."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp.checkpoint import load, save
from fsdp.checkpoint.files import Disk
from fsdp.flat.tensor_parallel import local_of
from tests.harness.disk import on_disk
from tests.harness.pool import of_all_ranks, on_ranks
from tests.harness.sharded import wrap
from tests.harness.versions import needs_cpu_events


class WatchedReads(Disk):
    """A disk that calls `before` with the number of each read, counted from 1, and the number of the open file."""

    def __init__(self, before: Callable[[int, int], None] = lambda count, number: None) -> None:
        self.before, self.count = before, 0

    def read(self, number: int, memory: memoryview, offset: int) -> int:
        self.count += 1
        self.before(self.count, number)
        return super().read(number, memory, offset)


def fails(*, at: int, times: int = 1 << 30) -> WatchedReads:
    """Return a disk that fails from read number `at` on, so many times."""

    def before(count: int, number: int) -> None:
        if at <= count < at + times:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    return WatchedReads(before)


def trained(value: float, *, stepped: bool = True) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = wrap(nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 7)), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=value)
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.arange(param.numel()) * value + number)
    if stepped:
        model(torch.full((2, 40), value)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def content_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the values on this rank."""
    values = [param.tolist() for param in model.parameters()]
    states = [[torch.as_tensor(value).tolist() for value in state.values()] for state in optimizer.state.values()]
    return repr([values, states, [group["lr"] for group in optimizer.param_groups]])


def reads_of(path: Path, **options: Any) -> int:
    """Return the number of reads of this rank in a load without failure."""
    with on_disk(counting := WatchedReads()):
        load(path, *trained(0.5), **options)
    return counting.count


@on_ranks(2)
def test_a_load_reads_into_the_present_parameters_and_states(tmp_path: Path) -> None:
    """So it takes no memory of the size of the shards."""
    expected = trained(0.25)
    save(tmp_path, *expected)
    for in_place in (True, False):
        model, optimizer = trained(0.5)
        states = {id(value) for state in optimizer.state.values() for value in state.values() if value.dim()}
        places = [param.data_ptr() for param in model.parameters()]
        load(tmp_path, model, optimizer, **({} if in_place else {"in_place": False}))
        assert content_of(model, optimizer) == content_of(*expected)
        assert [param.data_ptr() for param in model.parameters()] == places
        now = {id(value) for state in optimizer.state.values() for value in state.values() if value.dim()}
        assert (now == states) is in_place and len(now & states) == len(now) * in_place


@on_ranks(2)
def test_states_that_share_memory_are_loaded_apart(tmp_path: Path) -> None:
    """With each other, or with a parameter, as some optimizers begin."""
    expected = trained(0.25)
    save(tmp_path, *expected)
    model, optimizer = trained(0.5)
    for param, state in optimizer.state.items():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], param.detach()
    first = next(iter(optimizer.state.values()))
    first["exp_avg"] = first["exp_avg_sq"]
    load(tmp_path, model, optimizer)
    assert content_of(model, optimizer) == content_of(*expected)


@on_ranks(2)
def test_a_failure_at_any_read_of_the_first_pass_changes_nothing(tmp_path: Path) -> None:
    """On the ranks whose disk works as well, and at every read with one pass."""
    save(tmp_path, *trained(0.25))
    model, optimizer = trained(0.5)
    before = content_of(model, optimizer)
    for in_place in (True, False):
        count = max(of_all_ranks(reads_of(tmp_path, in_place=in_place)))
        damaged = []
        for at in range(1, count + 1):
            failing = fails(at=at if dist.get_rank() == 1 else 1 << 30)
            with on_disk(failing), pytest.raises((OSError, RuntimeError)) as caught:
                load(tmp_path, model, optimizer, in_place=in_place)
            if "hold old and new values" in str(caught.value):
                damaged.append(at)
                load(tmp_path, *trained(0.5))
                model, optimizer = trained(0.5)
            else:
                assert content_of(model, optimizer) == before, at
        assert all(of_all_ranks(damaged)) is in_place, "reads of the second pass"
        assert damaged == [*range(count + 1 - len(damaged), count + 1)]


@pytest.mark.parametrize("how", ["fails", "changed", "interrupted"])
@on_ranks(2)
def test_a_failure_in_the_second_pass_is_reported_on_all_ranks_and_the_next_load_repairs(
    how: str, tmp_path: Path
) -> None:
    """The error says that values are mixed, and what to do. Also where a file has another checksum by then."""
    expected, odd = trained(0.25), dist.get_rank() == 1
    made = save(tmp_path, *expected) / f"rank_{dist.get_rank()}.safetensors"
    content, last = made.read_bytes(), reads_of(tmp_path)
    told = {
        "fails": r"in_place=False.*rank 1: Input/output error.*rank_\d\.safetensors",
        "changed": "has another checksum",
        "interrupted": "",
    }

    def before(count: int, number: int) -> None:
        if odd and count >= last:
            if how == "changed":
                made.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            else:
                raise KeyboardInterrupt if how == "interrupted" else OSError(errno.EIO, os.strerror(errno.EIO))

    words = rf"hold old and new values: load again, .*{told[how]}"
    error = (
        pytest.raises(KeyboardInterrupt) if how == "interrupted" and odd else pytest.raises(RuntimeError, match=words)
    )
    model, optimizer = trained(0.5)
    with on_disk(WatchedReads(before)), error:
        load(tmp_path, model, optimizer)
    made.write_bytes(content)
    dist.barrier()
    load(tmp_path, model, optimizer)
    assert content_of(model, optimizer) == content_of(*expected)


@on_ranks(2)
def test_the_second_pass_reads_the_files_that_were_verified(tmp_path: Path) -> None:
    """Another job removes the checkpoint between the passes, and another rank is slow."""
    expected = trained(0.25)
    made = save(tmp_path, *expected) / f"rank_{dist.get_rank()}.safetensors"
    last = reads_of(tmp_path)
    model, optimizer = trained(0.5)
    with on_disk(WatchedReads(lambda count, number: made.unlink() if count == last else None)):
        load(tmp_path, model, optimizer)
    assert content_of(model, optimizer) == content_of(*expected)


@on_ranks(2)
def test_a_block_that_fails_is_read_twice_again(tmp_path: Path) -> None:
    """At any read of the second pass, whose failure would leave old and new values."""
    expected = trained(0.25)
    save(tmp_path, *expected)
    in_both, in_first = reads_of(tmp_path), reads_of(tmp_path, in_place=False)
    last = min(of_all_ranks(in_both - in_first))
    assert last > 0
    for at in range(in_both - last + 1, in_both + 1):
        model, optimizer = trained(0.5)
        with on_disk(fails(at=at, times=2)):
            load(tmp_path, model, optimizer)
        assert content_of(model, optimizer) == content_of(*expected)


class Doubling(nn.Linear):
    """A module that doubles its weight as it loads it, as modules do that have changed their meaning."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state_dict, prefix, *args)


class Inverse(nn.Linear):
    """A module of version 2, which converts older values: version 1 had the inverse of the scale."""

    _version = 2

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("scale", torch.tensor(4.0))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, metadata: Any, *rest: Any) -> None:
        if metadata.get("version", 1) < 2:
            state_dict[f"{prefix}scale"] = 1 / state_dict[f"{prefix}scale"]
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)


@on_ranks(2)
def test_modules_see_the_version_of_the_state_that_was_saved(tmp_path: Path) -> None:
    model = wrap(nn.Sequential(Inverse()), wrap_policy=None)
    save(tmp_path / "new", model)
    with mock.patch.object(Inverse, "_version", 1):
        save(tmp_path / "old", model)
    for name, scale in ("new", 4.0), ("old", 0.25):
        load(tmp_path / name, model)
        assert model.module[0].scale == scale, name
        model.module[0].scale.fill_(4.0)


@needs_cpu_events
@on_ranks(2)
def test_values_that_a_module_changes_as_it_loads_them_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    """In models of torch's `fully_shard`, and plain ones."""
    for name in ("plain", "fully_shard"):
        model = nn.Sequential(Doubling(4, 6, bias=False))
        if name == "fully_shard":
            fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        with torch.no_grad():
            model[0].weight.fill_(3.0)
        save(tmp_path / name, model)
        with torch.no_grad():
            model[0].weight.fill_(5.0)
        load(tmp_path / name, model)
        assert local_of(model[0].weight.detach()).unique().tolist() == [6.0], name
