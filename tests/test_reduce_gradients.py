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


@on_ranks(2)
def test_units_without_gradients_are_not_reduced() -> None:
    model = build(FULL, True)
    accumulate(model, 2, skip_second=True)
    model.reduce_gradients()
    grads = full_gradients(model)
    assert all((grad is None) is name.startswith("second") for name, grad in grads.items())


@on_ranks(2)
def test_ranks_may_reduce_after_using_different_units() -> None:
    """One rank uses a unit that the second rank skips."""
    model = build(FULL, True, reduce_unused=True)
    model.head.bias.requires_grad_(False)
    accumulate(model, 2, skip_second=dist.get_rank() == 0)
    model.reduce_gradients()
    grads = full_gradients(model)
    assert grads.pop("head.bias") is None
    assert all(grad is not None and bool(grad.any()) for grad in grads.values())


@on_ranks(2)
def test_parameters_that_no_rank_uses_get_no_gradient() -> None:
    """With `reduce_unused`, as from a synchronized backward."""
    net = Net(lambda m, x: m.used(x), used=nn.Linear(4, 3), unused=nn.Linear(4, 3))
    model = wrap(net, FULL, True, reduce_unused=True)
    with model.no_sync():
        model(torch.ones(2, 4)).sum().backward()
    model.reduce_gradients()
    assert {name for name, grad in full_gradients(model).items() if grad is None} == {"unused.weight", "unused.bias"}


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
