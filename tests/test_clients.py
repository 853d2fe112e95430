"""Sequences of calls that trainers make to save and load with torch's FSDP1 work here, argument by argument.

Each recipe is one trainer's. It saves on one number of ranks and loads on another, and has to restore the model and
the optimizer bit for bit.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dist_cp
from torch import nn
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.flat.names import clean
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.mesh_names import mesh_of
from tests.harness.models import ZOO
from tests.harness.optim_states import adamw, ours, quiet, row_major, same_state, torchs, trained
from tests.harness.oracle import Schedule, assert_bit_equal, rank_batch
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.sharded import full_parameters, wrap
from tests.harness.versions import needs_cpu_events

Save = Callable[[FSDP, Any, str], None]
Load = Callable[[FSDP, Any, str], None]


class Recipe(NamedTuple):
    save: Save
    load: Load


def rank() -> int:
    return dist.get_rank()


def read_optimizer_state(model_state: Any, key: str, reader: Any) -> Any:
    """Read the optimizer's state in shards, as trainers do."""
    options = {"model_state_dict": model_state, "optimizer_key": key, "storage_reader": reader}
    return quiet(load_sharded_optimizer_state_dict, **options)[key]


def settings_of(kind: StateDictType, **full: bool) -> tuple[StateDictType, Any, Any]:
    if kind is StateDictType.FULL_STATE_DICT:
        return kind, FullStateDictConfig(**full), FullOptimStateDictConfig(**full)
    return kind, ShardedStateDictConfig(offload_to_cpu=True), ShardedOptimStateDictConfig(offload_to_cpu=True)


# -- accelerate --------------------------------------------------------------------------------------------------------


def accelerate_save(kind: StateDictType, model: FSDP, optimizer: Any, folder: str) -> None:
    assert type(model) is FSDP
    full = kind is StateDictType.FULL_STATE_DICT
    several = dist.get_world_size() > 1
    settings = settings_of(kind, offload_to_cpu=several, rank0_only=several)
    with FSDP.state_dict_type(model, *settings):
        state = model.state_dict()
        if full and rank() == 0:
            torch.save(state, f"{folder}/model.bin")
        elif not full:
            writer, planner = dist_cp.FileSystemWriter(f"{folder}/model"), dist_cp.DefaultSavePlanner()
            quiet(dist_cp.save, state_dict={"model": state}, storage_writer=writer, planner=planner)
    with FSDP.state_dict_type(model, *settings):
        optim_state = FSDP.optim_state_dict(model, optimizer)
        if full and rank() == 0:
            torch.save(optim_state, f"{folder}/optimizer.bin")
        elif not full:
            writer, planner = dist_cp.FileSystemWriter(f"{folder}/optimizer"), dist_cp.DefaultSavePlanner()
            quiet(dist_cp.save, state_dict={"optimizer": optim_state}, storage_writer=writer, planner=planner)
    dist.barrier()


def accelerate_load(kind: StateDictType, model: FSDP, optimizer: Any, folder: str) -> None:
    full = kind is StateDictType.FULL_STATE_DICT
    several = dist.get_world_size() > 1
    settings = settings_of(kind, offload_to_cpu=several, rank0_only=several)
    with FSDP.state_dict_type(model, *settings):
        if full:
            state = torch.load(f"{folder}/model.bin", weights_only=True)
        else:
            into = {"model": model.state_dict()}
            reader = dist_cp.FileSystemReader(f"{folder}/model")
            quiet(dist_cp.load, state_dict=into, storage_reader=reader, planner=dist_cp.DefaultLoadPlanner())
            state = into["model"]
        model.load_state_dict(state)
    with FSDP.state_dict_type(model, *settings):
        optim_state = None
        if not full:
            reader = dist_cp.FileSystemReader(f"{folder}/optimizer")
            optim_state = read_optimizer_state(model.state_dict(), "optimizer", reader)
        elif rank() == 0 or not settings[2].rank0_only:
            optim_state = torch.load(f"{folder}/optimizer.bin", weights_only=True)
        flattened = FSDP.optim_state_dict_to_load(model=model, optim=optimizer, optim_state_dict=optim_state)
        optimizer.load_state_dict(flattened)


def accelerate(kind: StateDictType) -> Recipe:
    return Recipe(functools.partial(accelerate_save, kind), functools.partial(accelerate_load, kind))


