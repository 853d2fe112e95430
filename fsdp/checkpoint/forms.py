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
import torch.distributed as dist
from torch._utils import _get_device_module
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as ShardOf
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp.api import OptimStateDictConfig, RaggedOptimStateDictConfig, RaggedStateDictConfig, StateDictType
from fsdp.checkpoint.placement import Box, Part, Placement, chunk_rows, copy_parts, memory_order
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.redistribute import Channel, Channels, Item, redistribute
from fsdp.comm.groups import Groups, default_group, group_ranks
from fsdp.comm.versions import root_of
from fsdp.flat.layout import contiguous_stride
from fsdp.runtime.unit import Unit


class Held(NamedTuple):
    """A tensor whose elements the ranks of a group hold.

    Attributes:
        part: this rank's interval of it.
        spans: gives the (rank, start, end) of every rank's; None if each has all of it.
    """

    part: RaggedTensor
    spans: Callable[[], Sequence[tuple[int, int, int]]] | None

    def placement(self, ranks: int) -> Placement | None:
        """Of its elements on so many ranks; None if each has all of it."""
        if self.spans is None:
            return None
        return Placement.intervals(self.part.shape, self.part.stride(), self.spans(), ranks)


class Source(NamedTuple):
    """What this rank has of a tensor; ``placement`` is None if every rank has what it needs. ``group`` are the ranks
    that have it, if others than those that hold the parts of the tensor that it goes to."""

    placement: Placement | None
    parts: Sequence[Part]
    group: Any = None

    @classmethod
    def of_first(cls, value: torch.Tensor | None, shape: Sequence[int], ranks: int) -> Source:
        """Of a tensor that rank 0 has as ``value``, and the others, where it is None, not at all."""
        placement = Placement.whole(shape, ranks, only=0)
        if value is None:
            return cls(placement, [])
        return cls(placement, [(Box.whole(shape), value.to_local() if isinstance(value, DTensor) else value)])


@dataclass(frozen=True)
class Form(ABC):
    """What becomes of tensors on their way into a state dict, whatever their unit.

    Attributes:
        rank0_only: only rank 0 gets it. For ``Full``.
        offload_to_cpu: tensors in CPU memory; else where the unit computes, or in the shards' own memory.
        rows: for ``Rows``: the mesh and its dimension over which they lie as ``DTensor``; None for ``ShardedTensor``.
        kind: of state dict, for which it is used; None for one that a config asks for.
        called: in errors.
        is_readable: the values stand in the modules already while ``nn.Module`` walks them.
        stays: the values are the shards' own; nothing travels.
        is_cut: each rank gets a part, so that there have to be several; what is not sharded has the full form.
        is_flat: of flat vectors instead of parameters.
    """

    rank0_only: bool = False
    offload_to_cpu: bool = True
    rows: tuple[DeviceMesh, int] | None = None

    kind: ClassVar[StateDictType | None] = None
    called: ClassVar[str]
    is_readable: ClassVar[bool] = False
    stays: ClassVar[bool] = False
    is_cut: ClassVar[bool] = False
    is_flat: ClassVar[bool] = False

    @staticmethod
    def of(kind: StateDictType, config: Any) -> Form:
        """What the settings in force ask for."""
        form = next(form for form in FORMS if form.kind is kind)
        if isinstance(config, (RaggedStateDictConfig, RaggedOptimStateDictConfig)):
            form = Ragged
        elif isinstance(config, OptimStateDictConfig) and form.is_flat:
            form = Rows
        return form(getattr(config, "rank0_only", False), config.offload_to_cpu)

    def within(self, unit: Unit, *, cut: bool) -> Form:
        """What it is for ``unit``; whole where each rank would get a part and there are no parts (not ``cut``).

        Raises:
            RuntimeError: flat vectors, and the unit has a device mesh.
        """
        if self.is_cut and not cut:
            return Full(self.rank0_only, self.offload_to_cpu)
        if unit.mesh is None or not self.is_cut:
            return self
        if self.is_flat:
            check_no_mesh(unit)
        return replace(self, rows=_rows_on(unit.mesh, group_of(unit.groups)))

    def device(self, channel: Channel) -> torch.device | None:
        """Where tensors go; None for where they are."""
        return torch.device("cpu") if self.offload_to_cpu else None if self.stays else channel.device

    @abstractmethod
    def place(self, shape: tuple[int, ...], ranks: int) -> Placement | None:
        """Which of so many ranks gets what of a tensor of this shape; None if it stays where it is."""

    @abstractmethod
    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        """What stands in the state dict for a tensor that the ranks of ``channel`` hold; ``local`` is what this rank
        got of it, if anything."""

    @staticmethod
    @abstractmethod
    def read(value: Any, groups: Groups) -> Source:
        """What this rank has in ``value``, which is of this form and goes to a unit of these groups.

        Raises:
            AssertionError: nobody can tell who has what, or ranks that may not take part have some.
        """

    @staticmethod
    @abstractmethod
    def problem(value: Any, held: Held, groups: Groups) -> str | None:
        """Why ``value``, of this form, cannot be loaded into a parameter that is sharded over ``groups``."""


