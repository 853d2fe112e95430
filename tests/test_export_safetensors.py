"""`save_safetensors` and `load_safetensors`: files of Hugging Face's layout, written and read by slices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import ShardingStrategy
from fsdp.checkpoint.safetensors import header_size, parse_header
from fsdp.export import load_safetensors, safetensors, save_safetensors
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import Died, run_fresh, run_ranks
from tests.harness.sharded import full_parameters, wrap
from tests.test_export import FULL, HYBRID, NONE, Block, Model, build, expected, train


def content(folder: Path) -> dict[str, Tensor]:
    """Read the files as another program does."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found = {}
    for name in names:
        data = (folder / name).read_bytes()
        size = header_size(data[:8], len(data))
        entries, metadata = parse_header(data[:size], len(data))
        assert metadata == {"format": "pt"}
        for each in entries:
            part = bytearray(data[size + each.begin : size + each.end])
            found[each.name] = torch.frombuffer(part, dtype=each.dtype).view(each.shape)
    return found


def without_ties(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name != "head.weight"}


def _saves_and_loads(folder: Path, use_orig_params: bool, strategy: ShardingStrategy, size: str) -> None:
    options: dict[str, Any] = {}
    if strategy is HYBRID:
        options["device_mesh"] = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    model = build(use_orig_params, strategy, **options)
    train(model)
    for dtype in (None, torch.bfloat16):
        to = folder / str(dtype)
        files = save_safetensors(model, to, dtype=dtype, max_shard_size=size)
        assert sorted(os.listdir(to)) == sorted(file.name for file in files)
        assert_bit_equal(content(to), without_ties(expected(model, dtype)))
    other = build(use_orig_params, strategy, **options)
    load_safetensors(other, folder / "None")
    assert_bit_equal(other.state_dict(), model.state_dict())
    load_safetensors(other, folder / "torch.bfloat16")
    low = expected(model, torch.bfloat16)
    assert_bit_equal(other.state_dict(), {n: v.to(low[n].dtype).to(v.dtype) for n, v in model.state_dict().items()})
    train(other)
    plain = Model()
    load_safetensors(plain, files_of(folder))
    assert_bit_equal(plain.state_dict(), model.state_dict())


def files_of(folder: Path) -> Path:
    """The single file where there is one, else the directory."""
    single = folder / "None" / "model.safetensors"
    return single if single.exists() else folder / "None"


@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_files_hold_what_one_process_would_write(world_size: int, use_orig_params: bool, tmp_path: Path) -> None:
    """One file or several, in the model's dtypes or in bf16, and back, into sharded and plain models."""
    run_ranks(world_size, _saves_and_loads, tmp_path / "one", use_orig_params, FULL, "5GB")
    run_ranks(world_size, _saves_and_loads, tmp_path / "several", use_orig_params, FULL, "400B")


def test_files_of_replicas(tmp_path: Path) -> None:
    run_ranks(2, _saves_and_loads, tmp_path / "not sharded", True, NONE, "400B")
    run_ranks(4, _saves_and_loads, tmp_path / "hybrid", True, HYBRID, "400B")


def _reads_its_own_ranges(folder: Path) -> None:
    model = wrap(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), FULL, True, wrap_policy=None)
    save_safetensors(model, folder)
    count, real = 0, os.preadv

    def counted(descriptor: int, buffers: Any, place: int) -> int:
        nonlocal count
        count += (got := real(descriptor, buffers, place))
        return got

    with mock.patch.object(safetensors.os, "preadv", counted):
        load_safetensors(model, folder)
    shard = sum(param.numel() for param in model.parameters()) * 4
    assert count == shard
    total: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(total, count)
    assert sum(total) == 4 * (64 * 64 + 64) * 4


def test_a_rank_reads_the_bytes_of_its_shards(tmp_path: Path) -> None:
    run_ranks(3, _reads_its_own_ranges, tmp_path)


def _into_a_model_from_the_meta_device(folder: Path) -> None:
    model = build(True)
    train(model)
    save_safetensors(model, folder, rename=lambda name: f"transformer.{name}")
    with torch.device("meta"):
        empty = Model()
    other = wrap(
        empty,
        FULL,
        True,
        wrap_policy=ModuleWrapPolicy({Block}),
        param_init_fn=lambda module: module.to_empty(device="cpu", recurse=False),
    )
    load_safetensors(other, folder, rename=lambda name: f"transformer.{name}")
    assert_bit_equal(full_parameters(other), {**full_parameters(model), "ignored": model.module.ignored.detach()})


