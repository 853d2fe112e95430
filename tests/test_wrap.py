"""Auto-wrap policies: the chosen modules, compared with torch's choice, and their replacement by wrappers."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp._wrap_utils as torch_wrap_utils
import torch.distributed.fsdp.wrap as torch_wrap
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import fsdp.wrap as our_wrap
from fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    auto_wrap,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)
from tests.harness.models import Net

INFIX = "_fsdp_wrapped_module."


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self._fsdp_wrapped_module = module
        self.kwargs = kwargs

    def forward(self, *args: Any) -> Any:
        return self._fsdp_wrapped_module(*args)


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 1)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
        self.norm = nn.LayerNorm(width)


class Transformer(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.extras = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.BatchNorm1d(4)})
        self.head = nn.Linear(4, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 5), nn.ReLU()), nn.Linear(5, 2))


TREES: dict[str, Callable[[], nn.Module]] = {
    "transformer": Transformer,
    "tied": partial(Transformer, tied=True),
    "mlp": mlp,
}
CALLABLES: dict[str, Callable[[Any], Callable[..., bool]]] = {
    "always": lambda wrap: wrap.always_wrap_policy,
    "lambda": lambda wrap: partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.LayerNorm)),
    "transformer": lambda wrap: partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.Linear}),
    "size 30": lambda wrap: partial(wrap.size_based_auto_wrap_policy, min_num_params=30),
    "size 70": lambda wrap: partial(wrap.size_based_auto_wrap_policy, min_num_params=70),
    "size 70, no leaves": lambda wrap: partial(
        wrap.size_based_auto_wrap_policy, min_num_params=70, force_leaf_modules={Block}, exclude_wrap_modules=set()
    ),
    "module policy": lambda wrap: wrap.ModuleWrapPolicy([Block, nn.Linear]),
    "or": lambda wrap: partial(
        wrap._or_policy,
        policies=[
            partial(wrap.lambda_auto_wrap_policy, lambda_fn=lambda m: isinstance(m, nn.Embedding)),
            partial(wrap._module_wrap_policy, module_classes={Block}),
            partial(wrap._wrap_module_cls_individually, module_classes=[nn.BatchNorm1d]),
        ],
    ),
}


def wrapped_paths(root: nn.Module, wrapper_cls: type[nn.Module] = Wrapper) -> list[str]:
    """Return the path of every registered wrapper, as it was before wrapping."""
    named = root.named_modules(remove_duplicate=False)
    return [path.replace(INFIX, "") for path, module in named if isinstance(module, wrapper_cls)]


def recorded(policy: Callable[..., bool], root: nn.Module, log: list[Any]) -> Callable[..., bool]:
    names = {module: path for path, module in root.named_modules()}

    def ask(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        answer = policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        log.append((names[module], recurse, nonwrapped_numel, bool(answer)))
        return answer

    return ask


# Choice of modules


@pytest.mark.parametrize("policy", CALLABLES)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("only_children", [True, False])
def test_callable_policies_choose_the_same_modules_as_torchs(tree: str, policy: str, only_children: bool) -> None:
    results = []
    for module in (torch_wrap, our_wrap):
        root = TREES[tree]()
        ignored = {root.blocks[1], *root.blocks[1].modules()} if isinstance(root, Transformer) else set()
        ignored_params = {root.extras["a"].weight} if isinstance(root, Transformer) else {root[0].weight}
        log: list[Any] = []
        ask = recorded(CALLABLES[policy](module), root, log)
        result, numel = module._recursive_wrap(
            root, ask, Wrapper, ignored, ignored_params, only_wrap_children=only_children
        )
        results.append((wrapped_paths(result), numel, log))
    (torch_paths, torch_numel, torch_log), (our_paths, our_numel, our_log) = results
    assert our_paths == torch_paths
    if tree != "tied":  # torch subtracts a tied parameter once for each unit that reaches it
        assert our_numel == torch_numel
        assert our_log == torch_log  # the same calls with the same numbers, in the same order


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("ignore", [False, True])
def test_policy_objects_choose_the_same_modules_as_torchs(tree: str, ignore: bool) -> None:
    root = TREES[tree]()
    ignored = set(list(root.children())[1].modules()) if ignore else set()

    def fn(module: nn.Module) -> bool | dict[str, Any]:
        if isinstance(module, nn.LayerNorm):
            return {"use_orig_params": True, "extra": 1}
        return {} if isinstance(module, nn.Embedding) else isinstance(module, (nn.Linear, nn.Sequential))

    kwargs = {"use_orig_params": False, "limit_all_gathers": True}
    for ours, theirs in [
        (ModuleWrapPolicy({Block, nn.Sequential}), torch_wrap.ModuleWrapPolicy({Block, nn.Sequential})),
        (ModuleWrapPolicy(c for c in [nn.Linear]), torch_wrap.ModuleWrapPolicy([nn.Linear])),
        (CustomPolicy(fn), torch_wrap.CustomPolicy(fn)),
    ]:
        mine = ours._run_policy(root, ignored, kwargs)
        assert mine == theirs._run_policy(root, ignored, kwargs)
        assert list(mine) == list(theirs._run_policy(root, ignored, kwargs))
        assert len({id(values) for values in mine.values()} | {id(kwargs)}) == len(mine) + 1
    assert kwargs == {"use_orig_params": False, "limit_all_gathers": True}


def test_a_tied_parameter_counts_once() -> None:
    root = Transformer(tied=True)
    numels = {}

    def policy(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if not recurse:
            numels[module] = nonwrapped_numel
        return recurse or module in (root.embed, root.head)

    _, numel = our_wrap._recursive_wrap(root, policy, Wrapper, set(), set())
    assert numel == 44
    assert numels[root] == sum(p.numel() for p in Transformer(tied=True).parameters()) - 44


def test_size_policy_defaults_are_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {nn.MultiheadAttention} == size_based_auto_wrap_policy.FORCE_LEAF_MODULES
    assert {nn.ModuleList, nn.ModuleDict} == size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES
    linear = nn.Linear(1, 1)
    assert size_based_auto_wrap_policy(linear, False, 100_000_000)
    assert not size_based_auto_wrap_policy(linear, False, 99_999_999)
    monkeypatch.setattr(size_based_auto_wrap_policy, "EXCLUDE_WRAP_MODULES", {nn.Linear})
    assert not size_based_auto_wrap_policy(linear, False, 100_000_000)
    assert size_based_auto_wrap_policy(linear, True, 100_000_000)
    monkeypatch.setattr(size_based_auto_wrap_policy, "FORCE_LEAF_MODULES", {nn.Linear})
    assert not size_based_auto_wrap_policy(linear, True, 100_000_000)


# Effects of auto_wrap


def test_auto_wrap_replaces_children_and_never_the_root() -> None:
    root = mlp()
    children = list(root.children())
    policy = ModuleWrapPolicy({nn.Linear, nn.Sequential})
    count = auto_wrap(root, policy, set(), set(), Wrapper, {"limit_all_gathers": False})
    assert count == 4
    assert type(root) is nn.Sequential
    assert wrapped_paths(root) == ["0", "1", "1.0", "2"]
    assert root[1]._fsdp_wrapped_module is children[1]
    assert all(m.kwargs == {"limit_all_gathers": False, "auto_wrap_policy": None} for m in root)


def test_auto_wrap_passes_keyword_arguments_unchanged() -> None:
    root = mlp()
    root[2]._wrap_overrides = {"limit_all_gathers": True, "own": 1}
    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    assert auto_wrap(root, policy, set(), set(), Wrapper, {"limit_all_gathers": False}) == 3
    assert root[0].kwargs == {"limit_all_gathers": False}
    assert root[2].kwargs == {"limit_all_gathers": True, "own": 1}


@pytest.mark.parametrize("policy", [torch_wrap.ModuleWrapPolicy({nn.Linear}), torch_wrap.CustomPolicy(lambda m: True)])
def test_auto_wrap_accepts_torchs_policy_objects(policy: Any) -> None:
    assert auto_wrap(mlp(), policy, set(), set(), Wrapper, {}) in (3, 5)


@pytest.mark.parametrize(
    "policy",
    [
        ModuleWrapPolicy({nn.Sequential}),
        CustomPolicy(lambda m: isinstance(m, nn.Sequential)),
        partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
    ],
    ids=["module", "custom", "callable"],
)
def test_a_shared_module_is_replaced_at_every_reference(policy: Any) -> None:
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 4)
    inner = nn.Sequential(nn.Linear(4, 4), block)
    root = Net(lambda m, x: m.inner(m.second(m.first(x))), first=block, second=block, inner=inner)
    expected = root(x)
    assert auto_wrap(root, policy, set(), set(), Wrapper, {}) == 2
    inner = root.inner._fsdp_wrapped_module
    assert root.first is root.second is inner[1]
    assert isinstance(root.first, Wrapper)
    assert root.first._fsdp_wrapped_module is block
    assert wrapped_paths(root) == ["first", "second", "inner", "inner.1"]
    assert torch.equal(root(x), expected)


@pytest.mark.parametrize("policy", [ModuleWrapPolicy({nn.Linear}), always_wrap_policy])
def test_a_tree_with_wrappers_is_refused_and_unchanged(policy: Any) -> None:
    root = Transformer()
    root.blocks[1].mlp[0] = Wrapper(root.blocks[1].mlp[0])
    with pytest.raises(ValueError, match=r"'blocks\.1\.mlp\.0' in Transformer is one"):
        auto_wrap(root, policy, set(), set(), Wrapper, {})
    assert wrapped_paths(root) == ["blocks.1.mlp.0"]
    with pytest.raises(ValueError, match="module to wrap itself"):
        auto_wrap(Wrapper(mlp()), policy, set(), set(), Wrapper, {})
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp\.0"):
        our_wrap._recursive_wrap(root, always_wrap_policy, Wrapper, set(), set())


@pytest.mark.parametrize(
    "policy",
    [ModuleWrapPolicy({nn.Conv2d}), CustomPolicy(lambda m: {}), size_based_auto_wrap_policy],
    ids=["module", "custom", "callable"],
)
def test_a_policy_without_a_match_warns(policy: Any) -> None:
    with pytest.warns(UserWarning, match="matched no submodule of Sequential: .* Check the policy's"):
        assert auto_wrap(mlp(), policy, set(), set(), Wrapper, {}) == 0


def test_a_policy_that_matches_only_the_root_does_not_warn() -> None:
    assert auto_wrap(nn.Linear(2, 2), always_wrap_policy, set(), set(), Wrapper, {}) == 0
    assert auto_wrap(Block(), ModuleWrapPolicy({Block}), set(), set(), Wrapper, {}) == 0  # the root itself matched


def test_a_policys_dict_is_not_modified_and_unknown_modules_in_it_are_ignored() -> None:
    root = mlp()
    chosen: dict[nn.Module, dict[str, Any]] = {root: {}, root[0]: {"a": 1}, nn.Linear(1, 1): {}}

    class Stored(our_wrap._Policy):
        def _run_policy(self, *args: Any) -> dict[nn.Module, dict[str, Any]]:
            return chosen

    assert auto_wrap(root, Stored(), set(), set(), Wrapper, {}) == 1
    assert wrapped_paths(root) == ["0"]
    assert len(chosen) == 3


def test_an_exception_in_a_policy_leaves_the_tree_unchanged() -> None:
    root = mlp()

    def fn(module: nn.Module) -> bool:
        if isinstance(module, nn.ReLU):
            raise RuntimeError("no")
        return True

    for policy in (CustomPolicy(fn), partial(lambda_auto_wrap_policy, lambda_fn=fn)):
        with pytest.raises(RuntimeError, match="no"):
            auto_wrap(root, policy, set(), set(), Wrapper, {})
    assert wrapped_paths(root) == []


@pytest.mark.parametrize("through", ["auto_wrap", "_recursive_wrap"])
def test_auto_wrap_keeps_no_reference_to_parameters(through: str) -> None:
    """A wrapper that replaces parameters frees their memory at once: before the walk ends, and without a collection."""
    root = mlp()
    dead_when_wrapped = []

    class Forgetful(Wrapper):
        def __init__(self, module: nn.Module, **kwargs: Any) -> None:
            super().__init__(module)
            params = [weakref.ref(param) for param in module.parameters()]
            for name in ("weight", "bias"):
                setattr(module, name, nn.Parameter(torch.empty(0)))
            dead_when_wrapped.append([ref() is None for ref in params])

    policy = partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Linear})
    gc.disable()
    try:
        if through == "auto_wrap":
            auto_wrap(root, policy, set(), set(), Forgetful, {})
        else:
            our_wrap._recursive_wrap(root, policy, Forgetful, set(), set(), only_wrap_children=True)
    finally:
        gc.enable()
    assert dead_when_wrapped == [[True, True]] * 3


@pytest.mark.parametrize(
    "classes", [nn.Linear, [nn.Linear(1, 1)], ["Linear"], None], ids=["class", "module", "str", "None"]
)
def test_module_wrap_policy_accepts_classes_only(classes: Any) -> None:
    with pytest.raises(TypeError, match="iterable of module classes"):
        ModuleWrapPolicy(classes)


# Wrapping by hand


def test_wrap_applies_only_inside_enable_wrap() -> None:
    linear = nn.Linear(1, 1)
    assert wrap(linear, a=1) is linear
    with enable_wrap(wrapper_cls=Wrapper, a=1, b=2):
        assert wrap(linear).kwargs == {"a": 1, "b": 2}
        assert wrap(linear, b=3, c=4).kwargs == {"a": 1, "b": 3, "c": 4}
        linear._wrap_overrides = {"b": 5}
        assert wrap(linear, b=3).kwargs == {"a": 1, "b": 5}
    assert wrap(linear) is linear


def test_enable_wrap_contexts_do_not_nest_and_end_on_errors() -> None:
    with enable_wrap(wrapper_cls=Wrapper, a=1):
        with pytest.raises(NotImplementedError, match="nested"), enable_wrap(wrapper_cls=Wrapper):
            pass
        assert wrap(nn.Linear(1, 1)).kwargs == {"a": 1}
    with pytest.raises(KeyError), enable_wrap(wrapper_cls=Wrapper):
        raise KeyError
    assert not our_wrap._ConfigAutoWrap.in_autowrap_context
    assert our_wrap._ConfigAutoWrap.wrapper_cls is None
    assert our_wrap._ConfigAutoWrap.kwargs == {}
    with pytest.raises(ValueError, match="wrapper_cls"), our_wrap._ConfigAutoWrap(a=1):
        pass


# Helpers that torch's activation checkpointing calls


@pytest.fixture(params=["torch's helpers", "our helpers"])
def helpers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return apply_activation_checkpointing with torch's wrapping helpers, and with this package's instead."""
    if request.param == "our helpers":
        for name in ("_Policy", "_recursive_wrap", "lambda_auto_wrap_policy"):
            monkeypatch.setattr(torch_wrap, name, getattr(our_wrap, name))
        for name in ("_construct_wrap_fn", "_post_order_apply"):
            monkeypatch.setattr(torch_wrap_utils, name, getattr(our_wrap, name))


