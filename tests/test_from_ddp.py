"""Habits of scripts for `DistributedDataParallel`: each works, or a message names the remedy."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from fsdp.checkpoint import load, save
from fsdp.comm.consensus import CPU, TrainingRanks
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.models import Net
from tests.harness.oracle import clean_name
from tests.harness.pool import of_all_ranks, on_ranks
from tests.harness.sharded import full_gradients, full_parameters


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def build(**options: Any) -> Any:
    return FullyShardedDataParallel(net(), **{"use_orig_params": True, **options})


def batch(seed: int = 0) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def backward(model: nn.Module, seed: int = 0) -> None:
    model(batch(seed)).square().mean().backward()


def warned(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        action()
    assert all(each.filename == __file__ for each in seen), [(each.filename, each.lineno) for each in seen]
    return [str(each.message) for each in seen]


def optimizer_warnings(make: Callable[[], torch.optim.Optimizer], model: nn.Module) -> list[str]:
    optimizer = make()
    backward(model)
    return warned(lambda: (optimizer.step(), optimizer.step()))


def _clip_by_two_calls(model: nn.Module) -> None:
    norm = get_total_norm([param.grad for param in model.parameters() if param.grad is not None])
    clip_grads_with_norm_(model.parameters(), 0.01, norm)


@on_ranks(2)
def test_clipping_of_torch_warns_of_shards() -> None:
    """Given in any form or from before they were wrapped, and by two calls; unsharded gradients do not warn."""
    for flat in (False, True):
        module = net()
        before = list(module.parameters())
        model = FullyShardedDataParallel(module, use_orig_params=not flat)
        backward(model)
        forms: list[Any] = [model.parameters(), filter(torch.is_tensor, model.parameters()), next(model.parameters())]
        forms += [model.module.parameters(), before]
        clips = [functools.partial(clip_grad_norm_, params, 0.01) for params in forms]
        for clip in (*clips, functools.partial(_clip_by_two_calls, model)):
            (message,) = warned(clip)
            assert "Call clip_grad_norm_() of the outermost wrapped module" in message
        assert not warned(functools.partial(clip_grads_with_norm_, model.parameters(), 0.01, torch.ones(())))
    replicated, plain = build(sharding_strategy=ShardingStrategy.NO_SHARD), net()
    for model in (replicated, plain):
        backward(model)
        assert not warned(functools.partial(clip_grad_norm_, list(model.parameters()), 0.01))
        assert not warned(functools.partial(_clip_by_two_calls, model))
    assert torch.equal(*(torch.cat([p.grad.flatten() for p in m.parameters()]) for m in (replicated, plain)))


def batch_normed() -> nn.Module:
    torch.manual_seed(dist.get_rank())
    return Net(
        lambda m, x: m.norm(m.inner(x) + m.offset),
        inner=nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        norm=nn.BatchNorm1d(4),
        offset=torch.randn(4),
    )


@on_ranks(2)
def test_broadcast_buffers_equals_ddp() -> None:
    """With accumulation, and evaluation in between."""
    reference = batch_normed()
    wrapped = FullyShardedDataParallel(
        batch_normed(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        sync_module_states=True,
        broadcast_buffers=True,
    )
    ddp = DistributedDataParallel(reference)
    rank = dist.get_rank()
    for step, mode in enumerate(["sync", "no_sync", "no_sync", "sync", "no_grad", "sync"]):
        for model in (wrapped, ddp):
            x = batch(10 * step + rank)
            if mode == "no_grad":
                with torch.no_grad():
                    model(x)
            elif mode == "no_sync":
                with model.no_sync():
                    model(x).sum().backward()
            else:
                model(x).sum().backward()
        found = {clean_name(name): buffer for name, buffer in wrapped.named_buffers()}
        assert_close(found, dict(reference.named_buffers()))
    with pytest.raises(ValueError, match="broadcast_buffers must be the same"):
        inner = FullyShardedDataParallel(nn.Linear(1, 1), broadcast_buffers=True)
        FullyShardedDataParallel(nn.Sequential(inner))(torch.ones(1, 1))


@on_ranks(2)
def test_names_of_ddp_raise_with_a_remedy() -> None:
    for name in ("join", "_set_static_graph", "find_unused_parameters", "reducer"):
        with pytest.raises(AttributeError, match=f"has no '{name}' as DistributedDataParallel has"):
            getattr(build(), name)
    with pytest.raises(AttributeError, match=r"for batch in fsdp.join\(model, loader\)"):
        build().join()
    with pytest.raises(AttributeError, match="'Sequential' object has no attribute 'other'"):
        build().other  # noqa: B018
    for name, remedy in (
        ("find_unused_parameters", "reduce_unused=True"),
        ("device_ids", "device_id="),
        ("static_graph", "nothing has to be promised"),
        ("bucket_cap_mb", "auto_wrap_policy="),
    ):
        with pytest.raises(TypeError, match=f"{name}= is an argument of DistributedDataParallel.*{remedy}"):
            build(**{name: None})
    with pytest.raises(TypeError, match="unexpected keyword argument 'strategy'"):
        build(strategy=None)
    with pytest.raises(TypeError, match=r"got \[0\]: that looks like the device_ids.*device_id="):
        FullyShardedDataParallel(net(), [0])  # type: ignore[arg-type]
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="device_id=1 is not available: torch finds 0 devices"):
            build(device_id=1)


@on_ranks(2)
def test_require_backward_grad_sync_accumulates() -> None:
    """Set before each forward, as nanoGPT accumulates."""
    model, plain = build(), net()
    rank = dist.get_rank()
    for micro in range(2):
        model.require_backward_grad_sync = micro == 1
        assert model.require_backward_grad_sync is (micro == 1)
        backward(model, 2 * rank + micro)
    for seed in range(4):
        (plain(batch(seed)).square().mean() / 2).backward()
    assert_close(full_gradients(model), {n: p.grad for n, p in plain.named_parameters()})


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("transport", "reduce_unused"), [("native", False), ("auto", True)])
@on_ranks(2)
def test_ranks_that_step_differently_warn(transport: str, reduce_unused: bool) -> None:
    """Another number of steps, or other learning rates, at the next backward, on one of the ranks at least.

    Equal steps do not warn, whatever their number, nor do rates that are tensors. After the warning ranks are compared
    anew.
    """
    with mock.patch.dict(os.environ, FSDP_COLLECTIVES=transport):
        model, rank = build(process_group=dist.new_group(), reduce_unused=reduce_unused), dist.get_rank()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        backward(model)

        def told(words: str = "") -> bool:
            messages = warned(lambda: backward(model))
            assert all(words in message and "average a loss over the ranks" in message for message in messages)
            return 1 in of_all_ranks(len(messages))

        for rate, count in ((0.1, 1), (torch.tensor(0.2), 3), (0.3, 0)):
            optimizer.param_groups[0]["lr"] = rate
            for _ in range(count):
                optimizer.step()
            assert not told()
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + rank)
        optimizer.step()
        assert told("stepped an optimizer with other learning rates on this rank")
        assert not told()
        if rank == 0:
            optimizer.step()
        assert told("made 0 optimizer steps on this rank, and 1 on another one")
        assert not told()


@on_ranks(2)
def test_hooks_on_flat_parameters_warn() -> None:
    module = net()
    module[0].weight.register_hook(lambda grad: None)  # type: ignore[index]
    messages = warned(lambda: FullyShardedDataParallel(module))
    assert (
        len(messages) == 1
        and "on '0.weight' of the Sequential unit" in messages[0]
        and "use_orig_params=True" in messages[0]
    )
    model = build(use_orig_params=False)
    next(model.parameters()).register_hook(lambda grad: None)
    (message,) = optimizer_warnings(lambda: torch.optim.SGD(model.parameters()), model)
    assert "on a flat parameter by register_hook() never fires" in message


@on_ranks(2)
def test_checkpoints_of_ddp_load_without_their_prefix() -> None:
    reference = net()
    saved = DistributedDataParallel(reference).state_dict()
    model = build()
    with pytest.raises(RuntimeError, match=r'(?s)Missing key.*begin with "module.".*consume_prefix_in_state_dict'):
        model.load_state_dict(saved)
    with pytest.raises(RuntimeError, match="Missing key") as error:
        model.load_state_dict({"other": torch.zeros(1)})
    assert "module" not in str(error.value)
    nn.init.ones_(reference[0].bias)  # type: ignore[index, arg-type]
    saved = DistributedDataParallel(reference).state_dict()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(saved, "module.")
    model.load_state_dict(saved)
    assert_close(full_parameters(model), dict(reference.named_parameters()))


class OwnStep(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:  # for example with compensation of rounding
        return super().step(closure)


@on_ranks(2)
def test_training_in_low_precision_warns() -> None:
    """Only if torch's own optimizers round updates: frozen parameters and low compute precision do not warn."""
    low = torch.bfloat16
    some: list[Callable[..., Any]] = [torch.optim.SGD, torch.optim.AdamW, OwnStep]
    for flat in (False, True):
        for make, dtype, count in zip(some, (low, torch.float16, low), (1, 1, 0)):
            model = FullyShardedDataParallel(net().to(dtype), use_orig_params=not flat)
            optimizer = make(model.parameters())
            for param in model.parameters():
                param.grad = torch.zeros_like(param)
            messages = warned(lambda optimizer=optimizer: (optimizer.step(), optimizer.step()))
            assert len(messages) == count, messages
            if messages:
                count, part = (1, 4)[not flat], (4096, 512)[dtype == low]
                assert (
                    f"trains {count} of {count} parameters in {dtype}: an update of less than 1/{part} " in messages[0]
                )
                assert (
                    f"model.float() before) and pass mixed_precision=MixedPrecision(param_dtype={dtype})" in messages[0]
                )
        model = build(use_orig_params=not flat, mixed_precision=MixedPrecision(param_dtype=low))
        assert not optimizer_warnings(functools.partial(torch.optim.SGD, model.parameters()), model)
    frozen = net()
    frozen[0].to(low).requires_grad_(False)  # type: ignore[index]
    adapters = FullyShardedDataParallel(frozen, use_orig_params=True)
    trained = [param for param in adapters.parameters() if param.requires_grad]
    for param in trained:
        param.grad = torch.zeros_like(param)
    assert not warned(torch.optim.SGD(trained).step)


