"""The whole flat vector of a bucket: its buffer, the leaves over it, and whether there is memory behind them.

[Note: Permanent tensors, pooled memory]
A full buffer is a tensor whose identity and views are permanent while its memory comes from a pool and goes back. So
nothing is split, viewed or allocated per step, and what autograd saved in forward is valid again once the buffer has
been refilled in backward. The leaves, which the modules compute with, are parameters made empty and given their view
of the buffer through ``.data``: they share no version counter with it, so a refill is not taken for an in-place
change. The price is that autograd no longer notices a wrong fill; the handle's state machine and, with
``FSDP_DEBUG=1``, poisoning take its place. That there is no memory it does notice: then leaves have another version.

``memory.py`` allocates the memory and frees it. This file and ``flat_param.py`` alone (with ``ownership.py``, while a
unit is built) assign ``.data``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import nn

from fsdp.comm.versions import set_versions
from fsdp.comm.work import Work
from fsdp.flat.layout import FlatLayout
from fsdp.flat.memory import PooledTensor
from fsdp.flat.released import CheckedLeaf
from fsdp.flat.tensor_parallel import local_of
from fsdp.flat.visible import flag_of, version_of


def parameter_views(layout: FlatLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """Each parameter of ``layout`` as a view of ``flat`` (``padded_numel`` elements), with its own shape and
    strides."""
    start = flat.storage_offset()
    return [flat.as_strided(p.shape, p.stride, start + p.offset) for p in layout.params]


def point_at(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Let each tensor hold its one of ``values``; it stays the same object."""
    for param, value in zip(params, values):
        param.data = value


class BufferState(Enum):
    SHARDED = auto()  # the full buffer has no memory
    GATHERING = auto()  # a gather into it is under way
    UNSHARDED = auto()  # it holds every parameter
    RESIDENT = auto()  # it is the shard: nothing to gather, nothing to release

    __hash__ = object.__hash__  # Enum's own is a Python function


_TRANSITIONS = {
    BufferState.SHARDED: (BufferState.GATHERING,),
    BufferState.GATHERING: (BufferState.UNSHARDED,),
    BufferState.UNSHARDED: (BufferState.SHARDED, BufferState.GATHERING),
    BufferState.RESIDENT: (),
}


