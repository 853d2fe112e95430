"""Checkpoints: loaded at any number of ranks, written atomically, verified before they load."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict as torch_state_dict
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer

from fsdp import FullyShardedDataParallel
from fsdp.checkpoint import async_save, load, load_plain, save, save_checkpoint
from fsdp.checkpoint.files import Disk
from fsdp.comm import consensus
from tests.harness.disk import FaultyDisk, Killed, on_disk
from tests.harness.models import ZOO, WithExtraState
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import on_ranks, run_ranks
from tests.harness.process_groups import record_collectives
from tests.harness.sharded import wrap
from tests.harness.states import Rich, full_state, rich, whole
from tests.harness.strategies import FULL_SHARD
from tests.harness.versions import needs_cpu_events

# -- with the optimizer ------------------------------------------------------------------------------------------------

LORA = ZOO["lora"]  # this model has frozen parameters


def trained(seed: int, mode: bool) -> tuple[FullyShardedDataParallel, Optimizer]:
    """Train with two parameter groups where parameters are visible; frozen parameters are in no group."""
    model = wrap(LORA, FULL_SHARD, mode, seed=seed)
    params = [param for param in model.parameters() if param.requires_grad]
    groups = [{"params": params[1:], "weight_decay": 0.1}, {"params": params[:1], "lr": 0.02}]
    return model, torch.optim.AdamW(groups, lr=0.01)


def steps(model: nn.Module, optimizer: Optimizer, first: int) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in (first, first + 1):
        batch = LORA.make_batch(step, 12)
        LORA.loss(model, batch.slice(rank * 12 // world_size, (rank + 1) * 12 // world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()


@on_ranks(2)
def test_save_and_load_with_the_optimizer_move_no_tensor_data(tmp_path: Path) -> None:
    """In a load the ranks agree on four numbers. A plain model loads the state; merged groups are refused.

    `test_checkpoints` trains on after a load, at any number of ranks.
    """
    for mode in (False, True):
        path, (model, optimizer), fresh = tmp_path / str(mode), trained(1, mode), trained(2, mode)
        steps(model, optimizer, 0)
        with record_collectives() as log:
            save(path, model, optimizer)
        assert all(str(record.label).startswith("agree") for record in log.records)
        with record_collectives() as log:
            load(path, *fresh)
        assert all(record.nbytes == 24 or str(record.label).startswith("agree") for record in log.records)
        expected = whole(model, optimizer)
        assert_bit_equal(whole(*fresh), expected)
        module = LORA.build(5)
        saved, named = load_plain(path), dict(module.named_parameters())
        assert saved.optimizer is not None
        groups = [{"params": [named[name] for name in group["params"]]} for group in saved.optimizer["param_groups"]]
        merged = torch.optim.AdamW([param for group in groups for param in group["params"]])
        with pytest.raises(ValueError, match=r"in one parameter group of the optimizer.*were saved in groups with"):
            load(path, module, merged)
        optimizer = torch.optim.AdamW(groups)
        load(path, module, optimizer)
        assert_bit_equal(whole(module, optimizer), expected)


@on_ranks(2)
def test_loading_an_optimizer_that_never_stepped_adds_no_state(tmp_path: Path) -> None:
    """No step is counted or run, and no state is made."""
    for mode, kind in ((False, torch.optim.Adam), (True, torch.optim.Rprop)):
        models = [wrap(LORA, FULL_SHARD, mode, seed=1) for _ in range(2)]
        optimizers = [kind([p for p in model.parameters() if p.requires_grad], lr=0.01) for model in models]
        steps(models[1], optimizers[1], 2)
        load(save(tmp_path / f"{mode}-{kind.__name__}", models[0], optimizers[0]), models[1], optimizers[1])
        for model, optimizer in zip(models, optimizers):
            steps(model, optimizer, 0)
        assert_bit_equal(whole(models[1], optimizers[1]), whole(models[0], optimizers[0]))
    module = nn.Linear(2, 2)
    lbfgs = torch.optim.LBFGS(module.parameters())  # this optimizer's steps need a closure
    load(save(tmp_path / "plain", module, lbfgs), module, lbfgs)
    assert not lbfgs.state


# -- faults ------------------------------------------------------------------------------------------------------------


def small(value: float) -> nn.Module:
    module = nn.Linear(2, 3, bias=False)
    nn.init.constant_(module.weight, value)
    return module


def value_of(root: Path) -> tuple[float, Any] | None:
    """Return the values of the latest checkpoint, which must be consistent; None if there is none."""
    module = small(-1.0)
    try:
        extra = load(root, module)
    except FileNotFoundError:
        return None
    assert len(module.weight.unique()) == 1
    return module.weight[0, 0].item(), extra


def operations(root: Path) -> int:
    """Return the number of operations of a save that removes an older checkpoint."""
    save(root, small(1.0), extra=1)
    with on_disk(disk := FaultyDisk()):
        save(root, small(2.0), extra=2, keep=1)
    return disk.count


@pytest.mark.parametrize(
    ("fresh", "names"), [(True, "names lost"), (False, "names kept"), (False, "names lost"), (False, "a rename lost")]
)
def test_a_power_loss_at_any_operation_leaves_a_complete_checkpoint(tmp_path: Path, fresh: bool, names: str) -> None:
    """Either the old or the new checkpoint is there, and leftovers do not disturb the next save."""
    old, new, seen = None if fresh else (1.0, 1), (2.0, 2), []
    for at in range(operations(tmp_path / "count") + (6 if fresh else 0)):
        root = tmp_path / str(at) / "deep" / "down"
        if not fresh:
            save(root, small(1.0), extra=1)
        disk = FaultyDisk(at)
        with on_disk(disk), contextlib.suppress(Killed):
            save(root, small(2.0), extra=2, keep=1)
        disk.lose_power(names)
        seen.append(value_of(root))
        assert seen[-1] in (old, new), at
        save(root, small(3.0), extra=3, keep=1)
        assert value_of(root) == (3.0, 3)
        assert len(os.listdir(root)) == 2, at
    assert seen == sorted(seen, key=[old, new].index)
    assert {old, new} == set(seen)


def test_an_error_at_any_operation_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    """The error names the operation and the file, the old checkpoint is there, and no other files are left."""
    for at in range(operations(tmp_path / "count")):
        root = tmp_path / str(at)
        save(root, small(1.0), extra=1)
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(root))
        with on_disk(FaultyDisk(at, full)), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                save(root, small(2.0), extra=2, keep=1)
            except OSError as error:
                assert error is full
        last = value_of(root)
        if warned:  # the new checkpoint is there, but the old one could not be removed
            assert last == (2.0, 2)
            assert "is saved, but something older" in str(warned[0].message)
        elif last == (1.0, 1):
            assert sorted(os.listdir(root)) == ["checkpoint_00000001", "latest"]
        else:
            assert last == (2.0, 2)
        save(root, small(3.0), extra=3, keep=1)
        assert value_of(root) == (3.0, 3)


class Interrupting(FaultyDisk):
    """A disk that runs a complete second save before operation number `turn`, counted from 1."""

    def __init__(self, turn: int, root: Path) -> None:
        super().__init__()
        self.turn, self.root = turn, root

    def _step(self, path: Path | None = None) -> None:
        super()._step(path)
        if self.count == self.turn:
            save(self.root, small(9.0), extra=9)


def test_concurrent_saves_get_separate_checkpoints(tmp_path: Path) -> None:
    """Each save makes a separate checkpoint, at whichever operation the second one begins."""
    save(tmp_path / "count", small(1.0))
    with on_disk(counting := FaultyDisk()):
        save(tmp_path / "count", small(2.0))
    for at in range(1, counting.count + 1):
        root = tmp_path / str(at)
        save(root, small(1.0), extra=1)
        with on_disk(Interrupting(at, root)):
            made = save(root, small(2.0), extra=2)
        assert value_of(made) == (2.0, 2)
        assert value_of(root) in ((2.0, 2), (9.0, 9))
        whole = [name for name in os.listdir(root) if name != "latest"]
        assert sorted(value_of(root / name) for name in whole) == [(1.0, 1), (2.0, 2), (9.0, 9)]


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(2, 5)).square().mean().backward()
    optimizer.step()


def refuses_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    raise ValueError("not here")


@on_ranks(2)
def test_faults_on_one_rank_are_raised_on_all(tmp_path: Path) -> None:
    """No space, read-only, no permission, bad arguments: the old checkpoint is intact, and training continues."""
    root, rank = str(tmp_path / "run"), dist.get_rank()
    torch.manual_seed(3)
    model = wrap(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    train(model)
    save(root, model, extra={"step": 1})
    before = {name: value.clone() for name, value in full_state(model).items()}
    errors = itertools.cycle(((errno.ENOSPC, OSError), (errno.EROFS, OSError), (errno.EACCES, PermissionError)))
    for failing, at in [(0, 0), (0, 1), (0, 5), (0, 9), (1, 0), (1, 1), (1, 4)]:
        number, kind = next(errors)
        disk = FaultyDisk(at, OSError(number, os.strerror(number), root)) if rank == failing else Disk()
        with on_disk(disk), pytest.raises(kind, match=f"rank {failing}: {os.strerror(number)}: {root}"):
            save(root, model, extra={"step": 2})
        dist.barrier()
        assert sorted(os.listdir(root)) == ["checkpoint_00000001", "latest"]
        dist.barrier()
    with pytest.raises(TypeError, match="on all ranks: extra is of type function, which"):
        save(root, model, extra=lambda: None if rank == 1 else 0)
    with pytest.raises(ValueError, match="rank 0: keep must be a positive number"):
        save(root, model, keep=0 if rank == 0 else 1)
    with pytest.raises(NotADirectoryError, match=r"rank 0: .*latest"):
        save(f"{root}/latest/deeper", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["note"] = range(3)
    with pytest.raises(TypeError, match=r"rank 0: optim\.param_groups\[0\]\['note'\] is of type range"):
        save(root, model, optimizer)
    del optimizer.param_groups[0]["note"]
    with pytest.raises(RuntimeError, match=r"on all ranks: .* has no optimizer state, and nothing was loaded. Load"):
        load(root, model, optimizer)
    save(f"{root}-optimizer", model, optimizer)
    for call in (save, async_save, load):
        with pytest.raises(RuntimeError, match=rf"{call.__name__}\(\) with 1 optimizer, and rank 0 with 0 optimizers"):
            call(f"{root}-optimizer", model, optimizer if rank == 1 else None)
    if rank == 1:
        optimizer.register_load_state_dict_pre_hook(refuses_state)
        optimizer.register_state_dict_post_hook(refuses_state)
    for call, kind in ((load, ValueError), (save, RuntimeError)):
        with pytest.raises(kind, match="rank 1: not here"):
            call(f"{root}-optimizer", model, optimizer)
    train(model)
    assert load(root, model) == {"step": 1}
    assert_bit_equal(full_state(model), before)
    train(model)
    assert save(root, model, keep=1).name == "checkpoint_00000002"
    dist.barrier()
    assert sorted(os.listdir(root)) == ["checkpoint_00000002", "latest"]


def interrupted_on(ranks: set[int], at: int, root: str, model: nn.Module, group: Any, step: int) -> None:
    """Interrupt some ranks: every rank raises, and the next save works and holds a single step."""
    rank = dist.get_rank()
    with on_disk(FaultyDisk(at, KeyboardInterrupt()) if rank in ranks else Disk()):
        if rank in ranks:
            with pytest.raises((KeyboardInterrupt, RuntimeError) if rank and 0 in ranks else KeyboardInterrupt):
                save(root, model, extra={"step": step}, process_group=group)
        else:
            with pytest.raises(RuntimeError, match=rf"rank {min(ranks)} left .*: KeyboardInterrupt"):
                save(root, model, extra={"step": step}, process_group=group)
    train(model)
    made = save(root, model, extra={"step": step + 1}, process_group=group)
    assert load(root, model, process_group=group) == {"step": step + 1}, made


def interrupted(*args: Any, **kwargs: Any) -> None:
    raise KeyboardInterrupt


@on_ranks(2)
def test_another_path_than_on_rank_0_warns(tmp_path: Path) -> None:
    """Rank 0's counts. The same relative path from another working directory does not warn."""
    rank = dist.get_rank()
    own, first = tmp_path / f"rank_{rank}", tmp_path / "rank_0"
    torch.manual_seed(3)
    model = wrap(nn.Linear(5, 7))

    def warned(action: Callable[[], Any]) -> Any:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            result = action()
        if rank == 0:
            assert not seen
        else:
            (message,) = (str(each.message) for each in seen)
            assert f"'{first}' on rank 0, which all ranks use, and '{own}' on this rank" in message
        return result

    saved = warned(lambda: save(own, model, extra=rank))
    assert saved.parent == first and not (tmp_path / "rank_1").exists()
    assert warned(lambda: load(own, model)) == rank
    warned(lambda: async_save(str(own), model).result())
    other = tmp_path / f"directory_{rank}"
    other.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(other)
        save("run", model)
        load("run", model)
    assert not (tmp_path / "directory_1" / "run").exists()


