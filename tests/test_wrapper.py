"""The wrapper's constructor and members: what is accepted, what is refused and how, and what holds afterwards.

Where no collective is needed, a model is built in this process over a `StandIn` for a process group.
"""

from __future__ import annotations

import enum
import functools
import gc
import inspect
import os
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp
import fsdp.fully_sharded_data_parallel as wrapper_file
from fsdp import (
    BackwardPrefetch,
    CPUOffload,
    FlatParameter,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    shard_info,
)
from fsdp.api import TrainingState
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from tests.harness.meter import NOISE, Meter, meter_available
from tests.harness.oracle import assert_bit_equal, clean_name
from tests.harness.pool import run_ranks
from tests.harness.sharded import full_parameters

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
STRATEGIES = [FULL_SHARD, SHARD_GRAD_OP, NO_SHARD]
WIDTH = 5
is_2_13 = pytest.mark.skipif(not torch.__version__.startswith("2.13"), reason="known of this version of torch")
both_modes = pytest.mark.parametrize("use_orig_params", [False, True])


class StandIn:
    """All that a constructor may ask of a process group."""

    def __init__(self, rank: int = 0, size: int = 2) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Net(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        modules = [m for _ in range(layers) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
        self.layers = nn.Sequential(*modules)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


def net(layers: int = 3) -> Net:
    torch.manual_seed(0)
    return Net(layers)


def build(module: nn.Module, **options: Any) -> FullyShardedDataParallel:
    """Wrapped, without the warning that one rank has nothing to shard over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FullyShardedDataParallel: the group has one rank", UserWarning)
        return FullyShardedDataParallel(module, **options)


def torchs(module: nn.Module, **options: Any) -> nn.Module:
    """Wrapped in torch's FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

    return TorchFSDP(module, device_id=torch.device("cpu"), **options)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, first: int = 0, steps: int = 2, rank: int = -1
) -> None:
    optimizer = optimizer or sgd(model)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        model(batch(step, dist.get_rank() if rank < 0 else rank)).square().mean().backward()
        optimizer.step()


def train_plain(module: nn.Module, world_size: int, first: int = 0, steps: int = 2) -> dict[str, Tensor]:
    """What `train` does on all ranks: the mean of their gradients, summed in rank order. Returns the parameters."""
    optimizer = sgd(module)
    for step in range(first, first + steps):
        grads = []
        for rank in range(world_size):
            optimizer.zero_grad()
            module(batch(step, rank)).square().mean().backward()
            grads.append([p.grad for p in module.parameters()])
        for param, *each in zip(module.parameters(), *grads, strict=True):
            if each[0] is not None:
                param.grad = functools.reduce(torch.add, each) / world_size
        optimizer.step()
    return values(module)


def values(module: nn.Module) -> dict[str, Tensor]:
    return {clean_name(name): param.detach().clone() for name, param in module.named_parameters()}


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The type and the words of what `function` raises; warnings do not count."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            function(*args, **kwargs)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


# -- the signature -------------------------------------------------------------------------------------------------


def _signature(function: Any) -> list[tuple[str, Any, str]]:
    return [
        (name, getattr(parameter.default, "name", parameter.default), parameter.kind.name)
        for name, parameter in inspect.signature(function).parameters.items()
    ]


SAME_AS_TORCHS = ["__init__", "summon_full_params", "fsdp_modules", "check_is_root", "apply", "no_sync"]
SAME_AS_TORCHS += ["register_comm_hook", "named_parameters", "_unshard", "_assert_state"]


@pytest.mark.parametrize("name", SAME_AS_TORCHS)
def test_signatures_are_torchs(name: str) -> None:
    """Names, order, defaults, kinds (section C); what ours has besides comes after them, by keyword only."""
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

    ours, theirs = _signature(getattr(FullyShardedDataParallel, name)), _signature(getattr(TorchFSDP, name))
    assert ours[: len(theirs)] == theirs
    assert all(kind == "KEYWORD_ONLY" for _, _, kind in ours[len(theirs) :])


def test_clipping_has_one_argument_more() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

    theirs = _signature(TorchFSDP.clip_grad_norm_)
    more = [("error_if_nonfinite", False, "POSITIONAL_OR_KEYWORD")]
    assert _signature(FullyShardedDataParallel.clip_grad_norm_) == theirs + more


def test_every_public_member_of_torchs_is_there() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

    names = {name for name in TorchFSDP.__dict__ if not name.startswith("_")}
    assert names <= set(dir(FullyShardedDataParallel))


# -- bad arguments -------------------------------------------------------------------------------------------------


class Mesh:
    def __init__(self, ndim: int) -> None:
        self.ndim = ndim


HYBRID = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
PAIR = (StandIn(), StandIn())
BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "Y1": ({"device_mesh": Mesh(1)}, ValueError, "pass only one"),
    "Y2": (
        {**HYBRID, "process_group": None},
        ValueError,
        "requires explicit specification of process group or device_mesh",
    ),
    "Y3": ({**HYBRID, "process_group": None, "device_mesh": Mesh(1)}, ValueError, "ndim=2"),
    "Y4": (HYBRID, ValueError, "Expected process_group to be passed in .*StandIn"),
    "Y4, three": (
        {**HYBRID, "process_group": (*PAIR, StandIn())},
        ValueError,
        "Expected process_group to be passed in",
    ),
    "C2": ({"process_group": PAIR}, ValueError, "pair"),
    "Y5": (
        {"ignored_modules": [], "ignored_states": []},
        ValueError,
        "Cannot pass both ignored_modules and ignored_states",
    ),
    "Y6": (
        {"ignored_states": [nn.Parameter(torch.ones(2)), nn.Linear(2, 2)]},
        ValueError,
        r"got types \[<class 'torch.nn.modules.linear.Linear'>, <class 'torch.nn.parameter.Parameter'>\]",
    ),
    "Y6, others": ({"ignored_states": ["layers"]}, ValueError, r"got types \[<class 'str'>\]"),
    "Y7, elements": ({"ignored_modules": ["layers"]}, ValueError, r"got types \[<class 'str'>\]"),
    "Y7, not iterable": ({"ignored_modules": 3}, TypeError, "ignored_modules should be an iterable"),
    "Y11": ({"auto_wrap_policy": CustomPolicy(lambda module: 3)}, ValueError, "bool or a dict"),
    "Y22": ({"param_init_fn": 3}, ValueError, "to be callable"),
    "no policy": ({"auto_wrap_policy": {nn.Linear}}, ValueError, "auto_wrap_policy to be callable"),
    "strategy": ({"sharding_strategy": 1}, TypeError, "sharding_strategy must be a ShardingStrategy"),
    "prefetch": ({"backward_prefetch": "pre"}, TypeError, "backward_prefetch"),
    "forward prefetch": ({"forward_prefetch": "yes"}, TypeError, "forward_prefetch must be a bool, but got 'yes'"),
    "limit": ({"limit_all_gathers": 2}, TypeError, "limit_all_gathers must be a bool"),
    "distance, kind": ({"forward_prefetch_distance": True}, TypeError, "forward_prefetch_distance must be an int"),
    "distance, fraction": ({"backward_prefetch_distance": 1.5}, TypeError, "backward_prefetch_distance must be an int"),
    "distance, negative": ({"backward_prefetch_distance": -1}, ValueError, "0 or more, but got -1"),
    "no prefetch, far": (
        {"backward_prefetch": None, "backward_prefetch_distance": 2},
        ValueError,
        "backward_prefetch=None gathers nothing ahead, and backward_prefetch_distance is 2",
    ),
    "prefetch, nothing": (
        {"forward_prefetch": True, "forward_prefetch_distance": 0},
        ValueError,
        "forward_prefetch_distance is 0",
    ),
    "precision": ({"mixed_precision": torch.bfloat16}, TypeError, "mixed_precision"),
    "offload": ({"cpu_offload": True}, TypeError, "cpu_offload"),
    "device": ({"device_id": "nowhere"}, RuntimeError, "nowhere"),
    # features that come later name themselves
    "hybrid": ({**HYBRID, "process_group": PAIR}, NotImplementedError, "HYBRID_SHARD"),
    "mesh": ({"process_group": None, "device_mesh": Mesh(1)}, NotImplementedError, "device_mesh"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case: str) -> None:
    """Section Y-1, and AA26 for the words. Nothing of the module is changed before the error."""
    options, kind, words = BAD[case]
    module = net()
    before, children = list(module.parameters()), list(module.modules())
    shapes = [p.shape for p in before]
    options = {"process_group": StandIn(), "auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), **options}
    if case == "Y2":
        del options["auto_wrap_policy"]
    with pytest.raises(kind, match=words):
        FullyShardedDataParallel(module, **options)
    assert list(module.modules()) == children
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))
    assert [p.shape for p in module.parameters()] == shapes


