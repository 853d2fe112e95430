"""One bucket of a unit: shard, full buffer and leaves; gathering and releasing the full buffer.

See [Note: Permanent tensors, pooled memory] in ``full_copy.py``.

[Note: The tensors of a bucket]
Each bucket has these tensors, of ``shard_numel`` elements (1/N of the padded flat vector) or ``padded_numel`` (all):

===================  ========  =============  ==============================================  ========================
tensor               elements  dtype          has memory                                      owner of the memory
===================  ========  =============  ==============================================  ========================
shard, the data of   shard     parameter      always; in host memory with CPU offload         the compute stream
``flat_param``
cast shard           shard     compute        during a gather                                 the gather stream
slice for nearby     padded/k  compute        from a forward to the end of the backward, if   the gather stream
ranks                                         units stay sharded over k ranks
full buffer, and     padded    compute        while the unit is gathered                      the gather stream's pool
the leaves
reduce buffer, and   padded    reduce         from the first gradient of a backward until     the compute stream's pool
the slots                                     the reduction
accumulator          padded    reduce         under ``no_sync``, until the reduction, or      the compute stream
                                              until the user drops it; it is ``.grad``
reduced gradient     shard     parameter      from the reduction on; ``.grad`` from the end   the compute stream
                                              of the backward until the user drops it
===================  ========  =============  ==============================================  ========================

The original parameters (``use_orig_params=True``) are views of the shard; placeholders (False) have no memory. Each
compute dtype has a full buffer of its own. A full buffer on one rank with the dtype and device of the shard is the
shard. A stream that reads memory of another stream records an event, and the owner waits for the event before it uses
the memory again: see [Note: Memory across streams] in ``fsdp/comm/streams.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from fsdp.api import CPUOffload, MixedPrecision
from fsdp.comm.collectives import Communicator, Event, Gather
from fsdp.comm.groups import Groups, rank_names
from fsdp.comm.host_memory import place
from fsdp.comm.streams import Streams, streams_for
from fsdp.flat.full_copy import BufferState, FullCopy, parameter_views
from fsdp.flat.layout import FlatLayout, ParamRecord, Piece
from fsdp.flat.memory import MemoryPool
from fsdp.flat.metadata import for_tools
from fsdp.flat.tensor_parallel import TensorParallel

LOST_WRITE = (
    "where it is a gathered copy: that would be lost. If forward is to change it, make it a buffer (register_buffer). "
    "Else change it between the steps: what is sharded in place, or the whole inside summon_full_params(), on all "
    "ranks alike"
)


class MisplacedShardError(RuntimeError, AssertionError):
    """An error for a shard that was moved to another device than the unit's, but not by the module's ``.to()``.

    FSDP1 raises AssertionError at the first use, and RuntimeError later.
    """


class _FlatParameterMeta(type(nn.Parameter)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and getattr(instance, "_is_flat_param", False)


class FlatParameter(nn.Parameter, metaclass=_FlatParameterMeta):
    """A 1-D ``nn.Parameter`` with this rank's shard of one bucket.

    The constructor returns a plain ``nn.Parameter`` with a mark, and ``isinstance`` checks the mark. So code that
    compares exact types (optimizers, serialization) treats it as any parameter.
    """

    def __new__(cls, data: torch.Tensor | None = None, requires_grad: bool = True) -> FlatParameter:
        if cls is not FlatParameter:
            raise TypeError("FlatParameter cannot be subclassed")
        flat: Any = nn.Parameter(torch.empty(0) if data is None else data, requires_grad=requires_grad)
        flat._is_flat_param = True
        flat._fsdp_flattened = True
        return flat


def assign_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Set ``param.grad`` to a gradient that may have another shape, dtype or device than ``param``."""
    if grad is None or (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device):
        param.grad = grad
        return
    shard = param.data
    param.data = grad  # autograd compares the two only when the gradient is assigned
    param.grad = grad
    param.data = shard


