"""``copy.deepcopy`` of a wrapped model: one with shards, buffers and a runtime of its own, over the same ranks.

A unit is copied around the copy of its module. Before that is made, what stands on the module for parameters is given
its counterparts in ``memo``, where ``deepcopy`` looks before it copies anything; so an optimizer that is copied
together with the model holds the parameters of the copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp.runtime.unit import Unit


def copy_unit(unit: Unit, copy_module: Callable[[], nn.Module], memo: dict[int, Any]) -> Unit:
    """A copy of ``unit`` around ``copy_module()``, with the same values and no gradients, which belongs to no tree yet.

    It reduces its gradients also if it is made inside ``no_sync()``, which ends for the original alone.

    A communication hook, with its state, is shared.

    Raises:
        RuntimeError: ``unit`` runs, or is shown whole, or its state dict is being made.
    """
    unit.check_idle("a wrapped model can be copied only while it does not run, and outside of summon_full_params()")
    if any(views.registration.placeholders is not None for views in unit.views):
        raise RuntimeError(
            f"the state dict of {unit.name} is being made: a wrapped model cannot be copied in its hooks"
        )
    unit.follow_parameters()
    for group in (unit.groups.shard, unit.groups.replica):
        memo[id(group)] = group
    handles = [handle.clone() for handle in unit.handles]
    for handle, views in zip(handles, unit.views):
        views.announce_copies(handle, memo)
    module = copy_module()
    views_of_copy = [views.copied(handle, memo) for handle, views in zip(handles, unit.views)]
    precision = unit.precision.copied(module, memo)
    copied = Unit(module, unit.name, views_of_copy, unit.groups, unit.device, unit.policy, precision)
    copied.has_parent, copied.mesh, copied.state_settings = unit.has_parent, unit.mesh, copy.copy(unit.state_settings)
    copied.all_reduce_hook = unit.all_reduce_hook
    copied.follow_divisor()
    if unit.comm_hook is not None:
        copied.use_hook(unit.comm_hook)
    return copied
