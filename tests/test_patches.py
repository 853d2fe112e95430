"""`fsdp.patches`: what the package changes in torch and Python is listed, and can be taken back."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
import torch
import torch.optim.optimizer as optimizers
from torch import nn
from torch.nn.utils import clip_grad

from fsdp import FullyShardedDataParallel, ShardingStrategy, compat, patches
from fsdp.checkpoint import get_state_dict
from tests.harness.pool import on_ranks, run_fresh


def everything() -> dict[tuple[str, str, str], Any]:
    """Return functions and classes of all modules, and the methods of these classes."""
    owners = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] != "fsdp"]
    classes = {id(c): c for m in owners for c in list(getattr(m, "__dict__", {}).values()) if isinstance(c, type)}
    return {
        (getattr(owner, "__module__", ""), owner.__name__, name): value
        for owner in [*(m for m in owners if hasattr(m, "__dict__") and hasattr(m, "__name__")), *classes.values()]
        for name, value in list(vars(owner).items())
        if callable(value) or isinstance(value, (staticmethod, classmethod, property))
    }


def registries() -> list[Any]:
    hooks = list(optimizers._global_optimizer_pre_hooks), list(optimizers._global_optimizer_post_hooks)
    return [*hooks, [type(finder).__name__ for finder in sys.meta_path], sys.excepthook, sys.unraisablehook]


def train(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        clip_grad.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return optimizer


def wrapped() -> FullyShardedDataParallel:
    return FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD)


def check_changes() -> None:
    def changed() -> list[str]:
        now = everything()
        return sorted(".".join(filter(None, key)) for key, value in before.items() if now.get(key) is not value)

    warnings.simplefilter("ignore")  # of deprecated names of torch, as they are looked at
    train(nn.Linear(2, 2))  # torch imports modules in the first step
    before, at_first = everything(), registries()
    model = wrapped()
    get_state_dict(model, train(model))
    assert changed() == sorted(str(each.what) for each in patches.ALL if isinstance(each, patches.Patch))
    compat.enable_dcp()
    compat.patch()
    assert len(changed()) > 50 and registries() != at_first
    patches.take_back()
    assert changed() == [] and registries() == at_first


def test_everything_is_listed_and_taken_back() -> None:
    """After training, the listed functions alone differ; after `take_back` none does, and no hook is left."""
    run_fresh(1, check_changes)


@on_ranks(1)
def test_next_wrapped_module_changes_torch_again() -> None:
    wrapped()
    assert patches.BACKWARD and patches.CLIPPING and patches.STEPS
    patches.take_back()
    assert not any(patches.ALL)
    torchs = clip_grad._clip_grads_with_norm_
    patches.take_back()
    model = wrapped()
    assert clip_grad._clip_grads_with_norm_ is not torchs and patches.BACKWARD
    model(torch.ones(1, 2)).sum().backward(inputs=list(model.parameters()))
    assert all(param.grad is not None for param in model.parameters())


@on_ranks(1)
def test_names_that_others_have_replaced_are_not_taken_back() -> None:
    wrapped()
    ours = clip_grad._clip_grads_with_norm_
    clip_grad._clip_grads_with_norm_ = lambda *args, **kwargs: ours(*args, **kwargs)
    try:
        with pytest.raises(RuntimeError, match=r"take_back\(\): .*_clip_grads_with_norm_ was replaced by something"):
            patches.take_back()
        assert all(patches.ALL[:5])
    finally:
        clip_grad._clip_grads_with_norm_ = ours


class Library:
    @staticmethod
    def double(x: int) -> int:
        return 2 * x


def test_patch_of_a_static_method_of_a_class() -> None:
    before = vars(Library)["double"]
    patch = patches.Patch(f"{__name__}:Library", "double", "adds one")
    for _ in range(2):
        patch.install(lambda double: lambda x: double(x) + 1)
        assert Library.double(3) == Library().double(3) == 7
    patch.undo("undo")
    assert vars(Library)["double"] is before and not patch


def test_patch_waits_for_the_module() -> None:
    patch = patches.Patch("not.imported", "double", "adds one")
    patch.install(lambda double: double)
    assert not patch
