"""A lane without a model: ranks issue events in one order, find out where they differ, and go on after a failure."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp.comm.diagnosis import END_WORDS
from fsdp.comm.history import Habit, History, Pass
from fsdp.comm.issuing import GATHER, GATHER_NEARBY, KINDS, MAX_BUCKETS, PER_UNIT, REDUCE, Event
from fsdp.comm.lane import ORDER_REMEDY, Lane
from fsdp.comm.work import OutOfStep
from tests.harness.agreeing import PATIENT, impatient, new_group
from tests.harness.pool import run_ranks
from tests.harness.process_groups import record_collectives

UNITS = ["the root unit", "unit 'a'", "unit 'b'"]


class Tree:
    """Passes over three units of one number each, on one lane."""

    def __init__(self, lane: Lane, layout: list[str] | None = None) -> None:
        self.lane = lane
        lane.join(self, "a test", layout or [f"{name}: 1 element" for name in UNITS])

    def run(self, order: list[int], number: int = 1, *, backward: bool = False, wait: bool = False) -> list[float]:
        """Sum a number per unit over the ranks, in this order of units; return the sums."""
        what, sums = Pass("backward") if backward else Pass("forward", self), []
        try:
            self.lane.enter(what, number, neighbours=(), remedy=ORDER_REMEDY)
            for unit in order:
                event = Event.of(REDUCE if backward else GATHER, unit, UNITS[unit])
                self.lane.agree(event)
                values = torch.full((unit + 1,), float(dist.get_rank() + 1))
                self.lane.collective("all_reduce", event, values, asynchronous=True).wait()
                sums.append(values[0].item())
            self.lane.end(PER_UNIT * len(UNITS), wait=wait)
        except BaseException:
            self.lane.fail(what)
            raise
        return sums

    def step(self, forward: list[int], backward: list[int] | None = None) -> None:
        self.run(forward)
        self.run(list(reversed(forward)) if backward is None else backward, 2, backward=True, wait=True)

    def recover(self) -> None:
        self.lane.post_state()
        self.lane.recover()


def lane_of_new_group() -> Lane:
    group = new_group()
    return Lane.of(group, torch.device("cpu"))


def test_events_have_different_numbers_that_tell_unit_and_kind() -> None:
    """The number of an event orders the lane, tags messages, and identifies posts."""
    numbers = {}
    for unit in range(3):
        for kind in KINDS:
            for full_precision in (False, True):
                for bucket in (0, MAX_BUCKETS - 1):
                    event = Event.of(kind, unit, "unit 'x'", bucket=bucket, full_precision=full_precision)
                    assert Event.parts_of(event.number) == (unit, kind, full_precision)
                    numbers[event.number] = event.label
    assert len(numbers) == 3 * 3 * 2 * 2 and max(numbers) < 3 * PER_UNIT
    assert Event.of(GATHER_NEARBY, 0, "unit 'x'", full_precision=True).label == (
        "gather from nearby unit 'x' in full precision"
    )


def test_a_history_predicts_what_followed_last_time() -> None:
    """Events and passes that follow as before need no agreement; the memory of it is bounded."""
    history, forward = History(), Pass("forward", Habit())
    for turn in range(3):
        expected = history.begin(1, forward)
        assert expected == (None if turn == 0 else 1)
        for number in (5, 7):
            assert history.follow("", number) == (turn > 0)
            if turn == 0:
                history.note(number)
    history.begin(1, forward)
    assert not history.follow("", 7) and history.has_follower
    for number in range(1000):
        history.note(number)
    assert len(history._followers) <= history._capacity
    history.forget(passes=9, rounds=4)
    assert (history.passes, history.rounds, history.has_follower, history.entries) == (9, 4, False, [])


def follow_the_history() -> list[list[str]]:
    lane, labels = lane_of_new_group(), []
    tree = Tree(lane)
    for _ in range(3):
        with record_collectives() as log:
            tree.step([0, 1, 2])
        labels.append([str(label) for label in log.labels() if str(label).startswith("agree")])
    return labels


def test_ranks_agree_on_each_event_of_the_first_step_and_then_on_passes_alone() -> None:
    for first, *later in run_ranks(2, follow_the_history):
        assert first[:3] == [f"agree to gather {name}" for name in UNITS]
        assert (
            later == [["agree to begin the backward", "agree on the backward"]] * 2
            or later == [["agree on the backward"]] * 2
        ), later


@impatient
def deviate(how: str) -> tuple[str, float]:
    """After two steps, rank 1 does something else in the forward or the backward."""
    tree, odd = Tree(lane_of_new_group()), dist.get_rank() == 1
    for _ in range(2):
        tree.step([0, 1, 2])
    started = time.monotonic()
    with pytest.raises(OutOfStep) as caught:
        if how == "another order":
            tree.step([0, 2, 1] if odd else [0, 1, 2])
        elif how == "a unit less":
            tree.step([0, 1, 2], [2, 1] if odd else [2, 1, 0])
        elif how == "another pass":
            tree.run([0, 1, 2])
            tree.run([0, 1, 2]) if odd else tree.run([2, 1, 0], 2, backward=True, wait=True)
    seconds = time.monotonic() - started
    tree.recover()
    tree.step([0, 1, 2])
    assert tree.run([0, 1, 2]) == [3.0] * 3
    return str(caught.value), seconds


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("another order", ["gather unit 'a'", "gather unit 'b'"]),
        ("a unit less", ["reduce the root unit", END_WORDS]),
        ("another pass", ["rank 1 runs the forward", "runs the backward"]),
    ],
)
def test_ranks_that_deviate_get_an_error_on_every_rank_and_go_on(how: str, words: list[str]) -> None:
    """Both sides are named soon. After a meeting of all ranks the sums are right again."""
    for rank, (error, seconds) in enumerate(run_ranks(2, deviate, how)):
        assert seconds < PATIENT / 2 and all(word in error for word in words), f"rank {rank}: {error}"


@impatient
def differ_in_layout() -> str:
    layout = [f"{name}: {1 + dist.get_rank() * (name != UNITS[0])} elements" for name in UNITS]
    lane = lane_of_new_group()
    with pytest.raises(OutOfStep) as caught:
        Tree(lane, layout)
    assert Tree(lane).run([1]) == [3.0]
    return str(caught.value)


def test_layouts_are_compared_before_the_first_event() -> None:
    for error in run_ranks(2, differ_in_layout):
        assert "at unit 1 of the group: rank 0 has unit 'a': 1 elements; rank 1 has unit 'a': 2 elements" in error


class BadBatchError(Exception):
    """An error of the user's program."""


