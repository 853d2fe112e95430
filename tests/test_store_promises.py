"""Guarantees of a checkpoint directory: files of users, concurrent jobs, untrusted checkpoints."""

from __future__ import annotations

import dataclasses
import enum
import errno
import json
import os
import re
import stat
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp import FullStateDictConfig, StateDictType
from fsdp import FullyShardedDataParallel as FSDP
from fsdp.checkpoint import (
    StateDictOptions,
    async_save,
    checksums,
    files,
    get_model_state_dict,
    get_optimizer_state_dict,
    load,
    load_checkpoint,
    load_plain,
    rank_file,
    save,
    set_state_dict,
)
from fsdp.checkpoint.files import Disk
from fsdp.checkpoint.rank_file import Piece
from fsdp.comm import consensus
from fsdp.placement.boxes import Box
from tests.harness.models import Net, WithExtraState
from tests.harness.pool import on_ranks, run_fresh
from tests.harness.sharded import wrap


def with_extra(value: float = 0.0, extra: Any = None) -> WithExtraState:
    return WithExtraState(extra, weight=nn.Parameter(torch.full((3,), value)))


def manifest_of(directory: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory / "manifest.json").read_text())
    del content["checksum"]
    return content


def forge(directory: Path, name: str, content: bytes, manifest: dict[str, Any] | None = None) -> None:
    """Change a file of the latest checkpoint, which is `directory`, and update the checksums."""
    (directory / name).write_bytes(content)
    manifest = manifest or manifest_of(directory)
    header = content[: 8 + int.from_bytes(content[:8], "little")] if name.endswith(".safetensors") else content
    manifest["files"][name] = [len(content), checksums.sha256(header)]
    checksum = checksums.sha256(files._dumped(manifest))
    (directory / "manifest.json").write_bytes(files._dumped({"checksum": checksum, **manifest}))
    (directory.parent / "latest").write_text(f"{directory.name} {checksum}\n")


def with_header(content: bytes, there: str, forged: str) -> bytes:
    """Replace a part of the header of a safetensors file."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].decode()
    assert there in header, header
    header = header.replace(there, forged)
    return len(header).to_bytes(8, "little") + header.encode() + content[end:]


# -- files of users ----------------------------------------------------------------------------------------------------


def test_files_and_directories_of_users_are_kept(tmp_path: Path) -> None:
    """Outside of checkpoints files and directories of any name are neither removed, renamed nor counted."""
    others = ["20240115/notes", "99999999/data", ".20240116.tmp/work", "checkpoint_00000007/config.json"]
    others += [".checkpoint_00000003", "20240117", "checkpoint_00000009", "00000002/manifest.json"]
    for name in others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    names = [save(tmp_path, with_extra(float(step)), keep=2).name for step in range(9)]
    assert names == [f"checkpoint_{number:08d}" for number in (1, 2, 3, 4, 5, 6, 8, 10, 11)]
    assert all((tmp_path / name).read_text() == name for name in others)
    ours = {"latest", *names[-2:]}
    assert set(os.listdir(tmp_path)) == {name.partition("/")[0] for name in others} | ours


@pytest.mark.parametrize("theirs", ["latest", "latest/notes"])
def test_a_users_file_or_directory_named_latest_is_not_replaced(tmp_path: Path, theirs: str) -> None:
    """A save into a directory with such a file, and without checkpoints, raises an error before it writes."""
    (tmp_path / theirs).parent.mkdir(exist_ok=True)
    (tmp_path / theirs).write_text("my notes")
    with pytest.raises(FileExistsError, match=r"expected a file that names the latest checkpoint; .*/latest"):
        save(tmp_path, with_extra())
    assert contents(tmp_path) == {theirs: b"my notes"}


def contents(folder: Path) -> dict[str, bytes]:
    """Return all files below `folder`, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_link_among_the_checkpoints_is_never_followed(tmp_path: Path) -> None:
    """A link with the name of a checkpoint, or of an unfinished one, is kept, and so is the directory it leads to. Of a
    link inside an expired checkpoint the target stays."""
    root, archive = tmp_path / "run", tmp_path / "archive"
    made = save(root, with_extra(1.0), extra="first")
    os.rename(made, archive)
    (archive / "notes.txt").write_text("mine")
    made.symlink_to(archive)
    parts = tmp_path / "parts"
    parts.mkdir()
    for name in ("manifest.json", "latest", "rank_0.safetensors", "index.json"):
        (parts / name).write_text(name)
    (root / ".checkpoint_00000002.tmp").symlink_to(parts)
    (root / "checkpoint_00000003").symlink_to(parts)
    (root / "checkpoint_00000004").symlink_to(tmp_path / "nowhere")
    links = {path.name: os.readlink(path) for path in root.iterdir() if path.is_symlink()}
    before = contents(archive), contents(parts)
    names = []
    for step in range(3):
        new = save(root, with_extra(float(step)), extra=step, keep=1)
        names.append(new.name)
        (new / "to archive").symlink_to(archive)
    assert names == [f"checkpoint_{number:08d}" for number in (5, 6, 7)]
    assert (contents(archive), contents(parts)) == before
    assert {path.name: os.readlink(path) for path in root.iterdir() if path.is_symlink()} == links
    assert set(os.listdir(root)) == {*links, names[-1], "latest"}
    assert load(made, with_extra()) == "first", "a link to a checkpoint can be loaded"


