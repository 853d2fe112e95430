"""Mixed precision computes with the current values of the shards, in the configured dtypes.

The reference is the plain model: a float32 master copy that is trained and written like the shards, and a replica in
the compute dtype for each forward. Outputs, gradients and shards are compared bit for bit.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

from fsdp import FullyShardedDataParallel, MixedPrecision
from fsdp.comm import host_memory
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.lockstep import assert_at_rest, assert_local_gradients, assert_local_parameters
from tests.harness.meter import Meter, needs_meter
from tests.harness.oracle import assert_bit_equal, named_parameters
from tests.harness.pool import on_ranks
from tests.harness.precision import BF16, FP32, FP64, WIDTH, Block, Pair, by_foreach, loss_of, same
from tests.harness.sharded import full_gradients, wrap
from tests.harness.strategies import FULL, GRAD_OP, MODES, NONE, STRATEGIES

OTHER_MODES = [(FULL, False), (FULL, True), (GRAD_OP, False), (NONE, True)]

# -- writes to the shards -----------------------------------------------------------------------------------------


def by_copy(params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.copy_(param * 0.875)


def by_new_data(params: list[nn.Parameter]) -> None:
    for param in params:
        param.data = param.data * 1.125


def by_data_in_place(params: list[nn.Parameter]) -> None:
    for param in params:
        param.data.mul_(0.9375)


def by_numpy(params: list[nn.Parameter]) -> None:
    """Write without a new version counter, like an optimizer in C++ or CUDA."""
    for param in params:
        version = param._version
        array = param.detach().numpy()
        array *= 1.0625
        assert param._version == version


WRITERS: list[Callable[[list[nn.Parameter]], None]] = [by_copy, by_new_data, by_data_in_place, by_numpy, by_foreach]


@on_ranks(2)
def test_forward_uses_every_kind_of_write_to_the_shards() -> None:
    """By an optimizer, `.data`, `copy_`, numpy, `summon_full_params` and `.double()`."""
    for strategy, use_orig_params in MODES:
        pair = Pair(strategy, use_orig_params)
        for cycle in range(2):
            for writer in WRITERS:
                case = f"{strategy.name}, {use_orig_params=}, cycle {cycle}, {writer.__name__}"
                pair.step(case)
                if cycle:  # gathered and cast values are outdated, too
                    pair.check_output(f"{case}, before")
                    pair.model(pair.inputs()[dist.get_rank()])
                for params in (pair.model.parameters(), pair.plain.parameters()):
                    writer(list(params))
                if cycle:
                    pair.check_output(f"{case}, after")
            with FullyShardedDataParallel.summon_full_params(pair.model, writeback=True):
                by_copy(list(pair.model.parameters()))
            by_copy(list(pair.plain.parameters()))
            pair.step(f"{strategy.name}, {use_orig_params=}, cycle {cycle}, summon_full_params")
            for dtype in (FP64, FP32):
                pair.model.to(dtype)
                pair.plain.to(dtype)
                pair.step(f"{strategy.name}, {use_orig_params=}, cycle {cycle}, {dtype}")
        assert_at_rest(pair.model, strategy.name)


# -- full precision in eval mode -----------------------------------------------------------------------------------

STAGES = ("train", "train, no_grad", "eval", "eval, no_grad", "eval, inference")
full_precision_in_eval = partial(mock.patch.dict, os.environ, FSDP_USE_FULL_PREC_IN_EVAL="1")


def run_stage(pair: Pair, stage: str, case: str) -> None:
    pair.model.train(stage.startswith("train"))
    dtype = BF16 if stage.startswith("train") else None
    if stage in ("train", "eval"):
        pair.step(case, dtype=dtype)
    elif stage.endswith("no_grad"):
        pair.check_output(case, dtype)
    else:
        inputs = pair.inputs()
        with torch.inference_mode():
            output = pair.model(inputs[dist.get_rank()])
        same(output, pair.outputs(inputs, dtype)[dist.get_rank()], case)
    assert pair.net.seen() == {dtype or FP32}, case
    assert pair.net.blocks[0].turn.dtype == (dtype or FP32), case


@on_ranks(1, 2)
@full_precision_in_eval()
def test_full_precision_evaluation_between_training_in_any_order(world_size: int) -> None:
    """Parameters, buffers and inputs have the dtype of the mode; gradients in eval mode are float32."""
    for strategy, use_orig_params in OTHER_MODES:
        for seed in range(2):
            order = random.Random(f"{seed}/{strategy}").sample(STAGES * 2, 2 * len(STAGES))
            if seed == 0:
                order = list(reversed(STAGES))  # begins with a forward in inference mode
            pair = Pair(strategy, use_orig_params)
            for index, stage in enumerate(order):
                run_stage(pair, stage, f"{strategy.name}, {use_orig_params=}, {order[: index + 1]}")
            assert_at_rest(pair.model, strategy.name)


@on_ranks(2)
@full_precision_in_eval()
def test_graphs_of_train_and_eval_mode_coexist() -> None:
    """Each backward uses the precision of its forward; one backward of both graphs is refused."""
    rank = dist.get_rank()

    def forwards() -> tuple[Tensor, Tensor]:
        trained = pair.model(first[rank])
        pair.model.eval()
        return trained, pair.model(second[rank])

    for strategy, use_orig_params in MODES:
        pair, case = Pair(strategy, use_orig_params), f"{strategy.name}, {use_orig_params=}"
        first, second = pair.inputs(), pair.inputs()
        trained, evaluated = forwards()
        pair.check_output(case, None)
        loss_of(trained).backward()
        assert_local_gradients(pair.model, pair.gradients(first, BF16), 0, f"{case}, train")
        pair.model.zero_grad()
        pair.model.train()
        loss_of(evaluated).backward()
        assert_local_gradients(pair.model, pair.gradients(second, None), 0, f"{case}, eval")
        pair.model.zero_grad()
        pair.step(f"{case}, afterwards")
        trained, evaluated = forwards()
        pair.model.train()
        with pytest.raises(RuntimeError, match="mixed and in full precision at once"):
            (loss_of(trained).float() + loss_of(evaluated)).backward()
        pair.model.zero_grad()
        pair.step(f"{case}, after the error")


@on_ranks(1)
def test_full_precision_in_eval_is_chosen_at_wrapping() -> None:
    """Units of one tree with different choices are refused; without the switch eval mode uses mixed precision."""
    with full_precision_in_eval():
        inner = wrap(Block(), mixed_precision=MixedPrecision(BF16))
    outer = wrap(nn.Sequential(inner, nn.Linear(WIDTH, 3)), mixed_precision=MixedPrecision(BF16))
    assert inner._use_full_prec_in_eval and not outer._use_full_prec_in_eval
    with pytest.raises(ValueError, match="use_full_prec_in_eval"):
        outer(torch.ones(2, WIDTH))
    for strategy, use_orig_params in MODES:  # without the variable
        pair = Pair(strategy, use_orig_params)
        with full_precision_in_eval():
            pair.model.eval()
            pair.step("evaluated")
            pair.check_output("evaluated")
        assert pair.net.seen() == {BF16}


# -- summoned ------------------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_summoned_parameters_have_full_precision(world_size: int) -> None:
    """Forwards inside use them; writes are kept or dropped as without mixed precision."""
    rank = dist.get_rank()
    for strategy in STRATEGIES if world_size > 1 else (FULL,):
        for use_orig_params in (False, True):
            pair, case = Pair(strategy, use_orig_params), f"{strategy.name}, {use_orig_params=}"
            summoned = FullyShardedDataParallel.summon_full_params
            pair.step(case)
            for writeback in (True, False):
                first, second = pair.inputs(), pair.inputs()
                with summoned(pair.model, writeback=writeback):
                    assert pair.net.blocks[0].turn.dtype == BF16
                    shown = {n: p.detach().clone() for n, p in named_parameters(pair.model).items()}
                    assert_bit_equal(shown, {n: p.detach() for n, p in named_parameters(pair.plain).items()}, case)
                    by_copy(list(pair.model.parameters()))
                    by_copy(list(pair.plain.parameters()))
                    output = pair.model(first[rank])
                    same(output, pair.outputs(first, None)[rank], f"{case}, inside")
                    expected = pair.gradients(first, None)
                    by_new_data(list(pair.model.parameters()))
                    by_new_data(list(pair.plain.parameters()))
                    with torch.inference_mode():
                        same(pair.model(second[rank]), pair.outputs(second, None)[rank], f"{case}, inside, written")
                assert pair.net.blocks[0].turn.dtype == BF16
                assert pair.net.seen() >= {FP32}
                if not writeback and strategy is not NONE and dist.get_world_size() > 1:  # live tensors otherwise
                    pair.plain.load_state_dict(shown, strict=False)
                del output, expected
                pair.step(f"{case}, {writeback=}, afterwards")
            with summoned(pair.model), pytest.raises(RuntimeError, match="inside summon_full_params, or of a forward"):
                loss_of(pair.model(first[rank])).backward()
            pair.step(f"{case}, after the error")


# -- gradients in low precision ------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_keep_low_precision_grads(world_size: int) -> None:
    """Reduced in `reduce_dtype`, added in the parameter's dtype, kept in bfloat16."""
    rank = dist.get_rank()
    for reduce_dtype in (None, FP32):
        for strategy, use_orig_params in MODES:
            precision = MixedPrecision(BF16, reduce_dtype, BF16, keep_low_precision_grads=True)
            pair = Pair(strategy, use_orig_params, precision)
            case = f"{strategy.name}, {use_orig_params=}, {reduce_dtype}"
            expected: dict[str, Tensor] = {}
            # one rank reduces and casts nothing: each backward adds to the gradient
            alike = reduce_dtype is None and dist.get_world_size() == 1
            for unsynced in (0, 0, 0) if alike else (0, 0, 1, 2, 0):
                local: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
                for micro in range(unsynced + 1):
                    inputs = pair.inputs()
                    with pair.model.no_sync() if micro < unsynced else nullcontext():
                        loss_of(pair.model(inputs[rank])).backward()
                    for sums, x in zip(local, inputs):
                        for name, grad in pair.local_gradients(x, BF16).items():
                            sums[name] = sums[name] + grad if name in sums else grad
                for name, mean in pair.mean(local).items():  # added in float32, then rounded
                    expected[name] = (expected[name].float() + mean if name in expected else mean).to(BF16)
                if use_orig_params:
                    with FullyShardedDataParallel.summon_full_params(pair.model, with_grads=True):
                        shown = {name: param.grad.to(BF16) for name, param in named_parameters(pair.model).items()}
                    assert_bit_equal(shown, expected, case)
                assert {param.grad.dtype for param in pair.model.parameters() if param.grad is not None} == {BF16}
                assert_bit_equal(full_gradients(pair.model), expected, case)
            for param in pair.model.parameters():
                assert param.dtype == FP32
                if param.grad is not None:
                    param.grad = param.grad.float()
            SGD(pair.model.parameters(), 0.1).step()
            for name, param in named_parameters(pair.plain).items():
                param.data.sub_(expected[name].float(), alpha=0.1)
            assert_local_parameters(pair.model, dict(named_parameters(pair.plain)), 0, case)


