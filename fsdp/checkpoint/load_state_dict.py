"""``load_state_dict()`` of a wrapped module: with a dict on every rank, or with one on rank 0 alone.

In the latter case rank 0 loads like any rank but writes nothing; it tells the others what it found, and then hands out
the values, a unit at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from fsdp.api import FullStateDictConfig, StateDictType
from fsdp.checkpoint.forms import Held, Source, fill
from fsdp.checkpoint.loading import Loading, persistent_buffers
from fsdp.checkpoint.placement import Placement
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.redistribute import Channel
from fsdp.checkpoint.state_dict import held_params
from fsdp.comm.collectives import broadcast
from fsdp.comm.consensus import broadcast_object
from fsdp.flat.names import clean, joined, unit_of, wrappers_in
from fsdp.flat.views import registered_params
from fsdp.runtime.build import join
from fsdp.runtime.unit import Phase, Unit, units_of


class Mismatch(RuntimeError, AssertionError):
    """A sharded or local state dict does not fit: an error of the one kind in FSDP1, of the other in ``nn.Module``."""


def load(
    wrapper: Any, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> Any:
    """``wrapper.load_state_dict(state_dict, strict, assign)``; ``into_module`` is that of ``nn.Module``."""
    with join(unit_of(wrapper)).calling("load_state_dict()"):
        return _load(wrapper, into_module, state_dict, strict, assign)


def _load(
    wrapper: Any, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool, assign: bool
) -> Any:
    unit = unit_of(wrapper)
    settings = unit.state_settings
    if isinstance(settings.state_dict_config, FullStateDictConfig) and settings.state_dict_config.rank0_only:
        empty = torch.tensor([int(isinstance(state_dict, Mapping) and not state_dict)], device="cpu")
        unit.agree_on_maximum(empty)
        if int(empty):
            return load_from_first(wrapper, into_module, state_dict, strict)
    loading = Loading(wrapper, strict, assign=assign)
    with contextlib.closing(loading):
        loading.begin(wrappers_in(wrapper))
        try:
            return into_module(state_dict, strict, assign)
        except BaseException as error:
            loading.failed(error)
            if type(error) is RuntimeError and settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
                raise Mismatch(str(error)) from error
            raise


def prepare(
    model: nn.Module, into_module: Callable[..., Any], state_dict: Mapping[str, Any], *, strict: bool
) -> Loading:
    """All of ``model.load_state_dict(state_dict, strict)`` that can fail, for a model that is wrapped or contains what
    is; ``into_module`` is that of ``nn.Module``. This rank alone, without communication.

    Returns:
        what then has to ``write()``, which changes parameters and cannot fail, or to ``undo()``.

    Raises: as ``load_state_dict``, with the model as it was.
    """
    loading = Loading(model, strict, alone=True)
    with contextlib.closing(loading):
        loading.begin(wrappers_in(model))
        if not loading.hears_of(model):
            loading.error_messages = []
        found = loading.incompatible = into_module(state_dict, strict=strict)
        if not loading.hears_of(model):
            loading.finish(found.missing_keys, found.unexpected_keys)
            if loading.error_messages:
                raise RuntimeError("; ".join(loading.error_messages))
    return loading


# -- from rank 0 alone -------------------------------------------------------------------------------------------------


def load_from_first(wrapper: Any, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool) -> Any:
    """Load what rank 0 of the units' group has; the others' dicts are not looked at. One collective per unit."""
    units = units_of(wrapper)
    root = units[0]
    if any(unit.groups != root.groups for unit in units):
        raise RuntimeError(
            "loading a state dict that only rank 0 has needs all units to be sharded over the same group; pass the "
            "dict on every rank"
        )
    for unit in units:
        if unit.phase is not Phase.IDLE:
            raise RuntimeError(
                f"loading what only rank 0 has while {unit.name} is in {unit.phase.name}: load it outside"
            )
    first = root.groups.shard_rank == 0 and root.groups.replica_rank == 0
    loading = Loading(wrapper, strict, alone=True)
    plan: Any = None
    if first:
        try:
            with contextlib.closing(loading):
                loading.begin(wrappers_in(wrapper))
                plan = _plan(loading, into_module, state_dict, strict)
        except BaseException as error:
            _from_first(root, str(error) or type(error).__name__)
            raise
    plan = _from_first(root, plan)
    if isinstance(plan, str):
        raise RuntimeError(plan)
    incompatible, present, rest = plan
    with torch.inference_mode(False), torch.no_grad():
        for position, unit in enumerate(units):
            _scatter(unit, present[position], loading.units[position].sources if first else None)
            unit.shards_were_written()
        if first and loading._rest is not None:
            loading._rest.commit(assign=False)
        tensors = [tensor for name, tensor in rest_of(wrapper) if name in rest]
        for group in (root.groups.shard, root.groups.replica):
            if group is not None:
                broadcast(tensors, group)
    return incompatible


def _from_first(root: Unit, value: Any) -> Any:
    """What rank 0 of the unit's ranks has as ``value``."""
    for group in (root.groups.shard, root.groups.replica):
        if group is not None and group.size() > 1:
            value = broadcast_object(value, group, "tell what state rank 0 has", root.device)
    return value