def test_what_is_wrapped_is_a_module() -> None:
    with pytest.raises(TypeError, match=r"module must be an nn\.Module, got type"):
        FullyShardedDataParallel(nn.Linear, StandIn())  # type: ignore[arg-type]


def test_a_wrapped_module_cannot_be_ignored_nor_wrapped_again_by_a_policy() -> None:
    """Y8, Y10: the path is named."""
    inner = build(nn.Linear(2, 2), process_group=StandIn())
    module = nn.Sequential(nn.ReLU(), nn.Sequential(inner))
    with pytest.raises(ValueError, match="should not include FSDP modules"):
        FullyShardedDataParallel(module, StandIn(), ignored_modules=[inner])
    with pytest.raises(ValueError, match=re.escape("'1.0' in Sequential")):
        FullyShardedDataParallel(module, StandIn(), auto_wrap_policy=ModuleWrapPolicy({nn.ReLU}))


def test_warnings_at_construction() -> None:
    """Y9, Y24, Y25, AA8; no warning about CPU (AA1) nor about NO_SHARD (AA26)."""
    group = StandIn()
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.warns(UserWarning, match=f"wraps a {type(container).__name__}, which has no forward"):
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


def test_there_must_be_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="init_process_group"):
        FullyShardedDataParallel(net())


# -- optimizers ------------------------------------------------------------------------------------------------------


