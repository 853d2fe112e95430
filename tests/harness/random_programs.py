"""Training of random models, wrapped and plain, with a comparison of every gradient, output and parameter.

In float64 on the default group, bit for bit where both add the same numbers in the same order. Plans that the plain
model refuses (for example a segment that checkpointing cannot recompute) or that diverge to NaN are drawn again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

from fsdp import FullyShardedDataParallel
from tests.harness.lockstep import STEP, Data, Reference
from tests.harness.random_models import VOCABULARY, WIDTH, Plan, build, wrap


@dataclass
class Result:
    x: Tensor
    y: Tensor
    sides: list[Tensor]

    def losses(self, which: str) -> list[Tensor]:
        terms = [self.y] if which != "sides" else []
        terms += self.sides if which != "output" else []
        terms = [term for term in terms if term.requires_grad] or [self.y]
        return [term.square().mean() for term in terms]

    def loss(self, which: str) -> Tensor:
        return torch.stack(self.losses(which)).sum()


class Program:
    """A program of the lockstep harness."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __call__(self, model: Any, data: Data) -> Iterator[Any]:
        run = Run(self.plan, model, data)
        for step in self.plan.steps:
            for kind, loss in step:
                yield from run.go(kind, loss)
            yield STEP


class Run:
    """One model's run of a program; replicas run side by side."""

    def __init__(self, plan: Plan, model: Any, data: Data) -> None:
        self.plan, self.model, self.data = plan, model, data
        self.index = 0

    def _forward(self, x: Tensor | None = None) -> Result:
        model, data = self.model, self.data
        self.index += 1
        if x is None and self.plan.tokens:
            generator = torch.Generator().manual_seed(100 * self.index + data.rank)
            x = torch.randint(VOCABULARY, (2, 3), generator=generator)
        elif x is None:
            x = data.tensor(self.index, 2, 3, WIDTH).detach().double().requires_grad_()
        box = model.box
        box.sides.clear()
        output = model(x)
        losses = []
        if isinstance(output, dict):
            output, losses = output.values()
        elif isinstance(output, tuple):
            output, losses = output
        return Result(x, output, [*box.sides, *losses])

    def go(self, kind: str, which: str) -> Iterator[Any]:
        model, first = self.model, None
        if kind == "no_sync":
            with contextlib.ExitStack() as stack:
                for root in FullyShardedDataParallel.fsdp_modules(model, root_only=True):
                    stack.enter_context(root.no_sync())
                self._forward().loss(which).backward()
        elif kind in ("forward forward backward backward", "forward without backward", "two losses"):
            first = self._forward()
        result = self._forward()
        values = {"y": result.y.detach().clone()}
        if kind == "used twice" and not self.plan.tokens:
            sides = result.sides
            result = dataclasses.replace(self._forward(result.y), x=result.x)
            result.sides += sides
        elif kind == "evaluation in between":
            model.eval()
            with torch.no_grad():
                values["eval"] = self._forward().y
            model.train()
        if kind == "retained":
            result.loss(which).backward(retain_graph=True)
            yield {"x": result.x.grad}
        elif kind == "sides first":
            result.loss("sides").backward(retain_graph=True)
            yield {"x": result.x.grad}
            which = "output"
        elif kind == "gradients of inputs" and not self.plan.tokens:
            yield dict(enumerate(torch.autograd.grad(result.loss(which), result.x, retain_graph=True)))
        elif kind == "forward forward backward backward":
            assert first is not None
            first.loss(which).backward()
            yield {"x": first.x.grad}
        if kind == "several tensors":
            torch.autograd.backward(result.losses(which))
        elif kind == "two losses":
            assert first is not None
            (first.loss(which) + result.loss("all")).backward()
        else:
            result.loss(which).backward()
        yield {**values, "x": result.x.grad}


# -- comparing ---------------------------------------------------------------------------------------------------------


def _reference(plan: Plan, world_size: int) -> Reference:
    reference = Reference(
        lambda: build(plan), Program(plan), plan.make_optimizer, world_size=world_size, zero_unused=True
    )
    if not all(value.isfinite().all() for event in reference.events for value in event.params.values()):
        raise RuntimeError("the plain model diverges")
    return reference


def plan_of(seed: int, world_size: int = 2) -> Plan:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return reference_of(seed, world_size)[0]


def reference_of(seed: int, world_size: int = 2) -> tuple[Plan, Reference]:
    """Return the first plan of `seed` that the plain model can run, and its reference."""
    for attempt in range(20):
        plan = Plan.of(f"{seed}.{attempt}")
        try:
            return plan, _reference(plan, world_size)
        except (RuntimeError, CheckpointError):
            continue
    raise AssertionError(f"seed {seed}: the plain model refuses 20 programs")


def check(seed: int) -> Plan:
    """Run program `seed` on the default group, and return its plan; AssertionError if it differs from the plain
    model."""
    plan, reference = reference_of(seed, dist.get_world_size())
    way = os.environ.get("FSDP_COLLECTIVES", "direct")
    with mock.patch.dict(os.environ, FSDP_DEBUG="1" if plan.debug else "0", FSDP_COLLECTIVES=way):
        reference.check(
            wrap(plan, build(plan)),
            f"program {plan.seed}",
            ulps=plan.ulps,
            ulps_after_step=plan.ulps_after_step,
            at_rest=not plan.separate_roots,
        )
    return plan


def check_range(seeds: Iterable[int]) -> list[str]:
    """Check several seeds, and return their plans as text; an error names the first seed that fails."""
    plans = []
    for seed in seeds:
        try:
            with warnings.catch_warnings():
                # from a segment with hidden arguments, or inside the forward of an outer segment
                warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
                # from a separate root without inner units
                warnings.filterwarnings("ignore", "auto_wrap_policy .* matched no submodule")
                plans.append(str(check(seed)))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    return plans
