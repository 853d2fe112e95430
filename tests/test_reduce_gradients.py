"""`reduce_gradients()` reduces gradients accumulated under `no_sync()` without another backward."""

from __future__ import annotations

import os
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import MlpBlock, Net
from tests.harness.oracle import assert_bit_equal
from tests.harness.pairs import pairwise
from tests.harness.pool import RankFailure, on_ranks, run_fresh
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients, wrap
from tests.harness.strategies import FULL, GRAD_OP, NONE

WIDTH = 7


def plain() -> nn.Module:
    return Net(
        lambda m, x, skip_second=False: m.head(m.first(x) if skip_second else m.second(m.first(x))),
        first=MlpBlock(WIDTH, WIDTH),
        second=MlpBlock(WIDTH, WIDTH),
        head=nn.Linear(WIDTH, 3),
    ).double()


def build(strategy: ShardingStrategy, use_orig_params: bool, **options: Any) -> FullyShardedDataParallel:
    torch.manual_seed(3)
    policy = ModuleWrapPolicy({MlpBlock})
    return wrap(plain(), strategy, use_orig_params, wrap_policy=policy, **options)


def batch(rank: int, index: int) -> Tensor:
    return torch.randn(4, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + index))


def accumulate(model: FullyShardedDataParallel, batches: int, **options: Any) -> None:
    """Run `batches` backwards inside `no_sync()`."""
    with model.no_sync():
        for index in range(batches):
            model(batch(dist.get_rank(), index), **options).square().mean().backward()


@pytest.mark.parametrize(
    ("strategy", "use_orig_params", "world_size"), pairwise([FULL, GRAD_OP, NONE], [True, False], [1, 2, 3])
)
@on_ranks("world_size")
def test_reduce_gradients_equals_a_last_backward_outside_no_sync(
    world_size: int, use_orig_params: bool, strategy: ShardingStrategy
) -> None:
    model, other = build(strategy, use_orig_params), build(strategy, use_orig_params)
    for _ in range(2):  # the second iteration adds to the gradients of the first
        accumulate(model, 3)
        model.reduce_gradients()
        accumulate(other, 2)
        other(batch(dist.get_rank(), 2)).square().mean().backward()
        assert_bit_equal(full_gradients(model), full_gradients(other))
    assert float(model.clip_grad_norm_(1.0)) == float(other.clip_grad_norm_(1.0)) > 0


@pytest.mark.parametrize(("counts", "ranks"), [([2, 2], 2), ([3, 1], 2), ([0, 2], 2), ([1, 0, 4], 3)], ids=str)
@pytest.mark.parametrize("strategy", [FULL, NONE])
@on_ranks("ranks")
def test_ranks_may_have_different_numbers_of_micro_batches(
    strategy: ShardingStrategy, counts: list[int], ranks: int
) -> None:
    """Gradients of all micro-batches are summed and divided by the number of ranks; see `fsdp.join`."""
    model, own = build(strategy, True), [batch(dist.get_rank(), index) for index in range(counts[dist.get_rank()])]
    with model.no_sync():
        for x in own if strategy is NONE else fsdp.join(model, own):
            model(x).square().mean().backward()
    model.reduce_gradients()
    torch.manual_seed(3)
    expected = plain()
    for rank, count in enumerate(counts):
        for index in range(count):
            expected(batch(rank, index)).square().mean().div(ranks).backward()
    grads = full_gradients(model)
    for name, param in expected.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-12, atol=1e-14, msg=name)


@on_ranks(2)
def test_reduce_gradients_reduces_each_unit_once_and_gathers_none() -> None:
    model = build(FULL, True)
    model(batch(0, 0)).sum().backward()
    model.zero_grad()
    with record_collectives() as log:
        model(batch(0, 0)).sum().backward()
    once = log.nbytes(label="reduce the root unit"), log.nbytes(label="reduce unit 'first'")
    model.zero_grad()
    with record_collectives() as log:
        accumulate(model, 3)
        assert not log.units("reduce")
        log.clear()
        model.reduce_gradients()
    assert (log.nbytes(label="reduce the root unit"), log.nbytes(label="reduce unit 'first'")) == once
    assert not log.units("gather")
    with record_collectives() as log:
        model.reduce_gradients()  # no accumulated gradients remain
    assert not log.units("reduce")


# Whether `reduce_unused`, whether each rank skips the second unit, and the parameters that have no gradient then.
SKIPPING: list[tuple[bool, tuple[bool, bool], tuple[str, ...]]] = [
    (False, (True, True), ("second", "head.bias")),
    (True, (True, False), ("head.bias",)),
    (True, (True, True), ("second", "head.bias")),
]


@pytest.mark.parametrize(("unused", "skips", "without"), SKIPPING)
@on_ranks(2)
def test_units_without_gradients_are_not_reduced(
    unused: bool, skips: tuple[bool, bool], without: tuple[str, ...]
) -> None:
    """With `reduce_unused` one rank may use a unit that the second rank skips. The bias of the head is frozen."""
    model = build(FULL, True, reduce_unused=unused)
    model.head.bias.requires_grad_(False)
    accumulate(model, 2, skip_second=skips[dist.get_rank()])
    model.reduce_gradients()
    for name, grad in full_gradients(model).items():
        assert (grad is None) is name.startswith(without), name
        assert grad is None or bool(grad.any()), name


@on_ranks(4)
def test_reduce_gradients_with_mixed_precision_and_hybrid_sharding() -> None:
    for options in (
        {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"device_mesh": dist.device_mesh.init_device_mesh("cpu", (2, 2))},
    ):
        strategy = ShardingStrategy.HYBRID_SHARD if "device_mesh" in options else FULL
        model, other = build(strategy, True, **options), build(strategy, True, **options)
        accumulate(model, 2)
        model.reduce_gradients()
        accumulate(other, 1)
        other(batch(dist.get_rank(), 1)).square().mean().backward()
        assert_bit_equal(full_gradients(model), full_gradients(other))


@on_ranks(2)
def test_reduce_gradients_is_refused_during_a_forward_and_by_inner_units() -> None:
    model = build(FULL, True)
    model(batch(0, 0))
    inner: Any = model.module.first
    with pytest.raises(RuntimeError, match="root"):
        inner.reduce_gradients()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer = FullyShardedDataParallel(nn.Sequential(nn.Linear(3, 3), Net(lambda m, x: outer.reduce_gradients())))
    with pytest.raises(ValueError, match="FORWARD"):
        outer(torch.ones(1, 3))


def _is_left_out_by_rank_1() -> None:
    os.environ["FSDP_COLLECTIVES"] = "native"  # where messages of different sizes would end the process
    model = build(FULL, True)
    accumulate(model, 1)
    if dist.get_rank() == 0:
        model.reduce_gradients()
    else:
        model(batch(1, 1))


def test_a_rank_that_omits_reduce_gradients_is_an_error_on_all_ranks() -> None:
    with pytest.raises(RankFailure, match=r"reduce_gradients\(\)"):
        run_fresh(2, _is_left_out_by_rank_1)