@impatient
def fail(ranks: list[int], position: int) -> tuple[int, bool]:
    """Some ranks fail in a forward, maybe after they have issued more than others."""
    lane = lane_of_new_group()
    tree, rank = Tree(lane), dist.get_rank()
    for _ in range(2):
        tree.step([0, 1, 2])
    users = lane.carrier.group
    what = Pass("forward", tree)
    with pytest.raises((BadBatchError, OutOfStep)):
        if rank in ranks:
            lane.enter(what, 1, neighbours=(), remedy=ORDER_REMEDY)
            for unit in range(position):
                event = Event.of(GATHER, unit, UNITS[unit])
                lane.agree(event)
                lane.collective("all_reduce", event, torch.ones(unit + 1), asynchronous=True).wait()
            lane.fail(what)
            raise BadBatchError
        tree.step([0, 1, 2])
    tree.recover()
    for _ in range(3):
        tree.step([2, 0, 1])
    assert tree.run([0, 1, 2]) == [6.0] * 3
    return lane.carrier.number, lane.carrier.group is users


@pytest.mark.parametrize("position", [0, 2])
def test_a_group_stays_in_use_after_all_ranks_failed_alike(position: int) -> None:
    assert run_ranks(3, fail, [0, 1, 2], position) == [(0, True)] * 3


