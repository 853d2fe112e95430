"""Writes of users between construction and exit: parameters and gradients replaced, frozen, changed in place and
copied.

Values equal a plain model's to which the same is done, or an error names the remedy.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from fsdp import FullyShardedDataParallel, MixedPrecision
from fsdp.comm.versions import ALL_GATHER, REDUCE_SCATTER
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Net
from tests.harness.oracle import assert_bit_equal
from tests.harness.pairs import pairwise
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_gradients, wrap
from tests.harness.strategies import FULL, GRAD_OP, MODES, NONE, both_modes, describe
from tests.harness.writes import batch, build, layer_of, local_part, loss_of, pair, summon


def step(model: nn.Module, seed: int = 0) -> Tensor:
    """Run a step and return the loss; existing gradients are added to."""
    loss = loss_of(model, seed)
    loss.backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5).step()
    model.zero_grad()
    return loss.detach()


def assert_alike(model: nn.Module, plain: nn.Module, what: str) -> None:
    assert_bit_equal(model.state_dict(), plain.state_dict(), what)
    assert torch.equal(step(model, 1), step(plain, 1)), what
    assert_bit_equal(model.state_dict(), plain.state_dict(), f"{what}, one step on")


@on_ranks(2)
def test_forward_can_use_all_of_its_parameters() -> None:
    """`self.parameters()` inside of a forward: in full, in the compute dtype, and with gradients."""
    for mode in MODES:
        plain, model = pair(mode)
        plain.penalty = model.module.penalty = 0.1
        torch.testing.assert_close(step(model), step(plain))
        with model.no_sync():
            loss_of(model, 3).backward()
        loss_of(model, 4).backward()
        for seed in (3, 4):
            loss_of(plain, seed).backward()
        torch.testing.assert_close(full_gradients(model), {n: p.grad for n, p in plain.named_parameters()})
        precision = MixedPrecision(torch.bfloat16, cast_root_forward_inputs=True)
        _, model = pair(mode, mixed_precision=precision)
        model.module.penalty = 0.1  # the forward asserts its parameters' dtype
        step(model)
        with summon(model):  # with summoned parameters, in the original dtype
            model(batch())


class Calling(nn.Module):
    """A module that calls an inner one with weights from elsewhere, as a hypernetwork does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(5, 5), nn.Parameter(torch.randn(5, 5))
        self.inputs = 5

    def forward(self, x: Tensor) -> Tensor:
        x = functional_call(self.linear, {"weight": self.linear.weight * 2}, x)  # a tensor
        x = functional_call(self.linear, {"weight": self.other}, (x[:, : self.inputs],))  # a parameter
        return x + self.linear(x)


@on_ranks(1, 2)
def test_functional_call_computes_with_the_given_weight(world_size: int) -> None:
    """Inside of a unit's forward, and outside where the values are not sharded; also after a call that raised."""
    for mode in (*MODES, (NONE, True)):
        torch.manual_seed(3)
        plain = nn.Sequential(Calling(), nn.Linear(5, 5))
        model = wrap(copy.deepcopy(plain), *mode, wrap_policy=ModuleWrapPolicy({Calling}))
        inner: Any = model.module[0].module
        before = list(map(id, model.parameters()))
        for number in range(2):
            assert torch.equal(step(model, number), step(plain, number)), describe(mode)
        with torch.no_grad():
            assert torch.equal(model(batch()), plain(batch()))
        inner.inputs = 3
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            model(batch())
        inner.inputs = 5
        assert list(map(id, model.parameters())) == before, describe(mode)
        if mode[0] is NONE or world_size == 1:
            given = {"weight": torch.eye(5)}
            values = [functional_call(m.linear, given, batch()) for m in (inner, plain[0])]
            assert torch.equal(*values), describe(mode)
            loss_of(model).backward()
            loss_of(plain).backward()
            torch.testing.assert_close(full_gradients(model), {n: p.grad for n, p in plain.named_parameters()})
            plain.zero_grad(), model.zero_grad()
        with pytest.raises(TypeError, match=r"'linear.weight' of .*functional_call.* on a plain model that has loaded"):
            functional_call(model, {"0.linear.weight": torch.eye(5)}, batch())
        assert_alike(model, plain, describe(mode))
        assert list(map(id, model.parameters())) == before, describe(mode)
        with summon(model):
            names = [name.replace("_fsdp_wrapped_module.", "") for name, _ in model.named_parameters()]
        assert names == [name for name, _ in plain.named_parameters()], describe(mode)


