"""Random programs in which one rank deviates once, and training loops that continue after a failed step.

Every living rank raises within seconds, with both sides named; afterwards the ranks train together and right.
`scripts/fuzz_ranks.py` runs many more programs.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp import FullyShardedDataParallel
from tests.harness.agreeing import UNEQUAL, WIDTH, Chain, build, impatient, new_group
from tests.harness.differing import Program, faults, run_programs
from tests.harness.pool import Died, of_all_ranks, on_ranks, run_fresh, run_ranks


@pytest.mark.parametrize(
    "world_size, seeds, shard_size",
    [(2, [*range(0, 14, 2), 395], 0), (3, [80, *range(100, 107, 2)], 0), (4, [0, 8, 17, 63], 2)],
)
def test_deviation_of_one_rank_raises_on_every_rank(world_size: int, seeds: list[int], shard_size: int) -> None:
    """Another unit, order or pass, a missing or additional call, an exception.

    With a shard size there are replicas: ranks without a group in common with the odd one raise as well.
    """
    by_rank = run_ranks(world_size, run_programs, seeds, False, shard_size, timeout=180.0)
    for seed, outcomes in zip(seeds, zip(*by_rank, strict=True), strict=True):
        program = Program.make(seed, world_size, exits=False)
        assert not (found := faults(program, list(outcomes))), "\n".join([str(program), *found])


def test_rank_that_exits_during_a_step_is_named_by_its_peers() -> None:
    by_rank = run_fresh(3, run_programs, [1], True)
    program = Program.make(1, 3, exits=True)
    assert by_rank[program.odd] == Died(3)
    outcomes = [None if isinstance(found, Died) else found[0] for found in by_rank]
    assert not (found := faults(program, outcomes)), "\n".join([str(program), *found])


@pytest.mark.parametrize(("position", "at"), [("a unit's forward", 0), ("the root's forward", 3), ("the backward", 0)])
@on_ranks(2)
@impatient
def test_step_that_fails_on_one_rank_is_lost_by_all(position: str, at: int) -> None:
    """Rank 1 fails once, in step `at` of a loop that continues after failed steps.

    The failing rank's next step must not raise the same failure again, as the peers would begin it alone.
    """
    torch.manual_seed(0)
    plain = Chain(UNEQUAL)
    model = build(copy.deepcopy(plain), new_group(), use_orig_params=True)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (plain, model)]
    rank, done = dist.get_rank(), []

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    inner, outer = model.module.blocks[1].module.up, model.module.head
    register = {
        "a unit's forward": inner.register_forward_hook,
        "the root's forward": outer.register_forward_hook,
        "the backward": inner.register_full_backward_hook,
    }
    for step in range(at + 4):
        inputs = [torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(step)) for _ in range(2)]
        handle = register[position](fail) if rank == 1 and step == at else None
        try:
            model(inputs[rank]).square().sum().backward()
            optimizers[1].step()
            done.append("done")
        except (ValueError, RuntimeError) as error:
            done.append(type(error).__name__)
            assert handle is None or type(error) is ValueError
        if handle is not None:
            handle.remove()
        optimizers[1].zero_grad()
        if done[-1] == "done":
            optimizers[0].zero_grad()
            losses = [plain(x).square().sum() for x in inputs]
            (sum(losses) / 2).backward()  # type: ignore[union-attr]
            optimizers[0].step()
    first, second = by_rank = of_all_ranks(done)
    assert [word == "done" for word in first] == [word == "done" for word in second], by_rank
    assert first.count("done") == at + 3 and second[at] == "ValueError", by_rank
    with FullyShardedDataParallel.summon_full_params(model):
        for (name, ours), theirs in zip(model.module.named_parameters(), plain.parameters()):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=name)
