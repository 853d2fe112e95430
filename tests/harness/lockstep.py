"""One program, run by a sharded model and by a plain replica of every rank, compared after every backward.

A `Program` is a generator function of (model, `Data`): it calls the model and `backward()` as it likes and yields

* a dictionary after each synchronised backward pass: this rank's tensors to compare (outputs, gradients of inputs);
* `STEP` where the optimizer steps and gradients are set to None, `CLEAR` where they are set to None.

`Reference` runs the program on one plain replica per rank, and `Reference.check` on a wrapped model. At each yield of a
dictionary the replicas' gradients are averaged in rank order and added to earlier gradients. A sharded model that
reduces at the end of each backward agrees bit for bit, on 2 ranks and on more if the sum has rank order.

Comparisons are local: each rank compares its tensors with its part of the reference, without communication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp
from fsdp.runtime import arrivals
from fsdp.runtime.unit import units_in
from tests.harness.oracle import (
    MakeOptimizer,
    assert_bit_equal,
    assert_close_ulp,
    mean_gradients,
    named_parameters,
    sgd_of_halves,
)
from tests.harness.sharded import _in_memory_order

STEP, CLEAR = "step", "clear"

# Units in float64 by which values may differ where sums are added up in another order and training goes on from them.
# Two orders of a sum differ by at most (terms - 1) * 2**-53 of the largest partial sum. Further steps multiply this by
# the conditions of a few layers of width 7 or less: less than 2**20 units, 2**-32 of the largest element. A missing,
# stale or repeated contribution changes the sum by more than 2**-20.
REASSOCIATED = 2.0**20


@dataclass(frozen=True)
class Data:
    """Rank and inputs of one rank."""

    rank: int
    world_size: int

    def tensor(self, index: int, *shape: int) -> Tensor:
        """Return normal values that depend on `index` and the rank only; a leaf that requires grad."""
        generator = torch.Generator().manual_seed(1000 * index + self.rank)
        return torch.randn(*shape, generator=generator).requires_grad_()


Values = dict[str, Tensor | None]
Program = Callable[[nn.Module, Data], Iterator[Any]]


@dataclass
class _Event:
    """The reference at one yield: mean gradients so far and each rank's values; after a step, the parameters.

    `summed` is the gradient of magnitudes, which bounds rounding.
    """

    grads: Values = field(default_factory=dict)
    summed: Values = field(default_factory=dict)
    values: list[Values] = field(default_factory=list)
    params: Values = field(default_factory=dict)


class Reference:
    """Plain replicas under `program`. Gradients have full shapes and the plain model's parameter names."""

    def __init__(
        self,
        build: Callable[[], nn.Module],
        program: Program,
        make_optimizer: MakeOptimizer = sgd_of_halves,
        *,
        world_size: int | None = None,
        zero_unused: bool = False,
    ) -> None:
        """Run the program on plain replicas.

        With `zero_unused`, missing gradients are zeros at a step, because momentum and weight decay move unused
        members of used units.
        """
        self.build, self.program, self.make_optimizer = build, program, make_optimizer
        self.world_size = world_size or dist.get_world_size()
        replicas = [build() for _ in range(self.world_size)]
        optimizer = make_optimizer(replicas[0].parameters())
        self.events: list[_Event] = []
        totals: Values = dict.fromkeys(named_parameters(replicas[0]))
        summed: Values = dict(totals)
        programs = [program(replica, Data(rank, self.world_size)) for rank, replica in enumerate(replicas)]
        for yielded in zip(*programs, strict=True):
            if yielded[0] is CLEAR:
                totals, summed = dict.fromkeys(totals), dict.fromkeys(totals)
                for replica in replicas:
                    replica.zero_grad()
                self.events.append(_Event())
                continue
            if yielded[0] is STEP:
                for name, param in named_parameters(replicas[0]).items():
                    grad = totals[name]
                    if grad is None and zero_unused and param.requires_grad:
                        grad = torch.zeros_like(param)
                    param.grad = grad
                optimizer.step()
                optimizer.zero_grad()
                totals, summed = dict.fromkeys(totals), dict.fromkeys(totals)
                with torch.no_grad():
                    for replica in replicas[1:]:
                        for ours, theirs in zip(replica.parameters(), replicas[0].parameters()):
                            ours.copy_(theirs)
                params = {name: p.detach().clone() for name, p in named_parameters(replicas[0]).items()}
                self.events.append(_Event(params=params))
                continue
            for name, found in mean_gradients(replicas, self.world_size).items():
                for sums, value in zip((totals, summed), found or ()):
                    before = sums[name]
                    sums[name] = value if before is None else before + value
            self.events.append(_Event(dict(totals), dict(summed), [_copies(values) for values in yielded]))

    def check(
        self,
        model: nn.Module,
        what: str,
        *,
        ulps: float = 0,
        ulps_after_step: float | None = None,
        at_rest: bool = True,
    ) -> None:
        """Run the program on the wrapped `model` and compare, bit for bit with `ulps=0`.

        Parameters after a step are bit-equal only if the optimizer rounds alike at every memory position, as
        `sgd_of_halves` does. Otherwise, or if `ulps` is not 0, `ulps_after_step` bounds values after a step:
        `REASSOCIATED` for float64 models.
        """
        rank = dist.get_rank()
        optimizer = self.make_optimizer(model.parameters())
        program = self.program(model, Data(rank, self.world_size))
        for index, event in enumerate(self.events):
            where = f"{what}, event {index}"
            try:
                yielded = next(program)
            except Exception as error:
                raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
            if yielded is CLEAR:
                optimizer.zero_grad()
                continue
            if yielded is STEP:
                optimizer.step()
                optimizer.zero_grad()
                ulps = ulps if ulps_after_step is None else ulps_after_step
                assert_local_parameters(model, event.params, ulps, where)
                continue
            assert_same(yielded, event.values[rank], ulps, f"{where}, values")
            assert_local_gradients(model, event.grads, ulps, where, summed=event.summed)
            if at_rest:
                assert_at_rest(model, where)
        next(program, None)


