"""`clip_grad_norm_`: one norm of all gradients, equal on every rank, over sharded, replicated and ignored
parameters.

Gradients come from real backwards. The oracle takes the same gradients in full shapes and float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Gain, MlpBlock, Net
from tests.harness.oracle import assert_bit_equal, clean_name
from tests.harness.pairs import pairwise
from tests.harness.passes import HostReads
from tests.harness.pool import of_all_ranks, on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients, wrap
from tests.harness.small import torchs
from tests.harness.strategies import FULL, NONE

ORDERS = (2.0, 1.0, math.inf, 0.5, 3.0, -1.0)
WIDTH = 7


def plain_model() -> nn.Module:
    """Build parameters of the root, two blocks, a unit of one element, a frozen and an unused parameter."""
    return Net(
        lambda m, x: m.head(m.scale(m.second(m.first(m.embed(x)))) * m.frozen),
        embed=nn.Linear(WIDTH, WIDTH),
        first=MlpBlock(WIDTH, 13),
        second=MlpBlock(13, 11),
        scale=Gain(),
        frozen=nn.Parameter(torch.ones(11), requires_grad=False),
        unused=nn.Parameter(torch.ones(3)),
        head=nn.Linear(11, 5),
    )


UNITS = {MlpBlock, Gain}
TREES = ("sharded", "mixed", "mixed, whole root", "replicated")


def build(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(3)
    return plain_model().to(dtype)


def tree(kind: str, orig: bool, dtype: torch.dtype = torch.float32, **options: Any) -> FullyShardedDataParallel:
    model = build(dtype)
    policy = ModuleWrapPolicy(UNITS)
    if kind == "mixed":
        model.second = wrap(model.second, NONE, orig, wrap_policy=None)
        model.first = wrap(model.first, FULL, orig, wrap_policy=None)
        model.scale = wrap(model.scale, FULL, orig, wrap_policy=None)
        return wrap(model, FULL, orig, wrap_policy=None, **options)
    if kind == "mixed, whole root":
        model.first = wrap(model.first, FULL, orig, wrap_policy=None)
        return wrap(model, NONE, orig, wrap_policy=None, **options)
    return wrap(model, NONE if kind == "replicated" else FULL, orig, wrap_policy=policy, **options)


def backward(model: nn.Module, seed: int | None = None, dtype: torch.dtype = torch.float32) -> None:
    """Run one pass over a batch that differs by rank, or with `seed` is equal on all."""
    generator = torch.Generator().manual_seed(100 + (dist.get_rank() if seed is None else seed))
    x = torch.randn(4, WIDTH, generator=generator).to(dtype)
    (model(x).square().sum() * 10).backward()


def oracle(grads: Iterable[Tensor | None], p: float) -> float:
    """Compute the p-norm of all elements of all gradients in float64."""
    elements = torch.cat([grad.detach().double().flatten() for grad in grads if grad is not None])
    return float(torch.linalg.vector_norm(elements, p))


def ranks_agree(norm: Tensor) -> None:
    norms = of_all_ranks((norm.dtype, norm.double().numpy().tobytes()))
    assert len(set(norms)) == 1, norms


def padding_is_zero(model: nn.Module) -> None:
    for bucket in (bucket for unit in fsdp.shard_info(model) for bucket in unit.buckets):
        grad = bucket.flat_param.grad
        for start, end in bucket.layout.shard_gaps(bucket.rank) if grad is not None else ():
            assert not grad[start:end].any()


def local_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Copy this rank's gradients."""
    return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


# -- the norm --------------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_norms_of_all_orders_and_trees(world_size: int) -> None:
    """Within 1e-6 of float64 and bit-equal on every rank; clipped gradients are the gradients times the factor."""
    for number, kind in enumerate(TREES):
        orig = (number + world_size) % 2 == 0
        model = tree(kind, orig)
        backward(model)
        everything = full_gradients(model)
        before = local_gradients(model)
        for p in ORDERS:
            expected = oracle(everything.values(), p)
            max_norm = expected * 0.37
            norm = model.clip_grad_norm_(max_norm, norm_type=p)
            case = f"{kind}, use_orig_params={orig}, p={p}"
            assert norm.dtype == torch.float32 and norm.shape == (), case
            assert float(norm) == pytest.approx(expected, rel=1e-6), case
            ranks_agree(norm)
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            assert_bit_equal(local_gradients(model), {name: grad * factor for name, grad in before.items()}, case)
            padding_is_zero(model)
            for name, param in model.named_parameters():
                if param.grad is not None:
                    param.grad.copy_(before[name])
        model.clip_grad_norm_(1e9)
        assert_bit_equal(local_gradients(model), before, f"{kind}: below the bound nothing changes")


