"""How much memory a rank holds at most in a training step, and what it receives: the step, run through without tensors.

[Note: The memory of a step]
What is gone through is a step of a training that is under way, with gradients set to None before: units run in the
order of the model's modules (or of a forward that was tried), the backward in the reverse. When a full or reduce buffer
gets memory, and from whom it goes back, is what ``runtime/residency.py``, ``runtime/unit.py`` and
``runtime/reduction.py`` do, with one unit prefetched; the pools are the engine's own, ``flat/memory.py``, with blocks
that are only counted. The terms, per bucket, are those of [Note: The tensors of a bucket] in ``flat/flat_param.py``:

* a full buffer: ``padded_numel`` elements in the compute dtype, from the unit's gather until it is resharded; and the
  shard in the compute dtype, where that is another one, until the gather is over; if the unit is gathered again for
  backward, until that is;
* a reduce buffer: ``padded_numel`` in the reduce dtype, from the first gradient until the reduction is over, which is
  waited for when the next but one begins. A unit around others, whose parameters are used before and behind these, has
  its open for all of the backward;
* what a direct exchange receives (gloo, [Note: Direct exchange] in ``comm/collectives.py``): ``shard_size - 1`` shards
  in the reduce dtype, until the reduction is over;
* what gloo's all-reduce over replicas receives into: two segments of at most 1 MiB (``gloo/allreduce.cc``), of the
  latest one;
* one parameter's gradient, which is copied into its slot, until the reduction has begun: the largest of the unit's,
  in the compute dtype. Where the backward ends with the unit, autograd has let it go before that;
* reduced gradients: ``shard_numel`` in the reduce dtype, from the unit's reduction on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp.comm.collectives import DIRECT_MIN_NBYTES
from fsdp.comm.groups import Groups
from fsdp.comm.streams import HostStreams
from fsdp.flat.layout import FlatLayout
from fsdp.flat.memory import MemoryPool

_SEGMENT = 1 << 20  # bytes; the largest that gloo's all-reduce cuts its messages into


@dataclass(frozen=True)
class Bucket:
    """One flat vector, and whether it is trained."""

    layout: FlatLayout
    trained: bool

    @property
    def shard_nbytes(self) -> int:
        return self.layout.shard_numel * self.layout.dtype.itemsize

    @property
    def cast_nbytes(self) -> int:
        """Of the shard in the compute dtype, where that is another one."""
        layout = self.layout
        return layout.shard_numel * layout.compute_dtype.itemsize * (layout.compute_dtype != layout.dtype)

    def full_nbytes(self, groups: Groups) -> int:
        """Of the full buffer, where it has memory of its own."""
        resident = not groups.sharded and self.layout.compute_dtype == self.layout.dtype
        return 0 if resident else self.layout.padded_numel * self.layout.compute_dtype.itemsize

    @property
    def reduce_nbytes(self) -> int:
        return self.layout.padded_numel * self.layout.reduce_dtype.itemsize


@dataclass(frozen=True)
class PlannedUnit:
    """A unit as far as memory depends on it.

    Attributes:
        index: its number in the tree; 0 is the root.
        around: the numbers of the units around it.
        stays: whether it stays gathered from forward to backward.
        opens_early, closes_late: whether it has trained parameters behind the units in it, whose gradients come first,
            and before them, whose gradients come last.
        activation_nbytes: what autograd saves in its forward.
    """

    index: int
    around: frozenset[int]
    groups: Groups
    buckets: tuple[Bucket, ...]
    stays: bool
    opens_early: bool
    closes_late: bool
    activation_nbytes: int = 0

    @property
    def full_nbytes(self) -> int:
        return sum(bucket.full_nbytes(self.groups) for bucket in self.buckets)

    @property
    def trained(self) -> list[Bucket]:
        return [bucket for bucket in self.buckets if bucket.trained]


class _Buffer:
    """What a pool lends memory to."""

    tensor: Any = None

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._block: Any = None

    @property
    def has_block(self) -> bool:
        return self._block is not None

    def attach(self, block: Any) -> None:
        self._block = block

    def detach(self) -> Any:
        block, self._block = self._block, None
        return block


class _Block:
    def __init__(self, nbytes: int, pool: CountingPool) -> None:
        self._nbytes, self._pool = nbytes, pool
        pool.held += nbytes

    def nbytes(self) -> int:
        return self._nbytes

    def __del__(self) -> None:
        self._pool.held -= self._nbytes


class CountingPool(MemoryPool):
    """The engine's pool, of blocks without memory. ``held``: their bytes, those in use and those kept."""

    def __init__(self, spare_nbytes: int, largest: int) -> None:
        super().__init__(torch.device("cpu"), HostStreams())
        self.held = 0
        if self.exchanges_blocks:
            self.kept_nbytes, self.kept_block_nbytes = spare_nbytes, 2 * largest
        self.exchanges_blocks = True  # its buffers have no storages

    def lend(self, nbytes: int) -> _Buffer:
        buffer: Any = _Buffer(nbytes)
        self.allocate(buffer)
        return buffer

    def take_back(self, buffer: Any) -> None:
        self.free(buffer, None)

    def _new_block(self, nbytes: int) -> Any:
        return _Block(nbytes, self)