def interrupt_saves(root: str, group: Any) -> None:
    torch.manual_seed(3)
    model = wrap(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)), process_group=group)
    world_size, step = dist.get_world_size(), 0
    for failing in range(world_size):
        for at in (0, 1) if failing == 0 else (0,):  # a rank's file; on rank 0 the directory before it
            interrupted_on({failing}, at, root, model, group, step := step + 2)
        full = OSError(errno.ENOSPC, "full")
        fails = on_disk(FaultyDisk(0, full) if dist.get_rank() == failing else Disk())
        with fails, pytest.raises(OSError, match=f"rank {failing}: full"):
            save(root, model, process_group=group)
    interrupted_on(set(range(world_size)), 0, root, model, group, step := step + 2)
    if dist.get_rank() == 1:  # between two rounds: rank 1 has an answer and does not start the next round
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(save_checkpoint.Save, "write", interrupted)
            save(root, model, process_group=group)
    else:
        with pytest.raises(RuntimeError, match=r"rank 1 left fsdp.checkpoint.save\(\) \(take .*\): KeyboardInterrupt"):
            save(root, model, process_group=group)
    save(root, model, extra="last", keep=1, process_group=group)
    assert load(root, model, process_group=group) == "last"
    with pytest.raises(RuntimeError, match=r"rank \d: it is in fsdp.checkpoint.\w+\(\) .* in fsdp.checkpoint"):
        (save if dist.get_rank() == 0 else load)(root, model, process_group=group)
    assert load(root, model, process_group=group) == "last"


