"""Parameters of an optimizer, their keys in the state dict, their names in the plain model, and their groups.

An optimizer holds flat parameters, or original parameters cut to a rank's part, and numbers them. State dicts go by the
names of the parameters in the plain model. This file maps the former to the latter, and moves no tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from fsdp.api import OptimStateKeyType
from fsdp.checkpoint.forms import Held
from fsdp.checkpoint.state_dict import held_param
from fsdp.comm import host_memory
from fsdp.flat.flat_param import FlatParamHandle
from fsdp.flat.layout import ParamRecord
from fsdp.flat.names import clean, joined, path_of, unit_name, unit_of
from fsdp.flat.views import FlatViews
from fsdp.placement.boxes import elements_of, memory_order
from fsdp.runtime.unit import Unit

Key = int | str
Group = Mapping[str, Any]  # a parameter group
# Attribute of an optimizer's parameter that stands for one of the model's: the model's parameter, and a ``Holder``.
STANDS_FOR = "_fsdp_stands_for"


@dataclass(frozen=True)
class StateInfo:
    """A tensor state that the ranks hold by elements, as all ranks know it.

    Attributes:
        shape: of the whole state; () for one of a flat parameter.
        order: the dimensions, outermost in memory first; None for the parameter's order, or row-major for another
            shape.
        value: the whole tensor, in a dict to load that this rank has. It does not travel between ranks.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    value: torch.Tensor | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> Any:
        return StateInfo, (self.dtype, self.shape, self.order)


@dataclass(frozen=True, eq=False)
class Member:
    """An original parameter in a bucket.

    Attributes:
        names: all names in the model, the parameter's own first.
        index: position in the bucket's layout.
        record: entry of the layout; with tensor parallelism that of this rank's part.
        shape: shape of the whole parameter.
    """

    names: tuple[str, ...]
    index: int
    record: ParamRecord
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, eq=False)
class Holder:
    """A parameter that optimizers hold, with the original parameters that its state belongs to: one, or, for a flat
    parameter, all of its bucket.

    Attributes:
        is_flat: True for a flat parameter (``use_orig_params=False``).
    """

    param: nn.Parameter
    members: tuple[Member, ...]
    unit: Unit
    handle: FlatParamHandle
    is_flat: bool

    @property
    def sharded(self) -> bool:
        return self.unit.groups.sharded

    @property
    def is_cut(self) -> bool:
        """True if tensor parallelism has cut the parameter: then no shard group holds all of it."""
        return any(self.handle.is_cut(member.index) for member in self.members)

    @property
    def is_whole(self) -> bool:
        """True for one parameter of which every rank holds all elements."""
        return not (self.is_flat or self.sharded or self.is_cut)

    @property
    def rank(self) -> int:
        """This process's rank in the group over which the parameter is sharded."""
        return self.unit.groups.shard_rank

    any_shape: ClassVar[bool] = False  # whether tensor states may differ from the parameter in shape and memory order

    def held(self, member: Member, state: torch.Tensor, info: StateInfo | None = None) -> Held:
        """Describe how the ranks hold a tensor state of ``member``; ``state`` is (or contains) this rank's part.
        ``info`` describes the whole state; None: as the parameter."""
        return held_param(self.handle, member.index, self.part(member, state))

    def empty(self, info: StateInfo) -> torch.Tensor:
        """Allocate this rank's part of a tensor state. Padding is zero; other elements are uninitialized."""
        stride = (1,) if self.is_flat or self.sharded else self.members[0].record.stride
        memory = host_memory.empty_strided(self.local_shape, stride, dtype=info.dtype, device=self.param.device)
        for start, end in self.handle.layout.shard_gaps(self.rank) if self.is_flat else ():
            memory[start:end].zero_()
        return memory

    def order_of(self, state: torch.Tensor) -> tuple[int, ...] | None:
        """Return the memory order of a state that this rank has whole; None for the order that ``held`` assumes."""
        if not (self.is_whole or self.any_shape):
            return None
        shape, record = tuple(state.shape), self.members[0].record
        usual = record.stride if shape == record.shape else None
        order = memory_order(shape, state.stride())
        return None if order == memory_order(shape, usual) else tuple(order)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """The ranks whose optimizer has state for the parameter: those that hold elements of it. Empty where tensor
        parallelism has left the shard group no part."""
        ranks = tuple(range(self.handle.layout.world_size))
        if self.is_flat:
            return ranks
        owners = {rank for member in self.members for rank, _, _ in self.handle.layout.owners(member.index)}
        return tuple(sorted(owners)) or (() if self.is_cut else ranks)

    @property
    def is_short(self) -> bool:
        """True if tensor parallelism has cut the parameter into fewer parts than there are ranks: the last have none,
        and so no state."""
        tp = None if self.is_flat else self.handle.tp[self.members[0].index]
        return tp is not None and tp.numel > 0 and 0 in tp.local_shape(tp.group.size() - 1)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of an element-wise state on this rank, whether the unit is unsharded or not."""
        if not self.is_flat and not self.sharded:
            return self.members[0].record.shape
        record, layout = self.members[0], self.handle.layout
        return (layout.shard_numel if self.is_flat else layout.piece(record.index, self.rank).numel,)

    def part(self, member: Member, state: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of ``member`` in an element-wise state, 1-D and in memory order; a view if
        possible."""
        if not self.is_flat:
            return state if self.sharded else elements_of(state, member.record.stride)
        piece = self.handle.layout.piece(member.index, self.rank)
        return state[piece.shard_offset : piece.shard_offset + piece.numel] if piece.numel else state[:0]

    def __str__(self) -> str:
        return ", ".join(repr(member.name) for member in self.members)


