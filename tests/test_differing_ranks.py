"""Random programs in which one rank deviates once, and training loops that continue after a failed step.

Every living rank raises within seconds, with both sides named; afterwards the ranks train together and right.
`scripts/fuzz_ranks.py` runs many more programs.
"""

from __future__ import annotations

import pytest

from tests.harness.differing import Program, faults, run_programs
from tests.harness.pool import Died, run_fresh, run_ranks


@pytest.mark.parametrize(
    "world_size, seeds, shard_size",
    [(2, [0, 2, 6, 12, 395], 0), (3, [80, 100, 102, 106], 0), (4, [8, 17, 63], 2)],
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