def test_a_failed_removal_is_repeated_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a checkpoint is not taken for one; the next save removes it, with the files that a user has put there."""
    first = save(tmp_path, with_extra(1.0), extra=1)
    (first / "tokenizer").mkdir()
    (first / "tokenizer" / "notes.txt").write_text("mine")

    def remove_some(disk: Disk, path: Path) -> None:
        (path / "index.json").unlink()
        raise OSError(13, "Permission denied", str(path / "rank_0.safetensors"))

    fails = pytest.warns(UserWarning, match=r"could not be removed: .*rank_0\.safetensors")
    with monkeypatch.context() as patch, fails:
        patch.setattr(Disk, "remove", remove_some)
        save(tmp_path, with_extra(2.0), extra=2, keep=1)
    assert sorted(os.listdir(tmp_path)) == [".checkpoint_00000001.tmp", "checkpoint_00000002", "latest"]
    with pytest.raises(FileNotFoundError, match="is no checkpoint"):
        load_plain(first)
    assert save(tmp_path, with_extra(3.0), extra=3, keep=1).name == "checkpoint_00000003"
    assert sorted(os.listdir(tmp_path)) == ["checkpoint_00000003", "latest"]


# -- other jobs --------------------------------------------------------------------------------------------------------


class SlowDisk(Disk):
    """A disk where publishing takes longer than the process group's timeout, and removals fail."""

    def rename(self, old: Path, new: Path) -> None:
        time.sleep(3.0 if new.name == "latest" else 0.0)
        super().rename(old, new)

    def remove(self, path: Path) -> None:
        raise OSError(39, "Directory not empty", str(path))


def saves_slowly(root: str) -> None:
    model = with_extra(float(dist.get_rank()))
    consensus.group_timeout = lambda group: timedelta(seconds=2)  # type: ignore[assignment]
    save(root, model)
    files.disk = SlowDisk()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        made = save(root, model, keep=1)
    assert [" not empty" in str(each.message) for each in warned] == [True] * (dist.get_rank() == 0)
    assert made.name == "checkpoint_00000002"


def test_a_save_may_take_longer_than_the_timeout_of_collectives(tmp_path: Path) -> None:
    """A directory that cannot be removed afterwards is no error; rank 0 warns."""
    assert run_fresh(2, saves_slowly, str(tmp_path)) == [None, None], "a rank has died"
    assert load_plain(tmp_path).model["weight"].tolist() == [0.0] * 3


