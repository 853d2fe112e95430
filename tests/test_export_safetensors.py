"""`save_safetensors` and `load_safetensors`: files in Hugging Face's layout, written and read in slices."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp import FullyShardedDataParallel, ShardingStrategy, checkpoint
from fsdp.checkpoint.safetensors import LENGTH, parse_header
from fsdp.export import load_safetensors, safetensors, save_safetensors
from fsdp.wrap import ModuleWrapPolicy
from tests.harness.exports import Block, Model, build, expected, train
from tests.harness.oracle import assert_bit_equal
from tests.harness.pool import Died, of_all_ranks, on_ranks, run_fresh
from tests.harness.sharded import full_parameters, wrap
from tests.harness.strategies import FULL, HYBRID, NONE


def header_size(data: bytes) -> int:
    return LENGTH + int.from_bytes(data[:LENGTH], "little")


def content(folder: Path) -> dict[str, Tensor]:
    """Read the files as an independent program would."""
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found = {}
    for name in names:
        data = (folder / name).read_bytes()
        size = header_size(data)
        entries, metadata = parse_header(data[:size], len(data))
        assert metadata == {"format": "pt"}
        for each in entries:
            part = bytearray(data[size + each.begin : size + each.end])
            found[each.name] = torch.frombuffer(part, dtype=each.dtype).view(each.shape)
    return found


def without_ties(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if name != "head.weight"}


CASES = [
    (1, True, "5GB", FULL),
    (2, False, "5GB", FULL),
    (3, True, "400B", FULL),
    (3, False, "400B", FULL),
    (2, True, "400B", NONE),
    (4, True, "400B", HYBRID),
]


@pytest.mark.parametrize("world_size, use_orig_params, size, strategy", CASES)
@on_ranks("world_size")
def test_files_equal_those_of_a_plain_model_and_can_be_loaded(
    world_size: int, use_orig_params: bool, size: str, strategy: ShardingStrategy, tmp_path: Path
) -> None:
    """One file or several, in the model's dtypes or in bf16, loaded into sharded and plain models."""
    folder = tmp_path
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
    target = build(use_orig_params, strategy, **options)
    load_safetensors(target, folder / "None")
    assert_bit_equal(target.state_dict(), model.state_dict())
    load_safetensors(target, folder / "torch.bfloat16")
    low = expected(model, torch.bfloat16)
    assert_bit_equal(target.state_dict(), {n: v.to(low[n].dtype).to(v.dtype) for n, v in model.state_dict().items()})
    train(target)
    plain, single = Model(), folder / "None" / "model.safetensors"
    load_safetensors(plain, single if single.exists() else single.parent)
    assert_bit_equal(plain.state_dict(), model.state_dict())


@on_ranks(3)
def test_rank_reads_only_the_bytes_of_its_shards(tmp_path: Path) -> None:
    model = wrap(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))), FULL, True, wrap_policy=None)
    save_safetensors(model, tmp_path)
    count, real = 0, os.preadv

    def counted(descriptor: int, buffers: Any, offset: int) -> int:
        nonlocal count
        count += (got := real(descriptor, buffers, offset))
        return got

    with mock.patch.object(safetensors.os, "preadv", counted):
        load_safetensors(model, tmp_path)
    shard = sum(param.numel() for param in model.parameters()) * 4
    data = (tmp_path / "model.safetensors").read_bytes()
    assert count == shard + 8 + header_size(data)  # the length is in the header, and read before it
    assert sum(of_all_ranks(shard)) == 4 * (64 * 64 + 64) * 4


@on_ranks(2)
def test_load_into_a_model_from_the_meta_device_with_renamed_keys(tmp_path: Path) -> None:
    model = build(True)
    train(model)
    save_safetensors(model, tmp_path, rename=lambda name: f"transformer.{name}")
    target = from_meta(with_scratch)
    load_safetensors(target, tmp_path, rename=lambda name: f"transformer.{name}")
    assert_bit_equal(full_parameters(target), {**full_parameters(model), "ignored": model.module.ignored.detach()})
    assert_bit_equal(dict(target.named_buffers()), dict(model.named_buffers()))


def empty(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)


def with_scratch(module: nn.Module) -> None:
    """Allocate the module's tensors, and compute the buffer that no file has, as the constructor does."""
    empty(module)
    if isinstance(module, Block):
        module.register_buffer("scratch", torch.arange(1, 3) / torch.arange(1, 3), persistent=False)


