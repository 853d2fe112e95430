"""Ranks that wait for each other in different calls, and waits that take long.

Where all ranks are inside the package, every rank gets an error that names both sides. Where a rank is elsewhere, the
ranks that wait say so on stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel
from fsdp.checkpoint import async_save, load, save
from fsdp.comm import threads
from tests.harness.agreeing import PATIENT, SHORT, UNEQUAL, Chain, build, impatient, new_group, summon, train
from tests.harness.pool import run_ranks


class Run:
    """A model and its optimizer over a group of its own, and where it is saved."""

    def __init__(self, path: str) -> None:
        torch.manual_seed(0)
        self.path, self.group = path, new_group()
        self.model = build(Chain(UNEQUAL), self.group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    def step(self) -> None:
        train(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self) -> Any:
        return save(self.path, self.model, self.optimizer, process_group=self.group)

    def async_save(self) -> Any:
        return async_save(self.path, self.model, self.optimizer, process_group=self.group).result()

    def load(self) -> Any:
        return load(self.path, self.model, self.optimizer, process_group=self.group)

    def state_dict(self) -> Any:
        return self.model.state_dict()

    def clip(self) -> Any:
        return self.model.clip_grad_norm_(1.0)

    def summon(self) -> Any:
        return summon(self.model)

    def new_model(self) -> None:
        train(build(Chain(UNEQUAL), self.group))

    def optim_state_dict(self) -> Any:
        return FullyShardedDataParallel.optim_state_dict(self.model, self.optimizer)

    def load_state_dict(self) -> Any:
        return self.model.load_state_dict(Chain(UNEQUAL).state_dict())


BESIDE: dict[str, Callable[[Run], Any]] = {"save": Run.save, "async_save": Run.async_save, "load": Run.load}
OTHERS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "step": (Run.step, "the forward of the root unit"),
    "state_dict": (Run.state_dict, "state_dict() (FULL_STATE_DICT) of the root unit"),
    "clip": (Run.clip, "clip_grad_norm_(norm_type=2.0) of the root unit"),
    "summon": (Run.summon, "summon_full_params() of the root unit"),
    "new model": (Run.new_model, "the first pass or call of a model"),
}


@impatient
def part(path: str, beside: str, other: str, alone: int, before: bool) -> tuple[float, str]:
    """Rank `alone` makes one call, and the others another one; then all of them go on."""
    run = Run(f"{path}/{dist.get_world_size()}")
    run.step()
    if before:
        run.save()
        run.step()
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        BESIDE[beside](run) if dist.get_rank() == alone else OTHERS[other][0](run)
    seconds = time.monotonic() - started
    run.optimizer.zero_grad()
    dist.barrier()
    for _ in range(2):
        run.step()
        run.save()
        run.load()
        run.state_dict()
    return seconds, str(caught.value)


@pytest.mark.parametrize(
    ("ranks", "beside", "other", "alone", "before"),
    [
        (2, "save", "step", 0, False),
        (3, "save", "step", 1, True),
        (2, "async_save", "step", 0, True),
        (3, "load", "step", 0, True),
        (2, "save", "state_dict", 0, False),
        (2, "load", "clip", 1, True),
        (3, "async_save", "summon", 0, False),
        (2, "save", "new model", 0, True),
        (3, "save", "new model", 1, False),
    ],
)
def test_ranks_in_different_calls(tmp_path: Any, ranks: int, beside: str, other: str, alone: int, before: bool) -> None:
    """Every rank gets an error that names both sides, soon, and then the ranks go on together: the next step, save and
    load work. So also where the ranks have saved together before."""
    for rank, (seconds, error) in enumerate(run_ranks(ranks, part, str(tmp_path), beside, other, alone, before)):
        assert seconds < PATIENT / 2, f"rank {rank}: {error}"
        assert f"rank {alone} has called fsdp.checkpoint.{beside}()" in error, f"rank {rank}: {error}"
        assert OTHERS[other][1] in error and "if rank == 0" in error and "fsdp.join" in error, f"rank {rank}: {error}"


@impatient
def summon_with_other_arguments() -> tuple[float, str]:
    """Rank 0 alone asks for the gradients; then all ranks go on."""
    group = new_group()
    model = build(Chain(UNEQUAL), group, use_orig_params=True)
    for _ in range(2):
        train(model)
    started = time.monotonic()
    with pytest.raises(RuntimeError) as caught, model.summon_full_params(model, with_grads=dist.get_rank() == 0):
        pass
    seconds = time.monotonic() - started
    dist.barrier()
    model.zero_grad()
    train(model)
    with model.summon_full_params(model, with_grads=True):
        pass
    return seconds, str(caught.value)


def test_ranks_that_summon_with_other_arguments() -> None:
    """Gradients are gathered in collectives of their own, so `with_grads` has to be the same on all ranks."""
    for rank, (seconds, error) in enumerate(run_ranks(2, summon_with_other_arguments)):
        assert seconds < PATIENT / 2, f"rank {rank}: {error}"
        assert "summon_full_params(with_grads=True)" in error and "summon_full_params()" in error, error


@impatient
def come_late(way: str) -> tuple[list[str], float]:
    """The last rank comes later than the group's timeout; then all go on. The errors, and the seconds of the rest."""
    os.environ["FSDP_COLLECTIVES"] = way
    group = new_group(SHORT)
    torch.manual_seed(0)
    model = build(Chain(UNEQUAL), group)
    for _ in range(2):
        train(model)
    dist.barrier()
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(SHORT + 1.5)
    errors, started = list[str](), time.monotonic()
    for _ in range(3):
        try:
            train(model)
            break
        except RuntimeError as error:
            errors.append(str(error))
    model.state_dict()
    train(model)
    return errors, time.monotonic() - started


