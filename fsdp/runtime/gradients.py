"""The gradients of one unit, during and between backwards: copies into slots, and the settings of their reduction."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp.comm.collectives import Communicator, Event
from fsdp.flat.views import BucketViews
from fsdp.runtime.comm_hook import CommHook
from fsdp.runtime.policy import UnitPolicy
from fsdp.runtime.reduction import AllReduceHook, BucketGradients, ReductionQueue


class UnitGradients:
    """The gradients of one unit: one ``BucketGradients`` per bucket, and the settings that they share.

    Attributes:
        synchronize: backwards reduce the gradients; read when a backward runs.
        events: of the reductions, by bucket.
        weight: factor of this rank's gradients, as they are copied.
        comm_hook: the user's reduction in place of the communicator's.
        all_reduce_hook: is called with each reduced gradient.
    """

    def __init__(self, views: Sequence[BucketViews], policy: UnitPolicy, *, keep_low_precision: bool) -> None:
        finds_unused = policy.tree.reduce_unused
        self.buckets = [
            BucketGradients(each, keep_low_precision=keep_low_precision, finds_unused=finds_unused) for each in views
        ]
        self.synchronize = True
        self.weight = 1.0
        self.events: list[Event] = []
        self.comm_hook: CommHook | None = None
        self.all_reduce_hook: AllReduceHook | None = None
        self._communicator: Communicator | None = None  # of the unit's groups, once it is in a tree
        self._policy = policy
        self._follow_settings()

    # -- settings ------------------------------------------------------------------------------------------------------

    def set_synchronize(self, synchronize: bool) -> None:
        """Let backwards reduce the gradients, or accumulate them."""
        self.synchronize = synchronize

    def set_weight(self, weight: float) -> None:
        """Multiply this rank's gradients by ``weight`` from now on."""
        self.weight = weight

    def set_events(self, events: list[Event]) -> None:
        """Reduce the buckets under these events."""
        self.events = events

    def set_comm_hook(self, hook: CommHook) -> None:
        """Reduce by ``hook`` from now on."""
        self.comm_hook = hook
        for bucket in self.buckets:
            bucket.use_hook(hook)

    def set_all_reduce_hook(self, hook: AllReduceHook | None) -> None:
        """Call ``hook`` with each reduced gradient from now on."""
        self.all_reduce_hook = hook
        self._follow_settings()

    def set_policy(self, policy: UnitPolicy) -> None:
        """Follow the unit's ``policy``."""
        self._policy = policy
        self._follow_settings()

    def connect(self, communicator: Communicator) -> None:
        """Reduce by ``communicator``."""
        self._communicator = communicator
        self._follow_settings()

    def _follow_settings(self) -> None:
        divisor = self._policy.gradient_divide_factor
        if self._communicator is not None:
            self._communicator.divide_by(divisor, sums_only=self._policy.force_sum_reduction)
        for bucket in self.buckets:
            bucket.set_finds_unused(self._policy.tree.reduce_unused)
            bucket.set_altered(divisor is not None or self.all_reduce_hook is not None)

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
        arrived = [(bucket, grads) for bucket, grads in zip(self.buckets, grads_of) if grads]
        for bucket, grads in arrived:
            bucket.check(grads, reads_parameters=self._policy.unshard_in_backward)
        for bucket, grads in arrived:
            slots = bucket.open(queue, synchronize=self.synchronize)
            if self.weight:  # else the slots count as unwritten
                bucket.add(slots, grads, self.weight)

    def check_outside(self, number: int, grads: dict[int, torch.Tensor]) -> None:
        """Raise RuntimeError if gradients of parameters that were used outside of forward are not supported."""
        self.buckets[number].check(grads, reads_parameters=False)

    def add_outside(self, number: int, grads: dict[int, torch.Tensor], queue: ReductionQueue) -> None:
        """Add gradients of parameters that were used outside of forward; see ``outside.py``."""
        slots = self.buckets[number].open(queue, synchronize=self.synchronize)
        if self.weight:
            self.buckets[number].add(slots, grads, self.weight, outside=True)

    def open_accumulated(self, queue: ReductionQueue) -> None:
        """Open the slots of gradients that earlier backwards have accumulated, and this one did not reach."""
        for bucket in self.buckets:
            if bucket.accumulates:
                bucket.open(queue, synchronize=True)

    def reduce(self, queue: ReductionQueue, buckets: Sequence[int] | None = None) -> None:
        """Start to reduce these buckets: what this backward has written, else accumulated gradients, else zeros.

        By default all buckets that have gradients, or may have some on peers because they are trainable.
        """
        if buckets is None:
            buckets = [
                number
                for number, bucket in enumerate(self.buckets)
                if bucket.slots is not None or bucket.trainable or bucket.accumulates
            ]
        assert self._communicator is not None
        to_replicas = self._policy.requires_all_reduce
        for number in buckets:
            bucket, event = self.buckets[number], self.events[number]
            bucket.open(queue, synchronize=True)
            bucket.reduce(self._communicator, queue, event, self.all_reduce_hook, to_replicas)

    def expose(self, queue: ReductionQueue) -> None:
        """Show what this backward has written as ``.grad``, unsharded."""
        for bucket in self.buckets:
            if bucket.trainable:
                slots = bucket.open(queue, synchronize=False)
                bucket.expose(slots, complete=self.synchronize)

    def abandon(self, queue: ReductionQueue) -> None:
        """Drop what a failed backward has written."""
        for bucket in self.buckets:
            bucket.abandon(queue)
