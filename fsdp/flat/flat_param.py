"""One bucket of a unit: its shard, its full buffer and its leaves; gathering and releasing them.

[Note: Permanent tensors, lent memory]
A full buffer is a tensor whose identity and views are permanent while its memory comes from a pool and goes back. So
nothing is split, viewed or allocated per step, and what autograd saved in forward is valid again once the buffer has
been refilled in backward. The leaves, which the modules compute with, are parameters made empty and given their view
of the buffer through ``.data``: they share no version counter with it, so a refill is not taken for an in-place
change. The price is that autograd no longer notices a wrong fill; the handle's state machine and, with
``FSDP_DEBUG=1``, poisoning take its place. That there is no memory it does notice: then leaves have another version.

``memory.py`` lends the memory and takes it back. This file alone (with ``ownership.py``, while a unit is built) assigns
``.data``.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from fsdp.api import CPUOffload, MixedPrecision
from fsdp.comm.collectives import Communicator, Pending, Tag, Watch
from fsdp.comm.groups import Groups
from fsdp.comm.host_memory import place
from fsdp.comm.streams import Event, Streams, streams_for
from fsdp.flat.layout import FlatLayout
from fsdp.flat.memory import LentTensor, MemoryPool
from fsdp.flat.metadata import for_tools
from fsdp.flat.released import CheckedLeaf, new_leaf

LOST_WRITE = (
    "where it is a gathered copy: that would be lost. If forward is to change it, make it a buffer (register_buffer). "
    "Else change it between the steps: what is sharded in place, or the whole inside summon_full_params(), on all "
    "ranks alike"
)


class MisplacedShardError(RuntimeError, AssertionError):
    """A shard was moved to another device than its unit computes on, past ``.to()`` and the like.

    Callers of FSDP1 expect the one type at the first use and the other one later.
    """


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """One bucket's parameters as a 1-D ``nn.Parameter`` that holds this rank's shard.

    Constructing one gives a plain ``nn.Parameter`` marked as flat, and ``isinstance`` goes by that mark, so that code
    which looks for exact types (optimizers, serialisation) sees nothing special.
    """

    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> FlatParameter:
        if cls is not FlatParameter:
            raise TypeError("FlatParameter cannot be subclassed")
        flat: Any = nn.Parameter(torch.empty(0) if data is None else data, requires_grad=requires_grad)
        flat._is_flat_param = True
        flat._fsdp_flattened = True
        return flat


def parameter_views(layout: FlatLayout, flat: torch.Tensor) -> list[torch.Tensor]:
    """Each parameter of ``layout`` as a view of ``flat`` (``padded_numel`` elements), with its own shape and
    strides."""
    start = flat.storage_offset()
    return [flat.as_strided(p.shape, p.stride, start + p.offset) for p in layout.params]


def point_at(params: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Let each tensor hold its one of ``values``; it stays the same object."""
    for param, value in zip(params, values):
        param.data = value


def collect(params: Sequence[nn.Parameter], values: Sequence[torch.Tensor]) -> None:
    """Copy back into ``values``, which ``params`` were pointed at, what users put in their place.

    Raises:
        RuntimeError: something of another shape.
    """
    for param, value in zip(params, values):
        if param.data_ptr() != value.data_ptr():
            if param.shape != value.shape:
                raise RuntimeError(
                    f"Cannot writeback a parameter of shape {tuple(value.shape)}: its data was replaced by one of "
                    f"shape {tuple(param.shape)}"
                )
            value.copy_(param.detach())


def assign_grad(param: nn.Parameter, grad: torch.Tensor) -> None:
    """Set ``param.grad`` to a gradient of another shape, dtype or device than ``param`` has."""
    shard = param.data
    param.data = grad  # autograd compares the two when the gradient is assigned, and only then
    param.grad = grad
    param.data = shard


