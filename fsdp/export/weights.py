"""``weights``: all weights of a sharded model as a stream, one unit gathered at a time.

Each shard is cast before the gather, so that a bf16 export of a float32 model moves half the bytes. A unit is gathered
into one of two buffers while the program uses the previous unit in the second buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from fsdp.checkpoint.forms import Held
from fsdp.checkpoint.load_state_dict import persistent_buffers
from fsdp.checkpoint.optim_names import ModelParams
from fsdp.checkpoint.state_dict import check_no_experts, held_param
from fsdp.comm.collectives import Gather, exchange
from fsdp.comm.groups import group_ranks
from fsdp.comm.lane.issuing import GATHER
from fsdp.comm.waiting.work import Work
from fsdp.flat.full_copy import parameter_views
from fsdp.flat.names import joined, plain_modules
from fsdp.runtime.build import join
from fsdp.runtime.unit import Unit

Merge = Callable[[nn.Module, dict[str, torch.Tensor]], Iterable[tuple[str, torch.Tensor]]]
LABEL = "fsdp.export.weights()"


class TensorInfo(NamedTuple):
    """A tensor of a stream before it is there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Slice(NamedTuple):
    """A tensor in a bucket: ``buffer[start:end].as_strided(shape, stride)``, counted in elements."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int
    end: int
    stride: tuple[int, ...]


class Bucket(NamedTuple):
    """One 1-D buffer with several tensors, and padding between them."""

    buffer: torch.Tensor
    tensors: list[Slice]


@dataclass
class _Gathered:
    """The buffers of a unit that is being gathered: one per bucket, of ``padded_numel`` elements each.

    Attributes:
        works: the collectives in flight, which read ``shards``.
    """

    unit: Unit
    buffers: list[torch.Tensor]
    works: list[Work]
    shards: list[torch.Tensor]


def weights(
    model: nn.Module, dtype: torch.dtype | None = None, *, to: int | None = None, merge: Merge | None = None
) -> WeightStream:
    """Return a stream of all weights of ``model``, unit by unit, under the plain model's names::

        for name, tensor in fsdp.export.weights(model, dtype=torch.bfloat16):
            engine.load(name, tensor)

    All ranks have to iterate. The tensors equal those of a full state dict, cast to ``dtype``, bit for bit. A tensor is
    valid until the next unit's first one is asked for; copy it to keep it. At most two units are gathered at a time. A
    loop that is left early, or by an exception, takes part in the gathers that are left, so that peers can go on.

    Args:
        model: a wrapped model, or a module with wrapped modules in it, in no forward or backward.
        dtype: of floating-point tensors; None for the dtypes that they have. Integers stay integers.
        to: the rank, in the default group, that receives the weights; the other ranks only send, and get no
            tensors. None: all ranks.
        merge: called with the model and the gathered tensors of a unit by name, which it may change in place; returns
            the names and tensors to yield instead. See :func:`fsdp.export.lora`. Shards are never changed.

    Raises:
        ValueError: ``model`` has no wrapped modules in it, or there is no rank ``to``.
        NotImplementedError: a parameter is placed by tensor parallelism; or ``to`` would not get the experts that other
            ranks hold.
        RuntimeError: while iterating, in a forward or backward, or where some ranks do not iterate.
    """
    return WeightStream(model, dtype, to, merge)


class WeightStream:
    """The result of :func:`weights`. It can be iterated over again, for the weights that the model has then."""

    def __init__(self, model: nn.Module, dtype: torch.dtype | None, to: int | None, merge: Merge | None) -> None:
        params = ModelParams(model)
        if not params.units:
            raise ValueError(f"expected a model with wrapped modules in it, but {type(model).__name__} has none")
        ranks = torch.distributed.get_world_size()
        if to is not None and not 0 <= to < ranks:
            raise ValueError(f"{LABEL}: to must be a rank of the default group, 0 to {ranks - 1}, or None, got {to}")
        check_placements(params, LABEL)
        if to is not None:
            check_no_experts(model, LABEL)
        self._model, self._dtype, self._to, self._merge = model, dtype, to, merge
        members = [(holder.handle, member) for holder in params.holders.values() for member in holder.members]
        self._names = {(handle, member.index): member.names for handle, member in members}
        self._units = [unit for unit in params.units if unit.handles]

    def metadata(self) -> list[TensorInfo]:
        """The names, dtypes and shapes of all tensors, in order. Nothing moves."""
        found: list[TensorInfo] = []
        for unit in self._units:
            metas = [
                torch.empty(
                    handle.layout.padded_numel, dtype=target_dtype(handle.layout.dtype, self._dtype), device="meta"
                )
                for handle in unit.handles
            ]
            found += [TensorInfo(n, t.dtype, tuple(t.shape)) for n, t in self._merged(self._named(unit, metas))]
        rest = unowned(self._model)
        return found + [TensorInfo(n, target_dtype(t.dtype, self._dtype), tuple(t.shape)) for n, t in rest]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for gathered in self._gather():
            yield from self._merged(self._named(gathered.unit, gathered.buffers))
        if self._receives:
            for name, tensor in unowned(self._model):
                yield name, tensor.detach().to(target_dtype(tensor.dtype, self._dtype))

    def buckets(self) -> Iterator[Bucket]:
        """Iterate over the gathered buffers themselves, for transfers of few large messages.

        The weights that no unit owns, such as buffers, come last, each in a bucket by itself.

        Raises:
            ValueError: ``merge`` has returned a tensor that does not lie in the gathered buffer.
        """
        for gathered in self._gather():
            named = self._merged(self._named(gathered.unit, gathered.buffers))
            for buffer in gathered.buffers:
                inside = [each for each in named if each[1].untyped_storage()._cdata == buffer.untyped_storage()._cdata]
                named = [each for each in named if all(each is not other for other in inside)]
                yield Bucket(buffer, [_slice(name, tensor, buffer) for name, tensor in inside])
            if named:
                raise ValueError(f"{named[0][0]!r}, which merge() has returned, does not lie in the gathered buffer")
        if self._receives:
            for name, tensor in unowned(self._model):
                flat = tensor.detach().to(target_dtype(tensor.dtype, self._dtype)).reshape(-1)
                yield Bucket(flat, [_slice(name, flat.view(tensor.shape), flat)])

    # -- names and tensors ---------------------------------------------------------------------------------------------

    def _named(self, unit: Unit, buffers: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The unit's parameters as views of ``buffers``, under all of their names."""
        named = {}
        for handle, buffer in zip(unit.handles, buffers):
            for index, tensor in enumerate(parameter_views(handle.layout, buffer)):
                named.update(dict.fromkeys(self._names[handle, index], tensor))
        return named

    def _merged(self, named: dict[str, torch.Tensor]) -> list[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            return list(named.items() if self._merge is None else self._merge(self._model, named))

    @property
    def _receives(self) -> bool:
        return self._to is None or torch.distributed.get_rank() == self._to

    # -- gathering -----------------------------------------------------------------------------------------------------

    def _gather(self) -> Iterator[_Gathered]:
        """Yield each unit once it is gathered, with the gather of the next one in flight."""
        units = [unit for unit in self._units if self._takes_part(unit)]
        memory: list[torch.Tensor | None] = [None, None]
        next_one: _Gathered | None = None
        left_early = False
        for number in range(len(units) + 1):
            gathered = next_one
            next_one = self._start(units[number], memory, number % 2) if number < len(units) else None
            if gathered is None:
                continue
            for work in gathered.works:
                work.wait()
            gathered.shards.clear()
            if left_early or not self._receives:
                continue
            try:
                yield gathered
            except GeneratorExit:  # the loop was left, and peers may go on
                left_early = True
        for unit in units:
            join(unit).unsharder.settle_offloaded()

    def _takes_part(self, unit: Unit) -> bool:
        """Whether this rank receives the unit, or sends its shard."""
        if self._to is None or not unit.groups.sharded:
            return self._receives
        return self._to in group_ranks(unit.groups.shard)

    def _start(self, unit: Unit, memory: list[torch.Tensor | None], turn: int) -> _Gathered:
        """Start to gather ``unit`` into ``memory[turn]``, which grows as needed."""
        context, groups = join(unit), unit.groups
        with torch.no_grad(), torch.inference_mode(False), context.calling(LABEL, often=True):
            unit.check_idle(f"iterate over {LABEL} outside of that")
            unit.follow_parameters()
            unit.announce(replicas=False)
            dtypes = [target_dtype(handle.layout.dtype, self._dtype) for handle in unit.handles]
            buffers = [torch.empty(0, dtype=dtype, device=unit.device) for dtype in dtypes]
            if self._receives:
                buffers = _cut(memory, turn, unit, dtypes)
            streams = context.streams
            context.unsharder.gathers_follow_compute()
            with streams.on_gather_stream():
                shards = [
                    streams.upload(handle.shard).to(dtype) for handle, dtype in zip(unit.handles, dtypes, strict=True)
                ]
                if not groups.sharded:
                    for buffer, shard in zip(buffers, shards):
                        buffer.copy_(shard)
                    return _Gathered(unit, buffers, [Work.done(streams)], shards)
                if self._to is None:
                    parts = [Gather(buffer, shard) for buffer, shard in zip(buffers, shards)]
                    event = context.passes.event(GATHER, unit)
                    return _Gathered(unit, buffers, [unit.communicator.gather(parts, event)], shards)
                target = group_ranks(groups.shard).index(self._to)
                works = [
                    exchange(
                        buffer.view(torch.uint8),
                        shard.view(torch.uint8),
                        [shard.nbytes if groups.shard_rank == target else 0] * groups.shard_size,
                        [shard.nbytes if rank == target else 0 for rank in range(groups.shard_size)],
                        groups.shard,
                        streams,
                        LABEL,
                    )
                    for buffer, shard in zip(buffers, shards)
                ]
                return _Gathered(unit, buffers, works, shards)


def _cut(memory: list[torch.Tensor | None], turn: int, unit: Unit, dtypes: list[torch.dtype]) -> list[torch.Tensor]:
    """Return buffers for the unit's buckets in ``memory[turn]``; each begins at a multiple of 64 bytes."""
    sizes = [handle.layout.padded_numel * dtype.itemsize for handle, dtype in zip(unit.handles, dtypes)]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 64) * 64)
    block = memory[turn]
    if block is None or block.numel() < starts[-1] or block.device != unit.device:
        memory[turn] = block = None  # released before the next one is allocated
        memory[turn] = block = torch.empty(starts[-1], dtype=torch.uint8, device=unit.device)
    return [block[start : start + size].view(dtype) for start, size, dtype in zip(starts, sizes, dtypes)]