class Full(Form):
    """Whole tensors on every rank, or on rank 0 alone."""

    kind, called, is_readable = StateDictType.FULL_STATE_DICT, "a full state dict", True

    def place(self, shape: tuple[int, ...], ranks: int) -> Placement | None:
        return Placement.whole(shape, ranks)

    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        return local

    @staticmethod
    def read(value: Any, groups: Groups) -> Source:
        whole = value.to_local() if isinstance(value, DTensor) else value
        return Source(None, [(Box.whole(value.shape), whole.detach())])

    @staticmethod
    def problem(value: Any, held: Held, groups: Groups) -> str | None:
        if value.layout == torch.strided and not value.is_meta:
            return None
        return f"expected a dense tensor with values, but got {value.layout} on {value.device}"


class Rows(Form):
    """Each rank's chunk of rows, by the rule of ``torch.chunk``: as ``DTensor`` where there is a mesh, else as
    ``ShardedTensor``. What has no rows is whole on every rank."""

    kind, called, is_cut = StateDictType.SHARDED_STATE_DICT, "a sharded state dict", True

    def place(self, shape: tuple[int, ...], ranks: int) -> Placement | None:
        if not shape or 0 in shape:
            return Placement.whole(shape, ranks)
        return Placement.rows(shape, chunk_rows(shape[0], ranks))

    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        shape = tuple(held.part.shape)
        if not shape or 0 in shape:
            return local
        if local is None:
            local = torch.empty((0, *shape[1:]), dtype=held.part.dtype, device=self.device(channel))
        rows = local.contiguous()  # as torch's sharded tensors have to be, whatever the parameter is
        if self.rows is None:
            return one_chunk_each(rows, chunk_rows(shape[0], channel.size), shape, channel.group)
        mesh, dim = self.rows
        layout = tuple(ShardOf(0) if at == dim else Replicate() for at in range(mesh.ndim))
        meta = TensorMeta(torch.Size(shape), contiguous_stride(shape), rows.dtype)
        # not from_local(), which would take to the mesh's device what was offloaded
        return DTensor(rows, DTensorSpec(mesh, layout, meta), requires_grad=False)

    @staticmethod
    def read(value: Any, groups: Groups) -> Source:
        shape = kind_of(value)[1]
        group = _ranks_of(value, groups)
        ranges, rows = _rows_of_dtensor(value, group) if isinstance(value, DTensor) else _rows_of_shards(value, group)
        if sum(end - start for start, end in ranges) != shape[0]:
            raise AssertionError(f"the ranks of the group have rows {ranges} of a tensor of shape {shape}")
        placement = Placement.rows(shape, ranges)
        own = [(box, rows) for box in placement.boxes[group.rank()]]
        return Source(placement, own, None if group is group_of(groups) else group)

    @staticmethod
    def problem(value: Any, held: Held, groups: Groups) -> str | None:
        try:
            Rows.read(value, groups)
        except AssertionError as error:
            return str(error)
        return None


class Ragged(Form):
    """What this rank's shard holds, in the shard's own memory unless it is on another device."""

    called, stays = "a state dict without communication", True

    def place(self, shape: tuple[int, ...], ranks: int) -> Placement | None:
        return None

    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        part = held.part
        return RaggedTensor(part.local.to(device=self.device(channel)), part.shape, part.start, part.stride())

    @staticmethod
    def read(value: Any, groups: Groups) -> Source:
        return Source(None, value.parts)

    @staticmethod
    def problem(value: Any, held: Held, groups: Groups) -> str | None:
        part = held.part
        if not value.same_interval(part):
            return (
                f"this rank has its elements {part.start} to {part.end} and was given {value.start} to {value.end}; "
                "let torch.distributed.checkpoint load into the state dict of this model instead"
            )
        return None


class Local(Form):
    """Each rank's interval of a vector as ``ShardedTensor``, in the shard's own memory unless that is elsewhere."""

    kind, called, stays, is_cut, is_flat = StateDictType.LOCAL_STATE_DICT, "a local state dict", True, True, True

    def place(self, shape: tuple[int, ...], ranks: int) -> Placement | None:
        return None

    def wrap(self, held: Held, local: torch.Tensor | None, channel: Channel) -> Any:
        assert held.spans is not None
        ranges = [(start, end) for _, start, end in held.spans()]
        return one_chunk_each(held.part.local.to(self.device(channel)), ranges, held.part.shape, channel.group)

    read = Rows.read

    @staticmethod
    def problem(value: Any, held: Held, groups: Groups) -> str | None:
        problem = form_of(value).problem(value, held, groups)
        if problem is not None or not is_sharded(value):
            return problem
        expected, found = held.placement(groups.shard_size), read(value, groups).placement
        if found == expected:
            return None
        return (
            f"of its elements {expected}, but in what was given {found}: a local state dict fits only the model it was "
            "made from, at the same number of ranks; use a sharded or full one"
        )


