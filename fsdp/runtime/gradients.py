"""The gradients of one unit, during and between backwards: one ``BucketGradients`` per bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp.comm.collectives import Communicator, Event
from fsdp.flat.views import BucketViews
from fsdp.runtime.policy import UnitPolicy
from fsdp.runtime.reduction import BucketGradients, ReductionQueue


class UnitGradients:
    """The gradients of one unit.

    Attributes:
        synchronize: backwards reduce the gradients; read when a backward runs.
        weight: factor of this rank's gradients, as they are copied.
    """

    def __init__(self, views: Sequence[BucketViews], policy: UnitPolicy, *, keep_low_precision: bool) -> None:
        self.buckets = [BucketGradients(each, policy, keep_low_precision=keep_low_precision) for each in views]
        self.synchronize = True
        self.weight = 1.0

    def set_synchronize(self, synchronize: bool) -> None:
        """Let backwards reduce the gradients, or accumulate them."""
        self.synchronize = synchronize

    def set_weight(self, weight: float) -> None:
        """Multiply this rank's gradients by ``weight`` from now on."""
        self.weight = weight

    def follow(self, policy: UnitPolicy) -> None:
        """Reduce by ``policy`` from now on."""
        for bucket in self.buckets:
            bucket.follow(policy)

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def accumulate(self) -> bool:
        """Whether gradients of earlier backwards are not reduced, or not averaged over replicas."""
        return any(bucket.accumulates for bucket in self.buckets)

    @property
    def are_exposed(self) -> bool:
        """Whether ``.grad`` of a parameter is, or was, an unsharded gradient that is not reduced."""
        return any(bucket.accumulator.exposed for bucket in self.buckets)

    @property
    def are_at_rest(self) -> bool:
        """Whether the end of a backward has no work here."""
        for bucket in self.buckets:
            if bucket.slots is not None or bucket.accumulator.exposed or bucket.partial is not None:
                return False
        return True

    @property
    def are_written(self) -> bool:
        """Whether slots hold gradients that are neither reduced nor exposed."""
        for bucket in self.buckets:
            if bucket.slots is not None:
                return True
        return False

    @property
    def are_reduced(self) -> bool:
        """Whether the end of a backward reduces the gradients."""
        return self.synchronize and any(bucket.reduces for bucket in self.buckets)

    @property
    def trainable(self) -> list[int]:
        """The buckets with leaves that require grad."""
        return [number for number, bucket in enumerate(self.buckets) if bucket.trainable]

    @property
    def lack_some(self) -> bool:
        """Whether this rank reduces gradients, and some parameter has none."""
        return any(bucket.used for bucket in self.buckets) and any(bucket.lacks for bucket in self.buckets)

    def used(self) -> torch.Tensor:
        """Return a flag per leaf (uint8, on CPU), by bucket and index: this rank has a gradient of it."""
        flags = [index in bucket.used for bucket in self.buckets for index in range(len(bucket.handle.leaves))]
        return torch.tensor(flags, dtype=torch.uint8, device="cpu")

    def note_used(self, flags: list[int]) -> None:
        """Take over the flags of ``used``, combined over all ranks."""
        remaining = iter(flags)
        for bucket in self.buckets:
            bucket.note_used({index for index in range(len(bucket.handle.leaves)) if next(remaining)})

    # -- a backward ----------------------------------------------------------------------------------------------------

    def copy(self, grads_of: Sequence[dict[int, torch.Tensor]], queue: ReductionQueue) -> None:
        """Copy gradients of leaves, by bucket and index, into their slots."""
        for bucket, grads in zip(self.buckets, grads_of):
            if grads:
                bucket.write(grads, queue, self.weight, synchronize=self.synchronize)

    def open_accumulated(self, queue: ReductionQueue) -> None:
        """Open the slots of gradients that earlier backwards have accumulated, and this one did not reach."""
        for bucket in self.buckets:
            if bucket.accumulates:
                bucket.open(queue, synchronize=True)

    def reduce(
        self, communicator: Communicator, queue: ReductionQueue, event: Event, buckets: Sequence[int] | None = None
    ) -> None:
        """Start to reduce these buckets: what this backward has written, else accumulated gradients, else zeros.

        By default all buckets that have gradients, or may have some on peers because they are trainable. The numbers
        from that of the ``event`` on are those of the buckets.
        """
        for number, bucket in enumerate(self.buckets):
            has_some = bucket.slots is not None or bucket.trainable or bucket.accumulates
            if has_some if buckets is None else number in buckets:
                bucket.reduce(communicator, queue, Event(event.label, event.number + number))

    def expose(self, queue: ReductionQueue) -> None:
        """Show what this backward has written as ``.grad``, unsharded."""
        for bucket in self.buckets:
            if bucket.trainable:
                bucket.expose(queue, complete=self.synchronize)

    def abandon(self, queue: ReductionQueue) -> None:
        """Drop what a failed backward has written."""
        for bucket in self.buckets:
            bucket.abandon(queue)
