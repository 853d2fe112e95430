"""Hybrid sharding: shards within a group of ranks, replicas across such groups."""

from __future__ import annotations

import contextlib
import copy
import math
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy, shard_info
from fsdp.comm.groups import Groups
from fsdp.comm.nodes import node_groups
from fsdp.sharded_grad_scaler import ShardedGradScaler
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import (
    UNEQUAL,
    Chain,
    build,
    impatient,
    new_group,
    new_pair,
    train,
    train_and_raise,
)
from tests.harness.agreeing import WIDTH as INPUTS
from tests.harness.models import ZOO, Net
from tests.harness.oracle import Schedule, assert_bit_equal, assert_equivalent, clean_name, rank_batch
from tests.harness.pool import of_all_ranks, on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients, full_parameters, wrap
from tests.harness.small import WIDTH, StandIn, net
from tests.harness.strategies import FULL_SHARD, HYBRID, NO_SHARD, ZERO2

LINEARS = ModuleWrapPolicy({nn.Linear})


class Mesh:
    """A stand-in for a mesh; dimension i has the i-th group."""

    def __init__(self, *groups: Any) -> None:
        self.groups, self.ndim = groups, len(groups)

    def get_group(self, dim: int) -> Any:
        return self.groups[dim]


# -- construction ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [HYBRID, ZERO2])
@pytest.mark.parametrize("kind", ["pair", "mesh"])
def test_all_units_share_the_given_groups(strategy: ShardingStrategy, kind: str) -> None:
    """A pair is used as given; a mesh is (replicate, shard)."""
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


def test_meshes_with_one_rank_per_shard_or_replica_group() -> None:
    """(n, 1) works as NO_SHARD over the replicas, (1, n) as FULL_SHARD over the shards."""
    many, one = StandIn(1, 2), StandIn(0, 1)
    with pytest.warns(UserWarning, match="HYBRID_SHARD works like NO_SHARD here, over the replica group"):
        replicated = FullyShardedDataParallel(net(), (one, many), HYBRID)
    assert replicated.sharding_strategy is NO_SHARD and replicated.process_group is one
    assert replicated._fsdp_unit.groups == Groups(None, 0, 1, many, 1, 2, hybrid=True)
    sharded = FullyShardedDataParallel(net(), (many, one), HYBRID)
    assert sharded.sharding_strategy is HYBRID and sharded._inter_node_pg is one
    assert sharded._fsdp_unit.groups == Groups(many, 1, 2, None, 0, 1, hybrid=True)
    with mock.patch.dict(os.environ, FSDP_FORCE_SHARDED="1"):
        forced = FullyShardedDataParallel(net(), (one, many), HYBRID)
    assert forced._fsdp_unit.groups == Groups(one, 0, 1, many, 1, 2, True, True)


@pytest.mark.parametrize("strategy", [FULL_SHARD, NO_SHARD])
def test_mesh_with_pure_strategies_gives_the_shard_group(strategy: ShardingStrategy) -> None:
    """Dimension 0, with a warning if the mesh has more dimensions."""
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


@on_ranks(4)
def test_default_groups_follow_the_machines() -> None:
    """Consecutive ranks shard, equal local ranks replicate, and all trees share the groups.

    Machines with different numbers of ranks are an error on every rank.
    """
    rank = dist.get_rank()
    dist.new_group([0, 1])  # ranks know different numbers of groups
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
    assert dist.get_process_group_ranks(shard) == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert dist.get_process_group_ranks(replica) == [rank % 2, rank % 2 + 2]
    assert "of 4 ranks this machine has 3" in errors[0]
    assert f"of 4 ranks this machine has {2 + rank // 2}" in errors[1]


# -- values ------------------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_sync_module_states_broadcasts_rank_0_to_all_replicas() -> None:
    """Forwards without gradients, a copy, summoned parameters and the state dict have rank 0's values."""
    rank = dist.get_rank()
    expected = net()
    module = net()
    with torch.no_grad():
        for param in module.parameters():
            param.add_(rank)
    mesh = init_device_mesh("cpu", (2, 2))
    model = FullyShardedDataParallel(
        module, None, HYBRID, auto_wrap_policy=LINEARS, use_orig_params=True, device_mesh=mesh, sync_module_states=True
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


# -- training ----------------------------------------------------------------------------------------------------------

CASE = ZOO["mlp"]
SCHEDULE = Schedule(steps=1)


def mesh_of(shape: str) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(map(int, shape.split("x"))))