def _slice(name: str, tensor: torch.Tensor, buffer: torch.Tensor) -> Slice:
    start = int(tensor.storage_offset()) - int(buffer.storage_offset())
    return Slice(name, tuple(tensor.shape), tensor.dtype, start, start + tensor.numel(), tensor.stride())


class ModelTensor(NamedTuple):
    """A tensor of a model: a parameter of ``unit``, or a ``value`` that every rank has.

    Attributes:
        names: all names in the plain model.
        dtype: to export it in.
        held: this rank's part of the parameter.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    unit: Unit | None
    held: Held | None
    value: torch.Tensor | None


def tensors_of(model: nn.Module, label: str, dtype: torch.dtype | None = None) -> list[ModelTensor]:
    """List the tensors of the model by unit, in ``dtype`` or their own; those that no unit owns are last. ``label`` is
    the call in errors."""
    params, found = ModelParams(model), list[ModelTensor]()
    check_placements(params, label)
    for unit in params.units:
        unit.check_idle(f"call {label} outside of that")
        unit.follow_parameters()
    for holder in params.holders.values():
        own = target_dtype(holder.handle.layout.dtype, dtype)
        for member in holder.members:
            held = held_param(holder.handle, member.index)
            found.append(ModelTensor(member.names, own, member.shape, holder.unit, held, None))
    for name, value in unowned(model):
        found.append(ModelTensor((name,), target_dtype(value.dtype, dtype), tuple(value.shape), None, None, value))
    return found


def unowned(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters that no unit owns, and the persistent buffers, by name in the plain model."""
    found: dict[str, torch.Tensor] = {name: param for param, name in ModelParams(model).others.items()}
    for path, module in plain_modules(model):
        found.update((joined(path, name), buffer) for name, buffer in persistent_buffers(module))
    return list(found.items())


def target_dtype(own: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype to export tensors of dtype ``own`` in: ``dtype``, if both are for floating-point numbers."""
    return dtype if dtype is not None and own.is_floating_point else own


def check_placements(params: ModelParams, label: str) -> None:
    """Raise NotImplementedError if a parameter is placed by tensor parallelism, or holds experts."""
    for unit in params.units:
        if unit.groups.tp is not None:
            raise NotImplementedError(
                f"{label}: {unit.name} has experts or parameters of tensor parallelism: gather them by a full state "
                "dict"
            )
