"""Reducing the gradients that ``no_sync()`` has accumulated, without another backward."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup

from fsdp.comm.collectives import agree
from fsdp.comm.lane.issuing import REDUCE
from fsdp.runtime.context import RootContext
from fsdp.runtime.negotiation import agree_on_used
from fsdp.runtime.unit import Unit


def reduce_accumulated(context: RootContext, units: Sequence[Unit]) -> None:
    """Reduce the accumulated gradients of ``units``, all of one tree, and attach the results as ``.grad``.

    A bucket is reduced if any rank has accumulated a gradient in it; the other ranks contribute zeros.
    """
    joined = context.streams.joined(context.compute)
    with torch.no_grad(), context.calling("reduce_gradients()", often=True, gathers=False), joined:
        accumulated = _agree_on_buckets(context, units)
        for unit, buckets in accumulated.items():
            event = context.passes.about_to(REDUCE, unit)
            unit.reduce(context.reductions, event, buckets)
        for unit in accumulated:
            if unit.policy.tree.reduce_unused:
                agree_on_used([unit], unit.agree_on_maximum)
        context.reductions.drain(attach=True)


def _agree_on_buckets(context: RootContext, units: Sequence[Unit]) -> dict[Unit, list[int]]:
    """Return the buckets in which any rank has accumulated gradients, by unit; units without any are left out."""
    flags = {
        unit: torch.tensor([bucket.accumulates for bucket in unit.gradients], dtype=torch.uint8, device="cpu")
        for unit in units
        if unit.handles
    }
    for over in ((lambda groups: groups.shard if groups.shard_size > 1 else None), (lambda groups: groups.replica)):
        by_group: dict[int, tuple[ProcessGroup, list[Unit]]] = {}
        for unit in flags:
            group = over(unit.groups)
            if group is not None:
                by_group.setdefault(id(group), (group, []))[1].append(unit)
        for group, members in by_group.values():
            context.passes.announce(group)
            together = torch.cat([flags[unit] for unit in members])
            agree(together, group, context.root.device, "agree on the gradients to reduce")
            flags.update(zip(members, together.split([len(flags[unit]) for unit in members])))
    buckets = {unit: [bucket for bucket, flag in enumerate(each.tolist()) if flag] for unit, each in flags.items()}
    return {unit: numbers for unit, numbers in buckets.items() if numbers}
