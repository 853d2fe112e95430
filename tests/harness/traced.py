"""A training program to run under the stream tracer, in parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel as FSDP
from fsdp.runtime.unit import units_in
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import in_turn
from tests.harness.stream_tracer import StreamTracer

WIDTH = 8


def raise_error() -> None:
    raise ArithmeticError("failed on purpose")


class Block(nn.Module):
    """A frozen layer that is used first, and so read last in backward, beside trained ones."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, hidden).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 3), nn.Linear(3, hidden)
        self.out = nn.Linear(hidden, WIDTH)
        self.at_end: dict[str, Callable[[], None]] = {}  # "forward" or "backward" -> a function to call at the end

    def forward(self, x: Tensor) -> Tensor:
        if "backward" in self.at_end:
            at_end = self.at_end["backward"]
            x.register_hook(lambda _: at_end())
        y = x + self.out(torch.tanh(self.base(x) + self.up(self.down(x))))
        if "forward" in self.at_end:
            self.at_end["forward"]()
        return y


class BlockTower(nn.Module):
    """Blocks of several sizes that can be skipped, and that can be checkpointed."""

    def __init__(self, sizes: tuple[int, ...] = (7, 13, 13, 29)) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList([Block(hidden) for hidden in sizes])
        self.skipped: set[int] = set()
        self.segments = "none"

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        blocks = [block for index, block in enumerate(self.blocks) if index not in self.skipped]
        x = in_turn(blocks, self.first(x), self.segments)
        return self.last(x)


class Link(nn.Linear):
    pass


class Chain(nn.Sequential):
    """Units of one size in a root without parameters."""

    def __init__(self) -> None:
        super().__init__(*(Link(WIDTH, WIDTH) for _ in range(5)))


class Training:
    """A wrapped model with an optimizer, and the parts of a training program."""

    def __init__(self, tracer: StreamTracer, model: nn.Module, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = FSDP(model, **{"auto_wrap_policy": ModuleWrapPolicy({Block, Link}), **options})
        tracer.watch(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    @property
    def blocks(self) -> list[Block]:
        return [block.module for block in self.model.module.blocks]

    def loss(self) -> Tensor:
        return self.model(torch.randn(4, WIDTH)).square().mean()

    def step(self, *passes: bool, set_to_none: bool = True) -> None:
        for synchronised in passes or (True,):
            with nullcontext() if synchronised else self.model.no_sync():
                self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none)

    def steps(self) -> None:
        for _ in range(3):
            self.step()

    def accumulation(self) -> None:
        self.step(False, False, True)
        self.step(True, False, True, set_to_none=False)
        self.step(False, True, True)

    def evaluation(self) -> None:
        self.model.eval()
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode:
                self.loss()
                self.loss()
            self.step()
        self.model.train()

    def several_forwards(self) -> None:
        first, second = self.loss(), self.loss()
        first.backward()
        second.backward()
        (self.loss() + self.loss()).backward()
        self.step()

    def input_gradients(self) -> None:
        x = torch.randn(4, WIDTH, requires_grad=True)
        torch.autograd.grad(self.model(x).sum(), x)
        self.step()

    def checkpointing(self) -> None:
        tower = self.model.module
        for tower.segments in ("reentrant", "non-reentrant"):
            self.step()
            self.step(False, True)
        tower.segments = "none"

    def skipping(self) -> None:
        """Skip units that were prefetched."""
        tower = self.model.module
        for tower.skipped in (set(), {0}, {0, 2}, {3}, {1, 2}, set()):
            self.step(set_to_none=False)

    def changing(self) -> None:
        """Write to parameters whose prefetched unit was not used, while no further unit is gathered."""
        tower = self.model.module
        with torch.no_grad():
            for tower.skipped in (set(), set(), {3}):
                self.loss()
            for param in self.model.parameters():
                param.mul_(0.9)
        tower.skipped = set()
        self.step()

    def failures(self) -> None:
        for block in (self.blocks[0], self.blocks[-1]):
            block.at_end["forward"] = raise_error
            with pytest.raises(ArithmeticError):
                self.loss()
            del block.at_end["forward"]
            self.step()
            block.at_end["backward"] = raise_error
            loss = self.loss()
            del block.at_end["backward"]
            with pytest.raises(ArithmeticError):
                loss.backward()
            del loss
            self.step()

    def clipping(self) -> None:
        for norm_type in (2.0, float("inf")):
            self.loss().backward()
            self.model.clip_grad_norm_(0.1, norm_type)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def hooks(self) -> None:
        """Use a communication hook that raises in the second call, after reading the gradient."""
        calls = itertools.count()

        def hook(state: None, grad: Tensor, shard: Tensor) -> None:
            shard.copy_(grad)
            if next(calls) == 1:
                raise_error()

        self.model.register_comm_hook(None, hook)
        loss = self.loss()
        with pytest.raises(RuntimeError, match="failed on purpose"):
            loss.backward()
        del loss
        self.steps()

    def freezing(self) -> None:
        params = [p for name, p in self.model.named_parameters() if "blocks.1" in name or "blocks.3" in name]
        before = [param.requires_grad for param in params]
        for param in params:
            param.requires_grad_(False)
        self.step()
        for param, value in zip(params, before):
            param.requires_grad_(value)
        self.step()

    def summoning(self) -> None:
        for writeback in (False, True):
            self.step()
            with FSDP.summon_full_params(self.model, writeback=writeback):
                for param in self.model.parameters():
                    param.sum()
            self.step()

    def unsharding(self) -> None:
        for wait in (True, False):
            self.step()
            handle = self.model._unshard(async_op=True)
            if wait:
                handle.wait()
                with torch.no_grad():  # too late for the gather, which is complete
                    for param in self.model.parameters():
                        param.mul_(0.5)
            self.step()

    def moving(self) -> None:
        self.model._apply(torch.clone)
        self.step()

    def switching(self) -> None:
        """Keep units between passes, prefetch, accumulate backwards, delay the replicas' reduction, and set a hook."""
        units = [unit for _, unit, _ in units_in(self.model)]
        before = [unit.policy for unit in units]
        self.model.set_reshard_after_backward(False)
        self.model.set_modules_to_forward_prefetch([self.model.blocks[1], self.model.blocks[0]])
        self.step(True, True)
        self.step()
        self.model.set_modules_to_forward_prefetch([])
        for unit, policy in zip(units, before):
            unit.policy = policy
        self.model.set_is_last_backward(False)
        self.loss().backward()
        self.model.set_is_last_backward(True)
        self.model.set_requires_all_reduce(False)
        self.loss().backward()
        self.loss().backward()
        self.model.set_requires_all_reduce(True)
        self.step()
        self.model.set_all_reduce_hook(lambda shard: shard.mul_(0.5), recurse=True)
        self.step()
        self.model.set_all_reduce_hook(None, recurse=True)

    def deletion(self) -> None:
        self.step()
        self.loss()
        del self.model, self.optimizer
