"""Loading optimizer state: from tensors by parameter name to this rank's part of the optimizer's state.

Each rank takes the elements of its shard from a full dict, without communication of tensors. Values on rank 0 alone,
and chunks of rows on all ranks, are sent to their ranks: one collective per unit, in several batches for large units.
Every check precedes all communication of tensors. The ranks of a unit compare which states their dicts have, so that
all of them raise or none.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from fsdp.checkpoint.forms import Held, Source, is_part, read, scalar_of
from fsdp.checkpoint.load_state_dict import by_group, watched
from fsdp.checkpoint.optim_blocks import as_tensors
from fsdp.checkpoint.optim_dtypes import dequantized, keep_dtypes, with_values
from fsdp.checkpoint.optim_names import Group, Holder, Member, ModelParams, StateInfo, lay_out, same_value, state_order
from fsdp.checkpoint.sharded_tensors import is_sharded, kind_of
from fsdp.checkpoint.transfers import fill_each, fill_from_first
from fsdp.comm.collectives import broadcast
from fsdp.comm.consensus import ranks_of
from fsdp.comm.groups import default_group
from fsdp.flat.names import bare
from fsdp.flat.tensor_parallel import local_of
from fsdp.placement.boxes import memory_order
from fsdp.placement.redistribute import Channels
from fsdp.runtime.unit import Unit


@dataclass(frozen=True, kw_only=True)
class UnreadState(StateInfo):
    """A tensor that the caller reads after the plan, in a dict to load.

    Attributes:
        in_place: the memory of the optimizer's present state may receive it.
        place: called with the memory for this rank's part, and whether that is the optimizer's present state.
    """

    in_place: bool
    place: Callable[[torch.Tensor, bool], None] = field(compare=False)


@dataclass
class Description:
    """A description of a dict to load. Equal on all ranks.

    Attributes:
        states: by name of parameter and state; ``StateInfo`` for a tensor with dimensions, otherwise the value.
        others: entries of no parameter.
        groups: the parameter groups; None if the dict has none.
    """

    states: dict[str, dict[str, Any]]
    others: dict[str, Any]
    groups: list[dict[str, Any]] | None


def _describe(optim_state_dict: Mapping[str, Any] | None, params: ModelParams, *, full: bool) -> Description:
    if optim_state_dict is None or "state" not in optim_state_dict:
        raise ValueError('expected an optimizer state dict with the key "state", but it has none')
    known = dict.fromkeys([*params.by_name, *params.others.values()])
    bare_names = {bare(name): name for name in known}
    given: Mapping[Any, Any] = optim_state_dict["state"]
    if numbers := [name for name in given if not isinstance(name, str)]:
        raise ValueError(
            f"expected names of parameters as keys of the state, but got {numbers[0]!r}: this looks like the state of "
            "a plain optimizer; turn it into names first, with rekey_optim_state_dict(..., "
            "OptimStateKeyType.PARAM_NAME, plain_model, optim=plain_optimizer)"
        )
    states = {name: {k: _described_value(v) for k, v in given[name].items()} for name in given if name in known}
    others = {name: state for name, state in given.items() if name not in known}
    renamed = {name: bare_names[bare(name)] for name in others if bare(name) in bare_names}
    sharded = ", ".join(sorted(name for name in states if full and any(map(is_part, given[name].values()))))
    if renamed:
        listed = ", ".join(f"{name!r} (is it {candidate!r}?)" for name, candidate in renamed.items())
        raise ValueError(f"expected the names of this model's parameters, but got {listed}")
    if sharded:
        raise ValueError(f"expected a full optimizer state dict, but the states of {sharded} are sharded")
    return Description(states, others, copy.deepcopy(optim_state_dict.get("param_groups")))


def _described_value(value: Any) -> Any:
    """Return ``StateInfo`` for a tensor with dimensions, the local element of a ragged scalar, and any other value
    itself."""
    if not isinstance(value, torch.Tensor):
        return value
    dtype, shape = kind_of(value)
    return StateInfo(dtype, shape, value=value) if shape else scalar_of(value)


# -- the plan ------------------------------------------------------------------------------------------


class _Plan:
    """The state of each parameter on this rank after the load, with memory for it, and the transfers into that
    memory.

    Attributes:
        arrivals: the tensors of each unit, and where this rank finds the values. Of values on rank 0 alone: the value
            there, and None on the other ranks.
        compared: descriptions of the states in the dict, and of the values that need communication, which have to be
            equal on all ranks of the unit.
    """

    def __init__(
        self,
        params: ModelParams,
        contents: Description,
        present: Mapping[Any, Mapping[Any, Any]],
        *,
        from_rank0: bool,
        strict: bool,
    ) -> None:
        """Plan the load of ``contents``.

        Args:
            present: the optimizer's state.
            strict: parameters that are not in the dict do not keep it.

        Raises:
            ValueError: the states do not fit the model.
            AssertionError: as :meth:`fsdp.checkpoint.forms.Form.read`.
        """
        self.local: dict[nn.Parameter, dict[str, Any]] = {}
        self.arrivals: dict[Unit, list[tuple[Held, Any]]] = {}
        self.compared: dict[Unit, list[str]] = {}
        self.as_they_are: list[tuple[nn.Parameter, str, StateInfo]] = []  # (parameter, name of the state, value)
        self._problems: list[str] = []
        self._from_rank0 = from_rank0
        self._present, self._kept, self.contents = present, {} if strict else present, contents
        # the parameters in the dict, with state or without
        self._known = {*contents.states, *(name for group in contents.groups or () for name in group["params"])}
        # addresses that no state may have
        self._taken = {None, *(_address(key) for key in present if isinstance(key, torch.Tensor))} - {0}
        # states without dimensions of parameters that have dimensions
        self._scalars = {"step"} | {
            key
            for name, states in contents.states.items()
            for key, value in states.items()
            if name in params.by_name and params.by_name[name][1].shape and not isinstance(value, StateInfo)
        }
        for holder in params.holders.values():
            self._plan(holder)
        for param, name in params.others.items():
            if states := contents.states.get(name):
                self.local[param] = dict(states)
                for state, value in states.items():
                    if isinstance(value, StateInfo):
                        self.as_they_are.append((param, state, value))
        if self._problems:
            raise ValueError(f"this optimizer state does not fit the model: {'; '.join(self._problems)}")
        for param in params.in_order:
            if param not in self.local and param in self._kept and not self._known.issuperset(params.names(param)):
                self.local[param] = dict(self._kept[param])

    def _plan(self, holder: Holder) -> None:
        present = [member for member in holder.members if self.contents.states.get(member.name)]
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
        compared = self.compared.setdefault(holder.unit, [])
        compared += (f"the state of {member.name!r} ({', '.join(sorted(map(repr, names)))})" for member in present)
        for state in sorted(names, key=state_order):  # the same order on all ranks
            values = [states[member][state] for member in present]
            if not all(isinstance(value, StateInfo) for value in values):
                local[state] = self._common(holder, present, state, values)
            elif holder.is_whole and (values[0].order is not None or _is_whole_by_nature(values[0], present[0])):
                local[state] = values[0]
                self.as_they_are.append((holder.param, state, values[0]))
            else:
                local[state] = self._memory(holder, present, state, values)
        if holder.rank in holder.owners:
            self.local[holder.param] = {state: local[state] for state in names}

    def _described(self, holder: Holder, member: Member) -> dict[str, Any]:
        """Return the states of ``member``; element-wise ones of a parameter without dimensions as ``StateInfo``."""
        states = dict(self.contents.states[member.name])
        if member.shape == () and (holder.sharded or holder.is_flat):
            for state, value in states.items():
                if isinstance(value, torch.Tensor) and state not in self._scalars:
                    states[state] = StateInfo(value.dtype, (), value=value)
        return states

    def _memory(self, holder: Holder, present: list[Member], state: str, values: list[StateInfo]) -> torch.Tensor:
        """Allocate this rank's part of an element-wise state, fill in the parts that are not loaded, and note the
        transfers of the rest."""
        unit, dtypes = holder.unit, {value.dtype for value in values}
        if len(dtypes) > 1:
            self._problems.append(f"state {state!r} of {holder} needs one dtype, but has {sorted(map(str, dtypes))}")
        new = holder.empty(values[0])
        in_place = all(isinstance(value, UnreadState) and value.in_place for value in values)
        has_all = len(present) == len(holder.members)
        memory = self.present_or(new, holder.param, state) if in_place and has_all else new
        for member in holder.members:
            if member not in present:
                part = holder.part(member, memory)
                part.zero_() if (kept := self._kept_of(holder, member, state)) is None else part.copy_(kept)
        for member, value in zip(present, values):
            called = f"state {state!r} of {member.name!r}"
            if value.shape != member.shape and not holder.any_shape:
                self._problems.append(f"{called} has shape {value.shape}, and the parameter has {member.shape}")
                continue
            held = holder.held(member, memory, value)
            if isinstance(value, UnreadState):
                value.place(held.part, memory is not new)
                continue
            found = value.value if self._from_rank0 else self._source(called, value, held, unit)
            self.arrivals.setdefault(unit, []).append((held, found))
        return memory

    def _source(self, called: str, whole: StateInfo, held: Held, unit: Unit) -> Source:
        """Return where this rank finds its part of a value."""
        assert whole.value is not None
        try:
            source = read(whole.value, held, unit.groups)
        except (AssertionError, ValueError) as error:
            raise type(error)(f"{called}: {error}") from error
        if source.placement is not None:
            self.compared[unit].append(f"{called} ({whole.dtype}, {source.placement})")
        return source

    def present_or(self, new: torch.Tensor, param: nn.Parameter, state: Any) -> torch.Tensor:
        """Return the optimizer's present state if it is like ``new``, and no alias of a parameter or of another state;
        else ``new``."""
        present = self._present.get(param, {}).get(state)
        if type(present) is not type(new) or kind_of(present) != kind_of(new):
            return new
        here, there = ((one.stride(), one.device, getattr(one, "_spec", None)) for one in (present, new))
        place = _address(present)
        if here != there or place in self._taken:
            return new
        if place != 0:
            self._taken.add(place)
        return present

    def _kept_of(self, holder: Holder, member: Member, state: Any) -> Any:
        """Return the optimizer's present state of a member of a flat parameter if it is kept; otherwise None."""
        kept = {} if member.name in self._known else self._kept.get(holder.param, {})
        value = dequantized(as_tensors(kept).get(state))
        return holder.part(member, value) if isinstance(value, torch.Tensor) and value.dim() > 0 else value

    def _common(self, holder: Holder, present: list[Member], state: str, values: list[Any]) -> Any:
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


