"""Saving optimizer state: from flat shards to tensors by parameter name.

First the ranks exchange a description of their states (names, dtypes, scalars) as objects. Then every rank can compute
every message, and the elements of a unit travel in one collective to the ranks that get them. Large units travel in
several batches; two batches are in memory beside the result, one in flight and one being unpacked.

:mod:`fsdp.checkpoint.optim_load` is the reverse.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from fsdp.checkpoint.forms import Form
from fsdp.checkpoint.optim_names import (
    STAMP,
    Group,
    Holder,
    Member,
    ModelParams,
    is_named,
    params_by_id,
    state_order,
)
from fsdp.checkpoint.sharded_tensors import dim_of, group_of, rows_on
from fsdp.checkpoint.transfers import Leaving, export, finish
from fsdp.comm.consensus import Failure, TrainingRanks, all_gather_object, joint_error
from fsdp.comm.groups import default_group, group_ranks
from fsdp.comm.versions import root_of
from fsdp.placement.redistribute import Channel, Channels
from fsdp.runtime.unit import Unit

_CPU = torch.device("cpu")


# -- description of states ---------------------------------------------------------------------------------------------


class Elementwise(NamedTuple):
    """A state with one element per element of the parameter."""

    dtype: torch.dtype


class Scalar(NamedTuple):
    """A tensor without dimensions, by its bits."""

    dtype: torch.dtype
    bits: bytes

    @staticmethod
    def of(tensor: torch.Tensor) -> Scalar:
        return Scalar(tensor.dtype, bytes(tensor.detach().cpu().reshape(1).view(torch.uint8).tolist()))

    def tensor(self) -> torch.Tensor:
        """Make a new tensor on CPU."""
        return torch.frombuffer(bytearray(self.bits), dtype=self.dtype).reshape(())


States = dict[str, Any]  # one parameter's states by name: Elementwise, Scalar, or any other value


def _described(holder: Holder, state: Mapping[str, Any], problems: list[str], known: dict[Any, States]) -> States:
    """Describe ``state``, this rank's state of ``holder``. Unsupported states are appended to ``problems``. Equal
    descriptions are one object, found in ``known``: most parameters have the same one, and pickle writes it once."""
    found: States = {}
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            found[name] = value
            if holder.sharded and any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value)):
                problems.append(f"state {name!r} of {holder} is a {type(value).__name__} of tensors")
        elif tuple(value.shape) == holder.local_shape and (value.dim() > 0 or not holder.sharded):
            found[name] = Elementwise(value.dtype)
        elif value.dim() == 0:
            found[name] = Scalar.of(value)
        elif holder.is_whole:
            found[name] = value  # equal on every rank
        else:
            problems.append(
                f"state {name!r} of {holder} has shape {tuple(value.shape)}, and this rank's part of the parameter has "
                f"{holder.local_shape}"
            )
    try:
        return known.setdefault(tuple((name, type(value), value) for name, value in found.items()), found)
    except TypeError:  # a value that cannot be hashed
        return found


def _merged(
    holder: Holder, by_rank: Sequence[States | None], ranks: Sequence[int], missing: list[str], different: list[str]
) -> States | None:
    """Merge the descriptions of the ranks that own elements of ``holder``; None without state.

    Optimizers may also hold state on ranks without elements, but never step it.

    Args:
        by_rank: descriptions by rank of the shard group.
        ranks: global ranks of the shard group.
        missing, different: disagreements are appended to these lists.
    """
    owners = {rank: by_rank[rank] for rank in holder.owners}
    if all(states is None for states in owners.values()):
        return None
    merged: States = {}
    for states in owners.values():
        merged = (states or {}) | merged
    for rank, states in owners.items():
        if states is None:
            missing.append(f"rank {ranks[rank]} is missing all states of {holder}")
            continue
        for name, value in merged.items():
            if name not in states:
                missing.append(f"rank {ranks[rank]} is missing state {name!r} of {holder}")
            elif states[name] is not value and (type(states[name]) is not type(value) or states[name] != value):
                here, there = (repr(_plain(one, to_cpu=True)) for one in (states[name], value))
                different.append(f"state {name!r} of {holder} is {here} on rank {ranks[rank]} and {there} on others")
    return merged


def _agree(
    params: ModelParams, state_of: Mapping[nn.Parameter, Mapping[str, Any]], unknown: str | None
) -> dict[Holder, States]:
    """Return the states of every parameter that has any, equal on all ranks: one exchange of objects per shard group.

    With several groups, the ranks then exchange failures, since some ranks may be in one group only, and compare the
    descriptions of replicas.

    Args:
        unknown: an error about the parameters that this rank's optimizer holds, if any.

    Raises, on every rank:
        KeyError: ``unknown``.
        NotImplementedError: a state is neither a scalar nor element-wise, or cannot be sent to other ranks.
        RuntimeError: some ranks lack states.
        AssertionError: states differ between ranks.
    """
    label, device, me = "agree on the optimizer's states", params.device, dist.get_rank()
    problems, known = list[str](), dict[Any, States]()
    local = {
        holder: _described(holder, state_of[param], problems, known) if param in state_of else None
        for param, holder in params.holders.items()
    }
    failures = {me: failure} if (failure := _failure(unknown, problems)) is not None else {}

    def exchanged(
        of: Mapping[Holder, States | None], holders: list[Holder], group: Any
    ) -> dict[int, list[States | None]]:
        """Return the descriptions of ``holders`` by rank of ``group``; empty if a rank has failed."""
        own = [of.get(holder) for holder in holders]
        everyone = {me: (own, failures)}
        if group is not None:
            try:
                packed = pickle.dumps((own, failures))
            except Exception as error:  # a value's own __reduce__ may raise any exception
                failure = _failure(unknown, [*problems, f"a state cannot be pickled: {error}"])
                packed = pickle.dumps(([], {me: failure}))
            packed_by_rank = all_gather_object(packed, group, label, device)
            everyone = dict(zip(group_ranks(group), map(pickle.loads, packed_by_rank)))
        for _, failures_there in everyone.values():
            failures.update(failures_there)
        return {} if failures else {rank: states for rank, (states, _) in everyone.items()}

    by_shards, by_tp = defaultdict[Any, list[Holder]](list), defaultdict[Any, list[Holder]](list)
    for holder in local:
        by_shards[holder.unit.groups.shard if holder.handle.layout.world_size > 1 else None].append(holder)
        if holder.tp_owners:  # ranks without a part of the parameter have no state, and get the description
            by_tp[holder.unit.groups.tp].append(holder)
    agreed: dict[Holder, States | None] = {}
    missing, different = list[str](), list[str]()
    for group, holders in by_shards.items():
        if group is not None:
            holders[0].unit.announce()
        by_rank = exchanged(local, holders, group)
        for holder, *of_ranks in zip(holders, *by_rank.values()) if by_rank else ():
            agreed[holder] = _merged(holder, of_ranks, [*by_rank], missing, different)
    for group, holders in by_tp.items():
        by_rank = exchanged(agreed, holders, group)
        for holder, *of_ranks in zip(holders, *by_rank.values()) if by_rank else ():
            agreed[holder] = of_ranks[holder.tp_owners[0]]
    error: Exception | None = None
    if failures:
        error = joint_error(dict(sorted(failures.items())))
    elif missing:
        error = RuntimeError(
            "expected the optimizers of all ranks to hold the same parameters, so that each rank has the states of "
            "its part, but " + "; ".join(missing)
        )
    elif different:
        error = AssertionError("expected states without elements to agree, but " + "; ".join(different))
    of_units = [unit.groups for unit in params.units]
    several = [
        *dict.fromkeys(group for groups in of_units for group in (groups.shard, groups.replica, groups.tp) if group)
    ]

    def check() -> dict[Any, list[str]]:
        if error is not None:
            raise error
        return {group: list(_words(local, agreed, group)) for group in several}

    if len(several) > 1:
        TrainingRanks(several, device).together(label, check, lambda texts: texts)
    else:
        check()
    return {holder: states for holder in local if (states := agreed[holder]) is not None}


def _words(holders: Iterable[Holder], agreed: Mapping[Holder, States | None], group: Any) -> Iterator[str]:
    """Describe the states that the ranks of ``group`` must have alike: replicas, and ranks of tensor parallelism."""
    for holder in holders:
        alike = group in (holder.unit.groups.replica, holder.unit.groups.tp)
        for name, value in (agreed.get(holder) or {}).items() if alike else ():
            described = value if isinstance(value, (Elementwise, Scalar)) else type(value).__name__
            yield f"state {name!r} of {holder}: {described}"


def _failure(unknown: str | None, problems: list[str]) -> Failure | None:
    if unknown is not None:
        return Failure("KeyError", None, unknown)
    if not problems:
        return None
    expected = (
        "only states that are scalars, or that have one element per element of the parameter, can leave a sharded "
        "optimizer (factored and block-quantized ones cannot)"
    )
    return Failure("NotImplementedError", None, f"{expected}, but {'; '.join(problems)}")


# -- saving ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def optim_state_dict(
    model: nn.Module,
    groups: Sequence[Group] | None,
    raw: Mapping[str, Any],
    form: Form,
    *,
    group: Any = None,
) -> dict[str, Any]:
    """Implement ``FullyShardedDataParallel.optim_state_dict`` for ``raw``, the optimizer's own state dict on this rank.

    Tensors are copies, each in memory of its own; scalars are on CPU.

    Args:
        groups: groups of the optimizer; None for an optimizer built from ``model.parameters()``.
    """
    params = ModelParams(model)
    by_key = params.by_current_name() if is_named(raw) else params_by_id(model, groups)
    state_of = {by_key[key]: state for key, state in raw["state"].items() if key in by_key}
    group = group if group is not None else default_group()
    held = [by_key[key] for group_ in raw.get("param_groups", ()) for key in group_["params"] if key in by_key]
    others = {key: value for key, value in raw["state"].items() if key not in by_key}
    agreed = _agree(params, state_of, _unknown(params, [*state_of, *held], others))
    channels, leaving = Channels(), {}
    for unit, called in params.units.items():
        of_unit = {holder: states for holder, states in agreed.items() if holder.unit is unit}
        if of_unit:
            channel = channels.over(group_of(unit.groups), unit.device)
            leaving.update(_send(unit, of_unit, state_of, form, group, channel, f"optimizer state of {called}"))
    channels.flush()
    finished = finish(leaving.values(), channels, "optimizer state of tensor parallelism")
    leaving = dict(zip(leaving, finished))
    if form.rank0_only and group.rank() != 0:
        return {}
    to_cpu = form.offload_to_cpu
    result: dict[str, dict[str, Any]] = {
        member.name: {
            name: leaving[member, name].value() if isinstance(value, Elementwise) else _plain(value, to_cpu=to_cpu)
            for name, value in _ordered(holder, states)
        }
        for holder, states in agreed.items()
        for member in holder.members
    }
    for param, name in params.others.items():
        if param in state_of:
            result[name] = {key: _plain(value, to_cpu=to_cpu) for key, value in state_of[param].items()}
    state: dict[Any, Any] = {name: result[name] for name in _order(params, state_of) if name in result}
    for key, value in others.items():
        warnings.warn(
            f"the optimizer's state has an entry {key!r} that belongs to no parameter; it is copied as it is",
            stacklevel=3,
        )
        state[key] = copy.deepcopy(value)
    full: dict[str, Any] = {"state": state}
    if "param_groups" in raw:
        full["param_groups"] = [
            {
                key: params.names_of_group(by_key[one] for one in value) if key == "params" else copy.deepcopy(value)
                for key, value in group_.items()
                if key != STAMP
            }
            for group_ in raw["param_groups"]
        ]
    return full


def _unknown(params: ModelParams, state_of: Iterable[nn.Parameter], others: Iterable[Any]) -> str | None:
    """Return an error text if a parameter is not in the model, or an entry of no parameter has a parameter's name."""
    for key in others:
        if key in params.by_name or key in params.others.values():
            return f"the state's entry {key!r} belongs to no parameter, and has the name of one: rename it"
    try:
        for param in state_of:
            params.names(param)
    except KeyError as error:
        return str(error.args[0])
    return None