def _copies(values: Mapping[str, Tensor | None]) -> Values:
    return {name: None if value is None else value.detach().clone() for name, value in values.items()}


def assert_same(
    actual: Mapping[str, Tensor | None], expected: Values, ulps: float, what: str, summed: Values | None = None
) -> None:
    """Assert bit equality with `ulps=0`, else a bound in units in the last place of the largest element or `summed`."""
    __tracebackhide__ = True
    if ulps == 0:
        assert_bit_equal(actual, expected, what)
    else:
        assert_close_ulp(actual, expected, ulps, what, summed=summed)


# -- values of a rank -------------------------------------------------------------------------------------------


def assert_local_gradients(
    model: nn.Module,
    full: Mapping[str, Tensor | None],
    ulps: float,
    what: str,
    summed: Mapping[str, Tensor | None] | None = None,
) -> None:
    """Assert that every `.grad` is this rank's part of `full`, or None, and that padding is zero.

    A parameter with None in `full` has zeros if another parameter of its unit has a gradient, and None if it does
    not require grad. `ulps` are units of `summed`, if given.
    """
    __tracebackhide__ = True
    actual, expected = local_gradients(model, full)
    terms = None if summed is None else local_gradients(model, summed)[1]
    assert_same(actual, expected, ulps, f"{what}, gradients", terms)


def local_gradients(model: nn.Module, full: Mapping[str, Tensor | None]) -> tuple[Values, Values]:
    """Return (actual, expected) gradients of this rank by name; with flat parameters one tensor per bucket."""
    actual: Values = {}
    expected: Values = {}
    for unit in fsdp.shard_info(model):
        used = any(full[unit.full_name(r)] is not None for b in unit.buckets for r in b.layout.params)
        for bucket in unit.buckets:
            layout, sharded = bucket.layout, bucket.layout.world_size > 1
            if bucket.params[0] is bucket.flat_param:
                name = f"{unit.name}:{layout.params[0].name}..."
                actual[name] = bucket.flat_param.grad
                expected[name] = None
                if used and bucket.flat_param.requires_grad:
                    flat = torch.zeros(layout.padded_numel, dtype=layout.dtype)
                    for record in layout.params:
                        grad = full[unit.full_name(record)]
                        if grad is not None:
                            flat[record.offset : record.end] = _in_memory_order(grad, record)
                    start, end = layout.shard_range(bucket.rank)
                    expected[name] = flat[start:end]
                continue
            for param, record, piece in zip(bucket.params, layout.params, bucket.pieces):
                name = unit.full_name(record)
                actual[name] = param.grad
                grad = full[name] if full[name] is not None else torch.zeros(record.shape, dtype=layout.dtype)
                of_others = (
                    sharded and piece.numel == 0 and record.numel > 0
                )  # every rank owns a parameter without elements
                if not used or not param.requires_grad or of_others:
                    expected[name] = None
                elif sharded:
                    expected[name] = _in_memory_order(grad, record)[piece.start : piece.end]
                else:
                    expected[name] = grad
    return actual, expected