def test_an_optimizer_in_backward_wants_the_original_parameters() -> None:
    """Y30, W11: it would never step."""
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
def test_the_constructor_asks_a_group_for_rank_and_size(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """AA3: torch.distributed is not even initialised. Each rank's shards are those of the plain parameters."""
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


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _with_expert(kind: int) -> nn.Module:
    """The same trunk on every rank around one of two experts of different sizes."""
    torch.manual_seed(0)
    trunk = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)]
    torch.manual_seed(1 + kind)
    return nn.Sequential(trunk[0], Expert((4, 7)[kind]), trunk[1])


def _experts(use_orig_params: bool) -> None:
    """Rank 0 has an expert of its own, ranks 1 and 2 share another; the trunk belongs to all."""
    os.environ["FSDP_COLLECTIVES"] = "direct"  # sums in rank order
    rank, homes = dist.get_rank(), [[0], [1, 2], [1, 2]]
    groups = [dist.new_group([0]), dist.new_group([1, 2])]
    kind = min(rank, 1)
    module = _with_expert(kind)
    module[1] = build(module[1], process_group=groups[kind], use_orig_params=use_orig_params)
    model = build(module, use_orig_params=use_orig_params)
    assert module[1].sharding_strategy is (NO_SHARD if rank == 0 else FULL_SHARD)
    train(model, steps=3)

    plain = [_with_expert(min(r, 1)) for r in range(3)]  # one model per rank; gradients are averaged where they belong
    optimizers = [sgd(m) for m in plain]
    for step in range(3):
        for r in range(3):
            optimizers[r].zero_grad()
            plain[r](batch(step, r)).square().mean().backward()
        grads = [{name: p.grad for name, p in m.named_parameters()} for m in plain]
        for r, m in enumerate(plain):
            for name, p in m.named_parameters():
                ranks = homes[r] if name.startswith("1.") else [0, 1, 2]
                p.grad = functools.reduce(torch.add, [grads[i][name] for i in ranks]) / len(ranks)
        for optimizer in optimizers:
            optimizer.step()
    with FullyShardedDataParallel.summon_full_params(model):
        assert_bit_equal(values(model), values(plain[rank]), f"rank {rank}")


@both_modes
def test_groups_may_differ_per_rank_and_have_one_rank(use_orig_params: bool) -> None:
    """AA4: sizes too, where the groups do."""
    run_ranks(3, _experts, use_orig_params)


def _on_some_ranks(use_orig_params: bool) -> None:
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    model = build(
        net(), process_group=group, use_orig_params=use_orig_params, auto_wrap_policy=ModuleWrapPolicy({nn.Linear})
    )
    train(model, rank=dist.get_rank() - 1)
    with model.summon_full_params(model):
        assert_bit_equal(values(model), train_plain(net(), 2))


@both_modes
def test_a_model_may_be_built_on_some_ranks_only(use_orig_params: bool) -> None:
    """AA4"""
    run_ranks(3, _on_some_ranks, use_orig_params)


@both_modes
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_changes_no_value(strategy: ShardingStrategy, use_orig_params: bool) -> None:
    """AA8, AA13: without torch.distributed, and with the original shapes."""
    plain = net()
    model = build(
        net(), process_group=StandIn(0, 1), sharding_strategy=strategy, use_orig_params=use_orig_params,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
    )  # fmt: skip
    train(model, rank=0, steps=3)
    expected = train_plain(plain, 1, steps=3)
    if use_orig_params:
        assert_bit_equal(values(model), expected)
    with model.summon_full_params(model):
        assert_bit_equal(values(model), expected)


# -- roots ---------------------------------------------------------------------------------------------------------


def _child_first(use_orig_params: bool) -> dict[str, Tensor]:
    module = net()
    module.layers = build(module.layers, use_orig_params=use_orig_params)
    with torch.no_grad():
        module.layers(batch(0, 0))
    model = build(module, use_orig_params=use_orig_params)
    train(model)
    return full_parameters(model)


def _roots(use_orig_params: bool) -> None:
    expected = train_plain(net(), 2)
    assert_bit_equal(_child_first(use_orig_params), expected, "after the child was used first")

    # A second root adopts the units of a tree that was trained under another one, and lets go of them when it dies.
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
    # Two trees side by side, neither of which is the other's.
    both = nn.ModuleList([build(net(), use_orig_params=use_orig_params) for _ in range(2)])
    assert FullyShardedDataParallel.fsdp_modules(both, root_only=True) == list(both)
    for model in both:
        train(model)
        assert_bit_equal(full_parameters(model), train_plain(net(), 2))


@both_modes
def test_roots(use_orig_params: bool) -> None:
    """Y63, AA6, H1: whoever runs first, and whoever comes and goes."""
    run_ranks(2, _roots, use_orig_params)


@pytest.mark.parametrize("attribute", ["use_orig_params", "limit_all_gathers"])
def test_what_must_be_the_same_in_a_tree(attribute: str) -> None:
    """Y29: found at first use; the tree can be used apart."""
    group = StandIn(0, 1)
    inner = build(nn.Linear(WIDTH, WIDTH), process_group=group, **{attribute: True})
    model = build(nn.Sequential(inner, nn.Linear(WIDTH, 3)), process_group=group, **{attribute: False})
    for use in (lambda: model(torch.ones(1, WIDTH)), model.check_is_root, lambda: model.apply(print)):
        with pytest.raises(ValueError, match=f"{attribute} must be the same for all"):
            use()
    assert inner(torch.ones(1, WIDTH)).shape == (1, WIDTH)


