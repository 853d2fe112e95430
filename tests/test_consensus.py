"""Agreement among ranks: all succeed or all raise with the errors of the failed ranks, and none hangs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from fsdp.comm import consensus, threads
from fsdp.comm.consensus import CPU, TrainingRanks
from fsdp.comm.groups import group_store
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives

WORLD = 3


def unanimous(groups: Sequence[Any], action: Callable[[], int], label: str) -> int:
    """Run `action` on every rank of `groups`, and raise on all if it fails on one."""
    return TrainingRanks(groups, CPU).together(label, action)


def concatenated(several: list[list[int]]) -> list[int]:
    return [value for values in several for value in values]


class Refused(Exception):
    pass


def failing_on(ranks: set[int], kind: type[BaseException]) -> Callable[[], int]:
    def action() -> int:
        if dist.get_rank() in ranks:
            raise kind(f"not on {dist.get_rank()}")
        return 7

    return action


@on_ranks(WORLD)
def test_all_ranks_raise_or_all_succeed() -> None:
    """Also where a rank is interrupted; calls with different labels or numbers are never confused."""
    rank, world = dist.get_rank(), dist.group.WORLD
    pairs = [dist.new_group([0, 1]), dist.new_group([2])]
    own: list[Any] = [world, pairs[rank // 2]]
    for groups in ([world], own):
        with record_collectives() as log:
            assert unanimous(groups, failing_on(set(), ValueError), "try") == 7
        assert [record.nbytes for record in log.records] == [24] * (len(groups) + (len(groups) > 1 and rank < 2))
        for ranks, kind in (({2}, ValueError), ({0, 2}, OSError), ({1}, KeyboardInterrupt), ({0}, SystemExit)):
            expected = kind if rank in ranks or issubclass(kind, Exception) else RuntimeError
            with pytest.raises(expected, match=f"not on {rank if rank in ranks else min(ranks)}"):
                unanimous(groups, failing_on(ranks, kind), "try")
            assert unanimous(groups, failing_on(set(), ValueError), "try again") == 7
    for usual, odd, words in ((["a"], ["b"], "a, b"), (["a", "c"], ["c", "a"], "the order")):
        texts = odd if rank == 1 else usual
        with pytest.raises(RuntimeError, match=f"^rank 1: it differs from rank 0 in {words}$"):
            TrainingRanks([world], CPU).together("compare", lambda texts=texts: texts, lambda texts: {world: texts})
    assert TrainingRanks([world], CPU).together("compare", list, lambda _: {world: ["a"]}) == []
    with pytest.raises(RuntimeError, match="rank 1: it differs from rank 0 in a"):  # on rank 2, too
        TrainingRanks(own, CPU).together("compare", list, lambda _: {own[1]: ["a"] if rank == 1 else []})
    with pytest.raises(RuntimeError, match="rank 0 is about to save; ranks 1-2 are about to load"):
        unanimous([world], failing_on(set(), ValueError), "save" if rank == 0 else "load")
    assert unanimous([world], failing_on(set(), ValueError), "load") == 7
    dist.destroy_process_group(own[1])


@on_ranks(4)
def test_first_runs_on_rank_0_and_returns_or_raises_on_all() -> None:
    world, rank = dist.group.WORLD, dist.get_rank()
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for groups in ([world], [rows[rank // 2], columns[rank % 2]]):
        ranks = TrainingRanks(groups, CPU)
        assert ranks.first("ask", lambda: rank) == 0
        with pytest.raises(ValueError, match="not on 0"):
            ranks.first("ask", failing_on({0}, ValueError))
        with pytest.raises(ZeroDivisionError if rank == 0 else RuntimeError):  # its own error, with the traceback
            ranks.first("ask", lambda: 1 // 0)
        assert ranks.first("ask again", lambda: rank) == 0
        joined = ranks.round("join", lambda: [rank], lambda all: (rank, all), concatenated)
        assert joined == (0, [0, 1, 2, 3])  # on rank 0, in the order of ranks
        with pytest.raises(ValueError, match="not on 2"):
            ranks.round("add", failing_on({2}, ValueError), lambda total: total, sum)
        with pytest.raises(TypeError, match="cannot be sent to the other ranks"):
            ranks.first("ask", lambda: lambda: 7)


@pytest.mark.parametrize("ranks", [TrainingRanks([None], CPU), consensus.Ranks()], ids=["training", "beside"])
def test_one_rank_agrees_without_a_group(ranks: consensus.Agreement) -> None:
    """A dropped error keeps nothing alive until the next garbage collection: a failed load holds tensors."""
    assert ranks.together("try", lambda: 7) == ranks.first("ask", lambda: 7) == 7
    assert ranks.round("add", lambda: 7, lambda total: total + 1, sum) == 8

    def refuse() -> None:
        raise Refused

    gc.disable()
    try:
        ranks.together("try", refuse)
    except Refused as error:
        raised = weakref.ref(error)
    alive = raised()
    gc.enable()
    assert alive is None


# -- side group --------------------------------------------------------------------------------------------------------


def not_on_0(several: list[Any]) -> Any:
    if dist.get_rank() == 0:
        raise TypeError("cannot join")


@on_ranks(4)
def test_side_group_communicates_over_a_tree() -> None:
    """Each rank connects to the parent and the children alone."""
    rank, size, connect = dist.get_rank(), dist.get_world_size(), dist.ProcessGroupGloo

    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        connected: list[int] = []
        patch.setattr(dist, "ProcessGroupGloo", lambda *args: (connected.append(args[2]), connect(*args))[1])
        patch.setattr(consensus, "FAN_OUT", 1, raising=False)  # a chain
        group = dist.new_group()
        ranks, store = consensus.Ranks(group), dist.PrefixStore("told", group_store(group))
        with ranks.call("try"):
            assert connected == [2] * ((rank > 0) + (rank < size - 1))
            assert ranks.round("join", lambda: [rank], lambda all: all, concatenated) == [*range(size)]
            for failing in ({3}, {1, 2}, {0}):
                with pytest.raises(ValueError, match=f"not on {min(failing)}"):
                    ranks.together("fail", failing_on(failing, ValueError))
            with pytest.raises(ValueError, match="not on 0"):
                ranks.first("fail", failing_on({0}, ValueError))
            with pytest.raises(RuntimeError, match=r"rank 2: it is in try \(b\), and rank 0 in try \(a\)"):
                ranks.together("a" if rank < 2 else "b", lambda: None)
            with pytest.raises(TypeError, match=r"^rank 0: .*join"):  # rank 0 joins the values
                ranks.round("join", lambda: None, lambda all: all, not_on_0)
        left = r"rank 3 left leave \(b\)|not on 3"
        expected = pytest.raises(KeyboardInterrupt if rank == 3 else RuntimeError, match=left)
        with expected, ranks.call("leave"):  # ranks 1 and 2 pass the error on to rank 0
            ranks.together("b", failing_on({3}, KeyboardInterrupt))
        with ranks.call("go on"):
            assert ranks.first("b", lambda: 5) == 5
        patch.setattr(threads, "PATIENCE", timedelta(0))
        patch.setattr(consensus.Wait, "look", lambda wait: interrupt() if rank == 3 else None)
        if rank == 3:  # it is interrupted while it waits, before its peers arrive
            with pytest.raises(KeyboardInterrupt), ranks.call("wait"):
                raise AssertionError("no peer has arrived")
            store.set("left", "")
        else:
            store.wait(["left"])
            with pytest.raises(RuntimeError, match="rank 3 left wait: KeyboardInterrupt"), ranks.call("wait"):
                raise AssertionError("rank 3 has left")
        patch.undo()
        with ranks.call("go on"):
            assert ranks.first("b", lambda: 5) == 5


@on_ranks(2)
def test_a_long_wait_in_a_round_is_reported() -> None:
    rank, group, said = dist.get_rank(), dist.new_group(), list[str]()
    ranks, store = consensus.Ranks(group), dist.PrefixStore("told", group_store(group))

    def warn(text: str, *values: Any) -> None:
        said.append(text % values)
        store.set("", "")

    soon = mock.patch.object(threads, "NOTICE", timedelta(seconds=0.1))
    with soon, mock.patch.object(threads.logger, "warning", warn), ranks.call("save()"):
        ranks.together("write", lambda: store.wait([""]) if rank == 1 else None)
    assert rank == 1 or said == ["rank 0 has waited 0 s in save() (write) for other ranks, which are in it as well"]


@pytest.mark.parametrize("size", [1, 2, 9, 10, 75, 4096])
def test_tree_has_all_ranks_once_and_logarithmic_depth(size: int) -> None:
    found = [consensus.tree(rank, size) for rank in range(size)]
    assert [rank for rank, (parent, _) in enumerate(found) if parent is None] == [0]
    for rank, (parent, children) in enumerate(found):
        assert len(children) <= consensus.FAN_OUT
        behind = [descendant for child in children for descendant in child]
        assert behind == [*range(rank + 1, rank + 1 + len(behind))]
        assert all(found[child[0]][0] == rank for child in children)
        depth = 0
        while parent is not None:
            parent, depth = found[parent][0], depth + 1
        assert consensus.FAN_OUT ** (depth - 1) <= size
