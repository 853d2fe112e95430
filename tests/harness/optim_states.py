"""Optimizer states of this package, of torch's FSDP1 and of plain optimizers, and their comparison."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp as torch_api
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import StateDictType as TorchKind
from torch.distributed.fsdp.api import FullOptimStateDictConfig as TorchFullOptim
from torch.distributed.fsdp.api import ShardedOptimStateDictConfig as TorchShardedOptim
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

import fsdp
from fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    RaggedOptimStateDictConfig,
    RaggedStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    checkpoint,
)
from fsdp.checkpoint import StateDictOptions, get_optimizer_state_dict, get_state_dict, set_optimizer_state_dict
from fsdp.compat import disable_dcp, enable_dcp
from fsdp.wrap import ModuleWrapPolicy
from tests.harness import small
from tests.harness.models import Net, Unit

FSDP = FullyShardedDataParallel
FORMS: dict[str, tuple[Any, ...]] = {  # arguments of `state_dict_type`
    "full": (StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()),
    "rank 0": (
        StateDictType.FULL_STATE_DICT,
        FullStateDictConfig(rank0_only=True, offload_to_cpu=True),
        FullOptimStateDictConfig(rank0_only=True),
    ),
    "sharded": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()),
    "ragged": (StateDictType.SHARDED_STATE_DICT, RaggedStateDictConfig(), RaggedOptimStateDictConfig()),
}


def transfer(form: str, model: FSDP, optimizer: Optimizer, fresh: Optimizer, root: Path) -> None:
    """Move state from one optimizer of the model to another, in a state dict or through a checkpoint in `root`."""
    if form in FORMS:
        with FSDP.state_dict_type(model, *FORMS[form]):
            saved = FSDP.optim_state_dict(model, optimizer)
            fresh.load_state_dict(FSDP.optim_state_dict_to_load(model, fresh, saved))
    elif form == "dcp":
        options = StateDictOptions(ragged=True)
        dcp.save({"optim": get_optimizer_state_dict(model, optimizer, options=options)}, checkpoint_id=root / "dcp")
        target = {"optim": get_optimizer_state_dict(model, fresh, options=options)}
        dcp.load(target, checkpoint_id=root / "dcp")
        set_optimizer_state_dict(model, fresh, target["optim"], options=options)
    else:
        path = checkpoint.save(root, model, optimizer, keep=1)
        checkpoint.load(path, model, fresh, in_place=form != "one pass")


@contextlib.contextmanager
def dcp_enabled() -> Iterator[None]:
    enable_dcp()
    try:
        yield
    finally:
        disable_dcp()


def block(a: int, b: int) -> Unit:
    return Unit(linear=nn.Linear(a, b), scale=nn.Parameter(torch.ones(1)))  # fewer elements than ranks


def build(seed: int = 0) -> Net:
    """Build sizes that do not divide, a tie, a parameter in another memory order, nested units."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        model = Net(
            tokens=nn.Embedding(7, 5),
            blocks=nn.Sequential(block(5, 3), block(3, 5)),
            conv=nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last),
            head=nn.Linear(5, 7, bias=False),
            bias=nn.Parameter(torch.randn(2)),
        )
    model.head.weight = model.tokens.weight
    return model


def ours(uop: bool, strategy: str = "FULL_SHARD", blocks: bool = True, **options: Any) -> FSDP:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FSDP(
            options.pop("module", None) or build(),
            sharding_strategy=ShardingStrategy[strategy],
            auto_wrap_policy=ModuleWrapPolicy({Unit}) if blocks else None,
            use_orig_params=uop,
            **options,
        )


def torchs(uop: bool, strategy: str = "FULL_SHARD", blocks: bool = True, **options: Any) -> Any:
    module = options.pop("module", None) or build()
    return small.torchs(module, strategy, {Unit} if blocks else (), use_orig_params=uop, **options)


def adamw(params: Iterable[Any]) -> Optimizer:
    return AdamW(params, lr=0.01, weight_decay=0.1)


def train(optimizer: Optimizer, steps: int = 2) -> Optimizer:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad and param.numel() > 0:
                    param.grad = torch.sin(3 * param.detach())  # zero in the padding
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def settle(value: Any) -> Any:
    """Convert a sharded value to (global shape, this rank's rows)."""
    if isinstance(value, DTensor):
        return (
            "distributed",
            tuple(value.shape),
            value.stride(),
            value.placements,
            str(value.device_mesh),
            value.to_local(),
        )
    if isinstance(value, ShardedTensor):
        metadata = value.metadata()
        local = value.local_shards()
        return (
            "sharded",
            tuple(metadata.size),
            [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in metadata.shards_metadata],
            [(shard.tensor.clone(), shard.metadata.shard_offsets) for shard in local],
            str(metadata.tensor_properties),
        )
    return value