# -- states --------------------------------------------------------------------------------------------------------


class Foreign(enum.Enum):
    """Another package's enum with the same names."""

    IDLE = "idle"
    FORWARD_BACKWARD = "running"


def test_the_training_state_and_its_check() -> None:
    """AA10, Y36, R12: by name, whatever enum it comes from."""
    model = build(net(), process_group=StandIn(0, 1), use_orig_params=True)
    seen: list[TrainingState] = []

    def inside(*args: Any) -> None:
        seen.append(model.training_state)
        model._assert_state([TrainingState.IDLE, Foreign.FORWARD_BACKWARD])
        for call in (lambda: model._assert_state(Foreign.IDLE), lambda: model.apply(print)):
            with pytest.raises(ValueError, match="expected to be in states"):
                call()
        with pytest.raises(ValueError, match=r"expected to be in states \['IDLE'\]"), model.no_sync():
            pass

    handle = model.module.head.register_forward_hook(inside)
    output = model(torch.ones(1, WIDTH))
    handle.remove()
    assert model.training_state is TrainingState.IDLE
    model.module.layers[0].weight.register_hook(inside)
    output.sum().backward()
    with model.summon_full_params(model):
        seen.append(model.training_state)
        model._assert_state(TrainingState.SUMMON_FULL_PARAMS)
    assert TrainingState.FORWARD_BACKWARD in seen and seen[-1] is TrainingState.SUMMON_FULL_PARAMS
    assert model.training_state is TrainingState.IDLE
    model._assert_state(Foreign.IDLE)


def test_no_sync_is_the_roots() -> None:
    """Y35"""
    inner = build(nn.Linear(WIDTH, WIDTH), process_group=StandIn(0, 1))
    model = build(nn.Sequential(inner), process_group=StandIn(0, 1))
    model.check_is_root()
    with pytest.raises(RuntimeError, match="should only be called on the root FSDP instance"), inner.no_sync():
        pass


def test_who_synchronises_is_readable_and_writable() -> None:
    """R9: per unit; `no_sync` sets it in the whole tree and puts back what was there, after errors too."""
    module = net()
    inner = module.layers = build(module.layers, process_group=StandIn(0, 1))
    model = build(module, process_group=StandIn(0, 1))
    inner._sync_gradients = False
    with pytest.raises(KeyError), model.no_sync():
        assert not model._sync_gradients and not inner._sync_gradients
        raise KeyError
    assert model._sync_gradients and not inner._sync_gradients


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), "cpu:0"])
def test_device_id(device: Any) -> None:
    """AA1, AA2, D5: parameters stay the same objects."""
    module = net()
    params = list(module.parameters())
    model = build(module, process_group=StandIn(), device_id=device, use_orig_params=True)
    assert model.compute_device.type == "cpu"
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))


def test_a_lazy_module_needs_a_forward_first() -> None:
    with pytest.raises(ValueError, match=r"'1\.weight' of the Sequential unit is not initialised yet"):
        FullyShardedDataParallel(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)), StandIn())


# -- members and names ---------------------------------------------------------------------------------------------


@both_modes
def test_names_that_tools_look_for(use_orig_params: bool) -> None:
    """A7, A8, AA11, F15, F16, R9, W12"""
    assert wrapper_file.FLAT_PARAM == "_flat_param"
    plain = net()
    model = build(plain, process_group=StandIn(), use_orig_params=use_orig_params)
    state_of = wrapper_file._get_module_fsdp_state_if_fully_sharded_module
    assert state_of(model) is model and state_of(plain) is None
    assert _get_module_state(model) is model
    flat = model._flat_param
    assert flat is model.params[0] and model.params == [flat] and model._has_params
    assert isinstance(flat, FlatParameter) and type(flat) is nn.Parameter and flat._is_flat_param
    assert not isinstance(nn.Parameter(torch.ones(1)), FlatParameter)
    with pytest.raises(TypeError, match="cannot be subclassed"):
        type("Mine", (FlatParameter,), {})(torch.ones(1))
    names = [f"{layer}.{kind}" for layer in ("layers.0", "layers.2", "layers.4", "head") for kind in ("weight", "bias")]
    assert list(flat._fqns) == names
    assert all(param._fsdp_flattened and type(param) is nn.Parameter for param in model.parameters())
    assert model.cpu_offload == CPUOffload() and model.mixed_precision == MixedPrecision()
    assert model.backward_prefetch is BackwardPrefetch.BACKWARD_PRE and model.sharding_strategy is FULL_SHARD
    assert (model.rank, model.world_size, model.compute_device) == (0, 2, torch.device("cpu"))
    assert not model.forward_prefetch and model.limit_all_gathers
    assert model._handle is model._all_handles[0] and model._handle.flat_param is flat
    for module in plain.modules():
        assert module._is_fsdp_managed_module and module._fsdp_use_orig_params is use_orig_params
    assert repr(model).startswith("FullyShardedDataParallel(\n  (_fsdp_wrapped_module): Net(")


def test_attributes_and_items_fall_through() -> None:
    """R2, R3: reading does, setting does not."""
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


