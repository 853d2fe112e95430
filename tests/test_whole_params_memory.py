"""Memory of whole parameters on their owners during a step."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp import ShardingStrategy
from fsdp.optim import WholeParamOptimizer
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.pool import on_ranks
from tests.harness.sharded import wrap

UNITS, WIDTH = 5, 12


class Watching(torch.optim.SGD):
    """SGD that notes, at each step, which units' matrices are whole on this rank."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.whole: list[set[int]] = []
        self.outer: Any = None

    def step(self, closure: Any = None) -> Any:
        self.whole.append({index for index, each in enumerate(self.outer._selected) if each.whole})
        return super().step(closure)


@on_ranks(2)
def test_owners_hold_the_parameters_of_two_units() -> None:
    """While a unit is stepped, only the next unit's parameters are whole besides."""
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
    model = wrap(plain, ShardingStrategy.FULL_SHARD, True, wrap_policy=ModuleWrapPolicy({nn.Linear}))
    optimizer = WholeParamOptimizer(
        model, Watching, select=lambda name, shape: len(shape) == 2, rest=lambda params: torch.optim.SGD(params, lr=0.1)
    )
    inner: Any = optimizer.inner_optimizers[0]
    inner.outer = optimizer
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    of_ranks: list[Any] = [None, None]
    dist.all_gather_object(of_ranks, inner.whole)
    whole = [one | other for one, other in zip(*of_ranks)]
    assert whole == [{unit, unit + 1} & set(range(UNITS)) for unit in range(UNITS)]
    assert not any(each.whole for each in optimizer._selected)
