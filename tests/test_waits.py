"""Ranks that are late: a long wait is reported on stderr, and after the timeout all ranks raise and can continue."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp.comm import threads
from fsdp.comm.waiting.work import OutOfStep
from tests.harness.agreeing import (
    CALLS,
    ODD,
    PATIENT,
    SHORT,
    UNEQUAL,
    BadBatchError,
    Chain,
    Row,
    Run,
    build,
    evaluate,
    fail_at,
    impatient,
    new_group,
    perform,
    raises_soon,
    train,
)
from tests.harness.pool import on_ranks, run_ranks


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
LONG = {
    "train": "the forward of the root unit",
    "a second model": "the first pass or call of a model",
    **{call: CALLS[call] for call in ("state_dict", "clip", "summon", "load_state_dict", "optim_state_dict")},
    **{call: f"fsdp.checkpoint.{call}()" for call in ("save", "async_save", "load")},
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
    run, said, last = Run(Row(""), path), dict[str, list[str]](), dist.get_rank() == dist.get_world_size() - 1
    store = dist.distributed_c10d._world.pg_map[run.group][1]
    perform(run, "train, train, save")
    for name in LONG:
        perform(run, "train")
        stderr = Stderr(store, f"said/{name}")
        with mock.patch.object(threads, "NOTICE", timedelta(seconds=0.3)), contextlib.redirect_stderr(stderr):
            if last:
                store.wait([f"said/{name}"])
                time.sleep(0.3)  # no second notice follows
            perform(run, name)
        said[name] = stderr.getvalue().splitlines()
        run.optimizer.zero_grad()
    return said


def test_a_long_wait_is_reported_once_on_stderr(tmp_path: Any) -> None:
    """One waiting rank names the call, the missing rank, its last call and the likely mistake."""
    *waited, _last = run_ranks(3, wait_long, str(tmp_path / "saved"))
    for name, words in LONG.items():
        # On a slow machine further notices, of later waits, may be printed, and the missing rank may have posted its
        # position in the backward.
        lines = [line for said in waited for line in said[name]]
        missing = r"for rank 2, which (last took part|was last) in the backward"
        found = [line for line in lines if re.search(missing, line)]
        assert len(found) == 1, (name, lines)
        (line,) = found
        assert f" s in {words}" in line and line.startswith(("rank 0 has waited ", "rank 1 has waited ")), line
        assert "if rank == 0" in line and "fsdp.join(model, loader)" in line, line
        assert ("use FullStateDictConfig(rank0_only=True)" in line) is (name == "state_dict"), line


@on_ranks(3)
@impatient
def test_a_rank_that_failed_alone_reports_its_wait_for_ranks_that_have_not_noticed() -> None:
    """They may be slow in code of the program, so there is no error before the timeout."""
    rank, odd, group = dist.get_rank(), dist.get_rank() == ODD, new_group()
    store, model = dist.distributed_c10d._world.pg_map[group][1], build(Chain(UNEQUAL), group)
    evaluate(model)
    if odd:
        fail_at(model, len(UNEQUAL))
    with pytest.raises(BadBatchError) if odd else contextlib.nullcontext():
        evaluate(model)
    model.module.reset()
    stderr = Stderr(store, "said")
    if not odd:
        store.wait(["said"])
    notice = mock.patch.object(threads, "NOTICE", timedelta(seconds=0.3))
    with notice, contextlib.redirect_stderr(stderr), raises_soon(OutOfStep):
        train(model)
    if odd:
        (line,) = stderr.getvalue().splitlines()
        assert line.startswith(f"rank {rank} has waited ") and " in the forward of the root unit " in line, line
        assert "for ranks 0 and 2" in line and "catch no error on one rank alone" in line, line
    train(model)