# -- after the backward --------------------------------------------------------------------------------------------


def fail(*args: Any) -> None:
    raise ZeroDivisionError


@needs_meter
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
@mock.patch.object(host_memory, "_RECYCLED", 1 << 62)  # such memory is given back later, from another thread
def test_no_low_precision_copies_are_held_at_rest(use_orig_params: bool) -> None:
    """Neither of the full parameters (half a shard) nor of the shard (another half)."""
    meter = Meter()
    options: dict[str, Any] = {"wrap_policy": ModuleWrapPolicy({nn.Linear}), "mixed_precision": MixedPrecision(BF16)}
    found: dict[str, float] = {}
    for _ in range(2):  # the first run fills caches
        base = meter.baseline()
        model = wrap(
            nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(4))), FULL, use_orig_params, **options
        )
        shards = sum(param.nbytes for param in model.parameters())
        x = torch.ones(1, 512)
        for name in ("step", "evaluated", "failed", "step again"):
            if name == "failed":
                hook = model.module.register_forward_hook(fail)
                with pytest.raises(ZeroDivisionError):
                    model(x)
                hook.remove()
                continue  # the pool keeps blocks until the next pass has checked what is in flight
            if name == "evaluated":
                with torch.no_grad():
                    model(x)
            else:
                model(x).sum().backward()
                found[f"{name}, gradients"] = (meter.at_rest() - base) / shards
                model.zero_grad()
            found[name] = (meter.at_rest() - base) / shards
        del model
    for name, value in found.items():
        assert value == pytest.approx(2 if "gradients" in name else 1, abs=0.1), found