@pytest.mark.parametrize("children", [8, 1], ids=["star", "chain"])
@on_ranks(3)
def test_an_interrupted_save_raises_on_all_ranks_and_the_next_save_works(children: int, tmp_path: Path) -> None:
    """The error names the interrupted rank, and the next save holds one step on all ranks.

    Ranks talk to rank 0, as up to nine do, or each to the next one, as ranks do that are deep in a tree of many.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consensus, "FAN_OUT", children)
        interrupt_saves(str(tmp_path / "run"), dist.new_group())


# -- damage ------------------------------------------------------------------------------------------------------------


def damages(path: Path) -> Iterator[str]:
    """Damage the file in several ways in turn, and restore it."""
    content = path.read_bytes()
    for place in sorted({0, len(content) // 2, len(content) - 1}):
        flipped = bytearray(content)
        flipped[place] ^= 1
        path.write_bytes(flipped)
        yield f"flip in byte {place}"
        path.write_bytes(content[:place])
        yield f"cut to {place}"
    path.write_bytes(content + b"x")
    yield "longer"
    path.unlink()
    yield "lost"
    path.write_bytes(content)


def refuses(root: Path, what: str, *paths: Path) -> None:
    """Check that a load in one process from `root` raises an error naming one of `paths`, and changes nothing."""
    module = Rich(100)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    for read in (lambda: load(root, module), lambda: load_plain(root)):
        with pytest.raises((RuntimeError, FileNotFoundError)) as caught:
            read()
        told = str(caught.value).replace("no file 'latest'", str(root / "latest"))
        assert any(str(path) in told for path in paths), what
    assert_bit_equal(module.state_dict(), before)


def test_damage_to_any_file_is_found(tmp_path: Path) -> None:
    """A flipped bit, another length, a lost file, and a file of the checkpoint before."""
    run_ranks(2, save_two, str(tmp_path))
    older, newer = tmp_path / "checkpoint_00000001", tmp_path / "checkpoint_00000002"
    paths = [tmp_path / "latest", *sorted(newer.iterdir())]
    ranks = {"rank_0.safetensors", "rank_1.safetensors"}
    assert {path.name for path in paths} >= {"latest", "manifest.json", "index.json", *ranks}
    for path in paths:
        for what in damages(path):
            refuses(tmp_path, f"{path.name}: {what}", path)
    for path in paths[1:]:
        content = path.read_bytes()
        path.write_bytes((older / path.name).read_bytes())
        if path.read_bytes() != content:
            refuses(tmp_path, f"an older {path}", path)
        path.write_bytes(content)
    module = Rich(100)
    load(tmp_path, module)
    assert_bit_equal(module.state_dict(), Rich(2).state_dict())


def unusual(seed: int) -> WithExtraState:
    """Build tensors that a backend or a storage format may not support, and extra state that contains a tensor."""
    torch.manual_seed(seed)
    linear, number = nn.Linear(3, 2), nn.Parameter(torch.randn(()))
    module = WithExtraState({}, linear=linear, number=number, again=linear.weight)
    module.complex = nn.Parameter(torch.randn(3, dtype=torch.complex64))
    values = torch.randn(3, 5, dtype=torch.complex64)
    buffers = [
        values.real > 0,
        values.conj(),
        values.conj().imag,
        values.real.t(),
        torch.randn(8)[::2],
        torch.randn(4).to(torch.float8_e4m3fn),
        torch.randn(()).to(torch.float8_e5m2),
        torch.randint(-9, 9, (5,), dtype=torch.int8)[1:3],
        torch.empty(0, 3, dtype=torch.uint16),
    ]
    for index, buffer in enumerate(buffers):
        module.register_buffer(f"buffer{index}", buffer)
    module.extra["history"] = torch.randn(2)
    return module


def values_of(module: WithExtraState) -> dict[str, tuple[torch.dtype, list[int], Any]]:
    named = {**module.state_dict(), "history": module.extra["history"]}
    tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
    return {name: (each.dtype, list(each.shape), each.to(torch.complex128).tolist()) for name, each in tensors.items()}


def test_unusual_tensors_are_saved_and_loaded(tmp_path: Path) -> None:
    """Views, conjugates, small dtypes; a default device has no effect."""
    module = unusual(1)
    save(tmp_path, module)
    async_save(tmp_path, module).result()
    for path in ("checkpoint_00000001", "checkpoint_00000002"):
        other = unusual(2)
        with torch.device("meta"):
            load(tmp_path / path, other)
        assert values_of(other) == values_of(module)


def test_tensors_saved_on_a_device_load_on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also within extra state and groups; a tensor learning rate moves to the optimizer's device."""
    module = unusual(1)
    with monkeypatch.context() as patch:
        patch.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")
        save(tmp_path, module, torch.optim.Adam(module.parameters(), lr=torch.tensor(0.5)), extra=torch.ones(2))
    saved = load_plain(tmp_path)
    assert saved.optimizer is not None and saved.optimizer["param_groups"][0]["lr"].item() == 0.5
    other = unusual(2)
    optimizer = torch.optim.Adam(other.parameters())
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1, device="meta")
    extra = load(tmp_path, other, optimizer)
    assert extra.tolist() == [1.0, 1.0]
    assert values_of(other) == values_of(module)
    assert optimizer.param_groups[0]["lr"].device.type == "meta"


