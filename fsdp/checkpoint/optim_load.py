"""Optimizer state on its way in: from parameter names to what this rank's optimizer holds.

A full dict gives each rank the elements that its shard holds, without communication. What rank 0 alone has, or what
lies in chunks of rows on all ranks, is sent to whom it belongs: one collective per unit, large units in several parts
as on the way out. Everything is checked before anything moves, on every rank by the same description of the dict, so
that all of them raise or none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp.checkpoint.forms import Held, Source, fill_each, fill_from_first, read
from fsdp.checkpoint.load_state_dict import alike_on_all_ranks, on_first, watched
from fsdp.checkpoint.optim_dtypes import keep_dtypes
from fsdp.checkpoint.optim_names import (
    Holder,
    Member,
    ModelParams,
    OptimInput,
    groups_of,
    lay_out,
    params_by_id,
    same_value,
    state_order,
)
from fsdp.checkpoint.ragged import RaggedTensor
from fsdp.checkpoint.sharded_tensors import is_sharded, kind_of
from fsdp.comm.collectives import broadcast
from fsdp.comm.groups import default_group
from fsdp.flat.names import bare
from fsdp.placement.redistribute import Channels
from fsdp.runtime.unit import Unit


class Whole(NamedTuple):
    """A tensor with dimensions, whoever has its elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass
class Contents:
    """What a dict to load holds. Equal on all ranks.

    Attributes:
        states: by name of parameter and state; ``Whole`` for tensors with dimensions, other values as they are.
        others: what belongs to no parameter, as it is.
        groups: the parameter groups; None if the dict has none.
    """

    states: dict[str, dict[str, Any]]
    others: dict[str, Any]
    groups: list[dict[str, Any]] | None

    @cached_property
    def known(self) -> set[str]:
        """The parameters that the dict has, with state or without."""
        return {*self.states, *(name for group in self.groups or () for name in group["params"])}


def _contents_of(optim_state_dict: Mapping[str, Any] | None, params: ModelParams, *, full: bool) -> Contents:
    """
    Raises:
        ValueError: there is no "state", or its keys are no names of this model's parameters but look like some; or it
            has to be ``full``, and states are sharded.
    """
    if optim_state_dict is None or "state" not in optim_state_dict:
        raise ValueError('expected an optimizer state dict with the key "state", but it has none')
    known = dict.fromkeys([*params.by_name, *params.others.values()])
    bare_names = {bare(name): name for name in known}
    contents = Contents({}, {}, copy.deepcopy(optim_state_dict.get("param_groups")))
    renamed = {}
    sharded = []
    for name, state in optim_state_dict["state"].items():
        if not isinstance(name, str):
            raise ValueError(
                f"expected names of parameters as keys of the state, but got {name!r}: this looks like the state of a "
                "plain optimizer; turn it into names first, with rekey_optim_state_dict(..., "
                "OptimStateKeyType.PARAM_NAME, plain_model, optim=plain_optimizer)"
            )
        if name in known:
            contents.states[name] = {key: _described_value(value) for key, value in state.items()}
            if full and any(is_sharded(value) or isinstance(value, RaggedTensor) for value in state.values()):
                sharded.append(name)
            continue
        contents.others[name] = state
        if bare(name) in bare_names:
            renamed[name] = bare_names[bare(name)]
    if renamed:
        listed = ", ".join(f"{name!r} (is it {candidate!r}?)" for name, candidate in renamed.items())
        raise ValueError(f"expected the names of this model's parameters, but got {listed}")
    if sharded:
        listed = ", ".join(sorted(sharded))
        raise ValueError(f"expected a full optimizer state dict on rank 0, but the states of {listed} are sharded")
    return contents


def _described_value(value: Any) -> Any:
    """A tensor with dimensions as ``Whole``; any other value as it is, and of a ragged one the element that is here."""
    if not isinstance(value, torch.Tensor):
        return value
    dtype, shape = kind_of(value)
    if shape:
        return Whole(dtype, shape)
    return value.local.view(()) if isinstance(value, RaggedTensor) and value.local.numel() == 1 else value


# -- what this rank will hold ------------------------------------------------------------------------------------------


class _Arrival(NamedTuple):
    """One state of one original parameter, and where the ranks hold it, with this rank's memory for its part."""

    name: str
    state: str
    what: Whole
    held: Held


