"""FSDP2's switches: gathers, kept units and reductions for each setting, with the values of a plain model."""

from __future__ import annotations

import copy
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp
from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.comm.streams import HostStreams
from fsdp.runtime.unit import units_of
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_gradients
from tests.harness.strategies import FULL, GRAD_OP, HYBRID, NO_SHARD, ZERO2
from tests.harness.switches import Net, batch, build, make_twin, per_rank
from tests.harness.twin import Twin


@contextmanager
def gathers() -> Iterator[list[str]]:
    """Return the gathered units, in order: "root", "embed", "0" ..."""
    names: list[str] = []
    with record_collectives() as recorded:
        yield names
    for unit in recorded.units("gather"):
        names.append("root" if "root" in unit else unit.rstrip("'").replace("'", ".").rpartition(".")[2])


def gathers_of_a_step(twin: Twin, step: int) -> tuple[int, int]:
    """Train both models, and return the numbers of gathers in the forward and in the backward."""
    with gathers() as forward:
        loss = twin.loss_of(twin.model, step, 0)
    with gathers() as backward:
        loss.backward()
    twin.backward_plain(step)
    twin.finish()
    return len(forward), len(backward)


@on_ranks(2)
def test_reshard_after_forward_argument_sets_the_gathers_of_a_step() -> None:
    for options, forward, backward in (
        ({}, 5, 4),
        ({"reshard_after_forward": True}, 5, 5),
        ({"reshard_after_forward": False}, 5, 0),
        ({"sharding_strategy": GRAD_OP}, 5, 0),
        ({"sharding_strategy": GRAD_OP, "reshard_after_forward": False}, 5, 0),
    ):
        twin = make_twin(**options)
        for step in range(2):
            assert gathers_of_a_step(twin, step) == (forward, backward), options


@on_ranks(2)
def test_set_reshard_after_forward_changes_the_gathers_of_a_step() -> None:
    twin = make_twin()
    model = twin.model
    for step, (given, recurse, forward, backward) in enumerate(
        [(False, True, 5, 0), (True, True, 5, 5), (None, True, 5, 4), (True, False, 5, 5), (None, False, 5, 4)]
    ):
        model.set_reshard_after_forward(given, recurse)
        assert gathers_of_a_step(twin, step) == (forward, backward), f"{given}, {recurse}"
    loss = model(batch(9)).square().mean()  # between a forward and the backward: gathered units stay gathered
    model.set_reshard_after_forward(False)
    with gathers() as found:
        loss.backward()
    assert len(found) == 4