def _order(params: ModelParams, state_of: Iterable[nn.Parameter]) -> list[str]:
    """Return the names in an order that is equal on every rank, and that of torch's FSDP1 for an optimizer built from
    ``model.parameters()``.

    With flat parameters it is the model's order. Otherwise parameters without unit are first, and then those of each
    unit, sorted by name.
    """
    if not params.use_orig_params:
        return [name for param in params.in_order if param in state_of for name in params.names(param)]
    units: dict[Unit, list[str]] = {}
    for name, (holder, _) in sorted(params.by_name.items()):
        units.setdefault(holder.unit, []).append(name)
    return [*sorted(params.others.values()), *(name for names in units.values() for name in names)]


def _plain(value: Any, *, to_cpu: bool) -> Any:
    """Copy a value that has no elements to collect."""
    if isinstance(value, Scalar):
        return value.tensor()
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    return value.detach().to(_CPU, copy=True) if to_cpu else value.detach().clone()


def _send(
    unit: Unit,
    states: Mapping[Holder, States],
    state_of: Mapping[nn.Parameter, Mapping[str, Any]],
    form: Form,
    group: Any,
    channel: Channel,
    label: str,
) -> dict[tuple[Member, str], Leaving]:
    """Start to send the unit's states to the ranks that get them."""
    keys = [
        (holder, member, name)
        for holder, of_holder in states.items()
        for member in holder.members
        for name, value in of_holder.items()
        if isinstance(value, Elementwise)
    ]
    keys.sort(key=lambda key: state_order(key[2]))  # so that one batch contains few states
    tensors = []
    for holder, member, name in keys:
        owns = holder.rank in holder.owners  # otherwise this rank may have no state
        state = state_of[holder.param][name] if owns else holder.empty(states[holder][name].dtype)
        tensors.append(holder.held(member, state))
    groups = unit.groups
    # torch's FSDP1 also cuts flat states of units that are not sharded, over the ranks of their group
    over_group = (groups.shard or groups.replica) is not None and (unit.mesh is None or unit.mesh.ndim == 1)
    cut = groups.sharded or (next(iter(states)).is_flat and over_group)
    form = form.within(unit, cut=cut)
    leaving = export(tensors, form, channel, label, first=_first(group_ranks(group)[0], unit, channel))
    return {(member, name): one for (_, member, name), one in zip(keys, leaving)}