class FullCopy:
    """The whole flat vector in one dtype: its buffer, and the leaves that the modules compute with.

    Attributes:
        tensor: ``layout.padded_numel`` elements; the shard itself if that is all of it, in this dtype, on this device.
        leaves: one ``nn.Parameter`` per parameter of the layout, with its true shape, over ``tensor``; a ``DTensor``
            where tensor parallelism has placed it.
        state: what is in the memory; changed by ``enter`` alone.
        whole: one for all of the vector, without padding, where the modules have a flat parameter.
        memories: of each leaf the plain tensor over ``tensor``, which is itself or what a ``DTensor`` is made around.
        pooled: the buffer's memory; None where the shard has it.
        flags: of each leaf whether it requires grad.
        differs: whether the shard has another dtype, or is on another device.
        keeps_writes: whether what is written to the leaves reaches the shard.
    """

    def __init__(
        self,
        layout: FlatLayout,
        tensor: torch.Tensor,
        views: list[torch.Tensor],
        leaves: list[nn.Parameter],
        *,
        resident: bool,
        differs: bool,
    ) -> None:
        """Points the leaves, the whole vector's behind those of its parameters, at the ``views`` of ``tensor``, whose
        memory is released unless it is ``resident``."""
        count = len(layout.params)
        self.tensor, self.all_leaves = tensor, leaves
        self.leaves, self.whole = leaves[:count], leaves[count] if len(leaves) > count else None
        self.pending: Work | None = None
        self._views = [*views, tensor[: layout.numel]]  # made while there is memory
        self.memories = [local_of(leaf) for leaf in leaves]
        point_at(self.memories, self._views)
        self._marks = marks = self._look()
        self.flags = marks[2]
        self.keeps_writes, self.differs = resident, differs
        self.pooled = None if resident else PooledTensor(tensor)
        self.state = BufferState.RESIDENT if resident else BufferState.SHARDED
        self._unchecked = tuple(leaf for leaf, its in zip(leaves, self.memories) if not isinstance(its, CheckedLeaf))
        self._versions: tuple[int, ...] = ()  # that these have while there is memory
        self._released = (RELEASED_VERSION,) * len(self._unchecked)
        self._cuts: dict[int, Sequence[torch.Tensor]] = {}

    def cut(self, count: int) -> Sequence[torch.Tensor]:
        """``tensor`` in ``count`` equal pieces, which are there as long as it is."""
        pieces = self._cuts.get(count)
        if pieces is None:
            with torch.inference_mode(False):
                pieces = self._cuts[count] = self.tensor.view(count, self.tensor.numel() // count).unbind()
        return pieces

    def _look(self) -> tuple[list[int], list[int], list[bool]]:
        """Of the leaves what a write to one changes; our own writes go to ``tensor``, and change none of it."""
        start, leaves = self.tensor.data_ptr(), self.all_leaves
        offsets = [memory.data_ptr() - start for memory in self.memories]
        if -start in offsets:  # of what has no elements
            offsets = [0 if offset == -start else offset for offset in offsets]
        return list(map(version_of, leaves)), offsets, list(map(flag_of, leaves))

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Freeze or unfreeze one leaf."""
        self.all_leaves[index].requires_grad_(requires_grad)
        self.flags[index] = requires_grad

    def undo_writes(self) -> list[tuple[int, str]]:
        """What users did to the leaves since the last call and will be lost with the buffer's memory, as (index, in
        words). But for their values the leaves are what they were again. To be called while there is memory.

        A write through ``leaf.data`` leaves no trace here; with ``FSDP_DEBUG=1`` it is an error at once.
        """
        seen, marks = self._look(), self._marks
        if seen == marks:
            return []
        found = []
        each = zip(self.all_leaves, self._views, zip(*seen), zip(*marks))
        for index, (leaf, view, now, before) in enumerate(each):
            if now[1] != before[1]:
                self.memories[index].data = view
                found.append((index, "given other data"))
            elif now[0] != before[0] and not self.keeps_writes:
                found.append((index, "changed in place"))
            if now[2] is not before[2]:
                leaf.requires_grad_(before[2])
                found.append((index, "unfrozen" if now[2] else "frozen"))
        self._marks = marks = self._look()
        self.flags = marks[2]
        return found

    def enter(self, state: BufferState) -> None:
        """From here on it is in ``state``."""
        if state not in _TRANSITIONS[self.state]:
            raise AssertionError(f"a full buffer went from {self.state.name} to {state.name}")
        if state is BufferState.SHARDED:
            # Autograd refuses to read what it saved of a leaf at another version: so ends a backward that comes to a
            # leaf which is not there, past all that would have gathered it.
            self._versions = tuple(map(version_of, self._unchecked))
            set_versions(self._unchecked, self._released)
        elif self.state is BufferState.SHARDED and self._versions:
            set_versions(self._unchecked, self._versions)
        self.state = state

    def outdate(self) -> None:
        """Autograd refuses to read what it has saved of the leaves so far."""
        set_versions(self._unchecked, tuple(version + 1 for version in map(version_of, self._unchecked)))


RELEASED_VERSION = 1 << 30  # the version of a leaf while there is nothing behind it


class SlotBuffer:
    """A flat gradient vector in the reduce dtype, its slots, one view per parameter with its strides, and its
    padding, one per gap."""

    __slots__ = ("flat", "layout", "padding", "pooled", "slots")

    def __init__(self, layout: FlatLayout, flat: torch.Tensor, *, pooled: bool = False) -> None:
        """``flat`` has ``layout.padded_numel`` elements. If it is ``pooled``, its memory is released, and a pool gives
        it other memory."""
        self.layout, self.flat = layout, flat
        self.slots = parameter_views(layout, flat)
        self.padding = [flat[start:end] for start, end in layout.gaps]
        self.pooled = PooledTensor(flat) if pooled else None  # last: the views need memory
