"""Short names of the sharding strategies, and the two modes as parameters of a test."""

import pytest

from fsdp import ShardingStrategy

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2 = ShardingStrategy
STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD]
both_modes = pytest.mark.parametrize("use_orig_params", [False, True])