# -- Lightning ---------------------------------------------------------------------------------------------------------


def lightning_context(model: FSDP, kind: StateDictType, rank0_only: bool = True) -> Any:
    several = dist.get_world_size() > 1
    kind, of_model, of_optimizer = settings_of(kind, offload_to_cpu=several, rank0_only=rank0_only)
    return FSDP.state_dict_type(
        module=model, state_dict_type=kind, state_dict_config=of_model, optim_state_dict_config=of_optimizer
    )


def lightning_save_full(model: FSDP, optimizer: Any, folder: str) -> None:
    holds_flat = any(
        getattr(param, "_fsdp_flattened", False) and param.numel() > 0
        for group in optimizer.param_groups
        for param in group["params"]
    )
    assert holds_flat and any(isinstance(module, FSDP) for module in model.modules())
    with lightning_context(model, StateDictType.FULL_STATE_DICT):
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
    if rank() == 0:
        if model._use_orig_params:  # Trainer saves in the standard format, by ids
            state["optimizer"] = FSDP.rekey_optim_state_dict(state["optimizer"], OptimStateKeyType.PARAM_ID, model)
            assert all(isinstance(key, int) for key in state["optimizer"]["state"])
        torch.save(state, f"{folder}/full.ckpt")
    dist.barrier()


def lightning_load_full(model: FSDP, optimizer: Any, folder: str) -> None:
    checkpoint = torch.load(f"{folder}/full.ckpt", mmap=True, map_location="cpu", weights_only=True)
    with lightning_context(model, StateDictType.FULL_STATE_DICT, rank0_only=False):
        model.load_state_dict(checkpoint.pop("model"), strict=True)
    with lightning_context(model, StateDictType.FULL_STATE_DICT, rank0_only=False):
        state = checkpoint.pop("optimizer")
        if isinstance(next(iter(state["state"])), int):
            state = FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, model)
        loadable = FSDP.optim_state_dict_to_load(optim_state_dict=state, model=model, optim=optimizer)
        optimizer.load_state_dict(loadable)