class _Plan:
    """What each parameter's state will be on this rank, with memory for it, and what has to arrive there."""

    def __init__(self, params: ModelParams, contents: Contents, kept: Mapping[Any, Mapping[Any, Any]]) -> None:
        """
        Args:
            kept: the optimizer's present state, where parameters that the dict does not know are to keep it.

        Raises:
            ValueError: a state does not fit the parameter, or, for a flat one, the states of its members differ.
        """
        self.local: dict[nn.Parameter, dict[str, Any]] = {}
        self.arrivals: dict[Unit, list[_Arrival]] = {}
        self.as_they_are: list[tuple[nn.Parameter, str, str, Whole]] = []  # (parameter, its name, state)
        self._problems: list[str] = []
        self._kept, self._contents = kept, contents
        # states that have no dimensions although their parameter has
        self._scalars = {"step"} | {
            key
            for name, states in contents.states.items()
            for key, value in states.items()
            if name in params.by_name and params.by_name[name][1].shape and not isinstance(value, Whole)
        }
        for holder in params.holders.values():
            self._plan(holder)
        for param, name in params.others.items():
            if states := contents.states.get(name):
                self.local[param] = dict(states)
                for state, value in states.items():
                    if isinstance(value, Whole):
                        self.as_they_are.append((param, name, state, value))
        if self._problems:
            raise ValueError(f"this optimizer state does not fit the model: {'; '.join(self._problems)}")
        for param in params.in_order:
            if param not in self.local and param in kept and not contents.known.issuperset(params.names(param)):
                self.local[param] = dict(kept[param])

    def _plan(self, holder: Holder) -> None:
        present = [member for member in holder.members if self._contents.states.get(member.name)]
        if not present:
            return
        states = {member: self._described(holder, member) for member in present}
        names = list(states[present[0]])
        different = [member.name for member in present if set(states[member]) != set(names)]
        if different:
            self._problems.append(
                f"the parameters of a flat parameter need the same states, but {present[0].name!r} has "
                f"{sorted(names, key=state_order)}, and {', '.join(different)} others"
            )
            return
        local: dict[str, Any] = {}
        for state in sorted(names, key=state_order):  # the same order on all ranks, whatever that of their dicts is
            values = [states[member][state] for member in present]
            if not all(isinstance(value, Whole) for value in values):
                local[state] = self._common(holder, present, state, values)
            elif holder.is_whole and _is_whole_by_nature(values[0], present[0]):
                local[state] = values[0]
                self.as_they_are.append((holder.param, present[0].name, state, values[0]))
            else:
                local[state] = self._memory(holder, present, state, values)
        if holder.rank in holder.owners:
            self.local[holder.param] = {state: local[state] for state in names}

    def _described(self, holder: Holder, member: Member) -> dict[str, Any]:
        """Its states; as ``Whole`` also what is an element-wise state of a parameter without dimensions."""
        states = dict(self._contents.states[member.name])
        if member.shape == () and (holder.sharded or holder.is_flat):
            for state, value in states.items():
                if isinstance(value, torch.Tensor) and state not in self._scalars:
                    states[state] = Whole(value.dtype, ())
        return states

    def _memory(self, holder: Holder, present: list[Member], state: str, values: list[Whole]) -> torch.Tensor:
        """For this rank's part of an element-wise state, with what does not have to arrive."""
        dtypes = {value.dtype for value in values}
        if len(dtypes) > 1:
            self._problems.append(f"state {state!r} of {holder} needs one dtype, but has {sorted(map(str, dtypes))}")
        memory = holder.empty(values[0].dtype)
        for member in holder.members:
            if member not in present:
                part = holder.part(member, memory)
                part.zero_() if (kept := self._kept_of(holder, member, state)) is None else part.copy_(kept)
        for member, value in zip(present, values):
            if value.shape != member.shape:
                self._problems.append(
                    f"state {state!r} of {member.name!r} has shape {value.shape}, and the parameter has {member.shape}"
                )
            arrival = _Arrival(member.name, state, value, holder.held(member, memory))
            self.arrivals.setdefault(holder.unit, []).append(arrival)
        return memory

    def _kept_of(self, holder: Holder, member: Member, state: Any) -> Any:
        """What the optimizer has now, and keeps, of a member of a flat parameter; None for nothing."""
        value = None if member.name in self._contents.known else self._kept.get(holder.param, {}).get(state)
        return holder.part(member, value) if isinstance(value, torch.Tensor) and value.dim() > 0 else value

    def _common(self, holder: Holder, present: list[Member], state: str, values: list[Any]) -> Any:
        """The value that all members share."""
        lacking = [
            member.name
            for member in holder.members
            if member not in present and not same_value(self._kept_of(holder, member, state), values[0])
        ]
        if lacking and any(value is not None for value in values):
            self._problems.append(
                f"the parameters of a flat parameter share {state!r}, which {', '.join(lacking)} lack: no value would "
                "be right for them"
            )
        if not all(same_value(value, values[0]) for value in values[1:]):
            shown = {member.name: value for member, value in zip(present, values)}
            self._problems.append(f"the parameters of a flat parameter share {state!r}, but it is {shown}")
        return copy.deepcopy(values[0])


def _is_whole_by_nature(value: Whole, member: Member) -> bool:
    """Whether a state may be another thing than one element per element, as rows and columns are."""
    shape, of_param = value.shape, member.shape
    if shape == of_param:
        return False
    return len(shape) != len(of_param) or all(a in (1, b) for a, b in zip(shape, of_param))


# -- moving ------------------------------------------------------------------------------------------------------------


