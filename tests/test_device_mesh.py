"""State with a device mesh: sharded values are `DTensor`s, equal to those of torch's FSDP1, and load on any mesh."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
    checkpoint,
)
from fsdp.checkpoint import StateDictOptions, get_state_dict, set_state_dict
from tests.harness.mesh_names import mesh_of
from tests.harness.optim_states import (
    adamw,
    assert_same,
    assert_same_states,
    cross_load,
    load_model,
    model_state,
    ours,
    parts,
    quiet,
    row_major,
    same_state,
    save,
    settle_all,
    torchs,
    train,
)
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.process_groups import record_collectives

FSDP = FullyShardedDataParallel
GRIDS, HYBRID = ((2, 2), (4, 1), (1, 4)), {"strategy": "HYBRID_SHARD"}
WAYS = {1: 3, 2: 3, 3: 3, 4: 4}  # by number of ranks


def names_of(mesh: DeviceMesh) -> tuple[str, ...]:
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names


def meshes() -> dict[str, dict[str, Any]]:
    """Return the arguments for each way to wrap with a mesh of all ranks; of four ranks also with replicas."""
    ranks = dist.get_world_size()
    if ranks == 4:
        grids = [mesh_of(shape) for shape in GRIDS]
        pair = grids[0].get_group(1), grids[0].get_group(0)
        hybrid = {f"hybrid {shape}": {"device_mesh": mesh, **HYBRID} for shape, mesh in zip(GRIDS, grids)}
        return hybrid | {"hybrid pair": {"process_group": pair, "strategy": "_HYBRID_SHARD_ZERO2"}}
    grid = mesh_of((ranks, 1))
    sliced = grid[names_of(grid)[0]]
    return {
        "row": {"device_mesh": mesh_of((ranks,))},
        "slice": {"device_mesh": sliced, "strategy": "SHARD_GRAD_OP"},
        "not sharded": {"device_mesh": sliced, "strategy": "NO_SHARD"},
    }


def first_way() -> dict[str, Any]:
    """Return the first arguments of `meshes()`, with replicas if there are four ranks."""
    ranks = dist.get_world_size()
    return {"device_mesh": mesh_of(GRIDS[0]), **HYBRID} if ranks == 4 else {"device_mesh": mesh_of((ranks,))}


# -- parity with torch -------------------------------------------------------------------------------------------------


@on_ranks(3, 4)
def test_state_equals_torchs_with_the_same_mesh(world_size: int) -> None:
    """Each package loads the other's state of model and optimizer, sharded, and full under the first way."""
    modes = itertools.cycle((world_size != 3, world_size == 3))  # both modes over all cases
    for number, ((way, options), uop) in enumerate(zip(meshes().items(), modes)):
        case = f"{way}, use_orig_params={uop}"
        model, theirs = ours(uop, module=row_major(), **options), torchs(uop, module=row_major(), **options)
        optimizer, their_optimizer = train(adamw(model.parameters())), train(adamw(theirs.parameters()))
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT")[min(number, 1) :]:
            state, expected = model_state(FSDP, model, kind), model_state(TorchFSDP, theirs, kind)
            assert_same(settle_all(state), settle_all(expected), f"{case}, {kind}")
            states = save(FSDP, model, optimizer, kind, offload_to_cpu=uop)
            cross_load(model, optimizer, theirs, their_optimizer, states, f"{case}, {kind}")
            whole = "(4, 1)" in way  # torch's flat states are replicated DTensors there
            expected_kind = "FULL_STATE_DICT" if whole else kind
            expected_states = save(TorchFSDP, theirs, their_optimizer, expected_kind, offload_to_cpu=False)
            assert_same(states, expected_states, f"{case}, {kind}")
            target, their_target = (make(uop, module=row_major(1), **options) for make in (ours, torchs))
            load_model(FSDP, target, kind, expected)
            load_model(TorchFSDP, their_target, kind, state)
            for library, loaded in ((FSDP, target), (TorchFSDP, their_target)):
                assert_same(settle_all(model_state(library, loaded, kind)), settle_all(expected), case)
        is_sharded = model.sharding_strategy.name != "NO_SHARD"
        assert isinstance(state["blocks.0.linear.weight"], DTensor) is (is_sharded and "device_mesh" in options)
        if "device_mesh" in options:
            check_settings(model)