def differences(actual: Any, expected: Any, path: str = "") -> list[str]:
    """List differences of nested values, including types and dtypes."""
    actual, expected = settle(actual), settle(expected)
    if type(actual) is not type(expected):
        return [f"{path}: {type(actual).__name__}, expected {type(expected).__name__}"]
    if isinstance(actual, dict):
        if actual.keys() != expected.keys():
            return [f"{path}: keys {list(actual)}, expected {list(expected)}"]
        return [line for key in actual for line in differences(actual[key], expected[key], f"{path}/{key}")]
    if isinstance(actual, (list, tuple)):
        if len(actual) != len(expected):
            return [f"{path}: {actual}, expected {expected}"]
        return [line for i, pair in enumerate(zip(actual, expected)) for line in differences(*pair, f"{path}/{i}")]
    if isinstance(actual, Tensor):
        alike = (actual.dtype, actual.shape, actual.device) == (expected.dtype, expected.shape, expected.device)
        return [] if alike and torch.equal(actual, expected) else [f"{path}: {actual}, expected {expected}"]
    return [] if actual == expected else [f"{path}: {actual!r}, expected {expected!r}"]


def assert_same(actual: Any, expected: Any, case: str) -> None:
    found = differences(actual, expected)
    assert not found, f"{case}: " + "\n".join(found[:8])


def sort_states(raw: dict[str, Any]) -> dict[str, Any]:
    """Sort the states of each parameter by name, because optimizers keep their own order."""
    return {**raw, "state": {key: dict(sorted(state.items())) for key, state in sorted(raw["state"].items())}}


def assert_same_states(actual: Any, expected: Any, case: str) -> None:
    assert_same(sort_states(actual), sort_states(expected), case)


def quiet(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function` without torch's warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(*args, **kwargs)


def compiled(module: nn.Module) -> Any:
    """Compile with a backend that returns its graph: the backends of torch take seconds to import."""
    return quiet(torch.compile, module, backend=lambda graph, inputs: graph)


def save(library: Any, model: nn.Module, optimizer: Optimizer, kind: str = "FULL_STATE_DICT", **config: Any) -> Any:
    """Return the library's `optim_state_dict` of this kind."""
    is_ours = library is FSDP
    kinds = StateDictType if is_ours else TorchKind
    full, sharded = (
        (FullOptimStateDictConfig, ShardedOptimStateDictConfig) if is_ours else (TorchFullOptim, TorchShardedOptim)
    )
    config = (full if kind == "FULL_STATE_DICT" else sharded)(**config)

    def work() -> Any:
        with library.state_dict_type(model, kinds[kind], None, config):
            return library.optim_state_dict(model, optimizer)

    return work() if is_ours else quiet(work)


@contextlib.contextmanager
def kind_set(library: Any, model: nn.Module, kind: str, **config: Any) -> Iterator[None]:
    """Set the kind of state dicts of a model of ours or of torch's FSDP1, without torch's warnings."""
    name = "FullStateDictConfig" if kind == "FULL_STATE_DICT" else "ShardedStateDictConfig"
    kinds, configs = (StateDictType, fsdp) if library is FSDP else (TorchKind, torch_api)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with library.state_dict_type(model, kinds[kind], getattr(configs, name)(**config) if config else None):
            yield


def model_state(library: Any, model: nn.Module, kind: str, **config: Any) -> dict[str, Any]:
    with kind_set(library, model, kind, **config):
        return dict(model.state_dict())


def load_model(library: Any, model: nn.Module, kind: str, state: dict[str, Any]) -> None:
    with kind_set(library, model, kind):
        assert model.load_state_dict(state) == ([], [])


def row_major(seed: int = 0) -> Net:
    """Build a model without other memory orders, which torch's sharded state cannot hold."""
    model = build(seed)
    model.conv.to(memory_format=torch.contiguous_format)
    return model


def cross_load(
    model: Any, optimizer: Optimizer, torch_model: Any, torch_optimizer: Optimizer, saved: Any, case: str
) -> None:
    """Load torch's state with both libraries and compare each with its own state."""
    loadable = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    assert_same_states(loadable, optimizer.state_dict(), f"{case}, to load")
    fresh = adamw(model.parameters())
    fresh.load_state_dict(loadable)
    assert_same_states(fresh.state_dict(), optimizer.state_dict(), f"{case}, loaded")
    taken = quiet(TorchFSDP.optim_state_dict_to_load, torch_model, torch_optimizer, saved)
    assert_same_states(taken, torch_optimizer.state_dict(), f"{case}, to load by torch")


def mixed_plain() -> Net:
    """Build frozen and trained parameters of two dtypes in one unit, an ignored module, a parameter not optimized."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(1)
        return Net(
            base=nn.Linear(5, 5).requires_grad_(False),
            up=nn.Linear(5, 3),
            down=nn.Linear(3, 5, dtype=torch.float64),
            ignored=nn.Linear(3, 2),
            idle=nn.Parameter(torch.randn(9)),
        )


def settle_all(value: Any) -> Any:
    return {key: settle_all(inner) for key, inner in value.items()} if isinstance(value, dict) else settle(value)


def trained(uop: bool, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    model = ours(uop, module=row_major(seed), **options)
    return model, train(adamw(model.parameters()))


def same_state(model: nn.Module, optimizer: Any, expected: nn.Module, expected_optimizer: Any, case: str) -> None:
    assert_same_states(optimizer.state_dict(), expected_optimizer.state_dict(), case)
    for param, value in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(param, value), case


def parts(model: nn.Module, optimizer: Any, ragged: bool) -> dict[str, Any]:
    options = StateDictOptions(ragged=ragged)
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options)))
