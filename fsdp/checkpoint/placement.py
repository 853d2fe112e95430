"""Which rank has which elements of a tensor: the one description that all state moves by.

A rank has *boxes*: rectangles of the tensor. A flat shard holds one interval of the elements, counted in memory order,
which is a few boxes (the end of a row, whole rows, the start of a row, and so on inwards); a chunk of rows is one box,
a whole tensor is one, and so is a shard of tensor parallelism, with an offset in some other dimension. What two boxes
have in common is a box. Nothing here communicates.

The geometry of a parameter is asked for at every state dict and is always the same, so it is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch


class Box(NamedTuple):
    """A rectangle of a tensor: its first corner and its extent, one number per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    def overlap(self, other: Box) -> Box | None:
        """The elements that are in both; None if there are none."""
        return _overlap(self, other)

    def moved(self, offsets: Sequence[int]) -> Box:
        """The box as far away as these say."""
        return Box(tuple(map(sum, zip(self.offsets, offsets))), self.sizes)

    def cut(self, inner: Box, values: torch.Tensor) -> torch.Tensor:
        """The elements of ``inner``, which lies in this box, as a view of ``values``, this box's."""
        if inner == self:
            return values
        return values[tuple(slice(i - o, i - o + n) for o, i, n in zip(self.offsets, *inner))]


_KEPT = 1 << 14  # of each kind of geometry

Part = tuple[Box, torch.Tensor]  # values that a rank has, with the box's shape


def copy_parts(values: Iterable[Part], into: Iterable[Part]) -> None:
    """Copy what ``values`` have of ``into``."""
    into = list(into)
    for held, its in values:
        for needed, memory in into:
            if (both := held.overlap(needed)) is not None:
                needed.cut(both, memory).copy_(held.cut(both, its))


