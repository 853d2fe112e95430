"""Detection of optimizer state that another rank or a plain optimizer has saved.

``optimizer.state_dict()`` of a sharded model contains the parts of one rank, without names. Loaded state is checked
before the optimizer's first step: a part of a different size is an error. Parts of equal size, such as those of flat
parameters, are not compared. (A mark in the dict would be another key of its groups, and ``optim_state_dict_to_load``
would not return the optimizer's own dict.)
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from fsdp import patches
from fsdp.checkpoint.optim_blocks import as_tensors
from fsdp.checkpoint.optim_names import Holder, holders_of
from fsdp.runtime.unit import Unit

_REMEDY = (
    "optimizer.state_dict() of a sharded model is of one rank's parts alone. Save FSDP.optim_state_dict(model, "
    "optimizer), and load what FSDP.optim_state_dict_to_load(model, optimizer, saved) makes of it; or save and load "
    "each rank's own"
)

_units: weakref.WeakSet[Unit] = weakref.WeakSet()
_lock = threading.Lock()  # ranks may be threads
_checked: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()  # whether since the last load


def watch_state_of(unit: Unit) -> None:
    """Check the state of optimizers that hold parameters of ``unit``, from now on."""
    with _lock:
        _units.add(unit)
    patches.LOADED_STATE.install(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer not in _checked:
        optimizer.register_load_state_dict_post_hook(lambda loaded: _checked.update({loaded: False}))
    was_checked, _checked[optimizer] = _checked.get(optimizer, False), True
    if was_checked or not optimizer.state:
        return
    with _lock:
        units = list(_units)
    known = {one.param: one for unit in units if unit.groups.sharded for one in holders_of(unit)}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in known and optimizer.state.get(param):
                _check_size(optimizer, known[param])


def _check_size(optimizer: Optimizer, holder: Holder) -> None:
    """Check the sizes of the states of one parameter.

    Raises:
        RuntimeError: a state has the size of another rank's part, or of the whole parameter.
    """
    if holder.is_flat:  # all parts of a flat parameter have one size
        return
    layout, (member,) = holder.handle.layout, holder.members
    numels = [layout.piece(member.index, rank).numel for rank in range(layout.world_size)]
    whole = member.record.numel
    own = numels[holder.rank]
    for name, value in as_tensors(optimizer.state[holder.param]).items():
        numel = value.numel() if isinstance(value, torch.Tensor) and value.dim() > 0 else own
        if numel != own and numel > 1 and numel in (*numels, whole):
            raise RuntimeError(
                f"{type(optimizer).__name__} holds state of another rank: state {name!r} of {holder} in "
                f"{holder.unit.name} has {numel} elements, and this rank's part of the parameter has {own}. {_REMEDY}"
            )