@both_modes
def test_module_looks_through_a_checkpoint_wrapper(use_orig_params: bool) -> None:
    """R1, G11: the flat parameter is registered on the innermost module."""
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
    with model.summon_full_params(model):
        assert_bit_equal(values(model), train_plain(plain, 1))


@both_modes
def test_names_between_steps(use_orig_params: bool) -> None:
    """G1: and their shapes on each of three ranks; modules that are read directly show the same."""
    numels = {}
    for rank in range(3):
        module = net(1)
        model = build(module, process_group=StandIn(rank, 3), use_orig_params=use_orig_params,
                      auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}))  # fmt: skip
        shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        top, layers = "_fsdp_wrapped_module.", "_fsdp_wrapped_module.layers._fsdp_wrapped_module."
        if use_orig_params:
            names = [layers + "0.weight", layers + "0.bias", top + "head.weight", top + "head.bias"]
            assert all(len(shape) == 1 for shape in shapes.values())
            # Each begins on 16 bytes: 30 and 18 elements become 28 + 5 and 16 + 3, shared out in elevens and sevens.
            assert [shapes[name][0] for name in names] == [[11, 0, 7, 0], [11, 0, 7, 0], [3, 5, 1, 3]][rank]
            assert module.head.weight.shape == shapes[top + "head.weight"]
        else:
            names = [top + "_flat_param", layers + "_flat_param"]
            assert shapes == {names[0]: (6,), names[1]: (10,)}
        assert list(shapes) == names
        assert [name for name, _ in model.module.named_parameters()] == [name.removeprefix(top) for name in names]
        numels[rank] = sum(p.numel() for p in model.parameters())
    assert max(numels.values()) <= -(-(33 + 19) // 3) + 1


class Silent(nn.Module):
    """No parameters, one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def _without_parameters(use_orig_params: bool) -> None:
    wrap = functools.partial(build, use_orig_params=use_orig_params)
    torch.manual_seed(0)
    linear = nn.Linear(WIDTH, 3)
    torch.manual_seed(0)
    plain = nn.Sequential(Silent(), nn.Linear(WIDTH, 3))
    model = wrap(nn.Sequential(wrap(Silent()), wrap(linear)))
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


@both_modes
def test_units_without_parameters(use_orig_params: bool) -> None:
    """D9: as root and inside; every member works."""
    run_ranks(2, _without_parameters, use_orig_params)


def _optimizer_first() -> None:
    module = net()
    for index, param in enumerate(module.parameters()):
        param.note = index  # type: ignore[attr-defined]
    params = list(module.parameters())
    optimizer = sgd(module)
    model = build(module, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    train(model, optimizer)
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert [p.note for p in model.parameters()] == list(range(8))  # type: ignore[attr-defined]
    assert_bit_equal(full_parameters(model), train_plain(net(), 2))


def test_an_optimizer_may_be_older_than_the_wrapper() -> None:
    """D13: parameters keep their identity and what hangs on them."""
    run_ranks(2, _optimizer_first)


@both_modes
def test_shard_alignment(use_orig_params: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """AA15: the chunk rule on CPU, and as many bytes as `FSDP_SHARD_ALIGNMENT` says; padding is zero."""
    for setting, dtype, expected in [
        (None, torch.float32, 7),
        ("16", torch.float32, 8),
        ("16", torch.bfloat16, 8),
        ("64", torch.bfloat16, 32),
    ]:
        if setting is None:
            monkeypatch.delenv("FSDP_SHARD_ALIGNMENT", raising=False)
        else:
            monkeypatch.setenv("FSDP_SHARD_ALIGNMENT", setting)
        values = []
        for rank in range(3):
            plain = nn.Linear(3, 5).to(dtype)
            with torch.no_grad():
                for param in plain.parameters():
                    param.fill_(1)
            model = build(plain, process_group=StandIn(rank, 3), use_orig_params=use_orig_params)
            (unit,) = shard_info(model)
            layout = unit.buckets[0].layout
            aligned = use_orig_params or setting is not None  # the bias begins after 15 elements or on 16 bytes
            assert layout.params[1].offset == (16 if aligned else 15)
            assert layout.shard_numel == model._flat_param.numel() == expected
            values.append(model._flat_param.detach())
        assert torch.cat(values).sum() == 20


# -- sharing -------------------------------------------------------------------------------------------------------


def _tied(place: str) -> tuple[nn.Module, ModuleWrapPolicy]:
    module = net()
    if place == "siblings":
        module.layers[4].weight = module.layers[0].weight
        return module, ModuleWrapPolicy({nn.Linear})
    module.head = nn.Linear(WIDTH, WIDTH)
    module.layers[0].weight = module.head.weight
    return module, ModuleWrapPolicy({nn.Sequential})


@both_modes
@pytest.mark.parametrize(
    ("place", "names"),
    [("siblings", ("layers.0.weight", "layers.4.weight")), ("parent", ("layers.0.weight", "head.weight"))],
)
def test_R08_a_parameter_shared_across_units(place: str, names: tuple[str, str], use_orig_params: bool) -> None:
    """Y60: the error names both places, and nothing is left half wrapped."""
    module, policy = _tied(place)
    modules, before = list(module.modules()), values(module)
    with pytest.raises(ValueError, match="shared") as caught:
        FullyShardedDataParallel(module, StandIn(), auto_wrap_policy=policy, use_orig_params=use_orig_params)
    for name in names:
        assert f"'{name}'" in str(caught.value)
    assert list(module.modules()) == modules
    assert_bit_equal(values(module), before)


@both_modes
def test_a_parameter_shared_with_a_unit_wrapped_by_hand(use_orig_params: bool) -> None:
    """Y60: both places are named as far as they are known."""
    module, _ = _tied("parent")
    module.layers = build(module.layers, process_group=StandIn(), use_orig_params=use_orig_params)
    words = r"parameter 'head.weight' of the Net unit is shared with '0.weight' of the Sequential unit"
    with pytest.raises(ValueError, match=words):
        FullyShardedDataParallel(module, StandIn(), use_orig_params=use_orig_params)


def _shared_module(use_orig_params: bool) -> None:
    torch.manual_seed(0)
    shared = nn.Linear(WIDTH, WIDTH)
    model = build(
        nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(WIDTH, 3)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=use_orig_params,
    )
    torch.manual_seed(0)
    plain = nn.Linear(WIDTH, WIDTH)
    train(model)
    assert model[0] is model[2]
    expected = train_plain(nn.Sequential(plain, nn.Tanh(), plain, nn.Linear(WIDTH, 3)), 2)
    assert_bit_equal(full_parameters(model), expected)


def _sharing() -> None:
    for use_orig_params in (False, True):
        _shared_module(use_orig_params)


def test_a_shared_module_is_one_unit_at_every_place() -> None:
    """Y61"""
    run_ranks(2, _sharing)


class WithHead(nn.Module):
    """Looks like the module it holds: attributes fall through."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.value = inner, nn.Linear(WIDTH, 1)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "inner":
                raise
            return getattr(self.inner, name)

    def forward(self, x: Tensor) -> Tensor:
        return self.value(self.inner(x))


@both_modes
def test_a_module_that_looks_like_a_wrapper_is_owned(use_orig_params: bool) -> None:
    wrap = functools.partial(build, process_group=StandIn(), use_orig_params=use_orig_params)
    model = wrap(nn.Sequential(WithHead(wrap(nn.Linear(WIDTH, WIDTH)))))
    owned = [[unit.full_name(r) for b in unit.buckets for r in b.layout.params] for unit in shard_info(model)]
    assert owned == [["0.value.weight", "0.value.bias"], ["0.inner.weight", "0.inner.bias"]]


@both_modes
def test_wrapping_a_wrapped_module(use_orig_params: bool) -> None:
    """D2: the outer one is a unit without parameters."""
    wrap = functools.partial(build, process_group=StandIn(0, 1), use_orig_params=use_orig_params)
    inner = wrap(nn.Linear(WIDTH, 3))
    model = wrap(inner)
    assert not model._has_params and inner._has_params and model._all_handles == inner._all_handles
    assert model(torch.ones(1, WIDTH)).shape == (1, 3)


# -- what is ignored -----------------------------------------------------------------------------------------------


@both_modes
def test_ignored_modules_bring_all_below_them(use_orig_params: bool) -> None:
    """Q1, Q4, Q5, AA5: nested units apart; generators are read once; what is not in the tree does not matter."""
    module = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), nn.Linear(4, 5))
    inner = module[1][0] = build(module[1][0], process_group=StandIn(), use_orig_params=use_orig_params)
    ignored = module[1]
    strangers = [nn.Linear(9, 9)]
    kept = dict(ignored[1].named_parameters())
    policy = CustomPolicy(lambda m: isinstance(m, nn.Linear) and m is not inner.module)
    with pytest.raises(ValueError, match="holds no FullyShardedDataParallel"):
        FullyShardedDataParallel(module, StandIn(), auto_wrap_policy=policy)
    model = build(
        module,
        process_group=StandIn(),
        use_orig_params=use_orig_params,
        ignored_modules=(m for m in [ignored, *strangers]),
    )
    names = [[record.name for record in unit.buckets[0].layout.params] for unit in shard_info(model)]
    assert names == [["0.weight", "0.bias", "2.weight", "2.bias"], ["weight", "bias"]]
    assert dict(ignored[1].named_parameters()) == kept
    assert not any(hasattr(p, "_fsdp_flattened") for p in kept.values())