def _is_whole_by_nature(value: StateInfo, member: Member) -> bool:
    """Return True if a state may have another meaning than one element per element, as factored rows and columns
    have."""
    shape, of_param = value.shape, member.shape
    if shape == of_param:
        return False
    return len(shape) != len(of_param) or all(a in (1, b) for a, b in zip(shape, of_param))


# -- transfers ---------------------------------------------------------------------------------------------------------


def _of_first(whole: StateInfo, group: Any, device: torch.device) -> torch.Tensor:
    """Broadcast the value from rank 0 of ``group``; ``device`` is one on which the group communicates."""
    tensor = torch.empty(whole.shape, dtype=whole.dtype, device=device)
    if whole.value is not None:
        tensor.copy_(whole.value)
    broadcast([tensor], group)
    return tensor


def _address(tensor: torch.Tensor) -> int | None:
    """Return the address of this rank's elements, 0 without elements; None for a class that may have no address."""
    local = local_of(tensor.detach())
    return local.data_ptr() if type(local) is torch.Tensor else None


def _target(param: nn.Parameter, whole: StateInfo) -> torch.Tensor:
    """Make memory for a state of a parameter that no unit shards: as ``DTensor`` if the parameter is one, which a step
    needs at one rank as well."""
    alike = tuple(param.shape) == whole.shape
    like = param.detach() if alike else torch.empty(whole.shape, device="meta")
    order = memory_order(like.shape, like.stride()) if whole.order is None else whole.order
    like, packed = like.permute(order), torch.contiguous_format
    new = torch.empty_like(like, dtype=whole.dtype, device=param.device, memory_format=packed)
    return new.permute([order.index(dim) for dim in range(len(order))])


