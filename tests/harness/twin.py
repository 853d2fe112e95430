"""A wrapped model next to its plain twin, which takes the same steps on the batches of all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.harness.oracle import assert_bit_equal, clean_name
from tests.harness.sharded import full_gradients, full_parameters


def values(module: nn.Module) -> dict[str, Tensor]:
    return {clean_name(name): param.detach().clone() for name, param in module.named_parameters()}


def average(module: nn.Module, world_size: int, run: Callable[[int], Any]) -> None:
    """Average the gradients of `run(rank)` over all ranks, summed in rank order; unused parameters have zeros."""
    grads = []
    for rank in range(world_size):
        module.zero_grad()
        run(rank)
        grads.append([p.grad for p in module.parameters()])
    for param, *each in zip(module.parameters(), *grads, strict=True):
        if each[0] is not None:
            wide = torch.float32 if param.dtype.itemsize == 2 else param.dtype
            param.grad = (functools.reduce(torch.add, [grad.to(wide) for grad in each]) / world_size).to(param.dtype)
        elif param.requires_grad:
            param.grad = torch.zeros_like(param)  # unused, next to used ones


class Twin:
    """A wrapped model and the plain one. Its gradients are the means over all ranks, summed in rank order.

    `loss_of(model, step, rank)` is a model's loss on the batch of one rank. With `ranks=1` all ranks have one batch.
    """

    def __init__(
        self,
        model: nn.Module,
        plain: nn.Module,
        loss_of: Callable[[Any, int, int], Tensor],
        make_optimizer: Callable[[nn.Module], Optimizer],
        ranks: int | None = None,
    ) -> None:
        self.model: Any = model
        self.plain: Any = plain
        self.loss_of, self.ranks = loss_of, dist.get_world_size() if ranks is None else ranks
        self.optimizers = [make_optimizer(model), make_optimizer(plain)]

    def values(self) -> dict[str, Tensor]:
        """Return the parameters of the plain model."""
        return values(self.plain)

    def grads(self) -> dict[str, Tensor | None]:
        return {name: param.grad for name, param in self.plain.named_parameters()}

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def backward(self, step: int = 0) -> None:
        """Add the gradients of a step to those of both models."""
        self.loss_of(self.model, step, dist.get_rank()).backward()
        self.backward_plain(step)

    def backward_plain(self, step: int = 0, run: Callable[[int], Any] | None = None) -> None:
        """Add to the plain model's gradients those of `run(rank)`, by default of a backward of the rank's loss."""
        before = self.grads()
        average(self.plain, self.ranks, run or (lambda rank: self.loss_of(self.plain, step, rank).backward()))
        for name, param in self.plain.named_parameters():
            if before[name] is not None:
                param.grad = before[name] if param.grad is None else before[name] + param.grad

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self, step: int) -> None:
        """Take a step, and compare the parameters; the gradients stay."""
        self.zero_grad()
        self.backward(step)
        self.update()
        self.check(f"step {step}")

    def finish(self, what: str = "a step") -> None:
        """Take a step with the gradients there are, compare these and the parameters, and clear the gradients."""
        assert_bit_equal(full_gradients(self.model), self.grads(), f"{what}, gradients")
        self.update()
        self.zero_grad()
        self.check(what)

    def check(self, what: str = "a step") -> None:
        """Compare the parameters."""
        assert_bit_equal(full_parameters(self.model), self.values(), f"{what}, parameters")
