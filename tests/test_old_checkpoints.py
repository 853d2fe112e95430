"""Checkpoints of other programs: `fsdp.checkpoint.convert` and `fsdp convert` make checkpoints of this package."""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp.__main__ import main
from fsdp.checkpoint import convert, load, load_plain
from fsdp.checkpoint.safetensors import SafetensorsFile, laid_out, memory_of
from fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from tests.harness.old_programs import AFTER, BEFORE, Block, adamw, old_model, old_programs, train
from tests.harness.optim_states import quiet
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import run_ranks
from tests.harness.sharded import wrap


class Written(NamedTuple):
    """Checkpoints by two ranks, and the losses with which each program went on, by name of the directory."""

    folder: Path
    losses: dict[str, list[float]]


def write_on(ranks: int, folder: Path) -> Written:
    return Written(folder, run_ranks(ranks, old_programs, folder, timeout=180)[0])


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_on(2, tmp_path_factory.mktemp("of_two_ranks"))


def model_of(name: str, seed: int = 0) -> nn.Module:
    return old_model(seed, torch.channels_last if "channels_last" in name else torch.contiguous_format)


def converted(old: Path, new: Path) -> Path:
    with torch.device("meta"):
        model = model_of(old.name)
    return convert(old, new, model=model, auto_wrap_policy=ModuleWrapPolicy({Block}))


def go_on(name: str, path: Path) -> list[float]:
    """Load a checkpoint into a model of other values, with the units of the old programs, and go on training."""
    model = wrap(model_of(name, 1), wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True)
    optimizer = adamw(model)
    load(path, model, optimizer)
    return quiet(train, model, optimizer, range(BEFORE, BEFORE + AFTER))


def go_on_all(paths: dict[str, Path]) -> dict[str, list[float]]:
    return {name: go_on(name, path) for name, path in paths.items()}


@pytest.mark.parametrize(("saving", "loading"), [(2, [1, 2]), (3, [4])])
def test_training_goes_on_from_every_kind_at_any_number_of_ranks(
    saving: int, loading: list[int], written: Written, tmp_path: Path
) -> None:
    """The losses are those of the program that saved, bit for bit at two ranks, where sums have one order."""
    if saving != 2:
        (tmp_path / "old").mkdir()
        written = write_on(saving, tmp_path / "old")
    assert len(written.losses) == 18
    paths = {name: converted(written.folder / name, tmp_path / name) for name in written.losses}
    for ranks in loading:
        for name, losses in run_ranks(ranks, go_on_all, paths, timeout=180)[0].items():
            assert losses == pytest.approx(written.losses[name], rel=1e-12, abs=0), (name, ranks)
            if ranks == saving == 2:
                assert losses == written.losses[name], name


# -- incomplete, damaged and unsafe checkpoints ------------------------------------------------------------------------

LOCAL, VERL, RANKS = "fsdp1 flat, local", "fsdp2, verl", "fsdp1 flat, sharded on each rank"
DCP = "fsdp1 flat, torch.distributed.checkpoint"