def assert_local_parameters(model: nn.Module, full: Values, ulps: float, what: str) -> None:
    """Assert that this rank's shards hold this rank's part of `full`, and that padding is zero."""
    __tracebackhide__ = True
    actual: Values = {}
    expected: Values = {}
    for unit in fsdp.shard_info(model):
        for bucket in unit.buckets:
            flat = torch.zeros(bucket.layout.padded_numel, dtype=bucket.layout.dtype)
            for record in bucket.layout.params:
                value = full[unit.full_name(record)]
                assert value is not None
                flat[record.offset : record.end] = _in_memory_order(value, record)
            start, end = bucket.layout.shard_range(bucket.rank)
            name = f"{unit.name}:{bucket.layout.params[0].name}..."
            actual[name], expected[name] = bucket.flat_param.detach(), flat[start:end]
    assert_same(actual, expected, ulps, f"{what}, parameters")


def _kept(unit: Any) -> bool:
    found = None if unit.context is None else unit.context.unsharder._gathered.get(unit)
    return found is not None and found.versions is not None and not unit.policy.reshard_after_forward


def assert_at_rest(model: nn.Module, what: str) -> None:
    """Assert that no unit is unsharded or running: shards are registered, full buffers have no memory (or are
    poisoned), leaves no gradient.

    Units that a backward of `no_sync` keeps for the next forward are exempt.
    """
    __tracebackhide__ = True
    wrong = []
    for name, unit, _ in units_in(model):
        for handle in unit.handles:
            if _kept(unit):
                continue
            if handle.groups.sharded and handle.full.untyped_storage().nbytes() and not handle.full.isnan().all():
                wrong.append(f"unit {name!r} holds {handle.full.untyped_storage().nbytes()} bytes")
            wrong += [f"a leaf of {name!r} has a gradient" for leaf in handle.leaves if leaf.grad is not None]
        if unit.phase.name != "IDLE":
            wrong.append(f"unit {name!r} is in {unit.phase}")
        leaves = {id(leaf) for handle in unit.handles if handle.groups.sharded for leaf in handle.leaves}
        for module in unit.module.modules():
            wrong += [f"{key} of {name!r} is a leaf" for key, p in module._parameters.items() if id(p) in leaves]
        context = unit.context
        gathered = context is not None and any(not _kept(other) for other in context.unsharder)
        if context is not None and (gathered or context.unsharder.idle or context.passes.in_backward):
            wrong.append(f"the context of {name!r} is not at rest")
    registered = {id(param) for param in model.parameters()}
    for bucket in (bucket for unit in fsdp.shard_info(model) for bucket in unit.buckets):
        shard = bucket.flat_param.untyped_storage().data_ptr()
        for name, param in zip((record.name for record in bucket.layout.params), bucket.params):
            if id(param) not in registered or (param.numel() and param.untyped_storage().data_ptr() != shard):
                wrong.append(f"{name!r} is not registered in the shard")
    if wrong:
        raise AssertionError(f"{what}, not at rest: " + "; ".join(wrong[:6]))


ALL_SMALL = pytest.mark.parametrize("all_small", [False, True], ids=["mixed", "small"])


@contextmanager
def gradient_sizes(all_small: bool) -> Iterator[None]:
    """Let all gradients of the test models be small, and so held until the last one arrives, or else some."""
    with mock.patch.object(arrivals, "SMALL", 1 << 16 if all_small else arrivals.SMALL):  # see `worker.main`
        yield


def with_gradients(all_small: bool, function: Callable[..., Any], *args: Any) -> Any:
    """Call ``function`` under `gradient_sizes`."""
    with gradient_sizes(all_small):
        return function(*args)