@dataclass(frozen=True)
class Placement:
    """The boxes of one tensor that each rank of a group has, by rank: none twice, or all of them on every rank."""

    boxes: tuple[tuple[Box, ...], ...]

    @classmethod
    @lru_cache(_KEPT)
    def whole(cls, shape: tuple[int, ...], ranks: int, only: int | None = None) -> Placement:
        """All of it on every rank, or on rank ``only`` alone; -1 is none of them."""
        return cls(tuple((Box.whole(shape),) if only in (None, rank) else () for rank in range(ranks)))

    @classmethod
    def rows(cls, shape: Sequence[int], ranges: Iterable[tuple[int, int]]) -> Placement:
        """On each rank the rows (along dimension 0) of its (start, end)."""
        rest = tuple(shape[1:])
        boxes = (Box((start, *(0 for _ in rest)), (end - start, *rest)) for start, end in ranges)
        return cls(tuple((box,) if box.numel else () for box in boxes))

    @classmethod
    @lru_cache(_KEPT)
    def chunks(cls, shape: tuple[int, ...], ranks: int) -> Placement:
        """On each rank its chunk of the rows, by the rule of ``torch.chunk``."""
        return cls.rows(shape, chunk_rows(shape[0], ranks))

    @classmethod
    @lru_cache(_KEPT)
    def intervals(
        cls,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        spans: tuple[tuple[int, int, int], ...],
        ranks: int,
        within: Box | None = None,
    ) -> Placement:
        """Of each (rank, start, end) these elements; see ``rectangles``."""
        boxes: list[tuple[Box, ...]] = [()] * ranks
        for rank, start, end in spans:
            boxes[rank] = rectangles(shape, start, end, stride, within)
        return cls(tuple(boxes))

    def inside(self, box: Box) -> Placement:
        """What of it lies in ``box``."""
        both = ((one.overlap(box) for one in boxes) for boxes in self.boxes)
        return Placement(tuple(tuple(one for one in boxes if one is not None) for boxes in both))

    def __str__(self) -> str:
        of_ranks = (
            " and ".join(str([f"{start}:{start + size}" for start, size in zip(*box)]) for box in boxes) or "nothing"
            for boxes in self.boxes
        )
        return "; ".join(f"rank {rank} has {its}" for rank, its in enumerate(of_ranks)).replace("'", "")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.boxes)

    @cached_property
    def numel(self) -> int:
        """Of all ranks together."""
        return sum(box.numel for _, boxes in self.held for box in boxes)

    @cached_property
    def held(self) -> tuple[tuple[int, tuple[Box, ...]], ...]:
        """(rank, its boxes) of those ranks that have any: at many ranks few have some of a small tensor."""
        return tuple((rank, boxes) for rank, boxes in enumerate(self.boxes) if boxes)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest box."""
        return max((box.numel for _, boxes in self.held for box in boxes), default=0)

    @cached_property
    def is_everywhere(self) -> bool:
        """Whether every rank has all that any has."""
        return all(boxes == self.boxes[0] for boxes in self.boxes)


@lru_cache(_KEPT)
def _overlap(one: Box, other: Box) -> Box | None:
    offsets = tuple(map(max, one.offsets, other.offsets))
    ends = (min(a + n, b + m) for a, n, b, m in zip(*one, *other))
    sizes = tuple(end - offset for end, offset in zip(ends, offsets))
    return Box(offsets, sizes) if all(size > 0 for size in sizes) else None


@lru_cache(_KEPT)
def overlaps(source: Placement, target: Placement, rank: int) -> tuple[tuple[int, int, Box], ...]:
    """(rank that has, rank that gets, what) of all that ``rank`` sends to others and receives from them."""
    sent = ((rank, taker, source.boxes[rank], its) for taker, its in target.held)
    received = ((giver, rank, its, target.boxes[rank]) for giver, its in source.held)
    return tuple(
        (giver, taker, box)
        for giver, taker, held, needed in (*sent, *received)
        if giver != taker
        for one in held
        for other in needed
        if (box := one.overlap(other)) is not None
    )


def chunk_rows(rows: int, count: int) -> list[tuple[int, int]]:
    """The (start, end) of each of ``count`` chunks of ``rows`` rows, by the rule of ``torch.chunk``; the last may be
    empty."""
    size = -(-rows // count)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(count)]


@lru_cache(_KEPT)
def rectangles(
    shape: tuple[int, ...],
    start: int,
    end: int,
    stride: tuple[int, ...] | None = None,
    within: Box | None = None,
) -> tuple[Box, ...]:
    """The boxes that together are the elements ``start`` to ``end`` (half-open) of a tensor, in that order.

    Elements are counted in memory order: row-major, or as ``stride``, that of a dense tensor of this shape, tells; and
    if the tensor is only a part of it, those of the box ``within``. Each box's elements lie one after the other in
    memory. There are at most ``2 * len(shape) - 1`` of them, and none for an empty interval; a scalar's only element is
    one box without dimensions.

    Raises:
        ValueError: the interval does not lie in the tensor.
    """
    if within is not None and within.sizes != shape:
        inner = dense_stride(within.sizes, memory_order(shape, stride))
        return tuple(box.moved(within.offsets) for box in rectangles(within.sizes, start, end, inner))
    if not 0 <= start <= end <= math.prod(shape):
        raise ValueError(f"elements {start} to {end} are no interval of a tensor of shape {tuple(shape)}")
    order = memory_order(shape, stride)
    boxes = []
    for offsets, sizes in _row_major([shape[dim] for dim in order], start, end):
        by_dim = sorted(zip(order, offsets, sizes))
        boxes.append(Box(tuple(offset for _, offset, _ in by_dim), tuple(size for _, _, size in by_dim)))
    return tuple(boxes)


def _row_major(shape: list[int], start: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes of ``start`` to ``end`` in a row-major tensor."""
    if start == end:
        return []
    if not shape:
        return [((), ())]
    rest = shape[1:]
    row = math.prod(rest)
    (first, into_first), (last, into_last) = divmod(start, row), divmod(end, row)
    if first == last:
        return [((first, *o), (1, *s)) for o, s in _row_major(rest, into_first, into_last)]
    boxes = []
    if into_first:
        boxes += [((first, *o), (1, *s)) for o, s in _row_major(rest, into_first, row)]
        first += 1
    if first < last:
        boxes.append(((first, *(0 for _ in rest)), (last - first, *rest)))
    boxes += [((last, *o), (1, *s)) for o, s in _row_major(rest, 0, into_last)]
    return boxes


def memory_order(shape: Sequence[int], stride: Sequence[int] | None) -> list[int]:
    """The dimensions from the outermost in memory to the innermost."""
    if stride is None:
        return list(range(len(shape)))
    return sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim], dim))


def dense_stride(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor of this shape whose dimensions lie in memory in this order, the outermost first."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def elements_of(values: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """All elements of ``values``, a box of a tensor with ``stride``, 1-D in memory order: a view if they lie so."""
    return values.permute(memory_order(values.shape, stride)).contiguous().as_strided((values.numel(),), (1,))


def box_view(local: torch.Tensor, box: Box, position: int, stride: Sequence[int]) -> torch.Tensor:
    """``box`` of a tensor with ``stride``, as a view of ``local`` (1-D), where they begin at ``position``."""
    order = memory_order(box.sizes, stride)
    flat = local[position : position + box.numel].view([box.sizes[dim] for dim in order])
    return flat if order == sorted(order) else flat.permute([order.index(dim) for dim in range(len(order))])