class Harmful:
    """An object whose pickle makes a directory when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def lose_last(path: Path) -> None:
    sorted(path.glob("model*"))[-1].unlink()


def lose_first(path: Path) -> None:
    sorted(path.glob("model*"))[0].unlink()


def add_ranks_of_another_count(path: Path) -> None:
    for file in list(path.iterdir()):
        shutil.copy(file, path / re.sub(r"size_\d", "size_7", file.name))


def rename_the_last_rank(path: Path) -> None:
    for file in list(path.iterdir()):
        file.rename(path / re.sub(r"world_size_\d_", "", file.name).replace("rank_1", "rank_2"))
    for file in path.glob("*_rank_2.pt"):
        shutil.copy(file, path / file.name.replace("rank_2", "rank_1"))


def truncate(path: Path) -> None:
    file = max((each for each in path.iterdir() if each.suffix), key=lambda each: each.name)
    file.write_bytes(file.read_bytes()[:-100])


def truncate_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes((path / ".metadata").read_bytes()[:-100])


def put_code(path: Path) -> None:
    file = next(each for each in sorted(path.iterdir()) if "model" in each.name or each.name == "run.pt")
    torch.save({"model": {"weight": torch.ones(2), "code": Harmful(path.parent / "made")}}, file)


def put_code_in_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Harmful(path.parent / "made")))


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        (VERL, lose_last, r"has 'model_\*\.pt' for .*; missing are \[1\]"),
        (VERL, lose_first, r"missing are \[0\]"),
        (LOCAL, lose_last, r"missing are \[1\]"),
        (RANKS, lose_last, "elements of 'model.first.weight'"),
        (VERL, add_ranks_of_another_count, "once for each of 2 or 7 ranks or parts"),
        (VERL, rename_the_last_rank, r"_rank_2\.pt, of rank 2, has a DTensor over \[0, 1\]"),
        *((name, truncate, r"\.(pt|distcp)") for name in (VERL, RANKS, LOCAL, DCP, "ddp")),
        (DCP, truncate_metadata, r"\.metadata is damaged"),
        *(
            (name, put_code, r"(?s)holds other objects than tensors.*(posix|nt)\.mkdir")
            for name in (VERL, LOCAL, "ddp")
        ),
        (DCP, put_code_in_metadata, r"\.metadata is damaged, or of an unknown version: .*mkdir"),
    ],
)
def test_damaged_and_unsafe_checkpoints_are_refused(
    name: str, damage: Callable[[Path], None], words: str, written: Written, tmp_path: Path
) -> None:
    """The error names the file or the missing ranks; nothing is written, and no code is run."""
    old = Path(shutil.copytree(written.folder / name, tmp_path / name))
    damage(old)
    for new in (tmp_path / "new", tmp_path / "new.safetensors"):
        with pytest.raises((ValueError, RuntimeError), match=words):
            converted(old, new)
        assert os.listdir(tmp_path) == [name]


def save_on_meshes(folder: Path) -> dict[str, Any]:
    """Save a model with replicas, and one with tensor parallelism inside of shards; return the whole tensors."""
    expected = {}
    for name in ("replicas", "tensor parallel"):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        model = nn.Linear(6, 8)
        if name == "tensor parallel":
            model = parallelize_module(model, mesh["inner"], ColwiseParallel())
        fully_shard(model, mesh=mesh if name == "replicas" else mesh["outer"])
        state = model.state_dict()
        (folder / name).mkdir(exist_ok=True)
        torch.save(state, folder / name / f"model_world_size_4_rank_{dist.get_rank()}.pt")
        expected[name] = {key: value.full_tensor() for key, value in state.items()}
    return expected


def test_shards_on_a_mesh_of_two_dimensions_are_joined(tmp_path: Path) -> None:
    """Replicas count once. A dimension is cut first by tensor parallelism, and then by `fully_shard`."""
    for name, expected in quiet(run_ranks, 4, save_on_meshes, tmp_path)[0].items():
        assert_bit_equal(load_plain(convert(tmp_path / name, tmp_path / "new")).model, expected)


# -- files of one process ----------------------------------------------------------------------------------------------


def write_safetensors(path: Path, state: dict[str, torch.Tensor]) -> None:
    entries = laid_out((name, value.dtype, tuple(value.shape)) for name, value in state.items())
    with SafetensorsFile.create(path, entries, {}) as file:
        for entry, value in zip(entries, state.values()):
            file.write(memory_of(value.contiguous().view(-1)), entry.begin)
        file.finish()


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_prefixes_of_wrappers_are_removed(prefix: str, tmp_path: Path) -> None:
    state = old_model().state_dict()
    torch.save({prefix + name: value for name, value in state.items()}, tmp_path / "model.pt")
    assert_bit_equal(load_plain(convert(tmp_path / "model.pt", tmp_path / "new")).model, dict(state))


def test_safetensors_in_parts_are_joined(tmp_path: Path) -> None:
    """The parts have tensors of several dtypes, and an index or numbers say which parts there are."""
    state = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.randn(2, 3), "c": torch.randn(5).to(torch.bfloat16)}
    old = tmp_path / "old"
    for names in (
        ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"],
        ["x.safetensors", "y.safetensors"],
    ):
        old.mkdir()
        write_safetensors(old / names[0], {"a": state["a"], "b": state["b"]})
        write_safetensors(old / names[1], {"c": state["c"]})
        index = {"weight_map": {"a": names[0], "b": names[0], "c": names[1]}}
        (old / "model.safetensors.index.json").write_text(json.dumps(index))
        assert_bit_equal(load_plain(convert(old, tmp_path / "new")).model, state)
        one = convert(old, tmp_path / "one.safetensors")
        assert_bit_equal(load_plain(convert(one, tmp_path / "again")).model, state)
        write_safetensors(old / names[1], {"b": state["b"], "c": state["c"]})
        with pytest.raises(ValueError, match=r"have a tensor \['b'\]"):
            convert(old, tmp_path / "twice")
        (old / names[1]).write_bytes((old / names[1]).read_bytes()[:-1])
        with pytest.raises(RuntimeError, match=rf"{names[1]} is damaged, truncated or no safetensors file"):
            convert(old, tmp_path / "truncated")
        (old / names[0]).unlink()
        with pytest.raises(ValueError, match=r"missing are \[1\]|has no x\.safetensors"):
            convert(old, tmp_path / "missing")
        shutil.rmtree(old)


def trained(groups: int = 1, *, names: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with a frozen parameter, and an optimizer that has stepped."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.BatchNorm1d(3))
    model[0].bias.requires_grad_(False)
    params = [(name, param) if names else param for name, param in model.named_parameters() if param.requires_grad]
    several = [{"params": params[::2]}, {"params": params[1::2], "lr": 0.5}]
    optimizer = torch.optim.AdamW(several if groups == 2 else params)
    model(torch.randn(5, 3)).square().sum().backward()
    optimizer.step()
    return model, optimizer


def save_trained(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **others: Any) -> Path:
    torch.save({"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), **others}, path)
    return path


def resumed(path: Path, groups: int = 1) -> tuple[nn.Module, torch.optim.Optimizer]:
    model, optimizer = trained(groups)
    load(path, model, optimizer)
    return model, optimizer


def test_optimizer_by_number_needs_the_model(tmp_path: Path) -> None:
    model, optimizer = trained()
    old = save_trained(tmp_path / "run.pt", model, optimizer, epoch=3, rng=torch.ones(2))
    with pytest.raises(ValueError, match=r"by number of the parameter: pass model="):
        convert(old, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.warns(UserWarning, match=r"left out: .*'rng'"):
        new = convert(old, tmp_path / "new", model=model)
    assert load_plain(new).extra == [{"epoch": 3}]
    after, optimizer_after = resumed(new)
    assert_bit_equal(after.state_dict(), model.state_dict())
    expected = optimizer.state_dict()["state"]
    for number, states in optimizer_after.state_dict()["state"].items():
        assert_bit_equal(states, expected[number])
    with pytest.raises(ValueError, match=r"of 5 parameters in groups of \[5\], and the model has 2"):
        convert(old, tmp_path / "other", model=nn.Linear(1, 1))


def test_several_groups_by_number_need_the_optimizer_or_its_names(tmp_path: Path) -> None:
    model, optimizer = trained(2)
    old = save_trained(tmp_path / "run.pt", model, optimizer)
    with pytest.raises(ValueError, match="by number of the parameter in 2 groups: pass optimizer="):
        convert(old, tmp_path / "new", model=model)
    news = [convert(old, tmp_path / "new", model=model, optimizer=optimizer)]
    if "param_names" in trained(2, names=True)[1].param_groups[0]:
        model_of_names, optimizer_of_names = trained(2, names=True)
        model_of_names.load_state_dict(model.state_dict())
        state = optimizer.state_dict()
        for group, named in zip(state["param_groups"], optimizer_of_names.state_dict()["param_groups"]):
            group["param_names"] = named["param_names"]
        optimizer_of_names.load_state_dict(state)
        news.append(convert(save_trained(tmp_path / "names.pt", model, optimizer_of_names), tmp_path / "named"))
    for new in news:
        expected = optimizer.state_dict()
        found = resumed(new, 2)[1].state_dict()
        assert [group["lr"] for group in found["param_groups"]] == [0.001, 0.5]
        for number, states in found["state"].items():
            assert_bit_equal(states, expected["state"][number])


def test_optimizer_of_other_groups_than_those_saved_is_refused(tmp_path: Path) -> None:
    """Groups of two and three parameters have as many as groups of three and two."""
    model, optimizer = trained(2)
    old = save_trained(tmp_path / "run.pt", model, optimizer)
    params = [param for param in model.parameters() if param.requires_grad]
    other = torch.optim.AdamW([{"params": params[:2]}, {"params": params[2:]}])
    with pytest.raises(ValueError, match=r"in groups of \[3, 2\], and the optimizer given has 5 in groups of \[2, 3\]"):
        convert(old, tmp_path / "new", model=model, optimizer=other)
    with pytest.raises(ValueError, match="has other parameters"):
        convert(old, tmp_path / "new", model=model, optimizer=trained(2)[1])
    assert os.listdir(tmp_path) == ["run.pt"]


def test_states_of_another_shape_than_the_parameter_are_refused(tmp_path: Path) -> None:
    """Rank 0 of FSDP1 has saved its part alone."""
    model, optimizer = trained()
    state = optimizer.state_dict()
    state["state"][0]["exp_avg"] = torch.ones(6)
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "run.pt")
    message = re.escape("'optim.state.0.weight.exp_avg' of shape (6,) for a parameter of (4, 3)")
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "run.pt", tmp_path / "new", model=model)
    assert os.listdir(tmp_path) == ["run.pt"]


def test_equal_parts_without_a_description_are_refused(tmp_path: Path) -> None:
    """Tensors that differ between the ranks are no replicas, unless the model says that they are buffers."""
    old = tmp_path / "old"
    old.mkdir()
    model = nn.BatchNorm1d(4)
    for rank in range(2):
        torch.save({**model.state_dict(), "running_mean": torch.full([4], float(rank))}, old / f"model_rank{rank}.pt")
    message = r"several values of 'model.running_mean' of shape \(4,\).*pass model= if it is a buffer"
    with pytest.raises(ValueError, match=message):
        convert(old, tmp_path / "new")
    assert not load_plain(convert(old, tmp_path / "new", model=model)).model["running_mean"].any()
    torch.save({**model.state_dict(), "weight": torch.zeros(4)}, old / "model_rank1.pt")
    with pytest.raises(ValueError, match=r"several values of 'model\.weight'"):
        convert(old, tmp_path / "other", model=model)


def test_parts_that_two_orders_of_parameters_fit_are_refused(tmp_path: Path) -> None:
    """FSDP1's flat parameters are those of the root first, and original ones are in the order of the model."""
    for rank in range(2):
        states = {number: {"exp_avg": torch.full((8,), float(number))} for number in range(2)}
        optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        torch.save(optimizer, tmp_path / f"optim_rank{rank}.pt")
    wrapped, own = (nn.Linear(4, 4, bias=False) for _ in range(2))
    model, policy = nn.Sequential(wrapped, own), CustomPolicy(lambda module: module is wrapped)
    torch.save({"0.weight": torch.ones(4, 4), "1.weight": torch.ones(4, 4)}, tmp_path / "model.pt")
    with pytest.raises(ValueError, match="whose sizes two orders of parameters have"):
        convert(tmp_path, f"{tmp_path}_new", model=model, auto_wrap_policy=policy)
    plain = load_plain(convert(tmp_path, f"{tmp_path}_new", model=model))  # one flat parameter would have other sizes
    assert plain.optimizer is not None and (plain.optimizer["state"]["1.weight"]["exp_avg"] == 1).all()