def holders_of(unit: Unit, prefix: str = "") -> Iterator[Holder]:
    """Describe each parameter of ``unit`` that optimizers hold. ``prefix`` is the path of the unit in the model."""
    for handle, views in zip(unit.handles, unit.views):
        for one in views.visible:
            members = []
            for index in one.members[: len(handle.layout.params)]:  # the flat vector may follow
                record = handle.layout.params[index]
                names = tuple(clean(joined(prefix, name)) for name in (record.name, *record.aliases))
                members.append(Member(names, index, record, (handle.tp[index] or record).shape))
            yield Holder(one.param, tuple(members), unit, handle, isinstance(views, FlatViews))


class ModelParams:
    """The parameters of a model as optimizers see them.

    Attributes:
        units: all units, depth first, with names for messages.
        holders: parameters of units, in the order of units and layouts.
        others: names of the parameters that no unit owns.
        device: where the units compute.
        by_id: the parameters of the optimizer, by their numbers in its state dict.
    """

    def __init__(self, model: nn.Module, groups: Iterable[Group] | None = None) -> None:
        """Look up all parameters of ``model``, as the optimizer with these parameter groups holds them. None stands for
        an optimizer built from ``model.parameters()``."""
        self.units: dict[Unit, str] = {}
        self.holders: dict[nn.Parameter, Holder] = {}
        modes = set()
        stands_for: dict[nn.Parameter, nn.Parameter] = {}  # parameter of an unsharded unit -> flat parameter
        for path, module in model.named_modules():
            unit = unit_of(module)
            if unit is None or unit in self.units:
                continue
            name = unit_name(module, clean(path))
            self.units[unit] = f"unit {name!r}" if name else "the outermost unit"
            self.holders.update((holder.param, holder) for holder in holders_of(unit, path_of(unit, name)))
            for handle, views in zip(unit.handles, unit.views):
                modes.add(isinstance(views, FlatViews))
                whole = len(handle.layout.params)  # the index of the flat vector's own leaf
                stands_for.update({leaf: handle.flat_param for index, leaf in handle.all_leaves if index == whole})
        if len(modes) > 1:
            raise AssertionError("expected one use_orig_params for all FullyShardedDataParallel modules of the model")
        optimized = model.parameters() if groups is None else (param for group in groups for param in group["params"])
        self.by_id: dict[Key, nn.Parameter] = dict(enumerate(optimized))
        for param in self.by_id.values():
            if (stands := getattr(param, STANDS_FOR, None)) is not None:
                shards, self.holders[param] = stands
                self.holders.pop(shards, None)
        self.device = next((unit.device for unit in self.units), torch.device("cpu"))
        self._current_names: dict[nn.Parameter, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            self._current_names.setdefault(stands_for.get(param, param), []).append(name)
        # An unsharded unit has different parameters registered under the same names.
        self.others = {
            param: clean(names[0])
            for param, names in self._current_names.items()
            if param not in self.holders and clean(names[0]) not in self.by_name
        }

    @cached_property
    def by_name(self) -> dict[str, tuple[Holder, Member]]:
        return {member.name: (holder, member) for holder in self.holders.values() for member in holder.members}

    @property
    def in_order(self) -> list[nn.Parameter]:
        """All parameters, in the order of ``model.parameters()``; hidden ones last."""
        visible = (param for param in self._current_names if param in self.holders or param in self.others)
        return list(dict.fromkeys([*visible, *self.holders]))

    def names(self, param: nn.Parameter) -> list[str]:
        """Return the names in the plain model of the parameters behind ``param``.

        Raises:
            KeyError: ``param`` is not in the model.
        """
        if param in self.holders:
            return [member.name for member in self.holders[param].members]
        if param in self.others:
            return [self.others[param]]
        raise KeyError(
            f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not in the model; build the "
            "optimizer from the wrapped model's parameters()"
        )

    def key_of_named(self, param: nn.Parameter) -> str:
        """Return the key of ``param`` for an optimizer that goes by names: the present name, wrappers' parts
        included."""
        return self._current_names[param][0]

    def by_key(self, optim_state_dict: Mapping[str, Any]) -> dict[Key, nn.Parameter]:
        """Map the keys of parameters in a state dict of the optimizer to the parameters. Entries of no parameter may
        have keys of any kind.

        In torch's ``_NamedOptimizer`` the keys are present names, with the wrappers' parts. The names in the plain
        model are mapped as well if they are unambiguous.
        """
        groups = optim_state_dict.get("param_groups")
        keys = [key for group in groups for key in group["params"]] if groups else optim_state_dict.get("state") or ()
        if not keys or not all(isinstance(key, str) for key in keys):
            return self.by_id
        now: dict[Key, nn.Parameter] = {n: param for param, names in self._current_names.items() for n in names}
        return {clean(str(name)): param for name, param in reversed(now.items())} | now


# -- values of states --------------------------------------------------------------------------------------------------


def same_value(value: Any, other: Any) -> bool:
    """Compare two values of a state dict, dtypes included; lists of tensors, as LBFGS has, by element."""
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return value.dtype == other.dtype and torch.equal(value.cpu(), other.cpu())
    if type(value) is not type(other):
        return False
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same_value, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same_value(each, other[key]) for key, each in value.items())
    return bool(value == other)


