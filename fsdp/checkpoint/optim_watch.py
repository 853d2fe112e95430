"""Detection of optimizer state that another rank or a plain optimizer has saved.

``optimizer.state_dict()`` of a sharded model contains the parts of one rank, without names. So the groups in the dict
get a stamp: the rank that saves, and the number of ranks. ``Optimizer.load_state_dict`` copies unknown settings of
groups, so the stamp reaches every optimizer that loads the dict. The first step after a load compares it with this rank
and removes it. Stamps are in dicts, and in groups between a load and the next step; never in the state by parameter
names.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fsdp.checkpoint.optim_names import STAMP, Group, Holder, holders_of
from fsdp.runtime.unit import Unit

_REMEDY = (
    "optimizer.state_dict() of a sharded model is of one rank's parts alone. Save FSDP.optim_state_dict(model, "
    "optimizer), and load what FSDP.optim_state_dict_to_load(model, optimizer, saved) makes of it; or save and load "
    "each rank's own"
)

_units: weakref.WeakSet[Unit] = weakref.WeakSet()
_lock = threading.Lock()  # ranks may be threads
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # since their last load
_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def watch_state_of(unit: Unit) -> None:
    """Check the state of optimizers that hold parameters of ``unit``, from now on."""
    with _lock:
        _units.add(unit)
    _watch()


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check the loaded state before the first step.

    Raises:
        RuntimeError: the state is that of another rank, or of a plain optimizer.
    """
    if optimizer in _checked:
        return
    if optimizer not in _hooked:
        _hooked.add(optimizer)
        optimizer.register_load_state_dict_post_hook(_checked.discard)
        optimizer.register_state_dict_post_hook(_add_stamps)
    holders = _holders()
    for group in optimizer.param_groups:
        _check_stamp(optimizer, group, holders)
        for param in group["params"]:
            if param in holders and optimizer.state.get(param):
                _check_size(optimizer, holders[param])
    for group in optimizer.param_groups:
        group.pop(STAMP, None)
    _checked.add(optimizer)


def _holders() -> dict[torch.Tensor, Holder]:
    """Return all sharded parameters of this process."""
    with _lock:
        units = [unit for unit in _units if unit.is_sharded]
    return {holder.param: holder for unit in units for holder in holders_of(unit)}


def _add_stamps(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Add stamps to a dict of ``optimizer.state_dict()``; the optimizer's own groups do not change."""
    holders = _holders()
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"]):
        if ranks := list(_ranks_of(group, holders)):
            saved[STAMP] = ranks


def _ranks_of(group: Group, holders: dict[torch.Tensor, Holder]) -> Iterator[list[int]]:
    """Yield each distinct [rank, number of ranks] for the sharded parameters in ``group``; with tensor parallelism also
    the rank there and the number of those ranks."""
    found = []
    for holder in (holders[param] for param in group["params"] if param in holders):
        groups = holder.unit.groups
        tp = [] if groups.tp is None else [groups.tp.rank(), groups.tp.size()]
        if (ranks := [groups.shard_rank, groups.shard_size, *tp]) not in found:
            found.append(ranks)
            yield ranks


def _check_stamp(optimizer: Optimizer, group: Group, holders: dict[torch.Tensor, Holder]) -> None:
    """Check that this rank has saved the state of ``group``.

    Raises:
        RuntimeError: another rank has saved it.
    """
    saved, here = group.get(STAMP), list(_ranks_of(group, holders))
    if saved is not None and here and [list(ranks) for ranks in saved] != here:
        raise RuntimeError(
            f"{type(optimizer).__name__} holds state of another rank: it was saved by {_words(saved)}, and this is "
            f"{_words(here)}. {_REMEDY}"
        )


def _words(several: list[list[int]]) -> str:
    return " and ".join(
        f"rank {rank} of {size}" + (f", rank {tp[0]} of {tp[1]} of tensor parallelism" if tp else "")
        for rank, size, *tp in several
    )


def _check_size(optimizer: Optimizer, holder: Holder) -> None:
    """Check the sizes of the states of one parameter.

    Raises:
        RuntimeError: a state has the size of another rank's part, or of the whole parameter.
    """
    if holder.is_flat or not holder.sharded:  # all parts of a flat parameter have one size
        return
    layout, (member,) = holder.handle.layout, holder.members
    numels = [layout.piece(member.index, rank).numel for rank in range(layout.world_size)]
    whole = member.record.numel
    own = numels[holder.rank]
    for name, value in optimizer.state[holder.param].items():
        numel = value.numel() if isinstance(value, torch.Tensor) and value.dim() > 0 else own
        if numel != own and numel > 1 and numel in (*numels, whole):
            raise RuntimeError(
                f"{type(optimizer).__name__} holds state of another rank: state {name!r} of {holder} in "
                f"{holder.unit.name} has {numel} elements, and this rank's part of the parameter has {own}. {_REMEDY}"
            )
