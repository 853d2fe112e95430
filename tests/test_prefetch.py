"""Prefetching, exactly: the order of gathers and compute, and the number of full buffers at each point.

A chain of units under a root R that has a layer at each end. Units are numbered in the order in which they run, so
backward begins at the last. The table shows distance d with a recorded pass; the first pass behaves like distance 0.
"k + d" stands for unit k + d and all earlier units that are not gathered yet:

                            before R computes   before unit k computes      after its gradients, before they are reduced
    forward                 R and 0 ... d - 1   k + d
    backward, BACKWARD_PRE  0 ... d - 1         k + d
    backward, BACKWARD_POST                     k                           k + d
    backward, None                              k

So 1 + d units have memory while one computes; under BACKWARD_POST d, or one without a prefetch. The root is gathered
once for both passes.
"""

from __future__ import annotations

import itertools
import os
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from tests.harness.chains import Chain, Outer, Part, batch
from tests.harness.lockstep import assert_at_rest
from tests.harness.oracle import assert_bit_equal, clean_name
from tests.harness.pool import on_ranks
from tests.harness.process_groups import Collective, delay_collectives, record_collectives
from tests.harness.sharded import full_gradients, wrap
from tests.harness.strategies import FULL_SHARD, SHARD_GRAD_OP

PRE, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST
UNITS, STEPS = 5, 3


def chain(segment: str = "") -> Chain:
    torch.manual_seed(0)
    return Chain(*(Part() for _ in range(UNITS)), segment=segment)


@dataclass(frozen=True)
class Choice:
    """Prefetch options of a user."""

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


# -- observed ------------------------------------------------------------------------------------------------------


class Tracer:
    """Records gathers, reductions and computing units of a step, and the number of unsharded inner units."""

    def __init__(self, model: FullyShardedDataParallel) -> None:
        self.events: list[str] = []
        self.live: list[int] = []
        self.waits: list[str] = []  # waits for gathers, between the computing units
        self._fulls = []
        self._log: Any = None
        for path, module in model.named_modules():
            if isinstance(module, FullyShardedDataParallel):
                name = clean_name(path).removeprefix("units.") or "R"
                self._watch(name, module.module)
                if module is not model:
                    self._fulls.append(module._fsdp_unit.handles[0].full)

    def _watch(self, name: str, module: nn.Module) -> None:
        """Hook into the unit's own module, before its operations."""

        def returns(module: nn.Module, args: Any, output: Tensor) -> None:
            if output.grad_fn is not None:  # runs after all hooks on the tensor
                output.grad_fn.register_prehook(lambda grads: self.note(f"backward {name}"))

        module.register_forward_pre_hook(lambda module, args: self.note(f"forward {name}"))
        module.register_forward_hook(returns)

    def note(self, event: str) -> None:
        self.events.append(event)
        self._log.mark(event)
        self.live.append(sum(full.untyped_storage().nbytes() > 0 for full in self._fulls))

    def issued(self, record: Collective) -> None:
        if record.dtype is not None and record.dtype.is_floating_point:
            self.note(self._name(record))

    @staticmethod
    def _name(record: Collective) -> str:
        verb, _, unit = str(record.label).partition(" ")
        return f"{verb} {'R' if unit == 'the root unit' else unit[len('unit ') :].strip(chr(39))[len('units.') :]}"

    def run(self, model: FullyShardedDataParallel, step: int) -> tuple[list[str], list[int]]:
        self.events, self.live = [], []
        with record_collectives() as log:
            log.on_issue, self._log = self.issued, log
            model(batch(step)).square().mean().backward()
        words = [entry if kind == "mark" else f"wait {self._name(log.records[entry])}" for kind, entry in log.events]
        self.waits = [each for each in words if each.startswith(("forward", "backward", "wait gather"))]
        return self.events, self.live

    def check_waits(self) -> None:
        """Check that each unit waits for its gather after the preceding unit's computation."""
        computing = [index for index, event in enumerate(self.waits) if not event.startswith("wait")]
        for before, now in itertools.pairwise(computing):
            unit = self.waits[now].split()[1]
            assert unit == "R" or f"wait gather {unit}" in self.waits[before:now], self.waits


