"""The wrapper's constructor and members: accepted and refused arguments, and invariants of a wrapped model.

Where no collective is needed, a model is built in this process over a `StandIn`.
"""

from __future__ import annotations

import functools
import re
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

import fsdp
import fsdp.fully_sharded_data_parallel as wrapper_file
from fsdp import CPUOffload, FlatParameter, FullyShardedDataParallel, ShardingStrategy, shard_info
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy, transformer_auto_wrap_policy
from tests.harness.models import Net
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_parameters, wrap
from tests.harness.small import WIDTH, StandIn, batch, build, net, train, train_plain, values
from tests.harness.strategies import FULL_SHARD, NO_SHARD, SHARD_GRAD_OP, STRATEGIES, both_modes

# -- bad arguments -------------------------------------------------------------------------------------------------


class StandInMesh:
    def __init__(self, ndim: int) -> None:
        self.ndim = ndim

    def get_group(self, dim: int) -> StandIn:
        return StandIn()


HYBRID = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
PAIR, FLAT = (StandIn(), StandIn()), StandInMesh(1)
MIXED_STATES = [nn.Parameter(torch.ones(2)), nn.Linear(2, 2)]
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"device_mesh": FLAT}, ValueError, "pass only one"),
    ({**HYBRID, "process_group": None, "auto_wrap_policy": None}, ValueError, "requires explicit .* group or device_m"),
    ({**HYBRID, "process_group": None, "device_mesh": FLAT}, ValueError, "ndim=2"),
    (HYBRID, ValueError, "Expected process_group to be passed in .*StandIn"),
    ({**HYBRID, "process_group": (*PAIR, StandIn())}, ValueError, "Expected process_group to be passed in"),
    ({**HYBRID, "process_group": (StandIn(), 3)}, ValueError, "Expected process_group to be passed in .*StandIn.*int"),
    ({"process_group": None, "device_mesh": (2, 2)}, TypeError, "device_mesh must be a DeviceMesh, got .*tuple"),
    ({"process_group": PAIR}, ValueError, "pair"),
    ({"process_group": 2}, TypeError, "process_group must be a process group or None, got 2"),
    ({"ignored_modules": [], "ignored_states": []}, ValueError, "Cannot pass both ignored_modules and ignored_states"),
    ({"ignored_states": MIXED_STATES}, ValueError, r"got types \[<class '.*Linear'>, <class '.*Parameter'>\]"),
    ({"ignored_states": ["layers"]}, ValueError, r"got types \[<class 'str'>\]"),
    ({"ignored_modules": ["layers"]}, ValueError, r"got types \[<class 'str'>\]"),
    ({"ignored_modules": 3}, TypeError, "ignored_modules should be an iterable"),
    ({"param_init_fn": 3}, ValueError, "to be callable"),
    ({"auto_wrap_policy": CustomPolicy(lambda module: 3)}, ValueError, "bool or a dict"),
    ({"auto_wrap_policy": nn.ReLU}, ValueError, "auto_wrap_policy to be callable"),
    ({"auto_wrap_policy": {nn.Linear}}, ValueError, "auto_wrap_policy to be callable"),
    (
        {"auto_wrap_policy": transformer_auto_wrap_policy},
        TypeError,
        r"needs 'transformer_layer_cls' .*functools.partial\(transformer_auto_wrap_policy, transformer_layer_cls={Bl",
    ),
    ({"sharding_strategy": 1}, TypeError, "sharding_strategy must be a ShardingStrategy"),
    ({"backward_prefetch": "pre"}, TypeError, "backward_prefetch"),
    ({"forward_prefetch": "yes"}, TypeError, "forward_prefetch must be a bool, but got 'yes'"),
    ({"use_orig_params": "no"}, TypeError, "use_orig_params must be a bool, but got 'no'"),
    ({"limit_all_gathers": 2}, TypeError, "limit_all_gathers must be a bool"),
    ({"forward_prefetch_distance": True}, TypeError, "forward_prefetch_distance must be an int"),
    ({"backward_prefetch_distance": 1.5}, TypeError, "backward_prefetch_distance must be an int"),
    ({"backward_prefetch_distance": -1}, ValueError, "0 or more, but got -1"),
    (
        {"backward_prefetch": None, "backward_prefetch_distance": 2},
        ValueError,
        "backward_prefetch=None gathers nothing ahead, and backward_prefetch_distance is 2",
    ),
    ({"forward_prefetch": True, "forward_prefetch_distance": 0}, ValueError, "forward_prefetch_distance is 0"),
    ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision"),
    ({"cpu_offload": True}, TypeError, "cpu_offload"),
    *(
        ({"device_id": device}, ValueError, rf"device_id={re.escape(repr(device))} is not available: torch")
        for device in ("nowhere", "meta", "xpu", "hpu:1", torch.device("fpga"))
    ),
    ({"auto_wrap_polcy": None}, TypeError, "unexpected .* argument 'auto_wrap_polcy'. Did you mean 'auto_wrap_policy'"),
    ({"coalesce_nbytes": 4}, TypeError, r"coalesce_nbytes= was removed: FullyShardedDataParallel.group\("),
    ({"zzz": None}, TypeError, "unexpected keyword argument 'zzz'$"),
]


