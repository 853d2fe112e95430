"""Detection of optimizer state that another rank or a plain optimizer has saved.

``optimizer.state_dict()`` of a sharded model contains the parts of one rank, without names. Loaded state is checked
before the optimizer's first step. A part of a different size is an error. Parts of equal size are compared: each rank
writes a digest of some elements into the group's store and reads the digests that are there, without waiting. So at
least the last of the ranks with equal values gives a warning. (A mark in the dict would be another key of its groups,
and ``optim_state_dict_to_load`` would not return the optimizer's own dict.)
"""

from __future__ import annotations

import functools
import hashlib
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from fsdp.checkpoint.optim_blocks import as_tensors
from fsdp.checkpoint.optim_dtypes import dequantized
from fsdp.checkpoint.optim_names import Holder, holders_of
from fsdp.comm.board import Board
from fsdp.runtime.unit import Unit

_SAMPLES = 32  # elements of each state that are compared
_REMEDY = (
    "optimizer.state_dict() of a sharded model is of one rank's parts alone. Save FSDP.optim_state_dict(model, "
    "optimizer), and load what FSDP.optim_state_dict_to_load(model, optimizer, saved) makes of it; or save and load "
    "each rank's own"
)

_units: weakref.WeakSet[Unit] = weakref.WeakSet()
_lock = threading.Lock()  # ranks may be threads
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # since their last load
_hooked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_checks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by group


def watch_state_of(unit: Unit) -> None:
    """Check the state of optimizers that hold parameters of ``unit``, from now on."""
    with _lock:
        _units.add(unit)
    _watch()


@functools.cache
def _watch() -> None:
    register_optimizer_step_pre_hook(_check)


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    if optimizer not in _hooked:
        _hooked.add(optimizer)
        optimizer.register_load_state_dict_post_hook(_checked.discard)
    if not optimizer.state:
        return
    by_group: dict[Any, list[Holder]] = {}
    for holder in _holders(optimizer):
        _check_size(optimizer, holder)
        by_group.setdefault(holder.unit.groups.shard, []).append(holder)
    for group, holders in by_group.items():
        _compare(optimizer, group, holders)


def _holders(optimizer: Optimizer) -> Iterator[Holder]:
    """Yield the sharded parameters that have state, in the optimizer's order."""
    with _lock:
        units = list(_units)
    known = {one.param: one for unit in units if unit.groups.sharded for one in holders_of(unit)}
    for group in optimizer.param_groups:
        for param in group["params"]:
            if param in known and optimizer.state.get(param):
                yield known[param]


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


def _compare(optimizer: Optimizer, group: Any, holders: list[Holder]) -> None:
    """Warn if another rank of ``group`` holds the same values."""
    samples, board = b"".join(_samples(optimizer, holders)), Board(group, "optimizer state")
    _checks[group] = check = _checks.get(group, 0) + 1
    own = hashlib.blake2b(samples, digest_size=16).hexdigest() if samples else ""
    board.post(str(check), own)
    for rank, digest in board.posted_next(str(check)).items():
        if rank != group.rank() and own and digest == own:
            warnings.warn(
                f"{type(optimizer).__name__} has the same state on ranks {rank} and {group.rank()} of the group, "
                f"although each holds another part of the parameters: was one rank's loaded on all? {_REMEDY}",
                stacklevel=6,
            )
            return


def _samples(optimizer: Optimizer, holders: list[Holder]) -> Iterator[bytes]:
    """Yield some elements of each state, except of states in which all elements are equal, as before a first step."""
    for holder in holders:
        for value in as_tensors(optimizer.state[holder.param]).values():
            if isinstance(value, torch.Tensor) and value.dim() > 0 and value.numel() > 1:
                elements = dequantized(value).detach().reshape(-1)
                some = elements[:: -(-elements.numel() // _SAMPLES)].cpu().contiguous()
                rows = some.view(torch.uint8).view(some.numel(), -1)
                if bool((rows != rows[0]).any()):
                    yield bytes(rows.view(-1).tolist())