def test_a_model_from_the_meta_device_and_other_names(tmp_path: Path) -> None:
    run_ranks(2, _into_a_model_from_the_meta_device, tmp_path)


# -- what does not fit -------------------------------------------------------------------------------------------------


def _refuses(folder: Path) -> None:
    model = build(True)
    save_safetensors(model, folder / "good")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(FileExistsError, match=r"good has model\.safetensors already"):
        save_safetensors(model, folder / "good")
    with pytest.raises(ValueError, match="must be a number of bytes, or like '5GB'"):
        save_safetensors(model, folder / "bad size", max_shard_size="much")
    with pytest.raises(ValueError, match=r"gives .* the same name 'x'"):
        save_safetensors(model, folder / "bad names", rename=lambda name: "x")
    data = (folder / "good" / "model.safetensors").read_bytes()
    size = header_size(data[:8], len(data))
    header = json.loads(data[8:size])
    lies = {
        "cut": data[:-4],
        "cut in the header": data[: size - 10],
        "no header": b"\xff" * 40,
        "gap": with_header(data, header | {"ignored": {**header["ignored"], "data_offsets": [4, 8]}}),
        "large": with_header(data, header | {"ignored": {**header["ignored"], "shape": [3 << 40]}}),
        "dtype": with_header(data, header | {"ignored": {**header["ignored"], "dtype": "F7"}}),
    }
    if dist.get_rank() == 0:
        for name, lie in lies.items():
            (folder / name).write_bytes(lie)
    dist.barrier()
    for name in lies:
        with pytest.raises(ValueError, match=f"{name} is damaged, or no safetensors file"):
            load_safetensors(model, folder / name)
    with pytest.raises(FileNotFoundError):
        load_safetensors(model, folder / "nowhere")
    with pytest.raises(FileNotFoundError, match="has neither"):
        load_safetensors(model, folder)

    other = wrap(nn.Sequential(nn.Linear(3, 3)), FULL, True)
    with pytest.raises(
        RuntimeError, match=r"missing in the files: '0\.weight', '0\.bias'; missing in the model: 'embed"
    ):
        load_safetensors(other, folder / "good")
    load_safetensors(other, folder / "good", strict=False)
    names = iter(["embed.weight", "ignored"])
    found = {"0.weight": next(names), "0.bias": next(names)}
    with pytest.raises(RuntimeError, match=r"'embed.weight' has shape \(13, 7\) in model.safetensors and \(3, 3\)"):
        load_safetensors(other, folder / "good", rename=found.__getitem__, strict=False)
    assert_bit_equal(model.state_dict(), before)
    load_safetensors(model, folder / "good")
    train(model)


def with_header(data: bytes, header: dict[str, Any]) -> bytes:
    size = header_size(data[:8], len(data))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[size:]


def test_what_does_not_fit_is_named_on_all_ranks_and_changes_nothing(tmp_path: Path) -> None:
    run_ranks(2, _refuses, tmp_path)


def _disk_is_full_on_rank_1(folder: Path) -> None:
    model = build(True)

    def full(*_: Any) -> int:
        raise OSError(28, "No space left on device")

    pwrite = mock.patch.object(safetensors.os, "pwrite", full if dist.get_rank() == 1 else os.pwrite)
    with pwrite, pytest.raises(OSError, match="No space left on device"):
        save_safetensors(model, folder, max_shard_size="400B")
    dist.barrier()
    assert not os.listdir(folder)
    save_safetensors(model, folder, max_shard_size="400B")
    assert_bit_equal(content(folder), without_ties(expected(model, None)))


def test_an_error_while_writing_is_one_on_all_ranks_and_leaves_no_file(tmp_path: Path) -> None:
    run_ranks(2, _disk_is_full_on_rank_1, tmp_path)


def _dies_while_writing(folder: Path) -> None:
    model = build(True)

    def die(*_: Any) -> int:
        os._exit(3)

    pwrite = mock.patch.object(safetensors.os, "pwrite", die if dist.get_rank() == 1 else os.pwrite)
    with pwrite, pytest.raises(RuntimeError):
        save_safetensors(model, folder, max_shard_size="400B")


def test_a_rank_that_dies_while_writing_leaves_no_file_with_a_final_name(tmp_path: Path) -> None:
    results = run_fresh(2, _dies_while_writing, tmp_path)
    assert isinstance(results[1], Died)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("model")]
