"""Communication hooks: users' reductions instead of the collective, and torch's own hooks, on CPU too."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks

import fsdp
from fsdp import MixedPrecision
from fsdp.comm.versions import REDUCE_SCATTER
from fsdp.runtime.unit import units_in
from tests.harness.lockstep import assert_at_rest
from tests.harness.models import ZOO
from tests.harness.oracle import Schedule, adamw, assert_bit_equal, assert_close_ulp, rank_batch, run_plain
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients, full_parameters, handles_of, wrap
from tests.harness.strategies import FULL, GRAD_OP, MODES, NONE, by_turns

CASE = ZOO["mlp"]
SCHEDULE = Schedule(steps=3)
reduce_scatter = getattr(dist, REDUCE_SCATTER)


def backward(model: nn.Module, step: int = 0) -> None:
    batch = rank_batch(CASE, SCHEDULE, step, 0, dist.get_rank(), dist.get_world_size())
    CASE.loss(model, batch).backward()


class State:
    """A record of the sizes that each call got."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []


def native(state: State, grad: Tensor, shard: Tensor | None = None) -> None:
    """Sum and divide by the number of ranks, as the engine does on gloo."""
    state.seen.append((grad.numel(),) if shard is None else (grad.numel(), shard.numel()))
    out = grad if shard is None else shard
    if shard is None:
        dist.all_reduce(grad)
    else:
        reduce_scatter(shard, grad)
    out.div_(dist.get_world_size())


def local_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if param.grad is None else param.grad.clone() for name, param in model.named_parameters()}


# -- users' hooks ----------------------------------------------------------------------------------------------------


