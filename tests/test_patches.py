"""`fsdp.patches`: what the package changes in torch and Python is listed, and can be taken back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad

from fsdp import FullyShardedDataParallel, ShardingStrategy, patches
from tests.harness.pool import on_ranks

ROOT = Path(__file__).resolve().parents[1]

# Prints the changed names before and after `take_back`: functions and classes of all modules, methods of their classes.
PROGRAM = """
import multiprocessing.spawn, sys
import torch, torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, torch.distributed.optim
import torch.distributed.tensor, torch.nn.utils.clip_grad, torch.optim.optimizer as optimizers
from torch import nn

def everything():
    owners = [m for name, m in list(sys.modules.items()) if name.partition(".")[0] != "fsdp" and name != "__main__"]
    classes = {id(c): c for m in owners for c in list(getattr(m, "__dict__", {}).values()) if isinstance(c, type)}
    return {
        (getattr(owner, "__module__", ""), owner.__name__, name): value
        for owner in [*(m for m in owners if hasattr(m, "__dict__") and hasattr(m, "__name__")), *classes.values()]
        for name, value in list(vars(owner).items())
        if callable(value) or isinstance(value, (staticmethod, classmethod, property))
    }

def registries():
    return [list(optimizers._global_optimizer_pre_hooks), list(optimizers._global_optimizer_post_hooks),
            [type(finder).__name__ for finder in sys.meta_path], sys.excepthook, sys.unraisablehook]

def train():
    model = fsdp.FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy=fsdp.ShardingStrategy.NO_SHARD)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        fsdp.checkpoint.get_state_dict(model, optimizer)

def changed():
    now = everything()
    return sorted(".".join(filter(None, key)) for key, value in before.items() if now.get(key) is not value)

import fsdp.checkpoint, fsdp.compat
# torch replaces sys.excepthook here, and imports modules in the first step
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
plain = nn.Linear(2, 2)
plain(torch.ones(1, 2)).sum().backward()
torch.optim.Adam(plain.parameters()).step()
before, at_first = everything(), registries()
train()
print(*changed())
fsdp.compat.enable_dcp()
fsdp.compat.patch()
print(len(changed()) > 50, registries() != at_first)
fsdp.patches.take_back()
print(*changed())
print(registries() == at_first)
torch.distributed.destroy_process_group()
"""


def test_everything_is_listed_and_taken_back() -> None:
    """After training, the listed functions alone differ; after `take_back` none does, and no hook is left."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=240)
    names = sorted(str(each.what) for each in patches.ALL if isinstance(each, patches.Patch))
    assert done.stdout.splitlines() == [" ".join(names), "True True", "", "True"], done.stdout + done.stderr


def wrapped() -> nn.Module:
    return FullyShardedDataParallel(nn.Linear(2, 2), sharding_strategy=ShardingStrategy.NO_SHARD)


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
