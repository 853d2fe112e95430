"""`coalesce_nbytes=`: small neighbouring units become one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fsdp
from fsdp import FullyShardedDataParallel as FSDP
from fsdp import MixedPrecision
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from tests.harness.models import Batch, Case
from tests.harness.oracle import Schedule, assert_bit_equal, assert_same_steps, run_ddp, sgd
from tests.harness.pool import on_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import full_parameters, run_fsdp, wrap

LAYER = 5 * 5 * 4 + 5 * 4  # bytes of a layer


class Layer(nn.Linear):
    def __init__(self) -> None:
        super().__init__(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x))


class Nested(nn.Module):
    """A unit with nested units."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(Layer(), Layer())

    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


class Net(nn.Module):
    """Neighbours with a module between that is no unit, a tied weight, and layers that run in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), nn.Dropout(0.0), Layer(), Layer(), Nested(), Layer(), Layer())
        self.last, self.first = Layer(), Layer()
        self.layers[2].weight = self.layers[0].weight
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.layers(self.first(x))))


def samples(generator: torch.Generator, size: int) -> Batch:
    return Batch((torch.randn(size, 5, generator=generator),), torch.randn(size, 2, generator=generator))


CASE = Case("neighbours", Net, samples, nn.functional.mse_loss, frozenset({Layer, Nested}))
UNITS = ["", "layers.0, layers.2", "layers.3", "layers.4", "layers.4.inside.0, layers.4.inside.1"]
UNITS += ["layers.5, layers.6", "last, first"]


def names(model: nn.Module) -> list[str]:
    return [unit.name for unit in fsdp.shard_info(model)]


@on_ranks(2)
def test_coalesced_units_train_as_under_ddp() -> None:
    """Small neighbours form one unit; state dicts keep the plain model's names."""
    schedule = Schedule(steps=5)
    expected = run_ddp(CASE, sgd, schedule)
    for mode in (True, False):
        found = run_fsdp(CASE, sgd, schedule, use_orig_params=mode, coalesce_nbytes=2 * LAYER)
        assert_same_steps(found, expected)
        model = wrap(CASE, use_orig_params=mode, coalesce_nbytes=2 * LAYER)
        assert names(model) == UNITS
        assert list(model.state_dict()) == list(CASE.build().state_dict())
        assert "layers.5, layers.6" in str(fsdp.describe(model))
        with record_collectives() as log:
            CASE.loss(model, CASE.make_batch(0, 2)).backward()
        reduced = log.units("reduce")
        assert len(reduced) == len(set(reduced)) == len(UNITS) - 1  # one unit owns no parameters
        copied = wrap(CASE, use_orig_params=mode, coalesce_nbytes=2 * LAYER, seed=1)
        copied.load_state_dict(model.state_dict())
        assert_bit_equal(full_parameters(copied), full_parameters(model))


@on_ranks(2)
def test_policy_may_choose_units_to_coalesce() -> None:
    """Units with different options stay apart, and invalid values and uses are refused."""
    full = MixedPrecision(param_dtype=torch.float64)

    def choice(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, Layer):
            return {"coalesce_nbytes": 9 * LAYER, **({"mixed_precision": full} if module is net.last else {})}
        return isinstance(module, Nested)

    net: Any = CASE.build()
    assert names(wrap(net, wrap_policy=CustomPolicy(choice))) == [
        "",
        "layers.0, layers.2, layers.3",
        *UNITS[3:6],
        "last",
        "first",
    ]
    policy = ModuleWrapPolicy({Layer})
    with pytest.raises(ValueError, match=r"is shared with .* and auto_wrap_policy puts the two into"):
        wrap(CASE.build(), wrap_policy=policy, coalesce_nbytes=LAYER)  # too small for two layers
    for wrong, error in ((-1, ValueError), (0.5, TypeError)):
        with pytest.raises(error, match=r"coalesce_nbytes must be a"):
            wrap(CASE.build(), wrap_policy=policy, coalesce_nbytes=wrong)
    with pytest.raises(ValueError, match=r"coalesce_nbytes is about the units of an auto_wrap_policy"):
        wrap(CASE.build(), wrap_policy=None, coalesce_nbytes=1)
    with pytest.raises(TypeError, match=r"group\(\) takes no coalesce_nbytes"):
        FSDP.group([net.head, net.layers], coalesce_nbytes=1)