class BufferState(Enum):
    SHARDED = auto()  # the full buffer has no memory
    GATHERING = auto()  # a gather into it is under way
    UNSHARDED = auto()  # it holds every parameter
    RESIDENT = auto()  # it is the shard: nothing to gather, nothing to release


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
        leaves: one ``nn.Parameter`` per parameter of the layout, with its true shape, over ``tensor``.
        whole: one for all of the vector, without padding, where the modules have a flat parameter.
        lent: the buffer's memory; None where the shard has it.
        keeps_writes: whether what is written to the leaves reaches the shard.
    """

    __slots__ = (
        "_marks",
        "_state",
        "_versions",
        "_views",
        "all_leaves",
        "keeps_writes",
        "leaves",
        "lent",
        "pending",
        "tensor",
        "whole",
    )

    def __init__(
        self,
        layout: FlatLayout,
        tensor: torch.Tensor,
        leaves: list[nn.Parameter],
        whole: nn.Parameter | None,
        *,
        resident: bool,
    ) -> None:
        """Points the leaves at ``tensor``, whose memory is released unless it is ``resident``."""
        self.tensor, self.leaves, self.whole = tensor, leaves, whole
        self.all_leaves = leaves if whole is None else [*leaves, whole]
        self.pending: Pending | None = None
        self._views = [*parameter_views(layout, tensor), tensor[: layout.numel]]  # made while there is memory
        point_at(self.all_leaves, self._views)
        self._marks = self._look()
        self.keeps_writes = resident
        self.lent = None if resident else LentTensor(tensor)
        self._state = BufferState.RESIDENT if resident else BufferState.SHARDED
        self._versions: list[tuple[nn.Parameter, int]] = []  # that the leaves have while there is memory

    def _look(self) -> list[tuple[int, int, bool]]:
        """Of each leaf what a write to it changes; our own writes go to ``tensor``, and change none of it."""
        start = self.tensor.data_ptr()
        return [(leaf._version, (leaf.data_ptr() or start) - start, leaf.requires_grad) for leaf in self.all_leaves]

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Freeze or unfreeze one leaf."""
        version, offset, _ = self._marks[index]
        self.all_leaves[index].requires_grad_(requires_grad)
        self._marks[index] = (version, offset, requires_grad)

    def undo_writes(self) -> list[tuple[int, str]]:
        """What users did to the leaves since the last call and will be lost with the buffer's memory, as (index, in
        words). But for their values the leaves are what they were again. To be called while there is memory.

        What is written through ``leaf.data`` leaves no trace; under ``FSDP_DEBUG=1`` it is an error at once.
        """
        seen, marks = self._look(), self._marks
        if seen == marks:
            return []
        found = []
        for index, (leaf, view, now, before) in enumerate(zip(self.all_leaves, self._views, seen, marks)):
            if now[1] != before[1]:
                leaf.data = view
                found.append((index, "given other data"))
            elif now[0] != before[0] and not self.keeps_writes:
                found.append((index, "changed in place"))
            if now[2] is not before[2]:
                leaf.requires_grad_(before[2])
                found.append((index, "unfrozen" if now[2] else "frozen"))
        self._marks = self._look()
        return found

    @property
    def state(self) -> BufferState:
        return self._state

    @state.setter
    def state(self, state: BufferState) -> None:
        if state not in _TRANSITIONS[self._state]:
            raise AssertionError(f"a full buffer went from {self._state.name} to {state.name}")
        if state is BufferState.SHARDED:
            leaves = [leaf for leaf in self.all_leaves if type(leaf) is nn.Parameter]
            self._versions = [(leaf, leaf._version) for leaf in leaves]
            _set_versions([(leaf, _RELEASED) for leaf in leaves])
        elif self._state is BufferState.SHARDED:
            _set_versions(self._versions)
        self._state = state


_RELEASED = 1 << 30  # the version of a leaf while there is nothing behind it


def _set_versions(versions: list[tuple[nn.Parameter, int]]) -> None:
    """Autograd refuses to read what it saved of a leaf at another version: so ends a backward that comes to a leaf
    which is not there, past all that would have gathered it."""
    if versions:
        torch._C._autograd._unsafe_set_version_counter(*zip(*versions))


