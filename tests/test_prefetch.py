"""Gathered ahead, exactly: which gathers are issued before which compute, and how many full buffers there are then.

A chain of units under a root R that has a layer at each end; here units are numbered in the order in which they run, so
from the other end in backward. With distance d and a record of the pass before (the first pass has none: all as with
distance 0), where "k + d" stands for that unit and all before it, as far as their gathers are not issued yet:

                            before R computes   before unit k computes      after its gradients, before they are reduced
    forward                 R and 0 ... d - 1   k + d
    backward, BACKWARD_PRE  0 ... d - 1         k + d
    backward, BACKWARD_POST                     k                           k + d
    backward, None                              k

So 1 + d units have memory while one computes, and under BACKWARD_POST d, or one where nothing was gathered ahead. The
root is gathered once for both passes.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from fsdp.runtime.order import ExecutionOrder
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from tests.harness.lockstep import assert_at_rest
from tests.harness.oracle import assert_bit_equal, clean_name
from tests.harness.pool import run_ranks
from tests.harness.process_groups import Collective, delay_collectives, record_collectives
from tests.harness.sharded import full_gradients, wrap

FULL_SHARD, SHARD_GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
UNITS, WIDTH, STEPS = 5, 5, 3


class Part(nn.Module):
    """A unit of the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Around(nn.Module):
    """A unit with units inside."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.inner = nn.Linear(WIDTH, WIDTH), nn.Sequential(Part(), Part())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.before(x))


class Chain(nn.Module):
    def __init__(self, *units: nn.Module, segment: str = "") -> None:
        super().__init__()
        self.stem, self.units, self.head = nn.Linear(WIDTH, WIDTH), nn.Sequential(*units), nn.Linear(WIDTH, 3)
        self.segment = segment

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.segment:
            return self.head(checkpoint(self.units, x, use_reentrant=self.segment == "reentrant"))
        return self.head(self.units(x))


def chain(segment: str = "") -> Chain:
    """With `segment` ("reentrant", "non-reentrant"), all units are checkpointed as one."""
    torch.manual_seed(0)
    return Chain(*(Part() for _ in range(UNITS)), segment=segment)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(2, WIDTH, generator=generator).requires_grad_()


@dataclass(frozen=True)
class Choice:
    """What a user may ask for."""

    forward: int = 1
    prefetch: BackwardPrefetch | None = PRE
    backward: int = 1
    limited: bool = True
    strategy: ShardingStrategy = FULL_SHARD
    use_orig_params: bool = False

    @property
    def options(self) -> dict[str, Any]:
        return {
            "forward_prefetch": self.forward > 1,
            "forward_prefetch_distance": self.forward,
            "backward_prefetch": self.prefetch,
            "backward_prefetch_distance": self.backward,
            "limit_all_gathers": self.limited,
        }


# -- what happens --------------------------------------------------------------------------------------------------


class Tracer:
    """What a step does: gathers and reductions as they are issued, and units as they begin to compute; with each event,
    how many units have memory (the root not counted). Units go by their names in the chain."""

    def __init__(self, model: FullyShardedDataParallel) -> None:
        self.events: list[str] = []
        self.live: list[int] = []
        self._fulls = []
        for path, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                name = clean_name(path).removeprefix("units.") or "R"
                self._watch(name, module.module)
                if module is not model:
                    self._fulls.append(module._fsdp_unit.handles[0].full)

    def _watch(self, name: str, module: nn.Module) -> None:
        """Inside of the unit's own hooks, before any operation of it."""

        def returns(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.grad_fn is not None:  # before the operation that made it, and after all hooks on the tensor
                output.grad_fn.register_prehook(lambda grads: self.note(f"backward {name}"))

        module.register_forward_pre_hook(lambda module, args: self.note(f"forward {name}"))
        module.register_forward_hook(returns)

    def note(self, event: str) -> None:
        self.events.append(event)
        self.live.append(sum(full.untyped_storage().nbytes() > 0 for full in self._fulls))

    def issued(self, record: Collective) -> None:
        if record.dtype is not None and record.dtype.is_floating_point:
            what, _, unit = str(record.label).partition(" ")
            self.note(
                f"{what} {'R' if unit == 'the root unit' else unit[len('unit ') :].strip(chr(39))[len('units.') :]}"
            )

    def run(self, model: FullyShardedDataParallel, step: int) -> tuple[list[str], list[int]]:
        self.events, self.live = [], []
        with record_collectives() as log:
            log.on_issue = self.issued
            model(batch(step)).square().mean().backward()
        return self.events, self.live


def train(choice: Choice, module: nn.Module, delayed: bool) -> tuple[list[Any], list[dict[str, Any]]]:
    """(events, live units) and gradients of each step."""
    policy = ModuleWrapPolicy({Part, Around})
    model = wrap(module, choice.strategy, choice.use_orig_params, wrap_policy=policy, **choice.options)
    tracer = Tracer(model)
    steps, grads = [], []
    for step in range(STEPS):
        with delay_collectives(seed=step, max_ms=0.5) if delayed else nullcontext():
            steps.append(tracer.run(model, step))
        assert_at_rest(model, f"{choice}, step {step}")
        grads.append(full_gradients(model))
        model.zero_grad()
    assert steps[2] == steps[1], f"{choice}: the same events and the same memory at every step"
    return steps, grads


# -- what should happen --------------------------------------------------------------------------------------------


class Expected:
    """The events of one step."""

    def __init__(self, order: list[int]) -> None:
        self.events: list[str] = []
        self._order = order
        self._issued = 0

    def gathers(self, until: int) -> None:
        """Those of the pass that are not issued yet, up to this many."""
        for unit in self._order[self._issued : until]:
            self.events.append(f"gather {unit}")
        self._issued = max(self._issued, min(until, len(self._order)))

    def note(self, *events: str) -> None:
        self.events.extend(events)


def expected_forward(distance: int) -> list[str]:
    order = list(range(UNITS))
    expected = Expected(order)
    expected.note("gather R")
    expected.gathers(distance)
    expected.note("forward R")
    for k in order:
        expected.gathers(k + distance + 1)
        expected.note(f"forward {k}")
    return expected.events


def expected_backward(distance: int, after: bool) -> list[str]:
    order = list(reversed(range(UNITS)))
    expected = Expected(order)
    if not after:
        expected.gathers(distance)
    expected.note("backward R")
    for k, unit in enumerate(order):
        expected.gathers(k + 1 if after else k + distance + 1)
        expected.note(f"backward {unit}")
        expected.gathers(k + distance + 1)
        expected.note(f"reduce {unit}")
    expected.note("reduce R")
    return expected.events


def check_order(choice: Choice, steps: list[Any]) -> None:
    for number, (events, live) in enumerate(steps):
        forward, backward = (choice.forward, choice.backward) if number else (0, 0)
        wanted = expected_forward(forward) + expected_backward(backward, choice.prefetch is POST)
        assert events == wanted, f"{choice}, step {number}:\n{events}\nexpected\n{wanted}"
        for event, count in zip(events, live, strict=True):
            what, _, unit = event.partition(" ")
            if what == "forward" and unit != "R":
                most = min(forward + 1, UNITS - int(unit))
            elif what == "backward" and unit != "R":
                most = backward + 1
                if choice.prefetch is POST:
                    most = max(backward, 1) if int(unit) < UNITS - 1 else 1
                most = min(most, int(unit) + 1)
            else:
                continue
            assert count == most, f"{choice}, step {number}, {event}: {count} units gathered, expected {most}"
        bound = {"forward": forward + 1, "backward": backward + 1}
        middle = events.index("backward R") + 1
        for phase, counts in (("forward", live[: events.index(f"forward {UNITS - 1}")]), ("backward", live[middle:])):
            assert max(counts) <= bound[phase], f"{choice}, step {number}: {max(counts)} at a time in {phase}"


DISTANCES = (0, 1, 2, 3)
CHOICES = [Choice(forward, PRE, UNITS - forward) for forward in DISTANCES]
CHOICES += [Choice(1, prefetch, backward) for prefetch in (PRE, POST) for backward in DISTANCES]
CHOICES += [Choice(2, None, 0), Choice(2, PRE, 2, limited=False), Choice(0, POST, 2, limited=False)]


def orders(delayed: bool) -> None:
    os.environ["FSDP_COLLECTIVES"] = "native"
    plain: list[dict[str, Any]] | None = None
    for number, choice in enumerate(CHOICES[:: 2 if delayed else 1]):
        choice = replace(choice, use_orig_params=number % 2 == 0)
        steps, grads = train(choice, chain(), delayed)
        check_order(choice, steps)
        plain = plain or grads
        for step, (ours, theirs) in enumerate(zip(grads, plain, strict=True)):
            assert_bit_equal(ours, theirs, f"{choice}, step {step}")


def test_a_pass_in_which_nothing_was_gathered_is_a_record_too() -> None:
    """After it nothing is gathered ahead; a unit at another place than recorded moves on from there."""
    first, second, third = units = ["first", "second", "third"]
    order: ExecutionOrder[str] = ExecutionOrder()
    order.start(first, backward=False)
    for unit in units:
        order.record(unit)
    order.stop()
    order.record(third)  # for nobody
    order.start(first, backward=True)
    assert order.upcoming(1) == []
    order.start(first, backward=False)
    assert order.upcoming(1) == [first]
    order.record(second)
    assert order.upcoming(2) == [third]
    order.start(first, backward=False)
    assert order.upcoming(2) == [second]
    order.start(first, backward=False)
    assert order.upcoming(2) == []


@pytest.mark.parametrize("delayed", [False, True])
def test_what_is_gathered_before_what_computes(delayed: bool) -> None:
    """Each kind of prefetch at each distance, and with collectives that come late every other one; no bit
    of a gradient depends on it."""
    run_ranks(2, orders, delayed)


# -- beyond the chain ----------------------------------------------------------------------------------------------


def room() -> None:
    """What the limit holds back, and what it does not."""
    for limited in (True, False):
        choice = Choice(limited=limited)
        steps, _ = train(choice, Chain(Part(), Around(), Part()), False)
        events, live = steps[-1]
        start, last = events.index("forward 1.inner.1"), events.index("gather 2")
        # Unit 1 is live around 1.inner.1 and not around 2, for which there is room only when 1.inner.1 is over.
        assert (last > start) is limited, events
        assert live[start] == (2 if limited else 3), live


def test_the_limit_counts_what_is_live() -> None:
    run_ranks(2, room)


def segments(reentrant: bool) -> None:
    distances = {PRE: DISTANCES[reentrant::2], POST: DISTANCES[not reentrant :: 2]}
    for choice in [Choice(1, prefetch, d) for prefetch in (PRE, POST) for d in distances[prefetch]] + [
        Choice(1, None), Choice(1, PRE, 1, limited=False), Choice(1, PRE, 1, strategy=SHARD_GRAD_OP),
        Choice(3, PRE, 3, strategy=SHARD_GRAD_OP),
    ]:  # fmt: skip
        steps, _ = train(choice, chain("reentrant" if reentrant else "non-reentrant"), False)
        # Without reentrance the last unit's backward is under way, and so gathered, while all are recomputed.
        bound = max(1 + (choice.backward if choice.prefetch else 0), 1 if reentrant else 2)
        for number, (events, live) in enumerate(steps):
            backward = events.index(f"forward {UNITS - 1}") + 1
            gathers = sum(event.startswith("gather") for event in events[backward:])
            most = max(live[backward:])
            if choice.strategy is SHARD_GRAD_OP:
                wanted = (0, UNITS)
            elif choice.limited:  # all are recomputed, and the last of them stay for their backward
                wanted = (2 * UNITS - bound, bound)
            else:
                wanted = (UNITS, UNITS)
            assert (gathers, most) == wanted, f"{choice}, step {number}: {gathers} gathers, {most} units\n{events}"


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_was_recomputed_stays_as_far_as_the_limit_goes(reentrant: bool) -> None:
    """Without the limit the whole segment stays, and is gathered no second time."""
    run_ranks(2, segments, reentrant)


def kept() -> None:
    """Units that stay between the passes are no reason to hold others back."""
    for distance in DISTANCES:
        choice = Choice(distance, PRE, distance, strategy=SHARD_GRAD_OP)
        steps, _ = train(choice, chain(), False)
        for number, (events, _) in enumerate(steps):
            forward = expected_forward(distance if number else 0)
            assert events[: len(forward)] == forward, f"{choice}, step {number}: {events}"
            assert not any(event.startswith("gather") for event in events[len(forward) :])
    policy, choice = ModuleWrapPolicy({Part, Around}), Choice(2, PRE, 0, strategy=SHARD_GRAD_OP)
    model = wrap(chain(), choice.strategy, wrap_policy=policy, **choice.options)
    tracer = Tracer(model)
    with model.no_sync():
        tracer.run(model, 0)
    events, _ = tracer.run(model, 1)  # with what was kept; its order is a record all the same
    assert not any(event.startswith("gather") for event in events), events
    events, _ = tracer.run(model, 2)
    assert events[: len(expected_forward(2))] == expected_forward(2), events


def test_units_that_are_kept() -> None:
    run_ranks(2, kept)


def one_unit_farther() -> None:
    module = chain()
    policy = CustomPolicy(lambda m: {"forward_prefetch_distance": 3} if m is module.units[1] else isinstance(m, Part))
    model = wrap(module, FULL_SHARD, wrap_policy=policy)
    tracer = Tracer(model)
    for step in range(2):
        events, _ = tracer.run(model, step)
    assert events[3 : events.index("forward 4") + 1] == [
        "gather 1", "forward 0", "gather 2", "gather 3", "gather 4", "forward 1", "forward 2", "forward 3", "forward 4",
    ]  # fmt: skip


def test_each_unit_may_have_distances_of_its_own() -> None:
    run_ranks(2, one_unit_farther)


def different_ranks() -> str:
    options: list[dict[str, Any]] = [{}, {"backward_prefetch_distance": 2}]
    model = wrap(chain(), FULL_SHARD, wrap_policy=ModuleWrapPolicy({Part}), **options[dist.get_rank()])
    with pytest.raises(RuntimeError) as caught:
        model(batch(0))
    return str(caught.value)


def test_ranks_that_gather_ahead_differently_are_told() -> None:
    """Their gathers and reductions would come in different orders."""
    for words in run_ranks(2, different_ranks):
        assert "FULL_SHARD, BACKWARD_PRE, 48" in words and "FULL_SHARD, BACKWARD_PRE, 2 ahead" in words, words
