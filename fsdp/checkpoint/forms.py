"""Forms of tensors in state dicts: whole, in chunks of rows, the elements of a shard, or a part of a flat vector.

A *form* decides which elements each rank gets (``place``), makes the value for the state dict (``wrap``), and finds
this rank's elements in a value that is loaded (``read``). No file outside of this one distinguishes forms;
:mod:`fsdp.checkpoint.transfers` moves the elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
    group_of,
    group_that_has,
    is_sharded,
    kind_of,
    one_chunk_each,
    rows_of_shards,
    rows_on,
)
from fsdp.comm.groups import Groups, group_ranks
from fsdp.flat.layout import contiguous_stride
from fsdp.flat.tensor_parallel import TensorParallel, local_of
from fsdp.placement.boxes import Box, Part, Placement, chunk_rows
from fsdp.placement.redistribute import Channel
from fsdp.runtime.unit import Unit


class Held(NamedTuple):
    """A tensor of a unit, with one element per element of a parameter, whose elements are on the ranks of a group.

    Attributes:
        part: this rank's interval.
        spans: returns (rank, start, end) of every rank's interval; None if each rank has the whole tensor.
        tp: placement by tensor parallelism, if any. Then the group holds one part of the tensor.
    """

    part: RaggedTensor
    spans: Callable[[], Sequence[tuple[int, int, int]]] | None
    tp: TensorParallel | None = None

    def placement(self, ranks: int) -> Placement | None:
        """Return the placement on ``ranks`` ranks; None if each rank has the whole tensor."""
        part, spans = self.part, self.spans
        return spans and Placement.intervals(part.shape, part.stride(), tuple(spans()), ranks, part.within)

    @property
    def shares(self) -> Placement:
        """The placement of the parts over the ranks of tensor parallelism."""
        tp = self.tp
        assert tp is not None
        return Placement(tuple((Box(tp.offsets(rank), tp.local_shape(rank)),) for rank in range(tp.group.size())))


class Source(NamedTuple):
    """This rank's elements of a value that is loaded.

    Attributes:
        placement: the elements of each rank; None if every rank has all the elements that it needs.
        parts: this rank's elements.
        group: the ranks of ``placement``.
        spread: group of tensor parallelism, and the placement over it, if its ranks together have the elements that
            ``placement`` gives to this rank.
    """

    placement: Placement | None
    parts: Sequence[Part]
    group: Any = None
    spread: tuple[Any, Placement] | None = None


class Mismatch(RuntimeError, AssertionError):
    """A sharded or local state dict that does not fit: an AssertionError in FSDP1, a RuntimeError in ``nn.Module``."""


@dataclass(frozen=True)
class Form(ABC):
    """The form of the tensors of any unit in a state dict.

    Attributes:
        rank0_only: only rank 0 gets the tensors. For ``Full``.
        offload_to_cpu: tensors are in CPU memory; otherwise where the unit computes, or in the shards' own memory.
        rows: for ``Rows``: the mesh and the dimension over which rows are cut as ``DTensor``; None for
            ``ShardedTensor``.
        configs: the config classes that choose the form.
        called: name in errors.
        is_readable: the values are registered on the modules during the walk of ``nn.Module``.
        stays: the values are the shards' own memory, without communication.
        is_cut: each rank gets a part. Units that are not sharded have the full form instead.
        is_flat: the tensors are flat vectors instead of parameters.
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
        """Return the form that ``config`` chooses."""
        form = next(form for form in FORMS if isinstance(config, form.configs))
        return form(getattr(config, "rank0_only", False), config.offload_to_cpu)

    def within(self, unit: Unit, *, cut: bool) -> Form:
        """Return the form for ``unit``: whole tensors for a form of parts if the unit is not ``cut``."""
        if self.is_cut and not cut:
            return Full(self.rank0_only, self.offload_to_cpu)
        mesh = unit.groups.mesh
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
        """Return the device of the values; None for the device of the shards."""
        return torch.device("cpu") if self.offload_to_cpu else None if self.stays else channel.device

    def place(self, shape: tuple[int, ...], ranks: int) -> Placement | None:
        """Return the elements of a tensor of this shape that each of ``ranks`` ranks gets; None if elements do not
        move."""
        return None

    def share(self, held: Held, box: Box) -> Placement:
        """Return the elements of ``box`` that each rank of tensor parallelism gets, for a tensor that it has cut."""
        ranks, alone = len(held.shares.boxes), self.rank0_only and held.tp is not None and held.tp.experts
        return Placement(((box,), *((() if alone else (box,),) * (ranks - 1))))

    @abstractmethod
    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        """Make the value for the state dict. ``local`` contains the elements that this rank gets by ``place``;
        ``channel`` is over the group of ``held``."""

    @staticmethod
    @abstractmethod
    def read(value: Any, held: Held, groups: Groups) -> Source:
        """Find this rank's elements in ``value``, a value of this form that is loaded into ``held`` of a unit with
        ``groups``.

        Raises:
            AssertionError: the placement of ``value`` is unknown, or on ranks that do not take part.
            ValueError: ``value`` lacks elements that this rank needs.
        """