@on_ranks(2)
def test_norm_has_at_least_float32() -> None:
    """Gradients in 16 bits have a float32 norm, float64 gradients a float64 norm."""
    for dtype, result, bound in (
        (torch.bfloat16, torch.float32, 1e-6),
        (torch.float16, torch.float32, 1e-6),
        (torch.float64, torch.float64, 1e-14),
    ):
        for orig in (True, False):
            model = tree("mixed", orig, dtype)
            backward(model, dtype=dtype)
            before = full_gradients(model)
            norm = model.clip_grad_norm_(0.5)
            assert norm.dtype == result
            assert float(norm) == pytest.approx(oracle(before.values(), 2.0), rel=bound)
            ranks_agree(norm)
            factor = (0.5 / (norm + 1e-6)).to(dtype)
            scaled = {name: None if grad is None else grad * factor for name, grad in before.items()}
            assert_bit_equal(full_gradients(model), scaled)


@on_ranks(2)
def test_norm_of_low_precision_gradients_has_float32() -> None:
    """`keep_low_precision_grads` leaves bfloat16 gradients on float32 parameters."""
    for keep in (True, False):
        for orig in (True, False):
            precision = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=keep)
            model = tree("sharded", orig, mixed_precision=precision)
            backward(model)
            before = local_gradients(model)
            assert {grad.dtype for grad in before.values()} == {torch.bfloat16 if keep else torch.float32}
            expected = oracle(full_gradients(model).values(), 2.0)
            norm = model.clip_grad_norm_(0.5)
            assert norm.dtype == torch.float32 and float(norm) == pytest.approx(expected, rel=1e-6)
            ranks_agree(norm)
            factor = 0.5 / (norm + 1e-6)
            scaled = {name: grad * factor.to(grad.dtype) for name, grad in before.items()}
            assert_bit_equal(local_gradients(model), scaled)
    precision = MixedPrecision(param_dtype=torch.float64, keep_low_precision_grads=True)
    model = tree("sharded", False, mixed_precision=precision)
    backward(model)
    assert model.clip_grad_norm_(0.5).dtype == torch.float64