@pytest.mark.parametrize(("options", "kind", "words"), BAD)
def test_wrong_arguments_raise_before_the_module_changes(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    """The message describes the argument, and the module is unchanged."""
    module = net()
    before, children = list(module.parameters()), list(module.modules())
    shapes = [p.shape for p in before]
    options = {"process_group": StandIn(), "auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), **options}
    with pytest.raises(kind, match=words):
        FullyShardedDataParallel(module, **options)
    assert list(module.modules()) == children
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))
    assert [p.shape for p in module.parameters()] == shapes


def test_use_orig_params_may_be_none() -> None:
    model = build(net(), process_group=StandIn(), use_orig_params=None)
    assert all(isinstance(param, FlatParameter) for param in model.parameters())


def test_only_modules_can_be_wrapped() -> None:
    with pytest.raises(TypeError, match=r"module must be an nn\.Module, got type"):
        FullyShardedDataParallel(nn.Linear, StandIn())  # type: ignore[arg-type]


def test_a_wrapped_module_cannot_be_ignored_nor_wrapped_again_by_a_policy() -> None:
    """The path of the module is named."""
    inner = build(nn.Linear(2, 2), process_group=StandIn())
    module = nn.Sequential(nn.ReLU(), nn.Sequential(inner))
    with pytest.raises(ValueError, match="should not include FSDP modules"):
        FullyShardedDataParallel(module, StandIn(), ignored_modules=[inner])
    with pytest.raises(ValueError, match=re.escape("'1.0' in Sequential")):
        FullyShardedDataParallel(module, StandIn(), auto_wrap_policy=ModuleWrapPolicy({nn.ReLU}))


@both_modes
@on_ranks(2)
def test_a_wrapper_directly_around_another_one_trains(use_orig_params: bool) -> None:
    """The outer one has no parameters of its own."""
    model = build(build(net(), use_orig_params=use_orig_params), use_orig_params=use_orig_params)
    train(model)
    assert_bit_equal(full_parameters(model), train_plain(net(), 2))


def test_warnings_at_construction() -> None:
    """No warning concerns CPU or NO_SHARD."""
    group = StandIn()
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.warns(UserWarning, match=f"wraps a {type(container).__name__}, which has no forward: .* Wrap its"):
            FullyShardedDataParallel(container, group)
    module = net()
    with pytest.warns(UserWarning, match="the module being wrapped is in ignored_modules"):
        model = FullyShardedDataParallel(module, group, ignored_modules=[module])
    assert not model._has_params and len(list(model.parameters())) == 8
    for strategy in (FULL_SHARD, SHARD_GRAD_OP):
        with pytest.warns(UserWarning, match=f"{strategy} works like NO_SHARD"):
            model = FullyShardedDataParallel(net(), StandIn(0, 1), strategy)
        assert model.sharding_strategy is NO_SHARD
    for strategy in STRATEGIES:
        FullyShardedDataParallel(net(), group, strategy)  # warnings are errors
    FullyShardedDataParallel(net(), StandIn(0, 1), NO_SHARD)


