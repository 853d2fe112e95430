"""Random programs in which one rank differs at one place; `scripts/fuzz_ranks.py` runs many more of them.

Every living rank is told within seconds, with both sides named, and they go on together and train right.
"""

from __future__ import annotations

import pytest

from tests.harness.differing import Program, faults, run_programs
from tests.harness.pool import Died, run_fresh, run_ranks


@pytest.mark.parametrize(
    "world_size, seeds, shard_size",
    [(2, [*range(0, 18, 2), 395], 0), (3, [80, *range(100, 109, 2)], 0), (4, [0, 8, 17, 26, 44, 63], 2)],
)
def test_one_rank_differs(world_size: int, seeds: list[int], shard_size: int) -> None:
    """Another unit, another order, another pass, a call that is missing or made alone, an exception. With a shard size
    there are replicas: ranks that share no group with the odd one are told as well."""
    by_rank = run_ranks(world_size, run_programs, seeds, False, shard_size, timeout=180.0)
    for seed, outcomes in zip(seeds, zip(*by_rank, strict=True), strict=True):
        program = Program.make(seed, world_size, exits=False)
        assert not (found := faults(program, list(outcomes))), "\n".join([str(program), *found])


def test_one_rank_ends() -> None:
    """Its process does, while the others are in the middle of a step."""
    by_rank = run_fresh(3, run_programs, [1], True)
    program = Program.make(1, 3, exits=True)
    assert by_rank[program.odd] == Died(3)
    outcomes = [None if isinstance(found, Died) else found[0] for found in by_rank]
    assert not (found := faults(program, outcomes)), "\n".join([str(program), *found])
