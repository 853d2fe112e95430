"""Properties of boxes and of `redistribute`, which moves elements from one placement to another."""

from __future__ import annotations

import math
import os
import random
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdp.comm import collectives
from fsdp.placement.boxes import Box, Part, Placement, chunk_rows, same_cover
from fsdp.placement.redistribute import Channel, Item, redistribute
from tests.harness.pool import on_ranks
from tests.harness.ragged import random_tensor

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)
FORMS = ("first", "last", "rows", "columns", "intervals", "whole")


def numbered(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    whole = torch.empty_strided(shape, stride, dtype=dtype)
    return whole.copy_((torch.arange(math.prod(shape)) % 113).view(shape))


def placed(rng: random.Random, form: str, shape: tuple[int, ...], stride: tuple[int, ...], ranks: int) -> Placement:
    numel = math.prod(shape)
    if form in ("first", "last"):
        return Placement.whole(shape, ranks, only=0 if form == "first" else ranks - 1)
    if form == "intervals":
        cuts = [0, *sorted(rng.randrange(numel + 1) for _ in range(ranks - 1)), numel]
        return Placement.intervals(shape, stride, tuple((rank, *cuts[rank : rank + 2]) for rank in range(ranks)), ranks)
    if form == "rows" and shape:
        return Placement.rows(shape, chunk_rows(shape[0], ranks))
    return columns(shape, ranks) if form == "columns" else Placement.whole(shape, ranks)


def columns(shape: tuple[int, ...], ranks: int) -> Placement:
    """Cut as tensor parallelism does, along the second dimension. A tensor with one dimension is replicated."""
    if len(shape) < 2:
        return Placement.whole(shape, ranks)
    boxes = []
    for start, end in chunk_rows(shape[-1], ranks):
        box = Box((*(0 for _ in shape[:-1]), start), (*shape[:-1], end - start))
        boxes.append((box,) if box.numel else ())
    return Placement(tuple(boxes))


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_boxes_with_the_same_cover_have_each_element_as_often(dims: int) -> None:
    """Boxes that overlap, or miss elements, are noticed, whatever their number of elements."""
    rng, seen = random.Random(dims), set()

    def some_boxes() -> list[Box]:
        def box() -> Box:
            offsets = tuple(rng.randint(0, 2) for _ in range(dims))
            return Box(offsets, tuple(rng.randint(0, 3 - offset) for offset in offsets))

        return [box() for _ in range(rng.randint(0, 3))]

    def counts(boxes: list[Box]) -> torch.Tensor:
        whole = Box.whole((3,) * dims)
        found = torch.zeros(whole.sizes)
        for box in boxes:
            whole.cut(box, found).add_(1)
        return found

    for _ in range(500):
        one, other = some_boxes(), some_boxes()
        if rng.random() < 0.3 and dims:  # one box in two parts
            at, (offsets, sizes) = rng.randint(0, 3), Box.whole((3,) * dims)
            one, other = (
                [Box(offsets, (at, *sizes[1:])), Box((at, *offsets[1:]), (3 - at, *sizes[1:]))],
                [Box.whole(sizes)],
            )
        expected = torch.equal(counts(one), counts(other))
        assert same_cover(one, other) is expected
        seen.add(expected)
    assert seen == {True, False}


def bits(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(values.numel(), dtype=values.dtype).copy_(values.reshape(-1)).view(torch.uint8)


def parts_of(placement: Placement, whole: torch.Tensor, rank: int) -> list[Part]:
    outer = Box.whole(whole.shape)
    return [(box, outer.cut(box, whole)) for box in placement.boxes[rank]]


def memory_for(rng: random.Random, placement: Placement, whole: torch.Tensor, rank: int) -> list[Part]:
    """Return contiguous memory, or memory with gaps between the rows."""
    parts: list[Part] = []
    for box in placement.boxes[rank]:
        sizes = [*box.sizes[:-1], box.sizes[-1] + rng.randrange(3)] if box.sizes else []
        memory = torch.zeros(sizes, dtype=whole.dtype)
        parts.append((box, memory[..., : box.sizes[-1]] if box.sizes else memory))
    return parts


@pytest.mark.parametrize("seed", range(2))
@on_ranks(3)
def test_redistribute_moves_any_placement_into_any_placement(seed: int) -> None:
    """Whole tensors, rows, columns and flat intervals, in any dtype and memory order, by messages, directly or both."""
    rng, own = random.Random(seed), random.Random(dist.get_rank())
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.new_group()  # ranks send different numbers of messages
    for way in ("native", "direct", "auto"):
        os.environ["FSDP_COLLECTIVES"] = way
        with mock.patch.object(collectives, "DIRECT_MIN_NBYTES", 100):
            channel = Channel(group, CPU)
        pairs = [(one, other) for one in FORMS[:-1] for other in FORMS]
        checks = []
        for source_form, target_form in rng.sample(pairs, 12):
            items = []
            for _ in range(rng.randrange(1, 6)):
                (shape, stride), dtype = random_tensor(rng), rng.choice(DTYPES)
                source = placed(rng, source_form, shape, stride, size)
                target = placed(rng, target_form, shape, stride, size)
                whole = numbered(shape, stride, dtype)
                gets = memory_for(own, target, whole, rank)
                items.append(Item(dtype, stride, source, target, parts_of(source, whole, rank), gets))
                checks.append((gets, parts_of(target, whole, rank), source, target))
            redistribute(items, channel, "move", limit=rng.choice([40, 1000, math.inf]))
        channel.flush()
        for gets, expected, source, target in checks:
            for (box, memory), (_, values) in zip(gets, expected, strict=True):
                assert torch.equal(bits(memory), bits(values)), (way, box, str(source), str(target))
    os.environ["FSDP_COLLECTIVES"] = "auto"
    dist.destroy_process_group(group)
