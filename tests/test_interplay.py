"""Hooks on parameters and modules, optimizers inside the backward, and copies of the model, compared with a plain
model."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, MixedPrecision, full_tensor, register_forward_method
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import new_pair
from tests.harness.models import ZOO
from tests.harness.oracle import Schedule, assert_bit_equal, named_parameters, rank_batch, run_plain, sgd
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_gradients, full_parameters, wrap
from tests.harness.strategies import FULL, GRAD_OP, HYBRID, MODES, NONE, STRATEGIES

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing the package warns
    from torch.distributed.optim import _apply_optimizer_in_backward

CASE = ZOO["mlp"]
SCHEDULE = Schedule(steps=10)


# -- optimizers inside the backward --------------------------------------------------------------------------------


def train(model: nn.Module, step: Callable[[], None], schedule: Schedule = SCHEDULE) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for index in range(schedule.steps):
        CASE.loss(model, rank_batch(CASE, schedule, index, 0, rank, world_size)).backward()
        step()


OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}


def step_by_hooks(model: nn.Module) -> list[int]:
    """Let hooks step an optimizer per parameter; return a list that gets the number of gradients after each step."""
    params, live = list(model.parameters()), list[int]()
    optimizers = {param: torch.optim.SGD([param], **OPTIONS) for param in params}

    def hook(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()
        live.append(sum(p.grad is not None for p in params))

    for param in params:
        param.register_post_accumulate_grad_hook(hook)
    return live


@on_ranks(1, 2)
def test_optimizer_steps_inside_the_backward_equal_the_plain_model(world_size: int) -> None:
    """By torch's `_apply_optimizer_in_backward` or by post-accumulate hooks, unit by unit."""
    expected = run_plain(CASE, sgd, world_size, SCHEDULE)[-1].params
    for strategy, by_hooks in ((FULL, True), (FULL, False), (GRAD_OP, True), (NONE, False)):
        model = wrap(CASE, strategy, use_orig_params=True)
        live = []
        if by_hooks:
            live = step_by_hooks(model)
        else:
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), OPTIONS)
        with model.no_sync():
            CASE.loss(model, CASE.make_batch(0, 2)).backward()  # no optimizer steps
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        model.zero_grad()
        train(model, lambda: None)
        assert all(param.grad is None for param in model.parameters())
        assert_bit_equal(full_parameters(model), expected, f"{strategy}, by_hooks={by_hooks}")
        if by_hooks and world_size > 1:
            assert max(live) < len(list(model.parameters())) / 2  # most gradients are freed before the last arrive


@on_ranks(4)
def test_optimizers_step_before_the_backward_ends() -> None:
    """Gradients that are averaged over replicas are complete one unit later."""
    for strategy, buffers in ((FULL, 1), (HYBRID, 1), (HYBRID, 2)):
        options = {"process_group": new_pair()} if strategy is HYBRID else {}
        model = wrap(CASE, strategy, use_orig_params=True, **options)
        model.set_reduce_scatter_max_input_buffers(buffers)
        steps, before = step_by_hooks(model), list[int]()
        next(model.parameters()).register_hook(lambda grad: before.append(len(steps)))  # noqa: B023
        train(model, lambda: None, Schedule(steps=1))
        assert 0 < before[0] < len(steps), (strategy, buffers, before, len(steps))


# -- hooks on parameters -------------------------------------------------------------------------------------------


@on_ranks(1, 2)
def test_parameter_hooks_see_the_full_local_gradient(world_size: int) -> None:
    """Hooks fire as under DDP, and the returned gradient is reduced."""
    schedule = Schedule(steps=3)
    rank = dist.get_rank()
    for strategy in STRATEGIES:
        plain = CASE.build()
        model = wrap(CASE, strategy, use_orig_params=True)
        seen: dict[str, dict[str, Tensor]] = {"plain": {}, "sharded": {}}

        def watch(kind: str, name: str) -> Callable[[Tensor], Tensor]:
            def hook(grad: Tensor) -> Tensor:
                seen[kind][name] = grad.clone()  # noqa: B023
                return grad * 2

            return hook

        for kind, module in (("plain", plain), ("sharded", model)):
            for name, param in named_parameters(module).items():
                handle = param.register_hook(watch(kind, name))
                if name.endswith("bias"):
                    handle.remove()
        for step in range(schedule.steps):
            batch = rank_batch(CASE, schedule, step, 0, rank, world_size)
            for module in (plain, model):
                module.zero_grad()
                CASE.loss(module, batch).backward()
            assert seen["plain"] and not any(name.endswith("bias") for name in seen["plain"])
            assert_bit_equal(seen["sharded"], seen["plain"], f"{strategy}: gradients seen by hooks")
            for param in plain.parameters():
                dist.all_reduce(param.grad)
                param.grad /= world_size
        ours = full_gradients(model)
        assert_bit_equal(ours, {n: p.grad for n, p in named_parameters(plain).items()}, f"{strategy}: gradients")


