"""Saving optimizer state: from flat shards to tensors by parameter name.

When the ranks have agreed on the states (see :mod:`fsdp.checkpoint.optim_agree`), the elements of a unit travel in one
collective to the ranks that get them. Large units travel in several batches; two batches are in memory next to the
result, one in flight and one being unpacked.

:mod:`fsdp.checkpoint.optim_load` is the reverse.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp.checkpoint.forms import Form, Held
from fsdp.checkpoint.optim_agree import States, agree, without_elements
from fsdp.checkpoint.optim_blocks import as_tensors
from fsdp.checkpoint.optim_dtypes import dequantized, marked
from fsdp.checkpoint.optim_names import Group, Holder, Member, ModelParams, StateInfo, state_order
from fsdp.checkpoint.sharded_tensors import group_of
from fsdp.checkpoint.state_dict import check_no_experts
from fsdp.checkpoint.transfers import Export, export, finish
from fsdp.comm.collectives import agree as agree_on_largest
from fsdp.comm.groups import default_group, group_ranks
from fsdp.placement.redistribute import Channel, Channels
from fsdp.runtime.unit import Unit


@torch.no_grad()
def optim_state_dict(
    model: nn.Module, groups: Sequence[Group] | None, raw: Mapping[str, Any], form: Form, *, group: Any = None
) -> dict[str, Any]:
    """Implement ``FullyShardedDataParallel.optim_state_dict`` for ``raw``, the optimizer's own state dict on this rank.

    Tensors are copies, each in memory of its own, unless the form's values stay in the shards' memory; scalars are on
    CPU. The model may be a plain one as well.

    Args:
        groups: groups of the optimizer; None for an optimizer built from ``model.parameters()``.
    """
    check_no_experts(model, "optim_state_dict()")
    params = ModelParams(model, groups)
    by_key = params.by_key(raw)
    state_of = {by_key[key]: as_tensors(state) for key, state in raw["state"].items() if key in by_key}
    if group is None and params.units:
        group = default_group()
    held = [by_key[key] for group_ in raw.get("param_groups", ()) for key in group_["params"] if key in by_key]
    others = {key: value for key, value in raw["state"].items() if key not in by_key}
    agreed, quantized = agree(params, state_of, lambda: _check_known(params, [*state_of, *held], others))
    channels, leaving = Channels(), {}
    for unit, called in params.units.items():
        of_unit = {holder: states for holder, states in agreed.items() if holder.unit is unit}
        if of_unit:
            alone = unit.groups.tp is not None and unit.groups.data_parallel_size == 1
            channel = channels.over(None if alone else group_of(unit.groups), unit.device)
            leaving.update(_send(unit, of_unit, state_of, form, group, channel, f"optimizer state of {called}"))
    finish(leaving.values(), channels, "optimizer state of tensor parallelism")
    if form.rank0_only and group is not None and group.rank() != 0:
        return {}
    to_cpu = form.offload_to_cpu
    result: dict[str, dict[str, Any]] = {
        member.name: {
            name: leaving[member, name].value()
            if isinstance(value, StateInfo)
            else without_elements(value, to_cpu=to_cpu)
            for name, value in states.items()
        }
        for holder, states in agreed.items()
        for member in holder.members
    }
    for param, name in params.others.items():
        if param in state_of:
            result[name] = {key: _own(value, form) for key, value in state_of[param].items()}
    names = (name for param in params.in_order for name in params.names(param))  # in one order on all ranks
    state: dict[Any, Any] = {name: result[name] for name in names if name in result}
    state.update(copy.deepcopy(others))
    full: dict[str, Any] = {"state": state}
    if "param_groups" in raw:
        full["param_groups"] = copy.deepcopy(raw["param_groups"])
        for group_ in full["param_groups"]:
            group_["params"] = [name for key in group_["params"] for name in params.names(by_key[key])]
        if quantized:
            full["param_groups"] = marked(full["param_groups"])
    return full


def _own(value: Any, form: Form) -> Any:
    """Return the value of a state that this rank has whole."""
    if form.stays and not form.offload_to_cpu and isinstance(value, torch.Tensor):
        return dequantized(value).detach()
    return without_elements(value, to_cpu=form.offload_to_cpu)


def _check_known(params: ModelParams, optimized: Iterable[nn.Parameter], others: Iterable[Any]) -> None:
    """Raise KeyError if a parameter is not in the model, or an entry of no parameter has a parameter's name."""
    for key in others:
        if key in params.by_name or key in params.others.values():
            raise KeyError(f"the state's entry {key!r} belongs to no parameter, and has the name of one: rename it")
    for param in optimized:
        params.names(param)


def _send(
    unit: Unit,
    states: Mapping[Holder, States],
    state_of: Mapping[nn.Parameter, Mapping[str, Any]],
    form: Form,
    group: Any,
    channel: Channel,
    label: str,
) -> dict[tuple[Member, str], Export]:
    elementwise = [
        (name, holder, info)
        for holder, of_holder in states.items()
        for name, info in of_holder.items()
        if isinstance(info, StateInfo)
    ]
    keys: list[tuple[Member, str]] = []
    tensors: list[Held] = []
    for name, holder, info in sorted(elementwise, key=lambda one: state_order(one[0])):  # few states in a batch
        mine = holder.rank in holder.owners  # else this rank may have no state
        tensor = dequantized(state_of[holder.param][name]) if mine else holder.empty(info)
        keys += [(member, name) for member in holder.members]
        tensors += [holder.held(member, tensor, info) for member in holder.members]
    groups = unit.groups
    # torch's FSDP1 also cuts flat states of units that are not sharded, over the ranks of their group
    over_group = (groups.shard or groups.replica) is not None and (groups.mesh is None or groups.mesh.ndim == 1)
    cut = groups.has_parts or (next(iter(states)).is_flat and over_group)
    form = form.within(unit, cut=cut)
    first = _first(group_ranks(group)[0], unit, channel) if form.rank0_only else 0
    leaving = export(tensors, form, channel, label, first)
    return dict(zip(keys, leaving))


def _first(saving: int, unit: Unit, channel: Channel) -> int:
    """Return the rank of ``channel`` that gets what rank ``saving`` gets alone: ``saving`` itself, or the counterpart
    of it on the ranks of tensor parallelism. -1 is no rank."""
    if channel.group is None:
        return 0
    if unit.groups.tp is None:
        ranks = group_ranks(channel.group)
        return ranks.index(saving) if saving in ranks else -1
    place = torch.tensor([channel.rank if saving in group_ranks(unit.groups.tp) else -1], device="cpu")
    agree_on_largest(place, channel.group, channel.device, "find the rank that saves")
    return int(place)