def test_a_load_starts_again_if_the_checkpoint_is_replaced_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each step of the load in turn; without a second job a missing file is damage."""
    steps: list[tuple[Any, str]] = [(files, "read_manifest"), (load_checkpoint, "Contents")]
    for number, (where, name) in enumerate([*steps, (rank_file.RankFile, "__init__")]):
        root = tmp_path / str(number)
        save(root, with_extra(1.0), extra=1)
        real, replacing = getattr(where, name), [True]

        def replaced(*args: Any, real: Any = real, root: Path = root, todo: list[bool] = replacing, **kw: Any) -> Any:
            if todo:
                todo.pop()
                save(root, with_extra(2.0), extra=2, keep=1)
            return real(*args, **kw)

        for loads in (True, False):
            with monkeypatch.context() as patch:
                patch.setattr(where, name, replaced)
                assert (load(root, with_extra()) if loads else load_plain(root).extra[0]) == 2, name
            replacing.append(True)

        def lost(*args: Any, real: Any = real, root: Path = root, **kw: Any) -> Any:
            files.disk.remove(next(root.glob("checkpoint_*")))
            return real(*args, **kw)

        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=r"removed while it was read|damaged"):
            patch.setattr(where, name, lost)
            load(root, with_extra())


@on_ranks(2)
def test_ranks_that_find_different_checkpoints_of_one_name_load_none(tmp_path: Path) -> None:
    """As on disks of different machines."""
    model = nn.Linear(2, 2)
    for name in "ab":
        save(tmp_path / name, model, extra=name)
    nn.init.zeros_(model.weight)
    own, read = tmp_path / "ab"[dist.get_rank()] / "checkpoint_00000001" / files.MANIFEST, files.read_manifest
    found = mock.patch.object(files, "read_manifest", lambda path: read(own))
    with found, pytest.raises(RuntimeError, match=r"manifest\.json is another file on rank 0"):
        load(tmp_path / "a", model)
    assert not model.weight.any()


# -- other people's checkpoints ----------------------------------------------------------------------------------------


class Malicious:
    """An object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_no_code_in_a_checkpoint_is_run(tmp_path: Path) -> None:
    """Neither in extra state nor in a separate file, except with `trusted=True`."""
    root, harm = tmp_path / "run", tmp_path / "harm"
    made = save(root, with_extra(1.0, Malicious(harm)), trusted=True)
    for read in (lambda **how: load(root, with_extra(), **how), lambda **how: load_plain(root, **how)):
        with pytest.raises(RuntimeError, match=r"'model\._extra_state' holds more than .* trusted=True"):
            read()
        assert not harm.exists()
        read(trusted=True)
        harm.rmdir()
    made = save(root, with_extra(1.0))
    own = (made / "index.json").read_bytes()
    for content in (b"[]", b"{", b'{"model.weight": ["load", [3], [0], []]}', own.replace(b"[3]", b"[[]]")):
        forge(made, "index.json", content)
        with pytest.raises(RuntimeError, match=r"index\.json is damaged, or was not written by this package"):
            load(root, with_extra())


RANK = "rank_0.safetensors"
FORGED: list[tuple[str, str, str]] = [  # the file, a part of it, and a forged replacement
    ("index.json", "[[0,1,0,3,0,3]]", "[[5,1,0,3,0,3]]"),
    ("index.json", "[[0,1,0,3,0,3]]", "[[0,1,0,1e400,0,3]]"),
    ("index.json", "[[0,1,0,3,0,3]]", "[[0,1,0,3]]"),
    ("index.json", "[3]", "[1180591620717411303424]"),
    ("index.json", "[3]", "[-3]"),
    (RANK, '"shape":[3]', '"shape":[1180591620717411303424]'),
    (RANK, '"shape":[3]', '"shape":[-3]'),
    (RANK, '"shape":[3]', '"shape":[3,3]'),
    (RANK, '"F32"', '"F99"'),
    (RANK, "[0,12]", "[-12,0]"),
    (RANK, "[0,12]", "[4,16]"),
    (RANK, "[0,12]", "[0,99999999]"),
    (RANK, '"fsdp.block":"1048576"', '"fsdp.block":"0"'),
    (RANK, '"fsdp.boxes":"{}"', '"fsdp.boxes":"[]"'),
    (RANK, '"fsdp.boxes":"{}"', r'"fsdp.boxes":"{\"model.weight\":[\"model.weight\",[7]]}"'),
    (RANK, '"fsdp.dtypes":"{}"', r'"fsdp.dtypes":"{\"model.weight\":\"load\"}"'),
]


