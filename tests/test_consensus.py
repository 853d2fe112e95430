"""Agreement among ranks: all succeed or all raise with the errors of the failed ranks, and none hangs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from fsdp.comm import consensus
from fsdp.comm.consensus import CPU, TrainingRanks
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
        assert [record.nbytes for record in log.records] == [32] * (len(groups) + (len(groups) > 1 and rank < 2))
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