@pytest.mark.parametrize("way", ["auto", "native", "direct"])
def test_a_rank_that_comes_later_than_the_timeout(way: str) -> None:
    """Every rank gets an error, and then the ranks go on with the same model. Gloo has closed the connections of the
    group, so the ranks connect anew."""
    for rank, (errors, seconds) in enumerate(run_ranks(2, come_late, way)):
        assert 1 <= len(errors) <= 2 and seconds < PATIENT / 2, errors
        if rank == 0:
            first = errors[0]
            assert "rank 0 waited 4 s in the forward of the root unit" in first and "for rank 1" in first, first
            if way != "auto":
                assert "the connections of this process group are closed" in first, first
                assert "The next forward or call of the model, on all ranks, makes new ones" in first, first


# -- ranks that are elsewhere ------------------------------------------------------------------------------------------

# What a rank waits in, and how the notice names it.
LONG: dict[str, tuple[Callable[[Run], Any], str]] = {
    "step": (Run.step, "the forward of the root unit"),
    "clip": (Run.clip, "clip_grad_norm_(norm_type=2.0) of the root unit"),
    "state_dict": (Run.state_dict, "state_dict() (FULL_STATE_DICT) of the root unit"),
    "load_state_dict": (Run.load_state_dict, "load_state_dict() of the root unit"),
    "optim_state_dict": (Run.optim_state_dict, "optim_state_dict() of the root unit"),
    "summon": (Run.summon, "summon_full_params() of the root unit"),
    "save": (Run.save, "fsdp.checkpoint.save()"),
    "async_save": (Run.async_save, "fsdp.checkpoint.async_save()"),
    "load": (Run.load, "fsdp.checkpoint.load()"),
    "new model": (Run.new_model, "the first pass or call of a model"),
}


class Stderr(io.StringIO):
    """The standard error stream of a rank, which lets another rank know that something was written there."""

    def __init__(self, store: Any, key: str) -> None:
        super().__init__()
        self._store, self._key = store, key

    def write(self, text: str) -> int:
        self._store.set(self._key, "")
        return super().write(text)


@impatient
def wait_long(path: str) -> dict[str, list[str]]:
    """In each call the last rank comes once the others have said something; by call, what this rank has said."""
    run, said, last = Run(path), dict[str, list[str]](), dist.get_rank() == dist.get_world_size() - 1
    store = dist.distributed_c10d._world.pg_map[run.group][1]
    for _ in range(2):
        run.step()
    run.save()
    for name, (call, _) in LONG.items():
        run.step()
        stderr = Stderr(store, f"said/{name}")
        with mock.patch.object(threads, "NOTICE", timedelta(seconds=0.3)), contextlib.redirect_stderr(stderr):
            if last:
                store.wait([f"said/{name}"])
                time.sleep(0.3)  # they say it once
            call(run)
        said[name] = stderr.getvalue().splitlines()
        run.optimizer.zero_grad()
    return said


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_long_wait_is_told_once_on_stderr(tmp_path: Any, ranks: int) -> None:
    """Which call, for which rank, what that one did last, and the likely mistake; by one of the ranks that wait."""
    *waited, _last = run_ranks(ranks, wait_long, str(tmp_path / str(ranks)))
    for name, (_, words) in LONG.items():
        lines = [line for said in waited for line in said[name]]  # a slow machine may have others, of later waits
        (line,) = [line for line in lines if f"for rank {ranks - 1}, which last took part in the backward" in line]
        assert f" s in {words}" in line and line.startswith(("rank 0 has waited ", "rank 1 has waited ")), line
        assert "if rank == 0" in line and "fsdp.join(model, loader)" in line, line
