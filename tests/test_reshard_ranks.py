"""`reshard_after_forward=N`: units stay sharded over N nearby ranks after forward and train as with ``FULL_SHARD``, bit
for bit. The backward gathers among these ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp import FullyShardedDataParallel, MixedPrecision
from fsdp.comm.nodes import nearby_group
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.agreeing import impatient
from tests.harness.chains import Part
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import handles_of
from tests.harness.strategies import GRAD_OP, HYBRID
from tests.harness.switches import Net, per_rank

ALL = (0, 1, 2, 3)
UNITS = 5


class Winding(Net):
    """Calls one layer twice if `twice` is set, recomputes segments if `reentrant` is set, and returns a detached output
    if `detached` is set."""

    reentrant: bool | None = None
    twice = detached = False

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for layer in (*self.layers, self.layers[0]) if self.twice else self.layers:
            y = layer(y) if self.reentrant is None else checkpoint(layer, y, use_reentrant=self.reentrant)
        return self.head(y.detach()).detach() if self.detached else self.head(y)


def wrapped(**options: Any) -> Any:
    torch.manual_seed(4)
    policy = ModuleWrapPolicy({Part, torch.nn.Embedding})
    return FullyShardedDataParallel(Winding(), auto_wrap_policy=policy, **options)


Steps = Callable[[Any, Callable[[int], Tensor]], None]


class Pair:
    """Two equal models, resharded over all ranks and over two, which must train alike."""

    def __init__(self, **options: Any) -> None:
        self.models = [wrapped(reshard_after_forward=value, **options) for value in (True, 2)]
        self.near = self.models[1]
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.9) for m in self.models]

    def loss(self, model: Any, step: int) -> Tensor:
        return model(per_rank(step, dist.get_rank())).float().square().mean()

    def run(self, steps: Steps) -> list[tuple[int, ...]]:
        """Run `steps` on both models, then the optimizers; return the groups over which the second model gathered."""
        found = []
        for model in self.models:
            with record_collectives() as recorded:
                steps(model, lambda step: self.loss(model, step))  # noqa: B023
            found = [c.group for c in recorded.select("all_gather") if str(c.label).startswith("gather ")]
        first, second = ([p.grad for p in model.parameters() if p.grad is not None] for model in self.models)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True)), "other gradients"
        assert any(grad.abs().sum() > 0 for grad in first)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return found

    def parts(self) -> int:
        """Return the bytes that the second model keeps from a forward to the backward."""
        return sum(h._slice.nbytes for h in handles_of(self.near) if h.has_slice)

    def full(self) -> int:
        return sum(handle.full_nbytes for handle in handles_of(self.near))


def backward(*numbers: int) -> Steps:
    """Return steps with all forwards first, then all backwards."""

    def steps(model: Any, loss: Callable[[int], Tensor]) -> None:
        losses = [loss(number) for number in numbers]
        for value in losses:
            value.backward()

    return steps


@contextmanager
def hooked(layer: Any, hook: Callable[..., None]) -> Iterator[None]:
    """Call ``hook`` with the gradients of the outputs of ``layer`` inside the context."""
    handle = layer.register_forward_hook(lambda module, args, output: output.register_hook(hook) and None)
    yield
    handle.remove()


@on_ranks(4)
def test_resharding_over_two_ranks_trains_bit_for_bit_as_over_all() -> None:
    rank = dist.get_rank()
    here = (0, 1) if rank < 2 else (2, 3)
    for options in ({}, {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32), "use_orig_params": True}):
        pair = Pair(**options)
        near = pair.near

        def count(found: list[tuple[int, ...]]) -> tuple[int, int]:
            assert found.count(ALL) + found.count(here) == len(found), found
            return found.count(ALL), found.count(here)

        assert count(pair.run(backward(0))) == (UNITS, UNITS)
        loss = pair.loss(near, 0)
        assert pair.parts() == pair.full() // 2, "a half stays from the forward to the backward"
        loss.backward()
        assert not pair.parts()
        near.zero_grad()
        assert count(pair.run(backward(1, 2))) == (3 * UNITS, UNITS)  # only the first backward gathers over two ranks
        for reentrant in (True,) if options else (False, True):
            for model in pair.models:
                model.module.reentrant, model.module.twice = reentrant, True
            # The second call of a layer gathers over two ranks in forward, and the first one in backward, if that is
            # still ahead.
            everywhere, nearby = count(pair.run(backward(11)))
            assert nearby == UNITS + 1 and everywhere <= UNITS + 1, (everywhere, nearby)
        if options:
            continue
        for model in pair.models:
            model.module.reentrant, model.module.twice = None, False
        pair.run(backward(12))  # the prefetch order is that of the previous step

        def accumulate(model: Any, loss: Callable[[int], Tensor]) -> None:
            with model.no_sync():
                loss(3).backward()
            loss(4).backward()

        assert count(pair.run(accumulate)) == (2 * UNITS, 2 * UNITS)

        def evaluate(model: Any, loss: Callable[[int], Tensor]) -> None:
            loss(5)  # a forward without backward
            with torch.no_grad():
                loss(6)
            assert all(handle._slice is None for handle in handles_of(model))
            loss(7).backward()

        assert count(pair.run(evaluate)) == (3 * UNITS, UNITS)

        def summon(model: Any, loss: Callable[[int], Tensor]) -> None:
            value = loss(8)
            with torch.no_grad():
                for param in model.parameters():
                    param.data.mul_(0.5)  # not seen by version counters
            with model.summon_full_params(model, writeback=False):
                assert all(torch.isfinite(param).all() for param in model.parameters())
            value.backward()  # the gradient of the current values, as with FULL_SHARD
            value = loss(9)
            with torch.no_grad():
                for param in model.parameters():
                    param.data.mul_(0.5)
            model.unshard()
            loss(10).backward()
            model.reshard()

        pair.run(summon)
        near.set_reshard_after_forward(False)
        assert count(pair.run(backward(12))) == (UNITS, 0)
        near.set_reshard_after_forward(True)
        assert count(pair.run(backward(13))) == (UNITS, UNITS)
        near.module.layers[1].set_unshard_in_backward(False)
        near(per_rank(0, rank))
        assert near.module.layers[1]._fsdp_unit.has_slices is False
        near.module.layers[1].set_unshard_in_backward(True)
        near.module.detached = True  # so that no backward can follow
        near(per_rank(0, rank))
        assert not pair.parts()
        near.module.detached = False
        pair.models = [copy.deepcopy(model) for model in pair.models]
        pair.near = pair.models[1]
        pair.optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in pair.models]
        near = pair.near
        assert count(pair.run(backward(14))) == (UNITS, UNITS)


@on_ranks(4)
@impatient
def test_ranks_continue_after_a_failure_between_gathers_over_two_ranks() -> None:
    """The peer in the nearby group has gathered once more."""
    group, stops = dist.new_group(list(ALL)), dist.get_rank() == 1

    def loss(step: int) -> Tensor:
        return model(per_rank(step, dist.get_rank())).square().mean()

    def stop(*_: Any) -> None:
        raise ArithmeticError("failed on purpose")

    model = wrapped(reshard_after_forward=2, process_group=group)
    layer = model.module.layers[1]
    model.module.reentrant = True  # a new model compares the recomputed order with the gathered one
    loss(0).backward()
    model.module.reentrant = None
    expected = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()
    with nullcontext() if not stops else hooked(layer, stop):
        value = loss(0)
    with pytest.raises(ArithmeticError if stops else RuntimeError):
        value.backward()
    model.zero_grad()
    for _ in range(2):
        try:
            loss(0).backward()
            break
        except RuntimeError as error:
            assert stops and "failed in the backward" in str(error)  # the failed rank learns of the peers' error
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), expected, strict=True))


@on_ranks(4)
def test_reshard_after_forward_validates_the_number_of_ranks() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    for options, wanted in (
        ({"reshard_after_forward": 1}, (False, 0)),
        ({"reshard_after_forward": 4}, (True, 0)),
        ({"reshard_after_forward": 2}, (True, 2)),
        ({"reshard_after_forward": 1, "sharding_strategy": HYBRID, "device_mesh": mesh}, (False, 0)),
        ({"reshard_after_forward": 2, "sharding_strategy": HYBRID, "device_mesh": mesh}, (True, 0)),
    ):
        model = wrapped(**options)
        policies = [wrapper._fsdp_unit.policy for wrapper in model.fsdp_modules(model)]
        assert {(policy.reshard_after_forward, policy.reshard_ranks) for policy in policies} == {wanted}, options
    for wrong, kind, words in (
        ({"reshard_after_forward": 3}, ValueError, "must be a factor of the 4"),
        ({"reshard_after_forward": 0}, ValueError, "a number of ranks, 1 or more"),
        ({"reshard_after_forward": 2, "sharding_strategy": GRAD_OP}, ValueError, "contradicts ShardingStrategy"),
        ({"reshard_after_forward": 2, "reduce_unused": True}, NotImplementedError, "with reduce_unused=True"),
    ):
        with pytest.raises(kind, match=words):
            wrapped(**wrong)
    with pytest.raises(TypeError, match="a number is for the wrapper"):
        model.set_reshard_after_forward(1)
    with pytest.raises(
        NotImplementedError, match=r"set_reduce_scatter_unused_params\(True\) with reshard_after_forward"
    ):
        wrapped(reshard_after_forward=2).set_reduce_scatter_unused_params(True)
    group = dist.new_group(list(ALL))
    with pytest.raises(ValueError, match="and another number on other ranks"):
        nearby_group(group, 2 if dist.get_rank() else 4)
    assert nearby_group(group, 2) is nearby_group(group, 2)
    assert dist.get_process_group_ranks(nearby_group(group, 2)) == ([0, 1] if dist.get_rank() < 2 else [2, 3])