def test_several_models_are_an_error_that_lists_them(tmp_path: Path) -> None:
    torch.save({"student": {"w": torch.ones(1)}, "teacher": {"w": torch.ones(1)}}, tmp_path / "run.pt")
    with pytest.raises(ValueError, match=r"tensors in .*'student'.*'teacher'.*one state dict of a model"):
        convert(tmp_path / "run.pt", tmp_path / "new")


# -- the command, and errors of load -----------------------------------------------------------------------------------


def test_local_state_needs_the_model_with_the_same_sizes(written: Written, tmp_path: Path) -> None:
    for name in ("fsdp1 flat, local", "fsdp1 original, local"):
        with pytest.raises(ValueError, match=r"FSDP1's flat parameters with \{.*'blocks.0': \d+.*pass model="):
            convert(written.folder / name, tmp_path / "new")
        with torch.device("meta"):
            other = old_model()
            other.first = nn.Linear(4, 3, dtype=torch.float64)
        with pytest.raises(ValueError, match="and the model given, wrapped as the keys say, has"):
            convert(written.folder / name, tmp_path / "new", model=other)
    with pytest.raises(
        ValueError, match=r"state of 3 parameters.*FSDP1 with \[112\] elements, wrapped as auto_wrap_policy= says"
    ):
        convert(written.folder / "fsdp1 flat, verl", tmp_path / "new", model=old_model())
    assert not os.listdir(tmp_path)


