"""Ranks that wait for each other in different calls, and long waits.

If all ranks are inside the package, every rank raises an error that names both sides. If a rank is elsewhere, the
waiting ranks report it on stderr.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
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
from fsdp.comm.waiting.work import TimedOut, Work
from tests.harness.agreeing import (
    PATIENT,
    SHORT,
    UNEQUAL,
    Chain,
    build,
    impatient,
    new_group,
    raises_soon,
    summon,
    train,
)
from tests.harness.pool import on_ranks, run_ranks


class Run:
    """A model, an optimizer, a separate process group and a checkpoint folder."""

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


BESIDE: dict[str, Callable[[Run], Any]] = {"save": Run.save, "async_save": Run.async_save, "load": Run.load}
OTHERS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "step": (Run.step, "the forward of the root unit"),
    "state_dict": (lambda run: run.model.state_dict(), "state_dict() (FULL_STATE_DICT) of the root unit"),
    "clip": (lambda run: run.model.clip_grad_norm_(1.0), "clip_grad_norm_(norm_type=2.0) of the root unit"),
    "summon": (lambda run: summon(run.model), "summon_full_params() of the root unit"),
    "new model": (lambda run: train(build(Chain(UNEQUAL), run.group)), "the first pass or call of a model"),
}


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
@on_ranks("ranks")
@impatient
def test_ranks_in_different_calls_raise_and_can_continue(
    tmp_path: Any, ranks: int, beside: str, other: str, alone: int, before: bool
) -> None:
    """Errors name both sides, with or without a previous save; then steps, saves and loads work."""
    path = str(tmp_path)
    run = Run(f"{path}/{dist.get_world_size()}")
    run.step()
    if before:
        run.save()
        run.step()
    with raises_soon() as caught:
        BESIDE[beside](run) if dist.get_rank() == alone else OTHERS[other][0](run)
    run.optimizer.zero_grad()
    dist.barrier()
    for _ in range(2):
        run.step()
        run.save()
        run.load()
        run.model.state_dict()
    error = str(caught.value)
    rank = dist.get_rank()
    assert f"rank {alone} has called fsdp.checkpoint.{beside}()" in error, f"rank {rank}: {error}"
    assert OTHERS[other][1] in error and "if rank == 0" in error and "fsdp.join" in error, f"rank {rank}: {error}"


@on_ranks(2)
@impatient
def test_a_save_of_all_ranks_right_after_one_of_some_is_another_call(tmp_path: Any) -> None:
    """A rank that is still in the first save hears of the difference there, and not of the next save."""
    run, rank = Run(str(tmp_path)), dist.get_rank()
    run.step()
    for alone in (0, 1, 0):
        with raises_soon() as caught:
            run.save() if rank == alone else run.step()
        assert f"rank {alone} has called fsdp.checkpoint.save()" in str(caught.value)
        run.optimizer.zero_grad()
        run.save()
        run.step()


@on_ranks(2)
@impatient
def test_ranks_that_summon_with_different_arguments_raise() -> None:
    """Gradients are gathered in separate collectives, so `with_grads` has to be the same on all ranks."""
    group = new_group()
    model = build(Chain(UNEQUAL), group, use_orig_params=True)
    for _ in range(2):
        train(model)
    with raises_soon() as caught, model.summon_full_params(model, with_grads=dist.get_rank() == 0):
        pass
    dist.barrier()
    model.zero_grad()
    train(model)
    with model.summon_full_params(model, with_grads=True):
        pass
    error = str(caught.value)
    assert "summon_full_params(with_grads=True)" in error and "summon_full_params()" in error, error


def test_timeout_that_gloo_notices_first_is_that_of_the_group() -> None:
    """Gloo and the wait count the same seconds, and either may be done first; the error says the same."""
    words = "[unbound_buffer.cc:129] Timed out waiting 4000ms for send operation to complete"
    ended = mock.Mock(spec=dist.Work, **{"wait.side_effect": RuntimeError(words), "is_completed.return_value": True})
    watch = mock.Mock(timeout=4.0, carrier=None, failed=lambda error, *_, **__: error)
    with pytest.raises(TimedOut, match="did not come within 4 s, the timeout of the process group"):
        Work((ended,), watch, "gather unit 'a'", ends_alone=True).wait()


@pytest.mark.parametrize("way", ["auto", "native", "direct"])
@on_ranks(2)
@impatient
def test_a_rank_later_than_the_timeout_raises_on_all_ranks_which_can_continue(way: str) -> None:
    """Gloo has closed the connections of the group, so the ranks connect anew and continue with the same model."""
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
    seconds = time.monotonic() - started
    rank = dist.get_rank()
    assert 1 <= len(errors) <= 2 and seconds < PATIENT / 2, errors
    if rank == 0:
        first = errors[0]
        assert "rank 0 waited 4 s in the forward of the root unit" in first and "for rank 1" in first, first
        if way != "auto":
            assert "the connections of this process group are closed" in first, first
            assert "The next forward or call of the model, on all ranks, makes new ones" in first, first


# -- ranks that are elsewhere ------------------------------------------------------------------------------------------

# The calls in which a rank waits, and their names in the notice.
LONG: dict[str, tuple[Callable[[Run], Any], str]] = {
    **OTHERS,
    "load_state_dict": (
        lambda run: run.model.load_state_dict(Chain(UNEQUAL).state_dict()),
        "load_state_dict() of the root unit",
    ),
    "optim_state_dict": (
        lambda run: FullyShardedDataParallel.optim_state_dict(run.model, run.optimizer),
        "optim_state_dict() of the root unit",
    ),
    "save": (Run.save, "fsdp.checkpoint.save()"),
    "async_save": (Run.async_save, "fsdp.checkpoint.async_save()"),
    "load": (Run.load, "fsdp.checkpoint.load()"),
}


class Stderr(io.StringIO):
    """The standard error stream of a rank, which signals a peer when text is written to it."""

    def __init__(self, store: Any, key: str) -> None:
        super().__init__()
        self._store, self._key = store, key

    def write(self, text: str) -> int:
        self._store.set(self._key, "")
        return super().write(text)


@impatient
def wait_long(path: str) -> dict[str, list[str]]:
    """In each call the last rank arrives after the notice of its peers; return this rank's notices by call."""
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
                time.sleep(0.3)  # no second notice follows
            call(run)
        said[name] = stderr.getvalue().splitlines()
        run.optimizer.zero_grad()
    return said


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_long_wait_is_reported_once_on_stderr(tmp_path: Any, ranks: int) -> None:
    """One waiting rank names the call, the missing rank, its last call and the likely mistake."""
    *waited, _last = run_ranks(ranks, wait_long, str(tmp_path / str(ranks)))
    for name, (_, words) in LONG.items():
        # On a slow machine further notices, of later waits, may be printed, and the missing rank may have posted its
        # position in the backward.
        lines = [line for said in waited for line in said[name]]
        missing = rf"for rank {ranks - 1}, which (last took part|was last) in the backward"
        found = [line for line in lines if re.search(missing, line)]
        assert len(found) == 1, (name, lines)
        (line,) = found
        assert f" s in {words}" in line and line.startswith(("rank 0 has waited ", "rank 1 has waited ")), line
        assert "if rank == 0" in line and "fsdp.join(model, loader)" in line, line
        assert ("use FullStateDictConfig(rank0_only=True)" in line) is (name == "state_dict"), line
