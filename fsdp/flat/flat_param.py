"""One bucket of a unit: its shard, its full buffer and its leaves; gathering and releasing them.

See [Note: Permanent tensors, pooled memory] in ``full_copy.py``.

[Note: The tensors of a bucket]
Of each bucket there are, of ``shard_numel`` elements (1/N of the padded flat vector) or ``padded_numel`` (all of it):

===================  ========  =============  ==============================================  ========================
tensor               elements  dtype          has memory                                      its memory belongs to
===================  ========  =============  ==============================================  ========================
shard, the data of   shard     parameter      always; in host memory with CPU offload         the compute stream
``flat_param``
cast shard           shard     compute        during a gather; where ``no_sync`` gathers      the gather stream
                                              again what has not changed, until it has
part for those       padded/k  compute        from a forward to the end of the backward,      the gather stream
nearby                                        where k ranks stay sharded
full buffer, and     padded    compute        while the unit is gathered                      the gather stream's pool
its leaves
reduce buffer, and   padded    reduce         from a backward's first gradient until it is    the compute stream's pool
its slots                                     reduced
accumulator          padded    reduce         under ``no_sync``, until it is reduced or the   the compute stream
                                              user drops it; it is ``.grad`` meanwhile
reduced gradient     shard     parameter      from the reduction on; ``.grad`` from the end   the compute stream
                                              of the backward until the user drops it
===================  ========  =============  ==============================================  ========================

The original parameters (``use_orig_params=True``) are views of the shard, placeholders (False) have no memory. Each
dtype that was computed in has a full buffer of its own, and one that is as the shard (one rank, same dtype and device)
is the shard. A stream that reads memory of another one's leaves an event, for which the owner waits before it uses
that memory again: see [Note: Memory across streams] in ``fsdp/comm/streams.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fsdp.api import CPUOffload, MixedPrecision
from fsdp.comm.collectives import Communicator, Event, Gather
from fsdp.comm.groups import Groups
from fsdp.comm.host_memory import place
from fsdp.comm.streams import StreamEvent, Streams, streams_for
from fsdp.flat.full_copy import BufferState, FullCopy, parameter_views
from fsdp.flat.layout import FlatLayout, ParamRecord, Piece
from fsdp.flat.memory import MemoryPool
from fsdp.flat.metadata import for_tools
from fsdp.flat.released import PLAIN_KINDS, CheckedLeaf, new_leaves
from fsdp.flat.tensor_parallel import TensorParallel, local_of

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


def assign_grad(param: nn.Parameter, grad: torch.Tensor | None) -> bool:
    """Set ``param.grad`` to a gradient that may have another shape, dtype or device than ``param``.

    Returns whether autograd makes a new accumulator for ``param`` from now on, on which nothing is hooked.
    """
    if grad is None or (grad.shape, grad.dtype, grad.device) == (param.shape, param.dtype, param.device):
        param.grad = grad
        return False
    shard = param.data
    param.data = grad  # autograd compares the two when the gradient is assigned, and only then
    param.grad = grad
    param.data = shard
    return (grad.dtype, grad.device) != (shard.dtype, shard.device)


@dataclasses.dataclass(frozen=True, slots=True)
class GatherSource:
    """A tensor that a handle keeps for the next gather, in the compute dtype.

    Attributes:
        is_slice: it is this rank's slice of the full buffer, for a gather among nearby ranks; else the cast shard.
    """

    tensor: torch.Tensor
    is_slice: bool


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
        tp: of each parameter of the layout how tensor parallelism has placed it, if it has. The layout's shapes are
            those of this rank's parts then, and leaves are ``DTensor`` s.
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
        tp: Sequence[TensorParallel | None],
        *,
        with_whole: bool,
    ) -> None:
        """Takes ``shard`` over. ``params`` tell what requires grad, and what users have hung on it; ``with_whole``:
        there are leaves for the whole vector as well."""
        self.layout = layout
        self.groups = groups
        self.device = device
        self.offload = offload
        self.tp = tuple(tp)
        self.has_tp = any(self.tp)  # whether some has
        self._cuts, self._places = layout.once(("cuts", groups.shard_rank), lambda: _cuts(layout, groups.shard_rank))
        self.full_precision = False
        self._source: GatherSource | None = None  # kept for the next gather
        self.unit_name = "its unit"

        self._shard = self._put_at_rest(shard)
        requires_grad = any(param.requires_grad for param in params)
        # Its version counter is its own: it tells what users change in place, and not what we write to the shard.
        self.flat_param: Any = FlatParameter(torch.empty_like(self._shard[:0]), requires_grad=requires_grad)
        self.flat_param.data = self._shard
        self.flat_param.__dict__.update(for_tools(layout, groups.shard_rank), _local_shard=self._shard)
        self._copies: dict[torch.dtype, FullCopy] = {}
        like = [*params, self.flat_param] if with_whole else params
        self.copy = self._make_copy(layout.compute_dtype, self._new_leaves(layout.compute_dtype, like))

    @staticmethod
    def flatten(
        layout: FlatLayout,
        params: list[nn.Parameter],
        groups: Groups,
        device: torch.device,
        offload: CPUOffload,
        tp: Sequence[TensorParallel | None],
        *,
        with_whole: bool,
    ) -> FlatParamHandle:
        """A handle with the values of ``params``, which stay as they are."""
        zeros = functools.partial(torch.zeros, dtype=layout.dtype, device=device)
        parts, end = list[torch.Tensor](), 0
        for record, piece, param in zip(layout.params, layout.pieces(groups.shard_rank), params):
            if piece.numel:
                if piece.shard_offset > end:
                    parts.append(zeros(piece.shard_offset - end))
                parts.append(_piece_of(record, piece, param))
                end = piece.shard_offset + piece.numel
        shard = torch.cat([*parts, zeros(layout.shard_numel - end)])
        return FlatParamHandle(layout, shard, params, groups, device, offload, tp, with_whole=with_whole)

    def clone(self) -> FlatParamHandle:
        """One with the same values, in memory of its own."""
        shard = self._shard.clone()
        with_whole = self.copy.whole is not None
        return FlatParamHandle(
            self.layout, shard, self.leaves, self.groups, self.device, self.offload, self.tp, with_whole=with_whole
        )

    def _put_at_rest(self, shard: torch.Tensor) -> torch.Tensor:
        """``shard``, in host memory if that is where it lives."""
        if not self.offload.offload_params or self.device.type == "cpu":
            return shard
        memory = streams_for(self.device).host_memory(shard.nbytes, pinned=self.offload.pin_memory)
        return place(memory, shard).copy_(shard)

    def _new_leaves(self, dtype: torch.dtype, params: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        its = list(itertools.zip_longest(self.tp, params))
        leaves = new_leaves(dtype, self.device, [param.requires_grad and tp is None for tp, param in its])
        for index, (tp, param) in enumerate(its):
            if tp is not None:  # it keeps the offset that its local tensor has when it is made, and compilers compare
                local = leaves[index].detach().as_strided((0,), (1,), self.layout.params[index].offset).detach()
                leaves[index] = tp.around(local, requires_grad=param.requires_grad)
            leaves[index].__dict__.update(param.__dict__)  # what users hang on their parameters is there in forward too
        return leaves

    def _make_copy(self, dtype: torch.dtype, leaves: list[nn.Parameter]) -> FullCopy:
        differs = (dtype, self.device) != (self._shard.dtype, self._shard.device)
        resident = not self.groups.sharded and not differs
        size = self.layout.padded_numel
        buffer = self._shard if resident else torch.empty(size, dtype=dtype, device=self.device)
        views = parameter_views(self.layout, buffer)
        self._copies[dtype] = copy = FullCopy(self.layout, buffer, views, leaves, resident=resident, differs=differs)
        for index, memory in enumerate(copy.memories):
            if isinstance(memory, CheckedLeaf):
                memory.explain = functools.partial(_why_not, weakref.ref(self), weakref.ref(copy), index)
        return copy

    def set_unit_name(self, name: str) -> None:
        """Use ``name`` for the unit in errors."""
        self.unit_name = name

    def reduce_in(self, dtype: torch.dtype) -> None:
        """Reduce gradients in ``dtype`` from now on."""
        self.layout = dataclasses.replace(self.layout, reduce_dtype=dtype)

    def compute_in_full_precision(self, full_precision: bool) -> None:
        """Compute and reduce in ``layout.dtype`` from here on, or in the layout's own dtypes again."""
        self.full_precision = full_precision
        dtype = self.layout.dtype if full_precision else self.layout.compute_dtype
        copy = self._copies.get(dtype)
        if copy is None:
            with torch.inference_mode(False):  # it outlives this forward, and the next one may want gradients
                copy = self._make_copy(dtype, self._new_leaves(dtype, self.copy.all_leaves))
        self.copy = copy

    @property
    def is_mixed(self) -> bool:
        """Whether it computes or reduces in another dtype than the shard has, unless in full precision."""
        return (self.layout.compute_dtype, self.layout.reduce_dtype) != (self.layout.dtype, self.layout.dtype)

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
        return self.copy.pooled.nbytes if self.copy.pooled is not None else 0

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> BufferState:
        return self.copy.state

    @property
    def shard(self) -> torch.Tensor:
        """This rank's part of the flat vector, detached; ``layout.shard_numel`` elements in ``layout.dtype``."""
        return self._shard

    @property
    def keeps_gradients_on_host(self) -> bool:
        """Whether reduced gradients leave the device that computes them."""
        return self.device.type != "cpu" and self.offload.gradients

    def holds_any(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether one of ``tensors`` lies in the full buffer, and so loses its values when that is released."""
        if self.copy.pooled is None or self.copy.state is BufferState.SHARDED:
            return False
        start = self.copy.tensor.data_ptr()
        end = start + self.copy.pooled.nbytes
        for tensor in tensors:
            plain = tensor if type(tensor) is torch.Tensor else local_of(tensor)
            if type(plain) in PLAIN_KINDS and plain.layout == torch.strided and start <= plain.data_ptr() < end:
                return True
        return False

    def describe_sharded(self, index: int) -> str:
        """Why parameter ``index`` of the layout cannot be read, and what to do."""
        return (
            f"parameter {self.name_of(index)!r} of {self.unit_name} is sharded; its values are there only "
            "while the unit runs. Call the wrapped module itself, or a module that contains it, instead of reading the "
            "parameter or calling a module inside the unit. Where the module around reads it, as "
            "nn.TransformerEncoderLayer does in eval mode, wrap that one instead. Use register_forward_method() for "
            "other methods, and summon_full_params() to read parameters"
        )

    # -- gather and release --------------------------------------------------------------------------------------------

    def begin_gather(self, pool: MemoryPool, communicator: Communicator, *, keep_cast: bool, nearby: bool) -> Gather:
        """Give the full buffer memory, and return the gather that fills it; see :func:`gather`."""
        copy = self.copy
        if not communicator.is_chosen:
            communicator.choose(self.device)  # which may fail, and decides which memory is of use
        assert copy.pooled is not None
        if copy.state is not BufferState.SHARDED:
            self.wait()
            if not pool.may_refill(copy.pooled):
                self.release(pool, None)
        if copy.state is BufferState.SHARDED:
            pool.allocate(copy.pooled)
        copy.enter(BufferState.GATHERING)
        if nearby:
            assert self._source is not None
            source = self._source.tensor
        elif self.groups.sharded:
            source = self._whole_shard(copy, communicator.streams, keep_cast=keep_cast)
        else:
            source = self._shard  # it is moved and cast as it is copied
        return Gather(copy.tensor, source, copy.cut)

    def _whole_shard(self, copy: FullCopy, streams: Streams, *, keep_cast: bool) -> torch.Tensor:
        """Return the shard in the dtype of ``copy``: the cast that an earlier gather has kept, or a new one. With
        ``keep_cast``, keep it."""
        kept, self._source = self._source, None
        if kept is not None and not kept.is_slice and kept.tensor.dtype == copy.tensor.dtype:
            shard = kept.tensor
        else:
            shard = self._shard_as(copy.tensor.dtype, streams) if copy.differs else self._shard
        if keep_cast and shard.dtype != self._shard.dtype and self._shard.device == self.device:
            self._source = GatherSource(shard, is_slice=False)
        return shard

    def _shard_as(self, dtype: torch.dtype, streams: Streams) -> torch.Tensor:
        """The shard where it is computed, in ``dtype``; in two steps: a host tensor would be cast by the host."""
        if self._shard.dtype == dtype and self._shard.device == self.device:
            return self._shard
        return streams.upload(self._shard).to(dtype)

    def part_for_others(self, streams: Streams, *, full_precision: bool) -> Gather:
        """For a gather that only other ranks need, in the dtype that they need; the full buffer is left alone."""
        dtype = self.layout.dtype if full_precision else self.layout.compute_dtype
        unread = torch.empty(self.layout.padded_numel, dtype=dtype, device=self.device)
        return Gather(unread, self._shard_as(dtype, streams))

    @property
    def has_slice(self) -> bool:
        """Whether a slice of the full buffer is kept for the next gather."""
        kept = self._source
        return kept is not None and kept.is_slice and kept.tensor.dtype == self.copy.tensor.dtype

    def keep_slice(self, nearby: Groups) -> None:
        """Keep this rank's slice of the filled full buffer for gathers among the ranks ``nearby``. The current stream
        has filled the buffer, and gathers again."""
        if not self.has_slice:
            part = self.full.view(nearby.shard_size, -1)[nearby.shard_rank]
            self._source = GatherSource(part.clone(), is_slice=True)

    def forget_source(self) -> None:
        """Let the next gather read the shard, which may have changed."""
        self._source = None

    def wait(self) -> None:
        """The full buffer is filled when this returns (for the current stream)."""
        copy = self.copy
        if copy.pending is not None:  # another stream may have waited before
            copy.pending.wait()  # where that is interrupted, the gather is still under way
            if copy.state is BufferState.GATHERING:
                copy.enter(BufferState.UNSHARDED)

    def release(self, pool: MemoryPool, last_use: StreamEvent) -> None:
        """Give the full buffer's memory back; idempotent. The current stream owns ``pool``."""
        copy = self.copy
        if copy.state is not BufferState.UNSHARDED:
            return
        copy.enter(BufferState.SHARDED)
        copy.pending = None
        assert copy.pooled is not None
        pool.free(copy.pooled, last_use)

    def leave_buffer(self) -> None:
        """Have another full buffer, without memory: to this one may still be written, by a gather that nobody can wait
        for, and which holds it. Graphs of before are refused: they have saved its memory."""
        copy = self.copy
        copy.outdate()
        with torch.inference_mode(False):
            self.copy = self._make_copy(copy.tensor.dtype, copy.all_leaves)

    def first_difference(self) -> int | None:
        """Compare this rank's part of the full buffer with the shard, bit by bit, and return the index of the first
        parameter that differs. Waits for the device."""
        start, end = self.layout.shard_range(self.groups.shard_rank)
        now = self.full[start:end].view(torch.uint8)
        expected = self._shard.to(self.device).to(self.full.dtype).view(torch.uint8)
        if torch.equal(now, expected):
            return None
        place = start + int((now != expected).nonzero()[0]) // self.full.element_size()
        return next((index for index, p in enumerate(self.layout.params) if p.offset <= place < p.end), None)

    def set_requires_grad(self, index: int, requires_grad: bool) -> None:
        """Freeze or unfreeze parameter ``index`` in every dtype."""
        for copy in self._copies.values():
            copy.set_requires_grad(index, requires_grad)

    @property
    def wholes(self) -> list[nn.Parameter]:
        """What modules show for the flat parameter while the unit runs, in every dtype that was computed in."""
        return [copy.whole for copy in self._copies.values() if copy.whole is not None]

    def is_cut(self, index: int) -> bool:
        """Whether tensor parallelism has cut parameter ``index``: of others every rank of it has all."""
        tp = self.tp[index]
        return tp is not None and tp.dim is not None

    @property
    def tp_group(self) -> Any | None:
        """The ranks that its parameters of tensor parallelism are placed on; None where there are none."""
        return next((tp.group for tp in self.tp if tp is not None), None)

    def is_leaf(self, tensor: Any, index: int) -> bool:
        """Whether ``tensor`` is a leaf of parameter ``index``."""
        return any(copy.leaves[index] is tensor for copy in self._copies.values())

    def replace_shard(self, new: torch.Tensor, compute_device: torch.device, precision: MixedPrecision) -> None:
        """Let ``new``, of another dtype or device or just other memory, be the shard; the layout keeps its offsets.

        The flat parameter and the leaves stay the same objects, but for ``DTensor`` s, which keep their dtype. The full
        buffer must have been released.
        """
        self.forget_source()
        self.compute_in_full_precision(False)
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
        """Each parameter's part in a vector of ``layout.shard_numel`` elements that lies like this rank's shard.

        Sharded: 1-D, of size 0 where this rank owns nothing of the parameter. Not sharded: the parameter's own shape.
        """
        if not self.groups.sharded:
            return parameter_views(self.layout, flat_shard)
        parts = flat_shard.split_with_sizes(self._cuts)
        return [parts[place] for place in self._places]

    def part_of(self, index: int, whole: torch.Tensor) -> torch.Tensor:
        """What :meth:`sharded_views` has of parameter ``index``, of a tensor in its true shape, or with tensor
        parallelism in that of this rank's part of it."""
        record, tp = self.layout.params[index], self.tp[index]
        if tp is not None and whole.shape != record.shape:
            whole = tp.part_of(whole)
        if not self.groups.sharded:
            return whole
        return _piece_of(record, self.layout.piece(index, self.groups.shard_rank), whole)


def gather(
    handles: Sequence[FlatParamHandle],
    pool: MemoryPool,
    communicator: Communicator,
    event: Event,
    *,
    keep_cast: bool = False,
    nearby: bool = False,
) -> None:
    """Start filling the full buffers of a unit as one collective, on the current stream; refill those that are filled
    already. ``nearby``: from the parts that ``communicator``'s ranks have kept.

    With ``keep_cast`` the shards in the compute dtype are kept for the next gather, which is to see the same values;
    :meth:`FlatParamHandle.forget_source` drops them.
    """
    parts, issues = [], False
    try:
        for handle in handles:
            if handle.copy.state is not BufferState.RESIDENT:
                parts.append(handle.begin_gather(pool, communicator, keep_cast=keep_cast, nearby=nearby))
        if not parts:
            return
        issues = True
        pending = communicator.gather(parts, event)
        for handle in handles:
            if handle.copy.state is BufferState.GATHERING:
                handle.copy.pending = pending
    except BaseException as error:
        # No room: nothing was issued. On an accelerator what was is over before the gather stream uses the memory.
        is_over = isinstance(error, OSError) or not issues or not communicator.streams.asynchronous_work
        for handle in handles:
            if handle.state is BufferState.GATHERING:
                if is_over:
                    handle.copy.enter(BufferState.UNSHARDED)
                    handle.release(pool, None)
                else:
                    handle.leave_buffer()
        raise


def _piece_of(record: ParamRecord, piece: Piece, whole: torch.Tensor) -> torch.Tensor:
    """What is to lie in a shard of ``whole``, a parameter's values: 1-D, maybe a view."""
    whole = whole.detach()
    if whole.stride() != record.stride:
        in_memory_order = torch.empty_strided(record.shape, record.stride, dtype=whole.dtype, device=whole.device)
        whole = in_memory_order.copy_(whole)
    return whole.as_strided((piece.numel,), (1,), whole.storage_offset() + piece.start)


def _cuts(layout: FlatLayout, rank: int) -> tuple[list[int], list[int]]:
    """The lengths of what a shard consists of, nothing first: by turns what lies before a parameter's piece, and the
    piece; and which of these each parameter has. Many have nothing here."""
    cuts, places, end = [0], list[int](), 0
    for piece in layout.pieces(rank):
        if piece.numel == 0:
            places.append(0)
            continue
        places.append(len(cuts) + 1)
        cuts += [piece.shard_offset - end, piece.numel]
        end = piece.shard_offset + piece.numel
    return [*cuts, layout.shard_numel - end], places


_KEPT = (
    "This reference was kept from inside a forward; where a backward came by it, through a tensor that the forward "
    "stored, or that a hook took, and did not return: mark that one inside the forward by fsdp.mark_side_output(tensor)"
)


def _why_not(
    handle_ref: weakref.ref[FlatParamHandle], copy_ref: weakref.ref[FullCopy], index: int, written: bool
) -> str | None:
    """What a :class:`CheckedLeaf` of the handle's copy asks before it is read, or ``written``."""
    handle, copy = handle_ref(), copy_ref()
    if handle is None:
        return "a parameter was read after its unit was deleted"
    if copy is None or copy.state not in (BufferState.UNSHARDED, BufferState.RESIDENT):
        return f"{handle.describe_sharded(index)}. {_KEPT}"
    if written and not copy.keeps_writes:
        return f"{handle.name_of(index)!r} of {handle.unit_name} is written, {LOST_WRITE}"
    return None
