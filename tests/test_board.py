"""The board, on which ranks post and poll: the cost of a poll does not grow with the number of ranks."""

from __future__ import annotations

import itertools
import os
import threading
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
from fsdp.comm.waiting import waits
from fsdp.comm.waiting.board import Board
from fsdp.comm.waiting.waits import Count
from tests.harness.fake_group import fake_group
from tests.harness.pool import Died, run_fresh


def recorded_store() -> mock.Mock:
    return mock.Mock(wraps=dist.HashStore())


def group_of(rank: int, size: int) -> Any:
    """Return a process group with a rank and a size only."""
    return mock.Mock(spec=["rank", "size"], **{"rank.return_value": rank, "size.return_value": size})


@pytest.fixture
def two_groups(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The group of two ranks, as either of them sees it."""
    store = dist.HashStore()
    monkeypatch.setattr(boards, "group_store", lambda group: store)
    return [group_of(rank, 2) for rank in range(2)]


@pytest.fixture
def two_boards(two_groups: list[Any]) -> list[Board]:
    return [Board(group, "test") for group in two_groups]


def test_rank_that_retries_a_barrier_counts_once(two_boards: list[Board]) -> None:
    first, second = two_boards

    def give_up() -> None:
        raise KeyboardInterrupt

    with mock.patch.object(threads, "PATIENCE", timedelta(0)):
        for _ in range(3):
            with pytest.raises(KeyboardInterrupt):
                first.meet("here", give_up)
            assert first.read("here/met") is None
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


def test_the_best_of_several_values_stays(two_boards: list[Board]) -> None:
    """A thousand ranks that fail at once leave one entry, the earliest end."""
    values = [*range(50, 100), *range(49, -1, -1)]
    ranks = [
        threading.Thread(target=board.replace, args=("end", value, lambda there, value=value: value < there))
        for board, value in zip(itertools.cycle(two_boards), values)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert two_boards[0].read("end") == 0
    two_boards[0].replace("end", 5, lambda there: False)
    assert two_boards[1].read("end") == 0


def test_the_best_value_is_written_to_a_store_that_cannot_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain(dist.HashStore):
        def compare_set(self, *_: object) -> bytes:
            raise RuntimeError("Not implemented")

    store = Plain()
    monkeypatch.setattr(boards, "group_store", lambda group: store)
    board = Board(group_of(0, 2), "test")
    for value in (7, 3, 5):
        board.replace("end", value, lambda there, value=value: value < there)
    assert board.read("end") == 3


def test_posts_of_an_earlier_default_group_in_the_same_store_are_void(two_groups: list[Any]) -> None:
    def is_told() -> bool:
        return second.reason_of_end("collectives", Count(1, 7)) == "rank 0 failed"

    first, second = map(waits._Rank, two_groups)
    assert not is_told()
    first.end({"collectives": Count(1, 7)}, "rank 0 failed")
    before = second.posts([0])[0].life
    assert is_told()
    first, second = map(waits._Rank, two_groups)
    assert not is_told() and second.posts([0])[0].life != before
    first.end({"collectives": Count(1, 7)}, "rank 0 failed")
    assert is_told()


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
