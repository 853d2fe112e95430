"""The full buffer of a bucket, the leaves over it, and the state of the memory.

[Note: Permanent tensors, pooled memory]
A full buffer is a tensor with permanent identity and views, while a pool lends the memory. So no
step splits, views or allocates tensors, and the tensors that autograd saved in forward are valid again after the refill
in backward. The leaves, with which modules compute, are parameters made empty, with a view of the buffer assigned
through ``.data``. They share no version counter with the buffer, so a refill is no in-place change. The price is that
autograd does not detect a wrong fill; the states below and, with ``FSDP_DEBUG=1``, poisoning replace that check.
Autograd does detect released memory: then the leaves have another version.

``memory.py`` allocates the memory and frees it. This file and ``flat_param.py`` alone (with ``ownership.py``, while a
unit is built) assign ``.data``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum, auto

import torch
from torch import nn

from fsdp.comm.streams import StreamEvent
from fsdp.comm.versions import set_versions
from fsdp.comm.waiting.work import Work
from fsdp.flat.layout import FlatLayout
from fsdp.flat.memory import MemoryPool, PooledTensor
from fsdp.flat.snapshot import flag_of, version_of
from fsdp.flat.tensor_parallel import local_of


def parameter_views(layout: FlatLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """Return each parameter of ``layout`` as a view of ``flat`` (``padded_numel`` elements), with its shape and
    strides."""
    start = flat.storage_offset()
    return [flat.as_strided(p.shape, p.stride, start + p.offset) for p in layout.params]


def point_at(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Let each tensor have the data of one of ``values``; it stays the same object."""
    for param, value in zip(params, values):
        param.data = value


def undo_swap(tensor: torch.Tensor) -> Callable[[], None]:
    """Return a function that gives ``tensor`` its present memory, gradient and attributes again if ``nn.Module`` has
    loaded it by ``torch.utils.swap_tensors``, as under ``set_swap_module_params_on_conversion(True)``."""
    if not torch.__future__.get_swap_module_params_on_conversion():
        return lambda: None
    attributes, twin = tensor.__dict__, tensor.detach()
    if isinstance(tensor, nn.Parameter):
        grad, values = tensor.grad, twin
        like = values if grad is None else values.new_empty(grad.shape, dtype=grad.dtype, device=grad.device)
        twin = nn.Parameter(like, tensor.requires_grad)
        twin.grad, twin.data = grad, values  # of other shapes inside of summon_full_params
    twin.__dict__ = attributes

    def swap_back() -> None:
        if tensor.__dict__ is not attributes:  # the memory may be that of a value in the state dict
            torch.utils.swap_tensors(tensor, twin)

    return swap_back


class BufferState(Enum):
    SHARDED = auto()  # the full buffer has no memory; then GATHERING
    GATHERING = auto()  # a gather into it is in flight; then UNSHARDED
    UNSHARDED = auto()  # it has the values of every parameter; then SHARDED, or GATHERING again
    RESIDENT = auto()  # it is the shard, and is neither gathered nor released

    __hash__ = object.__hash__  # Enum's own is a Python function


