"""The sharding strategies by short names, and the modes in which tests run: strategy and `use_orig_params`."""

from typing import NamedTuple

import pytest

from fsdp import ShardingStrategy

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy
FULL, GRAD_OP, NONE, HYBRID, ZERO2 = ShardingStrategy  # shorter, for tables
STRATEGIES = [FULL, GRAD_OP, NONE]
both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


class Mode(NamedTuple):
    strategy: ShardingStrategy
    use_orig_params: bool

    def __str__(self) -> str:
        return describe(self)


def describe(mode: tuple[ShardingStrategy, bool]) -> str:
    return f"{mode[0].name}, use_orig_params={mode[1]}"


EVERY_MODE = [Mode(strategy, use_orig_params) for strategy in STRATEGIES for use_orig_params in (False, True)]
MODES = [Mode(FULL, False), Mode(FULL, True), Mode(GRAD_OP, True), Mode(NONE, False)]  # of the others one each


def by_turns(number: int) -> list[Mode]:
    """Return each strategy in one of the two modes, alternating with the number of the case."""
    return [Mode(strategy, (number + index) % 2 == 0) for index, strategy in enumerate(STRATEGIES)]