@both_modes
@pytest.mark.parametrize("by", ["ignored_modules", "ignored_states", "parameters"])
def test_ignored_states(by: str, use_orig_params: bool) -> None:
    """Q2-Q4, C15, AA5: modules are skipped by the policy, parameters leave their module to it."""
    module = net()
    skipped = module.layers[2]
    states = iter([skipped.weight, nn.Parameter(torch.ones(3))]) if by == "parameters" else iter([skipped])
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
        assert model.layers[2] is skipped
    assert units == expected
    assert type(skipped.weight) is nn.Parameter and skipped.weight.shape == (WIDTH, WIDTH)
    assert any(p is skipped.weight for p in model.parameters())


def _ignoring(use_orig_params: bool) -> None:
    """Ignored parameters and buffers stay where and what they are; their gradients are this rank's own."""
    rank = dist.get_rank()
    module = net()
    module.layers.insert(1, nn.BatchNorm1d(WIDTH))
    ignored, weight = module.layers[1], module.layers[2 + 1].weight
    pointer, running = weight.data_ptr(), ignored.running_mean
    # Nested by hand: what the inner one ignores, the outer one does not take.
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


@both_modes
def test_what_is_ignored_is_left_alone(use_orig_params: bool) -> None:
    """Q1, Q3"""
    run_ranks(2, _ignoring, use_orig_params)