def state_order(name: Any) -> tuple[str, str]:
    """Return a sort key for names of states, which may be strings and numbers: the same order on all ranks."""
    return type(name).__name__, str(name)


# -- parameter groups --------------------------------------------------------------------------------------------------

# ``Optimizer.load_state_dict`` goes by position: the first group gets the settings of the dict's first group, and the
# first parameter the state of the first key. So the dict must have the optimizer's own groups, in their order, each
# with the settings that were saved for the parameters in it.

_NO_SETTINGS = ("params", "param_names")  # keys of a group


def lay_out(
    own: Sequence[Group] | None,
    saved: Sequence[Group],
    params: ModelParams,
    key_of: Mapping[nn.Parameter, Key],
    *,
    strict: bool,
) -> list[dict[str, Any]]:
    """Lay out the groups of a loaded dict like the optimizer's ``own`` groups, with the settings saved for their
    parameters.

    Without ``own`` the saved groups are returned.

    Args:
        own: groups of the optimizer; "params" are parameters.
        saved: groups of the dict; "params" are names.
        key_of: the key of each parameter in the result.
        strict: leave out parameters that no saved group contains, as torch does: ``Optimizer.load_state_dict`` refuses
            the result, unless the program adds them. Without it they and their groups keep their own settings.
    """
    group_of = {name: group for group in saved for name in group["params"]}
    keys = {name: key_of[param] for param in params.in_order if param in key_of for name in params.names(param)}
    if strange := [name for name in group_of if name not in keys]:
        raise KeyError(
            f"the optimizer holds no parameter {', '.join(map(repr, strange))}, which the parameter groups name"
        )
    if own is None:
        return [{**group, "params": sorted({keys[name] for name in group["params"]})} for group in saved]
    result = []
    for group in own:
        names = {param: params.names(param) for param in group["params"]}
        kept_params = [param for param in names if not strict or not group_of.keys().isdisjoint(names[param])]
        if names and not kept_params:
            continue
        loaded = _settings([name for some in names.values() for name in some], group_of)
        kept = _without_params(group)
        settings = copy.deepcopy(kept if loaded is None else loaded)
        for key, value in settings.items():  # capturable optimizers have rates that are tensors on the device
            if isinstance(value, torch.Tensor) and isinstance(kept.get(key), torch.Tensor):
                settings[key] = value.to(kept[key].device)
        if "param_names" in group:
            settings["param_names"] = list(group["param_names"])
        result.append({**settings, "params": sorted(key_of[param] for param in kept_params)})
    return result