def check_settings(model: FSDP) -> None:
    local = pytest.raises(RuntimeError, match="DeviceMesh is not compatible with LOCAL_STATE_DICT")
    FSDP.set_state_dict_type(model, StateDictType.LOCAL_STATE_DICT)
    with local:
        FSDP.get_state_dict_type(model)
    if model.sharding_strategy.name != "NO_SHARD":
        for module in (model, model.blocks[0]):
            with local:
                module.state_dict()
            with local:
                module.load_state_dict({})
    FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    assert model._state_dict_config == ShardedStateDictConfig(_use_dtensor=True)
    assert model._optim_state_dict_config == ShardedOptimStateDictConfig(_use_dtensor=True)


@on_ranks(4)
def test_dtensors_are_sharded_along_the_shard_dimension() -> None:
    """Wherever it is in the mesh: flattened from several, or the first one, where torch's FSDP1 names the last."""
    grid = mesh_of((2, 2))
    flat, last = grid._flatten("all"), grid[names_of(grid)[1]]
    plain = row_major().state_dict()
    over_all = None
    for mesh, placements in ((flat, (Shard(0),)), (grid, (Shard(0), Replicate())), (last, (Replicate(), Shard(0)))):
        model = quiet(ours, True, module=row_major(), device_mesh=mesh)
        state = model_state(FSDP, model, "SHARDED_STATE_DICT")
        assert state["bias"].placements == placements
        over_all = over_all or state
        assert_same({name: value.full_tensor() for name, value in state.items()}, dict(plain), str(mesh))
        target = quiet(ours, True, module=row_major(1), device_mesh=mesh)
        load_model(FSDP, target, "SHARDED_STATE_DICT", state)
        for param, expected in zip(target.parameters(), model.parameters()):
            assert torch.equal(param, expected)
    assert over_all is not None
    cut = {name: distribute_tensor(value, mesh_of((4, 1)), [Shard(0), Replicate()]) for name, value in plain.items()}
    given = cut if dist.get_rank() == 0 else over_all
    with pytest.raises(RuntimeError, match=r"it differs from rank . in 'bias' of the root unit in rows"):
        load_model(FSDP, ours(True, device_mesh=flat), "SHARDED_STATE_DICT", given)
    elsewhere = {name: distribute_tensor(value, grid, [Shard(0), Shard(0)]) for name, value in plain.items()}
    with pytest.raises(RuntimeError, match="expected rows over one dimension of the mesh"):
        load_model(FSDP, model, "SHARDED_STATE_DICT", elsewhere)
    with pytest.raises(
        RuntimeError, match=r"a DTensor over the ranks \[0, 1, 2, 3\], which are not those of the param"
    ):
        load_model(FSDP, model, "SHARDED_STATE_DICT", over_all)


@on_ranks(2)
def test_dtensors_on_a_mesh_of_an_accelerator_are_offloaded() -> None:
    """`DTensor.from_local` would move them back to the device."""
    mesh = mesh_of((dist.get_world_size(),))
    model = ours(True, module=row_major(), device_mesh=mesh)
    mesh._device_type = "meta"  # as if it were an accelerator's
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=True)):
        assert model.state_dict()["bias"].to_local().device.type == "cpu"


# -- other meshes and numbers of ranks ---------------------------------------------------------------------------------


def trained(seed: int = 0, *, uop: bool = True, **options: Any) -> tuple[Any, Any]:
    model = ours(uop, module=row_major(seed), **options)
    return model, adamw(model.parameters()) if seed else train(adamw(model.parameters()))


def save_each_way(root: str, ways: int | None = None) -> None:
    """Save under each way to wrap, or under the first ones, and under every second way through torch's storage."""
    for number, options in enumerate(list(meshes().values())[:ways]):
        model, optimizer = trained(uop=number % 2 == 0, **options)
        if number % 2 == 0:
            quiet(torch_dcp.save, parts(model, optimizer, False), checkpoint_id=f"{root}/torch {number}")
        checkpoint.save(f"{root}/ours {number}", model, optimizer, progress=False)


