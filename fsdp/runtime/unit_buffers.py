"""One unit as its tree knows it: what it is made of, and the state of its full buffers.

``residency.py`` fills and empties these, ``unit.py`` says when that is in a forward and a backward.
"""

from __future__ import annotations

import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from fsdp.comm import host_memory
from fsdp.comm.collectives import Communicator, Gather, Tag, agree
from fsdp.comm.groups import Groups
from fsdp.comm.nodes import nearby_group
from fsdp.comm.streams import Streams
from fsdp.flat.full_copy import BufferState
from fsdp.flat.initial_values import InitialValues
from fsdp.flat.views import BucketViews
from fsdp.runtime.agreement import GATHER, GATHER_NEARBY, MAX_BUCKETS, REDUCE, Member
from fsdp.runtime.arrivals import Arrivals
from fsdp.runtime.policy import UnitPolicy
from fsdp.runtime.precision import UnitPrecision


class Summoned(Enum):
    """Where a unit inside ``summon_full_params`` shows full parameters."""

    EVERYWHERE = auto()  # every rank shows the full parameters on the device: forwards compute with them
    PARTLY = auto()  # the full parameters are in host memory, or on one rank only: forwards are refused


@dataclass(eq=False)
class UnitBuffers(Member):
    """A unit as its tree knows it: what it is made of, and the state of its full buffers."""

    module: nn.Module  # the wrapped one
    name: str  # what errors call it; its path in the tree once a root is known
    views: list[BucketViews]  # one per bucket; so are `handles`
    groups: Groups  # the ranks it is sharded and replicated over
    device: torch.device  # where it computes
    policy: UnitPolicy
    precision: UnitPrecision
    arrivals: Arrivals = field(init=False)  # the gradients that are still to come
    synchronize: bool = field(default=True, init=False)  # whether a backward, when it runs, reduces its gradients
    gradient_weight: float = field(default=1.0, init=False)  # what this rank's gradients count, as they come
    full_precision: bool = field(default=False, init=False)  # whether it computes and reduces in the shards' dtypes
    index: int = field(default=0, init=False)  # its number in the tree
    place: int = field(default=0, init=False)  # that among the units of its first group, equal on every rank
    ancestors: frozenset[int] = field(default=frozenset(), init=False)  # the indices of the units around it
    communicator: Communicator | None = field(default=None, init=False)  # for its groups, once it is in a tree
    nearby: Communicator | None = field(default=None, init=False)  # for the ranks that it stays sharded over
    summoned: Summoned | None = field(default=None, init=False)  # None outside of ``summon_full_params``
    in_output: bool = field(default=False, init=False)  # the last forward returned a parameter, to stay readable
    generation: int = field(default=-1, init=False)  # of the tree, when the full buffers were last filled
    kept_versions: list[Any] | None = field(default=None, init=False)  # of shards that a backward left gathered
    # of forward and of backward, what users want to be prefetched; None, or where it says so: what came next last time
    listed: Callable[[bool], list[Any] | None] | None = field(default=None, init=False)

    initial: list[InitialValues] = field(default_factory=list, init=False)  # none where all have those of one rank

    def __post_init__(self) -> None:
        self.handles = [views.handle for views in self.views]
        self._tree: Callable[[], Any] = lambda: None  # the RootContext that it is in, or None
        self._call(self.name)

    # -- the tree ------------------------------------------------------------------------------------------------------

    def join(self, tree: Any, streams: Streams, index: int, name: str, ancestors: frozenset[int]) -> None:
        """Become unit ``index`` of ``tree``, which is held weakly."""
        before = self._tree()
        if before is not None and before is not tree:
            before.release(self)
        self._tree = weakref.ref(tree)
        self.communicator = Communicator(self.groups, streams)
        self.communicator.divisor = self.policy.gradient_divide_factor
        if self.policy.reshard_ranks:
            near = nearby_group(self.groups.shard, self.policy.reshard_ranks)
            self.nearby = Communicator(Groups.of(near, replicate=False), streams)
        self.index, self.ancestors = index, ancestors
        self._call(name)
        self.precision.place_buffers(self.device, full_precision=self.precision.wants_full)

    def _call(self, name: str) -> None:
        self.name = name
        for tags in ("gather_tags", "reduce_tags"):
            self.__dict__.pop(tags, None)
        for handle in self.handles:
            handle.unit_name = name

    def groups_for(self, kind: str) -> list[Any]:
        shard, replica = self.groups.shard, self.groups.replica
        if kind == GATHER_NEARBY:
            return [self.nearby.groups.shard] if self.nearby is not None else []
        sharded = [shard] if self.groups.shard_size > 1 else []
        return [*sharded, replica] if kind == REDUCE and replica is not None else sharded

    @abstractmethod
    def end_backward(self) -> None:
        """The whole backward is over; nothing of it may stay."""

    @abstractmethod
    def reset(self) -> None:
        """Forget a forward or backward that failed."""

    @abstractmethod
    def check_idle(self, words: str, kind: type[Exception] = RuntimeError) -> None:
        """Raise ``kind``, with ``words``, if the unit is running or shown whole."""

    # -- its full buffers ----------------------------------------------------------------------------------------------

    @property
    def gathers(self) -> bool:
        """Whether the full buffers have memory of their own."""
        return any(handle.copy.state is not BufferState.RESIDENT for handle in self.handles)

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full buffers, as far as they have memory of their own."""
        return sum(handle.full_nbytes for handle in self.handles)

    @property
    def is_nearby(self) -> bool:
        """Whether the ranks nearby have all of it, for its next gather."""
        return self.nearby is not None and bool(self.handles) and all(handle.has_part for handle in self.handles)

    @property
    def is_gathering(self) -> bool:
        """Whether a gather is under way."""
        return any(handle.copy.state is BufferState.GATHERING for handle in self.handles)

    @property
    def is_gathered(self) -> bool:
        """Whether the full buffers have memory (a gather may still be under way). Always true of what is not
        sharded."""
        for handle in self.handles:
            if handle.copy.state is BufferState.SHARDED:
                return False
        return True

    @property
    def in_full_precision(self) -> bool:
        return self.full_precision and any(handle.is_mixed for handle in self.handles)

    def begin_summon(self, *, everywhere: bool) -> None:
        """Enter ``summon_full_params``; ``everywhere``: the device of each rank has the full parameters."""
        for handle in self.handles:
            handle.forget_kept()  # users are about to write parameters
        self.summoned = Summoned.EVERYWHERE if everywhere else Summoned.PARTLY

    def end_summon(self) -> None:
        """Leave ``summon_full_params``. A forward inside has cast the buffers to their own dtypes."""
        self.summoned = None
        self.precision.cast_buffers(self.device, full_precision=self.precision.wants_full)

    @property
    def versions(self) -> list[Any]:
        """Others when a shard was written: through what users hold, or by the engine."""
        return [(view.handle.shard._version, view.versions) for view in self.views]

    @functools.cached_property
    def gather_tags(self) -> list[Tag]:
        """By bucket; the first is that of all together."""
        return self._tags("gather", 0)

    @functools.cached_property
    def reduce_tags(self) -> list[Tag]:
        """By bucket."""
        return self._tags("reduce", 1)

    def _tags(self, what: str, kind: int) -> list[Tag]:
        first = (self.place * 2 + kind) * MAX_BUCKETS
        return [Tag(f"{what} {self.name}", first + bucket) for bucket in range(len(self.handles) or 1)]

    def reshard_by_hand(self) -> None:
        """Give the memory of the full buffers back, whatever keeps them.

        Raises:
            RuntimeError: a forward or backward of the unit is under way, or the unit is summoned.
        """
        self.check_idle("call reshard() outside of that")
        tree = self._tree()
        if tree is not None:
            tree.residency.forget_output(self)
            tree.residency.reshard(self)

    def use_resting(self) -> None:
        """The modules show shards, or what is summoned."""
        for view in self.views:
            view.registration.use_resting()

    def wait(self) -> None:
        """The full buffers are filled when this returns (for the current stream)."""
        for handle in self.handles:
            handle.wait()

    # -- what users hold -----------------------------------------------------------------------------------------------

    def visible_params(self) -> Iterator[torch.Tensor]:
        """The unit's parameters as optimizers hold them."""
        return (visible.param for views in self.views for visible in views.visible)

    def follow_parameters(self) -> None:
        """Follow what the user did to the visible parameters."""
        changed = False
        for view in self.views:
            if not view.is_as_left:
                changed = view.refresh() or changed
        if changed:
            self.arrivals.watch()

    def follow_flags(self) -> bool:
        """Freeze and unfreeze the leaves as the visible parameters are now that a backward begins; returns whether some
        changed. ``check_unfrozen`` finds the gradients for which this came too late."""
        changed = False
        for view in self.views:
            if not view.flags_are_as_left:
                changed = view.follow_flags() or changed
        if changed:
            self.arrivals.watch(awaits_unfrozen=True)
        return changed

    def check_unfrozen(self) -> None:
        """Raise RuntimeError if the backward that ends has dropped the gradient of a leaf.

        Autograd does so with the gradient of a leaf that is frozen when it arrives, and the leaves follow the visible
        parameters only when the backward first comes to an output of a unit.
        """
        for bucket, index in sorted(self.arrivals.lost):
            raise RuntimeError(
                f"the gradient of parameter {self.handles[bucket].name_of(index)!r} of {self.name} is lost. The "
                "parameter was frozen during the last forward and unfrozen after it, and the backward reached the "
                "parameter before it reached an output of a wrapped module: through a tensor that the forward stored, "
                "or that a hook took. Return that tensor, or mark it inside the forward by "
                "fsdp.mark_side_output(tensor); or unfreeze the parameter before the last forward"
            )

    # -- communicating outside of a step -------------------------------------------------------------------------------

    def gather_now(self, bucket: int, shard: torch.Tensor) -> torch.Tensor:
        """The full vector of which each rank gives its ``shard``, outside of the step's schedule; ``shard`` itself if
        that is all of it."""
        if not self.groups.sharded:
            return shard
        assert self.communicator is not None
        self.announce(replicas=False)
        full = torch.empty(self.handles[bucket].layout.padded_numel, dtype=shard.dtype, device=shard.device)
        self.communicator.gather([Gather(full, shard)], self.gather_tags[bucket]).wait()
        return full

    def gather_vectors(self) -> list[torch.Tensor]:
        """Gather the full vector of each bucket in the parameters' dtype, as one collective, into memory of its own.

        The vector of a unit that is not sharded is the shard itself, if the shard is on the unit's device.
        """
        shards = [handle.shard.to(self.device) for handle in self.handles]
        if not (shards and self.groups.sharded):
            return shards
        assert self.communicator is not None
        self._tree().passes.about_to(GATHER, self)
        parts = [
            Gather(host_memory.empty(handle.layout.padded_numel, dtype=shard.dtype, device=shard.device), shard)
            for handle, shard in zip(self.handles, shards)
        ]
        self.communicator.gather(parts, self.gather_tags[0]).wait()
        return [part.full for part in parts]

    def announce(self, *, replicas: bool = True) -> None:
        """The call under way is about to communicate over the unit's groups, other than by ``gather``; without
        ``replicas`` over that which it is sharded over alone. See ``Passes.announce``."""
        tree = self._tree()
        for group in self.groups_for(REDUCE if replicas else GATHER) if tree is not None else ():
            tree.passes.announce(group)

    def agree_on_maximum(self, values: torch.Tensor, *, replicas: bool = True) -> None:
        """Give ``values`` (integers) the largest that any rank of the unit's groups has, element by element; without
        ``replicas``, of the ranks that it is sharded over."""
        self.announce(replicas=replicas)
        for group in self.groups_for(REDUCE if replicas else GATHER):
            agree(values, group, self.device, f"agree on {self.name}")