def test_the_warning_about_one_rank_points_once_at_the_users_line() -> None:
    """The policy may make many units: Python shows a warning once per line that it points at."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        FullyShardedDataParallel(net(), StandIn(0, 1), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert [(each.filename, "one rank" in str(each.message)) for each in seen] == [(__file__, True)]


class ScaledTensor(Tensor):
    """A tensor subclass with a hook by which FSDP2 gathers it."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        raise AssertionError("not called")


def test_tensor_subclasses_with_gather_hooks_are_refused() -> None:
    """FSDP2's extension hooks would be ignored, and training would continue without them. No module is changed."""
    module = net()
    module.head.weight = nn.Parameter(module.head.weight.detach().as_subclass(ScaledTensor))
    children, words = list(module.modules()), r"'head.weight' of the Net unit is a ScaledTensor with fsdp_pre_all_g"
    for policy in (None, ModuleWrapPolicy({nn.Linear})):
        with pytest.raises(NotImplementedError, match=words):
            FullyShardedDataParallel(module, StandIn(), auto_wrap_policy=policy)
        assert list(module.modules()) == children
    FullyShardedDataParallel(module, StandIn(), ignored_states=[module.head.weight])


def test_wrapping_without_a_process_group_raises() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group"):
        FullyShardedDataParallel(net())


# -- optimizers ------------------------------------------------------------------------------------------------------


def test_an_optimizer_in_backward_requires_use_orig_params() -> None:
    """With flat parameters the optimizer would never step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing the package warns
        from torch.distributed.optim import _apply_optimizer_in_backward
    model = build(net(), process_group=StandIn(0, 1))
    _apply_optimizer_in_backward(torch.optim.SGD, [next(model.parameters())], {"lr": 0.1})
    with pytest.raises(RuntimeError, match="only supported with use_orig_params=True"):
        model(torch.ones(1, WIDTH))


# -- process groups ------------------------------------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_constructor_needs_only_rank_and_size_of_a_group(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """torch.distributed is not initialized. Each rank's shards are those of the plain parameters."""
    assert not dist.is_initialized()
    plain = values(net())
    parts: dict[str, list[Tensor]] = {name: [] for name in plain}
    for rank in range(3):
        group = StandIn(rank, 3)
        model = build(
            net(), process_group=group, sharding_strategy=strategy, use_orig_params=use_orig_params,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        )  # fmt: skip
        for unit in FullyShardedDataParallel.fsdp_modules(model):
            assert unit.process_group is group and (unit.rank, unit.world_size) == (rank, 3)
        for unit in shard_info(model):
            for bucket in unit.buckets:
                for record, piece in zip(bucket.layout.params, bucket.pieces, strict=True):
                    part = bucket.flat_param[piece.shard_offset : piece.shard_offset + piece.numel]
                    parts[unit.full_name(record)].append(part.detach())
    for name, value in plain.items():
        whole = torch.cat(parts[name]) if strategy is not NO_SHARD else parts[name][0]
        assert torch.equal(whole, value.flatten()), name


@on_ranks(2)
def test_a_process_group_without_this_rank_is_refused_by_name() -> None:
    """Rank 1 passes a group, alone, in a pair or through a mesh, that it does not belong to."""
    group, mesh = dist.new_group([0]), DeviceMesh("cpu", [0])
    if dist.get_rank() == 1:
        for options in ({"process_group": group}, {**HYBRID, "process_group": (group, group)}, {"device_mesh": mesh}):
            module = net()
            with pytest.raises(ValueError, match=r"rank 1 does not belong to .*Pass each rank a .* it belongs to"):
                FullyShardedDataParallel(module, **{**options, "auto_wrap_policy": ModuleWrapPolicy({nn.Linear})})
            assert type(module.head) is nn.Linear


