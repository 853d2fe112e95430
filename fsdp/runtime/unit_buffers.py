"""One unit's full buffers: gathered before something reads them, resharded when nothing will, shown whole by hand.

``unit.py`` says when that is in a forward and a backward, and ``residency.py`` why each is gathered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from fsdp.comm.collectives import Communicator, Tag
from fsdp.comm.groups import Groups
from fsdp.comm.streams import streams_for
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.full_copy import BufferState
from fsdp.flat.views import BucketViews
from fsdp.runtime.agreement import GATHER, MAX_BUCKETS
from fsdp.runtime.context import RootContext, TreeUnit, UnitPolicy
from fsdp.runtime.precision import UnitPrecision
from fsdp.runtime.residency import Residence


class Summoned(Enum):
    """Where its parameters are shown whole."""

    NOWHERE = auto()
    HERE = auto()  # in the full buffers, on all ranks: forwards inside compute with them
    HERE_ALONE = auto()  # in the full buffers, but not on other ranks
    ELSEWHERE = auto()  # in other memory, or on other ranks: the full buffers are released


class UnitBuffers(TreeUnit):
    """The part of a unit that fills and empties its full buffers.

    Attributes:
        module: the wrapped module.
        name: what errors call it; its path in the tree once a root is known.
        handles, views: one of each per bucket.
        groups: the ranks it is sharded and replicated over.
        policy: when it is resharded and gathered ahead.
        precision: the dtypes of its inputs, outputs and buffers.
        synchronize: whether a backward reduces its gradients; read when the backward runs.
        index: its number in the tree.
        place: its number among the tree's units that communicate over the same group, equal on every rank.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str,
        buckets: list[tuple[FlatParamHandle, BucketViews]],
        groups: Groups,
        device: torch.device,
        policy: UnitPolicy,
        precision: UnitPrecision,
    ) -> None:
        self.module = module
        self.handles = [handle for handle, _ in buckets]
        self.name = self._named(name)
        self.views = [views for _, views in buckets]
        self.groups = groups
        self.device = device
        self.policy = policy
        self.precision = precision
        self.synchronize = True
        self.index = self.place = 0
        self.ancestors: frozenset[int] = frozenset()  # the indices of the units around it
        self._context: Callable[[], RootContext | None] = lambda: None
        self._communicator: Communicator | None = None
        self._summoned = Summoned.NOWHERE
        self._in_output = False  # the last forward returned (a view of) a parameter, which must stay readable
        self._generation = -1  # of the context, when the full buffers were last filled
        self._kept_versions: list[Any] | None = None  # of shards that an unsynchronised backward left gathered

    # -- the tree ------------------------------------------------------------------------------------------------------

    @property
    def context(self) -> RootContext | None:
        return self._context()

    def join(self, context: RootContext, index: int, name: str, ancestors: frozenset[int]) -> None:
        """Become unit ``index`` of ``context``'s tree."""
        before = self.context
        if before is not None and before is not context:
            before.release(self)
        self._context = weakref.ref(context)
        self._communicator = Communicator(self.groups, context.streams)
        self.index, self.name, self.ancestors = index, self._named(name), ancestors
        self.precision.place_buffers(self.device, full_precision=self.precision.wants_full)

    def _named(self, name: str) -> str:
        for handle in self.handles:
            handle.unit_name = name
        return name

    @property
    def group(self) -> Any | None:
        """The group whose ranks have to agree on this unit's collectives; None where there are none."""
        return self.groups.shard if self.groups.shard_size > 1 else self.groups.replica

    # -- gathering -----------------------------------------------------------------------------------------------------

    @property
    def _gathers(self) -> bool:
        """Whether the full buffers have memory of their own."""
        return any(handle.state is not BufferState.RESIDENT for handle in self.handles)

    @property
    def is_gathering(self) -> bool:
        """Whether a gather is under way."""
        return any(handle.state is BufferState.GATHERING for handle in self.handles)

    @property
    def is_gathered(self) -> bool:
        """Whether the full buffers have memory (a gather may still be under way). Always true of what is not
        sharded."""
        return all(handle.state is not BufferState.SHARDED for handle in self.handles)

    def _tag(self, bucket: int, what: str) -> Tag:
        return Tag(f"{what} {self.name}", (self.place * MAX_BUCKETS + bucket) * 2 + (what == "reduce"))

    def gather(self, context: RootContext, why: Residence = Residence.IN_USE) -> None:
        """Start filling the full buffers."""
        streams = context.streams
        if self.groups.sharded:
            context.passes.about_to(GATHER, self)
        again = context.backward_follows and not self._stays(context)
        with streams.on_gather_stream():
            for bucket, handle in enumerate(self.handles):
                assert self._communicator is not None
                tag = self._tag(bucket, "gather")
                handle.gather(context.gather_pool, self._communicator, tag, keep_cast=again)
        self._generation = context.generation
        self._kept_versions = None
        context.residency.gathers(self, why)

    @property
    def in_full_precision(self) -> bool:
        """Whether messages have the parameters' own dtypes, and usually have others."""
        return any(handle.departs_from_layout for handle in self.handles)

    def unshard(self, context: RootContext, *, refill: bool) -> None:
        """The modules hold the full parameters when this returns, and the current stream may read them.

        With ``refill``, a copy that an earlier forward left is gathered again: the shards may have changed since. Where
        a backward of ``no_sync`` kept it, their versions tell.
        """
        if self._gathers and not self._shown:
            earlier = refill and self._generation != context.generation
            stale = earlier and self._kept_versions != self._versions
            if not self.is_gathered or earlier or context.residency.of(self) is Residence.PREFETCHED:
                context.order.record(self)
            if not self.is_gathered:
                context.make_room(self)
                self.gather(context)
            elif stale:
                torch.clear_autocast_cache()  # its casts are of what was there before
                self.gather(context)
            elif earlier:
                self._generation = context.generation
            for handle in self.handles:
                handle.wait()
        for view in self.views:
            view.use_leaves()
        context.residency.becomes(self, Residence.IN_USE)

    @property
    def _versions(self) -> list[Any]:
        """Others when a shard was written: through what users hold, or by the engine."""
        return [(handle.shard._version, view.versions) for handle, view in zip(self.handles, self.views)]

    def _reshard_after_backward(self, context: RootContext) -> None:
        """Reshard; but where the strategy keeps a unit after forward and its gradients accumulate unsharded, it stays
        for the next forward as well, which gathers it again only if a shard was written in between."""
        if self.synchronize or self.policy.reshard_after_forward or not self.is_gathered:
            self.reshard(context)
            return
        for view in self.views:
            view.registration.use_resting()
        self._kept_versions = self._versions
        context.residency.becomes(self, Residence.KEPT)

    def reshard(self, context: RootContext) -> None:
        """Give the memory of the full buffers back; the modules show shards. Idempotent; what is summoned stays."""
        for view in self.views:
            view.registration.use_resting()
        if self._shown or self._in_output:
            return
        if context.residency.becomes(self, Residence.SHARDED):
            for handle in self.handles:
                handle.wait()  # gathered ahead in vain: whoever writes to the shard next must not overtake the gather
            last_use = context.streams.record()
            with context.streams.on_gather_stream():
                for handle in self.handles:
                    handle.release(context.gather_pool, last_use)
            torch.clear_autocast_cache()  # it keeps a cast of every leaf until the outermost autocast block ends

    def shards_were_written(self) -> None:
        """On some rank, if not on this one: what has been gathered for a forward to come is out of date on all."""
        self._kept_versions = None
        context = self.context
        if context is not None and context.residency.of(self) is Residence.PREFETCHED:
            self.reshard(context)

    def compute_in_full_precision(self, context: RootContext, full_precision: bool) -> None:
        """Compute in the parameters' own dtypes from here on, or in those of the mixed precision again.

        Raises:
            RuntimeError: a backward of the unit is under way, or its parameters are shown, in the other dtypes.
        """
        if all(handle.full_precision is full_precision for handle in self.handles):
            return
        if (self._shown or self.expected.seen) and any(handle.casts for handle in self.handles):
            raise RuntimeError(
                f"{self.name} would have to compute in mixed and in full precision at once. Forwards inside "
                "summon_full_params, and in eval mode with FSDP_USE_FULL_PREC_IN_EVAL=1, are in full precision: give "
                "graphs of different precision backwards of their own, and those of mixed precision outside of "
                "summon_full_params"
            )
        self.forget_output(context)
        self.reshard(context)
        for handle in self.handles:
            handle.compute_in_full_precision(full_precision)
        self.expected.watch()

    # -- shown whole ---------------------------------------------------------------------------------------------------

    def show_full(self, context: RootContext) -> None:
        """Gather, fresh, and stay gathered until ``end_show``; forwards inside compute with what is there."""
        self.compute_in_full_precision(context, True)
        if self._gathers:
            context.gathers_follow_compute()
            self.gather(context)
            for handle in self.handles:
                handle.wait()
        self._summoned = Summoned.HERE

    @property
    def _shown(self) -> bool:
        """Whether the full buffers are what users see."""
        return self._summoned in (Summoned.HERE, Summoned.HERE_ALONE)

    def show_elsewhere(self, context: RootContext, *, release: bool) -> None:
        """Until ``end_show`` run no forwards: not every rank's device has the full parameters. With ``release`` this
        one has not either: it shows a copy in CPU memory, or nothing."""
        self._summoned = Summoned.ELSEWHERE if release else Summoned.HERE_ALONE
        self.reshard(context)

    def end_show(self, context: RootContext) -> None:
        self._summoned = Summoned.NOWHERE
        self.reshard(context)
        context.settle_offloaded()
        self.precision.cast_buffers(self.device, full_precision=self.precision.wants_full)
        context.trim_at_rest()

    # -- communicating outside of a step -------------------------------------------------------------------------------

    def gather_now(self, bucket: int, full: torch.Tensor, shard: torch.Tensor) -> None:
        """Fill ``full`` with every rank's ``shard``, outside of the step's schedule."""
        assert self._communicator is not None
        self.announce()
        self._communicator.gather(full, shard, self._tag(bucket, "gather")).wait()

    def announce(self) -> None:
        """The call under way is about to communicate over the unit's group, other than by ``gather``; see
        ``Passes.announce``."""
        if self.context is not None:
            self.context.passes.announce(self.group)

    def agree_on_maximum(self, values: torch.Tensor) -> None:
        """Give ``values`` (integers) the largest that any rank of the unit's groups has, element by element."""
        communicator = self._communicator or Communicator(self.groups, streams_for(self.device))  # before its first use
        self.announce()
        communicator.maximum(values, self.device, f"agree on {self.name}")

    def _compute_in(self, context: RootContext, full_precision: bool) -> None:
        self.compute_in_full_precision(context, full_precision)
        self.precision.cast_buffers(self.device, full_precision=full_precision)

    def _stays(self, context: RootContext) -> bool:
        """Whether it stays gathered from forward to backward."""
        return not self.policy.reshard_after_forward or self is context.root

    def _holds(self, tensor: torch.Tensor) -> bool:
        return any(handle.holds(tensor) for handle in self.handles)

    def forget_output(self, context: RootContext) -> None:
        """What an earlier forward returned may lose its values now."""
        if self._in_output:
            self._in_output = False
            self.reshard(context)

    # -- what users hold -----------------------------------------------------------------------------------------------

    def visible_params(self) -> Iterator[torch.Tensor]:
        """What optimizers hold of it."""
        return (visible.param for views in self.views for visible in views.visible)

    def follow_parameters(self) -> None:
        """Follow what the user did to the visible parameters."""
        changed = [view.refresh() for view in self.views]
        if any(changed):
            self.expected.watch()