def backward(model: nn.Module, scale: float = 1.0) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    (scale * CASE.loss(model, rank_batch(CASE, SCHEDULE, 0, 0, rank, size))).backward()


@pytest.mark.parametrize("strategy", [HYBRID, ZERO2])
@on_ranks(4)
def test_collectives_and_bytes_of_each_group(strategy: ShardingStrategy) -> None:
    """A step gathers and reduces full units inside shard groups and averages shards over replicas.

    Replica groups have no further collectives except one vote, and none under no_sync().
    """
    os.environ["FSDP_COLLECTIVES"] = "native"
    model = build(Chain(UNEQUAL), new_pair(), strategy)
    shard, replica = (tuple(dist.get_process_group_ranks(g)) for g in (model.process_group, model._inter_node_pg))
    for _ in range(2):
        train(model)
    with record_collectives() as log:
        with model.no_sync():
            train(model)
        unsynchronised = [(r.op, r.group) for r in log.records if r.op != "all_gather"]
        log.clear()
        train(model)
    padded = {unit.name: sum(b.layout.padded_numel for b in unit.buckets) * 4 for unit in shard_info(model)}
    order = ["", "blocks.2", "blocks.1", "blocks.0"]
    names = {f"unit {name!r}" if name else "the root unit": name for name in order}
    sent = [(r.op, names[r.label.partition(" ")[2]], r.group, r.nbytes) for r in log.records if "agree" not in r.label]
    gathers = [sent.pop(i) for i in reversed(range(len(sent))) if sent[i][0] == "all_gather"]
    gathered = [] if strategy is ZERO2 else [*order, *order[1:]]  # what no_sync() has gathered is there still
    assert sorted(gathers) == sorted(("all_gather", name, shard, padded[name]) for name in gathered)
    expected = []  # the mean over replicas begins with the next reduction, which hid this one, or at the end
    for position, name in enumerate([*order, None]):
        if name is not None:
            expected.append(("reduce_scatter", name, shard, padded[name]))
        if position > 0:
            before = order[position - 1]
            expected.append(("all_reduce", before, replica, padded[before] // 2))
    assert sent == expected
    votes = [(r.group, r.label) for r in log.records if "agree" in r.label]
    assert votes[-2:] == [(shard, "agree on the backward"), (replica, "agree on the backward")]
    assert all(group == shard for group, _ in votes[:-1]) and len(votes) == 3
    assert all(group == shard for _, group in unsynchronised)


@on_ranks(4)
def test_gradients_are_averaged_in_the_reduce_dtype() -> None:
    """Float16 is also divided before each sum. Each sum has two terms, so its order is unique."""
    rank, mesh = dist.get_rank(), mesh_of("2x2")
    single_rank_group = [dist.new_group([r]) for r in range(4)][rank]
    for dtype, strategies in ((torch.float32, [ZERO2]), (torch.bfloat16, [HYBRID]), (torch.float16, [HYBRID, ZERO2])):
        precision = MixedPrecision(torch.bfloat16, dtype)
        own = wrap(CASE, NO_SHARD, True, process_group=single_rank_group, mixed_precision=precision)
        backward(own)
        held = of_all_ranks({clean_name(name): p.grad for name, p in own.named_parameters()})

        def mean(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            first = 2 if one.dtype == torch.float16 else 1
            return (one / first + other / first) / (2 / first)

        expected = {}
        for name in held[0]:
            a, b, c, d = (grads[name].to(dtype) for grads in held)
            expected[name] = mean(mean(a, b), mean(c, d)).float()
        for strategy in strategies:
            options = {"mixed_precision": precision, "cpu_offload": CPUOffload(strategy is ZERO2)}
            model = wrap(CASE, strategy, strategy is ZERO2, device_mesh=mesh, **options)
            backward(model)
            assert_bit_equal(full_gradients(model), expected, f"{strategy}, {dtype}")


@pytest.mark.parametrize("shape", ["2x2", "4x1"])
@on_ranks(4)
def test_gradient_norm_counts_replicas_once(shape: str) -> None:
    """All ranks clip alike. Gradients of ignored parameters count as their mean over all ranks."""
    mesh = mesh_of(shape)
    kinds = [("all", math.inf), ("some", 2.0), ("all", 2.0), ("some", math.inf)]
    for kind, p in kinds if shape == "2x2" else kinds[:2]:
        module: Any = CASE.build()
        if kind == "some":  # ignored parameters have a different gradient on each rank
            ones = torch.ones(1)
            module = Net(
                lambda m, *x: m.case(*x) + m.own(ones * (1 + dist.get_rank())).sum(),  # noqa: B023
                case=module,
                own=nn.Linear(1, 3),
            )
        ignored = [] if kind == "all" else [module.own]
        model = wrap(module, HYBRID, True, wrap_policy=LINEARS, device_mesh=mesh, ignored_modules=ignored)
        backward(model)
        grads = [grad for name, grad in full_gradients(model).items() if grad is not None]
        held = of_all_ranks([q.grad for q in module.own.parameters()] if ignored else [])
        with record_collectives() as log:
            norm = model.clip_grad_norm_(0.1, p)
        per_replica = [len(dist.get_process_group_ranks(mesh.get_group(1)))] if shape != "4x1" else []
        groups = [len(record.group) for record in log.records]
        assert groups == {"2x2": [2, 2] if ignored else [2], "4x1": [4] if ignored else []}[shape], per_replica
        norms = of_all_ranks(float(norm))
        assert len(set(norms)) == 1
        own = [torch.cat([g.flatten() for g in many]).double() for many in held if many]
        ours = torch.cat([g.flatten() for g in grads]).double()
        if p == math.inf:
            expected = max(float(v.abs().max()) for v in [ours, *own])
        else:
            expected = float(ours.square().sum() + sum(v.square().sum() for v in own) / 4) ** 0.5
        assert norms[0] == pytest.approx(expected, rel=1e-6)
        after = [grad for name, grad in full_gradients(model).items() if grad is not None]
        for before, clipped in zip(grads, after, strict=True):
            torch.testing.assert_close(clipped, before * min(1.0, 0.1 / (norms[0] + 1e-6)), rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("shape", ["2x2", "4x1"])
@on_ranks(4)
def test_communication_and_parameter_hooks(shape: str) -> None:
    """A communication hook reduces inside the shard group, and the engine averages the result over replicas.

    A parameter's own hook sees the complete gradient inside the backward.
    """
    mesh = mesh_of(shape)
    own = default_hooks.reduce_scatter_hook if shape == "2x2" else default_hooks.allreduce_hook
    for uop in (True, False) if shape == "2x2" else (True,):
        usual, model, seen = wrap(CASE, HYBRID, uop, device_mesh=mesh), wrap(CASE, HYBRID, uop, device_mesh=mesh), {}
        model.register_comm_hook(default_hooks.DefaultState(model.process_group), own)

        def keep(param: Any) -> None:
            seen[param] = param.grad.clone()  # noqa: B023

        for param in usual.parameters():
            param.register_post_accumulate_grad_hook(keep)
        for wrapped in (usual, model):
            backward(wrapped)
        expected = full_gradients(usual)
        assert_bit_equal(full_gradients(model), expected, f"{shape}, use_orig_params={uop}")
        held = [param for param in usual.parameters() if param.grad is not None]
        assert held and all(torch.equal(seen[param], param.grad) for param in held)
        calls = []
        hooked = wrap(CASE, HYBRID, uop, device_mesh=mesh)
        hooked.register_comm_hook(None, lambda state, *tensors: calls.append(len(tensors)) or tensors[-1].fill_(2.0))  # noqa: B023
        backward(hooked, scale=3.0)
        assert set(calls) == {2 if shape == "2x2" else 1}
        assert all(bool((grad == 2).all()) for grad in full_gradients(hooked).values() if grad is not None)


@on_ranks(4)
def test_loss_scaling_copies_and_reads_by_single_replicas() -> None:
    """The scaler agrees over all ranks; one replica alone can evaluate, summon and save."""
    rank, mesh = dist.get_rank(), mesh_of("2x2")
    model = wrap(CASE, HYBRID, True, device_mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = ShardedGradScaler(device="cpu", init_scale=2.0)
    before = full_parameters(model)
    backward(model, scale=math.inf if rank == 3 else 1.0)
    scaler.scale(torch.tensor(1.0))
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0
    assert_bit_equal(full_parameters(model), before, "a step after an infinity on one rank")
    optimizer.zero_grad()

    backward(model)
    grads = full_gradients(model)
    copied = copy.deepcopy(model)
    backward(copied)
    assert_bit_equal(full_gradients(copied), grads, "a copy")
    if rank < 2:  # one replica alone
        with torch.no_grad():
            model(*rank_batch(CASE, SCHEDULE, 0, 0, rank, 4).inputs)
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True, writeback=False):
            shown = {clean_name(name): param.grad for name, param in model.named_parameters()}
        assert_bit_equal(shown, grads, "shown on one replica")
        state = model.state_dict()
        assert_bit_equal(state, before, "the state dict of one replica")
    optimizer.step()
    backward(model)
    full_gradients(model)  # replicas are equal


ORDERS = ([[0, 2], [1], [2, 1], [0]], [[1], [1], [], [0, 1]], [[2], [2, 0], [0], [2]])  # by step and rank


@pytest.mark.parametrize("strategy", [HYBRID, ZERO2])
@on_ranks(4)
def test_reduce_unused_with_different_units_on_all_ranks(strategy: ShardingStrategy) -> None:
    """With and without synchronization; units that no rank runs have no gradient."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    plain = Chain(UNEQUAL).double()
    options = {"use_orig_params": strategy is HYBRID, "reduce_unused": True}
    model = build(copy.deepcopy(plain), new_pair(), strategy, **options)
    for order in (ORDERS[0], *ORDERS):
        for accumulates in (True, False):
            model.module.order = order[(rank + accumulates) % 4]
            with model.no_sync() if accumulates else contextlib.nullcontext():
                model(torch.full((2, INPUTS), 1.0 + rank, dtype=torch.float64)).square().sum().backward()
            for other in range(4):
                plain.order = order[(other + accumulates) % 4]
                x = torch.full((2, INPUTS), 1.0 + other, dtype=torch.float64)
                (plain(x).square().sum() / 4).backward()
        expected = {name: param.grad for name, param in plain.named_parameters()}
        assert_equivalent(full_gradients(model), expected)
        model.zero_grad()
        plain.zero_grad()
    if rank < 2:
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            pass


# -- ranks that differ -------------------------------------------------------------------------------------------------


@on_ranks(4)
@impatient
def test_training_resumes_after_a_backward_that_failed_on_one_rank() -> None:
    """The rank has a reduction whose all-reduce over the replicas it has yet to start."""
    torch.manual_seed(0)
    model = build(Chain(UNEQUAL), new_pair(), HYBRID)
    train(model)
    expected = full_gradients(model)
    model.zero_grad()
    if dist.get_rank() == 1:
        train_and_raise(model, 1, backward=True)
    else:
        with pytest.raises(RuntimeError, match="failed in the backward"):
            train(model)
    model.zero_grad()
    train(model)
    assert_bit_equal(full_gradients(model), expected)


@on_ranks(4)
def test_different_replicas_are_an_error() -> None:
    """A replica group has the same part of the same model, checked before the first gather of a training step."""
    rank = dist.get_rank()
    shards = [new_group(ranks=[0, 1]), new_group(ranks=[2, 3])]
    crossed = [new_group(ranks=[0, 3]), new_group(ranks=[1, 2])]
    errors = []
    for group, widths in (
        ((shards[rank // 2], crossed[rank in (1, 2)]), UNEQUAL),
        (new_pair(), UNEQUAL if rank < 2 else (5, 7, 12)),
    ):
        model = build(Chain(widths), group, HYBRID)
        with pytest.raises(RuntimeError) as caught:
            train(model)
        errors.append(str(caught.value))
    crossed, other = errors
    assert "replicated 2 times, part 0 of 2" in crossed and "replicated 2 times, part 1 of 2" in crossed
    assert "different models" in other and "unit 3 of the group" in other