@on_ranks(2)
def test_norm_of_complex_and_mixed_dtypes() -> None:
    """A unit with float32, float64 and complex parameters has a float64 norm."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return x * (m.one.sum() + m.two.square().sum() + (m.three * m.three).abs().sum())

    for orig in (True, False):
        for p in (1.0, 2.0, math.inf, 3.0):
            sizes = {"one": (5, torch.float32), "two": (3, torch.float64), "three": (7, torch.complex64)}
            generator = torch.Generator().manual_seed(1)
            params = {n: torch.randn(size, generator=generator, dtype=dtype) for n, (size, dtype) in sizes.items()}
            net = Net(forward, **{name: nn.Parameter(value) for name, value in params.items()})
            model = wrap(net, FULL, orig, wrap_policy=None)
            model(torch.tensor(1.0 + dist.get_rank())).backward()
            before = full_gradients(model)
            expected = oracle((grad.abs() for grad in before.values() if grad is not None), p)
            norm = model.clip_grad_norm_(0.1, p)
            assert norm.dtype == torch.float64 and float(norm) == pytest.approx(expected, rel=1e-6)
            ranks_agree(norm)
            after = full_gradients(model)
            assert oracle((g.abs() for g in after.values() if g is not None), p) == pytest.approx(0.1, rel=1e-5)


@on_ranks(1)
def test_long_vectors_are_summed_accurately() -> None:
    """Float32 sums along 3 million elements are off by more than 1e-5."""
    grad = torch.randn(3_000_000, generator=torch.Generator().manual_seed(0))
    assert abs(float(torch.linalg.vector_norm(grad, 1)) / oracle([grad], 1) - 1) > 1e-5
    model = wrap(nn.Linear(3000, 1000, bias=False), FULL, wrap_policy=None)
    for p in (1.0, 2.0, 3.0):
        model.params[0].grad = grad.clone()
        assert float(model.clip_grad_norm_(math.inf, p)) == pytest.approx(oracle([grad], p), rel=1e-7)
    assert torch.equal(model.params[0].grad, grad)


@on_ranks(3)
def test_rank_without_gradients_takes_part() -> None:
    """There is no warning, and later norms are as before."""
    for orig in (True, False):
        for p in (math.inf, 2.0):
            model = tree("sharded", orig)
            backward(model)
            everything = oracle(full_gradients(model).values(), p)
            own = [param.grad for param in model.parameters() if param.grad is not None]
            if dist.get_rank() == 1:
                model.zero_grad()
            kept = of_all_ranks([] if dist.get_rank() == 1 else [grad.clone() for grad in own])
            norm = model.clip_grad_norm_(1.0, p)
            assert float(norm) == pytest.approx(oracle([grad for grads in kept for grad in grads], p), rel=1e-6)
            ranks_agree(norm)
            model.zero_grad()
            norm = model.clip_grad_norm_(1.0, p)
            assert norm.dtype == torch.float32 and float(norm) == 0
            backward(model)
            assert float(model.clip_grad_norm_(1.0, p)) == pytest.approx(everything, rel=1e-6)


@on_ranks(3)
def test_nonfinite_gradient_on_one_rank_is_seen_by_all() -> None:
    """`error_if_nonfinite` raises on all ranks and changes no gradient."""
    trees = {way: tree(*way) for way in (("sharded", True), ("sharded", False), ("mixed", True))}
    for way, bad, p, culprit in pairwise([*trees], (math.nan, math.inf, -math.inf), (1.0, 2.0, math.inf), (0, 2)):
        model = trees[way]
        model.zero_grad()
        backward(model)
        if dist.get_rank() == culprit:
            part = model.first._fsdp_unit.views[0].grad_parts()[-1]
            part[-1] = bad
        before = local_gradients(model)
        with pytest.raises(RuntimeError, match=r"the total norm of order .* is (nan|inf), so they cannot"):
            model.clip_grad_norm_(1.0, p, error_if_nonfinite=True)
        assert_bit_equal(local_gradients(model), before)
        norm = model.clip_grad_norm_(1.0, p)
        assert math.isnan(norm) if math.isnan(bad) else math.isinf(norm), (way, bad, p)
        ranks_agree(norm)
        padding_is_zero(model)


# -- ignored parameters, groups and collectives ----------------------------------------------------------------------


@on_ranks(2)
def test_ignored_parameters_count_once() -> None:
    """Where their gradients differ by rank, every rank still clips alike."""
    rank = dist.get_rank()
    for strategy, orig, p in pairwise((FULL, NONE), (True, False), (2.0, math.inf)):
        plain = build()
        policy = ModuleWrapPolicy(UNITS)
        model = wrap(plain, strategy, orig, wrap_policy=policy, ignored_modules=[plain.head])
        backward(model)
        managed = [grad for grad in full_gradients(model).values() if grad is not None]
        for step in ("equal", "different"):
            for param in plain.head.parameters():
                param.grad = torch.full_like(param, 2.0 if step == "equal" else 2.0 + rank)
            ignored = torch.cat([param.grad.flatten() for param in plain.head.parameters()])
            if step == "equal":
                expected = oracle([*managed, ignored], p)
            elif p == 2.0:
                mean = (torch.full_like(ignored, 2.0).square() + torch.full_like(ignored, 3.0).square()) / 2
                expected = oracle([*managed, mean.sqrt()], p)
            else:
                expected = oracle([*managed, torch.tensor([3.0])], p)
            with record_collectives() as log:
                norm = model.clip_grad_norm_(math.inf, p)
            assert float(norm) == pytest.approx(expected, rel=1e-6), (strategy, orig, p, step)
            assert log.ops() == ["all_reduce"]
            ranks_agree(norm)
        model.clip_grad_norm_(expected / 4, p)
        torch.testing.assert_close(plain.head.bias.grad, torch.full_like(plain.head.bias, (2.0 + rank) / 4))


@on_ranks(4)
def test_units_sharded_over_subgroups() -> None:
    """Norms of units sharded over a pair are summed over the pair, the remaining norms over all four ranks. The pairs
    hold copies, as the divisor says."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair = pairs[dist.get_rank() // 2]
    for orig, p in ((True, 2.0), (False, 1.0), (True, math.inf)):
        model = build()
        model.first = wrap(model.first, FULL, orig, wrap_policy=None, process_group=pair)
        model.first.set_gradient_divide_factor(2)
        wrapped = wrap(model, FULL, orig, wrap_policy=None)
        backward(wrapped, seed=0)
        plain = build()
        backward(plain, seed=0)
        with record_collectives() as log:
            norm = wrapped.clip_grad_norm_(1.0, p)
        assert log.ops() == ["all_reduce"] * 2
        assert float(norm) == pytest.approx(oracle((param.grad for param in plain.parameters()), p), rel=2e-6)
        ranks_agree(norm)
        # Pairs with different data have different gradients of the units they share, and still clip alike.
        wrapped.zero_grad()
        backward(wrapped)
        inner = [param for param in wrapped.first.parameters() if param.grad is not None]
        outer = [param for param in wrapped.parameters() if param.grad is not None and param not in set(inner)]
        held = of_all_ranks([[param.grad.clone() for param in params] for params in (inner, outer)])
        norm = wrapped.clip_grad_norm_(1.0, p)
        ranks_agree(norm)
        first, second = (oracle([*held[rank][0], *held[rank + 1][0]], p) for rank in (0, 2))
        rest = oracle([grad for grads in held for grad in grads[1]], p)
        assert first != second
        expected = max(first, second, rest)
        if p != math.inf:
            expected = ((first**p + second**p) / 2 + rest**p) ** (1 / p)
        assert float(norm) == pytest.approx(expected, rel=1e-6)
    for group in pairs:
        if group is pair:
            dist.destroy_process_group(group)


