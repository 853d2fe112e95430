"""The file of one rank: tensors in boxes, read into any other boxes, and verified by blocks."""

from __future__ import annotations

import itertools
import json
import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp.checkpoint import checksums, rank_file, safetensors
from fsdp.checkpoint.rank_file import Piece, RankFile
from fsdp.placement.boxes import Box
from tests.harness.oracle import assert_bit_equal
from tests.harness.ragged import numbered, random_tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64, torch.float8_e5m2]


def cut(whole: torch.Tensor, pieces: int, rng: random.Random) -> list[Box]:
    """Cut a tensor into boxes along its first dimension."""
    if not whole.dim():
        return [Box((), ())]
    places = sorted({0, whole.shape[0], *(rng.randint(0, whole.shape[0]) for _ in range(pieces - 1))})
    rest = tuple(whole.shape[1:])
    boxes = [Box((a, *(0 for _ in rest)), (b - a, *rest)) for a, b in itertools.pairwise(places)]
    return boxes or [Box.whole(whole.shape)]


@pytest.mark.parametrize("seed", range(8))
def test_boxes_are_read_from_a_file_with_different_boxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Tensors are read bit for bit, at any alignment of tensors and blocks, in any memory order, and with a cast."""
    rng = random.Random(seed)
    monkeypatch.setattr(rank_file, "BLOCK", rng.choice([16, 112, 1 << 20]))
    pieces, tensors = [], {}
    for number in range(12):
        whole = (numbered(*random_tensor(rng)) % 100).to(rng.choice(DTYPES))
        tensors[str(number)] = whole
        pieces += [
            Piece(str(number), tuple(whole.shape), b, Box.whole(whole.shape).cut(b, whole)) for b in cut(whole, 3, rng)
        ]
    path = tmp_path / "rank_0.safetensors"
    record = rank_file.write(path, pieces, {})
    with ExitStack() as stack:
        file = RankFile(path, record, stack)
        for to in (None, torch.float64):
            got = {
                key: torch.zeros_like(value, dtype=None if value.is_complex() else to) for key, value in tensors.items()
            }
            parts = {key: [(b, Box.whole(v.shape).cut(b, v)) for b in cut(v, 2, rng)] for key, v in got.items()}
            copies, found = file.find(parts)
            file.read(copies)
            numels = {key: sum(box.numel for box in boxes) for key, boxes in found.items()}
            assert numels == {key: value.numel() for key, value in tensors.items() if value.numel()}
            assert_bit_equal(got, {key: value.to(got[key].dtype) for key, value in tensors.items()})


def test_a_change_of_any_byte_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_file, "BLOCK", 112)
    path = tmp_path / "rank_0.safetensors"
    whole = torch.arange(101.0)
    record = rank_file.write(path, [Piece("a", (101,), Box((0,), (101,)), whole)], {"extra": [1, 2]})
    content = path.read_bytes()
    for number in range(len(content)):
        path.write_bytes(content[:number] + bytes([content[number] ^ 1 << number % 8]) + content[number + 1 :])
        words = (
            r"rank_0.safetensors (is damaged, or was not written by this package|has another checksum than when it was)"
        )
        with pytest.raises(RuntimeError, match=words), ExitStack() as stack:
            file = RankFile(path, record, stack)
            copies, _ = file.find({"a": [(Box((0,), (101,)), torch.empty(101))]})
            file.read(copies, verify_only=number % 2 == 0)
    path.write_bytes(content + b"x")
    with pytest.raises(RuntimeError, match=rf"has {len(content) + 1} bytes instead of {len(content)}"):
        RankFile(path, record, ExitStack())
    path.unlink()
    with pytest.raises(RuntimeError, match="is missing"):
        RankFile(path, record, ExitStack())


@pytest.mark.parametrize("size", [4096, 512])
def test_pages_and_sectors_that_are_exchanged_change_the_checksum(size: int) -> None:
    block = torch.randint(256, (checksums.BLOCK,), dtype=torch.uint8)
    before = checksums.block_checksum(memoryview(block.numpy()))
    places = range(0, checksums.BLOCK, size)
    for _ in range(50):
        one, other = random.sample(places, 2)
        changed = block.clone()
        changed[one : one + size], changed[other : other + size] = block[other : other + size], block[one : one + size]
        assert checksums.block_checksum(memoryview(changed.numpy())) != before
    same_bit = block.clone()
    same_bit[7::4096] ^= 128  # the highest bit of one word in each page
    assert checksums.block_checksum(memoryview(same_bit.numpy())) != before


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    """The header has the length, dtypes, shapes and offsets that safetensors readers expect."""
    path = tmp_path / "rank_0.safetensors"
    weight = torch.arange(6.0).view(2, 3)
    pieces = [Piece("w", (4, 3), Box((2, 0), (2, 3)), weight), Piece("z", (2,), Box((0,), (2,)), torch.ones(2) * 1j)]
    rank_file.write(path, pieces, {})
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__")
    assert header == {
        "w[2:4,0:3]": {"dtype": "F32", "shape": [2, 3], "data_offsets": [24 - 8, 24 + 16]},
        "z": {"dtype": "U8", "shape": [2, 8], "data_offsets": [0, 16]},
    }
    assert all(isinstance(value, str) for value in metadata.values())
    assert json.loads(metadata["fsdp.boxes"]) == {"w[2:4,0:3]": ["w", [2, 0]]}
    assert json.loads(metadata["fsdp.dtypes"]) == {"z": "complex64"}
    assert content[8 + length + 16 :] == weight.numpy().tobytes()
    entries, _ = safetensors.parse_header(content[: 8 + length], len(content))
    assert [entry.name for entry in entries] == ["z", "w[2:4,0:3]"]
