"""Rectangles of flat intervals by property, and tensors that hold one interval in `torch.distributed.checkpoint`."""

from __future__ import annotations

import copy
import math
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.flat.layout import contiguous_stride
from fsdp.placement.boxes import Box, rectangles
from tests.harness.pool import run_ranks
from tests.harness.ragged import numbered, random_tensor


def part(tensor: Tensor, box: Box) -> Tensor:
    return tensor[tuple(slice(offset, offset + size) for offset, size in zip(*box, strict=True))]


@pytest.mark.parametrize("seed", range(4))
def test_boxes_tile_the_interval_in_memory_order(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(1500):
        shape, stride = random_tensor(rng)
        numel = math.prod(shape)
        start, end = sorted(rng.randrange(numel + 1) for _ in range(2))
        boxes = rectangles(shape, start, end, stride)
        whole = numbered(shape, stride)
        elements = []
        for box in boxes:
            inside = part(whole, box)
            assert inside.shape == box.sizes, (shape, stride, start, end, box)
            assert inside.numel() > 0
            elements += sorted(inside.flatten().tolist())
        assert elements == list(range(start, end)), (shape, stride, start, end, boxes)
        assert len(boxes) <= max(2 * len(shape) - 1, 1)
        if stride == contiguous_stride(shape):
            assert boxes == rectangles(shape, start, end)


def test_whole_tensors_and_whole_rows_are_one_box() -> None:
    assert rectangles((4, 5, 6), 0, 120) == (Box((0, 0, 0), (4, 5, 6)),)
    assert rectangles((4, 5, 6), 30, 90) == (Box((1, 0, 0), (2, 5, 6)),)
    assert rectangles((4, 5, 6), 36, 48) == (Box((1, 1, 0), (1, 2, 6)),)
    assert rectangles((4, 5, 6), 37, 38) == (Box((1, 1, 1), (1, 1, 1)),)
    assert rectangles((), 0, 1) == (Box((), ()),)
    assert rectangles((4, 5, 6), 7, 7) == rectangles((3, 0), 0, 0) == ()
    assert len(rectangles((4, 5, 6), 1, 119)) == 5


@pytest.mark.parametrize(("start", "end"), [(-1, 3), (3, 2), (0, 13)])
def test_invalid_intervals_are_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=r"no interval of a tensor of shape \(3, 4\)"):
        rectangles((3, 4), start, end)


@pytest.mark.parametrize("seed", range(2))
def test_views_of_boxes_have_the_elements_of_the_whole_tensor(seed: int) -> None:
    rng = random.Random(100 + seed)
    for _ in range(800):
        shape, stride = random_tensor(rng)
        start, end = sorted(rng.randrange(math.prod(shape) + 1) for _ in range(2))
        local = torch.arange(start, end)
        ragged = RaggedTensor(local, shape, start, stride)
        assert (ragged.shape, ragged.dtype, ragged.end) == (shape, local.dtype, end)
        assert ragged.numel() == 0 or ragged.stride() == stride
        whole = numbered(shape, stride)
        for box, view in ragged.parts:
            assert torch.equal(view, part(whole, box))
            assert view.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


def test_copies_work_on_the_interval() -> None:
    ragged = RaggedTensor(torch.arange(7.0), (3, 4), 2)
    for made in (ragged.clone(), ragged.detach().clone(), copy.deepcopy(ragged), ragged.to("cpu", copy=True)):
        assert isinstance(made, RaggedTensor)
        assert made.interval == ragged.interval
        assert torch.equal(made.local, ragged.local)
        assert made.local.data_ptr() != ragged.local.data_ptr()
    assert ragged.detach().local.data_ptr() == ragged.local.data_ptr()
    assert ragged.cpu() is ragged
    half = ragged.to(torch.bfloat16)
    assert (half.dtype, half.local.dtype) == (torch.bfloat16, torch.bfloat16)
    other = RaggedTensor(torch.zeros(7), (3, 4), 2)
    assert other.copy_(ragged) is other
    assert torch.equal(other.local, ragged.local)
    assert "elements 2 to 9" in repr(ragged)