def _settings(names: Iterable[str], group_of: Mapping[str, Group]) -> dict[str, Any] | None:
    """Return the saved settings of the parameters ``names``; None if no saved group contains one of them."""
    found = [*{id(group): (name, group) for name in names if (group := group_of.get(name))}.values()]
    if not found:
        return None
    (first, settings), *others = found
    for name, group in others:
        different = [
            f"{key!r} is {settings.get(key)!r} and {group.get(key)!r}"
            for key in dict.fromkeys([*settings, *group])
            if key not in _NO_SETTINGS and not same_value(settings.get(key), group.get(key))
        ]
        if different:
            raise ValueError(
                f"{first!r} and {name!r} are in one parameter group of the optimizer, or in one flat parameter, but "
                f"were saved in groups with different settings: {', '.join(different)}. Give the optimizer the groups "
                "that were saved, or the groups of the state dict equal settings"
            )
    return _without_params(settings)


def _without_params(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NO_SETTINGS}


# -- names for ids, and back -------------------------------------------------------------------------------------------


def param_to_name(model: nn.Module) -> dict[nn.Parameter, str]:
    """Map each parameter to its name in the plain model; for a shared parameter the first."""
    params = ModelParams(model)
    names = {param: params.names(param) for param in params.in_order}
    if several := next((of_one for of_one in names.values() if len(of_one) > 1), None):
        raise RuntimeError(
            f"expected a model whose parameters have one name each, but a flat parameter stands for {several}. Rekey "
            "with the plain model and its optimizer, or wrap with use_orig_params=True"
        )
    return {param: name for param, (name,) in names.items()}


def name_to_param(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for param, name in param_to_name(model).items()}


def rekey(
    optim_state_dict: dict[str, Any], key_type: OptimStateKeyType, model: nn.Module, own: Sequence[Group] | None
) -> dict[str, Any]:
    """Implement ``FullyShardedDataParallel.rekey_optim_state_dict``; ``own`` are the optimizer's groups."""
    groups = copy.deepcopy(optim_state_dict.get("param_groups"))
    named = [key for group in groups or () for key in group["params"]]
    if not named:  # with groups, other entries belong to no parameter
        named = list(optim_state_dict["state"])
    kinds = {type(key) for key in named}
    wanted = str if key_type is OptimStateKeyType.PARAM_NAME else int
    if not kinds <= {str} and not kinds <= {int}:
        raise ValueError(f"Invalid parameter keys: expected all names or all ids, got {list(dict.fromkeys(named))}")
    if kinds <= {wanted}:
        return optim_state_dict
    names, ids = param_to_name(model), ModelParams(model, own).by_id
    pairs = [(key, names[param]) for key, param in ids.items() if param in names]
    new_keys: dict[Any, Any] = dict(pairs) if wanted is str else {name: key for key, name in pairs}
    unknown = list(dict.fromkeys(key for key in named if key not in new_keys))
    taken = [key for key in optim_state_dict["state"] if key not in new_keys and key in new_keys.values()]
    if taken:
        raise KeyError(f"the state's entry {taken[0]!r} belongs to no parameter, and has the name of one: rename it")
    if unknown:
        raise KeyError(f"rekey_optim_state_dict: the optimizer or model given has no {', '.join(map(repr, unknown))}")
    result: dict[str, Any] = {
        "state": {new_keys.get(key, key): value for key, value in optim_state_dict["state"].items()}
    }
    if groups is not None:
        for group in groups:
            group["params"] = sorted(new_keys[key] for key in group["params"])
        result["param_groups"] = groups
    return result