@on_ranks(1, 2, 3)
def test_hook_with_the_native_arithmetic_changes_no_bit(world_size: int) -> None:
    """The hook is called once per unit and synchronised backward, also on one rank.

    The arguments are the padded gradient and, if sharded, this rank's part of it.
    """
    os.environ["FSDP_COLLECTIVES"] = "native"
    for strategy, orig in MODES if world_size == 2 else by_turns(0)[::2]:
        case = f"{strategy.name}, use_orig_params={orig}"
        models = [wrap(CASE, strategy, orig) for _ in range(2)]
        optimizers = [adamw(model.parameters()) for model in models]
        state = State()
        models[1].register_comm_hook(state, native)
        for step in range(2):
            for model in models:
                with model.no_sync():
                    backward(model, step)
                assert len(state.seen) == step * 4
                backward(model, step)
            assert_bit_equal(local_gradients(models[1]), local_gradients(models[0]), f"{case}, step {step}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert_bit_equal(full_parameters(models[1]), full_parameters(models[0]), case)
        layouts = [bucket.layout for unit in fsdp.shard_info(models[1]) for bucket in unit.buckets]
        whole = strategy is NONE or world_size == 1
        sizes = [(layout.padded_numel,) if whole else (layout.padded_numel, layout.shard_numel) for layout in layouts]
        assert sorted(state.seen) == sorted(sizes * 2)


@on_ranks(2)
def test_hook_replaces_the_reduction() -> None:
    """The engine adds no collective and no division."""
    for strategy, orig in MODES:
        model, other = wrap(CASE, strategy, orig), wrap(CASE, strategy, orig)
        model.register_comm_hook(State(), local_only)
        backward(model)
        with record_collectives() as log:
            backward(model)
        assert log.count("reduce_scatter") == 0
        assert all(collective.nbytes <= 64 for collective in log.select("all_reduce"))
        model.zero_grad()
        backward(model)
        with other.no_sync():  # this rank's own gradients
            backward(other)
        ours, local = _parts(model), _parts(other, sharded=strategy is not NONE)
        assert_bit_equal(ours, local, f"{strategy.name}, use_orig_params={orig}")


def local_only(state: State, grad: Tensor, shard: Tensor | None = None) -> None:
    if shard is not None:
        shard.copy_(grad.chunk(dist.get_world_size())[dist.get_rank()])


def _parts(model: nn.Module, sharded: bool = False) -> dict[str, Tensor]:
    """Return each gradient's part in this rank's shard; with `sharded`, cut from unsharded gradients."""
    parts = {}
    for unit in fsdp.shard_info(model):
        for bucket in unit.buckets:
            flat = bucket.params[0] is bucket.flat_param
            for index, (record, piece) in enumerate(zip(bucket.layout.params, bucket.pieces)):
                grad = bucket.params[0 if flat else index].grad
                if piece.numel == 0:
                    continue
                assert grad is not None
                if flat and sharded:
                    part = grad[record.offset + piece.start : record.offset + piece.end]
                elif flat:
                    part = grad[piece.shard_offset : piece.shard_offset + piece.numel]
                else:
                    part = grad.flatten()[piece.start : piece.end] if sharded else grad.flatten()
                parts[unit.full_name(record)] = part.clone()
    return parts


@on_ranks(3)
def test_values_that_a_hook_leaves_in_padding_are_dropped() -> None:
    for strategy in (FULL, GRAD_OP, NONE):
        model, other = wrap(CASE, strategy), wrap(CASE, strategy)
        model.register_comm_hook(State(), noisy)
        backward(model)
        backward(other)
        gaps = 0
        for unit, plain in zip(fsdp.shard_info(model), fsdp.shard_info(other)):
            for bucket, reference in zip(unit.buckets, plain.buckets):
                ours, theirs = bucket.flat_param.grad, reference.flat_param.grad
                assert ours is not None and theirs is not None
                expected = theirs + 1
                for start, end in bucket.layout.shard_gaps(bucket.rank):
                    gaps += end - start
                    expected[start:end] = 0
                torch.testing.assert_close(ours, expected)  # of terms near 1, so nothing cancels
        assert gaps or strategy is NONE or dist.get_rank() < 2


def noisy(state: State, grad: Tensor, shard: Tensor | None = None) -> None:
    grad.add_(1.0)
    native(state, grad, shard)


@on_ranks(2)
def test_hook_may_replace_the_data_of_gradients() -> None:
    """torch's compressing hooks assign `.data` of their arguments."""
    for strategy, orig in MODES:
        models = [wrap(CASE, strategy, orig) for _ in range(3)]
        for model, hook in zip(models[1:], (replacing, cloning)):
            model.register_comm_hook(State(), hook)
        for step in range(2):
            for model in models:
                backward(model, step)
        for model in models[1:]:
            # the sum of two float32 numbers in float64, rounded, is the float32 sum
            assert_bit_equal(local_gradients(model), local_gradients(models[0]), f"{strategy.name}, {orig}")
            assert_at_rest(model, f"{strategy.name}, {orig}")


def replacing(state: State, grad: Tensor, shard: Tensor | None = None) -> None:
    grad.data = grad.data.double()
    if shard is not None:
        shard.data = torch.empty_like(shard.data, dtype=torch.float64)
    native(state, grad, shard)
    result = grad if shard is None else shard
    result.data = result.data.float()


def cloning(state: State, grad: Tensor, shard: Tensor | None = None) -> None:
    grad.data = grad.data.clone()
    native(state, grad, shard)


# -- torch's hooks ---------------------------------------------------------------------------------------------------


@on_ranks(2, 3)
def test_torchs_default_hooks_reduce_as_the_native_path(world_size: int) -> None:
    """Bit-equal on 2 ranks; on 3, where torch divides by 2 and 1.5, within the bound of rounding."""
    for strategy, orig in MODES if world_size == 2 else by_turns(0)[::2]:
        model, other = wrap(CASE, strategy, orig), wrap(CASE, strategy, orig)
        hook = default_hooks.allreduce_hook if strategy is NONE else default_hooks.reduce_scatter_hook
        model.register_comm_hook(default_hooks.DefaultState(dist.group.WORLD), hook)
        assert not model._low_precision_hook_enabled()
        backward(model)
        backward(other)
        ours, theirs = full_gradients(model), full_gradients(other)
        if dist.get_world_size() == 2:
            assert_bit_equal(ours, theirs)
        else:  # three terms, each divided, and the sum divided once more, on either side
            terms = run_plain(CASE, adamw, dist.get_world_size(), dataclasses.replace(SCHEDULE, steps=1))[0].summed
            assert_close_ulp(ours, theirs, 2 * (1 + 0.5 + 0.5), summed=terms)


@on_ranks(1, 2, 3)
def test_torchs_compressing_hooks_work_on_cpu(world_size: int) -> None:
    """Gradients are cast to 16 bits, divided, summed, divided and cast back, with both call forms.

    On 1 and 2 ranks bit-equal to that arithmetic on the plain model's gradients; on 3 the backend chooses the order of
    the sum: within 2 ulp of 16 bits.
    """
    for hook, dtype in (
        (default_hooks.fp16_compress_hook, torch.float16),
        (default_hooks.bf16_compress_hook, torch.bfloat16),
    ):
        per_rank = []
        for rank in range(world_size):
            plain = CASE.build()
            CASE.loss(plain, rank_batch(CASE, SCHEDULE, 0, 0, rank, world_size)).backward()
            per_rank.append({name: param.grad for name, param in plain.named_parameters()})
        state = default_hooks.LowPrecisionState(dist.group.WORLD)
        expected, summed = {}, {}
        for name in per_rank[0]:
            summed[name] = torch.stack([grads[name] for grads in per_rank]).abs().sum(0) / world_size
            low = [grads[name].to(dtype) / state.gradient_predivide_factor for grads in per_rank]
            expected[name] = (functools.reduce(torch.add, low) / state.gradient_postdivide_factor).float()
        for strategy, orig in MODES if world_size == 2 else by_turns(dtype == torch.float16)[::2]:
            model = wrap(CASE, strategy, orig)
            model.register_comm_hook(state, hook)
            assert model._low_precision_hook_enabled() and model.head is not None
            backward(model)
            grads = full_gradients(model)
            what = f"{hook.__name__}, {strategy.name}, use_orig_params={orig}"
            if world_size < 3:
                assert_bit_equal(grads, expected, what)
            else:
                ours = {name: None if grad is None else grad.to(dtype) for name, grad in grads.items()}
                assert_bit_equal({n: None if g is None else g.float() for n, g in ours.items()}, grads, what)
                assert_close_ulp(ours, expected, 2, what, summed=summed)


@on_ranks(2)
def test_dtypes_of_hooks_under_mixed_precision() -> None:
    """Users' hooks get gradients in the reduce dtype, compressing hooks in the dtype of the computation.

    Compressing hooks decide about the dtype of `.grad`, so gradients are not rounded to bfloat16 again.
    """
    half, single = torch.bfloat16, torch.float32
    for strategy, orig in MODES:
        reference = wrap(CASE, strategy, orig, mixed_precision=MixedPrecision(half, single))
        state = Dtypes()
        reference.register_comm_hook(state, by_hand)
        backward(reference)
        assert state.seen == {single}
        expected = local_gradients(reference)
        for keep in (False, True):
            model = wrap(CASE, strategy, orig, mixed_precision=MixedPrecision(half, keep_low_precision_grads=keep))
            model.register_comm_hook(
                default_hooks.LowPrecisionState(dist.group.WORLD), default_hooks.fp16_compress_hook
            )
            backward(model)
            assert_bit_equal(local_gradients(model), expected, f"{strategy.name}, use_orig_params={orig}, keep={keep}")
            model.zero_grad()
            model.double().float()
            assert {handle.layout.reduce_dtype for handle in handles_of(model)} == {single}
            backward(model)
            assert_bit_equal(local_gradients(model), expected, f"{strategy.name}, use_orig_params={orig}, cast")
        model = wrap(CASE, strategy, orig, mixed_precision=MixedPrecision(half, keep_low_precision_grads=True))
        state = Dtypes()
        model.register_comm_hook(state, by_hand)
        backward(model)
        assert state.seen == {half}
        assert {grad.dtype for grad in local_gradients(model).values() if grad is not None} == {half}


class Dtypes:
    def __init__(self) -> None:
        self.seen: set[torch.dtype] = set()


def by_hand(state: Dtypes, grad: Tensor, shard: Tensor | None = None) -> None:
    """Compute the result of `fp16_compress_hook`."""
    state.seen.add(grad.dtype)
    low = grad.half() / 2
    dist.all_reduce(low)
    if shard is None:
        grad.copy_(low)
    else:
        shard.copy_(low.chunk(2)[dist.get_rank()])


# -- failures and invalid hooks --------------------------------------------------------------------------------------


class Refusal(Exception):
    pass


class Fragile:
    """A hook that fails once, at the `at`-th call."""

    def __init__(self, at: int) -> None:
        self.remaining = at

    def __call__(self, state: State, grad: Tensor, shard: Tensor | None = None) -> None:
        native(state, grad, shard)
        self.remaining -= 1
        if self.remaining == 0:
            raise Refusal("not today")


@on_ranks(2)
def test_hook_that_raises_is_named_and_leaves_no_state() -> None:
    """The error names the hook, the unit and the cause, and the next steps are right."""
    for strategy, orig in ((FULL, True), (FULL, False), (NONE, False)):
        for at in (1, 4):
            model, other = wrap(CASE, strategy, orig), wrap(CASE, strategy, orig)
            optimizers = adamw(model.parameters()), adamw(other.parameters())
            other.register_comm_hook(State(), native)
            model.register_comm_hook(State(), Fragile(at))
            unit = {1: "the root unit", 4: "unit 'blocks.0'"}[at]
            with pytest.raises(
                RuntimeError, match=f"reduce {unit}: communication hook .*Fragile.* raised Refusal: not t"
            ) as e:
                backward(model)
            assert isinstance(e.value.__cause__, Refusal)
            assert all(param.grad is None for param in model.parameters())
            for step in range(2):
                backward(model, step)
                backward(other, step)
                assert_bit_equal(local_gradients(model), local_gradients(other))
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                assert_at_rest(model, f"{strategy.name}, {orig}, call {at}")
                for gradients in (g for _, u, _ in units_in(model) for g in u.gradients):
                    scratch = gradients._scratch
                    assert scratch is None or scratch.flat.untyped_storage().nbytes() == 0


def gives_a_number(state: Any, grad: Tensor, shard: Tensor | None = None) -> Any:
    return 3


def gives_a_future(state: Any, grad: Tensor, shard: Tensor | None = None) -> Any:
    """Return a future, as hooks of DistributedDataParallel do."""
    return torch.futures.Future()


def leaves_another_shape(state: Any, grad: Tensor, shard: Tensor | None = None) -> None:
    (grad if shard is None else shard).data = torch.zeros(2)


def in_place(state: Any, grad: Tensor, shard: Tensor | None = None) -> Tensor:
    """Return the argument, as an in-place operation does."""
    if shard is None:
        return grad.mul_(2)
    return shard.copy_(grad.chunk(dist.get_world_size())[dist.get_rank()])


def does_nothing(state: Any, grad: Tensor, shard: Tensor | None = None) -> None:
    pass


@on_ranks(2)
def test_invalid_results_of_hooks_are_refused() -> None:
    """A hook may return None or its argument; a shard that it did not fill is NaN."""
    for strategy, orig in ((FULL, True), (FULL, False), (NONE, False)):
        refused: list[tuple[Callable[..., Any], type[Exception], str]] = [
            (gives_a_number, TypeError, "returned a int, and a hook returns None"),
            (gives_a_future, TypeError, "returned a Future, and a hook returns None"),
            (leaves_another_shape, ValueError, r"left a tensor of shape \(2,\) .* as the reduced gradient"),
        ]
        for hook, kind, match in refused:
            model = wrap(CASE, strategy, orig)
            model.register_comm_hook(None, hook)
            with pytest.raises(kind, match=f"reduce the root unit: communication hook {hook.__name__} {match}"):
                backward(model)
        model = wrap(CASE, strategy, orig)
        model.register_comm_hook(None, in_place)
        backward(model)
        assert all(grad is None or grad.isfinite().all() for grad in local_gradients(model).values())
        model = wrap(CASE, FULL, orig)
        model.register_comm_hook(None, does_nothing)
        backward(model)
        assert all(grad is None or grad.isnan().all() for grad in _parts(model).values())


@on_ranks(2)
def test_invalid_hooks_are_not_registered() -> None:
    """The error names the expected signature; a valid hook can be registered afterwards, once."""
    model = wrap(CASE, FULL)
    assert model.check_is_root()
    with pytest.raises(AssertionError, match="can only be called on a root instance"):
        model.blocks[0].register_comm_hook(None, native)
    with pytest.raises(ValueError, match="Expected the communication hook to be callable but got 3"):
        model.register_comm_hook(None, 3)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"takes_no_shard\(.*the root unit is sharded, so it is called with \(state, grad"
    ):
        model.register_comm_hook(None, takes_no_shard)
    with pytest.raises(TypeError, match=r"the root unit is not sharded: \(state, grad\); missing a required argument"):
        wrap(CASE, NONE).register_comm_hook(None, default_hooks.reduce_scatter_hook)
    state = State()
    model.register_comm_hook(state, native)
    with pytest.raises(AssertionError, match="a communication hook is already registered"):
        model.register_comm_hook(None, native)
    backward(model)
    assert len(state.seen) == 4
    for instance in fsdp.FullyShardedDataParallel.fsdp_modules(model):
        assert instance._comm_hook is native and instance._comm_hook_state is state


def takes_no_shard(state: Any, grad: Tensor) -> None:
    pass


@on_ranks(2)
def test_hook_on_some_ranks_only_raises() -> None:
    """The collectives of the hook would hang."""
    model = wrap(CASE, FULL)
    if dist.get_rank() == 0:
        model.register_comm_hook(State(), native)
    with pytest.raises(RuntimeError, match=r"reduced in torch\.float32, by a communication hook"):
        backward(model)