@on_ranks(1)
def test_parameter_hook_that_changes_the_shape_raises() -> None:
    model = wrap(CASE, use_orig_params=True)
    params = named_parameters(model)
    params["blocks.0.linear.weight"].register_hook(lambda grad: grad.flatten())
    with pytest.raises(RuntimeError, match=r"hook on parameter 'linear\.weight' returned a gradient of shape \(\d+,\)"):
        CASE.loss(model, CASE.make_batch(0, 2)).backward()


# -- optimizers built before wrapping ------------------------------------------------------------------------------


@on_ranks(2)
def test_optimizer_built_before_wrapping_trains_or_warns() -> None:
    for use_orig_params in (True, False):
        module = CASE.build()
        optimizer = sgd(module.parameters())
        model = wrap(module, use_orig_params=use_orig_params, wrap_policy=ModuleWrapPolicy(CASE.blocks))

        def step(optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        if use_orig_params:
            train(model, step)
            expected = run_plain(CASE, sgd, dist.get_world_size(), SCHEDULE)[-1].params
            assert_bit_equal(full_parameters(model), expected, "an optimizer from before")
            continue
        before = full_parameters(model)
        with pytest.warns(
            UserWarning, match=r"SGD holds 11 of 11 parameters .* the first one '\S+' of the MlpBlock unit"
        ):
            train(model, step, Schedule(steps=1))
        train(model, step, Schedule(steps=1))  # warns once
        assert_bit_equal(full_parameters(model), before, "nothing was stepped")
        train(model, sgd(model.parameters()).step, Schedule(steps=1))


# -- copies --------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """A tied weight, a frozen part, a buffer, a scalar, an LSTM, and a method beside `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(7, 7), nn.Linear(7, 7)
        self.second.weight = self.first.weight
        self.blocks = nn.Sequential(nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 7)), nn.LSTM(7, 7))
        self.blocks[0][0].requires_grad_(False)
        self.register_buffer("scale", torch.full((1,), 0.5))
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.blocks(self.first(x))[0])) * self.scale * self.gain

    def twice(self, x: Tensor) -> Tensor:
        return self(x) * 2


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> Tensor:
    torch.manual_seed(seed)
    loss = model(torch.randn(3, 2, 7)).float().square().mean()
    loss.backward()
    for param in model.parameters():  # average gradients of the plain model
        if type(model) is Tied and param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


@on_ranks(1, 2)
def test_deepcopies_train_independently(world_size: int) -> None:
    """Copies before and after the first use, with and without the optimizer."""
    for index, (strategy, use_orig_params) in enumerate(MODES if world_size == 2 else MODES[:2]):
        torch.manual_seed(0)
        plain = Tied()
        policy = ModuleWrapPolicy({nn.Sequential, nn.LSTM} if index else {nn.LSTM})
        model = wrap(deepcopy(plain), strategy, use_orig_params, wrap_policy=policy)
        register_forward_method(model, "twice")
        pristine = deepcopy(model)  # before the first use
        optimizers = [optimizer_of(module) for module in (plain, model)]
        for seed in range(2):
            losses = [step(module, opt, seed) for module, opt in zip((plain, model), optimizers, strict=True)]
            assert torch.equal(*losses)
        plain_copy, plain_optimizer = deepcopy((plain, optimizers[0]))
        copied, optimizer = deepcopy((model, optimizers[1]))
        assert type(copied) is type(model) and copied.process_group is model.process_group
        held = {param.untyped_storage().data_ptr() for param in model.parameters() if param.numel()}
        assert held.isdisjoint(p.untyped_storage().data_ptr() for p in copied.parameters() if p.numel())
        assert all(param.grad is None for param in copied.parameters())
        assert [n for n, _ in copied.named_parameters()] == [n for n, _ in model.named_parameters()]
        assert copied.module.first.weight is copied.module.second.weight
        if use_orig_params:
            assert all(torch.equal(*map(full_tensor, each)) for each in zip(copied.parameters(), model.parameters()))
        for seed in range(2, 4):  # both train further, on different data
            for module, opt, offset in (
                (plain, optimizers[0], 0),
                (model, optimizers[1], 0),
                (plain_copy, plain_optimizer, 100),
                (copied, optimizer, 100),
            ):
                step(module, opt, seed + offset)
        for ours, theirs in ((model, plain), (copied, plain_copy)):
            assert_bit_equal(full_parameters(ours), named_parameters(theirs), f"{strategy}, {use_orig_params}")
        with torch.no_grad():  # average the shards for evaluation
            for mine, other in zip(copied.parameters(), model.parameters(), strict=True):
                mine.lerp_(other, 0.5)
            for mine, other in zip(plain_copy.parameters(), plain.parameters(), strict=True):
                mine.lerp_(other, 0.5)
            x = torch.randn(3, 2, 7)
            assert torch.equal(copied(x), plain_copy(x))
            assert torch.equal(copied.twice(x), plain_copy(x) * 2)
            torch.manual_seed(0)
            assert torch.equal(pristine(x), Tied()(x))
        for ours, theirs in ((model, plain), (copied, plain_copy)):
            assert_bit_equal(ours.state_dict(), theirs.state_dict(), "state dicts")
        copied.load_state_dict(model.state_dict())
        assert_bit_equal(full_parameters(copied), full_parameters(model), "loaded into a copy")
        with FullyShardedDataParallel.summon_full_params(model), pytest.raises(RuntimeError, match="can be copied"):
            deepcopy(model)