class WritingThroughData(torch.optim.Optimizer):
    """An optimizer that writes through ``.data``, as old optimizers did."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.5)


@on_ranks(2)
def test_parameters_kept_after_backward_are_gathered_again_after_a_write() -> None:
    twin = make_twin()
    twin.model.set_reshard_after_backward(False)
    twin.model.set_reshard_after_forward(False)
    for step in range(3):
        with gathers() as first:
            twin.backward(3 * step)
        with gathers() as then:
            twin.backward(3 * step + 1)
            twin.backward(3 * step + 2)
        assert len(first) == 5 and then == [], (first, then)
        twin.finish()
    twin.backward(18)
    WritingThroughData(twin.model.parameters()).step()
    WritingThroughData(twin.plain.parameters()).step()
    twin.zero_grad()
    twin.backward(20)
    twin.finish()
    twin.model.set_reshard_after_backward(True)
    twin.backward(21)
    assert not any(unit.is_gathered for unit in units_of(twin.model))
    twin.finish()
    twin.model.set_reshard_after_backward(False)
    twin.backward(22)
    for wrapper in twin.model.fsdp_modules(twin.model):
        assert wrapper._fsdp_unit.is_gathered
        wrapper.reshard()
        assert not wrapper._fsdp_unit.is_gathered
        wrapper.reshard()
    twin.finish()


@on_ranks(2)
def test_unshard_and_reshard_by_hand() -> None:
    twin = make_twin()
    twin.backward(0)
    twin.finish()
    for step, asynchronous in enumerate((False, True), 1):
        layer = twin.model.layers[1]
        with gathers() as early:
            handle = layer.unshard(async_op=asynchronous)
            assert (handle is None) is not asynchronous
            if handle is not None:
                handle.wait()
        with gathers() as late:
            twin.backward(step)
        assert len(early) == 1 and len(late) == 8, (early, late)
        twin.finish()
    layer.unshard()
    layer.reshard()
    assert not layer._fsdp_unit.is_gathered
    with (
        twin.model.summon_full_params(twin.model),
        pytest.raises(RuntimeError, match="is in SUMMONED: call"),
    ):
        twin.model.reshard()


@on_ranks(2)
def test_set_unshard_in_backward_omits_the_gather() -> None:
    twin = make_twin()
    twin.model.embed.set_unshard_in_backward(False)
    for step in range(3):
        with gathers() as found:
            twin.backward(step)
        assert len(found) == 8 and found.count("embed") == 1, found
        twin.finish()
    twin.model.layers[0].set_unshard_in_backward(False)
    loss = twin.model(batch(0)).sum()
    with pytest.raises(RuntimeError, match="at version 1073741824"):
        loss.backward()


@on_ranks(2)
def test_explicit_prefetch_lists_set_the_order_of_gathers() -> None:
    twin = make_twin()
    model = twin.model
    layers = model.layers
    model.set_modules_to_forward_prefetch([model.embed, layers[1]])
    model.set_reshard_after_forward(True, recurse=False)  # so that the root prefetches the next unit at the end
    layers[1].set_modules_to_forward_prefetch([layers[2]])
    layers[2].set_modules_to_backward_prefetch([layers[0], layers[1]])
    for model in (twin.model, copy.deepcopy(twin.model)):  # a copy has separate prefetch lists
        for _ in range(2):
            with gathers() as forward:
                loss = model(batch(0)).square().mean()
            with gathers() as backward:
                loss.backward()
            order = ["root", "embed", "1", "0", "2"]
            assert (forward, backward) == (order, ["root", "2", "0", "1", "embed"])
            model.zero_grad()
    twin.model.layers[2].set_modules_to_backward_prefetch([])
    twin.backward(1)
    twin.zero_grad()
    twin.backward(1)
    twin.finish()
    with pytest.raises(TypeError, match="got Linear"):
        twin.model.set_modules_to_forward_prefetch([nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="can prefetch other units, each once"):
        twin.model.set_modules_to_forward_prefetch([twin.model])


@on_ranks(2)
def test_gradient_sync_can_be_switched_for_single_units() -> None:
    twin = make_twin()
    layer = twin.model.layers[0]
    layer.set_requires_gradient_sync(False)
    with record_collectives() as recorded:
        twin.backward(0)
    reduced = recorded.units("reduce")
    assert len(reduced) == 4 and not any("layers.0" in label for label in reduced), reduced
    assert layer.linear.weight.grad.shape == (6, 6)
    layer.set_requires_gradient_sync(True)
    twin.backward(1)
    twin.finish()
    twin.model.set_requires_gradient_sync(False)
    with record_collectives() as recorded:
        twin.backward(2)
    assert not recorded.units("reduce")
    twin.model.set_requires_gradient_sync(True)
    twin.backward(3)
    twin.finish()


@on_ranks(2)
def test_several_backwards_reduce_together_at_the_last_one() -> None:
    twin = make_twin()
    for first in (0, 10):
        twin.model.set_is_last_backward(False)
        twin.backward(first)
        twin.backward(first + 1)
        with pytest.raises(RuntimeError, match="or some whose reduction is not over"):
            twin.model.clip_grad_norm_(1.0)
        with pytest.raises(RuntimeError, match="or some whose reduction is not over"):
            fsdp.full_grad(next(twin.model.parameters()))
        twin.model.set_is_last_backward(True)
        twin.backward(first + 2)
        twin.finish()
    with pytest.raises(RuntimeError, match="on the root"):
        twin.model.layers[0].set_is_last_backward(False)


def summed(steps: range, divisor: float) -> dict[str, Tensor]:
    """Return the gradients of a plain model over the batches of all ranks, rank by rank and step by step."""
    return {name: grad / divisor for name, grad in _sums(steps, dist.get_world_size()).items()}


@functools.cache
def _sums(steps: range, world_size: int) -> dict[str, Tensor]:
    torch.manual_seed(4)
    plain = Net()
    for step in steps:
        for rank in range(world_size):
            plain(per_rank(step, rank)).square().mean().backward()
    return {name: param.grad for name, param in plain.named_parameters()}


def close(found: dict[str, Tensor], wanted: dict[str, Tensor], terms: int) -> None:
    """Compare up to the rounding of a sum of `terms` float32 numbers in another order."""
    for name, value in wanted.items():
        bound = terms * torch.finfo(torch.float32).eps * value.abs().max()
        assert (found[name] - value).abs().max() <= bound, name


def _on_four(strategy: ShardingStrategy, shard: int) -> Any:
    if strategy not in (HYBRID, ZERO2):
        return build(sharding_strategy=strategy)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FullyShardedDataParallel: the group has one rank")
        return build(sharding_strategy=strategy, device_mesh=init_device_mesh("cpu", (4 // shard, shard)))


@on_ranks(4)
def test_sums_of_gradients_are_divided_by_any_number() -> None:
    rank = dist.get_rank()
    for strategy, shard in [(FULL, 0), (NO_SHARD, 0), (HYBRID, 4), (ZERO2, 1), (HYBRID, 2)]:
        model = _on_four(strategy, shard)
        for step, factor in enumerate((1.0, None)):
            model.set_gradient_divide_factor(factor, recurse=True)
            model(per_rank(step, rank)).square().mean().backward()
            close(full_gradients(model), summed(range(step, step + 1), factor or 4), 4)
            model.zero_grad()
    model.set_gradient_divide_factor(2, recurse=True)
    copied = copy.deepcopy(model)  # the copy divides as the original does
    copied(per_rank(0, rank)).square().mean().backward()
    close(full_gradients(copied), summed(range(1), 2), 4)


@on_ranks(1)
def test_gradients_are_divided_on_one_rank() -> None:
    model = build(sharding_strategy=NO_SHARD)
    model.set_gradient_divide_factor(4.0, recurse=True)
    seen: list[int] = []
    model.set_all_reduce_hook(lambda shard: seen.append(shard.numel()), recurse=True)
    model(per_rank(0, 0)).square().mean().backward()
    close(full_gradients(model), summed(range(1), 4), 1)
    assert len(seen) == 5
    for wrong, kind in (("2", TypeError), (True, TypeError), (0, ValueError), (float("nan"), ValueError)):
        with pytest.raises(kind, match="divide factor must be"):
            model.set_gradient_divide_factor(wrong, recurse=True)
    with pytest.raises(TypeError, match="callable or None"):
        model.set_all_reduce_hook(3)
    with pytest.raises(RuntimeError, match=r"divides gradients by 4\.0, and a hook divides by itself"):
        model.register_comm_hook(None, lambda state, grad: None)
    model.set_gradient_divide_factor(None, recurse=True)
    model.set_requires_all_reduce(False)
    with pytest.raises(RuntimeError, match="delays its reduction over replicas, and a hook reduces by itself"):
        model.register_comm_hook(None, lambda state, grad: None)
    model.set_requires_all_reduce(True)
    model.register_comm_hook(None, lambda state, grad: None)
    with pytest.raises(RuntimeError, match=r"set_requires_all_reduce\(False\) with a communication hook"):
        model.set_requires_all_reduce(False)
    with pytest.raises(RuntimeError, match="with a communication hook, which divides by itself"):
        model.set_gradient_divide_factor(2, recurse=True)


@on_ranks(4)
def test_gradients_are_reduced_over_replicas_only_when_requested() -> None:
    rank = dist.get_rank()
    for strategy, shard in [(HYBRID, 2), (ZERO2, 2), (HYBRID, 1)]:
        model = _on_four(strategy, shard)
        for first in (0, 10) if shard == 2 else (0,):
            model.set_requires_all_reduce(False)
            with record_collectives() as recorded:
                for step in (first, first + 1):
                    model(per_rank(step, rank)).square().mean().backward()
            over_replicas = recorded.units("reduce", "all_reduce")
            assert not over_replicas and all(param.grad is None for param in model.parameters())
            with pytest.raises(RuntimeError, match="or some whose reduction is not over"):
                model.clip_grad_norm_(1.0)
            with pytest.raises(RuntimeError, match="or some whose reduction is not over"):
                model.double()
            model.set_requires_all_reduce(True)
            with record_collectives() as recorded:
                model(per_rank(first + 2, rank)).square().mean().backward()
            over_replicas = recorded.units("reduce", "all_reduce")
            assert len(over_replicas) == 5  # one per unit: the first two backwards use no collective between replicas
            sent = [r.nbytes for r in recorded.records if r.op == "all_reduce" and "reduce " in str(r.label)]
            shards = [4 * sum(b.layout.padded_numel for b in u.buckets) // shard for u in fsdp.shard_info(model)]
            assert sorted(sent) == sorted(shards), (sent, shards)  # the sum of three backwards, reduced once
            close(full_gradients(model), summed(range(first, first + 3), 4), 12)
            model.zero_grad()


@on_ranks(4)
def test_an_all_reduce_hook_receives_the_reduced_gradients() -> None:
    """The gradient passed to the hook is reduced over all groups, and the hook's result becomes the gradient."""
    rank = dist.get_rank()
    for strategy, shard in [(FULL, 0), (HYBRID, 2), (NO_SHARD, 0)]:
        model = _on_four(strategy, shard)
        model.set_all_reduce_hook(lambda part: part.mul_(3), recurse=True)
        model(per_rank(0, rank)).square().mean().backward()
        close(full_gradients(model), {k: 3 * v for k, v in summed(range(1), 4).items()}, 6)
        if strategy is HYBRID:
            as_on_accelerators = mock.patch.object(HostStreams, "asynchronous_work", False)
            with as_on_accelerators, pytest.raises(ValueError, match="is sharded and replicated"):
                model.set_all_reduce_hook(lambda part: None, stream=object(), recurse=True)
        model.set_all_reduce_hook(None, recurse=True)
        model.zero_grad()
        model(per_rank(0, rank)).square().mean().backward()
        close(full_gradients(model), summed(range(1), 4), 4)