def test_forged_files_with_right_checksums_raise_an_error_that_names_the_file(tmp_path: Path) -> None:
    """Anybody can compute checksums. Whatever the numbers are, the load raises a RuntimeError that names the file."""
    made = save(tmp_path, with_extra(1.0))
    words = rf"{re.escape(str(made))}.* (was not written by this package|has 0 of 3 elements of 'model\.weight')"
    for name, there, forged in FORGED:
        true = (made / name).read_bytes()
        changed = with_header(true, there, forged) if name == RANK else true.replace(there.encode(), forged.encode())
        assert changed != true
        forge(made, name, changed)
        for read in (lambda: load(tmp_path, with_extra()), lambda: load_plain(tmp_path)):
            with pytest.raises(RuntimeError, match=words):
                read()
        forge(made, name, true)
    load(tmp_path, with_extra())


def test_elements_that_are_stored_twice_do_not_stand_for_others(tmp_path: Path) -> None:
    """Two boxes over one half of a tensor and none over the other have as many elements as the tensor."""
    made = save(tmp_path, with_extra(1.0))
    halves = [Piece("model.weight", (3,), Box((0,), (size,)), torch.full((size,), 2.0)) for size in (1, 2)]
    record = rank_file.write(made / RANK, halves, {"model._extra_state": None})
    assert record.size == (made / RANK).stat().st_size
    forge(made, RANK, (made / RANK).read_bytes())
    module = with_extra(3.0)
    for read in (lambda: load(tmp_path, module), lambda: load_plain(tmp_path)):
        with pytest.raises(RuntimeError, match=r"3 of 3 elements of 'model\.weight'.*, but some of them twice"):
            read()
    assert module.weight.tolist() == [3.0] * 3


def test_other_versions_of_the_format_are_refused(tmp_path: Path) -> None:
    made = save(tmp_path, with_extra(1.0), extra=1)
    for version in (0, 2, "1"):
        forge(made, RANK, (made / RANK).read_bytes(), manifest_of(made) | {"version": version})
        words = rf"manifest.json has version {version}, and this package reads version"
        for read in (lambda: load(tmp_path, with_extra()), lambda: load_plain(tmp_path, trusted=True)):
            with pytest.raises(RuntimeError, match=words):
                read()


# -- other optimizers --------------------------------------------------------------------------------------------------

MAKERS: dict[str, Any] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


@on_ranks(2)
def test_the_state_of_a_different_optimizer_is_refused(tmp_path: Path) -> None:
    """Otherwise the first step would raise a KeyError, or train with the wrong learning rate."""
    root = str(tmp_path)
    for saved, make in MAKERS.items():
        model = wrap(nn.Sequential(nn.Linear(3, 4)))
        optimizer = make(model.parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        del optimizer.param_groups[0]["maximize"]  # an option that older versions lack
        path = save(f"{root}/{saved}", model, optimizer)
        for name, make_other in MAKERS.items():
            other = wrap(nn.Sequential(nn.Linear(3, 4)))
            into = make_other(other.parameters())
            before = all_state(other, into)
            if {name, saved} in ({name}, {"Adam", "AdamW"}):  # the states of these two have the same form
                load(path, other, into)
                other(torch.ones(2, 3)).sum().backward()
                into.step()
                continue
            words = rf"another optimizer than {name}: .* was trained by \w+\. Nothing was loaded\. Load with the"
            with pytest.raises(RuntimeError, match=words):
                load(path, other, into)
            assert all_state(other, into) == before
            load(path, other)


class Sign(torch.optim.Optimizer):
    """An optimizer with an option that torch's classes do not have."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "scale": 1.0})


def test_a_users_optimizer_refuses_groups_that_lack_an_option(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save(tmp_path, model, torch.optim.SGD(model.parameters(), lr=0.5))
    optimizer = Sign(model.parameters())
    with pytest.raises(RuntimeError, match="another optimizer than Sign, which needs 'scale': its parameter groups"):
        load(tmp_path, model, optimizer)
    assert [(group["lr"], group["scale"]) for group in optimizer.param_groups] == [(0.1, 1.0)]


# -- values that a load refuses are refused by the save --------------------------------------------------------------


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Settings:
    width: int = 3


REFUSED: list[tuple[Any, str]] = [  # the value and the end of the error, after the path
    (Color.RED, r" is of type .*\.Color, .*: pass numbers, strings, bytes, lists"),
    (range(3), r" is of type range, "),
    ({"deep": [1, (2, Settings())]}, r"\['deep'\]\[1\]\[1\] is of type .*\.Settings"),
    (numpy.ones(2), r" is of type numpy\.ndarray, .* or dense tensors in its place"),
]


@pytest.mark.parametrize(("value", "ends"), REFUSED, ids=lambda value: type(value).__name__)
def test_a_save_refuses_values_that_a_load_would_refuse(tmp_path: Path, value: Any, ends: str) -> None:
    """In a parameter group, an optimizer's state, extra state and `extra`: a one-line error, and no leftovers."""
    module = with_extra(1.0)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9) for _ in range(3)]
    optimizers[0].param_groups[0]["note"] = value
    optimizers[1].state[module.weight] = {"momentum_buffer": torch.ones(3), "note": value}
    optimizers[2].state["all"] = {"note": value}  # type: ignore[index]
    cases: list[tuple[str, Any]] = [
        ("optim.param_groups[0]['note']", lambda: save(tmp_path, module, optimizers[0])),
        ("optim.state.weight.note", lambda: save(tmp_path, module, optimizers[1])),
        ("optim.others['all']['note']", lambda: save(tmp_path, module, optimizers[2])),
        ("model._extra_state['note']", lambda: save(tmp_path, with_extra(1.0, {"note": value}))),
        ("extra['note']", lambda: save(tmp_path, module, extra={"note": value})),
        ("extra['note']", lambda: async_save(tmp_path, module, extra={"note": value})),
    ]
    for path, saves in cases:
        with pytest.raises(TypeError, match=re.escape(path) + ends) as caught:
            saves()
        assert "\n" not in str(caught.value) and "\x1b" not in str(caught.value)
        assert os.listdir(tmp_path) == []