def save_two(root: str) -> None:
    for seed in (1, 2):
        save(root, rich(False, seed=seed), extra={"seed": seed, "rank": dist.get_rank()})


@on_ranks(2)
def test_a_mismatch_raises_on_every_rank_before_anything_is_loaded(tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    model = wrap(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)))
    save(root, model)
    other = wrap(nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 4), nn.Linear(2, 2)), use_orig_params=True)
    before = full_state(other)
    words = [
        "missing in the checkpoint: '2.weight', '2.bias'",
        "missing in the model: '0.bias'",
        "'1.weight' has shape (3, 7) in the checkpoint and (4, 7) in the model",
    ]
    with pytest.raises(RuntimeError) as caught:
        load(root, other)
    assert all(each in str(caught.value) for each in words), str(caught.value)
    assert_bit_equal(full_state(other), before)
    other = wrap(nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3), nn.Linear(2, 2)))
    before = full_state(other)
    load(root, other, strict=False)
    saved = full_state(model)
    assert_bit_equal(full_state(other), {name: saved.get(name, value) for name, value in before.items()})
    with pytest.raises(FileNotFoundError, match=r"rank 0: .* is no checkpoint"):
        load(f"{root}/nowhere", model)


# -- of models that others have sharded --------------------------------------------------------------------------------


