"""The arithmetic of ``fsdp.plan``: memory and traffic of units, without tensors.

[Note: The peak of a step]
The peak is a closed form, evaluated when the backward computes each unit. It adds, in bytes:

* full buffers of the unit, of the units around it, and of earlier units that stay gathered; two more for prefetching
  and for memory that the pool keeps;
* reduce buffers: two, and those of units around that have gradients before and after; with gloo also the memory that a
  direct exchange receives into; the largest gradient of one parameter in the unit;
* gradients of units whose backward is over, activations of units whose backward is to come.

Not counted: temporary memory of operations, of the optimizer's step and of collectives, rounding by the allocator, and
CUDA's context. On two CPU ranks without shared memory the peak is within 10 % of the measured one (``test_plan.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp.comm.collectives import DIRECT_MIN_NBYTES
from fsdp.comm.groups import Groups
from fsdp.flat.layout import FlatLayout

_RING_SEGMENT = 1 << 20  # bytes; the largest message of gloo's all-reduce


@dataclass(frozen=True)
class PlannedBucket:
    """One flat vector; ``trained``: some parameter requires grad."""

    layout: FlatLayout
    trained: bool

    @property
    def shard_nbytes(self) -> int:
        return self.layout.shard_numel * self.layout.dtype.itemsize

    @property
    def reduce_nbytes(self) -> int:
        return self.layout.padded_numel * self.layout.reduce_dtype.itemsize


@dataclass(frozen=True)
class PlannedUnit:
    """The facts of a unit that memory and traffic depend on.

    Attributes:
        around: the indices of the units around it.
        stays: it stays gathered from forward to backward.
        open_early: it has trained parameters before and after nested units, so that the reduce buffer is open during
            their whole backward.
        activation_nbytes: bytes that autograd saves in its forward.
    """

    index: int
    around: frozenset[int]
    groups: Groups
    buckets: tuple[PlannedBucket, ...]
    stays: bool
    open_early: bool
    activation_nbytes: int

    @property
    def trained(self) -> list[PlannedBucket]:
        return [bucket for bucket in self.buckets if bucket.trained]

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full buffers that have memory of their own."""
        layouts = [bucket.layout for bucket in self.buckets]
        own = [each for each in layouts if self.groups.sharded or each.compute_dtype != each.dtype]
        return sum(each.padded_numel * each.compute_dtype.itemsize for each in own)

    @property
    def reduce_nbytes(self) -> int:
        """Bytes of the reduce buffers; without sharding these become the gradients."""
        return sum(bucket.reduce_nbytes for bucket in self.trained) if self.groups.sharded else 0

    @property
    def grad_nbytes(self) -> int:
        """Bytes of the reduced gradients, in the reduce dtype."""
        return sum(bucket.reduce_nbytes // self.groups.shard_size for bucket in self.trained)

    @property
    def leaf_nbytes(self) -> int:
        """Bytes of the largest gradient of one parameter."""
        sizes = [(record.numel, b.layout) for b in self.trained for record in b.layout.params]
        return max((numel * layout.compute_dtype.itemsize for numel, layout in sizes), default=0)

    def received_nbytes(self, on_cpu: bool) -> int:
        """Bytes that a reduction receives into memory of its own (gloo)."""
        if not on_cpu:
            return 0
        groups, direct, ring = self.groups, 0, 0
        for bucket in self.trained:
            shard = bucket.reduce_nbytes // groups.shard_size
            if groups.sharded and bucket.reduce_nbytes >= DIRECT_MIN_NBYTES:
                direct += shard * (groups.shard_size - 1)
            if groups.replica_size > 1:
                ring = max(ring, 2 * min(_RING_SEGMENT, shard // groups.replica_size))
        return direct + ring


def peaks(units: Sequence[PlannedUnit], order: Sequence[int], on_cpu: bool) -> tuple[int, int]:
    """Return the largest working set, and the largest sum of working set, gradients and activations.

    [Note: The peak of a step] has the formula.
    """
    run = [units[index] for index in order]
    limited = [unit for unit in units if not unit.stays]
    spare = sorted((unit.full_nbytes for unit in limited), reverse=True)[:2]
    reduces = sorted((u.reduce_nbytes + u.received_nbytes(on_cpu) for u in units if not u.open_early), reverse=True)
    working = most = 0
    for place, unit in enumerate(run):
        around = [units[index] for index in unit.around]
        before = [other for other in run[:place] if other not in around]
        full = sum(u.full_nbytes for u in {unit, *around, *before} if u.stays) + sum(spare)
        full += sum(other.full_nbytes for other in around if not other.stays)
        opened = sum(other.reduce_nbytes for other in [unit, *around] if other.open_early)
        held = full + opened + sum(reduces[:2]) + unit.leaf_nbytes
        over = [other for other in run[place:] if other is not unit] + [unit]
        working = max(working, held)
        grads = sum(other.grad_nbytes for other in over)
        most = max(most, held + grads + sum(other.activation_nbytes for other in [unit, *around, *before]))
    return working, most


def _reached(units: Sequence[PlannedUnit]) -> set[int]:
    """Return the units that a backward reaches: trained ones, later ones, and the units around these."""
    reached: set[int] = set()
    begun = False
    for unit in units:
        begun = begun or bool(unit.trained)
        reached |= {unit.index} | unit.around if begun else set()
    return reached


def gathers(units: Sequence[PlannedUnit]) -> tuple[int, int]:
    """Return the bytes that a rank receives in a step's gathers, and their number."""
    nbytes = count = 0
    reached = _reached(units)
    for unit in units:
        if unit.groups.sharded and unit.full_nbytes:
            times = 2 if not unit.stays and unit.index in reached else 1
            nbytes += times * (unit.full_nbytes * (unit.groups.shard_size - 1) // unit.groups.shard_size)
            count += times
    return nbytes, count


def reductions(units: Sequence[PlannedUnit]) -> tuple[int, int]:
    """Return the bytes that a rank receives in a step's reductions, and their number."""
    nbytes = count = 0
    for unit in units:
        for bucket in unit.trained:
            shard, groups = bucket.reduce_nbytes // unit.groups.shard_size, unit.groups
            nbytes += shard * (groups.shard_size - 1)  # 0 without sharding
            nbytes += 2 * shard * (groups.replica_size - 1) // groups.replica_size  # a ring, there and back
            count += groups.sharded + (groups.replica_size > 1)
    return nbytes, count
