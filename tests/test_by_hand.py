"""Calls on a wrapped model besides training: apply, moving and casting, methods, resetting."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fsdp
from fsdp import FullyShardedDataParallel, shard_info
from fsdp.api import TrainingState
from tests.harness.lockstep import assert_at_rest
from tests.harness.oracle import assert_bit_equal
from tests.harness.pairs import by_turns
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_gradients, handles_of
from tests.harness.small import batch, error_of, values
from tests.harness.strategies import EVERY_MODE, NO_SHARD, Mode
from tests.harness.summoned import Problem, backward, make_twin, modes_of_two_ranks, net, summon

# -- apply ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", modes_of_two_ranks(True))
@on_ranks(2)
def test_apply_gets_full_parameters(mode: Mode) -> None:
    """Before and after the first use, on the wrapper and on a parent, and while summoned."""

    def init(module: nn.Module) -> None:
        seen.append(type(module).__name__)
        with torch.no_grad():
            for name, param in module.named_parameters(recurse=False):
                assert list(param.shape) == list(shapes[f"{type(module).__name__}.{name}"]), name
                nn.init.normal_(param)

    shapes = {f"{type(m).__name__}.{n}": p.shape for m in net().modules() for n, p in m.named_parameters(recurse=False)}
    twin = make_twin(mode)
    model, plain = twin.model, twin.plain
    for step in range(2):
        seen: list[str] = []
        torch.manual_seed(step)
        assert model.apply(init) is model
        wrapped, seen = seen, []
        torch.manual_seed(step)
        plain.apply(init)
        assert [name for name in wrapped if name != "FullyShardedDataParallel"] == seen
        assert wrapped.count("FullyShardedDataParallel") == 4
        assert_at_rest(model, str(mode))
        twin.check()
        twin.train(step)
    with summon(model):
        model.apply(lambda module: None)
        assert model.training_state is TrainingState.SUMMON_FULL_PARAMS
    parent = nn.Sequential(model)
    torch.manual_seed(5)
    parent.apply(lambda m: init(m) if isinstance(m, nn.Linear) else None)
    torch.manual_seed(5)
    plain.apply(lambda m: init(m) if isinstance(m, nn.Linear) else None)
    twin.check()


# -- moving and casting ----------------------------------------------------------------------------------------------

CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "to": lambda m: m.to("cpu", torch.float64),
    "nothing": lambda m: m.float(),
}
MOMENTS = ["built", "trained", "with gradients"]


@pytest.mark.parametrize(("cast", "mode"), by_turns([*CASTS, "double"], modes_of_two_ranks(True)))
@on_ranks(2)
def test_cast_changes_values_and_gradients_as_in_a_plain_model(mode: Mode, cast: str) -> None:
    """Before and after the first use, with gradients; the optimizer's parameters stay the same objects."""
    moment = MOMENTS[(EVERY_MODE.index(mode) + list(CASTS).index(cast)) % len(MOMENTS)]  # by turns
    twin = make_twin(mode)
    model, plain = twin.model, twin.plain
    held = [p for group in twin.optimizers[0].param_groups for p in group["params"]]
    if moment != "built":
        twin.train(0)
    if moment == "trained":
        twin.zero_grad()
    leaves = [leaf for handle in handles_of(model) for leaf in handle.leaves]
    result: Any = CASTS[cast](model)
    CASTS[cast](plain)
    assert result is model
    assert all(a is b for a, b in zip(model.parameters(), held, strict=True))
    assert all(a is b for a, b in zip([x for h in handles_of(model) for x in h.leaves], leaves, strict=True))
    assert {p.dtype for p in model.parameters()} == {p.dtype for p in plain.parameters()}
    assert model.scale.dtype == plain.scale.dtype
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in model.parameters())
    with summon(model):
        assert_bit_equal(values(model), twin.values())
    assert_at_rest(model, str(mode))
    if moment == "with gradients":
        assert_bit_equal(full_gradients(model), twin.grads())
        twin.update()
    for step in (1, 2):
        twin.train(step)
    for layout in (bucket.layout for unit in shard_info(model) for bucket in unit.buckets):
        assert layout.dtype == layout.compute_dtype == layout.reduce_dtype == plain.gain.dtype