def _replicated(use_orig_params: bool) -> list[str]:
    from torch.distributed._composable import replicate

    module = net()
    replicate(module.layers[0])
    model = build(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params)
    assert module.layers[0].weight.shape == (WIDTH, WIDTH)
    train(model)
    expected = train_plain(net(), 2)
    assert torch.equal(module.layers[0].weight, expected["layers.0.weight"])
    assert_bit_equal(full_parameters(model), {n: v for n, v in expected.items() if not n.startswith("layers.0.")})
    return [unit.name for unit in shard_info(model)]


@both_modes
def test_modules_under_composable_replicate_are_left_to_it(use_orig_params: bool) -> None:
    """Q1"""
    assert run_ranks(2, _replicated, use_orig_params)[0] == ["", "layers.2", "layers.4", "head"]


# -- the meta device -----------------------------------------------------------------------------------------------


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def constant_init(module: nn.Module) -> None:
    """This module's own parameters and buffers get memory and values that tell them apart."""
    module.to_empty(device="cpu", recurse=False)
    with torch.no_grad():
        for index, tensor in enumerate([*module.parameters(recurse=False), *module.buffers(recurse=False)]):
            tensor.fill_(index + 1)


def recursive_init(module: nn.Module) -> None:
    """As some libraries do it: everything below is emptied and initialised again."""
    module.to_empty(device="cpu")

    def fill(each: nn.Module) -> None:
        with torch.no_grad():
            for param in each.parameters(recurse=False):
                param.fill_(3)

    module.apply(fill)


class WithOwn(nn.Module):
    """A parameter and a buffer of its own beside a layer, all to be initialised by `reset_parameters`."""

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


def _meta(use_orig_params: bool) -> None:
    wrap = functools.partial(build, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params)

    def shown(model: nn.Module) -> dict[str, Tensor]:
        with FullyShardedDataParallel.summon_full_params(model):
            return values(model)

    # By reset_parameters, in the order in which a plain model of these units draws its random numbers.
    torch.manual_seed(0)
    model = wrap(on_meta(Net))
    assert_bit_equal(shown(model), values(net()))
    train(model)
    assert_bit_equal(full_parameters(model), train_plain(net(), 2))
    model = wrap(on_meta(lambda: nn.Sequential(WithOwn(), WithOwn())))
    assert [b.tolist() for b in model.buffers()] == [[7, 7]] * 2
    assert all(v.unique().tolist() == [0.5] for n, v in shown(model).items() if n.endswith("own"))

    # By param_init_fn, which sees each module of each unit once, those without parameters too.
    seen: list[nn.Module] = []

    def init(module: nn.Module) -> None:
        seen.append(module)
        constant_init(module)

    plain = on_meta(Net)
    expected_order = [m for m in plain.modules() if isinstance(m, nn.Linear)]
    model = wrap(plain, param_init_fn=init)
    assert seen[: len(expected_order)] == expected_order and len(set(seen)) == len(seen)
    for name, value in shown(model).items():
        assert value.unique().tolist() == [1.0 if name.endswith("weight") else 2.0], name
    # One that goes down into units that have been wrapped before.
    model = wrap(on_meta(lambda: nn.Sequential(WithOwn(), WithOwn())), param_init_fn=recursive_init)
    assert all(value.unique().tolist() == [3.0] for value in shown(model).values())
    model(batch(0, 0)).sum().backward()
    assert any(param.grad is not None for param in model.parameters())

    # Rank 0 has the values, the others have none (Q19).
    rank = dist.get_rank()
    module = net() if rank == 0 else on_meta(Net)
    empty = functools.partial(nn.Module.to_empty, device="cpu", recurse=False)
    model = wrap(module, sync_module_states=True, param_init_fn=empty if rank else None)
    assert_bit_equal(shown(model), values(net()))


@both_modes
def test_modules_from_the_meta_device(use_orig_params: bool) -> None:
    """Q7-Q9, Q11, Q19, AA7"""
    run_ranks(2, _meta, use_orig_params)


class Lacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(2))


def test_missing_initialisers_are_listed() -> None:
    """Q9, Y23: all of them, before anything is changed; ignored modules need none."""
    module = on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Lacking(), nn.Sequential(Lacking())))
    words = r"no reset_parameters\(\) .*: 1 \(Lacking\), 2\.0 \(Lacking\)\. Give them one, or pass param_init_fn="
    with pytest.raises(AttributeError, match=words):
        FullyShardedDataParallel(module, StandIn())
    assert all(param.is_meta and param.dim() > 0 for param in module.parameters())
    model = build(module, process_group=StandIn(), ignored_modules=[module[1], module[2]])
    assert module[1].weight.is_meta and not model._flat_param.is_meta
    with pytest.raises(ValueError, match=r"param_init_fn left .* of '1' \(Lacking\) on the meta device"):
        FullyShardedDataParallel(
            on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Lacking())),
            StandIn(),
            param_init_fn=lambda m: constant_init(m) if isinstance(m, nn.Linear) else None,
        )