def test_load_names_the_kind_and_the_command(written: Written, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {"weight": torch.ones(1, 1)})
    kinds = {
        str(tmp_path): "safetensors of a model",
        str(tmp_path / "model.safetensors"): "safetensors of a model",
        "fsdp1 flat, full": "a file of torch.save()",
        "fsdp1 flat, accelerate": "a directory of torch.distributed.checkpoint",
        DCP: "a directory of torch.distributed.checkpoint",
        VERL: "files of torch.save() by each rank",
    }
    for name, kind in kinds.items():
        path = written.folder / name
        with pytest.raises(FileNotFoundError, match=re.escape(f"but {kind}: convert it by `fsdp convert {path} NEW`")):
            load(path, nn.Linear(1, 1))


def test_the_command_lists_and_converts(written: Written, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = str(written.folder / "fsdp1 original, verl"), str(tmp_path / "new")
    arguments = ["--model", "tests.harness.old_programs:old_model", "--wrap", "Block"]
    assert main(["convert", old, "--list", *arguments]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "files of torch.save() by each rank, 2 files"
    assert "  model.blocks.0.up.weight: float64 [5, 3]" in lines and "  optim.param_groups" in lines
    assert not os.listdir(tmp_path)
    assert main(["convert", old, new, *arguments]) == 0
    assert capsys.readouterr().out.startswith(f"{new}/checkpoint_00000001: fsdp checkpoint, ")
    assert main(["convert", old, f"{new}.safetensors", *arguments]) == 0
    assert capsys.readouterr().out.startswith(f"{new}.safetensors: safetensors, ")
    assert_bit_equal(load_plain(convert(f"{new}.safetensors", tmp_path / "again")).model, load_plain(new).model)
    for wrong in ([old], [old, f"{new}.pt"]):
        with pytest.raises(SystemExit):
            main(["convert", *wrong])
        assert "expected NAME.safetensors" in capsys.readouterr().err