# -- roots ---------------------------------------------------------------------------------------------------------


@both_modes
@on_ranks(2)
def test_roots_are_determined_at_first_use_and_adopt_units(use_orig_params: bool) -> None:
    """A second root adopts the units of a tree that was trained under another one, until it is deleted."""
    policy = ModuleWrapPolicy({nn.Linear})
    first = build(net(), auto_wrap_policy=policy, use_orig_params=use_orig_params)
    train(first)
    assert first.check_is_root() and not first.head.check_is_root()
    second: Any = build(nn.Sequential(first), use_orig_params=use_orig_params)
    train(second, first=2)
    assert second.check_is_root() and not first.check_is_root()
    assert FullyShardedDataParallel.fsdp_modules(nn.Sequential(second, nn.ReLU()), root_only=True) == [second]
    plain = net()
    for start in (0, 2):
        expected = train_plain(plain, 2, first=start)
    assert_bit_equal(full_parameters(first), expected, "under the second root")
    gone = weakref.ref(second)
    del second
    assert gone() is None
    train(first, first=4)
    assert first.check_is_root()
    assert_bit_equal(full_parameters(first), train_plain(plain, 2, first=4), "after the second root")
    # Two independent trees.
    both = nn.ModuleList([build(net(), use_orig_params=use_orig_params) for _ in range(2)])
    assert FullyShardedDataParallel.fsdp_modules(both, root_only=True) == list(both)
    for model in both:
        train(model)
        assert_bit_equal(full_parameters(model), train_plain(net(), 2))


@pytest.mark.parametrize("attribute", ["use_orig_params", "limit_all_gathers"])
def test_attributes_that_must_agree_in_a_tree(attribute: str) -> None:
    """A difference is found at first use; the units of the tree can be used separately."""
    group = StandIn(0, 1)
    inner = build(nn.Linear(WIDTH, WIDTH), process_group=group, **{attribute: True})
    model = build(nn.Sequential(inner, nn.Linear(WIDTH, 3)), process_group=group, **{attribute: False})
    for use in (lambda: model(torch.ones(1, WIDTH)), model.check_is_root, lambda: model.apply(print)):
        with pytest.raises(ValueError, match=f"{attribute} must be the same for all"):
            use()
    assert inner(torch.ones(1, WIDTH)).shape == (1, WIDTH)


# -- states --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [None, ModuleWrapPolicy({nn.Linear})], ids=["alone", "with a policy"])
def test_a_lazy_module_needs_a_forward_first(policy: Any) -> None:
    """A policy has wrapped nothing before the error."""
    module = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3))
    with pytest.raises(ValueError, match=r"'1\.weight' of the Sequential unit is not initialised yet"):
        FullyShardedDataParallel(module, StandIn(), auto_wrap_policy=policy)
    assert type(module[0]) is nn.Linear


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # a DeprecationWarning up to 2.13, then a FutureWarning
def test_scripted_modules_are_refused_unless_ignored() -> None:
    """They are refused by name, and may be ignored, with wrapped modules around them."""

    def scripted() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 3), torch.jit.script(nn.Linear(3, 3)))

    words = r"'1\.weight' of the Sequential unit is in a compiled script .* ignored_modules"
    with pytest.raises(ValueError, match=words):
        FullyShardedDataParallel(scripted(), StandIn())
    module = scripted()
    model = FullyShardedDataParallel(module, StandIn(), ignored_modules=[module[1]])
    assert model[1](torch.ones(1, 3)).shape == (1, 3)


# -- members and names ---------------------------------------------------------------------------------------------


