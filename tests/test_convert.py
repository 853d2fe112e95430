"""Conversion of checkpoints to files of foreign programs."""

from __future__ import annotations

import errno
import json
import os
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from fsdp.__main__ import main
from fsdp.checkpoint import get_state_dict, save, set_state_dict, to_dcp, to_safetensors
from fsdp.checkpoint.files import Disk
from tests.harness.models import WithExtraState
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import run_ranks
from tests.harness.sharded import wrap


def mixed(seed: int = 0) -> nn.Module:
    """Build parameters of several dtypes and memory orders, a buffer, and extra state."""
    torch.manual_seed(seed)
    return WithExtraState(
        {"calls": 3},
        linear=nn.Linear(5, 7),
        conv=nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last),
        low=nn.Parameter(torch.randn(9).to(torch.bfloat16)),
        table=torch.arange(3, dtype=torch.uint8),
    )


def trained(seed: int, *, sharded: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = mixed(seed)
    model = wrap(model, use_orig_params=True) if sharded else model
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def save_trained(root: str) -> None:
    save(root, *trained(1, sharded=True))


def test_checkpoint_is_converted_to_one_safetensors_file(tmp_path: Path) -> None:
    """The file has the plain model's names, dtypes, shapes and values, row-major and without gaps."""
    run_ranks(3, save_trained, str(tmp_path / "run"))
    path = to_safetensors(tmp_path / "run", tmp_path / "made" / "here" / "model.safetensors")
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    assert header.pop("__metadata__") == {"format": "pt"}
    expected = {k: v for k, v in trained(1, sharded=False)[0].state_dict().items() if isinstance(v, torch.Tensor)}
    names = {"F32": torch.float32, "BF16": torch.bfloat16, "U8": torch.uint8}
    found = {}
    for key, entry in header.items():
        begin, stop = entry["data_offsets"]
        data = torch.frombuffer(bytearray(content[end + begin : end + stop]), dtype=names[entry["dtype"]])
        found[key] = data.view(entry["shape"])
    assert_bit_equal(found, expected)
    assert os.listdir(path.parent) == ["model.safetensors"]


def test_damaged_checkpoint_leaves_no_converted_file(tmp_path: Path) -> None:
    made = save(tmp_path / "run", mixed())
    content = (made / "rank_0.safetensors").read_bytes()
    (made / "rank_0.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RuntimeError, match=r"rank_0\.safetensors has another checksum"):
        to_safetensors(tmp_path / "run", tmp_path / "model.safetensors")
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("step", ["create", "write", "rename"])
def test_full_disk_is_an_error_with_the_target_and_leaves_no_new_file(step: str, tmp_path: Path) -> None:
    save(tmp_path / "run", mixed())
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"before")
    name = [str(target)] if step in ("create", "rename") else []  # the other system calls have no name to report
    full = mock.patch.object(Disk, step, side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *name))
    with full, pytest.raises(OSError, match=r"No space left on device: .*model\.safetensors"):
        to_safetensors(tmp_path / "run", target)
    assert target.read_bytes() == b"before" and sorted(os.listdir(tmp_path)) == [target.name, "run"]


def test_checkpoint_is_converted_to_torchs_format(tmp_path: Path) -> None:
    """`torch.distributed.checkpoint` loads it into another model and optimizer, bit for bit."""
    run_ranks(2, save_trained, str(tmp_path / "run"))
    to_dcp(tmp_path / "run", tmp_path / "dcp")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        model, optimizer = trained(2, sharded=False)
        state = dict(zip(("model", "optim"), get_state_dict(model, optimizer)))
        dcp.load(state, checkpoint_id=tmp_path / "dcp")
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    source, source_optimizer = trained(1, sharded=False)
    expected = dict(zip(("model", "optim"), get_state_dict(source, source_optimizer)))
    assert_bit_equal(dict(model.named_parameters()), dict(source.named_parameters()))
    for name, states in expected["optim"]["state"].items():
        assert_bit_equal(state["optim"]["state"][name], states)


def test_the_command_converts_to_either_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The name of the target chooses the format; a name of another format and a missing checkpoint are errors."""
    model, _ = trained(1, sharded=False)
    save(tmp_path / "run", model)
    file, directory = tmp_path / "model.safetensors", tmp_path / "dcp"
    assert main(["convert", str(tmp_path / "run"), str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: safetensors, {file.stat().st_size:,} bytes\n"
    assert file.read_bytes() == to_safetensors(tmp_path / "run", tmp_path / "other.safetensors").read_bytes()

    assert main(["convert", str(tmp_path / "run"), str(directory)]) == 0
    nbytes = sum(path.stat().st_size for path in directory.iterdir())
    assert capsys.readouterr().out == f"{directory}: torch.distributed.checkpoint, {nbytes:,} bytes\n"
    state = {"model": {"linear.weight": torch.zeros(7, 5)}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is (disabled|unavailable)")
        dcp.load(state, checkpoint_id=directory)
    assert torch.equal(state["model"]["linear.weight"], model.get_parameter("linear.weight"))

    (tmp_path / "text").touch()
    for arguments, words in (
        (("run", "model.pt"), "expected NAME.safetensors"),
        (("run",), "but the target is missing"),
        (("run", "model.safetensors/new"), "Not a directory"),
        (("run", "model.safetensors/new.safetensors"), "Not a directory"),
        (("run", "run"), "run is the old checkpoint, or inside of it"),
        (("run", "run/new/model.safetensors"), "is the old checkpoint, or inside of it"),
        (("run", "text"), "File exists"),
        (("nothing", "x.safetensors"), "nothing is no checkpoint of another program: it does not exist"),
        (("run", "--list"), "run is no checkpoint of another program: it is one of this package"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["convert", *(str(tmp_path / name) if name != "--list" else name for name in arguments)])
        assert ended.value.code == 2 and words in capsys.readouterr().err
