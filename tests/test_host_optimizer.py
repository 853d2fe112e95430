"""HostOptimizer: steps on a thread that the next forward overlaps, equal to plain steps bit for bit."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy
from fsdp.checkpoint import load, save
from fsdp.optim import HostOptimizer, ShardedGradScaler
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks
from tests.harness.sharded import wrap
from tests.harness.small import WIDTH, net
from tests.harness.states import whole
from tests.harness.strategies import FULL_SHARD, HYBRID_SHARD, NO_SHARD, SHARD_GRAD_OP

Make = Callable[[list[nn.Parameter]], Optimizer]


def adamw(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(params, lr=0.05, fused=True)


def in_groups(params: list[nn.Parameter]) -> Optimizer:
    """Make groups that cut through the units, with a rate that is a tensor."""
    groups = [{"params": params[::2], "lr": torch.tensor(0.1)}, {"params": params[1::2], "weight_decay": 0.3}]
    return torch.optim.AdamW(groups, lr=0.05)


def momentum(params: list[nn.Parameter]) -> Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def built(strategy: ShardingStrategy = FULL_SHARD, mode: bool = True) -> FullyShardedDataParallel:
    policy, offload = ModuleWrapPolicy({nn.Linear}), CPUOffload(offload_params=True)
    return wrap(net(), strategy, mode, wrap_policy=policy, cpu_offload=offload)


def batch(number: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + dist.get_rank()))


def train(model: Any, optimizer: Optimizer, how: str, steps: int = 10) -> list[Tensor]:
    """Train with a schedule, which changes the rates right after each step."""
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = ShardedGradScaler("cpu", init_scale=2.0**10, enabled=how == "scaled")
    losses = []
    for number in range(steps):
        if how == "accumulated":
            with model.no_sync():
                model(batch(100 + number)).square().mean().backward()
        loss = model(batch(number)).square().mean()
        if how == "scaled" and number == 3:
            loss = loss * float("inf")  # the scaler leaves this step out
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if how == "clipped":
            model.clip_grad_norm_(0.01)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        losses.append(loss.detach())
    return losses


def check(strategy: ShardingStrategy, mode: bool, how: str, make: Make, *, early: bool = False) -> None:
    case = f"{strategy}, {mode}, {how}, {make.__name__}, {early}"
    plain, model = built(strategy, mode), built(strategy, mode)
    of_plain = make([param for param in plain.parameters() if param.requires_grad])
    optimizer = HostOptimizer(model, make, early=early)
    expected, found = train(plain, of_plain, how), train(model, optimizer, how)
    assert all(map(torch.equal, found, expected)), case
    assert_bit_equal(whole(model, optimizer), whole(plain, of_plain), case)


@on_ranks(2)
def test_training_equals_plain_steps_bit_for_bit() -> None:
    for strategy, mode, how, make in (
        (FULL_SHARD, True, "", adamw),
        (FULL_SHARD, False, "clipped", in_groups),
        (SHARD_GRAD_OP, True, "scaled", adamw),
        (NO_SHARD, True, "accumulated", in_groups),
    ):
        check(strategy, mode, how, make)


@on_ranks(2)
def test_early_steps_equal_plain_steps_bit_for_bit() -> None:
    for strategy, mode, how, make in (
        (FULL_SHARD, True, "", adamw),
        (SHARD_GRAD_OP, False, "accumulated", momentum),
        (NO_SHARD, True, "", adamw),
    ):
        check(strategy, mode, how, make, early=True)


@pytest.mark.parametrize("early", [False, True])
@on_ranks(4)
def test_hybrid_training_equals_plain_steps_bit_for_bit(early: bool) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    models = [
        FullyShardedDataParallel(
            net(),
            sharding_strategy=HYBRID_SHARD,
            device_mesh=mesh,
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            cpu_offload=CPUOffload(offload_params=True),
        )
        for _ in range(2)
    ]
    plain, optimizer = adamw(list(models[0].parameters())), HostOptimizer(models[1], adamw, early=early)
    how = "accumulated" if early else "clipped"
    expected, found = train(models[0], plain, how, steps=5), train(models[1], optimizer, how, steps=5)
    assert all(map(torch.equal, found, expected))


class Slow(torch.optim.SGD):
    """Waits, before it steps the parameter of ``number`` elements, until ``goes_on`` is set; or fails there."""

    goes_on, number, fails = threading.Event(), 0, False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.number and any(
            param.shape == (self.number,) for group in self.param_groups for param in group["params"]
        ):
            if Slow.fails:
                raise ArithmeticError("of the optimizer")
            assert Slow.goes_on.wait(20)
        super().step()


def slow(params: list[nn.Parameter]) -> Optimizer:
    made = Slow(params, lr=0.1)
    made.number = params[-1].numel()  # the bias of the head
    return made


@on_ranks(2)
def test_forward_begins_before_the_last_unit_is_stepped() -> None:
    plain, model = built(NO_SHARD), built(NO_SHARD)
    optimizer, of_plain = HostOptimizer(model, slow), torch.optim.SGD(plain.parameters(), lr=0.1)
    Slow.goes_on.clear()
    for either, stepped in ((plain, of_plain), (model, optimizer)):
        either(batch(0)).square().mean().backward()
        stepped.step()
        optimizer.zero_grad()
    handle = model.module.head.register_forward_pre_hook(lambda *_: Slow.goes_on.set(), prepend=True)
    result = model(batch(1))  # the first units run meanwhile; the head waits for its own step
    handle.remove()
    assert torch.equal(result, plain(batch(1)))


@on_ranks(2)
def test_early_steps_run_during_the_backward() -> None:
    """When the backward reaches the first unit, the last one is stepped and its gradient is gone."""
    plain, model = built(), built()
    optimizer = HostOptimizer(model, momentum, early=True)
    of_plain = momentum(list(plain.parameters()))
    found: list[bool] = []

    def look(*_: Any) -> None:
        optimizer.synchronize()
        found.extend(param.grad is None for param in model.module.head.parameters())
        found.extend(map(torch.equal, model.module.head.parameters(), plain.module.head.parameters()))

    plain(batch(0)).square().mean().backward()
    of_plain.step()
    model.module.layers[0].register_full_backward_pre_hook(look)
    model(batch(0).requires_grad_()).square().mean().backward()
    optimizer.step()
    assert found
    assert all(found)
    assert_bit_equal(whole(model, optimizer), whole(plain, of_plain), "after step()")


def misuse_early_steps(model: FullyShardedDataParallel) -> None:
    optimizer, scaler = HostOptimizer(model, in_groups, early=True), ShardedGradScaler("cpu", init_scale=1.0)

    def backward() -> None:
        scaler.scale(model(batch(0)).square().mean()).backward()

    backward()
    for call, text in (
        (lambda: model.clip_grad_norm_(1.0), r"clip_grad_norm_\(\): HostOptimizer\(early=True\) has stepped"),
        (optimizer.zero_grad, r"zero_grad\(\) instead of step\(\): .* has stepped"),
        (lambda: scaler.unscale_(optimizer), "leave out early=True to clip, scale"),
        (backward, r"a second backward before step\(\): .* under no_sync\(\)"),
    ):
        with pytest.raises(RuntimeError, match=text):
            call()
    backward()  # after a failed one
    optimizer.param_groups[0]["lr"] = 0.25  # in place of a tensor
    with pytest.raises(RuntimeError, match=r"'lr' of parameter group 0 changed from 0\.1\d* to 0\.25 after units were"):
        optimizer.step()
    backward()
    optimizer.step()


@on_ranks(2)
def test_misuse_of_early_steps_is_refused() -> None:
    model = built()
    misuse_early_steps(model)
    optimizer = adamw(list(model.parameters()))  # an ordinary one takes over
    model(batch(0)).square().mean().backward()
    assert model.clip_grad_norm_(1.0) > 0
    optimizer.step()
    with pytest.raises(ValueError, match=r"leave out reduce_unused=True or early=True"):
        HostOptimizer(wrap(net(), reduce_unused=True, cpu_offload=CPUOffload(True)), adamw, early=True)


@on_ranks(2)
def test_every_reader_waits(tmp_path: Path) -> None:
    """State dicts, checkpoints, full parameters and the optimizer's state have the values after the step."""
    readers: list[Callable[[Any, Any], object]] = [
        lambda model, optimizer: model.state_dict(),
        lambda model, optimizer: optimizer.state_dict(),
        lambda model, optimizer: FullyShardedDataParallel.optim_state_dict(model, optimizer),
        lambda model, optimizer: save(tmp_path / type(optimizer).__name__, model, optimizer),
        lambda model, optimizer: whole(model, optimizer),
    ]
    for number, read in enumerate(readers):
        plain, model = built(), built()
        of_plain, optimizer = momentum(list(plain.parameters())), HostOptimizer(model, momentum)
        results = []
        for either, stepped in ((plain, of_plain), (model, optimizer)):
            either(batch(0)).square().mean().backward()
            stepped.step()
            results.append(read(either, stepped))
        if not isinstance(results[0], Path):
            leaves = [torch.utils._pytree.tree_leaves(result) for result in results]
            tensors = [[leaf for leaf in several if isinstance(leaf, Tensor)] for several in leaves]
            assert tensors[0] and all(map(torch.equal, *tensors)), number
    load(tmp_path / "HostOptimizer", plain, of_plain)
    load(tmp_path / "SGD", model, optimizer)
    assert_bit_equal(whole(model, optimizer), whole(plain, of_plain), "checkpoints")
    assert all(map(torch.equal, train(model, optimizer, "", steps=2), train(plain, of_plain, "", steps=2)))