def train(choice: Choice, module: Chain, delayed: bool) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return (events, live units) and gradients of each step."""
    policy = ModuleWrapPolicy({Part, Outer})
    model = wrap(module, choice.strategy, choice.use_orig_params, wrap_policy=policy, **choice.options)
    tracer = Tracer(model)
    steps, grads = [], []
    for step in range(STEPS):
        with delay_collectives(seed=step, max_ms=0.5) if delayed else nullcontext():
            steps.append(tracer.run(model, step))
        if choice.strategy is FULL_SHARD and not module.segment and len(module.units) == UNITS:
            tracer.check_waits()
        assert_at_rest(model, f"{choice}, step {step}")
        grads.append(full_gradients(model))
        model.zero_grad()
    assert steps[2] == steps[1], f"{choice}: the same events and the same memory at every step"
    return steps, grads


# -- expected ------------------------------------------------------------------------------------------------------


class Expected:
    """The expected events of one step."""

    def __init__(self, order: list[int]) -> None:
        self.events: list[str] = []
        self._order = order
        self._issued = 0

    def gathers(self, until: int) -> None:
        """Append gathers of the pass that are not issued yet, up to this number."""
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
        expected_events = expected_forward(forward) + expected_backward(backward, choice.prefetch is POST)
        assert events == expected_events, f"{choice}, step {number}:\n{events}\nexpected\n{expected_events}"
        for event, count in zip(events, live, strict=True):
            verb, _, unit = event.partition(" ")
            if verb == "forward" and unit != "R":
                limit = min(forward + 1, UNITS - int(unit))
            elif verb == "backward" and unit != "R":
                limit = backward + 1
                if choice.prefetch is POST:
                    limit = max(backward, 1) if int(unit) < UNITS - 1 else 1
                limit = min(limit, int(unit) + 1)
            else:
                continue
            assert count == limit, f"{choice}, step {number}, {event}: {count} units gathered, expected {limit}"
        bound = {"forward": forward + 1, "backward": backward + 1}
        middle = events.index("backward R") + 1
        for phase, counts in (("forward", live[: events.index(f"forward {UNITS - 1}")]), ("backward", live[middle:])):
            assert max(counts) <= bound[phase], f"{choice}, step {number}: {max(counts)} at a time in {phase}"


DISTANCES = (0, 1, 3)
CHOICES = [Choice(0, PRE, UNITS), Choice(1, PRE, 0), Choice(3, PRE, 1), Choice(1, PRE, 3)]
CHOICES += [Choice(0, POST, 1), Choice(1, POST, 3), Choice(3, POST, 0)]
CHOICES += [Choice(2, None, 0), Choice(2, PRE, 2, limited=False), Choice(0, POST, 2, limited=False)]


@pytest.mark.parametrize("delayed", [False, True])
@on_ranks(2)
def test_gathers_are_issued_at_each_distance_and_kind_of_prefetch(delayed: bool) -> None:
    """With delayed collectives every third choice. Gradients do not depend on the choice."""
    os.environ["FSDP_COLLECTIVES"] = "native"
    plain: list[dict[str, Any]] | None = None
    for number, choice in enumerate(CHOICES[:: 3 if delayed else 1]):
        choice = replace(choice, use_orig_params=number % 2 == 0)
        steps, grads = train(choice, chain(), delayed)
        check_order(choice, steps)
        plain = plain or grads
        for step, (ours, theirs) in enumerate(zip(grads, plain, strict=True)):
            assert_bit_equal(ours, theirs, f"{choice}, step {step}")


# -- beyond the chain ----------------------------------------------------------------------------------------------


@on_ranks(2)
def test_limit_all_gathers_counts_unsharded_units() -> None:
    for limited in (True, False):
        choice = Choice(limited=limited)
        steps, _ = train(choice, Chain(Part(), Outer(), Part()), False)
        events, live = steps[-1]
        start, last = events.index("forward 1.inner.1"), events.index("gather 2")
        # Unit 1 is live around 1.inner.1 and not around 2, for which there is room only when 1.inner.1 is over.
        assert (last > start) is limited, events
        gathers = [event.removeprefix("gather ") for event in events if event.startswith("gather ")]
        assert gathers == ["R", "0", "1", *(inner := ["1.inner.0", "1.inner.1"]), "2", "2", "1", *inner[::-1], "0"]
        assert live[start] == (2 if limited else 3), live


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_recomputed_units_stay_unsharded_up_to_the_limit(reentrant: bool) -> None:
    """Without the limit the full segment stays and is not gathered again."""
    distances = {PRE: DISTANCES[reentrant::2], POST: DISTANCES[not reentrant :: 2]}
    choices = [Choice(1, prefetch, d) for prefetch in (PRE, POST) for d in distances[prefetch]]
    kept = Choice(3, PRE, 3, strategy=SHARD_GRAD_OP) if reentrant else Choice(1, PRE, 1, strategy=SHARD_GRAD_OP)
    choices += [kept, Choice(1, PRE, 1, limited=False)] + [Choice(1, None)] * (not reentrant)
    for choice in choices:
        steps, _ = train(choice, chain("reentrant" if reentrant else "non-reentrant"), False)
        # Without reentrance the last unit's backward is under way, and so gathered, while all are recomputed.
        bound = max(1 + (choice.backward if choice.prefetch else 0), 1 if reentrant else 2)
        for number, (events, live) in enumerate(steps):
            backward = events.index(f"forward {UNITS - 1}") + 1
            gathers = sum(event.startswith("gather") for event in events[backward:])
            limit = max(live[backward:])
            if choice.strategy is SHARD_GRAD_OP:
                expected_events = (0, UNITS)
            elif choice.limited:  # all are recomputed; the last ones stay for their backward
                expected_events = (2 * UNITS - bound, bound)
            else:
                expected_events = (UNITS, UNITS)
            assert (gathers, limit) == expected_events, (
                f"{choice}, step {number}: {gathers} gathers, {limit} units\n{events}"
            )


@on_ranks(2)
def test_units_kept_between_passes_do_not_count_for_the_limit() -> None:
    for distance in DISTANCES:
        choice = Choice(distance, PRE, distance, strategy=SHARD_GRAD_OP)
        steps, _ = train(choice, chain(), False)
        for number, (events, _) in enumerate(steps):
            forward = expected_forward(distance if number else 0)
            assert events[: len(forward)] == forward, f"{choice}, step {number}: {events}"
            assert not any(event.startswith("gather") for event in events[len(forward) :])
    policy, choice = ModuleWrapPolicy({Part, Outer}), Choice(2, PRE, 0, strategy=SHARD_GRAD_OP)
    model = wrap(chain(), choice.strategy, wrap_policy=policy, **choice.options)
    tracer = Tracer(model)
    with model.no_sync():
        tracer.run(model, 0)
    events, _ = tracer.run(model, 1)  # uses kept units and still records the order
    assert not any(event.startswith("gather") for event in events), events
    events, _ = tracer.run(model, 2)
    assert events[: len(expected_forward(2))] == expected_forward(2), events


@on_ranks(2)
def test_prefetched_units_that_do_not_run_are_resharded_at_the_end_of_the_forward() -> None:
    module = chain()
    model = wrap(module, FULL_SHARD, wrap_policy=ModuleWrapPolicy({Part}), forward_prefetch_distance=3)
    tracer = Tracer(model)
    for step in range(2):
        tracer.run(model, step)
    units = module.units
    module.units = units[:2]
    with torch.no_grad(), record_collectives() as log:
        model(batch(2))
    gathered = [str(record.label) for record in log.records if str(record.label).startswith("gather unit")]
    assert len(gathered) > 2, "nothing was prefetched"
    assert_at_rest(model, "a forward of two units")
    module.units = units
    assert tracer.run(model, 3)[0].count("reduce 4") == 1


@on_ranks(2)
def test_prefetch_distances_of_single_units() -> None:
    module = chain()
    policy = CustomPolicy(lambda m: {"forward_prefetch_distance": 3} if m is module.units[1] else isinstance(m, Part))
    model = wrap(module, FULL_SHARD, wrap_policy=policy)
    tracer = Tracer(model)
    for step in range(2):
        events, _ = tracer.run(model, step)
    assert events[3 : events.index("forward 4") + 1] == [
        "gather 1", "forward 0", "gather 2", "gather 3", "gather 4", "forward 1", "forward 2", "forward 3", "forward 4",
    ]  # fmt: skip


@on_ranks(2)
def test_different_distances_on_ranks_are_an_error() -> None:
    """The orders of gathers and reductions would differ."""
    options: list[dict[str, Any]] = [{}, {"backward_prefetch_distance": 2}]
    model = wrap(chain(), FULL_SHARD, wrap_policy=ModuleWrapPolicy({Part}), **options[dist.get_rank()])
    with pytest.raises(RuntimeError) as caught:
        model(batch(0))
    message = str(caught.value)
    assert "FULL_SHARD, BACKWARD_PRE, 48" in message and "FULL_SHARD, BACKWARD_PRE, 2 ahead" in message, message
