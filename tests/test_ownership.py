"""Parameters that a unit owns: shared, ignored or on the meta device, and their initial values."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, patches, shard_info
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from tests.harness.meter import NOISE, Meter, Peak, needs_meter
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks
from tests.harness.sharded import full_parameters
from tests.harness.small import (
    WIDTH,
    Net,
    StandIn,
    batch,
    build,
    error_of,
    is_2_13,
    net,
    torchs,
    train,
    train_plain,
    values,
)
from tests.harness.strategies import both_modes

# -- sharing -------------------------------------------------------------------------------------------------------


def tied_net(location: str) -> tuple[nn.Module, ModuleWrapPolicy]:
    module = net()
    if location == "siblings":
        module.layers[4].weight = module.layers[0].weight
        return module, ModuleWrapPolicy({nn.Linear})
    module.head = nn.Linear(WIDTH, WIDTH)
    module.layers[0].weight = module.head.weight
    return module, ModuleWrapPolicy({nn.Sequential})


@both_modes
@pytest.mark.parametrize(
    ("location", "names"),
    [("siblings", ("layers.0.weight", "layers.4.weight")), ("parent", ("layers.0.weight", "head.weight"))],
)
def test_parameter_shared_across_units_is_refused(location: str, names: tuple[str, str], use_orig_params: bool) -> None:
    """The error names both parameters, and the model stays unwrapped."""
    module, policy = tied_net(location)
    modules, before = list(module.modules()), values(module)
    with pytest.raises(ValueError, match="shared") as caught:
        FullyShardedDataParallel(module, StandIn(), auto_wrap_policy=policy, use_orig_params=use_orig_params)
    for name in names:
        assert f"'{name}'" in str(caught.value)
    assert list(module.modules()) == modules
    assert_bit_equal(values(module), before)


@both_modes
def test_parameter_shared_with_a_unit_wrapped_by_hand_is_refused(use_orig_params: bool) -> None:
    """The error names both parameters as far as they are known."""
    module, _ = tied_net("parent")
    module.layers = build(module.layers, process_group=StandIn(), use_orig_params=use_orig_params)
    message = r"parameter 'head.weight' of the Net unit is shared with '0.weight' of the Sequential unit"
    with pytest.raises(ValueError, match=message):
        FullyShardedDataParallel(module, StandIn(), use_orig_params=use_orig_params)


@both_modes
@pytest.mark.parametrize("kind", [nn.Linear, nn.Sequential, None])
def test_two_parameters_over_one_memory_warn_once_with_both_names(kind: Any, use_orig_params: bool) -> None:
    """In two units, in one unit inside, and in the root; each of the two has memory of its own afterwards."""
    module = net()
    module.layers[4].weight.data = module.layers[0].weight.data
    policy = None if kind is None else ModuleWrapPolicy({kind})
    words = r"'layers\.0\.weight' and 'layers\.4\.weight' .*one memory: .*head\.weight = embed\.weight"
    with pytest.warns(UserWarning, match=words) as caught:
        FullyShardedDataParallel(module, StandIn(), auto_wrap_policy=policy, use_orig_params=use_orig_params)
    assert len(caught) == 1
    views = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    for part, layer in zip(torch.zeros(2, WIDTH, WIDTH), views):  # next to each other
        layer.weight.data = part
    views[2].weight = views[1].weight  # tied
    FullyShardedDataParallel(nn.Sequential(*views), StandIn(), use_orig_params=use_orig_params)


@both_modes
def test_discarded_wrapper_is_refused_with_a_remedy(use_orig_params: bool) -> None:
    """Layers wrapped as by torch's `fully_shard`: the remedy is to assign the wrappers."""
    module = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 3))
    for layer in module:
        build(layer, process_group=StandIn(), use_orig_params=use_orig_params)
    name, other = (
        ("0.0.weight", "'0.weight' of the Sequential unit") if use_orig_params else ("0._flat_param", "a flat")
    )
    message = (
        f"'{name}' of the Sequential unit lies in a module that was wrapped before, as {other}.*assign it.*Or wrap"
    )
    with pytest.raises(ValueError, match=message):
        FullyShardedDataParallel(module, StandIn(), use_orig_params=use_orig_params)