@on_ranks(2)
def test_deepcopies_keep_precision_and_are_freed() -> None:
    precision = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    model = wrap(Tied(), use_orig_params=True, wrap_policy=ModuleWrapPolicy({nn.LSTM}), mixed_precision=precision)
    optimizer = optimizer_of(model)
    step(model, optimizer, 0)
    loss = model(torch.ones(3, 2, 7)).float().sum()
    copied = deepcopy(model)  # between a forward and its backward
    assert copied.module.scale.dtype is torch.bfloat16
    assert copied._fsdp_unit.precision.original_dtype(copied.module.scale) is torch.float32
    with model.no_sync():
        synchronising = deepcopy(model)
    assert all(wrapper._sync_gradients for wrapper in FullyShardedDataParallel.fsdp_modules(synchronising))
    loss.backward()
    before = full_parameters(copied)
    assert_bit_equal(before, full_parameters(model), "values")
    with torch.no_grad():
        assert torch.equal(copied(torch.ones(3, 2, 7)), model(torch.ones(3, 2, 7)))
    model.zero_grad()
    step(model, optimizer, 1)
    assert_bit_equal(full_parameters(copied), before, "the copy stays")
    reference = weakref.ref(copied)
    gc.disable()
    del copied
    assert reference() is None, "only the garbage collector would free the copy"


# -- hooks on modules, batch norms ---------------------------------------------------------------------------------


@on_ranks(2)
def test_module_hooks_see_the_plain_models_values() -> None:
    """In the same order; parameters are unsharded while hooks of a forward run."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for strategy in STRATEGIES:
        for use_orig_params in (False, True):
            plain = CASE.build()
            model = wrap(CASE, strategy, use_orig_params)
            seen: dict[str, list[tuple[str, str, Any]]] = {"plain": [], "sharded": []}

            def note(kind: str, name: str, event: str) -> Callable[..., None]:
                def hook(owner: nn.Module, *tensors: Any) -> None:
                    values = [t.clone() for part in tensors for t in (part if isinstance(part, tuple) else (part,))]
                    if event.startswith("forward"):  # parameters are unsharded
                        values += [param.detach().clone() for param in (owner.weight, owner.bias)]
                    seen[kind].append((name, event, values))  # noqa: B023

                return hook

            for kind, root in (("plain", plain), ("sharded", model.module)):
                for name, module in root.named_modules():
                    name = name.replace("._fsdp_wrapped_module", "").replace("_fsdp_wrapped_module.", "")
                    if not isinstance(module, nn.Linear):
                        continue
                    module.register_forward_pre_hook(note(kind, name, "forward begins"))
                    module.register_forward_hook(note(kind, name, "forward ends"))
                    module.register_full_backward_pre_hook(note(kind, name, "backward begins"))
                    module.register_full_backward_hook(note(kind, name, "backward ends"))
            for step in range(2):
                batch = rank_batch(CASE, SCHEDULE, step, 0, rank, world_size)
                batch.inputs[0].requires_grad_()  # torch warns where the first module's input has no gradient
                for module in (plain, model):
                    CASE.loss(module, batch).backward()
            assert len(seen["plain"]) == 2 * 4 * 4
            for ours, theirs in zip(seen["sharded"], seen["plain"], strict=True):
                assert ours[:2] == theirs[:2]
                assert all(torch.equal(a, b) for a, b in zip(ours[2], theirs[2], strict=True)), ours[:2]