def test_numpy_scalars_are_saved_as_numbers(tmp_path: Path) -> None:
    """A schedule that uses NumPy sets a NumPy learning rate, and every load accepts it."""
    module = with_extra(1.0, {"scale": numpy.float32(0.5)})
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 * (1 + numpy.cos(step / 3)))
    optimizer.step()
    schedule.step()
    rate = optimizer.param_groups[0]["lr"]
    assert type(rate) is numpy.float64
    save(tmp_path, module, optimizer, extra={"loss": numpy.float64(0.1), "epoch": numpy.int64(3)})
    other, fresh = with_extra(), torch.optim.SGD(module.parameters(), lr=0.1)
    extra = load(tmp_path, other, torch.optim.SGD(other.parameters(), lr=0.3))
    assert extra == {"loss": 0.1, "epoch": 3} and other.extra == {"scale": 0.5}
    load(tmp_path, module, fresh)
    assert fresh.param_groups[0]["lr"] == rate
    assert load_plain(tmp_path).optimizer["param_groups"][0]["lr"] == rate  # type: ignore[index]


def test_tensors_that_are_not_dense_are_refused_by_name(tmp_path: Path) -> None:
    sparse = torch.eye(3).to_sparse()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(are deprecated|in beta)")  # warnings of torch
        compressed = torch.eye(3).to_sparse_csr()
        quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)
    for number, buffer in enumerate((sparse, compressed, quantized)):
        module = nn.Sequential(nn.Linear(2, 2))
        module[0].register_buffer("table", buffer)
        with pytest.raises(NotImplementedError, match=r"model\.0\.table is a tensor of dtype .* and layout .* dense"):
            save(tmp_path / str(number), module)
        assert not (tmp_path / str(number)).exists()


# -- values ------------------------------------------------------------------------------------------------------------


def test_extra_state_is_loaded_regardless_of_its_present_value(tmp_path: Path) -> None:
    """A tensor of a different size or dtype, a tensor instead of None, and None instead of a tensor."""
    kinds = [None, torch.ones(2), torch.ones(3, 4, dtype=torch.int32), {"a": torch.ones(2)}, torch.ones(()), "text"]
    for number, kind in enumerate(kinds):
        save(tmp_path / str(number), with_extra(1.0, kind))
        for now in kinds:
            module = with_extra(0.0, now)
            load(tmp_path / str(number), module)
            assert repr(module.extra) == repr(kind)
            assert module.weight.tolist() == [1.0] * 3