@on_ranks(2)
def test_error_of_the_thread_reaches_the_next_call() -> None:
    model = built(NO_SHARD)
    optimizer = HostOptimizer(model, slow)
    for next_call in (lambda: model(batch(0)), optimizer.synchronize, optimizer.step, model.state_dict):
        model(batch(0)).square().mean().backward()
        with mock.patch.object(Slow, "fails", True):
            optimizer.step()
            with pytest.raises(RuntimeError, match=r"failed at unit 'head': of the optimizer"):
                next_call()
        Slow.goes_on.set()
        optimizer.synchronize()


@on_ranks(2)
def test_read_of_a_parameter_that_is_stepped_is_an_error_in_debug_mode() -> None:
    with mock.patch.dict(os.environ, FSDP_DEBUG="1"):
        model = built()
        optimizer = HostOptimizer(model, adamw)
        model(batch(0)).square().mean().backward()
        optimizer.step()
        param = next(model.parameters())
        with pytest.raises(RuntimeError, match=r"call optimizer\.synchronize\(\) before"):
            param.sum()
        optimizer.zero_grad()
        optimizer.synchronize()
        param.sum()
        model(batch(1)).square().mean().backward()


@on_ranks(2)
def test_wrong_arguments_are_refused() -> None:
    model = built()
    with pytest.raises(ValueError, match="has none: use the optimizer itself"):
        HostOptimizer(net(), adamw)
    with pytest.raises(ValueError, match=r"was given 8 parameters, and its AdamW holds 1"):
        HostOptimizer(model, lambda params: adamw(params[:1]))
    with pytest.raises(TypeError, match=r"must return a torch\.optim\.Optimizer, got int"):
        HostOptimizer(model, lambda params: 1)  # type: ignore[arg-type, return-value]
    with pytest.raises(RuntimeError, match="make the groups in `factory`"):
        HostOptimizer(model, adamw).add_param_group({"params": []})
