"""Host cost of a step and of wrapping: calls of the package's own functions, which the machine's load cannot change.

On torch's fake process group no data travels, so the count is the work of one rank per unit. The bounds are today's
counts with room for a few calls. A change that needs more calls per gather, wait or gradient should cache instead.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
from fsdp import FullyShardedDataParallel, ShardingStrategy
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.fake_group import fake_group
from tests.harness.strategies import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP

PACKAGE = str(Path(fsdp.__file__).parent)


@pytest.fixture
def group_of_eight() -> Iterator[None]:
    with fake_group(0, 8):
        yield


def chain(units: int, layers: int, **options: Any) -> nn.Module:
    """Return a root without parameters around `units` units of ``2 * layers`` parameters."""

    def unit() -> nn.Module:
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))

    options["device_id"] = torch.device("cpu")
    return FullyShardedDataParallel(
        nn.Sequential(*(FullyShardedDataParallel(unit(), **options) for _ in range(units))), **options
    )


@contextmanager
def counting(measured: bool) -> Iterator[list[str]]:
    """Yield the names of the package's functions called inside, if ``measured``, without comprehensions."""
    calls: list[str] = []

    def count(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
            calls.append(code.co_name)

    sys.setprofile(count if measured else None)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def calls_of_a_step(model: nn.Module) -> int:
    """Count calls of the package's functions in a forward and backward, once the order is recorded."""
    x, params = torch.ones(2, 4), list(model.parameters())
    gc.collect()  # finalize garbage of earlier tests first
    for measured in (False, False, False, True):
        with counting(measured) as calls:
            model(x).sum().backward()
        for param in params:
            param.grad = None
    return len(calls)


# calls of a unit of one layer, and of each further layer of two parameters
BOUNDS = {
    (FULL_SHARD, True): (221, 2),
    (FULL_SHARD, False): (221, 2),
    (SHARD_GRAD_OP, True): (199, 2),
    (NO_SHARD, True): (163, 4),
}


@pytest.mark.parametrize(("strategy", "use_orig_params"), BOUNDS)
def test_a_step_makes_a_bounded_number_of_calls_per_unit(
    group_of_eight: None, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    options: dict[str, Any] = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    few, some, many = (calls_of_a_step(chain(units, 1, **options)) for units in (4, 8, 12))
    assert many - some == some - few, "the cost of a unit grows with the number of units"
    of_a_unit = (some - few) / 4
    of_a_layer = (calls_of_a_step(chain(8, 6, **options)) - some) / 8 / 5
    bounds = BOUNDS[strategy, use_orig_params]
    assert (of_a_unit <= bounds[0], of_a_layer <= bounds[1]) == (True, True), (of_a_unit, of_a_layer, bounds)


def calls_of_wrapping(units: int, layers: int, *, use_orig_params: bool) -> int:
    """Count calls of the package's functions while wrapping a model, after an equal model was wrapped."""
    for measured in (False, True):
        plain = nn.Sequential(*(Block(*(nn.Linear(4, 4) for _ in range(layers))) for _ in range(units)))
        wrap = partial(FullyShardedDataParallel, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id="cpu")
        with counting(measured) as calls:
            wrap(plain, use_orig_params=use_orig_params)
    return len(calls)


class Written(TorchDispatchMode):
    """Counts the elements written inside."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        several = result if isinstance(result, (list, tuple)) else [args[0] if result is None else result]
        if "empty" not in func.name():
            for out, described in zip(several, func._schema.returns or [None]):
                if described is None or described.alias_info is None or described.alias_info.is_write:
                    self.numel += sum(each.numel() for each in (out if isinstance(out, list) else [out]))
        return result


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_wrapping_copies_only_the_shards(group_of_eight: None, use_orig_params: bool) -> None:
    plain = nn.Sequential(*(Block(nn.Linear(200, 300), nn.Linear(300, 200)) for _ in range(3)))
    numel = sum(param.numel() for param in plain.parameters())
    with Written() as written:
        FullyShardedDataParallel(
            plain, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id="cpu", use_orig_params=use_orig_params
        )
    assert numel / 8 <= written.numel < 1.05 * numel / 8, written.numel / numel


class Block(nn.Sequential):
    pass


@pytest.mark.parametrize(("use_orig_params", "bounds"), [(True, (278, 63)), (False, (290, 61))])
def test_wrapping_makes_a_bounded_number_of_calls_per_unit(
    group_of_eight: None, use_orig_params: bool, bounds: tuple[int, int]
) -> None:
    few, some, many = (calls_of_wrapping(units, 1, use_orig_params=use_orig_params) for units in (4, 8, 12))
    assert many - some == some - few, "the cost of a unit grows with the number of units"
    of_a_unit = (some - few) / 4
    of_a_layer = (calls_of_wrapping(8, 6, use_orig_params=use_orig_params) - some) / 8 / 5
    assert (of_a_unit <= bounds[0], of_a_layer <= bounds[1]) == (True, True), (of_a_unit, of_a_layer, bounds)