@on_ranks(2)
def test_a_stream_for_the_all_reduce_hook_is_refused_on_cpu() -> None:
    """CPU has no streams."""
    model = build()
    with pytest.raises(ValueError, match=r"set_all_reduce_hook\(stream=...\): the .* unit computes on CPU"):
        model.set_all_reduce_hook(lambda part: None, stream=object(), recurse=True)
    assert all(unit.policy.all_reduce_hook is None for unit in units_of(model))


@on_ranks(2)
def test_sums_in_the_collectives_give_the_same_gradients() -> None:
    """`set_force_sum_reduction_for_comms()` changes no value; a separate process group for reductions is refused."""
    twin = make_twin()
    for module in FullyShardedDataParallel.fsdp_modules(twin.model):
        module.set_force_sum_reduction_for_comms(True)
    twin.backward(0)
    assert all(unit.communicator.sums_only for unit in units_of(twin.model))
    twin.finish()
    twin.model.set_separate_reduce_scatter_group(False)
    with pytest.raises(NotImplementedError, match=r"set_separate_reduce_scatter_group\(True\)"):
        twin.model.set_separate_reduce_scatter_group()


SWITCHES: dict[str, Callable[[Any], None]] = {
    "reshard_after_forward": lambda model: model.set_reshard_after_forward("yes"),
    "reshard_after_backward": lambda model: model.set_reshard_after_backward(None),
    "unshard_in_backward": lambda model: model.set_unshard_in_backward(2),
    "requires_gradient_sync": lambda model: model.set_requires_gradient_sync(torch.tensor(True)),
    "reduce_scatter_unused_params": lambda model: model.set_reduce_scatter_unused_params(1.5),
    "enable": lambda model: model.set_force_sum_reduction_for_comms("no"),
    "async_op": lambda model: model._set_unshard_async_op("no"),
    "is_last_backward": lambda model: model.set_is_last_backward("no"),
}