@both_modes
def test_attributes_that_tools_rely_on(use_orig_params: bool) -> None:
    """Further ones are compared with torch's in test_members.py."""
    plain = net()
    model = build(plain, process_group=StandIn(), use_orig_params=use_orig_params)
    state_of = wrapper_file._get_module_fsdp_state_if_fully_sharded_module
    assert state_of(model) is model and state_of(plain) is None
    assert _get_module_state(model) is model
    flat = model._flat_param
    assert flat is model.params[0] and model.params == [flat] and model._has_params
    assert (model.cpu_offload, model.forward_prefetch, model.limit_all_gathers) == (CPUOffload(), False, True)
    assert isinstance(flat, FlatParameter) and type(flat) is nn.Parameter and flat._is_flat_param
    assert not isinstance(nn.Parameter(torch.ones(1)), FlatParameter)
    with pytest.raises(TypeError, match="cannot be subclassed"):
        type("Mine", (FlatParameter,), {})(torch.ones(1))
    assert all(param._fsdp_flattened and type(param) is nn.Parameter for param in model.parameters())
    for module in plain.modules():
        assert module._is_fsdp_managed_module and module._fsdp_use_orig_params is use_orig_params


def test_attributes_and_items_are_read_from_the_module() -> None:
    """Reading falls through to the module, setting does not."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    module.note = "mine"
    model = build(module, process_group=StandIn())
    assert model.note == "mine"
    assert model[1] is module[1] and model[-1] is module[1] and list(model) == list(module)
    model.note = "changed"
    assert module.note == "mine" and model.note == "changed"
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'nothing'"):
        _ = model.nothing
    with pytest.raises(TypeError):
        len(model)
    assert model._fsdp_wrapped_module is module and model.module is module


def sharing() -> nn.Module:
    """Build one module registered twice, one whose bias is registered as None, and one that is None itself."""
    twice = nn.Linear(WIDTH, WIDTH)
    module = nn.Sequential(twice, nn.Sequential(twice, nn.Linear(WIDTH, WIDTH, bias=False)), nn.Linear(WIDTH, WIDTH))
    module.register_module("nothing", None)
    return module


@both_modes
def test_zero_grad_equals_that_of_a_plain_module(use_orig_params: bool) -> None:
    """Also for a parameter that was registered after wrapping, and that no unit has."""
    for set_to_none in (True, False):
        found = []
        for zero_grad in (FullyShardedDataParallel.zero_grad, nn.Module.zero_grad):
            model = build(sharing(), process_group=StandIn(), use_orig_params=use_orig_params)
            late = model[1][1]._parameters["late"] = nn.Parameter(torch.ones(3))
            several = [late, *nn.Module.parameters(model)]
            for param in several[:-1]:  # one parameter has no gradient at first
                param.grad = torch.ones_like(param)
            zero_grad(model, set_to_none)
            found.append([param.grad if param.grad is None else param.grad.tolist() for param in several])
        assert found[0] == found[1], (set_to_none, found)


@both_modes
def test_module_looks_through_a_checkpoint_wrapper(use_orig_params: bool) -> None:
    """The flat parameter is registered on the innermost module, and training equals the plain module's."""
    inner = nn.Linear(WIDTH, 3)
    model = build(checkpoint_wrapper(inner), process_group=StandIn(0, 1), use_orig_params=use_orig_params)
    assert model.module is inner and model._fsdp_wrapped_module is not inner
    path = "_fsdp_wrapped_module._checkpoint_wrapped_module."
    names = ["weight", "bias"] if use_orig_params else ["_flat_param"]
    assert [name for name, _ in model.named_parameters()] == [path + name for name in names]
    if not use_orig_params:
        assert inner._flat_param is model._flat_param
    plain = nn.Linear(WIDTH, 3)
    plain.load_state_dict({"weight": inner.weight.detach().clone(), "bias": inner.bias.detach().clone()})
    train(model, rank=0)
    expected = train_plain(plain, 1)
    if use_orig_params:  # on one rank parameters keep their shapes
        assert_bit_equal(values(model), expected)
    with model.summon_full_params(model):
        assert_bit_equal(values(model), expected)