def test_a_view_is_saved_without_the_rest_of_its_storage(tmp_path: Path) -> None:
    """In `extra` and in extra state, at any depth."""
    big = torch.arange(100_000.0)
    made = save(tmp_path, with_extra(1.0, {"deep": [big[2:4]]}), extra={"x": big[:2], "y": [(big[5:7],)]})
    assert sum(path.stat().st_size for path in made.iterdir()) < 30_000
    module = with_extra()
    extra = load(tmp_path, module)
    assert (extra["x"].tolist(), extra["y"][0][0].tolist()) == ([0, 1], [5, 6])
    assert module.extra["deep"][0].tolist() == [2, 3]


def test_long_lists_of_numbers_take_no_room_in_the_header(tmp_path: Path) -> None:
    """The order of the data, whose numbers would make the header too large for readers of safetensors."""
    kinds: list[Any] = [
        [*range(-5, 5000)],
        tuple(number / 7 for number in range(5000)),
        [-0.0, float("inf"), float("-inf"), 5e-324] * 1000,
        [2**63 - 1, -(2**63)] * 1000,
        {*range(5000)},
        {"epochs": [[*range(1000)], [*range(1000, 2000)]]},
    ]
    made = save(tmp_path, with_extra(), extra=kinds) / RANK
    with made.open("rb") as file:
        assert int.from_bytes(file.read(8), "little") < 4000
    assert repr(load(tmp_path, with_extra())) == repr(kinds)
    odd: list[Any] = [[True] * 300, [1, 2.0] * 300, [2**63] * 300, ["1"] * 300, [None] * 300]
    save(tmp_path, with_extra(), extra=odd)
    assert repr(load(tmp_path, with_extra())) == repr(odd)


def test_errors_name_the_file_or_the_wrong_argument(tmp_path: Path) -> None:
    """An error of a full disk names the file, and a wrong argument is described."""
    full = mock.patch.object(Disk, "write", side_effect=OSError(28, "No space left on device"))
    with full, pytest.raises(OSError, match=r"No space left .*rank_0\.safetensors"):
        save(tmp_path, with_extra())
    with pytest.raises(TypeError, match=r"expected a model to save, a torch.nn.Module, but got str"):
        save(tmp_path, "x")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected a model to load into, a torch.nn.Module, but got str"):
        load(tmp_path, "x")  # type: ignore[arg-type]


def test_a_file_system_that_cannot_sync_directories_is_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A different error of the sync names the directory."""
    sync = os.fsync

    def fails_for_directories(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(code, os.strerror(code))
        sync(number)

    monkeypatch.setattr(os, "fsync", fails_for_directories)
    for code in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
        save(tmp_path / str(code), with_extra(1.0))
        assert load_plain(tmp_path / str(code)).model["weight"].tolist() == [1.0] * 3


# -- all or nothing ----------------------------------------------------------------------------------------------------


def all_state(model: nn.Module, *optimizers: torch.optim.Optimizer) -> str:
    """Return all state that a load could change."""
    values = [{name: value.tolist() for name, value in model.named_parameters()}, [b.tolist() for b in model.buffers()]]
    values.append([part.extra for part in model.modules() if isinstance(part, WithExtraState)])
    for one in optimizers:
        states = [{k: torch.as_tensor(v).tolist() for k, v in one.state[p].items()} for p in one.state]
        values.append([states, [{k: v for k, v in group.items() if k != "params"} for group in one.param_groups]])
    return repr(values)


def optimizers_after_a_step(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return two optimizers, each of some of the parameters, after a step."""
    params = list(model.parameters())
    optimizers = [torch.optim.Adam(params[number::2], lr=0.5) for number in range(2)]
    for param in params:
        param.grad = torch.ones_like(param)
    for one in optimizers:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* steps parameters that no wrapped module owns")
            one.step()
    return optimizers