@on_ranks(2)
def test_optimizers_of_whole_parameters_warn_or_raise() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    for flat in (False, True):
        model = build(use_orig_params=not flat)
        (messages,) = optimizer_warnings(functools.partial(torch.optim.Adafactor, model.parameters()), model)
        assert "Adafactor computes with the norms, shapes or products of whole parameters" in messages
        own = build(use_orig_params=not flat, sharding_strategy=ShardingStrategy.NO_SHARD)
        assert not optimizer_warnings(functools.partial(torch.optim.Adafactor, own.parameters()), own)
    values = {name: param.clone() for name, param in model.named_parameters()}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    backward(model)
    with pytest.raises(RuntimeError, match=r"those of a wrapped model are sharded, .* was given as optimizer_class"):
        optimizer.step()
    assert all(torch.equal(param, values[name]) for name, param in model.named_parameters())


@on_ranks(2)
def test_communication_hooks_for_ddp_buckets_are_refused() -> None:
    for hook in (default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        with pytest.raises(TypeError, match=r"take buckets: .*torch.distributed.algorithms._comm_hooks.default_hooks"):
            build().register_comm_hook(None, hook)


@on_ranks(2)
def test_parameter_groups_that_are_empty_warn() -> None:
    """By dimensions, or those of an inner module where parameters are flat, also in a group that is added later."""
    for flat in (False, True):
        model = build(use_orig_params=not flat)

        def by_dimensions(model: nn.Module = model) -> torch.optim.Optimizer:
            several = [[p for p in model.parameters() if (p.dim() >= 2) is wide] for wide in (True, False)]
            return torch.optim.AdamW([{"params": p, "weight_decay": d} for p, d in zip(several, (0.1, 0.0))])

        (messages,) = optimizer_warnings(by_dimensions, model)
        assert "parameter group 0 of AdamW is empty" in messages
        assert "fsdp.param_groups(model, weight_decay=...)" in messages
        groups = [{"params": list(model.parameters())}, {"params": []}]
        empty = optimizer_warnings(lambda groups=groups: torch.optim.SGD(groups), model)  # type: ignore[misc]
        assert len(empty) == flat
        optimizer = torch.optim.SGD([next(model.parameters())], lr=0.1)
        assert not warned(optimizer.step)
        optimizer.add_param_group({"params": model.module[2].parameters()})
        messages = warned(lambda optimizer=optimizer: (optimizer.step(), optimizer.step()))
        assert len(messages) == flat, messages
        if flat:
            assert "parameter group 1 of SGD is empty" in messages[0] and "Pass use_orig_params=True" in messages[0]


@on_ranks(2)
def test_ddp_in_and_around_a_wrapped_module_is_refused() -> None:
    """An ignored DDP module is left alone."""
    for module in (DistributedDataParallel(net()), nn.Sequential(DistributedDataParallel(net()))):
        with pytest.raises(ValueError, match=r"is a DistributedDataParallel, .*FullyShardedDataParallel\(ddp.module\)"):
            FullyShardedDataParallel(module)
    FullyShardedDataParallel(nn.Sequential(module[0], nn.Linear(2, 2)), ignored_modules=[module[0]])  # type: ignore[index]
    for flat in (True, False):
        with pytest.raises(TypeError, match=r"reduced already, .* use the module as it is"):
            DistributedDataParallel(build(use_orig_params=not flat))


def _differing(**options: Any) -> Any:
    """Wrap a model with other values on each rank, except in ignored modules or with values from rank 0."""
    torch.manual_seed(10 + dist.get_rank())
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return FullyShardedDataParallel(module, dist.new_group(), **{"use_orig_params": True, **options})


def _load(model: Any) -> None:
    model.load_state_dict(net().state_dict())


def _load_checkpoint(model: Any) -> None:
    folder = TrainingRanks([dist.group.WORLD], CPU).first("make a folder", tempfile.mkdtemp)
    save(f"{folder}/checkpoint", build(use_orig_params=model._use_orig_params))
    load(f"{folder}/checkpoint", model)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


def _write_summoned(model: Any) -> None:
    with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
        for param, value in zip(model.parameters(), net().parameters()):
            param.copy_(value)


def _read(model: Any) -> None:
    model.state_dict()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        pass


@pytest.mark.parametrize("collectives", ["auto", "native"])
@on_ranks(2)
def test_different_initial_values_warn_once_on_rank_0(collectives: str) -> None:
    """In the first pass. Values that were replaced since, or broadcast from one rank, do not warn."""
    os.environ["FSDP_COLLECTIVES"] = collectives
    rank, replicated = dist.get_rank(), {"sharding_strategy": ShardingStrategy.NO_SHARD}
    for options in ({"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}, {"use_orig_params": False}, replicated):
        model = _differing(**options)
        _read(model)
        messages = [*warned(lambda model=model: backward(model)), *warned(lambda model=model: backward(model))]
        assert len(messages) == (rank == 0), messages
        for text in messages:
            assert "when it was wrapped, '" in text and "weight' of " in text, text
            assert "on rank 1 was not what it was on rank 0, nor were 3 others" in text
            assert "Pass sync_module_states=True" in text
    module: Any = net()
    nn.init.normal_(module[0].weight, generator=torch.Generator().manual_seed(rank))
    for model in (_differing(sync_module_states=True), FullyShardedDataParallel(module, ignored_modules=[module[0]])):
        assert not warned(lambda model=model: backward(model))
    for change in (_load, _load_checkpoint, _write_summoned):
        model = _differing()
        change(model)
        assert not warned(lambda model=model: backward(model)), change