FORMS: tuple[type[Form], ...] = (Full, Rows, Ragged, Local)


def form_of(value: torch.Tensor) -> type[Form]:
    """The form of a value in a state dict."""
    return Ragged if isinstance(value, RaggedTensor) else Rows if is_sharded(value) else Full


def read(value: torch.Tensor, groups: Groups) -> Source:
    """What this rank has in a value of whatever form; see :meth:`Form.read`."""
    return form_of(value).read(value, groups)


def group_of(groups: Groups) -> Any:
    """The group whose ranks have a unit's chunks: those that it is sharded over, or else replicated over."""
    return groups.shard or groups.replica or default_group()


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
            self._parts = [(box, _memory_for(box, self._like, self._device)) for box in self._boxes]
        return self._parts[index]


class Leaving(NamedTuple):
    """A tensor on its way into a state dict."""

    form: Form
    held: Held
    memory: Sequence[Part]
    channel: Channel

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
        if target is not None:
            assert device is not None
            if form.rank0_only:
                target = Placement.whole(part.shape, channel.size, only=first)
            gets = _NewMemory(target.boxes[channel.rank], part, device)
            source = held.placement(channel.size)
            if source is None:
                copy_parts(part.parts, gets)
            else:
                items.append(Item(part.dtype, part.stride(), source, target, part.parts, gets))
        leaving.append(Leaving(form, held, gets, channel))
    redistribute(items, channel, label)
    return leaving


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
        items.append(Item(part.dtype, part.stride(), source.placement, target, source.parts, part.parts))
    redistribute(items, channel, label)


def fill_each(arriving: Iterable[tuple[Held, Source]], unit: Unit, channels: Channels, label: str) -> None:
    """Start moving what each source has to where the unit's ranks hold the tensor. Of what other ranks have than those
    that it is sharded over, or cut in another way among them, each gets all, a batch at a time."""
    by_group: dict[Any, list[tuple[Held, Source]]] = {}
    for held, source in arriving:
        group = None  # nothing travels
        if source.placement is not None:
            group = source.group or group_of(unit.groups)
        if source.group is not None:
            held = held._replace(spans=None)
        by_group.setdefault(group, []).append((held, source))
    for group, several in by_group.items():
        fill(several, channels.over(group, unit.device), label)


def fill_replicas(replicated: Iterable[Held], channel: Channel, label: str) -> None:
    """Start giving what the first rank of ``channel`` holds to the others, which hold the same parts."""
    several = [(held, Placement.on_first(held.part.boxes, channel.size)) for held in replicated]
    fill([(Held(held.part, None), Source(boxes, held.part.parts)) for held, boxes in several], channel, label)


def _memory_for(box: Box, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Uninitialised, in the memory order of the whole."""
    if box.sizes == tuple(like.shape):
        return torch.empty_strided(box.sizes, like.stride(), dtype=like.dtype, device=device)
    order = memory_order(like.shape, like.stride())
    memory = torch.empty([box.sizes[dim] for dim in order], dtype=like.dtype, device=device)
    return memory.permute([order.index(dim) for dim in range(len(order))])


# -- torch's own sharded tensors ---------------------------------------------------------------------------------------


def one_chunk_each(
    local: torch.Tensor, ranges: Sequence[tuple[int, int]], shape: Sequence[int], group: Any
) -> ShardedTensor:
    """A ``ShardedTensor`` of ``shape`` of which rank i of ``group`` has the rows of ``ranges[i]``, an empty range
    nothing. ``local`` are this rank's rows; they are not copied."""
    metadata = []
    for rank, (start, end) in enumerate(ranges):
        if start < end:
            placement = _placement(dist.get_global_rank(group, rank), local.device.type)
            offsets, sizes = [start, *(0 for _ in shape[1:])], [end - start, *shape[1:]]
            metadata.append((rank, ShardMetadata(offsets, sizes, placement)))
    own = [Shard(local, shard) for rank, shard in metadata if rank == group.rank()]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        own,
        sharded_tensor_metadata=ShardedTensorMetadata(
            shards_metadata=[shard for _, shard in metadata],
            size=torch.Size(shape),
            tensor_properties=TensorProperties(
                dtype=local.dtype,
                layout=torch.strided,
                requires_grad=False,
                memory_format=torch.contiguous_format,
                pin_memory=False,
            ),
        ),
        process_group=group,
    )


