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
from tests.harness.models import Batch, Case, Net, Unit
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


def neighbours() -> nn.Module:
    """Build layers around a module that is no unit, with a tied weight; they run in another order."""
    nested = Unit(lambda m, x: m.inside(x), inside=nn.Sequential(Layer(), Layer()))
    layers = nn.Sequential(Layer(), nn.Dropout(0.0), Layer(), Layer(), nested, Layer(), Layer())
    layers[2].weight = layers[0].weight
    last, first = Layer(), Layer()
    return Net(
        lambda m, x: m.head(m.last(m.layers(m.first(x)))), layers=layers, last=last, first=first, head=nn.Linear(5, 2)
    )


def samples(generator: torch.Generator, size: int) -> Batch:
    return Batch((torch.randn(size, 5, generator=generator),), torch.randn(size, 2, generator=generator))


CASE = Case("neighbours", neighbours, samples, nn.functional.mse_loss, frozenset({Layer, Unit}))
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
        return isinstance(module, Unit)

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