class FullCopy:
    """The full buffer in one dtype, and the leaves that the modules compute with.

    Attributes:
        tensor: ``layout.padded_numel`` elements; the shard itself if it is whole and has this dtype and device.
        leaves: one ``nn.Parameter`` per parameter of the layout, in its true shape, over ``tensor``; a ``DTensor``
            for a parameter of tensor parallelism.
        all_leaves: ``leaves``, and behind them one for the whole vector, without padding, if the modules have a flat
            parameter.
        memories: the plain tensor of each leaf: the leaf itself, or the local tensor of a ``DTensor``.
        state: of the memory; changed by ``begin``, ``wait`` and ``release``.
        pending: the gather in flight, or the last one.
        pooled: the memory of the buffer; None if it is the shard's, so that a write to a leaf writes the shard.
    """

    def __init__(
        self,
        layout: FlatLayout,
        tensor: torch.Tensor,
        leaves: list[nn.Parameter],
        *,
        resident: bool,
    ) -> None:
        """Point the leaves, the whole vector's behind those of the parameters, at views of ``tensor``, whose memory is
        released unless it is ``resident``."""
        count = len(layout.params)
        self.tensor, self.all_leaves, self.leaves = tensor, leaves, leaves[:count]
        self.pending: Work | None = None
        self._views = [*parameter_views(layout, tensor), tensor[: layout.numel]][
            : len(leaves)
        ]  # made while there is memory
        self.memories = [local_of(leaf) for leaf in leaves]
        point_at(self.memories, self._views)
        self._filled = [memory for memory in self.memories if memory.numel()]
        self._distances = [memory.data_ptr() - tensor.data_ptr() for memory in self._filled]  # from the buffer's start
        # Versions and flags without changes of users. The engine writes to ``tensor``, not to the leaves' counters.
        self._written, self._flags = list(map(version_of, leaves)), list(map(flag_of, leaves))
        self.pooled = None if resident else PooledTensor(tensor)
        self.state = BufferState.RESIDENT if resident else BufferState.SHARDED
        self._versions = self._written  # that the leaves have while there is memory
        self._released = (RELEASED_VERSION,) * len(leaves)
        self._cuts: dict[int, Sequence[torch.Tensor]] = {}

    def cut(self, count: int) -> Sequence[torch.Tensor]:
        """Return ``tensor`` in ``count`` equal pieces, which are made once."""
        pieces = self._cuts.get(count)
        if pieces is None:
            with torch.inference_mode(False):
                pieces = self._cuts[count] = self.tensor.view(count, self.tensor.numel() // count).unbind()
        return pieces

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Freeze or unfreeze one leaf."""
        self.all_leaves[index].requires_grad_(requires_grad)
        self._flags[index] = requires_grad

    @property
    def is_untouched(self) -> bool:
        """Whether ``undo_writes`` is a no-op."""
        return (
            list(map(version_of, self.all_leaves)) == self._written
            and list(map(flag_of, self.all_leaves)) == self._flags
            and list(map(torch.Tensor.data_ptr, self._filled))
            == list(map(self.tensor.data_ptr().__add__, self._distances))
        )

    def undo_writes(self) -> list[tuple[int, str, torch.Tensor | None]]:
        """Return the writes of users to leaves since the last call that would be lost, as (index, verb, new data), with
        the data where a frozen leaf was given some of the same size and dtype.

        The leaves show the buffer again, with the ``requires_grad`` of before. Values stay as written in place; other
        data is not copied to the buffer, which peers may still read. Must be called while there is memory. A write
        through ``leaf.data`` leaves no trace.
        """
        found: list[tuple[int, str, torch.Tensor | None]] = []
        for index, (leaf, flag) in enumerate(zip(self.all_leaves, self._flags)):
            memory, view = self.memories[index], self._views[index]
            if memory.data_ptr() != view.data_ptr():
                fits = (memory.numel(), memory.dtype, memory.device) == (view.numel(), view.dtype, view.device)
                data = memory.detach().reshape(view.shape) if fits and not leaf.requires_grad else None
                found.append((index, "given other data", data))
                memory.data = view
            elif leaf._version != self._written[index] and self.pooled is not None:
                found.append((index, "changed in place", None))
            if leaf.requires_grad is not flag:
                leaf.requires_grad_(flag)
                found.append((index, "frozen" if flag else "unfrozen", None))
        self._written = list(map(version_of, self.all_leaves))
        return found

    def begin(self) -> None:
        """Note that a gather fills the buffer, which has memory."""
        if self.state is BufferState.SHARDED:
            set_versions(self.all_leaves, self._versions)
        self.state = BufferState.GATHERING

    def wait(self) -> None:
        """Wait until the buffer is filled (for the current stream)."""
        if self.pending is not None:  # another stream may have waited before
            self.pending.wait()  # after an interrupt, the gather is still in flight
            if self.state is BufferState.GATHERING:
                self.state = BufferState.UNSHARDED

    def release(self, pool: MemoryPool, last_use: StreamEvent) -> None:
        """Give the memory back; idempotent. The current stream owns ``pool``. A gather in flight keeps the memory."""
        if self.pooled is None or self.state is BufferState.GATHERING:
            return
        pool.free(self.pooled, last_use)  # first: after an interrupt, the call is repeated
        self.pending = None
        if self.state is BufferState.UNSHARDED:
            # Autograd refuses to read a saved leaf at another version. So a backward that reaches a released leaf,
            # past every hook that would have gathered it, ends in an error.
            versions = list(map(version_of, self.all_leaves))
            if RELEASED_VERSION not in versions:  # else an interrupt has ended this before
                self._versions = versions
            set_versions(self.all_leaves, self._released)
            self.state = BufferState.SHARDED

    def give_up(self, pool: MemoryPool) -> None:
        """Release the memory of a gather that has failed, and writes to it no more."""
        self.state = BufferState.UNSHARDED
        self.release(pool, None)

    def outdate(self) -> None:
        """Let autograd refuse to read the leaves that it has saved so far."""
        versions = self._versions if self.state is BufferState.SHARDED else map(version_of, self.all_leaves)
        set_versions(self.all_leaves, [version + 1 for version in versions])


RELEASED_VERSION = 1 << 30  # the version of a leaf without memory


class SlotBuffer:
    """A flat gradient vector in the reduce dtype, with a slot per parameter (a view with the parameter's strides) and a
    view of the padding per gap."""

    __slots__ = ("flat", "layout", "padding", "pooled", "slots")

    def __init__(self, layout: FlatLayout, flat: torch.Tensor, *, pooled: bool = False) -> None:
        """``flat`` has ``layout.padded_numel`` elements. If it is ``pooled``, its memory is released, and a pool gives
        it other memory."""
        self.layout, self.flat = layout, flat
        self.slots = parameter_views(layout, flat)
        self.padding = [flat[start:end] for start, end in layout.gaps]
        self.pooled = PooledTensor(flat) if pooled else None  # last: the views need memory
