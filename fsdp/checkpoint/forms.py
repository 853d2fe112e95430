"""The forms that a tensor has in state dicts: whole, as chunks of rows, as what a shard holds, as a part of a vector.

A *form* tells which rank gets which elements (``place``), makes of them what stands in the state dict (``wrap``), and
finds in such a value what this rank has (``read``). All that leaves a model or an optimizer does so by :func:`export`,
and all that comes back by :func:`fill`, whatever its form.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp import api
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.sharded_tensors import (
    box_at,
    check_no_mesh,
    cut_dims,
    dim_of,
    dims_of_tp,
    group_of,
    group_that_has,
    is_sharded,
    kind_of,
    one_chunk_each,
    rows_of_shards,
    rows_on,
)
from fsdp.comm.groups import Groups, group_ranks
from fsdp.comm.host_memory import empty_strided
from fsdp.flat.layout import contiguous_stride
from fsdp.flat.tensor_parallel import TensorParallel, local_of
from fsdp.placement.boxes import Box, Part, Placement, chunk_rows, copy_parts, dense_stride, memory_order
from fsdp.placement.redistribute import Channel, Channels, Item, redistribute
from fsdp.runtime.unit import Unit


class Held(NamedTuple):
    """A tensor whose elements the ranks of a group hold.

    Attributes:
        part: this rank's interval of it.
        spans: gives the (rank, start, end) of every rank's; None if each has all of it.
        tp: how tensor parallelism has placed it, if it has: all of this is about a part of it then, and the ranks of
            another group hold the rest.
    """

    part: RaggedTensor
    spans: Callable[[], Sequence[tuple[int, int, int]]] | None
    tp: TensorParallel | None = None

    def placement(self, ranks: int) -> Placement | None:
        """Of its elements on so many ranks; None if each has all of it."""
        part, spans = self.part, self.spans
        return spans and Placement.intervals(part.shape, part.stride(), tuple(spans()), ranks, part.within)

    @property
    def shares(self) -> Placement:
        """What each rank of tensor parallelism holds parts of."""
        tp = self.tp
        assert tp is not None
        return Placement(tuple((Box(tp.offsets(rank), tp.local_shape(rank)),) for rank in range(tp.group.size())))


class Source(NamedTuple):
    """What this rank has of a tensor; ``placement`` is None if every rank has what it needs. ``group`` are the ranks
    that have it, if others than those that hold the parts of the tensor that it goes to. If it is ``spread`` over a
    group, that of tensor parallelism, its ranks have, as the placement there says, together what ``placement`` says of
    this rank."""

    placement: Placement | None
    parts: Sequence[Part]
    group: Any = None
    spread: tuple[Any, Placement] | None = None

    @classmethod
    def of_first(cls, value: torch.Tensor | None, shape: tuple[int, ...], ranks: int, tp: Any = None) -> Source:
        """Of a tensor that rank 0 has as ``value``, and the others, where it is None, not at all; with ``tp``, the
        ranks of tensor parallelism, it is rank 0 of them that has it, and the others have parts to get from it."""
        placement = Placement.whole(shape, ranks, only=0)
        spread = None if tp is None else (tp, Placement.whole(shape, tp.size(), only=0))
        if value is None:
            return cls(placement, [], spread=spread)
        return cls(placement, [(Box.whole(shape), local_of(value))], spread=spread)


@dataclass(frozen=True)
class Form(ABC):
    """What becomes of tensors on their way into a state dict, whatever their unit.

    Attributes:
        rank0_only: only rank 0 gets it. For ``Full``.
        offload_to_cpu: tensors in CPU memory; else where the unit computes, or in the shards' own memory.
        rows: for ``Rows``: the mesh and its dimension over which they lie as ``DTensor``; None for ``ShardedTensor``.
        configs: what asks for it.
        called: in errors.
        is_readable: the values stand in the modules already while ``nn.Module`` walks them.
        stays: the values are the shards' own; nothing travels.
        is_cut: each rank gets a part, so that there have to be several; what is not sharded has the full form.
        is_flat: of flat vectors instead of parameters.
    """

    rank0_only: bool = False
    offload_to_cpu: bool = True
    rows: tuple[DeviceMesh, int] | None = None

    configs: ClassVar[tuple[type, ...]]
    called: ClassVar[str]
    is_readable: ClassVar[bool] = False
    stays: ClassVar[bool] = False
    is_cut: ClassVar[bool] = False
    is_flat: ClassVar[bool] = False

    @staticmethod
    def of(config: Any) -> Form:
        """What this asks for."""
        form = next(form for form in FORMS if isinstance(config, form.configs))
        return form(getattr(config, "rank0_only", False), config.offload_to_cpu)

    def within(self, unit: Unit, *, cut: bool) -> Form:
        """What it is for ``unit``; whole where each rank would get a part and there are no parts (not ``cut``).

        Raises:
            RuntimeError: flat vectors, and the unit has a device mesh; or there is no mesh with tensor parallelism.
        """
        if self.is_cut and not cut:
            return Full(self.rank0_only, self.offload_to_cpu)
        mesh = unit.mesh
        if mesh is None:
            mesh = next((tp.spec.mesh for handle in unit.handles for tp in handle.tp if tp is not None), None)
        if mesh is None or not self.is_cut:
            return self
        if self.is_flat:
            check_no_mesh(unit)
            return self
        rows = rows_on(mesh, group_of(unit.groups))
        if unit.groups.tp is not None and dim_of(rows[0], unit.groups.tp) is None:
            raise RuntimeError(
                f"no dimension of {rows[0]} has the ranks of the tensor parallelism of {unit.name}, "
                f"{group_ranks(unit.groups.tp)}: sharded state needs one mesh that has both dimensions"
            )
        return replace(self, rows=rows)

    def device(self, channel: Channel) -> torch.device | None:
        """Where tensors go; None for where they are."""
        return torch.device("cpu") if self.offload_to_cpu else None if self.stays else channel.device

    def place(self, shape: tuple[int, ...], ranks: int) -> Placement | None:
        """Which of so many ranks gets what of a tensor of this shape; None if it stays where it is."""
        return None

    def share(self, held: Held, box: Box) -> Placement:
        """Which rank of tensor parallelism gets what of ``box``, of a tensor that it has cut."""
        return Placement(((box,),) * len(held.shares.boxes))

    @abstractmethod
    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        """What stands in the state dict for a tensor that the ranks of ``channel`` hold; ``local`` is what this rank
        got of it, if anything."""

    @staticmethod
    @abstractmethod
    def read(value: Any, held: Held, groups: Groups) -> Source:
        """What this rank has in ``value``, which is of this form and goes to ``held`` of a unit of these groups.

        Raises:
            AssertionError: nobody can tell who has what, or ranks that may not take part have some.
            ValueError: it has no values, or not those that this rank needs.
        """


class Full(Form):
    """Whole tensors on every rank, or on rank 0 alone."""

    configs, called = (api.FullStateDictConfig, api.FullOptimStateDictConfig), "a full state dict"
    is_readable = True

    def place(self, shape: tuple[int, ...], ranks: int) -> Placement | None:
        return Placement.whole(shape, ranks)

    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        return local

    @staticmethod
    def read(value: Any, held: Held, groups: Groups) -> Source:
        if value.layout != torch.strided or value.is_meta:
            raise ValueError(f"expected a dense tensor with values, but got {value.layout} on {value.device}")
        return Source(None, [(Box.whole(value.shape), local_of(value).detach())])


class Rows(Form):
    """Each rank's chunk of rows, by the rule of ``torch.chunk``: as ``DTensor`` where there is a mesh, else as
    ``ShardedTensor``. What has no rows is whole on every rank."""

    configs = api.ShardedStateDictConfig, api.ShardedOptimStateDictConfig, api.LocalOptimStateDictConfig
    called, is_cut = "a sharded state dict", True

    def place(self, shape: tuple[int, ...], ranks: int) -> Placement | None:
        if not shape or 0 in shape:
            return Placement.whole(shape, ranks)
        return Placement.chunks(shape, ranks)

    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        shape, tp = tuple(held.part.shape), held.tp
        if not shape or 0 in shape:
            return local
        if local is None:
            sizes = shape if tp is None else tp.local_shape(tp.group.rank())
            local = torch.empty((0, *sizes[1:]), dtype=held.part.dtype, device=self.device(channel))
        rows = local.contiguous()  # as torch's sharded tensors have to be, whatever the parameter is
        if self.rows is None:
            return one_chunk_each(rows, chunk_rows(shape[0], channel.size), shape, channel.group)
        mesh, dim = self.rows
        layout: list[Any] = [ShardOf(0) if at == dim else Replicate() for at in range(mesh.ndim)]
        if tp is not None:
            at = dim_of(mesh, tp.group)
            assert at is not None
            layout[at] = tp.spec.placements[0]
        meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), rows.dtype)
        # not from_local(), which would take to the mesh's device what was offloaded
        return DTensor(rows, DTensorSpec(mesh, tuple(layout), meta), requires_grad=False)

    def share(self, held: Held, box: Box) -> Placement:
        """As a ``DTensor`` has it that is cut into rows before: of rows, chunks."""
        assert held.tp is not None
        if held.tp.dim != 0:
            return held.shares.inside(box)
        (first, *offsets), (count, *sizes) = box
        ranges = chunk_rows(count, len(held.shares.boxes))
        chunks = [Box((first + start, *offsets), (end - start, *sizes)) for start, end in ranges]
        return Placement(tuple((chunk,) if chunk.numel else () for chunk in chunks))

    @staticmethod
    def read(value: Any, held: Held, groups: Groups) -> Source:
        shape = kind_of(value)[1]
        if isinstance(value, DTensor) and (of_tp := dims_of_tp(value, groups)):
            return _read_spread(value, groups, of_tp[0])
        group = group_that_has(value, groups)
        if isinstance(value, DTensor):
            ranges, rows = chunk_rows(shape[0], group.size()), value.to_local().detach()
        else:
            ranges, rows = rows_of_shards(value, group)
        if sum(end - start for start, end in ranges) != shape[0]:
            raise AssertionError(f"the ranks of the group have rows {ranges} of a tensor of shape {shape}")
        placement = Placement.rows(shape, ranges)
        own = [(box, rows) for box in placement.boxes[group.rank()]]
        return Source(placement, own, None if group is group_of(groups) else group)


class Ragged(Form):
    """What this rank's shard holds, in the shard's own memory unless it is on another device."""

    configs = api.RaggedStateDictConfig, api.RaggedOptimStateDictConfig
    called, stays = "a state dict without communication", True

    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        return held.part.with_local(held.part.local.to(device=self.device(channel)))

    @staticmethod
    def read(value: Any, held: Held, groups: Groups) -> Source:
        part = held.part
        of_same = (value.stride(), value.within) == (part.stride(), part.within)
        if not of_same or part.start < value.start or part.end > value.end:
            raise ValueError(
                f"this rank has its elements {part.start} to {part.end} and was given {value.start} to {value.end}; "
                "let torch.distributed.checkpoint load into the state dict of this model instead"
            )
        return Source(None, value.parts)


class Local(Form):
    """Each rank's interval of a vector as ``ShardedTensor``, in the shard's own memory unless that is elsewhere."""

    configs, called = (api.LocalStateDictConfig,), "a local state dict"
    stays = is_cut = is_flat = True

    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        assert held.spans is not None
        ranges = [(start, end) for _, start, end in held.spans()]
        return one_chunk_each(held.part.local.to(self.device(channel)), ranges, held.part.shape, channel.group)

    @staticmethod
    def read(value: Any, held: Held, groups: Groups) -> Source:
        """What is given for a flat vector may be whole as well."""
        source = read(value, held, groups)
        expected, found = held.placement(groups.shard_size), source.placement
        if is_sharded(value) and found != expected:
            raise ValueError(
                f"of its elements {expected}, but in what was given {found}: a local state dict fits only the model it "
                "was made from, at the same number of ranks; use a sharded or full one"
            )
        return source


FORMS: tuple[type[Form], ...] = (Full, Ragged, Rows, Local)  # those of a derived config before those of its base


def form_of(value: torch.Tensor) -> type[Form]:
    """The form of a value in a state dict."""
    return Ragged if isinstance(value, RaggedTensor) else Rows if is_sharded(value) else Full


def read(value: torch.Tensor, held: Held, groups: Groups) -> Source:
    """What this rank has in a value of whatever form; see :meth:`Form.read`."""
    return form_of(value).read(value, held, groups)


def _read_spread(value: DTensor, groups: Groups, of_tp: int) -> Source:
    """What this rank has in ``value``, which is cut along dimension ``of_tp`` of its mesh by tensor parallelism.

    Raises:
        AssertionError: it is cut along others as well, and not into rows over the ranks of the parameter.
    """
    mesh, rest, own = value.device_mesh, [dim for dim in cut_dims(value) if dim != of_tp], group_of(groups)
    rows = [dim for dim in rest if value.placements[dim] == ShardOf(0)]
    if len(rest) > 1 or rows != rest or any(group_ranks(mesh.get_group(dim)) != group_ranks(own) for dim in rest):
        raise AssertionError(
            f"a DTensor placed as {tuple(value.placements)} on {mesh}; expected rows over the ranks that the parameter "
            "is sharded over, or no cut but that of tensor parallelism"
        )
    here = dict(enumerate(mesh.get_coordinate() or ()))
    tp: Any = groups.tp
    has = Placement(tuple(box_at(value, here | {of_tp: rank}, sorted([*rows, of_tp])) for rank in range(tp.size())))
    placement = None
    if rows:
        placement = Placement(tuple(box_at(value, here | {rows[0]: rank}, rows) for rank in range(own.size())))
    local = value.to_local().detach()
    return Source(placement, [(box, local) for box in has.boxes[tp.rank()]], None, (tp, has))


# -- out and in --------------------------------------------------------------------------------------------------------


class _NewMemory(Sequence[Part]):
    """Uninitialised memory for boxes of a tensor, which is there from its first use on: so what travels through buffers
    is not in memory twice."""

    def __init__(self, boxes: Sequence[Box], like: torch.Tensor, device: torch.device) -> None:
        self._boxes, self._like, self._device = boxes, like, device
        self._parts: list[Part] | None = None

    def __len__(self) -> int:
        return len(self._boxes)

    def __getitem__(self, index: Any) -> Any:
        if self._parts is None:
            self._parts = [(box, self._memory(box)) for box in self._boxes]
        return self._parts[index]

    def _memory(self, box: Box) -> torch.Tensor:
        like = self._like  # in the memory order of the whole
        whole = box.sizes == tuple(like.shape)
        stride = like.stride() if whole else dense_stride(box.sizes, memory_order(like.shape, like.stride()))
        return empty_strided(box.sizes, stride, dtype=like.dtype, device=self._device)


class Leaving(NamedTuple):
    """A tensor on its way into a state dict; ``wanted`` is what this rank gets of it, or with tensor parallelism its
    ranks together."""

    form: Form
    held: Held
    memory: Sequence[Part]
    channel: Channel
    wanted: tuple[Box, ...]

    def value(self, *, again: bool = False) -> Any:
        """What stands in the state dict, when the channel has been flushed. ``again``: under one more name."""
        local = self.memory[0][1] if self.memory else None
        return self.form.wrap(self.held, local.clone() if again and local is not None else local, self.channel)


def export(tensors: Iterable[Held], form: Form, channel: Channel, label: str, first: int = 0) -> list[Leaving]:
    """Start moving ``tensors`` to whoever gets them in ``form``; see :func:`redistribute`. ``first`` is the channel's
    rank that gets what one rank alone gets; -1 is none."""
    leaving, items, device = [], [], form.device(channel)
    for held in tensors:
        part, target = held.part, form.place(tuple(held.part.shape), channel.size)
        gets: Sequence[Part] = ()
        wanted: tuple[Box, ...] = ()
        if target is not None:
            assert device is not None
            if form.rank0_only:
                target = Placement.whole(part.shape, channel.size, only=first)
            wanted = target.boxes[channel.rank]
            if held.tp is not None:
                target = target.inside(part.within)
            gets = _NewMemory(target.boxes[channel.rank], part, device)
            source = held.placement(channel.size)
            if source is None:
                copy_parts(part.parts, gets)
            else:
                items.append(Item(part.dtype, part.stride(), source, target, part.parts, gets))
        leaving.append(Leaving(form, held, gets, channel, wanted))
    redistribute(items, channel, label)
    return leaving


def finish(leaving: Iterable[Leaving], channels: Channels, label: str) -> list[Leaving]:
    """What has been flushed, with what the ranks of tensor parallelism have for each other."""
    finished: list[Leaving] = []
    items: dict[Channel, list[Item]] = {}
    for one in leaving:
        held, part = one.held, one.held.part
        if held.tp is not None and held.tp.dim is not None and one.wanted:
            source, target = held.shares.inside(one.wanted[0]), one.form.share(held, one.wanted[0])
            if source != target:
                channel, device = channels.over(held.tp.group, one.channel.device), one.form.device(one.channel)
                assert device is not None
                gets = _NewMemory(target.boxes[channel.rank], part, device)
                items.setdefault(channel, []).append(Item(part.dtype, part.stride(), source, target, one.memory, gets))
                one = one._replace(memory=gets)
        finished.append(one)
    for channel, several in items.items():
        redistribute(several, channel, label)
        channel.flush()
    return finished


def fill(arriving: Iterable[tuple[Held, Source]], channel: Channel, label: str) -> None:
    """Start moving what each source has to where the ranks hold the tensor, in the dtype in which they do; see
    :func:`redistribute`."""
    items = []
    for held, source in arriving:
        part = held.part
        if source.placement is None:
            copy_parts(source.parts, part.parts)
            continue
        target = held.placement(channel.size) or Placement.whole(part.shape, channel.size)
        placement = source.placement if source.spread is None else source.placement.inside(part.within)
        items.append(Item(part.dtype, part.stride(), placement, target, source.parts, part.parts))
    redistribute(items, channel, label)


def gathered(
    arriving: Iterable[tuple[Held, Source]], unit: Unit, channels: Channels, label: str
) -> list[tuple[Held, Source]]:
    """The same, but what is spread over the ranks of tensor parallelism has come to those that need it."""
    found: list[tuple[Held, Source]] = []
    items: dict[Channel, list[Item]] = {}
    for held, source in arriving:
        if source.spread is not None:
            part, (group, has) = held.part, source.spread
            channel = channels.over(group, unit.device)
            needs = held.shares if held.tp is not None else Placement.whole(part.shape, channel.size)
            if source.placement is not None:
                rows = source.placement.boxes[group_of(unit.groups).rank()]
                needs = needs.inside(rows[0]) if rows else Placement(((),) * channel.size)
            gets = _NewMemory(needs.boxes[channel.rank], part, unit.device)
            items.setdefault(channel, []).append(Item(part.dtype, part.stride(), has, needs, source.parts, gets))
            source = source._replace(parts=gets)
        found.append((held, source))
    for channel, several in items.items():
        redistribute(several, channel, label)
        channel.flush()
    return found


def fill_each(arriving: Iterable[tuple[Held, Source]], unit: Unit, channels: Channels, label: str) -> None:
    """Start moving what each source has to where the unit's ranks hold the tensor. Of what other ranks have than those
    that it is sharded over, or cut in another way among them, each gets all, a batch at a time."""
    by_group: dict[Any, list[tuple[Held, Source]]] = {}
    for held, source in gathered(arriving, unit, channels, label):
        group = None  # nothing travels
        if source.placement is not None:
            group = source.group or group_of(unit.groups)
        if source.group is not None:
            held = held._replace(spans=None)
        by_group.setdefault(group, []).append((held, source))
    for group, several in by_group.items():
        fill(several, channels.over(group, unit.device), label)


def fill_from_first(
    values: Iterable[tuple[Held, torch.Tensor | None]],
    unit: Unit,
    channels: Channels,
    label: str,
    *,
    group: Any = None,
    tp: Any = None,
) -> None:
    """Start moving what the first rank has, and others have None for, to where the unit's ranks hold the tensors: to
    those of the first replica, each its part, and from them to the others, which hold the same parts. Where it is the
    first of a ``group`` of other ranks, each of those gets all. ``tp`` are the ranks of tensor parallelism, if it is
    the first of them."""
    groups = unit.groups
    by_replicas = groups.sharded and groups.replica is not None
    if group is not None and not (by_replicas and groups.data_parallel_size == group.size()):
        shared = groups.sharded and group_ranks(groups.shard) == group_ranks(group)
        several = [(held if shared else held._replace(spans=None), value) for held, value in values]
        arriving = [(held, Source.of_first(value, held.part.shape, group.size())) for held, value in several]
        fill(arriving, channels.over(group, unit.device), label)
        return
    arriving = [(held, Source.of_first(value, held.part.shape, groups.shard_size, tp)) for held, value in values]
    if groups.replica_rank == 0:
        fill(gathered(arriving, unit, channels, label), channels.over(groups.shard, unit.device), label)
    if groups.replica is not None:
        channels.flush()
        channel, others = channels.over(groups.replica, unit.device), ((),) * (groups.replica.size() - 1)
        parts = [held.part for held, _ in arriving]
        fill([(Held(its, None), Source(Placement((its.boxes, *others)), its.parts)) for its in parts], channel, label)