@both_modes
@on_ranks(2)
def test_units_without_parameters_support_every_member(use_orig_params: bool) -> None:
    """Units without parameters occur as a root and nested."""

    def buffer_only() -> nn.Module:
        return Net(lambda m, x: x * m.scale, scale=torch.full((1,), 2.0))

    wrap = functools.partial(build, use_orig_params=use_orig_params)
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, 3)
    torch.manual_seed(0)
    plain = nn.Sequential(buffer_only(), nn.Linear(WIDTH, 3))
    model = wrap(nn.Sequential(wrap(buffer_only()), wrap(linear)))
    for unit in (model, model[0]):
        assert not unit._has_params and unit._flat_param is None and unit.params == [] and unit._handle is None
    assert len(model._all_handles) == 1
    train(model)
    expected = train_plain(plain, 2)
    assert_bit_equal(full_parameters(model), {"1." + n: v for n, v in full_parameters(model[1]).items()})
    assert_bit_equal(full_parameters(model), expected)
    with model.no_sync():
        model(batch(0, 0)).sum().backward()
    model.zero_grad()
    with model.summon_full_params(model, with_grads=use_orig_params):
        assert_bit_equal(values(model), expected)
    assert dict(fsdp.full_params(model)).keys() == expected.keys()
    model.apply(lambda module: None)
    model._unshard()
    model.reset_iter_state()
    model.double()
    assert model[0].scale.dtype == torch.float64 and model(batch(0, 0).double()).dtype == torch.float64


# -- parameters of no unit -------------------------------------------------------------------------------------------


def warnings_of_steps(model: nn.Module, params: Sequence[Tensor] = ()) -> list[str]:
    """Return the warnings of two steps of an optimizer of `params`, by default of those of the model."""
    optimizer = torch.optim.SGD([param for param in params or model.parameters() if param.requires_grad], lr=0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    found = [str(warning.message) for warning in caught]
    return [words for words in found if "no wrapped module owns" in words or "from before they were wrapped" in words]


@on_ranks(2)
def test_an_optimizer_with_parameters_outside_of_units_warns() -> None:
    """A head outside of the wrapped backbone, a layer added after wrapping, or flat parameters in the place of those of
    the optimizer: a warning at the first step, by name.

    There is none if they need no gradient, if the wrapper ignores them, or if DistributedDataParallel reduces them.
    """

    def classifier(backbone: nn.Module, head: nn.Module) -> nn.Module:
        return nn.Sequential(OrderedDict(backbone=backbone, head=head))

    for strategy in (ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD):
        for orig in (True, False):
            (words,) = warnings_of_steps(classifier(wrap(nn.Linear(4, 4), strategy, orig), nn.Linear(4, 2)))
            assert words.startswith("SGD steps parameters that no wrapped module owns (2: 'head.weight', ...)"), words
            assert "Wrap a module that contains them" in words
            late = wrap(nn.Sequential(nn.Linear(4, 4)), strategy, orig)
            late.module.add_module("1", nn.Linear(4, 2))
            (words,) = warnings_of_steps(late)
            assert "(2: '1.weight', ...)" in words, words
            assert not warnings_of_steps(wrap(classifier(nn.Linear(4, 4), nn.Linear(4, 2)), strategy, orig))
            frozen = nn.Linear(4, 2).requires_grad_(False)
            assert not warnings_of_steps(classifier(wrap(nn.Linear(4, 4), strategy, orig), frozen))
            head = nn.Linear(4, 2)
            ignoring = wrap(classifier(nn.Linear(4, 4), head), strategy, orig, ignored_states=[head])
            assert not warnings_of_steps(ignoring)
            reduced = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
            assert not warnings_of_steps(classifier(wrap(nn.Linear(4, 4), strategy, orig), reduced))
            before = list((plain := nn.Linear(4, 2)).parameters())
            several = warnings_of_steps(wrap(plain, strategy, orig), before)
            assert len(several) == (not orig), several
            assert orig or several[0].startswith("SGD holds 2 of 2 parameters from before they were wrapped"), several
