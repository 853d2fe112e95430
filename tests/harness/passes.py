"""Helpers of tests of backward passes: a small model, parity with plain replicas, states of units."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
from fsdp import FullyShardedDataParallel
from fsdp.runtime.unit import units_in
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.lockstep import Program, Reference
from tests.harness.models import MlpBlock, Net, in_turn
from tests.harness.sharded import wrap
from tests.harness.strategies import MODES, Mode, describe

KINDS = ("none", "non-reentrant", "reentrant")


WIDTH = 7


def wrapped(build: Callable[[], nn.Module], mode: Mode, *blocks: type[nn.Module]) -> FullyShardedDataParallel:
    return wrap(build(), *mode, wrap_policy=ModuleWrapPolicy(set(blocks)))


def check_parity(
    build: Callable[[], nn.Module],
    program: Program,
    *blocks: type[nn.Module],
    modes: Iterable[Mode] = MODES,
    case: str = "",
    **bounds: Any,
) -> None:
    """Run the program on a wrapped model in each mode, and compare it with plain replicas."""
    reference = Reference(build, program)
    for mode in modes:
        reference.check(wrapped(build, mode, *blocks), f"{case}, {describe(mode)}", **bounds)


def seeded(make: Callable[..., nn.Module], *args: Any) -> Callable[[], nn.Module]:
    """Return a builder of equal models."""

    def build() -> nn.Module:
        torch.manual_seed(3)
        return make(*args)

    return build


def clear(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def mlp() -> nn.Module:
    """Build blocks with a parameter of one element, and a root with parameters. Width 7 at both ends."""
    return Net(
        lambda m, x: m.head(in_turn(m.blocks, m.embed(x))),
        embed=nn.Linear(WIDTH, WIDTH),
        blocks=nn.ModuleList([MlpBlock(WIDTH, 13), MlpBlock(13, 11), MlpBlock(11, WIDTH)]),
        head=nn.Linear(WIDTH, WIDTH),
    )


def gathered(model: nn.Module) -> set[str]:
    """Return the names of unsharded units ("" is the root)."""
    return {name for name, unit, _ in units_in(model) for h in unit.handles if h.full.untyped_storage().nbytes()}


class HostReads(TorchDispatchMode):
    """A counter of reads of tensor values by the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def set_requires_grad(model: nn.Module, prefix: str, flag: bool) -> None:
    """Freeze or unfreeze parameters by prefix of their names, on the parameters that users hold."""
    found = 0
    for unit in fsdp.shard_info(model):
        for bucket in unit.buckets:
            names = [unit.full_name(record) for record in bucket.layout.params]
            if bucket.params[0] is bucket.flat_param:
                names = [names[0]] if all(name.startswith(prefix) for name in names) else []
            for name, param in zip(names, bucket.params):
                if name.startswith(prefix):
                    param.requires_grad_(flag)
                    found += 1
    if not fsdp.shard_info(model):
        for name, param in model.named_parameters():
            if name.startswith(prefix):
                param.requires_grad_(flag)
                found += 1
    assert found, prefix