def save_fully_shard(root: str) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = LORA.build(3)
    for part in (*model.children(), model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=0.01)
    steps(model, optimizer, 0)
    expected = full_state_of_fully_shard(model, optimizer)
    save(f"{root}/sync", model, optimizer)
    async_save(f"{root}/async", model, optimizer).result()
    for path in (f"{root}/sync", f"{root}/async"):
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        optimizer.state.clear()
        load(path, model, optimizer)
        assert_bit_equal(full_state_of_fully_shard(model, optimizer), expected)
        steps(model, optimizer, 2)  # with states that are DTensors as the parameters are
    return expected


def full_state_of_fully_shard(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    options = torch_state_dict.StateDictOptions(full_state_dict=True)
    of_model, of_optimizer = torch_state_dict.get_state_dict(model, optimizer, options=options)
    states = of_optimizer["state"].items()
    flat = {f"state.{name}.{key}": value for name, of in states for key, value in of.items()}
    return {key: value.clone() for key, value in {**of_model, **flat}.items()}


def load_from_fully_shard(root: str) -> list[dict[str, Tensor]]:
    told = []
    for way in ("sync", "async"):
        model, optimizer = trained(2, way == "sync")
        load(f"{root}/{way}", model, optimizer)
        every = whole(model, optimizer)
        told.append({key: value for key, value in every.items() if not key.startswith("param_groups.")})
    return told


@needs_cpu_events
def test_models_of_fully_shard_are_saved_and_load_into_wrapped_models(tmp_path: Path) -> None:
    """Every rank writes the local part of a DTensor; a wrapped model on a different number of ranks loads it."""
    run_ranks(1, save_fully_shard, str(tmp_path / "one rank"))
    expected = run_ranks(2, save_fully_shard, str(tmp_path))[0]
    for world_size in (1, 3):
        for found in run_ranks(world_size, load_from_fully_shard, str(tmp_path))[0]:
            assert_bit_equal(found, expected)
    saved = load_plain(tmp_path / "sync")
    assert_bit_equal(saved.model, {name: expected[name] for name in saved.model})
