"""Parameter groups from a state dict to the optimizer that loads it, matched by the names of their parameters.

``Optimizer.load_state_dict`` goes by positions: the first group gets what the first group of the dict says, and the
first parameter the state of the first key. So what it is given has the optimizer's own groups, in their order, each
with the settings that were saved for its parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fsdp.checkpoint.optim_params import Group, Key, same_value

_BY_PARAMETER = ("params", "param_names")  # what groups say of each parameter; the rest holds for all of them


def lay_out(
    own: Sequence[Group],
    saved: Sequence[Group],
    names_of: Callable[[nn.Parameter], list[str]],
    key_of: Mapping[nn.Parameter, Key],
    *,
    strict: bool,
) -> list[dict[str, Any]]:
    """The groups ``own`` of an optimizer, with the settings that the groups ``saved`` have for their parameters.

    Args:
        own: "params" are parameters.
        saved: "params" are names.
        names_of: the names that a parameter stands for, of which one has to be in ``saved``.
        key_of: what stands for a parameter in the result.
        strict: without it, groups of which ``saved`` knows no parameter have their own settings.

    Raises:
        ValueError: parameters of one group were saved in groups with other settings; or ``saved`` does not know a
            parameter (``strict``).
    """
    group_of = {name: group for group in saved for name in group["params"]}
    names = [[names_of(param) for param in group["params"]] for group in own]
    unknown = [some[0] for of_group in names for some in of_group if not any(name in group_of for name in some)]
    if unknown and strict:
        raise ValueError(
            f"the optimizer holds {', '.join(map(repr, unknown))}, which no parameter group of the state dict has"
        )
    empty = [group for group in saved if not group["params"]]
    if len(empty) != sum(not group["params"] for group in own):
        empty = []
    result = []
    for group, of_group in zip(own, names):
        if group["params"]:
            said = _settings([name for some in of_group for name in some], group_of)
        else:
            said = _without_params(empty.pop(0)) if empty else None
        kept = _without_params(group)
        settings = copy.deepcopy(kept if said is None else said)
        for key, value in settings.items():  # capturable optimizers have rates that are tensors on the device
            if isinstance(value, torch.Tensor) and isinstance(kept.get(key), torch.Tensor):
                settings[key] = value.to(kept[key].device)
        if "param_names" in group:
            settings["param_names"] = list(group["param_names"])
        result.append({**settings, "params": sorted(key_of[param] for param in group["params"])})
    return result


def _settings(names: Iterable[str], group_of: Mapping[str, Group]) -> dict[str, Any] | None:
    """What the groups that were saved say of the parameters ``names``; None if they know none of them."""
    first: tuple[str, Group] | None = None
    for name, group in {id(group): (name, group) for name in names if (group := group_of.get(name))}.values():
        if first is None:
            first = name, group
            continue
        different = [
            f"{key!r} is {first[1].get(key)!r} and {group.get(key)!r}"
            for key in dict.fromkeys([*first[1], *group])
            if key not in _BY_PARAMETER and not same_value(first[1].get(key), group.get(key))
        ]
        if different:
            raise ValueError(
                f"{first[0]!r} and {name!r} are in one parameter group of the optimizer, or in one flat parameter, but "
                f"were saved in groups with different settings: {', '.join(different)}. Give the optimizer the groups "
                "that were saved, or the groups of the state dict equal settings"
            )
    return None if first is None else _without_params(first[1])


def _without_params(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _BY_PARAMETER}