def _source(arrival: _Arrival, states: Mapping[str, Mapping[str, Any]], unit: Unit) -> Source:
    """What this rank has of it.

    Raises:
        AssertionError: a sharded value is not cut into chunks of rows, over ranks that share the unit.
        ValueError: it has no values, or not those that this rank needs.
    """
    try:
        return read(states[arrival.name][arrival.state], arrival.held, unit.groups)
    except (AssertionError, ValueError) as error:
        raise type(error)(f"state {arrival.state!r} of {arrival.name!r}: {error}") from error


def _of_first(value: torch.Tensor | None, what: Whole, group: Any, device: torch.device) -> torch.Tensor:
    """``value``, which rank 0 of ``group`` has; ``device`` is where that can communicate."""
    tensor = torch.empty(what.shape, dtype=what.dtype, device=device)
    if value is not None:
        tensor.copy_(value)
    broadcast([tensor], group)
    return tensor


# -- the whole of it ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def optim_state_dict_to_load(
    model: nn.Module,
    given: Callable[[], Mapping[str, Any] | None],
    *,
    optim: Optimizer | None = None,
    optim_input: OptimInput | None = None,
    is_named: bool = False,
    from_rank0: bool = False,
    group: Any = None,
    strict: bool = True,
) -> dict[str, Any]:
    """``FullyShardedDataParallel.optim_state_dict_to_load`` of what ``given`` returns, which stays as it is.

    The result has this rank's parts, in memory of their own on the parameters' devices, under the optimizer's keys.
    Parameters that are not in the dict get no entry, nor do those that the optimizer does not hold. What belongs to no
    parameter is copied under its name.

    Args:
        is_named: torch's ``_NamedOptimizer`` wants state for parameters, too, of which this rank holds nothing, and
            gets what it has.
        from_rank0: only on rank 0 of ``group`` ``given`` is called; what it raises is raised on all ranks.
        strict: leave out parameters that no group of the dict has. Without it they stay as ``optim`` has them.

    Raises, on every rank: as that, and RuntimeError if another rank cannot load sharded values, or has others.
    """
    own = groups_of(optim, optim_input)
    params = ModelParams(model)
    if from_rank0:
        group = watched(group if group is not None else default_group(), params.units)
    saved = None if from_rank0 else given()
    of_params = [state for state in (saved or {}).get("state", {}).values() if isinstance(state, Mapping)]
    chunked = any(is_sharded(value) for state in of_params for value in state.values())
    with alike_on_all_ranks(params.units if chunked else ()) as (chunks, _):  # else nothing is exchanged

        def look() -> Contents:
            nonlocal saved
            saved = given() if from_rank0 else saved
            return _contents_of(saved, params, full=from_rank0)

        label = "tell what optimizer state rank 0 has"
        contents = on_first(look, [group], list(params.units), label) if from_rank0 else look()
        keys = {param: key for key, param in params_by_id(model, own).items()}
        if is_named:
            keys = {param: params.key_of_named(param) for param in keys}
        groups = contents.groups
        if groups is not None:
            groups = lay_out(own, groups, params, keys, strict=strict)
        kept = {} if strict or optim is None else optim.state
        plan = _Plan(params, contents, kept)
        states: Mapping[str, Any] = {} if saved is None else saved["state"]
        sources: dict[Unit, list[Source]] = {}
        for unit, arrivals in plan.arrivals.items() if not from_rank0 else ():
            sources[unit] = [_source(arrival, states, unit) for arrival in arrivals]
            chunks[unit] = [
                f"state {its.state!r} of {its.name!r} ({its.what.dtype}, {source.placement})"
                for its, source in zip(arrivals, sources[unit])
                if source.placement is not None  # it has to be exchanged
            ]
    channels = Channels()
    for unit, arrivals in plan.arrivals.items():
        held, label = [arrival.held for arrival in arrivals], f"optimizer state of {params.units[unit]}"
        if from_rank0:
            values = [states[its.name][its.state].detach() if states else None for its in arrivals]
            fill_from_first(zip(held, values), unit, channels, label, group=group)
        else:
            fill_each(zip(held, sources[unit]), unit, channels, label)
    channels.flush()
    for param, name, state, whole in plan.as_they_are:
        value: Any = states[name][state] if states else None
        if from_rank0:
            value = _of_first(value, whole, group, params.device)
        elif not is_sharded(value):
            value = value.detach().clone()
        plan.local[param][state] = value if is_sharded(value) else value.to(param.device)
    if is_named and optim is not None:
        for param, holder in params.holders.items():
            if param not in plan.local and holder.rank not in holder.owners and param in optim.state:
                plan.local[param] = copy.deepcopy(optim.state[param])
    loadable: dict[str, Any] = {
        "state": {keys[param]: plan.local[param] for param in params.in_order if param in plan.local and param in keys}
    }
    loadable["state"].update((key, value) for key, value in kept.items() if not isinstance(key, torch.Tensor))
    loadable["state"].update((name, copy.deepcopy(value)) for name, value in contents.others.items())
    if groups is not None:
        loadable["param_groups"] = groups
    if optim is not None:
        keep_dtypes(optim)
    return loadable