def test_operations_on_the_whole_tensor_raise() -> None:
    ragged = RaggedTensor(torch.arange(7.0), (3, 4), 2)
    for use in (
        lambda: ragged + 1,
        lambda: ragged.sum(),
        lambda: ragged[0],
        lambda: ragged.copy_(torch.zeros(3, 4)),
        lambda: ragged.copy_(RaggedTensor(torch.zeros(7), (3, 4), 3)),
        lambda: torch.zeros(3, 4).copy_(ragged),
    ):
        with pytest.raises(RuntimeError, match=r"holds only its elements 2 to 9, in \.local"):
            use()
    with pytest.raises(ValueError, match="flat interval"):
        RaggedTensor(torch.zeros(2, 2), (3, 4), 0)


# -- through torch.distributed.checkpoint ------------------------------------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "matrix": ((7, 5), None),
    "transposed": ((7, 5), (1, 7)),
    "image": ((3, 4, 5, 2), (40, 1, 8, 4)),
    "vector": ((11,), None),
    "one": ((1,), None),
    "scalar": ((), None),
    "empty": ((3, 0), None),
    "deep": ((2, 3, 1, 4, 3), None),
}


def wholes() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, (shape, stride) in SHAPES.items():
        memory = torch.randn(math.prod(shape), generator=generator)
        made[name] = memory.as_strided(shape, stride or contiguous_stride(shape))
    return made


def cut(values: dict[str, Tensor], rank: int, world_size: int) -> dict[str, RaggedTensor]:
    """Cut tensors into one part per rank at arbitrary offsets; some ranks hold no elements of some tensors."""
    parts = {}
    for name, whole in values.items():
        shape, stride = SHAPES[name]
        flat = torch.empty(whole.numel()).as_strided((whole.numel(),), (1,))
        flat.as_strided(whole.shape, whole.stride()).copy_(whole)
        cuts = [
            0,
            *sorted((whole.numel() * 3 * i // (2 * world_size + i)) for i in range(1, world_size)),
            whole.numel(),
        ]
        parts[name] = RaggedTensor(flat[cuts[rank] : cuts[rank + 1]].clone(), shape, cuts[rank], stride)
    return parts


def _save(folder: str) -> None:
    dcp.save({"model": cut(wholes(), dist.get_rank(), dist.get_world_size())}, checkpoint_id=folder)


def _load(folder: str) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    empty = {name: torch.full_like(whole, float("nan")) for name, whole in wholes().items()}
    parts = cut(empty, rank, world_size)
    memory = {name: ragged.local for name, ragged in parts.items()}
    dcp.load({"model": parts}, checkpoint_id=folder)
    for name, expected in cut(wholes(), rank, world_size).items():
        assert torch.equal(memory[name], expected.local), name  # loaded in place
    plain = {name: whole.clone() for name, whole in empty.items()}
    dcp.load({"model": plain}, checkpoint_id=folder)
    for name, whole in wholes().items():
        assert torch.equal(plain[name], whole), name


def _save_plain(folder: str) -> None:
    dcp.save({"model": wholes()}, checkpoint_id=folder)


def test_checkpoints_load_at_any_number_of_ranks(tmp_path: Path) -> None:
    """Save ragged and plain tensors; load at other numbers of ranks, ragged and plain."""
    for saved_at in (1, 2, 3):
        run_ranks(saved_at, _save, str(tmp_path / f"{saved_at}"))
    run_ranks(2, _save_plain, str(tmp_path / "plain"))
    for loaded_at, saved in ((1, "3"), (2, "3"), (3, "2"), (3, "1"), (3, "plain"), (1, "1")):
        run_ranks(loaded_at, _load, str(tmp_path / saved))
    payload = sum(whole.nbytes for whole in wholes().values())
    for saved_at in (1, 2, 3):
        files = list((tmp_path / f"{saved_at}").glob("*.distcp"))
        assert payload <= sum(file.stat().st_size for file in files) <= payload + 64 * 1024 * len(files)
