"""Hybrid sharding: shards within a group of ranks, replicas across such groups."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.comm.groups import Groups
from fsdp.comm.nodes import node_groups
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.pool import run_ranks
from tests.test_wrapper import WIDTH, StandIn, net

FULL_SHARD, NO_SHARD = ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD
HYBRID, ZERO2 = ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2
LINEARS = ModuleWrapPolicy({nn.Linear})


class Mesh:
    """Stands for a mesh; dimension i has the i-th group."""

    def __init__(self, *groups: Any) -> None:
        self.groups, self.ndim = groups, len(groups)

    def get_group(self, dim: int) -> Any:
        return self.groups[dim]


# -- construction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [HYBRID, ZERO2])
@pytest.mark.parametrize("kind", ["pair", "mesh"])
def test_groups_of_a_tree(strategy: ShardingStrategy, kind: str) -> None:
    """P6, P8, P11, C18: the pair as it is given; the mesh is (replicate, shard); every unit has the same."""
    shard, replica = StandIn(1, 2), StandIn(2, 3)
    mesh: Any = Mesh(replica, shard)
    options = {"device_mesh": mesh} if kind == "mesh" else {"process_group": (shard, replica)}
    model = FullyShardedDataParallel(net(), sharding_strategy=strategy, auto_wrap_policy=LINEARS, **options)
    wrappers = FullyShardedDataParallel.fsdp_modules(model)
    assert len(wrappers) > 1
    for wrapper in wrappers:
        assert (wrapper.process_group, wrapper._inter_node_pg) == (shard, replica)
        assert (wrapper.rank, wrapper.world_size, wrapper.sharding_strategy) == (1, 2, strategy)
        assert (wrapper._gradient_predivide_factor, wrapper._gradient_postdivide_factor) == (4, 1.5)
        assert wrapper._device_mesh is (mesh if kind == "mesh" else None)
        assert wrapper._fsdp_unit.groups == Groups(shard, 1, 2, replica, 2, 3, hybrid=True)
        assert wrapper._fsdp_unit.policy.reshard_after_forward is (None if strategy is HYBRID else False)
    copied = copy.deepcopy(model)
    assert (copied.process_group, copied._inter_node_pg, copied._device_mesh) == (shard, replica, model._device_mesh)


def test_one_rank_to_shard_or_to_replicate_over() -> None:
    """Y55: over (n, 1) as NO_SHARD over the replicas, over (1, n) as FULL_SHARD over the shards."""
    several, one = StandIn(1, 2), StandIn(0, 1)
    with pytest.warns(UserWarning, match="HYBRID_SHARD works like NO_SHARD here, over the replica group"):
        replicated = FullyShardedDataParallel(net(), (one, several), HYBRID)
    assert replicated.sharding_strategy is NO_SHARD and replicated.process_group is one
    assert replicated._fsdp_unit.groups == Groups(None, 0, 1, several, 1, 2, hybrid=True)
    sharded = FullyShardedDataParallel(net(), (several, one), HYBRID)
    assert sharded.sharding_strategy is HYBRID and sharded._inter_node_pg is one
    assert sharded._fsdp_unit.groups == Groups(several, 1, 2, None, 0, 1, hybrid=True)
    with mock.patch.dict(os.environ, FSDP_FORCE_SHARDED="1"):
        forced = FullyShardedDataParallel(net(), (one, several), HYBRID)
    assert forced._fsdp_unit.groups == Groups(one, 0, 1, several, 1, 2, True, True)


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_a_mesh_for_other_strategies_is_a_group(strategy: ShardingStrategy) -> None:
    """P3: dimension 0, with a warning where that is not all of it."""
    group: Any = StandIn(1, 2)
    mesh: Any = Mesh(group)
    model = FullyShardedDataParallel(net(), sharding_strategy=strategy, auto_wrap_policy=LINEARS, device_mesh=mesh)
    for wrapper in FullyShardedDataParallel.fsdp_modules(model):
        assert wrapper.process_group is group and wrapper._device_mesh is mesh
        assert not hasattr(wrapper, "_inter_node_pg")
        assert wrapper._fsdp_unit.groups == Groups.of(group, replicate=strategy is NO_SHARD)
    mesh = Mesh(group, StandIn(0, 2))
    with pytest.warns(UserWarning, match="first of the 2 dimensions of device_mesh"):
        model = FullyShardedDataParallel(net(), sharding_strategy=strategy, device_mesh=mesh)
    assert model.process_group is group


# -- groups within and across machines ---------------------------------------------------------------------------------


def _by_machine() -> tuple[list[int], list[int], list[str]]:
    rank = dist.get_rank()
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        models = [FullyShardedDataParallel(net(), None, HYBRID, auto_wrap_policy=LINEARS) for _ in range(2)]
    pairs = {(w.process_group, w._inter_node_pg) for m in models for w in FullyShardedDataParallel.fsdp_modules(m)}
    ((shard, replica),) = pairs
    errors = []
    for machines in (3, 2 + rank // 2):
        with (
            mock.patch("fsdp.comm.nodes._node_groups", {}),
            mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(machines)),
            pytest.raises(ValueError) as caught,
        ):
            node_groups(dist.group.WORLD)
        errors.append(str(caught.value))
    return dist.get_process_group_ranks(shard), dist.get_process_group_ranks(replica), errors


def test_groups_by_machine() -> None:
    """P5, P12: consecutive ranks to shard over, the same place on each machine to replicate over; made once for all
    trees. An error on every rank where the machines do not have as many."""
    for rank, (shard, replica, errors) in enumerate(run_ranks(4, _by_machine)):
        assert shard == [rank // 2 * 2, rank // 2 * 2 + 1] and replica == [rank % 2, rank % 2 + 2]
        assert "of 4 ranks this machine has 3" in errors[0]
        assert f"of 4 ranks this machine has {2 + rank // 2}" in errors[1]


# -- values ------------------------------------------------------------------------------------------------------------


def _same_values() -> None:
    """Without gradients: what all start with, what is gathered, what a copy has."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    expected = net()
    torch.manual_seed(rank)
    module = net()
    mesh = init_device_mesh("cpu", (2, 2))
    model = FullyShardedDataParallel(
        module,
        None,
        HYBRID,
        auto_wrap_policy=LINEARS,
        use_orig_params=True,
        device_mesh=mesh,
        sync_module_states=True,
    )
    x = torch.ones(3, WIDTH)
    with torch.no_grad():
        for wrapped in (model, copy.deepcopy(model)):
            assert torch.equal(wrapped(x), expected(x))
    with FullyShardedDataParallel.summon_full_params(model):
        shown = dict(model.named_parameters())
        assert all(torch.equal(shown[name], value) for name, value in expected.named_parameters())
    state = model.state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.state_dict().items())


def test_values_of_the_first_rank() -> None:
    """Q15: all start with what the first rank of the first replica has."""
    run_ranks(4, _same_values)