@both_modes
@on_ranks(2)
def test_shared_module_is_one_unit(use_orig_params: bool) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        shared = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(WIDTH, 3))

    model = build(make(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params)
    train(model)
    assert model[0] is model[2]
    assert_bit_equal(full_parameters(model), train_plain(make(), 2))


# -- ignored ------------------------------------------------------------------------------------------------------


@both_modes
def test_ignored_modules_include_submodules_except_nested_units(use_orig_params: bool) -> None:
    """Generators are read once; modules outside the tree have no effect."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(4, 5))
    inner = module[1][0] = build(module[1][0], process_group=StandIn(), use_orig_params=use_orig_params)
    ignored = module[1]
    unrelated = [nn.Linear(9, 9)]
    kept = dict(ignored[1].named_parameters())
    policy = CustomPolicy(lambda m: isinstance(m, nn.Linear) and m is not inner.module)
    with pytest.raises(ValueError, match="holds no FullyShardedDataParallel"):
        FullyShardedDataParallel(module, StandIn(), auto_wrap_policy=policy)
    model = build(
        module,
        process_group=StandIn(),
        use_orig_params=use_orig_params,
        ignored_modules=(m for m in [ignored, *unrelated]),
    )
    names = [[record.name for record in unit.buckets[0].layout.params] for unit in shard_info(model)]
    assert names == [["0.weight", "0.bias", "2.weight", "2.bias"], ["weight", "bias"]]
    assert dict(ignored[1].named_parameters()) == kept
    assert not any(hasattr(p, "_fsdp_flattened") for p in kept.values())


@both_modes
@pytest.mark.parametrize("by", ["ignored_modules", "ignored_states", "parameters"])
def test_ignored_parameters_and_modules(by: str, use_orig_params: bool) -> None:
    """Policies skip ignored modules, but wrap modules of ignored parameters."""
    module = net()
    ignored = module.layers[2]
    states = iter([ignored.weight, nn.Parameter(torch.ones(3))]) if by == "parameters" else iter([ignored])
    model = build(
        module,
        process_group=StandIn(),
        use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        **{"ignored_modules" if by == "ignored_modules" else "ignored_states": states},
    )
    units = {unit.name: [r.name for b in unit.buckets for r in b.layout.params] for unit in shard_info(model)}
    whole = ["weight", "bias"]
    expected = {"": [], "layers.0": whole, "layers.2": ["bias"], "layers.4": whole, "head": whole}
    if by != "parameters":
        del expected["layers.2"]
        assert model.layers[2] is ignored
    assert units == expected
    assert type(ignored.weight) is nn.Parameter and ignored.weight.shape == (WIDTH, WIDTH)
    assert any(p is ignored.weight for p in model.parameters())


@both_modes
@on_ranks(2)
def test_ignored_parameters_and_buffers_are_unchanged(use_orig_params: bool) -> None:
    """Same memory, and gradients of this rank only."""
    rank = dist.get_rank()
    module = net()
    module.layers.insert(1, nn.BatchNorm1d(WIDTH))
    ignored, weight = module.layers[1], module.layers[2 + 1].weight
    pointer, running = weight.data_ptr(), ignored.running_mean
    # Nested by hand: the outer unit does not own parameters that the inner one ignores.
    module.layers = build(
        module.layers, ignored_states=[weight, *ignored.parameters()], use_orig_params=use_orig_params
    )
    model = build(module, use_orig_params=use_orig_params)
    owned = [[record.name for record in unit.buckets[0].layout.params] for unit in shard_info(model)]
    assert owned == [["head.weight", "head.bias"], ["0.weight", "0.bias", "3.bias", "5.weight", "5.bias"]]
    model(batch(0, rank)).square().mean().backward()
    assert weight.data_ptr() == pointer and ignored.running_mean is running

    plain = net()
    plain.layers.insert(1, nn.BatchNorm1d(WIDTH))
    plain(batch(0, rank)).square().mean().backward()
    assert torch.equal(weight.grad, plain.layers[3].weight.grad)
    assert torch.equal(ignored.weight.grad, plain.layers[1].weight.grad)
    with model.summon_full_params(model):
        assert module.layers.module[3].weight is weight


# -- the meta device -----------------------------------------------------------------------------------------------


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def constant_init(module: nn.Module) -> None:
    """Allocate the module's own tensors and fill them with distinct values."""
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for index, tensor in enumerate([*module.parameters(recurse=False), *module.buffers(recurse=False)]):
            tensor.fill_(index + 1)


def recursive_init(module: nn.Module) -> None:
    """Empty and initialize the whole subtree, as some libraries do."""
    module.to_empty(device="cpu")

    def fill(each: nn.Module) -> None:
        with torch.no_grad():
            for param in each.parameters(recurse=False):
                param.fill_(3)

    module.apply(fill)


class WithOwn(nn.Module):
    """A parameter and a buffer beside a layer, initialized by `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.empty(3))
        self.register_buffer("state", torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.own, 0.5)
        self.state.fill_(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.own.sum()


@both_modes
@on_ranks(2)
def test_initialization_from_the_meta_device(use_orig_params: bool) -> None:
    wrap = functools.partial(build, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params)

    def summoned(model: nn.Module) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(model):
            return values(model)

    # By reset_parameters, with the random numbers of a plain model.
    torch.manual_seed(0)
    model = wrap(on_meta(Net))
    assert_bit_equal(summoned(model), values(net()))
    train(model)
    assert_bit_equal(full_parameters(model), train_plain(net(), 2))
    model = wrap(on_meta(lambda: nn.Sequential(WithOwn(), WithOwn())))
    assert [b.tolist() for b in model.buffers()] == [[7, 7]] * 2
    assert all(v.unique().tolist() == [0.5] for n, v in summoned(model).items() if n.endswith("own"))

    # By param_init_fn, called once for each module, also for those without parameters.
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        constant_init(module)

    plain = on_meta(Net)
    expected_order = [m for m in plain.modules() if isinstance(m, nn.Linear)]
    model = wrap(plain, param_init_fn=init)
    assert seen[: len(expected_order)] == expected_order and len(set(seen)) == len(seen)
    for name, value in summoned(model).items():
        assert value.unique().tolist() == [1.0 if name.endswith("weight") else 2.0], name
    # By a param_init_fn that recurses into wrapped units.
    model = wrap(on_meta(lambda: nn.Sequential(WithOwn(), WithOwn())), param_init_fn=recursive_init)
    assert all(value.unique().tolist() == [3.0] for value in summoned(model).values())
    model(batch(0, 0)).sum().backward()
    assert any(param.grad is not None for param in model.parameters())

    # Values on rank 0 only.
    rank = dist.get_rank()
    module = net() if rank == 0 else on_meta(Net)
    empty = functools.partial(nn.Module.to_empty, device="cpu", recurse=False)
    model = wrap(module, sync_module_states=True, param_init_fn=empty if rank else None)
    assert_bit_equal(summoned(model), values(net()))


class WithoutReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))


def test_missing_initializers_are_listed() -> None:
    """All are listed before any change; ignored modules need none."""
    module = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), WithoutReset(), nn.Sequential(WithoutReset())))
    message = (
        r"no reset_parameters\(\) .*: 1 \(WithoutReset\), 2\.0 \(WithoutReset\)\. Give them one, or pass param_init_fn="
    )
    with pytest.raises(AttributeError, match=message):
        FullyShardedDataParallel(module, StandIn(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert type(module[0]) is nn.Linear
    assert all(param.is_meta and param.dim() > 0 for param in module.parameters())
    model = build(module, process_group=StandIn(), ignored_modules=[module[1], module[2]])
    assert module[1].weight.is_meta and not model._flat_param.is_meta
    with pytest.raises(ValueError, match=r"param_init_fn left .* of '1' \(WithoutReset\) on the meta device"):
        FullyShardedDataParallel(
            on_meta(lambda: nn.Sequential(nn.Linear(2, 2), WithoutReset())),
            StandIn(),
            param_init_fn=lambda m: constant_init(m) if isinstance(m, nn.Linear) else None,
        )


@both_modes
@pytest.mark.parametrize("init", [None, constant_init], ids=["reset_parameters", "param_init_fn"])
def test_meta_device_keeps_ties(init: Any, use_orig_params: bool) -> None:
    """Tied parameters stay one parameter."""

    def make() -> nn.Module:
        module = nn.Sequential(nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7, bias=False))
        module[1].weight = module[0].weight
        return module

    model = build(on_meta(make), process_group=StandIn(), use_orig_params=use_orig_params, param_init_fn=init)
    (record,) = shard_info(model)[0].buckets[0].layout.params
    assert (record.name, record.aliases) == ("0.weight", ("1.weight",))
    assert model[0].weight is model[1].weight


@needs_meter
@both_modes
@pytest.mark.parametrize("init", [None, constant_init], ids=["reset_parameters", "param_init_fn"])
def test_peak_memory_from_the_meta_device_is_shards_and_one_unit(init: Any, use_orig_params: bool) -> None:
    """One unit's parameters, and the flat vector they are copied into."""
    count, width, ranks = 16, 511, 4

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

    options: dict[str, Any] = {"process_group": StandIn(1, ranks), "use_orig_params": use_orig_params}
    options |= {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "param_init_fn": init}
    meter = Meter()
    with Peak(meter):
        build(on_meta(make), **options)  # fills the caches of what is called
    unit = (width + 1) * width * 4
    shards = count * unit // ranks
    base = meter.baseline()
    with Peak(meter) as peak:
        model = build(on_meta(make), **options)
    assert shards < peak.nbytes - base <= shards + 2 * unit + 4 * NOISE
    assert abs(meter.live() - base - shards) < 4 * NOISE
    del model


# -- the same values on every rank -----------------------------------------------------------------------------------


@both_modes
@on_ranks(3)
def test_sync_module_states_on_cpu(use_orig_params: bool) -> None:
    """Trained and frozen parameters and buffers of rank 0; torch refuses CPU tensors."""
    rank = dist.get_rank()
    policy = ModuleWrapPolicy({nn.Linear, nn.BatchNorm1d})

    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 3), nn.BatchNorm1d(3))
        for norm in (module[1], module[3]):
            norm.running_mean.fill_(seed)
            norm.num_batches_tracked.fill_(seed)
        module[0].bias.requires_grad_(False)
        module[2].double()  # several dtypes and kinds in one message
        module[2].weight.data = module[2].weight.data.t().contiguous().t()
        return module

    expected = make(10)
    for wrap_policy in (None, policy):
        module = make(10 + rank)
        ignored = [module[1].weight]
        model = build(
            module,
            sync_module_states=True,
            auto_wrap_policy=wrap_policy,
            use_orig_params=use_orig_params,
            ignored_states=ignored,
        )
        expected_values = values(expected)
        expected_values["1.weight"] = values(make(10 + rank))["1.weight"]  # ignored parameters are not synchronized
        with model.summon_full_params(model):
            assert_bit_equal(values(model), expected_values)
        for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(buffer, other), name
    message = error_of(torchs, make(10 + rank), sync_module_states=True, use_orig_params=True)
    if torch.__version__.startswith("2.13"):
        assert message.startswith("ValueError")