@pytest.mark.usefixtures("helpers")
@pytest.mark.parametrize(
    "kwargs",
    [
        {"check_fn": lambda m: isinstance(m, nn.Linear)},
        {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})},
        {"auto_wrap_policy": CustomPolicy(lambda m: {"x": 1} if isinstance(m, nn.Linear) else False)},
    ],
    ids=["check_fn", "ModuleWrapPolicy", "CustomPolicy"],
)
def test_activation_checkpointing_before_and_after_wrapping(kwargs: dict[str, Any]) -> None:
    before = Wrapper(mlp())
    apply_activation_checkpointing(before, checkpoint_wrapper_fn=checkpoint_wrapper, **kwargs)
    assert wrapped_paths(before, CheckpointWrapper) == ["0", "1.0", "2"]

    after = mlp()
    apply_activation_checkpointing(after, checkpoint_wrapper_fn=checkpoint_wrapper, **kwargs)
    auto_wrap(after, ModuleWrapPolicy({CheckpointWrapper}), set(), set(), Wrapper, {})
    assert wrapped_paths(after) == ["0", "1.0", "2"]


def test_wrapped_child_can_be_replaced_afterwards() -> None:
    wrapper = Wrapper(nn.Linear(2, 2))
    result, numel = our_wrap._recursive_wrap(
        wrapper, always_wrap_policy, checkpoint_wrapper, set(), set(), only_wrap_children=True
    )
    assert result is wrapper
    assert isinstance(wrapper._fsdp_wrapped_module, CheckpointWrapper)
    assert numel == 6


def test_the_root_cannot_be_replaced() -> None:
    with pytest.raises(ValueError, match="root cannot be replaced"):
        our_wrap._post_order_apply(nn.Linear(1, 1), Wrapper)