def _placement(rank: int, device_type: str) -> str:
    if device_type == "cpu":
        return f"rank:{rank}/cpu"
    return f"rank:{rank}/{device_type}:{rank % _get_device_module(device_type).device_count()}"


def is_sharded(value: Any) -> bool:
    """Whether ``value`` is one of torch's sharded tensors, of which this rank has not all."""
    if not isinstance(value, DTensor):
        return isinstance(value, ShardedTensor)
    return bool(_cut_dims(value))


def kind_of(value: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...]]:
    """The dtype and shape of a tensor, or of what a sharded one is a part of."""
    if isinstance(value, ShardedTensor):  # its own methods warn that it is deprecated
        return value.metadata().tensor_properties.dtype, tuple(value.metadata().size)
    return value.dtype, tuple(value.shape)


def _rows_on(mesh: DeviceMesh, group: Any) -> tuple[DeviceMesh, int]:
    """The dimension that has the ranks of ``group``: of the mesh that ``mesh`` is a slice of, as in torch's FSDP1, or
    of itself, where several dimensions were made one.

    Raises:
        RuntimeError: there is none.
    """
    ranks = group_ranks(group)
    for one in (root_of(mesh), mesh):
        for dim in range(one.ndim):
            if group_ranks(one.get_group(dim)) == ranks:
                return one, dim
    raise RuntimeError(f"no dimension of {mesh} has the ranks that the parameters are sharded over, {ranks}")


def check_no_mesh(unit: Unit) -> None:
    """
    Raises:
        RuntimeError: the unit has a device mesh, of which flat parameters know nothing.
    """
    if unit.mesh is not None:
        raise RuntimeError("DeviceMesh is not compatible with LOCAL_STATE_DICT; use SHARDED_STATE_DICT")


def _cut_dims(tensor: DTensor) -> list[int]:
    """The dimensions of its mesh along which not every rank has the same of it."""
    mesh, several = tensor.device_mesh, enumerate(tensor.placements)
    return [dim for dim, its in several if not its.is_replicate() and mesh.size(dim) > 1]


def _ranks_of(value: Any, groups: Groups) -> Any:
    """The group whose ranks have the rows of ``value``, which goes to a unit of ``groups``: the one that has its chunks
    if they are the same.

    Raises:
        AssertionError: not rows; or of others than the unit's ranks, which do not take part.
    """
    if isinstance(value, DTensor):
        mesh, cut = value.device_mesh, _cut_dims(value)
        if [value.placements[dim] for dim in cut] != [ShardOf(0)]:
            raise AssertionError(
                f"a DTensor placed as {tuple(value.placements)}; expected rows over one dimension of the mesh"
            )
        group = mesh.get_group(cut[0])
    else:
        group = value._process_group
    own, ranks = group_of(groups), group_ranks(group)
    if ranks == group_ranks(own):
        return own
    near = {*group_ranks(own), *(group_ranks(groups.replica) if groups.replica is not None else ())}
    if near.issuperset(ranks) or (near.issubset(ranks) and len(ranks) == groups.data_parallel_size):
        return group
    if isinstance(value, DTensor):
        raise AssertionError(f"a DTensor over the ranks {ranks}, which are not those of the parameter")
    return own  # what was loaded from a file is of the default group


def _rows_of_dtensor(tensor: DTensor, group: Any) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """Which rows each rank of ``group`` has, and this rank's."""
    return chunk_rows(tensor.shape[0], group.size()), tensor.to_local().detach()


def _rows_of_shards(tensor: Any, group: Any) -> tuple[list[tuple[int, int]], torch.Tensor]:
    """The same of a ``ShardedTensor``, whoever made it."""
    dtype, shape = kind_of(tensor)
    shards = tensor.local_shards()
    if len(shards) > 1:
        raise AssertionError(f"Expects 0 or 1 shard per rank but got {len(shards)} shards on this rank")
    ranks, ranges = group_ranks(group), [(0, 0)] * group.size()
    for metadata in tensor.metadata().shards_metadata:
        rank = metadata.placement.rank()
        if rank not in ranks or any(metadata.shard_offsets[1:]) or metadata.shard_sizes[1:] != [*shape[1:]]:
            raise AssertionError(
                f"a chunk at {metadata.shard_offsets} of size {metadata.shard_sizes} on rank {rank}; expected "
                "rows, on the ranks that the parameter is sharded over"
            )
        start = metadata.shard_offsets[0]
        ranges[ranks.index(rank)] = (start, start + metadata.shard_sizes[0])
    return ranges, shards[0].tensor.detach() if shards else torch.empty((0, *shape[1:]), dtype=dtype)