@both_modes
@pytest.mark.parametrize("init", [None, constant_init], ids=["reset_parameters", "param_init_fn"])
def test_meta_device_keeps_ties(init: Any, use_orig_params: bool) -> None:
    """Parameters that were one stay one when they get their values."""

    def make() -> nn.Module:
        module = nn.Sequential(nn.Embedding(7, WIDTH), nn.Linear(WIDTH, 7, bias=False))
        module[1].weight = module[0].weight
        return module

    model = build(on_meta(make), process_group=StandIn(), use_orig_params=use_orig_params, param_init_fn=init)
    (record,) = shard_info(model)[0].buckets[0].layout.params
    assert (record.name, record.aliases) == ("0.weight", ("1.weight",))
    assert model[0].weight is model[1].weight


class PeakOf(TorchDispatchMode):
    """The most bytes alive after any operation inside, beyond those at the start."""

    def __init__(self) -> None:
        super().__init__()
        gc.collect()
        self.meter = Meter()
        self.base = self.meter.at_rest()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.nbytes = max(self.nbytes, self.meter.live() - self.base)
        return result


@pytest.mark.skipif(not meter_available(), reason="no byte meter: needs glibc 2.33")
@both_modes
@pytest.mark.parametrize("init", [None, constant_init], ids=["reset_parameters", "param_init_fn"])
def test_the_peak_from_the_meta_device_is_the_shards_and_one_unit(init: Any, use_orig_params: bool) -> None:
    """Q12, F10: one unit's parameters, and the flat vector they are copied into."""
    count, width, ranks = 16, 511, 4

    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width) for _ in range(count)))

    options: dict[str, Any] = {"process_group": StandIn(1, ranks), "use_orig_params": use_orig_params}
    options |= {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear}), "param_init_fn": init}
    with PeakOf():
        build(on_meta(make), **options)  # fills the caches of what is called
    unit = (width + 1) * width * 4
    shards = count * unit // ranks
    with PeakOf() as peak:
        model = build(on_meta(make), **options)
    assert shards < peak.nbytes <= shards + 2 * unit + 4 * NOISE
    assert abs(peak.meter.live() - peak.base - shards) < 4 * NOISE
    del model


# -- the same values on every rank -----------------------------------------------------------------------------------


def _synchronised(use_orig_params: bool) -> list[str]:
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
        wanted = values(expected)
        wanted["1.weight"] = values(make(10 + rank))["1.weight"]  # Q18: what is ignored is not synchronised
        with model.summon_full_params(model):
            assert_bit_equal(values(model), wanted)
        for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
            assert torch.equal(buffer, other), name
    return [error_of(torchs, make(10 + rank), sync_module_states=True, use_orig_params=True)]


@both_modes
def test_sync_module_states_on_cpu(use_orig_params: bool) -> None:
    """Q15-Q18, AA1, Y65: parameters, frozen ones, and buffers of rank 0; torch refuses on CPU."""
    (words,) = run_ranks(3, _synchronised, use_orig_params)[0]
    if torch.__version__.startswith("2.13"):
        assert words.startswith("ValueError")


# -- torch's own FSDP ----------------------------------------------------------------------------------------------


def _nest_with_torchs(use_orig_params: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
    from torch.distributed.fsdp import fully_shard

    torchs = functools.partial(TorchFSDP, use_orig_params=use_orig_params, device_id=torch.device("cpu"))
    ours = functools.partial(FullyShardedDataParallel, use_orig_params=use_orig_params)
    policy = ModuleWrapPolicy({nn.Linear})
    for wrap, words in ((torchs, "FullyShardedDataParallel"), (fully_shard, "FSDPModule")):
        net = Net()
        net.head = wrap(net.head)
        before = [(name, type(module)) for name, module in net.named_modules()]
        with pytest.raises(
            ValueError, match=rf"'head' is already wrapped by torch\.distributed\.fsdp.*\.{words}, which"
        ):
            ours(net, auto_wrap_policy=policy)
        assert [(name, type(module)) for name, module in net.named_modules()] == before
        with pytest.raises(ValueError, match=r"the module is already wrapped by torch"):
            ours(net.head)
    if use_orig_params:
        net = Net()
        torchs(net)
        with pytest.raises(ValueError, match=r"parameter 'weight' is already sharded by torch\.distributed\.fsdp"):
            ours(net.head)
    net = Net()
    net.head = ours(net.head)
    model = torchs(net)
    with pytest.raises(RuntimeError, match=r"the Linear unit lies in a module that torch's own FSDP has wrapped"):
        model(torch.ones(2, WIDTH))
    model = ours(Net(), auto_wrap_policy=policy)
    model.head(torch.ones(2, WIDTH))  # one of ours in one of ours, called first (Y63)


@is_2_13
@pytest.mark.filterwarnings("ignore:.*FullyShardedDataParallel:")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_not_nested_with_torchs(use_orig_params: bool) -> None:
    """Two engines in one tree would shard the same things twice: refused by the class, before anything changes."""
    run_ranks(2, _nest_with_torchs, use_orig_params)