class Full(Form):
    """Whole tensors on every rank, or only on rank 0."""

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
    """Each rank's chunk of rows, by the rule of ``torch.chunk``: as ``DTensor`` with a mesh, otherwise as
    ``ShardedTensor``. Tensors without rows are whole on every rank."""

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
        rows = local.contiguous()  # torch's sharded tensors require it
        if self.rows is None:
            return one_chunk_each(rows, chunk_rows(shape[0], channel.size), shape, channel.group)
        mesh, dim = self.rows
        layout: list[Any] = [ShardOf(0) if at == dim else Replicate() for at in range(mesh.ndim)]
        if tp is not None:
            at = dim_of(mesh, tp.group)
            assert at is not None
            layout[at] = tp.spec.placements[0]
        meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), rows.dtype)
        # from_local() would move offloaded rows to the mesh's device
        return DTensor(rows, DTensorSpec(mesh, tuple(layout), meta), requires_grad=False)

    def share(self, held: Held, box: Box) -> Placement:
        """Return the parts of a ``DTensor`` that is cut into rows first: chunks of ``box`` if tensor parallelism
        cuts rows as well."""
        assert held.tp is not None
        if held.tp.dim != 0:
            return held.shares.inside(box)
        (first, *offsets), (count, *sizes) = box
        ranges = chunk_rows(count, len(held.shares.boxes))
        chunks = [Box((first + start, *offsets), (end - start, *sizes)) for start, end in ranges]
        return Placement(tuple((chunk,) if chunk.numel else () for chunk in chunks))

    @staticmethod
    def read(value: Any, held: Held, groups: Groups) -> Source:
        if isinstance(value, DTensor):
            return _read_dtensor(value, groups)
        shape, group = kind_of(value)[1], group_that_has(value, value._process_group, groups)
        ranges, rows = rows_of_shards(value, group)
        if sum(end - start for start, end in ranges) != shape[0]:
            raise AssertionError(f"the ranks of the group have rows {ranges} of a tensor of shape {shape}")
        placement = Placement.rows(shape, ranges)
        own = [(box, rows) for box in placement.boxes[group.rank()]]
        return Source(placement, own, group)


class Ragged(Form):
    """The elements of this rank's shard, in the shard's own memory if the device allows it."""

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
        is_own = value.interval == part.interval and value.local.data_ptr() == part.local.data_ptr()
        return Source(None, () if is_own and value.dtype == part.dtype else value.parts)


class Local(Form):
    """Each rank's interval of a flat vector as ``ShardedTensor``, in the shard's own memory if the device allows it."""

    configs, called = (api.LocalStateDictConfig,), "a local state dict"
    stays = is_cut = is_flat = True

    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        assert held.spans is not None
        ranges = [(start, end) for _, start, end in held.spans()]
        return one_chunk_each(held.part.local.to(self.device(channel)), ranges, held.part.shape, channel.group)

    @staticmethod
    def read(value: Any, held: Held, groups: Groups) -> Source:
        """Accept whole vectors as well."""
        source = read(value, held, groups)
        expected, found = held.placement(groups.shard_size), source.placement
        if is_sharded(value) and found != expected:
            raise ValueError(
                f"of its elements {expected}, but in what was given {found}: a local state dict fits only the model it "
                "was made from, at the same number of ranks; use a sharded or full one"
            )
        return source


FORMS: tuple[type[Form], ...] = (Full, Ragged, Rows, Local)  # configs of Ragged derive from those of Rows


def is_distributed(value: Any) -> bool:
    """True if ``value`` is a tensor of which each rank may hold other elements."""
    return isinstance(value, (RaggedTensor, DTensor))