def _plan(
    loading: Loading, into_module: Callable[..., Any], state_dict: Mapping[str, Any], strict: bool
) -> str | tuple[Any, list[list[list[int]]], set[str]]:
    """What is to be loaded: the keys that do not fit, the parameters by unit and bucket, and the names of the rest; or
    why it cannot be."""
    extra = [key for key in state_dict if key.endswith("_extra_state")]
    if extra:
        return f"{', '.join(extra)}: extra state cannot be loaded from one rank alone; pass the dict on every rank"
    incompatible = into_module(state_dict, strict)
    for unit in loading.units:
        for handle, sources in zip(unit.unit.handles, unit.sources):
            for index, source in sources.items():
                if isinstance(source, (ShardedTensor, DTensor, RaggedTensor)):
                    loading.undo()
                    return f"{unit.names(handle)[index]!r} of {unit.unit.name} is sharded, and only rank 0 has a dict"
    present = [[sorted(sources) for sources in unit.sources] for unit in loading.units]
    return incompatible, present, {name for name, _ in rest_of(loading.opener) if name in state_dict}


def rest_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """(name, tensor) of the parameters below ``module`` that no unit owns, and of its persistent buffers."""
    owned = {id(visible.param) for unit in units_of(module) for views in unit.views for visible in views.visible}
    found: list[tuple[str, torch.Tensor]] = []
    for path, owner in module.named_modules():
        tensors = [*registered_params(owner), *persistent_buffers(owner)]
        named = [(clean(joined(path, name)), tensor) for name, tensor in tensors]
        found += [(name, tensor.detach()) for name, tensor in named if id(tensor) not in owned]
    return found


def _scatter(unit: Unit, present: list[list[int]], sources: list[dict[int, torch.Tensor]] | None) -> None:
    """Give every rank its part of the parameters ``present``, by bucket, whose values the first rank has."""
    groups, label = unit.groups, f"scatter {unit.name}"
    several = [
        (held_params(handle)[index], sources[bucket][index] if sources is not None else None)
        for bucket, (handle, indices) in enumerate(zip(unit.handles, present))
        for index in indices
    ]
    if groups.replica_rank == 0:
        channel = Channel(groups.shard, groups.shard_rank, groups.shard_size, unit.device)
        arriving = [(held, Source.of_first(value, held.part.shape, channel.size)) for held, value in several]
        fill(arriving, channel, label, watch=unit.watch_call())
        channel.flush()
    if groups.replica is not None:
        channel = Channel(groups.replica, groups.replica_rank, groups.replica_size, unit.device)
        parts = [held.part for held, _ in several]
        of_first = [Source(Placement.on_first(part.boxes, channel.size), part.parts) for part in parts]
        fill([(Held(part, None), source) for part, source in zip(parts, of_first)], channel, label)
        channel.flush()
    for views, indices in zip(unit.views, present):
        views.note_writes(indices)