BETWEEN_PASSES: dict[str, Callable[[Any], Any]] = {
    "a choice of reshard_after_forward": lambda model: model.set_reshard_after_forward(False),
    "set_requires_gradient_sync()": lambda model: model.set_requires_gradient_sync(False),
    "set_all_reduce_hook()": lambda model: model.set_all_reduce_hook(None),
    "a list of modules to prefetch": lambda model: model.set_modules_to_forward_prefetch([model.layers[0]]),
}


@on_ranks(2)
def test_switches_validate_arguments_and_call_order() -> None:
    model = build()
    for name, wrong in SWITCHES.items():
        with pytest.raises(TypeError, match=f"{name} must be a bool"):
            wrong(model)
    with pytest.raises(ValueError, match=r"contradicts ShardingStrategy\.SHARD_GRAD_OP"):
        build(sharding_strategy=GRAD_OP, reshard_after_forward=True)
    model(batch(0))
    for name in ("set_reduce_scatter_max_input_buffers", "set_reduce_scatter_unused_params"):
        with pytest.raises(RuntimeError, match=rf"{name}\(\) should only be called on the root instance"):
            getattr(model.layers[0], name)(1 if "buffers" in name else True)
    away = mock.patch.object(model._fsdp_unit, "device", torch.device("meta"))
    with away, pytest.raises(NotImplementedError, match="run on a stream of their own"):
        model._set_unshard_async_op(True)
    for call, switch in BETWEEN_PASSES.items():
        handle = model.layers[0].module.register_forward_hook(lambda *_: switch(model))  # noqa: B023
        with pytest.raises(RuntimeError, match=re.escape(f"{call} in the middle of the forward of the root")):
            model(batch(0))
        handle.remove()