class Step:
    """Goes through one step of a tree's units, in the order in which they run.

    Attributes:
        working: the most that buffers of all kinds hold at a time.
        most: the most that these, gradients and activations hold at a time.
        gathered, reduced: the bytes that this rank receives.
        gathers, reductions: the collectives.
    """

    def __init__(self, units: Sequence[PlannedUnit], order: Sequence[tuple[int, bool]], *, on_cpu: bool) -> None:
        """``order``: (unit, whether its forward begins, else it ends)."""
        self._units, self._on_cpu = units, on_cpu
        largest = max((unit.full_nbytes for unit in units[1:]), default=units[0].full_nbytes)
        self._full, self._reduce = CountingPool(2 * largest, largest), CountingPool(2 * largest, largest)
        self._gathered: dict[int, list[_Buffer]] = {}
        self._open: dict[int, list[_Buffer]] = {}
        self._in_flight: deque[tuple[_Buffer, int]] = deque()  # a reduce buffer, and what is received for it
        self._casts: dict[int, int] = {}
        self._grads = self._received = self._ring = self._leaf = self._activations = 0
        self.working = self.most = self.gathered = self.reduced = self.gathers = self.reductions = 0
        self._forward(order)
        self._backward([(index, not begins) for index, begins in reversed(order)])

    # -- the two passes ------------------------------------------------------------------------------------------------

    def _forward(self, order: Sequence[tuple[int, bool]]) -> None:
        begins = [index for index, begin in order if begin]
        position = 0
        for index, begin in order:
            unit = self._units[index]
            if not begin:
                self._activations += unit.activation_nbytes
                self._look()
                if not unit.stays:
                    self._reshard(unit)
                continue
            position += 1
            self._gather(unit)
            if unit.stays:
                self._casts.pop(index, None)
            self._prefetch(begins[position:])

    def _backward(self, order: Sequence[tuple[int, bool]]) -> None:
        reached = self._reached()
        order = [(index, begin) for index, begin in order if index in reached]
        begins = [index for index, begin in order if begin]
        ends = [index for index, begin in order if not begin and self._units[index].trained]
        position = 0
        for index, begin in order:
            unit = self._units[index]
            has_inner = any(index in other.around for other in self._units)
            if begin:
                position += 1
                self._gather(unit)
                self._casts.pop(index, None)
                self._prefetch(begins[position:])
                if has_inner and unit.opens_early:
                    self._open_buffers(unit)
                    if not unit.closes_late:
                        self._start_reduction(unit)
                continue
            if unit.trained and not (has_inner and unit.opens_early and not unit.closes_late):
                self._open_buffers(unit)
                self._leaf *= index != ends[-1]
                self._start_reduction(unit)
            self._activations -= unit.activation_nbytes
            self._reshard(unit)
        for unit in self._units:  # what the backward has not reached
            self._reshard(unit)
        self._complete_all_but(0)

    def _reached(self) -> set[int]:
        """The units that a backward comes to: trained ones, what runs after one, and what is around these."""
        reached: set[int] = set()
        begun = False
        for unit in self._units:
            begun = begun or bool(unit.trained)
            if begun:
                reached |= {unit.index} | unit.around
        return reached

    # -- full buffers --------------------------------------------------------------------------------------------------

    def _gather(self, unit: PlannedUnit) -> None:
        if unit.index in self._gathered or not unit.full_nbytes:
            return
        self._gathered[unit.index] = [self._full.lend(bucket.full_nbytes(unit.groups)) for bucket in unit.buckets]
        if unit.groups.sharded:
            self.gathers += 1
            self.gathered += unit.full_nbytes * (unit.groups.shard_size - 1) // unit.groups.shard_size
            self._casts[unit.index] = sum(bucket.cast_nbytes for bucket in unit.buckets)
        self._look()

    def _prefetch(self, upcoming: Sequence[int]) -> None:
        for candidate in [self._units[index] for index in upcoming if self._units[index].full_nbytes][:1]:
            limited = [self._units[index] for index in self._gathered if index and not self._units[index].stays]
            if sum(other.index not in candidate.around for other in limited) <= 1:
                self._gather(candidate)

    def _reshard(self, unit: PlannedUnit) -> None:
        for buffer in self._gathered.pop(unit.index, []):
            self._full.take_back(buffer)

    # -- gradients -----------------------------------------------------------------------------------------------------

    def _open_buffers(self, unit: PlannedUnit) -> None:
        if unit.index in self._open:
            return
        self._open[unit.index] = []
        for bucket in unit.trained:
            if unit.groups.sharded:
                self._complete_all_but(1)
                self._open[unit.index].append(self._reduce.lend(bucket.reduce_nbytes))
            else:  # it becomes the gradient
                self._grads += bucket.reduce_nbytes
            largest = max(record.numel for record in bucket.layout.params)
            self._leaf = largest * bucket.layout.compute_dtype.itemsize
            self._look()

    def _start_reduction(self, unit: PlannedUnit) -> None:
        groups, size = unit.groups, unit.groups.shard_size
        buffers = self._open.pop(unit.index)
        for position, bucket in enumerate(unit.trained):
            shard_nbytes = bucket.reduce_nbytes // size
            if groups.sharded:
                direct = self._on_cpu and bucket.reduce_nbytes >= DIRECT_MIN_NBYTES
                self._grads += shard_nbytes
                self._in_flight.append((buffers[position], shard_nbytes * (size - 1) if direct else 0))
                self._received += self._in_flight[-1][1]
                self.reductions += 1
                self.reduced += shard_nbytes * (size - 1)
                self._look()
                self._complete_all_but(2)
            if groups.replica_size > 1:  # a ring: each part goes round once to be added up, and once to be told
                self.reductions += 1
                self.reduced += 2 * shard_nbytes * (groups.replica_size - 1) // groups.replica_size
                self._ring = 2 * min(_SEGMENT, shard_nbytes // groups.replica_size) * self._on_cpu
                self._look()
        self._leaf = 0

    def _complete_all_but(self, count: int) -> None:
        while len(self._in_flight) > count:
            buffer, received = self._in_flight.popleft()
            self._reduce.take_back(buffer)
            self._received -= received

    def _look(self) -> None:
        """This is a moment at which more may be held than ever before."""
        working = (
            self._full.held + self._reduce.held + self._received + self._ring + self._leaf + sum(self._casts.values())
        )
        self.working = max(self.working, working)
        self.most = max(self.most, working + self._grads + self._activations)