def _first(saving: int, unit: Unit, channel: Channel) -> int:
    """Return the rank of ``channel`` that gets what rank ``saving`` gets alone: ``saving`` itself, or its counterpart
    on the ranks of tensor parallelism. -1 is no rank."""
    ranks = group_ranks(channel.group)
    if unit.groups.tp is None or saving in ranks:
        return ranks.index(saving) if saving in ranks else -1
    of_tp = next(tp for handle in unit.handles for tp in handle.tp if tp is not None)
    # DTensor keeps one spec for equal meshes, so the mesh of the spec may be a slice of another mesh than the unit's.
    for mesh in (unit.mesh, of_tp.spec.mesh):
        whole = None if mesh is None else root_of(mesh)
        dim = None if whole is None else dim_of(whole, channel.group)
        if whole is not None and dim is not None and len(found := (whole.mesh == saving).nonzero()):
            return int(found[0, dim])
    rows_on(of_tp.spec.mesh, channel.group)  # which raises where there is no mesh of both
    return -1


def _ordered(holder: Holder, states: States) -> list[tuple[str, Any]]:
    """Return the states in the order of torch's FSDP1."""
    if not holder.sharded and not holder.is_flat:
        return list(states.items())
    kinds = [Elementwise, Scalar, None] if holder.is_flat else [None, Scalar, Elementwise]

    def place(item: tuple[Any, Any]) -> tuple[int, tuple[str, str]]:
        return kinds.index(type(item[1]) if type(item[1]) in kinds else None), state_order(item[0])

    return sorted(states.items(), key=place)