# -- torch's own FSDP ----------------------------------------------------------------------------------------------


@is_2_13
@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel:")
@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_nesting_with_torchs_fsdp_is_refused(use_orig_params: bool) -> None:
    """Named by class, before any change."""
    from torch.distributed.fsdp import fully_shard

    theirs = functools.partial(torchs, use_orig_params=use_orig_params)
    ours = functools.partial(FullyShardedDataParallel, use_orig_params=use_orig_params)
    policy = ModuleWrapPolicy({nn.Linear})
    for wrap, message in ((theirs, "FullyShardedDataParallel"), (fully_shard, "FSDPModule")):
        net = Net()
        net.head = wrap(net.head)
        before = [(name, type(module)) for name, module in net.named_modules()]
        with pytest.raises(
            ValueError, match=rf"'head' is already wrapped by torch\.distributed\.fsdp.*\.{message}, which"
        ):
            ours(net, auto_wrap_policy=policy)
        assert [(name, type(module)) for name, module in net.named_modules()] == before
        with pytest.raises(ValueError, match=r"the module is already wrapped by torch"):
            ours(net.head)
    if use_orig_params:
        net = Net()
        theirs(net)
        with pytest.raises(ValueError, match=r"parameter 'weight' is already sharded by torch\.distributed\.fsdp"):
            ours(net.head)
    net = Net()
    net.head = ours(net.head)
    with pytest.raises(TypeError, match="this model belongs to the package fsdp"):
        theirs(net)
    patches.take_back()
    model = theirs(net)
    with pytest.raises(RuntimeError, match=r"the Linear unit lies in a module that torch's own FSDP has wrapped"):
        model(torch.ones(2, WIDTH))
    model = ours(Net(), auto_wrap_policy=policy)
    model.head(torch.ones(2, WIDTH))  # an inner unit called before the root


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_fully_shard_of_a_wrapped_module_is_refused(use_orig_params: bool) -> None:
    """At the call, for the root and for an inner unit."""
    from torch.distributed.fsdp import fully_shard

    for pick in (lambda model: model, lambda model: model.head):
        model = FullyShardedDataParallel(
            Net(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params
        )
        words = (
            r"fully_shard\(\) of torch was called on a module of this package's FullyShardedDataParallel.*one of the"
        )
        with pytest.raises(TypeError, match=words):
            fully_shard(pick(model))
