"""The board, on which ranks post and poll: the cost of a poll does not grow with the number of ranks."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.comm import threads
from fsdp.comm.lane.lane import Lane
from fsdp.comm.waiting import board as boards
from fsdp.comm.waiting.board import Board
from tests.harness.fake_group import fake_group
from tests.harness.pool import Died, run_fresh


def recorded_store() -> mock.Mock:
    return mock.Mock(wraps=dist.HashStore())


def group_of(rank: int, size: int) -> Any:
    """Return a process group with a rank and a size only."""
    return mock.Mock(spec=["rank", "size"], **{"rank.return_value": rank, "size.return_value": size})


PER_MACHINE = 8


@pytest.fixture
def ranks_on_machines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make boards of many ranks in this process, of which 8 share a machine; `at` selects the acting rank."""
    at, store, ended = [0], recorded_store(), set[int]()
    monkeypatch.setattr(boards, "group_store", lambda group: store)
    monkeypatch.setattr(boards, "machine", lambda: f"machine {at[0] // PER_MACHINE}")
    monkeypatch.setattr(boards, "_start_of", lambda pid: -1 if pid in ended else 7)
    monkeypatch.setattr(os, "getpid", lambda: 1000 + at[0])

    def make(size: int) -> tuple[list[Any], list[Board]]:
        groups = [group_of(rank, size) for rank in range(size)]  # boards do not keep them
        made = [Board(group, str(size)) for group in groups]
        for at[0], board in enumerate(made):
            board.live()
            board.post("report", at[0])
        return groups, made

    return make, at, store, ended


def test_cost_of_a_poll_does_not_depend_on_the_number_of_ranks(ranks_on_machines: Any) -> None:
    make, at, store, _ = ranks_on_machines
    costs = []
    for size in (16, 64, 1024):
        groups, made = make(size)
        at[0], polls = 5, []
        for _ in range(3):
            store.reset_mock()
            assert made[5].dead() == []
            polls.append(len(store.method_calls))
        costs.append(polls)
        assert len(groups) == size
    assert costs[0] == costs[1] == costs[2], costs
    assert 64 > costs[0][0] > costs[0][1] == costs[0][2], costs  # the processes of this machine are read once


def test_rank_that_retries_a_barrier_counts_once(ranks_on_machines: Any) -> None:
    groups, (first, second) = ranks_on_machines[0](2)
    assert len(groups) == 2

    def give_up() -> None:
        raise KeyboardInterrupt

    with mock.patch.object(threads, "PATIENCE", timedelta(0)):
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                first.meet("here", give_up)
            assert not first.has_met("here")
        second.meet("here", give_up)
        first.meet("here", give_up)


@pytest.mark.parametrize("size", [16, 256])
def test_waiting_rank_makes_a_bounded_number_of_store_calls(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_group(1, size):
        model = FSDP(torch.nn.Linear(3, 3))
        model(torch.ones(2, 3)).sum().backward()
        lane = Lane.of(dist.group.WORLD)
        store = recorded_store()
        monkeypatch.setattr(boards, "group_store", lambda group: store)  # until here the fake group agreed with itself
        lane.waiting(1, "gather").look()
        assert 8 < len(store.method_calls) < 40, store.method_calls


def test_dead_process_is_reported_to_other_machines(ranks_on_machines: Any) -> None:
    """A rank of the same machine detects and publishes it; a restarted rank counts as alive."""
    make, at, _, ended = ranks_on_machines
    groups, made = make(32)
    ended.add(1010)
    assert made[20].dead() == []  # on another machine, before a poll on the same machine
    at[0] = 12
    assert made[12].dead() == [10]
    at[0] = 20
    assert made[20].dead() == [10] and len(groups) == 32
    at[0] = 10
    with mock.patch.object(os, "getpid", lambda: 2000):
        made[10].live()
    at[0] = 12
    assert made[12].dead() == []


def first_use_after_a_rank_exits() -> str:
    model = FSDP(torch.nn.Linear(3, 3))
    dist.barrier()
    if dist.get_rank() == 1:
        os._exit(9)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(2, 3))
    return str(caught.value)


def test_rank_that_exits_before_the_first_use_is_named() -> None:
    """The waiting ranks raise before the group's timeout."""
    error, died = run_fresh(2, first_use_after_a_rank_exits)
    assert isinstance(died, Died) and error.startswith("the process of rank 1 has ended"), error
