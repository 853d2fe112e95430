"""A lane without a model: ranks issue events in one order, detect differences, and recover after failures."""

from __future__ import annotations

import contextlib
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp.comm.lane.history import Pass
from fsdp.comm.lane.issuing import GATHER, PER_UNIT, REDUCE, Event
from fsdp.comm.lane.lane import ORDER_REMEDY, Lane
from fsdp.comm.transport.native import Transfer
from fsdp.comm.waiting import waits
from fsdp.comm.waiting.work import OutOfStep
from tests.harness.agreeing import BadBatchError, impatient, new_group, raises_soon
from tests.harness.pool import on_ranks

UNITS = ["the root unit", "unit 'a'", "unit 'b'"]


class Tree:
    """Passes over three units with one value each, on one lane."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        lane.join("a test", [f"{name}: 1 element" for name in UNITS])

    def run(self, order: list[int], number: int = 1, *, backward: bool = False, wait: bool = False) -> list[float]:
        """Sum a value per unit over the ranks in this order of units; return the sums."""
        current_pass, sums = Pass("backward") if backward else Pass("forward", self), []
        try:
            self.lane.enter(current_pass, number, neighbours=(), remedy=ORDER_REMEDY)
            for unit in order:
                event = Event.of(REDUCE if backward else GATHER, unit, UNITS[unit])
                self.lane.agree(event)
                values = torch.full((unit + 1,), float(dist.get_rank() + 1))
                self.lane.collective("all_reduce", event, values, asynchronous=True).wait()
                sums.append(values[0].item())
            self.lane.end(PER_UNIT * len(UNITS), wait=wait, value=0, listener=lambda largest: None)
        except BaseException:
            self.lane.fail(current_pass)
            raise
        return sums

    def step(self, forward: list[int], backward: list[int] | None = None) -> None:
        self.run(forward)
        self.run(list(reversed(forward)) if backward is None else backward, 2, backward=True, wait=True)

    def recover(self) -> None:
        self.lane.recover(Pass("forward", self))


def lane_of_new_group() -> Lane:
    return Lane.of(new_group(), torch.device("cpu"))


@on_ranks(2)
@impatient
def test_a_backward_ends_only_after_all_ranks_have_run_the_same() -> None:
    """A wrong sum must not reach the step of the optimizer, on any rank."""
    lane = lane_of_new_group()
    tree, end = Tree(lane), lane.end
    for _ in range(2):
        tree.step([0, 1, 2])

    def end_differently(*args: Any, **options: Any) -> None:
        lane._history.so_far += dist.get_rank()
        end(*args, **options)

    tree.run([0, 1, 2])
    with mock.patch.object(lane, "end", end_differently), raises_soon(OutOfStep):
        tree.run([2, 1, 0], 2, backward=True, wait=True)


@on_ranks(1)
def test_process_that_ended_is_named_in_a_long_wait() -> None:
    """A wait on an accelerator learns of a dead peer only so: no connection of the host is closed."""
    lane = lane_of_new_group()
    for words in ("rank 0 comes before the first pass", "rank 0 is about to gather unit"):
        ended = mock.patch.object(waits._Rank, "ended_of", return_value=[1])
        with ended, pytest.raises(RuntimeError, match=f"the process of rank 1 has ended, and {words}"):
            lane.waiting(1, "gather unit 'a'").look()
        Tree(lane).run([0, 1])


@on_ranks(3)
@impatient
def test_a_process_that_ended_is_reported_to_ranks_on_other_machines() -> None:
    """Rank 0 alone shares the machine of rank 2, which has ended."""
    lane, rank, ended = lane_of_new_group(), dist.get_rank(), {0: [2]}
    tree = Tree(lane)
    tree.run([0, 1])
    if rank < 2:
        with mock.patch.object(waits._Rank, "ended_of", lambda *_: ended.get(rank, [])), raises_soon() as caught:
            tree.run([0, 1], 3)
        assert "the process of rank 2 has ended" in str(caught.value), caught.value
    dist.barrier()


@pytest.mark.parametrize("where", ["in the meeting", "before the vote"])
@on_ranks(2)
@impatient
def test_an_interrupt_in_the_first_use_of_a_group_reaches_all_ranks(where: str) -> None:
    """Rank 1 is interrupted while it waits for rank 0, or after both have met; later both use the group."""
    lane, rank = lane_of_new_group(), dist.get_rank()
    owner, name = (waits.Wait, "look") if where == "in the meeting" else (Lane, "ask")
    with contextlib.ExitStack() as stack:
        if rank == 1:
            stack.enter_context(mock.patch.object(owner, name, side_effect=KeyboardInterrupt))
        elif where == "in the meeting":
            time.sleep(0.5)
        with raises_soon((KeyboardInterrupt, OutOfStep)) as caught:
            Tree(lane)
    if rank == 0:
        assert "rank 1 failed in a test" in str(caught.value), caught.value
    tree = Tree(lane)
    for _ in range(2):
        tree.step([0, 1, 2])
    assert tree.run([0, 1, 2]) == [3.0] * 3


@pytest.mark.parametrize("before", ["end", "leave", "fail"])
@on_ranks(2)
@impatient
def test_a_rank_that_failed_before_its_first_collective_goes_on_with_its_peers(before: str) -> None:
    """The failure counts for the evaluation that the peer has begun, however the one before it ended."""
    lane, rank, passed = lane_of_new_group(), dist.get_rank(), list[int]()
    tree = Tree(lane)
    for _ in range(2):
        tree.run([0, 1, 2])
    ends: dict[str, Any] = {
        "end": contextlib.nullcontext(),
        "leave": mock.patch.object(lane, "end", lambda *_, **__: lane.leave()),
        "fail": mock.patch.object(lane, "end", side_effect=BadBatchError),
    }
    with ends[before], contextlib.suppress(BadBatchError):
        tree.run([0, 1, 2])
    for batch in range(3):
        with contextlib.suppress(BadBatchError, OutOfStep):
            tree.recover()
            if rank == 1 and batch == 0:
                lane.fail(Pass("forward", tree))
                raise BadBatchError
            tree.run([0, 1, 2])
            passed.append(batch)
    assert passed == [1, 2]


@on_ranks(2)
@impatient
def test_a_collective_of_an_earlier_generation_waits_for_no_rank() -> None:
    """Work of an accelerator may outlast the meeting after a failure, from where on the collectives count anew."""
    lane, rank = lane_of_new_group(), dist.get_rank()
    tree = Tree(lane)
    tree.step([0, 1, 2])
    if rank == 0:
        wait = lane.waiting(1000, "gather unit 'a'")
        for _ in range(10):
            wait.look()
            time.sleep(0.1)
        wait.over()
    assert tree.run([0, 1, 2], 7) == [3.0] * 3


@on_ranks(2)
@impatient
def test_messages_in_flight_at_an_equal_failure_of_all_ranks_arrive() -> None:
    """Else gloo closes the connections: a message would arrive whose memory is gone."""
    lane, rank = lane_of_new_group(), dist.get_rank()
    tree, current_pass = Tree(lane), Pass("forward")
    tree.step([0, 1, 2])
    lane.enter(current_pass, 1, neighbours=(), remedy=ORDER_REMEDY)
    received = torch.empty(1 << 20)
    transfers = [Transfer(True, 1 - rank, torch.ones(1 << 20), 1), Transfer(False, 1 - rank, received, 1)]
    messages = lane.transfer(transfers, Event("exchange"), received.device).host_works
    lane.fail(current_pass)
    tree.recover()
    assert all(message.is_completed() for message in messages) and received.min() == 1
    assert not lane.carrier._held, "the memory of the messages is kept"
    tree.step([0, 1, 2])
    assert lane.carrier.number == 0


@on_ranks(2)
@impatient
def test_new_tree_works_after_the_replacement_group_was_destroyed() -> None:
    lane = lane_of_new_group()
    tree = Tree(lane)
    tree.step([0, 1, 2])
    with pytest.raises(OutOfStep):
        tree.run([0, 1, 2] if dist.get_rank() == 0 else [0, 2, 1])
    tree.recover()
    tree.step([0, 1, 2])
    dist.barrier()
    dist.destroy_process_group(lane.carrier.group)
    assert (Tree(lane).run([0, 1, 2]), lane.carrier.number) == ([3.0] * 3, 2)


@on_ranks(2)
@impatient
def test_new_tree_works_after_an_unequal_pass_of_a_deleted_tree() -> None:
    """Run one more pass on rank 0 only, then delete the tree on all ranks."""
    lane = lane_of_new_group()
    tree: Any = Tree(lane)
    for _ in range(2):
        tree.step([0, 1, 2])
    if dist.get_rank() == 0:
        current_pass, event = Pass("forward", tree), Event.of(GATHER, 0, UNITS[0])
        lane.enter(current_pass, 1, neighbours=(), remedy=ORDER_REMEDY)
        lane.agree(event)
        pending = lane.collective("all_reduce", event, torch.ones(1), asynchronous=True)
    del tree
    lane.begin("a model")
    other = Tree(lane)
    other.step([2, 1, 0])
    if dist.get_rank() == 0:
        pending.wait()  # at once: the peer will never take part
    other = Tree(lane)  # the ranks count alike again
    assert (other.run([0, 1, 2]), lane.carrier.number) == ([3.0] * 3, 1)


@on_ranks(2)
def test_functions_replaced_before_a_pass_see_all_collectives() -> None:
    """Otherwise methods of the group are called with the same options."""
    called = 0 if hasattr(dist.ProcessGroup, "all_gather_single") else 1
    lane = lane_of_new_group()
    for replaced_before in (False, True):
        for async_op in (True, False):
            with contextlib.ExitStack() as stack:
                if not replaced_before:
                    lane.begin_pass()
                replaced = stack.enter_context(mock.patch.object(dist, "all_reduce", side_effect=dist.all_reduce))
                if replaced_before:
                    lane.begin_pass()
                values = torch.tensor([dist.get_rank() + 1.0])
                lane.collective("all_reduce", Event("max"), values, asynchronous=async_op, op=dist.ReduceOp.MAX).wait()
                lane.end_pass()
                assert (values.item(), replaced.call_count) == (2.0, 1 if replaced_before else called)


@on_ranks(3)
@impatient
def test_votes_return_the_largest_value_of_equal_questions() -> None:
    lane, rank = lane_of_new_group(), dist.get_rank()
    assert (lane.ask("same", 7, largest=rank).result(), lane.ask("different", rank, largest=5).result()) == (2, None)
