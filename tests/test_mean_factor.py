"""`fsdp.mean_factor`: gradients of the mean over the tokens of all ranks, of which each has another number.

The reference is one process over all tokens.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision
from fsdp.wrap import ModuleWrapPolicy
from tests.harness import agreeing
from tests.harness.agreeing import impatient, new_group, raises_soon
from tests.harness.oracle import assert_bit_equal, assert_equivalent
from tests.harness.pairs import pairwise
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients, wrap
from tests.harness.small import WIDTH
from tests.harness.strategies import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP

TOKENS = [[7, 3, 1, 4], [0, 0, 2, 9], [5, 0, 0, 0], [0, 1, 0, 0]]  # by rank and micro-batch


def plain_net() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 3)).double()


def build(model: nn.Module | None = None, strategy: Any = FULL_SHARD, use_orig_params: bool = False, **options: Any):  # type: ignore[no-untyped-def]
    policy = ModuleWrapPolicy({nn.Sequential})
    return wrap(model or plain_net(), strategy, use_orig_params, wrap_policy=policy, **options)


def tokens_of(rank: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * rank + micro)
    x = torch.randn(TOKENS[rank][micro], WIDTH, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, x.shape[:1], generator=generator)


def loss_sum(model: nn.Module, tokens: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(tokens[0]), tokens[1], reduction="sum")


def gradients_of_all(micro_batches: int, ranks: int | None = None) -> dict[str, Tensor | None]:
    """Return the gradients of one process by the mean over all tokens at once."""
    plain = plain_net()
    each = list(itertools.product(range(ranks or dist.get_world_size()), range(micro_batches)))
    xs, labels = zip(*(tokens_of(*place) for place in each), strict=True)
    nn.functional.cross_entropy(plain(torch.cat(xs)), torch.cat(labels)).backward()
    return {name: param.grad for name, param in plain.named_parameters()}


def accumulate(model: Any, micro_batches: int, *, sync_every_time: bool) -> None:
    rank = dist.get_rank()
    factor = fsdp.mean_factor(model, TOKENS[rank][:micro_batches])
    for micro in range(micro_batches):
        synchronizes = sync_every_time or micro == micro_batches - 1
        with nullcontext() if synchronizes else model.no_sync():
            (loss_sum(model, tokens_of(rank, micro)) * factor).backward()


CASES = [
    *((FULL_SHARD, *values, None) for values in pairwise((False, True), (1, 4), (False, True))),
    (SHARD_GRAD_OP, True, 4, False, None),
    (NO_SHARD, False, 4, False, None),
    (FULL_SHARD, True, 4, False, 1.0),
    (SHARD_GRAD_OP, False, 4, True, 7.5),
    (NO_SHARD, True, 1, True, 0.5),
]


@on_ranks(1, 2, 3)
def test_gradients_are_those_of_one_process_over_all_tokens(world_size: int) -> None:
    """With micro-batches and ranks that have none, with and without `no_sync`, and with other divisors."""
    expected = {micro_batches: gradients_of_all(micro_batches) for micro_batches in (1, 4)}
    cases = [*enumerate(CASES)]
    for number, case in cases if world_size == 2 else cases[world_size // 2 :: 2]:
        strategy, use_orig_params, micro_batches, sync_every_time, divisor = case
        model = build(None, strategy, use_orig_params, reduce_unused=number % 3 == 2)
        model.set_gradient_divide_factor(divisor, recurse=True)
        for _ in range(2):
            accumulate(model, micro_batches, sync_every_time=sync_every_time)
            assert_equivalent(full_gradients(model), expected[micro_batches])
            model.zero_grad()


@on_ranks(4)
def test_all_replicas_of_hybrid_sharding_count() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for use_orig_params, micro_batches in ((False, 4), (True, 1)):
        model = build(None, HYBRID_SHARD, use_orig_params, device_mesh=mesh)
        accumulate(model, micro_batches, sync_every_time=False)
        assert_equivalent(full_gradients(model), gradients_of_all(micro_batches))


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@on_ranks(2)
def test_gradients_in_low_precision_are_exact_where_the_numbers_are(low: torch.dtype) -> None:
    """Integers, of which few bits are needed, and 16 tokens: neither products nor sums are rounded."""
    counts = [[1, 4], [11, 0]]
    generator = torch.Generator().manual_seed(0)
    plain = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 3))
    for param in plain.parameters():
        param.data = torch.randint(-1, 2, param.shape, generator=generator).float()
    batches = [[torch.randint(2, (n, WIDTH), generator=generator).float() for n in each] for each in counts]
    mine, own = batches[dist.get_rank()], counts[dist.get_rank()]
    models = [
        build(copy.deepcopy(plain), mixed_precision=MixedPrecision(param_dtype=low, reduce_dtype=reduce))
        for reduce in (low, torch.float32)
    ]
    plain(torch.cat([x for each in batches for x in each])).sum().div(16).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    for model in models:
        factor = fsdp.mean_factor(model, own)
        with model.no_sync():
            (model(mine[0]).sum() * factor).backward()
        (model(mine[1]).sum() * factor).backward()
        assert_bit_equal(full_gradients(model), expected)


@on_ranks(4)
def test_ranks_of_tensor_parallelism_count_as_one() -> None:
    """Where the root is over the ranks of data parallelism, and where it is over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp = mesh.get_local_rank("dp")
    for of_root in ({"device_mesh": mesh["dp"]}, {}):
        torch.manual_seed(0)
        plain = nn.Sequential(
            nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), nn.Sequential(nn.Linear(8, 8))
        ).double()
        first, cut, last = copy.deepcopy(plain)
        cut = parallelize_module(cut, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        inner = [wrap(each, FULL_SHARD, True, wrap_policy=None, device_mesh=mesh["dp"]) for each in (cut, last)]
        model = wrap(nn.Sequential(first, *inner), FULL_SHARD, True, wrap_policy=None, **of_root)
        warnings.filterwarnings("ignore", "unit '1' has DTensors over the ranks .* which the root unit is over")
        batches = [torch.randn(n, 8, generator=torch.Generator().manual_seed(n)).double() for n in (3, 8)]
        factor = fsdp.mean_factor(model, len(batches[dp]))
        (model(batches[dp]).square().sum() * factor).backward()
        plain(torch.cat(batches)).square().sum().div(3 + 8).backward()
        for of_model, of_plain in zip(model.parameters(), plain.parameters(), strict=True):
            assert_equivalent({"": fsdp.full_grad(of_model)}, {"": of_plain.grad})


@on_ranks(2)
def test_stand_ins_of_join_count_nothing() -> None:
    """Whether their gradients are left out of a mean over all ranks, or of one over the ranks with a batch."""
    rank = dist.get_rank()
    for by_all in (True, False):
        model = build()
        batches = [tokens_of(0, micro) for micro in range(4)] if rank == 0 else [tokens_of(1, 2)]
        for step, tokens in enumerate(fsdp.join(model, batches, divide_by_initial_world_size=by_all)):
            (loss_sum(model, tokens) * fsdp.mean_factor(model, len(tokens[0]))).backward()
            plain, everyone = plain_net(), [(0, step), *([(1, 2)] if step == 0 else [])]
            losses = [loss_sum(plain, tokens_of(*place)) for place in everyone]
            (torch.stack(losses).sum() / sum(TOKENS[of][micro] for of, micro in everyone)).backward()
            assert_equivalent(full_gradients(model), {name: p.grad for name, p in plain.named_parameters()})
            model.zero_grad()


@on_ranks(2)
def test_numbers_of_tokens_may_come_in_any_form_and_at_any_time() -> None:
    """As one number, numbers or tensors; before or after the forward; one message of 8 bytes."""
    rank, model = dist.get_rank(), build()
    counts = TOKENS[rank]
    labels = torch.full((2, 20), -100)
    labels.view(-1)[: sum(counts)] = 1
    forms: list[Any] = [sum(counts), float(sum(counts)), counts, torch.tensor(counts), labels != -100]
    forms += [[torch.tensor(count) for count in counts]]
    assert [fsdp.mean_factor(model, form) for form in forms] == [2 / (15 + 11)] * len(forms)
    assert fsdp.mean_factor(nn.ModuleList([model]), counts) == fsdp.mean_factor(model[0], counts) == 2 / (15 + 11)
    for _ in range(3):
        with record_collectives() as calls:
            factor = fsdp.mean_factor(model, sum(counts[:1]))
        loss = loss_sum(model, tokens_of(rank, 0))
        assert fsdp.mean_factor(model, counts[:1]) == factor
        (loss * factor).backward()
        assert_equivalent(full_gradients(model), gradients_of_all(1))
        model.zero_grad()
    assert [(record.op, record.input_numel, record.dtype) for record in calls.records] == [
        ("all_reduce", 1, torch.float64)
    ]


@on_ranks(2)
def test_numbers_without_a_mean_are_errors_on_all_ranks() -> None:
    rank, model = dist.get_rank(), build()
    for number, other, here, there in [
        (0, 0, "no rank has any tokens.*Leave the step out", "no rank has any tokens"),
        (-3, 2, "zero or more, but got -3", "another rank has passed a negative number"),
        (float("nan"), 2, "but got nan", "another rank"),
        ([1.0, float("inf")], 2, r"but got \[1.0, inf\]", "another rank"),
    ]:
        with pytest.raises(ValueError, match=here if rank == 0 else there):
            fsdp.mean_factor(model, number if rank == 0 else other)
        accumulate(model, 2, sync_every_time=False)  # nothing is left behind
        assert_equivalent(full_gradients(model), gradients_of_all(2))
        model.zero_grad()
    for wrong in (None, "7", [[1], [2, 3]], {"tokens": 7}):
        with pytest.raises(TypeError, match=f"a number of tokens, or several, but got a {type(wrong).__name__}"):
            fsdp.mean_factor(model, wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="a model with FullyShardedDataParallel in it, got Linear"):
        fsdp.mean_factor(nn.Linear(1, 1), 3)


@on_ranks(2)
def test_units_with_different_divisors_have_no_factor() -> None:
    """Unless they are frozen; divisors that are equal in all trees do."""
    model = build(use_orig_params=True)
    model[0].set_gradient_divide_factor(5)
    with pytest.raises(ValueError, match=r"those of unit '0' by 5.*recurse=True") as caught:
        fsdp.mean_factor(model, 3)
    assert "those of the root unit by 2" in str(caught.value)
    with pytest.raises(ValueError, match="divided by the same number"):
        fsdp.mean_factor(nn.ModuleList([build(), model]), 3)
    model[0].requires_grad_(False)
    assert fsdp.mean_factor(model, 4) == 2 / 8
    assert fsdp.mean_factor(nn.ModuleList([build(), build()]), 4) == 2 / 8
    model.requires_grad_(False)
    model[0].set_gradient_divide_factor(None)
    assert fsdp.mean_factor(model, 4) == 2 / 8


@pytest.mark.parametrize("used", [False, True])
@on_ranks(3)
@impatient
def test_a_rank_that_takes_no_part_is_an_error_on_every_rank(used: bool) -> None:
    """At the first use of the model and later. Afterwards the model trains."""
    rank, group = dist.get_rank(), new_group()
    model = agreeing.build(agreeing.Chain(agreeing.EQUAL), group)
    if used:
        for _ in range(2):
            fsdp.mean_factor(model, rank)
            agreeing.train(model)
    with raises_soon() as caught:
        if rank != agreeing.ODD:
            fsdp.mean_factor(model, rank)
        agreeing.train(model)
    assert "mean_factor()" in str(caught.value), caught.value
    for _ in range(2):
        assert fsdp.mean_factor(model, rank) == 3 / 3
        agreeing.train(model)


@on_ranks(2)
def test_a_call_of_a_model_that_is_offloaded_is_an_error() -> None:
    model = build()
    fsdp.offload(model)
    with pytest.raises(RuntimeError, match="offload"):
        fsdp.mean_factor(model, 3)
    fsdp.onload(model)
    assert fsdp.mean_factor(model, 3) == 2 / 6
    assert isinstance(model, FullyShardedDataParallel)