# -- the load ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def optim_state_dict_to_load(
    model: nn.Module,
    given: Callable[[], Mapping[str, Any] | None],
    own: Sequence[Group] | None,
    *,
    optim: Optimizer | None = None,
    is_named: bool = False,
    from_rank0: bool = False,
    group: Any = None,
    strict: bool = True,
    together: bool = True,
) -> dict[str, Any]:
    """Implement ``FullyShardedDataParallel.optim_state_dict_to_load`` for the result of ``given``, which is not
    modified.

    The result has this rank's parts, in new memory on the parameters' devices, under the optimizer's keys. Parameters
    that are not in the dict get no entry, nor do those that the optimizer does not hold. Entries of no parameter are
    copied. States of a quantized class are values: ``optim_dtypes.with_classes`` quantizes them.

    Args:
        own: groups of the optimizer; None for one built from ``model.parameters()``.
        is_named: torch's ``_NamedOptimizer`` also needs state for parameters of which this rank holds no elements; such
            state is kept.
        from_rank0: ``given`` is called only on rank 0 of ``group``; errors are raised on all ranks.
        strict: leave out parameters that no group of the dict contains. Without it they stay as ``optim`` has them.
        together: all ranks that share a unit call, and compare which states they have. False: without communication;
            then the caller has to agree with the other ranks, and the dict must be full.

    Raises, on every rank: the same errors, and RuntimeError if another rank cannot load, or has different states.
    """
    params = ModelParams(model, own)
    if from_rank0:
        group = watched(group if group is not None else default_group(), params.units)
    present = getattr(optim, "state", {})  # no optimizer, or a wrapper without states, has none

    def describe() -> Description:
        return _describe(with_values(given()), params, full=from_rank0 or not together)

    def make_plan() -> tuple[_Plan, list[dict[str, Any]] | None]:
        first = ranks_of(params.units, [group])
        contents = first.first("describe rank 0's optimizer state", describe) if from_rank0 else describe()
        groups = contents.groups
        if groups is not None:
            groups = lay_out(own, groups, params, keys, strict=strict)
        return _Plan(params, contents, present, from_rank0=from_rank0, strict=strict), groups

    keys = {param: params.key_of_named(param) if is_named else key for key, param in params.by_id.items()}
    ranks = ranks_of(params.units if together and not from_rank0 else ())
    plan, groups = ranks.together("load optimizer state", make_plan, lambda made: by_group(made[0].compared))
    channels = Channels()
    for unit, arriving in plan.arrivals.items():
        label = f"optimizer state of {params.units[unit]}"
        if from_rank0:
            fill_from_first(arriving, unit, channels, label, group=group)
        else:
            fill_each(arriving, unit, channels, label)
    channels.flush()
    for param, name, whole in plan.as_they_are:
        if from_rank0:
            value = _of_first(whole, group, params.device)
        elif isinstance(whole, UnreadState):
            new = _target(param, whole)
            value = plan.present_or(new, param, name) if whole.in_place else new
            whole.place(value, value is not new)
        else:
            assert whole.value is not None
            value = whole.value if is_sharded(whole.value) else whole.value.detach().clone()
        plan.local[param][name] = value if is_sharded(value) else value.to(param.device)
    if is_named:
        for param, holder in params.holders.items():
            if param not in plan.local and holder.rank not in holder.owners and param in present:
                plan.local[param] = copy.deepcopy(present[param])
    loaded = (param for param in params.in_order if param in plan.local and param in keys)
    state: dict[Any, Any] = {keys[param]: plan.local[param] for param in loaded}
    if not strict:
        state.update((key, value) for key, value in present.items() if not isinstance(key, torch.Tensor))
    state.update(copy.deepcopy(plan.contents.others))
    keep_dtypes(optim)
    return {"state": state} if groups is None else {"state": state, "param_groups": groups}