def from_meta(init: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
    with torch.device("meta"):
        module = Model()
    return wrap(module, FULL, True, wrap_policy=ModuleWrapPolicy({Block}), param_init_fn=init)


@on_ranks(2)
def test_buffers_that_no_file_has_are_named_if_they_hold_arbitrary_memory(tmp_path: Path) -> None:
    """Buffers that `param_init_fn`, rank 0 or the program has written are not named, nor are those in the files."""
    save_safetensors(build(True), tmp_path)
    checkpoint.save(tmp_path, build(True))
    names = ", ".join(f"'blocks.{number}.scratch'" for number in range(3))
    loads: list[Callable[[Any], Any]] = [
        lambda model: checkpoint.load(tmp_path, model),
        lambda model: load_safetensors(model, tmp_path),
    ]
    for load in loads:
        target = from_meta(empty)
        with pytest.warns(UserWarning, match=f"the files do not have the buffers {names}, and .*param_init_fn"):
            load(target)
    for number, block in enumerate(target.module.blocks):
        if number:
            block.scratch.fill_(1)
        else:
            block.module.scratch = torch.ones(2)
    for load in loads:
        load(target)
    load_safetensors(from_meta(lambda module: with_scratch(module.to_empty(device="cpu", recurse=False))), tmp_path)
    with torch.device("cpu" if dist.get_rank() == 0 else "meta"):
        module = Model()
    init = empty if dist.get_rank() else None
    target = wrap(
        module, FULL, True, wrap_policy=ModuleWrapPolicy({Block}), param_init_fn=init, sync_module_states=True
    )
    load_safetensors(target, tmp_path)
    assert all(block.scratch.tolist() == [1, 1] for block in target.module.blocks)


@on_ranks(1)
def test_load_into_a_plain_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    """A copy into its tensors would do nothing."""
    save_safetensors(wrap(nn.Linear(3, 2), FULL, True), tmp_path)
    empty = nn.Linear(3, 2, device="meta")
    with pytest.raises(RuntimeError, match=r"'weight' is on the meta device: call to_empty.* compute the buffers"):
        load_safetensors(empty, tmp_path)
    load_safetensors(empty.to_empty(device="cpu"), tmp_path)
    assert empty.weight.abs().sum() > 0


# -- errors ------------------------------------------------------------------------------------------------------------


def with_header(data: bytes, header: dict[str, Any]) -> bytes:
    size = header_size(data)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[size:]


@on_ranks(2)
def test_invalid_files_and_names_raise_on_all_ranks_and_change_nothing(tmp_path: Path) -> None:
    model = build(True)
    save_safetensors(model, tmp_path / "good")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(FileExistsError, match=r"good has model\.safetensors already"):
        save_safetensors(model, tmp_path / "good")
    with pytest.raises(ValueError, match="max_shard_size must be a number of bytes, such as 80GB"):
        save_safetensors(model, tmp_path / "bad size", max_shard_size="much")
    with pytest.raises(ValueError, match=r"gives .* the same name 'x'"):
        save_safetensors(model, tmp_path / "bad names", rename=lambda name: "x")
    data = (tmp_path / "good" / "model.safetensors").read_bytes()
    size = header_size(data)
    header = json.loads(data[8:size])
    damaged = {
        "cut": data[:-4],
        "no header": b"\xff" * 40,
        "gap": with_header(data, header | {"ignored": {**header["ignored"], "data_offsets": [4, 8]}}),
        "dtype": with_header(data, header | {"ignored": {**header["ignored"], "dtype": "F7"}}),
    }
    if dist.get_rank() == 0:
        for name, corrupt in damaged.items():
            (tmp_path / name).write_bytes(corrupt)
    dist.barrier()
    for name in damaged:
        with pytest.raises(ValueError, match=f"{name} is damaged, or no safetensors file"):
            load_safetensors(model, tmp_path / name)
    with pytest.raises(FileNotFoundError):
        load_safetensors(model, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="has neither"):
        load_safetensors(model, tmp_path)

    target = wrap(nn.Sequential(nn.Linear(3, 3)), FULL, True)
    with pytest.raises(
        RuntimeError, match=r"missing in the files: '0\.weight', '0\.bias'; missing in the model: 'embed"
    ):
        load_safetensors(target, tmp_path / "good")
    load_safetensors(target, tmp_path / "good", strict=False)
    found = {"0.weight": "embed.weight", "0.bias": "ignored"}
    with pytest.raises(RuntimeError, match=r"'embed.weight' has shape \(13, 7\) in model.safetensors and \(3, 3\)"):
        load_safetensors(target, tmp_path / "good", rename=found.__getitem__, strict=False)
    plain = nn.BatchNorm1d(3)
    save_safetensors(plain, tmp_path / "counted")
    plain.num_batches_tracked = torch.tensor(True)
    with pytest.raises(RuntimeError, match=r"'num_batches_tracked' is of torch.int64 in .* and of torch.bool in the"):
        load_safetensors(plain, tmp_path / "counted")
    assert_bit_equal(model.state_dict(), before)
    load_safetensors(model, tmp_path / "good")
    train(model)


@on_ranks(2)
def test_error_while_writing_raises_on_all_ranks_and_leaves_no_file(tmp_path: Path) -> None:
    model, writes = build(True), iter([OSError(28, "No space left on device")])

    def full_once(*args: Any) -> int:
        for error in writes:
            raise error
        return real(*args)

    real = os.pwrite
    pwrite = mock.patch.object(safetensors.os, "pwrite", full_once if dist.get_rank() == 1 else os.pwrite)
    with pwrite, pytest.raises(OSError, match=r"No space left on device: .*model-0000\d-of-"):
        save_safetensors(model, tmp_path, max_shard_size="400B")
    dist.barrier()
    assert not os.listdir(tmp_path)
    save_safetensors(model, tmp_path, max_shard_size="400B")
    assert_bit_equal(content(tmp_path), without_ties(expected(model, None)))


def save_while_rank_1_dies(folder: Path) -> None:
    model = build(True)

    def die(*_: Any) -> int:
        os._exit(3)

    pwrite = mock.patch.object(safetensors.os, "pwrite", die if dist.get_rank() == 1 else os.pwrite)
    with pwrite, pytest.raises(RuntimeError):
        save_safetensors(model, folder, max_shard_size="400B")


def test_rank_that_dies_while_writing_leaves_no_file_with_a_final_name(tmp_path: Path) -> None:
    results = run_fresh(2, save_while_rank_1_dies, tmp_path)
    assert isinstance(results[1], Died)
    assert not [name for name in os.listdir(tmp_path) if name.startswith("model")]