@pytest.mark.parametrize("mode", modes_of_two_ranks(True))
@on_ranks(2)
def test_cast_of_a_parent_or_one_unit_and_cast_during_a_pass(mode: Mode) -> None:
    """A cast during a pass or an accumulation is refused."""
    twin = make_twin(mode)
    model, plain = twin.model, twin.plain
    twin.train(0)
    nn.Sequential(model).double()  # a parent
    plain.double()
    twin.train(1)
    assert_at_rest(model, str(mode))

    # A single unit: the neighbours keep their dtype.
    model.layers[1].float()
    plain.layers[1].float()
    assert {str(p.dtype) for p in model.layers[1].parameters()} == {"torch.float32"}
    for each in (model, plain):
        each.layers[1].register_forward_pre_hook(lambda m, args: args[0].float())
        each.layers[1].register_forward_hook(lambda m, args, output: output.double())
    with summon(model):
        assert_bit_equal(values(model), twin.values())

    # Not during a forward or an accumulation; and then no parameter or buffer has changed.
    found: list[str] = []
    handle = model.layers[2].register_forward_hook(lambda *_: found.append(error_of(model.half)))
    model(batch(0).double())
    handle.remove()
    if mode.strategy is not NO_SHARD:
        with model.no_sync():
            model(batch(0).double()).sum().backward()
        found.append(error_of(model.half))
        model.zero_grad()
    assert all(words.startswith("RuntimeError") for words in found), found
    assert model.scale.dtype == torch.float64
    before = list(model.parameters())
    with pytest.raises(ZeroDivisionError):  # in a unit inside
        model._apply(lambda tensor: 1 // 0)
    assert list(map(id, model.parameters())) == list(map(id, before))
    with summon(model):
        assert_bit_equal(values(model), twin.values())
    model.double()
    assert {p.dtype for p in model.parameters()} == {torch.float64}


# -- forward methods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", modes_of_two_ranks(True))
@on_ranks(2)
def test_registered_forward_method_runs_unsharded(mode: Mode) -> None:
    twin = make_twin(mode)
    model, plain = twin.model, twin.plain
    fsdp.register_forward_method(model, "generate")
    for step in range(2):
        x = batch(step)
        assert torch.equal(model.generate(x, steps=3), plain.generate(x, steps=3))
        with torch.no_grad():
            assert torch.equal(model.generate(x), plain.generate(x))
        twin.zero_grad()
        model.generate(x).square().mean().backward()  # used twice
        twin.backward_plain(run=lambda rank: plain.generate(batch(step, rank)).square().mean().backward())  # noqa: B023
        twin.update()
        twin.check()

    def fail(*args: Any) -> None:
        raise Problem

    handle = model.layers[0].register_forward_pre_hook(fail)
    assert error_of(model.generate, batch(0)).startswith("Problem")
    handle.remove()
    assert torch.equal(model.generate(batch(0)), plain.generate(batch(0)))
    assert copy.deepcopy(model).generate.__name__ == "generate"
    words = error_of(fsdp.register_forward_method, model, "nothing")
    assert words == "ValueError: Net has no method 'nothing'"
    unwrapped = net()
    fsdp.register_forward_method(unwrapped, "nothing")  # a no-op on a module that is not wrapped
    assert "generate" not in unwrapped.__dict__


# -- reset -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", modes_of_two_ranks(True))
@on_ranks(2)
def test_reset_iter_state_drops_a_pass_and_keeps_gradients(mode: Mode) -> None:
    """After a failure in forward or backward, and after a forward without backward."""
    twin = make_twin(mode)
    model = twin.model
    model.reset_iter_state()
    backward(model, 0)
    before = {name: p.grad for name, p in model.named_parameters()}

    def fail(*args: Any) -> None:
        raise Problem

    handle = model.layers[1].register_forward_pre_hook(fail)
    assert error_of(model, batch(1)).startswith("Problem")
    handle.remove()
    model.reset_iter_state()
    assert all(unit.training_state is TrainingState.IDLE for unit in FullyShardedDataParallel.fsdp_modules(model))
    output = model(batch(1))
    output.register_hook(fail)
    assert error_of(output.sum().backward).startswith("Problem")
    model.reset_iter_state()
    model(batch(2))  # a forward without backward
    model.reset_iter_state()
    assert_at_rest(model, str(mode))
    assert all(p.grad is before[name] for name, p in model.named_parameters())
    twin.backward_plain(0)
    twin.update()
    twin.train(1)
