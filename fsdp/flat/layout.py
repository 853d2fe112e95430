"""The arithmetic of flattening: where each parameter lies in the flat vector, and which part of it each rank owns.

No tensors and no process groups here. The flat vector holds the parameters in order, each in its memory
order, each starting on an alignment boundary; behind the last one it is padded to ``world_size`` equal shards::

    | p0 ........ |gap| p1 ..... | p2 ... |gap| p3 .......... | padding |
    | shard 0         | shard 1           | shard 2                     |      (all of the same length)

All positions and lengths are in elements unless a name says bytes. All ranges are half-open, and an empty range is a
range like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, TypeVar

import torch

from fsdp.placement.boxes import dense_stride, memory_order

Computed = TypeVar("Computed")


class ParamSpec(NamedTuple):
    """A parameter before it has an offset."""

    name: str  # fully qualified, relative to the unit
    shape: tuple[int, ...]  # ``()`` for a scalar, and sizes may be 0
    stride: tuple[int, ...] | None = None  # None for row-major, else of a dense tensor (channels_last, transposed)
    aliases: tuple[str, ...] = ()  # other names of a shared parameter


@dataclass(frozen=True)
class ParamRecord:
    """A parameter in a flat vector: ``flat[offset:end]`` holds its elements in memory order, and is the parameter when
    viewed with ``shape`` and ``stride``."""

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    numel: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that one rank owns: the elements ``start`` to ``end``, counted in memory order, which
    lie in the rank's shard from ``shard_offset`` on. If the rank owns no element, ``start == end``, and slicing by
    these numbers gives an empty slice."""

    start: int
    end: int
    shard_offset: int

    @property
    def numel(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class FlatLayout:
    """The layout of one flat vector: parameters, dtypes and shards. Made by :meth:`build`; equal on every rank.

    Attributes:
        params: in the order of the flat vector.
        dtype, compute_dtype, reduce_dtype: of the shard, of the gathered vector, of the gradient reduction.
        world_size: number of shards.
        numel: end of the last parameter, gaps before it included.
        shard_numel: length of every shard.
    """

    params: tuple[ParamRecord, ...]
    dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    world_size: int
    numel: int
    shard_numel: int

    @classmethod
    def build(
        cls,
        specs: Iterable[ParamSpec],
        *,
        dtype: torch.dtype,
        world_size: int,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        param_alignment: int = 1,
        shard_alignment: int = 1,
    ) -> FlatLayout:
        """Lay out ``specs`` in the order given. Equal units, such as the blocks of a model, share one layout.

        Args:
            dtype: of the shard.
            compute_dtype: of the gathered vector; None means ``dtype``.
            reduce_dtype: of the gradient reduction; None means ``compute_dtype``.
            param_alignment: bytes; in the gathered vector, the offset of every parameter is a multiple of this.
            shard_alignment: bytes; the length of the shard is a multiple of this in each of the three dtypes. With 1,
                shards are those of ``torch.chunk``, the last ones padded to the length of the first. With more,
                parameters are aligned in each of the three dtypes as well, since the vector travels in all of them.

        Raises:
            ValueError: two parameters or aliases have the same name, ``world_size`` is less than 1, a size is negative,
                strides are not those of a dense tensor, or an alignment is not a power of two.
        """
        compute_dtype = compute_dtype or dtype
        reduce_dtype = reduce_dtype or compute_dtype
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, but got {world_size}")
        smallest = min(dtype.itemsize, compute_dtype.itemsize, reduce_dtype.itemsize)
        param_itemsize = smallest if shard_alignment > 1 else compute_dtype.itemsize
        param_multiple = _elements(param_alignment, param_itemsize, "param_alignment")
        shard_multiple = _elements(shard_alignment, smallest, "shard_alignment")
        return _laid_out(tuple(specs), (dtype, compute_dtype, reduce_dtype), world_size, param_multiple, shard_multiple)

    @cached_property
    def _computed(self) -> dict[Hashable, Any]:
        return {}

    def once(self, what: Hashable, compute: Callable[[], Computed]) -> Computed:
        """Return ``compute()``, a property ``what`` of the layout, computed once for all units with this layout."""
        if what not in self._computed:
            self._computed[what] = compute()
        computed: Computed = self._computed[what]
        return computed

    @property
    def padded_numel(self) -> int:
        """Length of the flat vector with all padding: ``world_size * shard_numel``."""
        return self.world_size * self.shard_numel

    @property
    def facts(self) -> str:
        """Numbers of elements and dtypes, for comparisons and errors."""
        dtypes = f"{self.dtype}, computed in {self.compute_dtype}, reduced in {self.reduce_dtype}"
        return f"{self.numel} elements ({self.shard_numel} per rank) of {dtypes}"

    @cached_property
    def gaps(self) -> tuple[tuple[int, int], ...]:
        """The (start, end) ranges of the padded vector that belong to no parameter, ascending, without empty ones."""
        starts = [0, *(param.end for param in self.params)]
        ends = [*(param.offset for param in self.params), self.padded_numel]
        return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start < end)

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Return the (start, end) of the shard of ``rank`` in the padded vector.

        Raises:
            ValueError: the rank is not in the group.
        """
        if not 0 <= rank < self.world_size:
            raise ValueError(f"expected a rank in [0, {self.world_size}), but got {rank}")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def shard_gaps(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the (start, end) ranges of the shard of ``rank`` that belong to no parameter, counted in the shard.

        Raises:
            ValueError: the rank is not in the group.
        """
        shard_start, shard_end = self.shard_range(rank)
        inside = [(max(start, shard_start), min(end, shard_end)) for start, end in self.gaps]
        return tuple((start - shard_start, end - shard_start) for start, end in inside if start < end)

    def shard_runs(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the (start, end) ranges between the ``shard_gaps`` of ``rank``: the elements of parameters."""
        gaps = self.shard_gaps(rank)
        starts, ends = [0, *(end for _, end in gaps)], [*(start for start, _ in gaps), self.shard_numel]
        return tuple((start, end) for start, end in zip(starts, ends, strict=True) if start < end)

    def piece(self, index: int, rank: int) -> Piece:
        """Return the part of ``params[index]`` that ``rank`` owns.

        Raises:
            ValueError: the rank is not in the group.
        """
        param = self.params[index]
        shard_start, shard_end = self.shard_range(rank)
        start = _clamp(shard_start - param.offset, param.numel)
        end = _clamp(shard_end - param.offset, param.numel)
        return Piece(start, end, shard_offset=_clamp(param.offset - shard_start, self.shard_numel))

    def pieces(self, rank: int) -> tuple[Piece, ...]:
        """Return the part of each parameter that ``rank`` owns, in the order of ``params``."""
        return self.once(("pieces", rank), lambda: tuple(self.piece(i, rank) for i in range(len(self.params))))

    def owners(self, index: int) -> tuple[tuple[int, int, int], ...]:
        """Return the (rank, start, end) of every rank's part of ``params[index]``, without empty ones."""

        def compute() -> tuple[tuple[int, int, int], ...]:
            param = self.params[index]
            ranks = range(param.offset // self.shard_numel, -(-param.end // self.shard_numel)) if param.numel else ()
            pieces = ((rank, self.piece(index, rank)) for rank in ranks)
            return tuple((rank, piece.start, piece.end) for rank, piece in pieces)

        return self.once(("owners", index), compute)


@lru_cache(maxsize=64)
def _laid_out(
    specs: tuple[ParamSpec, ...],
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    world_size: int,
    param_multiple: int,
    shard_multiple: int,
) -> FlatLayout:
    params: list[ParamRecord] = []
    names: set[str] = set()
    numel = 0
    for spec in specs:
        for name in (spec.name, *spec.aliases):
            if name in names:
                raise ValueError(f"expected every parameter to have names of its own, but {name!r} comes twice")
            names.add(name)
        record = _placed(spec, offset=_round_up(numel, param_multiple))
        params.append(record)
        numel = record.end
    shard_numel = _round_up(-(-numel // world_size), shard_multiple)
    return FlatLayout(tuple(params), *dtypes, world_size=world_size, numel=numel, shard_numel=shard_numel)


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major tensor of this shape, as torch counts them (a size of 0 counts as 1)."""
    return dense_stride(shape, range(len(shape)))


def _placed(spec: ParamSpec, offset: int) -> ParamRecord:
    shape = tuple(spec.shape)
    if any(size < 0 for size in shape):
        raise ValueError(f"expected sizes of at least 0, but {spec.name!r} has shape {shape}")
    stride = contiguous_stride(shape) if spec.stride is None else tuple(spec.stride)
    if not _is_dense(shape, stride):
        raise ValueError(
            f"expected the strides of a dense tensor, but {spec.name!r} with shape {shape} has stride {stride}; "
            "make the parameter contiguous first"
        )
    return ParamRecord(spec.name, tuple(spec.aliases), shape, stride, numel=math.prod(shape), offset=offset)


def _is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether the strides visit each of the ``numel`` elements from the first on exactly once."""
    if len(shape) != len(stride):
        return False
    dense = dense_stride(shape, memory_order(shape, stride))
    # of a size of 1 the stride is never used, and torch allows any
    return 0 in shape or all(size == 1 or one == other for size, one, other in zip(shape, stride, dense))


def _elements(alignment: int, itemsize: int, argument: str) -> int:
    """Return the least number of elements, at least 1, whose multiples are aligned to ``alignment`` bytes."""
    # Powers of two only: then a multiple in a small dtype is also one in every larger dtype.
    if alignment < 1 or alignment & (alignment - 1):
        raise ValueError(f"{argument} must be a power of two (bytes), but got {alignment}")
    return -(-alignment // itemsize)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _clamp(number: int, most: int) -> int:
    return max(0, min(number, most))