class FlatParamHandle:
    """One bucket: the parameters of a unit that share a dtype and a ``requires_grad``.

    It computes in ``layout.compute_dtype``, or in full precision (``layout.dtype``) while that is asked for. Each dtype
    has a full copy of its own, so graphs of both may be alive at once.

    Attributes:
        layout: where each parameter lies; public, and all there is to know about shapes, offsets and ranges.
        flat_param: the :class:`FlatParameter`; its data is this rank's shard (``layout.shard_numel`` elements).
        groups: the ranks it is sharded and replicated over.
        device: where it computes.
        offload: where shards and gradients live while nothing computes.
        full_precision: whether it computes, and reduces gradients, in ``layout.dtype``.
        unit_name: what errors call the unit.
    """

    def __init__(
        self,
        layout: FlatLayout,
        shard: torch.Tensor,
        params: Sequence[nn.Parameter],
        groups: Groups,
        device: torch.device,
        offload: CPUOffload,
        *,
        with_whole: bool,
        donated: torch.Tensor | None = None,
    ) -> None:
        """Takes ``shard`` over. ``params`` tell what requires grad, and what users have hung on it; ``with_whole``:
        there are leaves for the whole vector as well; ``donated`` is memory of the size of a full buffer that may
        become one."""
        self.layout = layout
        self.groups = groups
        self.device = device
        self.offload = offload
        self.full_precision = False
        self._cast: torch.Tensor | None = None  # the shard in the compute dtype, from a forward to its backward
        self.unit_name = "its unit"
        self.cast_to: Callable[[torch.dtype], None] | None = None  # by whoever knows what depends on the dtype

        self._shard = self._put_at_rest(shard)
        requires_grad = any(param.requires_grad for param in params)
        # Its version counter is its own: it tells what users change in place, and not what we write to the shard.
        self.flat_param: Any = FlatParameter(torch.empty_like(self._shard[:0]), requires_grad=requires_grad)
        self.flat_param.data = self._shard
        for name, value in for_tools(layout, groups.shard_rank).items():
            setattr(self.flat_param, name, value)
        self._copies: dict[torch.dtype, FullCopy] = {}
        leaves = self._new_leaves(layout.compute_dtype, params)
        whole = self._new_whole(layout.compute_dtype) if with_whole else None
        self.copy = self._make_copy(layout.compute_dtype, leaves, whole, donated)

    @staticmethod
    def flatten(
        layout: FlatLayout,
        params: Sequence[nn.Parameter],
        groups: Groups,
        device: torch.device,
        offload: CPUOffload,
        *,
        with_whole: bool,
    ) -> FlatParamHandle:
        """A handle with the values of ``params``, which stay as they are."""
        values = torch.zeros(layout.padded_numel, dtype=layout.dtype, device=device)  # zeros: padding is born zero
        with torch.no_grad():
            for view, param in zip(parameter_views(layout, values), params):
                view.copy_(param)
        if not groups.sharded:
            return FlatParamHandle(layout, values, params, groups, device, offload, with_whole=with_whole)
        start, end = layout.shard_range(groups.shard_rank)
        shard = values[start:end].clone()
        return FlatParamHandle(layout, shard, params, groups, device, offload, with_whole=with_whole, donated=values)

    def clone(self) -> FlatParamHandle:
        """One with the same values, in memory of its own."""
        shard = self._shard.clone()
        with_whole = self.copy.whole is not None
        return FlatParamHandle(
            self.layout, shard, self.leaves, self.groups, self.device, self.offload, with_whole=with_whole
        )

    def _put_at_rest(self, shard: torch.Tensor) -> torch.Tensor:
        """``shard``, in host memory if that is where it lives."""
        if not self.offload.offload_params or self.device.type == "cpu":
            return shard
        memory = streams_for(self.device).host_memory(shard.nbytes, pinned=self.offload.pin_memory)
        return place(memory, shard).copy_(shard)

    def _new_leaves(self, dtype: torch.dtype, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        leaves = [new_leaf(dtype, self.device, param.requires_grad) for param in params]
        for leaf, param in zip(leaves, params):
            leaf.__dict__.update(param.__dict__)  # what users hang on their parameters is there in forward too
        return leaves

    def _new_whole(self, dtype: torch.dtype) -> nn.Parameter:
        leaf = new_leaf(dtype, self.device, self.flat_param.requires_grad)
        leaf.__dict__.update(self.flat_param.__dict__)
        return leaf

    def _make_copy(
        self,
        dtype: torch.dtype,
        leaves: list[nn.Parameter],
        whole: nn.Parameter | None,
        donated: torch.Tensor | None,
    ) -> FullCopy:
        """``donated``, which may become the buffer: the flattened values have just its size."""
        resident = not self.groups.sharded and (dtype, self.device) == (self._shard.dtype, self._shard.device)
        if resident:
            donated = self._shard
        elif donated is None or donated.dtype != dtype:
            donated = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.device)
        self._copies[dtype] = copy = FullCopy(self.layout, donated, leaves, whole, resident=resident)
        for index, leaf in enumerate(copy.all_leaves):
            if isinstance(leaf, CheckedLeaf):
                leaf.explain = _why_not(weakref.ref(self), dtype, index)
        return copy

    def compute_in_full_precision(self, full_precision: bool) -> None:
        """Compute and reduce in ``layout.dtype`` from here on, or in the layout's own dtypes again."""
        self.full_precision = full_precision
        dtype = self.layout.dtype if full_precision else self.layout.compute_dtype
        copy = self._copies.get(dtype)
        if copy is None:
            with torch.inference_mode(False):  # it outlives this forward, and the next one may want gradients
                whole = self._new_whole(dtype) if self.copy.whole is not None else None
                copy = self._make_copy(dtype, self._new_leaves(dtype, self.leaves), whole, None)
        self.copy = copy

    @property
    def departs_from_layout(self) -> bool:
        """Whether it computes or reduces in other dtypes than the layout's."""
        dtypes = (self.copy.tensor.dtype, self.reduce_dtype)
        return dtypes != (self.layout.compute_dtype, self.layout.reduce_dtype)

    @property
    def casts(self) -> bool:
        """Whether it computes in another dtype than the shard has, unless in full precision."""
        return self.layout.compute_dtype != self.layout.dtype

    @property
    def full(self) -> torch.Tensor:
        """The full buffer that is computed with now."""
        return self.copy.tensor

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The leaves that are computed with now."""
        return self.copy.leaves

    @property
    def all_leaves(self) -> Iterator[tuple[int, nn.Parameter]]:
        """(index, leaf) of every dtype that was computed in; the whole vector's comes behind those of the layout."""
        return ((index, leaf) for copy in self._copies.values() for index, leaf in enumerate(copy.all_leaves))

    def name_of(self, index: int) -> str:
        """What errors call leaf ``index``."""
        return self.layout.params[index].name if index < len(self.layout.params) else "_flat_param"

    @property
    def reduce_dtype(self) -> torch.dtype:
        """In which gradients are gathered up and reduced."""
        return self.layout.dtype if self.full_precision else self.layout.reduce_dtype

    @property
    def full_nbytes(self) -> int:
        """Bytes of the full buffer while it has memory of its own."""
        return self.copy.lent.nbytes if self.copy.lent is not None else 0

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> BufferState:
        return self.copy.state

    @property
    def _orig_param_dtype(self) -> torch.dtype:
        """The parameters' dtype, by FSDP1's name. Trainers assign to it, and the flat parameter's ``data`` besides, to
        have parameters in another dtype than they came in."""
        return self.layout.dtype

    @_orig_param_dtype.setter
    def _orig_param_dtype(self, dtype: torch.dtype) -> None:
        assert self.cast_to is not None
        self.cast_to(dtype)

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part of the flat vector, detached; ``layout.shard_numel`` elements in ``layout.dtype``."""
        return self._shard

    @property
    def keeps_gradients_on_host(self) -> bool:
        """Whether reduced gradients leave the device that computes them."""
        return self.device.type != "cpu" and self.offload.gradients

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` lies in the full buffer, and so loses its values when that is released."""
        kinds = (torch.Tensor, nn.Parameter, CheckedLeaf)
        if self.copy.lent is None or type(tensor) not in kinds or tensor.layout != torch.strided:
            return False
        return bool(tensor.untyped_storage()._cdata == self.full.untyped_storage()._cdata)

    def state_in(self, dtype: torch.dtype) -> BufferState:
        """The state of the full copy in ``dtype``."""
        return self._copies[dtype].state if dtype in self._copies else BufferState.SHARDED

    def keeps_writes_in(self, dtype: torch.dtype) -> bool:
        """Whether what is written to the leaves in ``dtype`` reaches the shard."""
        return dtype in self._copies and self._copies[dtype].keeps_writes

    def describe_sharded(self, index: int) -> str:
        """Why parameter ``index`` of the layout cannot be read, and what to do."""
        return (
            f"parameter {self.name_of(index)!r} of {self.unit_name} is sharded; its values are there only "
            "while the unit runs. Call the wrapped module itself, or a module that contains it, instead of reading the "
            "parameter or calling a module inside the unit; use register_forward_method() for other methods, and "
            "summon_full_params() to read parameters"
        )

    # -- gather and release --------------------------------------------------------------------------------------------

    def gather(
        self, pool: MemoryPool, communicator: Communicator, tag: Tag, watch: Watch | None, *, keep_cast: bool = False
    ) -> None:
        """Start filling the full buffer, on the current stream; refills it where it is filled already.

        With ``keep_cast`` the shard in the compute dtype is kept for the next gather, which is to see the same values;
        :meth:`forget_cast` says that it is not.
        """
        copy = self.copy
        if copy.state is BufferState.RESIDENT:
            return
        if copy.state is BufferState.GATHERING:
            self.wait()
        assert copy.lent is not None
        if copy.state is BufferState.SHARDED:
            pool.lend(copy.lent)
        copy.state = BufferState.GATHERING
        shard = self._shard
        if self.groups.sharded:  # else it is moved and cast as it is copied
            kept, self._cast = self._cast, None
            if kept is not None and kept.dtype == copy.tensor.dtype:
                shard = kept
            else:
                shard = self._shard_as(copy.tensor.dtype, communicator.streams)
            if keep_cast and shard.dtype != self._shard.dtype and self._shard.device == self.device:
                self._cast = shard
        copy.pending = communicator.gather(copy.tensor, shard, tag, watch)

    def _shard_as(self, dtype: torch.dtype, streams: Streams) -> torch.Tensor:
        """The shard where it is computed, in ``dtype``; in two steps: a host tensor would be cast by the host."""
        return streams.upload(self._shard).to(dtype)

    def gather_in_vain(
        self, communicator: Communicator, tag: Tag, watch: Watch | None, *, full_precision: bool
    ) -> tuple[Pending, torch.Tensor]:
        """Take part in a gather that only other ranks need, in the dtype that they need; the full buffer is left
        alone. Returns what to wait for and the memory to hold until then."""
        dtype = self.layout.dtype if full_precision else self.layout.compute_dtype
        unread = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.device)
        return communicator.gather(unread, self._shard_as(dtype, communicator.streams), tag, watch), unread

    def forget_cast(self) -> None:
        """The shard may have changed: the next gather casts it again."""
        self._cast = None

    def wait(self) -> None:
        """The full buffer is filled when this returns (for the current stream)."""
        copy = self.copy
        if copy.state in (BufferState.GATHERING, BufferState.UNSHARDED):  # another stream may have waited before
            assert copy.pending is not None
            copy.pending.wait()  # where that is interrupted, the gather is still under way
            if copy.state is BufferState.GATHERING:
                copy.state = BufferState.UNSHARDED

    def release(self, pool: MemoryPool, last_use: Event) -> None:
        """Give the full buffer's memory back; idempotent. The current stream owns ``pool``."""
        copy = self.copy
        if copy.state is not BufferState.UNSHARDED:
            return
        copy.state, copy.pending = BufferState.SHARDED, None
        assert copy.lent is not None
        pool.take_back(copy.lent, last_use)

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Freeze or unfreeze parameter ``index`` in every dtype."""
        for copy in self._copies.values():
            copy.set_requires_grad(index, requires_grad)

    @property
    def wholes(self) -> list[nn.Parameter]:
        """What modules show for the flat parameter while the unit runs, in every dtype that was computed in."""
        return [copy.whole for copy in self._copies.values() if copy.whole is not None]

    def is_leaf(self, tensor: Any, index: int) -> bool:
        """Whether ``tensor`` is a leaf of parameter ``index``."""
        return any(copy.leaves[index] is tensor for copy in self._copies.values())

    def replace_shard(self, new: torch.Tensor, compute_device: torch.device, precision: MixedPrecision) -> None:
        """Let ``new``, of another dtype or device or just other memory, be the shard; the layout keeps its offsets.

        The flat parameter and the leaves stay the same objects. The full buffer must have been released.
        """
        self.compute_in_full_precision(False)
        leaves, whole = self.leaves, self.copy.whole
        self.layout = dataclasses.replace(
            self.layout,
            dtype=new.dtype,
            compute_dtype=precision.compute_dtype_of(new.dtype),
            reduce_dtype=precision.reduce_dtype_of(new.dtype),
        )
        self.device = compute_device
        self._shard = self.flat_param.data = self._put_at_rest(new)
        self._copies.clear()
        self.copy = self._make_copy(self.layout.compute_dtype, leaves, whole, None)

    # -- the shard's views ---------------------------------------------------------------------------------------------

    def sharded_views(self, flat_shard: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part in a vector of ``layout.shard_numel`` elements that lies like this rank's shard.

        Sharded: 1-D, of size 0 where this rank owns nothing of the parameter. Not sharded: the parameter's own shape.
        """
        if not self.groups.sharded:
            return parameter_views(self.layout, flat_shard)
        pieces = self.layout.pieces(self.groups.shard_rank)
        return [flat_shard[piece.shard_offset : piece.shard_offset + piece.numel] for piece in pieces]

    def part_of(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """What :meth:`sharded_views` has of parameter ``index``, of a tensor in its true shape."""
        if not self.groups.sharded:
            return whole
        record, piece = self.layout.params[index], self.layout.piece(index, self.groups.shard_rank)
        in_memory_order = torch.empty_strided(record.shape, record.stride, dtype=whole.dtype, device=whole.device)
        return in_memory_order.copy_(whole).as_strided((record.numel,), (1,))[piece.start : piece.end]

    def write_back_flat(self) -> None:
        """Take over the values of a tensor that the user put in the place of the flat parameter's data.

        Raises:
            RuntimeError: it has another shape, dtype or device.
        """
        new = self.flat_param.data
        if new.data_ptr() == self._shard.data_ptr():
            return
        if (new.shape, new.dtype, new.device) != (self._shard.shape, self._shard.dtype, self._shard.device):
            kind = RuntimeError if new.device == self._shard.device else MisplacedShardError
            raise kind(
                f"Cannot writeback the flat parameter of {self.unit_name}: its data became {tuple(new.shape)}, "
                f"{new.dtype} on {new.device}, and the shard is {tuple(self._shard.shape)}, {self._shard.dtype} on "
                f"{self._shard.device}. Move or cast the wrapped module instead: .to(), .half() and the like keep the "
                "two together"
            )
        self._shard.copy_(new)
        self.flat_param.data = self._shard

    def point_at_shard(self, originals: Sequence[nn.Parameter]) -> None:
        """Re-point each original parameter's data at its part of the shard."""
        point_at(originals, self.sharded_views(self.shard))


_KEPT = (
    "This reference was kept from inside a forward; where a backward came by it, through a tensor that the forward "
    "stored, or that a hook took, and did not return: mark that one inside the forward by fsdp.mark_side_output(tensor)"
)


def _why_not(handle_ref: weakref.ref[FlatParamHandle], dtype: torch.dtype, index: int) -> Callable[[bool], str | None]:
    """What a :class:`CheckedLeaf` of the handle's copy in ``dtype`` asks before it is read, or written."""

    def explain(written: bool) -> str | None:
        handle = handle_ref()
        if handle is None:
            return "a parameter was read after its unit was deleted"
        there = handle.state_in(dtype) in (BufferState.UNSHARDED, BufferState.RESIDENT)
        if there and written and not handle.keeps_writes_in(dtype):
            return f"{handle.name_of(index)!r} of {handle.unit_name} is written, {LOST_WRITE}"
        return None if there else f"{handle.describe_sharded(index)}. {_KEPT}"

    return explain


class SlotBuffer:
    """A flat gradient vector in the reduce dtype, and its slots: one view per parameter, with its strides."""

    __slots__ = ("flat", "lent", "slots")

    def __init__(self, layout: FlatLayout, flat: torch.Tensor) -> None:
        """Over ``flat``, of ``layout.padded_numel`` elements."""
        self.flat = flat
        self.slots = parameter_views(layout, flat)
        self.lent: LentTensor | None = None

    @staticmethod
    def lendable(layout: FlatLayout, dtype: torch.dtype, device: torch.device) -> SlotBuffer:
        """One without memory until a pool lends it some."""
        buffer = SlotBuffer(layout, torch.empty(layout.padded_numel, dtype=dtype, device=device))
        buffer.lent = LentTensor(buffer.flat)
        return buffer