def lightning_save_sharded(model: FSDP, optimizer: Any, folder: str) -> None:
    with lightning_context(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optimizer_0": FSDP.optim_state_dict(model, optimizer)}
        quiet(dist_cp.save, state, checkpoint_id=f"{folder}/sharded")


def lightning_load_sharded(model: FSDP, optimizer: Any, folder: str) -> None:
    with lightning_context(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict()}
        quiet(dist_cp.load, state, checkpoint_id=f"{folder}/sharded")
        model.load_state_dict(state["model"], strict=True)
        reader = dist_cp.FileSystemReader(path=f"{folder}/sharded")
        optim_state = read_optimizer_state(state["model"], "optimizer_0", reader)
        loadable = FSDP.optim_state_dict_to_load(optim_state_dict=optim_state, model=model, optim=optimizer)
        optimizer.load_state_dict(loadable)


# -- attributes that trainers read -------------------------------------------------------------------------------------


def shampoo_metadata(library: Any, model: nn.Module) -> list[tuple[Any, ...]]:
    """Return name, shape, size, this rank's range and the unit's strategy of every parameter."""
    found = []
    for wrapper in library.fsdp_modules(model):
        if wrapper._flat_param is None:
            continue
        flat = wrapper._flat_param
        for param, fqn, shape, numel, info in zip(
            flat._params, flat._fqns, flat._shapes, flat._numels, flat._shard_param_infos, strict=True
        ):
            start = info.intra_param_start_idx or 0
            end = info.intra_param_end_idx + 1 if info.intra_param_end_idx is not None else 0
            assert param.numel() == end - start
            found.append((fqn, shape, numel, start, end, wrapper.sharding_strategy.name))
    return found


def verl_metadata(model: nn.Module) -> list[Any]:
    """Return the attributes that verl reads before it moves the shards."""
    found = []
    assert len(set(model._all_handles)) == len(model._all_handles)
    for handle in model._all_handles:
        flat = handle.flat_param
        assert flat.data_ptr() == flat._local_shard.data_ptr() and flat.shape == flat._local_shard.shape
        assert flat._local_shard is not flat.data and not flat._local_shard.requires_grad
        assert handle.process_group is model.process_group or dist.get_world_size() == 1
        assert handle.device == model.compute_device
        facts = handle._offload_params, handle.uses_sharded_strategy, handle.needs_unshard()
        kinds = handle._sharding_strategy.name, handle._training_state.name, handle._use_orig_params
        dtypes = handle._orig_param_dtype, handle._fwd_bwd_param_dtype, handle._reduce_dtype
        found.append((*facts, *kinds, *dtypes, handle.rank, handle.world_size, handle.is_sharded(flat.data)))
        assert handle is not None and model._fully_sharded_module_to_handle[model.module] == model._handle
    assert model._is_root
    return found


@on_ranks(2)
def test_tools_may_assign_the_mesh_and_the_root() -> None:
    model, mesh = ours(True), init_device_mesh("cpu", (2,))
    assert model.check_is_root() and model._is_root
    for value, expected in ((False, None), (True, True), (None, None)):
        model._is_root = value
        assert model._is_root is expected, value
    for wrapper in FSDP.fsdp_modules(model):
        wrapper._device_mesh = mesh
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    assert all(value.device_mesh is mesh for value in state.values())


@on_ranks(1, 2, 3)
def test_flat_parameters_have_torchs_attributes(world_size: int) -> None:
    """The attributes that Shampoo reads."""
    for uop in (False, True):
        model, theirs = ours(uop, module=row_major()), torchs(uop, module=row_major())
        if uop:
            assert shampoo_metadata(FSDP, model) == shampoo_metadata(TorchFSDP, theirs)
        else:  # without padding between parameters
            params = [wrapper._flat_param._params for wrapper in FSDP.fsdp_modules(model)]
            assert params == [wrapper._flat_param._params for wrapper in TorchFSDP.fsdp_modules(theirs)] == [None] * 3
            facts = ("_unpadded_unsharded_size", "_shard_numel_padded", "_numels_with_padding", "_num_params")
            for wrapper, torchs_own in zip(FSDP.fsdp_modules(model), TorchFSDP.fsdp_modules(theirs), strict=True):
                for fact in facts:
                    assert getattr(wrapper._flat_param, fact) == getattr(torchs_own._flat_param, fact), fact


@needs_cpu_events
@on_ranks(1, 2)
def test_handles_have_torchs_attributes(world_size: int) -> None:
    """The attributes that verl and Composer read."""
    for uop, strategy in ((False, "FULL_SHARD"), (True, "SHARD_GRAD_OP"), (True, "NO_SHARD")):
        seen = []
        for make in (ours, torchs):
            model = make(uop, strategy, module=row_major())
            model.check_is_root()
            seen.append([verl_metadata(model)])
            for module in model.modules():
                if isinstance(module, (FSDP, TorchFSDP)):
                    module._unshard()
            seen[-1].append([handle.needs_unshard() for handle in model._all_handles])
        assert seen[0] == seen[1], (uop, strategy)


WAYS = [(False, ShardingStrategy.FULL_SHARD), (True, ShardingStrategy.SHARD_GRAD_OP), (True, ShardingStrategy.NO_SHARD)]


def assert_trains_alike(use: Callable[[FSDP, str, torch.Tensor], None], uop: bool, strategy: ShardingStrategy) -> FSDP:
    """Train without and with `use` of the model before each forward, backward and step, and compare; return it."""
    case, states = ZOO["mlp"], []
    for uses in (False, True):
        model = wrap(case, strategy, uop)
        optimizer = adamw(model.parameters())
        for number in range(2):
            batch = rank_batch(case, Schedule(), number, 0, rank(), dist.get_world_size())
            for moment in ("forward", "step"):
                if uses:
                    use(model, moment, batch)
                if moment == "forward":
                    case.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(full_parameters(model))
    assert_bit_equal(*states)
    return model


@pytest.mark.parametrize(("uop", "strategy"), WAYS)
@on_ranks(2)
def test_handle_reshards_its_unit(uop: bool, strategy: ShardingStrategy) -> None:
    """Verl reshards the root by the handle after each evaluation, whatever has gathered it."""
    case = ZOO["mlp"]

    def evaluate(model: FSDP, moment: str, batch: torch.Tensor) -> None:
        if moment == "forward":
            with torch.no_grad():
                case.loss(model.eval(), batch)
            model.train().unshard()
            model._handle.reshard(False)
            model._handle.reshard(True)
            assert model._handle.needs_unshard() is model._handle.uses_sharded_strategy

    model = assert_trains_alike(evaluate, uop, strategy)
    model.module.register_forward_hook(lambda *_: model._handle.reshard(True))
    with pytest.raises(RuntimeError, match=r"the root unit is in FORWARD: call reshard\(\) outside of that"):
        case.loss(model, case.make_batch(0, 2))


def weights_unit_by_unit(model: FSDP) -> dict[str, torch.Tensor]:
    """Collect the weights layer by layer, as verl collects adapters."""
    found: dict[str, torch.Tensor] = {}
    for name, inner in model.named_modules():
        if isinstance(inner, FSDP) and inner is not model:
            inner._is_root = True
            with FSDP.summon_full_params(inner, writeback=False):
                state = {f"{name}.{key}": value.detach().clone() for key, value in inner.state_dict().items()}
                found.update({clean(key): value for key, value in state.items()})
                inner._is_root = False
            inner._is_root = False
    return found


def weights_at_once(model: FSDP) -> dict[str, torch.Tensor]:
    """Collect the weights in host memory, as verl does before it first sends them to an engine."""
    with FSDP.summon_full_params(model, writeback=False):
        device = next(model.parameters()).device
        state = {key: value.detach().clone() for key, value in model.to("cpu").state_dict().items()}
        model.to(device)
    return state


@pytest.mark.parametrize(("uop", "strategy"), WAYS)
@on_ranks(2)
def test_weights_may_be_collected_between_steps(uop: bool, strategy: ShardingStrategy) -> None:
    """verl does so unit by unit, with `_is_root` assigned, and at once, with the summoned model moved."""

    def collect(model: FSDP, moment: str, batch: torch.Tensor) -> None:
        if moment == "forward":
            expected = full_parameters(model)
            inside = {key: value for key, value in expected.items() if key.startswith("blocks.")}
            assert inside and len(inside) < len(expected)
            assert_bit_equal(weights_unit_by_unit(model), inside)
            assert_bit_equal(weights_at_once(model), expected)
        else:
            assert model._is_root and not any(inner._is_root for inner in FSDP.fsdp_modules(model)[1:])

    assert_trains_alike(collect, uop, strategy)


@pytest.mark.parametrize(("uop", "strategy"), WAYS)
@on_ranks(2)
def test_shards_may_be_moved_between_phases(uop: bool, strategy: ShardingStrategy) -> None:
    """verl keeps them in host memory while another model computes."""

    def move(model: FSDP, moment: str, batch: torch.Tensor) -> None:
        for handle in model._all_handles if moment == "step" else ():
            before = handle.flat_param._local_shard
            handle.flat_param_to("cpu", non_blocking=True, copy=True)
            handle.flat_param._local_shard = handle.flat_param.data
            assert before.data_ptr() != handle.flat_param.data_ptr()

    model = assert_trains_alike(move, uop, strategy)
    summoned = model.summon_full_params(model)
    with pytest.raises(RuntimeError, match="can be moved or cast only while it does not run"), summoned:
        model._all_handles[0].flat_param_to("cpu")


# -- all recipes -------------------------------------------------------------------------------------------------------

RECIPES = {
    "accelerate, full": accelerate(StateDictType.FULL_STATE_DICT),
    "accelerate, sharded": accelerate(StateDictType.SHARDED_STATE_DICT),
    "Lightning, full": Recipe(lightning_save_full, lightning_load_full),
    "Lightning, sharded": Recipe(lightning_save_sharded, lightning_load_sharded),
}


def options_of(meshed: bool) -> dict[str, Any]:
    """Return the arguments of a wrapper with a mesh of all ranks: two replicas on four ranks, none on fewer."""
    size = dist.get_world_size()
    shape: tuple[int, ...] = (2, 2) if size == 4 else (size,)
    return {"device_mesh": mesh_of(shape), "strategy": "HYBRID_SHARD" if size == 4 else "FULL_SHARD"} if meshed else {}


def save_all(folder: str, uop: bool, names: list[str], meshed: bool = False) -> None:
    for name in names:
        into = Path(folder, name)
        into.mkdir(parents=True, exist_ok=True)
        RECIPES[name].save(*trained(uop, **options_of(meshed)), str(into))


def sort_settings(optimizer: torch.optim.Optimizer) -> None:
    """Sort the settings of each group, which torch's storage returns in any order."""
    optimizer.param_groups[:] = [dict(sorted(group.items())) for group in optimizer.param_groups]


def load_all(folder: str, uop: bool, names: list[str], meshed: bool = False) -> None:
    options = options_of(meshed)
    expected, expected_optimizer = trained(uop, **options)
    sort_settings(expected_optimizer)
    for name in names:
        model = ours(uop, module=row_major(1), **options)
        optimizer = adamw(model.parameters())
        RECIPES[name].load(model, optimizer, str(Path(folder, name)))
        sort_settings(optimizer)
        same_state(model, optimizer, expected, expected_optimizer, f"{name}, use_orig_params={uop}")


@pytest.mark.parametrize(("ranks", "loading", "uop"), [(2, [3], False), (2, [2], True), (4, [4, 3], True)])
def test_trainers_load_the_state_that_they_saved(tmp_path: Path, ranks: int, loading: list[int], uop: bool) -> None:
    """At the same and at another number of ranks. Four ranks are two replicas, whose mesh shows in sharded state."""
    names = [name for name in RECIPES if ranks == 2 or "sharded" in name]
    for function, size in ((save_all, ranks), *((load_all, size) for size in loading)):
        run_ranks(size, function, str(tmp_path), uop, names, ranks == 4)


# -- parameters cast after wrapping ------------------------------------------------------------------------------------


@on_ranks(2)
def test_flat_parameters_may_be_cast_after_wrapping() -> None:
    """accelerate sets the flat parameter's data and the handle's dtype; training then equals that of a model wrapped
    in that dtype."""
    case, low = ZOO["mlp"], torch.bfloat16
    policy = ModuleWrapPolicy(case.blocks)
    precision = MixedPrecision(param_dtype=low, reduce_dtype=torch.float32)
    for strategy, mode in itertools.product(
        (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP), (False, True)
    ):
        model = wrap(case, strategy, mode, dtype=low, mixed_precision=precision)
        for module in FSDP.fsdp_modules(model):
            if not module._has_params:
                continue
            param = module._flat_param
            if param.dtype != torch.float32 and param.requires_grad:
                param.data = param.data.to(torch.float32)
                module._handle._orig_param_dtype = torch.float32
                assert param._local_shard.dtype == torch.float32 and param._local_shard.data_ptr() == param.data_ptr()
        expected = wrap(case.build(0, low).float(), strategy, mode, wrap_policy=policy, mixed_precision=precision)
        optimizers = []
        for each in (model, expected):
            params = list(each.parameters())
            assert {param.dtype for param in params} == {torch.float32}
            optimizers.append(torch.optim.AdamW(params, lr=0.01))
        for number in range(4):
            losses = []
            for each, optimizer in zip((model, expected), optimizers):
                losses.append(case.loss(each, rank_batch(case, Schedule(), number, 0, rank(), dist.get_world_size())))
                losses[-1].backward()
                optimizer.step()
                optimizer.zero_grad()
            assert losses[0].equal(losses[1])
        assert_bit_equal(full_parameters(model), full_parameters(expected))


# -- a step inside a forward -------------------------------------------------------------------------------------------


class Task(nn.Module):
    """A module with manual optimisation, as Lightning's: the trainer's step runs inside the wrapper's forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, step: Callable[[torch.Tensor], None] | None = None) -> torch.Tensor:
        loss = self.last(torch.tanh(self.first(x))).square().mean()
        if step is not None:
            step(loss)
        return loss


@on_ranks(2)
def test_optimizer_may_step_inside_a_forward() -> None:
    for use_orig_params, policy in ((False, None), (True, ModuleWrapPolicy({nn.Linear}))):
        trained = []
        for inside in (False, True):
            model = wrap(Task(), use_orig_params=use_orig_params, wrap_policy=policy)
            params = list(model.parameters())
            optimizer = torch.optim.AdamW(params, lr=0.1)

            def step(
                loss: torch.Tensor, params: list[nn.Parameter] = params, optimizer: torch.optim.Optimizer = optimizer
            ) -> None:
                loss.backward()
                optimizer.step()
                for param in params:
                    param.grad = None
                optimizer.step()  # a no-op without gradients

            for number in range(3):
                x = torch.full((2, 4), 1.0 + number + rank())
                if inside:
                    model(x, step)
                else:
                    step(model(x))
            trained.append(full_parameters(model))
        assert_bit_equal(*trained)