@on_ranks(2)
def test_clipping_does_not_synchronize_the_host() -> None:
    for kind in ("mixed", "replicated"):
        for p in ORDERS:
            model = tree(kind, False)
            backward(model)
            with HostReads() as reads:
                norm = model.clip_grad_norm_(1.0, p)
            assert reads.count == 0
            with HostReads() as reads:
                norm.item()
            assert reads.count == 1


# -- the references --------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_norm_and_gradients_equal_torchs_fsdp1() -> None:
    """Float32 sums as short as these are within 1e-6."""
    for p, strategy, orig in (
        (2.0, "FULL_SHARD", True),
        (1.0, "FULL_SHARD", False),
        (0.5, "SHARD_GRAD_OP", True),
        (2.0, "SHARD_GRAD_OP", False),
        (math.inf, "NO_SHARD", True),
    ):
        theirs = torchs(_trainable(), strategy, UNITS, use_orig_params=orig)
        ours = wrap(_trainable(), ShardingStrategy[strategy], orig, wrap_policy=ModuleWrapPolicy(UNITS))
        backward(theirs)
        backward(ours)
        expected = theirs.clip_grad_norm_(1.5, p)
        torch.testing.assert_close(ours.clip_grad_norm_(1.5, p), expected, rtol=1e-6, atol=0)
        with theirs.summon_full_params(theirs, with_grads=orig):
            named = {clean_name(name): param for name, param in theirs.named_parameters()}
            if orig:
                grads = full_gradients(ours)
                for name, param in named.items():
                    torch.testing.assert_close(grads[name], param.grad, rtol=1e-5, atol=1e-6)
                assert grads.keys() == named.keys()


def _trainable() -> nn.Module:
    model = build()
    del model.unused
    model.frozen.requires_grad_(True)
    return model


# -- errors and warnings ---------------------------------------------------------------------------------------------


@on_ranks(2)
def test_invalid_calls_are_refused() -> None:
    for orig in (True, False):
        model = tree("sharded", orig)
        backward(model)
        before = full_gradients(model)
        with pytest.raises(RuntimeError, match="should only be called on the root FSDP instance"):
            model.first.clip_grad_norm_(1.0)
        for kind in (ValueError, ZeroDivisionError):
            with pytest.raises(kind, match="norm_type=0: there is no such norm"):
                model.clip_grad_norm_(1.0, 0)
        for p in (math.nan, -math.inf):
            with pytest.raises(ValueError, match="expected a number other than 0"):
                model.clip_grad_norm_(1.0, p)
        with (
            FullyShardedDataParallel.summon_full_params(model),
            pytest.raises(ValueError, match="expected to be in st"),
        ):
            model.clip_grad_norm_(1.0)
        inner = FullyShardedDataParallel.summon_full_params(model.first, recurse=False)
        with inner, pytest.raises(ValueError, match=r"unit 'first' is in .*expected to be in states"):
            model.clip_grad_norm_(1.0)
        assert_bit_equal(full_gradients(model), before)
        with model.no_sync():
            backward(model)
        with pytest.raises(RuntimeError, match=r"unsharded gradients from no_sync\(\)"):
            model.clip_grad_norm_(1.0)
        backward(model)
        assert float(model.clip_grad_norm_(1.0)) > 0