class FlatParamHandle:
    """One bucket: the parameters of a unit that share a dtype and a ``requires_grad`` (and a user's label).

    A bucket computes in ``layout.compute_dtype`` or in full precision, ``layout.dtype``. Each of the two dtypes has a
    full buffer of its own, so graphs of both may be alive at once.

    Attributes:
        layout: shapes, offsets and ranges of the parameters; public.
        flat_param: the :class:`FlatParameter`, over this rank's shard (``layout.shard_numel`` elements).
        groups: the ranks that the bucket is sharded and replicated over.
        device: the device that computes.
        offload: whether shards and gradients are in host memory between uses.
        tp: the placement of each parameter by tensor parallelism, or None. With a placement, the shape in the layout
            is that of this rank's part, and the leaf is a ``DTensor``, unless ``is_plain``.
        has_tp: whether some parameter has a placement.
        replicated_over: the ranks of tensor parallelism that hold equal parameters; None if ``tp`` has these ranks, or
            no save has noted them.
        full_precision: whether the bucket computes, and reduces gradients, in ``layout.dtype``.
        copy: the full buffer in use.
        unit_name: the name of the unit in errors.
    """

    def __init__(
        self,
        layout: FlatLayout,
        shard: torch.Tensor,
        params: Sequence[nn.Parameter],
        groups: Groups,
        device: torch.device,
        offload: CPUOffload,
        tp: Sequence[TensorParallel | None],
        *,
        with_whole: bool,
    ) -> None:
        """Take ``shard`` over. ``params`` give ``requires_grad`` and the attributes that users have set.

        With ``with_whole`` there is a leaf for the whole vector as well.
        """
        self.layout = layout
        self.groups = groups
        self.device = device
        self.offload = offload
        self.tp = tuple(tp)
        self.has_tp = any(self.tp)
        self.replicated_over: ProcessGroup | None = None
        self._lengths, self._parts = layout.once(
            ("lengths", groups.shard_rank), lambda: _lengths_and_parts(layout, groups.shard_rank)
        )
        self.full_precision = False
        self._slice: torch.Tensor | None = None  # this rank's slice of the full buffer, for a gather among nearby ranks
        self.unit_name = "its unit"

        self._shard = self._put_at_rest(shard)
        requires_grad = any(param.requires_grad for param in params)
        # It has a version counter of its own, which counts in-place writes of users, and not those of the engine.
        self.flat_param: Any = FlatParameter(torch.empty_like(self._shard[:0]), requires_grad=requires_grad)
        self.flat_param.data = self._shard
        self.flat_param.__dict__.update(for_tools(layout, groups.shard_rank), _local_shard=self._shard)
        self._copies: dict[torch.dtype, FullCopy] = {}
        like = [*params, self.flat_param] if with_whole else params
        self.copy = self._make_copy(layout.compute_dtype, self._new_leaves(layout.compute_dtype, like))

    def clone(self) -> FlatParamHandle:
        """Make a handle with the same values, in memory of its own."""
        shard = self._shard.clone()
        with_whole = len(self.copy.all_leaves) > len(self.leaves)
        return FlatParamHandle(
            self.layout, shard, self.leaves, self.groups, self.device, self.offload, self.tp, with_whole=with_whole
        )

    def _put_at_rest(self, shard: torch.Tensor) -> torch.Tensor:
        """Return ``shard``, in host memory if it is offloaded.

        Pinned memory is not mapped in child processes that the program forks: a child that reads an offloaded parameter
        there crashes. Pass ``CPUOffload(pin_memory=False)``, or read ``full_tensor(param)`` before the fork.
        """
        if not self.offload.offload_params or self.device.type == "cpu":
            return shard
        memory = streams_for(self.device).host_memory(shard.nbytes, pinned=self.offload.pin_memory)
        return place(memory, shard).copy_(shard)

    def _new_leaves(self, dtype: torch.dtype, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        placed = [None if tp is None or tp.is_plain else tp for tp in self.tp]
        pairs = list(itertools.zip_longest(placed, params))
        empty = functools.partial(torch.empty, 0, dtype=dtype, device=self.device)
        leaves = [nn.Parameter(empty(), param.requires_grad and tp is None) for tp, param in pairs]
        for index, (tp, param) in enumerate(pairs):
            if tp is not None:  # compilers compare the offset, which the DTensor keeps from its construction
                local = leaves[index].detach().as_strided((0,), (1,), self.layout.params[index].offset).detach()
                leaves[index] = tp.around(local, requires_grad=param.requires_grad)
            leaves[index].__dict__.update(param.__dict__)  # forwards read the attributes that users set
            leaves[index].__dict__.pop("_local_shard", None)  # of the flat parameter: it would outlive a new shard
        return leaves

    def _make_copy(self, dtype: torch.dtype, leaves: list[nn.Parameter]) -> FullCopy:
        differs = (dtype, self.device) != (self._shard.dtype, self._shard.device)
        resident = not self.groups.sharded and not differs
        size = self.layout.padded_numel
        buffer = self._shard if resident else torch.empty(size, dtype=dtype, device=self.device)
        self._copies[dtype] = copy = FullCopy(self.layout, buffer, leaves, resident=resident)
        return copy

    def set_unit_name(self, name: str) -> None:
        """Use ``name`` for the unit in errors."""
        self.unit_name = name

    def reduce_in(self, dtype: torch.dtype) -> None:
        """Reduce gradients in ``dtype`` from now on."""
        self.layout = dataclasses.replace(self.layout, reduce_dtype=dtype)

    def compute_in_full_precision(self, full_precision: bool) -> None:
        """Compute and reduce in ``layout.dtype`` from now on, or in the layout's own dtypes again."""
        self.full_precision = full_precision
        dtype = self.layout.dtype if full_precision else self.layout.compute_dtype
        copy = self._copies.get(dtype)
        if copy is None:
            with torch.inference_mode(False):  # later forwards may need gradients
                copy = self._make_copy(dtype, self._new_leaves(dtype, self.copy.all_leaves))
        self.copy = copy

    @property
    def is_mixed(self) -> bool:
        """Whether the layout's compute or reduce dtype differs from the shard's."""
        return (self.layout.compute_dtype, self.layout.reduce_dtype) != (self.layout.dtype, self.layout.dtype)

    @property
    def full(self) -> torch.Tensor:
        """The tensor of the full buffer in use."""
        return self.copy.tensor

    @property
    def leaves(self) -> list[nn.Parameter]:
        """The leaves over the full buffer in use."""
        return self.copy.leaves

    @property
    def all_leaves(self) -> Iterator[tuple[int, nn.Parameter]]:
        """(index, leaf) in every dtype that was used; the whole vector's leaf follows those of the layout."""
        return ((index, leaf) for copy in self._copies.values() for index, leaf in enumerate(copy.all_leaves))

    def name_of(self, index: int) -> str:
        """Return the name of leaf ``index`` in errors."""
        return self.layout.params[index].name if index < len(self.layout.params) else "_flat_param"

    @property
    def reduce_dtype(self) -> torch.dtype:
        """The dtype of the reduce buffer."""
        return self.layout.dtype if self.full_precision else self.layout.reduce_dtype

    @property
    def full_nbytes(self) -> int:
        """The bytes of the full buffer, if it has memory of its own."""
        return self.copy.pooled.nbytes if self.copy.pooled is not None else 0

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part of the flat vector, detached; ``layout.shard_numel`` elements in ``layout.dtype``."""
        return self._shard

    @property
    def keeps_gradients_on_host(self) -> bool:
        """Whether reduced gradients leave the device that computes them."""
        return self.offload.gradients and self.device.type != "cpu"

    def describe_sharded(self, index: int) -> str:
        """Return the text of errors for a read of parameter ``index`` while it is sharded."""
        return (
            f"parameter {self.name_of(index)!r} of {self.unit_name} is sharded; its values are there only "
            "while the unit runs. Call the wrapped module itself, or a module that contains it, instead of reading the "
            "parameter or calling a module inside the unit. Where the module around reads it, as "
            "nn.TransformerEncoderLayer does in eval mode, wrap that one instead. Use register_forward_method() for "
            "other methods, and summon_full_params() to read parameters"
        )

    # -- gather and release --------------------------------------------------------------------------------------------

    def begin_gather(self, pool: MemoryPool, communicator: Communicator, *, nearby: bool) -> Gather:
        """Give the full buffer memory, and return the gather that fills it; see :func:`gather`."""
        copy = self.copy
        if not communicator.is_chosen:
            communicator.choose(self.device)  # this may raise, and decides on the kind of memory
        assert copy.pooled is not None
        # first the source: an upload does not wait, as the memory does, until the compute has left a full buffer
        if nearby:
            assert self._slice is not None
            source = self._slice
        elif self.groups.sharded:
            source = self._shard_as(copy.tensor.dtype, communicator.streams)
        else:
            source = self._shard  # where the unit is not sharded, the copy moves and casts it
        if copy.state is not BufferState.SHARDED:
            copy.wait()
            if not pool.may_refill(copy.pooled):
                copy.release(pool, None)
        if copy.state is BufferState.SHARDED:
            pool.allocate(copy.pooled)
        copy.begin()
        return Gather(copy.tensor, source, copy.cut)

    def _shard_as(self, dtype: torch.dtype, streams: Streams) -> torch.Tensor:
        """Return the shard on the device, in ``dtype``. It is uploaded first, so that the device casts it."""
        if self._shard.dtype == dtype and self._shard.device == self.device:
            return self._shard
        return streams.upload(self._shard).to(dtype)

    def part_for_others(self, streams: Streams, *, full_precision: bool) -> Gather:
        """Make this rank's part in a gather that only peers need, in their dtype, without the full buffer."""
        dtype = self.layout.dtype if full_precision else self.layout.compute_dtype
        unread = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.device)
        return Gather(unread, self._shard_as(dtype, streams))

    @property
    def has_slice(self) -> bool:
        """Whether a slice of the full buffer is kept for the next gather."""
        return self._slice is not None and self._slice.dtype == self.copy.tensor.dtype

    def keep_slice(self, nearby: Groups) -> None:
        """Keep this rank's slice of the filled full buffer for gathers among the ranks ``nearby``. The current stream
        has filled the buffer, and gathers again."""
        if not self.has_slice:
            self._slice = self.full.view(nearby.shard_size, -1)[nearby.shard_rank].clone()

    def forget_slice(self) -> None:
        """Let the next gather read the shard, which may have changed."""
        self._slice = None

    def leave_buffer(self) -> None:
        """Replace the full buffer by a new one, without memory: a gather that cannot be waited for may still write to
        the old one, and keeps it alive. Backwards of earlier forwards, which saved the old memory, are refused."""
        copy = self.copy
        copy.outdate()
        with torch.inference_mode(False):
            self.copy = self._make_copy(copy.tensor.dtype, copy.all_leaves)

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Freeze or unfreeze parameter ``index`` in every dtype."""
        for copy in self._copies.values():
            copy.set_requires_grad(index, requires_grad)

    def is_cut(self, index: int) -> bool:
        """Whether tensor parallelism has cut parameter ``index``, so that no rank has all of it."""
        tp = self.tp[index]
        return tp is not None and tp.dim is not None

    @property
    def tp_group(self) -> ProcessGroup | None:
        """The group of the bucket's parameters of tensor parallelism; None without such parameters."""
        return next((tp.group for tp in self.tp if tp is not None), None)

    def note_replicas(self, tp_group: ProcessGroup) -> None:
        """Note that the ranks of ``tp_group``, by which other units of the model are cut, hold equal parameters here.

        This is a no-op for a bucket that is cut, sharded or replicated over these ranks.
        """
        own = [group for group in (self.groups.shard, self.groups.replica, self.tp_group) if group is not None]
        if not any(len({*rank_names(group)}.intersection(rank_names(tp_group))) > 1 for group in own):
            self.replicated_over = tp_group

    def is_leaf(self, tensor: object, index: int) -> bool:
        """Whether ``tensor`` is a leaf of parameter ``index``."""
        return any(copy.leaves[index] is tensor for copy in self._copies.values())

    def replace_shard(self, new: torch.Tensor, compute_device: torch.device, precision: MixedPrecision) -> None:
        """Let ``new``, of another dtype or device or in other memory, be the shard. The layout keeps the offsets.

        The flat parameter and the leaves stay the same objects, except ``DTensor`` s, whose dtype is fixed. The full
        buffer must have been released.
        """
        self.forget_slice()
        self.compute_in_full_precision(False)
        self.copy.outdate()
        before = self.copy.all_leaves
        self.layout = dataclasses.replace(
            self.layout,
            dtype=new.dtype,
            compute_dtype=precision.compute_dtype_of(new.dtype),
            reduce_dtype=precision.reduce_dtype_of(new.dtype),
        )
        self.device = compute_device
        self._shard = self.flat_param.data = self.flat_param._local_shard = self._put_at_rest(new)
        self._copies.clear()
        leaves = before
        if self.has_tp:
            renewed = self._new_leaves(self.layout.compute_dtype, before)
            leaves = [old if tp is None else new for tp, old, new in itertools.zip_longest(self.tp, before, renewed)]
        self.copy = self._make_copy(self.layout.compute_dtype, leaves)

    # -- the shard's views ---------------------------------------------------------------------------------------------

    def sharded_views(self, flat_shard: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's part of a vector of ``layout.shard_numel`` elements in the order of the shard.

        Sharded: 1-D, of size 0 for a parameter without elements on this rank. Not sharded: in the parameter's shape.
        """
        if not self.groups.sharded:
            return parameter_views(self.layout, flat_shard)
        parts = flat_shard.split_with_sizes(self._lengths)
        return list(map(parts.__getitem__, self._parts))

    def part_of(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of ``whole``, values of parameter ``index``, in the shape of :meth:`sharded_views`.

        ``whole`` has the true shape or, with tensor parallelism, that of the rank's local tensor.
        """
        record, tp = self.layout.params[index], self.tp[index]
        if tp is not None and whole.shape != record.shape:
            whole = tp.part_of(whole)
        if not self.groups.sharded:
            return whole
        return _piece_of(record, self.layout.piece(index, self.groups.shard_rank), whole)


def shard_of(layout: FlatLayout, params: Sequence[torch.Tensor], rank: int, device: torch.device) -> torch.Tensor:
    """Copy the parts of ``params`` that ``rank`` owns into a new shard."""
    zeros = functools.partial(torch.zeros, dtype=layout.dtype, device=device)
    parts, end = list[torch.Tensor](), 0
    for record, piece, param in zip(layout.params, layout.pieces(rank), params):
        if piece.numel:
            if piece.shard_offset > end:
                parts.append(zeros(piece.shard_offset - end))
            parts.append(_piece_of(record, piece, param))
            end = piece.shard_offset + piece.numel
    return torch.cat([*parts, zeros(layout.shard_numel - end)])


def gather(
    handles: Sequence[FlatParamHandle],
    pool: MemoryPool,
    communicator: Communicator,
    event: Event,
    *,
    nearby: bool = False,
) -> None:
    """Start filling the full buffers of a unit by one collective, on the current stream, even if they are filled.

    Args:
        nearby: gather the slices that the ranks of ``communicator`` have kept.
    """
    parts, issues = [], False
    try:
        for handle in handles:
            if handle.copy.state is not BufferState.RESIDENT:
                parts.append(handle.begin_gather(pool, communicator, nearby=nearby))
        if not parts:
            return
        issues = True
        pending = communicator.gather(parts, event)
        for handle in handles:
            if handle.copy.state is BufferState.GATHERING:
                handle.copy.pending = pending
    except BaseException as error:
        # Without memory no collective was issued. On an accelerator, a collective ends before the gather stream, which
        # owns the memory, uses it again.
        is_over = isinstance(error, OSError) or not issues or not communicator.streams.asynchronous_work
        for handle in handles:
            if handle.copy.state is BufferState.GATHERING:
                if is_over:
                    handle.copy.give_up(pool)
                else:
                    handle.leave_buffer()
        raise


def _piece_of(record: ParamRecord, piece: Piece, whole: torch.Tensor) -> torch.Tensor:
    """Return the ``piece`` of ``whole``, a parameter's values, for a shard: 1-D, possibly a view."""
    whole = whole.detach()
    if whole.stride() != record.stride:
        in_memory_order = torch.empty_strided(record.shape, record.stride, dtype=whole.dtype, device=whole.device)
        whole = in_memory_order.copy_(whole)
    return whole.as_strided((piece.numel,), (1,), whole.storage_offset() + piece.start)


def _lengths_and_parts(layout: FlatLayout, rank: int) -> tuple[list[int], list[int]]:
    """Divide a shard into parts: an empty one, then the pieces of parameters and the gaps between them.

    Returns the lengths of the parts, and the number of the part of each parameter; 0 for one without elements here.
    """
    lengths, parts, end = [0], list[int](), 0
    for piece in layout.pieces(rank):
        if piece.numel == 0:
            parts.append(0)
            continue
        if piece.shard_offset > end:
            lengths.append(piece.shard_offset - end)
        parts.append(len(lengths))
        lengths.append(piece.numel)
        end = piece.shard_offset + piece.numel
    return [*lengths, layout.shard_numel - end], parts