def parts_of(value: torch.Tensor) -> list[Part]:
    """Return the elements of ``value`` that this rank holds, in the tensor's own memory.

    Raises:
        NotImplementedError: they are not one box of a ``DTensor``.
    """
    if isinstance(value, RaggedTensor):
        return value.parts
    if not isinstance(value, DTensor):
        return [(Box.whole(value.shape), value.detach())]
    local = value.to_local().detach()
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in value.__create_chunk_list__()]
    if local.numel() == 0:
        return []
    if len(boxes) != 1 or boxes[0].sizes != tuple(local.shape):
        raise NotImplementedError(f"a DTensor placed as {tuple(value.placements)}: a rank has to hold one box of it")
    return [(boxes[0], local)]


def replicas_of(value: torch.Tensor) -> tuple[int, ...]:
    """Return the global ranks that hold the same elements of a distributed tensor; () if only this rank does."""
    if isinstance(value, RaggedTensor):
        return value.replicas
    assert isinstance(value, DTensor)
    mesh, here = value.device_mesh, value.device_mesh.get_coordinate() or ()
    place = tuple(
        slice(None) if placement.is_replicate() else at for placement, at in zip(value.placements, here, strict=True)
    )
    return tuple(mesh.mesh[place].flatten().tolist())


def form_of(value: torch.Tensor) -> type[Form]:
    """Return the form of a value in a state dict."""
    return Ragged if isinstance(value, RaggedTensor) else Rows if is_sharded(value) else Full


def is_part(value: Any) -> bool:
    """Return True for a tensor of which this rank may have only a part."""
    return isinstance(value, torch.Tensor) and form_of(value) is not Full


def scalar_of(value: torch.Tensor) -> torch.Tensor:
    """Return a tensor without dimensions as a plain tensor, if its element is on this rank."""
    return value.local.view(()) if isinstance(value, RaggedTensor) and value.local.numel() == 1 else value


def distribution(value: torch.Tensor, groups: Groups) -> str:
    """Describe how ``value`` is distributed, as text that must be equal on all ranks that exchange elements."""
    if not is_sharded(value):
        return ""
    if not isinstance(value, DTensor):
        return " in rows"
    # with tensor parallelism the ranks of a shard group may have different one-dimensional meshes
    mesh = value.device_mesh if value.device_mesh.ndim > 1 or groups.tp is None else "a mesh"
    return f" in rows ({value.placements} on {mesh})"


def read(value: torch.Tensor, held: Held, groups: Groups, *, flat: bool = False) -> Source:
    """Find this rank's elements in a value of any form; see :meth:`Form.read`. With ``flat`` the value is a flat
    vector."""
    form = Local if flat else form_of(value)
    return form.read(value, held, groups)


def _read_dtensor(value: DTensor, groups: Groups) -> Source:
    """Find this rank's elements in ``value``, which is cut into rows, by tensor parallelism, or both."""
    mesh, cut, own, tp = value.device_mesh, cut_dims(value), group_of(groups), groups.tp
    ranks = None if tp is None else group_ranks(tp)
    of_tp = [dim for dim in cut if type(value.placements[dim]) is ShardOf and group_ranks(mesh.get_group(dim)) == ranks]
    rows, group = [dim for dim in cut if dim not in of_tp], own
    has_rows = [value.placements[dim] for dim in rows] == [ShardOf(0)]
    if has_rows:
        group = group_that_has(value, mesh.get_group(rows[0]), groups)
    if not (has_rows or (of_tp and not rows)) or (of_tp and group is not own):
        raise AssertionError(
            f"a DTensor placed as {tuple(value.placements)} on {mesh}; expected rows over one dimension of the mesh, "
            "which with tensor parallelism has the ranks that the parameter is sharded over"
        )
    here = dict(enumerate(mesh.get_coordinate() or ()))

    def along(dim: int, ranks: int, dims: list[int]) -> Placement:
        return Placement(tuple(box_at(value, here | {dim: rank}, dims) for rank in range(ranks)))

    placement = along(rows[0], group.size(), rows) if rows else None
    spread = (tp, along(of_tp[0], tp.size(), cut)) if tp is not None and of_tp else None
    parts = [(box, value.to_local().detach()) for box in box_at(value, here, cut)]
    return Source(placement, parts, group, spread)
