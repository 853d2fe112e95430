"""``.to()``, ``.half()``, ``.cuda()`` and so on, on a wrapped model: a function is applied to shards and buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fsdp.runtime.full_params import without_shards
from fsdp.runtime.unit import Phase, Unit


def apply_to_unit(
    unit: Unit,
    units: Sequence[Unit],
    place: str,
    fn: Callable[[torch.Tensor], torch.Tensor],
    apply_to_modules: Callable[[], object],
) -> bool:
    """Apply ``fn`` to the shards, gradients and buffers of ``unit``, and to the modules inside it.

    Args:
        unit: the unit of the wrapper that ``nn.Module._apply`` reached.
        units: ``unit`` and all units inside it.
        place: the prefix of the wrapper's module in the names of the unit's parameters.
        apply_to_modules: ``nn.Module._apply`` of the wrapper. It sees buffers and nested wrappers, but no parameters of
            ``unit``; of summoned units it sees the full parameters.

    Returns:
        True if a unit without parameters has moved to another device, so that the tree has to be built again.

    Raises:
        RuntimeError: a unit runs, or only a part of the units is summoned.
    """
    if all(inner.phase is Phase.SUMMONED for inner in units):
        with without_shards(unit):
            apply_to_modules()
        return False
    for inner in units:
        inner.check_can_change()
        inner.follow_parameters()
    unit.precision.release_buffers(unit.device)
    for views in unit.views:
        views.registration.unregister()
    try:
        apply_to_modules()
    finally:
        for views in unit.views:
            views.registration.show()
    device = unit.device
    if unit.members.is_first_to_change(fn, place):
        with torch.no_grad():
            device = unit.apply_to_shards(fn) if unit.handles else fn(torch.empty(0, device=device)).device
    if unit.context is not None:
        unit.precision.place_buffers(device, full_precision=unit.precision.wants_full)
    moved = device != unit.device
    unit.move_to(device)
    return moved
