"""Ranks with different numbers of batches: `fsdp.join` trains as DDP's `join` does."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fsdp
from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.checkpoint import save
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import impatient, new_group, raises_soon
from tests.harness.models import Net
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_gradients, full_parameters
from tests.harness.strategies import FULL, GRAD_OP, NO_SHARD


def plain_net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(3)), nn.Linear(5, 2))


def build(**options: Any) -> Any:
    return FullyShardedDataParallel(plain_net(), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}), **options)


def batches(rank: int, count: int) -> list[Tensor]:
    return [torch.randn(3, 5, generator=torch.Generator().manual_seed(10 * rank + step)) for step in range(count)]


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)


def trained(model: nn.Module, own: Any) -> list[bool]:
    """Train in an ordinary loop, twice over the batches; return which steps used this rank's batches."""
    optimizer, active = optimizer_of(model), []
    for _ in range(2):
        for batch in own:
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            active.append(getattr(own, "active", True))
    return active


def assert_close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    torch.testing.assert_close(ours, {name: value.detach() for name, value in theirs.items()}, rtol=1e-5, atol=1e-6)


@on_ranks(2)
def test_join_trains_as_ddp_join() -> None:
    """An optimizer with momentum and weight decay also steps on a rank that only receives gradients from its peers."""
    counts = [2, 4]
    rank, most = dist.get_rank(), max(counts)
    own = batches(rank, counts[rank])
    kinds: list[dict[str, Any]] = [
        {"sharding_strategy": FULL},
        {"sharding_strategy": GRAD_OP, "use_orig_params": True},
        {"sharding_strategy": NO_SHARD},
        {"sharding_strategy": FULL, "reduce_unused": True},
    ]
    for by_all in (True, False):
        theirs = plain_net()
        ddp = DistributedDataParallel(theirs)
        with ddp.join(divide_by_initial_world_size=by_all):
            optimizer = optimizer_of(theirs)
            for step in range(2 * counts[rank]):  # a `join` context has no second loop
                loss_of(ddp, own[step % counts[rank]]).backward()
                optimizer.step()
                optimizer.zero_grad()
        for options in kinds if by_all else kinds[1:2]:
            ours = build(**options)
            once = own + own  # as DDP's ranks, of which one starts the second round alone
            told = fsdp.join(ours, once, divide_by_initial_world_size=by_all)
            optimizer, seen = optimizer_of(ours), []
            for batch in told:
                loss_of(ours, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                seen.append((told.active, told.num_active))
            assert seen == [(s < 2 * counts[rank], sum(s < 2 * count for count in counts)) for s in range(2 * most)]
            assert_close(full_parameters(ours), dict(theirs.named_parameters()))


class VaryingEpochs:
    """A loader with a different number of batches in each epoch and on each rank; `join` iterates it once per epoch."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = iter(counts)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(batches(dist.get_rank(), next(self.counts)))


@on_ranks(2)
def test_join_with_accumulation_and_clipping() -> None:
    """Two batches per step, with a clipped norm; one rank has no batch in one epoch, and both have none at the end."""
    rank, counts = dist.get_rank(), [[3, 4, 0], [4, 1, 0]]
    model, plain = build(), plain_net()
    optimizers = [optimizer_of(model), optimizer_of(plain)]
    loader = VaryingEpochs(counts[rank])
    for epoch in range(3):
        steps = 0
        for index, batch in enumerate(fsdp.join(model, loader)):
            steps += 1
            if index % 2 == 0:
                with model.no_sync():
                    loss_of(model, batch).backward()
            else:
                loss_of(model, batch).backward()
                norm = model.clip_grad_norm_(0.05)
                optimizers[0].step()
                optimizers[0].zero_grad()
                mean = torch.zeros(())
                for of, number in enumerate(counts[r][epoch] for r in range(2)):
                    mean = mean + sum(loss_of(plain, b) for b in batches(of, number)[index - 1 : index + 1]) / 2
                mean.backward()
                torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.05))
                optimizers[1].step()
                optimizers[1].zero_grad()
        assert steps == max(counts[0][epoch], counts[1][epoch])
    assert_close(full_parameters(model), dict(plain.named_parameters()))


@on_ranks(2)
def test_join_with_a_rank_without_any_batch() -> None:
    """The first stand-in batch comes from a peer; a stand-in with a non-finite gradient has no effect."""
    rank = dist.get_rank()
    model = build(use_orig_params=True)
    own = [{"x": batch} for batch in batches(1, 2)] if rank else []
    seen, ours = fsdp.join(model, own, divide_by_initial_world_size=False), []
    for batch in seen:
        ours.append(batch["x"])
        factor = 1.0 if seen.active else float("nan")
        (loss_of(model, batch["x"]) * factor).backward()
    expected = [batches(1, 2)[step * rank] for step in range(2)]
    assert all(torch.equal(found, wanted) for found, wanted in zip(ours, expected, strict=True))
    plain = plain_net()
    sum(loss_of(plain, batch) for batch in batches(1, 2)).backward()  # type: ignore[union-attr]
    assert_close(full_gradients(model), {name: param.grad for name, param in plain.named_parameters()})
    model(batches(0, 1)[0]).sum().backward()  # outside of the loop every batch counts again
    assert all(unit.weight == 1 for unit in fsdp.runtime.unit.units_of(model))


@on_ranks(2)
def test_buffers_changed_or_replaced_by_the_forward_of_a_stand_in_batch_are_restored() -> None:
    rank = dist.get_rank()

    def forward(m: Any, x: Tensor) -> Tensor:
        m.seen = m.seen + 1
        return m.norm(m.linear(x))

    torch.manual_seed(5)
    counting = Net(forward, linear=nn.Linear(5, 5), norm=nn.BatchNorm1d(5), seen=torch.zeros(()))
    model = FullyShardedDataParallel(counting)
    states = []
    for batch in fsdp.join(model, batches(rank, 3 - 2 * rank)):
        model(batch).sum().backward()
        states.append(copy.deepcopy(dict(model.named_buffers())))
    found = dict(model.named_buffers())
    wanted = states[-1] if rank == 0 else states[0]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted), (found, states)


@on_ranks(2)
def test_join_validates_its_arguments_and_ends_with_the_loop() -> None:
    rank = dist.get_rank()
    model = build()
    uneven = batches(rank, 1 + rank)
    for wrong in (None, 3):
        with pytest.raises(TypeError, match=r"for batch in fsdp.join\(model, loader\)"):
            fsdp.join(model, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a model with FullyShardedDataParallel in it, got Linear"):
        fsdp.join(nn.Linear(1, 1), [])
    for batch in fsdp.join(model, uneven):
        loss_of(model, batch).backward()
        break  # alone or not: the next step is an ordinary one
    loss_of(model, uneven[0]).backward()
    with pytest.raises(RuntimeError, match=r"rank 1 .*begin the clip_grad_norm_.*|join\(\): the next batch"):
        if rank:
            model.clip_grad_norm_(1.0)
        else:
            next(iter(fsdp.join(model, uneven)))


@on_ranks(2)
@impatient
def test_a_save_after_loops_of_different_length_is_an_error_on_every_rank(tmp_path: Path) -> None:
    """One rank saves while a second one trains: the error names both, and `fsdp.join` as the remedy."""
    group = new_group()
    model = build(process_group=group)
    optimizer = optimizer_of(model)
    with raises_soon() as caught:
        for batch in batches(dist.get_rank(), 2 + dist.get_rank()):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        save(tmp_path, model, optimizer, process_group=group)
    error = str(caught.value)

    assert "rank 0 has called fsdp.checkpoint.save()" in error and "the forward of the root unit" in error, error
    assert "fsdp.join(model, loader)" in error, error
    assert not any(tmp_path.iterdir())


@on_ranks(4)
def test_join_with_replica_groups() -> None:
    """The only rank with batches at first shares no group with some rank."""
    rank, counts = dist.get_rank(), [0, 0, 1, 2]
    groups = [[dist.new_group(ranks) for ranks in several] for several in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    model = build(
        sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=(groups[0][rank // 2], groups[1][rank % 2])
    )
    plain = plain_net()
    active = trained(model, fsdp.join(model, batches(rank, counts[rank]), divide_by_initial_world_size=False))
    assert active == [step < counts[rank] for _ in range(2) for step in range(2)]
    optimizer = optimizer_of(plain)
    for step in [0, 1] * 2:
        several = [batches(of, counts[of])[step] for of in range(4) if step < counts[of]]
        (sum(loss_of(plain, batch) for batch in several) / len(several)).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    assert_close(full_parameters(model), dict(plain.named_parameters()))
