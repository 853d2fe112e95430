"""``load_state_dict()`` of a wrapped module: with a dict on every rank, or with one on rank 0 alone.

In the latter case rank 0 loads like any rank but writes nothing; it tells the others what it found, and then hands out
the values, a unit at a time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX

from fsdp.api import FullStateDictConfig, StateDictType
from fsdp.checkpoint.forms import Held, Source, fill
from fsdp.checkpoint.loading import Loading, alike_on_all_ranks, persistent_buffers
from fsdp.checkpoint.placement import Placement
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.redistribute import Channel
from fsdp.checkpoint.state_dict import held_params
from fsdp.comm.collectives import broadcast
from fsdp.comm.consensus import broadcast_object
from fsdp.comm.groups import default_group
from fsdp.flat.names import clean, clean_text, joined, unit_of, wrappers_in
from fsdp.flat.registration import registered_params
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
    try:
        return load_alike(wrapper, functools.partial(into_module, assign=assign), state_dict, strict, assign=assign)
    except RuntimeError as error:
        if type(error) is RuntimeError and settings.state_dict_type is not StateDictType.FULL_STATE_DICT:
            raise Mismatch(str(error)) from error
        raise


def load_alike(
    model: nn.Module,
    into_module: Callable[..., Any],
    state_dict: Mapping[str, Any],
    strict: bool,
    *,
    assign: bool = False,
) -> Any:
    """``model.load_state_dict(state_dict, strict)`` on all ranks that share a unit, or on none. ``into_module`` is
    that of ``nn.Module``."""
    with contextlib.ExitStack() as undo:
        with alike_on_all_ranks(units_of(model)) as given:
            loading = prepare(model, into_module, state_dict, strict=strict, assign=assign)
            undo.callback(loading.undo)
            given.update({unit.unit: list(unit.given()) for unit in loading.units})
        undo.pop_all()
    loading.write()
    return loading.incompatible


def prepare(
    model: nn.Module,
    into_module: Callable[..., Any],
    state_dict: Mapping[str, Any],
    *,
    strict: bool,
    assign: bool = False,
) -> Loading:
    """All of ``model.load_state_dict(state_dict, strict)`` that can fail, for a model that is wrapped or contains what
    is; ``into_module`` is that of ``nn.Module``. This rank alone, without communication.

    Returns:
        what then has to ``write()``, which changes parameters and cannot fail, or to ``undo()``.

    Raises: as ``load_state_dict``, with the model as it was.
    """
    loading = Loading(model, strict, assign=assign, alone=True)
    with contextlib.closing(loading):
        loading.begin(wrappers_in(model))
        if not loading.hears_of(model):
            loading.error_messages = []
        try:
            found = loading.incompatible = into_module(state_dict, strict=strict)
        except RuntimeError as error:
            if type(error) is not RuntimeError or loading.hears_of(model):
                raise
            lines = [line if "Unexpected key(s)" in line else clean_text(line) for line in str(error).split("\n")]
            raise RuntimeError("\n".join(lines)) from error
        if not loading.hears_of(model):
            loading.finish(found.missing_keys, found.unexpected_keys)
            if loading.error_messages:
                raise RuntimeError("; ".join(loading.error_messages))
    return loading


# -- from rank 0 alone -------------------------------------------------------------------------------------------------


def load_from_first(model: nn.Module, into_module: Callable[..., Any], state_dict: Any, strict: bool) -> Any:
    """``model.load_state_dict(state_dict, strict)`` with the dict of rank 0 of the units' group, or of the default one
    where there are no units; the others' are not looked at. One collective per unit.

    Raises, on every rank, before anything is loaded: as ``prepare`` does on rank 0.
    """
    units = units_of(model)
    groups, device = _ranks_of(model, units)
    for unit in units:
        unit.watch_call()
        if unit.phase is not Phase.IDLE:
            raise RuntimeError(
                f"loading what only rank 0 has while {unit.name} is in {unit.phase.name}: load it outside"
            )
    first = all(group.rank() == 0 for group in groups)

    def from_first(value: Any) -> Any:
        for group in groups:
            value = broadcast_object(value, group, "tell what state rank 0 has", device)
        return value

    with contextlib.ExitStack() as undo:
        plan: Any = None
        loading: Loading | None = None
        if first:
            try:
                loading = prepare(model, into_module, state_dict, strict=strict)
                undo.callback(loading.undo)
                plan = _plan(loading, state_dict)
            except BaseException as error:
                from_first(str(error) or type(error).__name__)
                raise
        plan = from_first(plan)
        if isinstance(plan, str):
            raise RuntimeError(plan)
        incompatible, present, rest, extra = plan
        with alike_on_all_ranks(units):
            if not first and extra:
                undo.callback(prepare(model, into_module, extra, strict=False).undo)
        undo.pop_all()
    with torch.inference_mode(False), torch.no_grad():
        for position, unit in enumerate(units):
            _scatter(unit, present[position], loading.units[position].sources if loading is not None else None)
            unit.shards_were_written()
        if loading is not None and loading._rest is not None:
            loading._rest.commit(assign=False)
        tensors = [tensor for name, tensor in rest_of(model) if name in rest]
        for group in groups:
            broadcast(tensors, group)
    return incompatible


def _ranks_of(model: nn.Module, units: list[Unit]) -> tuple[list[Any], torch.device]:
    """The groups over which, one after the other, what rank 0 has comes to all; and where they communicate."""
    if not units:
        return [default_group()], torch.device("cpu")
    root = units[0].groups
    if any(unit.groups != root for unit in units) or (
        unit_of(model) is None and root.data_parallel_size != default_group().size()
    ):
        raise RuntimeError(
            "loading a state dict that only rank 0 has needs all units to be sharded over the same group, and over all "
            "ranks where the model itself is not wrapped; pass the dict on every rank"
        )
    groups = [group for group in (root.shard, root.replica) if group is not None and group.size() > 1]
    return groups, units[0].device


def _plan(loading: Loading, state_dict: Mapping[str, Any]) -> tuple[Any, list[list[list[int]]], set[str], Any]:
    """What is to be loaded: the keys that do not fit, the parameters by unit and bucket, the names of the rest, and the
    extra state.

    Raises:
        RuntimeError: a value is sharded.
    """
    sharded = [key for key, value in state_dict.items() if isinstance(value, (ShardedTensor, DTensor, RaggedTensor))]
    if sharded:
        raise RuntimeError(f"{', '.join(map(repr, sharded))}: sharded, and only rank 0 has a dict")
    present = [[sorted(sources) for sources in unit.sources] for unit in loading.units]
    rest = {name for name, _ in rest_of(loading.opener) if name in state_dict}
    extra = {key: value for key, value in state_dict.items() if key.rpartition(".")[2] == _EXTRA_STATE_KEY_SUFFIX}
    return loading.incompatible, present, rest, extra


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