@pytest.mark.parametrize("ranks", [[1], [0, 2]])
def test_a_new_group_carries_the_lane_after_some_ranks_failed(ranks: list[int]) -> None:
    """The other ranks have issued collectives that nobody completes; the ranks go on over new connections."""
    assert run_ranks(3, fail, ranks, 2) == [(1, False)] * 3


@impatient
def fail_again_and_again() -> list[int]:
    lane, numbers = lane_of_new_group(), []
    tree = Tree(lane)
    for turn in range(4):
        tree.step([0, 1, 2])
        with pytest.raises(OutOfStep):
            tree.run([0, 1, 2] if dist.get_rank() == turn % 2 else [0, 2, 1])
        tree.recover()
        numbers.append(lane.carrier.number)
    dist.barrier()
    return numbers


@impatient
def destroy_the_replacement() -> list[float]:
    lane = lane_of_new_group()
    tree = Tree(lane)
    tree.step([0, 1, 2])
    with pytest.raises(OutOfStep):
        tree.run([0, 1, 2] if dist.get_rank() == 0 else [0, 2, 1])
    tree.recover()
    tree.step([0, 1, 2])
    dist.barrier()
    dist.destroy_process_group(lane.carrier.group)
    return Tree(lane).run([0, 1, 2])


def test_a_tree_begins_after_the_program_has_destroyed_the_groups_that_torch_knows() -> None:
    assert run_ranks(2, destroy_the_replacement) == [[3.0] * 3] * 2


def test_ranks_recover_as_often_as_they_fail() -> None:
    assert run_ranks(2, fail_again_and_again) == [[1, 2, 3, 4]] * 2


@impatient
def begin_after_a_tree_that_ranks_ran_differently() -> tuple[list[float], int]:
    """Rank 0 runs one more pass, of a unit that the others do not run, and all delete the tree."""
    lane = lane_of_new_group()
    tree: Any = Tree(lane)
    for _ in range(2):
        tree.step([0, 1, 2])
    if dist.get_rank() == 0:
        what, event = Pass("forward", tree), Event.of(GATHER, 0, UNITS[0])
        lane.enter(what, 1, neighbours=(), remedy=ORDER_REMEDY)
        lane.agree(event)
        lane.collective("all_reduce", event, torch.ones(1), asynchronous=True)
    del tree
    other = Tree(lane)
    other.step([2, 1, 0])
    return other.run([0, 1, 2]), lane.carrier.number


def test_a_tree_begins_after_another_one_that_only_some_ranks_have_run() -> None:
    assert run_ranks(2, begin_after_a_tree_that_ranks_ran_differently) == [([3.0] * 3, 1)] * 2


def replace_functions() -> list[tuple[float, int]]:
    """The result of an all-reduce, and the calls of a replaced function, which begins in a pass or before it."""
    lane, found = lane_of_new_group(), []
    for replaced_before in (False, True):
        for asynchronous in (True, False):
            with contextlib.ExitStack() as stack:
                if not replaced_before:
                    lane.begin_pass()
                replaced = stack.enter_context(mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce))
                if replaced_before:
                    lane.begin_pass()
                values = torch.tensor([dist.get_rank() + 1.0])
                options: dict[str, Any] = {"asynchronous": asynchronous, "op": dist.ReduceOp.MAX}
                lane.collective("all_reduce", Event("reduce"), values, **options).wait()
                lane.end_pass()
                found.append((values.item(), replaced.call_count))
    return found


def test_functions_that_are_replaced_before_a_pass_see_all_collectives_of_it() -> None:
    """Otherwise the methods of the group are called, with the same options."""
    called = 0 if hasattr(dist.ProcessGroup, "all_gather_single") else 1
    assert run_ranks(2, replace_functions) == [[(2.0, called)] * 2 + [(2.0, 1)] * 2] * 2


@impatient
def vote_apart() -> tuple[int | None, int | None]:
    lane, rank = lane_of_new_group(), dist.get_rank()
    return lane.ask("same", 7, largest=rank).result(), lane.ask("different", rank, largest=5).result()


def test_a_vote_returns_the_largest_value_of_ranks_with_the_same_number() -> None:
    assert run_ranks(3, vote_apart) == [(2, None)] * 3
