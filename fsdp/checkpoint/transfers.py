"""Transfers of tensors between the shards of a unit and the values of a state dict, in any form.

A save is :func:`export` and :func:`finish`. A load is :func:`fill_each`, or :func:`fill_from_first` for values on rank
0 alone, and a flush of the channels.

[Note: Tensor parallelism]
A tensor that tensor parallelism has cut is on the ranks of a shard group and of a tensor-parallel group. A rank knows
the intervals of the own shard group, and the chunk of each tensor-parallel rank, but not the intervals of other shard
groups: with chunks of different sizes their flat vectors have different layouts. So elements move in two steps. A save
gathers within the shard group first, and a load exchanges within the tensor-parallel group first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fsdp.checkpoint.forms import Form, Held, Source
from fsdp.checkpoint.sharded_tensors import group_of
from fsdp.comm.groups import group_ranks
from fsdp.comm.host_memory import empty_strided
from fsdp.flat.tensor_parallel import local_of
from fsdp.placement.boxes import Box, Part, Placement, copy_parts, dense_stride, memory_order
from fsdp.placement.redistribute import Channel, Channels, Item, redistribute
from fsdp.runtime.unit import Unit


def _memory(boxes: Iterable[Box], like: torch.Tensor, device: torch.device) -> list[Part]:
    """Allocate memory for boxes of a tensor with the dtype and the memory order of ``like``."""
    order, whole = memory_order(like.shape, like.stride()), tuple(like.shape)
    strides = ((box, like.stride() if box.sizes == whole else dense_stride(box.sizes, order)) for box in boxes)
    return [(box, empty_strided(box.sizes, stride, dtype=like.dtype, device=device)) for box, stride in strides]


@dataclass
class Export:
    """A tensor on its way into a state dict.

    Attributes:
        memory: memory for this rank's elements.
        wanted: boxes that this rank gets, or with tensor parallelism the ranks of that group together.
    """

    form: Form
    held: Held
    memory: Sequence[Part]
    channel: Channel
    wanted: tuple[Box, ...]

    def value(self, *, again: bool = False) -> Any:
        """Make the value for the state dict after the channel's flush. ``again`` copies it for another name of the
        parameter."""
        local = self.memory[0][1] if self.memory else None
        return self.form.wrap(self.held, local.clone() if again and local is not None else local, self.channel)


def export(tensors: Iterable[Held], form: Form, channel: Channel, label: str, first: int = 0) -> list[Export]:
    """Start to move ``tensors`` to the ranks that get them in ``form``; see :func:`redistribute`. With
    ``rank0_only`` rank ``first`` of the channel gets them; -1 is no rank."""
    leaving, items, device = [], [], form.device(channel) or channel.device
    for held in tensors:
        part, target = held.part, form.place(tuple(held.part.shape), channel.size)
        memory, wanted = list[Part](), tuple[Box, ...]()
        if target is not None:
            if form.rank0_only:
                target = Placement.whole(part.shape, channel.size, only=first)
            wanted = target.boxes[channel.rank]
            if held.tp is not None:
                target = target.inside(part.within)
            memory = _memory(target.boxes[channel.rank], part, device)
            source = held.placement(channel.size)
            if source is None:
                copy_parts(part.parts, memory)
            else:
                items.append(Item(part.dtype, part.stride(), source, target, part.parts, memory))
        leaving.append(Export(form, held, memory, channel, wanted))
    redistribute(items, channel, label)
    return leaving


def finish(leaving: Iterable[Export], channels: Channels, label: str) -> None:
    """Wait until the elements of ``leaving`` are there, and exchange them among the ranks of tensor parallelism. See
    [Note: Tensor parallelism]."""
    channels.flush()
    items: dict[Channel, list[Item]] = {}
    for one in leaving:
        held, part = one.held, one.held.part
        if held.tp is not None and held.tp.dim is not None and one.wanted:
            source, target = held.shares.inside(one.wanted[0]), one.form.share(held, one.wanted[0])
            if source != target:
                channel = channels.over(held.tp.group, one.channel.device)
                gets = _memory(target.boxes[channel.rank], part, one.form.device(channel) or channel.device)
                items.setdefault(channel, []).append(Item(part.dtype, part.stride(), source, target, one.memory, gets))
                one.memory = gets
    _exchange(items, label)


def _exchange(items: Mapping[Channel, list[Item]], label: str) -> None:
    for channel, several in items.items():
        redistribute(several, channel, label)
        channel.flush()


def fill(arriving: Iterable[tuple[Held, Source]], channel: Channel, label: str) -> None:
    """Start to move the elements of each source to the ranks that hold them, in their dtype; see
    :func:`redistribute`."""
    items = []
    for held, source in arriving:
        part = held.part
        if source.placement is None:
            if source.parts:
                copy_parts(source.parts, part.parts)
            continue
        target = held.placement(channel.size) or Placement.whole(part.shape, channel.size)
        placement = source.placement if source.spread is None else source.placement.inside(part.within)
        items.append(Item(part.dtype, part.stride(), placement, target, source.parts, part.parts))
    redistribute(items, channel, label)


def gathered(
    arriving: Iterable[tuple[Held, Source]], unit: Unit, channels: Channels, label: str
) -> list[tuple[Held, Source]]:
    """Exchange spread sources among the ranks of tensor parallelism, so that each rank has the elements for its
    shard group. See [Note: Tensor parallelism]."""
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
            gets = _memory(needs.boxes[channel.rank], part, unit.device)
            items.setdefault(channel, []).append(Item(part.dtype, part.stride(), has, needs, source.parts, gets))
            source = source._replace(parts=gets)
        found.append((held, source))
    _exchange(items, label)
    return found


def fill_each(arriving: Iterable[tuple[Held, Source]], unit: Unit, channels: Channels, label: str) -> None:
    """Start to move the elements of each source to the ranks of the unit. A source on other ranks than those of the
    unit's chunks is sent whole to all of them, a batch at a time."""
    by_group: dict[Any, list[tuple[Held, Source]]] = {}
    for held, source in gathered(arriving, unit, channels, label):
        if source.group not in (None, group_of(unit.groups)):
            held = held._replace(spans=None)
        by_group.setdefault(source.group, []).append((held, source))
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
    """Start to send values from the first rank to the ranks that hold the tensors.

    The ranks of the first replica get their parts, and pass them on to the other replicas.

    Args:
        values: pairs of a tensor and a value, which is None except on the first rank.
        group: ranks whose first has the values, if not the unit's; then each of them gets the whole value.
        tp: ranks of tensor parallelism, if the first of them has the values.
    """
    groups = unit.groups
    by_replicas = groups.sharded and groups.replica is not None
    if group is not None and by_replicas and groups.data_parallel_size == group.size():
        group = None
    channel = channels.over(groups.shard if group is None else group, unit.device)
    is_cut = group is None or (groups.sharded and group_ranks(groups.shard) == group_ranks(group))
    arriving: list[tuple[Held, Source]] = []
    for held, value in values:
        shape = tuple(held.part.shape)
        parts = [] if value is None else [(Box.whole(shape), local_of(value))]
        spread = None if tp is None else (tp, Placement.whole(shape, tp.size(), only=0))
        source = Source(Placement.whole(shape, channel.size, only=0), parts, spread=spread)
        arriving.append((held if is_cut else held._replace(spans=None), source))
    if group is not None or groups.replica_rank == 0:
        fill(gathered(arriving, unit, channels, label), channel, label)
    if group is None and groups.replica is not None:
        channels.flush()
        channel, others = channels.over(groups.replica, unit.device), ((),) * (groups.replica.size() - 1)
        copies = [(held.part, Placement((held.part.boxes, *others))) for held, _ in arriving]
        fill([(Held(part, None), Source(placement, part.parts)) for part, placement in copies], channel, label)
