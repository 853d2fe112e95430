"""Agreement among ranks: all go on or all raise, with the words of those that failed; nobody waits for what is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch.distributed as dist

from fsdp.comm import ledger
from fsdp.comm.consensus import CPU, failures_in, joint_error
from tests.harness.pool import run_ranks
from tests.harness.process_groups import record_collectives

WORLD = 3


def unanimous(groups: Sequence[Any], action: Callable[[], int], label: str) -> int:
    """Do `action` on every rank of `groups`, and raise on all if it fails on one."""
    try:
        result = action()
    except BaseException as error:
        failures_in(groups, error, label, CPU)
        raise
    if failures := failures_in(groups, None, label, CPU):
        raise joint_error(failures)
    return result


def failing_on(ranks: set[int], kind: type[BaseException]) -> Callable[[], int]:
    def action() -> int:
        if dist.get_rank() in ranks:
            raise kind(f"not on {dist.get_rank()}")
        return 7

    return action


def agreements() -> None:
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
    for here, there, told in ((["a"], ["b"], "differs from"), (["a", "c"], ["c", "a"], "in another order")):
        found = failures_in([world], None, "compare", CPU, {world: there if rank == 1 else here})
        assert told in next(iter(found.values())).text
    assert not failures_in([world], None, "compare", CPU, {world: ["a"]})
    different = failures_in(own, None, "compare", CPU, {own[1]: ["a"] if rank == 1 else []})
    assert "differs" in next(iter(different.values())).text  # rank 2 learns of it, too
    with pytest.raises(RuntimeError, match=r"it is at '.*', its collective .*, and others at"):
        unanimous([world], failing_on(set(), ValueError), "save" if rank == 0 else "load")
    ledger._ledger_of(world).count += rank == 1  # it has come farther than the others
    with pytest.raises(RuntimeError, match=r"rank .: it is at 'load', its collective"):
        unanimous([world], failing_on(set(), ValueError), "load")
    ledger._ledger_of(world).count -= rank == 1
    assert unanimous([world], failing_on(set(), ValueError), "load") == 7
    dist.destroy_process_group(own[1])


def test_all_ranks_raise_or_none() -> None:
    """FD09: also where a rank is interrupted; calls of different names or numbers are never taken for one another."""
    run_ranks(WORLD, agreements)


def test_one_rank_alone() -> None:
    assert unanimous([None], lambda: 7, "try") == 7
    with pytest.raises(ZeroDivisionError):
        unanimous([], lambda: 1 // 0, "try")