def load_each_way(root: str, saved_by: int) -> None:
    """Load each saved state under the next way to wrap, and without a mesh."""
    ways = [*meshes().values(), {}]
    for number in range(WAYS[saved_by]):
        uop = (number + saved_by) % 2 == 0
        options = ways[(number + 1 + uop) % len(ways)]
        case = f"{number}, use_orig_params={uop}, {options}"
        expected = trained(uop=uop, **options)
        model, optimizer = trained(1, uop=uop, **options)
        checkpoint.load(f"{root}/ours {number}", model, optimizer, progress=False)
        same_state(model, optimizer, *expected, f"{case}, fsdp.checkpoint")
        if number % 2:
            continue
        model, optimizer = trained(1, uop=uop, **options)
        state = parts(model, optimizer, False)
        planner = torch_dcp.DefaultLoadPlanner(flatten_sharded_tensors=False)  # flattening drops tensors without rows
        quiet(
            torch_dcp.load,
            state,
            checkpoint_id=f"{root}/torch {number}",
            planner=None if "device_mesh" in options else planner,
        )
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        same_state(model, optimizer, *expected, f"{case}, torch.distributed.checkpoint")


@pytest.mark.parametrize(("saving", "loading"), [(4, 3), (3, 1)])
def test_checkpoint_of_a_mesh_loads_on_any_mesh(tmp_path: Path, saving: int, loading: int) -> None:
    """Through torch's storage and ours, on different numbers of ranks, and in a plain model."""
    run_ranks(saving, save_each_way, str(tmp_path))
    run_ranks(loading, load_each_way, str(tmp_path), saving)
    for number in range(WAYS[saving]):
        plain, expected = row_major(1), row_major()
        optimizer = adamw(plain.parameters())
        checkpoint.load(tmp_path / f"ours {number}", plain, optimizer, progress=False)
        same_state(plain, optimizer, expected, train(adamw(expected.parameters())), f"plain, {number}")


@on_ranks(4)
def test_sharded_state_loads_on_any_mesh_of_the_same_ranks() -> None:
    """Also where torch's FSDP1 refuses: replicas, other meshes, and models that are not sharded."""
    ways = {**meshes(), "row": {"device_mesh": mesh_of((4,))}, "no mesh": {}}
    for number, (source, options) in enumerate(ways.items()):
        model, optimizer = trained(uop=number % 2 == 0, **options)
        state = model_state(FSDP, model, "SHARDED_STATE_DICT")
        states = quiet(save, FSDP, model, optimizer, "SHARDED_STATE_DICT")
        for index, (target, own) in enumerate(ways.items()):
            if (index - number) % len(ways) != (3 if number % 2 else 1):  # each is a source once, and a target once
                continue
            uop = (number + len(target)) % 2 == 0
            model, optimizer = trained(1, uop=uop, **own)
            load_model(FSDP, model, "SHARDED_STATE_DICT", state)
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, states))
            same_state(model, optimizer, *trained(uop=uop, **own), f"{source} to {target}")


def fully_sharded(mesh: DeviceMesh, seed: int = 0) -> nn.Module:
    model = row_major(seed)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh)
    return model


@on_ranks(2, 4)
def test_state_moves_to_fully_shard_on_the_same_mesh_and_back(world_size: int, tmp_path: Path) -> None:
    """Its state dicts load into our models, and our checkpoints into its models."""
    root = str(tmp_path)
    for number, (way, options) in enumerate(meshes().items()):
        mesh = options.get("device_mesh")
        if mesh is None:
            continue
        theirs, (model, optimizer) = fully_sharded(mesh), trained(1, **options)
        load_model(FSDP, model, "SHARDED_STATE_DICT", theirs.state_dict())
        for param, expected in zip(model.parameters(), ours(True, module=row_major(), **options).parameters()):
            assert torch.equal(param, expected), way
        if number > 0:
            continue
        checkpoint.save(f"{root}/{way}", model, train(optimizer), progress=False)
        target = fully_sharded(mesh, 1)
        checkpoint.load(f"{root}/{way}", target, adamw(target.parameters()), progress=False)
        plain = row_major()
        train(adamw(plain.parameters()))
        for param, whole in zip(target.parameters(), plain.parameters()):
            assert torch.equal(param.full_tensor(), whole), way