def make_model(value: float, extra: str, wrapping: str) -> nn.Module:
    first, last = with_extra(value, value), with_extra(value, extra)
    module = Net(first=first, linear=nn.Linear(2, 2), last=last, table=torch.full((2,), value))
    nn.init.constant_(module.linear.weight, value)
    return wrap(module, use_orig_params=True) if wrapping == "whole" else module


def refuses(*args: Any) -> None:
    raise ValueError("this optimizer takes no such state")


@on_ranks(2)
def test_a_load_loads_all_or_nothing(tmp_path: Path) -> None:
    """A module or an optimizer refuses its state on one rank or on all; plain and wrapped."""
    root = str(tmp_path)
    rank = dist.get_rank()
    for wrapping in ("none", "whole"):
        for extra in ("bad", "good"):
            model = make_model(1.0, extra, wrapping)
            save(f"{root}/{wrapping}/{extra}", model, optimizers_after_a_step(model))
        expected = model.state_dict() if wrapping != "whole" else {}
        model = make_model(2.0, "now", wrapping)
        optimizers = optimizers_after_a_step(model)
        before = all_state(model, *optimizers)
        with pytest.raises(ValueError, match=r"this module takes no such state"):
            load(f"{root}/{wrapping}/bad", model, optimizers)
        assert all_state(model, *optimizers) == before, wrapping
        handle = optimizers[1].register_load_state_dict_post_hook(refuses) if rank == 1 else None
        with pytest.raises(ValueError, match=r"rank 1: this optimizer takes no such state"):
            load(f"{root}/{wrapping}/good", model, optimizers)
        with pytest.raises(RuntimeError, match=r"has optimizer state of '.*, which no optimizer given holds: pass"):
            load(f"{root}/{wrapping}/good", model, optimizers[0])
        assert all_state(model, *optimizers) == before, wrapping
        if handle is not None:
            handle.remove()
        if wrapping == "whole":
            expected = state = make_model(1.0, "good", wrapping).state_dict()
            with pytest.raises((ValueError, RuntimeError), match="takes no such state"):
                model.load_state_dict(state | {"last._extra_state": "bad"} if rank == 1 else state)  # on one rank alone
            assert all_state(model, *optimizers) == before
            of_rank0 = FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True))
            with of_rank0, pytest.raises((ValueError, RuntimeError), match=r"takes no such state"):
                model.load_state_dict(state | {"last._extra_state": "bad"} if rank == 0 else {})
            assert all_state(model, *optimizers) == before, "from rank 0"
        options = StateDictOptions(full_state_dict=True)
        models = (make_model(1.0, extra, wrapping) for extra in ("good", "bad"))
        good, bad = (get_model_state_dict(model, options=options) for model in models)
        state = get_optimizer_state_dict(model, optimizers, options=options)
        state["param_groups"][0]["lr"] = 0.25
        for odd in ((0, 1), (1,)) if wrapping == "whole" else ((0, 1),):  # plain models load on each rank separately
            given = bad if rank in odd else good
            with pytest.raises((ValueError, RuntimeError), match=r"takes no such state"):
                set_state_dict(model, optimizers, model_state_dict=given, optim_state_dict=state, options=options)
            assert all_state(model, *optimizers) == before, f"{wrapping}, module of ranks {odd}"
        load(f"{root}/{wrapping}/good", model, optimizers)
        assert all_state(model, *optimizers) != before
        assert repr(model.state_dict()["table"]) == repr(expected["table"])
        assert [part.extra for part in model.modules() if isinstance(part, WithExtraState)] == [1.0, "good"]


class NotYetLoaded:
    """A lazy tensor as in Lightning's state dicts: it is loaded when a torch function is called with it."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value, self.shape, self.dtype, self.is_meta = value, value.shape, value.dtype, False

    def size(self) -> torch.Size:
        return self.shape

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.value if isinstance(arg, NotYetLoaded) else arg for arg in args), **(kwargs or {}))


@on_ranks(2)
def test_lazy_tensors_of_lightning_are_loaded(tmp_path: Path) -> None:
    model = wrap(nn.Linear(5, 3))
    model.load_state_dict({"weight": NotYetLoaded(torch.ones(3, 5)), "bias": torch.zeros(3)})
    assert model.state_dict()["weight"].tolist() == [[1.0] * 5] * 3
