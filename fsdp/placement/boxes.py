"""Placements: the rectangles (boxes) of a tensor that each rank of a group holds.

State dicts, optimizer state, checkpoints and whole-matrix optimizers all describe tensors this way. A flat shard is an
interval of elements in memory order, which is a few boxes: the end of a row, whole rows, the start of a row. A chunk of
rows is one box, and so are a whole tensor and a shard of tensor parallelism. The overlap of two boxes is a box.

There is no communication here: see :mod:`fsdp.placement.redistribute`. Results are cached, because every state dict
needs the same ones again.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch

_CACHED = 1 << 14  # results of each cached function


class Box(NamedTuple):
    """A rectangle of a tensor: the offset and the size of each dimension, in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @lru_cache(_CACHED)  # noqa: B019, a box is a value
    def overlap(self, other: Box) -> Box | None:
        """Return the box of the elements in both boxes, or None."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other))
        sizes = tuple(end - offset for end, offset in zip(ends, offsets))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def shifted(self, offsets: Sequence[int]) -> Box:
        """Return a box of the same sizes, with ``offsets`` added."""
        return Box(tuple(map(sum, zip(self.offsets, offsets))), self.sizes)

    def cut(self, inner: Box, values: torch.Tensor) -> torch.Tensor:
        """Return the elements of ``inner``, a box inside this one, as a view of ``values``, the tensor of this box."""
        if inner == self:
            return values
        return values[tuple(slice(i - o, i - o + n) for o, i, n in zip(self.offsets, *inner))]


Part = tuple[Box, torch.Tensor]  # a local tensor, and its box in the whole tensor, of the same shape


def same_cover(boxes: Iterable[Box], others: Iterable[Box]) -> bool:
    """Return True if each element lies in as many of ``boxes`` as of ``others``.

    The number of boxes over each element is a function of the element's position. Its differences along one dimension
    after the other determine it. For one box they are 1 or -1 at the corners, and 0 elsewhere, so it is enough to add
    up corners. Comparing pairs of boxes would cost the square of their number.
    """
    corners: Counter[tuple[int, ...]] = Counter()
    for sign, several in ((1, boxes), (-1, others)):
        for offsets, sizes in several:
            ends = [((offset, 1), (offset + size, -1)) for offset, size in zip(offsets, sizes)]
            for corner in itertools.product(*ends):
                corners[tuple(at for at, _ in corner)] += sign * math.prod(side for _, side in corner)
    return not any(corners.values())


def copy_parts(source: Iterable[Part], target: Sequence[Part]) -> None:
    """Copy the elements that are in both ``source`` and ``target`` to ``target``."""
    for source_box, values in source:
        for target_box, memory in target:
            if (both := source_box.overlap(target_box)) is not None:
                target_box.cut(both, memory).copy_(source_box.cut(both, values))


@dataclass(frozen=True)
class Placement:
    """The boxes of one tensor that each rank of a group holds.

    ``boxes[rank]`` are those of one rank. Either no element is on two ranks, or every rank has the same boxes.
    """

    boxes: tuple[tuple[Box, ...], ...]

    @classmethod
    @lru_cache(_CACHED)
    def whole(cls, shape: tuple[int, ...], ranks: int, only: int | None = None) -> Placement:
        """Place the whole tensor on every rank, or on rank ``only`` alone; -1 places it on no rank."""
        return cls(tuple((Box.whole(shape),) if only in (None, rank) else () for rank in range(ranks)))

    @classmethod
    def rows(cls, shape: Sequence[int], ranges: Iterable[tuple[int, int]]) -> Placement:
        """Place rows ``start`` to ``end`` (half-open, dimension 0) on each rank, by its pair in ``ranges``."""
        rest = tuple(shape[1:])
        boxes = (Box((start, *(0 for _ in rest)), (end - start, *rest)) for start, end in ranges)
        return cls(tuple((box,) if box.numel else () for box in boxes))

    @classmethod
    @lru_cache(_CACHED)
    def chunks(cls, shape: tuple[int, ...], ranks: int) -> Placement:
        """Place on each rank its chunk of the rows, by the rule of ``torch.chunk``."""
        return cls.rows(shape, chunk_rows(shape[0], ranks))

    @classmethod
    @lru_cache(_CACHED)
    def intervals(
        cls,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        spans: tuple[tuple[int, int, int], ...],
        ranks: int,
        within: Box | None = None,
    ) -> Placement:
        """Place elements ``start`` to ``end`` on ``rank`` for each (rank, start, end); see :func:`rectangles`."""
        boxes: list[tuple[Box, ...]] = [()] * ranks
        for rank, start, end in spans:
            boxes[rank] = rectangles(shape, start, end, stride, within)
        return cls(tuple(boxes))

    def inside(self, box: Box) -> Placement:
        """Return the overlap of every box with ``box``."""
        both = ((one.overlap(box) for one in boxes) for boxes in self.boxes)
        return Placement(tuple(tuple(one for one in boxes if one is not None) for boxes in both))

    def __str__(self) -> str:
        by_rank = (
            " and ".join(str([f"{start}:{start + size}" for start, size in zip(*box)]) for box in boxes) or "nothing"
            for boxes in self.boxes
        )
        return "; ".join(f"rank {rank} has {text}" for rank, text in enumerate(by_rank)).replace("'", "")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(self.boxes)

    @cached_property
    def numel(self) -> int:
        """Elements on all ranks together."""
        return sum(box.numel for _, boxes in self.held for box in boxes)

    @cached_property
    def held(self) -> tuple[tuple[int, tuple[Box, ...]], ...]:
        """(rank, boxes) of the ranks that hold any: few ranks of a large group hold parts of a small tensor."""
        return tuple((rank, boxes) for rank, boxes in enumerate(self.boxes) if boxes)

    @cached_property
    def largest(self) -> int:
        """Elements of the largest box."""
        return max((box.numel for _, boxes in self.held for box in boxes), default=0)

    @cached_property
    def is_replicated(self) -> bool:
        """True if every rank holds the same boxes."""
        return all(boxes == self.boxes[0] for boxes in self.boxes)


@lru_cache(_CACHED)
def overlaps(source: Placement, target: Placement, rank: int) -> tuple[tuple[int, int, Box], ...]:
    """List (sender, receiver, box) of everything that ``rank`` sends or receives."""
    sent = ((rank, receiver, source.boxes[rank], boxes) for receiver, boxes in target.held)
    received = ((sender, rank, boxes, target.boxes[rank]) for sender, boxes in source.held)
    return tuple(
        (sender, receiver, box)
        for sender, receiver, source_boxes, target_boxes in (*sent, *received)
        if sender != receiver
        for one in source_boxes
        for other in target_boxes
        if (box := one.overlap(other)) is not None
    )


def chunk_rows(rows: int, count: int) -> list[tuple[int, int]]:
    """Return (start, end) of each of ``count`` chunks, by the rule of ``torch.chunk``; the last chunks may be empty."""
    size = -(-rows // count)
    return [(min(rank * size, rows), min((rank + 1) * size, rows)) for rank in range(count)]


@lru_cache(_CACHED)
def rectangles(
    shape: tuple[int, ...],
    start: int,
    end: int,
    stride: tuple[int, ...] | None = None,
    within: Box | None = None,
) -> tuple[Box, ...]:
    """Cut the elements ``start`` to ``end`` (half-open) of a tensor into boxes, in that order.

    Elements are counted in memory order: row-major, or the order of ``stride`` (strides of a dense tensor of this
    shape). With ``within``, elements of that box alone are counted; offsets of the result are in the whole tensor. The
    elements of each box are contiguous in memory. There are at most ``2 * len(shape) - 1`` boxes, and none for an empty
    interval; a scalar is one box without dimensions.

    Raises:
        ValueError: the interval does not lie in the tensor.
    """
    if within is not None and within.sizes != shape:
        inner = dense_stride(within.sizes, memory_order(shape, stride))
        return tuple(box.shifted(within.offsets) for box in rectangles(within.sizes, start, end, inner))
    if not 0 <= start <= end <= math.prod(shape):
        raise ValueError(f"elements {start} to {end} are no interval of a tensor of shape {tuple(shape)}")
    order = memory_order(shape, stride)
    boxes = []
    for offsets, sizes in _row_major([shape[dim] for dim in order], start, end):
        by_dim = sorted(zip(order, offsets, sizes))
        boxes.append(Box(tuple(offset for _, offset, _ in by_dim), tuple(size for _, _, size in by_dim)))
    return tuple(boxes)


def _row_major(shape: list[int], start: int, end: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offsets, sizes) of the boxes of ``start`` to ``end`` in a row-major tensor."""
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
    """List the dimensions from the outermost in memory to the innermost."""
    if stride is None:
        return list(range(len(shape)))
    return sorted(range(len(shape)), key=lambda dim: (-stride[dim], -shape[dim], dim))


def dense_stride(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Compute the strides of a dense tensor whose dimensions have this ``order`` in memory, outermost first."""
    stride, step = [0] * len(shape), 1
    for dim in reversed(order):
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def elements_of(values: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Return the elements of a box of a tensor with ``stride``, 1-D in memory order: a view if ``values`` is dense."""
    return values.permute(memory_order(values.shape, stride)).contiguous().as_strided((values.numel(),), (1,))


def box_view(local: torch.Tensor, box: Box, position: int, stride: Sequence[int]) -> torch.Tensor:
    """View the elements of ``local`` (1-D) from ``position`` on as ``box``, a box of a tensor with ``stride``."""
    order = memory_order(box.sizes, stride)
    flat = local[position : position + box.numel].view([box.sizes[dim] for dim in order])
    return flat if order == sorted(order) else flat.permute([order.index(dim) for dim in range(len(order))])