# -- replicas ----------------------------------------------------------------------------------------------------------


def written(directory: Path) -> dict[int, int]:
    """Return the bytes of tensors that each rank wrote."""
    files = [(int(path.name.split("_")[2]), path.stat().st_size) for path in directory.rglob("__*.distcp")]
    for path in directory.rglob("rank_*.safetensors"):
        header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
        files.append((int(path.stem.removeprefix("rank_")), path.stat().st_size - header))
    return {rank: sum(size for each, size in files if each == rank) for rank, _ in files}


def test_replicas_share_the_writing_of_each_tensor(tmp_path: Path) -> None:
    """All files together are as large as without replicas, and alike."""
    for ranks, way in ((2, "two"), (4, "four")):
        run_ranks(ranks, save_each_way, str(tmp_path / way), 1)
    for storage in ("torch", "ours"):
        two, four = written(tmp_path / "two" / f"{storage} 0"), written(tmp_path / "four" / f"{storage} 0")
        assert sum(four.values()) < 1.1 * sum(two.values())
        assert set(four) == {0, 1, 2, 3} and max(four.values()) < 3 * min(four.values())


@on_ranks(4)
def test_state_of_rank_0_is_broadcast_to_all_replicas() -> None:
    """By options and by kinds of state dicts, in turns."""
    rank = dist.get_rank()
    for number, options in enumerate(meshes().values()):
        uop = number // 2 == 1
        expected, expected_optimizer = trained(uop=uop, **options)
        if number % 2 == 0:
            full = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)
            saved = get_state_dict(expected, expected_optimizer, options=full)
            assert (saved == ({}, {})) is (rank > 0)
            model, optimizer = trained(1, uop=uop, **options)
            set_state_dict(model, optimizer, model_state_dict=saved[0], optim_state_dict=saved[1], options=full)
            same_state(model, optimizer, expected, expected_optimizer, f"{options}, use_orig_params={uop}")
            continue
        model, optimizer = expected, expected_optimizer
        alone = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *alone):
            of_model, of_optimizer = model.state_dict(), FSDP.optim_state_dict(model, optimizer)
            assert (len(of_model) > 0) is (model.rank == 0 if model.world_size > 1 else rank == 0)  # of each replica
            assert (of_optimizer != {}) is (rank == 0)
            model, optimizer = trained(1, uop=uop, **options)
            FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT, *alone)
            model.load_state_dict(of_model if rank == 0 else {})
            optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, of_optimizer))
        same_state(model, optimizer, expected, expected_optimizer, f"{options}, use_orig_params={uop}, rank0_only")


@on_ranks(4)
def test_save_of_replicas_with_different_optimizers_raises() -> None:
    """The state of one replica would be wrong for the second."""
    for uop in (False, True):
        model, optimizer = trained(uop=uop, **first_way())
        if dist.get_rank() >= 2:
            train(optimizer, steps=1)
        for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT"):
            with pytest.raises(RuntimeError, match=r"it differs from rank [01] in state 'step' of"):
                save(FSDP, model, optimizer, kind)
        train(optimizer, steps=1 if dist.get_rank() < 2 else 0)
        save(FSDP, model, optimizer)


@on_ranks(4)
def test_scattered_state_is_sent_to_one_replica_and_copied_from_there() -> None:
    mesh = mesh_of((2, 2))
    model = ours(True, blocks=False, module=nn.Linear(100, 100, bias=False), device_mesh=mesh, **HYBRID)
    optimizer = train(adamw(model.parameters()))
    full = FSDP.full_optim_state_dict(model, optimizer)
    with record_collectives() as log:
        loadable = FSDP.scatter_full_optim_state_dict(full, model, optim=optimizer)
    assert_same_states(loadable, optimizer.state_dict(), "scattered")
    received = sum(record.output_nbytes for record in log.records if record.op != "all_reduce")
    assert received <= 2 * 100 * 100 * 4 / 2, "two states, of which a rank has half"