class Twice(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


@on_ranks(2)
def test_a_parametrization_registered_after_wrapping_is_refused_by_name() -> None:
    """At once, or at the next use of the model: the modules would compute with a shard, or a copy of their own."""
    for mode, summoned in itertools.product((*MODES, (NONE, True)), (False, True)):
        _, model = pair(mode)
        words = r"parameter 'linear\.weight' of (unit 'layers\.0'|the Layer unit)"
        if mode == (NONE, False) and not summoned:
            words = "does not have a parameter.* with name 'weight'"  # torch's words
        with pytest.raises((RuntimeError, ValueError), match=words):
            with summon(model) if summoned else contextlib.nullcontext():
                parametrize.register_parametrization(layer_of(model, 0).linear, "weight", Twice())
            loss_of(model)


@on_ranks(2)
def test_modules_that_write_buffers_in_forward_run() -> None:
    """torch modules write to buffers, or to attributes derived from their parameters."""
    for mode in ((FULL, False), (FULL, True), (GRAD_OP, True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            old = nn.utils.weight_norm(nn.Linear(5, 5)), nn.utils.spectral_norm(nn.Linear(5, 5))
        changes = (parametrizations.spectral_norm, parametrizations.weight_norm, parametrizations.orthogonal)
        norms = nn.BatchNorm1d(5), nn.LayerNorm(5), nn.Dropout(0.1)
        layers = nn.Sequential(*(change(nn.Linear(5, 5)) for change in changes), *old, *norms)
        net = Net(lambda m, x: m.lstm(m.layers(x))[0], layers=layers, lstm=nn.LSTM(5, 5))
        model = wrap(net, *mode, wrap_policy=None)
        for _ in range(2):
            step(model)
            with torch.no_grad():
                model(batch())
        # RNNs keep records of their parameters
        assert model.module.lstm.weight_ih_l0.requires_grad, mode
        names = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
        assert names == {"_flat_param"} or mode[1], names
        # it would move the leaves' memory to a buffer of its own, on an accelerator
        with mock.patch.object(nn.RNNBase, "flatten_parameters", side_effect=AssertionError):
            model.double()


ENTRIES: dict[str, Callable[[FullyShardedDataParallel], Any]] = {
    "forward": lambda model: model(batch()),
    "summon": lambda model: summon(model).__enter__(),
    "state_dict": lambda model: model.state_dict(),
    "load_state_dict": lambda model: model.load_state_dict(build().state_dict()),
    "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
    "deepcopy": copy.deepcopy,
    "to": lambda model: model.to(torch.float64),
}


@both_modes
@on_ranks(2)
def test_an_embedding_with_max_norm_is_refused_with_the_remedy(use_orig_params: bool) -> None:
    """A buffer, the remedy for other writes in a forward, does not apply here."""
    for module in (nn.Embedding(8, 3, max_norm=0.1), nn.EmbeddingBag(8, 3, max_norm=0.1)):
        model = FullyShardedDataParallel(module, use_orig_params=use_orig_params)
        with pytest.raises(RuntimeError, match=r"'weight' of .*max_norm=None, and rescale .* summon_full_params\(\)"):
            model(torch.zeros(2, 1, dtype=torch.long))


@on_ranks(2)
def test_replaced_parameters_that_do_not_fit_are_refused_at_every_entry() -> None:
    """Training resumes once the former parameter is back; `test_write_table` replaces parameters by fitting ones."""
    modes, changes = ((FULL, False), (FULL, True), (NONE, True)), ("shape became", "became torch.float64")
    for mode, name, change in pairwise(modes, [*ENTRIES], changes):
        _, model = pair(mode)
        linear = layer_of(model, 0).linear
        before = linear.weight
        bad = torch.zeros(2, 3) if "shape" in change else torch.zeros(before.shape, dtype=torch.float64)
        linear.weight = nn.Parameter(bad)
        with pytest.raises(RuntimeError, match=rf"Cannot writeback 'linear.weight' of .*: (its|it) {change}"):
            ENTRIES[name](model)
        if mode[1]:
            linear.weight = before
        else:
            del linear.weight
        assert_alike(model, build(), f"{name}, {describe(mode)}")
    for use_orig_params, name in ((False, "_flat_param"), (True, "linear.weight"), (True, "linear.bias")):
        _, model = pair((FULL, use_orig_params))  # data that do not fit; rank 0 has no element of the bias
        param = layer_of(model, 0).get_parameter(name)
        param.data = (before := param.data).double()
        with pytest.raises(RuntimeError, match=r"Cannot writeback .* became .*torch.float64"):
            ENTRIES["optimizer"](model)
        param.data = before
        ENTRIES["optimizer"](model)
    _, model = pair((FULL, True))
    linear = layer_of(model, 0).linear
    before, linear.weight = linear.weight, nn.Parameter(torch.zeros(7, 4))
    with pytest.raises(RuntimeError, match=r"'linear.weight' .*write the whole inside FSDP.summon_full_params\(model"):
        model(batch())
    linear.weight, linear.bias = before, None  # the module runs without a bias from here on
    loss_of(model).backward()


@on_ranks(2)
def test_parameters_shared_after_wrapping_are_refused() -> None:
    """The optimizer would train two parameters where the program means one. The error names both."""
    _, model = pair((FULL, True))
    first, second = (layer_of(model, index).linear for index in range(2))
    second.weight = first.weight
    words = r"'linear.weight' of .*was replaced by 'linear.weight' of .* sharded already. Share parameters before wrap"
    with pytest.raises(RuntimeError, match=words):
        loss_of(model)


@on_ranks(2)
def test_an_assigned_parameter_gets_the_gradients() -> None:
    """With `use_orig_params=True` an optimizer may hold it already."""
    for strategy in (FULL, NONE):
        plain, model = pair((strategy, True))
        linear = layer_of(model, 0).linear
        former = linear.weight
        linear.weight = assigned = nn.Parameter(linear.weight.detach() * 0.5)
        plain.layers[0].linear.weight.data.mul_(0.5)
        model.state_dict()
        former.detach().zero_()  # it is the user's, with memory of its own
        assert_alike(model, plain, strategy.name)
        assert linear.weight is assigned
        other = nn.Linear(5, 7)
        other.weight = assigned
        with pytest.raises(ValueError, match=r"shared with 'linear\.weight' of .*, which already owns it"):
            wrap(other, strategy, True)


class Assigning(nn.Module):
    """A module that assigns the weight of an inner unit, while the unit may be gathered already."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.factor != 1.0:
            linear: Any = getattr(self.second, "module", self.second)
            linear.weight = nn.Parameter(linear.weight.detach() * self.factor)
        return self.second(x)


@on_ranks(2)
def test_a_parameter_assigned_inside_of_a_forward_takes_effect_at_once() -> None:
    for strategy, ahead in itertools.product((FULL, GRAD_OP, NONE), (False, True)):
        torch.manual_seed(0)
        plain = Assigning()
        options: dict[str, Any] = {"wrap_policy": ModuleWrapPolicy({nn.Linear}), "forward_prefetch": ahead}
        model = wrap(copy.deepcopy(plain), strategy, True, **options)
        for number, factor in enumerate((1.0, 1.0, 0.5, 1.0)):
            losses = []
            for each in (plain, model):
                inner: Any = getattr(each, "module", each)
                inner.factor = factor
                losses.append(step(each, number))
            assert torch.equal(*losses), (strategy, ahead, number)
        assert_bit_equal(model.state_dict(), plain.state_dict(), f"{strategy} {ahead}")


@on_ranks(2)
def test_deepcopy_of_a_module_needs_its_wrapper_or_summoned_parameters() -> None:
    for mode in MODES:
        plain, model = pair(mode)
        step(plain), step(model)
        for param in model.parameters():
            param.no_decay = True  # type: ignore[attr-defined]
        if mode == (NONE, True):  # its parameters are full
            copied = copy.deepcopy(model.module.head)
            assert torch.equal(copied.weight, plain.head.weight)
        else:
            for module in (model.module, model.module.head, layer_of(model, 0).linear):
                words = r"copy.deepcopy of the \w+ alone .*'\w.*' of .*copy.deepcopy\(model\).*summon_full_params"
                with pytest.raises(RuntimeError, match=words):
                    copy.deepcopy(module)
            copy.deepcopy(layer_of(model, 0).inside)
        with summon(model):
            copied = copy.deepcopy(layer_of(model, 0))
        assert torch.equal(copied(batch()), plain.layers[0](batch()))
        if dist.get_rank() == 0:  # a plain module needs no collective
            assert_bit_equal(copied.state_dict(), plain.layers[0].state_dict(), describe(mode))
            copied.load_state_dict(build().layers[0].state_dict())
            assert_bit_equal(copied.state_dict(), build().layers[0].state_dict(), describe(mode))
        copied.load_state_dict(build().layers[0].state_dict())
        assert len(list(copied.parameters())) == 2
        again = copy.deepcopy(copied)
        assert torch.equal(again.linear.weight, copied.linear.weight)
        with torch.no_grad():  # the copy has separate memory
            copied.linear.weight.zero_()
        twin = copy.deepcopy(model)
        assert not mode[1] or all(hasattr(param, "no_decay") for param in twin.parameters())
        assert_alike(twin, plain, describe(mode))


@on_ranks(2)
def test_writes_to_summoned_flat_parameters_take_effect() -> None:
    """Gradients are kept, and values written between a forward and the backward are refused."""
    for strategy in (FULL, GRAD_OP, NONE):
        plain, model = pair((strategy, False))
        for side in (plain, model):
            loss_of(side).backward()
        with summon(model):
            for name, param in model.named_parameters():
                param.grad = dict(plain.named_parameters())[name].grad.mul_(0.5) if "0" in name else None
        full = full_gradients(model)
        assert all(torch.equal(full[name], param.grad) for name, param in plain.named_parameters()), strategy
        loss = loss_of(model)
        with summon(model):
            pass  # reading changes no state
        loss.backward()
        loss = loss_of(model)
        with summon(model), torch.no_grad():
            layer_of(model, 1).linear.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"unit 'layers\.1' was changed in place, or replaced, between"):
            loss.backward()


@on_ranks(2)
def test_a_parameter_replaced_again_between_forward_and_backward_is_refused() -> None:
    """The first and the second new parameter were written equally often."""
    _, model = pair((FULL, True))
    linear = layer_of(model, 0).linear
    linear.weight = nn.Parameter(linear.weight.detach().clone())
    loss = loss_of(model)
    linear.weight = nn.Parameter(linear.weight.detach() * 0.5)
    with pytest.raises(RuntimeError, match=r"'linear.weight' of .* was changed in place, or replaced, between"):
        loss.backward()


@both_modes
@on_ranks(2)
def test_a_parameter_that_a_program_registers_is_taken_over(use_orig_params: bool) -> None:
    """``register_parameter`` does not remove a plain attribute, as an assignment does."""
    plain, model = pair((FULL, use_orig_params))
    new = plain.layers[0].linear.weight.detach() * 0.5
    plain.layers[0].linear.weight = nn.Parameter(new)
    linear, name = layer_of(model, 0).linear, "layers.0.linear.weight"
    linear.register_parameter("weight", nn.Parameter(local_part(model, linear.weight, name, new).clone()))
    assert_alike(model, plain, "registered")


@on_ranks(2)
def test_forwards_run_with_mocked_collectives() -> None:
    """Users mock collectives to count them: the engine must not compare gathered values with the shards."""
    for strategy, use_orig_params in ((FULL, True), (GRAD_OP, False)):
        model = pair((strategy, use_orig_params))[1]
        with contextlib.ExitStack() as mocks:
            mocked = [mocks.enter_context(mock.patch.object(dist, name)) for name in (ALL_GATHER, REDUCE_SCATTER)]
            for _ in range(2):
                loss_of(model).backward()
                with torch.no_grad():
                    model(batch())
            assert mocked[0].called and mocked[1].called
